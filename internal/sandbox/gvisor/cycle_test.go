package gvisor

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
	"postern/internal/sandbox/sandboxtest"
)

// times is how often a test does what it does: n, or as often as the
// environment says (POSTERN_TEST_CYCLES multiplies it).
func times(t *testing.T, n int) int {
	t.Helper()
	if v := os.Getenv("POSTERN_TEST_CYCLES"); v != "" {
		by, err := strconv.Atoi(v)
		if err != nil {
			t.Fatalf("POSTERN_TEST_CYCLES: %v", err)
		}
		return n * by
	}
	return n
}

// holdings are what this process has of its own.
func holdings(t *testing.T) (files, goroutines int) {
	t.Helper()
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es { // the test's own links stay open until it ends
		if l, _ := os.Readlink("/proc/self/fd/" + e.Name()); !strings.HasPrefix(l, "socket:") && !strings.Contains(l, "eventfd") {
			files++
		}
	}
	b := make([]byte, 4<<20)
	b = b[:runtime.Stack(b, true)]
	for g := range strings.SplitSeq(string(b), "\n\n") { // those of our package, not of the test's network
		if strings.Contains(g, "sandbox/gvisor.(*instance)") || strings.Contains(g, "sandbox/gvisor.(*Runtime)") || strings.Contains(g, "gvisor.launch(") {
			goroutines++
		}
	}
	return files, goroutines
}

// holdsNoMore says that this process has not more than before. What ends in a
// moment is no leak: a goroutine reports the end before it returns.
func holdsNoMore(t *testing.T, files, goroutines int) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		f, g := holdings(t)
		if f <= files+1 && g <= goroutines {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("open files %d, before %d; goroutines %d, before %d", f, files, g, goroutines)
		}
	}
}

// instanceOf is what a runtime knows of a sandbox.
func instanceOf(r *Runtime, id string) *instance {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all[id]
}

// instances are the sandboxes that a runtime knows of.
func instances(r *Runtime) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.all))
}

