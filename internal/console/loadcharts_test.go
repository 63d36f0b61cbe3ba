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
