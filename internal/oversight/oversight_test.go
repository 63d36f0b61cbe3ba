package oversight_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

// An effect is an executor that counts what it did.
type effect struct {
	mu       sync.Mutex // guards ran
	ran      []string
	outcomes []oversight.Outcome // the next ones; then Done
	finish   error
}

func (e *effect) Execute(_ context.Context, a oversight.Action) oversight.Outcome {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ran = append(e.ran, string(a.Payload))
	if len(e.outcomes) > 0 {
		o := e.outcomes[0]
		e.outcomes = e.outcomes[1:]
		return o
	}
	return oversight.Outcome{State: oversight.Done, Detail: "ok"}
}

func (e *effect) Show(a oversight.Action) (oversight.View, error) {
	return oversight.View{Title: string(a.Payload)}, nil
}

func (e *effect) Finish(context.Context, *store.Tx, oversight.Action, oversight.Outcome) error {
	return e.finish
}

type fixture struct {
	t    *testing.T
	log  *slog.Logger
	db   *store.DB
	gate *oversight.Gate
	eff  *effect

	agent, person, stranger auth.Principal
}

func setup(t *testing.T, db *store.DB, rules oversighttest.Rules) *fixture {
	t.Helper()
	return setupNamed(t, db, rules, "one", "two")
}

func setupNamed(t *testing.T, db *store.DB, rules oversighttest.Rules, names ...string) *fixture {
	t.Helper()
	f := &fixture{t: t, log: slog.New(slog.NewTextHandler(t.Output(), nil)), db: db, eff: &effect{}}
	f.gate = oversight.NewGate(f.log, db, rules)
	f.gate.Handle("test.effect", f.eff)
	var ids []string
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		for _, name := range names {
			id, _, err := auth.NewProject(t.Context(), tx, name)
			if err != nil {
				return err
			}
			ids = append(ids, id)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	f.agent = auth.Principal{Kind: auth.Agent, ID: "crd_1", Project: ids[0], Inbox: "ibx_1"}
	f.person = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: ids[0]}
	f.stranger = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "eve", Project: ids[1]}
	return f
}

