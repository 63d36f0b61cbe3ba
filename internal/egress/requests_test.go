package egress

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/inspect"
	"postern/internal/outgoing"
	"postern/internal/policy"
)

// A judge decides on requests as a test says.
type judge struct {
	mu     sync.Mutex
	all    bool // it concerns every host
	decide func(r *outgoing.Request) policy.Verdict
	hold   func(r *outgoing.Request) policy.Verdict
	over   func(r *outgoing.Request) bool // it may not go on
	made   []string
}

func (j *judge) Concerns(_ context.Context, _ auth.Principal, _ string) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.all
}

func (j *judge) Judge(_ context.Context, _ auth.Principal, r *outgoing.Request) policy.Verdict {
	if j.decide == nil {
		return policy.Verdict{Effect: policy.Allow}
	}
	return j.decide(r)
}

func (j *judge) Hold(_ context.Context, _ auth.Principal, r *outgoing.Request, _ policy.Verdict) policy.Verdict {
	return j.hold(r)
}

func (j *judge) MayContinue(_ context.Context, _ auth.Principal, r *outgoing.Request) policy.Verdict {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.over != nil && j.over(r) {
		return policy.Verdict{Effect: policy.Deny, Rule: "stop", Reason: "a switch is on"}
	}
	return policy.Verdict{Effect: policy.Allow}
}

func (j *judge) Made(_ context.Context, _ auth.Principal, r *outgoing.Request, result string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.made = append(j.made, r.Method+" "+r.URL()+": "+result)
}

// vault has one secret, for the host example.com.
type vault struct {
	hosts  []string
	places []inject.Place
}

const (
	sentinel    = "pst_abcdefghijklmnopqrstuvwxyz234567abcdefgh"
	secretValue = "s3cr3t-value/with+signs=42"
)

func (v vault) Bound(context.Context, auth.Principal, *policy.Egress) ([]inject.Secret, error) {
	return []inject.Secret{{ID: "sec_1", Name: "github", Sentinel: sentinel, Hosts: v.hosts, Places: v.places, Kind: inject.KindValue}}, nil
}

func (vault) Open(context.Context, auth.Principal, string) (inject.Value, error) {
	return inject.Value{Value: []byte(secretValue)}, nil
}

// An inspectedWorld is a world whose wall inspects requests.
type inspectedWorld struct {
	*world
	authority *inspect.Authority
	outside   *httptest.Server
	seen      atomic.Int64 // requests at the server outside
	log       logged       // the inspector's, with every detail
}

// newInspected returns a world with an HTTPS server for example.com at site. Its
// certificate is verified by its own authority.
func newInspected(tb testing.TB, cfg inspect.Config, h http.HandlerFunc, change func(*Config)) *inspectedWorld {
	tb.Helper()
	a, err := inspect.NewAuthority(bytes.Repeat([]byte("k"), 32))
	if err != nil {
		tb.Fatal(err)
	}
	w := &inspectedWorld{authority: a}
	w.outside = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.seen.Add(1)
		h(rw, r)
	}))
	w.outside.EnableHTTP2 = true
	w.outside.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	w.outside.StartTLS()
	tb.Cleanup(w.outside.Close)
	cfg.Leaf = a.Leaf
	if cfg.Roots == nil {
		cfg.Roots = x509.NewCertPool()
		cfg.Roots.AddCert(w.outside.Certificate())
	}
	w.world = newWorld(tb, func(c *Config) {
		open(c)
		var out io.Writer = &w.log
		if t, ok := tb.(*testing.T); ok {
			out = io.MultiWriter(t.Output(), out)
		}
		c.Inspect = inspect.New(slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug})), cfg)
		if change != nil {
			change(c)
		}
	})
	w.standsFor(site+":443", w.outside.Listener)
	w.says("example.com", site)
	w.says("www.example.com", site)
	return w
}

// ruled is a sandbox with the Internet and a rule for example.com.
func ruled(headers map[string]string) policy.Egress {
	return policy.Egress{Internet: true, Rules: map[string][]policy.Rule{"example.com": {{Headers: headers}}}}
}

// client returns an HTTP client inside b, which trusts the sandbox's authority.
func (w *inspectedWorld) client(b *box, h2 bool) *http.Client {
	t := &http.Transport{
		DialContext: func(_ context.Context, _, addr string) (net.Conn, error) {
			host, port, _ := net.SplitHostPort(addr)
			m, err := b.ask("10.0.0.1:53", host+".", dnsmessage.TypeA)
			if err != nil || len(addrsOf(m)) == 0 {
				return nil, fmt.Errorf("look up %s: %w", host, err)
			}
			return b.dial(addrsOf(m)[0] + ":" + port) //nolint:contextcheck // it has a time-out of its own
		},
		TLSClientConfig: w.trust(b), DisableCompression: true, Protocols: new(http.Protocols), ExpectContinueTimeout: time.Minute,
	}
	t.Protocols.SetHTTP1(!h2)
	t.Protocols.SetHTTP2(h2)
	w.tb.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Timeout: time.Minute, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func (w *inspectedWorld) trust(b *box) *tls.Config {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(w.authority.CertificatePEM(b.id))
	return &tls.Config{RootCAs: pool}
}

// tls returns a TLS connection inside b to site, for a name.
func (w *inspectedWorld) tls(b *box, name string, protos ...string) (*tls.Conn, error) {
	w.tb.Helper()
	if _, err := b.ask("10.0.0.1:53", name+".", dnsmessage.TypeA); err != nil {
		w.tb.Fatal(err)
	}
	conf := w.trust(b)
	conf.ServerName, conf.NextProtos = name, protos
	c := tls.Client(b.mustDial(site+":443"), conf)
	return c, c.Handshake()
}

func do(t testing.TB, c *http.Client, method, url, body string, header ...string) (*http.Response, string) {
	t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, url, r)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header[header[i]] = append(req.Header[header[i]], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

// versions runs a test for HTTP/1.1 and HTTP/2.
func versions(t *testing.T, f func(t *testing.T, h2 bool)) {
	t.Run("HTTP/1.1", func(t *testing.T) { f(t, false) })
	t.Run("HTTP/2", func(t *testing.T) { f(t, true) })
}

func TestInspectedRequestsArriveAsTheyWereSentWithTheHeadersOfTheRule(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		var got *http.Request
		var body string
		w := newInspected(t, inspect.Config{}, func(rw http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			got, body = r, string(b)
			rw.Header().Set("X-Answer", "yes")
			rw.Header().Set("Alt-Svc", `h3=":443"`)
			rw.WriteHeader(http.StatusCreated)
			io.WriteString(rw, "done")
		}, nil)
		b := w.box("i1", ruled(map[string]string{"X-Team": "blue"}))
		resp, answer := do(t, w.client(b, h2), "POST", "https://example.com/a%2Fb//c?x=1&y=%41", "the body", "x_team", "red", "X-Team", "green", "X-Other", "1", "X-Other", "2", "User-Agent", "", "Accept-Encoding", "br")
		if resp.StatusCode != http.StatusCreated || answer != "done" || resp.Header.Get("X-Answer") != "yes" || resp.Header.Get("Alt-Svc") != "" {
			t.Errorf("got %d %q %v", resp.StatusCode, answer, resp.Header)
		}
		if got == nil {
			t.Fatal("nothing arrived")
		}
		if got.RequestURI != "/a%2Fb//c?x=1&y=%41" || got.Host != "example.com" || got.Method != "POST" || body != "the body" || got.ContentLength != 8 {
			t.Errorf("got %s %s %s, body %q, length %d", got.Method, got.Host, got.RequestURI, body, got.ContentLength)
		}
		want := http.Header{"X-Team": {"blue"}, "X-Other": {"1", "2"}, "Accept-Encoding": {"br"}, "Content-Length": {"8"}}
		if fmt.Sprint(got.Header) != fmt.Sprint(want) {
			t.Errorf("got header %v, want %v", got.Header, want)
		}
		if (got.ProtoMajor == 2) != true {
			t.Errorf("the server was spoken to in %s, want HTTP/2", got.Proto)
		}
		e := w.wait("request", func(e Event) bool { return e.Kind == Requested })
		if e.Method != "POST" || e.URL != "https://example.com/a%2Fb//c" || e.Status != 201 || e.Bytes != 4 || e.Name != "example.com" {
			t.Errorf("got %+v", e)
		}
	})
}

