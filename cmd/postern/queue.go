package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/client"
	"postern/internal/api"
)

func queueCommand() *command {
	var c Config
	q := client.QueueQuery{}
	var most int
	return &command{
		use: "queue", short: "list what waits for you, the riskiest first", lists: true,
		long: `
Lists the actions that wait for a person, one a line, with their risk and the
reasons for it. "postern pending" shows all of them in full, and "postern show ID"
one. Actions that you have snoozed are left out; --snoozed lists them.

Over the local socket you have no name. Sign in with "postern login" to use
--assigned (assigned to you) or --mine (policy asks you).`,
		example: "postern queue --grave\npostern queue --recipient example.com --order age",
		flags: func(fs *pflag.FlagSet) {
			c.location(fs)
			fs.StringVar(&q.Order, "order", "risk", "`risk` (the riskiest first) or age (the oldest first)")
			fs.Var(&list{values: &q.Kinds}, "kind", "only this `kind` of action, such as email.send; may be repeated")
			fs.StringVar(&q.Inbox, "inbox", "", "only of this inbox, by `address` or ID")
			fs.StringVar(&q.Proposer, "proposer", "", "only actions that this `principal` has proposed, such as agent:crd_...")
			fs.StringVar(&q.Recipient, "recipient", "", "only actions to this `address`, domain or host")
			fs.StringVar(&q.Words, "words", "", "only actions with all these `words` in recipients, hosts, subject or file names")
			fs.BoolVar(&q.Mine, "mine", false, "only actions that policy asks you about")
			fs.BoolVar(&q.Assigned, "assigned", false, "only actions that are assigned to you")
			fs.BoolVar(&q.Grave, "grave", false, "only actions with a grave finding")
			fs.BoolVar(&q.Snoozed, "snoozed", false, "only actions that you have snoozed")
			fs.IntVar(&most, "limit", 50, "how many to list, 1 to 500")
		},
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			q.Limit = most
			if most < 1 || most > 500 {
				return fmt.Errorf("%w: --limit: must be 1 to 500", errUsage)
			}
			page, err := l.api.Actions.Queue(ctx, q)
			if err != nil {
				return notFoundAs(err, "there is no inbox %q", q.Inbox)
			}
			return l.printQueue(ctx, page, q.Snoozed, out)
		}),
	}
}

// printQueue prints a page of the queue. Reasons may quote an agent.
func (l *local) printQueue(ctx context.Context, page api.ReviewQueue, snoozed bool, out *output) error {
	if out.json {
		return out.object(page.Actions)
	}
	addresses, err := l.addresses(ctx)
	if err != nil {
		return err
	}
	last := "DENIED"
	if snoozed {
		last = "BACK"
	}
	rows := [][]string{{"ACTION", "RISK", "KIND", "FROM", "WHY", "ASSIGNED", last}}
	for _, a := range page.Actions {
		a.Action = reviewable(a.Action)
		from, end := a.Proposer, in(a.ExpiresAt)
		if address := addresses[a.Inbox]; address != "" {
			from = address
		}
		if a.Snooze != nil {
			if end = in(&a.Snooze.Until); a.Snooze.OnAnswer {
				end += ", or on answer"
			}
		}
		rows = append(rows, []string{a.ID, strconv.Itoa(a.Risk), a.Kind, cell(from), cell(strings.Join(a.Reasons, "; ")), cell(a.Assignee), end})
	}
	if err := out.table(rows); err != nil {
		return err
	}
	n := page.Counts
	_, err = fmt.Fprintf(out, "%d of %d shown; waiting %d, grave %d, denied within a day %d, snoozed %d\n", len(page.Actions), page.Total, n.Waiting, n.Grave, n.Soon, n.Snoozed)
	return err
}

