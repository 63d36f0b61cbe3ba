package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/client"
	"postern/internal/api"
	"postern/internal/contract"
)

const runHelp = `
Runs a command in a sandbox of its own, under a contract. The contract says which
programs may start, which files the run sees, where it connects, what its limits are,
and which files may leave. The run is reviewed before it starts: unless a policy rule
decides, a person does (postern review). Afterwards the sandbox is destroyed, and the
report says of each clause whether it was kept.

CONTRACT is a file. With --name the server's stored contract is used instead. The
words after -- are the command. With --file the script becomes an input, the
interpreter for its name runs it, and the words after -- are its arguments: python3
for .py, bash for .sh, node for .js and .mjs, perl for .pl, ruby for .rb.

--command LINE gives one command of several. They run one after the other, in the same
sandbox, in the order of the flags. LINE has quotes as in a shell, and no shell reads
it. After one that fails the rest does not run, unless the contract says
on_failure: {exit: continue}.

Without a PATH, an input goes to the entry of files.inputs that has its name, else to
the first pattern there that matches it. In a directory, symbolic links and special
files are left out.

The exit status is that of the last command, or one of these:

  120  refused: the contract is not valid or wider than the boundary, the review
       refused the run, or evidence is missing
  121  violated: the run started, or tried to start, a program that its contract does
       not allow, was over a limit of output or disk, or something else happened that
       the contract does not allow; refused connections, opens and mail do not count
  122  nobody reviewed it within --wait-review, and it was cancelled
  123  lost or cancelled, or the server could not be reached
  124  timed out
  125  too many runs: of this proposer within an hour, or that wait for their review;
       the message says which limit it is and when to try again

Ctrl-C cancels the run and waits for its end. A second Ctrl-C leaves at once.`

// The exit statuses of postern run, apart from the program's own.
const (
	statusRefused    = 120
	statusViolated   = 121
	statusUnreviewed = 122
	statusLost       = 123
	statusTimedOut   = 124
	statusFull       = 125
)

// A statusError is an error with an exit status of its own.
type statusError struct {
	status int
	err    error
}

func (e *statusError) Error() string { return e.err.Error() }
func (e *statusError) Unwrap() error { return e.err }

// withStatus returns err with an exit status, unless it has one, is about the command
// line or is nil.
func withStatus(status int, err error) error {
	var has *statusError
	var exit exitError
	if err == nil || errors.As(err, &has) || errors.As(err, &exit) || errors.Is(err, errUsage) {
		return err
	}
	return &statusError{status, err}
}

// A runTool is the run command with its flags.
type runTool struct {
	conf Config

	name, file            string
	inputs, commands      []string
	task                  string
	check, cleanup        string
	export, timeout       string
	missing               []string
	events, detach, force bool
	first                 bool
	wait                  time.Duration
	out                   string
}

func runCommand() *command {
	t := &runTool{}
	return &command{
		use: "run [CONTRACT] [flags] [--] [COMMAND [ARGUMENT...]]", short: "run a command under a contract, and report what it did",
		long: runHelp,
		example: `
  postern run --first
  postern run report.yaml --input sales.csv --out results -- python3 report.py
  postern run report.yaml --file report.py --task 'weekly totals' -- --month 11
  postern run report.yaml --command 'python3 fetch.py' --command 'python3 report.py "June 2026"'
  postern run --name weekly-report --detach -- python3 /work/report.py`,
		facts: true,
		flags: func(fs *pflag.FlagSet) {
			t.conf.location(fs)
			t.flags(fs)
		},
		run: func(ctx context.Context, args []string, out *output) error {
			run := t.run
			if t.first {
				run = t.runFirst
			}
			err := onServer(&t.conf, run)(ctx, args, out)
			return withStatus(statusLost, err)
		},
	}
}