func TestUninspectedHostsKeepTheirCertificate(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(rw http.ResponseWriter, _ *http.Request) { io.WriteString(rw, "hi") }, nil)
	b := w.box("i1", ruled(nil))
	conf := &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "www.example.com"}
	conf.RootCAs.AddCert(w.outside.Certificate())
	if _, err := b.ask("10.0.0.1:53", "www.example.com.", dnsmessage.TypeA); err != nil {
		t.Fatal(err)
	}
	c := tls.Client(b.mustDial(site+":443"), conf)
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
}

// TestStreams: each side sees what the other sends at once, in both directions, and
// trailers at the end.
func TestInspectedStreamsFlowInBothDirections(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "application/grpc")
		rw.Header().Set("Trailer", "Grpc-Status")
		rc := http.NewResponseController(rw)
		rc.EnableFullDuplex()
		rw.WriteHeader(200)
		rc.Flush()
		buf := make([]byte, 100)
		for {
			n, err := r.Body.Read(buf)
			rw.Write(bytes.ToUpper(buf[:n]))
			rc.Flush()
			if err != nil {
				break
			}
		}
		rw.Header().Set("Grpc-Status", "7")
		rw.Header().Set(http.TrailerPrefix+"Grpc-Message", "late")
	}, nil)
	versions(t, func(t *testing.T, h2 bool) {
		b := w.box("i-"+fmt.Sprint(h2), ruled(nil))
		pr, pw := io.Pipe()
		req, _ := http.NewRequestWithContext(t.Context(), "POST", "https://example.com/svc/Method", pr)
		req.Header.Set("Content-Type", "application/grpc")
		req.Header.Set("Te", "trailers")
		resp, err := w.client(b, h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		for _, s := range []string{"one", "two", "three"} {
			io.WriteString(pw, s)
			got := make([]byte, len(s))
			if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != strings.ToUpper(s) {
				t.Fatalf("got %q, %v", got, err)
			}
		}
		pw.Close()
		if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
			t.Errorf("got %q, %v", rest, err)
		}
		if resp.Trailer.Get("Grpc-Status") != "7" || resp.Trailer.Get("Grpc-Message") != "late" {
			t.Errorf("got trailers %v", resp.Trailer)
		}
	})
}

func TestInspectedAnswersArriveEventByEvent(t *testing.T) {
	next := make(chan string)
	w := newInspected(t, inspect.Config{}, func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Content-Type", "text/event-stream")
		for s := range next {
			fmt.Fprintf(rw, "data: %s\n\n", s)
			rw.(http.Flusher).Flush()
		}
	}, nil)
	b := w.box("i1", ruled(nil))
	go func() { next <- "a" }()
	resp, err := w.client(b, false).Get("https://example.com/events")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	r := bufio.NewReader(resp.Body)
	for _, s := range []string{"a", "b", "c"} {
		if s != "a" {
			next <- s
		}
		if line, err := r.ReadString('\n'); err != nil || line != "data: "+s+"\n" {
			t.Fatalf("got %q, %v", line, err)
		}
		r.ReadString('\n')
	}
	close(next)
}

// TestInterim: interim answers pass, and a body is sent only after 100 Continue.
func TestInspectedInterimAnswersPass(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Link", "</style.css>; rel=preload")
		rw.WriteHeader(http.StatusEarlyHints)
		if r.URL.Path == "/no" {
			rw.WriteHeader(http.StatusExpectationFailed)
			return
		}
		b, _ := io.ReadAll(r.Body)
		rw.Write(b)
	}, nil)
	b := w.box("i1", ruled(nil))
	for _, path := range []string{"/yes", "/no"} {
		var hints, continued atomic.Bool
		var sent atomic.Int64
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
			Got100Continue: func() { continued.Store(true) },
			Got1xxResponse: func(code int, _ textproto.MIMEHeader) error {
				if code == http.StatusEarlyHints {
					hints.Store(true)
				}
				return nil
			},
		})
		req, _ := http.NewRequestWithContext(ctx, "PUT", "https://example.com"+path, &counted{strings.NewReader("body"), &sent})
		req.ContentLength = 4
		req.Header.Set("Expect", "100-continue")
		resp, err := w.client(b, false).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		switch {
		case !hints.Load():
			t.Errorf("%s: 103 did not pass", path)
		case path == "/yes" && (string(got) != "body" || !continued.Load()):
			t.Errorf("got %q, continued %v", got, continued.Load())
		case path == "/no" && (resp.StatusCode != http.StatusExpectationFailed || sent.Load() > 0):
			t.Errorf("got %d after %d bytes", resp.StatusCode, sent.Load())
		}
	}
}

