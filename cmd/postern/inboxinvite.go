package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

const inviteHelp = `
Makes a code with which an agent connects itself, and a sentence to paste into
the agent's chat. The agent needs a shell or another way to make HTTP requests,
and nothing else. The code creates one new inbox for the first client that uses
it: treat it like a key. NAME is as for "postern inbox create".

The code ends after a day unless --expires says otherwise. "postern inbox
invites" shows what became of it, and whether somebody showed it again after it
was used. The agent's key may do all in its inbox unless --scope says less; an
inbox whose key lacks full never gets another key.`

// inviteCommand is "postern inbox invite".
func (n *inboxTool) inviteCommand() *command {
	return &command{
		use: "invite [NAME]", short: "make a code with which an agent connects itself", facts: true, long: inviteHelp,
		example: `
postern inbox invite analyst
postern inbox invite analyst --mode gated_all --scope read,draft,send --expires 2h`,
		flags: func(fs *pflag.FlagSet) {
			fs.StringVar(&n.display, "display-name", "", "`name` that recipients see beside the address")
			fs.StringVar(&n.mode, "mode", "gated_send", "oversight `mode` of the inbox; see docs/reference/modes.md")
			fs.StringVar(&n.scope, "scope", "", "`scopes` of the inbox's key, separated by commas: read, draft, send or full (default: full)")
			n.expiresFlag(fs, "when the code ends, as 2h, 7d or a `time` (default: 24h)")
		},
		run: onServer(&n.conf, n.invite),
	}
}

func (n *inboxTool) invite(ctx context.Context, l *local, args []string, out *output) error {
	if len(args) > 1 {
		return fmt.Errorf("%w: want one NAME at most, got %d arguments", errUsage, len(args))
	}
	expires, err := moment("expires", n.expires)
	if err != nil {
		return err
	}
	wanted := api.NewConnectCode{DisplayName: n.display, Mode: api.Mode(n.mode), ExpiresAt: expires}
	if len(args) == 1 {
		wanted.Address = args[0]
	}
	for _, s := range strings.FieldsFunc(n.scope, func(r rune) bool { return r == ',' || r == ' ' }) {
		wanted.Scopes = append(wanted.Scopes, api.Scope(s))
	}
	c, err := l.api.Connect.Create(ctx, wanted)
	if err != nil {
		return err
	}
	return out.facts(c, func() error { return printInvite(out, c) })
}

func printInvite(out *output, c api.ConnectCode) error {
	_, err := fmt.Fprintf(out, "code  %s\nends  %s\nIt is shown this once. It creates an inbox for the first client that uses it. Paste this to the agent:\n\n  %s\n\n"+
		"postern inbox invites shows what becomes of it; postern inbox uninvite %s withdraws it.\n", c.Code, orNever(&c.ExpiresAt), printable(c.Prompt), c.ID)
	return err
}

// invitesCommand is "postern inbox invites".
func (n *inboxTool) invitesCommand() *command {
	return &command{
		use: "invites", short: "list the codes for agents, and how each was used", lists: true,
		run: onServer(&n.conf, func(ctx context.Context, l *local, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			list, err := l.api.Connect.List(ctx)
			if err != nil {
				return err
			}
			addresses, err := l.addresses(ctx)
			if err != nil {
				return err
			}
			rows := [][]string{{"ID", "ADDRESS", "MODE", "STATE", "ENDS", "MADE BY", "SHOWN AGAIN"}}
			for _, c := range list {
				rows = append(rows, []string{c.ID, cell(first(addresses[c.Inbox], c.Address)), string(c.Mode), c.State, in(&c.ExpiresAt), cell(c.CreatedBy), agoOrNever(c.TriedAgainAt)})
			}
			return out.rows(list, rows)
		}),
	}
}

// uninviteCommand is "postern inbox uninvite".
func (n *inboxTool) uninviteCommand() *command {
	return &command{
		use: "uninvite ID", short: "withdraw an unused code",
		run: onServer(&n.conf, func(ctx context.Context, l *local, args []string, out *output) error {
			id, err := oneArg(args, "ID")
			if err != nil {
				return err
			}
			if err := l.api.Connect.Withdraw(ctx, id); err != nil {
				return notFoundAs(err, "there is no code %q; postern inbox invites shows them", id)
			}
			_, err = fmt.Fprintln(out, "The code is withdrawn.")
			return err
		}),
	}
}
