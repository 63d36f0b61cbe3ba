package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/client"
	"postern/internal/api"
)

// A runsTool is the runs command with its flags.
type runsTool struct {
	conf Config

	query         client.RunQuery
	follow, force bool
	out           string
}

func runsCommand() *command {
	t := &runsTool{}
	c := &t.conf
	ids := completing(c, func(ctx context.Context, l *local) (ids []string, err error) {
		list, err := l.api.Runs.List(ctx, client.RunQuery{})
		for _, r := range list {
			ids = append(ids, r.ID+"\t"+runState(r)+" "+cell(r.Contract))
		}
		return ids, err
	})
	return &command{
		use: "runs", short: "list, show and cancel runs; print their reports, files and statements",
		long: `
Lists, shows and cancels runs, also those that other programs proposed over the API.
"postern run" starts one. See docs/reference/runs.md.`,
		example: `
  postern runs list
  postern runs report run_...
  postern runs download run_... --out results`,
		flags: c.location,
		below: []*command{
			{
				use: "list", short: "list runs, the newest first", lists: true,
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(&t.query.State, "state", "", "only runs in this `state`: draft, proposed, refused, starting, running, collecting or ended")
					fs.StringVar(&t.query.Contract, "contract", "", "only runs under the contract of this `name`")
					fs.IntVar(&t.query.Limit, "limit", 50, "at most this many `runs`, up to 200")
				},
				run: onServer(c, t.list),
			},
			{use: "show ID", short: "show a run: its contract, inputs, review, commands and files", facts: true, complete: ids, run: onServer(c, showRun)},
			{use: "report ID", short: "show what a run did, and which clauses of its contract it kept", facts: true, complete: ids, run: onServer(c, reportRun)},
			{
				use: "events ID", short: "print what happened in a run", facts: true, complete: ids,
				long: `
Prints the events of a run, oldest first. With --json each is a line of JSON.`,
				flags: func(fs *pflag.FlagSet) {
					fs.BoolVar(&t.follow, "follow", false, "wait for more events until the run has ended")
				},
				run: onServer(c, t.events),
			},
			{use: "cancel ID", short: "cancel a run: one that waits is not started, one that runs is stopped", complete: ids, run: onServer(c, cancelRun)},
			{use: "artifacts ID", short: "list the files of a run, with the decision about each", lists: true, complete: ids, run: onServer(c, listArtifacts)},
			{
				use: "download ID [NUMBER]", short: "save the released files of a run, or one of them", complete: ids,
				long: `
Saves the released files of a run into a directory, under names without directories
and special characters. Each is checked against the digest that was approved.
"postern runs artifacts ID" shows the NUMBER of each file.`,
				example: "postern runs download run_... --out results\npostern runs download run_... 2",
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(&t.out, "out", ".", "`directory` to save into")
					fs.BoolVar(&t.force, "force", false, "overwrite files")
				},
				run: onServer(c, t.download),
			},
			{
				use: "statement ID", short: "print the signed statement of a run", complete: ids,
				long: `
Prints the statement of a run that has ended: an in-toto Statement in a DSSE
envelope, signed by the server. Keep it in a file. postern verify-run checks it
without the server.`,
				example: "postern runs statement run_... > statement.json",
				run:     onServer(c, printStatement),
			},
		},
	}
}

// noRun says that there is no such run.
func noRun(err error, id string) error {
	return notFoundAs(err, "there is no run %q; postern runs list shows those there are", id)
}

// outcomeWords returns an outcome for people: "timed out" for timed_out.
func outcomeWords(outcome string) string { return strings.ReplaceAll(outcome, "_", " ") }

// runState returns the state of a run in a word or two, or why it is over.
func runState(r api.Run) string {
	switch {
	case r.State == api.RunEnded && r.Outcome != "":
		return outcomeWords(r.Outcome)
	case r.State == api.RunRefused && r.Refused != "":
		return "refused: " + r.Refused
	}
	return r.State
}

func (t *runsTool) list(ctx context.Context, l *local, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	if t.query.Limit < 1 || t.query.Limit > 200 {
		return fmt.Errorf("%w: --limit: want 1 to 200", errUsage)
	}
	list, err := l.api.Runs.List(ctx, t.query)
	if err != nil {
		return err
	}
	rows := [][]string{{"ID", "STATE", "CONTRACT", "PROPOSED", "TOOK", "EXIT", "TASK"}}
	for _, r := range list {
		rows = append(rows, []string{r.ID, cell(runState(r)), cell(r.Contract), ago(r.CreatedAt), took(r.StartedAt, r.EndedAt), exitCode(r.ExitCode), cell(r.Task)})
	}
	return out.rows(list, rows)
}

// took returns how long something took, or "-" if it has not begun and ended.
func took(start, end *time.Time) string {
	if start == nil || end == nil {
		return "-"
	}
	switch d := end.Sub(*start); {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	default:
		return d.Round(time.Second).String()
	}
}

