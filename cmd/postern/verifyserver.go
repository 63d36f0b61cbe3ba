package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"

	"github.com/spf13/pflag"

	"postern/internal/api"
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
outside. Run it before the machine's first real work, or in CI. It takes about a minute.`

// A verifyTool is the verify command with its flags.
type verifyTool struct {
	conf Config

	template, log, junit string
	only                 []string
}

func verifyCommand() *command {
	v := &verifyTool{}
	return &command{
		use: "verify", short: "try on this server the attacks that sandboxes must withstand", long: verifyHelp, facts: true,
		example: "postern verify\npostern verify --only egress --only secrets --junit verify.xml\npostern verify --template data-tools --json",
		flags: func(fs *pflag.FlagSet) {
			v.conf.location(fs)
			fs.StringVar(&v.template, "template", "base", "`id or name` of the template that sandboxes start from; it needs python3")
			fs.Var(&addressList{&v.only}, "only", "make only this `group` of checks: files, egress, ports, state, secrets, teardown, templates or bombs; may be repeated")
			fs.StringVar(&v.junit, "junit", "", "also write the results to this `file`, as JUnit XML")
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
	begun, err := l.api.Verifications.Begin(ctx, api.NewVerification{Template: v.template, Checks: len(checks)})
	if err != nil {
		return fmt.Errorf("announce the verification: %w", err)
	}
	server := verification.Server{API: l.api, HTTP: &http.Client{Transport: l.http.Transport, CheckRedirect: l.http.CheckRedirect}, Base: l.address(""), Template: v.template, ID: begun.ID, Settings: verification.Settings(begun.Opens)}
	if l.base == "" {
		if server.Machine, err = verification.FindMachine(v.conf.Data, v.conf.socket(), v.log); err != nil {
			fmt.Fprintln(os.Stderr, "postern verify: this user cannot look at the server's process, so some checks will fail:", err)
		}
	}
	report, err := verification.Run(ctx, server, checks, func(r verification.Result) {
		if !out.json {
			fmt.Fprint(out, r.Line())
		}
	})
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
		_, err := fmt.Fprintf(out, "\n%d passed, %d failed, %d open by configuration; recorded as %s\n%s\n", report.Passed, report.Failed, report.Open, report.ID, report.Digest())
		return err
	})); err != nil {
		return err
	}
	if report.Failed > 0 {
		return exitError(1)
	}
	return nil
}
