package connection_test

import (
	"context"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/connection"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/store"
	"postern/internal/storetest"
)

// rulesOnConnections ask about one host, deny another and leave the rest.
const rulesOnConnections = `rules:
  - id: evil
    kind: net.connect
    when: to.exists(h, h.under('evil.example'))
    then: deny
    reason: not there
  - id: careful
    kind: net.connect
    when: to.exists(h, h.under('api.example')) || detail['port'] == '22'
    then: ask
  - id: mails
    kind: email.send
    then: ask
`

func to(port uint16, names ...string) policy.Connection {
	return policy.Connection{Addr: netip.AddrPortFrom(netip.MustParseAddr("203.0.113.7"), port), Names: names}
}

// holds makes text the policy.
func (f *fixture) holds(text string) {
	f.t.Helper()
	a := f.propose(rulebook.Change{Text: text})
	f.approve(a)
	if a = f.run(a); a.State != oversight.Done {
		f.t.Fatalf("got %s: %s", a.State, a.Result)
	}
}

// connections returns the last word of another program on the database.
func (f *fixture) connections(hold time.Duration) *connection.Admission {
	book, gate := f.server(f.db)
	c := connection.New(f.log, f.db, book, gate, hold)
	gate.Handle(policy.KindConnect, c)
	f.gate.Handle(policy.KindConnect, c)
	return c
}

// until waits for something to become so.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it has not come to be: %s", what)
		}
	}
}

func (f *fixture) waiting() []oversight.Action {
	f.t.Helper()
	list, err := f.gate.Actions(f.t.Context(), f.owner, oversight.Query{States: []oversight.State{oversight.Pending}})
	if err != nil {
		f.t.Fatal(err)
	}
	return list
}

func TestRulesDecideOnConnections(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.owner.Project, Template: "base"}
		c := f.connections(time.Millisecond)
		ctx := t.Context()
		if v := c.Permit(ctx, box, to(443, "www.evil.example")); v.Effect != policy.Allow || c.Names(ctx, box) {
			t.Errorf("got %+v, want that the lists have it where no rule speaks of connections", v)
		}
		f.holds(rulesOnConnections)
		c = f.connections(time.Millisecond)
		for _, tt := range []struct {
			name string
			to   policy.Connection
			want policy.Effect
			rule string
		}{
			{"a rule denies", to(443, "www.evil.example"), policy.Deny, "evil"},
			{"one of its names", to(443, "good.example", "evil.example"), policy.Deny, "evil"},
			{"no rule", to(443, "good.example"), policy.Allow, ""},
			{"an address", to(443), policy.Allow, ""},
		} {
			if v := c.Permit(ctx, box, tt.to); v.Effect != tt.want || v.Rule != tt.rule {
				t.Errorf("%s: got %+v, want %s by %q", tt.name, v, tt.want, tt.rule)
			}
		}
		if !c.Names(ctx, box) {
			t.Error("names are not looked for although a rule goes by them")
		}
		// Nobody decides in time: it is refused, and says what waits.
		v := c.Permit(ctx, box, to(443, "api.example"))
		waiting := f.waiting()
		if len(waiting) != 1 || v.Effect != policy.Deny || !strings.Contains(v.Reason, waiting[0].ID) || !strings.Contains(v.Reason, "try again") {
			t.Fatalf("got %+v and %d actions, want that it names the one that waits", v, len(waiting))
		}
		if v = c.Permit(ctx, box, to(443, "api.example")); len(f.waiting()) != 1 {
			t.Errorf("got %+v and %d actions, want that a second try asks nobody again", v, len(f.waiting()))
		}
		view, err := f.gate.Show(f.read(waiting[0].ID))
		if err != nil || view.Title != "Connection to api.example:443" {
			t.Errorf("got %+v, %v", view, err)
		}
		f.approve(f.read(waiting[0].ID))
		if a := f.run(waiting[0]); a.State != oversight.Done {
			t.Fatalf("got %s: %s", a.State, a.Result)
		}
		if v = c.Permit(ctx, box, to(443, "api.example")); v.Effect != policy.Allow {
			t.Errorf("got %+v once it is approved, want allow", v)
		}
		// It was let to that host and port, for that sandbox.
		other := box
		other.ID = "i2"
		for who, d := range map[auth.Principal]policy.Connection{box: to(22, "api.example"), other: to(443, "api.example")} {
			if v := c.Permit(ctx, who, d); v.Effect != policy.Deny {
				t.Errorf("%s to %v: got %+v, want that it is asked about", who, d, v)
			}
		}
	})
}

