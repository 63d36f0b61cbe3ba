package egress

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"postern/internal/auth"
	"postern/internal/inspect"
	"postern/internal/policy"
	"postern/internal/sandbox"
)

// A world is a Wall with an outside: servers on loopback in place of public
// addresses, and a DNS server.
type world struct {
	tb   testing.TB
	wall *Wall

	project string // of its sandboxes

	mu     sync.Mutex
	events []Event
	dialed []string
	asked  []string                // names that reached the DNS server
	zone   map[string][]netip.Addr // what the DNS server says
	hosts  map[string]string       // public address and port → real one
	mail   chan conversation
}

// A conversation is one call of Config.SMTP.
type conversation struct {
	who  auth.Principal
	dst  netip.AddrPort
	seen string
	conn net.Conn
	tls  *tls.Config
	over chan struct{}
}

func newWorld(tb testing.TB, change func(*Config)) *world {
	tb.Helper()
	w := &world{tb: tb, project: "prj_1", zone: map[string][]netip.Addr{}, hosts: map[string]string{}, mail: make(chan conversation, 10)}
	authority, err := inspect.NewAuthority(make([]byte, 32))
	if err != nil {
		tb.Fatal(err)
	}
	cfg := Config{
		Leaf:     authority.Leaf,
		Resolver: w.serveDNS(),
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			w.mu.Lock()
			w.dialed = append(w.dialed, address)
			to, ok := w.hosts[address]
			w.mu.Unlock()
			if !ok {
				return nil, fmt.Errorf("dial %s: nothing there", address)
			}
			return (&net.Dialer{}).DialContext(ctx, network, to)
		},
		Record: func(_ context.Context, _ auth.Principal, e Event) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.events = append(w.events, e)
			return nil
		},
		SMTP: func(_ context.Context, who auth.Principal, dst netip.AddrPort, conn net.Conn, seen []byte, startTLS *tls.Config) {
			c := conversation{who, dst, string(seen), conn, startTLS, make(chan struct{})}
			w.mail <- c
			<-c.over
		},
		// This machine may have much else to do; what a limit does is tested with
		// one that is short.
		Limits: Limits{SniffTimeout: 30 * time.Second, DialTimeout: time.Minute},
	}
	if change != nil {
		change(&cfg)
	}
	out := io.Discard
	if t, ok := tb.(*testing.T); ok {
		out = t.Output()
	}
	wall, err := New(slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelInfo})), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	w.wall = wall
	return w
}

func (w *world) standsFor(public string, l net.Listener) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hosts[public] = l.Addr().String()
}

// says sets what the DNS server answers for a name.
func (w *world) says(name string, addrs ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.zone[name] = nil
	for _, a := range addrs {
		w.zone[name] = append(w.zone[name], netip.MustParseAddr(a))
	}
}

// outside returns the dialled addresses and the resolved names.
func (w *world) outside() (dialed, asked []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.dialed), slices.Clone(w.asked)
}

// at starts a server on loopback for a public address.
func (w *world) at(public string, serve func(net.Conn)) {
	w.tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.tb.Fatal(err)
	}
	w.tb.Cleanup(func() { l.Close() })
	w.standsFor(public, l)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
}

// web starts a web server that answers with the Host header it got.
func (w *world) web(public string) {
	s := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(rw, "hello %s", r.Host)
	}))
	w.tb.Cleanup(s.Close)
	w.standsFor(public, s.Listener)
}

func echo(c net.Conn) {
	defer c.Close()
	io.Copy(c, c)
}

func (w *world) serveDNS() netip.AddrPort {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		w.tb.Fatal(err)
	}
	w.tb.Cleanup(func() { pc.Close() })
	go func() {
		b := make([]byte, 4096)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			r, _, drop := question(b[:n])
			if drop {
				continue
			}
			q := r.question
			name := strings.TrimSuffix(strings.ToLower(q.Name.String()), ".")
			w.mu.Lock()
			w.asked = append(w.asked, name)
			addrs, ok := w.zone[name]
			w.mu.Unlock()
			code := dnsmessage.RCodeSuccess
			if !ok {
				code = dnsmessage.RCodeNameError
			}
			if q.Type != dnsmessage.TypeA {
				addrs = nil
			}
			pc.WriteTo(reply(r, answer{code: code, addrs: addrs}), from)
		}
	}()
	return netip.MustParseAddrPort(pc.LocalAddr().String())
}

func (w *world) record() []Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.events)
}

// wait returns the first event of a kind for which ok holds.
func (w *world) wait(what string, ok func(Event) bool) Event {
	w.tb.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		for _, e := range w.record() {
			if ok(e) {
				return e
			}
		}
	}
	w.tb.Fatalf("no event: %s; got %+v", what, w.record())
	return Event{}
}

// A box plays a sandbox: it has a stack on the other end of the link.
type box struct {
	w     *world
	id    string
	stack *stack.Stack
	link  *link
	file  *os.File
}

// principal returns a sandbox; inbox may be empty.
func (w *world) principal(id, inbox string) auth.Principal {
	return auth.Principal{Kind: auth.Sandbox, ID: id, Project: w.project, Inbox: inbox}
}

// bare attaches a sandbox without a stack, for packets made by hand.
func (w *world) bare(id, inbox string, e policy.Egress) *box {
	w.tb.Helper()
	f, err := w.wall.Attach(context.Background(), w.principal(id, inbox), e)
	if err != nil {
		w.tb.Fatal(err)
	}
	w.tb.Cleanup(func() { w.wall.Detach(id); f.Close() })
	return &box{w: w, id: id, file: f}
}

func (w *world) box(id string, e policy.Egress) *box {
	w.tb.Helper()
	return w.boxFor(id, "", e)
}

func (w *world) boxFor(id, inbox string, e policy.Egress) *box {
	w.tb.Helper()
	return w.boxOn(id, w.bare(id, inbox, e).file)
}

// boxOn plays a sandbox on its end of a link.
func (w *world) boxOn(id string, file *os.File) *box {
	w.tb.Helper()
	w.tb.Cleanup(func() { w.wall.Detach(id); file.Close() })
	b := &box{w: w, id: id, file: file}
	fd, err := unix.FcntlInt(b.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		w.tb.Fatal(err)
	}
	unix.SetNonblock(fd, true)
	if b.link, err = newLink(os.NewFile(uintptr(fd), "box"), func([]byte) bool { return true }); err != nil {
		w.tb.Fatal(err)
	}
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})
	sack := tcpip.TCPSACKEnabled(true)
	s.SetTransportProtocolOption(tcp.ProtocolNumber, &sack)
	if e := s.CreateNIC(nic, b.link); e != nil {
		w.tb.Fatal(e)
	}
	s.AddProtocolAddress(nic, tcpip.ProtocolAddress{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: tcpip.AddressWithPrefix{Address: tcpip.AddrFrom4(sandbox.LinkAddress.As4()), PrefixLen: sandbox.LinkNetwork.Bits()}}, stack.AddressProperties{})
	s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, Gateway: tcpip.AddrFrom4(sandbox.LinkGateway.As4()), NIC: nic}})
	b.stack = s
	w.tb.Cleanup(func() { b.link.stop(); s.Destroy() })
	return b
}

