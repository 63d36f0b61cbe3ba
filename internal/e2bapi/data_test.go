package e2bapi

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/framing"
	"postern/internal/sandbox"
)

const otherID = "izzzzzzzzzzzzzzzzzzzz"

// fakeSandboxes are sandboxes whose ports are listeners on loopback. Only testID and
// otherID exist.
type fakeSandboxes struct {
	ports   map[uint16]string // addresses
	traffic sandbox.Traffic
	wake    error
	woken   atomic.Int64

	mu    sync.Mutex // guards conns
	conns []net.Conn // into sandboxes
}

func (f *fakeSandboxes) Live() []string { return []string{otherID, testID} }

func (f *fakeSandboxes) Traffic(id string) (sandbox.Traffic, bool) {
	return f.traffic, id == testID || id == otherID
}

func (f *fakeSandboxes) Wake(context.Context, string) error {
	f.woken.Add(1)
	return f.wake
}

func (f *fakeSandboxes) AccessToken(id string) auth.Secret  { return auth.Secret("access-" + id) }
func (f *fakeSandboxes) TrafficToken(id string) auth.Secret { return auth.Secret("traffic-" + id) }
func (f *fakeSandboxes) ChannelKey(id string) auth.Secret   { return auth.Secret("channel-" + id) }

func (f *fakeSandboxes) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	id, port, _ := net.SplitHostPort(addr)
	p, _ := strconv.ParseUint(port, 10, 16)
	to, ok := f.ports[uint16(p)]
	switch {
	case f.wake != nil:
		return nil, fmt.Errorf("dial %s: %w", id, sandbox.ErrNotFound)
	case !ok:
		return nil, fmt.Errorf("dial %s at 10.9.8.7: %w", id, sandbox.ErrPortClosed)
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, network, to)
	if err == nil {
		f.mu.Lock()
		f.conns = append(f.conns, c)
		f.mu.Unlock()
	}
	return c, err
}

// kill ends connections as the end of a sandbox does.
func (f *fakeSandboxes) kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.Close()
	}
}

// A dataServer is a listening data plane.
type dataServer struct {
	*Server
	boxes *fakeSandboxes
	addr  string
}

func serveData(t *testing.T, c Config, ports map[uint16]string) *dataServer {
	t.Helper()
	b := &fakeSandboxes{ports: ports}
	s := &Server{log: slog.New(slog.NewTextHandler(t.Output(), nil)), conf: c}
	inside := &http.Transport{DialContext: b.dial, DisableCompression: true}
	s.openData(b, inside)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.IsData(r) {
			http.Error(w, "the control API", http.StatusTeapot)
			return
		}
		s.ServeData(w, r)
	}))
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	framing.Guard(srv.Config)
	srv.Listener = framing.Listener(srv.Listener)
	srv.Start()
	t.Cleanup(func() {
		b.kill()
		srv.Close()
	})
	return &dataServer{s, b, srv.Listener.Addr().String()}
}

// inside serves h on loopback as a service in a sandbox and returns its address.
func inside(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s.Listener.Addr().String()
}

// raw serves each connection with f, for bytes that no HTTP server would send.
func raw(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				f(c)
			}()
		}
	}()
	return l.Addr().String()
}

// host returns the host name of a port of testID.
func host(port int) string { return strconv.Itoa(port) + "-" + testID + ".boxes.example" }

func (d *dataServer) request(t *testing.T, method, host, path string, h http.Header, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+d.addr+path, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = host
	for k, v := range h {
		r.Header[http.CanonicalHeaderKey(k)] = v
	}
	return r
}

