package run_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/run"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestRunFromProposalToEnd goes from a proposal through a person's review to the end.
func TestRunFromProposalToEnd(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.fleet.act = func(_ context.Context, args []string, output func(byte, []byte) error) (sandbox.Ended, error) {
			if err := output('e', []byte("password=hunter2hunter2 of "+args[0])); err != nil {
				return sandbox.Ended{}, err
			}
			return sandbox.Ended{PID: 9, Code: 3}, output('o', []byte("hello"))
		}
		p := job("python3", "report.py")
		p.Inputs = []run.Input{input("/work/in/a.csv", "a,b\n")}
		r := f.propose(f.keyed, p)
		if r.State != run.Draft {
			t.Fatalf("state = %s, want draft", r.State)
		}
		ctx := t.Context()
		if _, err := f.runs.Submit(ctx, f.keyed, r.ID); !errors.Is(err, run.ErrInvalid) {
			t.Errorf("submit without its input: %v", err)
		}
		for _, bad := range []string{"a,c\n", "a,b\n+", ""} {
			if _, err := f.runs.PutInput(ctx, f.keyed, r.ID, "/work/in/a.csv", strings.NewReader(bad)); !errors.Is(err, run.ErrInvalid) {
				t.Errorf("input %q: %v", bad, err)
			}
		}
		if _, err := f.runs.PutInput(ctx, f.foreign, r.ID, "/work/in/a.csv", strings.NewReader("a,b\n")); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("input of another project: %v", err)
		}
		if _, err := f.runs.PutInput(ctx, f.owner, r.ID, "/work/in/a.csv", strings.NewReader("a,b\n")); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("input by somebody else: %v", err)
		}
		if _, err := f.runs.PutInput(ctx, f.keyed, r.ID, "/work/in/a.csv", strings.NewReader("a,b\n")); err != nil {
			t.Fatal(err)
		}
		r, err := f.runs.Submit(ctx, f.keyed, r.ID)
		if err != nil || r.State != run.Proposed {
			t.Fatalf("submit: %v, %s", err, r.State)
		}
		if _, err := f.runs.PutInput(ctx, f.keyed, r.ID, "/work/in/a.csv", strings.NewReader("a,b\n")); !errors.Is(err, run.ErrState) {
			t.Errorf("input after it was proposed: %v", err)
		}
		a, err := f.gate.Action(ctx, f.owner, r.Action)
		if err != nil || a.State != oversight.Pending {
			t.Fatalf("action: %v, %s", err, a.State)
		}
		v, err := f.gate.Show(a)
		if err != nil || !strings.Contains(v.Text, "api.example.com") || v.Fields[1].Value != "python3 report.py" {
			t.Errorf("view = %+v, %v", v, err)
		}
		stop := f.serve()
		defer stop()
		f.decide(r, true)
		r = f.until(r.ID, run.Ended)
		if r.Outcome != run.Failed || len(r.Results) != 1 || *r.Results[0].Exit != 3 || r.Results[0].Stdout != 5 || strings.Contains(r.Results[0].Tail, "hunter2hunter2") || r.Results[0].Output != "" {
			t.Errorf("run = %+v", r)
		}
		if b := f.fleet.boxes[r.Sandbox]; b == nil || !b.dead || b.files["/work/in/a.csv"] != "a,b\n" || b.confined.Dir != "/work" || b.Contract != "report@"+r.ContractDigest {
			t.Errorf("sandbox = %+v", b)
		} else if got, want := strings.Join(b.calls, ", "), "confine, settle, bind, settle, command, kill all, settle"; got != want {
			// What the template's services asked is answered before the contract binds. What
			// the guest opened before the first command arrives before it; what the commands
			// opened arrives before the run is judged.
			t.Errorf("calls = %s, want %s", got, want)
		}
		if len(f.binds.bound) != 0 {
			t.Error("the sandbox is still bound")
		}
		list, state, err := f.runs.Events(ctx, f.keyed, r.ID, 0, 0, nil)
		want := "state draft,state proposed,decision ,state starting,state running,command ,output ,exit ,state collecting,state ended"
		if got := strings.Join(kinds(list), ","); err != nil || state != run.Ended || got != want {
			t.Errorf("events = %s, want %s", got, want)
		}
		if _, _, err := f.runs.Events(ctx, f.foreign, r.ID, 0, 0, nil); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("events of another project: %v", err)
		}
		stop() // a run's inputs are removed after its end is recorded
		n := 0
		if err := f.blobs.Old(time.Now().Add(time.Hour), func(ids []string) error { n += len(ids); return nil }); err != nil || n != 0 {
			t.Errorf("%d blobs are left, %v", n, err)
		}
	})
}