func (f *fixture) read(id string) oversight.Action {
	f.t.Helper()
	a, err := f.gate.Action(f.t.Context(), f.owner, id)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

// TestHeld: a connection waits for the person, whose answer may come to another
// program.
func TestHeldUntilAPersonDecides(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.owner.Project}
		f.holds(rulesOnConnections)
		c := f.connections(time.Hour)
		for _, approve := range []bool{true, false} {
			var wg sync.WaitGroup
			verdicts := make([]policy.Verdict, 3)
			port := uint16(22)
			if approve {
				port = 443
			}
			for i := range verdicts {
				wg.Go(func() { verdicts[i] = c.Permit(t.Context(), box, to(port, "api.example")) })
			}
			until(t, "one action waits", func() bool { return len(f.waiting()) == 1 })
			a := f.read(f.waiting()[0].ID)
			err := f.gate.Decide(t.Context(), f.owner, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: approve, Reason: "as I please"})
			if err != nil {
				t.Fatal(err)
			}
			f.run(a)
			wg.Wait()
			for _, v := range verdicts {
				if (v.Effect == policy.Allow) != approve || !approve && !strings.Contains(v.Reason, "as I please") {
					t.Errorf("approved: %v: got %+v", approve, v)
				}
			}
		}
		if v := c.Permit(t.Context(), box, to(22, "api.example")); v.Effect != policy.Deny || len(f.waiting()) != 0 {
			t.Errorf("got %+v, want that who was refused does not ask again at once", v)
		}
	})
}

// TestPassFromBeforeARestoreIsAskedAgain: the database is a copy of that in which a person
// allowed the connection.
func TestPassFromBeforeARestoreIsAskedAgain(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.owner.Project}
		f.holds(rulesOnConnections)
		f.connections(time.Millisecond).Permit(t.Context(), box, to(443, "api.example"))
		a := f.read(f.waiting()[0].ID)
		f.approve(a)
		f.run(a)
		f.void = time.Now()
		if v := f.connections(time.Millisecond).Permit(t.Context(), box, to(443, "api.example")); v.Effect != policy.Deny || len(f.waiting()) != 1 {
			t.Errorf("got %+v, with %d questions, want that it is asked about again", v, len(f.waiting()))
		}
	})
}

// TestSwitchesOnConnections: a switch refuses new connections, by name or all,
// also those that a person let through, and questions to the DNS.
func TestSwitchesOnConnections(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.owner.Project}
	c := f.connections(time.Millisecond)
	changes := make(chan string, 100)
	c.Watch(func() []string { return []string{box.Project} }, func(_ context.Context, project string) { changes <- project })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	defer func() { cancel(); <-done }()
	allows := func(names ...string) bool { return c.Permit(ctx, box, to(443, names...)).Effect == policy.Allow }
	looks := func(name string) bool { return c.Lookup(ctx, box, name).Effect == policy.Allow }
	goesOn := func() bool { return c.MayContinue(ctx, box, to(443, "a.example")).Effect == policy.Allow }
	if !allows("a.example") || !looks("a.example") || !goesOn() {
		t.Fatal("it is refused from the beginning")
	}
	<-changes // what holds is read for the first time
	for _, tt := range []struct {
		scope  oversight.Scope
		target string
		others bool // to other hosts it may connect
	}{
		{oversight.ScopeDomain, "example", true},
		{oversight.ScopeCapability, string(policy.KindConnect), false},
		{oversight.ScopeProject, "", false},
	} {
		s, err := f.gate.SwitchOn(ctx, f.owner, oversight.Switch{Scope: tt.scope, Target: tt.target, Reason: "enough"})
		if err != nil {
			t.Fatal(err)
		}
		if project := <-changes; project != box.Project || goesOn() || allows("a.example") {
			t.Errorf("%s: of project %s it is told, and a connection goes on: %v", tt.scope, project, goesOn())
		}
		if v := c.Permit(ctx, box, to(443, "a.example")); !strings.Contains(v.Reason, "enough") {
			t.Errorf("got %+v, want the switch's reason", v)
		}
		if looks("a.example") || looks("b.test") != tt.others || allows("b.test") != tt.others || allows() != tt.others {
			t.Errorf("%s: looked up: %v, other host: %v", tt.scope, looks("a.example"), allows("b.test"))
		}
		if tt.scope == oversight.ScopeDomain && !c.Names(ctx, box) {
			t.Error("names are not looked for although a switch goes by them")
		}
		if err := f.gate.SwitchOff(ctx, f.owner, s.ID); err != nil {
			t.Fatal(err)
		}
		if <-changes; !allows("a.example") || !looks("a.example") || !goesOn() {
			t.Errorf("%s: it is refused still", tt.scope)
		}
	}
}

