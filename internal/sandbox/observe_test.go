package sandbox_test

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestMetricsBelongToTheirProject: a project sees the usage of its own sandboxes,
// also for an hour after their end.
func TestMetricsBelongToTheirProject(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ctx := t.Context()
		m := sandbox.NewSampler(f.fleet)
		s := f.create(sandbox.Request{Template: "base"})
		if got, err := m.Samples(ctx, f.who, s.ID, time.Time{}, time.Time{}); err != nil || len(got) != 0 {
			t.Errorf("before the first sample: got %v, %v", got, err)
		}
		f.runtime.SetUsage(s.ID, sandbox.Usage{CPU: time.Second, Memory: 5 << 20, Disk: 6})
		measure := func() {
			t.Helper()
			if err := m.Measure(ctx); err != nil {
				t.Fatal(err)
			}
		}
		measure()
		second := f.create(sandbox.Request{Template: "base"})
		measure()
		got, err := m.Samples(ctx, f.who, s.ID, time.Time{}, time.Time{})
		if err != nil || len(got) != 2 || got[0].MemoryUsed != 5<<20 || got[0].DiskUsed != 6 || got[0].CPUPercent <= 0 || got[1].CPUPercent != 0 {
			t.Errorf("got %+v, %v", got, err)
		}
		if some, err := m.Samples(ctx, f.who, s.ID, got[1].At, time.Time{}); err != nil || len(some) != 1 {
			t.Errorf("since the second: got %v, %v", some, err)
		}
		team, err := m.Team(f.who, time.Time{}, time.Time{})
		if err != nil || len(team) != 1 || team[0].Running != 2 || team[0].StartRate <= 0 {
			t.Errorf("team: got %+v, %v", team, err)
		}
		if team, err := m.Team(f.stranger, time.Time{}, time.Time{}); err != nil || len(team) != 0 {
			t.Errorf("another team: got %+v, %v", team, err)
		}
		for _, id := range []string{s.ID, second.ID} {
			if err := f.fleet.Kill(ctx, f.who, id); err != nil {
				t.Fatal(err)
			}
		}
		measure()
		measure()
		if got, err := m.Samples(ctx, f.who, s.ID, time.Time{}, time.Time{}); err != nil || len(got) != 2 {
			t.Errorf("after its end: got %d, %v", len(got), err)
		}
		if got, err := m.Newest(f.who, []string{s.ID}); err != nil || len(got) != 0 {
			t.Errorf("newest after its end: got %v, %v", got, err)
		}
		if team, err := m.Team(f.who, time.Time{}, time.Time{}); err != nil || len(team) != 2 || team[1].Running != 0 {
			t.Errorf("team at the end: got %+v, %v", team, err)
		}
		if _, err := m.Samples(ctx, f.stranger, s.ID, time.Time{}, time.Time{}); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("another project: got %v", err)
		}
		if _, err := m.Samples(ctx, auth.Principal{Kind: auth.Sandbox, ID: s.ID, Project: f.who.Project}, s.ID, time.Time{}, time.Time{}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a sandbox: got %v", err)
		}
	})
}

// TestLogsBelongToTheirProject: a project sees the lines of guest and host
// together, also after the end.
func TestLogsBelongToTheirProject(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ctx := t.Context()
		l, err := sandbox.NewLogbook(slog.New(slog.NewTextHandler(t.Output(), nil)), db, filepath.Join(t.TempDir(), "logs"))
		if err != nil {
			t.Fatal(err)
		}
		s := f.create(sandbox.Request{Template: "base"})
		w := l.Writer(s.ID)
		for i, level := range []string{"debug", "info", "warn", "error"} {
			time.Sleep(2 * time.Millisecond) // a line's time tells it from the next
			fmt.Fprintf(w, `{"level":%q,"logger":"process","message":"line %d"}`+"\n", level, i)
		}
		fmt.Fprintln(w, `{"logger":"postern","message":"sandbox killed: by a friend"}`)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if err := f.fleet.Kill(ctx, f.who, s.ID); err != nil {
			t.Fatal(err)
		}
		read := func(q sandbox.LogQuery) string {
			t.Helper()
			if q.Limit == 0 {
				q.Limit = 1000
			}
			es, err := l.Read(ctx, f.who, s.ID, q)
			if err != nil {
				t.Fatal(err)
			}
			var out []string
			for _, e := range es {
				out = append(out, e.Logger+": "+e.Message)
			}
			return strings.Join(out, ", ")
		}
		all, err := l.Read(ctx, f.who, s.ID, sandbox.LogQuery{Limit: 1000})
		if err != nil || len(all) != 7 {
			t.Fatalf("got %+v, %v, want 7 lines", all, err)
		}
		tests := []struct {
			name string
			q    sandbox.LogQuery
			want string
		}{
			{"all", sandbox.LogQuery{}, "postern: sandbox created, process: line 0, process: line 1, process: line 2, process: line 3, guest: sandbox killed: by a friend, postern: sandbox killed: killed"},
			{"the oldest", sandbox.LogQuery{Limit: 2}, "postern: sandbox created, process: line 0"},
			{"the newest", sandbox.LogQuery{Limit: 2, Backward: true}, "postern: sandbox killed: killed, guest: sandbox killed: by a friend"},
			{"least level", sandbox.LogQuery{Level: sandbox.LevelWarn}, "process: line 2, process: line 3"},
			{"search", sandbox.LogQuery{Search: "line 1"}, "process: line 1"},
			{"from", sandbox.LogQuery{From: all[4].At, Limit: 1}, "process: line 3"},
			{"back from", sandbox.LogQuery{From: all[1].At, Backward: true}, "process: line 0, postern: sandbox created"},
		}
		for _, tt := range tests {
			if got := read(tt.q); got != tt.want {
				t.Errorf("%s: got  %s\nwant %s", tt.name, got, tt.want)
			}
		}
		if _, err := l.Read(ctx, f.stranger, s.ID, sandbox.LogQuery{Limit: 1}); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("another project: got %v", err)
		}
		for _, id := range []string{"../../../etc/passwd", "", "i0\x00", "i00000000000000000000"} {
			if _, err := l.Read(ctx, f.who, id, sandbox.LogQuery{Limit: 1}); !errors.Is(err, sandbox.ErrNotFound) {
				t.Errorf("log of %q: got %v", id, err)
			}
		}
		for _, k := range []auth.Kind{auth.Agent, auth.Sandbox} {
			if _, err := l.Read(ctx, auth.Principal{Kind: k, Project: f.who.Project}, s.ID, sandbox.LogQuery{Limit: 1}); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s reads a log: %v", k, err)
			}
		}
		// What the events say of its run.
		es, err := event.List(ctx, db, f.who, event.Query{Sandbox: s.ID, Limit: 1})
		if err != nil || len(es) != 1 || es[0].Type != event.Killed {
			t.Fatalf("got %+v, %v", es, err)
		}
		x, ok := es[0].Data["execution"].(map[string]any)
		if ms, _ := x["execution_time"].(float64); !ok || ms < 1 || x["memory_mb"] == nil || x["vcpu_count"] == nil {
			t.Errorf("execution: %v", es[0].Data["execution"])
		}
	})
}
