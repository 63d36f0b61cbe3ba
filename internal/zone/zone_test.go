package zone

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

func newServer(t testing.TB, addrs ...netip.Addr) *Server {
	t.Helper()
	s, err := New(slog.New(slog.DiscardHandler), "Boxes.Example.", addrs)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func ask(t *testing.T, s *Server, name string, kind dnsmessage.Type) dnsmessage.Message {
	t.Helper()
	q := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 7, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name), Type: kind, Class: dnsmessage.ClassINET}},
	}
	b, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	var a dnsmessage.Message
	if err := a.Unpack(s.Answer(b)); err != nil {
		t.Fatal(err)
	}
	if a.ID != 7 || !a.Response || len(a.Questions) != 1 || a.Questions[0] != q.Questions[0] || a.RecursionAvailable {
		t.Errorf("got header %+v of %v", a.Header, a.Questions)
	}
	return a
}

func TestAnswersOnlyForTheDomain(t *testing.T) {
	whole := newServer(t, netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7"))
	part := newServer(t)
	for _, s := range []*Server{whole, part} {
		for _, text := range []string{"one", "two", "three"} {
			if err := s.SetText(text); err != nil {
				t.Fatal(err)
			}
		}
		s.RemoveText("two")
		s.RemoveText("never there")
	}
	const ok, refused = dnsmessage.RCodeSuccess, dnsmessage.RCodeRefused
	tests := []struct {
		name   string
		s      *Server
		ask    string
		kind   dnsmessage.Type
		want   []string
		code   dnsmessage.RCode
		ending string // the zone that the authority names
	}{
		{"a sandbox", whole, "3000-iabc.boxes.example.", dnsmessage.TypeA, []string{"192.0.2.7"}, ok, ""},
		{"likewise, in mixed case", whole, "3000-IABC.bOxEs.exAmple.", dnsmessage.TypeA, []string{"192.0.2.7"}, ok, ""},
		{"its IPv6 address", whole, "api.boxes.example.", dnsmessage.TypeAAAA, []string{"2001:db8::7"}, ok, ""},
		{"the domain", whole, "boxes.example.", dnsmessage.TypeA, []string{"192.0.2.7"}, ok, ""},
		{"its name server", whole, "boxes.example.", dnsmessage.TypeNS, []string{"ns.boxes.example."}, ok, ""},
		{"a type without a record", whole, "api.boxes.example.", dnsmessage.TypeMX, nil, ok, "boxes.example."},
		{"the challenge", whole, "_acme-challenge.boxes.example.", dnsmessage.TypeTXT, []string{"one", "three"}, ok, ""},
		{"the challenge has no address", whole, "_acme-challenge.boxes.example.", dnsmessage.TypeA, nil, ok, "boxes.example."},
		{"text of another name", whole, "x.boxes.example.", dnsmessage.TypeTXT, nil, ok, "boxes.example."},
		{"another domain", whole, "example.", dnsmessage.TypeA, nil, refused, ""},
		{"a domain that ends like it", whole, "evilboxes.example.", dnsmessage.TypeA, nil, refused, ""},
		{"only the challenge: text", part, "_acme-challenge.boxes.example.", dnsmessage.TypeTXT, []string{"one", "three"}, ok, ""},
		{"only the challenge: the rest of it", part, "_acme-challenge.boxes.example.", dnsmessage.TypeSOA, nil, ok, "_acme-challenge.boxes.example."},
		{"only the challenge: a sandbox", part, "3000-iabc.boxes.example.", dnsmessage.TypeA, nil, refused, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := ask(t, tt.s, tt.ask, tt.kind)
			if a.RCode != tt.code {
				t.Errorf("got %v, want %v", a.RCode, tt.code)
			}
			var got []string
			for _, r := range a.Answers {
				switch b := r.Body.(type) {
				case *dnsmessage.AResource:
					got = append(got, netip.AddrFrom4(b.A).String())
				case *dnsmessage.AAAAResource:
					got = append(got, netip.AddrFrom16(b.AAAA).String())
				case *dnsmessage.TXTResource:
					got = append(got, b.TXT...)
				case *dnsmessage.NSResource:
					got = append(got, b.NS.String())
				}
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
			ending := ""
			if len(a.Authorities) > 0 {
				ending = a.Authorities[0].Header.Name.String()
			}
			if ending != tt.ending {
				t.Errorf("got authority %q, want %q", ending, tt.ending)
			}
		})
	}
}

func TestNewRefuses(t *testing.T) {
	for _, domain := range []string{"", ".", strings.Repeat("a.", 130), strings.Repeat("a.", 122) + "a"} {
		if _, err := New(slog.New(slog.DiscardHandler), domain, nil); err == nil {
			t.Errorf("%q was taken", domain)
		}
	}
	s := newServer(t)
	if err := s.SetText(strings.Repeat("x", 256)); err == nil {
		t.Error("a text was taken that no record holds")
	}
	for range maxTexts {
		if err := s.SetText("x"); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.SetText("x"); err == nil {
		t.Error("texts have no bound")
	}
}

// TestServesOverUDPAndTCP asks over both transports as others do.
func TestServesOverUDPAndTCP(t *testing.T) {
	s := newServer(t, netip.MustParseAddr("192.0.2.7"))
	packets, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- s.ServePackets(ctx, packets) }()
	go func() { ended <- s.Serve(ctx, l) }()
	for network, addr := range map[string]string{"udp": packets.LocalAddr().String(), "tcp": l.Addr().String()} {
		r := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, addr)
		}}
		got, err := r.LookupHost(ctx, "api.boxes.example.")
		if err != nil || !slices.Equal(got, []string{"192.0.2.7"}) {
			t.Errorf("over %s: got %v, %v", network, got, err)
		}
	}
	cancel()
	for range 2 {
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Fatal("it does not end")
		}
	}
}

// FuzzAnswer: whatever comes, an answer is well formed and hardly longer than
// what was asked.
func FuzzAnswer(f *testing.F) {
	s := newServer(f, netip.MustParseAddr("192.0.2.7"))
	q := dnsmessage.Message{Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName("a.boxes.example."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}}}
	b, err := q.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[:12])
	f.Add([]byte{0, 0, 0x80, 0, 0, 1, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, question []byte) {
		answer := s.Answer(question)
		if answer == nil {
			return
		}
		var m dnsmessage.Message
		if err := m.Unpack(answer); err != nil {
			t.Errorf("answer does not parse: %v", err)
		}
		if len(answer) > len(question)+256 {
			t.Errorf("%d bytes answer %d", len(answer), len(question))
		}
	})
}
