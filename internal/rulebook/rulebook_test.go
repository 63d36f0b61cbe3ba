package rulebook_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/store"
	"postern/internal/storetest"
)

const (
	open = `version: 1
rules:
  - id: bob
    kind: email.send
    when: to.all(a, a == 'bob@example.com')
    then: allow
`
	closed = `version: 1
rules:
  - id: nothing
    kind: email.send
    then: deny
    reason: not today
`
	tests = `tests:
  - name: bob may get mail
    request: {kind: email.send, to: [bob@example.com]}
    want: allow
    rule: bob
`
)

type fixture struct {
	t    *testing.T
	log  *slog.Logger
	db   *store.DB
	book *rulebook.Book
	gate *oversight.Gate

	owner, reviewer, viewer, agent, stranger auth.Principal
}

func setup(t *testing.T, db *store.DB) *fixture {
	t.Helper()
	f := &fixture{t: t, log: slog.New(slog.NewTextHandler(t.Output(), nil)), db: db}
	f.book, f.gate = f.server(db)
	var ids []string
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		for _, name := range []string{"one", "two"} {
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
	person := func(name string, role auth.Role) auth.Principal {
		return auth.Principal{Kind: auth.Person, Role: role, ID: name, Project: ids[0]}
	}
	f.owner, f.reviewer, f.viewer = person("ann", auth.Owner), person("rob", auth.Reviewer), person("vic", auth.Viewer)
	f.agent = auth.Principal{Kind: auth.Agent, ID: "crd_1", Project: ids[0], Inbox: "ibx_1"}
	f.stranger = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "eve", Project: ids[1]}
	return f
}

// server is a program on db.
func (f *fixture) server(db *store.DB) (*rulebook.Book, *oversight.Gate) {
	book := rulebook.New(f.log, db)
	gate := oversight.NewGate(f.log, db, book)
	gate.Handle(policy.KindChange, book)
	return book, gate
}