func full(s string) tcpip.FullAddress {
	a := netip.MustParseAddrPort(s)
	return tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFrom4(a.Addr().As4()), Port: a.Port()}
}

func (b *box) dial(to string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := gonet.DialContextTCP(ctx, b.stack, full(to), ipv4.ProtocolNumber)
	if err != nil {
		return nil, err
	}
	c.SetDeadline(time.Now().Add(time.Minute))
	return c, nil
}

func (b *box) mustDial(to string) net.Conn {
	b.w.tb.Helper()
	c, err := b.dial(to)
	if err != nil {
		b.w.tb.Fatalf("dial %s: %v", to, err)
	}
	b.w.tb.Cleanup(func() { c.Close() })
	return c
}

func query(name string, typ dnsmessage.Type) []byte {
	return reply2(dnsmessage.Header{ID: 7, RecursionDesired: true}, dnsmessage.Question{Name: dnsmessage.MustNewName(name), Type: typ, Class: dnsmessage.ClassINET})
}

func reply2(h dnsmessage.Header, q dnsmessage.Question) []byte {
	m := dnsmessage.Message{Header: h, Questions: []dnsmessage.Question{q}}
	b, err := m.Pack()
	if err != nil {
		panic(err)
	}
	return b
}

// ask asks a DNS server at any address over UDP.
func (b *box) ask(server, name string, typ dnsmessage.Type) (dnsmessage.Message, error) {
	var m dnsmessage.Message
	to := full(server)
	c, err := gonet.DialUDP(b.stack, nil, &to, ipv4.ProtocolNumber)
	if err != nil {
		return m, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := c.Write(query(name, typ)); err != nil {
		return m, err
	}
	buf := make([]byte, 1500)
	n, err := c.Read(buf)
	if err != nil {
		return m, err
	}
	return m, m.Unpack(buf[:n])
}

func addrsOf(m dnsmessage.Message) []string {
	var out []string
	for _, r := range m.Answers {
		if a, ok := r.Body.(*dnsmessage.AResource); ok {
			out = append(out, netip.AddrFrom4(a.A).String())
		}
	}
	return out
}

const site = "93.184.216.34" // a public address

var named = policy.Egress{AllowOut: []string{"example.com", "*.allowed.test", "example.com:22", "example.com:53", "example.com:7007", "example.com:8021", "example.com:8025", "*.allowed.test:8025", "*.allowed.test:2526"}, DenyOut: []string{"0.0.0.0/0"}}

func open(c *Config) { c.Ceiling.Internet = true }

func TestRefusesAtOnceAndRecords(t *testing.T) {
	for _, tc := range []struct {
		name, to string
		ceiling  policy.Ceiling
		egress   policy.Egress
		reason   string
	}{
		{"closed project", site + ":443", policy.Ceiling{}, policy.Egress{Internet: true}, "the project denies outbound connections"},
		{"metadata", "169.254.169.254:80", policy.Ceiling{Internet: true}, policy.Egress{Internet: true}, "169.254.169.254 is link-local (cloud metadata) and never reachable"},
		{"metadata under a wide entry", "169.254.169.254:80", policy.Ceiling{Allow: []string{"169.254.0.0/16", "0.0.0.0/0"}}, policy.Egress{Internet: true}, "cloud metadata"},
		{"private", "192.168.1.1:22", policy.Ceiling{Internet: true}, policy.Egress{Internet: true}, "private and never reachable"},
		{"another sandbox", "10.0.0.6:49983", policy.Ceiling{Internet: true}, policy.Egress{Internet: true}, "private"},
		{"carrier NAT", "100.64.1.1:80", policy.Ceiling{Internet: true}, policy.Egress{Internet: true}, "carrier NAT"},
		{"benchmark", "198.18.0.1:80", policy.Ceiling{Internet: true}, policy.Egress{Internet: true}, "benchmarks"},
		{"gateway, other port", "10.0.0.1:3000", policy.Ceiling{Internet: true}, policy.Egress{Internet: true}, "10.0.0.1 has no service at this port"},
		{"gateway, no inner server", "10.0.0.1:80", policy.Ceiling{Internet: true}, policy.Egress{Internet: true}, "10.0.0.1 has no service at this port"},
		{"denied by the sandbox", site + ":80", policy.Ceiling{Internet: true}, policy.Egress{Internet: true, DenyOut: []string{"93.184.0.0/16"}}, "denyOut of the sandbox names"},
		{"not asked for", site + ":80", policy.Ceiling{Internet: true}, policy.Egress{}, "has no Internet access"},
		{"own address", "198.51.45.7:3000", policy.Ceiling{Internet: true}, policy.Egress{Internet: true}, "an address of the machine"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, func(c *Config) {
				c.Ceiling = tc.ceiling
				c.Own = []netip.Addr{netip.MustParseAddr("198.51.45.7")}
			})
			b := w.box("i1", tc.egress)
			c, err := b.dial(tc.to)
			if err == nil {
				c.Close()
				t.Fatal("connected")
			}
			if !strings.Contains(err.Error(), "refused") { // at once: what is dropped ends in a time-out
				t.Errorf("got %v, want refused", err)
			}
			es := w.record()
			if len(es) != 1 || es[0].Kind != Denied || es[0].Dst.String() != tc.to || !strings.Contains(es[0].Reason, tc.reason) || es[0].Count != 1 {
				t.Errorf("got %+v, want one denial of %s: %s", es, tc.to, tc.reason)
			}
			if dialed, _ := w.outside(); len(dialed) > 0 {
				t.Errorf("dialed %v", dialed)
			}
		})
	}
}

// TestOwnPublicURLsAreReached: what the server serves everybody at its public address it
// serves sandboxes as well, and nothing else at that address.
func TestOwnPublicURLsAreReached(t *testing.T) {
	own := netip.MustParseAddr("198.51.45.7")
	w := newWorld(t, func(c *Config) {
		open(c)
		c.Own, c.OwnPorts = []netip.Addr{own, netip.MustParseAddr("192.168.7.7")}, []uint16{443}
	})
	w.at(own.String()+":443", echo)
	w.at(own.String()+":3000", echo)
	w.says("boxes.test", own.String())
	b := w.box("i1", policy.Egress{Internet: true})
	b.mustDial(own.String() + ":443").Close()
	if m, err := b.ask("10.0.0.1:53", "boxes.test.", dnsmessage.TypeA); err != nil || !slices.Equal(addrsOf(m), []string{own.String()}) {
		t.Errorf("its name is %v, %v, want %v", addrsOf(m), err, own)
	}
	for _, to := range []string{own.String() + ":3000", own.String() + ":22", "192.168.7.7:443", "127.0.0.1:443"} {
		if c, err := b.dial(to); err == nil {
			c.Close()
			t.Errorf("connected to %s", to)
		}
	}
	if c, err := w.box("i2", policy.Egress{}).dial(own.String() + ":443"); err == nil {
		c.Close()
		t.Error("connected without access to the Internet")
	}
}

