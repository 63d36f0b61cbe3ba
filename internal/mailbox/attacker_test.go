package mailbox_test

import (
	"strings"
	"testing"
	"time"

	"postern/internal/delivery"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestReviseWhatWaits: recipients of what was put off are not those of what is
// put in its place.
func TestReviseWhatWaits(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		d := deliver(t, db, delivery.Config{PerMinute: 1})
		d.send([]string{"first@a.test"}, nil)
		d.run(1)
		waits := d.send([]string{"u1@a.test", "u2@a.test", "u3@a.test"}, nil)
		d.run(1)
		if a := d.state(waits.ID); a.State != oversight.Approved || a.Attempts != 0 {
			t.Fatalf("what waits is %s after %d attempts", a.State, a.Attempts)
		}
		if _, err := d.post.Revise(t.Context(), d.agent, "rest", waits.ID, 0, letter("another", "bob@b.test")); err != nil {
			t.Fatal(err)
		}
		d.run(2)
		if got, want := d.states(waits.ID), "bob@b.test:delivered"; got != want || d.state(waits.ID).State != oversight.Done {
			t.Errorf("revised: %q (%s), want %q", got, d.state(waits.ID).State, want)
		}
		if d.w.got["u1@a.test"]+d.w.got[""] != 0 || d.w.got["bob@b.test"] != 1 {
			t.Errorf("who got it: %v", d.w.got)
		}
	})
}

// TestLateRecord: a program that stood still, and was taken for dead, does not
// undo what another has done since.
func TestLateRecord(t *testing.T) {
	for _, tt := range []struct {
		name, meanwhile, want string
		late                  mail.Delivery
	}{
		{"another has sent it", `state = 'delivered', attempts = 2`, "delivered", later},
		{"a person confirmed that it arrived", `state = 'delivered'`, "delivered", later},
		{"a person is asked", `state = 'uncertain'`, "uncertain", later},
		{"it arrived after all", `state = 'queued'`, "delivered", taken},
	} {
		t.Run(tt.name, func(t *testing.T) {
			storetest.Each(t, func(t *testing.T, db *store.DB) {
				d := deliver(t, db, delivery.Config{})
				block := make(chan struct{})
				d.w.block["a.test"], d.w.answers["bob@a.test"] = block, []mail.Delivery{tt.late}
				a := d.send([]string{"bob@a.test"}, nil)
				d.due()
				done := make(chan error, 1)
				go func() { _, err := d.gate.RunOne(t.Context()); done <- err }()
				for end := time.Now().Add(2 * time.Minute); !strings.Contains(d.states(a.ID), "sending"); time.Sleep(5 * time.Millisecond) {
					if time.Now().After(end) {
						t.Fatalf("it is not sent: %s", d.states(a.ID))
					}
				}
				d.exec(`update delivery set `+tt.meanwhile+` where action_id = $1`, a.ID)
				close(block)
				<-done
				if got, want := d.states(a.ID), "bob@a.test:"+tt.want; got != want {
					t.Errorf("got %q, want %q", got, want)
				}
			})
		})
	}
}
