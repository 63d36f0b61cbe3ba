package main

import (
	"context"
	"fmt"
	"strings"

	"postern/internal/auth"
)

const appHelp = `
Apps are programs that connected themselves to an inbox by OAuth, for example
hosts of the Model Context Protocol that were given the address .../mcp. An owner
allowed each of them in the console, where they can be disconnected, too.
`

func appCommand() *command {
	var c Config
	return &command{
		use: "app", short: "list and disconnect programs that connected themselves", long: appHelp,
		flags: c.location,
		below: []*command{
			{
				use: "list", short: "list the connected programs of the project", lists: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					list, err := l.api.Apps.List(ctx)
					if err != nil {
						return err
					}
					rows := [][]string{{"ID", "CALLS ITSELF", "RETURNS TO", "INBOX", "SCOPES", "CONNECTED", "USED"}}
					for _, a := range list {
						var scopes []string
						for _, s := range a.Scopes {
							scopes = append(scopes, string(s))
						}
						rows = append(rows, []string{a.ID, cell(a.Name), cell(a.ReturnsTo), a.Address, strings.Join(scopes, ","), ago(a.CreatedAt), usedAgo(a.UsedAt, auth.UseResolution)})
					}
					return out.rows(list, rows)
				}),
			},
			{
				use: "revoke ID", short: "disconnect a program",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					id, err := oneArg(args, "ID")
					if err != nil {
						return err
					}
					if err := l.api.Apps.Revoke(ctx, id); err != nil {
						return notFoundAs(err, "there is no app %q; postern app list shows them", id)
					}
					_, err = fmt.Fprintln(out, "Disconnected. Its tokens are invalid, and it cannot read mail that arrives from now on.")
					return err
				}),
			},
		},
	}
}