func TestConnectsWhereAllowed(t *testing.T) {
	w := newWorld(t, open)
	w.at(site+":7", echo)
	b := w.box("i1", policy.Egress{Internet: true})
	c := b.mustDial(site + ":7")
	want := strings.Repeat("the quick brown fox ", 100_000)
	go func() {
		io.WriteString(c, want)
		c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	got, err := io.ReadAll(c)
	if err != nil || string(got) != want {
		t.Fatalf("got %d bytes, %v; want %d", len(got), err, len(want))
	}
	e := w.wait("connected", func(e Event) bool { return e.Kind == Connected })
	if e.Dst.String() != site+":7" || e.Dialed != e.Dst {
		t.Errorf("got %+v", e)
	}
	// What is refused outside is refused inside.
	if _, err := b.dial(site + ":9"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("got %v, want refused", err)
	}
}

// TestConnectsOnceRecorded: an allowed connection is on the record before it is made,
// and is not made if it cannot be recorded.
func TestConnectsOnceRecorded(t *testing.T) {
	var w *world
	var broken atomic.Bool
	w = newWorld(t, func(c *Config) {
		open(c)
		record := c.Record
		c.Record = func(ctx context.Context, who auth.Principal, e Event) error {
			if dialed, _ := w.outside(); e.Kind == Connected && len(dialed) > 0 {
				t.Errorf("dialed %v before the record has %v", dialed, e.Dst)
			}
			if broken.Load() {
				return errors.New("the disk is full")
			}
			return record(ctx, who, e)
		}
	})
	w.at(site+":7", echo)
	b := w.box("i1", policy.Egress{Internet: true})
	broken.Store(true)
	for range 2 {
		if _, err := b.dial(site + ":7"); err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("got %v, want refused", err)
		}
	}
	if dialed, _ := w.outside(); len(dialed) > 0 {
		t.Errorf("dialed %v, which is not on the record", dialed)
	}
	broken.Store(false)
	b.mustDial(site + ":7").Close()
	b.mustDial(site + ":7").Close() // on the record already
	if es := w.record(); len(es) != 1 || es[0].Kind != Connected {
		t.Errorf("got %+v, want one connection", es)
	}
}

func TestResetIsPassedOn(t *testing.T) {
	w := newWorld(t, open)
	w.at(site+":7", func(c net.Conn) {
		io.WriteString(c, "half of")
		time.Sleep(50 * time.Millisecond)
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	})
	c := w.box("i1", policy.Egress{Internet: true}).mustDial(site + ":7")
	if b, err := io.ReadAll(c); err == nil {
		t.Errorf("got %q and a clean end, want an error", b)
	}
}

func get(c net.Conn, request string) (string, error) {
	if _, err := io.WriteString(c, request); err != nil {
		return "", err
	}
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return "", err
	}
	b, err := io.ReadAll(r.Body)
	return fmt.Sprintf("%d %s", r.StatusCode, b), err
}

func TestHTTPByName(t *testing.T) {
	for _, tc := range []struct{ name, to, request, want, recorded string }{
		{"allowed", site + ":80", "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n", "200 hello example.com", ""},
		{"upper case, port and final dot", site + ":80", "GET / HTTP/1.1\r\nHost: EXAMPLE.com.:80\r\nConnection: close\r\n\r\n", "200 hello EXAMPLE.com.:80", ""},
		{"the address is not the name's: ours is dialled", "8.8.4.4:80", "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n", "200 hello example.com", ""},
		{"below a wildcard", "8.8.4.4:80", "GET / HTTP/1.1\r\nHost: a.b.allowed.test\r\nConnection: close\r\n\r\n", "200 hello a.b.allowed.test", ""},
		{"the wildcard's own name", site + ":80", "GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n", "403 ", "allowed.test"},
		{"another host at the allowed address", site + ":80", "GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n", "403 ", "evil.test"},
		{"allowed name as a prefix", site + ":80", "GET / HTTP/1.1\r\nHost: example.com.evil.test\r\n\r\n", "403 ", "example.com.evil.test"},
		{"two hosts", site + ":80", "GET / HTTP/1.1\r\nHost: example.com\r\nHost: evil.test\r\n\r\n", "403 ", "example.com"},
		{"absolute target", site + ":80", "GET http://evil.test/ HTTP/1.1\r\nHost: example.com\r\n\r\n", "403 ", "evil.test"},
		{"user in the target", site + ":80", "GET http://example.com@evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n", "403 ", "evil.test"},
		{"space before the colon", site + ":80", "GET / HTTP/1.1\r\nHost : example.com\r\n\r\n", "403 ", ""},
		{"CONNECT", site + ":80", "CONNECT evil.test:25 HTTP/1.1\r\nHost: example.com\r\n\r\n", "403 ", "evil.test"},
		{"HTTP/2 without TLS", site + ":80", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "403 ", ""},
		{"decimal address", site + ":80", "GET / HTTP/1.1\r\nHost: 2852039166\r\n\r\n", "403 ", "2852039166"},
		{"octal address", site + ":80", "GET / HTTP/1.1\r\nHost: 0251.0376.0251.0376\r\n\r\n", "403 ", "0251.0376.0251.0376"},
		{"hexadecimal address", site + ":80", "GET / HTTP/1.1\r\nHost: 0xa9fea9fe\r\n\r\n", "403 ", "0xa9fea9fe"},
		{"mapped address", site + ":80", "GET / HTTP/1.1\r\nHost: [::ffff:169.254.169.254]\r\n\r\n", "403 ", "[::ffff:169.254.169.254]"},
		{"a name that resolves to metadata", site + ":80", "GET / HTTP/1.1\r\nHost: rebind.allowed.test\r\n\r\n", "403 ", "rebind.allowed.test"},
		{"the inner name", site + ":80", "GET / HTTP/1.1\r\nHost: postern.internal\r\n\r\n", "403 ", "postern.internal"},
		{"control bytes", site + ":80", "GET / HTTP/1.1\r\nHost: \x1b[31mexample.com\r\n\r\n", "403 ", ""},
		{"bytes that a terminal obeys", site + ":80", "GET / HTTP/1.1\r\nHost: \x9b31mexample.com\r\n\r\n", "403 ", "?31mexample.com"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, open)
			w.web(site + ":80")
			w.web("93.184.216.35:80")
			w.says("example.com", site)
			w.says("a.b.allowed.test", "93.184.216.35")
			w.says("rebind.allowed.test", "169.254.169.254", "127.0.0.1")
			got, err := get(w.box("i1", named).mustDial(tc.to), tc.request)
			if err != nil || !strings.HasPrefix(got, tc.want) {
				t.Errorf("got %q, %v; want %q", got, err, tc.want)
			}
			if strings.HasPrefix(tc.want, "200") {
				return
			}
			es := w.record()
			if len(es) != 1 || es[0].Kind != Denied || es[0].Name != tc.recorded || es[0].Dst.String() != tc.to {
				t.Errorf("got %+v, want one denial of %q at %s", es, tc.recorded, tc.to)
			}
			if dialed, _ := w.outside(); len(dialed) != 0 {
				t.Errorf("dialed %v", dialed)
			}
		})
	}
}

