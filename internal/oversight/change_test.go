package oversight_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
	"postern/internal/storetest"
)

var allow = oversighttest.Rules{{ID: "all", Kind: "*", Effect: policy.Allow}}

func (f *fixture) proposal(payload string) oversight.Proposal {
	return oversight.Proposal{Request: policy.Request{Kind: "test.effect"}, Inbox: f.agent.Inbox, Via: "test", Payload: []byte(payload)}
}

func (f *fixture) proposeAs(p oversight.Proposal) (a oversight.Action) {
	f.t.Helper()
	err := f.db.Update(f.t.Context(), func(tx *store.Tx) (err error) {
		a, err = f.gate.Propose(f.t.Context(), tx, f.agent, p)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func (f *fixture) exec(query string, args ...any) {
	f.t.Helper()
	err := f.db.Update(f.t.Context(), func(tx *store.Tx) error {
		if _, err := tx.ExecContext(f.t.Context(), query, args...); err != nil {
			return err
		}
		return oversighttest.Settle(f.t.Context(), tx)
	})
	if err != nil {
		f.t.Fatal(err)
	}
}

// come makes a time that is in the future one that has come.
func (f *fixture) come(column, id string) {
	f.t.Helper()
	f.exec(`update action set `+column+` = $1 where id = $2`, store.Time(time.Now().Add(-time.Second)), id)
}

func (f *fixture) verbs(id string) (verbs []string) {
	f.t.Helper()
	err := audit.View(f.t.Context(), f.db, func(tx *store.Tx) error {
		es, err := audit.List(f.t.Context(), tx, audit.Query{Object: id})
		for _, e := range slices.Backward(es) {
			verbs = append(verbs, string(e.Verb))
		}
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return verbs
}

func (f *fixture) expect(id string, want oversight.State, verbs ...string) {
	f.t.Helper()
	if got := f.state(id); got.State != want {
		f.t.Errorf("state = %s, want %s", got.State, want)
	}
	if got := f.verbs(id); verbs != nil && !slices.Equal(got, verbs) {
		f.t.Errorf("audit = %v, want %v", got, verbs)
	}
}

// TestGateFirst asks now and leaves at the time.
func TestGateFirst(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		p := f.proposal("later")
		p.NotBefore = time.Now().Add(time.Hour)
		a := f.proposeAs(p)
		if a.State != oversight.Pending {
			t.Fatalf("state = %s, want pending", a.State)
		}
		if err := f.gate.Decide(t.Context(), f.person, decision(a, true)); err != nil {
			t.Fatal(err)
		}
		f.drain()
		if got := f.state(a.ID); got.State != oversight.Approved || !got.Due.Equal(got.SendAt) || len(f.eff.ran) != 0 {
			t.Fatalf("before its time: %s, due %v, ran %v", got.State, got.Due, f.eff.ran)
		}
		f.come("not_before", a.ID)
		f.drain()
		f.expect(a.ID, oversight.Done, "action.propose", "action.approve", "action.execute", "action.done")
	})
}

// TestScheduleFirst asks only when the time has come.
func TestScheduleFirst(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		p := f.proposal("later")
		p.NotBefore = time.Now().Add(time.Hour)
		p.AskAt = p.NotBefore
		a := f.proposeAs(p)
		f.drain()
		f.expect(a.ID, oversight.Scheduled, "action.propose")
		if err := f.gate.Decide(t.Context(), f.person, decision(a, true)); !errors.Is(err, oversight.ErrStale) {
			t.Errorf("Decide before anybody is asked = %v, want ErrStale", err)
		}
		f.exec(`update action set send_at = $1, ask_at = $1 where id = $2`, store.Time(time.Now().Add(-time.Minute)), a.ID)
		f.drain()
		f.expect(a.ID, oversight.Pending, "action.propose", "action.ask")
		if err := f.gate.Decide(t.Context(), f.person, decision(f.state(a.ID), true)); err != nil {
			t.Fatal(err)
		}
		f.drain()
		f.expect(a.ID, oversight.Done)
		// A policy that needs no approval has no approvers.
		f = setupAgain(t, f, allow)
		b := f.proposeAs(p)
		if f.drain(); b.State != oversight.Approved || len(f.eff.ran) != 0 {
			t.Errorf("allowed: %s, ran %v", b.State, f.eff.ran)
		}
	})
}

// setupAgain is f with a gate of other rules.
func setupAgain(t *testing.T, f *fixture, rules oversighttest.Rules) *fixture {
	t.Helper()
	g := *f
	g.eff = &effect{}
	g.gate = oversight.NewGate(f.log, f.db, rules)
	g.gate.Handle("test.effect", g.eff)
	return &g
}

// TestApprovedLate: what is approved long after its time is shown once more.
func TestApprovedLate(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		p := f.proposal("good morning")
		p.NotBefore = time.Now().Add(-oversight.MaxLate / 2)
		a := f.proposeAs(p)
		if err := f.gate.Decide(t.Context(), f.person, decision(a, true)); err != nil {
			t.Fatalf("a little late: %v", err)
		}
		p.NotBefore = time.Now().Add(-2 * oversight.MaxLate)
		b := f.proposeAs(p)
		err := f.gate.Decide(t.Context(), f.person, decision(b, true))
		if !errors.Is(err, oversight.ErrLate) || !errors.Is(err, oversight.ErrStale) {
			t.Fatalf("too late: %v, want ErrLate, which is stale", err)
		}
		f.drain()
		f.expect(a.ID, oversight.Done)
		f.expect(b.ID, oversight.Pending, "action.propose", "action.late")
		got := f.state(b.ID)
		v, err := f.gate.Show(got)
		if err != nil || len(v.Notes) != 1 || !got.SendAt.IsZero() {
			t.Errorf("shown again with notes %q, %v", v.Notes, err)
		}
		if err := f.gate.Decide(t.Context(), f.person, decision(b, true)); !errors.Is(err, oversight.ErrStale) {
			t.Errorf("the first page's button once more: %v, want ErrStale", err)
		}
		if err := f.gate.Decide(t.Context(), f.person, decision(got, true)); err != nil {
			t.Fatal(err)
		}
		f.drain()
		f.expect(b.ID, oversight.Done)
	})
}

