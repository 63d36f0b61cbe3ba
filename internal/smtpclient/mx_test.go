package smtpclient

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/delivery"
	"postern/internal/mail"
	"postern/internal/mailauth/dnstest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A lab is mail servers at 127.0.0.2, .3 and .4, all on one port.
type lab struct {
	port  string
	peers [3]*peer
	dns   *dnstest.Server
}

func newLab(t *testing.T, peers [3]*peer, records ...string) *lab {
	t.Helper()
	l := &lab{peers: peers, dns: dnstest.Start(t, records...)}
	for i, name := range []string{"a", "b", "c"} {
		l.dns.Add(t, fmt.Sprintf("%s.mx.example. A 127.0.0.%d", name, i+2))
	}
	for try := range 20 {
		port, free := freePort(), true
		for i := range peers {
			c, err := net.Listen("tcp", fmt.Sprintf("127.0.0.%d:%s", i+2, port))
			if err != nil {
				free = false
				break
			}
			c.Close()
		}
		if l.port = port; free {
			break
		} else if try == 19 {
			t.Fatal("no port is free on three addresses")
		}
	}
	for i, p := range peers {
		if p != nil {
			p.startAt(t, fmt.Sprintf("127.0.0.%d:%s", i+2, l.port))
		}
	}
	return l
}

// freePort returns a port below those that the system gives to whoever asks for
// any: no other test takes it meanwhile.
func freePort() string { return strconv.Itoa(20_000 + rand.IntN(12_000)) }

func (l *lab) config() Config {
	return Config{Direct: &Direct{Resolver: l.dns.Resolver(), Port: l.port, Private: true, Names: []string{"postern.example"}}}
}

func to(rcpts ...string) mail.Envelope {
	e := message()
	e.To = rcpts
	return e
}

func TestDirect(t *testing.T) {
	const ok, down, refuses = 1, 0, 2
	greylist := map[string]string{"": "451 not now"}
	tests := []struct {
		name    string
		records []string
		peers   [3]int
		want    mail.Outcome
		gone    bool
		got     int // index of the peer that got it, or -1
		detail  string
	}{
		{"the preferred one", []string{"d.example. MX 20 b.mx.example.", "d.example. MX 10 a.mx.example."}, [3]int{ok, ok, ok}, mail.Accepted, false, 0, ""},
		{"the next one where it is down", []string{"d.example. MX 10 a.mx.example.", "d.example. MX 20 b.mx.example."}, [3]int{down, ok, ok}, mail.Accepted, false, 1, ""},
		{"the next one where it greets with an error", []string{"d.example. MX 10 a.mx.example.", "d.example. MX 20 b.mx.example."}, [3]int{refuses, ok, ok}, mail.Accepted, false, 1, ""},
		{"several addresses of one host", []string{"d.example. MX 10 many.example.", "many.example. A 127.0.0.2", "many.example. A 127.0.0.4"}, [3]int{down, down, ok}, mail.Accepted, false, 2, ""},
		{"a host without an address, then one with", []string{"d.example. MX 10 none.example.", "d.example. MX 20 b.mx.example."}, [3]int{ok, ok, ok}, mail.Accepted, false, 1, ""},
		{"without MX records the domain itself", []string{"d.example. A 127.0.0.4"}, [3]int{ok, ok, ok}, mail.Accepted, false, 2, ""},
		{"all are down", []string{"d.example. MX 10 a.mx.example."}, [3]int{down, down, down}, mail.NotSent, false, -1, "connect to"},
		{"all greet with an error", []string{"d.example. MX 10 a.mx.example."}, [3]int{refuses, ok, ok}, mail.NotSent, false, -1, "451 not now"},
		{"null MX", []string{"d.example. MX 0 ."}, [3]int{ok, ok, ok}, mail.Refused, true, -1, "null MX"},
		{"no such domain", nil, [3]int{ok, ok, ok}, mail.Refused, true, -1, "the domain d.example accepts no mail"},
		{"us", []string{"d.example. MX 10 POSTERN.example."}, [3]int{ok, ok, ok}, mail.Refused, false, -1, "would loop"},
		{"us, and one that is less preferred", []string{"d.example. MX 10 postern.example.", "d.example. MX 20 b.mx.example."}, [3]int{ok, ok, ok}, mail.Refused, false, -1, "would loop"},
		{"us as the last resort", []string{"d.example. MX 10 a.mx.example.", "d.example. MX 20 postern.example."}, [3]int{ok, ok, ok}, mail.Accepted, false, 0, ""},
		{"an address for a host", []string{"d.example. MX 10 127.0.0.2."}, [3]int{ok, ok, ok}, mail.NotSent, false, -1, "instead of a host name"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var peers [3]*peer
			for i, p := range tt.peers {
				switch p {
				case ok:
					peers[i] = &peer{}
				case refuses:
					peers[i] = &peer{answers: greylist}
				}
			}
			l := newLab(t, peers, tt.records...)
			c := newClient(t, l.config())
			if h := c.Hop(t.Context(), "x@ｄ.example"); h.Kind != delivery.HopDirect || h.Name != "d.example" {
				t.Errorf("a domain written another way goes by %+v", h)
			}
			if h := c.Hop(t.Context(), "x@D.example"); h.Kind != delivery.HopDirect || h.Name != "d.example" {
				t.Errorf("hop = %+v", h)
			}
			ds, err := c.Deliver(t.Context(), to("x@d.example"))
			if err != nil {
				t.Fatal(err)
			}
			if ds[0].Outcome != tt.want || ds[0].Gone != tt.gone || !strings.Contains(ds[0].Detail, tt.detail) {
				t.Errorf("got %+v, want %s, gone %v, %q", ds[0], tt.want, tt.gone, tt.detail)
			}
			for i, p := range peers {
				if p != nil && (p.count() == 1) != (i == tt.got) {
					t.Errorf("server %d got %d messages", i, p.count())
				}
			}
		})
	}
}