func TestTLSByName(t *testing.T) {
	w := newWorld(t, open)
	srv := httptest.NewTLSServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, "secret") }))
	t.Cleanup(srv.Close)
	w.standsFor(site+":443", srv.Listener)
	w.says("example.com", site)
	b := w.box("i1", named)
	for _, tc := range []struct{ name, to, sni, fail string }{
		{"allowed", site + ":443", "example.com", ""},
		{"upper case", site + ":443", "Example.COM", ""},
		{"another address: the name's is dialled", "1.1.1.1:443", "example.com", ""},
		{"mismatch: allowed address, denied name", site + ":443", "evil.test", "access denied"},
		{"no name", site + ":443", "", "access denied"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := tls.Client(b.mustDial(tc.to), &tls.Config{ServerName: tc.sni, InsecureSkipVerify: true})
			err := c.Handshake()
			if tc.fail == "" {
				if err != nil {
					t.Fatal(err)
				}
				if got, err := get(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); got != "200 secret" {
					t.Errorf("got %q, %v", got, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.fail) {
				t.Errorf("got %v, want %s", err, tc.fail)
			}
			w.wait("denied", func(e Event) bool { return e.Kind == Denied && e.Name == tc.sni && e.Dst.String() == tc.to })
		})
	}
}

// TestNamesLearnedFromDNS: a program that sends nothing on the web's ports is
// refused, unless our resolver gave it the address.
func TestNamesLearnedFromDNS(t *testing.T) {
	w := newWorld(t, func(c *Config) { open(c); c.Limits.SniffTimeout = 100 * time.Millisecond })
	banner := func(c net.Conn) { io.WriteString(c, "SSH-2.0-x\r\n"); echo(c) }
	w.at(site+":22", banner)
	w.at(site+":443", banner)
	w.says("example.com", site)
	b := w.box("i1", named)
	other := w.box("i2", named)
	if _, err := b.dial(site + ":22"); err == nil {
		t.Fatal("connected before the name was asked for")
	}
	m, err := b.ask("10.0.0.1:53", "Example.com.", dnsmessage.TypeA)
	if err != nil || m.RCode != 0 || !slices.Equal(addrsOf(m), []string{site}) {
		t.Fatalf("got %v %v", m, err)
	}
	for _, port := range []string{":22", ":443"} {
		c := b.mustDial(site + port)
		if l, err := bufio.NewReader(c).ReadString('\n'); err != nil || l != "SSH-2.0-x\r\n" {
			t.Errorf("%s: got %q, %v", port, l, err)
		}
	}
	if _, err := b.dial("93.184.216.35:22"); err == nil {
		t.Error("connected to an address of no name")
	}
	if _, err := other.dial(site + ":22"); err == nil {
		t.Error("another sandbox used what this one learned")
	}
}

func TestDNS(t *testing.T) {
	w := newWorld(t, open)
	w.says("example.com", site)
	w.says("evil.test", site)
	w.says("rebind.allowed.test", "10.1.2.3")
	w.says("mixed.allowed.test", "10.1.2.3", site)
	b := w.box("i1", named)
	for _, tc := range []struct {
		name, server, ask string
		typ               dnsmessage.Type
		code              dnsmessage.RCode
		want              string
		recorded          string // part of the reason; empty: nothing
	}{
		{"allowed", "10.0.0.1:53", "example.com.", dnsmessage.TypeA, 0, site, ""},
		{"ourselves", "10.0.0.1:53", "postern.internal.", dnsmessage.TypeA, 0, "10.0.0.1", ""},
		{"ourselves, mixed case", "10.0.0.1:53", "PoStErN.Internal.", dnsmessage.TypeA, 0, "10.0.0.1", ""},
		{"a server elsewhere is us", "8.8.8.8:53", "example.com.", dnsmessage.TypeA, 0, site, ""},
		{"AAAA of an allowed name", "10.0.0.1:53", "example.com.", dnsmessage.TypeAAAA, 0, "", ""},
		{"denied", "10.0.0.1:53", "evil.test.", dnsmessage.TypeA, 3, "", "allowOut does not name evil.test"},
		{"denied AAAA", "9.9.9.9:53", "evil2.test.", dnsmessage.TypeAAAA, 3, "", "allowOut does not name evil2.test"},
		{"tunnel in the name", "10.0.0.1:53", "c2VjcmV0.d29yZHM.tunnel.evil.test.", dnsmessage.TypeA, 3, "", "does not name c2VjcmV0"},
		{"TXT of an allowed name", "10.0.0.1:53", "example.com.", dnsmessage.TypeTXT, 5, "", "TypeTXT"},
		{"MX of an allowed name", "10.0.0.1:53", "mx.allowed.test.", dnsmessage.TypeMX, 5, "", "TypeMX"},
		{"reverse", "10.0.0.1:53", "34.216.184.93.in-addr.arpa.", dnsmessage.TypePTR, 5, "", "TypePTR"},
		{"rebinding", "10.0.0.1:53", "rebind.allowed.test.", dnsmessage.TypeA, 3, "", "10.1.2.3 is private"},
		{"private ones left out", "10.0.0.1:53", "mixed.allowed.test.", dnsmessage.TypeA, 0, site, ""},
		{"private name", "10.0.0.1:53", "metadata.google.internal.", dnsmessage.TypeA, 3, "", "a private name"},
		{"no domain", "10.0.0.1:53", "db.", dnsmessage.TypeA, 3, "", "without a domain"},
		{"allowed, not there", "10.0.0.1:53", "nx.allowed.test.", dnsmessage.TypeA, 3, "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := len(w.record())
			m, err := b.ask(tc.server, tc.ask, tc.typ)
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(addrsOf(m), " "); m.RCode != tc.code || got != tc.want {
				t.Errorf("got %v %q, want %v %q", m.RCode, got, tc.code, tc.want)
			}
			es := w.record()[before:]
			if tc.recorded == "" {
				if len(es) != 0 {
					t.Errorf("recorded %+v", es)
				}
				return
			}
			if len(es) != 1 || !strings.Contains(strings.ToLower(es[0].Reason), strings.ToLower(tc.recorded)) || es[0].Name != tc.ask || es[0].Dst.String() != tc.server || es[0].Proto != "dns" {
				t.Errorf("got %+v, want %q", es, tc.recorded)
			}
		})
	}
	_, asked := w.outside()
	for _, n := range asked {
		if !strings.HasSuffix(n, "allowed.test") && n != "example.com" {
			t.Errorf("a denied name was asked for outside: %s", n)
		}
	}
}

