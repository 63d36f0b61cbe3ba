package gvisor

import (
	"log/slog"
	"runtime"
	"strings"
	"testing"
	"time"
)

// awaiting says whether launchers are being started for later.
func awaiting() bool {
	b := make([]byte, 4<<20)
	return strings.Contains(string(b[:runtime.Stack(b, true)]), "gvisor.(*Runtime).await(")
}

// TestLaunchersWait: starts that find a launcher waiting, starts that find one
// that somebody has ended, and many at once.
func TestLaunchersWait(t *testing.T) {
	needRoot(t)
	r, err := New(slog.New(slog.NewTextHandler(t.Output(), nil)), Config{StateDir: t.TempDir(), Launchers: 2})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // after the last await, also if the test fails
		for end := time.Now().Add(time.Minute); awaiting() && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		}
		for len(r.waiting) > 0 {
			if err := (<-r.waiting).dismiss(); err == nil {
				t.Error("a launcher without an order ends: got no error")
			}
		}
	})
	wait := func(n int) {
		t.Helper()
		for end := time.Now().Add(time.Minute); len(r.waiting) < n; time.Sleep(5 * time.Millisecond) {
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
	for end := time.Now().Add(time.Minute); awaiting() && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
	}
	for range 2 { // all that wait
		l := <-r.waiting
		if err := l.cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
		awaitEnd(t, l.cmd.Process.Pid) // or it would still take an order
		r.waiting <- l
	}
	for range 3 {
		start(t, r, nil)
	}
	wait(2)
}