// newClient returns a client without connections of other tests.
func newClient(t *testing.T) *http.Client {
	tr := &http.Transport{DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 2 * time.Minute, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func (d *dataServer) do(t *testing.T, r *http.Request) *http.Response {
	t.Helper()
	resp, err := newClient(t).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

func (d *dataServer) get(t *testing.T, host, path string, h http.Header) *http.Response {
	t.Helper()
	return d.do(t, d.request(t, "GET", host, path, h, nil))
}

func text(t *testing.T, r *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

var traffics = http.Header{"E2b-Traffic-Access-Token": {"traffic-" + testID}}

// TestDataPlaneNeedsItsToken: who may reach what, and what others get as an answer.
func TestDataPlaneNeedsItsToken(t *testing.T) {
	echo := inside(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "inside") })
	all := map[uint16]string{sandbox.GuestPort: echo, 3000: echo, InterpreterPort: echo}
	access := func(id string) http.Header { return http.Header{"X-Access-Token": {"access-" + id}} }
	pub := sandbox.Traffic{Public: true}
	const noTraffic = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
	const wrongTraffic = "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"
	asleep := sandbox.Traffic{Asleep: true}
	guest, web, kernel := host(sandbox.GuestPort), host(3000), host(InterpreterPort)
	tests := []struct {
		name         string
		public       bool // the operator's
		traffic      sandbox.Traffic
		wake         error
		method, host string
		path         string
		header       http.Header
		want         int
		msg          string
		woken        int64
	}{
		{"guest with its token", false, sandbox.Traffic{}, nil, "GET", guest, "/x", access(testID), 200, "inside", 1},
		{"guest with another sandbox's", false, sandbox.Traffic{}, nil, "GET", guest, "/x", access(otherID), 401, "missing or wrong X-Access-Token", 0},
		{"guest with the traffic token", false, sandbox.Traffic{}, nil, "GET", guest, "/x", traffics, 401, "missing or wrong X-Access-Token", 0},
		{"guest's health", false, sandbox.Traffic{}, nil, "GET", guest, "/health", nil, 200, "inside", 0},
		{"guest's health, with a token", false, sandbox.Traffic{}, nil, "GET", guest, "/health", access(testID), 200, "inside", 1},
		{"guest's health, paused", false, sandbox.Traffic{}, sandbox.ErrPaused, "GET", guest, "/health", nil, 502, "The sandbox was not found", 0},
		{"guest's init", false, sandbox.Traffic{}, nil, "POST", guest, "/init", access(testID), 404, "there is nothing at this path", 0},
		{"likewise, escaped", false, sandbox.Traffic{}, nil, "POST", guest, "/%69nit", access(testID), 404, "there is nothing at this path", 0},
		{"likewise, with an escaped slash", false, sandbox.Traffic{}, nil, "POST", guest, "/init%2f", access(testID), 404, "there is nothing at this path", 0},
		{"likewise, in a detour", false, sandbox.Traffic{}, nil, "POST", guest, "/files/..%2finit", access(testID), 404, "there is nothing at this path", 0},
		{"likewise, with two slashes", false, sandbox.Traffic{}, nil, "POST", guest, "//init", access(testID), 404, "there is nothing at this path", 0},
		{"a port with its token", false, sandbox.Traffic{}, nil, "GET", web, "/", traffics, 200, "inside", 1},
		{"a port without", false, sandbox.Traffic{}, nil, "GET", web, "/", nil, 403, noTraffic, 0},
		{"a port with the guest's token", false, sandbox.Traffic{}, nil, "GET", web, "/", access(testID), 403, noTraffic, 0},
		{"public, if both want it", true, pub, nil, "GET", web, "/", nil, 200, "inside", 1},
		{"public, for the creator alone", false, pub, nil, "GET", web, "/", nil, 403, noTraffic, 0},
		{"public, for the operator alone", true, sandbox.Traffic{}, nil, "GET", web, "/", nil, 403, noTraffic, 0},
		{"public, but the guest is not", true, pub, nil, "GET", guest, "/x", nil, 401, "missing or wrong X-Access-Token", 0},
		{"public, but the interpreter is not", true, pub, nil, "GET", kernel, "/execute", nil, 403, noTraffic, 0},
		{"interpreter with the access token", false, sandbox.Traffic{}, nil, "GET", kernel, "/", access(testID), 200, "inside", 1},
		{"closed port", false, sandbox.Traffic{}, nil, "GET", host(4000), "/", traffics, 502, "The sandbox is running but port is not open", 1},
		{"unknown sandbox", false, sandbox.Traffic{}, nil, "GET", "3000-iaaaaaaaaaaaaaaaaaaaa.boxes.example", "/", nil, 502, "The sandbox was not found", 0},
		{"ended meanwhile", false, sandbox.Traffic{}, sandbox.ErrNotFound, "GET", web, "/", traffics, 502, "The sandbox was not found", 1},
		{"paused", false, sandbox.Traffic{}, sandbox.ErrPaused, "GET", web, "/", traffics, 502, "The sandbox is paused and does not resume on traffic", 1},
		{"a port with another's token", false, sandbox.Traffic{}, nil, "GET", web, "/", http.Header{"E2b-Traffic-Access-Token": {"traffic-" + otherID}}, 403, wrongTraffic, 0},
		{"paused, without a token", false, asleep, sandbox.ErrPaused, "GET", web, "/", nil, 403, errAsleep.msg, 0},
		{"paused, with another's token", false, asleep, sandbox.ErrPaused, "GET", web, "/", http.Header{"E2b-Traffic-Access-Token": {"traffic-" + otherID}}, 403, errAsleep.msg, 0},
		{"paused, its guest without a token", false, asleep, sandbox.ErrPaused, "GET", guest, "/x", nil, 403, errAsleep.msg, 0},
		{"paused, with its token", false, asleep, nil, "GET", web, "/", traffics, 200, "inside", 1},
		{"changing its state", false, sandbox.Traffic{}, sandbox.ErrBusy, "GET", web, "/", traffics, 409, "The sandbox is changing its state; try again soon", 1},
		{"broken on the host", false, sandbox.Traffic{}, errors.New("open /var/lib/postern: permission denied"), "GET", web, "/", traffics, 502, "The sandbox did not answer as HTTP wants", 1},
		{"headers at an address", false, sandbox.Traffic{}, nil, "GET", "127.0.0.1:3000", "/", http.Header{idHeader: {testID}, portHeader: {"3000"}, "E2b-Traffic-Access-Token": {"traffic-" + testID}}, 200, "inside", 1},
		{"headers at a name that is not ours", false, sandbox.Traffic{}, nil, "GET", "evil.example", "/", http.Header{idHeader: {testID}, portHeader: {"3000"}, "E2b-Traffic-Access-Token": {"traffic-" + testID}}, 421, "this server was not told that it has the name in Host: start it with --host or --domain", 0},
		{"headers at another sandbox's name", false, sandbox.Traffic{}, nil, "GET", "3000-" + otherID + ".boxes.example", "/", http.Header{idHeader: {testID}, portHeader: {"3000"}, "E2b-Traffic-Access-Token": {"traffic-" + testID}}, 403, wrongTraffic, 0},
		{"headers with a bad id", false, sandbox.Traffic{}, nil, "GET", "127.0.0.1", "/", http.Header{idHeader: {"../../etc"}, portHeader: {"3000"}}, 400, idHeader + ": want the id of a sandbox", 0},
		{"headers with a bad port", false, sandbox.Traffic{}, nil, "GET", "127.0.0.1", "/", http.Header{idHeader: {testID}, portHeader: {"70000"}}, 400, portHeader + ": want a TCP port from 1 to 65535", 0},
		{"signed URL without an id", false, sandbox.Traffic{}, nil, "GET", "127.0.0.1", sign("/x", "read", "", "access-"+testID, 0), nil, 200, "inside", 1},
		{"signed URL, expired", false, sandbox.Traffic{}, nil, "GET", "127.0.0.1", sign("/x", "read", "", "access-"+testID, 1), nil, 401, "signature is already expired", 0},
		{"signed URL, expires later", false, sandbox.Traffic{}, nil, "GET", "127.0.0.1", sign("/x", "read", "root", "access-"+testID, time.Now().Unix()+60), nil, 200, "inside", 1},
		{"signed URL by nobody", false, sandbox.Traffic{}, nil, "GET", "127.0.0.1", sign("/x", "read", "", "access-iaaa", 0), nil, 502, "The sandbox was not found", 0},
		{"signed URL of one at another's name", false, sandbox.Traffic{}, nil, "GET", guest, sign("/x", "read", "", "access-"+otherID, 0), nil, 401, "invalid signature", 0},
		{"signed URL at a name that is not ours", false, sandbox.Traffic{}, nil, "GET", "evil.example", sign("/x", "read", "", "access-"+testID, 0), nil, 418, "the control API", 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveData(t, Config{Domain: "boxes.example", PublicPorts: tt.public}, all)
			d.boxes.traffic, d.boxes.wake = tt.traffic, tt.wake
			resp := d.do(t, d.request(t, tt.method, tt.host, tt.path, tt.header, nil))
			got := text(t, resp)
			if resp.StatusCode != tt.want {
				t.Errorf("got status %d, want %d: %s", resp.StatusCode, tt.want, got)
			}
			if tt.want != 200 && tt.want != 418 {
				var b struct {
					Message string
					Code    int
				}
				if err := json.Unmarshal([]byte(got), &b); err != nil || b.Code != tt.want {
					t.Errorf("got %s, want JSON with the code %d", got, tt.want)
				}
				got = b.Message
			}
			if strings.TrimSpace(got) != tt.msg {
				t.Errorf("got %q, want %q", got, tt.msg)
			}
			if got := d.boxes.woken.Load(); got != tt.woken {
				t.Errorf("woken %d times, want %d", got, tt.woken)
			}
		})
	}
}

// TestServicesGetNoCredentials: services get no secrets of the host, and the right
// Host header.
func TestServicesGetNoCredentials(t *testing.T) {
	seen := make(chan *http.Request, 1)
	addr := inside(t, func(_ http.ResponseWriter, r *http.Request) { seen <- r })
	tlsServer := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { seen <- r }))
	defer tlsServer.Close()
	d := serveData(t, Config{Domain: "boxes.example"}, map[uint16]string{3000: addr, 8443: tlsServer.Listener.Addr().String(), sandbox.GuestPort: addr})
	d.boxes.traffic = sandbox.Traffic{MaskHost: "localhost:${PORT}", HTTPSPorts: []uint16{8443}}
	h := http.Header{
		"X-Access-Token": {"access-" + testID}, "E2b-Traffic-Access-Token": {"traffic-" + testID}, "X-Api-Key": {"e2b_x"}, InboxKeyHeader: {"pib_x"},
		sandbox.ChannelHeader: {"forged"}, idHeader: {otherID}, portHeader: {"1"}, "Cookie": {"a=1; postern_session=x"},
		// What removes a header after it was set would open the guest to all.
		"Connection": {"keep-alive, " + sandbox.ChannelHeader}, "X-Mine": {"kept"},
	}
	tests := []struct {
		name, host, wantHost, channel string
		tls                           bool
	}{
		{"a port", host(3000), "localhost:3000", "", false},
		{"a port with TLS", host(8443), "localhost:8443", "", true},
		{"the guest", host(sandbox.GuestPort), host(sandbox.GuestPort), "channel-" + testID, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d.get(t, tt.host, "/p?q=%2f&q;=1", h)
			r := <-seen
			if r.Host != tt.wantHost || (r.TLS != nil) != tt.tls {
				t.Errorf("got Host %q, TLS %v, want %q, %v", r.Host, r.TLS != nil, tt.wantHost, tt.tls)
			}
			if got := r.Header.Get(sandbox.ChannelHeader); got != tt.channel {
				t.Errorf("got channel key %q, want %q", got, tt.channel)
			}
			for _, k := range secrets {
				if got := r.Header.Get(k); got != "" && k != sandbox.ChannelHeader {
					t.Errorf("%s went inside: %q", k, got)
				}
			}
			if got := r.Header.Get("Cookie") + " " + r.Header.Get("X-Mine"); got != "a=1 kept" {
				t.Errorf("got %q of what is the service's", got)
			}
			if got := r.Header.Get("X-Forwarded-For"); got != "" {
				t.Errorf("X-Forwarded-For tells the sandbox %q", got)
			}
		})
	}
}

