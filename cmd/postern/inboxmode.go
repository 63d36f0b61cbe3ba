package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

// modeVerbs are the commands about who approves what an inbox sends.
func modeVerbs(n *inboxTool) []*command {
	c := &n.conf
	why := func(fs *pflag.FlagSet) {
		fs.StringVar(&n.reason, "reason", "", "`text` for the record and for the owner who decides")
	}
	until := func(fs *pflag.FlagSet) {
		n.expiresFlag(fs, "when the entry ends, as 36h, 30d or a `time` (default: never)")
	}
	return []*command{
		{
			use: "mode ADDRESS [MODE]", short: "show or change the oversight mode", long: inboxModeHelp, facts: true, complete: inboxAddresses(c),
			flags: why,
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				return inboxMode(ctx, l, args, n.reason, out)
			}),
		},
		{
			use: "code ADDRESS MODE", short: "make a code with which the agent raises the mode, once",
			flags: why,
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				if len(args) != 2 {
					return fmt.Errorf("%w: want ADDRESS and MODE, got %d arguments", errUsage, len(args))
				}
				v, err := l.api.Inboxes.NewModeCode(ctx, args[0], api.NewModeCode{Mode: api.Mode(args[1]), Reason: n.reason})
				if err != nil {
					return noInbox(args[0], err)
				}
				_, err = fmt.Fprintf(out, "%s\nGive it to whoever holds the inbox's key: it raises %s to %s, once, until %s.\nAny change of the mode ends it, and so do five wrong ones.\n", v.Code, args[0], args[1], orNever(&v.ExpiresAt))
				return err
			}),
		},
		{
			use: "allow", short: "manage to whom an inbox writes without approval",
			below: []*command{
				{use: "list ADDRESS", short: "list the entries", lists: true, complete: inboxAddresses(c), run: onServer(c, listAllowed)},
				{
					use: "add ADDRESS PATTERN", short: "add an address or '*@example.com'",
					flags: until,
					run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
						if len(args) != 2 {
							return fmt.Errorf("%w: want ADDRESS and PATTERN, got %d arguments", errUsage, len(args))
						}
						until, err := moment("expires", n.expires)
						if err != nil {
							return err
						}
						e, err := l.api.Inboxes.Allow(ctx, args[0], api.NewAllowEntry{Pattern: args[1], ExpiresAt: until})
						if err != nil {
							return noInbox(args[0], err)
						}
						_, err = fmt.Fprintf(out, "%s may write to %s without asking, until: %s\n", args[0], e.Pattern, orNever(e.ExpiresAt))
						return err
					}),
				},
				{
					use: "remove ADDRESS PATTERN", short: "remove an entry",
					run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
						if len(args) != 2 {
							return fmt.Errorf("%w: want ADDRESS and PATTERN, got %d arguments", errUsage, len(args))
						}
						if err := l.api.Inboxes.Disallow(ctx, args[0], args[1]); err != nil {
							return notFoundAs(err, "there is no inbox %q with %q on its allow list; postern inbox allow list shows it", args[0], args[1])
						}
						_, err := fmt.Fprintf(out, "%s is off the allow list of %s\n", args[1], args[0])
						return err
					}),
				},
			},
		},
		{
			use: "overseers", short: "manage who gets copies of monitored mail",
			below: []*command{
				{
					use: "get [ADDRESS]", short: "show the overseers of an inbox, or the default",
					run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
						if len(args) > 1 {
							return fmt.Errorf("%w: want one ADDRESS at most, got %d arguments", errUsage, len(args))
						}
						return l.overseers(ctx, "GET", args, nil, out)
					}),
				},
				{
					use: "set [ADDRESS] EMAIL,EMAIL", short: "set the overseers of an inbox, or the default",
					run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
						if len(args) < 1 || len(args) > 2 {
							return fmt.Errorf("%w: want [ADDRESS] and EMAIL,EMAIL, got %d arguments; '' means none", errUsage, len(args))
						}
						list := []string{}
						for a := range strings.SplitSeq(args[len(args)-1], ",") {
							if a = strings.TrimSpace(a); a != "" {
								list = append(list, a)
							}
						}
						return l.overseers(ctx, "POST", args[:len(args)-1], api.Overseers{Addresses: list}, out)
					}),
				},
			},
		},
		{
			use: "upgrade CODE", short: "raise the mode with a code, with the inbox's key",
			run: n.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
				code, err := oneArg(args, "CODE")
				if err != nil {
					return err
				}
				if code == "-" {
					if _, err := fmt.Fscan(os.Stdin, &code); err != nil {
						return fmt.Errorf("read the code: %w", err)
					}
				}
				var b api.Inbox
				if err := l.call(ctx, "POST", path+"/upgrade", api.ModeUpgrade{Code: code}, &b); err != nil {
					return err
				}
				_, err = fmt.Fprintf(out, "%s is in mode %s\n", b.Address, b.Mode)
				return err
			}),
		},
		{
			use: "request", short: "ask the owners for a right, with the inbox's key",
			below: []*command{
				{
					use: "mode MODE", short: "ask for another mode",
					flags: why,
					run: n.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
						mode, err := oneArg(args, "MODE")
						if err != nil {
							return err
						}
						return l.request(ctx, path+"/request-upgrade", api.ModeRequest{TargetMode: api.Mode(mode), Reason: n.reason}, out)
					}),
				},
				{
					use: "allow PATTERN", short: "ask for an entry of the allow list",
					flags: func(fs *pflag.FlagSet) {
						why(fs)
						until(fs)
					},
					run: n.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
						pattern, err := oneArg(args, "PATTERN")
						if err != nil {
							return err
						}
						until, err := moment("expires", n.expires)
						if err != nil {
							return err
						}
						return l.request(ctx, path+"/allowlist/requests", api.AllowRequest{Pattern: pattern, ExpiresAt: until, Reason: n.reason}, out)
					}),
				},
			},
		},
	}
}