func TestUndo(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, allow)
		p := f.proposal("oops")
		p.Undo = time.Minute
		a := f.proposeAs(p)
		f.drain()
		if got := f.state(a.ID); got.State != oversight.Approved || time.Until(got.Due) < 30*time.Second {
			t.Fatalf("%s, due %v", got.State, got.Due)
		}
		if _, err := f.gate.Cancel(t.Context(), f.agent, a.ID); err != nil {
			t.Fatal(err)
		}
		f.come("not_before", a.ID)
		f.drain()
		f.expect(a.ID, oversight.Cancelled, "action.propose", "action.cancel")
		if again, err := f.gate.Cancel(t.Context(), f.agent, a.ID); err != nil || again.State != oversight.Cancelled {
			t.Errorf("cancelled twice: %s, %v", again.State, err)
		}
		b := f.proposeAs(p)
		f.come("not_before", b.ID)
		f.drain()
		f.expect(b.ID, oversight.Done)
		if _, err := f.gate.Cancel(t.Context(), f.agent, b.ID); !errors.Is(err, oversight.ErrTooLate) {
			t.Errorf("cancelled when done: %v, want ErrTooLate", err)
		}
		if !slices.Equal(f.eff.ran, []string{"oops"}) {
			t.Errorf("ran %v", f.eff.ran)
		}
	})
}

// TestWhoCancels is who may take back what, and those who may not.
func TestWhoCancels(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		other := f.agent
		other.ID, other.Inbox = "crd_2", "ibx_2"
		mate := f.agent
		mate.ID = "crd_3"
		project := auth.Principal{Kind: auth.Project, ID: "crd_4", Project: f.agent.Project}
		sandbox := f.agent
		sandbox.Kind, sandbox.ID = auth.Sandbox, "isb1"
		for _, tt := range []struct {
			name string
			who  auth.Principal
			want error
		}{
			{"its proposer", f.agent, nil},
			{"another key of the inbox", mate, nil},
			{"a person", f.person, nil},
			{"a sandbox of the inbox that did not propose it", sandbox, auth.ErrForbidden},
			{"another inbox", other, store.ErrNotFound},
			{"a project key", project, store.ErrNotFound},
			{"a person of another project", f.stranger, store.ErrNotFound},
		} {
			t.Run(tt.name, func(t *testing.T) {
				a := f.propose("x")
				_, err := f.gate.Cancel(t.Context(), tt.who, a.ID)
				if !errors.Is(err, tt.want) || (err == nil) != (tt.want == nil) {
					t.Errorf("Cancel = %v, want %v", err, tt.want)
				}
				want := oversight.Cancelled
				if tt.want != nil {
					want = oversight.Pending
				}
				if got := f.state(a.ID); got.State != want {
					t.Errorf("state = %s, want %s", got.State, want)
				}
				if err := f.gate.Decide(t.Context(), f.person, decision(a, true)); (err != nil) != (want == oversight.Cancelled) {
					t.Errorf("Decide afterwards = %v", err)
				}
			})
		}
	})
}

