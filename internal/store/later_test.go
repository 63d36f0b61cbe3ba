package store_test

import (
	"errors"
	"testing"

	"postern/internal/store"
	"postern/internal/storetest"
)

// TestLater: a statement that was put off runs before the next one and before the
// commit, and its error undoes all.
func TestLater(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		add := func(tx *store.Tx, id string) error {
			return tx.Later(ctx, `insert into project (id, name, created_at) values ($1, $1, 1)`, id)
		}
		count := func(tx *store.Tx) (n int, err error) {
			err = tx.One(ctx, `select count(*) from project`, nil, &n)
			return n, err
		}
		err := db.UpdateIn(ctx, store.Project("p"), func(tx *store.Tx) error {
			if err := errors.Join(add(tx, "a"), add(tx, "b")); err != nil {
				return err
			}
			if n, err := count(tx); n != 2 || err != nil {
				t.Errorf("got %d rows, %v, want those that were put off", n, err)
			}
			return add(tx, "c")
		})
		if err != nil {
			t.Fatal(err)
		}
		for name, fn := range map[string]func(tx *store.Tx) error{
			"the last one fails": func(tx *store.Tx) error { return errors.Join(add(tx, "d"), add(tx, "a")) },
			"one fails before a query": func(tx *store.Tx) error {
				if err := errors.Join(add(tx, "d"), add(tx, "a")); err != nil {
					return err
				}
				_, err := count(tx)
				return err
			},
			"fn returns an error": func(tx *store.Tx) error { return errors.Join(add(tx, "d"), errors.New("boom")) },
		} {
			err := db.UpdateIn(ctx, store.Project("p"), fn)
			if err == nil || errors.Is(err, store.ErrCommit) {
				t.Errorf("%s: got %v, want an error that says that nothing was committed", name, err)
			}
		}
		func() {
			defer func() { _ = recover() }()
			_ = db.UpdateIn(ctx, store.Project("p"), func(tx *store.Tx) error {
				_, _ = tx.ExecContext(ctx, `insert into project (id, name, created_at) values ('e', 'e', 1)`)
				if tx.Concurrent() { // SQLite's one connection is lost with the panic
					panic("a bug")
				}
				return errors.New("boom")
			})
		}()
		if err := db.Update(ctx, func(tx *store.Tx) error {
			if n, err := count(tx); n != 3 || err != nil {
				t.Errorf("got %d rows, %v, want 3", n, err)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		// PostgreSQL would answer the commit with a rollback.
		err = db.Update(ctx, func(tx *store.Tx) error {
			if !tx.Concurrent() {
				return errors.New("boom")
			}
			_, _ = tx.ExecContext(ctx, `select nothing from nowhere`)
			return add(tx, "f")
		})
		if err == nil {
			t.Error("a transaction with a failed statement was committed")
		}
		err = db.Update(ctx, func(tx *store.Tx) error {
			if !tx.Concurrent() {
				return errors.New("boom")
			}
			_, _ = tx.ExecContext(ctx, `select nothing from nowhere`)
			return nil
		})
		if err == nil {
			t.Error("a transaction with a failed statement was committed")
		}
	})
}

// TestLookDoesNotWrite: what has no turn changes nothing.
func TestLookDoesNotWrite(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		for name, write := range map[string]func(tx *store.Tx) error{
			"ExecContext": func(tx *store.Tx) error {
				_, err := tx.ExecContext(t.Context(), `delete from project`)
				return err
			},
			"Later": func(tx *store.Tx) error { return tx.Later(t.Context(), `delete from project`) },
		} {
			if err := db.Look(t.Context(), write); err == nil {
				t.Errorf("%s wrote", name)
			}
		}
	})
}