func inboxMode(ctx context.Context, l *local, args []string, reason string, out *output) error {
	var b api.Inbox
	var err error
	switch len(args) {
	case 1:
		b, err = l.api.Inboxes.Get(ctx, args[0])
	case 2:
		b, err = l.api.Inboxes.Update(ctx, args[0], api.InboxChange{Mode: new(api.Mode(args[1])), ModeReason: reason})
	default:
		return fmt.Errorf("%w: want ADDRESS, and MODE to change it, got %d arguments", errUsage, len(args))
	}
	if err != nil {
		return noInbox(args[0], err)
	}
	since := "since it was made"
	if b.ModeAt != nil {
		since = "since " + orNever(b.ModeAt)
	}
	if b.ModeReason != "" {
		since += ": " + printable(b.ModeReason)
	}
	return out.facts(b, func() error {
		_, err := fmt.Fprintf(out, "%s is in mode %s, %s\n", b.Address, b.Mode, since)
		return err
	})
}

func listAllowed(ctx context.Context, l *local, args []string, out *output) error {
	name, err := oneArg(args, "ADDRESS")
	if err != nil {
		return err
	}
	list, err := l.api.Inboxes.AllowList(ctx, name)
	if err != nil {
		return noInbox(name, err)
	}
	if len(list) == 0 && !out.json {
		_, err := fmt.Fprintln(out, "no entries: every outgoing mail of it waits for a person")
		return err
	}
	rows := [][]string{{"PATTERN", "FILES", "ADDED", "BY", "ENDS"}}
	for _, e := range list {
		files := "no"
		if e.Files {
			files = "yes"
		}
		rows = append(rows, []string{e.Pattern, files, ago(e.CreatedAt), e.CreatedBy, in(e.ExpiresAt)})
	}
	return out.rows(list, rows)
}

// overseers asks for the overseers of an inbox, or for no name of the project.
func (l *local) overseers(ctx context.Context, method string, args []string, body any, out *output) error {
	path := "/v1/overseers"
	if len(args) == 1 {
		path = inboxPath(args[0]) + "/overseers"
	}
	var v api.Overseers
	if err := l.call(ctx, method, path, body, &v); err != nil {
		if len(args) == 1 {
			return noInbox(args[0], err)
		}
		return err
	}
	if len(v.Addresses) == 0 {
		_, err := fmt.Fprintln(out, "no overseers: mail of monitored inboxes waits for a person")
		return err
	}
	_, err := fmt.Fprintln(out, strings.Join(v.Addresses, "\n"))
	return err
}

// request asks the owners for something.
func (l *local) request(ctx context.Context, path string, body any, out *output) error {
	var a api.Action
	if err := l.call(ctx, "POST", path, body, &a); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "%s is %s: an owner decides\n", a.ID, a.State)
	return err
}
