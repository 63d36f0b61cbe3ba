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
	stop := f.run()
	claimed := func() int { _, n := f.runtime.Prepared(); return n }
	wait := func(what string) {
		t.Helper()
		f.waitFor(what, func() bool { ps, _ := f.runtime.Prepared(); return len(ps) == 2 })
	}
	wait("two wait")
	ps, _ := f.runtime.Prepared()
	if s := ps[0]; s.MemoryMB == 0 || s.CPUs == 0 || s.DiskMB == 0 || s.Processes == 0 || s.Rootfs == "" || s.ID != "" || s.Link != nil {
		t.Errorf("prepared like %+v, want root file system and limits and nothing else", s)
	}
	f.create(sandbox.Request{Template: "base"}) // it may boot, while the template has no snapshot
	var s sandbox.Info
	f.waitFor("a create that uses one", func() bool {
		if s.ID != "" {
			_ = f.fleet.Kill(t.Context(), f.who, s.ID)
		}
		was := claimed()
		s = f.create(sandbox.Request{Template: "base"})
		return claimed() == was+1
	})
	wait("two wait again")
	was := claimed()
	if err := f.fleet.Pause(t.Context(), f.who, s.ID, false); err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.fleet.Connect(t.Context(), f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil {
		t.Fatal(err)
	}
	if got := claimed(); got != was+1 {
		t.Errorf("a resume: got %d that were used, want %d", got, was+1)
	}
	wait("two wait after the resume")
	if _, err := f.fleet.Fork(t.Context(), f.who, s.ID, time.Minute, 2); err != nil {
		t.Fatal(err)
	}
	if got := claimed(); got != was+3 {
		t.Errorf("a fork: got %d that were used, want %d", got, was+3)
	}
	stop()
	if ps, _ := f.runtime.Prepared(); len(ps) != 0 {
		t.Errorf("%d wait after the end", len(ps))
	}
}

// TestPoolLeavesPreparedSandboxes: a refill, for which nobody waits, uses none.
func TestPoolLeavesPreparedSandboxes(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Prepare, c.Prepared = false, []string{"base"}, 1
		c.Pool = sandbox.PoolConfig{Min: 2, Max: 2, MemoryMB: 100}
	})
	stop := f.run()
	for range 3 {
		f.waitFor("two are pooled, one is prepared", func() bool {
			pooled, _ := f.fleet.Pooled()
			ps, _ := f.runtime.Prepared()
			return pooled == 2 && len(ps) == 1
		})
		f.create(sandbox.Request{Template: "base"})
	}
	if _, n := f.runtime.Prepared(); n != 0 {
		t.Errorf("got %d that were used, want none", n)
	}
	stop()
}

// TestColdServerPreparesOnlyAfterAResume: where sandboxes boot, nothing is prepared
// before somebody has waited for a restore.
func TestColdServerPreparesOnlyAfterAResume(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Prepare, c.Prepared = true, []string{"base"}, 1
	})
	stop := f.run()
	s := f.create(sandbox.Request{Template: "base"})
	time.Sleep(600 * time.Millisecond) // more than a refill is delayed
	if ps, _ := f.runtime.Prepared(); len(ps) != 0 {
		t.Errorf("%d wait", len(ps))
	}
	if err := f.fleet.Pause(t.Context(), f.who, s.ID, false); err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.fleet.Connect(t.Context(), f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil {
		t.Fatal(err)
	}
	f.waitFor("one waits", func() bool { ps, _ := f.runtime.Prepared(); return len(ps) == 1 })
	stop()
}

// TestPreparedSandboxesFollowDemand: they fit what was started last, of whatever
// template, and a template that has gone does not keep others from being prepared.
func TestPreparedSandboxesFollowDemand(t *testing.T) {
	root := t.TempDir()
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Prepare, c.Prepared = false, []string{"base"}, 2
		base := c.Base
		c.Base = func(ctx context.Context, template string) (sandbox.Base, error) {
			b, err := base(ctx, "base")
			if template == "other" {
				b.Rootfs, b.Key, b.MemoryMB = root, "other", 777
			}
			return b, err
		}
	})
	stop := f.run()
	waiting := func(want int) func() bool {
		return func() bool {
			ps, _ := f.runtime.Prepared()
			others := 0
			for _, p := range ps {
				if p.Rootfs == root && p.MemoryMB == 777 {
					others++
				}
			}
			return len(ps) == 2 && others == want
		}
	}
	f.waitFor("two of base wait", waiting(0))
	used := func(template string) bool {
		_, was := f.runtime.Prepared()
		s := f.create(sandbox.Request{Template: template})
		if err := f.fleet.Kill(t.Context(), f.who, s.ID); err != nil {
			t.Error(err)
		}
		_, is := f.runtime.Prepared()
		return is == was+1
	}
	// The first create boots. A sandbox is prepared for the next once starts rest.
	f.waitFor("a create of the other template that uses one", func() bool {
		time.Sleep(500 * time.Millisecond)
		return used("other")
	})
	f.waitFor("two of the other", waiting(2))
	if used("base") {
		t.Error("a create of base used one of the other template")
	}
	f.waitFor("one of each", waiting(1))
	if !used("base") {
		t.Error("a create of base did not use the one of base")
	}
	f.waitFor("two of base wait, as after the last starts", waiting(0))
	used("other")
	f.waitFor("one of each again", waiting(1))
	f.runtime.RefusePrepare(root)
	used("base")
	f.waitFor("two of base wait, since the other cannot", waiting(0))
	stop()
}
