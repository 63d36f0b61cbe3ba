// Package gmailtest is a stand-in for Gmail and for Google's OAuth: a server that
// official clients accept. It keeps mailboxes in memory, with Gmail's labels, threads
// and history, and refuses what Google refuses, with Google's errors. Tests tell it to
// fail, to forget and to revoke.
//
// It was written from Google's documentation and the clients' code. The real Gmail was
// not reachable where it was written.
package gmailtest

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// The scopes that requests need.
const (
	ScopeModify   = "https://www.googleapis.com/auth/gmail.modify"
	ScopeSettings = "https://www.googleapis.com/auth/gmail.settings.basic"
	ScopeAll      = "https://mail.google.com/"
)

// A Client is an OAuth client as Google Cloud's console makes them.
type Client struct {
	ID, Secret string
	Redirects  []string // exact ones of a web client; empty means a desktop client, with loopback addresses
	TestUsers  []string // not nil: the application is in Testing, and only these accounts may use it
	Devices    bool     // Gmail's scope is allowed in the device flow, as Google does not
}

// A Server is a running stand-in. Its exported fields are set before it is used; its
// methods are safe for concurrent use.
type Server struct {
	URL string
	// TokenLife is the life of access tokens. 0 means an hour.
	TokenLife time.Duration
	// KeepMessageID says that a message keeps the Message-ID with which it was sent.
	// Gmail replaces most.
	KeepMessageID bool

	web *httptest.Server

	mu       sync.Mutex
	clients  map[string]Client
	accounts map[string]*account
	oauth    grants
	faults   []*Fault
	requests []string // "METHOD path", the tokens' last
	units    int
}

// Start returns a stand-in on a loopback address. Close ends it.
func Start() *Server {
	s := &Server{clients: map[string]Client{}, accounts: map[string]*account{}, oauth: newGrants()}
	s.web = httptest.NewServer(s.handler())
	s.URL = s.web.URL
	return s
}

// StartOn is like Start, on an own listener.
func StartOn(l net.Listener) *Server {
	s := &Server{clients: map[string]Client{}, accounts: map[string]*account{}, oauth: newGrants()}
	s.web = &httptest.Server{Listener: l, Config: &http.Server{Handler: s.handler(), ReadHeaderTimeout: time.Minute}}
	s.web.Start()
	s.URL = s.web.URL
	return s
}

// Close ends the server.
func (s *Server) Close() {
	s.web.CloseClientConnections()
	s.web.Close()
}

// AddClient registers an OAuth client.
func (s *Server) AddClient(c Client) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clients[c.ID] = c
}

// AddAccount makes a mailbox with an address.
func (s *Server) AddAccount(address string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.accounts[address] = newAccount(address)
}

// Requests returns the requests so far, as "METHOD path".
func (s *Server) Requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

// Units returns the quota units that were used.
func (s *Server) Units() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.units
}

// A Fault is what happens to requests instead of an answer.
type Fault struct {
	Path       string // only requests whose path contains it; empty means all of the API
	Times      int    // how many requests; 0 means one
	Status     int
	Reason     string // of Google's errors, such as rateLimitExceeded
	Message    string
	RetryAfter string // header field
	Raw        string // answered instead of an error in JSON
	// Cut closes the connection after the request was carried out: its answer is lost.
	Cut bool
	// Hold, if not nil, keeps the request until it is closed; then it is carried out.
	Hold chan struct{}
	Held chan struct{} // closed when a request is held, if not nil
}

// Fail makes the next requests fail.
func (s *Server) Fail(f Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f.Times = max(f.Times, 1)
	s.faults = append(s.faults, &f)
}

// fault returns the fault of a request, or nil.
func (s *Server) fault(path string) *Fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.faults {
		if f.Times > 0 && strings.Contains(path, f.Path) && (f.Path != "" || strings.Contains(path, "/gmail/")) {
			f.Times--
			return f
		}
	}
	return nil
}

// An apiError is an error of the API.
type apiError struct {
	status          int
	reason, message string
}

func (e *apiError) Error() string { return e.message }

func fail(status int, reason, format string, args ...any) error {
	return &apiError{status, reason, fmt.Sprintf(format, args...)}
}

var (
	errNotFound = fail(http.StatusNotFound, "notFound", "Requested entity was not found.")
	errScope    = fail(http.StatusForbidden, "insufficientPermissions", "Request had insufficient authentication scopes.")
)

var statusNames = map[int]string{400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ABORTED", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE"}

