package egress

import (
	"context"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"postern/internal/auth"
	"postern/internal/policy"
)

// A lastWord is a Permitter that refuses some hosts and ports.
type lastWord struct {
	names bool
	hosts []string // refused; an address where no name is known
	ports []uint16 // refused
	hold  chan struct{}

	mu   sync.Mutex
	got  []policy.Connection
	ends bool // nothing goes on
}

func (w *lastWord) MayContinue(context.Context, auth.Principal, policy.Connection) policy.Verdict {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ends {
		return policy.Verdict{Effect: policy.Deny, Reason: "a switch is on"}
	}
	return policy.Verdict{Effect: policy.Allow}
}

func (w *lastWord) Names(context.Context, auth.Principal) bool { return w.names }

func (w *lastWord) Lookup(_ context.Context, _ auth.Principal, name string) policy.Verdict {
	if slices.Contains(w.hosts, name) {
		return policy.Verdict{Effect: policy.Deny, Reason: "a switch is on"}
	}
	return policy.Verdict{Effect: policy.Allow}
}

func (w *lastWord) Permit(ctx context.Context, who auth.Principal, to policy.Connection) policy.Verdict {
	w.mu.Lock()
	w.got = append(w.got, to)
	w.mu.Unlock()
	if w.hold != nil {
		select {
		case <-w.hold:
		case <-ctx.Done():
			return policy.Verdict{Effect: policy.Deny, Reason: "over"}
		}
	}
	hosts := to.Names
	if len(hosts) == 0 {
		hosts = []string{to.Addr.Addr().String()}
	}
	if slices.Contains(w.ports, to.Addr.Port()) || slices.ContainsFunc(hosts, func(h string) bool { return slices.Contains(w.hosts, h) }) {
		return policy.Verdict{Effect: policy.Deny, Reason: "a rule of " + who.ID + " says no"}
	}
	return policy.Verdict{Effect: policy.Allow}
}

// TestPermitDecidesAfterTheLists: a connection that the lists allow is refused if
// the Permitter refuses it, also if the sandbox hides the name.
func TestPermitDecidesAfterTheLists(t *testing.T) {
	const other = "93.184.216.35"
	for _, tc := range []struct {
		name, to, request string
		word              *lastWord
		egress            policy.Egress
		want              string // the answer; empty: refused at once
		reason            string // on record
	}{
		{"allowed", site + ":7", "hi", &lastWord{}, policy.Egress{Internet: true}, "hi", ""},
		{"a port", site + ":7", "", &lastWord{ports: []uint16{7}}, policy.Egress{Internet: true}, "", "a rule of i1 says no"},
		{"by address", site + ":80", "", &lastWord{hosts: []string{site}}, policy.Egress{Internet: true}, "", "a rule of i1 says no"},
		{"by the name in the request", site + ":80", "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n", &lastWord{names: true, hosts: []string{"example.com"}}, policy.Egress{Internet: true}, "403 ", "a switch is on"},
		{"by another name", site + ":80", "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n", &lastWord{names: true, hosts: []string{"evil.test"}}, policy.Egress{Internet: true}, "200 hello example.com", ""},
		{"a name that is not the address's: ours is dialled", "8.8.4.4:80", "GET / HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n", &lastWord{names: true, hosts: []string{"8.8.4.4"}}, policy.Egress{Internet: true}, "200 hello example.com", ""},
		{"a name that is none", other + ":80", "GET / HTTP/1.1\r\nHost: no.such.test\r\n\r\n", &lastWord{names: true, hosts: []string{other}}, policy.Egress{Internet: true}, "403 ", "a rule of i1 says no"},
		{"no name, allowed by its address", site + ":80", "GET / HTTP/1.1\r\nHost: " + site + "\r\nConnection: close\r\n\r\n", &lastWord{names: true}, policy.Egress{Internet: true}, "200 hello " + site, ""},
		{"a list that names it", site + ":80", "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n", &lastWord{ports: []uint16{80}}, named, "403 ", "a rule of i1 says no"},
		{"what no list allows is not asked about", site + ":7", "", &lastWord{}, policy.Egress{}, "", "has no Internet access"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t, func(c *Config) {
				open(c)
				c.Permit = tc.word
			})
			w.at(site+":7", echo)
			w.web(site + ":80")
			w.web(other + ":80")
			w.says("example.com", site)
			b := w.box("i1", tc.egress)
			c, err := b.dial(tc.to)
			switch {
			case tc.want == "":
				if err == nil || !strings.Contains(err.Error(), "refused") {
					t.Errorf("got %v, want refused", err)
				}
			case err != nil:
				t.Fatal(err)
			case tc.request == "hi":
				io.WriteString(c, "hi")
				got := make([]byte, 2)
				if _, err := io.ReadFull(c, got); err != nil || string(got) != "hi" {
					t.Errorf("got %q, %v", got, err)
				}
			default:
				if got, err := get(c, tc.request); err != nil || !strings.HasPrefix(got, tc.want) {
					t.Errorf("got %q, %v; want %q", got, err, tc.want)
				}
			}
			if tc.reason == "" {
				return
			}
			w.wait("denied", func(e Event) bool { return e.Kind == Denied && strings.Contains(e.Reason, tc.reason) })
			if dialed, _ := w.outside(); len(dialed) > 0 {
				t.Errorf("dialed %v", dialed)
			}
			if tc.reason == "has no Internet access" && len(tc.word.got) > 0 {
				t.Errorf("was asked about %v", tc.word.got)
			}
		})
	}
}