func TestDNSOverTCP(t *testing.T) {
	w := newWorld(t, nil) // a closed project
	b := w.box("i1", policy.Egress{Internet: true})
	c := b.mustDial("10.0.0.1:53")
	for _, name := range []string{"postern.internal.", "evil.test."} {
		q := query(name, dnsmessage.TypeA)
		c.Write(append([]byte{0, byte(len(q))}, q...))
		var l [2]byte
		if _, err := io.ReadFull(c, l[:]); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, int(l[0])<<8|int(l[1]))
		io.ReadFull(c, buf)
		var m dnsmessage.Message
		if err := m.Unpack(buf); err != nil {
			t.Fatal(err)
		}
		if (m.RCode == 0) != (name == "postern.internal.") {
			t.Errorf("%s: got %v", name, m.RCode)
		}
	}
	if e := w.wait("denied", func(e Event) bool { return e.Kind == Denied }); e.Dst.String() != "10.0.0.1:53" || e.Name != "evil.test." {
		t.Errorf("got %+v", e)
	}
	if _, asked := w.outside(); len(asked) > 0 {
		t.Errorf("asked outside for %v", asked)
	}
}

func TestOtherUDPAndICMP(t *testing.T) {
	w := newWorld(t, open)
	b := w.box("i1", policy.Egress{Internet: true})
	for _, to := range []string{"8.8.8.8:123", site + ":443", "10.0.0.1:5353"} {
		a := full(to)
		c, err := gonet.DialUDP(b.stack, nil, &a, ipv4.ProtocolNumber)
		if err != nil {
			t.Fatal(err)
		}
		// The error of a datagram is told with the next.
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if _, err = c.Write([]byte("hello")); err != nil {
				break
			}
		}
		if err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("%s: got %v, want refused", to, err)
		}
		c.Close()
		if e := w.wait("udp "+to, func(e Event) bool { return e.Dst.String() == to }); e.Kind != Denied || e.Proto != "udp" {
			t.Errorf("got %+v", e)
		}
	}
	raw := w.bare("i2", "", policy.Egress{Internet: true})
	ping := packet(sandbox.LinkAddress, netip.MustParseAddr("8.8.8.8"), 1, []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0})
	raw.file.Write(ping)
	if e := w.wait("icmp", func(e Event) bool { return e.Proto == "icmp" }); e.Dst.String() != "8.8.8.8:0" {
		t.Errorf("got %+v", e)
	}
	buf := make([]byte, 1500)
	n, err := raw.file.Read(buf)
	if err != nil || n < 28 || header.ICMPv4(buf[20:n]).Type() != header.ICMPv4DstUnreachable {
		t.Errorf("got %x, %v; want unreachable, not an echo", buf[:n], err)
	}
}

// packet makes an IPv4 packet.
func packet(src, dst netip.Addr, proto byte, body []byte) []byte {
	p := make([]byte, 20+len(body))
	header.IPv4(p).Encode(&header.IPv4Fields{TotalLength: uint16(len(p)), TTL: 64, Protocol: proto, SrcAddr: tcpip.AddrFrom4(src.As4()), DstAddr: tcpip.AddrFrom4(dst.As4())})
	header.IPv4(p).SetChecksum(^header.IPv4(p).CalculateChecksum())
	copy(p[20:], body)
	return p
}

func syn(src, dst netip.Addr, sport, dport uint16) []byte {
	t := make([]byte, 20)
	header.TCP(t).Encode(&header.TCPFields{SrcPort: sport, DstPort: dport, SeqNum: 1, DataOffset: 20, Flags: header.TCPFlagSyn, WindowSize: 1000})
	return packet(src, dst, 6, t)
}

func TestHandMadePackets(t *testing.T) {
	public := netip.MustParseAddr(site)
	fragment := syn(sandbox.LinkAddress, public, 1, 80)
	fragment[6] = 0x20 // more fragments
	six := append([]byte{0x60, 0, 0, 0, 0, 20, 6, 64}, make([]byte, 16)...)
	dst6 := netip.MustParseAddr("2606:4700::1111").As16()
	six = append(six, dst6[:]...)
	six = append(six, syn(sandbox.LinkAddress, public, 1, 443)[20:]...)
	for _, tc := range []struct {
		name   string
		p      []byte
		dst    string
		reason string
	}{
		{"spoofed source", syn(netip.MustParseAddr("8.8.8.8"), public, 1, 80), site + ":0", "source address 8.8.8.8"},
		{"the gateway's source", syn(sandbox.LinkGateway, public, 1, 80), site + ":0", "source address 10.0.0.1"},
		{"fragment", fragment, site + ":0", "fragments"},
		{"multicast", syn(sandbox.LinkAddress, netip.MustParseAddr("224.0.0.1"), 1, 80), "224.0.0.1:80", "is not an address that accepts connections"},
		{"broadcast", syn(sandbox.LinkAddress, netip.MustParseAddr("255.255.255.255"), 1, 80), "255.255.255.255:80", "not an address"},
		{"our loopback", syn(sandbox.LinkAddress, netip.MustParseAddr("127.0.0.1"), 1, 3000), "127.0.0.1:3000", "not an address"},
		{"itself", syn(sandbox.LinkAddress, sandbox.LinkAddress, 1, 80), "10.0.0.2:80", "not an address"},
		{"GRE", packet(sandbox.LinkAddress, public, 47, []byte("tunnel")), site + ":0", "only TCP"},
		{"SCTP", packet(sandbox.LinkAddress, public, 132, make([]byte, 40)), site + ":0", "only TCP"},
		{"DNS by multicast", packet(sandbox.LinkAddress, netip.MustParseAddr("224.0.0.251"), 17, []byte{0, 1, 0, 53, 0, 8, 0, 0}), "224.0.0.251:53", "only TCP"},
		{"IPv6", six, "[2606:4700::1111]:443", "IPv6"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, open)
			w.at(site+":80", echo)
			b := w.bare("i1", "", policy.Egress{Internet: true})
			b.file.Write(tc.p)
			e := w.wait(tc.name, func(e Event) bool { return e.Kind == Denied })
			if e.Dst.String() != tc.dst || !strings.Contains(e.Reason, tc.reason) {
				t.Errorf("got %+v, want %s: %s", e, tc.dst, tc.reason)
			}
			if dialed, _ := w.outside(); len(dialed) > 0 {
				t.Errorf("dialed %v", dialed)
			}
		})
	}
}