func (f *fixture) judge(b *rulebook.Book, project string, r policy.Request) (v policy.Verdict) {
	f.t.Helper()
	err := f.db.View(f.t.Context(), func(tx *store.Tx) (err error) {
		v, err = b.Judge(f.t.Context(), tx, project, r)
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return v
}

func (f *fixture) propose(c rulebook.Change) oversight.Action {
	f.t.Helper()
	a, err := f.book.Propose(f.t.Context(), f.gate, f.owner, c)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

func (f *fixture) approve(a oversight.Action) {
	f.t.Helper()
	if err := f.gate.Decide(f.t.Context(), f.owner, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: true}); err != nil {
		f.t.Fatal(err)
	}
}

// approved returns a change that an owner has approved.
func (f *fixture) approved(c rulebook.Change) oversight.Action {
	f.t.Helper()
	a := f.propose(c)
	f.approve(a)
	return a
}

// run executes what is due, and returns a as it is then.
func (f *fixture) run(a oversight.Action) oversight.Action {
	f.t.Helper()
	if _, err := f.gate.RunOne(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	a, err := f.gate.Action(f.t.Context(), f.owner, a.ID)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

var toBob = policy.Request{Kind: policy.KindSend, Mode: policy.GatedSend, To: []string{"bob@example.com"}}

func TestChange(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		if v := f.judge(f.book, f.owner.Project, toBob); v.Effect != policy.Ask {
			t.Errorf("got %+v by the program's own policy, want ask", v)
		}
		a := f.propose(rulebook.Change{Text: open, Tests: tests, Reason: "bob is one of us", Via: "rest"})
		if a.State != oversight.Pending || len(a.Who) != 1 || a.Who[0] != "role:owner" {
			t.Fatalf("got %s, asked %v; want that an owner is asked", a.State, a.Who)
		}
		v, err := f.gate.Show(a)
		if err != nil {
			t.Fatal(err)
		}
		shown := v.Text + strings.Join(v.Notes, "\n")
		for _, want := range []string{"+  - id: bob", "-  - id: secret", "rule bob (line 3) is new or changed, and allows", "rule secret, which said ask, was removed"} {
			if !strings.Contains(shown, want) {
				t.Errorf("got view %q, want %q in it", shown, want)
			}
		}
		if got := field(v, "Tests"); got != "1 came with it, 0 fail" {
			t.Errorf("got tests %q", got)
		}
		if v := f.judge(f.book, f.owner.Project, toBob); v.Effect != policy.Ask {
			t.Errorf("got %+v before anybody approved, want ask", v)
		}
		f.approve(a)
		if a = f.run(a); a.State != oversight.Done {
			t.Fatalf("got %s: %s, want done", a.State, a.Result)
		}
		if v := f.judge(f.book, f.owner.Project, toBob); v.Effect != policy.Allow || v.Rule != "bob" {
			t.Errorf("got %+v, want that bob is allowed", v)
		}
		if v := f.judge(f.book, f.stranger.Project, toBob); v.Effect != policy.Ask {
			t.Errorf("got %+v in another project, want ask", v)
		}
		other, _ := f.server(db)
		if v := f.judge(other, f.owner.Project, toBob); v.Effect != policy.Allow {
			t.Errorf("got %+v by another program, want allow", v)
		}
		list, err := f.book.Versions(t.Context(), f.viewer, 10)
		if err != nil || len(list) != 2 || list[0].Number != 1 || list[0].Author != "person:ann" || list[0].Decider != "person:ann" || list[0].Action != a.ID || list[1].Number != 0 {
			t.Errorf("got versions %+v, %v", list, err)
		}
		one, err := f.book.Version(t.Context(), f.viewer, 1)
		if err != nil || one.Text != open || one.Tests != tests || one.Reason != "bob is one of us" {
			t.Errorf("got %+v, %v", one, err)
		}
		if _, err := f.book.Version(t.Context(), f.stranger, 1); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("got %v for another project's version, want ErrNotFound", err)
		}
		var entries []audit.Entry
		err = audit.View(t.Context(), db, func(tx *store.Tx) (err error) {
			entries, err = audit.List(t.Context(), tx, audit.Query{Project: f.owner.Project, Verb: "policy.change", Limit: 10})
			return err
		})
		if err != nil || len(entries) != 1 || entries[0].Object != a.ID || !strings.Contains(entries[0].Detail, one.Hex()) || strings.Contains(entries[0].Detail, "bob@") {
			t.Errorf("got audit %+v, %v", entries, err)
		}
		// The tests of the version that holds speak against the next.
		next := f.propose(rulebook.Change{Text: closed, Replaces: one.Hex()})
		if v, err = f.gate.Show(next); err != nil || field(v, "Tests") != "none came with it; of the 1 of the version before 1 fail" {
			t.Errorf("got tests %q, %v", field(v, "Tests"), err)
		}
		if !strings.Contains(v.Text, "-  - name: bob may get mail") {
			t.Errorf("the tests go, and the difference says nothing of it: %q", v.Text)
		}
		if notes := strings.Join(v.Notes, "\n"); !strings.Contains(notes, "bob may get mail: the verdict is deny, want allow") {
			t.Errorf("got notes %q", notes)
		}
	})
}

func field(v oversight.View, name string) string {
	for _, f := range v.Fields {
		if f.Name == name {
			return f.Value
		}
	}
	return ""
}

// TestStale: of two changes of one version the second has no effect, also
// where both were approved.
func TestStale(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		first, second := f.propose(rulebook.Change{Text: open}), f.propose(rulebook.Change{Text: closed})
		f.approve(first)
		f.approve(second)
		if first = f.run(first); first.State != oversight.Done {
			t.Fatalf("got %s: %s, want done", first.State, first.Result)
		}
		if second = f.run(second); second.State != oversight.Failed || !strings.Contains(second.Result, "changed in the meantime") {
			t.Errorf("got %s: %s, want that it failed", second.State, second.Result)
		}
		if v, err := f.book.Active(t.Context(), f.owner); err != nil || v.Text != open || v.Number != 1 {
			t.Errorf("got %+v, %v, want the first", v, err)
		}
		own := policy.Default().Digest()
		if _, err := f.book.Propose(t.Context(), f.gate, f.owner, rulebook.Change{Text: closed, Replaces: string(own[:])}); !errors.Is(err, rulebook.ErrStale) {
			t.Errorf("got %v for a change of what held before, want ErrStale", err)
		}
	})
}

