package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

const mailboxHelp = `
A connected mailbox is an inbox of an agent that exists already at another
provider: the agent reads what is there, and what it archives, moves to the
trash, labels or sends happens there, after the decision that your policy asks
for. What was approved leaves through that provider, byte for byte.

Only an owner connects. The password, or the access token, is read from
$POSTERN_MAILBOX_CREDENTIAL or from standard input, never from an argument, which
others on the machine see. It is stored encrypted and never shown. See
docs/tasks/connect-mailbox.md, and docs/tasks/connect-gmail.md for Gmail.`

// mailboxVariable holds the credential of a mailbox.
const mailboxVariable = "POSTERN_MAILBOX_CREDENTIAL"

// A mailboxTool is the mailbox command with its flags.
type mailboxTool struct {
	conf Config

	address, imap, smtp, user, auth, authserv, sent string

	since, mode, display string
	most                 int
}

func (n *mailboxTool) serverFlags(fs *pflag.FlagSet) {
	fs.StringVar(&n.imap, "imap", "", "`host:port` of the IMAP server, usually port 993")
	fs.StringVar(&n.smtp, "smtp", "", "`host:port` of the server that takes mail, usually port 465 or 587")
	fs.StringVar(&n.user, "user", "", "`name` to sign in with (default: the address)")
	fs.StringVar(&n.auth, "auth", "", "password, or xoauth2 where the credential is an access token (default: password)")
	fs.StringVar(&n.authserv, "authserv", "", "`name` in the provider's Authentication-Results fields; without it nothing that a message says about its sender is believed")
	fs.StringVar(&n.sent, "sent", "", "append, or provider where the provider itself keeps copies of what was sent (default: append)")
}

// settings returns the settings that were given.
func (n *mailboxTool) settings() map[string]string {
	out := map[string]string{}
	for k, v := range map[string]string{"imap": n.imap, "smtp": n.smtp, "user": n.user, "auth": n.auth, "authserv": n.authserv, "sent": n.sent} {
		if v != "" {
			out[k] = v
		}
	}
	return out
}

// credential reads the password or token.
func (n *mailboxTool) credential() (string, error) {
	if v := os.Getenv(mailboxVariable); v != "" {
		return v, nil
	}
	return secretText("", "Password or access token: ")
}

func mailboxCommand() *command {
	n := &mailboxTool{}
	c := &n.conf
	one := func(do func(ctx context.Context, l *local, name string) (api.Connection, error)) runner {
		return onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
			name, err := oneArg(args, "ADDRESS")
			if err != nil {
				return err
			}
			got, err := do(ctx, l, name)
			if errors.Is(err, errNotFound) {
				return fmt.Errorf("there is no connected mailbox %q; postern mailbox list shows them", name)
			} else if err != nil {
				return err
			}
			return printConnection(out, got)
		})
	}
	return &command{
		use: "mailbox", short: "connect mailboxes that exist at other providers", long: mailboxHelp,
		flags: c.location,
		below: []*command{
			{
				use: "connect", short: "connect a mailbox and print the key of its inbox, once",
				below: []*command{n.connectCommand(), gmailCommand(c)},
			},
			{use: "list", short: "list connected mailboxes", lists: true, run: onServer(c, listConnections)},
			{use: "show ADDRESS", short: "show a connection: how far it is, and its last error", facts: true, run: one(func(ctx context.Context, l *local, name string) (api.Connection, error) {
				return l.api.Connected.Get(ctx, name)
			})},
			{use: "pause ADDRESS", short: "fetch, change and send nothing until it is resumed", facts: true, run: one(func(ctx context.Context, l *local, name string) (api.Connection, error) {
				return l.api.Connected.Pause(ctx, name)
			})},
			{use: "resume ADDRESS", short: "continue a paused connection", facts: true, run: one(func(ctx context.Context, l *local, name string) (api.Connection, error) {
				return l.api.Connected.Resume(ctx, name)
			})},
			{use: "resync ADDRESS", short: "compare all of the mailbox with what is here", facts: true, run: one(func(ctx context.Context, l *local, name string) (api.Connection, error) {
				return l.api.Connected.Resync(ctx, name)
			})},
			{
				use: "sign-in ADDRESS", short: "replace the password or token, after it was refused or changed", facts: true,
				example: "postern mailbox sign-in ann@example.org < password",
				flags:   n.serverFlags,
				run: one(func(ctx context.Context, l *local, name string) (api.Connection, error) {
					text, err := n.credential()
					if err != nil {
						return api.Connection{}, err
					}
					return l.api.Connected.SignIn(ctx, name, api.ConnectionCredential{Settings: n.settings(), Credential: text})
				}),
			},
			{use: "disconnect ADDRESS", short: "end a connection and delete its credential; the mail that is here stays", facts: true, run: one(func(ctx context.Context, l *local, name string) (api.Connection, error) {
				return l.api.Connected.Disconnect(ctx, name)
			})},
		},
	}
}