// TestCancelRaces lets workers and cancellers fight over the same actions: each
// either ran once or was cancelled, and who cancelled was told the truth.
func TestCancelRaces(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, allow)
		var mu sync.Mutex // guards cancelled
		cancelled := map[string]bool{}
		payload := map[string]string{}
		var ids []string
		for _, s := range []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"} {
			a := f.propose(s)
			ids = append(ids, a.ID)
			payload[a.ID] = s
		}
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for {
					ran, err := f.gate.RunOne(t.Context())
					if err != nil {
						t.Error(err)
					}
					if !ran {
						return
					}
				}
			})
			wg.Go(func() {
				for _, id := range slices.Backward(ids) {
					_, err := f.gate.Cancel(t.Context(), f.agent, id)
					if err != nil && !errors.Is(err, oversight.ErrTooLate) {
						t.Error(err)
					}
					if err == nil {
						mu.Lock()
						cancelled[id] = true
						mu.Unlock()
					}
				}
			})
		}
		wg.Wait()
		f.drain()
		for _, id := range ids {
			n := 0
			for _, ran := range f.eff.ran {
				if ran == payload[id] {
					n++
				}
			}
			want := oversight.Done
			if cancelled[id] {
				want = oversight.Cancelled
			}
			if got := f.state(id); got.State != want || (n == 1) == cancelled[id] || n > 1 {
				t.Errorf("%s: %s, ran %d times, cancelled %v", payload[id], got.State, n, cancelled[id])
			}
		}
	})
}

func TestRevise(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		revise := func(who auth.Principal, id string, version int64, p oversight.Proposal) (a oversight.Action, err error) {
			err = db.Update(t.Context(), func(tx *store.Tx) error {
				a, err = f.gate.Revise(t.Context(), tx, who, id, version, p)
				return err
			})
			return a, err
		}
		p := f.proposal("draft")
		p.NotBefore = time.Now().Add(time.Hour)
		a := f.proposeAs(p)
		if err := f.gate.Decide(t.Context(), f.person, decision(a, true)); err != nil {
			t.Fatal(err)
		}
		p.Payload = []byte("better")
		b, err := revise(f.agent, a.ID, 2, p)
		if err != nil || b.State != oversight.Pending || b.Decider != "" || b.Version != 3 || b.Hex() == a.Hex() {
			t.Fatalf("revised = %+v, %v; want it pending again", b, err)
		}
		// The attack: approval of the old bytes, whatever version is claimed.
		for _, version := range []int64{1, 2, 3} {
			old := a
			old.Version = version
			if err := f.gate.Decide(t.Context(), f.person, decision(old, true)); !errors.Is(err, oversight.ErrStale) {
				t.Errorf("Decide on the old bytes at version %d = %v, want ErrStale", version, err)
			}
		}
		if _, err := revise(f.agent, a.ID, 2, p); !errors.Is(err, oversight.ErrStale) {
			t.Errorf("revising an older version = %v, want ErrStale", err)
		}
		viewer := f.person
		viewer.Role = auth.Viewer
		if _, err := revise(viewer, a.ID, 0, p); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a viewer revised: %v", err)
		}
		sandbox := f.agent
		sandbox.Kind, sandbox.ID = auth.Sandbox, "isb1"
		if _, err := revise(sandbox, a.ID, 0, p); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a sandbox rewrote what another proposed: %v", err)
		}
		stranger := f.agent
		stranger.ID, stranger.Inbox = "crd_2", "ibx_2"
		if _, err := revise(stranger, a.ID, 0, p); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("another inbox revised: %v", err)
		}
		p.NotBefore = time.Time{}
		mate := f.agent
		mate.ID = "crd_3"
		if b, err = revise(mate, a.ID, 0, p); err != nil || b.Proposer != "agent:crd_3" || f.state(a.ID).Proposer != b.Proposer {
			t.Fatalf("another key of the inbox: proposer %s, %v; want it who wrote these bytes", b.Proposer, err)
		}
		if err := f.gate.Decide(t.Context(), f.person, decision(b, true)); err != nil {
			t.Fatal(err)
		}
		f.drain()
		f.expect(a.ID, oversight.Done, "action.propose", "action.approve", "action.revise", "action.revise", "action.approve", "action.execute", "action.done")
		if !slices.Equal(f.eff.ran, []string{"better"}) {
			t.Errorf("ran %v, want only what was approved last", f.eff.ran)
		}
		if _, err := revise(f.agent, a.ID, 0, p); !errors.Is(err, oversight.ErrTooLate) {
			t.Errorf("revised when done: %v, want ErrTooLate", err)
		}
	})
}

