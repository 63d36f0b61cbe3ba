package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

func TestOutboundConnect(t *testing.T) {
	const site = "93.184.216.34"
	internet, everything := Ceiling{Internet: true}, Egress{Internet: true}
	names := Egress{AllowOut: []string{"example.com", "*.example.org"}, DenyOut: []string{"0.0.0.0/0"}}
	for _, tc := range []struct {
		name    string
		c       Ceiling
		e       Egress
		addr    string
		names   []string
		own     bool
		allowed bool
		reason  string // part of it
	}{
		{"zero values", Ceiling{}, Egress{}, site, nil, false, false, "the project denies outbound connections"},
		{"closed project", Ceiling{}, everything, site, nil, false, false, "the project denies outbound connections"},
		{"open project", internet, everything, site, nil, false, true, ""},
		{"open project, sandbox asked for nothing", internet, Egress{}, site, nil, false, false, "has no Internet access"},
		{"allow wins over deny", internet, Egress{Internet: true, AllowOut: []string{site}, DenyOut: []string{"93.0.0.0/8"}}, site, nil, false, true, ""},
		{"deny", internet, Egress{Internet: true, DenyOut: []string{"93.0.0.0/8"}}, site, nil, false, false, "denyOut of the sandbox names"},
		{"deny does not reach further", internet, Egress{Internet: true, DenyOut: []string{"93.0.0.0/8"}}, "1.1.1.1", nil, false, true, ""},
		{"deny all", internet, Egress{Internet: true, DenyOut: []string{"0.0.0.0/0"}}, site, nil, false, false, "denyOut"},
		{"ceiling by prefix", Ceiling{Allow: []string{"93.184.216.0/24"}}, everything, site, nil, false, true, ""},
		{"outside the ceiling's prefix", Ceiling{Allow: []string{"93.184.216.0/24"}}, everything, "1.1.1.1", nil, false, false, "a list only, which does not name 1.1.1.1"},
		{"sandbox cannot widen", Ceiling{Allow: []string{"93.184.216.0/24"}}, Egress{AllowOut: []string{"1.1.1.1", "0.0.0.0/0"}}, "1.1.1.1", nil, false, false, "a list only"},
		{"ceiling by name", Ceiling{Allow: []string{"example.com"}}, everything, site, []string{"example.com"}, false, true, ""},
		{"ceiling by name, unknown here", Ceiling{Allow: []string{"example.com"}}, everything, site, nil, false, false, "a list only"},
		{"sandbox by name", internet, names, site, []string{"example.com"}, false, true, ""},
		{"sandbox by name, spelled otherwise", internet, names, site, []string{"EXAMPLE.com."}, false, true, ""},
		{"wildcard", internet, names, site, []string{"a.b.example.org"}, false, true, ""},
		{"wildcard is not its own name", internet, names, site, []string{"example.org"}, false, false, "denyOut"},
		{"wildcard needs a dot", internet, names, site, []string{"evilexample.org"}, false, false, ""},
		{"one of several names", internet, names, site, []string{"x.test", "example.com"}, false, true, ""},
		{"two names do not add up", Ceiling{Allow: []string{"a.test"}}, Egress{AllowOut: []string{"b.test"}}, site, []string{"a.test", "b.test"}, false, false, ""},
		{"a name that is an address", internet, Egress{AllowOut: []string{"example.com"}}, site, []string{"0x5db8d822"}, false, false, ""},

		{"metadata", internet, everything, "169.254.169.254", nil, false, false, "169.254.169.254 is link-local (cloud metadata) and never reachable"},
		{"metadata, mapped", internet, everything, "::ffff:169.254.169.254", nil, false, false, "cloud metadata"},
		{"metadata, NAT64", internet, everything, "64:ff9b::a9fe:a9fe", nil, false, false, "NAT64"},
		{"metadata, 6to4", internet, everything, "2002:a9fe:a9fe::1", nil, false, false, "6to4"},
		{"metadata, IPv6", internet, everything, "fd00:ec2::254", nil, false, false, "cloud metadata"},
		{"metadata, zone", internet, everything, "fe80::a9fe:a9fe%eth0", nil, false, false, "link-local"},
		{"metadata asked for by the sandbox", internet, Egress{AllowOut: []string{"169.254.169.254"}}, "169.254.169.254", nil, false, false, "never reachable"},
		{"metadata under the whole world", Ceiling{Allow: []string{"0.0.0.0/0"}}, everything, "169.254.169.254", nil, false, false, "never reachable"},
		{"metadata under link-local", Ceiling{Allow: []string{"169.254.0.0/16"}}, everything, "169.254.169.254", nil, false, false, "never reachable"},
		{"metadata by its address", Ceiling{Allow: []string{"169.254.169.254"}}, everything, "169.254.169.254", nil, false, true, ""},
		{"azure", internet, everything, "168.63.129.16", nil, false, false, "host service"},
		{"alibaba", internet, everything, "100.100.100.200", nil, false, false, "cloud metadata"},
		{"private", internet, everything, "10.1.2.3", nil, false, false, "private"},
		{"private in an entry", Ceiling{Allow: []string{"10.1.0.0/16"}}, everything, "10.1.2.3", nil, false, true, ""},
		{"private in an entry, not of the sandbox", Ceiling{Allow: []string{"10.1.0.0/16"}}, Egress{}, "10.1.2.3", nil, false, false, "no Internet access"},
		{"private in an entry of more than private", Ceiling{Allow: []string{"8.0.0.0/5"}}, everything, "10.1.2.3", nil, false, false, "private"},
		{"rebinding", Ceiling{Internet: true, Allow: []string{"example.com"}}, names, "10.1.2.3", []string{"example.com"}, false, false, "10.1.2.3 is private and never reachable"},
		{"rebinding to us", Ceiling{Internet: true, Allow: []string{"example.com"}}, names, "127.0.0.1", []string{"example.com"}, false, false, "loopback"},
		{"name of a private address in an entry", Ceiling{Allow: []string{"10.1.2.3"}}, names, "10.1.2.3", []string{"example.com"}, false, true, ""},
		{"loopback", internet, everything, "127.9.9.9", nil, false, false, "loopback"},
		{"IPv6 loopback", internet, everything, "::1", nil, false, false, "loopback"},
		{"unspecified", internet, everything, "0.0.0.0", nil, false, false, "this network"},
		{"carrier NAT", internet, everything, "100.127.255.255", nil, false, false, "carrier NAT"},
		{"after carrier NAT", internet, everything, "100.128.0.1", nil, false, true, ""},
		{"172.16/12", internet, everything, "172.31.255.255", nil, false, false, "private"},
		{"after 172.16/12", internet, everything, "172.32.0.1", nil, false, true, ""},
		{"benchmark", internet, everything, "198.19.0.1", nil, false, false, "benchmarks"},
		{"documentation", internet, everything, "203.0.113.9", nil, false, false, "documentation"},
		{"multicast", internet, everything, "239.1.1.1", nil, false, false, "multicast"},
		{"broadcast", internet, everything, "255.255.255.255", nil, false, false, "broadcast"},
		{"reserved", internet, everything, "250.1.1.1", nil, false, false, "reserved"},
		{"IPv6 private", internet, everything, "fc00::1", nil, false, false, "private"},
		{"IPv6 unassigned", internet, everything, "4000::1", nil, false, false, "not a public address"},
		{"IPv6 compatible", internet, everything, "::10.0.0.1", nil, false, false, "embedded"},
		{"IPv6 public", internet, everything, "2606:4700::1111", nil, false, true, ""},
		{"own", internet, everything, site, nil, true, false, "an address of the machine"},
		{"own in a prefix", Ceiling{Internet: true, Allow: []string{"93.184.216.0/24"}}, everything, site, nil, true, false, "an address of the machine"},
		{"own by its address", Ceiling{Allow: []string{site}}, everything, site, nil, true, true, ""},
		{"own and private, in a prefix", Ceiling{Allow: []string{"10.0.0.0/8"}}, everything, "10.1.2.3", nil, true, false, "an address of the machine"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o, err := NewOutbound(tc.e, tc.c)
			if err != nil {
				t.Fatal(err)
			}
			c := Connection{Addr: netip.AddrPortFrom(netip.MustParseAddr(tc.addr), 443), Names: tc.names, Own: tc.own}
			v := o.Connect(c)
			if (v.Effect == Allow) != tc.allowed || v.Effect == Ask || v.Reason == "" || !strings.Contains(v.Reason, tc.reason) {
				t.Errorf("got %+v, want allowed %v: %q", v, tc.allowed, tc.reason)
			}
		})
	}
}