// connectCommand is "postern mailbox connect imap".
func (n *mailboxTool) connectCommand() *command {
	return &command{
		use: "imap", short: "a mailbox of any provider, over IMAP and SMTP", facts: true,
		example: "postern mailbox connect imap --address ann@example.org --imap imap.example.org:993 --smtp smtp.example.org:465 < password",
		flags: func(fs *pflag.FlagSet) {
			fs.StringVar(&n.address, "address", "", "`address` of the mailbox")
			n.serverFlags(fs)
			fs.StringVar(&n.since, "since", "", "take no older mail than this `time`: 2026-01-31, or 90d for ninety days ago")
			fs.IntVar(&n.most, "most", 0, "take at most this many older messages, the newest (default: 1000)")
			fs.StringVar(&n.mode, "mode", "", "oversight `mode` (default: gated_send); see postern help inbox mode")
			fs.StringVar(&n.display, "display-name", "", "`name` beside the address in what it sends")
		},
		run: onServer(&n.conf, func(ctx context.Context, l *local, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			for flag, v := range map[string]string{"address": n.address, "imap": n.imap, "smtp": n.smtp} {
				if v == "" {
					return fmt.Errorf("%w: --%s is missing", errUsage, flag)
				}
			}
			since, err := pastTime(n.since)
			if err != nil {
				return err
			}
			text, err := n.credential()
			if err != nil {
				return err
			}
			made, err := l.api.Connected.Connect(ctx, api.NewConnection{
				Kind: "imap", Address: n.address, ConnectionCredential: api.ConnectionCredential{Settings: n.settings(), Credential: text},
				Since: since, Most: n.most, Mode: api.Mode(n.mode), DisplayName: n.display,
			})
			if err != nil {
				return err
			}
			return printConnection(out, made)
		}),
	}
}

// pastTime returns the time that a flag names: a date, or how long ago.
func pastTime(v string) (*time.Time, error) {
	t, err := moment("since", v)
	if err != nil || t == nil {
		return t, err
	}
	if now := time.Now(); t.After(now) { // a duration
		past := now.Add(-t.Sub(now)).UTC()
		return &past, nil
	}
	return t, nil
}

func listConnections(ctx context.Context, l *local, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	all, err := l.api.Connected.List(ctx)
	if err != nil {
		return err
	}
	rows := [][]string{{"ADDRESS", "KIND", "STATE", "UP TO DATE", "PROBLEM"}}
	for _, c := range all {
		rows = append(rows, []string{c.Address, c.Kind, stateOf(c), agoOrNever(c.SyncedAt), cell(c.Problem)})
	}
	return out.rows(all, rows)
}

// stateOf returns the state of a connection, with its progress.
func stateOf(c api.Connection) string {
	if c.State == api.ConnectionSyncing && c.Total > 0 {
		return c.State + " " + strconv.FormatInt(c.Done, 10) + "/" + strconv.FormatInt(c.Total, 10)
	}
	return c.State
}

func printConnection(out *output, c api.Connection) error {
	return out.facts(c, func() error {
		var b strings.Builder
		fmt.Fprintf(&b, "address     %s\nid          %s\ninbox       %s\nkind        %s\nstate       %s\nup to date  %s\n", c.Address, c.ID, c.Inbox, c.Kind, stateOf(c), agoOrNever(c.SyncedAt))
		for _, k := range []string{"imap", "smtp", "user", "auth", "authserv", "sent"} {
			if v := c.Settings[k]; v != "" {
				fmt.Fprintf(&b, "%-11s %s\n", k, printable(v))
			}
		}
		if c.LeftOut > 0 {
			fmt.Fprintf(&b, "left out    %d messages\n", c.LeftOut)
		}
		if c.Problem != "" {
			fmt.Fprintf(&b, "problem     %s\n", printable(c.Problem))
		}
		if c.Key != "" {
			fmt.Fprintf(&b, "\n%s\n%s\n", c.Key, c.Notice)
		}
		_, err := out.Write([]byte(b.String()))
		return err
	})
}
