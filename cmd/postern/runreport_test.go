package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"postern/internal/api"
)

func TestReportsPrintViolationsFirst(t *testing.T) {
	zero, hostile := 0, "a\x1b[2J\n"
	r := api.RunReport{
		Run: "run_1", Contract: "report", Outcome: "violated", Kept: 1, Violated: 1, NotVerified: 1,
		Clauses: []api.RunClause{
			{ID: "commands", Verdict: api.ClauseKept, Rank: api.RankKernel, Because: "2 programs"},
			{ID: "files", Verdict: api.ClauseNotVerified, Rank: api.RankNone, Because: hostile},
			{ID: "network", Verdict: api.ClauseViolated, Rank: api.RankWall, Because: "evil.example"},
		},
		Results:  []api.RunCommandResult{{Command: []string{"python3", "a b.py", hostile}, StartedAt: time.Now(), ExitCode: &zero}},
		Programs: api.RunPrograms{Started: 2, Refused: 1, List: []api.RunProgram{{Verdict: "refused", Args: []string{hostile}, Why: hostile}}},
		Writes:   make([]api.RunWrite, 30), Network: []api.RunContact{{Host: hostile, Denied: true, Reason: hostile}},
		Artifacts: []api.RunArtifact{{N: 1, Path: hostile, State: hostile, Reason: hostile}},
		Teardown:  []api.RunTrace{{What: "cgroup", Detail: hostile}},
	}
	var b bytes.Buffer
	if err := printRunReport(&b, r); err != nil {
		t.Fatal(err)
	}
	out := b.String()
	if strings.Contains(out, "\x1b") {
		t.Errorf("an escape sequence is printed: %q", out)
	}
	at := -1
	for _, want := range []string{"violated      network", "not verified  files", "kept          commands", `"a b.py"`, "THE RECORD IS NOT COMPLETE", "… and 10 more", "FOUND  cgroup"} {
		i := strings.Index(out, want)
		if i <= at {
			t.Errorf("%q is not there, or too early:\n%s", want, out)
		}
		at = i
	}
}
