package e2bapi

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/sandbox"
)

// InterpreterPort is the TCP port of the code interpreter of a template. The
// SDK shows it the data plane's access token.
const InterpreterPort = 49999

// IsData reports whether r is for the data plane, that is for something inside
// a sandbox.
func IsData(r *http.Request) bool {
	if _, ok := route(r); ok {
		return true
	}
	// The SDK's signed URLs name no sandbox; see signedFor.
	return r.URL.Path == "/files" && r.URL.Query().Has("signature")
}

// ServeData forwards r to the sandbox that it is for, if the caller may.
func (s *Server) ServeData(w http.ResponseWriter, r *http.Request) {
	t, ok := route(r)
	if !ok {
		t = target{sandbox: s.signedFor(r), port: sandbox.GuestPort}
	}
	if t.sandbox == "" {
		dataError(w, http.StatusBadGateway, t, "The sandbox was not found")
		return
	}
	if t.port == 0 {
		dataError(w, http.StatusBadRequest, t, portHeader+": want a TCP port from 1 to 65535")
		return
	}
	if t.port == sandbox.GuestPort && !strings.HasPrefix(r.URL.Path, "/") {
		dataError(w, http.StatusBadRequest, t, "path: want one that begins with /")
		return
	}
	if msg := s.mayEnter(r, t); msg != "" {
		status := http.StatusUnauthorized
		if t.port != sandbox.GuestPort {
			status = http.StatusForbidden
		}
		dataError(w, status, t, msg)
		return
	}
	s.proxy.ServeHTTP(w, r.WithContext(withTarget(r.Context(), t)))
}

type targetKey struct{}

// withTarget hands t through httputil.ReverseProxy, whose hooks see only the
// request.
func withTarget(ctx context.Context, t target) context.Context {
	return context.WithValue(ctx, targetKey{}, t)
}

func targetOf(ctx context.Context) target {
	t, _ := ctx.Value(targetKey{}).(target)
	return t
}

// mayEnter returns why r may not reach t, or the empty string.
func (s *Server) mayEnter(r *http.Request, t target) string {
	access := s.fleet.AccessToken(t.sandbox)
	shown := same(r.Header.Get("X-Access-Token"), access.Reveal())
	switch t.port {
	case sandbox.GuestPort:
		switch {
		case controlPath(r.URL.Path):
			return "this path is for the host only"
		case r.URL.Path == "/health" && r.Method == http.MethodGet, shown:
			return ""
		case r.URL.Path == "/files":
			return checkSignature(r, access.Reveal(), time.Now())
		}
		return "missing or wrong X-Access-Token"
	case InterpreterPort:
		if shown {
			return ""
		}
	}
	// The defaults are closed: unlike E2B's, other ports need their token too.
	if same(r.Header.Get("E2b-Traffic-Access-Token"), s.fleet.TrafficToken(t.sandbox).Reveal()) {
		return ""
	}
	return "missing or wrong e2b-traffic-access-token"
}

func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// controlPath reports whether only the host may ask the guest for path.
func controlPath(path string) bool {
	switch strings.TrimRight(path, "/") {
	case "/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade":
		return true
	}
	// The guest's router cleans paths; what is not clean here could become one
	// of the above there.
	return strings.Contains(path, "//") || strings.Contains(path, "/.")
}

// checkSignature checks a signed URL for /files and returns what is wrong with
// it, or the empty string.
func checkSignature(r *http.Request, token string, now time.Time) string {
	q := r.URL.Query()
	got := q.Get("signature")
	if got == "" {
		return "missing signature query parameter"
	}
	op := "read"
	if r.Method == http.MethodPost {
		op = "write"
	}
	text := q.Get("path") + ":" + op + ":" + q.Get("username") + ":" + token
	expires := q.Get("signature_expiration")
	if expires != "" {
		text += ":" + expires
	}
	sum := sha256.Sum256([]byte(text))
	if !same(got, "v1_"+base64.RawStdEncoding.EncodeToString(sum[:])) {
		return "invalid signature"
	}
	if expires != "" {
		if at, err := strconv.ParseInt(expires, 10, 64); err != nil || at < now.Unix() {
			return "signature is already expired"
		}
	}
	return ""
}

