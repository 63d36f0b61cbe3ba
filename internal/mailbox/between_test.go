package mailbox_test

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// A slow executor is one whose action was claimed when something else happens.
type slow struct {
	oversight.Executor
	oversight.Recoverer
	oversight.Watcher
	first func()
}

func (s slow) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	s.first()
	return s.Executor.Execute(ctx, a)
}

// TestSwitchInBetween: a switch that is turned on when an action has been claimed,
// and has had no effect yet, stops it, whatever its kind, and for good.
func TestSwitchInBetween(t *testing.T) {
	offices(t, nil, mailbox.Config{}, func(t *testing.T, f *fixture, _, _ office) {
		ctx := t.Context()
		f.judgedBy(t, modes{})
		b, agent, k := f.agentIn(t, "analyst", policy.GatedAll)
		n := 0
		receive := func() (a oversight.Action) {
			t.Helper()
			n++
			raw := bytes.Replace(incoming, []byte("<1@"), fmt.Appendf(nil, "<%d@", n), 1)
			if err := f.post.Receive(ctx, mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{b.Address}, Raw: raw}}); err != nil {
				t.Fatal(err)
			}
			list, err := f.gate.Actions(ctx, f.person, oversight.Query{States: []oversight.State{oversight.Pending}})
			if err != nil || len(list) != 1 {
				t.Fatalf("%d actions wait, %v; want 1", len(list), err)
			}
			return list[0]
		}
		messages := func() []message.Message {
			t.Helper()
			ms, err := f.post.Messages(ctx, agent, k, 0)
			if err != nil {
				t.Fatal(err)
			}
			return ms
		}
		if err := f.decide(t, f.person, receive().ID, true); err != nil {
			t.Fatal(err)
		}
		f.runAll(t)
		msg := messages()[0]
		for _, tt := range []struct {
			kind    policy.Kind
			propose func() (oversight.Action, error)
			effect  func() bool
		}{
			{
				mailbox.ModeKind, func() (oversight.Action, error) {
					return f.post.RequestMode(ctx, agent, "rest", "", policy.Monitored, "")
				},
				func() bool { return f.mode(t, b.ID) != policy.GatedAll },
			},
			{
				mailbox.AllowKind, func() (oversight.Action, error) {
					return f.post.AllowList.Request(ctx, agent, "rest", "", "bob@example.com", time.Time{}, "")
				},
				func() bool {
					list, err := f.post.AllowList.Entries(ctx, agent, "")
					return err != nil || len(list) > 0
				},
			},
			{
				policy.KindArchive, func() (oversight.Action, error) {
					return f.post.Arrange(ctx, agent, "mcp", k, policy.KindArchive, msg.ID)
				},
				func() bool {
					return slices.ContainsFunc(messages(), func(m message.Message) bool { return slices.Contains(m.Labels, mailbox.LabelArchived) })
				},
			},
			{
				mailbox.ReceiveKind, func() (oversight.Action, error) { return receive(), nil },
				func() bool { return len(messages()) > 1 },
			},
		} {
			a, err := tt.propose()
			if err != nil || a.State != oversight.Pending {
				t.Fatalf("%s: proposed as %s, %v", tt.kind, a.State, err)
			}
			if err := f.decide(t, f.person, a.ID, true); err != nil {
				t.Fatal(err)
			}
			x := f.post.ExecutorOf(tt.kind)
			var s oversight.Switch
			f.gate.Handle(tt.kind, slow{x.(oversight.Executor), x.(oversight.Recoverer), x.(oversight.Watcher), func() {
				if s, err = f.gate.SwitchOn(ctx, f.person, oversight.Switch{Scope: oversight.ScopeCapability, Target: string(tt.kind), Reason: "not now"}); err != nil {
					t.Error(err)
				}
			}})
			f.runAll(t)
			if err := f.gate.SwitchOff(ctx, f.person, s.ID); err != nil {
				t.Fatal(err)
			}
			f.runAll(t)
			got, err := f.gate.Action(ctx, f.person, a.ID)
			if err != nil || got.State != oversight.Denied || !strings.Contains(got.Reason, "not now") || tt.effect() {
				t.Errorf("%s: it is %s, %q, %v; it has happened: %v", tt.kind, got.State, got.Reason, err, tt.effect())
			}
		}
	})
}
