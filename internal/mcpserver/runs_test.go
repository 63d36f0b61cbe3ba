package mcpserver

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/policy"
	"postern/internal/run"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

// runRows has valid arguments for every tool of the set runs.
var runRows = map[string]map[string]any{
	"run_propose":   {"task": "TASK", "contractText": smallJob, "commands": [][]string{{"true"}}, "execution": true, "network": false, "files": true, "credentials": false, "check": "exit code 0", "timeout": "it ends", "cleanup": "all goes", "export": "nothing"},
	"run_status":    {"runId": "RUN"},
	"run_artifacts": {"runId": "RUN"},
}

const smallJob = "version: 1\nname: job\ncommands: {allow: [{run: \"true\"}]}\nfiles: {inputs: [{path: /in/*}]}\n"

// withRuns makes the server accept runs. There are no sandboxes to perform them.
func (f *fixture) withRuns(t *testing.T, db *store.DB) {
	t.Helper()
	blobs, err := store.OpenBlobs(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	log := f.srv.log
	f.srv.conf.Runs, err = run.New(log, db, f.gate, run.Config{
		Key: make([]byte, 32), Blobs: blobs, Post: f.post,
		Template: func(context.Context, auth.Principal, string) (id, image string, err error) { return "base-1", "", nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	f.gate.Handle(policy.KindRun, f.srv.conf.Runs)
	if f.srv.conf.Artifacts, err = run.NewExports(log, db, f.gate, nil, blobs, make([]byte, 32)); err != nil {
		t.Fatal(err)
	}
	f.gate.Handle(policy.KindExport, f.srv.conf.Artifacts)
}

// TestRunIsolation: an agent sees only the runs that its inbox proposed, a project key sees
// those of its project, and code in a sandbox is not offered these tools.
func TestRunIsolation(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.withRuns(t, db)
		ctx := t.Context()
		fatal := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		a, keyA := f.inbox(t, "alice")
		_, keyB := f.inbox(t, "bella")
		whoA, err := auth.CheckKey(ctx, db, keyA)
		fatal(err)
		ka, err := f.post.Keys.Open(ctx, whoA, keyA, "")
		fatal(err)
		_, reading, err := f.post.Keys.Add(ctx, whoA, ka, keyring.NewKey{Scope: seal.Read})
		fatal(err)
		_, grant, err := f.post.Keys.Grant(ctx, whoA, ka, keyring.NewKey{Scope: seal.Propose, Expires: time.Now().Add(time.Hour)})
		fatal(err)
		foreign, foreignKey := f.project, auth.Secret("")
		fatal(db.Update(ctx, func(tx *store.Tx) (err error) {
			foreign.Project, foreignKey, err = auth.NewProject(ctx, tx, "two")
			return err
		}))
		_, keyC, err := f.post.CreateInbox(ctx, foreign, directory.NewInbox{Address: "foreign"}, "")
		fatal(err)
		propose := func(key auth.Secret) string {
			t.Helper()
			status, r := f.ask(t, f.srv.Handler(), key, "run_propose", runRows["run_propose"], "", strings.NewReplacer("TASK", "sums"))
			if status != 200 || r.isErr || !strings.Contains(r.text, ": proposed") {
				t.Fatalf("propose: %d %+v", status, r)
			}
			id, _, _ := strings.Cut(r.text, ":")
			return id
		}
		own, plain := propose(keyA), propose(f.projectKey)
		inside, _ := f.sandbox(t, a.ID)
		for _, p := range []struct {
			name       string
			key        auth.Secret
			handler    http.Handler
			own, plain bool // sees the run of alice, and that of the project key
			proposes   bool
			door       int
		}{
			{name: "nobody", door: 401},
			{name: "alice", key: keyA, own: true, proposes: true},
			{name: "a reading key of alice's", key: reading, own: true},
			{name: "a grant over alice's inbox", key: grant},
			{name: "bella", key: keyB, proposes: true},
			{name: "another project's agent", key: keyC, proposes: true},
			{name: "the project's key", key: f.projectKey, own: true, plain: true, proposes: true},
			{name: "another project's key", key: foreignKey, proposes: true},
			{name: "a sandbox", handler: f.srv.HandlerFor(inside)},
		} {
			for tool, args := range runRows {
				if p.handler != nil {
					if tools, err := chosen(httpRequest(tool), inside); err != nil || slices.Contains(tools, find(tool)) {
						t.Errorf("a sandbox is offered %s", tool)
					}
					continue
				}
				for id, may := range map[string]bool{own: p.own, plain: p.plain, "run_" + strings.Repeat("A", 26): false, "'; drop table run": false} {
					if tool == "run_propose" {
						may = p.proposes
					}
					status, got := f.ask(t, f.srv.Handler(), p.key, tool, args, "", strings.NewReplacer("RUN", id, "TASK", "sums "+p.name))
					switch {
					case status != 200:
						if status != p.door {
							t.Errorf("%s as %s: status %d, want %d", tool, p.name, status, p.door)
						}
					case p.door != 0:
						t.Errorf("%s as %s: the call was admitted", tool, p.name)
					case may == got.isErr:
						t.Errorf("%s of %s as %s: error %v, may %v: %s", tool, id, p.name, got.isErr, may, got.text)
					case got.isErr && (strings.Contains(got.text, "internal error") || strings.Contains(got.text, "sums")):
						t.Errorf("%s as %s: %s", tool, p.name, got.text)
					}
				}
			}
		}
	})
}

// TestRunToolsProposeAndExplainRefusals: a proposal with inputs waits for its review, and a
// refusal names its reason.
func TestRunToolsProposeAndExplainRefusals(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	f.withRuns(t, f.srv.db)
	_, key := f.inbox(t, "analyst")
	cs := connect(t, f.srv.Handler(), key, "?tools=runs")
	base := func(change args) args {
		out := args{}
		maps.Copy(out, runRows["run_propose"])
		maps.Copy(out, change)
		return out
	}
	r := call(t, cs, "run_propose", base(args{"inputs": []any{args{"path": "/in/a.csv", "content": "a,b\n"}, args{"path": "/in/b", "content_base64": "AAE="}}}))
	if r.isErr || r.field("state") != string(run.Proposed) || !strings.Contains(r.text, "nothing has started") {
		t.Fatalf("got %+v", r)
	}
	id := r.field("runId")
	if r := call(t, cs, "run_status", args{"runId": id, "waitSeconds": 1}); r.isErr || r.field("state") != string(run.Proposed) || r.data["after"] == 0.0 {
		t.Errorf("status: %+v", r)
	}
	for name, tt := range map[string]struct {
		in   args
		want string
	}{
		"missing evidence":    {args{"missing": []string{"which month"}}, "which month"},
		"a wrong answer":      {args{"network": true}, "network"},
		"no answers":          {args{"check": ""}, "check"},
		"no such contract":    {args{"contractText": "", "contract": "none"}, "none"},
		"an invalid contract": {args{"contractText": "version: 9"}, "version"},
		"content twice":       {args{"inputs": []any{args{"path": "/in/a", "content": "a", "content_base64": "YQ=="}}}, "inputs[0]"},
		"too many bytes":      {args{"inputs": []any{args{"path": "/in/a", "content": strings.Repeat("a", maxRunInputs+1)}}}, "8388608"},
		"an input elsewhere":  {args{"inputs": []any{args{"path": "/etc/passwd", "content": "a"}}}, "/etc/passwd"},
		"too long a wait":     {args{"waitSeconds": 999}, "waitSeconds"},
	} {
		r := call(t, cs, "run_propose", base(tt.in))
		if !r.isErr && r.field("state") != string(run.Refused) || !strings.Contains(r.text, tt.want) || strings.Contains(r.text, "internal error") {
			t.Errorf("%s: got %s", name, fmt.Sprint(r))
		}
	}
}
