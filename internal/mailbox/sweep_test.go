package mailbox_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestSweep: of the sealed bytes, those with a row stay, and those young
// enough to get one.
func TestSweep(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.inbox(t, "analyst")
		if err := f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{To: []string{"analyst@agents.test"}, Raw: incoming}}); err != nil {
			t.Fatal(err)
		}
		blobs, err := store.OpenBlobs(f.blobs)
		if err != nil {
			t.Fatal(err)
		}
		if err := blobs.Put("blb_LEFT", []byte("x")); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(f.blobs, "FT", ".tmp-1"), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		stored := func() int {
			files, err := filepath.Glob(filepath.Join(f.blobs, "*", "*"))
			if err != nil {
				t.Fatal(err)
			}
			return len(files)
		}
		for _, tt := range []struct {
			name        string
			before      time.Time
			removed, of int
		}{
			{"young", time.Now().Add(-time.Hour), 0, 3},
			{"old", time.Now().Add(time.Hour), 1, 1},
			{"again", time.Now().Add(time.Hour), 0, 1},
		} {
			n, err := f.post.Sweep(t.Context(), tt.before)
			if err != nil || n != tt.removed || stored() != tt.of {
				t.Errorf("%s: removed %d, %v, and %d are left; want %d and %d", tt.name, n, err, stored(), tt.removed, tt.of)
			}
		}
	})
}
