package webhook_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
	"postern/internal/webhook"
)

// TestAgentsWebhookWaits: a webhook that an agent makes is a way out. Nothing is
// sent to it before a person has seen its whole URL, and none to another URL
// that it is turned to.
func TestAgentsWebhookWaits(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		p := newPost(t, db)
		a, keyA := p.inbox(t, "alice")
		_, keyB := p.inbox(t, "bob")
		h, gate := gated(t, db, oversighttest.Rules(nil), webhook.Config{Private: true, Retry: time.Millisecond})
		r := newReceiver(t, nil)
		person := auth.Principal{Kind: auth.Person, ID: "ann", Project: p.who.Project, Role: auth.Owner}
		run(t, h)
		make := func(who auth.Principal, path string) webhook.Webhook {
			t.Helper()
			w, _, err := h.Create(t.Context(), who, change("a", r.URL+path, event.MessageReceived))
			if err != nil {
				t.Fatal(err)
			}
			return w
		}
		decide := func(id string, approve bool) {
			t.Helper()
			act, err := gate.Action(t.Context(), person, id)
			if err != nil {
				t.Fatal(err)
			}
			if err := gate.Decide(t.Context(), person, oversight.Decision{ID: id, Version: act.Version, Digest: act.Hex(), Approve: approve, Reason: "because"}); err != nil {
				t.Fatal(err)
			}
		}
		state := func(w webhook.Webhook, want string) {
			t.Helper()
			eventually(t, "state "+want, func() bool {
				got, err := h.Get(t.Context(), keyA, w.ID)
				return err == nil && got.State() == want
			})
		}
		// told receives a message and waits until the project's own webhook, which
		// needs no approval, has received its event. Earlier deliveries have left then.
		free := make(p.who, "/project")
		if free.State() != "active" {
			t.Fatalf("the project's own: %+v", free)
		}
		n := 0
		told := func(path string, want int) {
			t.Helper()
			p.receive(t, a)
			n++
			eventually(t, "the project's request", func() bool { return len(r.at("/project")) == n })
			eventually(t, "what was routed with it", func() bool {
				ds, err := h.Deliveries(t.Context(), p.who, free.ID, 0, 100)
				return err == nil && len(ds) == n
			})
			if want > 0 {
				eventually(t, "a request at "+path, func() bool { return len(r.at(path)) == want })
			}
			if got := len(r.at(path)); got != want {
				t.Errorf("%d requests at %s, want %d", got, path, want)
			}
		}

		w := make(keyA, "/one?x=secret")
		if w.State() != "waiting" || w.Waits == "" {
			t.Fatalf("made as %+v, want it to wait", w)
		}
		act, err := gate.Action(t.Context(), person, w.Waits)
		if err != nil || act.Kind != policy.KindWebhook || act.State != oversight.Pending || act.Inbox != a.ID {
			t.Fatalf("action %+v, %v", act, err)
		}
		if v, err := gate.Show(act); err != nil || !strings.Contains(v.Fields[0].Value, r.URL+"/one?x=secret") || len(v.Notes) == 0 {
			t.Errorf("shown as %+v, %v, want the whole URL", v, err)
		}
		told("/one", 0)
		on := true
		if got, err := h.Update(t.Context(), keyA, w.ID, webhook.Change{Enabled: &on}); err != nil || got.State() != "waiting" {
			t.Errorf("enabled: %+v, %v", got, err)
		}
		told("/one", 0)
		decide(w.Waits, true)
		state(w, "active")
		told("/one", 1)

		// To another URL it waits again; the first action is over.
		u := r.URL + "/two"
		w, err = h.Update(t.Context(), keyA, w.ID, webhook.Change{URL: &u})
		if err != nil || w.State() != "waiting" || w.Waits == act.ID {
			t.Fatalf("turned: %+v, %v", w, err)
		}
		told("/two", 0)
		if ds, err := h.Deliveries(t.Context(), keyA, w.ID, 0, 1); err != nil || len(ds) != 1 {
			t.Errorf("log: %v, %v", ds, err)
		} else if _, err := h.Redeliver(t.Context(), keyA, w.ID, ds[0].ID); !errors.Is(err, webhook.ErrInvalid) {
			t.Errorf("redelivered to it: %v", err)
		}
		// An approval of a URL that it has no more lets nothing through.
		stale := w.Waits
		u = r.URL + "/three"
		if w, err = h.Update(t.Context(), keyA, w.ID, webhook.Change{URL: &u}); err != nil {
			t.Fatal(err)
		}
		if act, err := gate.Action(t.Context(), person, stale); err != nil || act.State != oversight.Cancelled {
			t.Errorf("the action for its former URL: %+v, %v, want it cancelled", act.State, err)
		}
		if o := h.Execute(t.Context(), oversight.Action{ID: stale, Payload: act.Payload}); o.State != oversight.Failed {
			t.Errorf("carried out all the same: %+v", o)
		}
		told("/three", 0)
		decide(w.Waits, false)
		state(w, "disabled")
		if got, err := h.Get(t.Context(), keyA, w.ID); err != nil || !strings.Contains(got.Reason, "because") {
			t.Errorf("refused as %+v, %v, want the person's reason", got, err)
		}
		// Turned on, it is asked for once more, and not simply on.
		got, err := h.Update(t.Context(), keyA, w.ID, webhook.Change{Enabled: &on})
		if err != nil || got.State() != "waiting" || got.Waits == w.Waits {
			t.Errorf("turned on after a refusal: %+v, %v", got, err)
		}
		told("/three", 0)

		// One key does not fill the queue of people, and leaves nothing in it.
		b := make(keyB, "/b")
		for i := range 50 {
			u := r.URL + "/" + strings.Repeat("x", i+1)
			if _, err := h.Update(t.Context(), keyB, b.ID, webhook.Change{URL: &u}); err != nil {
				t.Fatal(err)
			}
		}
		waiting := func() (n int) {
			as, err := gate.Actions(t.Context(), person, oversight.Query{States: []oversight.State{oversight.Pending}})
			for _, a := range as {
				if a.Proposer == keyB.String() {
					n++
				}
			}
			if err != nil {
				t.Error(err)
			}
			return n
		}
		if n := waiting(); n != 1 {
			t.Errorf("%d actions wait, want that of the last URL", n)
		}
		if err := h.Delete(t.Context(), keyB, b.ID); err != nil {
			t.Fatal(err)
		}
		if n := waiting(); n != 0 {
			t.Errorf("%d actions wait for a webhook that is gone", n)
		}
	})
}

