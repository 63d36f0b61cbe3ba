package auth

import (
	"context"
	"fmt"

	"postern/internal/store"
)

// The attack: somebody who can write the database inserts a person, a session or
// a link, and then decides as a person. So the rows that let people sign in are
// sealed, in the columns that identify the person and the role.

// SealedPeople describes the sealed table of accounts.
func SealedPeople() store.Sealed {
	return store.Sealed{Table: "person", Key: []string{"id"}, Only: []string{"id", "project_id", "name", "password", "role", "email", "disabled_at", "changes"}}
}

// SealedChanges describes the sealed history of accounts, from which a [Roll]
// counts people. The attack: an owner hides in the database that they created a
// second account, or that it was recently, and approves with both. Deleted rows
// are noticed by their number, which is in the account's own sealed row.
func SealedChanges() store.Sealed {
	return store.Sealed{Table: "person_change", Key: []string{"person_id", "at", "what"}}
}

// SealedSessions describes the sealed table of sessions.
func SealedSessions() store.Sealed {
	return store.Sealed{Table: "session", Key: []string{"hash"}, Only: []string{"hash", "person_id", "id", "kind", "created_at", "expires_at", "strong_at"}}
}

// SealedSetups describes the sealed table of one-time links, which create accounts
// and set passwords.
func SealedSetups() store.Sealed {
	return store.Sealed{Table: "setup", Key: []string{"hash"}, Only: []string{"hash", "project_id", "id", "role", "person_id", "created_by", "expires_at", "used_at"}}
}

// EndSetups ends the unused links that match where, and returns their number.
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
			continue // it is invalid already, and must not become valid
		}
		if err := tx.Seal(ctx, SealedSetups(), `hash = $1`, r.Values["hash"]); err != nil {
			return 0, err
		}
	}
	return len(rows), nil
}

// SealPerson seals the account with this ID as tx has written it.
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
