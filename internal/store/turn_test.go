package store_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"postern/internal/store"
	"postern/internal/storetest"
)

// TestTurnsExclude: transactions whose turns exclude one another never run at the same
// time on PostgreSQL, and others do.
func TestTurnsExclude(t *testing.T) {
	db := postgres(t)
	inbox, other, elsewhere := store.Thing("p", "ibx_1"), store.Thing("p", "ibx_2"), store.Thing("q", "ibx_1")
	for _, tt := range []struct {
		a, b store.Turn
		want bool // they exclude one another
	}{
		{store.All(), store.All(), true},
		{store.All(), store.Project("p"), true},
		{store.All(), inbox, true},
		{store.All(), store.Task("sequence"), true},
		{store.Project("p"), store.Project("p"), true},
		{store.Project("p"), inbox, true},
		{store.Project("p"), store.Project("q"), false},
		{store.Project("p"), elsewhere, false},
		{store.Project("p"), store.Task("p"), false},
		{inbox, inbox, true},
		{inbox, elsewhere, true}, // ids are unique, so no two projects have this one
		{inbox, other, false},
		{inbox, store.Task("ibx_1"), false},
		{store.Task("sequence"), store.Task("sequence"), true},
		{store.Task("sequence"), store.Task("prune"), false},
		// What the caller does not know widens the turn.
		{store.Thing("", "ibx_1"), store.Thing("p", "ibx_2"), true},
		{store.Thing("p", ""), inbox, true},
		{store.Project(""), elsewhere, true},
		{store.Task(""), elsewhere, true},
		{store.Turn{}, elsewhere, true},
	} {
		t.Run(fmt.Sprintf("%s and %s", tt.a, tt.b), func(t *testing.T) {
			for _, order := range [][2]store.Turn{{tt.a, tt.b}, {tt.b, tt.a}} {
				if got := excludes(t, db, order[0], order[1]); got != tt.want {
					t.Errorf("%s excludes %s: got %v, want %v", order[0], order[1], got, tt.want)
				}
			}
		})
	}
}

// postgres returns a database of PostgreSQL, or skips the test: SQLite has one writer.
func postgres(t *testing.T) *store.DB {
	t.Helper()
	source := storetest.PostgresURL(t)
	if source == "" {
		t.Skipf("%s is not set", storetest.PostgresVar)
	}
	return storetest.Open(t, source)
}

// excludes reports whether b has to wait while a runs.
func excludes(t *testing.T, db *store.DB, a, b store.Turn) (waited bool) {
	t.Helper()
	ran := make(chan error, 1)
	err := db.UpdateIn(t.Context(), a, func(*store.Tx) error {
		go func() { ran <- db.UpdateIn(t.Context(), b, func(*store.Tx) error { return nil }) }()
		for {
			select {
			case err := <-ran:
				ran <- nil
				return err
			case <-time.After(5 * time.Millisecond):
			}
			if n := locks(t, db, `not l.granted`); n > 0 {
				waited = true
				return nil
			}
		}
	})
	if err = errors.Join(err, <-ran); err != nil {
		t.Fatal(err)
	}
	return waited
}

// locks returns how many locks of the database match where.
func locks(t *testing.T, db *store.DB, where string) (n int) {
	t.Helper()
	err := db.View(t.Context(), func(tx *store.Tx) error {
		return tx.One(t.Context(), `select count(*) from pg_locks l join pg_database d on d.oid = l.database where d.datname = current_database() and `+where, nil, &n)
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestTurnsTakeLocksInOrder: what waits for its project does not hold its thing, so
// that nobody who holds the project waits for it.
func TestTurnsTakeLocksInOrder(t *testing.T) {
	db := postgres(t)
	ran := make(chan error, 1)
	err := db.UpdateIn(t.Context(), store.Project("p"), func(*store.Tx) error {
		go func() {
			ran <- db.UpdateIn(t.Context(), store.Thing("p", "ibx_1"), func(*store.Tx) error { return nil })
		}()
		for locks(t, db, `not l.granted`) == 0 {
			time.Sleep(5 * time.Millisecond)
		}
		if n := locks(t, db, `l.locktype = 'advisory' and l.granted`); n != 1 {
			t.Errorf("%d advisory locks are held, want the project's", n)
		}
		return nil
	})
	if err = errors.Join(err, <-ran); err != nil {
		t.Fatal(err)
	}
}

// TestTurnsNeverDeadlock: transactions of all turns in two programs count exactly, and
// PostgreSQL ends none as a deadlock.
func TestTurnsNeverDeadlock(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		projects, things := []string{"p", "q"}, []string{"ibx_1", "ibx_2", "ibx_3"}
		add := func(tx *store.Tx, name string) error {
			var n int
			if err := tx.One(ctx, `select seq from turn_count where name = $1`, []any{name}, &n); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, `update turn_count set seq = $1 where name = $2`, n+1, name)
			return err
		}
		err := db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `create table turn_count (name text primary key, seq bigint not null)`)
			for _, p := range projects {
				for _, thing := range things {
					if err == nil {
						_, err = tx.ExecContext(ctx, `insert into turn_count values ($1, 0)`, p+thing)
					}
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]int{}
		var mu sync.Mutex
		var wg sync.WaitGroup
		for w := range 8 {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(uint64(w), 1))
				for range 40 {
					turn, write := store.All(), []string{}
					p, thing := projects[r.IntN(2)], things[r.IntN(3)]
					for _, other := range projects {
						for _, of := range things {
							write = append(write, other+of)
						}
					}
					switch n := r.IntN(20); {
					case n > 3:
						turn, write = store.Thing(p, thing), []string{p + thing}
					case n > 0:
						turn, write = store.Project(p), []string{p + "ibx_3", p + "ibx_1", p + "ibx_2"}
					}
					err := db.UpdateIn(ctx, turn, func(tx *store.Tx) error {
						for _, name := range write {
							if err := add(tx, name); err != nil {
								return err
							}
						}
						return nil
					})
					if err != nil {
						t.Errorf("%s: %v", turn, err)
						return
					}
					mu.Lock()
					for _, name := range write {
						want[name]++
					}
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		err = db.View(ctx, func(tx *store.Tx) error {
			for name, n := range want {
				var got int
				if err := tx.One(ctx, `select seq from turn_count where name = $1`, []any{name}, &got); err != nil || got != n {
					t.Errorf("%s: got %d, %v, want %d", name, got, err, n)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		storetest.NoDeadlocks(t, db)
	})
}

// TestTurnsCover: a transaction knows whose rows it may write, on both databases.
func TestTurnsCover(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		for _, tt := range []struct {
			turn              store.Turn
			own, other, nones bool
		}{
			{store.All(), true, true, true},
			{store.Project("p"), true, false, false},
			{store.Thing("p", "ibx_1"), true, false, false},
			{store.Task("sequence"), false, false, true},
		} {
			err := db.UpdateIn(t.Context(), tt.turn, func(tx *store.Tx) error {
				for project, want := range map[string]bool{"p": tt.own, "q": tt.other, "": tt.nones} {
					if got := tx.Turn().Covers(project); got != want {
						t.Errorf("%s covers project %q: got %v, want %v", tt.turn, project, got, want)
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := db.View(t.Context(), func(tx *store.Tx) error {
			if tx.Turn().Covers("p") || tx.Turn() == store.All() {
				t.Error("a transaction that reads has a turn to write")
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	})
}
