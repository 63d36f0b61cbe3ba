package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"postern/client"
	"postern/internal/api"
	"postern/internal/attest"
	"postern/internal/contract"
)

// firstContract is the smallest contract that does something: one command without an
// interpreter, one input, one directory, one artifact, no network and no secret. Its
// input's digest is filled in.
const firstContract = `version: 1
name: first-run
description: copy one small file to where it may come out
commands:
  allow:
    - run: cp /in/hello.txt /out/hello.txt
      max: 1
files:
  read: [/in]
  write: [/out]
  inputs:
    - path: /in/hello.txt
      size: 1KiB
      sha256: %s
      required: true
limits:
  time: 30s
  memory: 256MiB
  processes: 16
  output: 1KiB
artifacts:
  - path: /out/hello.txt
    type: text
    size: 1KiB
    required: true
    review: flagged
`

// firstInput is what the first run copies.
const firstInput = "Hello from the first run of Postern.\n"

// A checklist prints steps, each with a tick or a cross.
type checklist struct {
	w  io.Writer
	no int // steps that failed
}

func (c *checklist) step(ok bool, format string, args ...any) {
	mark := "✓"
	if !ok {
		mark = "✗"
		c.no++
	}
	fmt.Fprintf(c.w, "%s %s\n", mark, fmt.Sprintf(format, args...))
}

// runFirst goes through the first run on a machine, step by step.
func (t *runTool) runFirst(ctx context.Context, l *local, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	sum := sha256.Sum256([]byte(firstInput))
	digest := hex.EncodeToString(sum[:])
	text := fmt.Sprintf(firstContract, digest)
	c, err := contract.Parse([]byte(text))
	if err != nil {
		return fmt.Errorf("the contract of the first run: %w", err) // unreachable
	}
	list := &checklist{w: out}
	list.step(len(c.Warnings()) == 0, "the contract allows one command, one input, one directory and one artifact; %s", c.Digest())
	for _, s := range c.Explain() {
		fmt.Fprintf(out, "    %s\n", s)
	}
	id, err := firstProposal(ctx, l, c, text, digest)
	if err != nil {
		return refusal(err)
	}
	list.step(true, "proposed as %s, with an input of %d bytes and no secret", id, len(firstInput))
	if err := t.firstReview(ctx, l, id, list, out); err != nil {
		return err
	}
	f := &follower{t: t, l: l, out: newOutput(io.Discard, false, false), p: newRunScreen(os.Stderr), id: id}
	defer f.p.end()
	if err := f.watch(ctx, t.wait); err != nil {
		if ctx.Err() != nil {
			return f.interrupted(ctx)
		}
		return fmt.Errorf("%s: %w", id, err)
	}
	f.p.end()
	r, err := l.api.Runs.Get(ctx, id)
	if err != nil {
		return err
	}
	list.step(r.Outcome == api.RunSucceeded && r.ExitCode != nil && *r.ExitCode == 0, "one command ran in its own sandbox: %s, %s", cell(runState(r)), took(r.StartedAt, r.EndedAt))
	if r.State != api.RunEnded {
		return &statusError{statusRefused, fmt.Errorf("%s did not start: %s", id, cell(r.Reason))}
	}
	if _, err := f.artifacts(ctx, true); err != nil { // it is released once the scan has found nothing
		return err
	}
	if err := l.firstResults(ctx, r, list, out); err != nil {
		return err
	}
	if list.no > 0 {
		return fmt.Errorf("the first run is not done: %d steps failed", list.no)
	}
	fmt.Fprintf(out, "\nThe first run is done. Write your own contract with postern contract init; docs/runs.md continues from here.\n")
	return nil
}

// firstProposal proposes the run and uploads its input.
func firstProposal(ctx context.Context, l *local, c *contract.Contract, text, digest string) (id string, err error) {
	t := &runTool{
		check: "this run: it writes one file, which is destroyed with its sandbox", timeout: "it is ended after 30 s and counts as failed",
		cleanup: "its sandbox is destroyed", export: "one text file, for the person at this terminal",
	}
	input := api.NewInput{Path: "/in/hello.txt", Size: int64(len(firstInput)), SHA256: digest}
	n := api.NewRun{ContractText: text, Task: "the first run on this server", Commands: [][]string{{"cp", "/in/hello.txt", "/out/hello.txt"}}, Inputs: []api.NewInput{input}, Answers: t.answers(c)}
	r, err := l.api.Runs.Propose(ctx, n)
	if err != nil {
		return "", err
	}
	if _, err := l.api.Runs.Upload(ctx, r.ID, input.Path, strings.NewReader(firstInput)); err != nil {
		return "", err
	}
	r, err = l.api.Runs.Submit(ctx, r.ID)
	return r.ID, err
}

