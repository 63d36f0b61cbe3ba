package egress

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
)

// A socksServer is a SOCKS5 server (RFC 1928) with one user (RFC 1929), or none. It
// connects where the world says that an address is.
type socksServer struct {
	w              *world
	user, password string

	mu    sync.Mutex
	asked []string // destinations, as they were written: "4 93.184.216.34:7"
	wrong int      // logins that were refused
}

func (s *socksServer) requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.asked...)
}

func (s *socksServer) serve(c net.Conn) {
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	b := make([]byte, 512)
	read := func(n int) []byte {
		if _, err := io.ReadFull(c, b[:n]); err != nil {
			return make([]byte, n)
		}
		return append([]byte(nil), b[:n]...)
	}
	head := read(2)
	methods := read(int(head[1]))
	want := byte(0)
	if s.user != "" {
		want = 2
	}
	if head[0] != 5 || !strings.Contains(string(methods), string([]byte{want})) {
		c.Write([]byte{5, 0xff})
		return
	}
	c.Write([]byte{5, want})
	if want == 2 {
		n := read(2)
		user := string(read(int(n[1])))
		password := string(read(int(read(1)[0])))
		if user != s.user || password != s.password {
			s.mu.Lock()
			s.wrong++
			s.mu.Unlock()
			c.Write([]byte{1, 1})
			return
		}
		c.Write([]byte{1, 0})
	}
	req := read(4)
	var host string
	switch req[3] {
	case 1:
		host = netip.AddrFrom4([4]byte(read(4))).String()
	case 3:
		host = string(read(int(read(1)[0])))
	default:
		return
	}
	to := fmt.Sprintf("%s:%d", host, binary.BigEndian.Uint16(read(2)))
	s.w.mu.Lock()
	real, ok := s.w.hosts[to]
	s.w.mu.Unlock()
	s.mu.Lock()
	s.asked = append(s.asked, fmt.Sprintf("%d %s", req[3], to))
	s.mu.Unlock()
	if !ok {
		c.Write([]byte{5, 5, 0, 1, 0, 0, 0, 0, 0, 0})
		return
	}
	up, err := net.Dial("tcp", real)
	if err != nil {
		return
	}
	defer up.Close()
	c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
	go func() {
		io.Copy(up, c)
		up.(*net.TCPConn).CloseWrite()
	}()
	io.Copy(c, up)
}

// proxyWorld returns a world with a SOCKS5 server at proxy.test, 198.51.44.4:1080.
func proxyWorld(t *testing.T, user, password string, change func(*Config)) (*world, *socksServer, *ProxyKey) {
	t.Helper()
	key, err := NewProxyKey(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, func(c *Config) {
		c.Ceiling.Internet, c.ProxyKey = true, key
		if change != nil {
			change(c)
		}
	})
	s := &socksServer{w: w, user: user, password: password}
	w.at("198.51.44.4:1080", s.serve)
	w.says("proxy.test", "198.51.44.4")
	return w, s, key
}

func roundTrip(t *testing.T, c net.Conn) {
	t.Helper()
	if _, err := io.WriteString(c, "hello"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello" {
		t.Fatalf("got %q, %v", b, err)
	}
}

func TestConnectionsOutsideGoThroughTheProxy(t *testing.T) {
	for _, tc := range []struct{ name, user, password string }{{"without login", "", ""}, {"with login", "agent", "s3cret pass"}} {
		t.Run(tc.name, func(t *testing.T) {
			w, s, key := proxyWorld(t, tc.user, tc.password, nil)
			w.at(site+":7", echo)
			p := &policy.Proxy{Address: "proxy.test:1080", Username: tc.user}
			if tc.password != "" {
				if err := key.Seal("prj_1", p, auth.Secret(tc.password)); err != nil {
					t.Fatal(err)
				}
			}
			b := w.box("i1", policy.Egress{Internet: true, Proxy: p})
			roundTrip(t, b.mustDial(site+":7"))
			// By the address that policy judged, never by a name that the proxy could
			// resolve to another place.
			if got, want := fmt.Sprint(s.requests()), "[1 "+site+":7]"; got != want {
				t.Errorf("the proxy was asked for %s, want %s", got, want)
			}
			if dialed, _ := w.outside(); fmt.Sprint(dialed) != "[198.51.44.4:1080]" {
				t.Errorf("dialed %v, want the proxy alone", dialed)
			}
			// Policy decides first.
			if c, err := b.dial("169.254.169.254:80"); err == nil {
				c.Close()
				t.Error("connected to a private address through the proxy")
			}
			if n := len(s.requests()); n != 1 {
				t.Errorf("the proxy was asked %d times, want once", n)
			}
		})
	}
}

func TestLoginsOfProxiesNameTheSandbox(t *testing.T) {
	w, s, key := proxyWorld(t, "box-i1", "pass-i1", nil)
	w.at(site+":7", echo)
	p := &policy.Proxy{Address: "proxy.test:1080", Username: "box-{{sandboxID}}"}
	if err := key.Seal("prj_1", p, "pass-{{sandboxID}}"); err != nil {
		t.Fatal(err)
	}
	roundTrip(t, w.box("i1", policy.Egress{Internet: true, Proxy: p}).mustDial(site+":7"))
	if len(s.requests()) != 1 {
		t.Errorf("the proxy connected %d times, want once", len(s.requests()))
	}
	if c, err := w.box("i2", policy.Egress{Internet: true, Proxy: p}).dial(site + ":7"); err == nil {
		c.Close()
		t.Error("another sandbox has the same login")
	}
}