// TestBodiesPassUnchanged: large bodies and their trailers pass in both directions.
func TestBodiesPassUnchanged(t *testing.T) {
	var fail atomic.Value
	addr := inside(t, func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			fail.Store(err.Error())
		}
		w.Header().Set("Trailer", "X-Sum")
		w.Header().Set("X-Got", strconv.FormatInt(n, 10)+" "+r.Trailer.Get("X-End"))
		buf := make([]byte, 1<<20)
		for range n >> 20 {
			_, _ = w.Write(buf)
		}
		w.Header().Set("X-Sum", "done")
	})
	d := serveData(t, Config{}, map[uint16]string{3000: addr})
	const size = 64 << 20
	r := d.request(t, "POST", host(3000), "/", traffics, io.LimitReader(rand.Reader, size))
	r.Trailer = http.Header{"X-End": {"ended"}}
	resp := d.do(t, r)
	if got, want := resp.Header.Get("X-Got"), strconv.Itoa(size)+" ended"; got != want {
		t.Errorf("inside got %q, want %q (%v)", got, want, fail.Load())
	}
	if n, err := io.Copy(io.Discard, resp.Body); n != size || err != nil {
		t.Errorf("got %d bytes, %v, want %d", n, err, size)
	}
	if got := resp.Trailer.Get("X-Sum"); got != "done" {
		t.Errorf("got trailer %q, want done", got)
	}
}