type counted struct {
	io.Reader
	n *atomic.Int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// TestWebSocket: the handshake is a request, and the bytes after it pass. The value of
// a secret that the server sends back is masked.
func TestInspectedWebSocketsPass(t *testing.T) {
	var key string
	w := newInspected(t, inspect.Config{Secrets: vault{hosts: []string{"example.com"}}}, func(rw http.ResponseWriter, r *http.Request) {
		key = r.Header.Get("Authorization")
		if r.Header.Get("Upgrade") != "websocket" || r.Header.Get("Sec-Websocket-Extensions") != "" {
			http.Error(rw, "no", 400)
			return
		}
		c, rw2, _ := http.NewResponseController(rw).Hijack()
		defer c.Close()
		io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"+"key "+key+".")
		io.Copy(c, rw2)
	}, nil)
	b := w.box("i1", ruled(map[string]string{"Authorization": "Bearer ${e2b.secrets.github}"}))
	c, err := w.tls(b, "example.com", "http/1.1")
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(c, "GET /ws HTTP/1.1\r\nHost: example.com\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n")
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != 101 || resp.Header.Get("Upgrade") != "websocket" {
		t.Fatalf("got %+v, %v", resp, err)
	}
	if key != "Bearer "+secretValue {
		t.Errorf("the server got %q", key)
	}
	got := make([]byte, len("key Bearer .")+len(secretValue))
	if _, err := io.ReadFull(r, got); err != nil || strings.Contains(string(got), secretValue) {
		t.Errorf("got %q, %v; want it masked", got, err)
	}
	io.WriteString(c, "hello")
	if _, err := io.ReadFull(r, got[:5]); err != nil || string(got[:5]) != "hello" {
		t.Errorf("got %q, %v", got[:5], err)
	}
}

func TestSecretsAreOnTheWireAndNotInTheSandbox(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		var got []string
		w := newInspected(t, inspect.Config{Secrets: vault{[]string{"example.com"}, []inject.Place{
			{Host: "example.com", Method: "POST", Path: "/*", In: inject.InQuery, Name: "key"},
			{Host: "example.com", Method: "POST", Path: "/*", In: inject.InJSON, Name: "/token"},
		}}}, func(rw http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			got = []string{r.Header.Get("Authorization"), r.URL.Query().Get("key"), string(b), r.Header.Get("Accept-Encoding"), r.Header.Get("Range")}
			rw.Header().Set("X-Echo", r.Header.Get("Authorization"))
			var out io.Writer = rw
			switch r.URL.Path {
			case "/gzip":
				rw.Header().Set("Content-Encoding", "gzip")
				z := gzip.NewWriter(rw)
				defer z.Close()
				out = z
			case "/br":
				rw.Header().Set("Content-Encoding", "br")
			}
			fmt.Fprintf(out, "you sent %s and %s", r.Header.Get("Authorization"), b)
		}, nil)
		b := w.box("i1", ruled(map[string]string{"Authorization": "Bearer ${e2b.secrets.github}"}))
		c := w.client(b, h2)
		for _, path := range []string{"/", "/gzip"} {
			resp, answer := do(t, c, "POST", "https://example.com"+path+"?key="+sentinel, `{"token":"`+sentinel+`"}`, "Content-Type", "application/json", "Accept-Encoding", "gzip", "Range", "bytes=0-1")
			want := []string{"Bearer " + secretValue, secretValue, `{"token":"` + secretValue + `"}`, "identity", ""}
			if !slices.Equal(got, want) {
				t.Errorf("the server got %q, want %q", got, want)
			}
			if strings.Contains(answer, secretValue) || !strings.HasPrefix(answer, "you sent Bearer ") || strings.Contains(fmt.Sprint(resp.Header), secretValue) || resp.Header.Get("Content-Encoding") != "" {
				t.Errorf("got %q with %v, want the value masked", answer, resp.Header)
			}
		}
		if resp, answer := do(t, c, "GET", "https://example.com/br", ""); resp.StatusCode != http.StatusBadGateway {
			t.Errorf("got %d %q of an answer that cannot be searched", resp.StatusCode, answer)
		}
		w.wait("masked", func(e Event) bool { return e.Kind == Masked })
		for _, e := range w.record() {
			if strings.Contains(fmt.Sprint(e), secretValue) {
				t.Errorf("the record has the value: %+v", e)
			}
		}
	})
}

func TestSentinelsThatDoNotBelongAreRefusedAndRecorded(t *testing.T) {
	j := &judge{all: true}
	w := newInspected(t, inspect.Config{Secrets: vault{hosts: []string{"example.com"}}, Judge: j}, func(rw http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
	}, nil)
	w.web(site + ":80")
	e := policy.Egress{Internet: true, Secrets: []string{"github"}}
	c := w.client(w.box("i1", e), false)
	other := "pst_" + strings.Repeat("z", 40)
	for _, tc := range []struct {
		name, method, url, body string
		header                  []string
		kind                    Kind
	}{
		{"another host", "GET", "https://www.example.com/", "", []string{"Authorization", "Bearer " + sentinel}, Misdirected},
		{"an unknown one", "GET", "https://example.com/", "", []string{"Authorization", other}, Misdirected},
		{"in clear text", "GET", "http://example.com/", "", []string{"Authorization", sentinel}, Misdirected},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := len(w.record())
			resp, answer := do(t, c, tc.method, tc.url, tc.body, tc.header...)
			if resp.StatusCode != http.StatusForbidden || resp.Header.Get("Postern-Denial") != "1" || resp.Header.Get("Content-Type") != "application/problem+json" {
				t.Errorf("got %d %v %s", resp.StatusCode, resp.Header, answer)
			}
			if !slices.ContainsFunc(w.record()[n:], func(e Event) bool { return e.Kind == tc.kind }) {
				t.Errorf("not on record: %+v", w.record()[n:])
			}
			if d := w.wall.Denials("i1"); len(d) == 0 || d[0].Method != tc.method {
				t.Errorf("got denials %+v", d)
			}
		})
	}
}