func (t *runTool) flags(fs *pflag.FlagSet) {
	fs.BoolVar(&t.first, "first", false, "go through a small run step by step, as a checklist for a new server; without CONTRACT and COMMAND")
	fs.StringVar(&t.name, "name", "", "`name` of a contract that the server has stored, instead of CONTRACT")
	fs.StringVar(&t.file, "file", "", "`script` to add as an input and run; the words after -- are its arguments")
	fs.Var(&addressList{&t.commands}, "command", "`line` with a command of the run, instead of the words after --; may be repeated: they run one after the other")
	fs.Var(&addressList{&t.inputs}, "input", "`FILE|DIR[=PATH]`: add a file or directory of this machine as a read-only input; may be repeated")
	fs.StringVar(&t.task, "task", "", "`text` that says what the run is for, for the people who review it (default: the contract's description, else the command)")
	fs.StringVar(&t.check, "check", "", "answer for the review: the smallest `check` that can be undone")
	fs.StringVar(&t.timeout, "on-timeout", "", "answer for the review: `what` happens when its time is over")
	fs.StringVar(&t.cleanup, "cleanup", "", "answer for the review: `what` is cleaned up, and how")
	fs.StringVar(&t.export, "export", "", "answer for the review: `what` leaves, and for whom")
	fs.Var(&addressList{&t.missing}, "missing", "answer for the review: `evidence` that is missing, so that the run is refused; may be repeated")
	fs.BoolVar(&t.detach, "detach", false, "propose the run, print its ID and return")
	fs.DurationVar(&t.wait, "wait-review", 10*time.Minute, "how long to wait for the review, and with --out for decisions about files; 0 means without end")
	fs.StringVar(&t.out, "out", "", "`directory` to save released artifacts into")
	fs.BoolVar(&t.force, "force", false, "with --out, overwrite files")
	fs.BoolVar(&t.events, "events", false, "print each event as a line of JSON, as it happens")
}

// run proposes the run, waits for it and returns its exit status as an error.
func (t *runTool) run(ctx context.Context, l *local, args []string, out *output) error {
	source, command, err := t.arguments(args, out.flags.ArgsLenAtDash())
	if err != nil {
		return err
	}
	if t.events && out.json || t.detach && (t.events || t.out != "") {
		return fmt.Errorf("%w: --events and --json, and --detach with --events or --out, exclude each other", errUsage)
	}
	proposal := api.NewRun{Contract: t.name, Task: t.task}
	text, err := t.contract(ctx, l, source)
	if err != nil {
		return withStatus(statusRefused, err)
	}
	if t.name == "" {
		proposal.ContractText = string(text)
	}
	c, err := contract.Parse(text)
	if err != nil {
		return &statusError{statusRefused, fmt.Errorf("%s: %w", cmp.Or(source, t.name), err)}
	}
	ins := &runInputs{contract: c}
	defer ins.close()
	if proposal.Commands, err = t.prepare(ins, command); err != nil {
		return withStatus(statusRefused, err)
	}
	for _, in := range ins.list {
		proposal.Inputs = append(proposal.Inputs, api.NewInput{Path: in.path, Size: in.size, SHA256: in.sha256})
	}
	proposal.Answers = t.answers(c)
	proposal.Task = cmp.Or(t.task, c.Description, "to run "+cut(commandLines(proposal.Commands), longLine))
	p := newRunScreen(os.Stderr)
	defer p.end()
	for _, n := range ins.notes {
		p.line("%s", n)
	}
	r, err := t.propose(ctx, l, proposal, ins)
	if err != nil {
		return refusal(err)
	}
	if t.detach && r.State != api.RunRefused {
		return out.facts(r, func() error {
			_, err := fmt.Fprintln(out, r.ID)
			return err
		})
	}
	return (&follower{t: t, l: l, out: out, p: p, id: r.ID}).follow(ctx)
}

// arguments splits the arguments into the contract's file and the command. Dash is how
// many stand before "--"; negative if there is none.
func (t *runTool) arguments(args []string, dash int) (source string, command []string, err error) {
	command = args
	if t.name == "" {
		if len(args) == 0 || dash == 0 {
			return "", nil, fmt.Errorf("%w: CONTRACT is missing; postern contract init writes one", errUsage)
		}
		source, command = args[0], args[1:]
		dash--
	}
	switch {
	case dash > 0 || dash < 0 && len(command) > 0 && strings.HasPrefix(command[0], "-"):
		return "", nil, fmt.Errorf("%w: unexpected argument %q; the command follows --", errUsage, command[0])
	case len(t.commands) > 0 && (t.file != "" || len(command) > 0):
		return "", nil, fmt.Errorf("%w: --command, and --file or a command after --, exclude each other: give each command with --command", errUsage)
	case t.file == "" && len(command) == 0 && len(t.commands) == 0:
		return "", nil, fmt.Errorf("%w: COMMAND is missing: write it after --, give several with --command, or name a script with --file", errUsage)
	}
	return source, command, nil
}

