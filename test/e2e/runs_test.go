package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	rest "postern/client"
)

// runContract is the contract of the runs in these tests.
const runContract = `version: 1
name: numbers
commands:
  allow: [{run: "true"}, {run: "python3 **"}, {run: "sleep *"}]
files:
  write: [/work]
  inputs: [{path: "/data/*", size: 64KiB}]
limits: {time: 2m, output: 64KiB, memory: 512MiB, disk: 64MiB}
on_failure: {output: true}
`

// api returns two clients of the server: one with the project key, one for a person.
func (s *server) api() (key, person *rest.Client) {
	s.t.Helper()
	key, err := rest.New("http://"+s.web, s.key)
	if err != nil {
		s.t.Fatal(err)
	}
	if person, err = rest.New("unix:"+filepath.Join(s.data, "postern.sock"), ""); err != nil {
		s.t.Fatal(err)
	}
	return key, person
}

// approveRun approves an action as a person.
func approveRun(ctx context.Context, person *rest.Client, id string) error {
	a, err := person.Actions.Get(ctx, id)
	if err != nil {
		return err
	}
	_, err = person.Actions.Approve(ctx, a, "")
	return err
}

// follow waits until a run is over, and returns it.
func follow(ctx context.Context, c *rest.Client, id string) (rest.Run, error) {
	for after := int64(0); ; {
		list, err := c.Runs.Events(ctx, id, after, 30*time.Second)
		if err != nil {
			return rest.Run{}, err
		}
		for _, e := range list.Events {
			after = e.N
		}
		if list.State == rest.RunEnded || list.State == rest.RunRefused {
			return c.Runs.Get(ctx, id)
		}
	}
}

func newInput(path, content string) rest.NewInput {
	sum := sha256.Sum256([]byte(content))
	return rest.NewInput{Path: path, Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:])}
}

// runAttack tries what the contract does not allow. Each line with "did" means that an
// attack succeeded.
const runAttack = `
import os, socket, subprocess, sys
def tried(name, f):
    try:
        f()
    except Exception as e:
        print("refused", name, type(e).__name__, file=sys.stderr)
        return
    print("did", name)
tried("write an input", lambda: open("/data/numbers", "w"))
tried("write elsewhere", lambda: open("/usr/bin/x", "w"))
tried("read the guest", lambda: os.listdir("/run/postern"))
tried("start a shell", lambda: subprocess.run(["/bin/sh", "-c", "id"], check=True))
tried("start a copy", lambda: (open("/work/ls", "wb").write(open("/bin/ls", "rb").read()), os.chmod("/work/ls", 0o755), subprocess.run(["/work/ls"], check=True)))
tried("connect", lambda: socket.create_connection(("203.0.113.7", 80), 5))
tried("be root", lambda: os.setuid(0))
print(sum(int(l) for l in open("/data/numbers")), "is the sum")
`

