package sandbox_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A judge refuses the program at one path, and notes each call with its sandbox.
type judge struct {
	refuse string

	mu   sync.Mutex
	seen []string // "sandbox what"
}

func (j *judge) note(who auth.Principal, what string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.seen = append(j.seen, who.ID+" "+what)
}

func (j *judge) Exec(_ context.Context, who auth.Principal, e sandbox.Exec) bool {
	j.note(who, e.Path)
	return e.Path != j.refuse
}

func (j *judge) Exited(who auth.Principal, _ sandbox.Exit) { j.note(who, "exit") }
func (j *judge) Opened(who auth.Principal, o sandbox.Open) { j.note(who, "open "+o.Path) }
func (j *judge) Missed(who auth.Principal, _ uint64)       { j.note(who, "missed") }
func (j *judge) has(who sandbox.Info, what string) (ok bool) {
	return slices.Contains(j.all(), who.ID+" "+what)
}

func (j *judge) all() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.seen)
}

// TestCommandsAreJudgedForTheirOwner: each program is judged for the sandbox that starts it,
// also after a resume and under the next server.
func TestCommandsAreJudgedForTheirOwner(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		k, j := &keeper{kept: map[string]bool{}}, &judge{refuse: "/bin/sh"}
		f := setup(t, db, func(c *sandbox.Config) { c.Keeper, c.Commands = k, j })
		ctx := t.Context()
		check := func(s sandbox.Info, when string) {
			t.Helper()
			if f.runtime.Exec(ctx, s.ID, sandbox.Exec{Path: "/bin/sh"}) || !f.runtime.Exec(ctx, s.ID, sandbox.Exec{Path: "/bin/" + when}) {
				t.Errorf("%s: the runtime did not follow the judge's verdict", when)
			}
			if !j.has(s, "/bin/"+when) {
				t.Errorf("%s: seen: %q", when, j.all())
			}
		}
		s := f.create(sandbox.Request{})
		check(s, "created")
		if err := f.fleet.Pause(ctx, f.who, s.ID, false); err != nil {
			t.Fatal(err)
		}
		if _, _, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Hour}); err != nil {
			t.Fatal(err)
		}
		check(s, "resumed")
		f.runtime.Exit(s.ID, sandbox.Exit{})
		f.runtime.Miss(s.ID, 1)
		f.runtime.Open(s.ID, sandbox.Open{Path: "/a"})
		if !j.has(s, "exit") || !j.has(s, "missed") || j.has(s, "open /a") {
			t.Errorf("seen: %q", j.all())
		}
		f.open() // the next server on the same database and machine
		if err := f.fleet.Recover(ctx); err != nil {
			t.Fatal(err)
		}
		check(s, "recovered")
		if err := f.fleet.Kill(ctx, f.who, s.ID); err != nil {
			t.Fatal(err)
		}
		if left, _ := k.All(ctx); len(left) > 0 {
			t.Errorf("kept after the end: %v", left)
		}
	})
}

// TestPooledSandboxIsJudgedOnceItHasAnOwner: the programs that a template starts in a pooled
// sandbox are not judged, and its owner's programs are judged from the first one.
func TestPooledSandboxIsJudgedOnceItHasAnOwner(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		j := &judge{refuse: "/bin/sh"}
		f := setup(t, db, func(c *sandbox.Config) {
			c.Commands, c.Cold, c.Prepare, c.Inboxes, c.Pool = j, false, []string{"base"}, nil, sandbox.PoolConfig{Min: 1, Max: 1, MemoryMB: 1 << 20}
		})
		defer f.run()()
		f.waitFor("the pool is full", func() bool { return f.fleet.PooledOf("base") == 1 })
		ctx := t.Context()
		ids, err := f.runtime.List(ctx)
		if err != nil || len(ids) != 1 {
			t.Fatalf("%v, %v", ids, err)
		}
		pooled := ids[0]
		if !f.runtime.Exec(ctx, pooled, sandbox.Exec{Path: "/bin/sh"}) || len(j.all()) > 0 {
			t.Errorf("judged without an owner: %q", j.all())
		}
		s := f.create(sandbox.Request{Template: "base"})
		if s.ID != pooled {
			t.Fatalf("got %s, not the pooled %s", s.ID, pooled)
		}
		if f.runtime.Exec(ctx, s.ID, sandbox.Exec{Path: "/bin/sh"}) || !j.has(s, "/bin/sh") {
			t.Errorf("judged: %q", j.all())
		}
	})
}
