package run

import (
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/api"
	"postern/internal/attest"
	"postern/internal/command"
	"postern/internal/contract"
	"postern/internal/sandbox"
)

// contractText is a contract in which every clause has an entry.
const contractText = `
version: 1
name: report
commands: {allow: [{run: "python3 **"}]}
files:
  write: [/work/out]
  inputs: [{path: /work/in.csv, required: true}]
network: {allow: [feed.example]}
packages: [{manager: pypi, pinned: true}]
credentials: [{secret: feed, hosts: [feed.example]}]
mail: {inbox: reports@agents.example, max: 2}
limits: {time: 1m}
artifacts: [{path: /work/out/*.csv, type: csv, required: true}]
`

// good returns the evidence of a run in which nothing went wrong.
func good(t *testing.T) *observations {
	t.Helper()
	c, err := contract.Parse([]byte(contractText))
	if err != nil {
		t.Fatal(err)
	}
	at := time.Now()
	zero := 0
	r := Run{
		ID: "run_1", Project: "prj_1", Sandbox: "i1", Contract: c, ContractDigest: c.Digest(), State: Ended, Outcome: Succeeded,
		Created: at.Add(-time.Minute), Started: at.Add(-30 * time.Second), Ended: at,
		Inputs:  []Input{{Path: "/work/in.csv", Size: 3, SHA256: strings.Repeat("a", 64), Received: true}},
		Results: []Result{{Command: []string{"python3", "a.py"}, Started: at, Ended: at, Exit: &zero}, {Command: []string{"python3", "b.py"}, Started: at, Ended: at, Exit: &zero}},
	}
	return &observations{
		run: r,
		e:   Evidence{Complete: true, Confined: at, Traced: true, Killed: true, Usage: Usage{MemoryBytes: 1 << 20, Samples: 3}, Gone: at, Teardown: []sandbox.Trace{{What: "processes", Gone: true}}},
		record: &command.Record{
			Contract: "report@" + c.Digest(), Started: 2, Complete: true, SHA256: strings.Repeat("b", 64),
			Opens: []command.Opened{{Path: "/work/out/a.csv", Time: at}, {Path: "/etc/passwd", Err: 13, Time: at}, {Path: "/dev/null", Time: at}, {Path: "/.cover/file"}, {Path: "/run/postern/view/passwd", Time: at}},
		},
		network: []api.RunContact{
			{What: wallConnected, Host: "feed.example", Address: "93.184.216.34:443", Count: 2},
			{What: wallRequest, Host: "feed.example", Address: "93.184.216.34:443", Method: "GET", Count: 3},
			{What: wallDenied, Host: "evil.example", Address: "93.184.216.35:443", Count: 1, Denied: true},
		},
		mails: []api.RunMail{{Action: "act_1"}}, artifacts: []api.RunArtifact{{N: 1, State: api.ArtifactWaiting}}, collected: &collection{},
		traces: []api.RunTrace{{What: "processes", Gone: true}},
	}
}

