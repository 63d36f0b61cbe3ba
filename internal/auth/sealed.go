package auth

import (
	"context"
	"fmt"

	"postern/internal/store"
)

// An attacker who can write the database could insert a person, a session or a
// link, and then decide as a person. So the rows that let people sign in are
// sealed, in the columns that say who may and in which role.

// SealedPeople are the accounts of people.
func SealedPeople() store.Sealed {
	return store.Sealed{Table: "person", Key: []string{"id"}, Only: []string{"id", "project_id", "name", "password", "role", "email", "disabled_at", "changes"}}
}

// SealedChanges are what was done to the accounts, by which people are counted.
// The attack: an owner removes from the database that an account is one that he
// made for himself, or that it was a short time ago, and approves with both. Of
// rows that are gone the account's own seal tells, by their number.
func SealedChanges() store.Sealed {
	return store.Sealed{Table: "person_change", Key: []string{"person_id", "at", "what"}}
}

// SealedSessions are their sessions.
func SealedSessions() store.Sealed {
	return store.Sealed{Table: "session", Key: []string{"hash"}, Only: []string{"hash", "person_id", "id", "kind", "created_at", "expires_at", "strong_at"}}
}

// SealedSetups are the one-time links that create accounts and passwords.
func SealedSetups() store.Sealed {
	return store.Sealed{Table: "setup", Key: []string{"hash"}, Only: []string{"hash", "project_id", "id", "role", "person_id", "created_by", "expires_at", "used_at"}}
}

// EndSetups ends the links that match where and were not used, and returns how
// many those are.
func EndSetups(ctx context.Context, tx *store.Tx, where string, args ...any) (int, error) {
	rows, err := tx.Rows(ctx, SealedSetups(), true, where+` and used_at = 0 and expires_at > 0`, args...)
	if err != nil {
		return 0, err
	}
	for _, r := range rows {
		if _, err := tx.ExecContext(ctx, `update setup set expires_at = 0 where hash = $1`, r.Values["hash"]); err != nil {
			return 0, fmt.Errorf("end link: %w", err)
		}
		if !r.Holds {
			continue // it opens nothing, and is not made good
		}
		if err := tx.Seal(ctx, SealedSetups(), `hash = $1`, r.Values["hash"]); err != nil {
			return 0, err
		}
	}
	return len(rows), nil
}

// SealPerson seals the account with this id as tx has written it.
func SealPerson(ctx context.Context, tx *store.Tx, id string) error {
	return tx.Seal(ctx, SealedPeople(), `id = $1`, id)
}

// SealSession seals the session whose token has this digest as tx has written it.
func SealSession(ctx context.Context, tx *store.Tx, digest []byte) error {
	return tx.Seal(ctx, SealedSessions(), `hash = $1`, digest)
}

// requireSeal returns [ErrUnauthenticated] unless the server wrote the rows of s that
// match where.
func requireSeal(ctx context.Context, tx *store.Tx, s store.Sealed, where string, args ...any) error {
	ok, err := tx.Holding(ctx, s, where, args...)
	if err == nil && !ok {
		err = fmt.Errorf("a row of %s was changed in the database: %w", s.Table, ErrUnauthenticated)
	}
	return err
}
