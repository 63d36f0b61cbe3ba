package console_test

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/policy"
	"postern/internal/run"
	"postern/internal/store"
)

// A ledger is a fake of the runs and of what came of them.
type ledger struct {
	runs      []run.Run
	files     map[string]api.RunArtifactList
	reports   map[string]api.RunReport
	cancelled []string
}

// List implements [console.Runs].
func (l *ledger) List(_ context.Context, who auth.Principal, q run.Query) (out []run.Run, _ error) {
	for _, r := range l.runs {
		if r.Project == who.Project && len(out) < q.Limit {
			out = append(out, r)
		}
	}
	return out, nil
}

// Get implements [console.Runs].
func (l *ledger) Get(_ context.Context, who auth.Principal, id string) (run.Run, error) {
	if i := slices.IndexFunc(l.runs, func(r run.Run) bool { return r.ID == id && r.Project == who.Project }); i >= 0 {
		return l.runs[i], nil
	}
	return run.Run{}, fmt.Errorf("run %s: %w", id, store.ErrNotFound)
}

// Cancel implements [console.Runs].
func (l *ledger) Cancel(ctx context.Context, who auth.Principal, id string) (run.Run, error) {
	r, err := l.Get(ctx, who, id)
	if err == nil && r.State.Over() {
		err = run.ErrState
	}
	if err == nil {
		l.cancelled = append(l.cancelled, id)
	}
	return r, err
}

// A shelf is the files of a ledger.
type shelf struct{ *ledger }

// List implements [console.RunFiles].
func (s shelf) List(_ context.Context, _ auth.Principal, id string) (api.RunArtifactList, error) {
	return s.files[id], nil
}

// Open implements [console.RunFiles].
func (s shelf) Open(_ context.Context, _ auth.Principal, id string, n int) (api.RunArtifact, []byte, error) {
	for _, a := range s.files[id].Artifacts {
		if a.N == n && a.State == api.ArtifactReleased {
			return a, []byte("a,b\n"), nil
		}
	}
	return api.RunArtifact{}, nil, store.ErrNotFound
}

// Report implements [console.RunReports].
func (l *ledger) Report(_ context.Context, _ auth.Principal, id string) (api.RunReport, error) {
	if r, ok := l.reports[id]; ok {
		return r, nil
	}
	return api.RunReport{}, store.ErrNotFound
}

// Statement implements [console.RunReports].
func (l *ledger) Statement(_ context.Context, _ auth.Principal, id string) ([]byte, error) {
	if r, ok := l.reports[id]; ok && r.Signed {
		return []byte(`{"payload":""}`), nil
	}
	return nil, store.ErrNotFound
}

const (
	violatedRun = "run_AAAAAAAAAAAAAAAAAAAAAAAAAA"
	waitingRun  = "run_BBBBBBBBBBBBBBBBBBBBBBBBBB"
	foreignRun  = "run_CCCCCCCCCCCCCCCCCCCCCCCCCC"
)

