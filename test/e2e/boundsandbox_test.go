package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	rest "postern/client"
)

const boundContract = `version: 1
name: sums
commands: {allow: [{run: "bash **"}, {run: "python3 **"}, {run: "cat *"}]}
files:
  write: [/work]
  inputs: [{path: /work/in.csv, size: 1KiB, required: true}, {path: "/data/*", size: 64KiB}]
limits: {time: 10m, disk: 64MiB, output: 1MiB}
`

// call sends a request to the guest of b, and returns the status and the body.
func (b *box) call(t *testing.T, method, path, kind, body string) (int, string) {
	t.Helper()
	req := b.request(method, path, strings.NewReader(body))
	req.Header.Set("Content-Type", kind)
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// boundBox creates a sandbox that the contract sums binds, and approves its review.
func (s *server) boundBox(t *testing.T) *box {
	t.Helper()
	var made *box
	eventually(t, "a bound sandbox", func() bool {
		status, b, err := s.create(map[string]any{"templateID": "base", "timeout": 300, "metadata": map[string]string{"postern.contract": "sums"}})
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range s.pendingIDs() {
			s.approve(id)
		}
		made = b
		return status == http.StatusCreated
	})
	return made
}

// TestBoundSandboxesEndWithAStatement: the sandbox of an SDK takes the inputs of its contract,
// serves files where the contract names them, and ends with the report and the statement of
// a run, however it ends.
func TestBoundSandboxesEndWithAStatement(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--pool-max", "0")
	key, _ := s.api()
	ctx := t.Context()
	if _, err := key.Contracts.Put(ctx, "sums", boundContract); err != nil {
		t.Fatal(err)
	}
	const raw, rpc = "application/octet-stream", "application/json"
	b := s.boundBox(t)

	// Before the first command: inputs, and files of the contract.
	if r, text := b.call(t, "POST", "/process.Process/Start", "application/connect+json", ""); r != http.StatusConflict || !strings.Contains(text, "requires the input /work/in.csv") {
		t.Errorf("a command before the inputs: %d %s", r, text)
	}
	for _, c := range []struct {
		method, path, kind, body string
		want                     int
		says                     string
	}{
		{"POST", "/files?path=/data/too-large", raw, strings.Repeat("x", 70<<10), 400, "the contract allows 65536"},
		{"POST", "/files?path=in.csv", raw, "1\n2\n", 200, "/work/in.csv"},
		{"POST", "/files?path=/work/in.csv", raw, "3\n", 400, "is there already"},
		{"POST", "/files?path=/work/script.py", raw, "print(sum(map(int, open('/work/in.csv'))), open('/data/a').read())", 200, "/work/script.py"},
		{"POST", "/files?path=/etc/x", raw, "x", 403, ""},
		{"POST", "/files?path=/root/x", raw, "x", 403, ""},
		{"POST", "/files?path=/usr/bin/x", raw, "x", 403, ""},
		{"GET", "/files?path=/work/in.csv", raw, "", 200, "1\n2\n"},
		{"GET", "/files?path=/run/postern/state", raw, "", 404, ""},
		{"GET", "/files?path=/home/user/.bashrc", raw, "", 404, ""},
		{"GET", "/files?path=/etc/os-release", raw, "", 200, "Debian"},
		{"POST", "/filesystem.Filesystem/MakeDir", rpc, `{"path":"/work/made"}`, 200, "made"},
		{"POST", "/filesystem.Filesystem/MakeDir", rpc, `{"path":"/opt/made"}`, 403, ""},
		{"POST", "/filesystem.Filesystem/Remove", rpc, `{"path":"/work/in.csv"}`, 0, "err"},
		{"POST", "/filesystem.Filesystem/Move", rpc, `{"source":"/work/script.py","destination":"/work/job.py"}`, 200, "job.py"},
		{"POST", "/filesystem.Filesystem/ListDir", rpc, `{"path":"/work"}`, 200, "job.py"},
		{"POST", "/filesystem.Filesystem/ListDir", rpc, `{"path":"/run"}`, 0, "err"},
		{"POST", "/filesystem.Filesystem/CreateWatcher", rpc, `{"path":"/work"}`, 403, "bound by contract"},
	} {
		status, text := b.call(t, c.method, c.path, c.kind, c.body)
		if c.want != 0 && status != c.want || c.want == 0 && status < 400 || c.says != "err" && !strings.Contains(text, c.says) {
			t.Errorf("%s %s %.60s: %d %.300s, want %d %q", c.method, c.path, c.body, status, text, c.want, c.says)
		}
	}
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	for _, name := range []string{"/data/a", "/data/b"} {
		part, err := w.CreatePart(map[string][]string{"Content-Disposition": {fmt.Sprintf(`form-data; name="file"; filename="%s"`, name)}})
		if err == nil {
			_, err = part.Write([]byte("of " + name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	if status, text := b.call(t, "POST", "/files", w.FormDataContentType(), form.String()); status != 200 || !strings.Contains(text, "/data/b") {
		t.Errorf("several inputs: %d %s", status, text)
	}
	if r := b.run("python3 /work/job.py; echo made > /work/out.txt"); r.exit != 0 || r.stdout != "3 of /data/a\n" {
		t.Errorf("the job: %+v", r)
	}
	if status, text := b.call(t, "POST", "/files?path=/data/late", raw, "x"); status < 400 {
		t.Errorf("an input after the first command: %d %s", status, text)
	}
	if status, text := b.call(t, "GET", "/files?path=/work/out.txt", raw, ""); status != 200 || text != "made\n" {
		t.Errorf("its result: %d %s", status, text)
	}
	if status, _, _ := s.project("DELETE", "/sandboxes/"+b.id, ""); status != http.StatusNoContent {
		t.Fatalf("kill: %d", status)
	}
	r := s.sessionOf(t, key, b.id)
	if r.Outcome != rest.RunSucceeded || len(r.Inputs) != 3 || !r.Inputs[0].Received {
		t.Errorf("%s: %s, inputs %+v", r.Outcome, r.Reason, r.Inputs)
	}
	report := s.reportOf(ctx, key, r.ID)
	for _, c := range report.Clauses {
		if want := map[string]string{"on_failure": "not_verified", "artifacts": "not_verified"}[c.ID]; c.Verdict != want && (want != "" || c.Verdict != "kept") {
			t.Errorf("clause %s is %s: %s", c.ID, c.Verdict, c.Because)
		}
	}
	dir := t.TempDir()
	statement := filepath.Join(dir, "statement.json")
	if err := os.WriteFile(statement, []byte(s.mustCLI("runs", "statement", r.ID)), 0o600); err != nil {
		t.Fatal(err)
	}
	keys := filepath.Join(dir, "keys.json")
	resp, err := client.Get("http://" + s.web + "/.well-known/postern-run-keys.json")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close(), os.WriteFile(keys, doc, 0o600)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(s.bin, "verify-run", statement, "--keys", keys).CombinedOutput(); err != nil || !strings.Contains(string(out), r.ID) {
		t.Errorf("its statement: %v %s", err, out)
	}

	// What the contract refuses, and a disk that is full.
	b = s.boundBox(t)
	b.upload("/work/in.csv", []byte("1\n"))
	_ = b.run("env true")
	if status, _, _ := s.project("DELETE", "/sandboxes/"+b.id, ""); status != http.StatusNoContent {
		t.Fatalf("kill: %d", status)
	}
	if r := s.sessionOf(t, key, b.id); r.Outcome != rest.RunViolated || !strings.Contains(r.Reason, "env") {
		t.Errorf("a program that is not in the contract: %s: %s", r.Outcome, r.Reason)
	}
	b = s.boundBox(t)
	b.upload("/work/in.csv", []byte("1\n"))
	_ = b.run("python3 -c \"f = open('/work/x', 'wb'); f.write(b'x' * (100 << 20)); f.flush()\"") // it may be cut off
	_, _, _ = s.project("DELETE", "/sandboxes/"+b.id, "")                                         // it may have been ended
	if r := s.sessionOf(t, key, b.id); r.Outcome != rest.RunViolated || !strings.Contains(r.Reason, "disk") {
		t.Errorf("over its disk: %s: %s", r.Outcome, r.Reason)
	}

	// A pause: what was written before it is not known any more.
	b = s.boundBox(t)
	b.upload("/work/in.csv", []byte("1\n"))
	_ = b.run("cat /work/in.csv")
	for _, step := range [][2]string{{"pause", `{}`}, {"connect", `{"timeout":300}`}} {
		if status, _, text := s.project("POST", "/sandboxes/"+b.id+"/"+step[0], step[1]); status >= 300 {
			t.Fatalf("%s: %d %s", step[0], status, text)
		}
	}
	_ = b.run("cat /work/in.csv")
	if status, _, _ := s.project("DELETE", "/sandboxes/"+b.id, ""); status != http.StatusNoContent {
		t.Fatalf("kill: %d", status)
	}
	r = s.sessionOf(t, key, b.id)
	if report = s.reportOf(ctx, key, r.ID); r.Outcome != rest.RunSucceeded || clauseOf(report, "commands").Verdict != "kept" || clauseOf(report, "limits").Verdict != "not_verified" {
		t.Errorf("after a pause: %s: %s; %+v %+v", r.Outcome, r.Reason, clauseOf(report, "commands"), clauseOf(report, "limits"))
	}

	// A server that is killed, and the next one.
	b = s.boundBox(t)
	b.upload("/work/in.csv", []byte("1\n"))
	_ = b.run("cat /work/in.csv")
	_ = s.kill(syscall.SIGKILL)
	again := start(t, s.data, "--pool-max", "0")
	again.key, b.s = s.key, again
	key, _ = again.api()
	if r := b.run("cat /work/in.csv"); r.stdout != "1\n" {
		t.Errorf("after kill -9: %+v", r)
	}
	_, _, _ = again.project("DELETE", "/sandboxes/"+b.id, "")
	r = again.sessionOf(t, key, b.id)
	report = again.reportOf(ctx, key, r.ID)
	if r.Outcome != rest.RunSucceeded || clauseOf(report, "commands").Verdict != "kept" || clauseOf(report, "limits").Verdict != "not_verified" || !report.Signed {
		t.Errorf("after kill -9: %s: %s; %+v %+v", r.Outcome, r.Reason, clauseOf(report, "commands"), clauseOf(report, "limits"))
	}
}

// sessionOf waits for the end of the run of a sandbox.
func (s *server) sessionOf(t *testing.T, c *rest.Client, box string) (out rest.Run) {
	t.Helper()
	eventually(t, "the end of the run of "+box, func() bool {
		list, err := c.Runs.List(t.Context(), rest.RunQuery{State: "ended"})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			if r.Sandbox == box {
				out = r
				return true
			}
		}
		return false
	})
	return out
}
