package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/api"
	"postern/internal/contract"
)

// maxLearnt is how many starts of programs are read. A record has at most as many.
const maxLearnt = 1000

// A learnTool is the command contract learn with its flags.
type learnTool struct {
	conf Config

	name, template, out string
	inputs, write       []string
	time, wait          time.Duration
}

// learnContract is the command that writes a contract from a run.
func learnContract() *command {
	t := &learnTool{}
	return &command{
		use: "learn [flags] -- COMMAND [ARGUMENT...]", short: "run a command once, closed off, and write the narrowest contract that it kept",
		long: `
Runs COMMAND once in a trial sandbox that may start every program and reaches nothing
outside; each refusal is noted. Packages come from the registries that the operator
allows, through the operator's mirrors if there are (--package-mirror). Then it prints
the narrowest contract that this run kept: the programs that it started, its children
included, with their arguments; the directories that it wrote; the package managers that
installed. Comments say what was refused and what is left open.

A person reviews the trial before it starts, as every run. Read the contract before you
use it: it allows what that one run did, right or wrong. Names that differ from run to
run, such as those of temporary files, become *.

The exit status is 1 if the command did not succeed; the contract is written all the
same. It is 2 if a start could not be put into a pattern.`,
		example: `
  postern contract learn --input report.py --input sales.csv --out report.yaml -- python3 report.py sales.csv
  postern contract check report.yaml`,
		flags: func(fs *pflag.FlagSet) {
			t.conf.location(fs)
			fs.StringVar(&t.name, "name", "", "`name` of the contract (default: that of the file of --out, else learnt)")
			fs.StringVar(&t.template, "template", "", "`template` that the run starts from (default: base)")
			fs.StringVar(&t.out, "out", "", "`file` to write the contract to, which must not exist (default: standard output)")
			fs.Var(&addressList{&t.inputs}, "input", "`FILE|DIR[=PATH]`: add a file or directory of this machine as a read-only input, below the first --write; may be repeated")
			fs.Var(&addressList{&t.write}, "write", "`directory` in the sandbox that the run may write; the first is the working directory; may be repeated (default: /work)")
			fs.DurationVar(&t.time, "time", 10*time.Minute, "how long the trial may take")
			fs.DurationVar(&t.wait, "wait-review", 10*time.Minute, "how long to wait for the review; 0 means without end")
		},
		run: func(ctx context.Context, args []string, out *output) error {
			return onServer(&t.conf, t.learn)(ctx, args, out)
		},
	}
}

// learn performs the trial and writes the contract.
func (t *learnTool) learn(ctx context.Context, l *local, args []string, out *output) error {
	if len(args) == 0 {
		return fmt.Errorf("%w: COMMAND is missing: write it after --", errUsage)
	}
	trial, ins, err := t.trial(args)
	if err != nil {
		return err
	}
	defer ins.close()
	text := contract.TrialText(trial)
	c, err := contract.Parse(text)
	if err != nil {
		return fmt.Errorf("%w: the trial: %w", errUsage, err)
	}
	if t.out != "" {
		// Before the trial, which may take long.
		if _, err := os.Lstat(t.out); err == nil {
			return fmt.Errorf("%s exists already; choose another name", t.out)
		}
	}
	run := &runTool{
		wait: t.wait, check: "the run itself: it is a trial, and reaches nothing outside but package registries", timeout: "it is ended; what it did until then is learnt",
		cleanup: "the sandbox is destroyed", export: "nothing: no file leaves",
	}
	n := api.NewRun{ContractText: string(text), Task: "a trial from which a contract is learnt: " + cut(commandLine(args), longLine), Commands: [][]string{args}, Answers: run.answers(c)}
	for _, in := range ins.list {
		n.Inputs = append(n.Inputs, api.NewInput{Path: in.path, Size: in.size, SHA256: in.sha256})
	}
	p := newRunScreen(os.Stderr)
	defer p.end()
	for _, note := range ins.notes {
		p.line("%s", note)
	}
	r, err := run.propose(ctx, l, n, ins)
	if err != nil {
		return refusal(err)
	}
	f := &follower{t: run, l: l, out: out, p: p, id: r.ID}
	if err := f.watch(ctx, t.wait); err != nil {
		if ctx.Err() != nil {
			return f.interrupted(ctx)
		}
		if errors.Is(err, errUnreviewed) {
			_, cerr := l.api.Runs.Cancel(ctx, r.ID)
			return errors.Join(fmt.Errorf("%s: %w; it is cancelled", r.ID, err), cerr)
		}
		return fmt.Errorf("%s: %w", r.ID, err)
	}
	p.end()
	if r, err = l.api.Runs.Get(ctx, r.ID); err != nil {
		return err
	}
	if r.StartedAt == nil {
		return fmt.Errorf("the trial %s did not start: %s: %s", r.ID, cell(runState(r)), cell(r.Reason))
	}
	if err := l.saw(ctx, &trial, r); err != nil {
		return err
	}
	learnt, lacks, err := contract.Learn(trial)
	if err != nil {
		return err
	}
	if err := t.save(learnt, out); err != nil {
		return err
	}
	for _, s := range lacks {
		fmt.Fprintf(os.Stderr, "no pattern can name this start, so the contract does not allow it: %s\n", printable(s))
	}
	if r.Outcome != api.RunSucceeded {
		fmt.Fprintf(os.Stderr, "the trial %s %s: %s; the contract has what it did until then\n", r.ID, cell(outcomeWords(r.Outcome)), cell(r.Reason))
		return exitError(1)
	}
	if len(lacks) > 0 {
		return exitError(2)
	}
	return nil
}