// ofRuns returns a ledger with a run that violated its contract, one that waits, and one of
// another project. Hostile is put into every text that code or an agent chooses.
func ofRuns(t testing.TB, project, hostile string) *ledger {
	t.Helper()
	text := "version: 1\nname: tariff-update\ntemplate: base\ncommands:\n  allow:\n    - run: python3 **\nfiles:\n  write: [/work]\nartifacts:\n  - path: /work/*.csv\n    type: csv\n"
	c, err := contract.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	start := time.Date(2026, 11, 20, 11, 4, 2, 0, time.UTC)
	end := start.Add(22 * time.Second)
	zero, seven := 0, 7
	one := run.Run{
		ID: violatedRun, Project: project, Proposer: "project:crd_ONE", State: run.Ended, Outcome: run.Violated, Reason: "it ran a command that the contract does not name",
		Contract: c, ContractText: text, ContractDigest: c.Digest(), Task: "New tariffs of the EU" + hostile, Commands: [][]string{{"python3", "fetch.py", "--since", "2026-11-19" + hostile}},
		Inputs: []run.Input{{Path: "/work/in.csv" + hostile, Size: 1200, SHA256: strings.Repeat("ab", 32), Received: true}}, Sandbox: "iabcdefghij0123456789",
		Action: "act_" + strings.Repeat("A", 26), Created: start.Add(-4 * time.Minute), Started: start, Ended: end,
		Results: []run.Result{{Command: []string{"python3", "fetch.py", "--since", "2026-11-19" + hostile}, Started: start, Ended: end, Exit: &seven, Stdout: 3100, Stderr: 210}},
	}
	waiting := one
	waiting.ID, waiting.State, waiting.Outcome, waiting.Reason, waiting.Sandbox, waiting.Results = waitingRun, run.Proposed, "", "", "", nil
	waiting.Started, waiting.Ended = time.Time{}, time.Time{}
	foreign := one
	foreign.ID, foreign.Project = foreignRun, "another"
	report := api.RunReport{
		Run: violatedRun, Contract: "tariff-update", Outcome: api.RunViolated, Kept: 8, Violated: 1, NotVerified: 2, Signed: true,
		Clauses: []api.RunClause{
			{ID: "files", Text: "It writes to /work alone.", Verdict: api.ClauseKept, Rank: api.RankKernel, Because: "3 paths were opened for writing, all below /work" + hostile},
			{ID: "commands", Text: "It starts python3 with any arguments.", Verdict: api.ClauseViolated, Rank: api.RankKernel, Because: "curl -O https://tariffs.example/eu.csv was refused" + hostile},
			{ID: "limits", Text: "At most 10 minutes, 512 MiB and 1 CPU.", Verdict: api.ClauseNotVerified, Rank: api.RankNone, Because: "no sample was taken"},
			{ID: "network", Text: "It connects nowhere.", Verdict: api.ClauseKept, Rank: api.RankWall, Because: "no connection"},
			{ID: "teardown", Text: "Its sandbox is destroyed at its end.", Verdict: api.ClauseKept, Rank: api.RankHost, Because: "5 of 5 traces are gone"},
		},
		Programs: api.RunPrograms{Started: 3, Refused: 1, Complete: true, List: []api.RunProgram{
			{At: start, Path: "/usr/bin/python3.11", Args: []string{"python3", "fetch.py"}, Verdict: "allowed", ExitCode: &zero, Micros: 1},
			{At: end, Path: "/usr/bin/curl" + hostile, Args: []string{"curl", "-O", hostile}, Verdict: "refused", Why: "the contract does not name it"},
		}},
		Writes:    []api.RunWrite{{Path: "/work/out.csv" + hostile, Count: 2}, {Path: "/etc/passwd", Count: 1, Refused: 1, Error: "permission denied"}},
		Network:   []api.RunContact{{At: end, What: "egress.denied", Host: "tariffs.example" + hostile, Count: 1, Denied: true, Reason: "not in the contract"}},
		Usage:     api.RunUsage{MemoryBytes: 140 << 20, DiskBytes: 3 << 20, CPUMicros: 19_400_000, OutputBytes: 3310, Samples: 20},
		Decisions: []api.RunDecision{{Action: one.Action, Kind: "run.start", State: api.StateDone, Decider: "person:ann", Reason: hostile}},
		Teardown:  []api.RunTrace{{What: "processes", Gone: true, Detail: "no process of its user", At: end}, {What: "network link", Gone: true, Detail: "no link", At: end}},
	}
	return &ledger{
		runs:    []run.Run{waiting, one, foreign},
		reports: map[string]api.RunReport{violatedRun: report, foreignRun: report},
		files: map[string]api.RunArtifactList{violatedRun: {Collected: true, Missing: []string{"/work/summary.csv"}, Artifacts: []api.RunArtifact{
			{N: 1, Path: "/work/tariffs.csv" + hostile, Name: "tariffs.csv", Type: "csv", Size: 28000, SHA256: strings.Repeat("d1", 32), State: api.ArtifactWaiting, Action: "act_" + strings.Repeat("B", 26), Flags: []string{"personal_data"}},
			{N: 2, Path: "/work/changes.csv", Name: "changes" + hostile + ".csv", Type: "csv", Size: 41, SHA256: strings.Repeat("08", 32), State: api.ArtifactReleased, Action: "act_" + strings.Repeat("C", 26)},
			{N: 3, Path: "/work/x.csv", Name: "x.csv", Type: "csv", Size: 312, SHA256: strings.Repeat("55", 32), State: api.ArtifactRefused, Reason: "it is a program" + hostile},
		}}, foreignRun: {Artifacts: []api.RunArtifact{{N: 1, State: api.ArtifactReleased}}}},
	}
}

