// Package sandboxtest is the contract test of [sandbox.Runtime], which every
// implementation must pass, and a fake Runtime for tests of its users.
//
// It must not be linked into the program.
package sandboxtest

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/sandbox"
)

// NewID returns an unused sandbox ID.
func NewID() string {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	b := []byte("i")
	for range 20 {
		b = append(b, letters[rand.IntN(len(letters))])
	}
	return string(b)
}

// A Subject is a Runtime under test.
type Subject struct {
	// Open returns a Runtime for the same machine each time, as the next process
	// of the program would.
	Open func(t *testing.T) sandbox.Runtime
	// Spec returns what can be started, with a link of its own.
	Spec func(t *testing.T, id string) sandbox.Spec
	// Inside returns a way into the sandbox that was started last with what
	// Spec returned for id. Its methods wait until the guest answers.
	Inside func(t *testing.T, id string) Inside
}

// Inside is what a test does inside a running sandbox. Paths are absolute.
type Inside interface {
	Remember(v string) error // in the memory of a process that runs on
	Remembered() (string, error)
	Write(path, content string) error // "/etc" is a directory
	Read(path string) (string, error)
	Remove(path string) error
	Hostname() (string, error)
}

// Run runs the contract test.
func Run(t *testing.T, subject Subject) {
	const bound = time.Minute
	open, specFor := subject.Open, subject.Spec
	start := func(t *testing.T, r sandbox.Runtime) sandbox.Spec {
		t.Helper()
		return subject.start(t, r, specFor(t, NewID()))
	}
	listed := func(t *testing.T, r sandbox.Runtime, id string, want bool) {
		t.Helper()
		ids, err := r.List(t.Context())
		if err != nil {
			t.Fatalf("list: %v", err)
		}
		if got := slices.Contains(ids, id); got != want {
			t.Errorf("%s in the list %v: got %v, want %v", id, ids, got, want)
		}
	}
	linkClosed := func(t *testing.T, s sandbox.Spec) {
		t.Helper()
		if err := s.Link.Close(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("the link after Start: got %v, want that it is closed", err)
		}
	}
	t.Run("start, list, stop", func(t *testing.T) {
		r := open(t)
		s := start(t, r)
		linkClosed(t, s)
		listed(t, r, s.ID, true)
		lives(t, r, s.ID)
		type end struct {
			reason string
			err    error
		}
		ends := make(chan end)
		for range 3 {
			go func() {
				reason, err := waitForEnd(context.WithoutCancel(t.Context()), r, s.ID)
				ends <- end{reason, err}
			}()
		}
		waiting(t, 3)
		if err := r.Stop(t.Context(), s.ID); err != nil {
			t.Fatalf("stop: %v", err)
		}
		for range 3 {
			select {
			case e := <-ends:
				if e.err != nil || e.reason == "" {
					t.Errorf("wait for a sandbox that is stopped: got %q, %v, want a reason", e.reason, e.err)
				}
			case <-time.After(bound):
				t.Fatalf("wait does not return within %v after stop", bound)
			}
		}
		listed(t, r, s.ID, false)
		if err := r.Stop(t.Context(), s.ID); err != nil {
			t.Errorf("stop again: %v", err)
		}
		if _, err := r.Wait(t.Context(), s.ID); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("wait for one that was stopped: got %v, want %v", err, sandbox.ErrNotFound)
		}
	})

	t.Run("an unknown sandbox", func(t *testing.T) {
		r := open(t)
		id := NewID()
		listed(t, r, id, false)
		if err := r.Stop(t.Context(), id); err != nil {
			t.Errorf("stop: %v", err)
		}
		if _, err := r.Wait(t.Context(), id); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("wait: got %v, want %v", err, sandbox.ErrNotFound)
		}
		if _, err := r.Usage(t.Context(), id); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("usage: got %v, want %v", err, sandbox.ErrNotFound)
		}
		dir := filepath.Join(t.TempDir(), "snapshot")
		if err := r.Save(t.Context(), id, dir, sandbox.SaveOptions{}); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("save: got %v, want %v", err, sandbox.ErrNotFound)
		}
		empty(t, filepath.Dir(dir))
	})

	t.Run("a start that fails leaves nothing", func(t *testing.T) {
		r := open(t)
		s := specFor(t, NewID())
		s.Rootfs = t.TempDir() + "/missing"
		if err := r.Start(t.Context(), s); err == nil {
			t.Error("start without a root file system: got no error")
		}
		linkClosed(t, s)
		listed(t, r, s.ID, false)
	})

	t.Run("a start that is cancelled leaves nothing", func(t *testing.T) {
		r := open(t)
		s := specFor(t, NewID())
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := r.Start(ctx, s); !errors.Is(err, context.Canceled) {
			t.Errorf("start: got %v, want %v", err, context.Canceled)
		}
		linkClosed(t, s)
		listed(t, r, s.ID, false)
	})

	t.Run("an id is taken once", func(t *testing.T) {
		r := open(t)
		s := start(t, r)
		for _, r := range []sandbox.Runtime{r, open(t)} {
			again := specFor(t, s.ID)
			if err := r.Start(t.Context(), again); err == nil {
				t.Error("start of the same id: got no error")
			}
			linkClosed(t, again)
		}
		listed(t, r, s.ID, true)
		lives(t, r, s.ID)
	})

	t.Run("another process finds and stops it", func(t *testing.T) {
		first := open(t)
		s := start(t, first)
		second := open(t)
		listed(t, second, s.ID, true)
		lives(t, second, s.ID)
		if err := second.Stop(t.Context(), s.ID); err != nil {
			t.Fatalf("stop: %v", err)
		}
		listed(t, first, s.ID, false)
		listed(t, second, s.ID, false)
	})

	t.Run("stop comes at any time", func(t *testing.T) {
		r := open(t)
		for range 8 {
			s := specFor(t, NewID())
			var wg sync.WaitGroup
			wg.Go(func() { _ = r.Start(t.Context(), s) }) // either is right
			time.Sleep(rand.N(120 * time.Millisecond))
			ctx, cancel := context.WithTimeout(t.Context(), bound)
			if err := r.Stop(ctx, s.ID); err != nil {
				t.Errorf("stop during start: %v", err)
			}
			wg.Wait()
			// The start may have begun after the stop had found nothing.
			if err := r.Stop(ctx, s.ID); err != nil {
				t.Errorf("stop after start: %v", err)
			}
			cancel()
			linkClosed(t, s)
			listed(t, r, s.ID, false)
		}
	})

	subject.testSnapshots(t)
	subject.testMounts(t)
	subject.testUsage(t)

	t.Run("many at once", func(t *testing.T) {
		r := open(t)
		var wg sync.WaitGroup
		for range 6 {
			s := specFor(t, NewID())
			wg.Go(func() {
				if err := r.Start(t.Context(), s); err != nil {
					t.Errorf("start: %v", err)
				}
				if err := r.Stop(t.Context(), s.ID); err != nil {
					t.Errorf("stop: %v", err)
				}
			})
		}
		wg.Wait()
		ids, err := r.List(t.Context())
		if err != nil || len(ids) != 0 {
			t.Errorf("list: got %v, %v, want none", ids, err)
		}
	})
}

