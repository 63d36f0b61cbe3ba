package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// An inbox is what the API tells of one.
type inbox struct {
	ID, Address, Mode, Key, Notice string

	DisplayName string     `json:"display_name"`
	RecoveryKey string     `json:"recovery_key"`
	ModeAt      *time.Time `json:"mode_at"`
	ModeReason  string     `json:"mode_reason"`
	CreatedAt   time.Time  `json:"created_at"`
	ExpiresAt   *time.Time `json:"expires_at"`
	DeletedAt   *time.Time `json:"deleted_at"`
	PurgeAt     *time.Time `json:"purge_at"`
	MaxBytes    int64      `json:"max_bytes"`
}

// addresses returns the addresses of all inboxes by their ids.
func (l *local) addresses(ctx context.Context) (map[string]string, error) {
	var list struct{ Inboxes []inbox }
	if err := l.call(ctx, "GET", "/v1/inboxes", nil, &list); err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, b := range list.Inboxes {
		out[b.ID] = b.Address
	}
	return out, nil
}

const inboxHelp = `
The operator's part, over the local socket:

postern inbox create [NAME]    makes an inbox and prints its key, once; NAME is
                               a name in the server's mail domain, or a whole
                               address in a domain that you have verified
                               (postern domain); without it, one is drawn;
                               postmaster and abuse are only made here and in
                               the console
postern inbox list             lists them; --deleted: those that can be restored
postern inbox show ADDRESS     one of them, with its keys and grants by their ids
postern inbox update ADDRESS   changes what --display-name, --expires, --max-bytes say
postern inbox delete ADDRESS   it takes and shows no mail from now on; its mail
                               is gone for good after the grace time
postern inbox restore ADDRESS  brings it back within that time
postern inbox revoke ADDRESS CREDENTIAL   ends a key or a grant by its id
` + inboxModeHelp + `
The part of who holds the inbox's key, in $POSTERN_INBOX_KEY:

postern inbox key add          makes another key: --name, --scope, --expires
postern inbox key list         lists keys, never the keys themselves
postern inbox key rotate ID    replaces a key; the inbox is sealed anew
postern inbox key revoke ID    ends a key
postern inbox key recovery     makes a recovery key, to print and put away
postern inbox recover ADDRESS  makes a new key with the recovery key, which is in
                               $POSTERN_RECOVERY_KEY; --revoke-others also ends
                               every other key and grant
postern inbox webhook …        events of the inbox, sent to a URL:
                               create URL | list | delete ID | rotate ID | deliveries ID

What losing a key means. Mail is sealed to the inbox's key on arrival; neither
the project's key nor a person nor this server opens it. Lose every key, and the
mail is lost: nobody makes the key again. So make a recovery key while you still
hold a key, print it, and keep it where no machine reads it. It opens no mail; it
makes a new key. If a key was stolen, revoke or rotate it: what arrives after
that it cannot open; what had arrived before is to be taken as read.

Examples:

  postern inbox create analyst --recovery-key
  postern inbox create sales@example.com --display-name 'Sales' --expires 30d
  POSTERN_INBOX_KEY=pib_... postern inbox key add --name laptop --scope read
  postern inbox recover analyst@agents.internal --revoke-others

A sandbox may write from the inbox without any key once its creator attaches it:
Sandbox.create({ metadata: { 'postern.inbox': ADDRESS } }).
` + keyedHelp