// TestRandomPackets: random and mutated packets must not end this process or the
// link.
func TestRandomPackets(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		open(c)
		c.Limits.Records = 5
		c.Limits.Window = time.Hour
		c.Limits.DialTimeout = time.Millisecond
	})
	b := w.bare("i1", "", policy.Egress{Internet: true})
	r := rand.New(rand.NewPCG(1, 2))
	public := netip.MustParseAddr(site)
	good := [][]byte{
		syn(sandbox.LinkAddress, public, 1, 80), syn(sandbox.LinkAddress, sandbox.LinkGateway, 1, 53), syn(sandbox.LinkAddress, public, 9, 25), packet(sandbox.LinkAddress, sandbox.LinkGateway, 17, append([]byte{0, 1, 0, 53, 0, 50, 0, 0}, query("a.test.", 1)...)),
		packet(sandbox.LinkAddress, public, 1, make([]byte, 8)), append([]byte{0x60}, make([]byte, 79)...),
	}
	go func() { // empty the link, as a sandbox does
		buf := make([]byte, 1<<16)
		for {
			if _, err := b.file.Read(buf); err != nil {
				return
			}
		}
	}()
	for i := range 20_000 {
		var p []byte
		switch i % 4 {
		case 0:
			p = make([]byte, r.IntN(200))
			for j := range p {
				p[j] = byte(r.Uint32())
			}
		case 1:
			p = make([]byte, 65_000+r.IntN(5000))
			p[0] = byte(r.Uint32())
		default:
			p = slices.Clone(good[r.IntN(len(good))])
			for range 1 + r.IntN(4) {
				p[r.IntN(len(p))] = byte(r.Uint32())
			}
			if r.IntN(3) == 0 {
				p = p[:r.IntN(len(p))]
			}
			if len(p) >= 20 && r.IntN(2) == 0 {
				copy(p[12:16], []byte{10, 0, 0, 2})
				p[0], p[6], p[7] = 0x45, 0, 0
				p[2], p[3] = byte(len(p)>>8), byte(len(p))
			}
		}
		if _, err := unix.SendmsgN(int(b.file.Fd()), p, nil, nil, 0); err != nil {
			t.Fatalf("packet %d: %v", i, err)
		}
	}
	// The link still works.
	b.file.Write(syn(sandbox.LinkAddress, netip.MustParseAddr("169.254.169.254"), 77, 80))
	w.wall.Detach("i1")
	es := w.record()
	if len(es) == 0 || len(es) > 5+5+1 {
		t.Errorf("got %d events, want at most 5 refusals, 5 connections and a summary", len(es))
	}
	if last := es[len(es)-1]; last.Kind != Repeated || last.Count < 1000 {
		t.Errorf("got %+v, want a summary", last)
	}
}

func TestFlood(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Limits.Records = 10
		c.Limits.Window = time.Hour
		c.Limits.NewConnections = 50
		c.Limits.Questions = 50
	})
	b := w.box("i1", policy.Egress{Internet: true})
	neighbour := w.box("i2", policy.Egress{Internet: true})
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 50 {
				if c, err := b.dial(fmt.Sprintf("1.2.%d.%d:80", g, i)); err == nil {
					c.Close()
					t.Error("connected")
				}
			}
		})
	}
	// A neighbour does not notice.
	if _, err := neighbour.dial("1.1.1.1:80"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("neighbour: %v", err)
	}
	wg.Wait()
	w.wall.Detach("i1")
	var denied, counted int
	for _, e := range w.record() {
		switch {
		case e.Dst.Addr().String() == "1.1.1.1":
		case e.Kind == Denied:
			denied += e.Count
		case e.Kind == Repeated:
			counted += e.Count
			if !strings.Contains(e.Reason, "to addresses 1.2.") {
				t.Errorf("the summary does not say where to: %q", e.Reason)
			}
		}
	}
	// A SYN that is sent again, where the answer took a second, may count twice.
	if denied != 10 || denied+counted < 200 || denied+counted > 400 {
		t.Errorf("got %d recorded and %d counted, want 10 and 190", denied, counted)
	}
}

// TestConnectionsDoNotCrowdOutRefusals: a program cannot hide a refused attempt
// behind allowed ones.
func TestConnectionsDoNotCrowdOutRefusals(t *testing.T) {
	w := newWorld(t, func(c *Config) { open(c); c.Limits.Records = 3 })
	b := w.box("i1", policy.Egress{Internet: true})
	for i := range 6 {
		to := fmt.Sprintf("93.184.216.%d:7", i)
		w.at(to, echo)
		b.mustDial(to).Close()
	}
	b.dial("169.254.169.254:80")
	w.wait("the refusal", func(e Event) bool { return e.Kind == Denied })
}

func TestRepeatsAreCounted(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.Window = 300 * time.Millisecond })
	b := w.box("i1", policy.Egress{})
	for range 20 {
		b.dial(site + ":80")
	}
	// Where that took longer than a window there are summaries of several.
	count := func(kind Kind) (events, attempts int) {
		for _, e := range w.record() {
			if e.Dst.String() != site+":80" {
				t.Errorf("got %+v", e)
			}
			if e.Kind == kind {
				events, attempts = events+1, attempts+e.Count
			}
		}
		return events, attempts
	}
	w.wait("summary", func(Event) bool {
		denied, _ := count(Denied)
		_, repeated := count(Repeated)
		return denied+repeated >= 20
	})
	if denied, _ := count(Denied); denied >= 20 {
		t.Error("each was recorded")
	}
	before, _ := count(Denied)
	w.wait("again, in a new window", func(Event) bool {
		b.dial(site + ":80")
		now, _ := count(Denied)
		return now > before
	})
}

