package verification

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"

	"postern/internal/policy"
)

// A destination is an address and a port that no sandbox may reach, unless a setting opens it.
//
// Each is an attempt of its own. If several were one, a setting that opens one of them would
// hide a hole at the others.
type destination struct {
	at    netip.AddrPort
	bits  int  // see opening
	never bool // no setting opens it
	quiet bool // another attempt tries it
}

func (d *destination) what() string { return "TCP to " + d.at.String() }

func (d *destination) opening() opening {
	if d.never {
		return opening{}
	}
	return opening{at: d.at, bits: d.bits}
}

func to(at string, bits int) destination {
	return destination{at: netip.MustParseAddrPort(at), bits: bits}
}

// publicTCP returns public destinations at two addresses, so that an entry of --egress-allow
// that opens one opens not the other, and at a port for which no name is looked for. Mail
// never leaves by TCP, whatever is open.
func publicTCP() []destination {
	mail := to(publicHost2+":25", 0)
	mail.never = true
	return []destination{to(publicHost+":443", 0), to(publicHost2+":80", 0), to(publicHost2+":8443", 0), mail}
}

// resolverTCP returns the ports of public DNS resolvers.
func resolverTCP() []destination {
	return []destination{to(publicHost+":53", 0), to(publicHost2+":853", 0)}
}

// privateTCP returns an address at the end of each private range.
func privateTCP() []destination {
	return []destination{to("10.255.255.254:80", 8), to("172.31.255.254:80", 12), to("192.168.255.254:80", 16), to("100.127.255.254:80", 10)}
}

// metadataTCP returns the addresses at which clouds give credentials to whoever asks.
func metadataTCP() []destination {
	return []destination{to("169.254.169.254:80", 32), to("169.254.170.2:80", 32), to("100.100.100.200:80", 32), to("168.63.129.16:80", 32)}
}

func metadataNames() []string { return []string{"metadata.google.internal", "metadata.azure.internal"} }

// noWayTo wants none of the destinations to be reached, and each refusal to be recorded.
func noWayTo(to ...destination) (out []Want) {
	for i := range to {
		d := &to[i]
		if !d.quiet {
			out = append(out, noWay(d.what()).unless(d.opening()))
		}
		out = append(out, control(refusalOf(d.at.String())).unless(d.opening()))
	}
	return out
}

// noWayToNames wants no name to be resolved. --egress=allow does not open them: they belong
// to no public host.
func noWayToNames(names ...string) (out []Want) {
	for _, n := range names {
		out = append(out, noWay("the name "+n).unless(opening{name: n, special: true}))
	}
	return out
}

func nameJobs(names ...string) (out []job) {
	for _, n := range names {
		out = append(out, job{What: "the name " + n, Kind: "resolve", Targets: []string{n}})
	}
	return out
}

// maxOpened bounds how many entries of --egress-allow are tried.
const maxOpened = 16

// tryOpened tries to reach the entries of --egress-allow, and what a wall that reads them too
// widely would open as well: hosts below and above the listed ones, and their other ports.
func tryOpened(ctx context.Context, s *session) ([]Attempt, error) {
	addresses, hosts, names, ports := nextTo(&s.Settings)
	var jobs []job
	var made []Attempt
	for _, j := range []struct {
		job job
		n   int
	}{
		{job{What: "addresses on it", Kind: "reach", Targets: addresses}, len(addresses)},
		{job{What: "hosts on it", Kind: "web", Targets: hosts}, len(hosts)},
		{job{What: "names next to it", Kind: "resolve", Targets: names}, len(names)},
		{job{What: "other ports of it", Kind: "reach", Targets: ports}, len(ports)},
	} {
		if j.n > 0 {
			jobs = append(jobs, j.job)
		} else {
			made = append(made, Attempt{j.job.What, Absent, "there are none"})
		}
	}
	if len(jobs) == 0 {
		return made, nil
	}
	tried, err := inside(jobs...)(ctx, s)
	if err != nil {
		return append(made, tried...), err
	}
	// A name that does not exist cannot be resolved either. So the wall must have refused it.
	for _, r := range s.box.refusals(ctx, names...) {
		if r.Outcome != Done {
			err = errors.Join(err, errors.New(r.String()))
		}
	}
	return append(made, tried...), err
}

// nextTo returns the addresses and the hosts that the entries of --egress-allow open, names
// that they do not, and other ports of their hosts.
func nextTo(s *Settings) (addresses, listed []endpoint, names []string, ports []endpoint) {
	hosts := s.hosts()
	open := func(name string) bool { return s.opens(&opening{name: name}) != "" }
	for _, e := range s.EgressAllow {
		if p, err := prefix(e); err == nil && p.Addr().Is4() && p.Bits() > 0 && len(addresses) < maxOpened {
			addresses = append(addresses, endpoint{p.Addr().String(), 443})
		}
	}
	for _, h := range hosts[:min(len(hosts), maxOpened)] {
		name, wild := strings.CutPrefix(h.Name, ".")
		host := name
		if wild {
			host = "verify." + name
		}
		listed = append(listed, endpoint{host, int(h.Ports()[0])})
		next := "verify." + name
		if wild {
			next = name
		}
		if _, above, ok := strings.Cut(name, "."); ok && strings.Contains(above, ".") && !open("verify."+above) {
			names = append(names, "verify."+above)
		}
		// "evilexample.com" ends with "example.com".
		for _, n := range []string{next, "verify" + name} {
			if !open(n) && !slices.Contains(names, n) {
				names = append(names, n)
			}
		}
		const other = 8443
		if !slices.ContainsFunc(hosts, func(p policy.HostPattern) bool { return covers(p, host) && p.Opens(other) }) {
			ports = append(ports, endpoint{host, other})
		}
	}
	return addresses, listed, names, ports
}
