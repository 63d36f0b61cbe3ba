package mailbox_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestCommitFails: whether a row was committed is not known then, so its sealed
// bytes stay, until a sweep finds that it was not. The attack, or the accident:
// who hangs up while PostgreSQL commits, and has then a draft without content.
func TestCommitFails(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		_, who, key := f.inbox(t, "analyst")
		k := f.open(t, who, key)
		first, err := f.post.Drafts.Save(t.Context(), who, mailbox.Outgoing{Draft: mail.Draft{Text: "first"}})
		if err != nil {
			t.Fatal(err)
		}
		fails := func(what, table string, do func() error) {
			t.Helper()
			again := storetest.FailCommits(t, db, table)
			before := f.blobCount(t)
			if err := do(); !errors.Is(err, store.ErrCommit) {
				t.Errorf("%s: %v, want an ErrCommit", what, err)
			}
			if n := f.blobCount(t); n != before+1 {
				t.Errorf("%s: %d blobs, want the %d from before and the one whose row may be there", what, n, before)
			}
			again()
		}
		fails("a message", "message", func() error {
			return f.post.Receive(t.Context(), mailbox.Arrival{Envelope: mail.Envelope{To: []string{"analyst@agents.test"}, Raw: incoming}})
		})
		fails("a new draft", "draft", func() error {
			_, err := f.post.Drafts.Save(t.Context(), who, mailbox.Outgoing{Draft: mail.Draft{Text: "lost"}})
			return err
		})
		fails("a changed draft", "draft", func() error {
			_, err := f.post.Drafts.Update(t.Context(), who, first.ID, first.Version, mailbox.Outgoing{Draft: mail.Draft{Text: "lost"}})
			return err
		})
		if n, err := f.post.Sweep(t.Context(), time.Now().Add(time.Hour)); err != nil || n != 3 {
			t.Errorf("the sweep removed %d, %v; want the three without a row", n, err)
		}
		if _, o, err := f.post.Drafts.Get(t.Context(), who, k, first.ID); err != nil || o.Text != "first" {
			t.Errorf("the draft that was there is %q, %v", o.Text, err)
		}
	})
}

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