func TestRecordComesBeforeTheRefusal(t *testing.T) {
	release := make(chan struct{})
	w := newWorld(t, func(c *Config) {
		c.Record = func(context.Context, auth.Principal, Event) error { <-release; return errors.New("disk full") }
	})
	b := w.box("i1", policy.Egress{})
	done := make(chan error, 1)
	go func() { _, err := b.dial(site + ":80"); done <- err }()
	select {
	case err := <-done:
		t.Fatalf("answered before it was on record: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	close(release)
	if err := <-done; err == nil {
		t.Error("what cannot be recorded was allowed")
	}
}

func TestConnectionLimit(t *testing.T) {
	w := newWorld(t, func(c *Config) { open(c); c.Limits.Connections = 3 })
	w.at(site+":7", echo)
	b := w.box("i1", policy.Egress{Internet: true})
	var cs []net.Conn
	for range 3 {
		cs = append(cs, b.mustDial(site+":7"))
	}
	if _, err := b.dial(site + ":7"); err == nil {
		t.Fatal("a fourth connection was made")
	}
	w.wait("limit", func(e Event) bool { return e.Kind == Denied && strings.Contains(e.Reason, "3 connections open") })
	cs[0].Close()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if c, err := b.dial(site + ":7"); err == nil {
			c.Close()
			return
		}
	}
	t.Error("a closed connection's place is not free again")
}

func TestSYNFlood(t *testing.T) {
	w := newWorld(t, open)
	b := w.bare("i1", "", policy.Egress{Internet: true})
	neighbour := w.box("i2", policy.Egress{})
	for i := range 20_000 {
		b.file.Write(syn(sandbox.LinkAddress, netip.MustParseAddr("5.6.7.8"), uint16(i), 25))
	}
	if _, err := neighbour.dial("1.1.1.1:80"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("neighbour: %v", err)
	}
	a, _ := w.wall.find("i1")
	if n := len(a.slots); n > 1024 {
		t.Errorf("%d half-open connections", n)
	}
	detached := make(chan struct{})
	go func() { defer close(detached); w.wall.Detach("i1") }()
	select {
	case <-detached:
	case <-time.After(time.Minute):
		t.Error("the detach does not end")
	}
}

func TestUpdateCuts(t *testing.T) {
	w := newWorld(t, open)
	w.at(site+":7", echo)
	w.at("93.184.216.35:7", echo)
	b := w.box("i1", policy.Egress{Internet: true})
	c, kept := b.mustDial(site+":7"), b.mustDial("93.184.216.35:7")
	io.WriteString(c, "x")
	io.ReadFull(c, make([]byte, 1))
	if err := w.wall.Update(t.Context(), w.principal("i1", ""), policy.Egress{Internet: true, DenyOut: []string{site}}); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); err == nil {
		t.Errorf("read %d bytes from a connection that is no longer allowed", n)
	}
	io.WriteString(kept, "y")
	if _, err := io.ReadFull(kept, make([]byte, 1)); err != nil {
		t.Errorf("a connection that is still allowed: %v", err)
	}
	if e := w.wait("cut", func(e Event) bool { return e.Kind == Cut }); e.Dst.String() != site+":7" {
		t.Errorf("got %+v", e)
	}
	if _, err := b.dial(site + ":7"); err == nil {
		t.Error("connected after the update")
	}
	if err := w.wall.Update(t.Context(), w.principal("i1", ""), policy.Egress{DenyOut: []string{"example.com"}}); !errors.Is(err, policy.ErrInvalid) {
		t.Errorf("got %v, want ErrInvalid", err)
	}
	if err := w.wall.Update(t.Context(), w.principal("i9", ""), policy.Egress{}); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
}

func TestSMTPIsCaptured(t *testing.T) {
	talk := func(w *world) conversation {
		select {
		case m := <-w.mail:
			w.tb.Cleanup(func() { m.conn.Close(); close(m.over) })
			return m
		case <-time.After(time.Minute):
			w.tb.Fatalf("not captured; record %+v", w.record())
			return conversation{}
		}
	}
	for _, port := range []string{"25", "587", "2525", "465"} {
		for _, host := range []string{"198.51.100.9", "10.0.0.1", "169.254.169.254"} {
			t.Run("port "+port+" of "+host, func(t *testing.T) {
				w := newWorld(t, nil) // a closed project: mail can be proposed all the same
				c := w.boxFor("i1", "inb_1", policy.Egress{}).mustDial(host + ":" + port)
				go func() {
					if port == "465" {
						io.WriteString(tls.Client(c, &tls.Config{InsecureSkipVerify: true}), "EHLO x\r\n")
						return
					}
					io.WriteString(c, "EHLO x\r\n")
				}()
				m := talk(w)
				l, err := bufio.NewReader(m.conn).ReadString('\n')
				if l != "EHLO x\r\n" || err != nil || m.seen != "" || m.who.ID != "i1" || m.dst.String() != host+":"+port {
					t.Errorf("got %q %v %+v", l, err, m)
				}
				w.wait("captured", func(e Event) bool { return e.Kind == Captured && e.Dst == m.dst })
			})
		}
	}
	for _, tc := range []struct {
		name, to string
		greets   string
		send     []string // written one by one
		seen     string
		captured bool
	}{
		{"client first", site + ":8025", "", []string{"EHLO x\r\n"}, "EHLO ", true},
		{"a long name", site + ":8025", "", []string{"EHLO " + strings.Repeat("x", 500) + "\r\n"}, "EHLO ", true},
		{"lower case", site + ":8025", "", []string{"ehlo x\r\n"}, "ehlo ", true},
		{"LHLO", site + ":8025", "", []string{"LHLO x\r\n"}, "LHLO ", true},
		{"dripped", site + ":8025", "", []string{"E", "h", "L", "o", " ", "x"}, "EhLo ", true},
		{"after blank lines", site + ":8025", "", []string{"\r\n", " \t", "HELO x\r\n"}, "\r\n \tHELO ", true},
		{"server first", site + ":8025", "220 mx.test ESMTP\r\n", []string{"EHLO x\r\n"}, "EHLO ", true},
		{"server first, NOOP before it", site + ":8025", "220-mx.test\r\n220 go\r\n", []string{"NOOP\r\n", "EHLO x\r\n"}, "NOOP\r", true},
		{"server first, no HELO at all", site + ":8025", "220 mx.test\r\n", []string{"MAIL FROM:<a@b.c>\r\n"}, "MAIL ", true},
		{"on the web's port", site + ":443", "", []string{"EHLO x\r\n"}, "EHLO ", true},
		{"FTP", site + ":8021", "220 ftp.test\r\n", []string{"USER anonymous\r\n"}, "", false},
		{"a word like it", site + ":8025", "", []string{"H", "E", "L", "L", "O\r\n"}, "", false},
		{"HTTP", site + ":8025", "", []string{"HEAD / HTTP/1.1\r\n", "Host: example.com\r\n\r\n"}, "", false},
	} {
		for _, e := range []policy.Egress{{Internet: true}, named} {
			t.Run(fmt.Sprintf("%s, internet %v", tc.name, e.Internet), func(t *testing.T) {
				w := newWorld(t, open)
				w.says("example.com", site)
				arrived := make(chan string, 10)
				w.at(tc.to, func(c net.Conn) {
					defer c.Close()
					io.WriteString(c, tc.greets)
					b := make([]byte, 100)
					for {
						n, err := c.Read(b)
						if n > 0 {
							arrived <- string(b[:n])
						}
						if err != nil {
							return
						}
					}
				})
				b := w.box("i1", e)
				if _, err := b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil {
					t.Fatal(err)
				}
				c := b.mustDial(tc.to)
				lines := bufio.NewReader(c)
				if tc.greets != "" {
					for range strings.Count(tc.greets, "\n") {
						lines.ReadString('\n')
					}
				}
				for _, s := range tc.send {
					io.WriteString(c, s)
					time.Sleep(20 * time.Millisecond)
				}
				if !tc.captured {
					want := strings.Join(tc.send, "")
					var got string
					for len(got) < len(want) {
						select {
						case s := <-arrived:
							got += s
						case <-time.After(time.Minute):
							t.Fatalf("arrived %q, want %q", got, want)
						}
					}
					return
				}
				m := talk(w)
				if !strings.HasPrefix(m.seen, tc.seen) || m.dst.String() != tc.to {
					t.Errorf("got seen %q of %v, want %q", m.seen, m.dst, tc.seen)
				}
				if tc.greets == "" {
					if l, err := lines.ReadString('\n'); !strings.HasPrefix(l, "220 postern.internal") {
						t.Errorf("greeting: got %q, %v", l, err)
					}
				}
				go io.WriteString(m.conn, "250 hello\r\n")
				if l, err := lines.ReadString('\n'); l != "250 hello\r\n" {
					t.Errorf("got %q, %v", l, err)
				}
				select {
				case s := <-arrived:
					t.Errorf("%q has left", s)
				default:
				}
			})
		}
	}
}

