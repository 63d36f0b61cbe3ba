package auth_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// roll returns the accounts of f's project at now.
func (f *fixture) roll(now time.Time) (r auth.Roll) {
	f.t.Helper()
	err := f.db.View(f.ctx, func(tx *store.Tx) (err error) {
		r, err = auth.ReadRoll(f.ctx, tx, f.project, now)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return r
}

// TestInvitedAccountIsItsInviterAtFirst: an owner who makes a second account
// for themself is one human being until colleagues had a day to notice.
func TestInvitedAccountIsItsInviterAtFirst(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := newFixture(t, db)
		f.join("ann", auth.Owner, "")
		f.join("sock", auth.Reviewer, "person:ann")
		now := time.Now()
		r := f.roll(now)
		if got := r.Human("person:sock"); got != "person:ann" {
			t.Errorf("a fresh account is %q, want ann's", got)
		}
		if got := r.Human("person:ann"); got != "person:ann" {
			t.Errorf("the first account of a project is %q, want its own", got)
		}
		at, by, how := r.Settles("person:sock")
		if by != "person:ann" || how != auth.Joined || at.Sub(now) > auth.SettleTime || at.Sub(now) < auth.SettleTime-time.Minute {
			t.Errorf("it settles at %v by %s, %s", at, by, how)
		}
		later := f.roll(now.Add(auth.SettleTime + time.Minute))
		if got := later.Human("person:sock"); got != "person:sock" {
			t.Errorf("a day later it is %q, want its own", got)
		}
		if got := later.Human("person:local-root"); got != "" {
			t.Errorf("the operator at the machine is %q, want anybody", got)
		}
	})
}

// TestAccountsThatWereTamperedWithAreNobodys is an owner with a second account
// who can write the database and hides that the account is theirs.
func TestAccountsThatWereTamperedWithAreNobodys(t *testing.T) {
	for name, attack := range map[string]func(f *fixture){
		"removes who opened it": func(f *fixture) { f.exec(`delete from person_change where what = 'joined'`) },
		"names another opener":  func(f *fixture) { f.exec(`update person_change set by_whom = 'person:sock'`) },
		"opened it long ago":    func(f *fixture) { f.exec(`update person_change set at = 1`) },
		"adds a change": func(f *fixture) {
			f.exec(`insert into person_change (person_id, at, by_whom, what, was, seal) select person_id, at + 1, 'person:sock', 'enabled', '', seal from person_change`)
		},
		"removes it and its count": func(f *fixture) {
			f.exec(`delete from person_change`)
			f.exec(`update person set changes = 0 where name = 'sock'`)
		},
		"puts the row of before back": func(f *fixture) {
			f.exec(`delete from person_change`)
			f.exec(`update person set changes = 0, seal = (select seal from former) where name = 'sock'`)
		},
		"gives it another role": func(f *fixture) { f.exec(`update person set role = 'owner' where name = 'sock'`) },
	} {
		t.Run(name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				f := newFixture(t, db)
				f.join("ann", auth.Owner, "")
				f.join("sock", auth.Reviewer, "person:ann")
				f.exec(`create table former as select * from person where name = 'sock'`)
				f.update(func(tx *store.Tx) error {
					return auth.RecordChange(f.ctx, tx, f.idIn(tx, "sock"), "person:ann", auth.Reset)
				})
				before := f.roll(time.Now())
				if before.Doubtful("person:sock") || before.Human("person:sock") != "person:ann" {
					t.Fatalf("before the attack: doubtful %v, %q", before.Doubtful("person:sock"), before.Human("person:sock"))
				}
				attack(f)
				r := f.roll(time.Now())
				if !r.Doubtful("person:sock") || r.Human("person:sock") != "" {
					t.Errorf("doubtful %v, a human being of its own: %q; want it to be anybody's", r.Doubtful("person:sock"), r.Human("person:sock"))
				}
				if r.Doubtful("person:ann") || r.Human("person:ann") != "person:ann" {
					t.Error("ann's own account is in doubt, too")
				}
			})
		})
	}
}

// TestRemovedColleagueIsMissed removes the row of the only other person: who is
// left must not count as the only one who could decide.
func TestRemovedColleagueIsMissed(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	f.join("ann", auth.Owner, "")
	f.join("bob", auth.Owner, "person:ann")
	everybody := func(auth.Principal) bool { return true }
	if got := f.roll(time.Now()).Others(everybody, []string{"person:ann"}); len(got) != 0 {
		t.Errorf("others a moment after bob has joined: %v, want none: what counts is a day ago", got)
	}
	now := time.Now().Add(auth.SettleTime + time.Minute)
	if got := f.roll(now).Others(everybody, []string{"person:ann"}); !slices.Equal(got, []string{"person:bob"}) {
		t.Errorf("others a day later: %v, want bob", got)
	}
	f.exec(`delete from person_change`)
	f.exec(`delete from person where name = 'bob'`)
	r := f.roll(now)
	if got := r.Others(everybody, []string{"person:ann"}); len(got) != 1 {
		t.Errorf("others after the row was removed: %v, want somebody", got)
	}
	if !r.Doubtful("person:bob") || r.Human("person:bob") != "" {
		t.Error("what a removed person approved counts as that person's")
	}
}

// TestDisabledColleagueCountsForADay disables the only other reviewer: for as
// long as an opening counts, the owner does not become the only one.
func TestDisabledColleagueCountsForADay(t *testing.T) {
	f := newFixture(t, storetest.SQLite(t))
	f.join("ann", auth.Owner, "")
	f.join("bob", auth.Reviewer, "person:ann")
	day := auth.SettleTime + time.Minute
	f.update(func(tx *store.Tx) error { // they joined long ago
		_, err := tx.ExecContext(f.ctx, `update person_change set at = at - $1`, (2 * day).Microseconds())
		return errors.Join(err, storetest.Reseal(f.ctx, tx))
	})
	f.update(func(tx *store.Tx) error {
		id := f.idIn(tx, "bob")
		if err := auth.RecordChange(f.ctx, tx, id, "person:ann", auth.Disabled); err != nil {
			return err
		}
		_, err := tx.ExecContext(f.ctx, `update person set disabled_at = $1 where id = $2`, store.Time(time.Now()), id)
		return errors.Join(err, auth.SealPerson(f.ctx, tx, id))
	})
	everybody := func(auth.Principal) bool { return true }
	r := f.roll(time.Now())
	if got := r.Others(everybody, []string{"person:ann"}); !slices.Equal(got, []string{"person:bob"}) || !r.Gone("person:bob") {
		t.Errorf("just disabled: others %v, gone %v; want bob, true", got, r.Gone("person:bob"))
	}
	if got := f.roll(time.Now().Add(day)).Others(everybody, []string{"person:ann"}); len(got) != 0 {
		t.Errorf("others a day later: %v, want none", got)
	}
}

// TestRollReadWhileAccountsChange: nobody is doubted whose account changes, or who joins,
// while it is read. An earlier state that is put back is doubted at once.
func TestRollReadWhileAccountsChange(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := newFixture(t, db)
		f.join("ann", auth.Owner, "")
		f.join("bob", auth.Reviewer, "person:ann")
		f.exec(`create table people_before as select * from person`)
		f.exec(`create table changes_before as select * from person_change`)
		doubted := func(tx *store.Tx) (out []string) {
			r, err := auth.ReadRoll(f.ctx, tx, f.project, time.Now())
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range []string{"person:ann", "person:bob", "person:removed from the database"} {
				if r.Doubtful(p) != (p == "person:removed from the database") { // who has no account is doubted
					out = append(out, p)
				}
			}
			if n := len(r.Others(func(auth.Principal) bool { return true }, []string{"person:ann", "person:bob"})); n > 0 {
				out = append(out, "others")
			}
			return out
		}
		err := db.View(f.ctx, func(tx *store.Tx) error {
			doubted(tx)
			f.update(func(tx *store.Tx) error {
				return auth.RecordChange(f.ctx, tx, f.idIn(tx, "bob"), "person:ann", auth.Renewed)
			})
			f.join("cho", auth.Reviewer, "person:ann")
			f.roll(time.Now()) // which remembers them
			if got := doubted(tx); len(got) > 0 {
				t.Errorf("while accounts change: doubts about %v", got)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		f.exec(`delete from person_change`)
		f.exec(`delete from person where name = 'cho'`)
		f.exec(`update person set (changes, seal) = (select changes, seal from people_before b where b.id = person.id)`)
		f.exec(`insert into person_change select * from changes_before`)
		for name, in := range map[string]func(func(*store.Tx) error) error{
			"a reader":         func(fn func(*store.Tx) error) error { return db.View(f.ctx, fn) },
			"a writer":         func(fn func(*store.Tx) error) error { return db.Update(f.ctx, fn) },
			"another's writer": func(fn func(*store.Tx) error) error { return db.UpdateIn(f.ctx, store.Thing(f.project, "x"), fn) },
		} {
			if err := in(func(tx *store.Tx) error {
				if got := doubted(tx); !slices.Equal(got, []string{"person:bob", "others"}) {
					t.Errorf("%s of an earlier state: doubts about %v, want bob and somebody who was removed", name, got)
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
	})
}
