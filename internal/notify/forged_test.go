package notify_test

import (
	"strings"
	"testing"

	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestForgedLink: somebody who can write the database makes a person's chat his
// own, to be told what waits and to decide on it.
func TestForgedLink(t *testing.T) {
	f := chatting(t, storetest.SQLite(t), nil)
	f.judge.say(policy.Verdict{Who: []string{"bob"}})
	a := f.propose("text")
	f.step()
	good := f.chats.last(bobs).data(t, "Approve")
	id := f.chats.last(bobs).id
	f.update(func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `update telegram_link set user_id = $1, chat_id = $1 where user_id = $2`, strangers, bobs)
		return err
	})
	f.chats.press(strangers, strangers, id, good)
	f.poll()
	b := f.propose("another text")
	f.step()
	if got := f.action(a.ID); got.State != oversight.Pending {
		t.Errorf("a press in a chat that was put in bob's place: %s", got.State)
	}
	for _, m := range f.chats.in(strangers) {
		if strings.Contains(m.text, b.ID) || strings.Contains(m.text, "another text") {
			t.Errorf("told to a chat that was put in bob's place: %q", m.text)
		}
	}
}
