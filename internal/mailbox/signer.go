package mailbox

import (
	"context"
	"fmt"

	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/signing"
	"postern/internal/store"
)

// mayKeep returns an error unless who may manage the signing keys of a domain:
// a person of the project that holds it; of the server's own domain, of the
// first project, since those are the people who run the server. A domain that
// is not theirs is not found.
func (m *PostOffice) mayKeep(ctx context.Context, who auth.Principal, name string) error {
	if who.Kind != auth.Person {
		return fmt.Errorf("%s may not manage signing keys, only a person may: %w", who, auth.ErrForbidden)
	}
	if m.cfg.Signer == nil {
		return fmt.Errorf("domain %q: %w", name, signing.ErrNotFound)
	}
	var owner string
	err := m.db.View(ctx, func(tx *store.Tx) (err error) {
		if name == m.cfg.Domain {
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

// SigningDomains returns the domains whose DKIM keys who may manage: that of this
// server, if who is its operator, and those of who's project that are in use.
func (m *PostOffice) SigningDomains(ctx context.Context, who auth.Principal) (out []string, err error) {
	if who.Kind != auth.Person {
		return nil, fmt.Errorf("%s cannot manage signing keys, only a person can: %w", who, auth.ErrForbidden)
	}
	if m.cfg.Signer != nil && m.mayKeep(ctx, who, m.cfg.Domain) == nil {
		out = append(out, m.cfg.Domain)
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		names, err := tx.Strings(ctx, `select distinct k.domain from signing_key k join mail_domain d on d.name = k.domain where d.project_id = $1 and d.state <> 'pending' order by k.domain`, who.Project)
		out = append(out, names...)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list domains with signing keys: %w", err)
	}
	return out, nil
}

// SigningKeys returns the published keys of a domain of who's.
func (m *PostOffice) SigningKeys(ctx context.Context, who auth.Principal, name string) ([]signing.Key, error) {
	if err := m.mayKeep(ctx, who, name); err != nil {
		return nil, err
	}
	return m.cfg.Signer.Keys(ctx, name)
}

// RotateKeys is [signing.Ring.Rotate] for a domain of who's.
func (m *PostOffice) RotateKeys(ctx context.Context, who auth.Principal, name string) ([]signing.Key, error) {
	if err := m.mayKeep(ctx, who, name); err != nil {
		return nil, err
	}
	return m.cfg.Signer.Rotate(ctx, who, name)
}

// CheckKeys is [signing.Ring.Check] for a domain of who's.
func (m *PostOffice) CheckKeys(ctx context.Context, who auth.Principal, name string) ([]signing.Published, error) {
	if err := m.mayKeep(ctx, who, name); err != nil {
		return nil, err
	}
	return m.cfg.Signer.Check(ctx, who, name)
}

// RemoveKey is [signing.Ring.Remove] for a domain of who's.
func (m *PostOffice) RemoveKey(ctx context.Context, who auth.Principal, name, id string) error {
	if err := m.mayKeep(ctx, who, name); err != nil {
		return err
	}
	return m.cfg.Signer.Remove(ctx, who, name, id)
}
