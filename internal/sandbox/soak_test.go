package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestSoak calls everything on a few sandboxes concurrently, with failures and
// deaths in between, and restarts the server from time to time. Afterwards rows,
// runtime, links and disk must agree. It runs for POSTERN_TEST_SOAK, two seconds by
// default, with the race detector. A killed server is tested with the real one, in
// test/e2e.
func TestSoak(t *testing.T) {
	length := 2 * time.Second
	if s := os.Getenv("POSTERN_TEST_SOAK"); s != "" {
		var err error
		if length, err = time.ParseDuration(s); err != nil {
			t.Fatal(err)
		}
	}
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		k := &keeper{kept: map[string]bool{}}
		f := setup(t, db, func(c *sandbox.Config) {
			c.Cold, c.Prepare, c.Snapshots, c.Keeper = false, []string{"base"}, true, k
			c.MaxSandboxes, c.Pool = 12, sandbox.PoolConfig{Min: 1, Max: 3, MemoryMB: 100}
			c.Inboxes = nil
		})
		for end := time.Now().Add(length); time.Now().Before(end); {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- f.fleet.Run(ctx) }()
			f.load(8, 500*time.Millisecond)
			f.runtime.FailSave(nil)
			f.runtime.FailStart(nil)
			cancel()
			if err := <-done; !errors.Is(err, context.Canceled) {
				t.Errorf("Run = %v", err)
			}
			f.consistent(k, "after a stop", 0)
			f.open()
			if err := f.fleet.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
			f.consistent(k, "after Recover", 0)
		}
	})
}

// load calls the fleet from n goroutines for a while. It ignores the results,
// except for errors that nobody should get.
func (f *fixture) load(n int, length time.Duration) {
	ctx := f.t.Context()
	end := time.Now().Add(length)
	var wg sync.WaitGroup
	for g := range n {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), uint64(time.Now().UnixNano())))
			for time.Now().Before(end) {
				all, err := f.fleet.List(ctx, f.who, false)
				if err != nil {
					f.t.Error(err)
					return
				}
				id := "iaaaaaaaaaaaaaaaaaaaa"
				if len(all) > 0 {
					id = all[r.IntN(len(all))].ID
				}
				switch op := r.IntN(12); op {
				case 0, 1, 2:
					o := sandbox.Options{Timeout: time.Duration(50+r.IntN(2000)) * time.Millisecond, AutoPause: r.IntN(2) == 0}
					o.AutoResume = o.AutoPause && r.IntN(2) == 0
					_, err = f.fleet.Create(ctx, f.who, sandbox.Request{Template: "base", Options: o})
				case 3:
					err = f.fleet.Kill(ctx, f.who, id)
				case 4, 5:
					err = f.fleet.Pause(ctx, f.who, id, r.IntN(3) == 0)
				case 6, 7:
					_, _, err = f.fleet.Connect(ctx, f.who, id, sandbox.ConnectRequest{Timeout: time.Duration(1+r.IntN(3)) * time.Second, Reboot: r.IntN(4) == 0})
				case 8:
					err = f.fleet.Wake(ctx, id)
				case 9:
					_, err = f.fleet.Fork(ctx, f.who, id, time.Second, 1+r.IntN(3))
				case 10:
					var s sandbox.Snapshot
					if s, err = f.fleet.Snapshot(ctx, f.who, id, []string{"", "n:default"}[r.IntN(2)]); err == nil && r.IntN(2) == 0 {
						err = f.fleet.DeleteSnapshot(ctx, f.who, s.ID)
					}
				case 11:
					switch r.IntN(6) {
					case 0:
						f.runtime.Die(id, "killed")
					case 1:
						f.runtime.FailSave(syscall.ENOSPC)
					case 2:
						f.runtime.FailStart(errors.New("boom"))
					default:
						f.runtime.FailSave(nil)
						f.runtime.FailStart(nil)
					}
				}
				for _, known := range []error{
					sandbox.ErrNotFound, sandbox.ErrPaused, sandbox.ErrBusy, sandbox.ErrFull, sandbox.ErrNoSnapshot, sandbox.ErrInvalid,
					syscall.ENOSPC, context.Canceled, context.DeadlineExceeded,
				} {
					if errors.Is(err, known) {
						err = nil
					}
				}
				if err != nil && !strings.Contains(err.Error(), "boom") && !strings.Contains(err.Error(), "ended") {
					f.t.Errorf("an error that nobody should see: %v", err)
				}
			}
		})
	}
	wg.Wait()
}

// consistent compares rows, runtime, links, keeper and disk. There must be want
// sandboxes on the machine; -1 means as many as the rows say.
func (f *fixture) consistent(k *keeper, when string, want int) {
	f.t.Helper()
	ctx := f.t.Context()
	all, err := f.fleet.List(ctx, f.who, false)
	if err != nil {
		f.t.Fatal(err)
	}
	var running []string
	paused := 0
	for _, s := range all {
		switch s.State {
		case sandbox.Running:
			running = append(running, s.ID)
		case sandbox.Paused:
			paused++
		default:
			f.t.Errorf("%s: %s is %s", when, s.ID, s.State)
		}
	}
	slices.Sort(running)
	if want >= 0 && len(running) != want {
		f.t.Errorf("%s: %d run", when, len(running))
	}
	left, _ := f.runtime.List(ctx)
	if !slices.Equal(left, running) || !slices.Equal(f.fleet.Live(), running) {
		f.t.Errorf("%s: rows say that %v run, the machine has %v, to be dialled are %v", when, running, left, f.fleet.Live())
	}
	f.link.mu.Lock()
	links := len(f.link.attached)
	f.link.mu.Unlock()
	kept, _ := k.All(ctx)
	for _, file := range kept {
		file.Close()
	}
	if links != len(running) || len(kept) != len(running) {
		f.t.Errorf("%s: %d run, with %d links, of which %d are kept", when, len(running), links, len(kept))
	}
	snapshots, err := f.fleet.Snapshots(ctx, f.who)
	if err != nil {
		f.t.Fatal(err)
	}
	dirs := 0
	for _, n := range f.snapshots() {
		if !strings.HasPrefix(n, "t-") && !strings.HasSuffix(n, ".json") {
			dirs++
		}
	}
	if dirs != paused+len(snapshots) {
		f.t.Errorf("%s: %d are paused and there are %d snapshots, but on disk are %v", when, paused, len(snapshots), fmt.Sprint(f.snapshots()))
	}
}
