package egress

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"postern/internal/policy"
)

// TestStandIns: a sandbox with an inbox can resolve any name for mail, and reaches
// nothing else of it.
func TestStandIns(t *testing.T) {
	w := newWorld(t, nil) // a closed project
	b := w.boxFor("i1", "ibx_1", policy.Egress{Internet: true})
	m, err := b.ask("10.0.0.1:53", "smtp.example.com.", dnsmessage.TypeA)
	if err != nil || m.RCode != 0 || len(addrsOf(m)) != 1 {
		t.Fatalf("got %v %v, %v", m.RCode, addrsOf(m), err)
	}
	to := addrsOf(m)[0]
	if !strings.HasPrefix(to, "198.18.") {
		t.Errorf("got %s, want one of 198.18.0.0/15", to)
	}
	if again, _ := b.ask("10.0.0.1:53", "SMTP.example.COM.", dnsmessage.TypeA); addrsOf(again)[0] != to {
		t.Errorf("asked again: %v, want %s", addrsOf(again), to)
	}
	if six, err := b.ask("10.0.0.1:53", "smtp.example.com.", dnsmessage.TypeAAAA); err != nil || six.RCode != 0 || len(addrsOf(six)) != 0 {
		t.Errorf("AAAA: %v %v, %v; want no address and no error", six.RCode, addrsOf(six), err)
	}
	b.mustDial(to + ":25")
	c := <-w.mail
	defer close(c.over)
	if got := w.wall.NameOf("i1", c.dst.Addr()); got != "smtp.example.com" {
		t.Errorf("NameOf = %q", got)
	}
	w.wait("captured with its name", func(e Event) bool { return e.Kind == Captured && e.Name == "smtp.example.com" })
	if _, err := b.dial(to + ":443"); err == nil {
		t.Error("a stand-in took a connection to another port")
	}
	w.wait("refused with its name", func(e Event) bool {
		return e.Kind == Denied && e.Proto == "tcp" && e.Name == "smtp.example.com" && e.Dst.Port() == 443
	})
	// Neither another sandbox nor the world hears of it.
	other := w.boxFor("i2", "ibx_2", policy.Egress{})
	if _, err := other.dial(to + ":443"); err == nil || w.wall.NameOf("i2", netip.MustParseAddr(to)) != "" {
		t.Error("another sandbox knows the stand-in")
	}
	loose := w.box("i3", policy.Egress{})
	if m, _ := loose.ask("10.0.0.1:53", "smtp.example.com.", dnsmessage.TypeA); m.RCode != dnsmessage.RCodeNameError {
		t.Errorf("without an inbox: %v, want no such name", m.RCode)
	}
	if dialed, asked := w.outside(); len(dialed)+len(asked) != 0 {
		t.Errorf("outside saw %v %v", dialed, asked)
	}
}

func TestStandInsAreBounded(t *testing.T) {
	s := newStandIns()
	first := s.addr("name0.test")
	for i := range 3 * maxStandIns {
		name := fmt.Sprintf("name%d.test", i)
		if got := s.of(s.addr(name)); got != name {
			t.Fatalf("%s stands for %q", name, got)
		}
	}
	if len(s.addrs) != maxStandIns || len(s.names) != maxStandIns {
		t.Errorf("%d and %d are kept", len(s.addrs), len(s.names))
	}
	if got := s.of(first); got == "name0.test" {
		t.Error("the oldest is kept")
	}
	for _, a := range []string{"198.19.0.1", "10.0.0.1", "198.18.255.255"} {
		if got := s.of(netip.MustParseAddr(a)); got != "" {
			t.Errorf("%s stands for %q", a, got)
		}
	}
}