// trial returns the trial of a command, with its inputs.
func (t *learnTool) trial(args []string) (contract.Trial, *runInputs, error) {
	name := t.name
	if name == "" && t.out != "" {
		base := t.out[strings.LastIndexByte(t.out, '/')+1:]
		name = strings.TrimSuffix(strings.TrimSuffix(base, ".yaml"), ".yml")
	}
	if name == "" {
		name = "learnt"
	}
	trial := contract.Trial{Name: name, Template: t.template, Commands: [][]string{args}, Write: t.write, Time: t.time, Memory: 1 << 30, Disk: 1 << 30, Output: 16 << 20}
	if len(trial.Write) == 0 {
		trial.Write = []string{"/work"}
	}
	if i := slices.IndexFunc(trial.Write, func(p string) bool { return !contract.Absolute(p) }); i >= 0 {
		return trial, nil, fmt.Errorf("%w: --write: %q is not an absolute path", errUsage, trial.Write[i])
	}
	dir := trial.Write[0]
	ins := &runInputs{contract: &contract.Contract{Files: contract.Files{Write: trial.Write, Inputs: []contract.Input{{Path: dir + "/**"}}}}}
	for _, in := range t.inputs {
		if err := ins.add(in); err != nil {
			ins.close()
			return trial, nil, err
		}
	}
	for _, in := range ins.list {
		trial.Inputs = append(trial.Inputs, contract.Input{Path: in.path, Size: contract.Size(in.size), SHA256: in.sha256, Required: true})
	}
	return trial, ins, nil
}

// saw adds to a trial what the records have of its run.
func (l *local) saw(ctx context.Context, trial *contract.Trial, r api.Run) error {
	report, err := l.runReport(ctx, r.ID)
	if err != nil {
		return err
	}
	record, err := l.api.Sandboxes.Commands(ctx, r.Sandbox, maxLearnt)
	if err != nil {
		return fmt.Errorf("read the record of programs of %s: %w", r.Sandbox, err)
	}
	for _, c := range record.Commands {
		if c.Verdict != "allowed" || c.UID == 0 { // root is the guest alone
			continue
		}
		trial.Starts = append(trial.Starts, contract.Started{Path: c.Path, Name: c.Name, Dir: c.Dir, Args: c.Args, Fixed: c.Fixed, Cut: !c.Exact})
	}
	if !record.Complete || record.Dropped > 0 || record.Missed > 0 || uint64(len(record.Commands)) < record.Started {
		trial.Missing = append(trial.Missing, fmt.Sprintf("the record has %d of %d starts of programs; the others are not in this contract", len(trial.Starts), record.Started))
	}
	for _, c := range report.Cut {
		trial.Missing = append(trial.Missing, "the list of "+c+" was shortened")
	}
	for _, w := range report.Writes {
		if strings.HasPrefix(w.Path, "/dev/") || strings.HasPrefix(w.Path, "/proc/") {
			continue
		}
		trial.Writes = append(trial.Writes, contract.Opening{Path: w.Path, Refused: w.Count == w.Refused})
	}
	for _, n := range report.Network {
		if !n.Denied {
			continue
		}
		to := strings.TrimSuffix(n.Host, ".")
		if to == "" {
			to = n.Address
		}
		if i := slices.IndexFunc(trial.Refused, func(c contract.Contact) bool { return c.To == to }); i >= 0 {
			trial.Refused[i].Count += n.Count
			continue
		}
		trial.Refused = append(trial.Refused, contract.Contact{To: to, Why: n.Reason, Count: n.Count})
	}
	trial.Time = 0
	if r.StartedAt != nil && r.EndedAt != nil {
		trial.Time = r.EndedAt.Sub(*r.StartedAt)
	}
	trial.Memory, trial.Disk, trial.Output = contract.Size(report.Usage.MemoryBytes), contract.Size(report.Usage.DiskBytes), contract.Size(report.Usage.OutputBytes)
	return nil
}

// save writes the contract to the file of --out, or to standard output.
func (t *learnTool) save(text []byte, out *output) error {
	if t.out == "" {
		_, err := out.Write(text)
		return err
	}
	if err := writeContract(t.out, text); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "%s is written; read it, then run postern contract check %s\n", t.out, t.out)
	return err
}