func TestNamesOpenThePortsOfTheWebAndThoseNamed(t *testing.T) {
	const site = "93.184.216.34"
	for _, tc := range []struct {
		allow, ceiling []string // an empty ceiling is the whole Internet
		host           string
		open, closed   []uint16
		reason         string // of the closed ones
	}{
		{[]string{"example.com"}, nil, "example.com", []uint16{80, 443}, []uint16{1, 22, 53, 8443, 9000, 65535}, "example.com:"},
		{[]string{"example.com:8443"}, nil, "example.com", []uint16{8443}, []uint16{80, 443, 844, 22}, "allowOut names example.com, and not its port"},
		{[]string{"example.com", "example.com:8443"}, nil, "example.com", []uint16{80, 443, 8443}, []uint16{22}, ""},
		{[]string{"*.example.com:8443"}, nil, "a.example.com", []uint16{8443}, []uint16{443}, ""},
		{[]string{"*.example.com:8443"}, nil, "example.com", nil, []uint16{443, 8443}, "does not name example.com"},
		{[]string{"*.example.com:8443", "a.example.com"}, nil, "b.example.com", []uint16{8443}, []uint16{443}, ""},
		{[]string{"example.com:5432"}, []string{"example.com"}, "example.com", nil, []uint16{5432, 443}, ""},
		{[]string{"example.com"}, []string{"example.com:5432"}, "example.com", nil, []uint16{5432, 443}, ""},
		{[]string{"example.com:5432"}, []string{"example.com:5432"}, "example.com", []uint16{5432}, []uint16{443}, ""},
		{[]string{"0.0.0.0/0"}, []string{"example.com"}, "example.com", []uint16{443}, []uint16{5432}, "--egress-allow=example.com:5432"},
		{[]string{site}, nil, "example.com", []uint16{22, 443}, nil, ""},
	} {
		o, err := NewOutbound(Egress{AllowOut: tc.allow, DenyOut: []string{"0.0.0.0/0"}}, Ceiling{Internet: len(tc.ceiling) == 0, Allow: tc.ceiling})
		if err != nil {
			t.Fatal(err)
		}
		decide := func(port uint16) Verdict {
			return o.Connect(Connection{Addr: netip.AddrPortFrom(netip.MustParseAddr(site), port), Names: []string{tc.host}})
		}
		for _, p := range tc.open {
			if v := decide(p); v.Effect != Allow {
				t.Errorf("allowOut %q, ceiling %q, %s:%d: %+v", tc.allow, tc.ceiling, tc.host, p, v)
			}
		}
		for _, p := range tc.closed {
			if v := decide(p); v.Effect == Allow || !strings.Contains(v.Reason, tc.reason) {
				t.Errorf("allowOut %q, ceiling %q, %s:%d: %+v, want it denied with %q", tc.allow, tc.ceiling, tc.host, p, v, tc.reason)
			}
		}
	}
}

