package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"
)

const accountHelp = `
postern account create NAME    makes an account and prints its token, once
postern account list           lists the accounts of the project
postern account revoke ID      ends one, in every inbox that it made

An account (pgr_...) makes inboxes and opens those that it made, and no other. It
is what a client of LobsterMail shows as its token, with this server as its
baseUrl. "postern up --signup" lets whoever reaches the server make one.
`

type accountRow struct {
	ID, Name, Token string
	CreatedAt       time.Time `json:"created_at"`
	UsedAt          time.Time `json:"used_at"`
	Inboxes         int       `json:"inbox_count"`
}

func accountCommand() *command {
	var c Config
	return group("account", "create NAME|list|revoke ID [flags]", "let a program make inboxes of its own", accountHelp, c.location, map[string]runner{
		"create": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
			name, err := oneArg(args, "NAME")
			if err != nil {
				return err
			}
			var a accountRow
			if err := l.call(ctx, "POST", "/v1/accounts", map[string]string{"name": name}, &a); err != nil {
				return err
			}
			fmt.Fprintf(out, "%s\nThis is its token. It is shown this once:\n  %s\n", a.ID, a.Token)
			return nil
		}),
		"list": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
			if err := noArgs(args); err != nil {
				return err
			}
			var list struct{ Accounts []accountRow }
			if err := l.call(ctx, "GET", "/v1/accounts", nil, &list); err != nil {
				return err
			}
			rows := [][]string{{"ID", "NAME", "INBOXES", "MADE", "USED"}}
			for _, a := range list.Accounts {
				used := "never"
				if !a.UsedAt.IsZero() {
					used = ago(a.UsedAt)
				}
				rows = append(rows, []string{a.ID, a.Name, strconv.Itoa(a.Inboxes), ago(a.CreatedAt), used})
			}
			return table(out, rows)
		}),
		"revoke": onServer(&c, func(ctx context.Context, l *local, args []string, _ io.Writer) error {
			id, err := oneArg(args, "ID")
			if err != nil {
				return err
			}
			return notFoundAs(l.call(ctx, "DELETE", "/v1/grants/"+id, nil, nil), "there is no account %q", id)
		}),
	})
}