// TestPlaceholdersOfATranscriptReachTheirHostAsText: an agent prints its environment
// and sends the transcript to the model. The attack: the model says the value back,
// spelled, which no mask finds. So the value must not be in the transcript, and the
// session must go on.
func TestPlaceholdersOfATranscriptReachTheirHostAsText(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		var got struct{ key, body, query, trailer, encoding string }
		w := newInspected(t, inspect.Config{Secrets: vault{hosts: []string{"example.com"}}}, func(rw http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			got.key, got.body, got.query, got.trailer, got.encoding = r.Header.Get("Authorization"), string(b), r.URL.RawQuery, r.Trailer.Get("X-Sum"), r.Header.Get("Content-Encoding")
			if r.URL.Path == "/token" {
				rw.WriteHeader(http.StatusUnauthorized)
			}
		}, nil)
		c := w.client(w.box("i1", policy.Egress{Internet: true, Secrets: []string{"github"}}), h2)
		var zipped bytes.Buffer
		z := gzip.NewWriter(&zipped)
		_, _ = io.WriteString(z, sentinel)
		_ = z.Close()
		for _, tc := range []struct {
			name, path, body string
			header           []string
			recorded         bool
		}{
			{"JSON", "/v1/messages", `{"content":"SPELL:` + sentinel + `"}`, []string{"Content-Type", "application/json"}, true},
			{"JSON of more than a megabyte", "/v1/messages/long", `{"content":"` + strings.Repeat("x", 3<<20) + sentinel + `"}`, []string{"Content-Type", "application/json"}, true},
			{"multipart", "/v1/files", "--x\r\nContent-Disposition: form-data; name=a\r\n\r\n" + sentinel + "\r\n--x--\r\n", []string{"Content-Type", "multipart/form-data; boundary=x"}, true},
			{"form", "/token", "client_secret=" + sentinel, []string{"Content-Type", "application/x-www-form-urlencoded"}, true},
			{"query", "/search?q=" + sentinel, "", nil, true},
			{"gzip", "/v1/gzip", zipped.String(), []string{"Content-Encoding", "gzip", "Content-Type", "application/json"}, false},
		} {
			n := len(w.record())
			resp, answer := do(t, c, "POST", "https://example.com"+tc.path, tc.body, append(tc.header, "Authorization", "Bearer "+sentinel)...)
			if resp.Header.Get("Postern-Denial") != "" {
				t.Errorf("%s: refused with %d: %s", tc.name, resp.StatusCode, answer)
			}
			if got.key != "Bearer "+secretValue || got.body != tc.body || strings.Contains(got.query, secretValue) {
				t.Errorf("%s: the server got %q, a body of %d bytes that is the sent one: %v, and the query %q", tc.name, got.key, len(got.body), got.body == tc.body, got.query)
			}
			if !tc.recorded {
				continue
			}
			w.wait(tc.name, func(e Event) bool { return e.Kind == Stayed && slices.Contains(w.record()[n:], e) })
		}
		// The server refused the form: the record names the command that opens its field.
		w.wait("command", func(e Event) bool {
			return e.Kind == Stayed && e.Status == http.StatusUnauthorized && strings.Contains(e.Reason, "postern secret open github 'form:client_secret' POST 'example.com/token'")
		})
	})
}

// TestCommandsInTheRecordHaveNoTextOfPrograms: an operator pastes the command that the
// record names. The attack: the name of a field is a command of the program's.
func TestCommandsInTheRecordHaveNoTextOfPrograms(t *testing.T) {
	w := newInspected(t, inspect.Config{Secrets: vault{hosts: []string{"example.com"}}}, func(rw http.ResponseWriter, _ *http.Request) {
		rw.WriteHeader(http.StatusBadRequest)
	}, nil)
	c := w.client(w.box("i1", policy.Egress{Internet: true, Secrets: []string{"github"}}), false)
	for i, name := range []string{"a';id;'", "a b", "$(id)", "`id`", "a\u202eb"} {
		do(t, c, "POST", fmt.Sprintf("https://example.com/%d?%s=%s", i, url.QueryEscape(name), sentinel), "")
		w.wait(name, func(e Event) bool {
			return e.Kind == Stayed && strings.HasSuffix(e.URL, fmt.Sprintf("/%d", i)) && !strings.Contains(e.Reason, "postern secret open ")
		})
	}
}