func (f *fixture) propose(payload string) (a oversight.Action) {
	f.t.Helper()
	err := f.db.Update(f.t.Context(), func(tx *store.Tx) (err error) {
		a, err = f.gate.Propose(f.t.Context(), tx, f.agent, oversight.Proposal{
			Request: policy.Request{Kind: "test.effect"}, Inbox: f.agent.Inbox, Via: "test", Payload: []byte(payload),
		})
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func (f *fixture) state(id string) oversight.Action {
	f.t.Helper()
	a, err := f.gate.Action(f.t.Context(), f.person, id)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func (f *fixture) drain() {
	f.t.Helper()
	for {
		ran, err := f.gate.RunOne(f.t.Context())
		if err != nil {
			f.t.Fatal(err)
		}
		if !ran {
			return
		}
	}
}

// TestPendingIsBounded: who proposes in a loop fills neither the disk nor the
// reviewer's day, and takes no other inbox's room.
func TestPendingIsBounded(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		propose := func(inbox string, n int, payload []byte) error {
			return db.Update(t.Context(), func(tx *store.Tx) error {
				for range n {
					_, err := f.gate.Propose(t.Context(), tx, f.agent, oversight.Proposal{
						Request: policy.Request{Kind: "test.effect"}, Inbox: inbox, Via: "test", Payload: payload,
					})
					if err != nil {
						return err
					}
				}
				return nil
			})
		}
		if err := propose("ibx_1", 500, []byte("x")); err != nil {
			t.Fatal(err)
		}
		if err := propose("ibx_1", 1, []byte("x")); !errors.Is(err, oversight.ErrFull) {
			t.Errorf("the 501st: %v, want ErrFull", err)
		}
		big := make([]byte, 508<<20)
		if err := propose("ibx_2", 1, big[:5<<20]); err != nil {
			t.Fatal(err)
		}
		if err := propose("ibx_2", 1, big); !errors.Is(err, oversight.ErrFull) {
			t.Errorf("513 MiB: %v, want ErrFull", err)
		}
		if err := propose("ibx_2", 1, []byte("x")); err != nil {
			t.Errorf("another inbox: %v", err)
		}
	})
}

func decision(a oversight.Action, approve bool) oversight.Decision {
	return oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: approve, Reason: "because"}
}

func TestApproveRunsOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		a := f.propose("hello")
		if f.drain(); len(f.eff.ran) != 0 {
			t.Fatal("it ran before anybody approved it")
		}
		if err := f.gate.Decide(t.Context(), f.person, decision(a, true)); err != nil {
			t.Fatal(err)
		}
		if err := f.gate.Decide(t.Context(), f.person, decision(a, false)); !errors.Is(err, oversight.ErrStale) {
			t.Errorf("second decision = %v, want ErrStale", err)
		}
		// Several workers at once: one of them runs it.
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(f.drain)
		}
		wg.Wait()
		if got := f.state(a.ID); got.State != oversight.Done || len(f.eff.ran) != 1 || got.Decider != "person:ann" || got.Result != "ok" {
			t.Errorf("state = %+v, ran %d times", got, len(f.eff.ran))
		}
		err := audit.View(t.Context(), db, func(tx *store.Tx) error {
			es, err := audit.List(t.Context(), tx, audit.Query{Object: a.ID})
			var verbs []string
			for _, e := range slices.Backward(es) {
				verbs = append(verbs, string(e.Verb))
			}
			if want := []string{"action.propose", "action.approve", "action.execute", "action.done"}; !slices.Equal(verbs, want) {
				t.Errorf("audit = %v, want %v", verbs, want)
			}
			if _, verr := audit.Examine(t.Context(), tx, audit.Options{}); verr != nil {
				t.Error(verr)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}

// TestDecideRefuses is the attackers: who may not decide, and what was not shown.
func TestDecideRefuses(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		a := f.propose("hello")
		other := f.propose("other")
		sandbox := f.agent
		sandbox.Kind = auth.Sandbox
		project := f.agent
		project.Kind = auth.Project
		tests := []struct {
			name string
			who  auth.Principal
			d    oversight.Decision
			want error
		}{
			{"the agent itself", f.agent, decision(a, true), auth.ErrForbidden},
			{"a sandbox", sandbox, decision(a, true), auth.ErrForbidden},
			{"a project key", project, decision(a, true), auth.ErrForbidden},
			{"the system", auth.Principal{Kind: auth.System, Project: f.agent.Project}, decision(a, true), auth.ErrForbidden},
			{"nobody", auth.Principal{}, decision(a, true), auth.ErrForbidden},
			{"a person of another project", f.stranger, decision(a, true), store.ErrNotFound},
			{"another action's digest", f.person, oversight.Decision{ID: a.ID, Version: 1, Digest: other.Hex(), Approve: true}, oversight.ErrStale},
			{"no digest", f.person, oversight.Decision{ID: a.ID, Version: 1, Approve: true}, oversight.ErrStale},
			{"an older version", f.person, oversight.Decision{ID: a.ID, Version: 0, Digest: a.Hex(), Approve: true}, oversight.ErrStale},
			{"a later version", f.person, oversight.Decision{ID: a.ID, Version: 2, Digest: a.Hex(), Approve: true}, oversight.ErrStale},
			{"no such action", f.person, oversight.Decision{ID: "act_x", Version: 1, Approve: true}, store.ErrNotFound},
			{"rejected without a reason", f.person, oversight.Decision{ID: a.ID, Version: 1, Digest: a.Hex(), Reason: " "}, oversight.ErrReason},
			{"a reason without end", f.person, oversight.Decision{ID: a.ID, Version: 1, Digest: a.Hex(), Reason: strings.Repeat("x", 1001)}, oversight.ErrReason},
		}
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				if err := f.gate.Decide(t.Context(), tt.who, tt.d); !errors.Is(err, tt.want) {
					t.Errorf("Decide = %v, want %v", err, tt.want)
				}
				if err := f.gate.Resolve(t.Context(), tt.who, a.ID, 1, oversight.Approved, "x"); err == nil {
					t.Error("Resolve of a pending action succeeded")
				}
				if got := f.state(a.ID); got.State != oversight.Pending || got.Version != 1 {
					t.Errorf("afterwards: %s version %d", got.State, got.Version)
				}
			})
		}
		if f.drain(); len(f.eff.ran) != 0 {
			t.Errorf("ran %v", f.eff.ran)
		}
	})
}