func inboxCommand() *command {
	var k keyed
	c := &k.conf
	var n struct {
		mode, name, display, expires, scope string
		reason                              string
		maxBytes                            int64
		recovery, next, deleted, evenLast   bool
		revokeOthers                        bool
	}
	below := modeVerbs(&k, &n.reason, &n.expires)
	return group("inbox", "create [NAME]|list|show|update|delete|restore|revoke|mode|code|allow …|overseers …|key …|recover|upgrade|request …|webhook … [flags]", "make, change, watch, recover and delete inboxes", inboxHelp,
		func(fs *pflag.FlagSet) {
			k.flags(fs)
			fs.StringVar(&n.mode, "mode", "gated_send", "create: oversight `mode`: read_only, gated_all, gated_send, monitored or autonomous; see docs/reference/modes.md")
			fs.StringVar(&n.display, "display-name", "", "create, update: what recipients see beside the address")
			fs.StringVar(&n.reason, "reason", "", "mode, request: why, for the record and for who decides")
			fs.StringVar(&n.expires, "expires", "", "create, update, key add, allow add, request allow: when it ends, as 36h, 30d or a `time`; update: never")
			fs.Int64Var(&n.maxBytes, "max-bytes", 0, "create, update: `bytes` of mail that may arrive in it (default: 1 GiB)")
			fs.BoolVar(&n.recovery, "recovery-key", false, "create: make a recovery key, too")
			fs.BoolVar(&n.next, "next", false, "create: if the name is taken, take one like it")
			fs.BoolVar(&n.deleted, "deleted", false, "list: those that can be restored")
			fs.StringVar(&n.name, "name", "", "key add, webhook create: what to call it")
			fs.StringVar(&n.scope, "scope", "", "key add: read, propose (read and propose to send) or full (also manage keys); default full")
			fs.BoolVar(&n.evenLast, "even-last", false, "revoke, key revoke: also the last key that manages the inbox, without which its mail is lost")
			fs.BoolVar(&n.revokeOthers, "revoke-others", false, "recover: end every other key and grant of the inbox, as after a theft")
		}, merged(below, map[string]runner{
			"create": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if len(args) > 1 {
					return fmt.Errorf("%w: want one NAME at most, got %d arguments", errUsage, len(args))
				}
				expires, err := moment("expires", n.expires)
				if err != nil {
					return err
				}
				body := map[string]any{"mode": n.mode, "display_name": n.display, "next": n.next, "recovery_key": n.recovery, "max_bytes": n.maxBytes}
				if len(args) == 1 {
					body["address"] = args[0]
				}
				if expires != nil {
					body["expires_at"] = expires
				}
				var b inbox
				if err := l.call(ctx, "POST", "/v1/inboxes", body, &b); err != nil {
					return err
				}
				return b.shownOnce(out)
			}),
			"list": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				return listInboxes(ctx, l, out, n.deleted)
			}),
			"show": onServer(c, showInbox),
			"update": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				name, err := oneArg(args, "ADDRESS")
				if err != nil {
					return err
				}
				body := map[string]any{}
				if n.display != "" {
					body["display_name"] = n.display
				}
				if n.maxBytes != 0 {
					body["max_bytes"] = n.maxBytes
				}
				if n.expires == "never" {
					body["expires_at"] = nil
				} else if t, err := moment("expires", n.expires); err != nil {
					return err
				} else if t != nil {
					body["expires_at"] = t
				}
				if len(body) == 0 {
					return fmt.Errorf("%w: say what to change: --display-name, --expires or --max-bytes", errUsage)
				}
				var b inbox
				if err := l.call(ctx, "PATCH", inboxPath(name), body, &b); err != nil {
					return noInbox(name, err)
				}
				return b.print(out)
			}),
			"delete": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				name, err := oneArg(args, "ADDRESS")
				if err != nil {
					return err
				}
				var b inbox
				if err := l.call(ctx, "DELETE", inboxPath(name), nil, &b); err != nil {
					return noInbox(name, err)
				}
				_, err = fmt.Fprintf(out, "%s takes no mail and shows none. Until %s it can be brought back with postern inbox restore %s; then its mail is gone for good.\n", b.Address, orNever(b.PurgeAt), b.Address)
				return err
			}),
			"restore": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				return restoreInbox(ctx, l, args, out)
			}),
			"revoke": onServer(c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if len(args) != 2 {
					return fmt.Errorf("%w: want ADDRESS and CREDENTIAL, got %d arguments", errUsage, len(args))
				}
				return revokeKey(ctx, l, out, inboxPath(args[0]), args[1], n.evenLast)
			}),
			"key": verbs("inbox key", "add|list|rotate ID|revoke ID|recovery", map[string]runner{
				"add": k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
					if err := noArgs(args); err != nil {
						return err
					}
					return newCredential(ctx, l, out, path+"/keys", n.name, n.scope, n.expires)
				}),
				"list":   k.withKey(listKeys),
				"rotate": k.withKey(rotateKey),
				"revoke": k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
					id, err := oneArg(args, "ID")
					if err != nil {
						return err
					}
					return revokeKey(ctx, l, out, path, id, n.evenLast)
				}),
				"recovery": k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
					if err := noArgs(args); err != nil {
						return err
					}
					var p part
					if err := l.call(ctx, "POST", path+"/recovery-key", nil, &p); err != nil {
						return err
					}
					return p.shownOnce(out)
				}),
			}),
			"recover": func(ctx context.Context, args []string, out io.Writer) error {
				return recoverInbox(ctx, &k, args, out, n.revokeOthers)
			},
			"webhook": inboxHooks(&k, &n.name),
		}))
}