// TestTwice: a change that two programs execute at the same time, since one
// took the other for dead, holds once.
func TestTwice(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		a := f.propose(rulebook.Change{Text: open})
		f.approve(a)
		a, err := f.gate.Action(t.Context(), f.owner, a.ID)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		outcomes := make([]oversight.Outcome, 4)
		for i := range outcomes {
			b, _ := f.server(db)
			wg.Go(func() { outcomes[i] = b.Execute(t.Context(), a) })
		}
		wg.Wait()
		for _, o := range outcomes {
			if o.State != oversight.Done {
				t.Errorf("got %+v, want done", o)
			}
		}
		list, err := f.book.Versions(t.Context(), f.owner, 10)
		if err != nil || len(list) != 2 {
			t.Errorf("got %d versions, %v, want one and the program's own", len(list), err)
		}
		err = db.View(t.Context(), func(tx *store.Tx) error {
			o, err := f.book.Interrupted(t.Context(), tx, a)
			if err == nil && o.State != oversight.Done {
				t.Errorf("got %+v for one that holds, want done", o)
			}
			if o, err = f.book.Interrupted(t.Context(), tx, oversight.Action{ID: "act_x"}); err == nil && o.State != oversight.Approved {
				t.Errorf("got %+v for one that does not hold, want approved", o)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// TestWhoProposes is the attacker's: no key and no viewer proposes a policy or
// reads it.
func TestWhoProposes(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	for _, who := range []auth.Principal{
		f.agent,
		f.viewer,
		{Kind: auth.Project, ID: "crd_2", Project: f.owner.Project},
		{Kind: auth.Grant, ID: "crd_3", Project: f.owner.Project},
		{Kind: auth.Sandbox, ID: "i1", Project: f.owner.Project},
		{Kind: auth.System, ID: "gate", Project: f.owner.Project},
	} {
		if _, err := f.book.Propose(t.Context(), f.gate, who, rulebook.Change{Text: open}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("%s proposes: got %v, want ErrForbidden", who, err)
		}
		if who.Kind == auth.Person {
			continue
		}
		_, err1 := f.book.Active(t.Context(), who)
		_, err2 := f.book.Versions(t.Context(), who, 10)
		_, err3 := f.book.Version(t.Context(), who, 0)
		for _, err := range []error{err1, err2, err3} {
			if !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s reads: got %v, want ErrForbidden", who, err)
			}
		}
	}
}

// TestNoPersonNoChange is the attacker's: whatever a policy says, it does not
// let itself be replaced.
func TestNoPersonNoChange(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	a := f.propose(rulebook.Change{Text: "rules:\n  - id: all\n    then: allow\n"})
	f.approve(a)
	if a = f.run(a); a.State != oversight.Done {
		t.Fatalf("got %s: %s", a.State, a.Result)
	}
	a = f.propose(rulebook.Change{Text: open})
	if a.State != oversight.Pending {
		t.Errorf("got %s under a policy that allows everything, want pending", a.State)
	}
	a.State = oversight.Approved // as if there were another mistake
	if o := f.book.Execute(t.Context(), a); o.State != oversight.Failed || !strings.Contains(o.Detail, "no person") {
		t.Errorf("got %+v, want failed", o)
	}
	a.Decider = "system:gate"
	if o := f.book.Execute(t.Context(), a); o.State != oversight.Failed {
		t.Errorf("got %+v, want failed", o)
	}
}

func TestProposeRefuses(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	for _, tt := range []struct {
		name string
		c    rulebook.Change
		want string
	}{
		{"no document", rulebook.Change{}, "text: invalid policy: line 1"},
		{"a bad one", rulebook.Change{Text: "rules:\n  - id: a\n    then: maybe\n"}, "line 3"},
		{"bad tests", rulebook.Change{Text: open, Tests: "tests: 1"}, "tests: invalid policy: line 1"},
		{"tests that fail", rulebook.Change{Text: closed, Tests: tests}, "tests: 1 of 1 fail: line 2: bob may get mail: the verdict is deny, want allow"},
		{"a long reason", rulebook.Change{Text: open, Reason: strings.Repeat("x", 1001)}, "reason"},
		{"what holds", rulebook.Change{Text: policy.Default().Text()}, "in force already"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := f.book.Propose(t.Context(), f.gate, f.owner, tt.c)
			if !errors.Is(err, rulebook.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want ErrInvalid with %q", err, tt.want)
			}
		})
	}
}

// TestTampered is the attacker's: who changes the text of the policy in the
// database has people asked about everything.
func TestTampered(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	a := f.propose(rulebook.Change{Text: closed})
	f.approve(a)
	f.run(a)
	if v := f.judge(f.book, f.owner.Project, toBob); v.Effect != policy.Deny {
		t.Fatalf("got %+v, want deny", v)
	}
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `update policy_version set text = $1`, open)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range policy.Modes() {
		r := toBob
		r.Mode = mode
		if v := f.judge(f.book, f.owner.Project, r); v.Effect == policy.Allow {
			t.Errorf("mode %s: got %+v, want that it is not allowed", mode, v)
		}
	}
	// And it can be put right.
	a = f.propose(rulebook.Change{Text: open})
	f.approve(a)
	if a = f.run(a); a.State != oversight.Done {
		t.Errorf("got %s: %s, want done", a.State, a.Result)
	}
	if v := f.judge(f.book, f.owner.Project, toBob); v.Effect != policy.Allow {
		t.Errorf("got %+v, want allow", v)
	}
}

// TestGivenUp: a change that the database does not take is tried again later and
// later, and in the end is said to have failed: nobody could take it back else.
func TestGivenUp(t *testing.T) {
	db := storetest.SQLite(t)
	f := setup(t, db)
	a := f.propose(rulebook.Change{Text: open})
	f.approve(a)
	exec := func(query string) {
		t.Helper()
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), query)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	exec(`create trigger broken before insert on policy_version begin select raise(abort, 'no'); end`)
	a, err := f.gate.Action(t.Context(), f.owner, a.ID)
	if err != nil {
		t.Fatal(err)
	}
	waited := time.Duration(0)
	for a.Attempts = 1; a.Attempts < 12; a.Attempts++ {
		o := f.book.Execute(t.Context(), a)
		if o.State != oversight.Approved || o.Free || o.After < waited || o.After <= 0 || o.After > 5*time.Minute {
			t.Errorf("try %d: got %+v after %v", a.Attempts, o, waited)
		}
		waited = o.After
	}
	if o := f.book.Execute(t.Context(), a); o.State != oversight.Failed || !strings.Contains(o.Detail, "12 tries") || !strings.Contains(o.Detail, "propose it again") {
		t.Errorf("got %+v, want that it is given up", o)
	}
	exec(`drop trigger broken`)
	if o := f.book.Execute(t.Context(), a); o.State != oversight.Done {
		t.Errorf("got %+v for a late try that is taken, want done", o)
	}
}