// TestStreamsAreNotBuffered: an event arrives when it is sent, over HTTP/1.1 and
// HTTP/2.
func TestStreamsAreNotBuffered(t *testing.T) {
	next := make(chan struct{})
	left := make(chan struct{}, 2)
	addr := inside(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_ = http.NewResponseController(w).Flush()
		for {
			select {
			case <-next:
				fmt.Fprint(w, "data: x\n\n")
				_ = http.NewResponseController(w).Flush()
			case <-r.Context().Done():
				left <- struct{}{}
				return
			}
		}
	})
	d := serveData(t, Config{}, map[uint16]string{3000: addr})
	for _, proto := range []string{"HTTP/1.1", "HTTP/2.0"} {
		t.Run(proto, func(t *testing.T) {
			c := newClient(t)
			if proto == "HTTP/2.0" {
				c = h2c(t)
			}
			resp, err := c.Do(d.request(t, "GET", host(3000), "/", traffics, nil))
			if err != nil {
				t.Fatal(err)
			}
			if resp.Proto != proto {
				t.Errorf("got %s, want %s", resp.Proto, proto)
			}
			for range 3 {
				next <- struct{}{}
				b := make([]byte, 9)
				if _, err := io.ReadFull(resp.Body, b); err != nil || string(b) != "data: x\n\n" {
					t.Fatalf("got %q, %v", b, err)
				}
			}
			resp.Body.Close()
			select {
			case <-left:
			case <-time.After(time.Minute):
				t.Error("the service does not learn that its client has left")
			}
		})
	}
}

// h2c returns a client of HTTP/2 without TLS.
func h2c(t *testing.T) *http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 2 * time.Minute}
}

// TestGRPCPasses: services that only speak HTTP/2 are reached with it, with the
// status in the trailer.
func TestGRPCPasses(t *testing.T) {
	addr := inside(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Proto", r.Proto)
		w.Header().Set("Trailer", "Grpc-Status")
		fmt.Fprint(w, "x")
		w.Header().Set("Grpc-Status", "0")
	})
	d := serveData(t, Config{}, map[uint16]string{3000: addr})
	h := traffics.Clone()
	h.Set("Content-Type", "application/grpc+proto")
	resp, err := h2c(t).Do(d.request(t, "POST", host(3000), "/a.B/C", h, strings.NewReader("x")))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	_ = text(t, resp)
	if got := resp.Header.Get("X-Proto") + " " + resp.Trailer.Get("Grpc-Status"); got != "HTTP/2.0 0" {
		t.Errorf("got %q, want HTTP/2.0 0", got)
	}
}

