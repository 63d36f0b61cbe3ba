package mailbox_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/delivery"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// outside makes the post office anew, with servers that are not this one.
func (f *fixture) outside(t *testing.T) *world {
	t.Helper()
	blobs, err := store.OpenBlobs(f.blobs)
	if err != nil {
		t.Fatal(err)
	}
	w, log := newWorld(), slog.New(slog.NewTextHandler(t.Output(), nil))
	f.gate = oversight.NewGate(log, f.db, modes{})
	f.post = mailbox.New(log, f.db, f.gate, mailbox.Config{Blobs: blobs, Transport: w, Domain: "agents.test", Secret: []byte("s"), Delivery: delivery.Config{FirstRetry: time.Hour}})
	return w
}

// copied returns the copies that overseers got.
func (w *world) copied() (out []mail.Envelope) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.copies {
		if e.From == "" {
			out = append(out, e)
		}
	}
	return out
}

// TestCopyOfWhatLeft is an agent of a monitored inbox that has a harmless mail
// copied to its overseers while it waits, and then makes another one of it.
func TestCopyOfWhatLeft(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		w := f.outside(t)
		b, agent, _ := f.agentIn(t, "alice", policy.Monitored)
		if _, err := f.post.Overseers.Set(ctx, f.person, "", []string{"boss@example.com"}); err != nil {
			t.Fatal(err)
		}
		// What makes it wait: here a suspension, elsewhere a busy destination.
		f.shift(t, `insert into suspension (scope, project_id, reason, suspended_at, lifted_at) values ($1, $2, 'bounces', 1, 0)`, b.ID, f.person.Project)
		p, err := f.post.Send(ctx, agent, "rest", letter("harmless", "eve@example.net"))
		if err != nil || p.State != oversight.Approved {
			t.Fatalf("%s, %v", p.State, err)
		}
		f.runAll(t)
		if got := w.copied(); len(got) != 1 || w.got["eve@example.net"] != 0 {
			t.Fatalf("%d copies while it waits, %d left; want a copy of what is about to leave, which no suspension of the inbox keeps", len(got), w.got["eve@example.net"])
		}
		if _, err := f.post.Revise(ctx, agent, "rest", p.ID, 0, letter("the secret plan", "eve@example.net")); err != nil {
			t.Fatal(err)
		}
		f.shift(t, `delete from suspension`)
		f.runAll(t)
		if w.got["eve@example.net"] != 1 {
			t.Fatalf("%d left", w.got["eve@example.net"])
		}
		got := w.copied()
		if len(got) != 2 || !bytes.Contains(got[len(got)-1].Raw, []byte("Subject: the secret plan")) {
			t.Errorf("%d copies, and none of what left", len(got))
		}

		// And one that sends and is gone, while its overseers' server is slow.
		w.answers["boss@example.com"] = []mail.Delivery{{Outcome: mail.NotSent, Code: 451, Detail: "451 later"}, {Outcome: mail.Accepted, Code: 250, Detail: "250 ok"}}
		if _, err := f.post.Send(ctx, agent, "rest", letter("and gone", "eve@example.net")); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		if _, err := f.post.Delete(ctx, f.project, b.ID); err != nil {
			t.Fatal(err)
		}
		f.shift(t, `update action set not_before = 0 where state = 'approved'`)
		f.shift(t, `update delivery set next_at = 0 where settled_at = 0`)
		was := w.got["boss@example.com"]
		f.runAll(t)
		if w.got["boss@example.com"] != was+1 || w.got["eve@example.net"] != 2 {
			t.Errorf("the inbox was deleted: %d more copies arrived of %d mails", w.got["boss@example.com"]-was, w.got["eve@example.net"])
		}
	})
}

// TestReadOnlyIsSilent: what a person approved for later does not leave an inbox
// that was put into read_only meanwhile, and says so.
func TestReadOnlyIsSilent(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		f.judgedBy(t, modes{})
		b, agent, _ := f.agentIn(t, "alice", policy.GatedSend)
		var ids []string
		for _, subject := range []string{"approved before", "approved after"} {
			p, err := f.post.Send(ctx, agent, "rest", letter(subject))
			if err != nil || p.State != oversight.Pending {
				t.Fatalf("%s, %v", p.State, err)
			}
			ids = append(ids, p.ID)
		}
		if err := f.decide(t, f.person, ids[0], true); err != nil {
			t.Fatal(err)
		}
		reviewer := auth.Principal{Kind: auth.Person, ID: "rob", Project: f.person.Project, Role: auth.Reviewer}
		if _, err := f.post.SetMode(ctx, reviewer, b.ID, policy.ReadOnly, "it went mad"); err != nil {
			t.Fatal(err)
		}
		if err := f.decide(t, f.person, ids[1], true); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		if len(f.hop.got) != 0 {
			t.Errorf("%d left an inbox that is read_only", len(f.hop.got))
		}
		for _, id := range ids {
			a, err := f.gate.Action(ctx, f.person, id)
			if err != nil || a.State != oversight.Failed || !strings.Contains(a.Result, "read_only") {
				t.Errorf("%s: %s %q, %v", id, a.State, a.Result, err)
			}
		}
	})
}