// merged returns the commands of both, of which none has a name of the other's.
func merged(a, b map[string]runner) map[string]runner {
	maps.Copy(a, b)
	return a
}

func inboxPath(name string) string { return "/v1/inboxes/" + pathSegment(name) }

func noInbox(name string, err error) error {
	return notFoundAs(err, "there is no inbox %q; name its address or its id, as postern inbox list shows them", name)
}

// shownOnce prints an inbox with its keys, and what their loss means.
func (b *inbox) shownOnce(out io.Writer) error {
	fmt.Fprintf(out, "inbox         %s (%s, %s)\nkey           %s\n", b.Address, b.ID, b.Mode, b.Key)
	if b.RecoveryKey != "" {
		fmt.Fprintf(out, "recovery key  %s\n", b.RecoveryKey)
	}
	text := "The key is shown this once. Whoever has it reads this inbox; without it nobody does,\nand no operator can make it again.\n"
	if b.RecoveryKey != "" {
		text += "The recovery key is shown this once, too. Print it and keep it away from machines: it\nmakes a new key when this one is lost (postern inbox recover).\n"
	} else {
		text += "If it is lost, the mail is lost: a recovery key prevents that\n(POSTERN_INBOX_KEY=... postern inbox key recovery).\n"
	}
	_, err := fmt.Fprint(out, text)
	return err
}

func (b *inbox) print(out io.Writer) error {
	fmt.Fprintf(out, "inbox     %s (%s)\n", b.Address, b.ID)
	if b.DisplayName != "" {
		fmt.Fprintf(out, "shown as  %s\n", printable(b.DisplayName))
	}
	_, err := fmt.Fprintf(out, "mode      %s\nmade      %s\nends      %s\nroom      %s\n", b.Mode, orNever(&b.CreatedAt), orNever(b.ExpiresAt), megabytes(b.MaxBytes))
	return err
}

func listInboxes(ctx context.Context, l *local, out io.Writer, deleted bool) error {
	path, rows := "/v1/inboxes", [][]string{{"ADDRESS", "ID", "MODE", "CREATED", "ENDS"}}
	if deleted {
		path, rows = path+"?deleted=true", [][]string{{"ADDRESS", "ID", "MODE", "DELETED", "GONE FOR GOOD"}}
	}
	var list struct{ Inboxes []inbox }
	if err := l.call(ctx, "GET", path, nil, &list); err != nil {
		return err
	}
	for _, b := range list.Inboxes {
		row := []string{b.Address, b.ID, b.Mode, orNever(&b.CreatedAt), orNever(b.ExpiresAt)}
		if deleted {
			row[3], row[4] = orNever(b.DeletedAt), orNever(b.PurgeAt)
		}
		rows = append(rows, row)
	}
	return table(out, rows)
}

func showInbox(ctx context.Context, l *local, args []string, out io.Writer) error {
	name, err := oneArg(args, "ADDRESS")
	if err != nil {
		return err
	}
	var b inbox
	if err := l.call(ctx, "GET", inboxPath(name), nil, &b); err != nil {
		return noInbox(name, err)
	}
	if err := b.print(out); err != nil {
		return err
	}
	fmt.Fprintln(out)
	var keys struct{ Keys []part }
	var grants struct{ Grants []part }
	if err := l.call(ctx, "GET", inboxPath(b.ID)+"/keys", nil, &keys); err != nil {
		return err
	}
	if err := l.call(ctx, "GET", inboxPath(b.ID)+"/grants", nil, &grants); err != nil {
		return err
	}
	return printParts(out, append(keys.Keys, grants.Grants...), false)
}

