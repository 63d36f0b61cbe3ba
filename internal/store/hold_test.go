package store_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"postern/internal/store"
	"postern/internal/storetest"
)

// TestHoldIsExclusive: on PostgreSQL one process alone has a name; it gets free with its
// session, and a session that is lost is taken again. Holds on SQLite, whose
// database is one process's, exclude nobody.
func TestHoldIsExclusive(t *testing.T) {
	url := storetest.PostgresURL(t)
	if url == "" {
		db, err := store.Open(t.Context(), t.TempDir()+"/a.db", "")
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		h, err := db.Hold(t.Context(), "a", 0)
		if err != nil || h.Close(t.Context()) != nil {
			t.Fatal(err)
		}
		return
	}
	open := func() *store.DB {
		db, err := store.Open(t.Context(), url, "")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		return db
	}
	one, other := open(), open()
	h, err := one.Hold(t.Context(), "a", 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Hold(t.Context(), "a", 0); !errors.Is(err, store.ErrHeld) {
		t.Fatalf("held twice: %v", err)
	}
	b, err := other.Hold(t.Context(), "b", 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Who waits gets it when the other gives it back.
	got := make(chan error, 1)
	go func() {
		h, err := other.Hold(t.Context(), "a", time.Minute)
		if err == nil {
			err = h.Close(t.Context())
		}
		got <- err
	}()
	if err := h.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Fatal(err)
	}

	// The session is ended from outside, as by a restart of the database.
	if h, err = one.Hold(t.Context(), "a", 0); err != nil {
		t.Fatal(err)
	}
	defer h.Close(t.Context())
	ctx, stop := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- h.Run(ctx) }()
	end := func() {
		t.Helper()
		err := other.View(t.Context(), func(tx *store.Tx) error {
			var n int
			return tx.One(t.Context(), `select count(pg_terminate_backend(l.pid)) from pg_locks l join pg_database d on d.oid = l.database
				where l.locktype = 'advisory' and d.datname = current_database()`, nil, &n)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	end()
	// Its holder takes it again, or another does and the holder ends.
	x, err := other.Hold(t.Context(), "a", 30*time.Second)
	if err == nil {
		if err := <-ran; !errors.Is(err, store.ErrHeld) {
			t.Errorf("who lost it goes on: %v", err)
		}
		err = x.Close(t.Context())
	} else if errors.Is(err, store.ErrHeld) {
		err = nil
	}
	if err != nil {
		t.Fatal(err)
	}
	stop()
}