// TestDirectFails: what DNS does not answer today it may answer tomorrow.
func TestDirectFails(t *testing.T) {
	l := newLab(t, [3]*peer{{}, nil, nil}, "d.example. MX 10 a.mx.example.", "e.example. MX 10 x.broken.example.")
	l.dns.Fail("d.example", true)
	l.dns.Fail("broken.example", true)
	for _, rcpt := range []string{"x@d.example", "x@e.example"} {
		ds, err := newClient(t, l.config()).Deliver(t.Context(), to(rcpt))
		if err != nil || ds[0].Outcome != mail.NotSent || ds[0].Gone {
			t.Errorf("%s: %+v, %v; want not_sent", rcpt, ds, err)
		}
	}
}

// TestOwnDomainsGoToThisServer: mail for a domain of this server stays here. If the
// lookup of that fails the mail waits, instead of looping through the Internet.
func TestOwnDomainsGoToThisServer(t *testing.T) {
	own := &peer{}
	l := newLab(t, [3]*peer{nil, nil, nil}, "ours.example. MX 10 postern.example.")
	conf := l.config()
	conf.Own = own.start(t)
	var err error
	conf.Serves = func(_ context.Context, domain string) (bool, error) { return domain == "ours.example", err }
	c := newClient(t, conf)
	if h := c.Hop(t.Context(), "x@ours.example"); h.Kind != delivery.HopLocal {
		t.Errorf("hop = %+v", h)
	}
	if ds, derr := c.Deliver(t.Context(), to("x@ours.example")); derr != nil || ds[0].Outcome != mail.Accepted || own.count() != 1 {
		t.Errorf("ours: %+v, %v", ds, derr)
	}
	err = errors.New("the database is away")
	if ds, derr := c.Deliver(t.Context(), to("x@ours.example")); derr != nil || ds[0].Outcome != mail.NotSent {
		t.Errorf("while it cannot be told: %+v, %v; want not_sent", ds, derr)
	}
}

// TestDirectRefusesPrivate is a domain whose owner points its mail servers at
// our neighbours.
func TestDirectRefusesPrivate(t *testing.T) {
	for _, addr := range []string{"A 127.0.0.2", "A 10.0.0.1", "A 192.168.1.1", "A 169.254.169.254", "A 100.64.0.1", "A 0.0.0.0", "AAAA ::1", "AAAA fe80::1", "AAAA fc00::1", "AAAA ::ffff:127.0.0.2", "AAAA 64:ff9b::7f00:2"} {
		p := &peer{}
		l := newLab(t, [3]*peer{p, nil, nil}, "d.example. MX 10 inner.example.", "inner.example. "+addr)
		conf := l.config()
		conf.Direct.Private = false
		dialled := ""
		conf.Dial = func(_ context.Context, _, addr string) (net.Conn, error) {
			dialled = addr
			return nil, context.Canceled
		}
		ds, err := newClient(t, conf).Deliver(t.Context(), to("x@d.example"))
		if err != nil || ds[0].Outcome != mail.NotSent || !strings.Contains(ds[0].Detail, "not on the public Internet") || dialled != "" {
			t.Errorf("%s: %+v, %v, dialled %q", addr, ds, err, dialled)
		}
	}
}

