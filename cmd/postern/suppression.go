package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/pflag"
)

func suppressionCommand() *command {
	var c Config
	change := func(path, done string) runner {
		return onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
			address, err := oneArg(args, "ADDRESS")
			if err != nil {
				return err
			}
			err = l.call(ctx, "POST", "/v1/suppression"+path, map[string]any{"address": address}, nil)
			if errors.Is(err, errNotFound) {
				return fmt.Errorf("%s is not on the list", address)
			}
			if err == nil {
				_, err = fmt.Fprintf(out, done+"\n", address)
			}
			return err
		})
	}
	return group("suppression", "count|find|add|remove [ADDRESS] [flags]", "to whom nothing is sent", `
postern suppression find ADDRESS     says whether an address is written to no more, and why
postern suppression add ADDRESS      writes to it no more
postern suppression remove ADDRESS   writes to it again
postern suppression count            prints how many there are, by reason

Addresses get on the list by themselves: whose server says that there is no such
address, who calls a message spam, and who unsubscribes. The list holds hashes
under the server's key: nobody can read addresses from it.`,
		func(fs *pflag.FlagSet) { c.location(fs) }, map[string]runner{
			"add":    change("", "%s is written to no more"),
			"remove": change("/removal", "%s is written to again"),
			"find": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				address, err := oneArg(args, "ADDRESS")
				if err != nil {
					return err
				}
				var v struct {
					Reason, Inbox string
					CreatedAt     time.Time `json:"created_at"`
				}
				err = l.call(ctx, "POST", "/v1/suppression/lookup", map[string]any{"address": address}, &v)
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
			"count": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				var v struct{ Counts map[string]int }
				if err := l.call(ctx, "GET", "/v1/suppression", nil, &v); err != nil {
					return err
				}
				var rows [][]string
				for _, r := range slices.Sorted(maps.Keys(v.Counts)) {
					rows = append(rows, []string{r, strconv.Itoa(v.Counts[r])})
				}
				return table(out, rows)
			}),
		})
}

func suspensionCommand() *command {
	var c Config
	var reason string
	return group("suspension", "list|lift SCOPE [flags]", "inboxes and domains that may not send", `
postern suspension list                        prints those that send nothing, and why
postern suspension lift SCOPE --reason TEXT    lets one send again

An inbox or a domain is suspended by itself when more than 5 % of whom it wrote
to in a week bounced or more than 0.3 % complained. Its mail waits meanwhile and
is not lost. SCOPE is what list prints: the id of an inbox, or a domain. What was
before counts no more once it is lifted.`,
		func(fs *pflag.FlagSet) {
			c.location(fs)
			fs.StringVar(&reason, "reason", "", "lift: why, for the record")
		}, map[string]runner{
			"list": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				var v struct {
					Suspensions []struct {
						Scope, Reason string
						SuspendedAt   time.Time `json:"suspended_at"`
					}
				}
				if err := l.call(ctx, "GET", "/v1/suspensions", nil, &v); err != nil {
					return err
				}
				rows := [][]string{{"SCOPE", "SINCE", "WHY"}}
				for _, s := range v.Suspensions {
					rows = append(rows, []string{s.Scope, ago(s.SuspendedAt), s.Reason})
				}
				return table(out, rows)
			}),
			"lift": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				scope, err := oneArg(args, "SCOPE")
				if err != nil {
					return err
				}
				err = l.call(ctx, "POST", "/v1/suspensions/"+url.PathEscape(scope)+"/lift", map[string]any{"reason": reason}, nil)
				if errors.Is(err, errNotFound) {
					return fmt.Errorf("%s is not suspended", scope)
				}
				if err == nil {
					_, err = fmt.Fprintf(out, "%s sends again\n", scope)
				}
				return err
			}),
		})
}