// TestImpossibleRunsAreRefusedWithoutReview: a run that may not start is refused before
// anybody is asked, and the refusal is recorded.
func TestImpossibleRunsAreRefusedWithoutReview(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		if _, err := f.runs.SetBoundary(ctx, f.keyed, report); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a key sets the boundary: %v", err)
		}
		if _, err := f.runs.SetBoundary(ctx, f.owner, report); err != nil {
			t.Fatal(err)
		}
		no := false
		for _, tt := range []struct {
			name, by, want string
			change         func(*run.Proposal)
		}{
			{"boundary", api.RunRefusedByBoundary, "network", func(p *run.Proposal) {
				p.Text = strings.Replace(report, "api.example.com", "evil.example.com", 1)
			}},
			{"missing", api.RunRefusedByEvidence, "who asked for it", func(p *run.Proposal) { p.Answers.Missing = []string{"who asked for it"} }},
			{"answer", api.RunRefusedByEvidence, "answers.network", func(p *run.Proposal) { p.Answers.Network = &no }},
			{"template", api.RunRefusedByBoundary, "template", func(p *run.Proposal) { p.Text = report + "template: other\n" }},
		} {
			t.Run(tt.name, func(t *testing.T) {
				p := job()
				tt.change(&p)
				_, err := f.runs.Propose(ctx, f.keyed, "rest", p)
				refused, ok := errors.AsType[*run.RefusedError](err)
				if !ok || !strings.Contains(refused.Run.Reason, tt.want) {
					t.Fatalf("err = %v, want %s", err, tt.want)
				}
				if r := f.get(refused.Run.ID); r.State != run.Refused || r.Refused != tt.by || r.Action != "" { //nolint:contextcheck // it is the test's
					t.Errorf("run = %+v", r)
				}
			})
		}
		// A rejected run never starts.
		r := f.propose(f.keyed, job())
		f.decide(r, false)
		if r = f.get(r.ID); r.State != run.Refused || r.Refused != api.RunRefusedByReview || f.fleet.alive() != 0 {
			t.Errorf("rejected run = %+v", r)
		}
	})
}

// TestOnlyTheApprovedRunStarts: the attack: somebody who can write the database or the
// disk changes the run between the review and the start.
func TestOnlyTheApprovedRunStarts(t *testing.T) {
	for _, tt := range []struct{ name, query string }{
		{"commands", `update run set commands = '[["sh","-c","id"]]'`},
		{"contract", `update run set contract = replace(contract, 'api.example.com', 'evil.example.com')`},
		{"digest of an input", `update run set inputs = replace(inputs, '"size":4', '"size":5')`},
		{"task", `update run set task = 'another'`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := setup(t, storetest.SQLite(t))
			p := job()
			p.Inputs = []run.Input{input("/work/in/a.csv", "a,b\n")}
			r := f.propose(f.keyed, p)
			if _, err := f.runs.PutInput(t.Context(), f.keyed, r.ID, "/work/in/a.csv", strings.NewReader("a,b\n")); err != nil {
				t.Fatal(err)
			}
			r, err := f.runs.Submit(t.Context(), f.keyed, r.ID)
			if err != nil {
				t.Fatal(err)
			}
			err = f.db.Update(t.Context(), func(tx *store.Tx) error { _, err := tx.ExecContext(t.Context(), tt.query); return err })
			if err != nil {
				t.Fatal(err)
			}
			f.decide(r, true)
			if r = f.get(r.ID); r.State != run.Refused || f.fleet.alive() != 0 {
				t.Errorf("run = %s %s", r.State, r.Reason)
			}
		})
	}
	t.Run("bytes of an input", func(t *testing.T) {
		f := setup(t, storetest.SQLite(t))
		p := job()
		p.Inputs = []run.Input{input("/work/in/a", "a"), input("/work/in/b", "b")}
		r := f.propose(f.keyed, p)
		var err error
		for _, in := range []string{"a", "b"} {
			if r, err = f.runs.PutInput(t.Context(), f.keyed, r.ID, "/work/in/"+in, strings.NewReader(in)); err != nil {
				t.Fatal(err)
			}
		}
		if r, err = f.runs.Submit(t.Context(), f.keyed, r.ID); err != nil {
			t.Fatal(err)
		}
		// The server has encrypted both, each for its own ID.
		b, err := f.blobs.Get(r.Inputs[1].Blob)
		if err == nil {
			err = f.overwrite(r.Inputs[0].Blob, b)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer f.serve()()
		f.decide(r, true)
		if r = f.until(r.ID, run.Ended); r.Outcome != run.Failed || len(r.Results) != 0 || f.fleet.alive() != 0 {
			t.Errorf("run = %+v", r)
		}
	})
	t.Run("build of the template", func(t *testing.T) { // its name is moved after the review
		f := setup(t, storetest.SQLite(t))
		r := f.propose(f.keyed, job())
		f.decide(r, true)
		f.build = "2"
		defer f.serve()()
		if r = f.until(r.ID, run.Ended); r.Outcome != run.Failed || len(r.Results) != 0 || len(f.fleet.boxes) != 0 {
			t.Errorf("run = %+v", r)
		}
	})
	for _, tt := range []struct{ name, query string }{
		{"commands before a place is free", `update run set commands = '[["sh","-c","id"]]'`},
		{"contract before a place is free", `update run set contract = replace(contract, 'api.example.com', 'evil.example.com')`},
		{"template before a place is free", `update run set template = 'tother'`},
		{"no review at all", `update run set action_id = '', state = 'starting'`},
		{"rejected, and marked as let start", `update run set state = 'starting'`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := setup(t, storetest.SQLite(t))
			r := f.propose(f.keyed, job())
			f.decide(r, tt.name != "rejected, and marked as let start")
			err := f.db.Update(t.Context(), func(tx *store.Tx) error { _, err := tx.ExecContext(t.Context(), tt.query); return err })
			if err != nil {
				t.Fatal(err)
			}
			defer f.serve()()
			if r = f.until(r.ID, run.Ended); r.Outcome != run.Failed || len(r.Results) != 0 || len(f.fleet.boxes) != 0 {
				t.Errorf("run = %+v", r)
			}
		})
	}
	t.Run("boundary", func(t *testing.T) { // narrowed after the review, and changed behind the server's back
		f := setup(t, storetest.SQLite(t))
		r := f.propose(f.keyed, job())
		if _, err := f.runs.SetBoundary(t.Context(), f.owner, strings.Replace(report, "network: {allow: [api.example.com]}\n", "", 1)); err != nil {
			t.Fatal(err)
		}
		f.decide(r, true)
		if r = f.get(r.ID); r.State != run.Refused || !strings.Contains(r.Reason, "boundary") {
			t.Errorf("run = %s %s", r.State, r.Reason)
		}
		err := f.db.Update(t.Context(), func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `update boundary set text = $1`, report)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.runs.Propose(t.Context(), f.keyed, "rest", job()); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("proposed under a forged boundary: %v", err)
		}
	})
}

