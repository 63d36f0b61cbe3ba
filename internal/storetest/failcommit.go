package storetest

import (
	"testing"

	"postern/internal/store"
)

// FailCommits makes every transaction that inserts or updates a row of table fail when
// it commits, until the returned function is called. It uses deferred constraints,
// which both databases check at the commit.
func FailCommits(t testing.TB, db *store.DB, table string) (undo func()) {
	t.Helper()
	exec := func(statements ...string) {
		t.Helper()
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			for _, s := range statements {
				if _, err := tx.ExecContext(t.Context(), s); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if isSQLite(t, db) {
		exec(`create table no_commit (x text references project (id) deferrable initially deferred)`,
			`create trigger no_insert after insert on `+table+` begin insert into no_commit values ('nobody'); end`,
			`create trigger no_update after update on `+table+` begin insert into no_commit values ('nobody'); end`)
		return func() { exec(`drop trigger no_insert`, `drop trigger no_update`, `drop table no_commit`) }
	}
	exec(`create function no_commit() returns trigger language plpgsql as 'begin raise exception ''no commit''; end'`,
		`create constraint trigger no_commit after insert or update on `+table+` deferrable initially deferred for each row execute function no_commit()`)
	return func() { exec(`drop trigger no_commit on `+table, `drop function no_commit()`) }
}

// isSQLite reports whether db is of SQLite.
func isSQLite(t testing.TB, db *store.DB) bool {
	return db.View(t.Context(), func(tx *store.Tx) error {
		var version string
		return tx.One(t.Context(), `select sqlite_version()`, nil, &version)
	}) == nil
}

// NoDeadlocks fails the test if PostgreSQL has ended a transaction of db's because it
// and another waited for each other. SQLite has none.
func NoDeadlocks(t testing.TB, db *store.DB) {
	t.Helper()
	if isSQLite(t, db) {
		return
	}
	var n int64
	err := db.View(t.Context(), func(tx *store.Tx) error {
		return tx.One(t.Context(), `select deadlocks from pg_stat_database where datname = current_database()`, nil, &n)
	})
	if err != nil || n != 0 {
		t.Errorf("PostgreSQL ended %d transactions as deadlocks, %v, want none", n, err)
	}
}
