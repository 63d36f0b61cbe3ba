package domain

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"unicode"
)

// An echo is a fake DNS that answers every question with what it was given.
type echo struct {
	texts []string
	mx    []*net.MX
}

func (e echo) LookupTXT(context.Context, string) ([]string, error) { return e.texts, nil }

func (e echo) LookupMX(context.Context, string) ([]*net.MX, error)               { return e.mx, nil }
func (e echo) LookupAddr(context.Context, string) ([]string, error)              { return nil, nil }
func (e echo) LookupIPAddr(context.Context, string) ([]net.IPAddr, error)        { return nil, nil }
func (e echo) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) { return nil, nil }

// FuzzLook: whatever the DNS says, each record gets a result and a bounded
// sentence that can be printed, and nothing but its own token proves a domain.
func FuzzLook(f *testing.F) {
	for _, s := range []string{"", "v=spf1 mx ~all", "v=spf1 +all", "v=spf1 include:%{i}.x redirect=y", "v=DMARC1; p=reject; sp=none", "v=DMARC1;;p==;", "k=rsa; p=", "v=STSv1; id=1", "\x1b[2J\u202e\x00", "p=;p=x;k=ed25519;t=y:s", "postern-domain=", "TOKEN", " TOKEN ", "TOKENX"} {
		f.Add(s, "mx.agents.example.", uint16(10))
	}
	f.Fuzz(func(t *testing.T, text, host string, pref uint16) {
		d := Domain{Name: "example.org", Token: "TOKEN", State: StatePending}
		g := &Registry{cfg: Config{
			Domain: "agents.example", Host: "mx.agents.example", SPF: "mx", Resolver: echo{[]string{text, "v=spf1 " + text, "v=DMARC1; " + text}, []*net.MX{{Host: host, Pref: pref}}},
			Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
			Keys: func(context.Context, string, string) ([]Key, error) {
				return []Key{{"s", "v=DKIM1; k=ed25519; p=AAAA"}}, nil
			},
		}}
		rs, err := g.checkDNS(t.Context(), d)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rs {
			if r.Result == Unchecked || r.Detail == "" {
				t.Errorf("%s: %+v", r.Kind, r)
			}
			all := r.Detail + strings.Join(r.Found, "")
			if len(all) > 6000 || strings.ContainsFunc(all, unseen) || strings.Contains(r.Detail, "%!") {
				t.Errorf("%s says %q", r.Kind, all)
			}
			if r.Kind == Ownership && (r.Result == OK) != (strings.TrimSpace(text) == d.Token) {
				t.Errorf("the proof %q is %s", text, r.Result)
			}
		}
	})
}

// FuzzName: what is taken for a name is one that the DNS takes, is no address,
// no public suffix and none of the server's, and stays what it is when it is
// read again.
func FuzzName(f *testing.F) {
	for _, s := range []string{"example.org", "Bücher.Example.", "co.uk", "xn--a-.org", "a..b", "192.0.2.1", "a\u200db.org", "ﬀ.org", "。org", "x.agents.example", "-a.b", strings.Repeat("a", 64) + ".org"} {
		f.Add(s)
	}
	g := &Registry{cfg: Config{Domain: "agents.example", Host: "mx.agents.example"}}
	f.Fuzz(func(t *testing.T, in string) {
		name, err := g.checkName(in)
		if err != nil {
			if !errors.Is(err, ErrInvalid) || len(err.Error()) > 1000 {
				t.Errorf("%q: %v", in, err)
			}
			return
		}
		again, err := g.checkName(name)
		if err != nil || again != name {
			t.Errorf("%q is %q, and that is %q, %v", in, name, again, err)
		}
		if len(name) > longest || !strings.Contains(name, ".") || name != strings.ToLower(name) || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-.") != "" || strings.HasSuffix("."+name, ".agents.example") {
			t.Errorf("%q is taken for %q", in, name)
		}
	})
}

// unseen says whether c hides, or hides something: not the joiners of names and
// emoji, and not the Arabic signs under digits, which are seen.
func unseen(c rune) bool {
	joins := c == '\u200c' || c == '\u200d' || unicode.Is(unicode.Prepended_Concatenation_Mark, c)
	return unicode.IsControl(c) || unicode.Is(unicode.Cf, c) && !joins
}