// firstReview has the person at the terminal decide. Elsewhere somebody decides with
// postern approve, or in the console.
func (t *runTool) firstReview(ctx context.Context, l *local, id string, list *checklist, out *output) error {
	r, err := l.api.Runs.Get(ctx, id)
	if err != nil || r.Action == "" {
		return err
	}
	// The action says who decided, even when the run has already ended.
	a, err := l.api.Actions.Get(ctx, r.Action)
	if err != nil {
		return err
	}
	switch {
	case a.State == api.StatePending:
	case a.Review == nil || a.State == api.StateDenied:
		return nil
	case a.Decider != "":
		list.step(true, "reviewed by %s: %s", cell(a.Decider), a.ID)
		return nil
	default: // the second first run goes in nothing beyond the first
		list.step(true, "no person was asked: %s", cell(a.Verdict))
		return nil
	}
	if !isTerminal(os.Stdin) || !isTerminal(out) {
		fmt.Fprintf(out, "… waiting for a person: postern approve %s\n", r.Action)
		return nil
	}
	fmt.Fprintf(out, "? start this run? [y/N] ")
	line, err := bufio.NewReader(os.Stdin).ReadString('\n')
	if err != nil {
		return err
	}
	if answer := strings.ToLower(strings.TrimSpace(line)); answer != "y" && answer != "yes" {
		if _, err := l.api.Actions.Reject(ctx, a, "not started at the terminal"); err != nil {
			return err
		}
		return &statusError{statusRefused, errors.New("it was not started")}
	}
	if _, err := l.api.Actions.Approve(ctx, a, "the first run"); err != nil {
		return fmt.Errorf("approve %s: %w", a.ID, err)
	}
	list.step(true, "reviewed by you: %s", a.ID)
	return nil
}

// firstResults looks at what came of the run.
func (l *local) firstResults(ctx context.Context, r api.Run, list *checklist, out *output) error {
	files, err := l.api.Runs.Artifacts(ctx, r.ID)
	if err != nil {
		return err
	}
	same := false
	if len(files.Artifacts) == 1 && files.Artifacts[0].State == api.ArtifactReleased {
		body, err := l.api.Runs.Download(ctx, r.ID, files.Artifacts[0].N)
		if err != nil {
			return err
		}
		got, err := io.ReadAll(io.LimitReader(body, 1<<20))
		if err = errors.Join(err, body.Close()); err != nil {
			return err
		}
		same = bytes.Equal(got, []byte(firstInput))
	}
	list.step(same, "one artifact was scanned, released and downloaded; its bytes are those of the input")
	report, err := l.signedReport(ctx, r.ID)
	if err != nil {
		return err
	}
	left := 0
	for _, x := range report.Teardown {
		if !x.Gone {
			left++
		}
	}
	_, err = l.sandbox(ctx, r.Sandbox)
	list.step(left == 0 && len(report.Teardown) > 0 && err != nil, "the sandbox is destroyed: the server looked for %d traces of it and found %d", len(report.Teardown), left)
	list.step(report.Violated == 0 && report.NotVerified == 0, "clauses: %d kept, %d violated, %d not verified", report.Kept, report.Violated, report.NotVerified)
	n := 0
	for _, err := range l.api.Audit.List(ctx, client.AuditQuery{Object: r.ID, Since: r.CreatedAt.Add(-time.Minute)}) {
		if err != nil {
			return fmt.Errorf("read the audit: %w", err)
		}
		n++
	}
	list.step(n > 0, "the audit has %d entries about it", n)
	if err := l.firstStatement(ctx, r.ID, list); err != nil {
		return err
	}
	fmt.Fprintln(out)
	return printRunReport(out, report)
}

// signedReport waits, for 30 seconds, until the report of a run that has ended is
// complete and its statement is signed: that is after the sandbox was removed.
func (l *local) signedReport(ctx context.Context, id string) (r api.RunReport, err error) {
	for end := time.Now().Add(30 * time.Second); ; {
		r, err = l.api.Runs.Report(ctx, id)
		if err == nil && r.Signed || time.Now().After(end) {
			return r, err
		}
		if err := runPause(ctx, 200*time.Millisecond); err != nil {
			return r, err
		}
	}
}

// firstStatement checks the statement of the run with the keys that the server
// publishes, as postern verify-run does.
func (l *local) firstStatement(ctx context.Context, id string, list *checklist) error {
	text, err := l.api.Runs.Statement(ctx, id)
	if err != nil {
		return fmt.Errorf("get the statement: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, l.address(attest.KeysPath), http.NoBody)
	if err != nil {
		return err
	}
	resp, err := l.do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	doc, err := io.ReadAll(io.LimitReader(resp.Body, attest.MaxKeys+1))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = failure(resp, doc)
	}
	if err != nil {
		return fmt.Errorf("get the keys of statements: %w", err)
	}
	keys, err := attest.ParseKeys(doc)
	if err != nil {
		return err
	}
	v, err := attest.Verify(text, keys)
	list.step(err == nil && v.Statement.Predicate.Run == id, "its statement has a valid signature of the server; postern runs statement %s prints it", id)
	return nil
}
