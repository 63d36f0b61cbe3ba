package event_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/store"
	"postern/internal/storetest"
)

func addMail(t *testing.T, db *store.DB, after func(), es ...event.Event) {
	t.Helper()
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		for _, e := range es {
			if err := event.AppendMail(t.Context(), tx, e); err != nil {
				return err
			}
		}
		if after != nil {
			tx.AfterCommit(after)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func ofInbox(t *testing.T, db *store.DB, inbox string, after int64, limit int, types ...event.Type) (out []event.Event) {
	t.Helper()
	err := db.View(t.Context(), func(tx *store.Tx) (err error) {
		out, err = event.OfInbox(t.Context(), tx, inbox, after, limit, types...)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func objects(es []event.Event) string {
	var s []string
	for _, e := range es {
		s = append(s, e.Object)
	}
	return strings.Join(s, " ")
}

func TestOfInbox(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who, other := project(t, db, "one"), project(t, db, "two")
		e := func(p auth.Principal, inbox string, typ event.Type, object string) event.Event {
			return event.Event{Project: p.Project, Type: typ, Inbox: inbox, Object: object, Data: map[string]any{"message": object}}
		}
		addMail(t, db, nil,
			e(who, "ibx_A", event.MessageReceived, "msg_1"), e(who, "ibx_B", event.MessageReceived, "msg_2"),
			e(who, "ibx_A", event.MessageSent, "msg_3"), e(other, "ibx_C", event.MessageReceived, "msg_4"), e(who, "ibx_A", event.MessageReceived, "msg_5"))
		all := ofInbox(t, db, "ibx_A", 0, 10)
		if got, want := objects(all), "msg_1 msg_3 msg_5"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		for _, tt := range []struct {
			name  string
			after int64
			limit int
			types []event.Type
			want  string
		}{
			{"after the first", all[0].Seq, 10, nil, "msg_3 msg_5"},
			{"after the last", all[2].Seq, 10, nil, ""},
			{"a page", 0, 2, nil, "msg_1 msg_3"},
			{"of a type", 0, 10, []event.Type{event.MessageReceived}, "msg_1 msg_5"},
			{"of two types", 0, 10, []event.Type{event.MessageSent, event.MessageBounced}, "msg_3"},
		} {
			t.Run(tt.name, func(t *testing.T) {
				if got := objects(ofInbox(t, db, "ibx_A", tt.after, tt.limit, tt.types...)); got != tt.want {
					t.Errorf("got %q, want %q", got, tt.want)
				}
			})
		}
		err := db.View(t.Context(), func(tx *store.Tx) error {
			for id, want := range map[string]int64{all[1].ID: all[1].Seq, "msg_5": all[2].Seq} {
				if got, err := event.SeqOf(t.Context(), tx, "ibx_A", id); got != want || err != nil {
					t.Errorf("SeqOf(%s): got %d, %v, want %d", id, got, err, want)
				}
			}
			for _, id := range []string{"msg_2", "evt_X", ""} {
				if _, err := event.SeqOf(t.Context(), tx, "ibx_A", id); !errors.Is(err, store.ErrNotFound) {
					t.Errorf("SeqOf(%q): got %v, want ErrNotFound", id, err)
				}
			}
			last, err := event.Last(t.Context(), tx, "ibx_A")
			if last != all[2].Seq {
				t.Errorf("Last: got %d, want %d", last, all[2].Seq)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		// Sandboxes' events are a list of their own.
		es, err := event.List(t.Context(), db, who, event.Query{Limit: 10})
		if err != nil || len(es) != 0 {
			t.Errorf("got %d events of sandboxes, %v, want none", len(es), err)
		}
		b, err := json.Marshal(all[0])
		want := fmt.Sprintf(`{"id":%q,"type":"message.received","timestamp":%q,"inbox":"ibx_A","data":{"message":"msg_1"}}`, all[0].ID, all[0].At.Format(time.RFC3339Nano))
		if string(b) != want || err != nil {
			t.Errorf("got %s, %v\nwant %s", b, err, want)
		}
		err = db.Update(t.Context(), func(tx *store.Tx) error {
			for _, bad := range []event.Event{e(who, "", event.MessageSent, ""), e(who, "ibx_A", event.Created, ""), e(who, "ibx_A", "message.exploded", "")} {
				if err := event.AppendMail(t.Context(), tx, bad); err == nil {
					t.Errorf("appended %+v", bad)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}

// TestNoneIsMissed: a reader who goes on after the last number that it has seen
// sees every event, however many append at the same time.
func TestNoneIsMissed(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who := project(t, db, "one")
		const writers, each = 4, 25
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				for i := range each {
					addMail(t, db, nil, event.Event{Project: who.Project, Type: event.MessageReceived, Inbox: "ibx_A", Object: fmt.Sprintf("msg_%d_%d", w, i)})
				}
			})
		}
		seen, after := map[string]bool{}, int64(0)
		for end := time.Now().Add(5 * time.Minute); len(seen) < writers*each && time.Now().Before(end); {
			for _, e := range ofInbox(t, db, "ibx_A", after, 10) {
				if e.Seq <= after || seen[e.Object] {
					t.Fatalf("%s with number %d after %d", e.Object, e.Seq, after)
				}
				seen[e.Object], after = true, e.Seq
			}
		}
		wg.Wait()
		if len(seen) != writers*each {
			t.Errorf("saw %d events of %d", len(seen), writers*each)
		}
	})
}

// TestWatch: who waits is woken by this process at once, and by another one
// soon; and by neither for what was rolled back.
func TestAppendEach(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who := project(t, db, "one")
		var inboxes []string
		for i := range 1203 { // more than two statements' worth
			inboxes = append(inboxes, fmt.Sprintf("ibx_%d", i))
		}
		addMail(t, db, nil, event.Event{Project: who.Project, Type: event.MessageReceived, Inbox: "ibx_7", Object: "msg_1"})
		each := func(typ event.Type, inboxes ...string) error {
			return db.Update(t.Context(), func(tx *store.Tx) error {
				return event.AppendEach(t.Context(), tx, event.Event{Project: who.Project, Type: typ, Object: "swi_1", Data: map[string]any{"scope": "project"}}, inboxes)
			})
		}
		if err := each(event.SwitchOn, inboxes...); err != nil {
			t.Fatal(err)
		}
		addMail(t, db, nil, event.Event{Project: who.Project, Type: event.MessageReceived, Inbox: "ibx_7", Object: "msg_2"})
		if got, want := objects(ofInbox(t, db, "ibx_7", 0, 10)), "msg_1 swi_1 msg_2"; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		for _, inbox := range inboxes {
			es := ofInbox(t, db, inbox, 0, 10, event.SwitchOn)
			if len(es) != 1 || es[0].Data["scope"] != "project" {
				t.Fatalf("%s: got %v, want one event of its own", inbox, es)
			}
		}
		if err := each(event.SwitchOff); err != nil {
			t.Errorf("no inboxes: %v", err)
		}
		if err := each("switch.what", "ibx_7"); err == nil {
			t.Error("an unknown type was taken")
		}
		if err := each(event.SwitchOff, "ibx_7", ""); err == nil {
			t.Error("an inbox without a name was taken")
		}
	})
}

func TestWatch(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who := project(t, db, "one")
		log := slog.New(slog.NewTextHandler(t.Output(), nil))
		here, there := event.NewWatch(log, db), event.NewWatch(log, db)
		for _, w := range []*event.Watch{here, there} {
			ended := make(chan struct{})
			go func() { defer close(ended); _ = w.Run(t.Context()) }()
			t.Cleanup(func() { <-ended })
		}
		rung := func(c <-chan struct{}, what string) {
			t.Helper()
			select {
			case <-c:
			case <-time.After(2 * time.Minute):
				t.Fatalf("not within two minutes: %s", what)
			}
		}
		a, stopA := here.Wait("ibx_A")
		defer stopA()
		far, stopFar := there.Wait("ibx_A")
		defer stopFar()
		// Run wakes everybody once, when it begins.
		rung(far, "the first look")
		rung(a, "the first look")
		b, stopB := here.Wait("ibx_B")
		defer stopB()
		rung(b, "the first look")
		addMail(t, db, func() { here.Wake("ibx_A") }, event.Event{Project: who.Project, Type: event.MessageReceived, Inbox: "ibx_A"})
		rung(a, "in the same process")
		rung(far, "in another process")
		select {
		case <-b:
			t.Error("who waits for another inbox was woken")
		default:
		}
		boom := errors.New("boom")
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			tx.AfterCommit(func() { t.Error("called after a rollback") })
			return boom
		})
		if !errors.Is(err, boom) {
			t.Error(err)
		}
	})
}

func TestPruneInboxes(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who := project(t, db, "one")
		add(t, db, event.Event{Project: who.Project, Type: event.Created, Sandbox: "i1"}, event.Event{Project: who.Project, Type: event.Killed, Sandbox: "i1"})
		for _, inbox := range []string{"ibx_A", "ibx_A", "ibx_A", "ibx_A", "ibx_B"} {
			addMail(t, db, nil, event.Event{Project: who.Project, Type: event.MessageReceived, Inbox: inbox})
			time.Sleep(time.Millisecond)
		}
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `update event set routed_at = 1`)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		// The flood of one inbox removes nothing of another's, nor of sandboxes.
		if n, err := event.Prune(t.Context(), db, event.Retention{Inbox: 2}); n != 2 || err != nil {
			t.Errorf("got %d, %v, want 2", n, err)
		}
		es, err := event.List(t.Context(), db, who, event.Query{Limit: 10})
		if a, b := len(ofInbox(t, db, "ibx_A", 0, 10)), len(ofInbox(t, db, "ibx_B", 0, 10)); a != 2 || b != 1 || len(es) != 2 || err != nil {
			t.Errorf("left are %d, %d and %d of sandboxes, %v", a, b, len(es), err)
		}
	})
}

