package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/pflag"

	"postern/internal/auth"
	"postern/internal/multimail"
)

const accountHelp = `
An account (pgr_...) makes inboxes and opens those that it made, and no other. It
is what a client of LobsterMail shows as its token, with this server as its
baseUrl. "postern up --signup" lets whoever reaches the server make one.

With --multimail the token is printed as programs for MultiMail show it. It is
the same token under another name (mm_live_...): revoking the account ends both.

Examples:

  postern account create support-bot
  postern account create support-bot --multimail
`

func accountCommand() *command {
	var c Config
	var asMultiMail bool
	return &command{
		use: "account", short: "let a program make inboxes of its own", long: accountHelp,
		flags: c.location,
		below: []*command{
			{
				use: "create NAME", short: "make an account and print its token, once", facts: true,
				flags: func(fs *pflag.FlagSet) {
					fs.BoolVar(&asMultiMail, "multimail", false, "print the token as MultiMail's programs show it")
				},
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					name, err := oneArg(args, "NAME")
					if err != nil {
						return err
					}
					a, err := l.api.Accounts.Create(ctx, name)
					if err != nil {
						return err
					}
					if asMultiMail {
						a.Token = multimail.KeyFor(a.Token)
					}
					return out.facts(a, func() error {
						if asMultiMail {
							_, err := fmt.Fprintf(out, "%s\nThis is its token. It is shown this once:\n  MULTIMAIL_API_KEY=%s\nSet MULTIMAIL_API_URL to this server's address with the path %s.\n", a.ID, a.Token, multimail.Path)
							return err
						}
						_, err := fmt.Fprintf(out, "%s\nThis is its token. It is shown this once:\n  %s\n", a.ID, a.Token)
						return err
					})
				}),
			},
			{
				use: "list", short: "list the accounts of the project", lists: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					list, err := l.api.Accounts.List(ctx)
					if err != nil {
						return err
					}
					rows := [][]string{{"ID", "NAME", "INBOXES", "MADE", "USED"}}
					for _, a := range list {
						rows = append(rows, []string{a.ID, cell(a.Name), strconv.Itoa(a.Inboxes), ago(a.CreatedAt), usedAgo(a.UsedAt, auth.UseResolution)})
					}
					return out.rows(list, rows)
				}),
			},
			{
				use: "revoke ID", short: "end an account in every inbox that it made",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, _ *output) error {
					id, err := oneArg(args, "ID")
					if err != nil {
						return err
					}
					return notFoundAs(l.api.Grants.Revoke(ctx, "", id), "there is no account %q", id)
				}),
			},
		},
	}
}
