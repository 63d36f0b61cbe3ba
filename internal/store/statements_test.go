package store_test

import (
	"fmt"
	"testing"

	"postern/internal/store"
	"postern/internal/storetest"
)

// TestStatementsAreKept: a prepared statement answers as a new one does: within its own
// rows, after the table has changed, after an error, and with other values.
func TestStatementsAreKept(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		update := func(fn func(tx *store.Tx) error) {
			t.Helper()
			if err := db.Update(ctx, fn); err != nil {
				t.Fatal(err)
			}
		}
		insert := func(id string) error {
			return db.Update(ctx, func(tx *store.Tx) error {
				_, err := tx.ExecContext(ctx, `insert into project (id, name, created_at) values ($1, $1, 1)`, id)
				return err
			})
		}
		for i := range 5 {
			if err := insert(fmt.Sprint("p", i)); err != nil {
				t.Fatal(err)
			}
			if err := insert("p0"); err == nil {
				t.Fatal("an id is there twice")
			}
		}
		const query = `select id from project where id like $1 order by id`
		for range 3 {
			update(func(tx *store.Tx) error {
				outer, err := store.List(ctx, tx, func(row func(...any) error) (ids []string, err error) {
					var id string
					if err := row(&id); err != nil {
						return nil, err
					}
					if db.Concurrent() { // PostgreSQL has no rows within rows
						return []string{id}, nil
					}
					ids, err = tx.Strings(ctx, query, id)
					return ids, err
				}, query, "p%")
				if err == nil && fmt.Sprint(outer) != "[[p0] [p1] [p2] [p3] [p4]]" {
					t.Errorf("got %v", outer)
				}
				return err
			})
		}
		all := func() (n int) {
			t.Helper()
			rows := 0
			update(func(tx *store.Tx) error {
				_, err := store.List(ctx, tx, func(row func(...any) error) (any, error) {
					rows++
					return nil, nil //nolint:nilnil // only counted
				}, `select a from kept`)
				return err
			})
			return rows
		}
		update(func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `create table kept (a bigint)`)
			return err
		})
		for range 3 {
			all()
		}
		update(func(tx *store.Tx) error {
			if _, err := tx.ExecContext(ctx, `alter table kept add column b bigint not null default 7`); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, `insert into kept (a) values (1)`)
			return err
		})
		for range 3 {
			if n := all(); n != 1 {
				t.Errorf("after the table has changed: %d rows", n)
			}
		}
	})
}