// TestARuleWithOnly: a rule puts a key on requests to a model. The attack: code uses
// the key for another path of the host, or brings a key of its own along.
func TestARuleWithOnlyDropsOtherCredentialsAndBoundsRequests(t *testing.T) {
	var got http.Header
	var query string
	body := make(chan string, 100)
	w := newInspected(t, inspect.Config{Secrets: vault{hosts: []string{"example.com"}}}, func(_ http.ResponseWriter, r *http.Request) {
		got, query = r.Header.Clone(), r.URL.RawQuery
		b, _ := io.ReadAll(r.Body)
		body <- string(b)
	}, nil)
	e := ruled(map[string]string{"X-Api-Key": "${e2b.secrets.github}"})
	e.Rules["example.com"][0].Only = &policy.Only{Methods: []string{"POST"}, Paths: []string{"/v1/messages", "/v1/messages/*"}}
	c := w.client(w.box("i1", e), false)
	resp, answer := do(t, c, "POST", "https://example.com/v1/messages/count?beta=true&key=own&access_token=own&max_tokens=5", "{}",
		"Authorization", "Bearer own", "x-api-key", "own", "Api-Key", "own", "Cookie", "session=own", "X-Auth-Token", "own", "X-Goog-Api-Key", "own", "X_Api_Key", "own",
		"Anthropic-Version", "2023-06-01", "Idempotency-Key", "k1", "Content-Type", "application/json")
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusBadRequest {
		t.Fatalf("got %d %s", resp.StatusCode, answer)
	}
	for name, values := range got {
		if slices.Contains(values, "own") || strings.Contains(fmt.Sprint(values), "=own") {
			t.Errorf("the server got %s: %q", name, values)
		}
	}
	if got.Get("X-Api-Key") != secretValue || got.Get("Anthropic-Version") == "" || got.Get("Idempotency-Key") != "k1" || query != "beta=true&max_tokens=5" {
		t.Errorf("the server got %v and the query %q", got, query)
	}
	for _, tc := range [][2]string{{"GET", "/v1/messages"}, {"POST", "/v1/organizations/api_keys"}, {"POST", "/v1/messagesx"}, {"DELETE", "/v1/messages/1"}} {
		got = nil
		if resp, answer := do(t, c, tc[0], "https://example.com"+tc[1], ""); resp.StatusCode != http.StatusForbidden || got != nil || !strings.Contains(answer, "allows POST of /v1/messages") {
			t.Errorf("%s %s: got %d %s", tc[0], tc[1], resp.StatusCode, answer)
		}
	}
	// The attack: a POST in the request line, and another method where the server looks.
	const form = "application/x-www-form-urlencoded"
	for name, tc := range map[string]struct {
		query, body string
		header      []string
	}{
		"a header":  {"", "", []string{"X-HTTP-Method-Override", "DELETE"}},
		"the query": {"?_method=DELETE", "", nil},
		"a form":    {"", "a=1&_method=DELETE", []string{"Content-Type", form}},
		"JSON":      {"", `{"_method":"DELETE"}`, []string{"Content-Type", "application/json"}},
	} {
		got = nil
		req, _ := http.NewRequestWithContext(t.Context(), "POST", "https://example.com/v1/messages"+tc.query, strings.NewReader(tc.body))
		for i := 0; i < len(tc.header); i += 2 {
			req.Header.Set(tc.header[i], tc.header[i+1])
		}
		resp, err := c.Do(req)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusForbidden || got != nil {
			t.Errorf("%s: got %d, the server got %v", name, resp.StatusCode, got)
		}
	}
	// A body that is too long to be read first ends before the field.
	for len(body) > 0 {
		<-body
	}
	req, _ := http.NewRequestWithContext(t.Context(), "POST", "https://example.com/v1/messages", strings.NewReader(strings.Repeat("x=1&", 1<<19)+"_method=DELETE"))
	req.Header.Set("Content-Type", form)
	if resp, err := c.Do(req); err == nil {
		resp.Body.Close()
	}
	if b := <-body; strings.Contains(b, "_method") {
		t.Errorf("the server read the method of a long form, after %d bytes", len(b))
	}
}

func TestRequestsForOtherHostsAreMisdirected(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(http.ResponseWriter, *http.Request) {}, nil)
	b := w.box("i1", ruled(nil))
	versions(t, func(t *testing.T, h2 bool) {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", "https://example.com/", nil)
		req.Host = "www.example.com"
		resp, err := w.client(b, h2).Do(req)
		if err != nil || resp.StatusCode != http.StatusMisdirectedRequest {
			t.Fatalf("got %+v, %v", resp, err)
		}
		resp.Body.Close()
	})
	// The DNS was asked for another name, whose address is not this one's.
	w.says("elsewhere.test", "93.184.216.99")
	if _, err := b.ask("10.0.0.1:53", "elsewhere.test.", dnsmessage.TypeA); err != nil {
		t.Fatal(err)
	}
	conf := w.trust(b)
	conf.ServerName = "example.com"
	c := tls.Client(b.mustDial("93.184.216.99:443"), conf)
	if got, err := get(c, "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"); err != nil || !strings.HasPrefix(got, "421 ") {
		t.Errorf("got %q, %v", got, err)
	}
	if n := w.seen.Load(); n > 0 {
		t.Errorf("%d requests arrived", n)
	}
	w.wait("misdirected", func(e Event) bool { return e.Kind == Denied && strings.Contains(e.Reason, "elsewhere.test") })
}

// TestSmuggling: requests that two programs could read differently do not arrive.
func TestAmbiguousRequestsAreRefused(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(rw http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		fmt.Fprintf(rw, "%s %s", r.Method, r.RequestURI)
	}, nil)
	b := w.box("i1", ruled(map[string]string{"Authorization": "Bearer x", "X-Key": "ours"}))
	for _, tc := range []struct{ name, request string }{
		{"length and chunks", "POST / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{"two lengths", "POST / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!"},
		{"an underscore", "POST / HTTP/1.1\r\nHost: example.com\r\nContent_Length: 5\r\n\r\nhello"},
		{"chunked twice", "POST / HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"},
		{"identity", "POST / HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: identity\r\n\r\n"},
		{"a bad chunk", "POST / HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n"},
		{"a folded line", "GET / HTTP/1.1\r\nHost: example.com\r\nX-A: 1\r\n two\r\n\r\n"},
		{"a bare LF", "GET / HTTP/1.1\nHost: example.com\n\n"},
		{"a space before the colon", "GET / HTTP/1.1\r\nHost: example.com\r\nX-Key : 1\r\n\r\n"},
		{"two hosts", "GET / HTTP/1.1\r\nHost: example.com\r\nHost: www.example.com\r\n\r\n"},
		{"no host", "GET / HTTP/1.1\r\n\r\n"},
		{"another host", "GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"},
		{"another port", "GET / HTTP/1.1\r\nHost: example.com:8443\r\n\r\n"},
		{"a user", "GET / HTTP/1.1\r\nHost: example.com@evil.test\r\n\r\n"},
		{"an absolute target elsewhere", "GET https://evil.test/ HTTP/1.1\r\nHost: example.com\r\n\r\n"},
		{"an absolute target in clear text", "GET http://example.com/ HTTP/1.1\r\nHost: example.com\r\n\r\n"},
		{"CONNECT", "CONNECT evil.test:443 HTTP/1.1\r\nHost: example.com\r\n\r\n"},
		{"TRACE", "TRACE / HTTP/1.1\r\nHost: example.com\r\n\r\n"},
		{"a method in lower case", "get / HTTP/1.1\r\nHost: example.com\r\n\r\n"},
		{"dot segments", "GET /public/../admin HTTP/1.1\r\nHost: example.com\r\n\r\n"},
		{"encoded dot segments", "GET /public/%2e%2E/admin HTTP/1.1\r\nHost: example.com\r\n\r\n"},
		{"dot segments behind an encoded slash", "GET /public/..%2fadmin HTTP/1.1\r\nHost: example.com\r\n\r\n"},
		{"dot segments encoded twice", "GET /public/%252e%252e/admin HTTP/1.1\r\nHost: example.com\r\n\r\n"},
		{"dot segments with a parameter", "GET /public/..;x=1/admin HTTP/1.1\r\nHost: example.com\r\n\r\n"},
		{"a NUL in the path", "GET /a%00b HTTP/1.1\r\nHost: example.com\r\n\r\n"},
		{"a GET with chunks", "GET / HTTP/1.1\r\nHost: example.com\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{"a trailer that a rule sets", "POST / HTTP/1.1\r\nHost: example.com\r\nTrailer: x_key\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx_key: theirs\r\n\r\n"},
		{"HTTP/2 without agreement", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := w.seen.Load()
			c, err := w.tls(b, "example.com", "http/1.1")
			if err != nil {
				t.Fatal(err)
			}
			got, err := get(c, tc.request)
			if err == nil && !slices.ContainsFunc([]string{"400 ", "403 ", "421 ", "505 "}, func(s string) bool { return strings.HasPrefix(got, s) }) {
				t.Errorf("got %q", got)
			}
			if w.seen.Load() != before {
				t.Error("it arrived")
			}
			c.Close()
		})
	}
}

