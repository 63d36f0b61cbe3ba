package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	_ "time/tzdata"

	"github.com/spf13/pflag"

	"postern/internal/api"
	"postern/internal/policy"
)

// A policyTool is the policy command with its flags.
type policyTool struct {
	conf                  Config
	policy, tests, reason string
}

func policyCommand() *command {
	var p policyTool
	onServer := func(f func(context.Context, *local, []string, *output) error) runner {
		return onServer(&p.conf, f)
	}
	return &command{
		use: "policy", short: "rules that allow, ask and deny", long: `
A policy is a list of rules. The first that matches an action says what happens:
allow, ask or deny. If none matches, the mode of the inbox decides on an email,
and a person decides on everything else. Begin with the policy in force:

  postern policy show > policy.yaml

and write rules such as these:

  version: 1
  zone: Europe/Berlin               # of hour and weekday; UTC if left out
  grave: [lookalike, hidden_recipient, second_account, secret]
                                    # findings that an approver must tick; these if left out
  record: [input]                   # digests of what is typed in sandboxes; none if left out
  rules:
    - id: programs
      kind: email.send              # or a list of kinds; left out: all
      when: files.exists(f, f.ext in ['.exe', '.scr'])
      then: deny
      reason: we send no programs
    - id: night
      when: hour < 7 || weekday in ['sat', 'sun']
      then: ask
      who: [anna, "role:owner"]     # left out: whoever decides
      approvers: 2                  # so many of them
      within: 12h                   # then it is denied
      step_up: true                 # an approver proves a second factor
    - id: own
      kind: email.send
      when: to.all(a, a.under('example.com'))
      then: allow
    - id: small
      kind: email.send
      then: ask
      chat: true                    # people may decide in Slack and Telegram

A condition is a CEL expression over these:

` + variables() + `

A file of tests says what the policy must decide:

  tests:
    - name: nobody sends programs
      request:
        kind: email.send
        to: [bob@example.com]
        files: [{name: setup.exe, type: application/octet-stream, size: 9000}]
      want: deny
      rule: programs                # optional, as are approvers, who …

No rule opens an inbox that is read_only or gated_all, and none decides in place
of a person on a mode, an allow list or the policy itself. A condition that
cannot be evaluated never lets anything through. docs/reference/policy.md tells more.`,
		flags: p.conf.location,
		below: []*command{
			{use: "show [VERSION]", short: "print the policy in force, or an earlier version", facts: true, run: onServer(p.show)},
			{use: "history", short: "list the versions, with their authors and approvers", lists: true, run: onServer(p.history)},
			{use: "check FILE", at: onFiles, short: "check a policy for errors", run: p.check},
			{
				use: "test TESTS", at: byItself, short: "run tests against a policy",
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(&p.policy, "policy", "", "the policy's `file`; empty means what holds on the server")
				},
				run: p.test,
			},
			{use: "diff FILE", short: "print how a file differs from the policy in force", run: onServer(p.diff)},
			{
				use: "propose FILE", short: "propose a file as the policy; an owner approves it",
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(&p.tests, "tests", "", "a `file` of tests that come with it; empty means those of the version that holds")
					fs.StringVar(&p.reason, "reason", "", "`text` for who decides")
				},
				run: onServer(p.propose),
			},
		},
	}
}

// variables lists what conditions can ask of.
func variables() string {
	var b strings.Builder
	for _, v := range policy.Variables {
		fmt.Fprintf(&b, "  %-9s %-20s %s\n", v.Name, v.Type, v.Meaning)
	}
	b.WriteString("  under()   string.under(domain) whether an address or a name is of a domain or below it")
	return b.String()
}

// text reads a file as small as a policy is.
func (p *policyTool) text(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, policy.MaxText+1)) // one more: it is then refused with its limit
}

func (p *policyTool) check(_ context.Context, args []string, out *output) error {
	path, err := oneArg(args, "FILE")
	if err != nil {
		return err
	}
	b, err := p.text(path)
	if err != nil {
		return err
	}
	d, err := policy.Parse(b)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	rows := [][]string{{"RULE", "LINE", "KINDS", "SAYS", "IF"}}
	for _, c := range d.Clauses() {
		kinds, when := policy.JoinKinds(c.Kinds), strings.Join(strings.Fields(c.When), " ")
		if kinds == "" {
			kinds = "all"
		}
		if when == "" {
			when = "always"
		}
		rows = append(rows, []string{c.ID, strconv.Itoa(c.Line), kinds, string(c.Then), printable(when)})
	}
	if err := out.table(rows); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s is in order; its digest is %x\n", path, d.Digest())
	return err
}

// errTests means that tests fail; they have been printed.
var errTests = errors.New("tests fail")