func exitCode(code *int) string {
	if code == nil {
		return "-"
	}
	return strconv.Itoa(*code)
}

// plainLetters are the characters of words that are shown without quotes.
const plainLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./=:,@%+*"

// commandLine returns a command line for a person: words with special characters are
// quoted. It is not for a shell.
func commandLine(args []string) string {
	words := make([]string, len(args))
	for i, a := range args {
		words[i] = a
		if a == "" || strings.ContainsFunc(a, func(r rune) bool { return !strings.ContainsRune(plainLetters, r) }) {
			words[i] = strconv.Quote(a)
		}
	}
	return strings.Join(words, " ")
}

func showRun(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	res, err := result(ctx, l, id)
	if err != nil {
		return noRun(err, id)
	}
	return out.facts(res, func() error {
		printRun(out, res.Run)
		return printResult(out, res)
	})
}

// result returns a run with its files.
func result(ctx context.Context, l *local, id string) (res runResult, err error) {
	if res.Run, err = l.api.Runs.Get(ctx, id); err != nil || res.State != api.RunEnded {
		return res, err
	}
	list, err := l.api.Runs.Artifacts(ctx, id)
	res.Artifacts = list.Artifacts
	return res, err
}

// printRun prints what was proposed.
func printRun(out io.Writer, r api.Run) {
	line := func(name, value string) {
		if value != "" {
			fmt.Fprintf(out, "%-10s %s\n", name, printable(value))
		}
	}
	line("run", r.ID)
	line("contract", r.Contract+"  "+r.ContractDigest)
	line("boundary", r.BoundaryDigest)
	line("template", r.Template)
	line("task", r.Task)
	line("asked by", r.Proposer+", "+ago(r.CreatedAt))
	for _, c := range r.Commands {
		line("command", commandLine(c))
	}
	for _, in := range r.Inputs {
		line("input", fmt.Sprintf("%s  %s, sha256 %s", in.Path, megabytes(in.Size), in.SHA256))
	}
	line("review", r.Action)
	if r.Approved != "" {
		line("", "a repeat of the run that "+r.Approved+" approved")
	}
	for _, w := range r.Warnings {
		line("WARNING", w)
	}
	line("sandbox", r.Sandbox)
	fmt.Fprintln(out)
}

// printResult prints what came of a run. Parts of it are hostile.
func printResult(out io.Writer, res runResult) error {
	for _, c := range res.Results {
		fmt.Fprintf(out, "%-8s %-8s %s\n", "exit "+exitCode(c.ExitCode), took(&c.StartedAt, c.EndedAt), commandLine(c.Command))
		if c.Reason != "" {
			fmt.Fprintf(out, "         %s\n", printable(c.Reason))
		}
		if text := strings.TrimSpace(c.Stderr); text != "" && (c.ExitCode == nil || *c.ExitCode != 0) {
			for l := range strings.SplitSeq(text, "\n") {
				fmt.Fprintf(out, "         | %s\n", printable(l))
			}
		}
	}
	for _, a := range res.Artifacts {
		fmt.Fprintf(out, "%-8s %d  %s  %s, %s\n", cell(a.State), a.N, cell(a.Path), cell(a.Type), megabytes(a.Size))
		if a.Reason != "" && a.State != api.ArtifactReleased {
			fmt.Fprintf(out, "         %s\n", cell(a.Reason))
		}
		if a.State == api.ArtifactWaiting {
			fmt.Fprintf(out, "         postern show %s, then postern approve %s\n", a.Action, a.Action)
		}
	}
	for _, name := range res.Saved {
		fmt.Fprintf(out, "saved    %s\n", printable(name))
	}
	state := runState(res.Run)
	if took := took(res.StartedAt, res.EndedAt); took != "-" {
		state += " after " + took
	}
	if res.Reason != "" {
		state += ": " + cut(res.Reason, longLine)
	}
	_, err := fmt.Fprintf(out, "%s %s\n", res.ID, state)
	if err == nil && res.State == api.RunEnded {
		_, err = fmt.Fprintf(out, "postern runs report %s shows what it did\n", res.ID)
	}
	return err
}

func reportRun(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	r, err := l.runReport(ctx, id)
	if err != nil {
		return err
	}
	return out.facts(r, func() error { return printRunReport(out, r) })
}

// runReport returns the report of a run. That of a run that has just ended is written a
// moment later.
func (l *local) runReport(ctx context.Context, id string) (r api.RunReport, err error) {
	for end := time.Now().Add(settleTime); ; {
		if r, err = l.api.Runs.Report(ctx, id); !errors.Is(err, errNotFound) {
			return r, err
		}
		of, err := l.api.Runs.Get(ctx, id)
		switch {
		case err != nil:
			return r, noRun(err, id)
		case of.State != api.RunEnded || of.StartedAt == nil || time.Now().After(end):
			return r, fmt.Errorf("%s has no report: it is %s; postern runs show %s shows why", id, cell(runState(of)), id)
		}
		if err := runPause(ctx, lookAgain/5); err != nil {
			return r, err
		}
	}
}

