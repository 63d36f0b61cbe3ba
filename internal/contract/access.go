package contract

import (
	"fmt"
	"net/netip"
	"path"
	"slices"

	"postern/internal/policy"
)

// An Access is what a contract says about a path.
type Access struct {
	Read, Write bool
	Why         string // for people; names the clause
}

// Access says whether the run may read or write at p, by the words of Files alone: what
// is there is another question. The longest of Read, Write and the system directories
// that p is in holds; Deny wins, and inputs are read-only. A path that is not absolute or
// not written plainly is refused.
func (c *Contract) Access(p string) Access {
	if _, ok := names(p); !ok {
		return Access{Why: "the path must be absolute and written plainly, such as " + path.Join("/", p)}
	}
	for i, d := range c.Files.Deny {
		if inside(p, d) {
			return Access{Why: fmt.Sprintf("files.deny[%d] hides %s", i, d)}
		}
	}
	if in, ok := c.MatchInput(p); ok {
		return Access{Read: true, Why: "files.inputs has " + in.Path + ", read-only"}
	}
	best, found := -1, Access{Why: "neither files.read nor files.write has it"}
	try := func(dirs []string, a Access, field string) {
		for i, d := range dirs {
			if inside(p, d) && len(d) > best {
				best, found = len(d), a
				found.Why = fmt.Sprintf("%s has %s", field, d)
				if field != "the template" {
					found.Why = fmt.Sprintf("%s[%d] has %s", field, i, d)
				}
			}
		}
	}
	try(systemDirs(), Access{Read: true}, "the template")
	try(c.Files.Read, Access{Read: true}, "files.read")
	try(c.Files.Write, Access{Read: true, Write: true}, "files.write")
	return found
}

// Reach says whether the run may connect to a host or an address, by the contract
// alone: the project's own rules for the network bound it further.
func (c *Contract) Reach(host string) (allowed bool, why string) {
	out, err := policy.NewOutbound(c.Egress(), policy.Ceiling{Internet: true, Allow: c.special()})
	if err != nil {
		return false, err.Error()
	}
	var v policy.Verdict
	if a, err := netip.ParseAddr(host); err == nil {
		v = out.Connect(policy.Connection{Addr: netip.AddrPortFrom(a, 443)})
	} else {
		v = out.Resolve(host)
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

// special returns the addresses that the contract names itself: which of them a project
// opens is not the contract's question.
func (c *Contract) special() []string {
	return slices.DeleteFunc(slices.Clone(c.Network.Allow), func(s string) bool { return s == everywhere })
}