// A watched effect records the states that it receives.
type watched struct {
	effect
	told []oversight.State
}

func (w *watched) Moved(_ context.Context, _ *store.Tx, a oversight.Action) error {
	w.told = append(w.told, a.State)
	return nil
}

// TestWaits: what is looked at again and again and waits for the same reason is
// told once, as its approval is; that it is executed in earnest is told, too.
func TestWaits(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, allow)
		w := &watched{}
		f.gate.Handle("test.effect", w)
		free := func(detail string) oversight.Outcome {
			return oversight.Outcome{State: oversight.Approved, Free: true, Detail: detail}
		}
		w.outcomes = []oversight.Outcome{
			free("suspended"),
			free("suspended"),
			free("suspended"),
			free("too many"),
			free("too many"),
			{State: oversight.Approved, Detail: "greylisted"},
			free("too many"),
			free("too many"),
		}
		a := f.propose("x")
		f.drain()
		got := f.state(a.ID)
		if got.State != oversight.Done || got.Attempts != 2 || len(w.ran) != 9 {
			t.Fatalf("%s after %d attempts, %d executions", got.State, got.Attempts, len(w.ran))
		}
		var verbs []string
		var es []audit.Entry
		err := audit.View(t.Context(), db, func(tx *store.Tx) (err error) {
			es, err = audit.List(t.Context(), tx, audit.Query{Project: got.Project, Object: a.ID})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range es {
			verbs = append([]string{strings.TrimPrefix(string(e.Verb), "action.")}, verbs...)
		}
		if got, want := strings.Join(verbs, " "), "propose execute defer defer execute retry execute defer execute done"; got != want {
			t.Errorf("the audit has\n%s, want\n%s", got, want)
		}
		want := []oversight.State{oversight.Approved, oversight.Executing, oversight.Approved, oversight.Executing, oversight.Done}
		if !slices.Equal(w.told, want) {
			t.Errorf("its executor was told %v, want %v", w.told, want)
		}
	})
}

// TestFree: what was only put off is no attempt, and can still be cancelled.
func TestFree(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, allow)
		f.eff.outcomes = []oversight.Outcome{
			{State: oversight.Approved, Free: true, Detail: "throttled"},
			{State: oversight.Approved, Free: true, After: time.Hour, Detail: "throttled"},
			{State: oversight.Approved, After: time.Hour, Detail: "greylisted"},
		}
		a := f.propose("x")
		f.drain()
		if got := f.state(a.ID); got.State != oversight.Approved || got.Attempts != 0 || time.Until(got.Due) < time.Minute {
			t.Fatalf("%s after %d attempts, due %v", got.State, got.Attempts, got.Due)
		}
		if _, err := f.gate.Cancel(t.Context(), f.agent, a.ID); err != nil {
			t.Errorf("cancelled when only put off: %v", err)
		}
		b := f.propose("y")
		f.drain()
		if got := f.state(b.ID); got.Attempts != 1 {
			t.Errorf("attempts = %d, want 1", got.Attempts)
		}
		if _, err := f.gate.Cancel(t.Context(), f.agent, b.ID); !errors.Is(err, oversight.ErrTooLate) {
			t.Errorf("cancelled after an attempt: %v, want ErrTooLate", err)
		}
	})
}

