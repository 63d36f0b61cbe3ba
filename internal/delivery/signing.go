package delivery

import (
	"context"
	"fmt"

	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/signing"
	"postern/internal/store"
)

// SigningKeys lets people manage the DKIM keys of their domains.
type SigningKeys struct {
	db     *store.DB
	ring   *signing.Ring // nil means no signing keys
	domain string        // of the server
}

// NewSigningKeys returns the management of the keys in ring, which may be nil.
// Domain is the server's own.
func NewSigningKeys(db *store.DB, ring *signing.Ring, domain string) *SigningKeys {
	return &SigningKeys{db: db, ring: ring, domain: domain}
}

// mayKeep returns an error unless who may manage the signing keys of a domain.
// Only people of the project that holds the domain may; for the server's own
// domain, those of the first project, who operate the server. For any other
// domain it returns [signing.ErrNotFound], so that its existence is not
// revealed.
func (k *SigningKeys) mayKeep(ctx context.Context, who auth.Principal, name string) error {
	if who.Kind != auth.Person {
		return fmt.Errorf("%s may not manage signing keys: only a person may: %w", who, auth.ErrForbidden)
	}
	if k.ring == nil {
		return fmt.Errorf("domain %q: %w", name, signing.ErrNotFound)
	}
	var owner string
	err := k.db.View(ctx, func(tx *store.Tx) (err error) {
		if name == k.domain || name == signing.IdentityName(k.domain) {
			owner, err = auth.FirstProject(ctx, tx)
			return err
		}
		owner, _, err = domain.Owner(ctx, tx, name)
		return err
	})
	if err != nil {
		return fmt.Errorf("owner of domain %q: %w", name, err)
	}
	if owner != who.Project {
		return fmt.Errorf("domain %q: %w", name, signing.ErrNotFound)
	}
	return nil
}

// Domains returns the domains whose DKIM keys who may manage: the server's own
// if who operates it, and the verified domains of who's project.
func (k *SigningKeys) Domains(ctx context.Context, who auth.Principal) (out []string, err error) {
	if who.Kind != auth.Person {
		return nil, fmt.Errorf("%s may not manage signing keys: only a person may: %w", who, auth.ErrForbidden)
	}
	if k.ring != nil && k.mayKeep(ctx, who, k.domain) == nil {
		out = append(out, k.domain)
	}
	err = k.db.View(ctx, func(tx *store.Tx) error {
		names, err := tx.Strings(ctx, `select distinct k.domain from signing_key k join mail_domain d on d.name = k.domain where d.project_id = $1 and d.state <> 'pending' order by k.domain`, who.Project)
		out = append(out, names...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list domains with signing keys: %w", err)
	}
	return out, nil
}

// Keys returns the published keys of a domain of who's project.
func (k *SigningKeys) Keys(ctx context.Context, who auth.Principal, name string) ([]signing.Key, error) {
	if err := k.mayKeep(ctx, who, name); err != nil {
		return nil, err
	}
	return k.ring.Keys(ctx, name)
}

// Rotate is [signing.Ring.Rotate] for a domain of who's project.
func (k *SigningKeys) Rotate(ctx context.Context, who auth.Principal, name string) ([]signing.Key, error) {
	if err := k.mayKeep(ctx, who, name); err != nil {
		return nil, err
	}
	return k.ring.Rotate(ctx, who, name)
}

// Check is [signing.Ring.Check] for a domain of who's project.
func (k *SigningKeys) Check(ctx context.Context, who auth.Principal, name string) ([]signing.Published, error) {
	if err := k.mayKeep(ctx, who, name); err != nil {
		return nil, err
	}
	return k.ring.Check(ctx, who, name)
}

// Remove is [signing.Ring.Remove] for a domain of who's project.
func (k *SigningKeys) Remove(ctx context.Context, who auth.Principal, name, id string) error {
	if err := k.mayKeep(ctx, who, name); err != nil {
		return err
	}
	return k.ring.Remove(ctx, who, name, id)
}