func TestOnlyAnAddressOfTheSandboxOpensEveryProtocol(t *testing.T) {
	a := netip.MustParseAddr("93.184.216.34")
	for _, tc := range []struct {
		e    Egress
		c    Ceiling
		want bool
	}{
		{Egress{Internet: true}, Ceiling{Internet: true}, false},
		{Egress{AllowOut: []string{"0.0.0.0/0"}}, Ceiling{Internet: true}, false},
		{Egress{AllowOut: []string{"64.0.0.0/2", "0.0.0.0/1"}}, Ceiling{Internet: true}, false},
		{Egress{Internet: true}, Ceiling{Allow: []string{"93.184.216.34"}}, false},
		{Egress{AllowOut: []string{"example.com"}}, Ceiling{Internet: true}, false},
		{Egress{AllowOut: []string{"93.184.216.34"}}, Ceiling{Internet: true}, true},
		{Egress{AllowOut: []string{"::ffff:93.184.216.34"}}, Ceiling{Internet: true}, true},
		{Egress{AllowOut: []string{"93.0.0.0/8"}}, Ceiling{Internet: true}, true},
	} {
		o, err := NewOutbound(tc.e, tc.c)
		if err != nil {
			t.Fatal(err)
		}
		if got := o.ByAddress(a); got != tc.want {
			t.Errorf("%+v: got %v", tc.e, got)
		}
	}
}

