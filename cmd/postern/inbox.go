package main

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/api"
	"postern/internal/auth"
)

// addresses returns the addresses of all inboxes by their ids.
func (l *local) addresses(ctx context.Context) (map[string]string, error) {
	list, err := collect(l.api.Inboxes.List(ctx, false))
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, b := range list {
		out[b.ID] = b.Address
	}
	return out, nil
}

const inboxHelp = `
An inbox is an address of an agent, with mail that is sealed to the inbox's key
on arrival. The operator makes, lists, changes, stops and restores inboxes, sets
their oversight mode (see postern help inbox mode) and ends keys. Whoever holds
the inbox's key manages keys, recovery and webhooks ("key", "webhook", "upgrade"
and "request" below).

What losing a key means: neither the project's key nor a person nor this server
opens the mail. Lose every key, and the mail is lost: nobody can make the key
again. Make a recovery key while you still hold a key, print it, and keep it
where no machine reads it. It opens no mail; it makes a new key. If a key was
stolen, revoke or rotate it: it does not open what arrives after that. Assume
that whatever had arrived before was read.

A sandbox sends from the inbox without any key once its creator attaches it:
Sandbox.create({ metadata: { 'postern.inbox': ADDRESS } }).
` + keyedHelp

const inboxModeHelp = `
Shows the oversight mode of an inbox, or changes it. A closer mode is set at
once; a mode with less oversight needs a person (docs/reference/modes.md):

  read_only     it sends nothing
  gated_all     outgoing and incoming mail wait for a person
  gated_send    outgoing mail waits, except to addresses on the allow list
  monitored     outgoing mail is sent, and overseers get a copy
  autonomous    outgoing mail is sent`

// An inboxTool is the inbox command with its flags.
type inboxTool struct {
	keyed

	mode, name, display, expires, scope, reason string
	tools                                       []string

	maxBytes int64

	autoSubmitted string
	recovery      bool
	next          bool
	deleted       bool
	evenLast      bool
	revokeOthers  bool
}

func inboxCommand() *command {
	n := &inboxTool{}
	c := &n.conf
	below := []*command{
		{
			use: "create [NAME]", short: "make an inbox and print its key, once", facts: true,
			long: `
Makes an inbox and prints its key, which is not shown again. NAME is a name in
the server's mail domain, or a whole address in a domain that you have verified
(postern help domain); without it the server picks one. Only the operator, here
or in the console, makes the inboxes postmaster and abuse.`,
			example: `
postern inbox create analyst --recovery-key
postern inbox create sales@example.com --display-name 'Sales' --expires 30d`,
			flags: n.createFlags, run: onServer(c, n.create),
		},
		{
			use: "list", short: "list inboxes", lists: true,
			flags: func(fs *pflag.FlagSet) {
				fs.BoolVar(&n.deleted, "deleted", false, "list inboxes that can be restored")
			},
			run: onServer(c, n.list),
		},
		{use: "show ADDRESS", short: "show an inbox with the IDs of its keys and grants", facts: true, complete: inboxAddresses(c), run: onServer(c, showInbox)},
		{
			use: "update ADDRESS", short: "change the display name, the end or the size", facts: true, complete: inboxAddresses(c),
			flags: n.updateFlags, run: onServer(c, n.update),
		},
		n.inviteCommand(), n.invitesCommand(), n.uninviteCommand(),
		{use: "delete ADDRESS", short: "stop an inbox; its mail is erased after a grace period", complete: inboxAddresses(c), run: onServer(c, deleteInbox)},
		{use: "restore ADDRESS", short: "restore a deleted inbox within the grace period", run: onServer(c, restoreInbox)},
		{
			use: "revoke ADDRESS CREDENTIAL", short: "end a key or a grant by its ID", complete: inboxAddresses(c),
			flags: n.lastFlag,
			run: onServer(c, func(ctx context.Context, l *local, args []string, out *output) error {
				if len(args) != 2 {
					return fmt.Errorf("%w: want ADDRESS and CREDENTIAL, got %d arguments", errUsage, len(args))
				}
				return revokeKey(ctx, l, out, inboxPath(args[0]), args[1], n.evenLast)
			}),
		},
	}
	return &command{
		use: "inbox", short: "make, change, watch, recover and delete inboxes", long: inboxHelp,
		flags: n.flags,
		below: slices.Concat(below, modeVerbs(n), []*command{n.keyCommand(), {
			use: "recover ADDRESS", short: "make a new key with the recovery key in $POSTERN_RECOVERY_KEY",
			example: `postern inbox recover analyst@agents.internal --revoke-others`,
			flags: func(fs *pflag.FlagSet) {
				fs.BoolVar(&n.revokeOthers, "revoke-others", false, "end every other key and grant of the inbox, as after a theft")
			},
			run: func(ctx context.Context, args []string, out *output) error {
				return recoverInbox(ctx, &n.keyed, args, out, n.revokeOthers)
			},
		}, inboxHooks(&n.keyed, &n.name)}),
	}
}