// TestStoppedInBetween: a switch that is turned on when a change has been claimed
// stops it.
func TestStoppedInBetween(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		a := f.propose(rulebook.Change{Text: open})
		f.approve(a)
		s := oversight.Switch{}
		f.gate.Handle(policy.KindChange, interrupted{f.book, func() {
			var err error
			if s, err = f.gate.SwitchOn(t.Context(), f.owner, oversight.Switch{Scope: oversight.ScopeCapability, Target: string(policy.KindChange), Reason: "not now"}); err != nil {
				t.Error(err)
			}
		}})
		f.run(a)
		if err := f.gate.SwitchOff(t.Context(), f.owner, s.ID); err != nil {
			t.Fatal(err)
		}
		if a = f.run(a); a.State != oversight.Denied || !strings.Contains(a.Reason, "not now") {
			t.Errorf("it is %s: %s, want denied", a.State, a.Reason)
		}
		if v, err := f.book.Active(t.Context(), f.owner); err != nil || v.Number != 0 {
			t.Errorf("version %d holds, %v", v.Number, err)
		}
	})
}

// An interrupted executor is one whose action was claimed when something else happens.
type interrupted struct {
	oversight.Executor
	first func()
}

func (i interrupted) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	i.first()
	return i.Executor.Execute(ctx, a)
}