// TestExpectContinuePasses: "100 Continue" comes from the service, and not for a
// request that this server refuses.
func TestExpectContinuePasses(t *testing.T) {
	addr := inside(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/no" {
			w.WriteHeader(http.StatusExpectationFailed)
			return
		}
		if r.URL.Path == "/twice" {
			w.WriteHeader(http.StatusContinue)
			w.WriteHeader(http.StatusContinue)
		}
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n)
	})
	d := serveData(t, Config{}, map[uint16]string{3000: addr})
	tests := []struct{ name, path, token, want string }{
		{"taken", "/", "traffic-" + testID, "HTTP/1.1 100 Continue"},
		{"taken twice", "/twice", "traffic-" + testID, "HTTP/1.1 100 Continue"},
		{"the service refuses", "/no", "traffic-" + testID, "HTTP/1.1 417 Expectation Failed"},
		{"we refuse", "/", "wrong", "HTTP/1.1 403 Forbidden"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, in := d.open(t)
			fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: %s\r\nE2b-Traffic-Access-Token: %s\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n", tt.path, host(3000), tt.token)
			line, err := in.ReadString('\n')
			if err != nil || strings.TrimSpace(line) != tt.want {
				t.Fatalf("got %q, %v, want %q", line, err, tt.want)
			}
			if !strings.Contains(tt.want, "100") {
				return
			}
			_, _ = in.ReadString('\n')
			fmt.Fprint(c, "12345")
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if got := text(t, resp); resp.StatusCode != http.StatusOK || got != "5" {
				t.Errorf("got %s, %q, want 5 after a single 100 Continue", resp.Status, got)
			}
		})
	}
}

func (d *dataServer) open(t *testing.T) (net.Conn, *bufio.Reader) {
	t.Helper()
	c, err := net.Dial("tcp", d.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(2 * time.Minute))
	return c, bufio.NewReader(c)
}

// upgrader accepts any upgrade and then echoes.
func upgrader(t *testing.T) string {
	return raw(t, func(c net.Conn) {
		r := bufio.NewReader(c)
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		up := req.Header.Get("Upgrade")
		if up == "" {
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno")
			return
		}
		fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", up)
		_, _ = io.Copy(c, r)
	})
}

func TestUpgradesPassExceptToTheGuest(t *testing.T) {
	addr := upgrader(t)
	d := serveData(t, Config{}, map[uint16]string{3000: addr, sandbox.GuestPort: addr})
	tests := []struct {
		name, upgrade string
		port          int
		want          int
	}{
		{"websocket", "websocket", 3000, 101},
		{"any other", "my-protocol/2", 3000, 101},
		// Over such a connection requests would go in that nobody has looked at.
		{"HTTP/2 in disguise", "h2c", 3000, 200},
		{"the guest", "websocket", sandbox.GuestPort, 200},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, in := d.open(t)
			fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nX-Access-Token: access-%s\r\nE2b-Traffic-Access-Token: traffic-%s\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", host(tt.port), testID, testID, tt.upgrade)
			resp, err := http.ReadResponse(in, nil)
			if err != nil || resp.StatusCode != tt.want {
				t.Fatalf("got %+v, %v, want %d", resp, err, tt.want)
			}
			if tt.want != 101 {
				return
			}
			for _, msg := range []string{"hello", strings.Repeat("x", 1<<20)} {
				go func() { _, _ = io.WriteString(c, msg) }()
				got := make([]byte, len(msg))
				if _, err := io.ReadFull(in, got); err != nil || string(got) != msg {
					t.Fatalf("echo of %d bytes: %v", len(msg), err)
				}
			}
			// The connection must not outlive the sandbox.
			d.boxes.kill()
			if n, err := in.Read(make([]byte, 1)); err == nil {
				t.Errorf("got %d bytes after the sandbox has ended", n)
			}
		})
	}
}

// TestHostileResponsesAreBounded: a sandbox's response costs bounded memory and
// time, and cannot pose as the server's.
func TestHostileResponsesAreBounded(t *testing.T) {
	say := func(text string) func(net.Conn) {
		return func(c net.Conn) {
			_, _ = http.ReadRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, text)
		}
	}
	endless := func(first, more string) func(net.Conn) {
		return func(c net.Conn) {
			_, _ = http.ReadRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, first)
			for {
				if _, err := io.WriteString(c, more); err != nil {
					return
				}
			}
		}
	}
	const failed = "The sandbox did not answer as HTTP wants"
	tests := []struct {
		name  string
		f     func(net.Conn)
		want  int
		text  string
		short bool // the body ends early
	}{
		{"nothing", func(net.Conn) {}, 502, failed, false},
		{"no HTTP", say("SSH-2.0-OpenSSH\r\n"), 502, failed, false},
		{"endless header", endless("HTTP/1.1 200 OK\r\n", "X-A: "+strings.Repeat("a", 4096)+"\r\n"), 502, failed, false},
		{"one endless header line", endless("HTTP/1.1 200 OK\r\nX-A: ", strings.Repeat("a", 4096)), 502, failed, false},
		{"endless interim answers", endless("", "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"), 502, failed, false},
		{"both lengths", say("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"), 200, "a", false},
		{"two lengths", say("HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"), 502, failed, false},
		{"a negative length", say("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nabcd"), 502, failed, false},
		{"less than its length", say("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabcd"), 200, "", true},
		{"more than its length", say("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"), 200, "abc", false},
		{"a bad chunk", say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), 200, "", true},
		{"an upgrade that nobody asked for", say("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"), 502, failed, false},
		{"a folded header", say("HTTP/1.1 200 OK\r\nX-A: a\r\n b\r\nContent-Length: 1\r\n\r\nx"), 200, "x", false},
		{"a header with a NUL", say("HTTP/1.1 200 OK\r\nX-A: a\x00b\r\nContent-Length: 1\r\n\r\nx"), 502, failed, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveData(t, Config{}, map[uint16]string{3000: raw(t, tt.f)})
			resp, err := newClient(t).Do(d.request(t, "GET", host(3000), "/", traffics, nil))
			if err != nil {
				if !tt.short { // an answer that breaks off at once may be none
					t.Fatal(err)
				}
				return
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			if resp.StatusCode != tt.want || (err != nil) != tt.short || !strings.Contains(string(b), tt.text) {
				t.Errorf("got %d %q, %v, want %d %q, cut short: %v", resp.StatusCode, b, err, tt.want, tt.text, tt.short)
			}
		})
	}
}

