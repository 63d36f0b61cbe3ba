package store_test

import (
	"context"
	"testing"
	"time"

	"postern/internal/store"
	"postern/internal/storetest"
)

// TestCommitOutlivesItsContext: a caller that goes away while PostgreSQL commits must not
// be told that the commit failed, since it did not.
func TestCommitOutlivesItsContext(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		if !db.Concurrent() {
			return // SQLite commits in this process, whatever becomes of the context
		}
		exec := func(ctx context.Context, query string, after func()) error {
			return db.Update(ctx, func(tx *store.Tx) error {
				_, err := tx.ExecContext(ctx, query)
				after()
				return err
			})
		}
		must := func(query string) {
			t.Helper()
			if err := exec(t.Context(), query, func() {}); err != nil {
				t.Fatal(err)
			}
		}
		must(`create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(1); return null; end'`)
		must(`create constraint trigger slow after insert on project deferrable initially deferred for each row execute function slow()`)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		err := exec(ctx, `insert into project (id, name, created_at) values ('a', 'a', 1)`, func() { time.AfterFunc(200*time.Millisecond, cancel) })
		if ctx.Err() == nil {
			t.Fatal("the context did not end during the commit")
		}
		n := 0
		if verr := db.View(t.Context(), func(tx *store.Tx) error {
			return tx.One(t.Context(), `select count(*) from project where id = 'a'`, nil, &n)
		}); verr != nil {
			t.Fatal(verr)
		}
		if err != nil || n != 1 {
			t.Errorf("got %v and %d rows, want no error and one", err, n)
		}
		// A context that ended before the commit was sent undoes all.
		ended, end := context.WithCancel(t.Context())
		if err := exec(ended, `insert into project (id, name, created_at) values ('b', 'b', 1)`, end); err == nil {
			t.Error("a transaction whose context ended before the commit has no error")
		}
	})
}
