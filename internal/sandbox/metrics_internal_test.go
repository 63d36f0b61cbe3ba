package sandbox

import (
	"errors"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

func TestSampler(t *testing.T) {
	who, other := auth.Principal{Kind: auth.Project, Project: "p1"}, auth.Principal{Kind: auth.Project, Project: "p2"}
	m := NewSampler(nil)
	start := time.Unix(1_700_000_000, 0)
	s := subject{id: "i1", project: "p1", cpus: 2000, memory: 512, disk: 1024, started: store.Time(start)}
	at := func(n int) time.Time { return start.Add(time.Duration(n) * SampleEvery) }
	steps := []struct {
		name string
		u    Usage
		want Sample
	}{
		{"since the start", Usage{CPU: time.Second, Memory: 100 << 20, Disk: 7}, Sample{CPUPercent: 10, MemoryUsed: 100 << 20, DiskUsed: 7}},
		{"idle", Usage{CPU: time.Second, Memory: 1 << 20}, Sample{CPUPercent: 0, MemoryUsed: 1 << 20}},
		{"all of it and what the host takes", Usage{CPU: 12 * time.Second, Memory: 1 << 40, Disk: 1<<30 + 4096}, Sample{CPUPercent: 100, MemoryUsed: 512 << 20, DiskUsed: 1 << 30}},
		{"restored: its clock begins anew", Usage{CPU: 5 * time.Second}, Sample{CPUPercent: 50}},
	}
	for i, tt := range steps {
		m.add(s, tt.u, at(i+1))
		got, err := m.Newest(who, []string{"i1", "i2"})
		if err != nil || len(got) != 1 {
			t.Fatalf("%s: got %v, %v", tt.name, got, err)
		}
		tt.want.At, tt.want.CPUs, tt.want.MemoryTotal, tt.want.DiskTotal = at(i+1), 2, 512<<20, 1<<30
		if got["i1"] != tt.want {
			t.Errorf("%s: got %+v, want %+v", tt.name, got["i1"], tt.want)
		}
	}
	for i := range 2 * kept {
		m.add(s, Usage{}, at(i+10))
	}
	if got := len(m.boxes["i1"].samples); got != kept {
		t.Errorf("got %d samples, want no more than %d", got, kept)
	}
	m.forgetLocked(nil, at(1000))
	m.forgetLocked(nil, at(1001))
	if got, err := m.Newest(who, []string{"i1"}); err != nil || len(got) != 0 || len(m.boxes) != 1 {
		t.Errorf("one that ended: got %v, %v, %d kept", got, err, len(m.boxes))
	}
	m.forgetLocked(nil, at(1001+kept))
	if len(m.boxes) != 0 {
		t.Error("one that ended an hour ago is remembered")
	}
	m.add(s, Usage{}, at(3000))
	if got, err := m.Newest(other, []string{"i1"}); err != nil || len(got) != 0 {
		t.Errorf("another project's sandbox: got %v, %v", got, err)
	}
	for _, k := range []auth.Kind{auth.Sandbox, auth.Agent} {
		p := auth.Principal{Kind: k, Project: "p1"}
		_, err1 := m.Newest(p, []string{"i1"})
		_, err2 := m.Team(p, time.Time{}, time.Time{})
		if !errors.Is(err1, auth.ErrForbidden) || !errors.Is(err2, auth.ErrForbidden) {
			t.Errorf("%s measures: %v, %v", k, err1, err2)
		}
	}
}

func TestWithin(t *testing.T) {
	at := time.Unix(100, 0)
	tests := []struct {
		name       string
		start, end time.Time
		want       bool
	}{
		{"no bounds", time.Time{}, time.Time{}, true},
		{"at the start", at, time.Time{}, true},
		{"at the end", time.Time{}, at, true},
		{"before", at.Add(1), time.Time{}, false},
		{"after", time.Time{}, at.Add(-1), false},
	}
	for _, tt := range tests {
		if got := within(at, tt.start, tt.end); got != tt.want {
			t.Errorf("%s: got %v, want %v", tt.name, got, tt.want)
		}
	}
}