// TestSlowServiceHoldsOnlyItsCaller: a service that never answers blocks only its
// own caller, and is released with it.
func TestSlowServiceHoldsOnlyItsCaller(t *testing.T) {
	came, gone := make(chan struct{}), make(chan struct{})
	addr := raw(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 1))
		close(came)
		_, _ = io.Copy(io.Discard, c)
		close(gone)
	})
	d := serveData(t, Config{}, map[uint16]string{3000: addr})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		<-came
		cancel() // its caller gives up
	}()
	resp, err := newClient(t).Do(d.request(t, "GET", host(3000), "/", traffics, nil).WithContext(ctx))
	if err == nil {
		resp.Body.Close()
		t.Fatalf("got %s", resp.Status)
	}
	select {
	case <-gone:
	case <-time.After(time.Minute):
		t.Error("the connection inside outlives its caller")
	}
}

// TestConcurrentRequestsAreBounded: the requests to a sandbox are bounded, and
// requests without a token do not use up the share of those with one.
func TestConcurrentRequestsAreBounded(t *testing.T) {
	stop := make(chan struct{})
	addr := inside(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).Flush()
		select {
		case <-stop:
		case <-r.Context().Done():
		}
	})
	d := serveData(t, Config{PublicPorts: true, MaxConnections: 3}, map[uint16]string{3000: addr})
	d.boxes.traffic.Public = true
	var open []*http.Response
	status := func(h http.Header) int {
		resp := d.get(t, host(3000), "/", h)
		open = append(open, resp)
		return resp.StatusCode
	}
	for i, want := range []int{200, 200, 200, 429} {
		if got := status(nil); got != want {
			t.Errorf("stranger %d: got %d, want %d", i, got, want)
		}
	}
	for i, want := range []int{200, 200, 200, 429} {
		if got := status(traffics); got != want {
			t.Errorf("owner %d: got %d, want %d", i, got, want)
		}
	}
	if got := open[3].Header.Get("Retry-After"); got != "1" {
		t.Errorf("got Retry-After %q, want 1", got)
	}
	close(stop)
	for _, r := range open {
		_, _ = io.Copy(io.Discard, r.Body)
	}
	deadline := time.Now().Add(time.Minute)
	for status(nil) != 200 {
		if time.Now().After(deadline) {
			t.Fatal("who has left still counts")
		}
	}
}

// TestSmuggledRequestsAreRefused: an attacker's bytes are one request or none.
func TestSmuggledRequestsAreRefused(t *testing.T) {
	var got atomic.Int64
	addr := inside(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		got.Add(1)
	})
	head := "Host: " + host(3000) + "\r\nE2b-Traffic-Access-Token: traffic-" + testID + "\r\nConnection: close\r\n"
	evil := "GET /evil HTTP/1.1\r\nHost: x\r\n\r\n"
	tests := []struct {
		name, wire string
		want       []string // status
		inside     int64
	}{
		{"both lengths", "POST / HTTP/1.1\r\n" + head + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + evil, []string{"400"}, 0},
		{"two lengths", "POST / HTTP/1.1\r\n" + head + "Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde", []string{"400"}, 0},
		{"an odd coding", "POST / HTTP/1.1\r\n" + head + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", []string{"400"}, 0},
		{"an underscore", "POST / HTTP/1.1\r\n" + head + "Transfer_Encoding: chunked\r\nContent-Length: 4\r\n\r\nabcd", []string{"400"}, 0},
		{"an old version", "POST / HTTP/1.0\r\n" + head + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", []string{"400"}, 0},
		{"a space before the colon", "POST / HTTP/1.1\r\n" + head + "Content-Length : 4\r\n\r\nabcd", []string{"400"}, 0},
		{"two Hosts", "GET / HTTP/1.1\r\nHost: x\r\n" + head + "\r\n", []string{"400"}, 0},
		{"no Host", "GET / HTTP/1.1\r\n\r\n", []string{"400"}, 0},
		{"a tunnel", "CONNECT " + host(3000) + ":80 HTTP/1.1\r\n" + head + "\r\n", []string{"405"}, 0},
		{"all of the server", "OPTIONS * HTTP/1.1\r\n" + head + "\r\n", []string{"200"}, 0},
		{"the whole URL", "GET http://" + host(3000) + "/ HTTP/1.1\r\nHost: evil.example\r\nE2b-Traffic-Access-Token: traffic-" + testID + "\r\nConnection: close\r\n\r\n", []string{"200"}, 1},
		{"a line feed in the path", "GET /a\nb HTTP/1.1\r\n" + head + "\r\n", []string{"400"}, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got.Store(0)
			d := serveData(t, Config{}, map[uint16]string{3000: addr})
			c, in := d.open(t)
			_, _ = io.WriteString(c, tt.wire)
			all, _ := io.ReadAll(in)
			first, _, _ := bytes.Cut(all, []byte("\r\n"))
			if f := strings.Fields(string(first)); len(f) < 2 || f[1] != tt.want[0] {
				t.Errorf("got %q, want %v", all, tt.want)
			}
			if bytes.Contains(all[min(len(all), 1):], []byte("HTTP/1.1 200 OK\r\n")) && len(tt.want) > 1 {
				t.Errorf("the second request was taken: %q", all)
			}
			if got.Load() != tt.inside {
				t.Errorf("%d requests went inside, want %d", got.Load(), tt.inside)
			}
		})
	}
}

