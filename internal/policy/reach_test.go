package policy

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestReachSaysWhatConnectDoes(t *testing.T) {
	for _, tt := range []struct {
		name    string
		egress  Egress
		ceiling Ceiling
		want    string // hosts, "Internet", or "nothing"
		except  string
		asked   bool // more than it gets
	}{
		{"a server that denies", Egress{Internet: true}, Ceiling{}, "nothing", "", true},
		{"a server that allows", Egress{Internet: true}, Ceiling{Internet: true}, "Internet", "", false},
		{"a sandbox that asks for nothing", Egress{}, Ceiling{Internet: true}, "nothing", "", false},
		{"denyOut", Egress{Internet: true, DenyOut: []string{"203.0.113.0/24"}}, Ceiling{Internet: true}, "Internet", "203.0.113.0/24", false},
		{"denyOut has all", Egress{Internet: true, DenyOut: []string{"0.0.0.0/0"}}, Ceiling{Internet: true}, "nothing", "", false},
		{"a server with a list", Egress{Internet: true}, Ceiling{Allow: []string{"api.example.com", "8.8.8.8"}}, "api.example.com 8.8.8.8", "", true},
		{"a list within the Internet", Egress{AllowOut: []string{"api.example.com"}}, Ceiling{Internet: true}, "api.example.com", "", false},
		{"both have a list", Egress{AllowOut: []string{"api.example.com", "x.test"}}, Ceiling{Allow: []string{"*.example.com"}}, "api.example.com", "", true},
		{"the server is narrower", Egress{AllowOut: []string{"*.example.com"}}, Ceiling{Allow: []string{"api.example.com:8443"}}, "nothing", "", true},
		{"networks", Egress{AllowOut: []string{"8.8.0.0/16"}}, Ceiling{Allow: []string{"8.8.8.0/24"}}, "8.8.8.0/24", "", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := ReachOf(tt.egress, tt.ceiling)
			if err != nil {
				t.Fatal(err)
			}
			got := strings.Join(r.Hosts, " ")
			switch {
			case r.Internet:
				got = "Internet"
			case !r.Internet && len(r.Hosts) == 0 && len(r.Packages) == 0:
				got = "nothing"
			}
			if got != tt.want || strings.Join(r.Except, " ") != tt.except || r.Withheld != tt.asked {
				t.Errorf("got %q except %q, withheld %v; want %q, %q, %v", got, r.Except, r.Withheld, tt.want, tt.except, tt.asked)
			}
			// What it says is what the wall does.
			o, err := NewOutbound(tt.egress, tt.ceiling)
			if err != nil {
				t.Fatal(err)
			}
			for _, host := range []string{"api.example.com", "x.test", "other.example.org"} {
				v := o.Connect(Connection{Addr: netip.MustParseAddrPort("1.2.3.4:443"), Names: []string{host}})
				said := r.Internet || slices.Contains(r.Hosts, host)
				if (v.Effect == Allow) != said {
					t.Errorf("%s: the wall says %s, and the page %v", host, v.Effect, said)
				}
			}
		})
	}
}
