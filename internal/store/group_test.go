package store_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"postern/internal/store"
	"postern/internal/storetest"
)

// TestWritersShareACommit: of many that write at once each gets its own answer. What
// fails, panics or is given up leaves nothing, and takes nothing of the others along.
func TestWritersShareACommit(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		const writers = 80
		insert := func(ctx context.Context, tx *store.Tx, i int) error {
			_, err := tx.ExecContext(ctx, `insert into project (id, name, created_at) values ($1, $1, 1)`, fmt.Sprint("p", i))
			return err
		}
		failed := errors.New("failed")
		var hooks sync.Map
		var all sync.WaitGroup
		inside, others := make(chan struct{}), make(chan struct{})
		all.Go(func() { // holds the turn until the others wait for it
			if err := db.Update(t.Context(), func(*store.Tx) error {
				close(inside)
				<-others
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
		<-inside
		for i := range writers {
			all.Go(func() {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				kind := i % 5
				defer func() {
					if r := recover(); (r != nil) != (kind == 2) {
						t.Errorf("writer %d panicked: %v", i, r)
					}
				}()
				if kind == 4 {
					cancel() // the attack: a client hangs up as soon as it has asked
				}
				err := db.Update(ctx, func(tx *store.Tx) error {
					if err := insert(ctx, tx, i); err != nil {
						return err
					}
					tx.AfterCommit(func() { hooks.Store(i, true) })
					switch kind {
					case 1:
						return failed
					case 2:
						panic("in a transaction")
					case 3:
						cancel()
					}
					return nil
				})
				if (err == nil) != (kind == 0) || kind == 1 && !errors.Is(err, failed) {
					t.Errorf("writer %d: %v", i, err)
				}
			})
		}
		close(others)
		all.Wait()
		var ids []string
		if err := db.View(t.Context(), func(tx *store.Tx) (err error) {
			ids, err = tx.Strings(t.Context(), `select id from project where id like 'p%' order by id`)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		stored := map[string]bool{}
		for _, id := range ids {
			stored[id] = true
		}
		for i := range writers {
			_, hook := hooks.Load(i)
			if want := i%5 == 0; stored[fmt.Sprint("p", i)] != want || hook != want {
				t.Errorf("writer %d: stored %t, told %t, want %t", i, stored[fmt.Sprint("p", i)], hook, want)
			}
		}
		// Nothing was left open.
		if err := db.Update(t.Context(), func(tx *store.Tx) error { return insert(t.Context(), tx, writers) }); err != nil {
			t.Error(err)
		}
	})
}

// TestStatementRollsBackAll: SQLite may end the whole transaction in a statement, here by
// a conflict clause. Then nobody who shares it is told that he has succeeded.
func TestStatementRollsBackAll(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		if db.Concurrent() {
			return // PostgreSQL has a transaction for each
		}
		insert := func(query, id string) error {
			return db.Update(t.Context(), func(tx *store.Tx) error {
				_, err := tx.ExecContext(t.Context(), query, id)
				return err
			})
		}
		const plain = `insert into project (id, name, created_at) values ($1, $1, 1)`
		if err := insert(plain, "there"); err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		told := sync.Map{}
		for i := range 40 {
			all.Go(func() {
				query, id := plain, fmt.Sprint("p", i)
				if i%8 == 7 {
					query, id = `insert or rollback into project (id, name, created_at) values ($1, $1, 1)`, "there"
				}
				if err := insert(query, id); err == nil {
					told.Store(id, true)
				} else if i%8 != 7 && !errors.Is(err, store.ErrCommit) {
					t.Errorf("writer %d: %v", i, err)
				}
			})
		}
		all.Wait()
		for i := range 40 {
			id := fmt.Sprint("p", i)
			var n int
			if err := db.View(t.Context(), func(tx *store.Tx) error {
				return tx.One(t.Context(), `select count(*) from project where id = $1`, []any{id}, &n)
			}); err != nil {
				t.Fatal(err)
			}
			if _, ok := told.Load(id); ok != (n == 1) {
				t.Errorf("writer %d: told %t, %d rows", i, ok, n)
			}
		}
	})
}
