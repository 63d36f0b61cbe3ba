package oversight_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// request proposes an action with a request.
func (f *fixture) request(t testing.TB, r policy.Request) (a oversight.Action) {
	t.Helper()
	r.Kind = "test.effect"
	err := f.db.Update(t.Context(), func(tx *store.Tx) (err error) {
		a, err = f.gate.Propose(t.Context(), tx, f.agent, oversight.Proposal{Request: r, Inbox: f.agent.Inbox, Via: "test", Payload: []byte(r.Subject)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func (f *fixture) queue(q oversight.QueueQuery) oversight.Queue {
	f.t.Helper()
	out, err := f.gate.Queue(f.t.Context(), f.person, q)
	if err != nil {
		f.t.Fatal(err)
	}
	return out
}

func ids(q oversight.Queue) (out []string) {
	for _, a := range q.Items {
		out = append(out, a.ID)
	}
	return out
}

func TestQueueFollowsTheActions(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		plain := f.request(t, policy.Request{To: []string{"bob@example.com"}, Subject: "Hello"})
		money := f.request(t, policy.Request{To: []string{"eve@evil.test"}, Subject: "Invoice 100%", Money: []string{"invoice"}})
		flags := f.request(t, policy.Request{To: []string{"bob@example.com"}, Subject: "Third", Flags: []string{"iban", "media", "unread"}})

		if got, want := ids(f.queue(oversight.QueueQuery{})), []string{flags.ID, money.ID, plain.ID}; !slices.Equal(got, want) {
			t.Errorf("by risk: %v, want %v", got, want)
		}
		if got, want := ids(f.queue(oversight.QueueQuery{Order: oversight.ByAge})), []string{plain.ID, money.ID, flags.ID}; !slices.Equal(got, want) {
			t.Errorf("by age: %v, want %v", got, want)
		}
		for _, tt := range []struct {
			name string
			q    oversight.QueueQuery
			want []string
		}{
			{"words", oversight.QueueQuery{Words: "INVOICE eve"}, []string{money.ID}},
			{"a sign of the search language", oversight.QueueQuery{Words: "0%"}, []string{money.ID}},
			{"a sign that no subject has", oversight.QueueQuery{Words: "H_llo"}, nil},
			{"a recipient", oversight.QueueQuery{Recipient: "eve@evil.test"}, []string{money.ID}},
			{"a part of a recipient", oversight.QueueQuery{Recipient: "ve@evil.test"}, nil},
			{"a domain", oversight.QueueQuery{Recipient: "evil.test"}, []string{money.ID}},
			{"another inbox", oversight.QueueQuery{Inbox: "ibx_2"}, nil},
			{"another kind", oversight.QueueQuery{Kinds: []policy.Kind{policy.KindSend}}, nil},
			{"an attack on the query", oversight.QueueQuery{Words: `' or '1'='1`, Inbox: `' or 1=1 --`}, nil},
		} {
			if got := ids(f.queue(tt.q)); !slices.Equal(got, tt.want) {
				t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
			}
		}
		one := f.queue(oversight.QueueQuery{Limit: 2, Around: money.ID})
		if one.Total != 3 || one.Waiting != 3 || one.Place != 2 || one.Before != flags.ID || one.Behind != plain.ID || one.Inboxes["ibx_1"] != 3 {
			t.Errorf("got %+v", one)
		}
		if two := f.queue(oversight.QueueQuery{Limit: 2, After: one.Next}); !slices.Equal(ids(two), []string{plain.ID}) || two.Next != "" {
			t.Errorf("the second page has %v, next %q", ids(two), two.Next)
		}
		if _, err := f.gate.Queue(t.Context(), f.person, oversight.QueueQuery{After: "x"}); !errors.Is(err, auth.ErrInvalid) {
			t.Errorf("a forged cursor: %v", err)
		}
		if _, err := f.gate.Queue(t.Context(), f.agent, oversight.QueueQuery{}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("an agent reads the queue: %v", err)
		}
		if q, err := f.gate.Queue(t.Context(), f.stranger, oversight.QueueQuery{Around: money.ID}); err != nil || q.Waiting != 0 || q.Place != 0 {
			t.Errorf("another project sees %+v, %v", q, err)
		}
		// The attack: somebody who can write the database hides an action, or plants one.
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `update waiting set action_id = 'act_planted' where action_id = $1`, money.ID)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.gate.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		if q := f.queue(oversight.QueueQuery{}); q.Waiting != 3 || !slices.Contains(ids(q), money.ID) {
			t.Errorf("after a sweep: %d wait, %v", q.Waiting, ids(q))
		}
		if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: plain.ID, Version: 1, Digest: plain.Hex(), Approve: true}); err != nil {
			t.Fatal(err)
		}
		if q := f.queue(oversight.QueueQuery{}); q.Total != 2 || slices.Contains(ids(q), plain.ID) {
			t.Errorf("after a decision: %+v", ids(q))
		}
	})
}

