package mailbox_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// told returns what an inbox was told of oversight, "type state reason" a line.
func told(t *testing.T, db *store.DB, inbox string) string {
	t.Helper()
	var out []string
	err := db.View(t.Context(), func(tx *store.Tx) error {
		es, err := event.OfInbox(t.Context(), tx, inbox, 0, 100, event.OversightPending, event.OversightApproved, event.OversightRejected, event.OversightExpired,
			event.OversightCommented, event.OversightCancelled, event.SwitchOn, event.SwitchOff)
		for _, e := range es {
			line := []string{string(e.Type)}
			for _, k := range []string{"state", "scope", "reason"} {
				if v, ok := e.Data[k]; ok {
					line = append(line, fmt.Sprint(v))
				}
			}
			out = append(out, strings.Join(line, " "))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(out, "\n")
}

// TestAgentIsTold: an agent learns state and reason of each turn of what it
// proposed without asking, and nothing of what was written to it or of others'.
func TestAgentIsTold(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		box, agent, _ := f.inbox(t, "analyst")
		other, _, _ := f.inbox(t, "other")
		ctx, n := t.Context(), 0
		propose := func() oversight.Action {
			t.Helper()
			n++
			a, err := f.post.Send(ctx, agent, "rest", mailbox.Outgoing{Draft: mail.Draft{To: []string{"bob@shop.example"}, Subject: fmt.Sprint("s ", n), Text: fmt.Sprint("t ", n)}})
			if err != nil {
				t.Fatal(err)
			}
			return a.Action
		}
		check := func(what string, err error) {
			t.Helper()
			if err != nil {
				t.Fatalf("%s: %v", what, err)
			}
		}
		decide := func(a oversight.Action, approve bool, reason string) {
			t.Helper()
			check("decide", f.gate.Decide(ctx, f.person, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: approve, Reason: reason}))
		}
		a := propose()
		_, err := f.gate.Comment(ctx, f.person, a.ID, "between us", false)
		check("comment", err)
		_, err = f.gate.Comment(ctx, f.person, a.ID, "KOHLRABI is the wrong word", true)
		check("comment", err)
		decide(a, false, "wrong word")
		decide(propose(), true, "")
		a = propose()
		check("expire", db.Update(ctx, func(tx *store.Tx) error {
			if _, err := tx.ExecContext(ctx, `update action set expires_at = $1 where id = $2`, store.Time(time.Now().Add(-time.Second)), a.ID); err != nil {
				return err
			}
			return oversighttest.Settle(ctx, tx)
		}))
		for range 3 {
			_, err := f.gate.RunOne(ctx)
			check("run", err)
		}
		s, err := f.gate.SwitchOn(ctx, f.person, oversight.Switch{Scope: oversight.ScopeInbox, Target: box.ID, Reason: "it writes nonsense"})
		check("switch on", err)
		check("switch off", f.gate.SwitchOff(ctx, f.person, s.ID))
		check("switch off again", f.gate.SwitchOff(ctx, f.person, s.ID))
		_, err = f.gate.SwitchOn(ctx, f.person, oversight.Switch{Scope: oversight.ScopeDomain, Target: "evil.example", Reason: "nothing there"})
		check("switch on", err)
		got := strings.Split(told(t, db, box.ID), "\n")
		for i, want := range []string{
			"oversight.pending pending no rule allows it", "oversight.commented pending", "oversight.rejected denied wrong word",
			"oversight.pending pending", "oversight.approved approved", "oversight.pending pending", "oversight.expired denied nobody decided until",
			"switch.on inbox it writes nonsense", "switch.off inbox it writes nonsense", "switch.on domain nothing there",
		} {
			if i >= len(got) || !strings.HasPrefix(got[i], want) {
				t.Fatalf("told\n%s\nwant %q as number %d", strings.Join(got, "\n"), want, i+1)
			}
		}
		if len(got) != 10 {
			t.Errorf("told %d things, want 10:\n%s", len(got), strings.Join(got, "\n"))
		}
		if all := strings.Join(got, "\n"); strings.Contains(all, "KOHLRABI") || strings.Contains(all, "between us") || strings.Contains(all, "evil.example") {
			t.Errorf("an event holds what it must not:\n%s", all)
		}
		if got, want := told(t, db, other.ID), "switch.on domain nothing there"; got != want {
			t.Errorf("another inbox is told %q, want %q", got, want)
		}
		// Another project hears nothing of it.
		stranger := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "eve", Project: f.other.Project}
		if err := f.gate.SwitchOff(ctx, stranger, s.ID); err == nil {
			t.Error("a person of another project turned it off")
		}
	})
}
