package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// jobContract is the contract of the jobs in TestRun: one script, one writable directory and
// three patterns of artifacts.
const jobContract = `version: 1
name: job
commands:
  allow:
    - run: python3 -I /in/job.py **
    - run: sleep **
files:
  read: [/in]
  write: [/out]
  dir: /out
  inputs:
    - {path: /in/*, size: 64KiB}
on_failure: {stderr: 16KiB}
limits: {time: 60s, memory: 256MiB, output: 256KiB, processes: 64}
artifacts:
  - {path: /out/total.csv, type: csv, size: 64KiB, review: person}
  - {path: /out/swapped.txt, type: text, size: 64KiB, review: flagged}
  - {path: /out/odd*, type: text, size: 64KiB, review: flagged}
`

// jobBoundary is as wide as jobContract, with more time.
var jobBoundary = strings.NewReplacer("name: job", "name: boundary", "time: 60s", "time: 5m").Replace(jobContract)

// A job is a run as the API shows it, with the fields that the tests use.
type job struct {
	ID, State, Outcome, Refused, Reason, Action, Sandbox, Approved string

	Results []struct{ Stderr, Reason string }
}

// jobAnswers are the answers of the review.
func jobAnswers() map[string]any {
	return map[string]any{
		"execution": true, "network": false, "files": true, "credentials": false,
		"check": "the run itself", "timeout": "it counts as failed", "cleanup": "the sandbox is destroyed", "export": "a table",
	}
}

// in returns a copy of s whose helpers fail the subtest t.
func (s *server) in(t testing.TB) *server {
	c := *s
	c.t = t
	return &c
}

