package connector_test

import (
	"slices"
	"sync"
	"testing"
	"time"

	"postern/internal/connector"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestSentMailIsSeenBeforeItIsRecorded: the provider shows what left through it, in two
// copies, before this server has recorded the sending. The message is here once.
func TestSentMailIsSeenBeforeItIsRecorded(t *testing.T) {
	t.Parallel()
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s := newShelf()
		w := newWorld(t, db, s)
		c, who, k := w.connect("b@elsewhere.example", connector.Bounds{}, policy.GatedSend)
		w.phase(c, connector.Connected)
		p, err := w.post.Send(t.Context(), who, "test", mailbox.Outgoing{Key: k, Draft: mail.Draft{To: []string{"x@victim.example"}, Subject: "s", Text: "t"}})
		if err != nil {
			t.Fatal(err)
		}
		env, err := mail.ParsePayload(p.Payload)
		if err != nil {
			t.Fatal(err)
		}
		sealed, recorded := make(chan struct{}), make(chan struct{})
		sealedOnce, recordedOnce := sync.OnceFunc(func() { close(sealed) }), sync.OnceFunc(func() { close(recorded) })
		t.Cleanup(recordedOnce) // before the world stops
		m := connector.Message{Raw: env.Raw, At: time.Now(), State: connector.State{Place: connector.Sent, Read: true}}
		s.mu.Lock()
		s.messages["one"], s.messages["two"] = m, m
		s.order, s.log = append(s.order, "one", "two"), append(s.log, "one", "two")
		s.listed = func(n int) {
			if n == 2 {
				sealedOnce()
				<-recorded
			}
		}
		s.mu.Unlock()
		<-sealed // and not stored
		w.approve()
		w.eventually("the message is recorded", func() bool { return len(w.list(who, k)) > 0 })
		recordedOnce()
		w.seen(c, "one", "sent read")
		w.seen(c, "two", "sent read")
		if got := w.list(who, k); !slices.Equal(got, []string{"s read"}) {
			t.Errorf("got %q, want the message once", got)
		}
		if blobs := w.stored(); len(blobs) != 1 {
			t.Errorf("got the blobs %q, want one: what was sealed in vain is removed", blobs)
		}
	})
}

// TestSentMailIsStoredBeforeItIsRecorded: the provider's copy of a sent message is stored
// before this server has recorded the sending. The message is here once.
func TestSentMailIsStoredBeforeItIsRecorded(t *testing.T) {
	t.Parallel()
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		s := newShelf()
		w := newWorld(t, db, s)
		c, who, k := w.connect("b@elsewhere.example", connector.Bounds{}, policy.GatedSend)
		w.phase(c, connector.Connected)
		p, err := w.post.Send(t.Context(), who, "test", mailbox.Outgoing{Key: k, Draft: mail.Draft{To: []string{"x@victim.example"}, Subject: "s", Text: "t"}})
		if err != nil {
			t.Fatal(err)
		}
		env, err := mail.ParsePayload(p.Payload)
		if err != nil {
			t.Fatal(err)
		}
		s.mu.Lock()
		s.messages["one"] = connector.Message{Raw: env.Raw, At: time.Now(), State: connector.State{Place: connector.Sent, Read: true}}
		s.order, s.log = append(s.order, "one"), append(s.log, "one")
		s.mu.Unlock()
		w.seen(c, "one", "sent read")
		w.approve()
		w.eventually("the sending is recorded", func() bool {
			a, err := w.gate.Action(t.Context(), w.owner, p.ID)
			return err == nil && a.State == oversight.Done
		})
		if got := w.list(who, k); !slices.Equal(got, []string{"s read"}) {
			t.Errorf("got %q, want the message once", got)
		}
	})
}