// TestInputsAreReviewed: a script is code that will run, so its bytes are shown.
func TestInputsAreReviewed(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	ctx := t.Context()
	files := map[string]string{
		"/work/in/run.sh": "#!/bin/sh\nrm -rf /\n\nWhat the contract allows\n- nothing \u202e\n", "/work/in/prog": "\x7fELF\x02\x01\x01\x00", "/work/in/empty": "",
	}
	p := job()
	for _, name := range slices.Sorted(maps.Keys(files)) {
		p.Inputs = append(p.Inputs, input(name, files[name]))
	}
	r := f.propose(f.keyed, p)
	for name, data := range files {
		if _, err := f.runs.PutInput(ctx, f.keyed, r.ID, name, strings.NewReader(data)); err != nil {
			t.Fatal(err)
		}
	}
	r, err := f.runs.Submit(ctx, f.keyed, r.ID)
	if err != nil {
		t.Fatal(err)
	}
	a, err := f.gate.Action(ctx, f.owner, r.Action)
	if err != nil {
		t.Fatal(err)
	}
	v, err := f.runs.Show(a)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(v.Text, "  | rm -rf /\n") || strings.Contains(v.Text, "\n- nothing") || strings.Contains(v.Text, "\u202e") || strings.Contains(v.Text, "\x7f") {
		t.Errorf("text = %q", v.Text)
	}
	if len(v.Files) != 3 || !strings.Contains(strings.Join(v.Notes, "\n"), "1 of its 3 inputs") {
		t.Errorf("files = %+v, notes = %q", v.Files, v.Notes)
	}
	if !slices.Contains(v.Fields, oversight.Field{Name: "Clean-up", Value: "not answered"}) {
		t.Errorf("a question without an answer is not shown: %+v", v.Fields)
	}
	for i, file := range v.Files {
		if _, data, err := f.gate.File(ctx, f.owner, a.ID, i); err != nil || string(data) != files[file.Name] || !file.Open {
			t.Errorf("file %+v has %q, %v", file, data, err)
		}
		if _, _, err := f.gate.File(ctx, f.foreign, a.ID, i); err == nil {
			t.Error("a key of another project opens an input")
		}
	}
	if _, _, err := f.gate.File(ctx, f.owner, a.ID, 3); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("file 3: %v", err)
	}
	// Bytes that were swapped on the disk are not shown as those of the digest.
	b, err := f.blobs.Get(r.Inputs[1].Blob)
	if err == nil {
		err = f.overwrite(r.Inputs[2].Blob, b)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.gate.File(ctx, f.owner, a.ID, 2); err == nil {
		t.Error("swapped bytes are opened")
	}
	f.decide(r, false)
	if a, err = f.gate.Action(ctx, f.owner, r.Action); err != nil {
		t.Fatal(err)
	}
	if v, err = f.runs.Show(a); err != nil || strings.Contains(v.Text, "rm -rf") || v.Files[0].Open {
		t.Errorf("after the decision: %+v, %v", v, err)
	}
}

// TestInputsOfWaitingRunsAreBounded: no proposer fills the disk with inputs of runs that
// nobody starts.
func TestInputsOfWaitingRunsAreBounded(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	ctx := t.Context()
	p := job()
	p.Text = strings.Replace(report, "size: 1KiB", "size: 256MiB", 1)
	p.Inputs = []run.Input{{Path: "/work/in/data", Size: 200 << 20, SHA256: strings.Repeat("a", 64)}}
	var r run.Run
	for range 5 {
		r = f.propose(f.keyed, p)
	}
	if _, err := f.runs.Propose(ctx, f.keyed, "rest", p); !errors.Is(err, run.ErrFull) {
		t.Errorf("with 1200 MiB of inputs: %v, want ErrFull", err)
	}
	f.propose(f.owner, p) // another proposer
	f.propose(f.keyed, job())
	if _, err := f.runs.Cancel(ctx, f.keyed, r.ID); err != nil {
		t.Fatal(err)
	}
	f.propose(f.keyed, p)
}