func TestHostsWithin(t *testing.T) {
	for _, tc := range []struct {
		p    string
		of   []string
		want bool
	}{
		{"a.e.com", []string{"*.e.com"}, true},
		{"a.e.com:8443", []string{"*.e.com"}, false},
		{"a.e.com:443", []string{"*.e.com"}, true},
		{"a.e.com", []string{"*.e.com:443"}, false},
		{"a.e.com", []string{"*.e.com:443", "a.e.com:80"}, true},
		{"*.e.com:8443", []string{"a.e.com:8443"}, false},
		{"*.a.e.com:8443", []string{"*.e.com:8443"}, true},
		{"e.com", nil, false},
	} {
		p, err := ParseHostPattern(tc.p)
		if err != nil || p.String() != tc.p {
			t.Fatalf("%s: got %v, %v", tc.p, p, err)
		}
		var of []HostPattern
		for _, s := range tc.of {
			o, err := ParseHostPattern(s)
			if err != nil {
				t.Fatal(err)
			}
			of = append(of, o)
		}
		if got := HostsWithin(p, of); got != tc.want {
			t.Errorf("%s in %q: got %v", tc.p, tc.of, got)
		}
	}
}

func TestOutboundMayByName(t *testing.T) {
	names := Egress{AllowOut: []string{"example.com"}}
	for _, tc := range []struct {
		name string
		c    Ceiling
		e    Egress
		addr string
		want bool
	}{
		{"a name of the sandbox", Ceiling{Internet: true}, names, "1.1.1.1", true},
		{"a name of the project", Ceiling{Allow: []string{"example.com"}}, Egress{Internet: true}, "1.1.1.1", true},
		{"no names", Ceiling{Internet: true}, Egress{}, "1.1.1.1", false},
		{"a closed project", Ceiling{}, names, "1.1.1.1", false},
		{"allowed already", Ceiling{Internet: true}, Egress{Internet: true}, "1.1.1.1", false},
		{"private", Ceiling{Internet: true}, names, "10.0.0.9", false},
		{"a name at another port", Ceiling{Internet: true}, Egress{AllowOut: []string{"example.com:8443"}}, "1.1.1.1", false},
	} {
		o, err := NewOutbound(tc.e, tc.c)
		if err != nil {
			t.Fatal(err)
		}
		if got := o.MayByName(Connection{Addr: netip.AddrPortFrom(netip.MustParseAddr(tc.addr), 443)}); got != tc.want {
			t.Errorf("%s: got %v, want %v", tc.name, got, tc.want)
		}
	}
}