// TestFlood is the attacker's: code that connects everywhere asks a person a
// few times, and holds a few connections.
func TestFlood(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.owner.Project}
	f.holds("rules:\n  - {id: all, kind: net.connect, then: ask}\n")
	c := f.connections(time.Millisecond)
	for port := range uint16(50) {
		if v := c.Permit(t.Context(), box, to(1000+port)); v.Effect != policy.Deny {
			t.Fatalf("port %d: got %+v", port, v)
		}
	}
	if n := len(f.waiting()); n != 20 {
		t.Errorf("got %d actions that wait, want 20", n)
	}
	long := f.connections(time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var mu sync.Mutex
	refused := 0
	for range 40 {
		wg.Go(func() {
			v := long.Permit(ctx, box, to(1000))
			mu.Lock()
			defer mu.Unlock()
			if strings.Contains(v.Reason, "wait for a person already") {
				refused++
			}
		})
	}
	until(t, "all but those that are held are refused", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return refused == 40-16
	})
	cancel()
	wg.Wait()
}

// TestSwitchEndsPasses: a switch that is off again releases nothing: neither a
// connection that was let through before, nor one whose approval was being
// carried out. A switch for something else ends none.
func TestSwitchEndsPasses(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.owner.Project}
		f.holds(rulesOnConnections)
		c := f.connections(time.Millisecond)
		ctx := t.Context()
		allows := func(c *connection.Admission) bool {
			return c.Permit(ctx, box, to(443, "api.example")).Effect == policy.Allow
		}
		throw := func(scope oversight.Scope, target string) {
			t.Helper()
			s, err := f.gate.SwitchOn(ctx, f.owner, oversight.Switch{Scope: scope, Target: target, Reason: "enough"})
			if err != nil {
				t.Fatal(err)
			}
			if err := f.gate.SwitchOff(ctx, f.owner, s.ID); err != nil {
				t.Fatal(err)
			}
		}
		approved := func() oversight.Action {
			t.Helper()
			if allows(c) || len(f.waiting()) != 1 {
				t.Fatalf("%d actions wait, want 1", len(f.waiting()))
			}
			a := f.read(f.waiting()[0].ID)
			f.approve(a)
			return a
		}
		f.run(approved())
		if !allows(c) {
			t.Fatal("it is refused although a person let it through")
		}
		throw(oversight.ScopeDomain, "other.example")
		throw(oversight.ScopeCapability, string(policy.KindSend))
		if fresh := f.connections(time.Millisecond); !allows(fresh) {
			t.Error("a switch for something else has ended what was let through")
		}
		c = f.connections(time.Millisecond)
		if !allows(c) {
			t.Fatal("it is refused although a person let it through")
		}
		throw(oversight.ScopeDomain, "example")
		if fresh := f.connections(time.Millisecond); allows(fresh) {
			t.Error("it is let through by a program that saw no switch, on the word of before it")
		}
		watching, stop := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- c.Run(watching) }()
		until(t, "the program that let it through heeds the switch", func() bool { return !allows(c) })
		stop()
		<-done
		a := f.read(f.waiting()[0].ID)
		f.approve(a)
		f.gate.Handle(policy.KindConnect, interrupted{c, func() { throw(oversight.ScopeProject, "") }})
		if a = f.run(a); a.Stopped == "" {
			t.Fatalf("the switch has not met it: %s", a.State)
		}
		if fresh := f.connections(time.Millisecond); allows(fresh) {
			t.Error("it is let through although a switch was thrown while its approval was carried out")
		}
	})
}
