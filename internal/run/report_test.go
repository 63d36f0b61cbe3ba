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
	"postern/internal/policy"
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
		e:   Evidence{Complete: true, Confined: at, Traced: true, Killed: true, Usage: Usage{MemoryBytes: 1 << 20, MemoryMost: 2 << 30, Samples: 3, Final: true}, Operator: &Opened{}, Gone: at, Teardown: []sandbox.Trace{{What: "processes", Gone: true}}},
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
		{"network", api.ClauseViolated, "a connection elsewhere, and no mirror", func(s *observations) {
			s.network = append(s.network, api.RunContact{What: wallConnected, Host: "mirror.example", Address: "93.184.216.35:443", Count: 1})
		}},
		{"network", api.ClauseKept, "a private address that the operator opened", func(s *observations) {
			s.e.Operator.Allow = []string{"192.0.2.2"}
			s.network = append(s.network, api.RunContact{What: wallRequest, Host: "feed.example", Address: "192.0.2.2:443", Count: 3})
		}},
		{"network", api.ClauseKept, "a private prefix that the operator opened, for a plain connection", func(s *observations) {
			s.e.Operator.Allow = []string{"10.1.0.0/16"}
			s.network = append(s.network, api.RunContact{What: wallConnected, Host: "feed.example", Address: "10.1.2.3:80", Count: 1})
		}},
		{"network", api.ClauseViolated, "another host at an address that the operator opened", func(s *observations) {
			s.e.Operator.Allow = []string{"192.0.2.2"}
			s.network = append(s.network, api.RunContact{What: wallConnected, Host: "other.example", Address: "192.0.2.2:443", Count: 1})
		}},
		{"network", api.ClauseViolated, "a private address that nobody opened", func(s *observations) {
			s.network = append(s.network, api.RunContact{What: wallConnected, Host: "feed.example", Address: "10.1.2.3:443", Count: 1})
		}},
		{"network", api.ClauseKept, "the operator's mirror at a private address", func(s *observations) {
			s.e.Operator.Mirrors = []policy.Mirror{{Registry: "pypi", URL: "http://mirror.test:3141/simple"}}
			s.network = append(s.network, api.RunContact{What: wallRequest, Host: "mirror.test", Address: "10.0.0.7:3141", Count: 2})
		}},
		{"network", api.ClauseViolated, "a mirror of a registry that the contract does not name", func(s *observations) {
			s.e.Operator.Mirrors = []policy.Mirror{{Registry: "npm", URL: "http://mirror.test:4873"}}
			s.network = append(s.network, api.RunContact{What: wallRequest, Host: "mirror.test", Address: "10.0.0.7:4873", Count: 2})
		}},
		{"network", api.ClauseNotVerified, "a connection elsewhere, which may be a mirror", func(s *observations) {
			s.e.Operator = nil // evidence of an earlier version
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
		{"limits", api.ClauseNotVerified, "nothing was measured at the end", func(s *observations) { s.e.Usage.Final = false }},
		{"limits", api.ClauseViolated, "the last measure of the disk is over the limit", func(s *observations) { s.e.Usage.DiskBytes = 1<<30 + 1 }},
		{"limits", api.ClauseViolated, "the output is over the limit", func(s *observations) { s.e.Usage.OutputBytes = 1<<20 + 1 }},
		{"limits", api.ClauseViolated, "the memory is over the bound of the host's kernel", func(s *observations) { s.e.Usage.MemoryBytes = 3 << 30 }},
		{"limits", api.ClauseKept, "exactly the limits", func(s *observations) {
			s.e.Usage.DiskBytes, s.e.Usage.OutputBytes, s.e.Usage.MemoryBytes = 1<<30, 1<<20, 2<<30
		}},
		{"limits", api.ClauseKept, "a process was ended for memory", func(s *observations) { s.e.Limits = []Reached{{Name: "memory", Limit: 1 << 30, Seen: 1 << 29}} }},

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
		for _, c := range got {
			if (c.Evidence == "none") != (c.Rank == attest.RankNone) || c.Evidence == "" {
				t.Errorf("%s, %s: clause %s of rank %s names the evidence %q", tt.clause, tt.name, c.ID, c.Rank, c.Evidence)
			}
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

// TestOutOfMemoryIsNamed: the limit held, and the clause says that it was reached.
func TestOutOfMemoryIsNamed(t *testing.T) {
	for _, change := range []func(e *Evidence){
		func(e *Evidence) { e.Limits = []Reached{{Name: "memory", Limit: 96 << 20, Seen: 32 << 20}} },
		func(e *Evidence) { e.Usage.MemoryKills = 1 },
	} {
		s := good(t)
		change(&s.e)
		if f := s.limits(); f.verdict != api.ClauseKept || !strings.Contains(f.because, "The limit of memory (") {
			t.Errorf("%+v", f)
		}
	}
}

// TestCutTextsStayWithinTheirLimit counts the mark of what was cut off.
func TestCutTextsStayWithinTheirLimit(t *testing.T) {
	for _, text := range []string{strings.Repeat("x", 5000), strings.Repeat("ü", 5000), strings.Repeat("€", 5000)} {
		for _, most := range []int{1, 2, 3, 4, 5, 1024, 4999, 5000, 20000} {
			var out tail
			_, _ = out.Write([]byte(text))
			if got := out.text(most); len(got) > most || !strings.HasSuffix(text, strings.TrimPrefix(got, "…")) || most >= 8 && len(got) < min(most, len(text))-4 {
				t.Errorf("%d bytes of an end are %d: %.20q", most, len(got), got)
			}
			if most < 4 {
				continue
			}
			if got := bounded(text, most); len(got) > most || !strings.HasPrefix(text, strings.TrimSuffix(got, "…")) {
				t.Errorf("%d bytes of a beginning are %d: %.20q", most, len(got), got)
			}
		}
	}
}