// TestAsk: a person decides where the proposal says so, whatever policy allows,
// and reads why; nothing makes what policy denies ask.
func TestAsk(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, allow)
		p := f.proposal("again")
		p.Ask, p.Note = true, "the same was sent a second ago"
		a := f.proposeAs(p)
		v, err := f.gate.Show(a)
		if a.State != oversight.Pending || err != nil || !slices.Contains(v.Notes, p.Note) {
			t.Errorf("%s with notes %q, %v; want it pending with its note", a.State, v.Notes, err)
		}
		f = setupAgain(t, f, oversighttest.Rules{{ID: "none", Kind: "*", Effect: policy.Deny}})
		p.AskAt = time.Now().Add(time.Hour)
		if a := f.proposeAs(p); a.State != oversight.Denied || a.Settled.IsZero() {
			t.Errorf("denied by policy: %s", a.State)
		}
	})
}

// TestLease: one program does not take another's work for left behind, and does
// take it when nobody renews the lease.
func TestLease(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		a := f.propose("x")
		f.exec(`update action set state = $1, version = 3, lease = $2 where id = $3`, oversight.Executing, store.Time(time.Now().Add(time.Minute)), a.ID)
		if err := f.gate.Recover(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		f.expect(a.ID, oversight.Executing)
		f.come("lease", a.ID)
		if err := f.gate.Recover(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		f.expect(a.ID, oversight.Unknown)
		b := f.propose("y")
		f.exec(`update action set state = $1, version = 3, lease = $2 where id = $3`, oversight.Executing, store.Time(time.Now().Add(time.Minute)), b.ID)
		if err := f.gate.Recover(t.Context(), true); err != nil {
			t.Fatal(err)
		}
		f.expect(b.ID, oversight.Unknown)
	})
}

func TestDropPayloads(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		denied, pending, done := f.propose("denied"), f.propose("pending"), f.propose("done")
		if err := f.gate.Decide(t.Context(), f.person, decision(denied, false)); err != nil {
			t.Fatal(err)
		}
		if err := f.gate.Decide(t.Context(), f.person, decision(done, true)); err != nil {
			t.Fatal(err)
		}
		f.drain()
		if n, err := f.gate.DropPayloads(t.Context(), time.Hour); n != 0 || err != nil {
			t.Errorf("dropped %d that are young, %v", n, err)
		}
		if n, err := f.gate.DropPayloads(t.Context(), 0); n != 2 || err != nil {
			t.Errorf("dropped %d, %v; want the two that are settled", n, err)
		}
		for _, a := range []oversight.Action{denied, done} {
			got := f.state(a.ID)
			if v, err := f.gate.Show(got); len(got.Payload) != 0 || got.Hex() != a.Hex() || err != nil || len(v.Notes) != 1 {
				t.Errorf("dropped: %d bytes, digest kept %v, view %v, %v", len(got.Payload), got.Hex() == a.Hex(), v, err)
			}
		}
		if got := f.state(pending.ID); string(got.Payload) != "pending" {
			t.Errorf("what waits was dropped: %q", got.Payload)
		}
	})
}

// A watcher is an effect that hears of every move.
type watcher struct {
	effect
	heard []oversight.State
	fail  error
}

func (w *watcher) Moved(_ context.Context, _ *store.Tx, a oversight.Action) error {
	if w.fail == nil {
		w.heard = append(w.heard, a.State)
	}
	return w.fail
}

func TestWatcher(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		w := &watcher{}
		f.gate.Handle("test.effect", w)
		a := f.propose("x")
		w.fail = errors.New("disk full")
		if err := f.gate.Decide(t.Context(), f.person, decision(a, true)); !errors.Is(err, w.fail) {
			t.Errorf("Decide that cannot be told = %v", err)
		}
		f.expect(a.ID, oversight.Pending)
		w.fail = nil
		if err := f.gate.Decide(t.Context(), f.person, decision(a, true)); err != nil {
			t.Fatal(err)
		}
		f.drain()
		want := []oversight.State{oversight.Pending, oversight.Approved, oversight.Executing, oversight.Done}
		if !slices.Equal(w.heard, want) {
			t.Errorf("heard %v, want %v", w.heard, want)
		}
	})
}
