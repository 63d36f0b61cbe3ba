package main

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"time"
)

// inboxModeHelp is the part of inbox's help about modes; docs/reference/modes.md is the
// whole of it.
const inboxModeHelp = `
How closely an inbox is watched, over the local socket:

postern inbox mode ADDRESS           prints its mode, since when and why
postern inbox mode ADDRESS MODE      puts it into another; --reason says why, and
                                     is needed to watch it less
      read_only     it sends nothing
      gated_all     what it sends and what arrives waits for a person
      gated_send    what it sends waits, but to those on its allow list
      monitored     what it sends leaves at once, and its overseers get a copy
      autonomous    what it sends leaves at once
postern inbox code ADDRESS MODE      makes a code by which its agent raises it to
                                     MODE, once, within a day; --reason says why
postern inbox allow list ADDRESS     to whom it writes without a person's word
postern inbox allow add ADDRESS PATTERN     an address, or '*@example.com';
                                     --expires says until when
postern inbox allow remove ADDRESS PATTERN
postern inbox overseers get [ADDRESS]       who gets the copies; without ADDRESS:
postern inbox overseers set [ADDRESS] EMAIL,EMAIL   for inboxes that have none

With the inbox's key, in $POSTERN_INBOX_KEY:

postern inbox upgrade CODE           raises the mode by a code; it is read from
                                     the standard input where CODE is -
postern inbox request mode MODE      asks the owners for it, with --reason
postern inbox request allow PATTERN  asks them for an entry of the allow list
`

// An allowed is an entry of an allow list as the API tells it.
type allowed struct {
	ID, Pattern, Action string

	CreatedAt time.Time  `json:"created_at"`
	CreatedBy string     `json:"created_by"`
	ExpiresAt *time.Time `json:"expires_at"`
}

// modeVerbs are the commands of inboxModeHelp. Reason and expires are flags.
func modeVerbs(k *keyed, reason, expires *string) map[string]runner {
	c := &k.conf
	return map[string]runner{
		"mode": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
			return inboxMode(ctx, l, args, *reason, out)
		}),
		"code": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
			if len(args) != 2 {
				return fmt.Errorf("%w: want ADDRESS and MODE, got %d arguments", errUsage, len(args))
			}
			var v struct {
				Code      string
				ExpiresAt time.Time `json:"expires_at"`
			}
			if err := l.call(ctx, "POST", inboxPath(args[0])+"/mode-codes", map[string]any{"mode": args[1], "reason": *reason}, &v); err != nil {
				return noInbox(args[0], err)
			}
			_, err := fmt.Fprintf(out, "%s\nGive it to who holds the inbox's key: it raises %s to %s, once, until %s.\nAny change of the mode ends it, and so do five wrong ones.\n", v.Code, args[0], args[1], orNever(&v.ExpiresAt))
			return err
		}),
		"allow": verbs("inbox allow", "list ADDRESS|add ADDRESS PATTERN|remove ADDRESS PATTERN", map[string]runner{
			"list": onServer(c, listAllowed),
			"add": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if len(args) != 2 {
					return fmt.Errorf("%w: want ADDRESS and PATTERN, got %d arguments", errUsage, len(args))
				}
				until, err := moment("expires", *expires)
				if err != nil {
					return err
				}
				var e allowed
				if err := l.call(ctx, "POST", inboxPath(args[0])+"/allowlist", map[string]any{"pattern": args[1], "expires_at": until}, &e); err != nil {
					return noInbox(args[0], err)
				}
				_, err = fmt.Fprintf(out, "%s may write to %s without asking, until: %s\n", args[0], e.Pattern, orNever(e.ExpiresAt))
				return err
			}),
			"remove": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if len(args) != 2 {
					return fmt.Errorf("%w: want ADDRESS and PATTERN, got %d arguments", errUsage, len(args))
				}
				if err := l.call(ctx, "DELETE", inboxPath(args[0])+"/allowlist/"+url.PathEscape(args[1]), nil, nil); err != nil {
					return notFoundAs(err, "there is no inbox %q with %q on its allow list; postern inbox allow list shows it", args[0], args[1])
				}
				_, err := fmt.Fprintf(out, "%s is off the allow list of %s\n", args[1], args[0])
				return err
			}),
		}),
		"overseers": verbs("inbox overseers", "get [ADDRESS]|set [ADDRESS] EMAIL,EMAIL", map[string]runner{
			"get": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if len(args) > 1 {
					return fmt.Errorf("%w: want one ADDRESS at most, got %d arguments", errUsage, len(args))
				}
				return l.overseers(ctx, "GET", args, nil, out)
			}),
			"set": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if len(args) < 1 || len(args) > 2 {
					return fmt.Errorf("%w: want [ADDRESS] and EMAIL,EMAIL, got %d arguments; none are said by ''", errUsage, len(args))
				}
				list := []string{}
				for a := range strings.SplitSeq(args[len(args)-1], ",") {
					if a = strings.TrimSpace(a); a != "" {
						list = append(list, a)
					}
				}
				return l.overseers(ctx, "POST", args[:len(args)-1], map[string]any{"addresses": list}, out)
			}),
		}),
		"upgrade": k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
			code, err := oneArg(args, "CODE")
			if err != nil {
				return err
			}
			if code == "-" {
				if _, err := fmt.Fscan(os.Stdin, &code); err != nil {
					return fmt.Errorf("read the code: %w", err)
				}
			}
			var b inbox
			if err := l.call(ctx, "POST", path+"/upgrade", map[string]any{"code": code}, &b); err != nil {
				return err
			}
			_, err = fmt.Fprintf(out, "%s is in mode %s\n", b.Address, b.Mode)
			return err
		}),
		"request": verbs("inbox request", "mode MODE|allow PATTERN", map[string]runner{
			"mode": k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
				mode, err := oneArg(args, "MODE")
				if err != nil {
					return err
				}
				return l.request(ctx, path+"/request-upgrade", map[string]any{"target_mode": mode, "reason": *reason}, out)
			}),
			"allow": k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
				pattern, err := oneArg(args, "PATTERN")
				if err != nil {
					return err
				}
				until, err := moment("expires", *expires)
				if err != nil {
					return err
				}
				return l.request(ctx, path+"/allowlist/requests", map[string]any{"pattern": pattern, "expires_at": until, "reason": *reason}, out)
			}),
		}),
	}
}

