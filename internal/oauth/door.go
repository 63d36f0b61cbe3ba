package oauth

import (
	"encoding/json"
	"errors"
	"mime"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"postern/internal/auth"
)

// The paths of the endpoints. The second one of the metadata is for clients that take
// the address of the tools for the issuer.
const (
	metadataPath  = "/.well-known/oauth-authorization-server"
	authorizePath = "/oauth/authorize"
	tokenPath     = "/oauth/token" //nolint:gosec // a path
	registerPath  = "/oauth/register"
	revokePath    = "/oauth/revoke"
)

// Paths are those that [Server.Handler] serves.
var Paths = []string{metadataPath, metadataPath + "/mcp", authorizePath, tokenPath, registerPath, revokePath}

// maxBody bounds a request, in bytes.
const maxBody = 32 << 10

// Handler returns the endpoints for programs. They keep no cookies, so pages of any
// origin may use them; what they give is worth nothing without a person's consent.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+metadataPath, s.metadata)
	mux.HandleFunc("GET "+metadataPath+"/mcp", s.metadata)
	mux.HandleFunc("GET "+authorizePath, s.authorize)
	for path, serve := range map[string]func(http.ResponseWriter, *http.Request) error{
		registerPath: s.register, tokenPath: s.token, revokePath: s.revoke,
	} {
		mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
			r.Body = http.MaxBytesReader(w, r.Body, maxBody)
			err := s.rates.take(remote(r))
			if err == nil {
				err = serve(w, r)
			}
			if err != nil {
				s.fail(w, r, err)
			}
		})
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != authorizePath {
			w.Header().Set("Access-Control-Allow-Origin", "*")
		}
		if r.Method == http.MethodOptions && r.URL.Path != authorizePath {
			w.Header().Set("Access-Control-Allow-Methods", "GET, POST")
			w.Header().Set("Access-Control-Allow-Headers", "Content-Type, Mcp-Protocol-Version")
			w.Header().Set("Access-Control-Max-Age", "3600")
			w.WriteHeader(http.StatusNoContent)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// authorize leads the browser to the consent page, which checks the request for a
// signed-in person. The attack: an open redirect, by a request with an error in it.
func (s *Server) authorize(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Referrer-Policy", "no-referrer")
	http.Redirect(w, r, ConsentPath+"?"+r.URL.Query().Encode(), http.StatusSeeOther) //nolint:gosec // the path is ours, only the query is the caller's
}

// A document is the metadata of RFC 8414, section 2.
type document struct {
	Issuer        string   `json:"issuer"`
	Authorize     string   `json:"authorization_endpoint"`
	Token         string   `json:"token_endpoint"`
	Register      string   `json:"registration_endpoint"`
	Revoke        string   `json:"revocation_endpoint"`
	Scopes        []string `json:"scopes_supported"`
	ResponseTypes []string `json:"response_types_supported"`
	ResponseModes []string `json:"response_modes_supported"`
	GrantTypes    []string `json:"grant_types_supported"`
	Methods       []string `json:"token_endpoint_auth_methods_supported"`
	RevokeMethods []string `json:"revocation_endpoint_auth_methods_supported"`
	Challenges    []string `json:"code_challenge_methods_supported"`
	Iss           bool     `json:"authorization_response_iss_parameter_supported"`
}

func (s *Server) metadata(w http.ResponseWriter, r *http.Request) {
	base := s.Base(r)
	d := document{
		Issuer: base, Authorize: base + authorizePath, Token: base + tokenPath, Register: base + registerPath, Revoke: base + revokePath,
		ResponseTypes: []string{"code"}, ResponseModes: []string{"query"}, GrantTypes: []string{"authorization_code", "refresh_token"},
		Methods: []string{"none"}, RevokeMethods: []string{"none"}, Challenges: []string{"S256"}, Iss: true,
	}
	for _, scope := range Scopes {
		d.Scopes = append(d.Scopes, string(scope))
	}
	w.Header().Set("Cache-Control", "max-age=3600")
	answer(w, http.StatusOK, d)
}

// A registration is what a program says of itself (RFC 7591, section 2). Other fields
// are ignored, as the RFC asks.
type registration struct {
	Redirects []string `json:"redirect_uris"`
	Name      string   `json:"client_name"`
	Grants    []string `json:"grant_types"`
	Responses []string `json:"response_types"`
}

// decodeRegistration reads a registration out of hostile bytes.
func decodeRegistration(b []byte) (in registration, err error) {
	if err := json.Unmarshal(b, &in); err != nil {
		return in, refuse("invalid_client_metadata", "the body must be a JSON object as RFC 7591 defines it")
	}
	for _, v := range in.Responses {
		if v != "code" {
			return in, refuse("invalid_client_metadata", "response_types: must be code")
		}
	}
	return in, nil
}

func (s *Server) register(w http.ResponseWriter, r *http.Request) error {
	var raw json.RawMessage
	if err := json.NewDecoder(r.Body).Decode(&raw); err != nil {
		return refuse("invalid_client_metadata", "the body must be a JSON object of at most 32 KiB")
	}
	in, err := decodeRegistration(raw)
	if err != nil {
		return err
	}
	c, err := s.Register(r.Context(), remote(r), in.Name, in.Redirects)
	if err != nil {
		return err
	}
	var words []string
	for _, scope := range Scopes {
		words = append(words, string(scope))
	}
	w.Header().Set("Cache-Control", "no-store")
	answer(w, http.StatusCreated, map[string]any{
		"client_id": c.ID, "client_id_issued_at": time.Now().Unix(), "client_name": c.Name, "redirect_uris": c.Redirects,
		"grant_types": []string{"authorization_code", "refresh_token"}, "response_types": []string{"code"}, "token_endpoint_auth_method": "none", "scope": strings.Join(words, " "),
	})
	return nil
}

// form reads the parameters of a request. What is in the query does not count: it is
// written down by proxies.
func form(r *http.Request) error {
	if t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || t != "application/x-www-form-urlencoded" {
		return refuse("invalid_request", "the body must be application/x-www-form-urlencoded")
	}
	if err := r.ParseForm(); err != nil {
		return refuse("invalid_request", "the body is not a form of at most 32 KiB")
	}
	if r.Header.Get("Authorization") != "" {
		return refuse("invalid_client", "programs have no secret here: leave out the header Authorization, and send client_id")
	}
	return nil
}

func (s *Server) token(w http.ResponseWriter, r *http.Request) error {
	if err := form(r); err != nil {
		return err
	}
	t, err := s.Exchange(r.Context(), s.Base(r), r.PostForm)
	if err != nil {
		return err
	}
	w.Header().Set("Cache-Control", "no-store")
	answer(w, http.StatusOK, t)
	return nil
}

func (s *Server) revoke(w http.ResponseWriter, r *http.Request) error {
	if err := form(r); err != nil {
		return err
	}
	if err := s.Forget(r.Context(), auth.Secret(r.PostForm.Get("token"))); err != nil {
		return err
	}
	w.WriteHeader(http.StatusOK)
	return nil
}

// fail is the one table from errors to statuses.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	status, e := http.StatusBadRequest, (*Error)(nil)
	switch {
	case errors.Is(err, errBusy):
		status, e = http.StatusTooManyRequests, errBusy
		w.Header().Set("Retry-After", "60")
	case errors.As(err, &e) && e.Code == "invalid_client":
		status = http.StatusUnauthorized
	case e != nil:
	default:
		status, e = http.StatusInternalServerError, refuse("server_error", "internal error")
		if r.Context().Err() == nil {
			s.log.ErrorContext(r.Context(), "serve oauth", "path", r.URL.Path, "err", err)
		}
	}
	w.Header().Set("Cache-Control", "no-store")
	answer(w, status, map[string]string{"error": e.Code, "error_description": e.Detail})
}