func (t *runsTool) events(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	for after := int64(0); ; {
		wait := time.Duration(0)
		if t.follow {
			wait = eventWait
		}
		list, err := l.api.Runs.Events(ctx, id, after, wait)
		if err != nil && ctx.Err() == nil {
			return noRun(err, id)
		}
		if err != nil {
			return nil //nolint:nilerr // interrupted: what there is has been printed
		}
		for _, e := range list.Events {
			after = e.N
			if err := printRunEvent(out, e); err != nil {
				return err
			}
		}
		over := list.State == api.RunEnded || list.State == api.RunRefused
		if len(list.Events) == 0 && (over || !t.follow) {
			return nil
		}
	}
}

// printRunEvent prints an event on one line. Its text may be hostile.
func printRunEvent(out *output, e api.RunEvent) error {
	if out.json {
		return out.line(e)
	}
	_, err := fmt.Fprintf(out, "%s  %-9s %s\n", e.At.Local().Format(time.DateTime), cell(e.Kind), runEventText(e))
	return err
}

func cancelRun(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	r, err := l.api.Runs.Cancel(ctx, id)
	if err != nil {
		return noRun(err, id)
	}
	_, err = fmt.Fprintf(out, "%s is cancelled: %s\n", r.ID, cell(runState(r)))
	return err
}

func listArtifacts(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	list, err := l.api.Runs.Artifacts(ctx, id)
	if err != nil {
		return noRun(err, id)
	}
	rows := [][]string{{"N", "STATE", "PATH", "TYPE", "SIZE", "SHA256", "ACTION"}}
	for _, a := range list.Artifacts {
		rows = append(rows, []string{strconv.Itoa(a.N), cell(a.State), cell(a.Path), cell(a.Type), megabytes(a.Size), a.SHA256, a.Action})
	}
	if err := out.rows(list.Artifacts, rows); err != nil || out.json {
		return err
	}
	for _, m := range list.Missing {
		fmt.Fprintf(out, "missing: %s, which the contract requires\n", cell(m))
	}
	if list.Why != "" {
		fmt.Fprintf(out, "the list is not complete: %s\n", cell(list.Why))
	}
	return nil
}

func (t *runsTool) download(ctx context.Context, l *local, args []string, out *output) error {
	if len(args) != 1 && len(args) != 2 {
		return fmt.Errorf("%w: want ID and optionally NUMBER, got %d arguments", errUsage, len(args))
	}
	list, err := l.api.Runs.Artifacts(ctx, args[0])
	if err != nil {
		return noRun(err, args[0])
	}
	files := list.Artifacts
	if len(args) == 2 {
		n, err := strconv.Atoi(args[1])
		if err != nil {
			return fmt.Errorf("%w: NUMBER: %q is not a number", errUsage, args[1])
		}
		files = nil
		for _, a := range list.Artifacts {
			if a.N == n {
				files = []api.RunArtifact{a}
			}
		}
		if len(files) == 0 {
			return fmt.Errorf("the run has no file %d; postern runs artifacts %s lists them", n, args[0])
		}
		if files[0].State != api.ArtifactReleased {
			return fmt.Errorf("file %d is %s, not released; postern runs artifacts %s lists them", n, cell(files[0].State), args[0])
		}
	}
	names, err := save(ctx, l, args[0], files, t.out, t.force)
	for _, name := range names {
		fmt.Fprintln(out, printable(name))
	}
	if err == nil && len(names) == 0 {
		_, err = fmt.Fprintln(os.Stderr, "no file was released")
	}
	return err
}

// save saves the released files of a run into a directory, and returns their names. A
// file that cannot be saved does not keep the others.
func save(ctx context.Context, l *local, id string, files []api.RunArtifact, dir string, force bool) (names []string, err error) {
	s, err := newSaver(dir, force)
	if err != nil {
		return nil, err
	}
	defer s.root.Close()
	var errs []error
	for _, a := range files {
		if a.State != api.ArtifactReleased {
			continue
		}
		name, err := saveOne(ctx, l, s, id, a)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		names = append(names, name)
	}
	return names, errors.Join(errs...)
}

func saveOne(ctx context.Context, l *local, s *saver, id string, a api.RunArtifact) (string, error) {
	body, err := l.api.Runs.Download(ctx, id, a.N)
	if err != nil {
		return "", fmt.Errorf("download %s: %w", cell(a.Path), err)
	}
	defer body.Close()
	return s.save(a.Path, a.SHA256, body)
}

func printStatement(ctx context.Context, l *local, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	b, err := l.api.Runs.Statement(ctx, id)
	if err != nil {
		return notFoundAs(err, "there is no statement of run %q: it is signed when the run's sandbox is gone; postern runs show prints the run's state", id)
	}
	_, err = fmt.Fprintln(out, strings.TrimSpace(string(b)))
	return err
}