// TestRuns performs runs in real sandboxes: they can do what their contract allows and
// nothing else, and leave nothing behind.
func TestRuns(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--memory", "512", "--pool-max", "0")
	key, person := s.api()
	ctx := t.Context()
	propose := func(n rest.NewRun, inputs map[string]string) rest.Run {
		t.Helper()
		for path, content := range inputs {
			n.Inputs = append(n.Inputs, newInput(path, content))
		}
		r, err := key.Runs.Propose(ctx, n)
		for path, content := range inputs {
			if err == nil {
				_, err = key.Runs.Upload(ctx, r.ID, path, strings.NewReader(content))
			}
		}
		if err == nil && len(inputs) > 0 {
			r, err = key.Runs.Submit(ctx, r.ID)
		}
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	perform := func(n rest.NewRun, inputs map[string]string) rest.Run {
		t.Helper()
		r := propose(n, inputs)
		if r.Approved == "" {
			// No key may decide, not even the one that proposed the run.
			if err := approveRun(ctx, key, r.Action); err == nil {
				t.Error("the key approved its own run")
			}
			if err := approveRun(ctx, person, r.Action); err != nil {
				t.Fatal(err)
			}
		}
		r, err := follow(ctx, key, r.ID)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if _, err := key.Contracts.Put(ctx, "numbers", runContract); err != nil {
		t.Fatal(err)
	}
	sum := rest.NewRun{Contract: "numbers", Task: "add the numbers", Commands: [][]string{{"python3", "/data/sum.py"}}}
	code := `print(sum(int(l) for l in open("/data/numbers")))`
	r := perform(sum, map[string]string{"/data/numbers": "1\n2\n39\n", "/data/sum.py": code})
	if r.Outcome != rest.RunSucceeded || r.Results[0].Stdout != "42\n" {
		t.Errorf("sum: %s %s %+v", r.Outcome, r.Reason, r.Results)
	}
	// The same run again needs no new approval.
	if again := perform(sum, map[string]string{"/data/numbers": "1\n2\n39\n", "/data/sum.py": code}); again.Approved != r.Action || again.Outcome != rest.RunSucceeded {
		t.Errorf("again: %s, approved by %q", again.Outcome, again.Approved)
	}
	r = perform(rest.NewRun{Contract: "numbers", Task: "attack", Commands: [][]string{{"python3", "/data/a.py"}}}, map[string]string{"/data/numbers": "1\n2\n39\n", "/data/a.py": runAttack})
	if r.Outcome != rest.RunViolated || len(r.Results) != 1 || r.Results[0].Stdout != "42 is the sum\n" || strings.Count(r.Results[0].Stderr, "refused") != 7 {
		t.Errorf("attack: %s %s %+v", r.Outcome, r.Reason, r.Results)
	}
	for name, tt := range map[string]struct {
		args         []string
		outcome, why string
	}{
		"flood": {[]string{"python3", "-c", "while 1: print('x' * 4096)"}, rest.RunViolated, "output"},
		"disk":  {[]string{"python3", "-c", "f = open('/work/x', 'wb')\nwhile 1: f.write(b'x' * 1000000)"}, rest.RunViolated, "disk"},
		"exit":  {[]string{"python3", "-c", "raise SystemExit(7)"}, rest.RunFailed, "exit code 7"},
		"shell": {[]string{"sh", "-c", "true"}, rest.RunViolated, "sh"},
		"daemon": {[]string{"python3", "-c", `
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for s in range(1, 32):
            try: signal.signal(s, signal.SIG_IGN)
            except OSError: pass
        time.sleep(1000)
os._exit(0)`}, rest.RunSucceeded, ""},
	} {
		r := perform(rest.NewRun{Contract: "numbers", Task: name, Commands: [][]string{tt.args}}, nil)
		if r.Outcome != tt.outcome || !strings.Contains(r.Reason, tt.why) {
			t.Errorf("%s: %s %q, want %s %q: %+v", name, r.Outcome, r.Reason, tt.outcome, tt.why, r.Results)
		}
		if took := r.EndedAt.Sub(*r.StartedAt); took > time.Minute {
			t.Errorf("%s: took %s", name, took)
		}
	}
	// A time-out ends the run, and its remaining commands do not start.
	r = perform(rest.NewRun{ContractText: strings.Replace(runContract, "time: 2m", "time: 2s", 1), Task: "time", Commands: [][]string{{"sleep", "1000"}, {"true"}}}, nil)
	if r.Outcome != rest.RunTimedOut || len(r.Results) != 1 {
		t.Errorf("time: %s %s %+v", r.Outcome, r.Reason, r.Results)
	}
	// A contract wider than the boundary is refused without a review.
	if _, err := person.Contracts.SetBoundary(ctx, strings.Replace(runContract, "time: 2m", "time: 1m", 1)); err != nil {
		t.Fatal(err)
	}
	_, err := key.Runs.Propose(ctx, rest.NewRun{Contract: "numbers", Task: "wider", Commands: [][]string{{"true"}}})
	if e, ok := errors.AsType[*rest.Error](err); !ok || e.Code != "run_refused" || !strings.Contains(e.Detail, "limits.time") || !strings.HasPrefix(e.Action, "run_") {
		t.Errorf("wider: %v", err)
	}
	if left := s.mustCLI("sandbox", "list"); strings.Contains(left, "numbers") || strings.Contains(left, "running") {
		t.Errorf("left behind: %s", left)
	}
	if got := s.mustCLI("audit", "list", "--verb", "run.", "--limit", "1000"); strings.Contains(got, "is the sum") || !strings.Contains(got, "run.command") {
		t.Error("the audit has what a run printed, or no commands")
	}
}

// TestRunsCrash kills the server in several states of a run. No command runs twice, and no
// sandbox is left behind.
func TestRunsCrash(t *testing.T) {
	t.Parallel()
	data := t.TempDir()
	flags := []string{"--memory", "512", "--pool-max", "0"}
	s := start(t, data, flags...)
	ctx := t.Context()
	// The events of a run show how often its commands were begun.
	for i, until := range []string{rest.RunProposed, rest.RunStarting, rest.RunRunning, "command", rest.RunCollecting} {
		key, person := s.api()
		n := rest.NewRun{ContractText: runContract, Task: fmt.Sprintf("crash %d", i), Commands: [][]string{{"sleep", "5"}, {"true"}}}
		if until == rest.RunCollecting {
			n.Commands = [][]string{{"true"}}
		}
		r, err := key.Runs.Propose(ctx, n)
		if err == nil {
			err = approveRun(ctx, person, r.Action)
		}
		if err != nil {
			t.Fatal(err)
		}
		for after, there := int64(0), until == rest.RunProposed; !there; {
			list, err := key.Runs.Events(ctx, r.ID, after, 10*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range list.Events {
				after = e.N
				there = there || e.State == until || e.Kind == until
			}
			if list.State == rest.RunEnded && !there {
				t.Fatalf("the run ended without reaching %s", until)
			}
		}
		_ = s.kill(syscall.SIGKILL)
		s = start(t, data, flags...)
		key, _ = s.api()
		if r, err = follow(ctx, key, r.ID); err != nil {
			t.Fatal(err)
		}
		begun := 0
		list, err := key.Runs.Events(ctx, r.ID, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list.Events {
			if e.State == rest.RunRunning {
				begun++
			}
		}
		if begun > 1 || r.Outcome != rest.RunLost && (begun == 1 && until != rest.RunProposed && until != rest.RunStarting) || !slices.Contains([]string{rest.RunLost, rest.RunSucceeded}, r.Outcome) {
			t.Errorf("killed at %s: %s %s, started %d times", until, r.Outcome, r.Reason, begun)
		}
		if left := s.mustCLI("sandbox", "list"); strings.Contains(left, "running") {
			t.Errorf("killed at %s: left behind: %s", until, left)
		}
	}
}