func TestOutboundResolve(t *testing.T) {
	names := Egress{AllowOut: []string{"example.com", "*.example.org", "db.corp"}}
	for _, tc := range []struct {
		name   string
		c      Ceiling
		e      Egress
		ask    string
		want   bool
		reason string
	}{
		{"named", Ceiling{Internet: true}, names, "example.com.", true, ""},
		{"below a wildcard", Ceiling{Internet: true}, names, "X.Example.ORG", true, ""},
		{"not named", Ceiling{Internet: true}, names, "evil.test", false, "does not name evil.test"},
		{"any, with the Internet", Ceiling{Internet: true}, Egress{Internet: true}, "any.test", true, ""},
		{"any, with the Internet but for all of it", Ceiling{Internet: true}, Egress{Internet: true, DenyOut: []string{"0.0.0.0/0"}}, "any.test", false, ""},
		{"closed project", Ceiling{}, names, "example.com", false, "the project denies"},
		{"not of the project", Ceiling{Allow: []string{"example.com"}}, names, "a.example.org", false, "a list only"},
		{"private name", Ceiling{Internet: true}, Egress{Internet: true}, "metadata.google.internal", false, "a private name"},
		{"private name of the sandbox", Ceiling{Internet: true}, names, "db.corp", false, "a private name"},
		{"private name of both", Ceiling{Allow: []string{"db.corp"}}, names, "db.corp", true, ""},
		{"no domain", Ceiling{Internet: true}, Egress{Internet: true}, "localhost", false, "without a domain"},
		{"reverse of home", Ceiling{Internet: true}, Egress{Internet: true}, "1.home.arpa", false, "a private name"},
		{"an address", Ceiling{Internet: true}, Egress{Internet: true}, "127.1", false, "ends in a number"},
		{"empty", Ceiling{Internet: true}, Egress{Internet: true}, ".", false, "not a host name"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o, err := NewOutbound(tc.e, tc.c)
			if err != nil {
				t.Fatal(err)
			}
			if v := o.Resolve(tc.ask); (v.Effect == Allow) != tc.want || !strings.Contains(v.Reason, tc.reason) {
				t.Errorf("got %+v, want %v %q", v, tc.want, tc.reason)
			}
		})
	}
}

func TestEgressValidate(t *testing.T) {
	many := make([]string, maxEntries+1)
	for i := range many {
		many[i] = fmt.Sprintf("1.2.%d.%d", i/256, i%256)
	}
	for _, tc := range []struct {
		name string
		e    Egress
		want string // part of the error; empty: none
	}{
		{"zero", Egress{}, ""},
		{"all kinds", Egress{AllowOut: []string{"1.1.1.1", "10.0.0.0/8", "2606:4700::/32", "example.com", "*.example.com", "_dmarc.example.com"}}, ""},
		{"E2B's way of naming", Egress{Internet: true, AllowOut: []string{"example.com"}, DenyOut: []string{"0.0.0.0/0"}}, ""},
		{"a name with the Internet open", Egress{Internet: true, AllowOut: []string{"1.1.1.1", "example.com"}}, `allowOut[1] "example.com": a name needs "0.0.0.0/0" in denyOut`},
		{"a name in denyOut", Egress{DenyOut: []string{"1.1.1.1", "example.com"}}, `denyOut[1] "example.com": must be an IP address or a CIDR prefix`},
		{"a star", Egress{AllowOut: []string{"*"}}, `allowOut[0] "*": must be`},
		{"a star inside", Egress{AllowOut: []string{"a.*.com"}}, "allowOut[0]"},
		{"a URL", Egress{AllowOut: []string{"https://example.com"}}, "allowOut[0]"},
		{"ports", Egress{AllowOut: []string{"example.com:5432", "*.example.com:8443", "example.com:1", "example.com:65535"}}, ""},
		{"a port of a name with the Internet open", Egress{Internet: true, AllowOut: []string{"example.com:5432"}}, `allowOut[0] "example.com:5432": a name needs`},
		{"no port", Egress{AllowOut: []string{"a.test", "example.com:"}}, `allowOut[1] "example.com:": the port "" must be a number from 1 to 65535`},
		{"port 0", Egress{AllowOut: []string{"example.com:0"}}, `the port "0" must be`},
		{"a port too high", Egress{AllowOut: []string{"example.com:65536"}}, `the port "65536" must be`},
		{"a port that overflows", Egress{AllowOut: []string{"example.com:18446744073709551617"}}, "must be a number from 1 to 65535"},
		{"a port with a zero before it", Egress{AllowOut: []string{"example.com:0443"}}, `the port "0443" must be`},
		{"a port with a sign", Egress{AllowOut: []string{"example.com:+443"}}, `the port "+443" must be`},
		{"a port with a space", Egress{AllowOut: []string{"example.com: 443"}}, `the port " 443" must be`},
		{"a port in hexadecimal", Egress{AllowOut: []string{"example.com:0x1bb"}}, `the port "0x1bb" must be`},
		{"a port by name", Egress{AllowOut: []string{"example.com:https"}}, `the port "https" must be`},
		{"two ports", Egress{AllowOut: []string{"example.com:80:81"}}, `the port "80:81" must be`},
		{"a range of ports", Egress{AllowOut: []string{"example.com:80-90"}}, `the port "80-90" must be`},
		{"every port", Egress{AllowOut: []string{"example.com:*"}}, `the port "*" must be`},
		{"a port alone", Egress{AllowOut: []string{":443"}}, "allowOut[0]"},
		{"a port of every name", Egress{AllowOut: []string{"*:443"}}, "allowOut[0]"},
		{"a port of an address", Egress{AllowOut: []string{"93.184.216.34:443"}}, "an address opens all of its ports"},
		{"a port of an IPv6 address", Egress{AllowOut: []string{"[2600::1]:443"}}, "an address opens all of its ports"},
		{"a port of a network", Egress{AllowOut: []string{"93.184.216.0/24:443"}}, "allowOut[0]"},
		{"a port in denyOut", Egress{DenyOut: []string{"example.com:443"}}, "denyOut[0]"},
		{"an octal address", Egress{AllowOut: []string{"010.0.0.1"}}, "allowOut[0]"},
		{"a decimal address", Egress{AllowOut: []string{"2130706433"}}, "allowOut[0]"},
		{"a short address", Egress{AllowOut: []string{"127.1"}}, "allowOut[0]"},
		{"a wide mapped prefix", Egress{DenyOut: []string{"::ffff:0.0.0.0/90"}}, "denyOut[0]"},
		{"empty", Egress{AllowOut: []string{""}}, "allowOut[0]"},
		{"outside ASCII", Egress{AllowOut: []string{"exämple.com"}}, "allowOut[0]"},
		{"line break", Egress{AllowOut: []string{"example.com\r\nx"}}, "allowOut[0]"},
		{"too many", Egress{AllowOut: many}, "at most 512"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := tc.e.Validate()
			if tc.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
	if err := (Ceiling{Allow: []string{"example.com:x"}}).Validate(); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), `egress-allow[0] "example.com:x": the port "x"`) {
		t.Errorf("got %v", err)
	}
	if err := (Ceiling{Allow: []string{"*"}}).Validate(); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "egress-allow[0]") {
		t.Errorf("got %v", err)
	}
}

