package e2bapi

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
)

// sign returns a signed URL like those of the official SDKs.
func sign(path, op, user, token string, expires int64) string {
	text := path + ":" + op + ":" + user + ":" + token
	q := url.Values{"path": {path}}
	if user != "" {
		q.Set("username", user)
	}
	if expires != 0 {
		text += ":" + strconv.FormatInt(expires, 10)
		q.Set("signature_expiration", strconv.FormatInt(expires, 10))
	}
	sum := sha256.Sum256([]byte(text))
	q.Set("signature", "v1_"+base64.RawStdEncoding.EncodeToString(sum[:]))
	return "/files?" + q.Encode()
}

func TestCheckSignature(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	ok := sign("/home/user/a b", "read", "user", "tok", 0)
	tests := []struct {
		name, method, target, want string
	}{
		{"read", "GET", ok, ""},
		{"write", "POST", sign("/x", "write", "", "tok", 0), ""},
		{"not yet expired", "GET", sign("/x", "read", "", "tok", now.Unix()+1), ""},
		{"expired", "GET", sign("/x", "read", "", "tok", now.Unix()-1), "signature is already expired"},
		{"a signature to read, used to write", "POST", sign("/x", "read", "", "tok", 0), "invalid signature"},
		{"another path", "GET", strings.Replace(ok, "a+b", "c", 1), "invalid signature"},
		{"another user", "GET", strings.Replace(ok, "username=user", "username=root", 1), "invalid signature"},
		{"another sandbox's token", "GET", sign("/x", "read", "", "other", 0), "invalid signature"},
		{"expiry taken off", "GET", strings.Replace(sign("/x", "read", "", "tok", 1), "signature_expiration=1", "", 1), "invalid signature"},
		{"expiry that is no number", "GET", sign("/x", "read", "", "tok", 0) + "&signature_expiration=never", "invalid signature"},
		{"none", "GET", "/files?path=/x", "missing signature query parameter"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := httptest.NewRequest(tt.method, tt.target, nil)
			if got := checkSignature(r, "tok", now); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestControlPath(t *testing.T) {
	for path, want := range map[string]bool{
		"/init": true, "/init/": true, "//init": true, "/x/../init": true, "/./init": true, "/freeze": true,
		"/bench": true, "/bench/run": true, "/run/command": true, "/run": true, "/runs": false, "/benchmark": false, "/template/start": true, "/files": false, "/initial": false, "/process.Process/Start": false,
	} {
		if got := controlPath(path); got != want {
			t.Errorf("controlPath(%q) = %v, want %v", path, got, want)
		}
	}
}

func TestDropCookie(t *testing.T) {
	tests := map[string]string{
		"postern_session=x":                     "",
		"__Host-postern_session=x; c=3":         "c=3",
		"a=1; postern_session=x; b=2":           "a=1; b=2",
		"a=postern_session; xpostern_session=1": "a=postern_session; xpostern_session=1",
		"":                                      "",
	}
	for in, want := range tests {
		h := http.Header{}
		h.Set("Cookie", in)
		dropCookie(h)
		if got := h.Get("Cookie"); got != want {
			t.Errorf("dropCookie(%q) left %q, want %q", in, got, want)
		}
	}
}

// TestHeadersThatHarmOthersAreRemoved: a sandbox's response under this server's own
// name must not act as a page of the console, which has the same origin.
func TestHeadersThatHarmOthersAreRemoved(t *testing.T) {
	inside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Content-Type", "text/html")
		h.Set("Content-Security-Policy", "script-src *")
		h.Set("Clear-Site-Data", `"*"`)
		h.Add("Set-Cookie", "postern_session=theirs; Path=/console")
		h.Add("Set-Cookie", "a=b; Domain=example.com")
		h.Add("Set-Cookie", "a=c; domain=.example.com; HttpOnly")
	}))
	defer inside.Close()
	d := serveData(t, Config{PublicPorts: true}, map[uint16]string{8000: inside.Listener.Addr().String()})
	d.boxes.traffic.Public = true
	tests := []struct{ name, host, csp, cookies, clear string }{
		{"this server's host", "127.0.0.1:3000", "sandbox; frame-ancestors 'none'", "", ""},
		{"a host of its own", "8000-" + testID + ".example.com", "script-src *", "a=b; a=c; HttpOnly", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := d.get(t, tt.host, "/x.html", http.Header{idHeader: {testID}, portHeader: {"8000"}}).Header
			if got := h.Get("Content-Security-Policy"); got != tt.csp {
				t.Errorf("Content-Security-Policy %q, want %q", got, tt.csp)
			}
			if got := strings.Join(h.Values("Set-Cookie"), "; "); got != tt.cookies {
				t.Errorf("Set-Cookie %q, want %q", got, tt.cookies)
			}
			if got := h.Get("Clear-Site-Data"); got != tt.clear {
				t.Errorf("Clear-Site-Data %q, want %q", got, tt.clear)
			}
		})
	}
}

