package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestConformance plays test/conformance: what users of the official SDKs and of
// the official CLI may expect, each file against a server of its own. They wait for
// sandboxes more than they compute, so some run at once.
func TestConformance(t *testing.T) {
	t.Parallel()
	images, private := serveImages(t)
	files, err := filepath.Glob("../conformance/*.test.mjs")
	if err != nil || len(files) == 0 {
		t.Fatalf("find the tests: %v, %d files", err, len(files))
	}
	for _, file := range files {
		if file == volumeContent {
			continue
		}
		t.Run(strings.TrimSuffix(filepath.Base(file), ".test.mjs"), func(t *testing.T) {
			t.Parallel()
			playConformance(t, file, "REGISTRY="+images, "REGISTRY_PRIVATE="+private)
		})
	}
}

// TestConformanceOfVolumeContent plays the one file of [TestConformance] that moves
// gigabytes. It runs alone: a client that still sends when a full volume has
// refused its file must get around to reading the refusal.
func TestConformanceOfVolumeContent(t *testing.T) {
	t.Parallel()
	playConformance(t, volumeContent)
}

const volumeContent = "../conformance/volume.test.mjs"

// playConformance plays a file with more variables in its environment.
func playConformance(t *testing.T, file string, env ...string) {
	t.Helper()
	cmd := exec.Command("node", "--test", "--test-force-exit", "--test-reporter=spec", file)
	cmd.Env = append(append(os.Environ(), "POSTERN_TEST_BINARY="+postern(t), "NO_COLOR=1"), env...)
	out, err := cmd.CombinedOutput()
	// Node repeats the failures at the end, where they are easy to find.
	summary, failures, _ := strings.Cut(string(out), "\n✖ failing tests:")
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, tail(summary, 10), tail(failures, 200))
	}
	if !strings.Contains(summary, "\nℹ skipped 0\n") { // for want of a variable of env, say
		t.Errorf("tests were skipped\n%s", tail(summary, 200))
	}
	t.Log(tail(strings.TrimSpace(summary), 8))
}
