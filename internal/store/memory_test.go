package store_test

import (
	"context"
	"fmt"
	"testing"

	"postern/internal/store"
	"postern/internal/storetest"
)

// A counted is a row whose number only grows, and what the program remembers of it.
type counted struct {
	t  *testing.T
	db *store.DB
	m  *store.Memory
}

func newCounted(t *testing.T, db *store.DB) *counted {
	t.Helper()
	c := &counted{t: t, db: db, m: db.NewMemory(0)}
	c.write(func(tx *store.Tx) error {
		if _, err := tx.ExecContext(t.Context(), `create table counted (id text primary key, n bigint not null)`); err != nil {
			return err
		}
		_, err := tx.ExecContext(t.Context(), `insert into counted (id, n) values ('x', 0)`)
		return err
	})
	return c
}

// guard is the turn in which the row is written.
func (c *counted) guard() store.Turn { return store.Thing("p", "x") }

func (c *counted) write(fn func(tx *store.Tx) error) {
	c.t.Helper()
	if err := c.db.UpdateIn(c.t.Context(), c.guard(), fn); err != nil {
		c.t.Fatal(err)
	}
}

// set writes the row as the program does.
func (c *counted) set(n int64) {
	c.t.Helper()
	c.write(func(tx *store.Tx) error {
		c.m.Remember(tx, "x", n)
		_, err := tx.ExecContext(c.t.Context(), `update counted set n = $1 where id = 'x'`, n)
		return err
	})
}

// putBack writes the row as somebody does who can write the database.
func (c *counted) putBack(n int64) {
	c.t.Helper()
	c.write(func(tx *store.Tx) error {
		_, err := tx.ExecContext(c.t.Context(), `update counted set n = $1 where id = 'x'`, n)
		return err
	})
}

func (c *counted) read(tx *store.Tx) (n int64) {
	c.t.Helper()
	if err := tx.One(c.t.Context(), `select n from counted where id = 'x'`, nil, &n); err != nil {
		c.t.Fatal(err)
	}
	return n
}

// wentBack reports whether the row that tx sees has gone back.
func (c *counted) wentBack(tx *store.Tx) bool {
	c.t.Helper()
	n := c.read(tx)
	known, ok := c.m.Newest(tx, c.guard(), "x")
	return ok && known > n
}

// TestMemoryAnswersByTheSnapshot: a reader that took its snapshot before others committed
// finds no row that went back, and one that begins after a row went back does, at once.
func TestMemoryAnswersByTheSnapshot(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		c := newCounted(t, db)
		transactions := map[string]func(context.Context, func(*store.Tx) error) error{
			"View":   db.View,
			"Look":   db.Look,
			"Aside":  db.Aside,
			"Update": db.Update,
			"another turn": func(ctx context.Context, fn func(*store.Tx) error) error {
				return db.UpdateIn(ctx, store.Thing("p", "y"), fn)
			},
			"a wider turn": func(ctx context.Context, fn func(*store.Tx) error) error {
				return db.UpdateIn(ctx, store.Project("p"), fn)
			},
			"its turn": func(ctx context.Context, fn func(*store.Tx) error) error { return db.UpdateIn(ctx, c.guard(), fn) },
			"another task": func(ctx context.Context, fn func(*store.Tx) error) error {
				return db.UpdateIn(ctx, store.Task("t"), fn)
			},
		}
		n := int64(0)
		for name, in := range transactions {
			n += 10
			c.set(n)
			// What may run beside a writer of the row: all that reads, and on PostgreSQL what
			// has no turn, or another one.
			beside := name == "View" || name == "Look" || db.Concurrent() && (name == "Aside" || name == "another turn" || name == "another task")
			if beside {
				err := in(t.Context(), func(tx *store.Tx) error {
					first := c.read(tx)
					for range 3 {
						n++
						c.set(n)
					}
					if known, ok := c.m.Newest(tx, c.guard(), "x"); !ok || known != first {
						t.Errorf("%s, which has read %d: the memory says %d %v", name, first, known, ok)
					}
					if c.wentBack(tx) {
						t.Errorf("%s: the row went back", name)
					}
					return nil
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			for _, by := range []int64{1, 2, 12} {
				c.putBack(n - by)
				if err := in(t.Context(), func(tx *store.Tx) error {
					if !c.wentBack(tx) {
						t.Errorf("%s: a row that went back from %d to %d is not noticed", name, n, n-by)
					}
					return nil
				}); err != nil {
					t.Fatal(err)
				}
			}
			c.putBack(n)
		}
	})
}

// TestMemoryOfLongReaders: a row that went back is noticed by each reader that began after
// the program knew better, while others are still open and the row has moved on.
func TestMemoryOfLongReaders(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		c := newCounted(t, db)
		ctx := t.Context()
		c.set(3)
		err := db.View(ctx, func(old *store.Tx) error {
			c.read(old)                                       //nolint:contextcheck // each has its own
			c.set(4)                                          //nolint:contextcheck // each has its own
			c.putBack(2)                                      //nolint:contextcheck // each has its own
			return db.View(ctx, func(after *store.Tx) error { //nolint:contextcheck // each has its own
				c.read(after) // a snapshot with 2
				c.putBack(4)
				c.set(5)
				c.set(6)
				if c.wentBack(old) {
					t.Error("a reader of 3, before there was a 4: the row went back")
				}
				if !c.wentBack(after) {
					t.Error("a reader of 2, when 4 was known: it is not noticed once 6 is known")
				}
				if n := c.m.Kept("x"); n != 4 {
					t.Errorf("%d values are kept, want 4: 6, 5 and what two readers began with", n)
				}
				return nil
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		c.set(7)
		c.set(8)
		if n := c.m.Kept("x"); n > 2 {
			t.Errorf("%d values are kept though nobody reads", n)
		}
	})
}

// TestMemoryKeepsWhatIsCommitted: a transaction that fails is not remembered, a smaller
// value neither, and of more names than the limit the newest are.
func TestMemoryKeepsWhatIsCommitted(t *testing.T) {
	db := storetest.SQLite(t)
	m := db.NewMemory(2)
	remember := func(name string, n int64, result error) {
		if err := db.Update(t.Context(), func(tx *store.Tx) error {
			m.Remember(tx, name, n)
			return result
		}); (err == nil) != (result == nil) {
			t.Fatal(err)
		}
	}
	is := func(name string, want int64) {
		t.Helper()
		if err := db.View(t.Context(), func(tx *store.Tx) error {
			if got, ok := m.Newest(tx, store.All(), name); got != want || ok != (want != 0) {
				t.Errorf("%s is %d %v, want %d", name, got, ok, want)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	remember("a", 5, nil)
	remember("a", 7, store.ErrNotFound)
	remember("a", 4, nil)
	is("a", 5)
	for i := range 4 {
		remember(fmt.Sprint("b", i), 1, nil)
		is("a", map[bool]int64{true: 5}[i < 3]) // two in each half
	}
}