// TestChangedPayload is who can write the database: after the proposal, and
// after the approval.
func TestChangedPayload(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		change := func(id string) {
			err := db.Update(t.Context(), func(tx *store.Tx) error {
				_, err := tx.ExecContext(t.Context(), `update action set payload = $1 where id = $2`, []byte("evil"), id)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		before := f.propose("hello")
		change(before.ID)
		if err := f.gate.Decide(t.Context(), f.person, decision(before, true)); !errors.Is(err, oversight.ErrStale) {
			t.Errorf("Decide on a changed payload = %v, want ErrStale", err)
		}
		after := f.propose("hello")
		if err := f.gate.Decide(t.Context(), f.person, decision(after, true)); err != nil {
			t.Fatal(err)
		}
		change(after.ID)
		f.drain()
		if got := f.state(after.ID); got.State != oversight.Failed || len(f.eff.ran) != 0 {
			t.Errorf("state = %s, ran %v; want failed and nothing", got.State, f.eff.ran)
		}
	})
}

func TestOutcomes(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, allow)
		f.eff.outcomes = []oversight.Outcome{{State: oversight.Approved, Detail: "later"}, {State: oversight.Failed, Detail: "refused"}, {State: oversight.Unknown, Detail: "?"}}
		retried := f.propose("first")
		f.drain()
		if got := f.state(retried.ID); got.State != oversight.Failed || got.Attempts != 2 {
			t.Errorf("retried: %s after %d attempts, want failed after 2", got.State, got.Attempts)
		}
		unknown := f.propose("second")
		f.drain()
		got := f.state(unknown.ID)
		if got.State != oversight.Unknown {
			t.Fatalf("state = %s, want unknown", got.State)
		}
		if f.drain(); len(f.eff.ran) != 3 {
			t.Errorf("an unknown action was executed again: %v", f.eff.ran)
		}
		if err := f.gate.Resolve(t.Context(), f.agent, unknown.ID, got.Version, oversight.Done, "trust me"); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("an agent resolved: %v", err)
		}
		if err := f.gate.Resolve(t.Context(), f.person, unknown.ID, got.Version, oversight.Approved, "it did not arrive"); err != nil {
			t.Fatal(err)
		}
		f.drain()
		if got := f.state(unknown.ID); got.State != oversight.Done {
			t.Errorf("after resolving: %s, want done", got.State)
		}
		f.eff.finish = errors.New("disk full")
		a := f.propose("third")
		f.drain()
		if got := f.state(a.ID); got.State != oversight.Done {
			t.Errorf("with records that cannot be kept: %s, want done", got.State)
		}
	})
}