// TestQueries: HTTP/2 can carry what would end the target in HTTP/1.1.
func TestQueriesThatWouldEndTheTargetAreRefused(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(http.ResponseWriter, *http.Request) {}, nil)
	c := w.client(w.box("i1", ruled(nil)), true)
	for _, q := range []string{"a HTTP/1.1", "a#b"} {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", "https://example.com/", nil)
		req.URL.RawQuery = q
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if resp.Body.Close(); resp.StatusCode != http.StatusBadRequest || w.seen.Load() > 0 {
			t.Errorf("%q: got %d", q, resp.StatusCode)
		}
	}
}

// TestHopByHop: a program cannot have the header of a rule removed on the way.
func TestConnectionFieldsDoNotReachTheRule(t *testing.T) {
	var got http.Header
	w := newInspected(t, inspect.Config{}, func(_ http.ResponseWriter, r *http.Request) { got = r.Header }, nil)
	b := w.box("i1", ruled(map[string]string{"Authorization": "Bearer x"}))
	c, err := w.tls(b, "example.com", "http/1.1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := get(c, "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: Authorization, X-A, close\r\nX-A: 1\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\nProxy-Authorization: x\r\nAUTHORIZATION: theirs\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(got) != fmt.Sprint(http.Header{"Authorization": {"Bearer x"}}) {
		t.Errorf("got %v", got)
	}
}

func TestServersWithABadCertificateAreRefused(t *testing.T) {
	w := newInspected(t, inspect.Config{Roots: x509.NewCertPool()}, func(http.ResponseWriter, *http.Request) {}, nil)
	b := w.box("i1", ruled(nil))
	resp, answer := do(t, w.client(b, true), "GET", "https://example.com/", "")
	if resp.StatusCode != http.StatusBadGateway || !strings.Contains(answer, "unknown authority") || w.seen.Load() > 0 {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	w.wait("refused", func(e Event) bool { return e.Kind == Denied && strings.Contains(e.Reason, "not trusted") })
}

func TestClientsWithPinnedCertificatesFailWithAnEvent(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(http.ResponseWriter, *http.Request) {}, nil)
	b := w.box("i1", ruled(nil))
	conf := &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "example.com"}
	conf.RootCAs.AddCert(w.outside.Certificate())
	if err := tls.Client(b.mustDial(site+":443"), conf).Handshake(); err == nil {
		t.Fatal("the handshake succeeded")
	}
	w.wait("pinned", func(e Event) bool {
		return e.Kind == Denied && e.Name == "example.com" && strings.Contains(e.Reason, "the client refused the sandbox's certificate")
	})
	if d := w.wall.Denials("i1"); len(d) != 1 || d[0].Kind != "connection" || d[0].Host != "example.com" {
		t.Errorf("got %+v", d)
	}
}

func TestConnectionsThatHideTheirHostAreRefused(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(http.ResponseWriter, *http.Request) {}, nil)
	b := w.box("i1", ruled(nil))
	// Allowed by its address, as long as no inspected host is known there.
	w.says("shared.test", site)
	b.ask("10.0.0.1:53", "shared.test.", dnsmessage.TypeA)
	if err := tls.Client(b.mustDial(site+":443"), &tls.Config{InsecureSkipVerify: true}).Handshake(); err != nil {
		t.Fatalf("got %v before the inspected host was looked up", err)
	}
	b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA)
	if err := tls.Client(b.mustDial(site+":443"), &tls.Config{InsecureSkipVerify: true}).Handshake(); err == nil {
		t.Error("no name: it passed")
	}
	if err := tls.Client(b.mustDial(site+":443"), &tls.Config{InsecureSkipVerify: true, ServerName: "www.example.com"}).Handshake(); err != nil {
		t.Errorf("another name: %v", err)
	}
	c := b.mustDial(site + ":443")
	go tls.Client(c, &tls.Config{ServerName: "www.example.com", EncryptedClientHelloConfigList: echConfig(t), MinVersion: tls.VersionTLS13}).Handshake()
	w.wait("hidden", func(e Event) bool { return e.Kind == Denied && e.Name == "public.test" })
}

// TestTwoNames: what is malformed is not passed on to an address that is allowed
// whatever its name.
func TestMalformedConnectionsToAnInspectedHostAreRefused(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(http.ResponseWriter, *http.Request) {}, nil)
	w.web(site + ":80")
	b := w.box("i1", ruled(nil))
	for _, req := range []string{
		"GET / HTTP/1.1\r\nHost: example.com\r\nHost: www.example.com\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 1\r\n\r\nx",
		"GET http://example.com/ HTTP/1.1\r\nHost: www.example.com\r\n\r\n",
	} {
		// The DNS was not asked: nothing is known of the address.
		if got, err := get(b.mustDial(site+":80"), req); err == nil && !strings.HasPrefix(got, "403 ") && !strings.HasPrefix(got, "4") {
			t.Errorf("%q: got %q", req, got)
		}
	}
	if dialed, _ := w.world.outside(); len(dialed) > 0 {
		t.Errorf("dialed %v", dialed)
	}
}

