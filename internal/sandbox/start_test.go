package sandbox_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// hang makes the guests of the next n starts accept connections and never answer.
func (l *link) hang(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.silent = n
}

// TestSilentGuestIsStartedAgain: a guest that accepts connections and never answers
// costs part of the start's time, and not the sandbox, if it may be started again.
// If it may not, the snapshot stays unchanged.
func TestSilentGuestIsStartedAgain(t *testing.T) {
	t.Parallel()
	const patience = 6 * time.Second
	again := "sandbox.start_again"
	volume := func(c *sandbox.Config) {
		dir := t.TempDir()
		c.Mount = func(context.Context, string, string, sandbox.VolumeMount) (sandbox.Mount, error) {
			return sandbox.Mount{Source: dir, Destination: "/mnt"}, nil
		}
		c.Unmounted = func(context.Context, string) {}
	}
	paused := func(f *fixture, o sandbox.Options, filesOnly bool) string {
		s := f.create(sandbox.Request{Options: o})
		if err := f.fleet.Pause(f.t.Context(), f.who, s.ID, filesOnly); err != nil {
			f.t.Fatal(err)
		}
		return s.ID
	}
	resume := func(f *fixture, id string) error {
		_, _, err := f.fleet.Connect(f.t.Context(), f.who, id, sandbox.ConnectRequest{Timeout: time.Hour})
		return err
	}
	for _, tt := range []struct {
		name  string
		conf  func(*sandbox.Config)
		do    func(f *fixture) (id string, err error) // its next start is silent
		fails bool
		again bool
	}{
		{name: "a boot", again: true, do: func(f *fixture) (string, error) {
			f.link.hang(1)
			return f.create(sandbox.Request{}).ID, nil
		}},
		{name: "two boots", again: true, fails: true, do: func(f *fixture) (string, error) {
			f.link.hang(2)
			_, err := f.fleet.Create(f.t.Context(), f.who, sandbox.Request{Options: sandbox.Options{Timeout: time.Hour}})
			all, lerr := f.fleet.List(f.t.Context(), f.who, true)
			if lerr != nil || len(all) != 1 {
				f.t.Fatalf("rows: %v, %v", all, lerr)
			}
			return all[0].ID, err
		}},
		{name: "a boot with a volume", again: true, conf: volume, do: func(f *fixture) (string, error) {
			f.link.hang(1)
			return f.create(sandbox.Request{Options: sandbox.Options{Timeout: time.Hour, Volumes: []sandbox.VolumeMount{{Name: "v", Path: "/mnt"}}}}).ID, nil
		}},
		{name: "a resume without memory", again: true, do: func(f *fixture) (string, error) {
			id := paused(f, sandbox.Options{}, true)
			f.link.hang(1)
			return id, resume(f, id)
		}},
		{name: "a resume of which nothing has come out", again: true, do: func(f *fixture) (string, error) {
			id := paused(f, sandbox.Options{}, false)
			f.link.hang(1)
			return id, resume(f, id)
		}},
		// What it sent would be sent twice.
		{name: "a resume of which something has come out", fails: true, do: func(f *fixture) (string, error) {
			id := paused(f, sandbox.Options{}, false)
			f.link.mu.Lock()
			f.link.spoke = true
			f.link.mu.Unlock()
			f.link.hang(1)
			return id, resume(f, id)
		}},
		// What it wrote there is there.
		{name: "a resume with a volume", fails: true, conf: volume, do: func(f *fixture) (string, error) {
			id := paused(f, sandbox.Options{Timeout: time.Hour, Volumes: []sandbox.VolumeMount{{Name: "v", Path: "/mnt"}}}, false)
			f.link.hang(1)
			return id, resume(f, id)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
				c.StartTimeout = patience
				if tt.conf != nil {
					tt.conf(c)
				}
			})
			id, err := tt.do(f)
			if tt.fails != (err != nil) {
				t.Errorf("got %v, want an error: %v", err, tt.fails)
			}
			if got := slices.Contains(f.verbs(id), again); got != tt.again {
				t.Errorf("started again: %v, want %v; audit: %v", got, tt.again, f.verbs(id))
			}
			if got := f.runtime.Examined(); slices.Contains(got, id) != tt.again {
				t.Errorf("examined: %v, want %s: %v", got, id, tt.again)
			}
			left, lerr := f.runtime.List(t.Context())
			if lerr != nil || slices.Contains(left, id) == tt.fails {
				t.Errorf("on the machine: %v, %v", left, lerr)
			}
			if !tt.fails {
				if c, err := f.fleet.Dial(t.Context(), id, sandbox.GuestPort); err != nil {
					t.Errorf("it is not reached: %v", err)
				} else {
					c.Close()
				}
				return
			}
			// What was paused stays so, and goes on when it is asked again.
			if errors.Is(err, sandbox.ErrNotResumed) {
				f.link.hang(0)
				if err := resume(f, id); err != nil {
					t.Errorf("resume after one that failed: %v", err)
				}
			}
		})
	}
}

// TestSilentTemplateSnapshotIsReplacedByABoot: if the guest of a template's
// snapshot never answers, the sandbox boots within the time of one create. The same
// holds for a pooled sandbox.
func TestSilentTemplateSnapshotIsReplacedByABoot(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *sandbox.Config) {
			c.Cold, c.Prepare, c.StartTimeout = false, []string{"base"}, 6*time.Second
		})
		f.create(sandbox.Request{Template: "base"}) // which has the snapshot made
		from := ""
		for end := time.Now().Add(time.Minute); from == "" && time.Now().Before(end); time.Sleep(time.Millisecond) {
			s := f.create(sandbox.Request{Template: "base"})
			spec, _ := f.runtime.Spec(s.ID)
			from = spec.From
			if err := f.fleet.Kill(t.Context(), f.who, s.ID); err != nil {
				t.Fatal(err)
			}
		}
		if from == "" {
			t.Fatal("no sandbox starts from the template's snapshot")
		}
		f.link.hang(1)
		s := f.create(sandbox.Request{Template: "base"})
		if spec, _ := f.runtime.Spec(s.ID); spec.From != "" {
			t.Errorf("after a silent start from the snapshot: started from %q, want a boot", spec.From)
		}
		if got := f.verbs(s.ID); !slices.Contains(got, "sandbox.start_again") {
			t.Errorf("audit: %v", got)
		}
	})
}