// TestRecover is a program that stopped between intent and effect.
func TestRecover(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		for i, s := range []oversight.State{oversight.Executing, oversight.Approved, oversight.Pending, oversight.Done} {
			a := f.propose(fmt.Sprint(i))
			err := db.Update(t.Context(), func(tx *store.Tx) error {
				if _, err := tx.ExecContext(t.Context(), `update action set state = $1 where id = $2`, s, a.ID); err != nil {
					return err
				}
				return oversighttest.Settle(t.Context(), tx)
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := f.gate.Recover(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		count := map[oversight.State]int{}
		as, err := f.gate.Actions(t.Context(), f.person, oversight.Query{})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range as {
			count[a.State]++
		}
		if count[oversight.Unknown] != 1 || count[oversight.Approved] != 1 || count[oversight.Pending] != 1 || count[oversight.Done] != 1 {
			t.Errorf("states after Recover: %v", count)
		}
	})
}

func TestWhoSees(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	a := f.propose("secret")
	mate := f.agent
	mate.ID, mate.Inbox = "crd_2", "ibx_2"
	project := auth.Principal{Kind: auth.Project, ID: "crd_3", Project: f.agent.Project}
	for _, tt := range []struct {
		who  auth.Principal
		want int
	}{{f.agent, 1}, {f.person, 1}, {mate, 0}, {project, 0}, {f.stranger, 0}} {
		as, err := f.gate.Actions(t.Context(), tt.who, oversight.Query{States: []oversight.State{oversight.Pending, oversight.Done}})
		if err != nil || len(as) != tt.want {
			t.Errorf("%s sees %d actions, %v; want %d", tt.who, len(as), err, tt.want)
		}
		if _, err := f.gate.Action(t.Context(), tt.who, a.ID); (err == nil) != (tt.want == 1) {
			t.Errorf("%s opens the action: %v", tt.who, err)
		}
	}
}

func BenchmarkPropose(b *testing.B) {
	db := storetest.SQLite(b)
	gate := oversight.NewGate(slog.New(slog.DiscardHandler), db, oversighttest.Rules(nil))
	who := auth.Principal{Kind: auth.Agent, ID: "crd_1", Inbox: "ibx_1"}
	err := db.Update(b.Context(), func(tx *store.Tx) (err error) {
		who.Project, _, err = auth.NewProject(b.Context(), tx, "one")
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	payload := make([]byte, 4096)
	for i := 0; b.Loop(); i++ {
		inbox := fmt.Sprint("ibx_", i/400) // fewer than may wait for one inbox
		err := db.Update(b.Context(), func(tx *store.Tx) error {
			_, err := gate.Propose(b.Context(), tx, who, oversight.Proposal{Request: policy.Request{Kind: "email.send"}, Inbox: inbox, Payload: payload})
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
	}
}

// TestPages: a switch stops, and a program that starts recovers, all that there
// is, however few it looks at at a time and how much was proposed at one moment.
func TestPages(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, oversighttest.Rules{{ID: "all", Kind: "*", Effect: policy.Allow}})
		f.gate.Page(3)
		states := func() map[oversight.State]int {
			t.Helper()
			count := map[oversight.State]int{}
			as, err := f.gate.Actions(t.Context(), f.person, oversight.Query{})
			if err != nil {
				t.Fatal(err)
			}
			for _, a := range as {
				count[a.State]++
			}
			return count
		}
		set := func(query string) {
			t.Helper()
			err := db.Update(t.Context(), func(tx *store.Tx) error {
				if _, err := tx.ExecContext(t.Context(), query); err != nil {
					return err
				}
				return oversighttest.Settle(t.Context(), tx)
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		for i := range 9 {
			f.propose(fmt.Sprint(i))
		}
		set(`update action set state = 'executing', created_at = 1000`)
		if err := f.gate.Recover(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		if got := states(); got[oversight.Unknown] != 9 {
			t.Errorf("states after Recover: %v, want all unknown", got)
		}
		for i := range 10 {
			f.propose(fmt.Sprint(i))
		}
		set(`update action set created_at = 2000 where state = 'approved'`)
		s, err := f.gate.SwitchOn(t.Context(), f.person, oversight.Switch{Scope: oversight.ScopeProject, Reason: "enough"})
		if err != nil || s.Stopped != 10 {
			t.Errorf("the switch stopped %d, %v; want 10", s.Stopped, err)
		}
		if got := states(); got[oversight.Denied] != 10 || got[oversight.Unknown] != 9 {
			t.Errorf("states after the switch: %v", got)
		}
		as, err := f.gate.Actions(t.Context(), f.person, oversight.Query{States: []oversight.State{oversight.Unknown}})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range as {
			if a.Stopped == "" {
				t.Errorf("action %s was passed over", a.ID)
			}
		}
	})
}

// BenchmarkLife is an action from its proposal over a person's decision to its
// end: five transactions.
func BenchmarkLife(b *testing.B) {
	db := storetest.SQLite(b)
	gate := oversight.NewGate(slog.New(slog.DiscardHandler), db, oversighttest.Rules(nil))
	gate.Handle("email.send", &effect{})
	who, ann := auth.Principal{Kind: auth.Agent, ID: "crd_1", Inbox: "ibx_1"}, auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err := db.Update(b.Context(), func(tx *store.Tx) (err error) {
		who.Project, _, err = auth.NewProject(b.Context(), tx, "one")
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	ann.Project = who.Project
	payload := make([]byte, 4096)
	for b.Loop() {
		var a oversight.Action
		err := db.Update(b.Context(), func(tx *store.Tx) (err error) {
			a, err = gate.Propose(b.Context(), tx, who, oversight.Proposal{Request: policy.Request{Kind: "email.send"}, Inbox: "ibx_1", Payload: payload})
			return err
		})
		if err == nil {
			err = gate.Decide(b.Context(), ann, oversight.Decision{ID: a.ID, Version: 1, Digest: a.Hex(), Approve: true})
		}
		if err == nil {
			_, err = gate.RunOne(b.Context())
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
