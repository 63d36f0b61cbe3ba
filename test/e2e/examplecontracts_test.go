package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/api"
	"postern/internal/contract"
)

// An exampleJob is a row of examples/contracts/README.md.
type exampleJob struct {
	name, artifact, clause string
	command                []string
	contract, twin         string // texts of the contract and of its wider twin

	exit int    // expected exit code of the command
	has  string // expected beginning of the artifact; empty means that there is none
}

// exampleJobs returns the rows, with the expected results of each.
func exampleJobs(t *testing.T, dir string) (jobs []exampleJob) {
	t.Helper()
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	begins := map[string]string{
		"data-report": "region,cents\r\nnorth,950\r\nsouth,900\r\n", "code-review": "# Review\n\n- repo/util/text.py:1: has 109 columns\n- repo/app.py:2:",
		"dependency-update": "alpha==1.2.9\nbeta==2.0.0\n", "pdf-to-text": "Invoice 2026-11\nTotal: 42.00\n", "test-run": "test_cents", "release-notes": "## New\n\n- export as CSV\n",
		"image-resize": "\x89PNG\r\n\x1a\n", "log-analysis": "      3 200\n      2 404\n      1 500\n", "csv-to-json": `[`, "sql-report": "acme,150\r\nbolt,250\r\n",
		"license-check": "[]", "spell-check": "quik\n", "changelog": "# Changes\n\n- Mend the exporter\n- Add the importer\n", "benchmark": `{"sort_ms": `,
		"lint": "src/bad.py:1: ", "translation-check": `{"missing": ["bye"], "placeholders": ["count"]}`, "backup-verify": "dump.sql\n", "invoice-check": `{"wrong": ["A-2"]}`,
	}
	for line := range strings.Lines(read("README.md")) {
		cells := strings.Split(strings.Trim(line, "|\n "), " | ")
		name, _, ok := strings.Cut(strings.TrimPrefix(cells[0], "["), "]")
		if len(cells) != 5 || !ok {
			continue
		}
		j := exampleJob{
			name: name, command: strings.Fields(strings.Trim(cells[1], "`")), artifact: strings.Trim(cells[2], "`"), clause: cells[4],
			contract: read(name + ".yaml"), twin: read(name + ".wider.yaml"), has: begins[name],
		}
		if j.has == "" {
			j.exit = 3 // it cannot reach its host, because this server denies all connections
		}
		jobs = append(jobs, j)
	}
	return jobs
}

