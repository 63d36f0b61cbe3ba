package run

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/api"
	"postern/internal/attest"
	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/contract"
	"postern/internal/permit"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

type proofFixture struct {
	*exportFixture
	p      *Prover
	key    attest.Key
	record *command.Record
	lent   bool
}

func setupProof(t *testing.T, db *store.DB) *proofFixture {
	t.Helper()
	f := &proofFixture{exportFixture: setupExports(t, db)}
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	f.key = attest.Key{ID: attest.KeyID(public), Server: "agents.test/runs", Public: public}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	f.p, err = NewProver(log, db, f.x, ProverConfig{
		Server:  "agents.test/runs",
		Signer:  func(context.Context) (string, crypto.Signer, error) { return f.key.ID, private, nil },
		Permits: permit.New(log, db, f.gate, permit.Config{}),
		Lent:    func(string) bool { return f.lent },
		Records: func(context.Context, string) (command.Record, error) {
			if f.record == nil {
				return command.Record{}, store.ErrNotFound
			}
			return *f.record, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// wall records an event at the wall of a sandbox.
func (f *proofFixture) wall(box string, verb audit.Verb, fields audit.Fields) {
	f.t.Helper()
	who := auth.Principal{Kind: auth.Sandbox, ID: box, Project: f.owner.Project}
	err := f.db.UpdateIn(f.t.Context(), store.Thing(who.Project, who.ID), func(tx *store.Tx) error {
		return audit.Append(f.t.Context(), tx, who, verb, box, fields)
	})
	if err != nil {
		f.t.Fatal(err)
	}
}

// done returns a run that has ended, with all evidence, and its files collected.
func (f *proofFixture) done(id string) (Run, Evidence) {
	f.t.Helper()
	c, err := contract.Parse([]byte(contractText))
	if err != nil {
		f.t.Fatal(err)
	}
	zero, at := 0, time.Now().Add(-time.Minute)
	r := Run{
		ID: id, Project: f.owner.Project, Sandbox: "ibox" + id[4:], Proposer: "agent:crd_1", Contract: c, ContractDigest: c.Digest(), State: Ended, Outcome: Succeeded,
		Created: at, Started: at.Add(time.Second), Ended: at.Add(2 * time.Second), Inputs: []Input{{Path: "/work/in.csv", Size: 3, SHA256: strings.Repeat("a", 64), Received: true}},
		Results: []Result{{Command: []string{"python3", "a.py"}, Started: at, Ended: at, Exit: &zero, Stderr: 4, Tail: "hostile tail"}},
	}
	e := Evidence{Complete: true, Confined: at, Traced: true, Killed: true, Usage: Usage{Samples: 1, Final: true}}
	f.record = &command.Record{
		Contract: "report@" + c.Digest(), Started: 1, Complete: true, SHA256: strings.Repeat("b", 64),
		Commands: []command.Command{{Time: at, Path: "/usr/bin/python3.13", Args: []string{"python3", "a.py\x1b"}, Verdict: command.Allowed, Exited: true, Ended: at}},
		Opens:    []command.Opened{{Path: "/.cover", Time: at}, {Path: "/work/out/a.csv", Time: time.Now()}, {Path: "/etc/x\n", Err: 13, Time: time.Now()}},
	}
	f.files.files = map[string][]byte{"/work/out/a.csv": []byte("a\n1\n")}
	if err := f.x.Collect(f.t.Context(), r, e); err != nil {
		f.t.Fatal(err)
	}
	return r, e
}

func (f *proofFixture) report(r Run) api.RunReport {
	f.t.Helper()
	out, err := f.p.Report(f.t.Context(), f.owner, r.ID)
	if err != nil {
		f.t.Fatal(err)
	}
	return out
}

func verdict(r api.RunReport, id string) string {
	for _, c := range r.Clauses {
		if c.ID == id {
			return c.Verdict
		}
	}
	return ""
}

func TestStatementIsSignedAfterTheTeardown(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setupProof(t, db)
		r, e := f.done("run_1")
		f.wall(r.Sandbox, audit.EgressConnected, audit.Fields{"proto": "tcp", "name": "feed.example", "dst": "93.184.216.34:443"})
		f.wall(r.Sandbox, audit.EgressRequest, audit.Fields{"proto": "https", "name": "feed.example", "dst": "93.184.216.34:443", "method": "GET", "url": "https://feed.example/x", "status": "200", "bytes": "12"})
		f.wall(r.Sandbox, audit.EgressDenied, audit.Fields{"proto": "tcp", "name": "evil.example", "dst": "93.184.216.35:443", "reason": "no"})
		f.wall("iother", audit.EgressConnected, audit.Fields{"name": "evil.example", "dst": "93.184.216.35:443"})

		// Before the teardown there is a report, and nothing is signed.
		if err := f.p.Prove(t.Context(), r, e); err != nil {
			t.Fatal(err)
		}
		got := f.report(r)
		if got.Signed || verdict(got, "teardown") != api.ClauseNotVerified || got.Kept != 10 || len(got.Network) != 3 || len(got.Writes) != 2 || got.Writes[1].Path != `/etc/x\n` || got.Secrets[0].Uses != 1 {
			t.Errorf("before the teardown: %+v", got)
		}
		if _, err := f.p.Statement(t.Context(), f.owner, r.ID); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("a statement before the teardown: %v", err)
		}
		if slices.ContainsFunc(got.Results, func(c api.RunCommandResult) bool { return c.Stderr != "" }) {
			t.Error("the report has output")
		}

		e.Gone, e.Teardown = time.Now(), []sandbox.Trace{{What: "processes", Gone: true}}
		f.files.err = sandbox.ErrNotFound // a call is not answered any more
		if err := f.p.Prove(t.Context(), r, e); err != nil {
			t.Fatal(err)
		}
		got = f.report(r)
		if !got.Signed || got.Kept != 11 || len(got.Teardown) != 5 {
			t.Errorf("after the teardown: %+v", got)
		}
		b, err := f.p.Statement(t.Context(), f.owner, r.ID)
		if err != nil {
			t.Fatal(err)
		}
		v, err := attest.Verify(b, []attest.Key{f.key})
		if err != nil {
			t.Fatal(err)
		}
		s := v.Statement.Predicate
		if s.Run != r.ID || s.Outcome != "succeeded" || s.Contract.Digest != r.Contract.Digest() || len(s.Artifacts) != 1 || s.Artifacts[0].SHA256 != got.Artifacts[0].SHA256 || !s.Commands.Complete ||
			len(s.Decisions) != 1 || s.Decisions[0].Action != got.Artifacts[0].Action || s.Audit.Seq == 0 {
			t.Errorf("the statement says %+v", s)
		}
		if strings.Contains(string(v.Payload), "hostile tail") {
			t.Error("the statement has output")
		}

		// The statement does not change any more; the state of artifacts in the report does.
		e.Violations, r.Outcome = []Violation{{Clause: "network", Text: "x"}}, Violated
		if err := f.p.Prove(t.Context(), r, e); err != nil {
			t.Fatal(err)
		}
		again, err := f.p.Statement(t.Context(), f.owner, r.ID)
		if err != nil || string(again) != string(b) {
			t.Errorf("the statement has changed, %v", err)
		}
		if err := f.decide(got.Artifacts[0], true); err != nil {
			t.Fatal(err)
		}
		if got = f.report(r); got.Artifacts[0].State != api.ArtifactReleased || got.Decisions[0].Decider != "person:ann" {
			t.Errorf("after the decision: %+v, %+v", got.Artifacts, got.Decisions)
		}
		other := f.owner
		other.Project = "prj_other"
		_, err = f.p.Report(t.Context(), other, r.ID)
		_, err2 := f.p.Statement(t.Context(), other, r.ID)
		if !errors.Is(err, store.ErrNotFound) || !errors.Is(err2, store.ErrNotFound) {
			t.Errorf("another project: %v, %v", err, err2)
		}
		// The audit says which statement there is.
		err = audit.View(t.Context(), db, func(tx *store.Tx) error {
			n, err := audit.Count(t.Context(), tx, r.ID, audit.RunProve)
			if n != 1 {
				t.Errorf("%d entries about the statement, want 1", n)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}

// TestTeardownFindsLeftovers: each thing that could be left behind is planted, and must
// make the clause violated.
func TestTeardownFindsLeftovers(t *testing.T) {
	f := setupProof(t, storetest.SQLite(t))
	for i, tt := range []struct {
		name, what string
		plant      func(r Run, e *Evidence)
	}{
		{"what the fleet found", "cgroup", func(_ Run, e *Evidence) { e.Teardown = append(e.Teardown, sandbox.Trace{What: "cgroup"}) }},
		{"a key of an inbox is lent", "loan of an inbox's key", func(Run, *Evidence) { f.lent = true }},
		{"the guest still answers", "answer to a call", func(Run, *Evidence) { f.files.err = nil }},
		{"its row says that it lives", "record of a living sandbox", func(r Run, _ *Evidence) {
			err := f.db.Update(t.Context(), func(tx *store.Tx) error {
				_, err := tx.ExecContext(t.Context(), `insert into sandbox (id, project_id, template, state, reason, metadata, inbox_id, egress, cpus, memory_mb, disk_mb, started_at, ends_at, ended_at) values ($1, $2, '', $3, '', '{}', '', '{}', 0, 0, 0, 0, 0, 0)`,
					r.Sandbox, r.Project, sandbox.Running)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}},
	} {
		f.files.err = nil
		r, e := f.done("run_" + string(rune('a'+i)))
		f.lent, f.files.err = false, sandbox.ErrNotFound
		e.Gone, e.Teardown = time.Now(), []sandbox.Trace{{What: "processes", Gone: true}}
		tt.plant(r, &e)
		if err := f.p.Prove(t.Context(), r, e); err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		got := f.report(r)
		found := slices.ContainsFunc(got.Teardown, func(x api.RunTrace) bool { return x.What == tt.what && !x.Gone })
		if !found || verdict(got, "teardown") != api.ClauseViolated {
			t.Errorf("%s: %+v", tt.name, got.Teardown)
		}
	}
}

// TestUnrecordedConnectionsAreNotVerified: events that the wall only counted are
// unknown.
func TestUnrecordedConnectionsAreNotVerified(t *testing.T) {
	f := setupProof(t, storetest.SQLite(t))
	r, e := f.done("run_1")
	f.wall(r.Sandbox, audit.EgressRepeated, audit.Fields{"count": "900", "reason": "900 events over the limit of 50 in 1m0s, the first: x"})
	if err := f.p.Prove(t.Context(), r, e); err != nil {
		t.Fatal(err)
	}
	got := f.report(r)
	for _, id := range []string{"network", "packages", "credentials"} {
		if verdict(got, id) != api.ClauseNotVerified {
			t.Errorf("%s is %s", id, verdict(got, id))
		}
	}
}

// TestRecordedViolationsChangeTheOutcome: a violation that only the records show
// changes the outcome in report and statement.
func TestRecordedViolationsChangeTheOutcome(t *testing.T) {
	f := setupProof(t, storetest.SQLite(t))
	r, e := f.done("run_1")
	f.record.Opens = append(f.record.Opens, command.Opened{Path: "/etc/cron.d/x", Time: time.Now()})
	vs, err := f.p.Violations(t.Context(), r, e)
	if err != nil || len(vs) != 1 || vs[0].Clause != "files" || vs[0].Rank != ByKernel {
		t.Errorf("violations %+v, %v", vs, err)
	}
	e.Gone, e.Teardown, f.files.err = time.Now(), []sandbox.Trace{{What: "processes", Gone: true}}, sandbox.ErrNotFound
	if err := f.p.Prove(t.Context(), r, e); err != nil {
		t.Fatal(err)
	}
	if got := f.report(r); got.Outcome != string(Violated) || !got.Signed || !strings.Contains(got.Reason, "files") {
		t.Errorf("%s: %s", got.Outcome, got.Reason)
	}
}