// restoreInbox finds a deleted inbox by its id or address. Of several that had
// the address, the newest is meant.
func restoreInbox(ctx context.Context, l *local, args []string, out io.Writer) error {
	name, err := oneArg(args, "ADDRESS")
	if err != nil {
		return err
	}
	var list struct{ Inboxes []inbox }
	if err := l.call(ctx, "GET", "/v1/inboxes?deleted=true", nil, &list); err != nil {
		return err
	}
	var found *inbox
	for _, b := range list.Inboxes {
		if (b.ID == name || strings.EqualFold(b.Address, name)) && (found == nil || b.DeletedAt.After(*found.DeletedAt)) {
			found = &b
		}
	}
	if found == nil {
		return fmt.Errorf("there is no deleted inbox %q; postern inbox list --deleted shows them", name)
	}
	var b inbox
	if err := l.call(ctx, "POST", inboxPath(found.ID)+"/undelete", nil, &b); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s is back, with its mail and its keys.\n", b.Address)
	return err
}

// A part is what the API tells of a credential.
type part struct {
	ID, Inbox, Kind, Name, Scope, Key, Notice string

	CreatedAt time.Time  `json:"created_at"`
	CreatedBy string     `json:"created_by"`
	UsedAt    *time.Time `json:"used_at"`
	ExpiresAt *time.Time `json:"expires_at"`
}

func (p *part) shownOnce(out io.Writer) error {
	if p.Key == "" {
		_, err := fmt.Fprintf(out, "%s  %s, %s, ends %s\n", p.ID, p.Kind, p.Scope, orNever(p.ExpiresAt))
		return err
	}
	_, err := fmt.Fprintf(out, "%s  %s, %s, ends %s\n%s\n%s\n", p.ID, p.Kind, p.Scope, orNever(p.ExpiresAt), p.Key, p.Notice)
	return err
}

func printParts(out io.Writer, ps []part, inbox bool) error {
	rows := [][]string{{"CREDENTIAL", "KIND", "MAY", "NAME", "MADE", "LAST SHOWN", "ENDS"}}
	if inbox {
		rows[0] = append(rows[0], "INBOX")
	}
	for _, p := range ps {
		row := []string{p.ID, p.Kind, p.Scope, printable(p.Name), orNever(&p.CreatedAt), orNever(p.UsedAt), orNever(p.ExpiresAt)}
		if inbox {
			row = append(row, p.Inbox)
		}
		rows = append(rows, row)
	}
	return table(out, rows)
}

func newCredential(ctx context.Context, l *local, out io.Writer, path, name, scope, expires string) error {
	t, err := moment("expires", expires)
	if err != nil {
		return err
	}
	body := map[string]any{"name": name, "scope": scope}
	if t != nil {
		body["expires_at"] = t
	}
	var p part
	if err := l.call(ctx, "POST", path, body, &p); err != nil {
		return err
	}
	return p.shownOnce(out)
}

func listKeys(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
	if err := noArgs(args); err != nil {
		return err
	}
	var list struct{ Keys []part }
	if err := l.call(ctx, "GET", path+"/keys", nil, &list); err != nil {
		return err
	}
	return printParts(out, list.Keys, false)
}

func rotateKey(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	var p part
	if err := l.call(ctx, "POST", path+"/keys/"+pathSegment(id)+"/rotate", nil, &p); err != nil {
		return notFoundAs(err, "the inbox has no key %q; postern inbox key list shows them", id)
	}
	return p.shownOnce(out)
}

func revokeKey(ctx context.Context, l *local, out io.Writer, path, id string, evenLast bool) error {
	q := ""
	if evenLast {
		q = "?" + url.Values{"even_last": {"true"}}.Encode()
	}
	if err := l.call(ctx, "DELETE", path+"/keys/"+pathSegment(id)+q, nil, nil); err != nil {
		return notFoundAs(err, "the inbox has no credential %q; postern inbox show lists them", id)
	}
	_, err := fmt.Fprintln(out, "Revoked. Whoever held it opens nothing that arrives from now on; what had arrived before is to be taken as read.")
	return err
}

// recoverInbox makes a new key with the recovery key.
func recoverInbox(ctx context.Context, k *keyed, args []string, out io.Writer, revoke bool) error {
	name, err := oneArg(args, "ADDRESS")
	if err != nil {
		return err
	}
	l, err := k.client(recoveryVariable)
	if err != nil {
		return fmt.Errorf("%w\nIf there is no recovery key and every key of %s is lost, its mail cannot be opened by anybody. The address can be used again: delete the inbox, and make a new one", err, name)
	}
	var p part
	if err := l.call(ctx, "POST", inboxPath(name)+"/recover", map[string]any{"revoke_others": revoke}, &p); err != nil {
		return err
	}
	if err := p.shownOnce(out); err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "The recovery key stays good: put it back where it was.")
	return err
}
