package sandbox_test

import (
	"context"
	"testing"
	"time"

	"postern/internal/sandbox"
	"postern/internal/storetest"
)

// TestPreparedSandboxesAreForThoseWhoWait: a create that finds the pool empty, a resume
// and a fork use prepared sandboxes, and the pool does not. They are replaced, and gone
// when the fleet stops.
func TestPreparedSandboxesAreForThoseWhoWait(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Prepare, c.Prepared = false, []string{"base"}, 2
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.fleet.Run(ctx) }()
	claimed := func() int { _, _, n := f.runtime.Prepared(); return n }
	wait := func(what string) {
		t.Helper()
		f.waitFor(what, func() bool { n, _, _ := f.runtime.Prepared(); return n == 2 })
	}
	wait("two wait")
	if _, s, _ := f.runtime.Prepared(); s.MemoryMB == 0 || s.CPUs == 0 || s.DiskMB == 0 || s.Processes == 0 || s.Rootfs == "" || s.ID != "" || s.Link != nil {
		t.Errorf("prepared like %+v, want root file system and limits and nothing else", s)
	}
	f.create(sandbox.Request{Template: "base"}) // it may boot, while the template has no snapshot
	var s sandbox.Info
	f.waitFor("a create that uses one", func() bool {
		was := claimed()
		s = f.create(sandbox.Request{Template: "base"})
		return claimed() == was+1
	})
	wait("two wait again")
	was := claimed()
	if err := f.fleet.Pause(ctx, f.who, s.ID, false); err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil {
		t.Fatal(err)
	}
	if got := claimed(); got != was+1 {
		t.Errorf("a resume: got %d that were used, want %d", got, was+1)
	}
	wait("two wait after the resume")
	if _, err := f.fleet.Fork(ctx, f.who, s.ID, time.Minute, 2); err != nil {
		t.Fatal(err)
	}
	if got := claimed(); got != was+3 {
		t.Errorf("a fork: got %d that were used, want %d", got, was+3)
	}
	cancel()
	<-done
	if n, _, _ := f.runtime.Prepared(); n != 0 {
		t.Errorf("%d wait after the end", n)
	}
}

// TestPoolLeavesPreparedSandboxes: a refill, for which nobody waits, uses none.
func TestPoolLeavesPreparedSandboxes(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Prepare, c.Prepared = false, []string{"base"}, 1
		c.Pool = sandbox.PoolConfig{Min: 2, Max: 2, MemoryMB: 100}
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.fleet.Run(ctx) }()
	for range 3 {
		f.waitFor("two are pooled, one is prepared", func() bool {
			pooled, _ := f.fleet.Pooled()
			n, _, _ := f.runtime.Prepared()
			return pooled == 2 && n == 1
		})
		f.create(sandbox.Request{Template: "base"})
	}
	if _, _, n := f.runtime.Prepared(); n != 0 {
		t.Errorf("got %d that were used, want none", n)
	}
	cancel()
	<-done
}

// TestColdServerPreparesOnlyAfterAResume: where sandboxes boot, nothing is prepared
// before somebody has waited for a restore.
func TestColdServerPreparesOnlyAfterAResume(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Prepare, c.Prepared = true, []string{"base"}, 1
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.fleet.Run(ctx) }()
	s := f.create(sandbox.Request{Template: "base"})
	time.Sleep(600 * time.Millisecond) // more than a refill is delayed
	if n, _, _ := f.runtime.Prepared(); n != 0 {
		t.Errorf("%d wait", n)
	}
	if err := f.fleet.Pause(ctx, f.who, s.ID, false); err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil {
		t.Fatal(err)
	}
	f.waitFor("one waits", func() bool { n, _, _ := f.runtime.Prepared(); return n == 1 })
	cancel()
	<-done
}