// TestNarrowerRetryNeedsNoReview: a narrower retry starts without a new decision, a
// wider one needs one.
func TestNarrowerRetryNeedsNoReview(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		defer f.serve()()
		first := f.propose(f.keyed, job())
		f.decide(first, true)
		first = f.until(first.ID, run.Ended)
		if first.Outcome != run.Succeeded || first.Approved != "" {
			t.Fatalf("run = %+v", first)
		}
		narrower := strings.Replace(report, "network: {allow: [api.example.com]}\n", "", 1)
		wider := strings.Replace(report, "api.example.com", `"*.example.com"`, 1)
		other := auth.Principal{Kind: auth.Project, ID: "k3", Project: f.keyed.Project}
		for _, tt := range []struct {
			name string
			who  auth.Principal
			p    run.Proposal
			free bool
		}{
			{"the same", f.keyed, job(), true},
			{"narrower", f.keyed, run.Proposal{Text: narrower, Task: "make the report", Commands: [][]string{{"true"}}}, true},
			{"wider", f.keyed, run.Proposal{Text: wider, Task: "make the report", Commands: [][]string{{"true"}}}, false},
			{"longer", f.keyed, run.Proposal{Text: strings.Replace(report, "time: 1m", "time: 2m", 1), Task: "make the report", Commands: [][]string{{"true"}}}, false},
			{"another command", f.keyed, job("sleep", "1"), false},
			{"another task", f.keyed, run.Proposal{Text: report, Task: "make another report", Commands: [][]string{{"true"}}}, false},
			{"another proposer", other, job(), false},
			{"another name", f.keyed, run.Proposal{Text: strings.Replace(report, "name: report", "name: export", 1), Task: "make the report", Commands: [][]string{{"true"}}}, false},
		} {
			r := f.propose(tt.who, tt.p)
			if (r.Approved == first.Action) != tt.free {
				t.Errorf("%s: approved = %q, want free: %v", tt.name, r.Approved, tt.free)
			}
			if !tt.free {
				if r.State != run.Proposed {
					t.Errorf("%s: is %s", tt.name, r.State)
				}
				continue
			}
			f.execute()
			if r = f.until(r.ID, run.Ended); r.Outcome != run.Succeeded {
				t.Errorf("%s: %s %s", tt.name, r.Outcome, r.Reason)
			}
		}
		f.build = "2" // the template was built anew
		if r := f.propose(f.keyed, job()); r.Approved != "" {
			t.Errorf("another build of the template: approved = %q", r.Approved)
		}
		f.build = ""
		// Never after a violation.
		f.fleet.act = func(context.Context, []string, func(byte, []byte) error) (sandbox.Ended, error) {
			for id := range f.fleet.boxes {
				if b := f.binds.of(id); b.Violated != nil {
					b.Violated(command.Violation{Time: time.Now(), What: command.Refused, Text: "curl"})
				}
			}
			return sandbox.Ended{PID: 3}, nil
		}
		r := f.propose(f.keyed, job())
		f.execute()
		if r = f.until(r.ID, run.Ended); r.Outcome != run.Violated {
			t.Fatalf("outcome = %s", r.Outcome)
		}
		if r = f.propose(f.keyed, job()); r.Approved != "" {
			t.Errorf("free after a violation: %+v", r)
		}
	})
}

// TestRunsEndWithoutLeftovers: limits, a cancellation and a stop of the server end a
// run, and nothing of it is left.
func TestRunsEndWithoutLeftovers(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		hang := func(ctx context.Context, _ []string, _ func(byte, []byte) error) (sandbox.Ended, error) {
			<-ctx.Done()
			return sandbox.Ended{}, ctx.Err()
		}
		stop := f.serve()
		start := func(p run.Proposal) run.Run {
			t.Helper()
			r := f.propose(f.keyed, p)
			if r.Approved != "" {
				f.execute()
			} else {
				f.decide(r, true)
			}
			return r
		}
		f.fleet.act = hang
		r := start(run.Proposal{Text: strings.Replace(report, "time: 1m", "time: 1s", 1), Task: "time", Commands: [][]string{{"true"}, {"true"}}})
		if r = f.until(r.ID, run.Ended); r.Outcome != run.TimedOut || len(r.Results) != 1 {
			t.Errorf("time: %s %s", r.Outcome, r.Reason)
		}
		f.fleet.act = func(_ context.Context, _ []string, output func(byte, []byte) error) (sandbox.Ended, error) {
			for {
				if err := output('o', make([]byte, 32<<10)); err != nil {
					return sandbox.Ended{}, err
				}
			}
		}
		r = start(run.Proposal{Text: report, Task: "flood", Commands: [][]string{{"true"}}})
		if r = f.until(r.ID, run.Ended); r.Outcome != run.Violated || r.Results[0].Stdout > 128<<10 {
			t.Errorf("flood: %s %s %d", r.Outcome, r.Reason, r.Results[0].Stdout)
		}
		f.fleet.act = hang
		r = start(run.Proposal{Text: report, Task: "cancel", Commands: [][]string{{"true"}}})
		f.until(r.ID, run.Running)
		if _, err := f.runs.Cancel(ctx, f.foreign, r.ID); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("cancelled by another project: %v", err)
		}
		if _, err := f.runs.Cancel(ctx, f.keyed, r.ID); err != nil {
			t.Error(err)
		}
		if r = f.until(r.ID, run.Ended); r.Outcome != run.Cancelled {
			t.Errorf("cancel: %s %s", r.Outcome, r.Reason)
		}
		r = f.propose(f.keyed, run.Proposal{Text: report, Task: "cancel before", Commands: [][]string{{"true"}}})
		if r, err := f.runs.Cancel(ctx, f.keyed, r.ID); err != nil || r.State != run.Ended || r.Outcome != run.Cancelled {
			t.Errorf("cancel before the review: %+v, %v", r, err)
		}
		if a, err := f.gate.Action(ctx, f.owner, r.Action); err != nil || a.State != oversight.Cancelled {
			t.Errorf("its action: %s %v", a.State, err)
		}
		r = start(run.Proposal{Text: report, Task: "stop", Commands: [][]string{{"true"}}})
		f.until(r.ID, run.Running)
		stop()
		f.restart()
		if err := f.runs.Recover(ctx); err != nil {
			t.Fatal(err)
		}
		if r = f.get(r.ID); r.State != run.Ended || r.Outcome != run.Lost || f.fleet.alive() != 0 {
			t.Errorf("stop: %s %s %s, %d sandboxes", r.State, r.Outcome, r.Reason, f.fleet.alive())
		}
		defer f.serve()()
		f.fleet.act, f.fleet.fail = nil, errors.New("no room")
		r = start(run.Proposal{Text: report, Task: "fail", Commands: [][]string{{"true"}}})
		if r = f.until(r.ID, run.Ended); r.Outcome != run.Failed || f.fleet.alive() != 0 {
			t.Errorf("no sandbox: %s %s", r.Outcome, r.Reason)
		}
	})
}