func TestRefusalsOfRulesSayWhatToDo(t *testing.T) {
	j := &judge{all: true, decide: func(r *outgoing.Request) policy.Verdict {
		if r.Method == "DELETE" {
			return policy.Verdict{Effect: policy.Deny, Rule: "no-deletes", Reason: "nothing is deleted here"}
		}
		return policy.Verdict{Effect: policy.Allow}
	}}
	w := newInspected(t, inspect.Config{Judge: j}, func(http.ResponseWriter, *http.Request) {}, nil)
	b := w.box("i1", policy.Egress{Internet: true})
	resp, answer := do(t, w.client(b, true), "DELETE", "https://example.com/thing?token=private", "")
	var p map[string]any
	if err := json.Unmarshal([]byte(answer), &p); err != nil || resp.StatusCode != 403 || p["rule"] != "no-deletes" || p["detail"] != "nothing is deleted here" || p["ask"] != "http://postern.internal/proposals" || p["next"] == "" {
		t.Errorf("got %d %s, %v", resp.StatusCode, answer, err)
	}
	e := w.wait("denied", func(e Event) bool { return e.Kind == Denied })
	if e.Rule != "no-deletes" || e.Method != "DELETE" || e.URL != "https://example.com/thing" {
		t.Errorf("got %+v", e)
	}
	d := w.wall.Denials("i1")
	if len(d) != 1 || d[0].Kind != "request" || d[0].Path != "/thing" || d[0].Rule != "no-deletes" || d[0].Time.IsZero() {
		t.Errorf("got %+v", d)
	}
	if resp, _ := do(t, w.client(b, true), "GET", "https://example.com/thing", ""); resp.StatusCode != 200 {
		t.Errorf("got %d for what is allowed", resp.StatusCode)
	}
	if len(j.made) != 1 || j.made[0] != "GET https://example.com/thing: status 200, 0 bytes" {
		t.Errorf("made %q", j.made)
	}
}

func TestHeldRequestsAreMadeExactlyAsTheyWereShown(t *testing.T) {
	versions(t, func(t *testing.T, h2 bool) {
		body := strings.Repeat("0123456789", 300_000) // 3 MB
		var shown *outgoing.Request
		approve := true
		j := &judge{all: true, decide: func(*outgoing.Request) policy.Verdict { return policy.Verdict{Effect: policy.Ask} }}
		j.hold = func(r *outgoing.Request) policy.Verdict {
			shown = r
			if approve {
				return policy.Verdict{Effect: policy.Allow}
			}
			return policy.Verdict{Effect: policy.Deny, Action: "act_1", Reason: "it waits"}
		}
		var got string
		w := newInspected(t, inspect.Config{Judge: j, Secrets: vault{hosts: []string{"example.com"}}}, func(_ http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			got = r.Header.Get("Authorization") + string(b)
		}, nil)
		b := w.box("i1", ruled(map[string]string{"Authorization": "Bearer ${e2b.secrets.github}"}))
		pr, pw := io.Pipe()
		go func() { io.WriteString(pw, body); pw.Close() }()
		req, _ := http.NewRequestWithContext(t.Context(), "POST", "https://example.com/", pr)
		resp, err := w.client(b, h2).Do(req)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("got %+v, %v", resp, err)
		}
		resp.Body.Close()
		if got != "Bearer "+secretValue+body {
			t.Errorf("the server got %d bytes", len(got))
		}
		if !shown.Whole || string(shown.Body) != body || shown.Header.Get("Authorization") != "Bearer "+sentinel || len(shown.Uses) != 1 || shown.Uses[0].Secret != "github" {
			t.Errorf("a person was shown %d bytes with %v, uses %+v", len(shown.Body), shown.Header, shown.Uses)
		}
		if enc, err := shown.Encode(); err != nil || bytes.Contains(enc, []byte(secretValue)) {
			t.Errorf("the stored request has the value, %v", err)
		}
		approve = false
		resp, answer := do(t, w.client(b, h2), "POST", "https://example.com/", "x")
		if resp.StatusCode != 403 || !strings.Contains(answer, "act_1") || w.seen.Load() != 1 {
			t.Errorf("got %d %s", resp.StatusCode, answer)
		}
		resp, answer = do(t, w.client(b, h2), "POST", "https://example.com/", strings.Repeat("x", outgoing.MaxBody+1))
		if resp.StatusCode != 413 || w.seen.Load() != 1 {
			t.Errorf("got %d %s", resp.StatusCode, answer)
		}
	})
}

func TestAChangeEndsRequestsUnderWay(t *testing.T) {
	for name, change := range map[string]func(*inspectedWorld, *judge){
		"a switch": func(w *inspectedWorld, j *judge) {
			j.mu.Lock()
			j.over = func(*outgoing.Request) bool { return true }
			j.mu.Unlock()
			w.wall.Recheck(context.Background(), "prj_1")
		},
		"another rule": func(w *inspectedWorld, _ *judge) {
			w.wall.Update(context.Background(), w.principal("i1", ""), ruled(map[string]string{"X-A": "1"}))
		},
		"no access": func(w *inspectedWorld, _ *judge) {
			w.wall.Update(context.Background(), w.principal("i1", ""), policy.Egress{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			versions(t, func(t *testing.T, h2 bool) {
				j := &judge{all: true}
				gone := make(chan struct{})
				w := newInspected(t, inspect.Config{Judge: j}, func(rw http.ResponseWriter, r *http.Request) {
					io.WriteString(rw, "begin")
					rw.(http.Flusher).Flush()
					<-r.Context().Done()
					close(gone)
				}, nil)
				b := w.box("i1", ruled(nil))
				resp, err := w.client(b, h2).Get("https://example.com/")
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				if _, err := io.ReadFull(resp.Body, make([]byte, 5)); err != nil {
					t.Fatal(err)
				}
				change(w, j)
				if b, err := io.ReadAll(resp.Body); err == nil {
					t.Errorf("got %q and a clean end", b)
				}
				<-gone
				w.wait("cut", func(e Event) bool { return e.Kind == Cut })
			})
		})
	}
}

// TestUninspectedConnectionsEnd: what was passed through before a rule for its host
// came must not go on unseen.
func TestANewRuleEndsConnectionsThatWereNotInspected(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(http.ResponseWriter, *http.Request) {}, nil)
	b := w.box("i1", policy.Egress{AllowOut: []string{"example.com"}, DenyOut: []string{"0.0.0.0/0"}})
	conf := &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "example.com"}
	conf.RootCAs.AddCert(w.outside.Certificate())
	c := tls.Client(b.mustDial(site+":443"), conf)
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	e := policy.Egress{AllowOut: []string{"example.com"}, DenyOut: []string{"0.0.0.0/0"}, Rules: ruled(nil).Rules}
	if err := w.wall.Update(t.Context(), w.principal("i1", ""), e); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want that it ends", err)
	}
	w.wait("cut", func(e Event) bool { return e.Kind == Cut && strings.Contains(e.Reason, "are inspected now") })
}