// TestSaveAndRestoreCyclesLeaveNothing: one sandbox that is paused and resumed
// again and again, each time with changes. POSTERN_TEST_CYCLES=15 makes it 300.
func TestSaveAndRestoreCyclesLeaveNothing(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	parent := t.TempDir()
	h, link := newLink(t)
	s := specWith(t, link)
	if err := r.Start(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	h.ping(t)
	files, goroutines := 0, 0
	for n := range times(t, 20) {
		mark := strconv.Itoa(n)
		in := inside{t, h}
		if err := in.Remember(mark); err != nil {
			t.Fatal(err)
		}
		if err := in.Write("/etc/"+mark, mark); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(parent, mark)
		if err := r.Save(t.Context(), s.ID, dir, sandbox.SaveOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := r.Stop(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
		if f := footprintOf(t, r); !f.none() {
			t.Fatalf("round %d: left %v", n, f)
		}
		if n == 0 {
			files, goroutines = holdings(t)
		}
		h, s.Link = newLink(t)
		s.From = dir
		if n%2 == 1 {
			prepare(t, r, 1)
		}
		if err := r.Start(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		h.ping(t)
		in = inside{t, h}
		if got, err := in.Remembered(); err != nil || got != mark {
			t.Fatalf("round %d: remembered %q, %v", n, got, err)
		}
		for _, m := range []int{0, n / 2, n} {
			if got, err := in.Read("/etc/" + strconv.Itoa(m)); err != nil || got != strconv.Itoa(m) {
				t.Fatalf("round %d: file of round %d: %q, %v", n, m, got, err)
			}
		}
	}
	if err := r.Stop(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	holdsNoMore(t, files, goroutines)
	if es, err := os.ReadDir(parent); err != nil || len(es) != 0 {
		t.Errorf("beside the snapshots: %v, %v", es, err)
	}
	if all := instances(r); len(all) != 0 {
		t.Errorf("instances left: %v", all)
	}
}

// TestPartsKilledWhileStarting: whichever part of a sandbox dies at whatever
// moment of a start or a restore, also into a prepared sandbox, Start says so soon or
// what it started ends, and nothing stays.
func TestPartsKilledWhileStarting(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	first, _ := start(t, r, nil)
	dir := filepath.Join(t.TempDir(), "snapshot")
	if err := r.Save(t.Context(), first.ID, dir, sandbox.SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := r.Stop(t.Context(), first.ID); err != nil {
		t.Fatal(err)
	}
	failed := 0
	for n := range times(t, 16) {
		_, link := newLink(t)
		s := specWith(t, link)
		s.From = []string{"", dir}[n%2]
		name := []string{launch.Sentry, launch.Gofer, launch.Launcher}[n%3]
		if n%4 == 1 {
			prepare(t, r, 1)
		}
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(rand.N(100 * time.Millisecond))
			for { // as soon as there is one
				pids, _ := r.cgroups.pids(s.ID)
				for _, p := range pids {
					if cmd, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p)); strings.HasPrefix(string(cmd), name) {
						_ = unix.Kill(p, unix.SIGKILL) // it may have ended
						return
					}
				}
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
				}
			}
		})
		err := r.Start(t.Context(), s)
		if err != nil && strings.Contains(err.Error(), "not started within") {
			t.Errorf("%s killed: the start went on as long as it may: %v", name, err)
		}
		close(stop)
		wg.Wait()
		if err != nil {
			failed++
			if f := footprintOf(t, r); !f.none() {
				t.Errorf("%s killed: got %v, and left %v", name, err, f)
			}
			continue
		}
		if err := r.Stop(t.Context(), s.ID); err != nil {
			t.Errorf("%s killed: stop: %v", name, err)
		}
	}
	t.Logf("%d starts failed", failed)
	if f := footprintOf(t, r); !f.none() {
		t.Errorf("left %v", f)
	}
}

// TestManySandboxesAtOnce starts as many sandboxes from one snapshot as the environment
// says (POSTERN_TEST_ALIVE=200), four at a time, and has all of them answer.
func TestManySandboxesAtOnce(t *testing.T) {
	needRoot(t)
	n := 6
	if v := os.Getenv("POSTERN_TEST_ALIVE"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil {
			t.Fatalf("POSTERN_TEST_ALIVE: %v", err)
		}
	}
	r := newRuntime(t, t.TempDir())
	first, _ := start(t, r, nil)
	dir := filepath.Join(t.TempDir(), "snapshot")
	if err := r.Save(t.Context(), first.ID, dir, sandbox.SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	before := lookAtMachine(t, r.conf.StateDir)
	hosts := make([]*host, n)
	specs := make([]sandbox.Spec, n)
	took := make([]time.Duration, n)
	for i := range n {
		h, link := newLink(t)
		hosts[i], specs[i] = h, specWith(t, link)
		specs[i].From = dir
	}
	var wg sync.WaitGroup
	turn := make(chan struct{}, 4)
	for i := range n {
		wg.Go(func() {
			turn <- struct{}{}
			defer func() { <-turn }()
			begin := time.Now()
			if err := r.Start(t.Context(), specs[i]); err != nil {
				t.Errorf("start: %v", err)
				return
			}
			took[i] = time.Since(begin)
		})
	}
	wg.Wait()
	defer func() {
		for _, s := range specs {
			wg.Go(func() {
				turn <- struct{}{}
				defer func() { <-turn }()
				if err := r.Stop(context.Background(), s.ID); err != nil {
					t.Errorf("stop: %v", err)
				}
			})
		}
		wg.Wait()
	}()
	if t.Failed() {
		return
	}
	var memory int64
	for i, h := range hosts {
		h.ping(t)
		u, err := r.Usage(t.Context(), specs[i].ID)
		if err != nil {
			t.Error(err)
		}
		memory += u.Memory
	}
	after := lookAtMachine(t, r.conf.StateDir)
	slices.Sort(took)
	t.Logf("%d alive: start p50 %v, p95 %v; %.1f MiB each by the cgroups, %.1f MiB each by the machine", n, took[n/2], took[n*95/100],
		float64(memory)/float64(n)/(1<<20), float64(before.memoryMB-after.memoryMB)/float64(n))
}

// TestExamine: what a sandbox is doing is said also while its guest, or its
// whole kernel, stands still.
func TestExamine(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	s, _ := start(t, r, func(s *sandbox.Spec) { s.Image = sandbox.Image{} }) // with a gofer
	for _, c := range []struct {
		name, summary, file string
		before              func() error
	}{
		{"alive", "its kernel answers", "goroutine ", func() error { return nil }},
		{"its kernel stands still", "its kernel does not say", "no answer within", func() error {
			return stop(t, r.all[s.ID].sentry)
		}},
	} {
		if err := c.before(); err != nil {
			t.Fatal(err)
		}
		summary, file := r.Examine(t.Context(), s.ID)
		b, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(b), c.file) || !strings.Contains(string(b), "guest up") || !strings.Contains(string(b), launch.Gofer) {
			t.Errorf("%s: got %v and\n%s\nwant %q in it", c.name, err, b, c.file)
		}
		if !strings.Contains(summary, c.summary) || !strings.Contains(summary, launch.Sentry) || strings.Contains(summary, "\n") {
			t.Errorf("%s: got %q, want %q in it", c.name, summary, c.summary)
		}
	}
	// It is no sandbox of which anything is left.
	if ids, err := r.List(t.Context()); err != nil || !slices.Equal(ids, []string{s.ID}) {
		t.Errorf("List: got %v, %v", ids, err)
	}
	for _, id := range []string{sandboxtest.NewID(), "../" + s.ID} {
		if summary, _ := r.Examine(t.Context(), id); summary == "" {
			t.Errorf("%q: got no word", id)
		}
	}
}

// stop stops a process. Each of its threads may still run for a moment after
// the signal was sent, so it waits for all of them.
func stop(t *testing.T, pid int) error {
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		return err
	}
	for {
		stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		if err != nil {
			return err
		}
		running := slices.ContainsFunc(stats, func(path string) bool {
			b, err := os.ReadFile(path)
			// The state follows the name, which is in parentheses (proc_pid_stat(5)).
			return err == nil && !strings.HasPrefix(string(b[bytes.LastIndexByte(b, ')')+1:]), " T")
		})
		if !running {
			return nil
		}
		if err := t.Context().Err(); err != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}