func TestClausesAreJudgedByEvidence(t *testing.T) {
	one, late := 1, time.Now().Add(time.Hour)
	never := func(s *observations) { s.run.Started = time.Time{} }
	nowhere := func(s *observations) { s.run.Sandbox = "" }
	for _, tt := range []struct {
		clause, verdict string
		name            string
		change          func(s *observations)
	}{
		{"commands", api.ClauseKept, "one was refused before it ran", func(s *observations) { s.record.Refused = 1 }},
		{"commands", api.ClauseViolated, "the judge says so", func(s *observations) {
			s.e.Violations = []Violation{{Clause: "commands", Text: "curl was started", Rank: ByKernel}}
		}},
		{"commands", api.ClauseViolated, "the judge says so, and the record is lost", func(s *observations) {
			s.e.Violations, s.record = []Violation{{Clause: "commands", Text: "curl was started"}}, nil
		}},
		{"commands", api.ClauseNotVerified, "no record", func(s *observations) { s.record = nil }},
		{"commands", api.ClauseNotVerified, "the kernel lost events", func(s *observations) { s.record.Missed = 1 }},
		{"commands", api.ClauseNotVerified, "a damaged record", func(s *observations) { s.record.Complete = false }},
		{"commands", api.ClauseNotVerified, "a record of an unbound sandbox", func(s *observations) { s.record.Contract = "" }},
		{"commands", api.ClauseNotVerified, "a record of another contract", func(s *observations) { s.record.Contract = "report@sha256:" + strings.Repeat("0", 64) }},
		{"commands", api.ClauseNotVerified, "it was not confined", func(s *observations) { s.e.Confined = time.Time{} }},

		{"files", api.ClauseKept, "as it was", func(*observations) {}},
		{"files", api.ClauseViolated, "a write elsewhere", func(s *observations) {
			s.record.Opens = append(s.record.Opens, command.Opened{Path: "/work/outside", Time: time.Now()})
		}},
		{"files", api.ClauseViolated, "a write beside, by dots", func(s *observations) {
			s.record.Opens = append(s.record.Opens, command.Opened{Path: "/work/out/../x", Time: time.Now()})
		}},
		{"files", api.ClauseNotVerified, "opens were not recorded", func(s *observations) { s.e.Traced = false }},
		{"files", api.ClauseNotVerified, "the list of opens is short", func(s *observations) { s.record.Dropped = 1 }},

		{"inputs", api.ClauseKept, "as it was", func(*observations) {}},
		{"inputs", api.ClauseViolated, "a file that the contract does not name", func(s *observations) {
			s.run.Inputs = append(s.run.Inputs, Input{Path: "/etc/x", Received: true})
		}},
		{"inputs", api.ClauseViolated, "a required one is not there", func(s *observations) { s.run.Inputs = nil }},
		{"inputs", api.ClauseNotVerified, "it was not received", func(s *observations) { s.run.Inputs[0].Received = false }},
		{"inputs", api.ClauseNotVerified, "it did not start", never},

		{"network", api.ClauseKept, "as it was", func(*observations) {}},
		{"network", api.ClauseViolated, "a connection elsewhere", func(s *observations) {
			s.run.Contract.Packages = nil
			s.network = append(s.network, api.RunContact{What: wallConnected, Host: "evil.example", Address: "93.184.216.35:443", Count: 1})
		}},
		{"network", api.ClauseNotVerified, "a connection elsewhere, which may be a mirror", func(s *observations) {
			s.network = append(s.network, api.RunContact{What: wallConnected, Host: "mirror.example", Address: "93.184.216.35:443", Count: 1})
		}},
		{"network", api.ClauseNotVerified, "not every event was written", func(s *observations) { s.networkCut = "events were only counted" }},
		{"network", api.ClauseNotVerified, "there was no sandbox", nowhere},

		{"packages", api.ClauseKept, "as it was", func(*observations) {}},
		{"packages", api.ClauseViolated, "the judge says so", func(s *observations) {
			s.e.Violations = []Violation{{Clause: "packages", Text: "npm install", Rank: ByKernel}}
		}},
		{"packages", api.ClauseNotVerified, "no record", func(s *observations) { s.record = nil }},

		{"credentials", api.ClauseKept, "as it was", func(*observations) {}},
		{"credentials", api.ClauseViolated, "a placeholder went elsewhere", func(s *observations) {
			s.network = append(s.network, api.RunContact{What: wallMisdirected, Host: "evil.example", Count: 1, Denied: true})
		}},
		{"credentials", api.ClauseNotVerified, "not every event was written", func(s *observations) { s.networkCut = "events were only counted" }},

		{"mail", api.ClauseKept, "as it was", func(*observations) {}},
		{"mail", api.ClauseViolated, "too many", func(s *observations) { s.mails = make([]api.RunMail, 3) }},
		{"mail", api.ClauseViolated, "without an inbox", func(s *observations) { s.run.Contract.Mail = contract.Mail{} }},
		{"mail", api.ClauseNotVerified, "there was no sandbox", nowhere},

		{"limits", api.ClauseKept, "as it was", func(*observations) {}},
		{"limits", api.ClauseViolated, "the time", func(s *observations) { s.e.Limits = []Reached{{Name: "time", Limit: 60_000_000}} }},
		{"limits", api.ClauseNotVerified, "nothing was measured", func(s *observations) { s.e.Usage.Samples = 0 }},
		{"limits", api.ClauseNotVerified, "processes may be left", func(s *observations) { s.e.Killed = false }},

		{"on_failure", api.ClauseKept, "as it was", func(*observations) {}},
		{"on_failure", api.ClauseViolated, "it went on after a failure", func(s *observations) { s.run.Results[0].Exit = &one }},
		{"on_failure", api.ClauseKept, "it went on, and was allowed to", func(s *observations) {
			s.run.Results[0].Exit, s.run.Contract.OnFailure.Exit = &one, "continue"
		}},
		{"on_failure", api.ClauseNotVerified, "it did not start", never},

		{"artifacts", api.ClauseKept, "as it was", func(*observations) {}},
		{"artifacts", api.ClauseViolated, "a required one is missing", func(s *observations) { s.collected.missing = []string{"/work/out/*.csv"} }},
		{"artifacts", api.ClauseNotVerified, "not collected", func(s *observations) { s.collected = nil }},
		{"artifacts", api.ClauseNotVerified, "not all collected", func(s *observations) { s.collected.incomplete = "the guest is gone" }},

		{"teardown", api.ClauseKept, "as it was", func(*observations) {}},
		{"teardown", api.ClauseViolated, "something was found", func(s *observations) { s.traces = append(s.traces, api.RunTrace{What: "cgroup"}) }},
		{"teardown", api.ClauseNotVerified, "nothing was looked for", func(s *observations) { s.e.Teardown = nil }},
		{"teardown", api.ClauseNotVerified, "it is kept", func(s *observations) { s.e.Gone, s.e.Kept = time.Time{}, late }},
	} {
		s := good(t)
		tt.change(s)
		got := s.judge()
		i := slices.IndexFunc(got, func(c api.RunClause) bool { return c.ID == tt.clause })
		if i < 0 || got[i].Verdict != tt.verdict || got[i].Because == "" || got[i].Text == "" {
			t.Errorf("%s, %s: %+v, want %s", tt.clause, tt.name, got[max(i, 0)], tt.verdict)
			continue
		}
		if got[i].Verdict == api.ClauseKept && got[i].Rank == attest.RankNone {
			t.Errorf("%s, %s: kept without evidence", tt.clause, tt.name)
		}
		// The other clauses are judged as well.
		if len(got) != len(attest.ClauseIDs()) {
			t.Errorf("%s, %s: %d clauses", tt.clause, tt.name, len(got))
		}
	}
	for _, c := range good(t).judge() {
		if c.Verdict != api.ClauseKept {
			t.Errorf("a run in which nothing went wrong: %+v", c)
		}
	}
}

// TestNothingIsKeptInALostRun: missing evidence is never success, but an observed
// violation stays one.
func TestNothingIsKeptInALostRun(t *testing.T) {
	for _, change := range []func(s *observations){
		func(s *observations) { s.run.Outcome = Lost },
		func(s *observations) { s.e.Complete = false },
		func(s *observations) { s.e = Evidence{} },
		func(s *observations) { *s = observations{run: Run{Contract: s.run.Contract, Outcome: Cancelled}} },
	} {
		s := good(t)
		change(s)
		for _, c := range s.judge() {
			if c.Verdict != api.ClauseNotVerified {
				t.Errorf("%s is %s: %s", c.ID, c.Verdict, c.Because)
			}
		}
		s.e.Violations = []Violation{{Clause: "network", Text: "x"}}
		for _, c := range s.judge() {
			if (c.Verdict == api.ClauseViolated) != (c.ID == "network") {
				t.Errorf("with a violation: %s is %s", c.ID, c.Verdict)
			}
		}
	}
}
