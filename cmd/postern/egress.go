package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/policy"
	"postern/internal/secret"
	"postern/internal/signing"
)

// checkEgress returns an error unless a sandbox may have what e names outside of
// itself: its proxy, within the ceiling, and identity tokens, which need an issuer.
func (d *daemon) checkEgress(ctx context.Context, _ auth.Principal, e policy.Egress) error {
	if len(e.Tokens) > 0 && d.issuer == nil {
		return fmt.Errorf("%w: iam.tokens: this server issues no identity tokens; its operator sets --public-url, the address under which others fetch the keys that verify them", policy.ErrInvalid)
	}
	if e.Proxy != nil {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if err := d.wall.CheckProxy(ctx, e.Proxy); err != nil {
			return fmt.Errorf("%w: %w", policy.ErrInvalid, err)
		}
	}
	return nil
}

// credentials are what the wall puts on requests of sandboxes: the secrets of their
// projects and their identity tokens.
type credentials struct {
	secrets *secret.Store
	issuer  *signing.Issuer // nil without a public URL
}

// Bound returns the credentials of who's sandbox, without values.
func (c credentials) Bound(ctx context.Context, who auth.Principal, e *policy.Egress) ([]inject.Secret, error) {
	list, err := c.secrets.Bound(ctx, who, e)
	if err != nil || c.issuer == nil {
		return list, err
	}
	tokens, err := c.issuer.Bound(ctx, who, e)
	return slices.Concat(list, tokens), err
}

// Guarded returns whose values answers are searched for besides those of Bound.
func (c credentials) Guarded(ctx context.Context, who auth.Principal) ([]inject.Guarded, error) {
	return c.secrets.Guarded(ctx, who)
}

// OpenGuarded returns a value of Guarded, to mask answers with. The caller wipes it.
func (c credentials) OpenGuarded(ctx context.Context, who auth.Principal, g inject.Guarded) (inject.Value, error) {
	return c.secrets.OpenGuarded(ctx, who, g)
}

// Open returns the value of one of them. The caller wipes it.
func (c credentials) Open(ctx context.Context, who auth.Principal, id string) (inject.Value, error) {
	if signing.IsToken(id) {
		if c.issuer == nil {
			return inject.Value{}, fmt.Errorf("open identity token: this server issues none: %w", auth.ErrForbidden)
		}
		return c.issuer.Open(ctx, who, id)
	}
	return c.secrets.Open(ctx, who, id)
}