// A policyServer serves MTA-STS policies of any domain.
type policyServer struct {
	mu     sync.Mutex // guards what follows
	text   string
	kind   string
	status int
	asked  int
}

func (s *policyServer) set(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.text, s.kind, s.status = text, "text/plain", 200
}

func (s *policyServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	if r.URL.Path != "/.well-known/mta-sts.txt" || !strings.HasPrefix(r.Host, "mta-sts.") {
		w.WriteHeader(404)
		return
	}
	if s.status/100 == 3 {
		w.Header().Set("Location", "https://"+r.Host+"/elsewhere")
	}
	w.Header().Set("Content-Type", s.kind)
	w.WriteHeader(s.status)
	_, _ = w.Write([]byte(s.text))
}

func (s *policyServer) start(t *testing.T, conf *tls.Config) (port string) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", conf)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: s}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(l) }()
	t.Cleanup(func() { srv.Close(); <-done })
	_, port, _ = net.SplitHostPort(l.Addr().String())
	return port
}

const enforceB = "version: STSv1\r\nmode: enforce\r\nmx: b.mx.example\r\nmax_age: 86400\r\n"

// TestMTASTS: a policy is kept to, over restarts of this program and against
// who forges DNS or strips TLS.
func TestMTASTS(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		server, roots := testTLSFor(t, "b.mx.example", "mta-sts.d.example")
		plain, secure := &peer{}, &peer{tls: server}
		l := newLab(t, [3]*peer{plain, secure, nil}, "d.example. MX 10 a.mx.example.", "d.example. MX 20 b.mx.example.", "mta-sts.d.example. A 127.0.0.1", `_mta-sts.d.example. TXT "v=STSv1; id=1;"`)
		var ps policyServer
		ps.set(enforceB)
		conf := l.config()
		conf.Direct.Roots, conf.Direct.PolicyPort, conf.Direct.DB = roots, ps.start(t, server), db
		c := newClient(t, conf)
		send := func(c *Client) mail.Delivery {
			t.Helper()
			ds, err := c.Deliver(t.Context(), to("x@d.example"))
			if err != nil {
				t.Fatal(err)
			}
			return ds[0]
		}
		if d := send(c); d.Outcome != mail.Accepted || d.Remote != "b.mx.example" || plain.count() != 0 || secure.count() != 1 {
			t.Errorf("enforced: %+v", d)
		}
		if send(c); ps.asked != 1 {
			t.Errorf("the policy was fetched %d times, want once", ps.asked)
		}
		// DNS is forged: neither the record nor the true server is there.
		l.dns.Remove("_mta-sts.d.example")
		l.dns.Remove("d.example")
		l.dns.Add(t, "d.example. MX 10 a.mx.example.")
		again := newClient(t, conf) // a restart: the policy is in the database
		if d := send(again); d.Outcome != mail.NotSent || !strings.Contains(d.Detail, "does not name") || plain.count() != 0 {
			t.Errorf("to a server that the policy does not name: %+v", d)
		}
		// A server of the right name that cannot prove it.
		l.dns.Remove("d.example")
		l.dns.Add(t, "d.example. MX 10 b.mx.example.")
		other := conf
		direct := *conf.Direct
		direct.Roots = x509.NewCertPool()
		other.Direct = &direct
		if d := send(newClient(t, other)); d.Outcome != mail.NotSent || !strings.Contains(d.Detail, "requires TLS") {
			t.Errorf("to a server with another's certificate: %+v", d)
		}
		l.dns.Remove("b.mx.example")
		l.dns.Add(t, "b.mx.example. A 127.0.0.2") // where no STARTTLS is offered
		if d := send(again); d.Outcome != mail.NotSent || !strings.Contains(d.Detail, "STARTTLS") || plain.count() != 0 {
			t.Errorf("stripped of TLS: %+v", d)
		}
		// The domain's own change of mind: testing only tells.
		l.dns.Add(t, `_mta-sts.d.example. TXT "v=STSv1; id=2;"`)
		ps.set("version: STSv1\nmode: testing\nmx: b.mx.example\nmax_age: 86400\n")
		if d := send(again); d.Outcome != mail.Accepted || plain.count() != 1 {
			t.Errorf("testing: %+v", d)
		}
	})
}