// TestStoredContracts: contracts have versions and unique names, and agents may not
// store them.
func TestStoredContracts(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		agent := auth.Principal{Kind: auth.Agent, ID: "a", Project: f.keyed.Project, Inbox: "ibx_x"}
		if _, err := f.runs.PutContract(ctx, agent, "report", report); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("stored by an agent: %v", err)
		}
		if _, err := f.runs.PutContract(ctx, f.keyed, "other", report); !errors.Is(err, run.ErrInvalid) {
			t.Errorf("stored under another name: %v", err)
		}
		for _, text := range []string{report, report + "description: two\n", report + "description: two\n"} {
			if _, err := f.runs.PutContract(ctx, f.keyed, "report", text); err != nil {
				t.Fatal(err)
			}
		}
		c, err := f.runs.Contract(ctx, agent, "report")
		if err != nil || c.Version != 2 || c.Contract == nil {
			t.Errorf("contract = %+v, %v", c, err)
		}
		if _, err := f.runs.Contract(ctx, f.foreign, "report"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("read by another project: %v", err)
		}
		if list, err := f.runs.Contracts(ctx, f.owner); err != nil || len(list) != 1 {
			t.Errorf("list = %v, %v", list, err)
		}
		r := f.propose(f.keyed, run.Proposal{Contract: "report", Task: "t", Commands: [][]string{{"true"}}})
		if r.ContractDigest != c.Digest {
			t.Errorf("proposed with %s, want %s", r.ContractDigest, c.Digest)
		}
		if err := f.runs.DeleteContract(ctx, f.owner, "report"); err != nil {
			t.Fatal(err)
		}
		if _, err := f.runs.Contract(ctx, f.owner, "report"); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("after its removal: %v", err)
		}
		if c, err := f.runs.PutContract(ctx, f.keyed, "report", report); err != nil || c.Version != 3 {
			t.Errorf("stored again: %+v, %v", c, err)
		}
	})
}

// TestSDKSandboxesAreBound: the sandbox of an SDK is bound by a
// contract that was reviewed.
func TestSDKSandboxesAreBound(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		if _, err := f.runs.PutContract(ctx, f.keyed, "report", report); err != nil {
			t.Fatal(err)
		}
		req := sandbox.Request{Metadata: map[string]string{"who": "me", "postern.run": "run_forged"}, Options: sandbox.Options{Timeout: time.Hour}}
		_, err := f.runs.Sandbox(ctx, f.keyed, "report", req)
		waits, ok := errors.AsType[*run.ReviewError](err)
		if !ok || waits.Denied != "" {
			t.Fatalf("before the review: %v", err)
		}
		_, err = f.runs.Sandbox(ctx, f.keyed, "report", req)
		if again, ok := errors.AsType[*run.ReviewError](err); !ok || again.Action != waits.Action {
			t.Errorf("asked twice: %v", err)
		}
		f.decide(run.Run{Action: waits.Action}, true)
		b, err := f.runs.Sandbox(ctx, f.keyed, "report", req)
		if err != nil {
			t.Fatal(err)
		}
		if b.Options.Timeout != time.Minute || b.Options.Most != time.Minute {
			t.Errorf("the sandbox may live for %s, extended for %s; the contract allows a minute", b.Options.Timeout, b.Options.Most)
		}
		// The template's name is moved to another build: that was not reviewed.
		f.build = "2"
		if _, err := f.runs.Sandbox(ctx, f.keyed, "report", req); !errors.Is(err, run.ErrReview) {
			t.Errorf("another build of the template: %v", err)
		}
		f.build = ""
		if bound := f.binds.of(b.ID); bound.Contract == nil || b.Metadata["who"] != "me" || b.Metadata["postern.run"] == "run_forged" || len(b.Egress.AllowOut) != 0 {
			t.Errorf("sandbox = %+v", b)
		}
		// A new version is another contract.
		if _, err := f.runs.PutContract(ctx, f.keyed, "report", strings.Replace(report, "api.example.com", "evil.example.com", 1)); err != nil {
			t.Fatal(err)
		}
		if _, err := f.runs.Sandbox(ctx, f.keyed, "report", req); !errors.Is(err, run.ErrReview) {
			t.Errorf("wider version: %v", err)
		}
		// After a restart nothing starts in it until it is bound again.
		f.restart()
		if err := f.runs.Recover(ctx); err != nil {
			t.Fatal(err)
		}
		if f.binds.of(b.ID).Contract == nil || f.fleet.alive() != 1 {
			t.Error("the sandbox was not bound again")
		}
	})
}

