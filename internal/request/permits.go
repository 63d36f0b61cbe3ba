package request

import (
	"context"
	"errors"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/store"
)

// Permits are the [Grants] of a register of permits.
type Permits struct {
	Register *permit.Register
	// Bounds has the contracts that bind sandboxes. Nil: a sandbox that one binds uses no
	// secret.
	Bounds *contract.Bounds
}

var _ Grants = Permits{}

// Granted implements [Grants].
func (p Permits) Granted(ctx context.Context, who auth.Principal, secret, why string) string {
	return p.Register.Secret(ctx, who, secret, why)
}

// Holds implements [Grants].
func (p Permits) Holds(ctx context.Context, project, id string) bool {
	return p.Register.InForce(ctx, project, id)
}

// Permitted implements [Grants].
func (p Permits) Permitted(ctx context.Context, who auth.Principal, r *outgoing.Request, rule string) (id string, ok bool) {
	return p.Register.Request(ctx, who, r, rule)
}

// Allow implements [Grants].
func (p Permits) Allow(ctx context.Context, tx *store.Tx, who auth.Principal, a oversight.Action, r *outgoing.Request, w oversight.Allowance) (audit.Fields, error) {
	return p.Register.Like(ctx, tx, who, a, permit.Permit{Kind: permit.Request, Hosts: []string{r.Host}, Port: r.Port, Methods: []string{r.Method}, Paths: []string{r.Path}}, w)
}

// Make implements [Grants].
func (p Permits) Make(ctx context.Context, tx *store.Tx, g Grant) error {
	_, err := p.Register.Add(ctx, tx, permit.Permit{
		Project: g.Project, Sandbox: g.Sandbox, Kind: permit.Secret, Hosts: []string{g.Host}, Secret: g.Secret, Why: g.Why,
		Until: g.Until, Action: g.Action, Decider: g.Decider,
	})
	return err
}

// Bound implements [Grants].
func (p Permits) Bound(ctx context.Context, who auth.Principal, secret, host string) (string, policy.Verdict) {
	g := contract.Grant{Kind: policy.KindSecret, Secret: secret, Hosts: []string{host}}
	v := p.Bounds.Allows(ctx, who.Project, who.Contract, g)
	if v.Effect != policy.Allow || who.Contract == "" {
		return never, v
	}
	cred, err := p.Bounds.Credential(ctx, who.Project, who.Contract, secret)
	if err != nil {
		return always, refused("the contract that binds this sandbox cannot be read: no secret is used")
	}
	return cred.Approval, v
}

// Of implements [Grants].
func (p Permits) Of(ctx context.Context, tx *store.Tx, project, action string) (string, error) {
	g, err := permit.OfAction(ctx, tx, project, action)
	if errors.Is(err, permit.ErrNotFound) || err == nil && !g.Holds(time.Now()) {
		return "", nil
	}
	return g.ID, err
}