func answer(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil { // unreachable: strings and numbers
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(b) // the program may be gone
}

// remote returns the address that r came from, without its port.
func remote(r *http.Request) string {
	a, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return "unknown"
	}
	return a.Addr().Unmap().String()
}

// rates bounds what one address, and all together, may ask. The zero value is ready.
type rates struct {
	mu  sync.Mutex // guards what follows
	all *rate.Limiter
	by  map[string]*rate.Limiter
}

// The limits, a second and at once. Programs ask once an hour; a proxy on this machine
// stands for many.
const (
	eachSecond, eachAtOnce = 2, 60
	allSecond, allAtOnce   = 50, 500
	maxAddresses           = 10_000
)

func (l *rates) take(from string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all == nil {
		l.all, l.by = rate.NewLimiter(allSecond, allAtOnce), map[string]*rate.Limiter{}
	}
	if ip, err := netip.ParseAddr(from); err == nil && ip.IsLoopback() {
		if !l.all.Allow() {
			return errBusy
		}
		return nil
	}
	if l.by[from] == nil {
		if len(l.by) >= maxAddresses { // the attack: addresses without number
			clear(l.by)
		}
		l.by[from] = rate.NewLimiter(eachSecond, eachAtOnce)
	}
	if !l.by[from].Allow() || !l.all.Allow() {
		return errBusy
	}
	return nil
}