// exampleRun returns a proposal of j with the contract in text, and its inputs by path.
func exampleRun(t *testing.T, dir string, j exampleJob, text string) (n api.NewRun, files map[string][]byte) {
	t.Helper()
	c, err := contract.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	yes, network, credentials := true, len(c.Network.Allow)+len(c.Packages) > 0, len(c.Credentials) > 0
	n = api.NewRun{
		ContractText: text, Task: "example " + j.name, Commands: [][]string{j.command},
		Answers: api.RunAnswers{
			Execution: &yes, Network: &network, Files: &yes, Credentials: &credentials,
			Check: "the run itself", Timeout: "it counts as failed", Cleanup: "the sandbox is destroyed", Export: j.artifact,
		},
	}
	files = map[string][]byte{}
	root := filepath.Join(dir, j.name)
	err = filepath.WalkDir(root, func(p string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		sum := sha256.Sum256(b)
		to := c.Dir() + "/" + filepath.ToSlash(rel)
		n.Inputs = append(n.Inputs, api.NewInput{Path: to, Size: int64(len(b)), SHA256: hex.EncodeToString(sum[:])})
		files[to] = b
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n, files
}

// exampleUpload uploads the inputs of a draft, and proposes it.
func (s *server) exampleUpload(id string, files map[string][]byte) (r api.Run, err error) {
	base := "http://" + s.web + "/v1/runs/" + id
	for path, b := range files {
		req, err := http.NewRequest("PUT", base+"/input?path="+url.QueryEscape(path), strings.NewReader(string(b)))
		if err != nil {
			return r, err
		}
		req.Header.Set("Authorization", "Bearer "+s.key)
		resp, err := client.Do(req)
		if err != nil {
			return r, err
		}
		resp.Body.Close()
		if resp.StatusCode >= 300 {
			return r, fmt.Errorf("upload %s: %s", path, resp.Status)
		}
	}
	status, err := call(client, "POST", base+"/propose", s.key, nil, &r)
	if err == nil && status >= 300 {
		err = fmt.Errorf("propose: status %d", status)
	}
	return r, err
}

// exampleCall is like [call], but a status of 300 or more is an error with the response's
// body.
func exampleCall(c *http.Client, method, url, key string, in, out any) error {
	var raw json.RawMessage
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequest(method, url, bytes.NewReader(b))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if raw, err = io.ReadAll(resp.Body); err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, url, resp.Status, raw)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(raw, out)
}

// exampleApprove approves an action as the operator.
func (s *server) exampleApprove(local *http.Client, action string) error {
	var a struct {
		Version int64
		Digest  string
	}
	if err := exampleCall(local, "GET", "http://local/v1/actions/"+action, "", nil, &a); err != nil {
		return err
	}
	decision := map[string]any{"version": a.Version, "digest": a.Digest, "approve": true}
	return exampleCall(local, "POST", "http://local/v1/actions/"+action+"/decision", "", decision, nil)
}

// playExample performs one job, and approves its start and its artifacts as the operator.
func (s *server) playExample(t *testing.T, dir string, j exampleJob) {
	local := s.local()
	defer local.CloseIdleConnections()
	base := "http://" + s.web + "/v1/runs"
	n, files := exampleRun(t, dir, j, j.contract)
	var r api.Run
	if err := exampleCall(client, "POST", base, s.key, n, &r); err != nil || r.State != api.RunDraft {
		t.Errorf("create: %s, %v", r.State, err)
		return
	}
	r, err := s.exampleUpload(r.ID, files)
	if err != nil || r.State != api.RunProposed || r.Action == "" {
		t.Errorf("propose: %s %s, %v", r.State, r.Reason, err)
		return
	}
	if err := s.exampleApprove(local, r.Action); err != nil {
		t.Error(err)
		return
	}
	// An artifact waits for a person while the run is collecting or after it has ended.
	want := j.has != ""
	approved := map[string]bool{}
	for end := time.Now().Add(3 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if _, err := call(client, "GET", base+"/"+r.ID, s.key, nil, &r); err != nil || time.Now().After(end) {
			t.Errorf("run is %s: %s %v", r.State, r.Reason, err)
			return
		}
		var list api.RunArtifactList
		if _, err := call(client, "GET", base+"/"+r.ID+"/artifacts", s.key, nil, &list); err != nil {
			t.Error(err)
			return
		}
		released := false
		for _, a := range list.Artifacts {
			released = released || a.State == api.ArtifactReleased
			if a.Action != "" && a.State == api.ArtifactWaiting && !approved[a.Action] {
				approved[a.Action] = true
				// With review: flagged the policy may have released it meanwhile.
				if err := s.exampleApprove(local, a.Action); err != nil && !strings.Contains(err.Error(), "/v1/problems/stale") {
					t.Error(err)
				}
			}
		}
		if r.State == api.RunEnded && (released || !want) || r.State == api.RunRefused || r.State == api.RunEnded && r.Outcome != api.RunSucceeded {
			s.checkExample(t, j, r, list.Artifacts)
			return
		}
	}
}

// checkExample checks the outcome, the report and the artifact of one job.
func (s *server) checkExample(t *testing.T, j exampleJob, r api.Run, artifacts []api.RunArtifact) {
	base := "http://" + s.web + "/v1/runs/" + r.ID
	outcome := api.RunSucceeded
	if j.exit != 0 {
		outcome = api.RunFailed
	}
	if r.Outcome != outcome || r.ExitCode == nil || *r.ExitCode != j.exit {
		t.Errorf("%s, %s (%s), exit code %v, %+v", r.State, r.Outcome, r.Reason, r.ExitCode, r.Results)
		var report api.RunReport
		if _, err := call(client, "GET", base+"/report", s.key, nil, &report); err == nil {
			t.Logf("report: %+v", report)
		}
		return
	}
	var report api.RunReport
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		err := exampleCall(client, "GET", base+"/report", s.key, nil, &report)
		if err == nil {
			break
		}
		if time.Now().After(end) {
			t.Error(err)
			return
		}
	}
	for _, c := range report.Clauses {
		if c.Verdict != "kept" {
			t.Errorf("clause %s is %s: %s", c.ID, c.Verdict, c.Because)
		}
	}
	if j.has == "" {
		return
	}
	if len(artifacts) != 1 || filepath.Base(artifacts[0].Path) != j.artifact {
		t.Errorf("artifacts: %+v", artifacts)
		return
	}
	req, err := http.NewRequest("GET", fmt.Sprintf("%s/artifacts/%d", base, artifacts[0].N), nil)
	if err != nil {
		t.Error(err)
		return
	}
	req.Header.Set("Authorization", "Bearer "+s.key)
	resp, err := client.Do(req)
	if err != nil {
		t.Error(err)
		return
	}
	defer resp.Body.Close()
	b := make([]byte, len(j.has))
	if _, err := resp.Body.Read(b); resp.StatusCode != http.StatusOK || string(b) != j.has {
		t.Errorf("artifact: %s, %q, %v; want %q", resp.Status, b, err, j.has)
	}
}