func (p *policyTool) test(ctx context.Context, args []string, out *output) error {
	path, err := oneArg(args, "TESTS")
	if err != nil {
		return err
	}
	b, err := p.text(path)
	if err != nil {
		return err
	}
	trials, err := policy.ParseTrials(b)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	d, err := p.document(ctx)
	if err != nil {
		return err
	}
	failed := 0
	for _, t := range trials {
		v, err := t.Check(d)
		by := v.Rule
		if by == "" {
			by = "no rule"
		}
		if err != nil {
			failed++
			fmt.Fprintf(out, "FAIL  %s: %s\n", path, printable(err.Error()))
			continue
		}
		fmt.Fprintf(out, "ok    %s: %s by %s\n", printable(t.Name), v.Effect, by)
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d %w", failed, len(trials), errTests)
	}
	_, err = fmt.Fprintf(out, "%d of %d tests pass\n", len(trials), len(trials))
	return err
}

// document returns the document to be tested.
func (p *policyTool) document(ctx context.Context) (*policy.Document, error) {
	name := p.policy
	var text []byte
	if name != "" {
		b, err := p.text(name)
		if err != nil {
			return nil, err
		}
		text = b
	} else {
		l, err := asCaller(p.conf)
		if err != nil {
			return nil, err
		}
		v, err := l.policy(ctx, "")
		err = l.explain(err)
		if err != nil {
			return nil, fmt.Errorf("%w; --policy FILE tests a file without a server", err)
		}
		name, text = "the server's policy", []byte(v.Text)
	}
	d, err := policy.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return d, nil
}

// policy returns the version that holds, or the one with the given number.
func (l *local) policy(ctx context.Context, number string) (v api.PolicyVersion, err error) {
	path := "/v1/policy"
	if number != "" {
		path += "/versions/" + pathSegment(number)
	}
	err = l.call(ctx, "GET", path, nil, &v)
	if errors.Is(err, errNotFound) {
		err = fmt.Errorf("there is no version %q; postern policy history lists them", number)
	}
	if v.PolicyText == nil {
		v.PolicyText = &api.PolicyText{}
	}
	return v, err
}

func (p *policyTool) show(ctx context.Context, l *local, args []string, out *output) error {
	if len(args) > 1 {
		return fmt.Errorf("%w: want at most one VERSION, got %d arguments", errUsage, len(args))
	}
	number := ""
	if len(args) == 1 {
		number = args[0]
	}
	v, err := l.policy(ctx, number)
	if err != nil {
		return err
	}
	return out.facts(v, func() error {
		_, err := io.WriteString(out, v.Text)
		return err
	})
}

func (p *policyTool) history(ctx context.Context, l *local, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	list, err := l.api.Policy.Versions(ctx, 500)
	if err != nil {
		return err
	}
	rows := [][]string{{"VERSION", "SINCE", "BY", "APPROVED BY", "ACTION", "DIGEST", "REASON"}}
	for _, v := range list {
		if v.Version == 0 {
			rows = append(rows, []string{"0", "", "the program's own", "", "", v.Digest[:min(12, len(v.Digest))], ""})
			continue
		}
		rows = append(rows, []string{
			strconv.FormatInt(v.Version, 10), agoOrNever(v.CreatedAt), v.Author, v.Decider, v.Action, v.Digest[:min(12, len(v.Digest))], printable(v.Reason),
		})
	}
	return out.rows(list, rows)
}

func (p *policyTool) diff(ctx context.Context, l *local, args []string, out *output) error {
	path, err := oneArg(args, "FILE")
	if err != nil {
		return err
	}
	b, err := p.text(path)
	if err != nil {
		return err
	}
	v, err := l.policy(ctx, "")
	if err != nil {
		return err
	}
	if d := policy.Diff(v.Text, string(b)); d != "" {
		_, err = fmt.Fprintf(out, "--- version %d\n+++ %s\n%s", v.Version, path, d)
		return err
	}
	_, err = fmt.Fprintf(out, "%s is what holds, version %d\n", path, v.Version)
	return err
}

func (p *policyTool) propose(ctx context.Context, l *local, args []string, out *output) error {
	path, err := oneArg(args, "FILE")
	if err != nil {
		return err
	}
	b, err := p.text(path)
	if err != nil {
		return err
	}
	if _, err := policy.Parse(b); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	was, err := l.policy(ctx, "")
	if err != nil {
		return err
	}
	tests := was.Tests
	if p.tests != "" {
		t, err := p.text(p.tests)
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("--tests: %w", err)
		}
		if err != nil {
			return err
		}
		tests = string(t)
	}
	a, err := l.api.Policy.Propose(ctx, api.NewPolicy{Text: string(b), Tests: tests, Reason: p.reason, Replaces: was.Digest})
	if err != nil {
		return err
	}
	printAction(out, a, nil)
	_, err = fmt.Fprintf(out, "It holds once it is approved: postern approve %s\n", a.ID)
	return err
}