// keyCommand is "postern inbox key".
func (n *inboxTool) keyCommand() *command {
	return &command{
		use: "key", short: "manage keys, with the inbox's key",
		long: `
Manages the keys of the inbox whose key is in $POSTERN_INBOX_KEY. The list shows
IDs, never the keys themselves.` + "\n" + keyedHelp,
		below: []*command{
			{
				use: "add", short: "make another key",
				example: `POSTERN_INBOX_KEY=pib_... postern inbox key add --name laptop --scope read
POSTERN_INBOX_KEY=pib_... postern inbox key add --name reporter --scope send,draft --tools email_send,email_draft_create`,
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(&n.name, "name", "", "`name` of the key, for people")
					fs.StringVar(&n.scope, "scope", "", "`scopes`, separated by commas: read (opens mail), draft (writes drafts), send (proposes, opens nothing), or full (all, and manages keys) (default: full)")
					toolsFlag(fs, &n.tools)
					n.expiresFlag(fs, "when the key ends, as 36h, 30d or a `time` (default: never)")
				},
				run: n.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					return newCredential(ctx, l, out, path+"/keys", n.name, n.scope, n.expires, n.tools)
				}),
			},
			{use: "list", short: "list keys", lists: true, run: n.withKey(listKeys)},
			{use: "rotate ID", short: "replace a key; the inbox is sealed anew", run: n.withKey(rotateKey)},
			{
				use: "revoke ID", short: "end a key", flags: n.lastFlag,
				run: n.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					id, err := oneArg(args, "ID")
					if err != nil {
						return err
					}
					return revokeKey(ctx, l, out, path, id, n.evenLast)
				}),
			},
			{
				use: "recovery", short: "make a recovery key, to print and put away",
				run: n.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					var made api.Credential
					if err := l.call(ctx, "POST", path+"/recovery-key", nil, &made); err != nil {
						return err
					}
					return printNewCredential(out, made)
				}),
			},
		},
	}
}

func (n *inboxTool) expiresFlag(fs *pflag.FlagSet, usage string) {
	fs.StringVar(&n.expires, "expires", "", usage)
}

func (n *inboxTool) lastFlag(fs *pflag.FlagSet) {
	fs.BoolVar(&n.evenLast, "even-last", false, "also end the last key that manages the inbox, without which its mail is lost")
}

// settingFlags declares what can be set at creation and later.
func (n *inboxTool) settingFlags(fs *pflag.FlagSet) {
	fs.StringVar(&n.display, "display-name", "", "`name` that recipients see beside the address")
	n.expiresFlag(fs, "when the inbox is deleted, as 36h, 30d or a `time`; update: never for no end")
	fs.Int64Var(&n.maxBytes, "max-bytes", 0, "`bytes` of mail that the inbox may hold (default: 1 GiB)")
}

