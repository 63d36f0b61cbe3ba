package store_test

import (
	"path/filepath"
	"sync"
	"testing"

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
					db, err := store.Open(t.Context(), source)
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