// contract returns the text of the contract.
func (t *runTool) contract(ctx context.Context, l *local, source string) ([]byte, error) {
	if t.name != "" {
		c, err := l.api.Contracts.Get(ctx, t.name)
		if err != nil {
			return nil, noContract(err, t.name)
		}
		return []byte(c.Text), nil
	}
	b, err := readContract(source)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("contract: %w; for a contract on the server use --name", err)
	}
	return b, err
}

// interpreter returns the program that runs a script, by the end of its name, or "".
func interpreter(script string) string {
	switch filepath.Ext(script) {
	case ".py":
		return "python3"
	case ".sh":
		return "bash"
	case ".js", ".mjs":
		return "node"
	case ".pl":
		return "perl"
	case ".rb":
		return "ruby"
	}
	return ""
}

// prepare adds the inputs and returns the commands of the run.
func (t *runTool) prepare(ins *runInputs, command []string) ([][]string, error) {
	for _, in := range t.inputs {
		if err := ins.add(in); err != nil {
			return nil, err
		}
	}
	if len(t.commands) > 0 {
		var list [][]string
		for _, line := range t.commands {
			words, err := contract.Words(line)
			if err != nil {
				return nil, fmt.Errorf("%w: --command: %w", errUsage, err)
			}
			list = append(list, words)
		}
		return list, nil
	}
	if t.file == "" {
		return [][]string{command}, nil
	}
	program := interpreter(t.file)
	if program == "" {
		return nil, fmt.Errorf("%w: --file: %s: no interpreter is known for its name (.py, .sh, .js, .mjs, .pl or .rb); use --input, and write the program after --", errUsage, t.file)
	}
	if err := ins.addFile(t.file, ""); err != nil {
		return nil, fmt.Errorf("--file: %w", err)
	}
	return [][]string{append([]string{program, ins.list[len(ins.list)-1].path}, command...)}, nil
}

// answers returns the answers of the review. What the run needs is what the person has
// written into the contract.
func (t *runTool) answers(c *contract.Contract) api.RunAnswers {
	yes := true
	network := len(c.Network.Allow) > 0 || len(c.Packages) > 0 || len(c.Credentials) > 0
	files := len(c.Files.Read) > 0 || len(c.Files.Write) > 0 || len(c.Files.Inputs) > 0
	credentials := len(c.Credentials) > 0
	return api.RunAnswers{
		Execution: &yes, Network: &network, Files: &files, Credentials: &credentials,
		Check: t.check, Timeout: t.timeout, Cleanup: t.cleanup, Export: t.export, Missing: t.missing,
	}
}

// propose proposes the run and uploads its inputs.
func (t *runTool) propose(ctx context.Context, l *local, n api.NewRun, ins *runInputs) (api.Run, error) {
	r, err := l.api.Runs.Propose(ctx, n)
	if err != nil || r.State != api.RunDraft {
		return r, err
	}
	for i := range ins.list {
		if err = upload(ctx, l, r.ID, &ins.list[i]); err != nil {
			break
		}
	}
	if err == nil {
		var now api.Run
		if now, err = l.api.Runs.Submit(ctx, r.ID); err == nil {
			return now, nil
		}
	}
	away, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	_, _ = l.api.Runs.Cancel(away, r.ID) // best effort: a draft runs nothing
	return r, err
}

func upload(ctx context.Context, l *local, id string, in *runInput) error {
	f, err := in.open()
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := l.api.Runs.Upload(ctx, id, in.path, io.LimitReader(f, in.size)); err != nil {
		return fmt.Errorf("input %s: %w", in.path, err)
	}
	return nil
}

// commandLines returns command lines for a person, see [commandLine].
func commandLines(list [][]string) string {
	lines := make([]string, len(list))
	for i, args := range list {
		lines[i] = commandLine(args)
	}
	return strings.Join(lines, ", then ")
}

// refusal gives an answer of the server that refuses the run its exit status.
func refusal(err error) error {
	var said *client.Error
	if errors.As(err, &said) && said.Status == http.StatusTooManyRequests {
		text := printable(err.Error())
		if said.RetryAfter > 0 && !strings.Contains(text, "try again in") {
			text += "; try again in " + said.RetryAfter.String()
		}
		return &statusError{statusFull, errors.New(text)}
	}
	if errors.As(err, &said) && said.Status >= 400 && said.Status < 500 && !slices.Contains([]int{401, 404, 408}, said.Status) {
		return &statusError{statusRefused, errors.New(printable(err.Error()))}
	}
	return err
}
