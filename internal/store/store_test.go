package store_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"postern/internal/store"
	"postern/internal/storetest"
)

// TestParameters pins down what the shared subset of SQL relies on: $n means
// the n-th argument, in any order and more than once.
func TestParameters(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		err := db.View(t.Context(), func(tx *store.Tx) error {
			var a, b, c string
			if err := tx.One(t.Context(), `select cast($2 as text), cast($1 as text), cast($2 as text)`, []any{"one", "two"}, &a, &b, &c); err != nil {
				return err
			}
			if a != "two" || b != "one" || c != "two" {
				t.Errorf("got %q %q %q, want two one two", a, b, c)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}

func TestUpdateRollsBack(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		boom := errors.New("boom")
		err := db.Update(ctx, func(tx *store.Tx) error {
			if _, err := tx.ExecContext(ctx, `insert into project (id, name, created_at) values ($1, $2, $3)`, "prj_1", "x", 1); err != nil {
				return err
			}
			return boom
		})
		if !errors.Is(err, boom) {
			t.Fatalf("Update = %v, want boom", err)
		}
		err = db.View(ctx, func(tx *store.Tx) error {
			var name string
			return tx.One(ctx, `select name from project where id = $1`, []any{"prj_1"}, &name)
		})
		if !errors.Is(err, store.ErrNotFound) {
			t.Errorf("after rollback: %v, want ErrNotFound", err)
		}
	})
}

// TestCommitFails: who is told so knows that it may be there, and the next is
// not in its way.
func TestCommitFails(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		insert := func(ctx context.Context) error {
			return db.Update(ctx, func(tx *store.Tx) error {
				_, err := tx.ExecContext(ctx, `insert into overseer (scope, address, created_at, created_by) values ('x', 'y', 0, '')`)
				return err
			})
		}
		again := storetest.FailCommits(t, db, "overseer")
		if err := insert(t.Context()); !errors.Is(err, store.ErrCommit) {
			t.Errorf("a commit that fails is %v, want an ErrCommit", err)
		}
		again()
		if err := insert(t.Context()); err != nil {
			t.Errorf("the next: %v", err)
		}
		if err := insert(t.Context()); err == nil || errors.Is(err, store.ErrCommit) {
			t.Errorf("the same once more is %v, want an error that is no ErrCommit", err)
		}
	})
}

// TestCancelledTransactionReturnsTheContextError cancels the context in the middle of
// a transaction: the error is the context's, whatever the driver returns.
func TestCancelledTransactionReturnsTheContextError(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		for name, then := range map[string]func(ctx context.Context, tx *store.Tx) error{
			"before the commit": func(context.Context, *store.Tx) error { return nil },
			"before a statement": func(ctx context.Context, tx *store.Tx) error {
				_, err := tx.ExecContext(ctx, `delete from project where id = $1`, "prj_1")
				return err
			},
		} {
			t.Run(name, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				err := db.Update(ctx, func(tx *store.Tx) error {
					cancel()
					// The roll-back runs beside us; both of its outcomes are to be seen.
					for range 100 {
						if _, err := tx.ExecContext(context.WithoutCancel(ctx), `select 1`); err != nil {
							break
						}
						time.Sleep(time.Millisecond)
					}
					return then(ctx, tx)
				})
				if !errors.Is(err, context.Canceled) {
					t.Errorf("got %v, want context.Canceled", err)
				}
			})
		}
	})
}

func TestReadOnly(t *testing.T) {
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "a b?c%41.db") // a path, not a URL
	db, err := store.Open(ctx, path, "")
	if err != nil {
		t.Fatal(err)
	}
	db.Close()
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("the file is elsewhere: %v", err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the copy has mode %v, %v; want 0600", fi.Mode(), err)
	}
	ro, err := store.OpenReadOnly(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	defer ro.Close()
	err = ro.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `insert into project (id, name, created_at) values ($1, $2, $3)`, "p", "x", 1)
		return err
	})
	if err == nil {
		t.Error("a read-only database took a write")
	}
	if _, err := store.OpenReadOnly(ctx, path+".missing"); err == nil {
		t.Error("OpenReadOnly made a database")
	}
}

func TestBackup(t *testing.T) {
	ctx := t.Context()
	db := storetest.SQLite(t)
	path := filepath.Join(t.TempDir(), "copy.db")
	if err := db.Backup(ctx, path); err != nil {
		t.Fatal(err)
	}
	if err := db.Backup(ctx, path); err == nil {
		t.Error("Backup wrote over a file")
	}
	ro, err := store.OpenReadOnly(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	defer ro.Close()
	err = ro.View(ctx, func(tx *store.Tx) error {
		var n int
		return tx.One(ctx, `select count(*) from project`, nil, &n)
	})
	if err != nil {
		t.Error(err)
	}
}

// TestDatabaseFilesAreTheOwnersOnly: SQLite gives what it makes beside the database the same mode.
func TestDatabaseFilesAreTheOwnersOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.db")
	if err := os.WriteFile(path, nil, 0o644); err != nil { // as an older version left it
		t.Fatal(err)
	}
	db, err := store.Open(t.Context(), path, "")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for _, f := range []string{path, path + "-wal"} {
		if fi, err := os.Stat(f); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v; want mode 0600", f, fi, err)
		}
	}
}

func TestBlobs(t *testing.T) {
	dir := t.TempDir()
	b, err := store.OpenBlobs(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Put("blb_ABC", []byte("data")); err != nil {
		t.Fatal(err)
	}
	if made, err := filepath.Glob(filepath.Join(dir, "B?")); len(made) != 32 {
		t.Errorf("Put made %d directories, %v; want 32, for one sync", len(made), err)
	}
	if got, err := b.Get("blb_ABC"); err != nil || string(got) != "data" {
		t.Errorf("Get = %q, %v", got, err)
	}
	for _, id := range []string{"", "..", "../../etc/passwd", "a/b", "blb_missing"} { // hostile ids
		if _, err := b.Get(id); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("Get(%q) = %v, want ErrNotFound", id, err)
		}
	}
	if err := b.Put("../x", nil); err == nil {
		t.Error("Put took a path")
	}
	if err := errors.Join(b.Delete("blb_ABC"), b.Delete("blb_ABC")); err != nil {
		t.Error(err)
	}
}

func TestRedact(t *testing.T) {
	if got, want := store.Redact("postgres://u:secret@h/db"), "postgres://u:xxxxx@h/db"; got != want {
		t.Errorf("Redact = %q, want %q", got, want)
	}
	if _, err := store.Open(context.Background(), "postgres://u:secret@127.0.0.1:1/db?connect_timeout=1", ""); err == nil {
		t.Error("Open of a dead server succeeded")
	}
}
