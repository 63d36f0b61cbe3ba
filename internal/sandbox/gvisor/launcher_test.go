package gvisor

import (
	"log/slog"
	"testing"
	"time"
)

// TestLaunchersWait: starts that find a launcher waiting, starts that find one
// that somebody has ended, and many at once.
func TestLaunchersWait(t *testing.T) {
	needRoot(t)
	r, err := New(slog.New(slog.NewTextHandler(t.Output(), nil)), Config{StateDir: t.TempDir(), Launchers: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // after the last await, also if the test fails
		time.Sleep(100 * time.Millisecond)
		for len(r.waiting) > 0 {
			if err := (<-r.waiting).dismiss(); err == nil {
				t.Error("a launcher without an order ends: got no error")
			}
		}
	})
	wait := func(n int) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); len(r.waiting) < n; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%d launchers wait, want %d", len(r.waiting), n)
			}
		}
	}
	for range 4 {
		s, h := start(t, r, nil)
		if got, want := h.do(t, 0, "hostname"), "box"; got != want {
			t.Errorf("hostname: got %q, want %q", got, want)
		}
		wait(2)
		if err := r.Stop(t.Context(), s.ID); err != nil {
			t.Error(err)
		}
	}
	for range 2 { // all that wait
		l := <-r.waiting
		if err := l.cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
		r.waiting <- l
	}
	time.Sleep(50 * time.Millisecond)
	for range 3 {
		start(t, r, nil)
	}
	wait(2)
}
