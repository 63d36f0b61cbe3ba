package e2e

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	rest "postern/client"
)

// judgedJobs are jobs under one contract, with what their reports must say.
var judgedJobs = []struct {
	name, script    string
	outcome         string
	limits, network string // verdicts
	says            string // in the sentence of the clause limits
	reason          string // of the run
}{
	{"64 MiB of 8 at the very end", "f = open('/work/x', 'wb'); f.write(b'x' * (64 << 20)); f.flush()", "violated", "violated", "kept", "the limit of disk was exceeded: 8MiB, and 64", "clause limits"},
	{"a little", "open('/work/x', 'wb').write(b'x' * (1 << 20))", "succeeded", "kept", "kept", "the last time after the end of its processes", ""},
	{"all memory", "b = bytearray(1 << 30)\nfor i in range(0, len(b), 4096): b[i] = 1", "failed", "kept", "kept", "The limit of memory (128MiB) was reached", "out of memory"},
	{"all memory, in a child", "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'b = bytearray(1 << 30)\\nfor i in range(0, len(b), 4096): b[i] = 1'])", "succeeded", "kept", "kept", "The limit of memory (128MiB) was reached", ""},
	{"a host that the operator opened, and a mirror", "import urllib.request as u\nu.urlopen('http://status.test/').read()\nu.urlopen('http://mirror.test:3141/simple/x/').read()", "succeeded", "kept", "kept", "", ""},
	{"another host there", "import urllib.request as u\ntry: u.urlopen('http://other.test/', timeout=5)\nexcept OSError: pass", "succeeded", "kept", "kept", "", ""},
}

// TestRunsAreJudgedByTheLastMeasure: reports of real runs say what the last measure says,
// name a lack of memory, and know the addresses and mirrors that the operator opened.
func TestRunsAreJudgedByTheLastMeasure(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestRunsAreJudgedByTheLastMeasure$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestRunsAreJudgedByTheLastMeasure") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"route", "add", "local", outside + "/32", "dev", "lo"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	for _, port := range []string{"80", "3141"} {
		l, err := net.Listen("tcp", outside+":"+port)
		if err != nil {
			t.Fatal(err)
		}
		web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("fine")) })}
		go func() { _ = web.Serve(l) }()
		t.Cleanup(func() { web.Close() })
	}
	s := start(t, t.TempDir(), "--pool-max", "0", "--dns", nameServer(t), "--egress-allow", outside, "--egress-allow", "status.test", "--package-mirror", "pypi=http://mirror.test:3141/simple")
	key, person := s.api()
	ctx := t.Context()
	const contract = `version: 1
name: judged
commands: {allow: [{run: "python3 **"}]}
files: {write: [/work]}
network: {allow: [status.test]}
packages: [{manager: pypi}]
limits: {time: 2m, memory: 128MiB, disk: 8MiB}
`
	for _, job := range judgedJobs {
		r, err := key.Runs.Propose(ctx, rest.NewRun{ContractText: contract, Task: job.name, Commands: [][]string{{"python3", "-c", job.script}}})
		if err == nil && r.Approved == "" {
			err = approveRun(ctx, person, r.Action)
		}
		if err == nil {
			r, err = follow(ctx, key, r.ID)
		}
		if err != nil {
			t.Fatalf("%s: %v", job.name, err)
		}
		report := s.reportOf(ctx, key, r.ID)
		limits, network := clauseOf(report, "limits"), clauseOf(report, "network")
		if r.Outcome != job.outcome || limits.Verdict != job.limits || network.Verdict != job.network || !strings.Contains(limits.Because, job.says) || !strings.Contains(r.Reason, job.reason) {
			t.Errorf("%s: %s: %s\n%+v\n%+v\n%+v", job.name, r.Outcome, r.Reason, limits, network, r.Results)
		}
		if limits.Evidence == "" || limits.Rank != "host" || network.Evidence == "" || network.Rank != "wall" {
			t.Errorf("%s: the evidence of limits is %q (%s), that of network %q (%s)", job.name, limits.Evidence, limits.Rank, network.Evidence, network.Rank)
		}
		if out := s.mustCLI("runs", "report", r.ID); !strings.Contains(out, "(host: measurements of the host") {
			t.Errorf("%s: the printed report names no evidence:\n%s", job.name, out)
		}
	}
}

// reportOf waits for the report of a run.
func (s *server) reportOf(ctx context.Context, c *rest.Client, id string) (r rest.RunReport) {
	s.t.Helper()
	eventually(s.t, "the report of "+id, func() bool {
		var err error
		r, err = c.Runs.Report(ctx, id)
		return err == nil
	})
	return r
}

// clauseOf returns a clause of a report.
func clauseOf(r rest.RunReport, id string) rest.RunClause {
	for _, c := range r.Clauses {
		if c.ID == id {
			return c
		}
	}
	return rest.RunClause{}
}
