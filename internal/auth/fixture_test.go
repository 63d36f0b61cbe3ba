package auth_test

import (
	"context"
	"sync"
	"testing"

	"postern/internal/auth"
	"postern/internal/store"
)

const password = "correct horse battery"

// passwordHash makes the hash of password once: that takes some 60 ms by design.
var passwordHash = sync.OnceValues(func() (string, error) { return auth.HashPassword(password) })

// A fixture is a project in a database.
type fixture struct {
	t       *testing.T
	ctx     context.Context
	db      *store.DB
	project string
	key     auth.Secret // the project's
	hash    string      // of password
}

func newFixture(t *testing.T, db *store.DB) *fixture {
	t.Helper()
	f := &fixture{t: t, ctx: t.Context(), db: db}
	var err error
	if f.hash, err = passwordHash(); err != nil {
		t.Fatal(err)
	}
	f.update(func(tx *store.Tx) (err error) {
		f.project, f.key, err = auth.NewProject(f.ctx, tx, "one")
		return err
	})
	return f
}

// update runs fn in a transaction that must succeed.
func (f *fixture) update(fn func(tx *store.Tx) error) {
	f.t.Helper()
	if err := f.db.Update(f.ctx, fn); err != nil {
		f.t.Fatal(err)
	}
}

// exec is what somebody does who can write the database.
func (f *fixture) exec(query string, args ...any) {
	f.t.Helper()
	f.update(func(tx *store.Tx) error {
		_, err := tx.ExecContext(f.ctx, query, args...)
		return err
	})
}

// join makes an account by an invitation of by, a principal or empty.
func (f *fixture) join(name string, role auth.Role, by string) (p auth.Principal) {
	f.t.Helper()
	f.update(func(tx *store.Tx) error {
		_, link, err := auth.NewInvitation(f.ctx, tx, auth.Invitation{Project: f.project, Role: role, CreatedBy: by})
		if err == nil {
			p, err = auth.Redeem(f.ctx, tx, link, name, f.hash)
		}
		return err
	})
	return p
}

// session signs p in.
func (f *fixture) session(p auth.Principal, s auth.Session) (token auth.Secret) {
	f.t.Helper()
	f.update(func(tx *store.Tx) (err error) {
		_, token, err = auth.BeginSession(f.ctx, tx, p, s)
		return err
	})
	return token
}

// count runs a query of one number.
func (f *fixture) count(query string, args ...any) (n int) {
	f.t.Helper()
	f.update(func(tx *store.Tx) error { return tx.One(f.ctx, query, args, &n) })
	return n
}

// idIn returns the id of a person's row.
func (f *fixture) idIn(tx *store.Tx, name string) (id string) {
	f.t.Helper()
	if err := tx.One(f.ctx, `select id from person where name = $1`, []any{name}, &id); err != nil {
		f.t.Fatal(err)
	}
	return id
}
