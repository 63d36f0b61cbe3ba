package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

func suppressionCommand() *command {
	var c Config
	change := func(path, done string) runner {
		return onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			address, err := oneArg(args, "ADDRESS")
			if err != nil {
				return err
			}
			err = l.call(ctx, "POST", "/v1/suppression"+path, api.Address{Address: address}, nil)
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
		use: "suppression", short: "to whom nothing is sent", long: `
postern suppression find ADDRESS     says whether an address is written to no more, and why
postern suppression add ADDRESS      writes to it no more
postern suppression remove ADDRESS   writes to it again
postern suppression count            prints how many there are, by reason

Addresses get on the list by themselves: whose server says that there is no such
address, who calls a message spam, and who unsubscribes. The list holds hashes
under the server's key: nobody can read addresses from it.`,
		flags: c.location,
		below: []*command{
			{use: "add ADDRESS", short: "stop sending to an address", run: change("", "%s is written to no more")},
			{use: "remove ADDRESS", short: "send to an address again", run: change("/removal", "%s is written to again")},
			{
				use: "find ADDRESS", short: "say whether an address is suppressed, and why",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					address, err := oneArg(args, "ADDRESS")
					if err != nil {
						return err
					}
					var v api.Suppression
					err = l.call(ctx, "POST", "/v1/suppression/lookup", api.Address{Address: address}, &v)
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
					var v api.SuppressionCounts
					if err := l.call(ctx, "GET", "/v1/suppression", nil, &v); err != nil {
						return err
					}
					var rows [][]string
					for _, r := range slices.Sorted(maps.Keys(v.Counts)) {
						rows = append(rows, []string{r, strconv.Itoa(v.Counts[r])})
					}
					return out.facts(v.Counts, func() error { return out.table(rows) })
				}),
			},
		},
	}
}

func suspensionCommand() *command {
	var c Config
	var reason string
	return &command{
		use: "suspension", short: "inboxes and domains that may not send", long: `
postern suspension list                        prints those that send nothing, and why
postern suspension lift SCOPE --reason TEXT    lets one send again

An inbox or a domain is suspended by itself when more than 5 % of whom it wrote
to in a week bounced or more than 0.3 % complained. Its mail waits meanwhile and
is not lost. SCOPE is what list prints: the id of an inbox, or a domain. What was
before counts no more once it is lifted.`,
		flags: c.location,
		below: []*command{
			{
				use: "list", short: "list what may not send, and why", lists: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					var v api.SuspensionList
					if err := l.call(ctx, "GET", "/v1/suspensions", nil, &v); err != nil {
						return err
					}
					rows := [][]string{{"SCOPE", "SINCE", "WHY"}}
					for _, s := range v.Suspensions {
						rows = append(rows, []string{s.Scope, ago(s.SuspendedAt), s.Reason})
					}
					return out.rows(v.Suspensions, rows)
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
					err = l.call(ctx, "POST", "/v1/suspensions/"+url.PathEscape(scope)+"/lift", api.Lift{Reason: reason}, nil)
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
