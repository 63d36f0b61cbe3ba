package store_test

import (
	"context"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"postern/internal/store"
	"postern/internal/storetest"
)

// TestOpenAtOnce: programs that start at the same time on a database that is
// new make its tables once, and none of them fails.
func TestOpenAtOnce(t *testing.T) {
	sources := map[string]string{"sqlite": filepath.Join(t.TempDir(), "postern.db"), "postgres": storetest.PostgresURL(t)}
	for name, source := range sources {
		if source == "" {
			t.Logf("%s is not set: not run on PostgreSQL", storetest.PostgresVar)
			continue
		}
		t.Run(name, func(t *testing.T) {
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					db, err := store.Open(t.Context(), source, "")
					if err != nil {
						t.Error(err)
						return
					}
					if err := db.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
		})
	}
}

// TestReadersDoNotWaitForWriters: more transactions wait for their turn to write
// than there are connections, and the one that has it needs somebody who reads.
func TestReadersDoNotWaitForWriters(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		look := func(tx *store.Tx) error {
			var one int
			return tx.One(ctx, `select 1`, nil, &one)
		}
		var wg sync.WaitGroup
		for range 40 {
			wg.Go(func() {
				read := make(chan error, 1)
				if err := db.Update(ctx, func(*store.Tx) error {
					go func() { read <- db.View(ctx, look) }()
					return <-read
				}); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
}
