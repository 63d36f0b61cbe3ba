package console

import (
	"strings"
	"testing"
	"time"

	"postern/internal/sandbox"
)

// TestSparkShowsFifteenMinutes: the small chart of a list has the whole time that its column
// names, and the highest use of each part of it.
func TestSparkShowsFifteenMinutes(t *testing.T) {
	now := time.Now()
	var samples []sandbox.Sample
	for at := now.Add(-20 * time.Minute); !at.After(now); at = at.Add(sandbox.SampleEvery) {
		samples = append(samples, sandbox.Sample{At: at})
	}
	samples[len(samples)-100].CPUPercent = 100 // more than eight minutes ago
	path := sparkPath(samples, now)
	if n := strings.Count(path, "L") + 1; n != 60 || !strings.HasPrefix(path, "M0.0 19.0L") {
		t.Errorf("%d points, want 60 from the left edge: %s", n, path)
	}
	if !strings.Contains(path, " 1.0L") {
		t.Errorf("the peak is missing: %s", path)
	}
	// The attack: a kernel reports impossible figures.
	if got := sparkPath([]sandbox.Sample{{At: now, CPUPercent: 1e9}}, now); got != "M88.0 1.0" {
		t.Errorf("an impossible figure: %s", got)
	}
	if got := sparkPath(nil, now); got != "" {
		t.Errorf("without samples: %q", got)
	}
}

// TestChartsBeginWithTheSandbox: a young sandbox fills its charts, and an old one shows its
// last hour.
func TestChartsBeginWithTheSandbox(t *testing.T) {
	now := time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)
	for _, tt := range []struct {
		age   time.Duration
		first string // mark on the time axis
		x     string // of the sample of two minutes ago
	}{
		{time.Minute, "11:55", "M208.0"}, {20 * time.Minute, "11:40", "M289.0"}, {5 * time.Hour, "11:00", "M307.0"},
	} {
		list := chartsOf([]sandbox.Sample{{At: now.Add(-2 * time.Minute), CPUPercent: 50}}, chartTime(now.Add(-tt.age), now), now)
		if len(list) != 3 || list[0].Marks[0].Text != tt.first || !strings.HasPrefix(list[0].Path, tt.x) || list[0].Marks[3].Text != "12:00" {
			t.Errorf("after %v: %+v", tt.age, list)
		}
	}
}
