package mailbox_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A document is a judge by the policy that it holds now.
type document struct{ *policy.Document }

func (d *document) Judge(_ context.Context, _ *store.Tx, _ string, r policy.Request) (policy.Verdict, error) {
	return policy.Decide(d.Document, r), nil
}

// TestManualChangesFollowPolicy: what policy does not leave to one person, one person does not do by
// hand: neither raise a mode, nor make a code for it, nor make an inbox that has
// it, nor add to an allow list.
func TestManualChangesFollowPolicy(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		judge := &document{}
		gate := oversight.NewGate(slog.New(slog.NewTextHandler(t.Output(), nil)), db, judge)
		blobs, err := store.OpenBlobs(f.blobs)
		if err != nil {
			t.Fatal(err)
		}
		f.post = mailbox.New(slog.New(slog.NewTextHandler(t.Output(), nil)), db, gate, mailbox.Config{Blobs: blobs, Transport: f.hop, Domain: "agents.test", QuarantineScore: 0.75})
		rules := func(then string) {
			t.Helper()
			var err error
			judge.Document, err = policy.Parse([]byte("version: 1\nrules:\n  - {id: two, kind: [inbox.mode, inbox.allow], " + then + "}\n"))
			if err != nil {
				t.Fatal(err)
			}
		}
		b, agent, _ := f.inbox(t, "alice")
		code, _, err := f.post.ModeCode(ctx, f.person, b.ID, policy.Autonomous, "three good weeks")
		if err != nil {
			t.Fatal(err)
		}
		strong := f.person
		strong.Strong = time.Now()
		n := 0
		doors := map[string]func(who auth.Principal) error{
			"set": func(who auth.Principal) error {
				_, err := f.post.SetMode(ctx, who, b.ID, policy.Monitored, "three good weeks")
				if err == nil {
					_, err = f.post.SetMode(ctx, who, b.ID, policy.GatedSend, "")
				}
				return err
			},
			"code": func(who auth.Principal) error {
				_, _, err := f.post.ModeCode(ctx, who, b.ID, policy.Monitored, "three good weeks")
				return err
			},
			"make": func(who auth.Principal) error {
				n++
				_, _, err := f.post.CreateInbox(ctx, who, directory.NewInbox{Address: "bella" + string(rune('a'+n)), Mode: policy.Autonomous}, "")
				return err
			},
			"allow": func(who auth.Principal) error {
				_, err := f.post.AllowList.Add(ctx, who, b.ID, "bob@example.com", time.Time{})
				return err
			},
		}
		for _, tt := range []struct {
			then string
			who  auth.Principal
			want error // nil: it may be
		}{
			{"then: ask, approvers: 2", strong, oversight.ErrByHand},
			{"then: deny", strong, oversight.ErrByHand},
			{"then: ask, who: [bob]", strong, oversight.ErrNotAsked},
			{"then: ask, step_up: true", f.person, oversight.ErrStepUp},
			{"then: ask, step_up: true", strong, nil},
			{"then: ask, who: [ann]", f.person, nil},
		} {
			rules(tt.then)
			for name, door := range doors {
				if err := door(tt.who); !errors.Is(err, tt.want) {
					t.Errorf("%s: %s: %v, want %v", tt.then, name, err, tt.want)
				}
			}
			// The way down is free.
			if _, err := f.post.SetMode(ctx, f.person, b.ID, policy.ReadOnly, "stop"); err != nil {
				t.Errorf("%s: down: %v", tt.then, err)
			}
			judge.Document = nil
			if _, err := f.post.SetMode(ctx, f.person, b.ID, policy.GatedSend, "go on"); err != nil {
				t.Fatal(err)
			}
		}

		// A code that was made before policy asked two, and what the agent requests.
		if _, err := f.post.RaiseMode(ctx, agent, "", code); !errors.Is(err, mailbox.ErrCode) {
			t.Errorf("a code of before a change of the mode: %v", err)
		}
		if code, _, err = f.post.ModeCode(ctx, f.person, b.ID, policy.Autonomous, "three good weeks"); err != nil {
			t.Fatal(err)
		}
		rules("then: ask, approvers: 2")
		if _, err := f.post.RaiseMode(ctx, agent, "", code); !errors.Is(err, oversight.ErrByHand) {
			t.Errorf("a code of before the rule: %v", err)
		}
		a, err := f.post.RequestMode(ctx, agent, "rest", "", policy.Autonomous, "please")
		if err != nil || a.State != oversight.Pending || a.Approvers != 2 {
			t.Errorf("a request is %s for %d people: %v", a.State, a.Approvers, err)
		}
		if got := f.mode(t, b.ID); got != policy.GatedSend {
			t.Errorf("the mode is %s", got)
		}
		if _, err := f.post.SetMode(ctx, f.person, b.ID, policy.Monitored, " "); !errors.Is(err, directory.ErrInvalid) {
			t.Errorf("raised without a reason: %v", err)
		}
	})
}