// TestRunPages: a person sees what a run did, the worst first, gets what was released and
// the statement, and cancels a run that waits.
func TestRunPages(t *testing.T) {
	f := setup(t)
	f.enter()
	contains(t, "empty page", f.get("/console/runs").body, "No runs yet")
	*f.runs = *ofRuns(t, f.project.Project, "")
	contains(t, "list", f.get("/console/runs").body, "tariff-update", "contract violated", "waiting for review", "22.0 s")
	page := f.get("/console/runs/" + violatedRun).body
	contains(t, "page", page,
		"contract violated", "1 clause was violated", "not verified", "python3 fetch.py --since 2026-11-19", "permission denied", "no sample was taken",
		"Required but missing", "Decide", "2 of 2 traces are gone", "Download the statement", "140 MiB at most", "it is a program", "personal data")
	if v, k := strings.Index(page, ">violated</span></td>"), strings.Index(page, ">kept</span></td>"); v < 0 || k < v {
		t.Errorf("a violated clause is at %d, a kept one at %d: want the worst first", v, k)
	}
	if strings.Contains(page, "cancel-form") {
		t.Error("a run that is over can be cancelled")
	}
	waits := f.get("/console/runs/" + waitingRun).body
	contains(t, "waiting", waits, "Review", "What the contract allows", "No command was started", "cancel-form")
	if got := f.bytes("/console/runs/" + violatedRun + "/artifacts/2"); got.status != http.StatusOK || got.body != "a,b\n" || !strings.HasPrefix(got.header.Get("Content-Disposition"), "attachment") {
		t.Errorf("released file: %d %q %v", got.status, got.body, got.header)
	}
	if got := f.bytes("/console/runs/" + violatedRun + "/statement"); got.status != http.StatusOK || !strings.HasPrefix(got.header.Get("Content-Disposition"), "attachment") {
		t.Errorf("statement: %d", got.status)
	}
	if got := f.submit("/console/runs/"+waitingRun+"/cancel", url.Values{}); got.status != http.StatusSeeOther || !slices.Equal(f.runs.cancelled, []string{waitingRun}) {
		t.Errorf("cancel: %d, %v", got.status, f.runs.cancelled)
	}
	if got := f.submit("/console/runs/"+violatedRun+"/cancel", url.Values{}); got.status != http.StatusConflict || !strings.Contains(got.body, "changed nothing") {
		t.Errorf("cancel a run that is over: %d", got.status)
	}
}

// TestRunPageShowsWhatWaits: the page of a run leads to what its sandbox wants to do and
// waits for, and to nothing of other sandboxes.
func TestRunPageShowsWhatWaits(t *testing.T) {
	f := setup(t)
	f.enter()
	*f.runs = *ofRuns(t, f.project.Project, "")
	a := f.requested(policy.KindRequest, order())
	r := &f.runs.runs[0]
	r.State, r.Outcome, r.Ended = run.Running, "", time.Time{}
	link := "/console/actions/" + a.ID
	if page := f.get("/console/runs/" + r.ID).body; strings.Contains(page, link) {
		t.Error("the page of a run leads to an action of another sandbox")
	}
	_, r.Sandbox, _ = strings.Cut(a.Proposer, ":")
	contains(t, "page", f.get("/console/runs/"+r.ID).body, link, "waits for a person")
}

// TestRunsOfOthersAreNotThere: the pages tell nothing of another project's runs, and give
// nothing that was not released.
func TestRunsOfOthersAreNotThere(t *testing.T) {
	f := setup(t)
	f.enter()
	*f.runs = *ofRuns(t, f.project.Project, "")
	if body := f.get("/console/runs").body; strings.Contains(body, foreignRun) {
		t.Error("the list has another project's run")
	}
	for _, path := range []string{foreignRun, foreignRun + "/artifacts/1", foreignRun + "/statement", "run_X", "..%2f..%2fetc", violatedRun + "/artifacts/1", violatedRun + "/artifacts/3", violatedRun + "/artifacts/x", violatedRun + "/artifacts/9", waitingRun + "/statement"} {
		if got := f.get("/console/runs/" + path); got.status != http.StatusNotFound {
			t.Errorf("%s: %d, want 404", path, got.status)
		}
	}
	if got := f.submit("/console/runs/"+foreignRun+"/cancel", url.Values{}); got.status != http.StatusNotFound || len(f.runs.cancelled) > 0 {
		t.Errorf("cancel another project's run: %d, %v", got.status, f.runs.cancelled)
	}
}

// TestRunPagesShowHostileText: what code in a sandbox chose is text on the pages, and
// invisible characters are visible.
func TestRunPagesShowHostileText(t *testing.T) {
	f := setup(t)
	f.enter()
	*f.runs = *ofRuns(t, f.project.Project, "<script>alert(1)</script>\"'\u202e\x1b[2J\nx")
	for _, path := range []string{"/console/runs", "/console/runs/" + violatedRun, "/console/runs/" + waitingRun} {
		got := f.get(path) // which checks that the page is well formed
		if got.status != http.StatusOK {
			t.Fatalf("%s: %d\n%s", path, got.status, got.body)
		}
		for _, bad := range []string{"<script>alert", "\u202e", "\x1b"} {
			if strings.Contains(got.body, bad) {
				t.Errorf("%s has %q", path, bad)
			}
		}
	}
	if got := f.bytes("/console/runs/" + violatedRun + "/artifacts/2"); got.status != http.StatusOK || strings.ContainsAny(got.header.Get("Content-Disposition"), "<>\n") {
		t.Errorf("download: %d, %q", got.status, got.header.Get("Content-Disposition"))
	}
}
