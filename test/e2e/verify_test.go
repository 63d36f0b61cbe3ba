package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// A verified is the output of postern verify --json, with the fields that the test uses.
type verified struct {
	ID      string
	Results []struct {
		ID, Seen string
		Passed   bool
	}
}

// verify runs postern verify and returns its output, and an error if a check failed.
func (s *server) verify(args ...string) (v verified, err error) {
	s.t.Helper()
	cmd := exec.Command(s.bin, append([]string{"verify", "--json", "--data", s.data}, args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err2 := json.Unmarshal(out, &v); err2 != nil {
		s.t.Fatalf("postern verify: %v, %v: %s\n%s", err, err2, out, &stderr)
	}
	return v, err
}

// TestVerify: all checks pass on a server with default settings, and the checks of the
// network fail on one that allows all connections.
func TestVerify(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--memory", "512", "--disk", "512")
	dir := t.TempDir()
	log, junit := filepath.Join(dir, "log"), filepath.Join(dir, "junit.xml")
	// The tests read the server's log through a pipe. Here it is copied to a file, which is
	// replaced as a whole: a check that reads it must not find it empty.
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for last := false; !last; {
			select {
			case <-done:
				last = true
			case <-time.After(20 * time.Millisecond):
			}
			if os.WriteFile(log+".new", []byte(s.log.String()), 0o600) == nil {
				_ = os.Rename(log+".new", log)
			}
		}
	}()
	v, err := s.verify("--log", log, "--junit", junit)
	close(done)
	<-stopped
	for _, r := range v.Results {
		if !r.Passed {
			t.Errorf("%s: %s", r.ID, r.Seen)
		}
	}
	if err != nil || len(v.Results) < 25 {
		t.Errorf("%d checks, %v", len(v.Results), err)
	}
	if b, err := os.ReadFile(junit); err != nil || !strings.Contains(string(b), `<testsuites name="postern verify"`) {
		t.Errorf("JUnit: %v: %.200s", err, b)
	}
	record := s.mustCLI("audit", "list", "--verb", "verification.")
	if !strings.Contains(record, "verification.begin") || !strings.Contains(record, "verification.end") || !strings.Contains(record, v.ID) {
		t.Errorf("the audit has %s", record)
	}
	for _, list := range [][]string{{"sandbox", "list"}, {"secret", "list"}, {"template", "list"}} {
		if out := s.mustCLI(list...); strings.Contains(out, "verify-") {
			t.Errorf("the verification left %s", out)
		}
	}

	// The hole: the server allows all connections to the Internet. The checks must fail also
	// if the machine of this test has no Internet.
	open := start(t, t.TempDir(), "--egress", "allow")
	v, err = open.verify("--only", "egress")
	if err == nil {
		t.Error("a server that allows all connections passes")
	}
	failed := []string{}
	for _, r := range v.Results {
		if !r.Passed {
			failed = append(failed, r.ID)
			t.Logf("%s fails, as it should: %s", r.ID, r.Seen)
		}
	}
	if !slices.Contains(failed, "egress.tcp") {
		t.Errorf("failed: %v; want egress.tcp among them", failed)
	}
	for _, id := range []string{"egress.metadata", "egress.host", "egress.neighbours", "egress.raw"} { // no setting opens these
		if slices.Contains(failed, id) {
			t.Errorf("%s fails", id)
		}
	}
}
