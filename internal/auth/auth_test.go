package auth_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

func TestKeys(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		var project string
		var pkey, ikey auth.Secret
		err := db.Update(ctx, func(tx *store.Tx) (err error) {
			if project, pkey, err = auth.NewProject(ctx, tx, "default"); err != nil {
				return err
			}
			_, ikey, err = auth.NewCredential(ctx, tx, auth.Credential{Project: project, Kind: auth.Agent, Inbox: "ibx_1"})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if p, err := auth.CheckKey(ctx, db, pkey); err != nil || p.Kind != auth.Project || p.Project != project || p.Inbox != "" {
			t.Errorf("project key = %+v, %v", p, err)
		}
		if p, err := auth.CheckKey(ctx, db, ikey); err != nil || p.Kind != auth.Agent || p.Inbox != "ibx_1" {
			t.Errorf("inbox key = %+v, %v", p, err)
		}
		for _, bad := range []string{"", "e2b_", "e2b_" + strings.Repeat("0", 40), "pib_' or 1=1 --", pkey.Reveal() + " ", strings.ToUpper(pkey.Reveal())} {
			if _, err := auth.CheckKey(ctx, db, auth.Secret(bad)); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("CheckKey(%q) = %v, want ErrUnauthenticated", bad, err)
			}
		}
		if s := fmt.Sprintf("%v %s %#v %q", pkey, pkey, pkey, []any{pkey}); strings.Contains(s, "e2b_") {
			t.Errorf("a key prints itself: %s", s)
		}
		err = db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update credential set revoked_at = 1`)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := auth.CheckKey(ctx, db, ikey); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("a revoked key: %v", err)
		}
	})
}

func TestPersonSignsInByLinkAndPassword(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		hash, err := auth.HashPassword("correct horse battery")
		if err != nil {
			t.Fatal(err)
		}
		var link auth.Secret
		var ann auth.Principal
		err = db.Update(ctx, func(tx *store.Tx) error {
			project, _, err := auth.NewProject(ctx, tx, "default")
			if err != nil {
				return err
			}
			if link, err = auth.NewSetup(ctx, tx, project); err != nil {
				return err
			}
			if _, err := auth.CheckSetup(ctx, tx, link); err != nil {
				t.Errorf("CheckSetup = %v", err)
			}
			if _, err := auth.Redeem(ctx, tx, link+"x", "ann", hash); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("Redeem with a wrong token = %v", err)
			}
			if _, err := auth.Redeem(ctx, tx, link, "An n", hash); !errors.Is(err, auth.ErrInvalid) {
				t.Errorf("Redeem with a bad name = %v", err)
			}
			ann, err = auth.Redeem(ctx, tx, link, "ann", hash)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		var session auth.Secret
		err = db.Update(ctx, func(tx *store.Tx) (err error) {
			if _, err := auth.Redeem(ctx, tx, link, "eve", hash); !errors.Is(err, auth.ErrUnauthenticated) {
				t.Errorf("a link used twice: %v", err)
			}
			_, session, err = auth.BeginSession(ctx, tx, ann, auth.Session{Kind: auth.Browser})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if p, err := auth.CheckSession(ctx, db, session); err != nil || p != ann {
			t.Errorf("CheckSession = %+v, %v; want %+v", p, err, ann)
		}
		if err := db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `update session set expires_at = 1`)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if _, err := auth.CheckSession(ctx, db, session); !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("an expired session: %v", err)
		}

		in := auth.NewSignIn(db)
		if p, err := in.Check(ctx, "ann", "", "correct horse battery"); err != nil || p != ann {
			t.Errorf("Check = %+v, %v", p, err)
		}
		for i := range 7 {
			for _, name := range []string{"ann", "nobody"} {
				want := auth.ErrUnauthenticated
				if i >= 5 {
					want = auth.ErrTooMany
				}
				if _, err := in.Check(ctx, name, "", "guess guess guess"); !errors.Is(err, want) {
					t.Errorf("guess %d for %s: %v, want %v", i, name, err, want)
				}
				// However long it takes here, it is one minute.
				if err := db.Update(ctx, func(tx *store.Tx) error {
					_, err := tx.ExecContext(t.Context(), `update sign_in_try set ends_at = 4000000000000000`)
					return err
				}); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// TestGuessesAtOnce: who guesses in parallel gets no more guesses than in a row,
// but for the one that is being made.
func TestGuessesAtOnce(t *testing.T) {
	in := auth.NewSignIn(storetest.SQLite(t))
	var made atomic.Int64
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			if _, err := in.Check(t.Context(), "ann", "", "guess guess guess"); errors.Is(err, auth.ErrUnauthenticated) {
				made.Add(1)
			}
		})
	}
	wg.Wait()
	if n := made.Load(); n > 6 {
		t.Errorf("%d guesses were looked at, want 6 at most", n)
	}
}

func TestHashPassword(t *testing.T) {
	for _, pw := range []string{"", "short", strings.Repeat("x", 257)} {
		if _, err := auth.HashPassword(pw); !errors.Is(err, auth.ErrInvalid) {
			t.Errorf("HashPassword of %d bytes = %v, want ErrInvalid", len(pw), err)
		}
	}
}
