package sandbox_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestPausedSandboxesAreBounded: a caller cannot fill the disk with paused
// sandboxes and snapshots, and loses nothing by trying.
func TestPausedSandboxesAreBounded(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *sandbox.Config) { c.MaxPaused, c.MaxSnapshots, c.Snapshots = 2, 2, true })
		ctx := t.Context()
		var all []string
		for range 3 {
			all = append(all, f.create(sandbox.Request{}).ID)
		}
		for i, want := range []error{nil, nil, sandbox.ErrFull} {
			if err := f.fleet.Pause(ctx, f.who, all[i], i == 1); !errors.Is(err, want) {
				t.Errorf("pause %d = %v, want %v", i, err, want)
			}
		}
		if got := f.state(all[2]); got != sandbox.Running || len(f.snapshots()) != 3 { // two, and the environment of one
			t.Errorf("the third is %s, on disk %v", got, f.snapshots())
		}
		if _, _, err := f.fleet.Connect(ctx, f.who, all[0], sandbox.ConnectRequest{Timeout: time.Minute}); err != nil {
			t.Fatal(err)
		}
		if err := f.fleet.Pause(ctx, f.who, all[2], false); err != nil {
			t.Errorf("pause after one was resumed = %v", err)
		}

		for _, c := range []struct {
			name string
			want error
		}{{"", nil}, {"a:default", nil}, {"", sandbox.ErrFull}, {"b:default", sandbox.ErrFull}, {"a:default", nil}} {
			if _, err := f.fleet.Snapshot(ctx, f.who, all[0], c.name); !errors.Is(err, c.want) {
				t.Errorf("snapshot %q = %v, want %v", c.name, err, c.want)
			}
		}
		if got, err := f.fleet.Snapshots(ctx, f.who); err != nil || len(got) != 2 || len(f.snapshots()) != 5 {
			t.Errorf("%d snapshots, %v; on disk %v", len(got), err, f.snapshots())
		}
	})
}

// TestAutoPauseAtTheLimitKeepsRunning: beyond the limit of paused sandboxes a
// sandbox keeps running at the end of its life, but a stop of the server still
// freezes it.
func TestAutoPauseAtTheLimitKeepsRunning(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) { c.MaxPaused = 1 })
	first := f.create(sandbox.Request{})
	if err := f.fleet.Pause(t.Context(), f.who, first.ID, false); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	s := f.create(sandbox.Request{Options: sandbox.Options{Timeout: 10 * time.Millisecond, AutoPause: true}})
	go func() { done <- f.fleet.Run(ctx) }()
	f.waitFor("its life is made longer", func() bool { return slices.Contains(f.verbs(s.ID), "sandbox.timeout") })
	if got := f.state(s.ID); got != sandbox.Running {
		t.Errorf("it is %s", got)
	}
	cancel()
	<-done
	if got := f.state(s.ID); got != sandbox.Paused {
		t.Errorf("after a stop of the server it is %s", got)
	}
}

// TestSavesLeaveDiskFree: nothing is written that would leave less than KeepFreeMB.
func TestSavesLeaveDiskFree(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) { c.Snapshots = true })
	ctx := t.Context()
	s := f.create(sandbox.Request{})
	f.runtime.SetUsage(s.ID, sandbox.Usage{Memory: 1 << 60})
	_, snap := f.fleet.Snapshot(ctx, f.who, s.ID, "")
	_, fork := f.fleet.Fork(ctx, f.who, s.ID, time.Minute, 1)
	for what, err := range map[string]error{"pause": f.fleet.Pause(ctx, f.who, s.ID, false), "snapshot": snap, "fork": fork} {
		if !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s = %v, want %v", what, err, syscall.ENOSPC)
		}
	}
	if f.state(s.ID) != sandbox.Running || len(f.fleet.Live()) != 1 || len(f.snapshots()) != 0 {
		t.Errorf("afterwards it is %s, live %v, on disk %v", f.state(s.ID), f.fleet.Live(), f.snapshots())
	}
	f.runtime.SetUsage(s.ID, sandbox.Usage{Memory: 1 << 20})
	if err := f.fleet.Pause(ctx, f.who, s.ID, false); err != nil { // what was refused holds no space
		t.Errorf("pause of a small one = %v", err)
	}
}

// TestFailedWakeIsNotRepeatedAtOnce: requests to a sandbox that cannot be resumed
// do not cost a restore each.
func TestFailedWakeIsNotRepeatedAtOnce(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	ctx := t.Context()
	s := f.create(sandbox.Request{Options: sandbox.Options{AutoPause: true, AutoResume: true}})
	if err := f.fleet.Pause(ctx, f.who, s.ID, false); err != nil {
		t.Fatal(err)
	}
	f.runtime.FailStart(errors.New("boom"))
	begin := time.Now()
	for range 5 {
		if err := f.fleet.Wake(ctx, s.ID); !errors.Is(err, sandbox.ErrNotResumed) {
			t.Errorf("Wake = %v", err)
		}
	}
	most := 1 + int(time.Since(begin)/(10*time.Second)) // after ten seconds it may be tried again
	if n := strings.Count(strings.Join(f.verbs(s.ID), " "), "sandbox.resume_failed"); n < 1 || n > most {
		t.Errorf("five requests tried %d times, want at most %d", n, most)
	}
	f.runtime.FailStart(nil)
	if _, resumed, err := f.fleet.Connect(ctx, f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil || !resumed {
		t.Errorf("its owner resumed it: %v, %v", resumed, err)
	}
}

// TestRefusedCreateCostsNoPooledSandbox: a refused create or fork uses up no pooled
// sandbox and writes no copy.
func TestRefusedCreateCostsNoPooledSandbox(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Prepare, c.MaxSandboxes = false, []string{"base"}, 1
		c.Pool = sandbox.PoolConfig{Min: 1, Max: 1, MemoryMB: 100}
	})
	stop := f.run()
	s := f.create(sandbox.Request{Template: "base"})
	f.waitFor("one waits", func() bool {
		n, _ := f.fleet.Pooled()
		return n == 1
	})
	before, _ := f.runtime.List(t.Context())
	for range 3 {
		r := sandbox.Request{Template: "base", Options: sandbox.Options{Timeout: time.Minute}}
		if _, err := f.fleet.Create(t.Context(), f.who, r); !errors.Is(err, sandbox.ErrFull) {
			t.Errorf("Create = %v", err)
		}
	}
	slices.Sort(before)
	after, _ := f.runtime.List(t.Context())
	if slices.Sort(after); !slices.Equal(before, after) {
		t.Errorf("before there were %v, now %v", before, after)
	}
	f.runtime.FailSave(errors.New("a copy was made"))
	if _, err := f.fleet.Fork(t.Context(), f.who, s.ID, time.Minute, 3); !errors.Is(err, sandbox.ErrFull) {
		t.Errorf("Fork = %v", err)
	}
	f.runtime.FailSave(nil)
	stop()
}

// TestStuckWarmUpShellDoesNotBlockThePool: a warm-up shell that never ends delays
// the pool only for a limited time.
func TestStuckWarmUpShellDoesNotBlockThePool(t *testing.T) {
	f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
		c.Cold, c.Prepare, c.WarmTimeout = false, []string{"base"}, 100*time.Millisecond
		c.Pool = sandbox.PoolConfig{Min: 1, Max: 1, MemoryMB: 100}
	})
	f.link.cold = true
	stop := f.run()
	f.waitFor("one waits", func() bool {
		n, _ := f.fleet.Pooled()
		return n == 1
	})
	stop()
}