// TestNumbersGoOnAfterTheUpgrade: a reader who stands at an event from when all inboxes
// shared one counter misses none that comes after it.
func TestNumbersGoOnAfterTheUpgrade(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		who := project(t, db, "one")
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			for seq, inbox := range []string{1: "ibx_A", 2: "ibx_B", 3: "ibx_A"} {
				if inbox == "" {
					continue
				}
				_, err := tx.ExecContext(t.Context(), `insert into event (id, project_id, type, inbox_id, object_id, seq, sandbox_id, template, build_id, execution_id, data, at, routed_at)
					values ($1, $2, $3, $4, $1, $5, '', '', '', '', '{}', $5, 0)`, fmt.Sprintf("evt_%d", seq), who.Project, event.MessageReceived, inbox, seq)
				if err != nil {
					return err
				}
			}
			_, err := tx.ExecContext(t.Context(), `update event_head set seq = 3 where id = 1`)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			addMail(t, db, nil, event.Event{Project: who.Project, Type: event.MessageReceived, Inbox: "ibx_A", Object: "new"},
				event.Event{Project: who.Project, Type: event.MessageReceived, Inbox: "ibx_B", Object: "new"})
		}
		for inbox, want := range map[string]string{"ibx_A": "evt_1 evt_3 new new", "ibx_B": "evt_2 new new"} {
			if got := objects(ofInbox(t, db, inbox, 0, 10)); got != want {
				t.Errorf("%s: got %q, want %q", inbox, got, want)
			}
		}
	})
}
