package auth_test

import (
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestNamesThatAreTaken invites somebody who calls themself what others are in
// the record: the operator, the system, or a colleague.
func TestNamesThatAreTaken(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	f.join("ann", auth.Owner, "")
	for _, name := range []string{
		"local", "local-root", "local-0", "system", "ann", "", "Ann", "ann ", "-ann", ".ann", "a/b", "a\nb", "a\x00", "ánn", strings.Repeat("a", 64),
	} {
		err := f.db.Update(f.ctx, func(tx *store.Tx) error {
			_, link, err := auth.NewInvitation(f.ctx, tx, auth.Invitation{Project: f.project, Role: auth.Viewer})
			if err != nil {
				return err
			}
			_, err = auth.Redeem(f.ctx, tx, link, name, f.hash)
			return err
		})
		if !errors.Is(err, auth.ErrInvalid) || !strings.Contains(err.Error(), "name") {
			t.Errorf("name %q: %v, want ErrInvalid with the field", name, err)
		}
	}
	for _, name := range []string{"localhost", "systems", "0", "a.b_c@d+e-f", strings.Repeat("a", 63)} {
		if p := f.join(name, auth.Viewer, "person:ann"); p.ID != name || p.Role != auth.Viewer || p.Decides() {
			t.Errorf("name %q: %+v", name, p)
		}
	}
}

// TestInvitationGivesItsRole: the role and the project are the link's, and a
// link for no known role is not made.
func TestInvitationGivesItsRole(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	for _, role := range []auth.Role{"", "admin", "Owner"} {
		err := f.db.Update(f.ctx, func(tx *store.Tx) error {
			_, _, err := auth.NewInvitation(f.ctx, tx, auth.Invitation{Project: f.project, Role: role})
			return err
		})
		if !errors.Is(err, auth.ErrInvalid) {
			t.Errorf("an invitation of role %q: %v, want ErrInvalid", role, err)
		}
	}
	for i, role := range auth.Roles {
		if p := f.join("p"+string('a'+rune(i)), role, ""); p.Role != role || p.Project != f.project || p.Kind != auth.Person {
			t.Errorf("invited as %s: %+v", role, p)
		}
	}
}

// TestLinkEnds uses a link at its end, and one that many use at once.
func TestLinkEnds(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := newFixture(t, db)
		var link auth.Secret
		var v auth.Invitation
		invite := func() {
			f.update(func(tx *store.Tx) (err error) {
				v, link, err = auth.NewInvitation(f.ctx, tx, auth.Invitation{Project: f.project, Role: auth.Viewer, CreatedBy: "person:ann"})
				return err
			})
		}
		invite()
		if d := time.Until(v.Expires); d > auth.SetupTime || d < auth.SetupTime-time.Minute {
			t.Errorf("a link is good for %v, want %v", d, auth.SetupTime)
		}
		f.update(func(tx *store.Tx) error { // as the server itself would have written it a day ago
			_, err := tx.ExecContext(f.ctx, `update setup set expires_at = $1`, store.Time(time.Now()))
			return errors.Join(err, storetest.Reseal(f.ctx, tx))
		})
		err := db.Update(f.ctx, func(tx *store.Tx) error {
			_, err := auth.Redeem(f.ctx, tx, link, "late", f.hash)
			return err
		})
		if !errors.Is(err, auth.ErrUnauthenticated) {
			t.Errorf("a link at its end: %v, want ErrUnauthenticated", err)
		}
		invite()
		var made atomic.Int64
		var wg sync.WaitGroup
		for i := range 5 {
			wg.Go(func() {
				err := db.Update(f.ctx, func(tx *store.Tx) error {
					_, err := auth.Redeem(f.ctx, tx, link, "many"+string('a'+rune(i)), f.hash)
					return err
				})
				if err == nil {
					made.Add(1)
				} else if !errors.Is(err, auth.ErrUnauthenticated) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if made.Load() != 1 {
			t.Errorf("one link made %d accounts", made.Load())
		}
	})
}

// TestRenewalChangesOnlyThePassword uses a link that the operator made for a
// person who has forgotten theirs: name and role stay, sessions end, and for a
// day the account may be the operator's.
func TestRenewalChangesOnlyThePassword(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	f.join("ann", auth.Owner, "")
	bob := f.join("bob", auth.Reviewer, "person:ann")
	session := f.session(bob, auth.Session{Kind: auth.Browser})
	other, err := auth.HashPassword("another password")
	if err != nil {
		t.Fatal(err)
	}
	var p auth.Principal
	f.update(func(tx *store.Tx) error {
		_, link, err := auth.NewInvitation(f.ctx, tx, auth.Invitation{Project: f.project, Role: auth.Owner, Person: "bob", CreatedBy: "person:local-root"})
		if err != nil {
			return err
		}
		p, err = auth.Redeem(f.ctx, tx, link, "eve", other)
		return err
	})
	if p != bob {
		t.Errorf("the link is %+v, want bob as he was: %+v", p, bob)
	}
	if _, err := auth.CheckSession(f.ctx, f.db, session); !errors.Is(err, auth.ErrUnauthenticated) {
		t.Errorf("a session from before: %v, want ErrUnauthenticated", err)
	}
	signIn := auth.NewSignIn(f.db)
	if _, err := signIn.Check(f.ctx, "bob", "", password); !errors.Is(err, auth.ErrUnauthenticated) {
		t.Errorf("the former password: %v", err)
	}
	if got, err := signIn.Check(f.ctx, "bob", "", "another password"); err != nil || got != bob {
		t.Errorf("the new password: %+v, %v", got, err)
	}
	if got := f.roll(time.Now()).Human("person:bob"); got != "" {
		t.Errorf("after the operator's link bob's account is %q, want anybody's", got)
	}
	err = f.db.Update(f.ctx, func(tx *store.Tx) error {
		_, _, err := auth.NewInvitation(f.ctx, tx, auth.Invitation{Project: f.project, Role: auth.Owner, Person: "nobody"})
		return err
	})
	if !errors.Is(err, store.ErrNotFound) {
		t.Errorf("a link for somebody who is not there: %v", err)
	}
}