func snoozeCommand() *command {
	var c Config
	var until string
	var answer bool
	return &command{
		use: "snooze ID", short: "hide an action from your own queue for a time",
		long: `
Hides a waiting action from your queue until a time, at most 30 days ahead. It
decides nothing: everybody else still sees the action, and it expires as before.
"postern unsnooze ID" ends the snooze.`,
		example: "postern snooze act_4KX... --until 2h\npostern snooze act_4KX... --until 24h --on-answer",
		flags: func(fs *pflag.FlagSet) {
			c.location(fs)
			fs.StringVar(&until, "until", "", "`when` it comes back: 2h, 3d, 2027-01-31 or 2027-01-31T12:00:00Z; needed without --on-answer")
			fs.BoolVar(&answer, "on-answer", false, "it also comes back when its agent revises it")
		},
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			id, err := oneAction(args)
			if err != nil {
				return err
			}
			end, err := moment("until", until)
			if err != nil {
				return err
			}
			if end == nil && !answer {
				return fmt.Errorf("%w: --until is missing: say when it comes back, or --on-answer", errUsage)
			}
			z, err := l.api.Actions.Snooze(ctx, id, api.NewSnooze{Until: end, OnAnswer: answer})
			if err != nil {
				return noAction(err, id)
			}
			_, err = fmt.Fprintf(out, "snoozed %s until %s\n", id, z.Until.Local().Format(time.RFC1123))
			return err
		}),
	}
}

func unsnoozeCommand() *command {
	var c Config
	return &command{
		use: "unsnooze ID", short: "return an action to your queue",
		flags: c.location,
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			id, err := oneAction(args)
			if err != nil {
				return err
			}
			if err := l.api.Actions.Unsnooze(ctx, id); err != nil {
				return noAction(err, id)
			}
			_, err = fmt.Fprintln(out, id, "is not snoozed")
			return err
		}),
	}
}

func assignCommand() *command {
	var c Config
	return &command{
		use: "assign ID NAME", short: "ask a colleague to look at an action",
		long: `
Assigns a waiting action to a person who may decide on it. Everybody sees the
assignment. It gives nobody a right and limits nobody's decision. "postern unassign
ID" removes it, and "postern queue --assigned" lists what is assigned to you.`,
		flags: c.location,
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			if len(args) != 2 {
				return fmt.Errorf("%w: want an ID and the NAME of a person", errUsage)
			}
			if _, err := l.api.Actions.Assign(ctx, args[0], args[1]); err != nil {
				return noAction(err, args[0])
			}
			_, err := fmt.Fprintf(out, "%s is assigned to %s\n", args[0], args[1])
			return err
		}),
	}
}

func unassignCommand() *command {
	var c Config
	return &command{
		use: "unassign ID", short: "remove the assignment of an action",
		flags: c.location,
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			id, err := oneAction(args)
			if err != nil {
				return err
			}
			if err := l.api.Actions.Unassign(ctx, id); err != nil {
				return noAction(err, id)
			}
			_, err = fmt.Fprintln(out, id, "is assigned to nobody")
			return err
		}),
	}
}

// An allowing holds the flags of approve that make an allowance.
type allowing struct {
	address, domain, path, until string
	files                        bool
}

func (w *allowing) flags(fs *pflag.FlagSet) {
	fs.StringVar(&w.address, "allow-address", "", "also allow what is like it without asking until --allow-until: of mail a recipient's `address`, of a request or a connection its host")
	fs.StringVar(&w.domain, "allow-domain", "", "of mail: also allow all addresses in this `domain` of a recipient")
	fs.StringVar(&w.path, "allow-path", "", "of a request, with --allow-address: its `path`, or /v1/* for everything below")
	fs.StringVar(&w.until, "allow-until", "", "`when` that ends, at most 90 days ahead: 8h, 30d, 2027-01-31 or 2027-01-31T12:00:00Z")
	fs.BoolVar(&w.files, "allow-files", false, "of mail: also with files")
}

// allowance returns the allowance, or nil if no flag is given.
func (w *allowing) allowance() (*api.Allowance, error) {
	if w.address == "" && w.domain == "" {
		if w.until != "" || w.path != "" || w.files {
			return nil, fmt.Errorf("%w: --allow-until, --allow-path and --allow-files need --allow-address or --allow-domain", errUsage)
		}
		return nil, nil //nolint:nilnil // no allowance was requested
	}
	if w.address != "" && w.domain != "" {
		return nil, fmt.Errorf("%w: want --allow-address or --allow-domain, not both", errUsage)
	}
	end, err := moment("allow-until", w.until)
	if err != nil {
		return nil, err
	}
	if end == nil {
		return nil, fmt.Errorf("%w: --allow-until is missing: say when that ends, at most 90 days ahead", errUsage)
	}
	return &api.Allowance{Address: w.address, Domain: w.domain, Path: w.path, Files: w.files, Until: *end}, nil
}