// TestExampleContracts performs the jobs of examples/contracts on a real server. With each
// contract as the boundary, its wider twin is refused, and the refusal names the clause. Then
// each job runs after a review, and its artifact is released.
func TestExampleContracts(t *testing.T) {
	t.Parallel()
	const dir = "../../examples/contracts"
	jobs := exampleJobs(t, dir)
	if len(jobs) != 20 {
		t.Fatalf("%d jobs", len(jobs))
	}
	s := start(t, t.TempDir(), "--memory", "512")
	s.inbox("releases")
	base := "http://" + s.web + "/v1"
	token := map[string]any{"name": "crm-token", "value": "a token of nobody", "hosts": []string{"api.example.com"}, "approval": "first"}
	if status, err := call(client, "POST", base+"/secrets", s.key, token, nil); err != nil || status != http.StatusCreated {
		t.Fatalf("secret: %d, %v", status, err)
	}

	local := s.local()
	defer local.CloseIdleConnections()
	for _, j := range jobs {
		if status, err := call(local, "PUT", "http://local/v1/boundary", "", api.ContractText{Text: j.contract}, nil); err != nil || status >= 300 {
			t.Fatalf("boundary %s: %d, %v", j.name, status, err)
		}
		n, _ := exampleRun(t, dir, j, j.twin)
		n.Inputs = nil
		var r api.Run
		err := exampleCall(client, "POST", base+"/runs", s.key, n, &r)
		if err == nil || !strings.Contains(err.Error(), j.clause) {
			t.Errorf("the twin of %s: %v; want the clause %s", j.name, err, j.clause)
		}
	}
	if status, err := call(local, "DELETE", "http://local/v1/boundary", "", nil, nil); err != nil || status >= 300 {
		t.Fatalf("boundary: %d, %v", status, err)
	}

	s.await("made snapshot of template") // from then on no sandbox has to boot

	var wait sync.WaitGroup
	turn := make(chan struct{}, 4)
	t.Run("runs", func(t *testing.T) {
		for _, j := range jobs {
			wait.Go(func() {
				turn <- struct{}{}
				defer func() { <-turn }()
				t.Run(j.name, func(t *testing.T) { s.playExample(t, dir, j) })
			})
		}
		wait.Wait()
	})
}