// TestPermitKnowsNames: the Permitter gets the names that our resolver gave for an
// address, and a name that it refuses is not resolved outside.
func TestPermitKnowsNames(t *testing.T) {
	p := &lastWord{hosts: []string{"evil.test"}}
	w := newWorld(t, func(c *Config) {
		open(c)
		c.Permit = p
	})
	w.at(site+":22", echo)
	w.says("example.com", site)
	w.says("evil.test", site)
	b := w.box("i1", policy.Egress{Internet: true})
	if m, err := b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil || !slices.Equal(addrsOf(m), []string{site}) {
		t.Fatalf("got %v, %v", addrsOf(m), err)
	}
	if m, err := b.ask("10.0.0.1:53", "evil.test.", dnsmessage.TypeA); err != nil || len(addrsOf(m)) != 0 {
		t.Errorf("got %v, %v for a name that is stopped", addrsOf(m), err)
	}
	if _, asked := w.outside(); slices.Contains(asked, "evil.test") {
		t.Errorf("asked for %v outside", asked)
	}
	b.mustDial(site + ":22").Close()
	if len(p.got) != 1 || !slices.Equal(p.got[0].Names, []string{"example.com"}) || p.got[0].Addr != netip.MustParseAddrPort(site+":22") {
		t.Errorf("was asked about %+v, want example.com", p.got)
	}
}

// TestHeldConnection: a connection that waits for a person blocks no other one, and
// ends with its sandbox.
func TestHeldConnection(t *testing.T) {
	p := &lastWord{hold: make(chan struct{})}
	w := newWorld(t, func(c *Config) {
		open(c)
		c.Permit = p
	})
	w.at(site+":7", echo)
	w.says("example.com", site)
	b := w.box("i1", policy.Egress{Internet: true})
	made := make(chan error, 1)
	go func() {
		c, err := b.dial(site + ":7")
		if err == nil {
			c.Close()
		}
		made <- err
	}()
	if m, err := b.ask("10.0.0.1:53", "example.com.", dnsmessage.TypeA); err != nil || len(addrsOf(m)) != 1 {
		t.Fatalf("got %v, %v while a connection is held", addrsOf(m), err)
	}
	select {
	case err := <-made:
		t.Fatalf("got %v before anybody has said yes", err)
	default:
	}
	close(p.hold)
	if err := <-made; err != nil {
		t.Errorf("got %v once it is let through", err)
	}
}

// TestRecheckCutsConnections: forbidden connections of the project are cut and
// recorded, and those of other projects are not.
func TestRecheckCutsConnections(t *testing.T) {
	p := &lastWord{}
	w := newWorld(t, func(c *Config) {
		open(c)
		c.Permit = p
	})
	w.at(site+":7", echo)
	c := w.box("i1", policy.Egress{Internet: true}).mustDial(site + ":7")
	io.WriteString(c, "hi")
	if _, err := io.ReadFull(c, make([]byte, 2)); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	p.ends = true
	p.mu.Unlock()
	w.wall.Recheck(t.Context(), "another project")
	io.WriteString(c, "hi")
	if _, err := io.ReadFull(c, make([]byte, 2)); err != nil {
		t.Fatalf("another project's change cut it: %v", err)
	}
	w.wall.Recheck(t.Context(), w.principal("i1", "").Project)
	if _, err := io.ReadFull(c, make([]byte, 2)); err == nil {
		t.Error("it goes on")
	}
	w.wait("cut", func(e Event) bool { return e.Kind == Cut && e.Reason == "a switch is on" })
	// What was permitted before the switch and is made after it is refused.
	if c, err := w.box("i2", policy.Egress{Internet: true}).dial(site + ":7"); err == nil {
		c.Close()
		t.Error("connected")
	}
}