func (n *inboxTool) updateFlags(fs *pflag.FlagSet) {
	n.settingFlags(fs)
	fs.StringVar(&n.autoSubmitted, "auto-submitted", "", "`when` mail of the inbox has the field Auto-Submitted: always, or unless_approved, so that what a person approved leaves without it")
}

func (n *inboxTool) createFlags(fs *pflag.FlagSet) {
	n.settingFlags(fs)
	fs.StringVar(&n.mode, "mode", "gated_send", "oversight `mode`: read_only, gated_all, gated_send, monitored or autonomous; see docs/reference/modes.md")
	fs.BoolVar(&n.recovery, "recovery-key", false, "make a recovery key, too")
	fs.BoolVar(&n.next, "next", false, "if the name is taken, take one like it")
}

func (n *inboxTool) create(ctx context.Context, l *local, args []string, out *output) error {
	if len(args) > 1 {
		return fmt.Errorf("%w: want one NAME at most, got %d arguments", errUsage, len(args))
	}
	expires, err := moment("expires", n.expires)
	if err != nil {
		return err
	}
	wanted := api.NewInbox{Mode: api.Mode(n.mode), DisplayName: n.display, Next: n.next, RecoveryKey: n.recovery, MaxBytes: n.maxBytes, ExpiresAt: expires}
	if len(args) == 1 {
		wanted.Address = args[0]
	}
	b, err := l.api.Inboxes.Create(ctx, wanted)
	if err != nil {
		return err
	}
	return out.facts(b, func() error { return printNewInbox(out, b) })
}

func (n *inboxTool) update(ctx context.Context, l *local, args []string, out *output) error {
	name, err := oneArg(args, "ADDRESS")
	if err != nil {
		return err
	}
	var change api.InboxChange
	if n.display != "" {
		change.DisplayName = &n.display
	}
	if n.maxBytes != 0 {
		change.MaxBytes = &n.maxBytes
	}
	if n.expires == "never" {
		change.ExpiresAt = api.NeverExpire()
	} else if t, err := moment("expires", n.expires); err != nil {
		return err
	} else if t != nil {
		change.ExpiresAt = api.ExpireAt(*t)
	}
	if n.autoSubmitted != "" {
		change.AutoSubmitted = new(api.AutoSubmitted(strings.ReplaceAll(n.autoSubmitted, "-", "_")))
	}
	if change.DisplayName == nil && change.MaxBytes == nil && change.ExpiresAt == nil && change.AutoSubmitted == nil {
		return fmt.Errorf("%w: say what to change: --display-name, --expires, --max-bytes or --auto-submitted", errUsage)
	}
	b, err := l.api.Inboxes.Update(ctx, name, change)
	if err != nil {
		return noInbox(name, err)
	}
	return out.facts(b, func() error { return printInbox(out, b) })
}

func deleteInbox(ctx context.Context, l *local, args []string, out *output) error {
	name, err := oneArg(args, "ADDRESS")
	if err != nil {
		return err
	}
	b, err := l.api.Inboxes.Delete(ctx, name)
	if err != nil {
		return noInbox(name, err)
	}
	_, err = fmt.Fprintf(out, "%s takes no mail and shows none. Until %s it can be restored with postern inbox restore %s; then its mail is erased.\n", b.Address, orNever(b.PurgeAt), b.Address)
	return err
}

func inboxPath(name string) string { return "/v1/inboxes/" + pathSegment(name) }

func noInbox(name string, err error) error {
	return notFoundAs(err, "there is no inbox %q; name its address or its id, as postern inbox list shows them", name)
}

// inboxAddresses completes the first argument with the addresses of inboxes.
func inboxAddresses(c *Config) func(context.Context, []string) []string {
	return completing(c, func(ctx context.Context, l *local) (names []string, err error) {
		list, err := collect(l.api.Inboxes.List(ctx, false))
		if err != nil {
			return nil, err
		}
		for _, b := range list {
			names = append(names, b.Address+"\t"+string(b.Mode))
		}
		return names, nil
	})
}