// TestOtherOriginsMayRead: pages may use the SDK in a browser, but no cookie grants
// access.
func TestOtherOriginsMayRead(t *testing.T) {
	addr := inside(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", "https://console.example")
		w.Header().Set("Access-Control-Allow-Credentials", "true")
	})
	d := serveData(t, Config{Domain: "boxes.example"}, map[uint16]string{3000: addr, sandbox.GuestPort: addr})
	pre := func(headers string) http.Header {
		return http.Header{"Origin": {"https://app.example"}, "Access-Control-Request-Method": {"POST"}, "Access-Control-Request-Headers": {headers}}
	}
	tests := []struct {
		name, method, host   string
		header               http.Header
		want                 int
		origin, creds, allow string
	}{
		{"asks for the guest", "OPTIONS", host(sandbox.GuestPort), pre("x-access-token,content-type"), 204, "*", "", "x-access-token,content-type"},
		{"asks for headers", "OPTIONS", "sandbox.boxes.example", pre("content-type,e2b-sandbox-id"), 204, "*", "", "content-type,e2b-sandbox-id"},
		{"asks for the API", "OPTIONS", "api.boxes.example", pre("x-api-key"), 418, "", "", ""},
		{"asks elsewhere", "OPTIONS", "evil.example", pre("e2b-sandbox-id"), 418, "", "", ""},
		{"the guest", "GET", host(sandbox.GuestPort), http.Header{"X-Access-Token": {"access-" + testID}}, 200, "*", "", ""},
		{"the guest, refused", "GET", host(sandbox.GuestPort), nil, 401, "*", "", ""},
		{"a port has its own rules", "GET", host(3000), traffics, 200, "https://console.example", "true", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			resp := d.do(t, d.request(t, tt.method, tt.host, "/", tt.header, nil))
			h := resp.Header
			if resp.StatusCode != tt.want || h.Get("Access-Control-Allow-Origin") != tt.origin ||
				h.Get("Access-Control-Allow-Credentials") != tt.creds || h.Get("Access-Control-Allow-Headers") != tt.allow {
				t.Errorf("got %d %v, want %d %q %q %q", resp.StatusCode, h, tt.want, tt.origin, tt.creds, tt.allow)
			}
		})
	}
}

// TestBrowsersGetAPage: a person's browser gets a page without scripts.
func TestBrowsersGetAPage(t *testing.T) {
	const firefox = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
	d := serveData(t, Config{Domain: "boxes.example"}, nil)
	tests := []struct {
		name, method string
		header       http.Header
		want         bool
	}{
		{"a navigation", "GET", http.Header{"Sec-Fetch-Mode": {"navigate"}, "User-Agent": {firefox}}, true},
		{"an older browser", "GET", http.Header{"User-Agent": {firefox}, "Accept": {"text/html,application/xhtml+xml;q=0.9"}}, true},
		{"a browser that says nothing", "GET", http.Header{"User-Agent": {firefox}}, true},
		{"a form", "POST", http.Header{"User-Agent": {firefox}, "Accept": {"text/html"}}, true},
		{"a script", "GET", http.Header{"User-Agent": {firefox}, "Sec-Fetch-Mode": {"cors"}, "Accept": {"text/html"}}, false},
		{"an older script", "GET", http.Header{"User-Agent": {firefox}, "X-Requested-With": {"XMLHttpRequest"}}, false},
		{"a script that wants JSON", "GET", http.Header{"User-Agent": {firefox}, "Accept": {"application/json, */*"}}, false},
		{"the SDK", "GET", http.Header{"User-Agent": {"e2b-js-sdk/2.51.0"}, "Accept": {"*/*"}}, false},
		{"curl that takes HTML", "GET", http.Header{"User-Agent": {"curl/8.5.0"}, "Accept": {"text/html"}}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := traffics.Clone()
			maps.Copy(h, tt.header)
			resp := d.do(t, d.request(t, tt.method, host(3000), "/<script>alert(1)</script>?\"'", h, nil))
			got := text(t, resp)
			page := strings.HasPrefix(resp.Header.Get("Content-Type"), "text/html")
			if page != tt.want || resp.StatusCode != 502 {
				t.Errorf("got %d %s %s", resp.StatusCode, resp.Header.Get("Content-Type"), got)
			}
			if strings.Contains(got, "<script") || strings.Contains(got, "alert") {
				t.Errorf("the request is in the answer: %s", got)
			}
			if tt.want && (!strings.Contains(got, "port is not open") || !strings.HasPrefix(resp.Header.Get("Content-Security-Policy"), "default-src 'none'; style-src 'sha256-")) {
				t.Errorf("got %v %s", resp.Header, got)
			}
		})
	}
}