// TestHeadersForProxiesAreRemoved: a sandbox must not instruct a proxy in front of
// this server, neither in headers nor in trailers. Headers of web applications for
// their clients pass.
func TestHeadersForProxiesAreRemoved(t *testing.T) {
	hostile := []string{
		"X-Accel-Redirect", "X-Accel-Expires", "X-Accel-Limit-Rate", "X-Sendfile", "X-Sendfile2", "X-LIGHTTPD-send-file", "X-LIGHTTPD-KBytes-per-second", "X-Reproxy-URL", "X-Reproxy-File",
		"X-LiteSpeed-Location", "X-LiteSpeed-Cache-Control", "Surrogate-Control", "Surrogate-Key", "CDN-Cache-Control", "Cloudflare-CDN-Cache-Control", "Edge-Control", "Edge-Cache-Tag", "Cache-Tag", "xkey",
		"X-Envoy-Immediate-Health-Check-Fail", "X_Accel_Redirect", "Proxy-Status", "Clear-Site-Data", "Strict-Transport-Security", "Alt-Svc",
	}
	ordinary := map[string]string{
		"X-Accel-Buffering": "no", "X-Request-Id": "1", "Mcp-Session-Id": "2", "Hx-Trigger": "a", "Cache-Control": "max-age=1", "Etag": `"a"`, "Location": "/b", "Link": "</x>", "Www-Authenticate": "Bearer",
		"Content-Disposition": "attachment", "Server-Timing": "a", "Access-Control-Allow-Origin": "https://a.example", "X-Frame-Options": "DENY", "Vary": "Accept", "Retry-After": "1", "X-Send-At": "noon",
	}
	inside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		for k, v := range ordinary {
			h.Set(k, v)
		}
		h.Set("Trailer", "X-Checksum")
		for _, k := range hostile {
			h.Set(k, "/etc/passwd")
			h.Set(http.TrailerPrefix+k, "/etc/passwd")
		}
		_, _ = io.WriteString(w, "x")
		w.(http.Flusher).Flush()
		h.Set("X-Checksum", "3")
	}))
	defer inside.Close()
	d := serveData(t, Config{PublicPorts: true}, map[uint16]string{8000: inside.Listener.Addr().String()})
	d.boxes.traffic.Public = true
	resp := d.get(t, "8000-"+testID+".example.com", "/", nil)
	if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "x" {
		t.Fatalf("body %q, %v", b, err)
	}
	for k, v := range ordinary {
		if got := resp.Header.Get(k); got != v {
			t.Errorf("%s: got %q, want %q", k, got, v)
		}
	}
	if got := resp.Trailer.Get("X-Checksum"); got != "3" {
		t.Errorf("trailer X-Checksum: got %q, want 3", got)
	}
	for _, k := range hostile {
		if got := resp.Header.Get(k) + resp.Trailer.Get(k); got != "" {
			t.Errorf("%s: %q passed", k, got)
		}
	}
}

func TestParseListQuery(t *testing.T) {
	// As the JavaScript SDK sends {"a b":"c&d"}.
	q, err := url.ParseQuery("metadata=a%252520b%3Dc%252526d&state=running%2Cpaused&limit=7&order=asc")
	if err != nil {
		t.Fatal(err)
	}
	got, err := parseListQuery(q)
	if err != nil || got.metadata["a b"] != "c&d" || !got.running || got.limit != 7 || !got.ascending {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, bad := range []string{"limit=0", "limit=101", "limit=x", "order=up", "state=dead", "nextToken=%21", "nextToken=zz", "startedAfter=yesterday"} {
		q, _ := url.ParseQuery(bad)
		if _, err := parseListQuery(q); err == nil {
			t.Errorf("%s was taken", bad)
		}
	}
}

// TestRoutes: parts of E2B's API that Postern lacks are refused by name, and a
// request with a wrong key does not learn which routes exist.
func TestRoutes(t *testing.T) {
	s := &Server{log: slog.New(slog.DiscardHandler)}
	known := s.HandlerFor(func(*http.Request) (auth.Principal, error) { return auth.Principal{Kind: auth.Project}, nil })
	unknown := s.HandlerFor(func(*http.Request) (auth.Principal, error) { return auth.Principal{}, auth.ErrUnauthenticated })
	for target, statuses := range map[string][2]int{
		"POST /templates":     {410, 401},
		"GET /api-keys":       {403, 401},
		"POST /volumes":       {501, 401},
		"GET /secrets":        {501, 401},
		"GET /no-such":        {404, 404},
		"GET /":               {404, 404},
		"POST /no//such":      {404, 404},
		"PATCH /v2/sandboxes": {405, 405},
	} {
		method, path, _ := strings.Cut(target, " ")
		for i, h := range []http.Handler{known, unknown} {
			want := statuses[i]
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
			var body struct {
				Code    int
				Message string
			}
			if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil || w.Code != want || body.Code != want || body.Message == "" {
				t.Errorf("%s: %d %s, want %d", target, w.Code, w.Body, want)
			}
			if w.Header().Get("Location") != "" || w.Header().Get("Content-Type") != "application/json; charset=utf-8" {
				t.Errorf("%s: the header is %v, want that of JSON", target, w.Header())
			}
		}
	}
}
