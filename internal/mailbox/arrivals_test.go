package mailbox_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

// modes judges by the modes alone, as a project without rules of its own.
type modes struct{}

func (modes) Judge(_ context.Context, _ *store.Tx, _ string, r policy.Request) (policy.Verdict, error) {
	return policy.Decide(nil, r), nil
}

// agentIn makes an inbox in a mode, and returns who holds its key.
func (f *fixture) agentIn(t *testing.T, name string, mode policy.Mode) (directory.Inbox, auth.Principal, *seal.Key) {
	t.Helper()
	b, key, err := f.post.CreateInbox(t.Context(), f.person, directory.NewInbox{Address: name, Mode: mode}, "")
	if err != nil {
		t.Fatal(err)
	}
	who, err := auth.CheckKey(t.Context(), f.db, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := f.post.Keys.Open(t.Context(), who, key, "")
	if err != nil {
		t.Fatal(err)
	}
	return b, who, k
}

// TestGatedAllArrivals: mail waits sealed, a person lets it in or not, and what
// nobody decides about is dropped.
func TestGatedAllArrivals(t *testing.T) {
	offices(t, nil, mailbox.Config{}, func(t *testing.T, f *fixture, _, _ office) {
		ctx := t.Context()
		f.judgedBy(t, modes{})
		b, agent, k := f.agentIn(t, "analyst", policy.GatedAll)
		_, other, kOther := f.agentIn(t, "buyer", policy.GatedSend)
		n := 0
		receive := func() {
			t.Helper()
			n++
			raw := bytes.Replace(incoming, []byte("<1@"), fmt.Appendf(nil, "<%d@", n), 1)
			err := f.post.Receive(ctx, mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{"analyst@agents.test", "buyer@agents.test"}, Raw: raw}, Auth: mail.Results{DMARC: mail.Check{Result: "pass", Domain: "example.com"}}})
			if err != nil {
				t.Fatal(err)
			}
		}
		pending := func() oversight.Action {
			t.Helper()
			list, err := f.gate.Actions(ctx, f.person, oversight.Query{States: []oversight.State{oversight.Pending}})
			if err != nil || len(list) != 1 {
				t.Fatalf("%d actions wait, %v; want 1", len(list), err)
			}
			a, err := f.gate.Action(ctx, f.person, list[0].ID)
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		count := func(who auth.Principal, k *seal.Key) int {
			t.Helper()
			ms, err := f.post.Messages(ctx, who, k, 0)
			if err != nil {
				t.Fatal(err)
			}
			return len(ms)
		}
		blobs := func() (n int) {
			t.Helper()
			err := filepath.WalkDir(f.blobs, func(_ string, d os.DirEntry, err error) error {
				if err == nil && !d.IsDir() {
					n++
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			return n
		}

		receive()
		if count(agent, k) != 0 || count(other, kOther) != 1 {
			t.Errorf("the gated inbox has %d messages, its neighbour %d; want 0 and 1", count(agent, k), count(other, kOther))
		}
		a := pending()
		if a.Kind != mailbox.ReceiveKind || a.Proposer != "system:smtp" || a.Expires.IsZero() {
			t.Errorf("action %+v", a)
		}
		// Nothing that the sender wrote stands in the clear.
		v, err := f.gate.Show(a)
		if err != nil {
			t.Fatal(err)
		}
		shown := a
		shown.Payload, shown.Digest = nil, nil // which JSON has in base64, where any three letters come up some day
		all, err := json.Marshal([]any{shown, v, string(a.Payload)})
		if err != nil {
			t.Fatal(err)
		}
		if v.Raw != nil || v.HTML != nil {
			t.Errorf("the reviewer sees source: %q, %q", v.Raw, v.HTML)
		}
		for _, word := range []string{secretWord, "bob", "Bob", "example.com"} {
			if bytes.Contains(all, []byte(word)) {
				t.Errorf("the reviewer sees %q: %s", word, all)
			}
		}
		if !bytes.Contains(all, []byte("pass")) {
			t.Error("the reviewer does not see what was proved of the sender")
		}
		held, _, err := f.post.Quarantine(ctx, f.person, b.ID, "", 0)
		if err != nil || len(held) != 1 || held[0].Reason != message.ForMode || held[0].Action != a.ID {
			t.Fatalf("quarantine %+v, %v", held, err)
		}
		// One decision, in one place; none of the agent's.
		for name, err := range map[string]error{
			"release by a person": f.post.Release(ctx, f.person, held[0].ID), "drop by a person": f.post.Drop(ctx, f.person, held[0].ID),
		} {
			if !errors.Is(err, directory.ErrInvalid) || !strings.Contains(err.Error(), a.ID) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if err := f.post.Release(ctx, agent, held[0].ID); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("release by the agent: %v", err)
		}
		if _, err := f.post.Cancel(ctx, agent, a.ID); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("cancel by the agent: %v", err)
		}
		if err := f.decide(t, agent, a.ID, true); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("approve by the agent: %v", err)
		}

		if err := f.decide(t, f.person, a.ID, true); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		if got, err := f.gate.Action(ctx, f.person, a.ID); err != nil || got.State != oversight.Done || count(agent, k) != 1 {
			t.Errorf("approved: %s %q, %v, %d messages", got.State, got.Result, err, count(agent, k))
		}

		receive()
		was := blobs()
		if err := f.decide(t, f.person, pending().ID, false); err != nil {
			t.Fatal(err)
		}
		if held, _, err := f.post.Quarantine(ctx, f.person, b.ID, "", 0); err != nil || len(held) != 0 || blobs() != was-1 || count(agent, k) != 1 {
			t.Errorf("rejected: %d held, %v, %d blobs of %d", len(held), err, blobs(), was)
		}

		receive()
		a = pending()
		f.shift(t, `update action set expires_at = $1 where id = $2`, store.Time(time.Now().Add(-time.Minute)), a.ID)
		f.runAll(t)
		if got, err := f.gate.Action(ctx, f.person, a.ID); err != nil || got.State != oversight.Denied {
			t.Errorf("nobody decided: %s, %v", got.State, err)
		}
		if held, _, err := f.post.Quarantine(ctx, f.person, b.ID, "", 0); err != nil || len(held) != 0 || count(agent, k) != 1 {
			t.Errorf("nobody decided: %d held, %v, %d messages", len(held), err, count(agent, k))
		}

		// A crash before and after it was let in.
		receive()
		a = pending()
		if err := f.decide(t, f.person, a.ID, true); err != nil {
			t.Fatal(err)
		}
		f.shift(t, `update action set state = 'executing', version = version + 1, lease = 0 where id = $1`, a.ID)
		if err := f.gate.Recover(ctx, true); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		if count(agent, k) != 2 {
			t.Errorf("%d messages after a crash before, want 2", count(agent, k))
		}
		f.shift(t, `update action set state = 'executing', version = version + 1, lease = 0, settled_at = 0 where id = $1`, a.ID)
		if err := f.gate.Recover(ctx, true); err != nil {
			t.Fatal(err)
		}
		if got, err := f.gate.Action(ctx, f.person, a.ID); err != nil || got.State != oversight.Done || count(agent, k) != 2 {
			t.Errorf("after a crash behind: %s, %v", got.State, err)
		}

		// While all is stopped the sender's server is to come again: nothing is lost.
		if _, err := f.gate.SwitchOn(ctx, f.person, oversight.Switch{Scope: oversight.ScopeCapability, Target: string(mailbox.ReceiveKind), Reason: "flood"}); err != nil {
			t.Fatal(err)
		}
		err = f.post.Receive(ctx, mailbox.Arrival{Envelope: mail.Envelope{To: []string{"analyst@agents.test"}, Raw: incoming}})
		if !errors.Is(err, mailbox.ErrFull) {
			t.Errorf("while it is stopped: %v", err)
		}
		err = audit.View(ctx, f.db, func(tx *store.Tx) error {
			list, err := audit.List(ctx, tx, audit.Query{Limit: 1000})
			for _, e := range list {
				if strings.Contains(e.Detail, secretWord) || strings.Contains(e.Detail, "bob@") {
					t.Errorf("the audit tells: %s", e.Detail)
				}
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})
}
