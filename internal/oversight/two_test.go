package oversight

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight/oversighttest"
	"postern/internal/policy"
	"postern/internal/store"
)

// A counter counts what it executes, and says when the first begins.
type counter struct {
	mu  sync.Mutex // guards ran
	ran map[string]int
}

func (c *counter) Execute(_ context.Context, a Action) Outcome {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ran[a.ID]++
	return Outcome{State: Done}
}

func (c *counter) Show(Action) (View, error) { return View{}, nil }

func (c *counter) total() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.ran {
		n += k
	}
	return n
}

// two is two gates on one database, which do everything at the same time.
type two struct {
	t     *testing.T
	db    [2]*store.DB
	gates [2]*Gate
	count *counter

	agent, anna, ben auth.Principal
}

func newTwo(t *testing.T, db [2]*store.DB, v policy.Verdict) *two {
	f := &two{t: t, db: db, count: &counter{ran: map[string]int{}}}
	var project string
	err := db[0].Update(t.Context(), func(tx *store.Tx) (err error) {
		project, _, err = auth.NewProject(t.Context(), tx, "p"+fmt.Sprint(time.Now().UnixNano()))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range f.gates {
		f.gates[i] = NewGate(slog.New(slog.DiscardHandler), db[i], verdict(v))
		f.gates[i].Handle("test", f.count)
	}
	f.agent = auth.Principal{Kind: auth.Agent, ID: "crd_1", Project: project, Inbox: "i"}
	f.anna = auth.Principal{Kind: auth.Person, ID: "anna", Project: project, Role: auth.Owner}
	f.ben = auth.Principal{Kind: auth.Person, ID: "ben", Project: project, Role: auth.Reviewer}
	return f
}

// A verdict is a judge who always says the same.
type verdict policy.Verdict

func (v verdict) Judge(context.Context, *store.Tx, string, policy.Request) (policy.Verdict, error) {
	return policy.Verdict(v), nil
}

func (f *two) propose(n int) (out []Action) {
	f.t.Helper()
	err := f.db[0].Update(f.t.Context(), func(tx *store.Tx) error {
		for i := range n {
			a, err := f.gates[0].Propose(f.t.Context(), tx, f.agent, Proposal{Request: policy.Request{Kind: "test"}, Inbox: "i", Payload: fmt.Append(nil, i)})
			if err != nil {
				return err
			}
			out = append(out, a)
		}
		return nil
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return out
}

// drain executes with both gates until there is nothing left.
func (f *two) drain() {
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for {
				ran, err := f.gates[i%2].RunOne(f.t.Context())
				if err != nil {
					f.t.Error(err)
				}
				if !ran || err != nil {
					return
				}
			}
		})
	}
	wg.Wait()
}

func (f *two) state(id string) Action {
	a, err := f.gates[0].Action(f.t.Context(), f.anna, id)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func (f *two) entries(verb, id string) (n int) {
	err := audit.View(f.t.Context(), f.db[0], func(tx *store.Tx) error {
		es, err := audit.List(f.t.Context(), tx, audit.Query{Object: id, Verb: verb})
		n = len(es)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return n
}

// TestTwoApprove: two people decide at once, each twice, at two servers that both
// execute: each person counts once, and each action happens once.
func TestTwoApprove(t *testing.T) {
	each(t, func(t *testing.T, db [2]*store.DB) {
		f := newTwo(t, db, policy.Verdict{Effect: policy.Ask, Approvers: 2})
		as := f.propose(8)
		for _, a := range as[:4] { // anna alone, at both servers
			var wg sync.WaitGroup
			for i := range 2 {
				wg.Go(func() {
					if err := f.gates[i].Decide(t.Context(), f.anna, Decision{ID: a.ID, Version: 1, Digest: a.Hex(), Approve: true}); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
		}
		f.drain()
		for _, a := range as {
			if got := f.state(a.ID); got.State != Pending || got.Version != 1 {
				t.Errorf("approved by one of two: %s at version %d", got.State, got.Version)
			}
		}
		if n := f.count.total(); n > 0 {
			t.Fatalf("%d happened with one approval of two", n)
		}
		var wg sync.WaitGroup
		for i, who := range []auth.Principal{f.anna, f.ben} {
			wg.Go(func() {
				ds := []Decision{}
				for _, a := range as {
					ds = append(ds, Decision{ID: a.ID, Version: 1, Digest: a.Hex(), Approve: true})
				}
				for n, err := range f.gates[i].DecideAll(t.Context(), who, ds) {
					if err != nil && !errors.Is(err, ErrStale) { // anna once more, after ben
						t.Errorf("decision %d of %s: %v", n, who, err)
					}
				}
			})
		}
		wg.Wait()
		f.drain()
		for _, a := range as {
			votes, err := f.gates[0].Votes(t.Context(), f.anna, a.ID)
			if got := f.state(a.ID); err != nil || got.State != Done || f.count.ran[a.ID] != 1 || len(votes) != 2 || f.entries("action.approve", a.ID) != 1 {
				t.Errorf("%s, happened %d times, votes %+v, %v", got.State, f.count.ran[a.ID], votes, err)
			}
		}
	})
}

// TestTwoExpire: two servers notice at once that nobody decided.
func TestTwoExpire(t *testing.T) {
	each(t, func(t *testing.T, db [2]*store.DB) {
		f := newTwo(t, db, policy.Verdict{Effect: policy.Ask, Within: time.Hour})
		as := f.propose(6)
		f.drain()
		for _, a := range as {
			if got := f.state(a.ID); got.State != Pending || got.Expires.Sub(got.Created) < 59*time.Minute {
				t.Fatalf("%s until %v, want pending for an hour", got.State, got.Expires)
			}
		}
		err := db[0].Update(t.Context(), func(tx *store.Tx) error {
			if _, err := tx.ExecContext(t.Context(), `update action set expires_at = 1`); err != nil {
				return err
			}
			return oversighttest.Settle(t.Context(), tx)
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := f.gates[1].Decide(t.Context(), f.anna, Decision{ID: as[0].ID, Version: 1, Digest: as[0].Hex(), Approve: true}); !errors.Is(err, ErrStale) {
			t.Errorf("a decision after the end: %v, want ErrStale", err)
		}
		f.drain()
		for _, a := range as {
			if got := f.state(a.ID); got.State != Denied || got.Decider != "system:gate" || f.entries("action.expire", a.ID) != 1 {
				t.Errorf("%s by %s, %d entries", got.State, got.Decider, f.entries("action.expire", a.ID))
			}
		}
		if n := f.count.total(); n > 0 {
			t.Errorf("%d happened", n)
		}
	})
}

// TestTwoSwitch: a switch is turned on at one server while both execute. What
// has not begun by then never happens, also when the switch is off again.
func TestTwoSwitch(t *testing.T) {
	each(t, func(t *testing.T, db [2]*store.DB) {
		f := newTwo(t, db, policy.Verdict{Effect: policy.Allow})
		as := f.propose(24)
		var wg sync.WaitGroup
		wg.Go(f.drain)
		sw, err := f.gates[1].SwitchOn(t.Context(), f.ben, Switch{Scope: ScopeCapability, Target: "test", Reason: "enough"})
		if err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		n := f.count.total()
		late := f.propose(1)[0]
		if late.State != Denied {
			t.Errorf("proposed while it is on: %s, want denied", late.State)
		}
		if err := f.gates[0].SwitchOff(t.Context(), f.ben, sw.ID); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a reviewer turns it off: %v, want ErrForbidden", err)
		}
		if err := f.gates[0].SwitchOff(t.Context(), f.anna, sw.ID); err != nil {
			t.Fatal(err)
		}
		f.drain()
		if after := f.count.total(); after != n {
			t.Errorf("%d happened after the switch was off again", after-n)
		}
		done, denied := 0, 0
		for _, a := range as {
			switch got := f.state(a.ID); got.State {
			case Done:
				done++
			case Denied:
				denied++
			case Scheduled, Pending, Approved, Executing, Failed, Unknown, Cancelled:
				t.Errorf("%s is %s", a.ID, got.State)
			}
		}
		if done != n || int64(denied) != sw.Stopped {
			t.Errorf("%d done and %d happened; %d denied and the switch says %d", done, n, denied, sw.Stopped)
		}
		if free := f.propose(1)[0]; free.State != Approved {
			t.Errorf("proposed when it is off: %s, want approved", free.State)
		}
	})
}

// TestSwitches: who may turn which switch, and what each stops.
func TestSwitches(t *testing.T) {
	each(t, func(t *testing.T, db [2]*store.DB) {
		f := newTwo(t, db, policy.Verdict{Effect: policy.Allow})
		g := f.gates[0]
		viewer, operator := f.anna, f.anna
		viewer.Role, operator.Operator = auth.Viewer, true
		named := f.anna
		named.ID = "local-root" // a name proves nothing
		tests := []struct {
			name string
			who  auth.Principal
			s    Switch
			want error
		}{
			{"an agent", f.agent, Switch{Scope: ScopeProject, Reason: "r"}, auth.ErrForbidden},
			{"a viewer", viewer, Switch{Scope: ScopeProject, Reason: "r"}, auth.ErrForbidden},
			{"everything by an owner", f.anna, Switch{Scope: ScopeEverything, Reason: "r"}, auth.ErrForbidden},
			{"everything by one with the operator's name", named, Switch{Scope: ScopeEverything, Reason: "r"}, auth.ErrForbidden},
			{"no reason", f.anna, Switch{Scope: ScopeProject}, ErrReason},
			{"no target", f.anna, Switch{Scope: ScopeDomain, Reason: "r"}, auth.ErrInvalid},
			{"an address for a domain", f.anna, Switch{Scope: ScopeDomain, Target: "a@example.com", Reason: "r"}, auth.ErrInvalid},
			{"a pattern for a domain", f.anna, Switch{Scope: ScopeDomain, Target: "*.example.com", Reason: "r"}, auth.ErrInvalid},
			{"a kind that there is not", f.anna, Switch{Scope: ScopeCapability, Target: "email.sent", Reason: "r"}, auth.ErrInvalid},
			{"no such scope", f.anna, Switch{Scope: "world", Reason: "r"}, auth.ErrInvalid},
			{"over already", f.anna, Switch{Scope: ScopeProject, Reason: "r", Until: time.Now().Add(-time.Hour)}, auth.ErrInvalid},
		}
		for _, tt := range tests {
			if _, err := g.SwitchOn(t.Context(), tt.who, tt.s); !errors.Is(err, tt.want) {
				t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
			}
		}
		stops := []struct {
			s    Switch
			to   string
			want bool
		}{
			{Switch{Scope: ScopeDomain, Target: "Example.com."}, "bob@example.com", true},
			{Switch{Scope: ScopeDomain, Target: "example.com"}, "bob@mail.EXAMPLE.com", true},
			{Switch{Scope: ScopeDomain, Target: "example.com"}, "bob@notexample.com", false},
			{Switch{Scope: ScopeDomain, Target: "example.com"}, "bob@example.com.evil.org", false},
			{Switch{Scope: ScopeDomain, Target: "xn--mnchen-3ya.example"}, "bob@münchen.example", true},
			{Switch{Scope: ScopeDomain, Target: "MÜNCHEN.example"}, "bob@mail.xn--mnchen-3ya.example", true},
			{Switch{Scope: ScopeDomain, Target: "evil.com"}, "bob@ｅvil.com", true},
			{Switch{Scope: ScopeDomain, Target: "evil.com"}, "bob@EVIL.com..", true},
			{Switch{Scope: ScopeDomain, Target: "evil.com"}, "bob@ü_.com", true}, // no name: who knows where it goes
			{Switch{Scope: ScopeInbox, Target: "i"}, "bob@example.com", true},
			{Switch{Scope: ScopeInbox, Target: "j"}, "bob@example.com", false},
			{Switch{Scope: ScopeCapability, Target: " Test"}, "bob@example.com", true},
			{Switch{Scope: ScopeCapability, Target: "net.connect"}, "bob@example.com", false},
			{Switch{Scope: ScopeProject}, "bob@example.com", true},
			{Switch{Scope: ScopeEverything}, "bob@example.com", true},
		}
		for _, tt := range stops {
			tt.s.Reason = "r"
			s, err := g.SwitchOn(t.Context(), operator, tt.s)
			if err != nil {
				t.Fatal(err)
			}
			err = db[1].View(t.Context(), func(tx *store.Tx) error {
				_, on, err := f.gates[1].Stopped(t.Context(), tx, f.agent.Project, "i", policy.Request{Kind: "test", To: []string{"eve@example.net", tt.to}})
				if on != tt.want {
					t.Errorf("%s %s stops mail to %s: %v, want %v", tt.s.Scope, tt.s.Target, tt.to, on, tt.want)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := g.SwitchOff(t.Context(), operator, s.ID); err != nil {
				t.Fatal(err)
			}
		}
	})
}