// start starts s, and stops it at the end of the test.
func (subject Subject) start(t *testing.T, r sandbox.Runtime, s sandbox.Spec) sandbox.Spec {
	t.Helper()
	if err := r.Start(t.Context(), s); err != nil {
		t.Fatalf("start: %v", err)
	}
	t.Cleanup(func() {
		if err := r.Stop(context.Background(), s.ID); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return s
}

// waitForEnd is r.Wait under a name that waiting finds in stack traces.
func waitForEnd(ctx context.Context, r sandbox.Runtime, id string) (string, error) {
	reason, err := r.Wait(ctx, id)
	return reason, err
}

// waiting returns when n goroutines are in waitForEnd. A later call would find no
// such sandbox.
func waiting(t *testing.T, n int) {
	t.Helper()
	b := make([]byte, 8<<20)
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		got := 0
		for g := range strings.SplitSeq(string(b[:runtime.Stack(b, true)]), "\n\n") {
			head, frames, _ := strings.Cut(g, "\n")
			if strings.Contains(head, "[select") && strings.Contains(frames, "sandboxtest.waitForEnd(") {
				got++
			}
		}
		if got >= n {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d wait for the end, want %d", got, n)
		}
	}
}

// lives checks that a sandbox has not ended.
func lives(t *testing.T, r sandbox.Runtime, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if reason, err := r.Wait(ctx, id); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait for a sandbox that runs: got %q, %v, want that it goes on", reason, err)
	}
}

// empty checks that a directory is empty.
func empty(t *testing.T, dir string) {
	t.Helper()
	es, err := os.ReadDir(dir)
	if err != nil || len(es) != 0 {
		t.Errorf("in %s: got %v, %v, want nothing", dir, es, err)
	}
}
