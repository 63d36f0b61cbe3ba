package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/spf13/pflag"

	"postern/client"
)

func suppressionCommand() *command {
	var c Config
	change := func(do func(*client.SuppressionService, context.Context, string) error, done string) runner {
		return onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			address, err := oneArg(args, "ADDRESS")
			if err != nil {
				return err
			}
			err = do(l.api.Suppressed, ctx, address)
			if errors.Is(err, errNotFound) {
				return fmt.Errorf("%s is not on the list", address)
			}
			if err == nil {
				_, err = fmt.Fprintf(out, done+"\n", address)
			}
			return err
		})
	}
	return &command{
		use: "suppression", short: "manage addresses to which nothing is sent", long: `
The server adds an address when its mail server rejects it as unknown, when its
owner reports a message as spam, and when they unsubscribe. The list holds hashes
under the server's key: nobody can read addresses from it.`,
		flags: c.location,
		below: []*command{
			{use: "add ADDRESS", short: "stop sending to an address", run: change((*client.SuppressionService).Add, "%s is written to no more")},
			{use: "remove ADDRESS", short: "send to an address again", run: change((*client.SuppressionService).Remove, "%s is written to again")},
			{
				use: "find ADDRESS", short: "say whether an address is suppressed, and why",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					address, err := oneArg(args, "ADDRESS")
					if err != nil {
						return err
					}
					v, err := l.api.Suppressed.Get(ctx, address)
					if errors.Is(err, errNotFound) {
						_, err = fmt.Fprintf(out, "%s is not on the list\n", address)
						return err
					}
					if err != nil {
						return err
					}
					of := ""
					if v.Inbox != "" {
						of = ", by mail of " + v.Inbox
					}
					_, err = fmt.Fprintf(out, "%s is written to no more: %s %s%s\n", address, v.Reason, ago(v.CreatedAt), of)
					return err
				}),
			},
			{
				use: "count", short: "print how many addresses are suppressed, by reason", facts: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					counts, err := l.api.Suppressed.Counts(ctx)
					if err != nil {
						return err
					}
					var rows [][]string
					for _, r := range slices.Sorted(maps.Keys(counts)) {
						rows = append(rows, []string{r, strconv.Itoa(counts[r])})
					}
					return out.facts(counts, func() error { return out.table(rows) })
				}),
			},
		},
	}
}

func suspensionCommand() *command {
	var c Config
	var reason string
	return &command{
		use: "suspension", short: "show and lift suspensions of inboxes and domains", long: `
The server suspends an inbox or a domain when more than 5 % of its recipients in
a week bounced or more than 0.3 % complained. Its mail waits meanwhile and is not
lost. SCOPE is what list prints: the ID of an inbox, or a domain. Earlier bounces
and complaints no longer count once the suspension is lifted.`,
		flags: c.location,
		below: []*command{
			{
				use: "list", short: "list what may not send, and why", lists: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					list, err := l.api.Sending.Suspensions(ctx)
					if err != nil {
						return err
					}
					rows := [][]string{{"SCOPE", "SINCE", "WHY"}}
					for _, s := range list {
						rows = append(rows, []string{s.Scope, ago(s.SuspendedAt), s.Reason})
					}
					return out.rows(list, rows)
				}),
			},
			{
				use: "lift SCOPE", short: "let an inbox or a domain send again",
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(&reason, "reason", "", "why, for the record")
				},
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					scope, err := oneArg(args, "SCOPE")
					if err != nil {
						return err
					}
					err = l.api.Sending.Lift(ctx, scope, reason)
					if errors.Is(err, errNotFound) {
						return fmt.Errorf("%s is not suspended", scope)
					}
					if err == nil {
						_, err = fmt.Fprintf(out, "%s sends again\n", scope)
					}
					return err
				}),
			},
		},
	}
}