// TestReviewsFromBeforeARestoreStartNothing: a run that was approved, a retry of it and a
// sandbox under its contract are reviewed again in a restored copy: the original may have
// performed the run.
func TestReviewsFromBeforeARestoreStartNothing(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		if _, err := f.runs.PutContract(ctx, f.keyed, "report", report); err != nil {
			t.Fatal(err)
		}
		req := sandbox.Request{Options: sandbox.Options{Timeout: time.Hour}}
		_, err := f.runs.Sandbox(ctx, f.keyed, "report", req)
		waits, ok := errors.AsType[*run.ReviewError](err)
		if !ok {
			t.Fatalf("before the review: %v", err)
		}
		f.decide(run.Run{Action: waits.Action}, true)
		r := f.propose(f.keyed, job())
		f.decide(r, true) // nothing performs runs: it is about to start
		f.restart()
		f.gate.Void(time.Now())
		if err := f.runs.Recover(ctx); err != nil {
			t.Fatal(err)
		}
		if _, err := f.runs.Sandbox(ctx, f.keyed, "report", req); !errors.Is(err, run.ErrReview) {
			t.Errorf("a sandbox by the earlier review: %v", err)
		}
		if again := f.propose(f.keyed, job()); again.Approved != "" {
			t.Errorf("a retry is approved by %s", again.Approved)
		}
		defer f.serve()()
		if r = f.until(r.ID, run.Ended); f.fleet.alive() != 0 || len(f.fleet.boxes) != 0 || !strings.Contains(r.Reason, "before this database was restored") {
			t.Errorf("the run is %s, %s, in %d sandboxes", r.Outcome, r.Reason, len(f.fleet.boxes))
		}
	})
}

// TestContractLimitsMail: a sandbox proposes no more mail than its contract allows,
// through any interface.
func TestContractLimitsMail(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		for name, most := range map[string]int{"": 5, "none": 0, "one": 1, "three": 3, "unknown": 0} {
			id := "ibox" + name
			text := map[string]string{"none": "", "one": "mail: {inbox: a@agents.internal}\n", "three": "mail: {inbox: a@agents.internal, max: 3}\n"}[name]
			bound := ""
			if name != "" {
				c, err := contract.Parse([]byte(report + text))
				if err != nil {
					t.Fatal(err)
				}
				bound = "report@" + c.Digest()
				if name == "unknown" {
					bound = "report@sha256:00"
				} else if _, err := f.runs.Propose(ctx, f.keyed, "rest", run.Proposal{Text: report + text, Task: name, Commands: [][]string{{"true"}}}); err != nil && !errors.Is(err, run.ErrRefused) {
					t.Fatal(err)
				}
			}
			err := db.Update(ctx, func(tx *store.Tx) error {
				_, err := tx.ExecContext(ctx, `insert into sandbox (id, project_id, template, asked, state, reason, metadata, inbox_id, egress, options, execution, cpus, memory_mb, disk_mb, started_at, ends_at, paused_at, ended_at, restart, saved, contract, server_id)
					values ($1, $2, 'base', 'base', 'running', '', '{}', '', '{}', '{}', '', 1, 1, 1, 1, 1, 0, 0, 0, '', $3, '')`, id, f.keyed.Project, bound)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			box := auth.Principal{Kind: auth.Sandbox, ID: id, Project: f.keyed.Project}
			n := 0
			for range 5 {
				err := db.Update(ctx, func(tx *store.Tx) error {
					_, err := f.gate.Propose(ctx, tx, box, oversight.Proposal{Request: policy.Request{Kind: policy.KindSend, To: []string{"a@example.com"}}, Payload: []byte("x")})
					return err
				})
				if err == nil {
					n++
				}
			}
			if n != most {
				t.Errorf("%q: proposed %d messages, want %d", name, n, most)
			}
		}
	})
}

// TestBoundaryReadWhileItChanges: a reader whose snapshot is older than a new boundary has
// the boundary of then. An earlier one that is put back holds nothing.
func TestBoundaryReadWhileItChanges(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		set := func(host string) {
			t.Helper()
			if _, err := f.runs.SetBoundary(ctx, f.owner, strings.Replace(report, "api.example.com", host, 1)); err != nil {
				t.Fatal(err)
			}
		}
		read := func(tx *store.Tx) error {
			_, err := f.runs.BoundaryIn(ctx, tx, f.owner.Project)
			return err
		}
		set("a.example.com")
		err := db.View(ctx, func(tx *store.Tx) error {
			if err := read(tx); err != nil {
				return err
			}
			set("b.example.com")
			set("c.example.com")
			return read(tx)
		})
		if err != nil {
			t.Errorf("read while it changes: %v", err)
		}
		err = db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `delete from boundary where version > 1`)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		for name, in := range map[string]func(context.Context, func(*store.Tx) error) error{"a reader": db.View, "a writer": db.Update} {
			if err := in(ctx, read); !errors.Is(err, auth.ErrForbidden) {
				t.Errorf("%s of an earlier boundary: %v, want ErrForbidden", name, err)
			}
		}
	})
}