func TestProxiesFailClosed(t *testing.T) {
	for _, tc := range []struct {
		name   string
		proxy  func(*world, *ProxyKey) *policy.Proxy
		dialed string // what may have been dialled
	}{
		{"unreachable", func(*world, *ProxyKey) *policy.Proxy { return &policy.Proxy{Address: "198.51.44.5:1080"} }, "[198.51.44.5:1080]"},
		{"a name without address", func(*world, *ProxyKey) *policy.Proxy { return &policy.Proxy{Address: "gone.test:1080"} }, "[]"},
		{"no login", func(*world, *ProxyKey) *policy.Proxy { return &policy.Proxy{Address: "proxy.test:1080"} }, "[198.51.44.4:1080]"},
		{"a wrong password", func(_ *world, k *ProxyKey) *policy.Proxy {
			p := &policy.Proxy{Address: "proxy.test:1080", Username: "agent"}
			k.Seal("prj_1", p, "guess")
			return p
		}, "[198.51.44.4:1080]"},
		{"a password of another project", func(_ *world, k *ProxyKey) *policy.Proxy {
			p := &policy.Proxy{Address: "proxy.test:1080", Username: "agent"}
			k.Seal("prj_2", p, "right")
			return p
		}, "[]"},
		{"a password moved to another address", func(_ *world, k *ProxyKey) *policy.Proxy {
			p := &policy.Proxy{Address: "198.51.44.9:1080", Username: "agent"}
			k.Seal("prj_1", p, "right")
			p.Address = "proxy.test:1080"
			return p
		}, "[]"},
		{"a private address", func(w *world, _ *ProxyKey) *policy.Proxy {
			w.standsFor("10.1.1.1:1080", listen(w))
			return &policy.Proxy{Address: "10.1.1.1:1080"}
		}, "[]"},
		{"a name that turned to a private address", func(w *world, _ *ProxyKey) *policy.Proxy {
			w.says("turned.test", "169.254.169.254")
			return &policy.Proxy{Address: "turned.test:1080"}
		}, "[]"},
		{"no SOCKS", func(w *world, _ *ProxyKey) *policy.Proxy {
			w.at("198.51.44.6:80", func(c net.Conn) { io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n"); c.Close() })
			return &policy.Proxy{Address: "198.51.44.6:80"}
		}, "[198.51.44.6:80]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, s, key := proxyWorld(t, "agent", "right", nil)
			w.at(site+":7", echo)
			b := w.box("i1", policy.Egress{Internet: true, Proxy: tc.proxy(w, key)})
			if c, err := b.dial(site + ":7"); err == nil {
				c.Close()
				t.Fatal("connected without the proxy")
			}
			if dialed, _ := w.outside(); fmt.Sprint(dialed) != tc.dialed {
				t.Errorf("dialed %v, want %v", dialed, tc.dialed)
			}
			if n := len(s.requests()); n != 0 {
				t.Errorf("the proxy connected %d times", n)
			}
		})
	}
}

func listen(w *world) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.tb.Fatal(err)
	}
	w.tb.Cleanup(func() { l.Close() })
	return l
}

func TestAnotherProxyEndsConnections(t *testing.T) {
	w, s, _ := proxyWorld(t, "", "", nil)
	w.at(site+":7", echo)
	b := w.box("i1", policy.Egress{Internet: true})
	c := b.mustDial(site + ":7")
	roundTrip(t, c)
	with := policy.Egress{Internet: true, Proxy: &policy.Proxy{Address: "proxy.test:1080"}}
	if err := w.wall.Update(context.Background(), w.principal("i1", ""), with); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("a connection that left without the proxy goes on")
	}
	c = b.mustDial(site + ":7")
	roundTrip(t, c)
	if len(s.requests()) != 1 {
		t.Errorf("the proxy was asked for %v, want one connection", s.requests())
	}
	if err := w.wall.Update(context.Background(), w.principal("i1", ""), with); err != nil { // the same
		t.Fatal(err)
	}
	roundTrip(t, c)
}

func TestProxiesAreCheckedAgainstTheCeiling(t *testing.T) {
	for _, tc := range []struct {
		name, address string
		ceiling       policy.Ceiling
		want          string // part of the error, or empty
	}{
		{"public", "198.51.44.4:1080", policy.Ceiling{Internet: true}, ""},
		{"by name", "proxy.test:1080", policy.Ceiling{Internet: true}, ""},
		{"closed", "198.51.44.4:1080", policy.Ceiling{}, "the project denies outbound connections"},
		{"named in the ceiling", "proxy.test:1080", policy.Ceiling{Allow: []string{"proxy.test:1080"}}, ""},
		{"named in the ceiling at other ports", "proxy.test:1080", policy.Ceiling{Allow: []string{"proxy.test"}}, "--egress-allow=proxy.test:1080"},
		{"not named in the ceiling", "proxy.test:1080", policy.Ceiling{Allow: []string{"other.test"}}, "does not name proxy.test"},
		{"private", "10.1.1.1:1080", policy.Ceiling{Internet: true}, "private"},
		{"private and named", "10.1.1.1:1080", policy.Ceiling{Internet: true, Allow: []string{"10.1.1.1"}}, ""},
		{"metadata", "169.254.169.254:80", policy.Ceiling{Internet: true}, "never reachable"},
		{"this machine", "127.0.0.1:1080", policy.Ceiling{Internet: true}, "never reachable"},
		{"a private name", "proxy.internal:1080", policy.Ceiling{Internet: true}, "a private name"},
		{"no such name", "gone.test:1080", policy.Ceiling{Internet: true}, "cannot be resolved"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, _, _ := proxyWorld(t, "", "", func(c *Config) { c.Ceiling = tc.ceiling })
			err := w.wall.CheckProxy(context.Background(), &policy.Proxy{Address: tc.address})
			if tc.want == "" && err != nil || tc.want != "" && (!errors.Is(err, ErrProxy) || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("got error %v, want %q", err, tc.want)
			}
		})
	}
}
