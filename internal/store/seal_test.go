package store_test

import (
	"errors"
	"path/filepath"
	"testing"

	"postern/internal/store"
	"postern/internal/storetest"
)

// TestForgedRowsBreakTheirSeal tampers with the rows of a table in every way.
func TestForgedRowsBreakTheirSeal(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		s := store.Sealed{Table: "thing", Key: []string{"id"}, Omit: []string{"large"}}
		exec := func(query string) {
			t.Helper()
			err := db.Update(ctx, func(tx *store.Tx) error {
				_, err := tx.ExecContext(ctx, query)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		seal := func() {
			t.Helper()
			if err := db.Update(ctx, func(tx *store.Tx) error { return tx.Seal(ctx, s, `id <> ''`) }); err != nil {
				t.Fatal(err)
			}
		}
		holds := func(id string) (ok bool) {
			t.Helper()
			err := db.View(ctx, func(tx *store.Tx) (err error) {
				ok, err = tx.Holding(ctx, s, `id = $1`, id)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			return ok
		}
		exec(`create table thing (id text primary key, a text, b text not null, n bigint not null, large text not null, seal bytea)`)
		exec(`insert into thing (id, a, b, n, large) values ('one', 'x', 'y', 1, 'l'), ('two', 'x', 'y', 1, 'l')`)
		if holds("one") {
			t.Error("a row without a seal holds")
		}
		seal()
		if !holds("one") || !holds("two") {
			t.Error("a sealed row does not hold")
		}
		exec(`update thing set large = 'other' where id = 'one'`)
		if !holds("one") {
			t.Error("a column that is left out counts")
		}
		for _, change := range []string{
			`update thing set a = 'z' where id = 'one'`, `update thing set a = null where id = 'one'`, `update thing set a = '' where id = 'one'`,
			`update thing set a = 'xy', b = '' where id = 'one'`, `update thing set a = 'y', b = 'x' where id = 'one'`,
			`update thing set n = 0 where id = 'one'`, `update thing set n = -1 where id = 'one'`,
			`update thing set seal = (select seal from thing where id = 'two') where id = 'one'`, `update thing set seal = null where id = 'one'`, `update thing set seal = '' where id = 'one'`,
		} {
			exec(change)
			if holds("one") {
				t.Errorf("%s: it holds", change)
			}
			exec(`update thing set a = 'x', b = 'y', n = 1 where id = 'one'`)
			seal()
		}
		// Another key seals nothing that this one takes.
		foreign := storetest.WithOtherKey(t, db)
		if err := foreign.Update(ctx, func(tx *store.Tx) error { return tx.Seal(ctx, s, `id = 'one'`) }); err != nil {
			t.Fatal(err)
		}
		if holds("one") {
			t.Error("a row that another key sealed holds")
		}
	})
	bare, err := store.Open(t.Context(), filepath.Join(t.TempDir(), "bare.db"), "")
	if err != nil {
		t.Fatal(err)
	}
	defer bare.Close()
	err = bare.View(t.Context(), func(tx *store.Tx) error {
		_, err := tx.Holding(t.Context(), store.Sealed{Table: "action", Key: []string{"id"}}, `id = ''`)
		return err
	})
	if !errors.Is(err, store.ErrNoKey) {
		t.Errorf("without a key: %v, want ErrNoKey", err)
	}
}

// TestSealAllowsNewColumns adds a column to a sealed table, as a migration does: what it
// finds holds, and the new column counts. (On SQLite alone: connections to
// PostgreSQL keep the plans of a table that is exchanged under them.)
func TestSealAllowsNewColumns(t *testing.T) {
	ctx, db := t.Context(), storetest.SQLite(t)
	s := store.Sealed{Table: "thing", Key: []string{"id"}}
	exec := func(query string) {
		t.Helper()
		err := db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, query)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	exec(`create table thing (id text primary key, n bigint not null, seal bytea)`)
	exec(`insert into thing (id, n) values ('one', 1)`)
	if err := db.Update(ctx, func(tx *store.Tx) error { return tx.Seal(ctx, s, `id = 'one'`) }); err != nil {
		t.Fatal(err)
	}
	exec(`alter table thing add column added text not null default ''`)
	again := storetest.Reopen(t, db)
	is := func() (ok bool) {
		t.Helper()
		err := again.View(ctx, func(tx *store.Tx) (err error) {
			ok, err = tx.Holding(ctx, s, `id = 'one'`)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	if !is() {
		t.Error("a column that was added breaks the seals of before")
	}
	exec(`update thing set added = 'x' where id = 'one'`)
	if is() {
		t.Error("a column that was added is not sealed")
	}
}