// TestTheLastMeasureDecides: what a program has written after the last sample counts, and
// what was on the disk before it does not. A process that was ended for memory is named.
func TestTheLastMeasureDecides(t *testing.T) {
	const before = 50 << 20
	text := strings.Replace(report, "output: 64KiB", "output: 64KiB, disk: 8MiB, memory: 96MiB", 1)
	for _, tt := range []struct {
		name    string
		end     sandbox.Ended
		after   int64 // bytes on the disk once all processes are killed
		outcome run.Outcome
		reason  string
	}{
		{"within the limit", sandbox.Ended{PID: 7}, before + 8<<20, run.Succeeded, ""},
		{"one byte over it", sandbox.Ended{PID: 7}, before + 8<<20 + 1, run.Violated, "clause limits: it wrote more to its disk"},
		{"over it, and failed", sandbox.Ended{PID: 7, Code: 3}, before + 64<<20, run.Violated, "clause limits: it wrote more to its disk"},
		{"out of memory", sandbox.Ended{PID: 7, Code: 137, Signal: 9, Memory: true, Reason: "out of memory"}, before, run.Failed, "out of memory: a process was ended; limits.memory is 96MiB"},
		{"a child was out of memory", sandbox.Ended{PID: 7, Memory: true}, before, run.Succeeded, ""},
	} {
		storetest.Each(t, func(t *testing.T, db *store.DB) {
			f := setup(t, db)
			f.fleet.act = func(context.Context, []string, func(byte, []byte) error) (sandbox.Ended, error) { return tt.end, nil }
			f.fleet.usage = func(b *box) (sandbox.Usage, error) {
				u := sandbox.Usage{Disk: before, Memory: 40 << 20, MemoryMost: 200 << 20}
				if slices.Contains(b.calls, "kill all") {
					u.Disk = tt.after
				}
				return u, nil
			}
			defer f.serve()()
			p := job()
			p.Text = text
			r := f.propose(f.keyed, p)
			f.decide(r, true)
			r = f.until(r.ID, run.Ended)
			if r.Outcome != tt.outcome || !strings.Contains(r.Reason, tt.reason) {
				t.Errorf("%s: %s: %s", tt.name, r.Outcome, r.Reason)
			}
			if tt.end.Memory && !strings.Contains(r.Results[0].Reason, "out of memory") {
				t.Errorf("%s: the command's reason is %q", tt.name, r.Results[0].Reason)
			}
		})
	}
}

