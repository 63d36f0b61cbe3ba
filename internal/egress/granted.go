package egress

import (
	"context"
	"net/netip"
	"slices"

	"postern/internal/contract"
	"postern/internal/outgoing"
	"postern/internal/policy"
)

// This file decides by the lists of a sandbox and by what Config.Grants opens beyond
// them. A grant opens nothing that the contract which binds the sandbox does not have.

// bounded decides by the contract that binds the sandbox, if one does.
func (a *attached) bounded(ctx context.Context, g contract.Grant) policy.Verdict {
	return a.w.cfg.Bounds.Allows(ctx, a.who.Project, a.who.Contract, g)
}

// hasConnection decides by the contract on a connection to addr by name, which may be
// empty.
func (a *attached) hasConnection(ctx context.Context, name string, addr netip.AddrPort) policy.Verdict {
	g := contract.Grant{Kind: policy.KindConnect, Addr: addr}
	if name != "" {
		g.Hosts = []string{name}
	}
	return a.bounded(ctx, g)
}

// connect decides on a connection. Inspect means that only a grant for requests
// allows it, or that it is to a registry, which may only be read, whatever the port:
// then the connection may be made only if each of its requests is inspected.
func (a *attached) connect(ctx context.Context, c policy.Connection) (v policy.Verdict, inspect bool) {
	v = a.rules.Load().Connect(c)
	// The attack: a permitted name that its owner points to a private address.
	if v.Effect == policy.Allow {
		return v, v.Rule == policy.RulePackages || slices.ContainsFunc(c.Names, a.rules.Load().Packages().Host)
	}
	if !c.Public() {
		return v, false
	}
	if len(c.Names) == 0 {
		if w := a.hasConnection(ctx, "", c.Addr); w.Effect != policy.Allow {
			return w, false
		}
	}
	for _, n := range c.Names {
		n, err := policy.Name(n)
		if err != nil {
			continue
		}
		// The attack: a permit for the whole project opens a host to a run whose contract
		// does not have it. Each name is judged alone: a name of the contract and one of a
		// permit must not add up.
		if w := a.hasConnection(ctx, n, c.Addr); w.Effect != policy.Allow {
			if v.Effect != policy.Allow && w.Rule == policy.RuleContract {
				v = w
			}
			continue
		}
		if a.w.cfg.Grants == nil {
			continue
		}
		switch g, ins := a.w.cfg.Grants.Allows(ctx, a.who, n, c.Addr.Port()); {
		case g.Effect != policy.Allow:
		case !ins:
			return g, false
		default:
			v, inspect = g, true
		}
	}
	return v, inspect
}

// connectPlain is connect for a connection that is not inspected.
func (a *attached) connectPlain(ctx context.Context, c policy.Connection) policy.Verdict {
	v, inspect := a.connect(ctx, c)
	if inspect {
		return policy.Verdict{Effect: policy.Deny, Rule: v.Rule, Reason: "certain requests are allowed there, and this connection shows none that can be checked"}
	}
	return v
}

// resolve decides whether a name may be looked up outside.
func (a *attached) resolve(ctx context.Context, name string) policy.Verdict {
	v := a.rules.Load().Resolve(name)
	if v.Effect == policy.Allow {
		return v
	}
	n, err := policy.PublicName(name)
	if err != nil {
		return v
	}
	switch w := a.hasConnection(ctx, n, netip.AddrPort{}); {
	case w.Effect == policy.Allow:
	case w.Rule == policy.RulePackages: // the contract has it, and the ceiling does not
		return v
	default:
		return w
	}
	if a.w.cfg.Grants == nil {
		return v
	}
	if g, _ := a.w.cfg.Grants.Allows(ctx, a.who, n, 0); g.Effect == policy.Allow {
		return g
	}
	return v
}

// mayByName reports whether c, which is denied, would be allowed if it turned out to
// be meant for some name.
func (a *attached) mayByName(ctx context.Context, c policy.Connection) bool {
	if a.rules.Load().MayByName(c) {
		return true
	}
	if a.w.cfg.Grants == nil || !c.Public() || a.hasConnection(ctx, "", netip.AddrPort{}).Effect != policy.Allow {
		return false
	}
	v, _ := a.w.cfg.Grants.Allows(ctx, a.who, "", c.Addr.Port())
	return v.Effect == policy.Allow
}

// find decides by grants on a request to a host that the lists do not open, or open only
// to be read.
func (a *attached) find(ctx context.Context, g RequestGranter, r *outgoing.Request) policy.Verdict {
	// The attack: a contract lets a run read a registry, and a permit for the whole project
	// lets it publish there.
	if w := a.bounded(ctx, contract.Grant{Kind: policy.KindRequest, Hosts: []string{r.Host}}); w.Effect != policy.Allow {
		return w
	}
	return g.Find(ctx, a.who, r)
}

// onlyRequests reports whether the lists do not open name at the port of dst, and a
// grant opens it for certain requests only, at some port.
func (a *attached) onlyRequests(ctx context.Context, name string, dst netip.AddrPort) bool {
	if a.w.cfg.Grants == nil || a.rules.Load().Connect(a.connection(dst, []string{name})).Effect == policy.Allow {
		return false
	}
	v, inspect := a.w.cfg.Grants.Allows(ctx, a.who, name, 0)
	return v.Effect == policy.Allow && inspect
}