func TestClearTextRequestsGoThroughTheSameRules(t *testing.T) {
	j := &judge{all: true, decide: func(r *outgoing.Request) policy.Verdict {
		if r.Scheme == "http" && r.Path == "/no" {
			return policy.Verdict{Effect: policy.Deny, Reason: "not there"}
		}
		return policy.Verdict{Effect: policy.Allow}
	}}
	w := newInspected(t, inspect.Config{Judge: j}, func(http.ResponseWriter, *http.Request) {}, nil)
	w.web(site + ":80")
	c := w.client(w.box("i1", policy.Egress{Internet: true}), false)
	if resp, answer := do(t, c, "GET", "http://example.com/", ""); resp.StatusCode != 200 || answer != "hello example.com" {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
	if resp, answer := do(t, c, "GET", "http://example.com/no", ""); resp.StatusCode != 403 || !strings.Contains(answer, "not there") {
		t.Errorf("got %d %s", resp.StatusCode, answer)
	}
}

// TestMailInARequest: the wall watches for mail in the body of a clear-text request.
func TestMailInABodyOfAClearTextRequestDoesNotLeave(t *testing.T) {
	w := newInspected(t, inspect.Config{}, func(http.ResponseWriter, *http.Request) {}, nil)
	got := make(chan string, 1)
	w.at(site+":80", func(c net.Conn) {
		io.WriteString(c, "220 mail.example ESMTP\r\n")
		b, _ := io.ReadAll(c)
		got <- string(b)
	})
	c := w.client(w.box("i1", ruled(nil)), false)
	resp, _ := do(t, c, "POST", "http://example.com/", "x\r\nEHLO a\r\nMAIL FROM:<a@b.example>\r\nRCPT TO:<c@d.example>\r\nDATA\r\n")
	if b := <-got; strings.Contains(b, "RCPT") {
		t.Errorf("got %d; the server got %q", resp.StatusCode, b)
	}
}

func TestWithoutAnAuthorityNothingIsTerminated(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		open(c)
		c.Inspect = inspect.New(slog.New(slog.DiscardHandler), inspect.Config{})
	})
	w.at(site+":443", echo)
	w.says("example.com", site)
	b := w.box("i1", ruled(nil))
	if err := tls.Client(b.mustDial(site+":443"), &tls.Config{ServerName: "example.com", InsecureSkipVerify: true}).Handshake(); err == nil {
		t.Error("it passed")
	}
	if dialed, _ := w.outside(); len(dialed) > 0 {
		t.Errorf("dialed %v", dialed)
	}
}

// TestStoredSecretsAreMaskedLater: one request stores the value of a secret at its
// host, another without any secret reads it.
func TestStoredSecretsAreMaskedLater(t *testing.T) {
	var stored string
	w := newInspected(t, inspect.Config{Secrets: vault{[]string{"example.com"}, []inject.Place{{Host: "example.com", Method: "POST", Path: "/notes", In: inject.InForm, Name: "text"}}}}, func(rw http.ResponseWriter, r *http.Request) {
		if r.Method == "POST" {
			stored = r.PostFormValue("text")
			return
		}
		io.WriteString(rw, stored)
	}, nil)
	b := w.box("i1", policy.Egress{Internet: true, Secrets: []string{"github"}})
	c := w.client(b, false)
	if resp, answer := do(t, c, "POST", "https://example.com/notes", "text="+sentinel, "Content-Type", "application/x-www-form-urlencoded"); resp.StatusCode != 200 || stored != secretValue {
		t.Fatalf("got %d %q; the server has %q", resp.StatusCode, answer, stored)
	}
	if _, answer := do(t, c, "GET", "https://example.com/notes", "", "Range", "bytes=0-3"); answer != strings.Repeat("*", len(secretValue)) && !strings.HasSuffix(answer, "***") || strings.Contains(answer, secretValue) {
		t.Errorf("got %q, want it masked", answer)
	}
}

// TestRequestsAreInspectedOnEveryPort: TLS and HTTP are inspected on every port, and
// nothing else passes there; see also falsename_test.go.
func TestRequestsAreInspectedOnEveryPort(t *testing.T) {
	j := &judge{all: true, decide: func(r *outgoing.Request) policy.Verdict {
		return policy.Verdict{Effect: policy.Deny, Reason: "port " + fmt.Sprint(r.Port)}
	}}
	for name, e := range map[string]policy.Egress{
		"by address": {Internet: true},
		"by name":    {AllowOut: []string{"example.com:8443", "example.com:8080"}, DenyOut: []string{"0.0.0.0/0"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newInspected(t, inspect.Config{Judge: j}, func(http.ResponseWriter, *http.Request) {}, nil)
			w.standsFor(site+":8443", w.outside.Listener)
			w.web(site + ":8080")
			b := w.box("i1", e)
			c := w.client(b, false)
			for _, u := range []string{"https://example.com:8443/", "http://example.com:8080/"} {
				if resp, answer := do(t, c, "GET", u, ""); resp.StatusCode != 403 || !strings.Contains(answer, "port 8") {
					t.Errorf("%s: got %d %s", u, resp.StatusCode, answer)
				}
			}
			if err := tls.Client(b.mustDial(site+":8443"), &tls.Config{InsecureSkipVerify: true}).Handshake(); err == nil {
				t.Error("TLS without a name passed")
			}
			for _, req := range []string{"GET /\r\n", "\r\nget / http/1.1\nhost: example.com\n\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "SSH-2.0-y\r\n", "\x00\x00\x00\x08\x04\xd2\x16\x2f"} {
				c := b.mustDial(site + ":8080")
				io.WriteString(c, req)
				c.(interface{ CloseWrite() error }).CloseWrite()
				if got, _ := io.ReadAll(c); strings.Contains(string(got), "hello") {
					t.Errorf("%q: got %q", req, got)
				}
			}
			if n := w.seen.Load(); n > 0 {
				t.Errorf("%d requests arrived", n)
			}
			if dialed, _ := w.world.outside(); len(dialed) > 0 {
				t.Errorf("the wall dialled %v", dialed)
			}
		})
	}
}