// signedFor finds the sandbox whose token signed r: behind one address the
// SDK's signed URLs carry nothing else that tells.
func (s *Server) signedFor(r *http.Request) string {
	for _, id := range s.fleet.Live() {
		switch checkSignature(r, s.fleet.AccessToken(id).Reveal(), time.Now()) {
		case "", "signature is already expired":
			return id
		}
	}
	return ""
}

func (s *Server) newProxy(inside http.RoundTripper) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Transport:     inside,
		FlushInterval: -1, // streams of events must not wait in a buffer
		Rewrite: func(p *httputil.ProxyRequest) {
			t := targetOf(p.In.Context())
			p.Out.URL.Scheme = "http"
			p.Out.URL.Host = t.sandbox + ":" + strconv.Itoa(int(t.port))
			p.Out.Host = p.In.Host
			h := p.Out.Header
			// What is inside is hostile: it gets no credential that a client or a
			// browser sent along for the host.
			for _, k := range []string{"X-Access-Token", "X-Api-Key", "E2b-Traffic-Access-Token", sandbox.ChannelHeader, InboxKeyHeader, idHeader, portHeader} {
				h.Del(k)
			}
			dropCookie(h, auth.SessionCookie)
			if t.port == sandbox.GuestPort {
				h.Set(sandbox.ChannelHeader, s.fleet.ChannelKey(t.sandbox).Reveal())
			}
		},
		ModifyResponse: func(resp *http.Response) error {
			_, named := parseHost(resp.Request.Host)
			disarm(resp.Header, named)
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			t := targetOf(r.Context())
			switch {
			case errors.Is(err, sandbox.ErrNotFound):
				dataError(w, http.StatusBadGateway, t, "The sandbox was not found")
			case errors.Is(err, sandbox.ErrPortClosed):
				dataError(w, http.StatusBadGateway, t, "The sandbox is running but port is not open")
			case errors.Is(err, context.Canceled):
				// The caller has left; nobody reads an answer.
			default:
				s.log.DebugContext(r.Context(), "proxy to sandbox", "sandbox", t.sandbox, "port", t.port, "err", err)
				dataError(w, http.StatusBadGateway, t, "The sandbox did not answer")
			}
		},
		ErrorLog: nil,
	}
}

// forOrigin are the fields of an answer that act on the whole origin that it
// comes from, not on the answer alone.
var forOrigin = []string{"Set-Cookie", "Clear-Site-Data", "Strict-Transport-Security", "Service-Worker-Allowed", "Alt-Svc", "Nel", "Report-To", "Reporting-Endpoints"}

// disarm takes from the answer of a sandbox what would harm this server's own
// pages. The attack: a signed URL for an HTML file has the console's origin, so
// that whoever opens it while signed in runs the sandbox's script there, which
// then approves. named says that the sandbox has a host name, and so an origin,
// of its own.
func disarm(h http.Header, named bool) {
	if named {
		// A cookie for the common domain would sign the reviewer in as another.
		set := h.Values("Set-Cookie")
		h.Del("Set-Cookie")
		for _, c := range set {
			if k, _, _ := strings.Cut(c, "="); strings.TrimSpace(k) != auth.SessionCookie {
				h.Add("Set-Cookie", c)
			}
		}
		return
	}
	for _, k := range forOrigin {
		h.Del(k)
	}
	h.Set("Content-Security-Policy", "sandbox; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
}

func dropCookie(h http.Header, name string) {
	var kept []string
	for _, line := range h.Values("Cookie") {
		for c := range strings.SplitSeq(line, ";") {
			c = strings.TrimSpace(c)
			if k, _, _ := strings.Cut(c, "="); c != "" && k != name {
				kept = append(kept, c)
			}
		}
	}
	h.Del("Cookie")
	if len(kept) > 0 {
		h.Set("Cookie", strings.Join(kept, "; "))
	}
}

func dataError(w http.ResponseWriter, status int, t target, msg string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(struct {
		Sandbox string `json:"sandboxId"`
		Message string `json:"message"`
		Port    uint16 `json:"port,omitempty"`
		Code    int    `json:"code"`
	}{t.sandbox, msg, t.port, status})
}