func TestInnerServerKnowsTheSandbox(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Inner = func(who auth.Principal) http.Handler {
			return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, "you are ", who) })
		}
	})
	a, b := w.box("i1", policy.Egress{}), w.box("i2", policy.Egress{})
	for _, tc := range []struct {
		name string
		b    *box
		host string
		want string
	}{
		{"by name", a, "postern.internal", "200 you are sandbox:i1"},
		{"another sandbox is another", b, "postern.internal", "200 you are sandbox:i2"},
		{"by address", a, "10.0.0.1", "200 you are sandbox:i1"},
		{"case, dot and port", a, "Postern.Internal.:80", "200 you are sandbox:i1"},
		{"another host", a, "evil.test", "421 "},
		{"a longer name", a, "postern.internal.evil.test", "421 "},
		{"another port", a, "postern.internal:3000", "421 "},
		{"claims to be another", a, "postern.internal\r\nX-Sandbox: i2", "200 you are sandbox:i1"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := get(tc.b.mustDial("10.0.0.1:80"), "GET /mcp HTTP/1.1\r\nHost: "+tc.host+"\r\nConnection: close\r\n\r\n")
			if err != nil || !strings.HasPrefix(got, tc.want) {
				t.Errorf("got %q, %v; want %q", got, err, tc.want)
			}
		})
	}
}

func TestDialIn(t *testing.T) {
	w := newWorld(t, nil)
	b := w.box("i1", policy.Egress{})
	l, err := gonet.ListenTCP(b.stack, tcpip.FullAddress{Port: 49983}, ipv4.ProtocolNumber)
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
			go echo(c)
		}
	}()
	c, err := w.wall.Dial(t.Context(), "i1", 49983)
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(c, "ping")
	buf := make([]byte, 4)
	if _, err := io.ReadFull(c, buf); err != nil || string(buf) != "ping" {
		t.Errorf("got %q, %v", buf, err)
	}
	if _, err := w.wall.Dial(t.Context(), "i1", 81); !errors.Is(err, sandbox.ErrPortClosed) {
		t.Errorf("got %v, want ErrPortClosed", err)
	}
	if _, err := w.wall.Dial(t.Context(), "i2", 81); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
	w.wall.Detach("i1")
	w.wall.Detach("i1")
	if _, err := c.Read(buf); err == nil {
		t.Error("a connection survived Detach")
	}
	if _, err := w.wall.Dial(t.Context(), "i1", 49983); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("got %v, want ErrNotFound", err)
	}
}

func TestAttachRefuses(t *testing.T) {
	w := newWorld(t, nil)
	w.bare("i1", "", policy.Egress{})
	for name, try := range map[string]func() (*os.File, error){
		"twice": func() (*os.File, error) { return w.wall.Attach(t.Context(), w.principal("i1", ""), policy.Egress{}) },
		"not a sandbox": func() (*os.File, error) {
			return w.wall.Attach(t.Context(), auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "p"}, policy.Egress{})
		},
		"bad policy": func() (*os.File, error) {
			return w.wall.Attach(t.Context(), w.principal("i2", ""), policy.Egress{DenyOut: []string{"x"}})
		},
	} {
		if f, err := try(); err == nil {
			f.Close()
			t.Errorf("%s: attached", name)
		}
	}
	if _, err := New(slog.New(slog.DiscardHandler), Config{}); err == nil {
		t.Error("New without Record")
	}
}

func TestIdleConnectionsAreCut(t *testing.T) {
	w := newWorld(t, func(c *Config) { open(c); c.Limits.Idle = 2 * time.Second })
	w.at(site+":7", echo)
	b := w.box("i1", policy.Egress{Internet: true})
	// used uses a connection for longer than it may idle. It is nil where this
	// machine has done nothing for so long that it was idle indeed.
	used := func() net.Conn {
		c := b.mustDial(site + ":7")
		last := time.Now()
		for i := range 6 {
			io.WriteString(c, "x")
			_, err := io.ReadFull(c, make([]byte, 1))
			if gap := time.Since(last); err != nil && gap > time.Second {
				t.Logf("nothing for %v", gap)
				return nil
			}
			if err != nil {
				t.Fatalf("cut while in use, byte %d: %v", i, err)
			}
			last = time.Now()
			time.Sleep(400 * time.Millisecond)
		}
		return c
	}
	c := used()
	for range 20 {
		if c != nil {
			break
		}
		c = used()
	}
	if c == nil {
		t.Fatal("this machine stands still")
	}
	c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := c.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Errorf("got %v, want a cut", err)
	}
}

func TestNamesAreBounded(t *testing.T) {
	n := newNames()
	for i := range 3 * maxNames {
		a := netip.AddrFrom4([4]byte{1, byte(i >> 16), byte(i >> 8), byte(i)})
		n.learn(fmt.Sprintf("n%d.test", i), []netip.Addr{a, netip.MustParseAddr(site)}, func(string) bool { return false })
		n.cache(fmt.Sprintf("n%d.test", i), []netip.Addr{a})
	}
	if len(n.byAddr) > maxNames || len(n.byName) > maxNames || len(n.of(netip.MustParseAddr(site))) > namesOfOne {
		t.Errorf("got %d addresses, %d names", len(n.byAddr), len(n.byName))
	}
	_ = slices.Sorted(maps.Keys(n.byName))
}
