package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	rest "postern/client"
)

// learntJob starts children in several ways, writes files, and tries to reach a host.
const learntJob = `
import os, subprocess, sys, tempfile, urllib.request
print(subprocess.check_output(["uname", "-p"], text=True))
subprocess.run(["sh", "-c", "echo 'it works' | tr a-z A-Z > shell.txt"], check=True)
subprocess.run([sys.executable, "-c", "print(6 * 7)"], check=True)
os.system("ls /work > /dev/null")
with tempfile.TemporaryDirectory() as d:
    open(d + "/x.py", "w").write("print('from a temporary file')")
    subprocess.run([sys.executable, d + "/x.py"], check=True)
try:
    urllib.request.urlopen("http://outside.example/", timeout=5)
except OSError as e:
    print("no network", e)
try:
    open("/usr/share/x", "w")
except OSError as e:
    print("no file", e)
os.mkdir("made")
open("made/total.csv", "w").write(sys.argv[1] + "\n")
`

// TestLearntContractIsKept: a contract that was learnt from one run passes check, and the
// same command runs under it with every clause kept. Another command does not.
func TestLearntContractIsKept(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--pool-max", "0")
	key, person := s.api()
	dir := t.TempDir()
	script, learnt := filepath.Join(dir, "job.py"), filepath.Join(dir, "learnt.yaml")
	if err := os.WriteFile(script, []byte(learntJob), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	decided := make(chan struct{})
	go func() { // a person who approves what waits
		defer close(decided)
		for ctx.Err() == nil {
			list, err := person.Actions.List(ctx, 50, rest.StatePending)
			for _, a := range list {
				if err == nil {
					_ = approveRun(ctx, person, a.ID) // the next round tries again
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	}()
	defer func() {
		cancel()
		<-decided
	}()
	out, err := exec.CommandContext(ctx, s.bin, "contract", "learn", "--data", s.data, "--input", script, "--out", learnt, "--", "python3", "job.py", "June 2026").CombinedOutput()
	if err != nil {
		t.Fatalf("learn: %v\n%s", err, out)
	}
	text, err := os.ReadFile(learnt)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", text)
	for _, want := range []string{"uname -p", "outside.example", "# Refused to write: /usr/share/x", "made/total.csv", "job.py 'June 2026'"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%q is not in the contract", want)
		}
	}
	if out, err := exec.CommandContext(ctx, s.bin, "contract", "check", learnt).CombinedOutput(); err != nil || !strings.Contains(string(out), "is in order") {
		t.Errorf("check: %v\n%s", err, out)
	}
	if code, out := s.runStatus(t, nil, learnt, "--input", script, "--", "python3", "job.py", "June 2026"); code != 0 {
		t.Fatalf("run under the learnt contract: exit %d\n%s", code, out)
	}
	list, err := key.Runs.List(ctx, rest.RunQuery{})
	if err != nil || len(list) != 2 || list[0].Outcome != rest.RunSucceeded {
		t.Fatalf("%+v, %v", list, err)
	}
	r := s.reportOf(ctx, key, list[0].ID)
	for _, c := range r.Clauses {
		if c.Verdict != "kept" {
			t.Errorf("clause %s is %s: %s", c.ID, c.Verdict, c.Because)
		}
	}
	if code, out := s.runStatus(t, nil, learnt, "--input", script, "--", "python3", "job.py", "July 2026"); code != 121 {
		t.Errorf("another command: exit %d, want 121\n%s", code, out)
	}
}
