package command_test

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/connection"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/sandbox"
	"postern/internal/store"
)

const boxID = "iaaaaaaaaaaaaaaaaaaaa"

type fixture struct {
	t    testing.TB
	log  *slog.Logger
	db   *store.DB
	book *rulebook.Book
	gate *oversight.Gate
	dir  string

	void time.Time // approvals from before are void for servers that are started

	owner auth.Principal
}

func setup(t testing.TB, db *store.DB) *fixture {
	t.Helper()
	f := &fixture{t: t, log: slog.New(slog.NewTextHandler(t.Output(), nil)), db: db, dir: filepath.Join(t.TempDir(), "commands")}
	f.book, f.gate = f.server()
	f.owner = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
		f.owner.Project, _, err = auth.NewProject(t.Context(), tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// server returns the rules and the gate of one more server on the fixture's database.
func (f *fixture) server() (*rulebook.Book, *oversight.Gate) {
	book := rulebook.New(f.log, f.db)
	gate := oversight.NewGate(f.log, f.db, book)
	gate.Void(f.void)
	gate.Handle(policy.KindChange, book)
	return book, gate
}

// start returns the admission of one more server on the fixture's database and
// directory.
func (f *fixture) start(c command.Config) *command.Admission {
	f.t.Helper()
	book, gate := f.server()
	if c.Dir == "" {
		c.Dir = f.dir
	}
	if c.Contract == nil {
		c.Contract = func(context.Context, string) (string, error) { return "", nil }
	}
	a, err := command.New(f.log, f.db, gate, connection.New(f.log, f.db, book, gate, 0), c)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, g := range []*oversight.Gate{gate, f.gate} {
		g.Handle(policy.KindExec, a)
	}
	f.t.Cleanup(a.Close)
	return a
}

func (f *fixture) box() auth.Principal {
	return auth.Principal{Kind: auth.Sandbox, ID: boxID, Project: f.owner.Project, Template: "base"}
}

// setPolicy makes text the policy.
func (f *fixture) setPolicy(text string) {
	f.t.Helper()
	a, err := f.book.Propose(f.t.Context(), f.gate, f.owner, rulebook.Change{Text: text})
	if err != nil {
		f.t.Fatal(err)
	}
	f.answer(a, true)
}

// answer decides on a, and carries it out.
func (f *fixture) answer(a oversight.Action, yes bool) oversight.Action {
	f.t.Helper()
	ctx := f.t.Context()
	err := f.gate.Decide(ctx, f.owner, oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: yes, Reason: "as I please"})
	if err != nil {
		f.t.Fatal(err)
	}
	if yes {
		if _, err := f.gate.RunOne(ctx); err != nil {
			f.t.Fatal(err)
		}
	}
	if a, err = f.gate.Action(ctx, f.owner, a.ID); err != nil {
		f.t.Fatal(err)
	}
	if yes && a.State != oversight.Done {
		f.t.Fatalf("got %s: %s", a.State, a.Result)
	}
	return a
}

func (f *fixture) waiting() []oversight.Action {
	f.t.Helper()
	list, err := f.gate.Actions(f.t.Context(), f.owner, oversight.Query{States: []oversight.State{oversight.Pending}})
	if err != nil {
		f.t.Fatal(err)
	}
	return list
}

// one returns the only action that waits.
func (f *fixture) one() oversight.Action {
	f.t.Helper()
	until(f.t, "one action waits", func() bool { return len(f.waiting()) > 0 })
	if n := len(f.waiting()); n != 1 {
		f.t.Fatalf("got %d actions that wait, want 1", n)
	}
	a, err := f.gate.Action(f.t.Context(), f.owner, f.waiting()[0].ID)
	if err != nil {
		f.t.Fatal(err)
	}
	return a
}

// switched turns a switch on. The result turns it off.
func (f *fixture) switched(scope oversight.Scope, target string) (off func()) {
	f.t.Helper()
	s, err := f.gate.SwitchOn(f.t.Context(), f.owner, oversight.Switch{Scope: scope, Target: target, Reason: "enough"})
	if err != nil {
		f.t.Fatal(err)
	}
	return func() {
		f.t.Helper()
		if err := f.gate.SwitchOff(context.WithoutCancel(f.t.Context()), f.owner, s.ID); err != nil {
			f.t.Fatal(err)
		}
	}
}

// until waits until ok returns true.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timed out waiting until %s", what)
		}
	}
}

// run returns a start of a program of the template.
func run(pid int32, args ...string) sandbox.Exec {
	p := args[0]
	if !strings.HasPrefix(p, "/") {
		p = "/usr/bin/" + p
	}
	return sandbox.Exec{PID: pid, Parent: 1, Path: p, Name: p, Dir: "/work", Args: args, Fixed: true, UID: 1000, SHA256: [32]byte{1}, Time: time.Now()}
}

func parse(t testing.TB, text string) *contract.Contract {
	t.Helper()
	c, err := contract.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A side records what a binding calls.
type side struct {
	mu         sync.Mutex
	killed     []int32
	stopped    []string
	violations []command.Violation
}

func (s *side) binding(c *contract.Contract) command.Binding {
	return command.Binding{
		Contract: c,
		Kill: func(_ context.Context, pid int32) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.killed = append(s.killed, pid)
			return nil
		},
		Stop: func(reason string) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.stopped = append(s.stopped, reason)
		},
		Violated: func(v command.Violation) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.violations = append(s.violations, v)
		},
	}
}

func (s *side) seen() (killed []int32, stopped []string, violations []command.Violation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.killed, s.stopped, s.violations
}

// refresh makes a reload the rules in force.
func (f *fixture) refresh(a *command.Admission) {
	f.t.Helper()
	ctx, cancel := context.WithCancel(f.t.Context())
	done, read := make(chan error, 1), make(chan struct{}, 1)
	rules := command.Rules(a)
	// The first read of a Run is always told as a change.
	rules.Watch(func() []string { return []string{f.box().Project} }, func(context.Context, string) {
		select {
		case read <- struct{}{}:
		default:
		}
	})
	go func() { done <- rules.Run(ctx) }()
	<-read
	cancel()
	<-done
}