// propose proposes a run over REST with the project's key, and uploads its inputs.
func (s *server) propose(contract, task string, commands [][]string, inputs map[string]string) (j job, status int) {
	s.t.Helper()
	base := "http://" + s.web
	list := []map[string]any{}
	for path, text := range inputs {
		sum := sha256.Sum256([]byte(text))
		list = append(list, map[string]any{"path": path, "size": len(text), "sha256": hex.EncodeToString(sum[:])})
	}
	in := map[string]any{"contract_text": contract, "task": task, "commands": commands, "inputs": list, "answers": jobAnswers()}
	status, err := call(client, "POST", base+"/v1/runs", s.key, in, &j)
	if err != nil {
		s.t.Fatal(err)
	}
	if status >= 300 || len(inputs) == 0 {
		return j, status
	}
	for path, text := range inputs {
		req, err := http.NewRequest("PUT", base+"/v1/runs/"+j.ID+"/input?path="+url.QueryEscape(path), strings.NewReader(text))
		if err != nil {
			s.t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+s.key)
		resp, err := client.Do(req)
		if err != nil {
			s.t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode >= 300 {
			s.t.Fatalf("upload %s: %s", path, resp.Status)
		}
	}
	if status, err = call(client, "POST", base+"/v1/runs/"+j.ID+"/propose", s.key, nil, &j); err != nil {
		s.t.Fatal(err)
	}
	return j, status
}

// job returns a run as it is now.
func (s *server) job(id string) (j job) {
	s.t.Helper()
	if status, err := call(client, "GET", "http://"+s.web+"/v1/runs/"+id, s.key, nil, &j); err != nil || status != 200 {
		s.t.Fatalf("run %s: %d, %v", id, status, err)
	}
	return j
}

// ends waits until a run has ended or was refused, and returns it. If approve contains
// "run.start", it approves the start.
func (s *server) ends(id string, approve ...string) (j job) {
	s.t.Helper()
	for end := time.Now().Add(3 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if j = s.job(id); j.State == "ended" || j.State == "refused" {
			return j
		}
		if j.State == "proposed" && j.Action != "" && slices.Contains(approve, "run.start") {
			s.approve(j.Action)
		}
		if time.Now().After(end) {
			s.t.Fatalf("run %s is still %s: %+v", id, j.State, j)
		}
	}
}

// approve approves an action as the operator.
func (s *server) approve(action string) {
	s.t.Helper()
	if out, err := s.cli("approve", action); err != nil && !strings.Contains(out, "is not waiting") && !strings.Contains(out, "already") {
		s.t.Fatalf("approve %s: %v\n%s", action, err, out)
	}
}

// playJob proposes a run of a Python script, approves its start and waits for its end.
func (s *server) playJob(contract, task, script string, args ...string) job {
	s.t.Helper()
	j, status := s.propose(contract, task, [][]string{append([]string{"python3", "-I", "/in/job.py"}, args...)}, map[string]string{"/in/job.py": script})
	if status >= 300 {
		s.t.Fatalf("%s: propose: %d", task, status)
	}
	return s.ends(j.ID, "run.start")
}

// A jobReport is the report of a run, with the fields that the tests use.
type jobReport struct {
	Outcome  string
	Kept     int
	Violated int
	Signed   bool
	Clauses  []struct{ ID, Verdict, Because string }
	Teardown []struct {
		What   string
		Gone   bool
		Detail string
	}
	Limits []struct{ Name string }
}

// report waits for the report of a run.
func (s *server) report(id string) (r jobReport) {
	s.t.Helper()
	eventually(s.t, "the report of "+id, func() bool { // it is made once the run has ended
		status, err := call(client, "GET", "http://"+s.web+"/v1/runs/"+id+"/report", s.key, nil, &r)
		return err == nil && status == 200
	})
	return r
}

// clause returns the verdict on a clause.
func (r *jobReport) clause(id string) string {
	for _, c := range r.Clauses {
		if c.ID == id {
			return c.Verdict
		}
	}
	return "missing"
}

// A jobFile is an artifact of a run.
type jobFile struct {
	N                                                      int
	Path, Name, Type, Found, State, Reason, SHA256, Action string
	Size                                                   int64
	Flags, Findings                                        []string
}

// files returns the artifacts of a run.
func (s *server) files(id string) []jobFile {
	s.t.Helper()
	var out struct{ Artifacts []jobFile }
	if status, err := call(client, "GET", "http://"+s.web+"/v1/runs/"+id+"/artifacts", s.key, nil, &out); err != nil || status != 200 {
		s.t.Fatalf("artifacts of %s: %d, %v", id, status, err)
	}
	return out.Artifacts
}

// goodJob does what the contract allows.
const goodJob = `
import os
open("/out/total.csv", "w").write("region,total\nnorth,150\n")
print("done")
`

// TestRun performs runs on a real server, from the contract to the statement.
func TestRun(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--memory", "512")
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	exit := func(args ...string) (int, string) {
		out, err := exec.Command(s.bin, slices.Insert(args, 1, "--data", s.data)...).CombinedOutput()
		if e, ok := errors.AsType[*exec.ExitError](err); ok {
			return e.ExitCode(), string(out)
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return 0, string(out)
	}
	good := write("job.yaml", jobContract)

	t.Run("the boundary refuses a wider twin", func(t *testing.T) {
		s := s.in(t)
		s.mustCLI("boundary", "set", write("boundary.yaml", jobBoundary))
		for clause, wider := range map[string]string{
			"commands": strings.Replace(jobContract, "run: sleep **", "run: curl **", 1),
			"files":    strings.Replace(jobContract, "write: [/out]", "write: [/out, /home]", 1),
			"limits":   strings.Replace(jobContract, "time: 60s", "time: 1h", 1),
			"network":  jobContract + "network: {allow: [example.com]}\n",
		} {
			if j, status := s.propose(wider, "wider", [][]string{{"sleep", "0"}}, nil); status < 400 && j.State != "refused" {
				t.Errorf("%s: a contract that is wider than the boundary is %s", clause, j.State)
			}
			status, out := exit("run", write("wide.yaml", wider), "--task", "wider", "--", "sleep", "0")
			if status != 120 || !strings.Contains(out, clause) {
				t.Errorf("%s: exit %d, want 120 and the clause: %s", clause, status, out)
			}
		}
	})

	t.Run("a reviewed run, its artifact and its statement", func(t *testing.T) {
		s := s.in(t)
		results := filepath.Join(dir, "results")
		cmd := exec.Command(s.bin, "run", good, "--data", s.data, "--task", "totals", "--check", "x", "--export", "x", "--cleanup", "x", "--on-timeout", "x", "--out", results,
			"--input", write("job.py", goodJob)+"=/in/job.py", "--", "python3", "-I", "/in/job.py")
		var text lockedBuffer
		cmd.Stdout, cmd.Stderr = &text, &text
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		approved := map[string]bool{}
		var err error
		for waiting, end := true, time.Now().Add(3*time.Minute); waiting; {
			select {
			case err = <-ended:
				waiting = false
			case <-time.After(100 * time.Millisecond):
				for _, a := range s.pendingIDs() {
					if !approved[a] {
						approved[a] = true
						s.approve(a)
					}
				}
				if time.Now().After(end) {
					_ = cmd.Process.Kill()
				}
			}
		}
		if err != nil || len(approved) != 2 { // the start and the file
			t.Fatalf("postern run: %v, %d approvals\n%s", err, len(approved), &text)
		}
		if b, err := os.ReadFile(filepath.Join(results, "total.csv")); err != nil || !strings.HasPrefix(string(b), "region,total\n") {
			t.Errorf("the artifact: %q, %v", b, err)
		}
		var runs []job
		if err := json.Unmarshal([]byte(s.mustCLI("runs", "list", "--json", "--state", "ended")), &runs); err != nil || len(runs) == 0 {
			t.Fatalf("%v, %v", runs, err)
		}
		j := runs[0]
		r := s.report(j.ID)
		for _, c := range r.Clauses {
			if c.Verdict != "kept" {
				t.Errorf("clause %s: %s: %s", c.ID, c.Verdict, c.Because)
			}
		}
		if len(r.Clauses) == 0 || len(r.Teardown) == 0 || r.Outcome != "succeeded" {
			t.Errorf("report: %+v", r)
		}
		for _, x := range r.Teardown {
			if !x.Gone {
				t.Errorf("%s is left after the end: %s", x.What, x.Detail)
			}
		}
		nothingLeft(t, j.Sandbox)
		s.checkStatement(t, dir, j.ID, filepath.Join(results, "total.csv"))
	})

	t.Run("attackers", func(t *testing.T) { s.in(t).attackRuns(t) })

	t.Run("nobody reviews it", func(t *testing.T) {
		status, out := exit("run", good, "--task", "never reviewed", "--wait-review", "1s", "--", "sleep", "0")
		if status != 122 {
			t.Errorf("exit %d, want 122: %s", status, out)
		}
	})

	t.Run("its reviewer says no", func(t *testing.T) {
		s := s.in(t)
		j, status := s.propose(jobContract, "refused", [][]string{{"sleep", "1"}}, nil)
		if status >= 300 || j.Action == "" {
			t.Fatalf("%d, %+v", status, j)
		}
		s.mustCLI("reject", j.Action, "--reason", "not today")
		if j = s.ends(j.ID); j.State != "refused" || j.Sandbox != "" {
			t.Errorf("after the review: %+v", j)
		}
	})

	t.Run("an agent's key decides on no run", func(t *testing.T) {
		s := s.in(t)
		_, key := s.inbox("analyst")
		j, _ := s.propose(jobContract, "by a project", [][]string{{"sleep", "2"}}, nil)
		var a struct {
			Review struct {
				Version int64
				Digest  string
			}
		}
		if status, _ := call(s.local(), "GET", "http://127.0.0.1/v1/actions/"+j.Action, "", nil, &a); status != 200 {
			t.Fatalf("action: %d", status)
		}
		for _, k := range []string{key, s.key} {
			if status, _ := call(client, "POST", "http://"+s.web+"/v1/actions/"+j.Action+"/decision", k, map[string]any{"version": 1, "digest": a.Review.Digest, "approve": true}, nil); status < 400 {
				t.Errorf("a key approves a run: %d", status)
			}
		}
		if status, _ := call(client, "PUT", "http://"+s.web+"/v1/boundary", s.key, map[string]any{"text": jobBoundary}, nil); status != 403 {
			t.Errorf("a key sets the boundary: %d", status)
		}
		if status, _ := call(client, "POST", "http://"+s.web+"/v1/runs/"+j.ID+"/cancel", s.key, nil, nil); status >= 300 {
			t.Errorf("cancel: %d", status)
		}
	})

	t.Run("kill -9 in the middle", func(t *testing.T) {
		s := s.in(t)
		j, _ := s.propose(jobContract, "long", [][]string{{"sleep", "50"}}, nil)
		for end := time.Now().Add(2 * time.Minute); j.State != "running"; time.Sleep(50 * time.Millisecond) {
			if j = s.job(j.ID); j.State == "proposed" && j.Action != "" {
				s.approve(j.Action)
			}
			if time.Now().After(end) || j.State == "ended" {
				t.Fatalf("%+v", j)
			}
		}
		_ = s.kill(syscall.SIGKILL)
		again := start(t, s.data, "--memory", "512")
		again.key = s.key
		if got := again.ends(j.ID); got.Outcome != "lost" {
			t.Errorf("after kill -9: %+v", got)
		}
		r := again.report(j.ID)
		if r.clause("commands") == "kept" {
			t.Error("the clause commands is kept although its evidence is lost")
		}
		nothingLeft(t, j.Sandbox)
		if list := again.mustCLI("sandbox", "list"); strings.Contains(list, j.Sandbox) {
			t.Errorf("the sandbox is left: %s", list)
		}
	})
}

// pendingIDs returns the IDs of the actions that wait for a person.
func (s *server) pendingIDs() (ids []string) {
	s.t.Helper()
	var list []struct{ ID string }
	if err := json.Unmarshal([]byte(s.mustCLI("pending", "--json")), &list); err != nil {
		s.t.Fatal(err)
	}
	for _, a := range list {
		ids = append(ids, a.ID)
	}
	return ids
}

// checkStatement verifies the statement of a run without the server, and checks that a
// changed statement and another artifact fail.
func (s *server) checkStatement(t *testing.T, dir, id, artifact string) {
	t.Helper()
	statement := s.mustCLI("runs", "statement", id)
	path := filepath.Join(dir, "statement.json")
	keys := filepath.Join(dir, "keys.json")
	resp, err := client.Get("http://" + s.web + "/.well-known/postern-run-keys.json")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	f, err := os.Create(keys)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadFrom(resp.Body); err != nil || resp.StatusCode != 200 {
		t.Fatalf("keys: %s, %v", resp.Status, err)
	}
	f.Close()
	verify := func(text string, args ...string) error {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(s.bin, append([]string{"verify-run", path, "--keys", keys}, args...)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	if err := verify(statement, "--artifact", artifact); err != nil {
		t.Errorf("the statement: %v", err)
	}
	other := filepath.Join(dir, "other.csv")
	if err := os.WriteFile(other, []byte("region,total\nnorth,151\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if verify(statement, "--artifact", other) == nil {
		t.Error("another artifact passes")
	}
	var e struct{ Payload string }
	if err := json.Unmarshal([]byte(statement), &e); err != nil {
		t.Fatal(err)
	}
	changed := []byte(e.Payload)
	changed[len(changed)/2] ^= 1
	if verify(strings.Replace(statement, e.Payload, string(changed), 1)) == nil {
		t.Error("a changed statement passes")
	}
}
