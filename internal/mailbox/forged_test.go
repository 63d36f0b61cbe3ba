package mailbox_test

import (
	"strings"
	"testing"

	"postern/internal/delivery"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestForgedRecipients: of two recipients one has got the message and the other
// is put off. Whoever can write the database makes the first one wait again, by
// another row, by a former one, or by none at all.
func TestForgedRecipients(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		d := deliver(t, db, delivery.Config{})
		raw := func(query string, args ...any) {
			t.Helper()
			err := db.Update(t.Context(), func(tx *store.Tx) error {
				_, err := tx.ExecContext(t.Context(), query, args...)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		for i, change := range []string{
			`update delivery set state = 'queued', settled_at = 0 where action_id = $1 and n = 0`,
			`update delivery set seal = (select seal from delivery where action_id = $1 and n = 1), state = 'deferred' where action_id = $1 and n = 0`,
			`delete from delivery where action_id = $1`,
			`update delivery set n = n + 2 where action_id = $1`,
			`update delivery set attempts = 0, state = 'queued', seal = '' where action_id = $1`,
		} {
			bob, carol := "bob"+string(rune('a'+i))+"@a.test", "carol"+string(rune('a'+i))+"@b.test"
			d.w.answers[carol] = []mail.Delivery{later}
			a := d.send([]string{bob, carol}, nil)
			d.run(1)
			if d.w.got[bob] != 1 || d.state(a.ID).State != oversight.Approved {
				t.Fatalf("%s: %s, %d times to the first", d.state(a.ID).State, d.state(a.ID).Result, d.w.got[bob])
			}
			d.due()
			raw(change, a.ID)
			for range 3 {
				if _, err := d.gate.RunOne(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if got := d.state(a.ID); d.w.got[bob] != 1 || got.State == oversight.Done {
				t.Errorf("%s: it is %s, and the first recipient has got it %d times: %s", change, got.State, d.w.got[bob], got.Result)
			}
		}
	})
}

// TestForgedModes: whoever can write the database opens an inbox, or puts an
// address of his own on its allow list.
func TestForgedModes(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		b, agent, _ := f.inbox(t, "analyst")
		raw := func(query string, args ...any) {
			t.Helper()
			err := db.Update(t.Context(), func(tx *store.Tx) error {
				_, err := tx.ExecContext(t.Context(), query, args...)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		raw(`update inbox set mode = 'autonomous' where id = $1`, b.ID)
		got, err := f.post.Directory.Find(t.Context(), agent, b.ID)
		if err != nil || got.Mode != "gated_all" || !strings.Contains(got.ModeReason, "behind") {
			t.Errorf("opened in the database: mode %q, %q, %v; want gated_all", got.Mode, got.ModeReason, err)
		}
	})
}
