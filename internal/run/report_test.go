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

// contractText is a contract with something in every clause.
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

// good returns a run of which everything is known, and in which nothing went wrong.
func good(t *testing.T) *seen {
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
	return &seen{
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
	never := func(s *seen) { s.run.Started = time.Time{} }
	nowhere := func(s *seen) { s.run.Sandbox = "" }
	for _, tt := range []struct {
		clause, verdict string
		name            string
		change          func(s *seen)
	}{
		{"commands", api.ClauseKept, "one was refused before it ran", func(s *seen) { s.record.Refused = 1 }},
		{"commands", api.ClauseViolated, "the judge says so", func(s *seen) {
			s.e.Violations = []Violation{{Clause: "commands", Text: "curl was started", Rank: ByKernel}}
		}},
		{"commands", api.ClauseViolated, "the judge says so, and the record is lost", func(s *seen) {
			s.e.Violations, s.record = []Violation{{Clause: "commands", Text: "curl was started"}}, nil
		}},
		{"commands", api.ClauseNotVerified, "no record", func(s *seen) { s.record = nil }},
		{"commands", api.ClauseNotVerified, "the kernel lost events", func(s *seen) { s.record.Missed = 1 }},
		{"commands", api.ClauseNotVerified, "a damaged record", func(s *seen) { s.record.Complete = false }},
		{"commands", api.ClauseNotVerified, "a record of an unbound sandbox", func(s *seen) { s.record.Contract = "" }},
		{"commands", api.ClauseNotVerified, "a record of another contract", func(s *seen) { s.record.Contract = "report@sha256:" + strings.Repeat("0", 64) }},
		{"commands", api.ClauseNotVerified, "it was not confined", func(s *seen) { s.e.Confined = time.Time{} }},

		{"files", api.ClauseKept, "as it was", func(*seen) {}},
		{"files", api.ClauseViolated, "a write elsewhere", func(s *seen) {
			s.record.Opens = append(s.record.Opens, command.Opened{Path: "/work/outside", Time: time.Now()})
		}},
		{"files", api.ClauseViolated, "a write beside, by dots", func(s *seen) {
			s.record.Opens = append(s.record.Opens, command.Opened{Path: "/work/out/../x", Time: time.Now()})
		}},
		{"files", api.ClauseNotVerified, "opens were not recorded", func(s *seen) { s.e.Traced = false }},
		{"files", api.ClauseNotVerified, "the list of opens is short", func(s *seen) { s.record.Dropped = 1 }},

		{"inputs", api.ClauseKept, "as it was", func(*seen) {}},
		{"inputs", api.ClauseViolated, "a file that the contract does not name", func(s *seen) {
			s.run.Inputs = append(s.run.Inputs, Input{Path: "/etc/x", Received: true})
		}},
		{"inputs", api.ClauseViolated, "a required one is not there", func(s *seen) { s.run.Inputs = nil }},
		{"inputs", api.ClauseNotVerified, "it was not received", func(s *seen) { s.run.Inputs[0].Received = false }},
		{"inputs", api.ClauseNotVerified, "it did not start", never},

		{"network", api.ClauseKept, "as it was", func(*seen) {}},
		{"network", api.ClauseViolated, "a connection elsewhere", func(s *seen) {
			s.run.Contract.Packages = nil
			s.network = append(s.network, api.RunContact{What: wallConnected, Host: "evil.example", Address: "93.184.216.35:443", Count: 1})
		}},
		{"network", api.ClauseNotVerified, "a connection elsewhere, which may be a mirror", func(s *seen) {
			s.network = append(s.network, api.RunContact{What: wallConnected, Host: "mirror.example", Address: "93.184.216.35:443", Count: 1})
		}},
		{"network", api.ClauseNotVerified, "not every event was written", func(s *seen) { s.networkCut = "events were only counted" }},
		{"network", api.ClauseNotVerified, "there was no sandbox", nowhere},

		{"packages", api.ClauseKept, "as it was", func(*seen) {}},
		{"packages", api.ClauseViolated, "the judge says so", func(s *seen) { s.e.Violations = []Violation{{Clause: "packages", Text: "npm install", Rank: ByKernel}} }},
		{"packages", api.ClauseNotVerified, "no record", func(s *seen) { s.record = nil }},

		{"credentials", api.ClauseKept, "as it was", func(*seen) {}},
		{"credentials", api.ClauseViolated, "a placeholder went elsewhere", func(s *seen) {
			s.network = append(s.network, api.RunContact{What: wallMisdirected, Host: "evil.example", Count: 1, Denied: true})
		}},
		{"credentials", api.ClauseNotVerified, "not every event was written", func(s *seen) { s.networkCut = "events were only counted" }},

		{"mail", api.ClauseKept, "as it was", func(*seen) {}},
		{"mail", api.ClauseViolated, "too many", func(s *seen) { s.mails = make([]api.RunMail, 3) }},
		{"mail", api.ClauseViolated, "without an inbox", func(s *seen) { s.run.Contract.Mail = contract.Mail{} }},
		{"mail", api.ClauseNotVerified, "there was no sandbox", nowhere},

		{"limits", api.ClauseKept, "as it was", func(*seen) {}},
		{"limits", api.ClauseViolated, "the time", func(s *seen) { s.e.Limits = []Reached{{Name: "time", Limit: 60_000_000}} }},
		{"limits", api.ClauseNotVerified, "nothing was measured", func(s *seen) { s.e.Usage.Samples = 0 }},
		{"limits", api.ClauseNotVerified, "processes may be left", func(s *seen) { s.e.Killed = false }},

		{"on_failure", api.ClauseKept, "as it was", func(*seen) {}},
		{"on_failure", api.ClauseViolated, "it went on after a failure", func(s *seen) { s.run.Results[0].Exit = &one }},
		{"on_failure", api.ClauseKept, "it went on, and was allowed to", func(s *seen) {
			s.run.Results[0].Exit, s.run.Contract.OnFailure.Exit = &one, "continue"
		}},
		{"on_failure", api.ClauseNotVerified, "it did not start", never},

		{"artifacts", api.ClauseKept, "as it was", func(*seen) {}},
		{"artifacts", api.ClauseViolated, "a required one is missing", func(s *seen) { s.collected.missing = []string{"/work/out/*.csv"} }},
		{"artifacts", api.ClauseNotVerified, "not collected", func(s *seen) { s.collected = nil }},
		{"artifacts", api.ClauseNotVerified, "not all collected", func(s *seen) { s.collected.incomplete = "the guest is gone" }},

		{"teardown", api.ClauseKept, "as it was", func(*seen) {}},
		{"teardown", api.ClauseViolated, "something was found", func(s *seen) { s.traces = append(s.traces, api.RunTrace{What: "cgroup"}) }},
		{"teardown", api.ClauseNotVerified, "nothing was looked for", func(s *seen) { s.e.Teardown = nil }},
		{"teardown", api.ClauseNotVerified, "it is kept", func(s *seen) { s.e.Gone, s.e.Kept = time.Time{}, late }},
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
		// Where one clause is not kept, what has other evidence is.
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

// TestNothingIsKeptInALostRun: missing evidence is never success, and what was seen to be
// violated stays so.
func TestNothingIsKeptInALostRun(t *testing.T) {
	for _, change := range []func(s *seen){
		func(s *seen) { s.run.Outcome = Lost },
		func(s *seen) { s.e.Complete = false },
		func(s *seen) { s.e = Evidence{} },
		func(s *seen) { *s = seen{run: Run{Contract: s.run.Contract, Outcome: Cancelled}} },
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
