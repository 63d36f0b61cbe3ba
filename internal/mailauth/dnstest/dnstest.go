// Package dnstest is a DNS server for tests: records in the form of a zone
// file, names whose questions fail or are never answered, and a count of what
// was asked. It listens on loopback, so that the program under test asks it
// with --resolver, and code under test with [Server.Resolver].
//
// It is a real server on a real socket, since how a name that is not there
// differs from one that cannot be asked about is just what such tests are
// about. It must not be used outside of tests.
package dnstest

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/miekg/dns"
)

// A Server answers with its records, with NXDOMAIN for every other name, and
// with an empty answer for a name that has records of another type or names
// below it. It is safe for concurrent use.
type Server struct {
	// Addr is the server's host:port, for UDP and for TCP.
	Addr string

	mu      sync.Mutex // guards what follows
	records map[string][]dns.RR
	fails   map[string]bool
	drops   map[string]bool
	asked   []string
}

// Start returns a server with the given records, which are lines of a zone
// file such as `example.com. TXT "v=spf1 -all"`. The test ends it.
func Start(t testing.TB, records ...string) *Server {
	t.Helper()
	s := &Server{records: map[string][]dns.RR{}, fails: map[string]bool{}, drops: map[string]bool{}}
	var lc net.ListenConfig
	var l net.Listener
	var p net.PacketConn
	var err error
	for range 20 { // a port that is free for both
		if l, err = lc.Listen(t.Context(), "tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		if p, err = lc.ListenPacket(t.Context(), "udp", l.Addr().String()); err == nil {
			break
		}
		l.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	s.Addr = l.Addr().String()
	s.Add(t, records...)
	for _, srv := range []*dns.Server{{Listener: l, Handler: s}, {PacketConn: p, Handler: s}} {
		ready := make(chan struct{})
		srv.NotifyStartedFunc = func() { close(ready) }
		done := make(chan error, 1)
		go func() { done <- srv.ActivateAndServe() }()
		select {
		case <-ready:
		case err := <-done:
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = srv.Shutdown()
			if err := <-done; err != nil {
				t.Errorf("DNS server: %v", err)
			}
		})
	}
	return s
}

// Resolver returns a resolver that asks this server alone.
func (s *Server) Resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, s.Addr)
	}}
}

func key(name string) string { return strings.ToLower(dns.Fqdn(name)) }

// Add adds records; a text record's strings may be longer than 255 octets and
// are cut as DNS wants them.
func (s *Server) Add(t testing.TB, records ...string) {
	t.Helper()
	for _, line := range records {
		rr, err := dns.NewRR(line)
		if err != nil || rr == nil {
			t.Fatalf("record %q: %v", line, err)
		}
		if txt, ok := rr.(*dns.TXT); ok {
			txt.Txt = cut(txt.Txt)
		}
		s.AddRR(rr)
	}
}

// cut returns strings of at most 255 octets.
func cut(texts []string) (out []string) {
	for _, t := range texts {
		for len(t) > 255 {
			out, t = append(out, t[:255]), t[255:]
		}
		out = append(out, t)
	}
	return out
}

// TXT sets the text records of a name, one for each text, of any length.
func (s *Server) TXT(name string, texts ...string) {
	s.Remove(name)
	for _, t := range texts {
		t = strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(t) // as the library keeps them
		s.AddRR(&dns.TXT{Hdr: dns.RR_Header{Name: dns.Fqdn(name), Rrtype: dns.TypeTXT, Class: dns.ClassINET, Ttl: 1}, Txt: cut([]string{t})})
	}
}

// AddRR adds a record as the library writes it.
func (s *Server) AddRR(rr dns.RR) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := key(rr.Header().Name)
	s.records[k] = append(s.records[k], rr)
}

// Remove removes all records of a name.
func (s *Server) Remove(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.records, key(name))
}

// Fail makes questions about a name, and about those below it, end in SERVFAIL.
func (s *Server) Fail(name string, on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fails[key(name)] = on
}

// Drop leaves questions about a name, and about those below it, unanswered.
func (s *Server) Drop(name string, on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drops[key(name)] = on
}

// Asked returns what was asked, in order, each as "TXT example.com".
func (s *Server) Asked() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.asked)
}

// Forget empties what Asked returns.
func (s *Server) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = nil
}

// ServeDNS implements [dns.Handler].
func (s *Server) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	m.RecursionAvailable = true
	if len(q.Question) != 1 {
		m.Rcode = dns.RcodeFormatError
		_ = w.WriteMsg(m)
		return
	}
	if !s.answer(m, q.Question[0]) {
		return
	}
	if _, udp := w.RemoteAddr().(*net.UDPAddr); udp {
		size := dns.MinMsgSize
		if o := q.IsEdns0(); o != nil {
			size = int(o.UDPSize())
		}
		m.Truncate(size)
	}
	_ = w.WriteMsg(m) // who asked has gone
}

// answer fills in m; it returns false where nothing is to be answered.
func (s *Server) answer(m *dns.Msg, q dns.Question) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := key(q.Name)
	s.asked = append(s.asked, dns.TypeToString[q.Qtype]+" "+strings.TrimSuffix(name, "."))
	for n := name; n != ""; _, n, _ = strings.Cut(n, ".") {
		if s.drops[n] {
			return false
		}
		if s.fails[n] {
			m.Rcode = dns.RcodeServerFailure
			return true
		}
	}
	found := false
	for range 10 { // a chain of aliases
		rrs := s.records[name]
		found = found || len(rrs) > 0
		alias := ""
		for _, rr := range rrs {
			if rr.Header().Rrtype == q.Qtype || q.Qtype == dns.TypeANY {
				m.Answer = append(m.Answer, rr)
			} else if c, ok := rr.(*dns.CNAME); ok {
				m.Answer = append(m.Answer, rr)
				alias = key(c.Target)
			}
		}
		if alias == "" {
			break
		}
		name = alias
	}
	for other := range s.records {
		found = found || strings.HasSuffix(other, "."+name)
	}
	if !found {
		m.Rcode = dns.RcodeNameError
	}
	return true
}