// printNewInbox prints an inbox with its keys, and what losing them means.
func printNewInbox(out io.Writer, b api.Inbox) error {
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

func printInbox(out io.Writer, b api.Inbox) error {
	fmt.Fprintf(out, "inbox     %s (%s)\n", b.Address, b.ID)
	if b.DisplayName != "" {
		fmt.Fprintf(out, "shown as  %s\n", printable(b.DisplayName))
	}
	if b.AutoSubmitted == api.SubmittedUnapproved {
		fmt.Fprintln(out, "marked    mail that a person approved leaves without Auto-Submitted")
	}
	_, err := fmt.Fprintf(out, "mode      %s\nmade      %s\nends      %s\nroom      %s\n", b.Mode, orNever(&b.CreatedAt), orNever(b.ExpiresAt), megabytes(b.MaxBytes))
	return err
}

func (n *inboxTool) list(ctx context.Context, l *local, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	rows := [][]string{{"ADDRESS", "ID", "MODE", "CREATED", "ENDS"}}
	if n.deleted {
		rows = [][]string{{"ADDRESS", "ID", "MODE", "DELETED", "ERASED"}}
	}
	list, err := collect(l.api.Inboxes.List(ctx, n.deleted))
	if err != nil {
		return err
	}
	for _, b := range list {
		row := []string{b.Address, b.ID, string(b.Mode), ago(b.CreatedAt), in(b.ExpiresAt)}
		if n.deleted {
			row[3], row[4] = agoOrNever(b.DeletedAt), in(b.PurgeAt)
		}
		rows = append(rows, row)
	}
	return out.rows(list, rows)
}

// An inboxFacts is what "postern inbox show --json" prints.
type inboxFacts struct {
	api.Inbox

	Keys   []api.Credential `json:"keys"`
	Grants []api.Credential `json:"grants"`
}

func showInbox(ctx context.Context, l *local, args []string, out *output) error {
	name, err := oneArg(args, "ADDRESS")
	if err != nil {
		return err
	}
	var b inboxFacts
	if b.Inbox, err = l.api.Inboxes.Get(ctx, name); err != nil {
		return noInbox(name, err)
	}
	if b.Keys, err = l.api.Keys.List(ctx, b.ID); err != nil {
		return err
	}
	if b.Grants, err = l.api.Grants.List(ctx, b.ID); err != nil {
		return err
	}
	return out.facts(b, func() error {
		if err := printInbox(out, b.Inbox); err != nil {
			return err
		}
		fmt.Fprintln(out)
		return printCredentials(out, append(b.Keys, b.Grants...), false)
	})
}

// restoreInbox finds a deleted inbox by its id or address. Of several that had
// the address, the newest is meant.
func restoreInbox(ctx context.Context, l *local, args []string, out *output) error {
	name, err := oneArg(args, "ADDRESS")
	if err != nil {
		return err
	}
	list, err := collect(l.api.Inboxes.List(ctx, true))
	if err != nil {
		return err
	}
	var found *api.Inbox
	for _, b := range list {
		if (b.ID == name || strings.EqualFold(b.Address, name)) && (found == nil || b.DeletedAt.After(*found.DeletedAt)) {
			found = &b
		}
	}
	if found == nil {
		return fmt.Errorf("there is no deleted inbox %q; postern inbox list --deleted shows them", name)
	}
	b, err := l.api.Inboxes.Restore(ctx, found.ID)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s is back, with its mail and its keys.\n", b.Address)
	return err
}

func printNewCredential(out *output, p api.Credential) error {
	if p.Key == "" {
		_, err := fmt.Fprintf(out, "%s  %s, %s%s, ends %s\n", p.ID, p.Kind, p.Scope, limits(p), orNever(p.ExpiresAt))
		return err
	}
	_, err := fmt.Fprintf(out, "%s  %s, %s%s, ends %s\n%s\n%s\n", p.ID, p.Kind, p.Scope, limits(p), orNever(p.ExpiresAt), p.Key, p.Notice)
	return err
}

// limits says how many tools a credential is limited to.
func limits(p api.Credential) string {
	switch len(p.Tools) {
	case 0:
		return ""
	case 1:
		return ", 1 tool"
	}
	return fmt.Sprintf(", %d tools", len(p.Tools))
}

func printCredentials(out *output, list []api.Credential, inbox bool) error {
	rows := [][]string{{"CREDENTIAL", "KIND", "SCOPE", "NAME", "MADE", "LAST USED", "ENDS"}}
	if inbox {
		rows[0] = append(rows[0], "INBOX")
	}
	for _, p := range list {
		row := []string{p.ID, p.Kind, string(p.Scope) + limits(p), cell(p.Name), ago(p.CreatedAt), usedAgo(p.UsedAt, auth.UseResolution), in(p.ExpiresAt)}
		if inbox {
			row = append(row, p.Inbox)
		}
		rows = append(rows, row)
	}
	return out.rows(list, rows)
}

// toolsFlag is the flag for the only tools that a credential may call.
func toolsFlag(fs *pflag.FlagSet, tools *[]string) {
	fs.StringSliceVar(tools, "tools", nil, "the only `tools` that it may call, separated by commas, such as email_send (default: all that its scopes permit)")
}

// scopesOf returns the scopes of a flag, which commas separate.
func scopesOf(flag string) api.Scope { return api.Scope(strings.ReplaceAll(flag, ",", " ")) }

func newCredential(ctx context.Context, l *local, out *output, path, name, scope, expires string, tools []string) error {
	t, err := moment("expires", expires)
	if err != nil {
		return err
	}
	var made api.Credential
	if err := l.call(ctx, "POST", path, api.NewKey{Name: name, Scope: scopesOf(scope), ExpiresAt: t, Tools: tools}, &made); err != nil {
		return err
	}
	return printNewCredential(out, made)
}

func listKeys(ctx context.Context, l *local, path string, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	var list api.KeyList
	if err := l.call(ctx, "GET", path+"/keys", nil, &list); err != nil {
		return err
	}
	return printCredentials(out, list.Keys, false)
}

func rotateKey(ctx context.Context, l *local, path string, args []string, out *output) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	var p api.Credential
	if err := l.call(ctx, "POST", path+"/keys/"+pathSegment(id)+"/rotate", nil, &p); err != nil {
		return notFoundAs(err, "the inbox has no key %q; postern inbox key list shows them", id)
	}
	return printNewCredential(out, p)
}

