package people

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/extract"
	"postern/internal/store"
)

// Keys returns the live keys of who's project that are not bound to one inbox:
// project keys and grants. who must be a person.
func (p *People) Keys(ctx context.Context, who auth.Principal) (out []auth.Credential, err error) {
	if who.Kind != auth.Person {
		return nil, fmt.Errorf("%s may not list keys, only a person may: %w", who, auth.ErrForbidden)
	}
	err = p.db.View(ctx, func(tx *store.Tx) error {
		out, err = auth.KeysOf(ctx, tx, who.Project)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	return out, nil
}

// NewKey creates a key of who's project and returns its ID and the key, which
// cannot be retrieved again. who must be an owner; the name has 1 to 100 characters.
func (p *People) NewKey(ctx context.Context, who auth.Principal, name string) (id string, key auth.Secret, err error) {
	if !who.Manages() {
		return "", "", fmt.Errorf("%s may not create keys, only an owner may: %w", who, auth.ErrForbidden)
	}
	name = strings.TrimSpace(name)
	if name == "" || utf8.RuneCountInString(name) > 100 || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
		return "", "", fmt.Errorf("name: must be 1 to 100 characters: %w", auth.ErrInvalid)
	}
	if err := extract.CheckName(name); err != nil {
		return "", "", fmt.Errorf("name: %w: %w", err, auth.ErrInvalid)
	}
	err = p.db.Update(ctx, func(tx *store.Tx) error {
		if id, key, err = auth.NewKeyOf(ctx, tx, who.Project, name, who.String()); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.KeyCreate, id, audit.Fields{"name": name})
	})
	return id, key, err
}

// EndKey revokes a key of who's project that is not bound to one inbox. who must be
// an owner.
func (p *People) EndKey(ctx context.Context, who auth.Principal, id string) error {
	if !who.Manages() {
		return fmt.Errorf("%s may not revoke keys, only an owner may: %w", who, auth.ErrForbidden)
	}
	return p.db.Update(ctx, func(tx *store.Tx) error {
		keys, err := auth.KeysOf(ctx, tx, who.Project)
		if err != nil {
			return fmt.Errorf("end key: %w", err)
		}
		i := slices.IndexFunc(keys, func(c auth.Credential) bool { return c.ID == id })
		if i < 0 {
			return fmt.Errorf("key %s: %w", id, store.ErrNotFound)
		}
		if err := auth.Revoke(ctx, tx, id); err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.KeyRevoke, id, audit.Fields{"kind": string(keys[i].Kind), "name": keys[i].Name})
	})
}
