package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/api"
	"postern/internal/contract"
	"postern/internal/verification"
)

const verifyHelp = `
Tries attacks on the running server from inside disposable sandboxes: reading the
host's files, reaching the network, seeing the value of a secret, surviving the end of
the sandbox, exhausting the machine, and more. It creates the sandboxes, a secret and a
template, and removes them afterwards.

Each line says what was tried, what was expected and what was seen. A check that could
not be made counts as failed. A check whose attempts reach only what the operator opened
is "open", with the setting's name, such as --egress=allow: the server says which settings
it has. If more is reached than they open, the check fails. The exit status is 1 if a
check failed. The audit has an
entry with the counts and a digest.

Run it as root on the server's machine, because some checks look at the machine from
outside. Run it before the machine's first real work, or in CI. It takes about a minute.

With --contract it tries the clauses of a contract instead: programs, files, hosts, ports,
secrets, mail and limits that the contract does not have. The clause commands is tried
under the contract itself. The others need a program that can try them, so they are tried
under the same contract with python3 allowed as well; each line says which. A person
reviews both first, as for every run. A clause that cannot be tried says why. Afterwards the
sandboxes and both contracts are gone; the record of what was tried remains.`

// A verifyTool is the verify command with its flags.
type verifyTool struct {
	conf Config

	template, log, junit string
	only                 []string

	contract string
	wait     time.Duration // for the review of the contract's trial
}

func verifyCommand() *command {
	v := &verifyTool{}
	return &command{
		use: "verify", short: "try on this server the attacks that sandboxes must withstand", long: verifyHelp, facts: true,
		example: "postern verify\npostern verify --only egress --only secrets --junit verify.xml\npostern verify --template data-tools --json\npostern verify --contract report.yaml",
		flags: func(fs *pflag.FlagSet) {
			v.conf.location(fs)
			fs.StringVar(&v.template, "template", "base", "`id or name` of the template that sandboxes start from; it needs python3")
			fs.Var(&addressList{&v.only}, "only", "make only this `group` of checks: files, egress, ports, state, secrets, teardown, templates or bombs; may be repeated")
			fs.StringVar(&v.junit, "junit", "", "also write the results to this `file`, as JUnit XML")
			fs.StringVar(&v.contract, "contract", "", "try the clauses of this contract instead: a `file`, or the name of a stored contract")
			fs.DurationVar(&v.wait, "wait-review", 10*time.Minute, "with --contract: how long to wait for the review of its trial")
			fs.StringVar(&v.log, "log", "", "`file` with the server's log (default: the file that is the server's standard error)")
		},
		run: onServer(&v.conf, v.verify),
	}
}

func (v *verifyTool) verify(ctx context.Context, l *local, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	checks, err := verification.Select(v.only)
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	count := len(checks)
	var trial *contract.Contract
	if v.contract != "" {
		if len(v.only) > 0 || out.flags.Changed("template") {
			return fmt.Errorf("%w: --contract, and --only or --template, exclude each other: all clauses are tried, from the contract's template", errUsage)
		}
		if trial, err = v.trial(ctx, l); err != nil {
			return err
		}
		count, v.template = verification.TrialChecks(trial), cmp.Or(trial.Template, "base")
	}
	begun, err := l.api.Verifications.Begin(ctx, api.NewVerification{Template: v.template, Checks: count})
	if err != nil {
		return fmt.Errorf("announce the verification: %w", err)
	}
	server := verification.Server{API: l.api, HTTP: &http.Client{Transport: l.http.Transport, CheckRedirect: l.http.CheckRedirect}, Base: l.address(""), Template: v.template, ID: begun.ID, Settings: verification.Settings(begun.Opens)}
	if l.base == "" {
		if server.Machine, err = verification.FindMachine(v.conf.Data, v.conf.socket(), v.log); err != nil {
			fmt.Fprintln(os.Stderr, "postern verify: this user cannot look at the server's process, so some checks will fail:", err)
		}
	}
	seen := func(r verification.Result) {
		if !out.json {
			fmt.Fprint(out, r.Line())
		}
	}
	var report verification.Report
	if trial != nil {
		report, err = verification.RunTrial(ctx, server, trial, os.Stderr, v.wait, seen)
		if len(report.Results) == 0 { // nothing was tried; the record has a beginning without an end
			return err
		}
	} else {
		report, err = verification.Run(ctx, server, checks, seen)
	}
	if err != nil {
		err = fmt.Errorf("clean up: %w", err)
	}
	err = errors.Join(err, l.api.Verifications.End(context.WithoutCancel(ctx), report.ID, api.VerificationResult{Passed: report.Passed, Failed: report.Failed, Open: report.Open, Digest: report.Digest()}))
	if v.junit != "" {
		b, err2 := report.JUnit()
		if err2 == nil {
			err2 = os.WriteFile(v.junit, b, 0o644) //nolint:gosec // CI reads it
		}
		err = errors.Join(err, err2)
	}
	if err := errors.Join(err, out.facts(report, func() error {
		return v.sum(out, &report)
	})); err != nil {
		return err
	}
	if report.Failed > 0 {
		return exitError(1)
	}
	return nil
}

// trial returns the contract whose clauses are tried.
func (v *verifyTool) trial(ctx context.Context, l *local) (*contract.Contract, error) {
	text, err := readContract(v.contract)
	if errors.Is(err, fs.ErrNotExist) {
		stored, err2 := l.api.Contracts.Get(ctx, v.contract)
		if err2 != nil {
			return nil, fmt.Errorf("--contract: %w, and no contract that the server has stored: %w", err, err2)
		}
		text, err = []byte(stored.Text), nil
	}
	if err != nil {
		return nil, fmt.Errorf("--contract: %w", err)
	}
	c, err := contract.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("--contract: %s: %w", v.contract, err)
	}
	return c, nil
}

// sum prints the last lines of the text.
func (v *verifyTool) sum(out *output, r *verification.Report) error {
	if r.Contract == "" {
		_, err := fmt.Fprintf(out, "\n%d passed, %d failed, %d open by configuration; recorded as %s\n%s\n", r.Passed, r.Failed, r.Open, r.ID, r.Digest())
		return err
	}
	_, err := fmt.Fprintf(out, "\nThe probe's contract: %s.\n%d clauses kept, %d holes, %d not tried; contract %s; recorded as %s\n%s\n",
		strings.Join(r.Changes, "; "), r.Passed, r.Failed, r.Untried, r.Contract, r.ID, r.Digest())
	return err
}