// TestHourlyLimitsSayWhenToTryAgain: a proposal that was refused before anybody was asked
// takes no place of those that people review.
func TestHourlyLimitsSayWhenToTryAgain(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		refused := job()
		refused.Answers.Missing = []string{"the numbers of June"}
		for range 3 {
			if _, err := f.runs.Propose(ctx, f.keyed, "rest", refused); !errors.Is(err, run.ErrRefused) {
				t.Fatal(err)
			}
		}
		r := f.propose(f.keyed, job())
		if _, err := f.runs.Cancel(ctx, f.keyed, r.ID); err != nil {
			t.Fatal(err)
		}
		// 199 proposals, of which the first is 50 minutes old. Refused ones do not count.
		insert := func(n int, by string, at time.Time) {
			t.Helper()
			err := db.Update(ctx, func(tx *store.Tx) error {
				for i := range n {
					if _, err := tx.ExecContext(ctx, `insert into run (id, project_id, proposer, inbox_id, via, state, outcome, refused, reason, contract_name, contract, contract_text, contract_digest, boundary_digest,
							task, commands, inputs, answers, scope, action_id, approved, payload, sandbox_id, template, created_at, begun_at, started_at, ended_at, kept_until, cancelled_by, version, events, results, evidence)
						select $1, project_id, proposer, inbox_id, via, $4, outcome, $2, reason, contract_name, contract, contract_text, contract_digest, boundary_digest,
							task, commands, inputs, answers, scope, action_id, approved, payload, sandbox_id, template, $3, begun_at, started_at, ended_at, kept_until, cancelled_by, version, events, results, evidence
						from run where id = $5`, fmt.Sprintf("run_%s%d%d", by, at.Unix(), i), by, store.Time(at), run.Ended, r.ID); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		now := time.Now()
		insert(1, "", now.Add(-50*time.Minute))
		insert(100, api.RunRefusedByBoundary, now.Add(-40*time.Minute))
		insert(197, "", now.Add(-10*time.Minute))
		f.propose(f.keyed, job("true")) // the 200th
		_, err := f.runs.Propose(ctx, f.keyed, "rest", job("sleep", "1"))
		full, ok := errors.AsType[*run.FullError](err)
		if !ok || !errors.Is(err, run.ErrFull) || !strings.Contains(err.Error(), "you proposed 200 runs within an hour (at most 200); try again in ") {
			t.Fatalf("the 201st: %v", err)
		}
		if full.Wait < 9*time.Minute || full.Wait > 10*time.Minute {
			t.Errorf("it may be tried again after %s", full.Wait)
		}
		f.propose(f.owner, job()) // another proposer
		insert(900, api.RunRefusedByEvidence, now.Add(-30*time.Minute))
		if _, err = f.runs.Propose(ctx, f.keyed, "rest", refused); !errors.Is(err, run.ErrFull) {
			t.Errorf("with over 1000 in all: %v", err)
		}
	})
}

// TestSessionsAreRunsOfTheirOwn: the sandbox of an SDK has a run that takes inputs before the
// first command, survives the server, and ends with the sandbox.
func TestSessionsAreRunsOfTheirOwn(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		ctx := t.Context()
		text := strings.Replace(report, "size: 1KiB}", "size: 1KiB, required: true}", 1)
		if _, err := f.runs.PutContract(ctx, f.keyed, "report", text); err != nil {
			t.Fatal(err)
		}
		req := sandbox.Request{Options: sandbox.Options{Timeout: time.Hour}}
		_, err := f.runs.Sandbox(ctx, f.keyed, "report", req)
		waits, ok := errors.AsType[*run.ReviewError](err)
		if !ok || waits.Denied != "" {
			t.Fatalf("a required input must not keep the review: %v", err)
		}
		f.decide(run.Run{Action: waits.Action}, true)
		state := func(id string, state sandbox.State) {
			t.Helper()
			err := db.Update(ctx, func(tx *store.Tx) error {
				_, err := tx.ExecContext(ctx, `insert into sandbox (id, project_id, template, asked, state, reason, metadata, inbox_id, egress, options, execution, cpus, memory_mb, disk_mb, started_at, ends_at, paused_at, ended_at, restart, saved, contract, server_id)
					values ($1, $2, 'base', 'base', $3, 'killed', '{}', '', '{}', '{}', '', 1, 1, 1, 1, 1, 0, 0, 0, '', '', '')`, id, f.keyed.Project, state)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		create := func() (sandbox.Info, string) {
			t.Helper()
			b, err := f.runs.Sandbox(ctx, f.keyed, "report", req)
			if err != nil {
				t.Fatal(err)
			}
			r := f.get(b.Metadata["postern.run"]) //nolint:contextcheck // it has that of the test
			if r.State != run.Running || r.Sandbox != b.ID || r.Approved != waits.Action || len(r.Commands) != 0 {
				t.Fatalf("its run is %+v", r)
			}
			return b, r.ID
		}

		b, id := create()
		if err := f.runs.BeginCommand(b.ID); !errors.Is(err, run.ErrState) {
			t.Errorf("a command before its required input: %v", err)
		}
		for name, content := range map[string]string{"/etc/x": "x", "/work/in/a": strings.Repeat("x", 2000)} {
			if _, err := f.runs.BoxInput(ctx, b.ID, name, []byte(content)); !errors.Is(err, run.ErrInvalid) {
				t.Errorf("the input %s: %v", name, err)
			}
		}
		if at, err := f.runs.BoxInput(ctx, b.ID, "in/a", []byte("a")); err != nil || at != "/work/in/a" || f.fleet.boxes[b.ID].files[at] != "a" {
			t.Errorf("input: %q, %v", at, err)
		}
		if _, err := f.runs.BoxInput(ctx, b.ID, "/work/in/a", []byte("b")); !errors.Is(err, run.ErrInvalid) {
			t.Errorf("the same input again: %v", err)
		}
		if err := f.runs.BeginCommand(b.ID); err != nil || f.runs.TakesInput(b.ID, "/work/in/b") {
			t.Errorf("the first command: %v", err)
		}
		if r := f.get(id); len(r.Inputs) != 1 || !r.Inputs[0].Received || r.Inputs[0].SHA256 != input("", "a").SHA256 {
			t.Errorf("inputs %+v", r.Inputs)
		}

		// Another one does what its contract refuses, and a third one crashes.
		bad, badID := create()
		f.binds.of(bad.ID).Violated(command.Violation{Time: time.Now(), What: command.Refused, Text: "env: no"})
		crashed, crashedID := create()
		f.restart()
		if err := f.runs.Recover(ctx); err != nil {
			t.Fatal(err)
		}
		if r := f.get(id); r.State != run.Running {
			t.Errorf("after a restart: %+v", r)
		}
		for _, box := range []sandbox.Info{b, bad} {
			f.runs.Ending(ctx, box)
			if !slices.Contains(f.fleet.boxes[box.ID].calls, "kill all") {
				t.Error("processes were not killed before the last measure")
			}
			state(box.ID, sandbox.Killed)
		}
		state(crashed.ID, sandbox.Lost)
		defer f.serve()()
		for id, want := range map[string]run.Outcome{id: run.Succeeded, badID: run.Violated, crashedID: run.Lost} {
			if r := f.until(id, run.Ended); r.Outcome != want {
				t.Errorf("%s: %s, want %s", r.Outcome, r.Reason, want)
			}
		}
		// Sessions take no place of jobs, and count as no proposals.
		if r := f.propose(f.keyed, job("sleep", "1")); r.State != run.Proposed {
			t.Errorf("a job is %s", r.State)
		}
	})
}
