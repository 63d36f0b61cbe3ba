package notify_test

import (
	"testing"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/people"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// linkOperator says that the operator at the machine is bob, who confirms it.
func (f *fixture) linkOperator() (operator auth.Principal) {
	f.t.Helper()
	ann, bob := f.who("ann", auth.Owner), f.who("bob", auth.Reviewer)
	f.update(func(tx *store.Tx) error { return storetest.Reseal(f.t.Context(), tx) })
	p, err := people.New(f.db, people.Config{Key: []byte("0123456789abcdef0123456789abcdef")})
	if err != nil {
		f.t.Fatal(err)
	}
	for _, who := range []auth.Principal{ann, bob} {
		if err := p.LinkOperator(f.t.Context(), who, "bob"); err != nil {
			f.t.Fatal(err)
		}
	}
	return auth.Principal{Kind: auth.Person, ID: "local-root", Project: bob.Project, Role: auth.Owner, Operator: true}
}

// TestLinkedOperatorPressesInTelegram: who approved over the local socket, as bob, adds
// nothing by a press in bob's chat; nor the other way around; and ann is a second person.
func TestLinkedOperatorPressesInTelegram(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := chatting(t, db, nil)
		f.link("ann", auth.Owner, anns)
		operator := f.linkOperator()
		f.judge.say(policy.Verdict{Approvers: 2})
		a := f.propose("text")
		f.step()
		aOfBob, aOfAnn := f.chats.last(bobs), f.chats.last(anns)
		b := f.propose("other text")
		f.step()
		bOfBob := f.chats.last(bobs)
		press := func(chat int64, m chatMessage) {
			t.Helper()
			f.chats.press(chat, chat, m.id, m.data(t, "Approve"))
			f.poll()
		}
		waits := func(what string, a oversight.Action) {
			t.Helper()
			if got := f.action(a.ID); got.State != oversight.Pending || got.Approvals != 1 {
				t.Fatalf("%s: it is %s with %d approvals, want pending with 1; the bot says %q", what, got.State, got.Approvals, f.chats.answered())
			}
		}
		if err := f.gate.Decide(t.Context(), operator, decision(a, true)); err != nil {
			t.Fatal(err)
		}
		press(bobs, aOfBob)
		waits("bob presses after the socket", a)
		press(bobs, bOfBob)
		if err := f.gate.Decide(t.Context(), operator, decision(b, true)); err == nil {
			t.Error("the operator approves after bob's press")
		}
		waits("the socket after bob's press", b)
		press(anns, aOfAnn)
		if got := f.action(a.ID); got.State != oversight.Approved {
			t.Errorf("with ann it is %s; the bot says %q", got.State, f.chats.answered())
		}
	})
}

// TestLinkedOperatorPressesInSlack is the same for Slack.
func TestLinkedOperatorPressesInSlack(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		room := f.slackRoomOf(true)
		operator := f.linkOperator()
		f.judge.say(policy.Verdict{Approvers: 2})
		a := f.propose("Dear Bob, hello.")
		f.step()
		m := f.slack.posted()[0]
		f.linkSlack(room, "bob", auth.Reviewer, "UBOB", m)
		if err := f.gate.Decide(t.Context(), operator, decision(a, true)); err != nil {
			t.Fatal(err)
		}
		f.click(room, "UBOB", m, "approve", nil)
		if got := f.action(a.ID); got.State != oversight.Pending || got.Approvals != 1 {
			t.Fatalf("%s with %d approvals, want pending with 1; Slack says %q", got.State, got.Approvals, f.slack.lastTold())
		}
	})
}