// TestSearchIsBounded: anybody can cause a search for the signer of a URL, so it is
// rate limited.
func TestSearchIsBounded(t *testing.T) {
	addr := inside(t, func(http.ResponseWriter, *http.Request) {})
	l := DefaultLimits
	l.Unknown = Rate{PerSecond: 0.001, Burst: 3}
	d := serveData(t, Config{Limits: &l}, map[uint16]string{sandbox.GuestPort: addr})
	status := func(path string) int { return d.get(t, "127.0.0.1", path, nil).StatusCode }
	good, bad := sign("/x", "read", "", "access-"+testID, 0), sign("/x", "read", "", "nobody's", 0)
	for range 10 {
		if got := status(good); got != 200 {
			t.Fatalf("got %d for a good one", got)
		}
	}
	for i, want := range []int{502, 502, 502, 429} {
		if got := status(bad); got != want {
			t.Errorf("bad one %d: got %d, want %d", i, got, want)
		}
	}
	if got := status(sign("/"+strings.Repeat("x", maxSigned), "read", "", "access-"+testID, 0)); got == 200 {
		t.Errorf("a path that Linux does not know was looked up")
	}
}

func BenchmarkSignedFor(b *testing.B) {
	s := &Server{}
	s.boxes = &manySandboxes{}
	r := httptest.NewRequest("GET", sign("/home/user/x", "read", "", "nobody's", 0), nil)
	for b.Loop() {
		if s.signedFor(r) != "" {
			b.Fatal("found")
		}
	}
}

// manySandboxes are 200 sandboxes.
type manySandboxes struct{ fakeSandboxes }

func (*manySandboxes) Live() []string {
	ids := make([]string, 200)
	for i := range ids {
		sum := sha256.Sum256([]byte{byte(i)})
		ids[i] = fmt.Sprintf("%x", sum)
	}
	return ids
}

// FuzzReadSignature: a signed URL is either refused or yields exactly one line to
// sign.
func FuzzReadSignature(f *testing.F) {
	f.Add("GET", "path=/x&signature=v1_x")
	f.Add("POST", sign("/x", "write", "root", "tok", 5))
	f.Add("GET", "path=%00&signature=&signature_expiration=-1")
	f.Fuzz(func(t *testing.T, method, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		sig, msg := readSignature(method, q)
		if msg == "" && (len(sig.head) > maxSigned || sig.sum == "") {
			t.Errorf("%q was taken", query)
		}
		if sig.check("a token that nobody has", time.Now()) == "" {
			t.Errorf("%q opens a sandbox", query)
		}
	})
}

// BenchmarkProxy measures the proxy itself: the service is on loopback.
func BenchmarkProxy(b *testing.B) {
	const size = 64 << 20
	block := make([]byte, 1<<20)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/up":
			_, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, r.Body, make([]byte, 256<<10))
		case "/down":
			w.Header().Set("Content-Length", strconv.Itoa(size))
			for range size / len(block) {
				_, _ = w.Write(block)
			}
		}
	}))
	defer srv.Close()
	s := &Server{log: slog.New(slog.DiscardHandler)}
	boxes := &fakeSandboxes{ports: map[uint16]string{3000: srv.Listener.Addr().String()}}
	s.openData(boxes, &http.Transport{DialContext: boxes.dial, DisableCompression: true, MaxIdleConnsPerHost: 32, WriteBufferSize: 128 << 10, ReadBufferSize: 128 << 10})
	front := httptest.NewServer(http.HandlerFunc(s.ServeData))
	defer front.Close()
	for _, way := range []struct{ name, url string }{{"direct", srv.URL}, {"proxied", front.URL}} {
		do := func(b *testing.B, method, path string, body io.Reader, n int64) {
			r, err := http.NewRequestWithContext(b.Context(), method, way.url+path, body)
			if err != nil {
				b.Fatal(err)
			}
			r.ContentLength, r.Host, r.Header = n, host(3000), traffics.Clone()
			resp, err := http.DefaultClient.Do(r)
			if err != nil || resp.StatusCode != http.StatusOK {
				b.Fatal(resp, err)
			}
			defer resp.Body.Close()
			if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, resp.Body, block); err != nil {
				b.Fatal(err)
			}
		}
		b.Run(way.name+"/call", func(b *testing.B) {
			for b.Loop() {
				do(b, "GET", "/", nil, 0)
			}
		})
		b.Run(way.name+"/up", func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				do(b, "POST", "/up", io.LimitReader(zeros{}, size), size)
			}
		})
		b.Run(way.name+"/down", func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				do(b, "GET", "/down", nil, 0)
			}
		})
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }
