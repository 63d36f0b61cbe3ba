package oversight_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"postern/internal/oversight"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestTrustedReadsOneMoment: nobody may compare an action with its record where one of them
// may be newer than the other.
func TestTrustedReadsOneMoment(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		a := f.propose("x")
		check := func(tx *store.Tx) error { return f.gate.Trusted(t.Context(), tx, &a) }
		if err := f.db.Look(t.Context(), check); !errors.Is(err, oversight.ErrStale) || errors.Is(err, oversight.ErrTampered) {
			t.Errorf("outside of a transaction: %v, want ErrStale", err)
		}
		for _, turn := range []store.Turn{oversight.Turn(a.Project, "ibx_other"), store.Task("t")} {
			err := f.db.UpdateIn(t.Context(), turn, check)
			if f.db.Concurrent() != errors.Is(err, oversight.ErrStale) || errors.Is(err, oversight.ErrTampered) {
				t.Errorf("in the turn %s: %v", turn, err)
			}
		}
	})
}

// TestReaderOfAnOlderSnapshot: an action that moves while somebody reads it was not
// changed behind the server's back, and one that was put back, together with its
// record, was: for whoever reads next, and for whoever moves it.
func TestReaderOfAnOlderSnapshot(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ctx := t.Context()
		a := f.propose("x")
		trusted := func(tx *store.Tx) error {
			now, err := f.gate.Find(ctx, tx, f.person, a.ID)
			if err != nil {
				return err
			}
			return f.gate.Trusted(ctx, tx, &now)
		}
		// Readers of each version, all still open when the action is done.
		var check []func() error
		var read func(moves []func()) error
		read = func(moves []func()) error {
			return f.db.View(ctx, func(tx *store.Tx) error {
				if err := trusted(tx); err != nil {
					return err
				}
				check = append(check, func() error { return trusted(tx) })
				if len(moves) > 0 {
					moves[0]()
					return read(moves[1:])
				}
				for i, c := range check {
					if err := c(); err != nil {
						return fmt.Errorf("reader %d of %d: %w", i, len(check), err)
					}
				}
				return nil
			})
		}
		f.raw(fmt.Sprintf(`create table before as select * from action where id = '%s'`, a.ID))
		if err := read([]func(){func() { f.approve(a) }, f.drain}); err != nil {
			t.Errorf("reading it while it moves: %v", err)
		}
		if got := f.state(a.ID); got.State != oversight.Done || got.Doubt != "" {
			t.Fatalf("it is %s, doubt %q", got.State, got.Doubt)
		}

		// The seal holds and the record agrees: only the program's memory says otherwise.
		f.putBack("before", a.ID)
		f.raw(fmt.Sprintf(`delete from audit_entry where object = '%s' and verb <> 'action.propose'`, a.ID))
		if err := f.db.View(ctx, trusted); !errors.Is(err, oversight.ErrTampered) {
			t.Errorf("a reader of a row that was put back: %v, want ErrTampered", err)
		}
		if got := f.state(a.ID); got.Doubt == "" {
			t.Error("a page of a row that was put back shows no doubt")
		}
		for _, turn := range []store.Turn{store.All(), store.Project(a.Project), oversight.Turn(a.Project, a.Inbox)} {
			if err := f.db.UpdateIn(ctx, turn, trusted); !errors.Is(err, oversight.ErrTampered) {
				t.Errorf("a writer in the turn %s of a row that was put back: %v, want ErrTampered", turn, err)
			}
		}
		if err := f.gate.Decide(ctx, f.person, decision(a, true)); !errors.Is(err, oversight.ErrStale) {
			t.Errorf("a decision on it: %v, want ErrStale", err)
		}
		if f.drain(); len(f.eff.ran) != 1 {
			t.Errorf("it ran %d times", len(f.eff.ran))
		}
	})
}

// TestPartsOfAnOlderSnapshot: a part that begins while its row is read has begun as often
// as the row says, and for whoever reads next once more.
func TestPartsOfAnOlderSnapshot(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ctx := t.Context()
		a := f.propose("x")
		begin := func(attempts int64) {
			if err := f.db.Update(ctx, func(tx *store.Tx) error {
				f.gate.BeginPart(tx, a.ID, 1, attempts)
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		is := func(tx *store.Tx, want int64) error {
			if got := f.gate.PartBegun(tx, a.ID, 1); got != want {
				return fmt.Errorf("it has begun %d times, want %d", got, want)
			}
			return nil
		}
		begin(1)
		err := f.db.View(ctx, func(tx *store.Tx) error {
			if _, err := f.gate.Find(ctx, tx, f.person, a.ID); err != nil {
				return err
			}
			begin(2)
			begin(3)
			return is(tx, 1)
		})
		if err != nil {
			t.Errorf("a reader of before: %v", err)
		}
		for _, in := range []func(context.Context, func(*store.Tx) error) error{f.db.View, f.db.Update} {
			if err := in(ctx, func(tx *store.Tx) error { return is(tx, 3) }); err != nil {
				t.Error(err)
			}
		}
	})
}
