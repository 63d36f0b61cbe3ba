package auth_test

import (
	"crypto/sha256"
	"errors"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestForgedPeople is who can write the database and lets himself in: by a
// session, a person, a password, a role or a link that he has made up.
func TestForgedPeople(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		hash, err := auth.HashPassword("correct horse battery")
		if err != nil {
			t.Fatal(err)
		}
		other, err := auth.HashPassword("the attacker's own")
		if err != nil {
			t.Fatal(err)
		}
		var project string
		var session auth.Secret
		update := func(f func(tx *store.Tx) error) {
			t.Helper()
			if err := db.Update(ctx, f); err != nil {
				t.Fatal(err)
			}
		}
		exec := func(query string, args ...any) {
			t.Helper()
			update(func(tx *store.Tx) error {
				_, err := tx.ExecContext(ctx, query, args...)
				return err
			})
		}
		update(func(tx *store.Tx) error {
			if project, _, err = auth.NewProject(ctx, tx, "p"); err != nil {
				return err
			}
			_, link, err := auth.NewInvitation(ctx, tx, auth.Invitation{Project: project, Role: auth.Viewer})
			if err != nil {
				return err
			}
			ann, err := auth.Redeem(ctx, tx, link, "ann", hash)
			if err != nil {
				return err
			}
			_, session, err = auth.BeginSession(ctx, tx, ann, auth.Session{Kind: auth.Browser})
			return err
		})
		signIn := auth.NewSignIn(db)
		if _, err := auth.CheckSession(ctx, db, session); err != nil {
			t.Fatalf("her own session: %v", err)
		}
		if _, err := signIn.Check(ctx, "ann", "", "correct horse battery"); err != nil {
			t.Fatalf("her own password: %v", err)
		}
		refused := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("%s: %v, want ErrUnauthenticated", what, err)
			}
		}
		digest := func(token string) []byte {
			sum := sha256.Sum256([]byte(token))
			return sum[:]
		}
		exec(`insert into session (hash, person_id, created_at, expires_at, strong_at, id, kind, remote, agent, factor)
			select $1, id, 1, $2, $2, 'ses_1', 'browser', '', '', '' from person`, digest("made up"), time.Now().Add(time.Hour).UnixMicro())
		_, err = auth.CheckSession(ctx, db, "made up")
		refused("a session that was put in", err)
		exec(`insert into setup (hash, project_id, expires_at, used_at, id, role, email, person_id, created_by, created_at) values ($1, $2, $3, 0, 'inv_1', 'owner', '', '', '', 1)`,
			digest("a link"), project, time.Now().Add(time.Hour).UnixMicro())
		err = db.Update(ctx, func(tx *store.Tx) error {
			_, err := auth.Redeem(ctx, tx, "a link", "eve", other)
			return err
		})
		refused("a link that was put in", err)
		exec(`insert into person (id, project_id, name, password, created_at, role) values ('per_1', $1, 'eve', $2, 1, 'owner')`, project, other)
		_, err = signIn.Check(ctx, "eve", "", "the attacker's own")
		refused("a person who was put in", err)
		exec(`update person set role = 'owner' where name = 'ann'`)
		_, err = auth.CheckSession(ctx, db, session)
		refused("a role that was changed", err)
		exec(`update person set role = 'viewer' where name = 'ann'`)
		if _, err := auth.CheckSession(ctx, db, session); err != nil {
			t.Errorf("as it was again: %v", err)
		}
		exec(`update session set strong_at = $1 where id <> 'ses_1'`, time.Now().UnixMicro())
		_, err = auth.CheckSession(ctx, db, session)
		refused("a second factor that nobody proved", err)
		exec(`update person set password = $1 where name = 'ann'`, other)
		_, err = signIn.Check(ctx, "ann", "", "the attacker's own")
		refused("a password that was changed", err)
	})
}

// TestLinkUsedTwice is who has a link that is over, and makes it good in the
// database: a second account for one person, or one long after it was meant.
func TestLinkUsedTwice(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		update := func(f func(tx *store.Tx) error) {
			t.Helper()
			if err := db.Update(ctx, f); err != nil {
				t.Fatal(err)
			}
		}
		redeem := func(link auth.Secret, name string) error {
			return db.Update(ctx, func(tx *store.Tx) error {
				_, err := auth.Redeem(ctx, tx, link, name, "x")
				return err
			})
		}
		var used, ended auth.Secret
		update(func(tx *store.Tx) error {
			project, _, err := auth.NewProject(ctx, tx, "p")
			if err == nil {
				_, used, err = auth.NewInvitation(ctx, tx, auth.Invitation{Project: project, Role: auth.Owner})
			}
			if err == nil {
				_, ended, err = auth.NewInvitation(ctx, tx, auth.Invitation{Project: project, Role: auth.Owner})
			}
			if err == nil {
				_, err = tx.ExecContext(ctx, `create table former as select * from setup`)
			}
			return err
		})
		if err := redeem(used, "ann"); err != nil {
			t.Fatal(err)
		}
		update(func(tx *store.Tx) error {
			n, err := auth.EndSetups(ctx, tx, `created_by = ''`)
			if n != 1 {
				t.Errorf("%d links ended, want the one that was not used", n)
			}
			return err
		})
		for _, link := range []auth.Secret{used, ended} {
			if err := redeem(link, "bob"); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("a link that is over: %v, want ErrUnauthenticated", err)
			}
		}
		update(func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update setup set used_at = 0, expires_at = $1`, time.Now().Add(time.Hour).UnixMicro())
			return err
		})
		for _, link := range []auth.Secret{used, ended} {
			if err := redeem(link, "bob"); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("a link that was made good in the database: %v, want ErrUnauthenticated", err)
			}
		}
		// With the row of before, and its seal.
		update(func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `delete from setup`)
			if err == nil {
				_, err = tx.ExecContext(ctx, `insert into setup select * from former`)
			}
			return err
		})
		if err := redeem(used, "bob"); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("a link whose row was put back: %v, want ErrUnauthenticated", err)
		}
	})
}