// Whatever is known of a connection, no address that is not public is reached
// that the project did not name by address.
func FuzzOutboundConnect(f *testing.F) {
	f.Add([]byte{169, 254, 169, 254}, "example.com", "*.example.com", "0.0.0.0/0")
	f.Add([]byte{10, 0, 0, 1}, "10.0.0.1", "a.test", "8.0.0.0/5")
	f.Add(make([]byte, 16), "0x7f.1", "::/0", "::ffff:0:0/96")
	f.Fuzz(func(t *testing.T, addr []byte, name, allow, ceiling string) {
		a, ok := netip.AddrFromSlice(addr)
		if !ok {
			return
		}
		c := Connection{Addr: netip.AddrPortFrom(a, 80), Names: []string{name}}
		for _, e := range []Egress{{Internet: true}, {AllowOut: []string{allow, name}}} {
			o, err := NewOutbound(e, Ceiling{Internet: true, Allow: []string{ceiling}})
			if err != nil {
				continue
			}
			if v := o.Connect(c); v.Effect == Allow && kindOf(a.Unmap()).name != "" {
				if p, err := parsePrefix(ceiling); err != nil || !p.Contains(a.Unmap()) || p.Bits() < 4 {
					t.Errorf("%v allowed by %+v under %q: %+v", a, e, ceiling, v)
				}
			}
			o.Resolve(name)
			o.MayByName(c)
		}
		if n, err := Name(name); err == nil {
			if again, err := Name(n); err != nil || again != n {
				t.Errorf("Name(%q) = %q, then %q, %v", name, n, again, err)
			}
		}
	})
}