func inboxMode(ctx context.Context, l *local, args []string, reason string, out io.Writer) error {
	var b inbox
	switch len(args) {
	case 1:
		if err := l.call(ctx, "GET", inboxPath(args[0]), nil, &b); err != nil {
			return noInbox(args[0], err)
		}
	case 2:
		body := map[string]any{"mode": args[1]}
		if reason != "" {
			body["mode_reason"] = reason
		}
		if err := l.call(ctx, "PATCH", inboxPath(args[0]), body, &b); err != nil {
			return noInbox(args[0], err)
		}
	default:
		return fmt.Errorf("%w: want ADDRESS, and MODE to change it, got %d arguments", errUsage, len(args))
	}
	since := "since it was made"
	if b.ModeAt != nil {
		since = "since " + orNever(b.ModeAt)
	}
	if b.ModeReason != "" {
		since += ": " + printable(b.ModeReason)
	}
	_, err := fmt.Fprintf(out, "%s is in mode %s, %s\n", b.Address, b.Mode, since)
	return err
}

func listAllowed(ctx context.Context, l *local, args []string, out io.Writer) error {
	name, err := oneArg(args, "ADDRESS")
	if err != nil {
		return err
	}
	var v struct{ Allowlist []allowed }
	if err := l.call(ctx, "GET", inboxPath(name)+"/allowlist", nil, &v); err != nil {
		return noInbox(name, err)
	}
	if len(v.Allowlist) == 0 {
		_, err := fmt.Fprintln(out, "nobody: every mail of it waits for a person")
		return err
	}
	rows := [][]string{{"PATTERN", "ADDED", "BY", "ENDS"}}
	for _, e := range v.Allowlist {
		rows = append(rows, []string{e.Pattern, ago(e.CreatedAt), e.CreatedBy, orNever(e.ExpiresAt)})
	}
	return table(out, rows)
}

// overseers asks for the overseers of an inbox, or for no name of the project.
func (l *local) overseers(ctx context.Context, method string, args []string, body any, out io.Writer) error {
	path := "/v1/overseers"
	if len(args) == 1 {
		path = inboxPath(args[0]) + "/overseers"
	}
	var v struct{ Addresses []string }
	if err := l.call(ctx, method, path, body, &v); err != nil {
		if len(args) == 1 {
			return noInbox(args[0], err)
		}
		return err
	}
	if len(v.Addresses) == 0 {
		_, err := fmt.Fprintln(out, "nobody: what is monitored waits for a person")
		return err
	}
	_, err := fmt.Fprintln(out, strings.Join(v.Addresses, "\n"))
	return err
}

// request asks the owners for something.
func (l *local) request(ctx context.Context, path string, body any, out io.Writer) error {
	var a struct{ ID, State string }
	if err := l.call(ctx, "POST", path, body, &a); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "%s is %s: an owner decides\n", a.ID, a.State)
	return err
}