func writeError(w http.ResponseWriter, e *apiError) {
	domain := "global"
	if strings.HasSuffix(e.reason, "LimitExceeded") {
		domain = "usageLimits"
	}
	writeJSON(w, e.status, map[string]any{"error": map[string]any{
		"code": e.status, "message": e.message, "status": statusNames[e.status],
		"errors": []any{map[string]any{"message": e.message, "domain": domain, "reason": e.reason}},
	}})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		panic(err) // unreachable: maps and texts
	}
	w.Header().Set("Content-Type", "application/json; charset=UTF-8")
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b) // the client is gone
}

// A call is a request of the API, by whom it is and for whose mailbox.
type call struct {
	r       *http.Request
	account *account
	scopes  []string
}

func (c *call) may(scopes ...string) bool {
	return slices.ContainsFunc(c.scopes, func(s string) bool { return s == ScopeAll || slices.Contains(scopes, s) })
}

// decode reads the JSON body into v.
func (c *call) decode(v any) error {
	if err := json.NewDecoder(http.MaxBytesReader(nil, c.r.Body, 60<<20)).Decode(v); err != nil {
		return fail(http.StatusBadRequest, "parseError", "Invalid JSON payload received. %v", err)
	}
	return nil
}

// An endpoint answers a call under the server's lock.
type endpoint func(c *call) (any, error)

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	s.oauthRoutes(mux)
	for pattern, e := range s.messageRoutes() {
		s.handle(mux, pattern, e)
	}
	for pattern, e := range s.otherRoutes() {
		s.handle(mux, pattern, e)
	}
	return mux
}

// costs are the quota units of methods, by the last part of the path.
func cost(r *http.Request) int {
	switch {
	case strings.HasSuffix(r.URL.Path, "/send"):
		return 100
	case strings.HasSuffix(r.URL.Path, "/batchModify"), strings.HasSuffix(r.URL.Path, "/batchDelete"):
		return 50
	case strings.HasSuffix(r.URL.Path, "/history"):
		return 2
	case strings.HasSuffix(r.URL.Path, "/profile"), strings.HasSuffix(r.URL.Path, "/labels") && r.Method == http.MethodGet:
		return 1
	}
	return 5
}

func (s *Server) handle(mux *http.ServeMux, pattern string, e endpoint) {
	method, path, _ := strings.Cut(pattern, " ")
	mux.HandleFunc(method+" /gmail/v1/users/{user}/"+path, func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, e) })
	if strings.HasSuffix(path, "send") || path == "drafts" {
		mux.HandleFunc(method+" /upload/gmail/v1/users/{user}/"+path, func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, e) })
	}
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, e endpoint) {
	f := s.fault(r.URL.Path)
	if f != nil && f.Hold != nil {
		if f.Held != nil {
			close(f.Held)
		}
		<-f.Hold
	}
	if f != nil && f.Status != 0 {
		if f.RetryAfter != "" {
			w.Header().Set("Retry-After", f.RetryAfter)
		}
		if f.Raw != "" {
			w.WriteHeader(f.Status)
			_, _ = w.Write([]byte(f.Raw))
			return
		}
		writeError(w, &apiError{f.Status, f.Reason, f.Message})
		return
	}
	out, err := s.answer(r, e)
	if f != nil && f.Cut {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_ = conn.Close()
		}
		return
	}
	if err != nil {
		var a *apiError
		if !asError(err, &a) {
			a = &apiError{http.StatusInternalServerError, "backendError", err.Error()}
		}
		writeError(w, a)
		return
	}
	if out == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	writeJSON(w, http.StatusOK, out)
}

func asError(err error, a **apiError) bool {
	e, ok := err.(*apiError) //nolint:errorlint // errors of this package are never wrapped
	*a = e
	return ok
}

func (s *Server) answer(r *http.Request, e endpoint) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, r.Method+" "+r.URL.Path)
	s.units += cost(r)
	g, ok := s.oauth.access[strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")]
	if !ok || time.Now().After(g.expires) {
		return nil, fail(http.StatusUnauthorized, "authError", "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other valid authentication credential.")
	}
	a := s.accounts[g.account]
	if u := r.PathValue("user"); a == nil || u != "me" && u != g.account {
		return nil, fail(http.StatusForbidden, "forbidden", "Delegation denied for %s", g.account)
	}
	c := &call{r: r, account: a, scopes: g.scopes}
	if !c.may(ScopeModify, ScopeSettings) {
		return nil, errScope
	}
	return e(c)
}

func newID() string {
	b := make([]byte, 8)
	_, _ = rand.Read(b) // never fails
	return fmt.Sprintf("%016x", b)
}