func TestSnoozeIsOnePersons(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ctx := t.Context()
		a := f.request(t, policy.Request{Subject: "later"})
		bob := f.person
		bob.ID = "bob"
		if _, err := f.gate.Snooze(ctx, f.person, a.ID, time.Now().Add(time.Hour), false); err != nil {
			t.Fatal(err)
		}
		if q := f.queue(oversight.QueueQuery{}); q.Waiting != 0 || q.Snoozed != 1 {
			t.Errorf("put off: %d wait, %d are put off", q.Waiting, q.Snoozed)
		}
		if q := f.queue(oversight.QueueQuery{Snoozed: true}); len(q.Items) != 1 || !q.Items[0].Expires.Equal(a.Expires) {
			t.Errorf("what is put off: %+v", q.Items)
		}
		if q, err := f.gate.Queue(ctx, bob, oversight.QueueQuery{}); err != nil || q.Waiting != 1 {
			t.Errorf("another person sees %d, %v", q.Waiting, err)
		}
		if list, err := f.gate.Snoozed(ctx, f.person); err != nil || len(list) != 1 || list[0].Action != a.ID {
			t.Errorf("got %+v, %v", list, err)
		}
		if err := f.gate.Unsnooze(ctx, f.person, a.ID); err != nil {
			t.Fatal(err)
		}
		if q := f.queue(oversight.QueueQuery{}); q.Waiting != 1 {
			t.Error("it is not back on the list")
		}
		for _, until := range []time.Time{{}, time.Now().Add(-time.Hour), a.Expires.Add(time.Hour)} {
			if _, err := f.gate.Snooze(ctx, f.person, a.ID, until, false); !errors.Is(err, oversight.ErrSnooze) {
				t.Errorf("until %v: %v", until, err)
			}
		}
		for name, who := range map[string]auth.Principal{"its agent": f.agent, "a viewer": {Kind: auth.Person, Role: auth.Viewer, ID: "eve", Project: f.person.Project}} {
			if _, err := f.gate.Snooze(ctx, who, a.ID, time.Now().Add(time.Hour), false); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s puts it off: %v", name, err)
			}
			if err := f.gate.Assign(ctx, who, a.ID, "ann"); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s assigns it: %v", name, err)
			}
		}
		if _, err := f.gate.Snooze(ctx, f.stranger, a.ID, time.Now().Add(time.Hour), false); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("another project puts it off: %v", err)
		}
		if err := f.gate.Assign(ctx, f.person, a.ID, "nobody"); !errors.Is(err, oversight.ErrAssign) {
			t.Errorf("assigned to nobody of the project: %v", err)
		}
		// It comes back when its agent writes it anew.
		if _, err := f.gate.Snooze(ctx, f.person, a.ID, time.Time{}, true); err != nil {
			t.Fatal(err)
		}
		err := db.Update(ctx, func(tx *store.Tx) error {
			_, err := f.gate.Revise(ctx, tx, f.agent, a.ID, 0, oversight.Proposal{Request: policy.Request{Kind: "test.effect", Subject: "again"}, Inbox: "ibx_1", Via: "test", Payload: []byte("again")})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if q := f.queue(oversight.QueueQuery{Words: "again"}); q.Total != 1 {
			t.Error("the revised action is not back on the list")
		}
		var entries []audit.Entry
		err = audit.View(ctx, db, func(tx *store.Tx) (err error) {
			entries, err = audit.List(ctx, tx, audit.Query{Object: a.ID, Verbs: []audit.Verb{audit.ActionSnooze}})
			return err
		})
		if err != nil || len(entries) != 3 {
			t.Errorf("the record has %d entries, %v", len(entries), err)
		}
	})
}

// BenchmarkQueue reads the first page of 10,000 waiting actions.
func BenchmarkQueue(b *testing.B) {
	for _, name := range []string{"sqlite", "postgres"} {
		b.Run(name, func(b *testing.B) {
			var db *store.DB
			if name == "sqlite" {
				db = storetest.SQLite(b)
			} else {
				db = storetest.Open(b, storetest.PostgresURL(b))
			}
			person := auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: "prj_1"}
			gate := oversight.NewGate(slog.New(slog.DiscardHandler), db, nil)
			err := db.Update(b.Context(), func(tx *store.Tx) error {
				_, err := tx.ExecContext(b.Context(), `insert into project (id, name, created_at) values ('prj_1', 'one', 1)`)
				if err != nil {
					return err
				}
				payload := bytes.Repeat([]byte("x"), 20_000)
				for i := range 10_000 {
					_, err := tx.ExecContext(b.Context(), `insert into action (id, project_id, kind, proposer, inbox_id, via, payload, digest, state, version, rule, verdict, created_at, decider, decided_at, reason, attempts, not_before, result)
						values ($1, 'prj_1', 'email.send', 'agent:crd_1', $2, 'mcp', $3, $4, 'pending', 1, '', '', $5, '', 0, '', 0, 0, '')`, fmt.Sprintf("act_%05d", i), fmt.Sprintf("ibx_%d", i%20), payload, payload[:32], i)
					if err != nil {
						return err
					}
					_, err = tx.ExecContext(b.Context(), `insert into waiting (action_id, project_id, kind, inbox_id, proposer, who, risk, reasons, words, created_at, expires_at, grave)
						values ($1, 'prj_1', 'email.send', $2, 'agent:crd_1', '', $3, 'first mail to 1 recipient', $4, $5, 0, 0)`,
						fmt.Sprintf("act_%05d", i), fmt.Sprintf("ibx_%d", i%20), i%400, fmt.Sprintf("\nbob%d@example.com\nthe report of day %d\n", i, i), i)
					if err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
			for _, q := range []struct {
				name  string
				query oversight.QueueQuery
				total int
			}{{"first", oversight.QueueQuery{}, 10_000}, {"around", oversight.QueueQuery{Around: "act_05000"}, 10_000}, {"words", oversight.QueueQuery{Words: "day 77"}, 0}} {
				b.Run(q.name, func(b *testing.B) {
					for b.Loop() {
						if out, err := gate.Queue(b.Context(), person, q.query); err != nil || q.total > 0 && out.Total != q.total || len(out.Items) == 0 {
							b.Fatal(out.Total, err)
						}
					}
				})
			}
		})
	}
}