// TestAgentsWebhookDenied: what policy denies is made and told nothing.
func TestAgentsWebhookDenied(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		p := newPost(t, db)
		_, key := p.inbox(t, "alice")
		h, _ := gated(t, db, oversighttest.Rules{{ID: "no", Kind: policy.KindWebhook, Effect: policy.Deny, Reason: "no webhooks here"}}, webhook.Config{})
		w, _, err := h.Create(t.Context(), key, change("a", "https://hook.example/x", event.MessageReceived))
		if err != nil || w.State() != "disabled" || !strings.Contains(w.Reason, "no webhooks here") {
			t.Errorf("got %+v, %v", w, err)
		}
		for _, u := range []string{"https://hook.example/\u202ex", "https://hook.example/a b", "https://hook.example/ä"} {
			if _, _, err := h.Create(t.Context(), key, change("a", u, event.MessageReceived)); !errors.Is(err, webhook.ErrInvalid) {
				t.Errorf("%q: %v", u, err)
			}
		}
	})
}

// TestAgentsWebhookEvents: a webhook receives the events that a person saw when
// they allowed it. For more it waits again, and for fewer it does not.
func TestAgentsWebhookEvents(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		p := newPost(t, db)
		_, key := p.inbox(t, "alice")
		h, gate := gated(t, db, oversighttest.Rules(nil), webhook.Config{})
		person := auth.Principal{Kind: auth.Person, ID: "ann", Project: p.who.Project, Role: auth.Owner}
		w, _, err := h.Create(t.Context(), key, change("a", "https://hook.example/x", event.MessageReceived))
		if err != nil {
			t.Fatal(err)
		}
		first := w.Waits
		for _, tt := range []struct {
			name    string
			events  []event.Type
			allowed bool // before
			want    string
		}{
			{"more, while it waits", []event.Type{event.MessageReceived, event.MessageSent}, false, "waiting"},
			{"fewer", []event.Type{event.MessageSent}, true, "active"},
			{"another", []event.Type{event.MessageReceived}, false, "waiting"},
		} {
			if tt.allowed {
				act, err := gate.Action(t.Context(), person, w.Waits)
				if err != nil {
					t.Fatal(err)
				}
				if err := gate.Decide(t.Context(), person, oversight.Decision{ID: act.ID, Version: act.Version, Digest: act.Hex(), Approve: true}); err != nil {
					t.Fatal(err)
				}
				eventually(t, "leave", func() bool {
					got, err := h.Get(t.Context(), key, w.ID)
					return err == nil && got.State() == "active"
				})
			}
			if w, err = h.Update(t.Context(), key, w.ID, webhook.Change{Events: tt.events}); err != nil || w.State() != tt.want {
				t.Errorf("%s: %s, %v, want %s", tt.name, w.State(), err, tt.want)
			}
			if w.Waits == first {
				t.Errorf("%s: it waits for the action in which a person saw other events", tt.name)
			}
		}
	})
}