func revokeKey(ctx context.Context, l *local, out *output, path, id string, evenLast bool) error {
	q := ""
	if evenLast {
		q = "?" + url.Values{"even_last": {"true"}}.Encode()
	}
	if err := l.call(ctx, "DELETE", path+"/keys/"+pathSegment(id)+q, nil, nil); err != nil {
		return notFoundAs(err, "the inbox has no credential %q; postern inbox show lists them", id)
	}
	_, err := fmt.Fprintln(out, "Revoked. It opens nothing that arrives from now on; assume that what had arrived before was read.")
	return err
}

// recoverInbox makes a new key with the recovery key.
func recoverInbox(ctx context.Context, k *keyed, args []string, out *output, revoke bool) error {
	name, err := oneArg(args, "ADDRESS")
	if err != nil {
		return err
	}
	l, err := k.client(recoveryVariable)
	if err != nil {
		return fmt.Errorf("%w\nIf there is no recovery key and every key of %s is lost, nobody can open its mail. The address can be used again: delete the inbox, and make a new one", err, name)
	}
	var p api.Credential
	if err := l.call(ctx, "POST", inboxPath(name)+"/recover", api.Recover{RevokeOthers: revoke}, &p); err != nil {
		return err
	}
	if err := printNewCredential(out, p); err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, "The recovery key stays valid: put it back where it was.")
	return err
}