// TestMTASTSFetch is what counts as a policy.
func TestMTASTSFetch(t *testing.T) {
	server, roots := testTLSFor(t, "mta-sts.d.example")
	for name, change := range map[string]func(ps *policyServer, d *Direct, dns *dnstest.Server){
		"a redirect":          func(ps *policyServer, _ *Direct, _ *dnstest.Server) { ps.status = 302 },
		"not found":           func(ps *policyServer, _ *Direct, _ *dnstest.Server) { ps.status = 404 },
		"HTML":                func(ps *policyServer, _ *Direct, _ *dnstest.Server) { ps.kind = "text/html" },
		"too long":            func(ps *policyServer, _ *Direct, _ *dnstest.Server) { ps.text += strings.Repeat("x: y\n", 20000) },
		"another certificate": func(_ *policyServer, d *Direct, _ *dnstest.Server) { d.Roots = x509.NewCertPool() },
		"two records": func(_ *policyServer, _ *Direct, dns *dnstest.Server) {
			dns.TXT("_mta-sts.d.example", "v=STSv1; id=1", "v=STSv1; id=2")
		},
		"a record without id": func(_ *policyServer, _ *Direct, dns *dnstest.Server) { dns.TXT("_mta-sts.d.example", "v=STSv1;") },
		"mode none": func(ps *policyServer, _ *Direct, _ *dnstest.Server) {
			ps.text = "version: STSv1\nmode: none\nmax_age: 60\n"
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := &peer{}
			l := newLab(t, [3]*peer{p, nil, nil}, "d.example. MX 10 a.mx.example.", "mta-sts.d.example. A 127.0.0.1", `_mta-sts.d.example. TXT "v=STSv1; id=1;"`)
			var ps policyServer
			ps.set(enforceB)
			conf := l.config()
			conf.Direct.Roots, conf.Direct.PolicyPort = roots, ps.start(t, server)
			change(&ps, conf.Direct, l.dns)
			if ds, err := newClient(t, conf).Deliver(t.Context(), to("x@d.example")); err != nil || ds[0].Outcome != mail.Accepted {
				t.Errorf("%+v, %v; want it sent as without a policy", ds, err)
			}
		})
	}
	// The policy's host leads inside.
	l := newLab(t, [3]*peer{}, "mta-sts.d.example. A 127.0.0.1", `_mta-sts.d.example. TXT "v=STSv1; id=1;"`)
	var ps policyServer
	ps.set(enforceB)
	conf := l.config()
	conf.Direct.Roots, conf.Direct.PolicyPort, conf.Direct.Private = roots, ps.start(t, server), false
	if p := newClient(t, conf).sts.policy(t.Context(), "d.example"); p.Mode != "" || ps.asked != 0 {
		t.Errorf("a policy from inside: %+v, asked %d times", p, ps.asked)
	}
}

func TestParsePolicy(t *testing.T) {
	p, err := parsePolicy("version: STSv1\nmode: enforce\nmx: Mail.example\nmx: *.pool.example\nmax_age: 604800\nextra: x\n")
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]bool{
		"mail.example": true, "x.pool.example": true, "pool.example": false, "x.y.pool.example": false, "evil.example": false, "mail.example.evil.example": false,
	} {
		if got := p.allows(host); got != want {
			t.Errorf("%s: %v, want %v", host, got, want)
		}
	}
	if d := time.Until(p.Expires); d < 6*24*time.Hour || d > 8*24*time.Hour {
		t.Errorf("expires in %v", d)
	}
	for name, text := range map[string]string{
		"empty": "", "no version": "mode: enforce\nmx: a\nmax_age: 1\n", "another version": "version: STSv2\nmode: none\nmax_age: 1\n",
		"no mode": "version: STSv1\nmx: a\nmax_age: 1\n", "unknown mode": "version: STSv1\nmode: maybe\nmx: a\nmax_age: 1\n",
		"no mx": "version: STSv1\nmode: enforce\nmax_age: 1\n", "no age": "version: STSv1\nmode: none\n", "negative age": "version: STSv1\nmode: none\nmax_age: -1\n",
		"huge age": "version: STSv1\nmode: none\nmax_age: 99999999999999999999\n", "no pair": "version: STSv1\nmode: none\nmax_age: 1\nx\n",
	} {
		if p, err := parsePolicy(text); err == nil {
			t.Errorf("%s: %+v", name, p)
		}
	}
}

func FuzzParsePolicy(f *testing.F) {
	f.Add("version: STSv1\nmode: enforce\nmx: a.example\nmax_age: 86400\n")
	f.Add("version:STSv1\r\nmode:none\r\nmax_age:0")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := parsePolicy(text)
		if err == nil && (p.Mode != stsNone && len(p.MX) == 0 || time.Until(p.Expires) > maxPolicyAge) {
			t.Errorf("%+v", p)
		}
	})
}
