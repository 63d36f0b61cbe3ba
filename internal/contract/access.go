package contract

import (
	"fmt"
	"net/netip"
	"path"
	"slices"

	"postern/internal/policy"
)

// An Access is what a contract lets a run do with a path.
type Access struct {
	Read, Write bool
	Why         string // for people; names the clause
}

// Access reports whether Files lets the run read or write p. It does not check whether
// p exists. Deny takes precedence, then Inputs, which are read-only, then the longest
// of Read, Write and the system directories that contains p. Paths that are not
// absolute or not clean are refused.
func (c *Contract) Access(p string) Access {
	if _, ok := names(p); !ok {
		return Access{Why: "the path must be absolute and clean, such as " + path.Join("/", p)}
	}
	for i, d := range c.Files.Deny {
		if inside(p, d) {
			return Access{Why: fmt.Sprintf("files.deny[%d] hides %s", i, d)}
		}
	}
	if in, ok := c.MatchInput(p); ok {
		return Access{Read: true, Why: "files.inputs names " + in.Path + ", read-only"}
	}
	best, found := -1, Access{Why: "neither files.read nor files.write contains it"}
	try := func(dirs []string, a Access, field string) {
		for i, d := range dirs {
			if inside(p, d) && len(d) > best {
				best, found = len(d), a
				found.Why = fmt.Sprintf("%s has %s", field, d)
				if field != "the template" {
					found.Why = fmt.Sprintf("%s[%d] is %s", field, i, d)
				}
			}
		}
	}
	try(systemDirs(), Access{Read: true}, "the template")
	try(c.Files.Read, Access{Read: true}, "files.read")
	try(c.Files.Write, Access{Read: true, Write: true}, "files.write")
	return found
}

// Reach reports whether the contract lets the run connect to an address, or to a host:
// at the port that "host:port" names, or without one at any. The project's own network
// rules may be stricter.
func (c *Contract) Reach(host string) (allowed bool, why string) {
	out, err := c.outbound()
	if err != nil {
		return false, err.Error()
	}
	var v policy.Verdict
	if a, err := netip.ParseAddr(host); err == nil {
		v = out.Connect(policy.Connection{Addr: netip.AddrPortFrom(a, 443)})
	} else {
		p, err := policy.ParseHostPattern(host)
		if err != nil {
			return false, err.Error()
		}
		v = out.Resolve(p.Name)
		n := c.Network.parse()
		if v.Effect == policy.Allow && v.Rule != policy.RulePackages && p.Port != 0 && !n.internet && !policy.HostsWithin(p, n.names) {
			return false, fmt.Sprintf("network.allow names %s, and not its port %d", p.Name, p.Port)
		}
	}
	switch {
	case v.Effect == policy.Allow && v.Rule == policy.RulePackages:
		return true, "packages: " + v.Reason
	case v.Effect == policy.Allow:
		return true, "network.allow names it"
	case c.Network.parse().internet:
		return false, "network.deny names it, or it is not a public address"
	}
	return false, "network.allow does not name it"
}

// outbound returns the decisions of the contract alone.
func (c *Contract) outbound() (*policy.Outbound, error) {
	return policy.NewOutbound(c.Egress(), policy.Ceiling{Internet: true, Allow: c.special()})
}

// special returns the destinations that the contract names itself. Whether the project
// allows the private ones among them is not decided here.
func (c *Contract) special() []string {
	return slices.DeleteFunc(slices.Clone(c.Network.Allow), func(s string) bool { return s == everywhere })
}
