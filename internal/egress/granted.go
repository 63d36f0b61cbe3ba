package egress

import (
	"context"

	"postern/internal/policy"
)

// This file decides by the lists of a sandbox and by what Config.Grants opens beyond
// them.

// connect decides on a connection. Inspect means that only a grant for requests
// allows it, or that it is to a registry, which may only be read: then the connection may be made only if each of its requests is
// inspected.
func (a *attached) connect(ctx context.Context, c policy.Connection) (v policy.Verdict, inspect bool) {
	v = a.rules.Load().Connect(c)
	// The attack: a permitted name that its owner points to a private address.
	if v.Effect == policy.Allow {
		return v, v.Rule == policy.RulePackages // which are only read
	}
	if a.w.cfg.Grants == nil || !c.Public() {
		return v, false
	}
	for _, n := range c.Names {
		n, err := policy.Name(n)
		if err != nil {
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
	if v.Effect == policy.Allow || a.w.cfg.Grants == nil {
		return v
	}
	n, err := policy.PublicName(name)
	if err != nil {
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
	if a.w.cfg.Grants == nil || !c.Public() {
		return false
	}
	v, _ := a.w.cfg.Grants.Allows(ctx, a.who, "", c.Addr.Port())
	return v.Effect == policy.Allow
}
