package main

import (
	"context"
	"fmt"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

const grantHelp = `
A grant (pgr_...) is for a program that watches over several agents: it reads,
or reads and proposes to send, in the inboxes that their own keys have granted
it, until each one's end. Only who holds an inbox's key can grant it: neither the
project nor the operator can. Every use of it is shown under the inbox.

A grant for a reviewer (--for-reviewer) is for one person. In the console it shows
them the threads that waiting emails of this inbox answer, and senders and subjects
in its quarantine, and nothing else. The command prints a code, which the person
redeems once, in the console under Account. Each reading is in the record. "postern
grant reviewers" lists these grants. "postern grant revoke" with the inbox's key ends
one, and an owner can end it on the inbox's page of the console.

A grant that is revoked, or has ended, opens nothing that arrives afterwards.
What had arrived before, its holder may have read and kept.

Examples:

  export POSTERN_INBOX_KEY=pib_...
  postern grant create --name orchestrator --scope read --expires 30d
  postern grant create --for-reviewer ann --expires 90d
  POSTERN_INBOX_KEY=pib_<another inbox's> postern grant extend crd_... --expires 30d
` + keyedHelp

func grantCommand() *command {
	var k keyed
	var name, scope, expires, reviewer string
	var tools []string
	return &command{
		use: "grant", short: "let a program into several inboxes for a time", long: grantHelp,
		flags: k.flags,
		below: []*command{
			{
				use: "create", short: "make a grant over the inbox",
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(&name, "name", "", "what to call it")
					toolsFlag(fs, &tools)
					fs.StringVar(&scope, "scope", "read", "`scopes`, separated by commas: read (opens mail), draft (writes drafts), send (proposes, opens nothing)")
					fs.StringVar(&expires, "expires", "", "when it ends, as 36h, 30d or a `time`")
					fs.StringVar(&reviewer, "for-reviewer", "", "`name` of a person who may see the threads of waiting emails; cannot be combined with --name, --scope and --tools")
				},
				run: k.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					if reviewer != "" {
						if name != "" || len(tools) > 0 || scope != "read" {
							return fmt.Errorf("%w: --for-reviewer cannot be combined with --name, --scope and --tools", errUsage)
						}
						return newContextGrant(ctx, l, out, path, reviewer, expires)
					}
					return newCredential(ctx, l, out, path+"/grants", name, scope, expires, tools)
				}),
			},
			{
				use: "extend GRANT", short: "add the inbox to a grant",
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(&scope, "scope", "read", "`scopes`, separated by commas: read (opens mail), draft (writes drafts), send (proposes, opens nothing)")
					fs.StringVar(&expires, "expires", "", "when it ends, as 36h, 30d or a `time`")
				},
				run: k.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					id, err := oneArg(args, "GRANT")
					if err != nil {
						return err
					}
					t, err := moment("expires", expires)
					if err != nil {
						return err
					}
					body := map[string]any{"grant": id, "scope": scopesOf(scope)}
					if t != nil {
						body["expires_at"] = t
					}
					var p api.Credential
					if err := l.call(ctx, "POST", path+"/grants", body, &p); err != nil {
						return notFoundAs(err, "there is no grant %q", id)
					}
					return printNewCredential(out, p)
				}),
			},
			{
				use: "list", short: "list the grants of the project, or of the inbox with its key",
				run: k.either(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					var list api.GrantList
					if err := l.call(ctx, "GET", path+"/grants", nil, &list); err != nil {
						return err
					}
					return printCredentials(out, list.Grants, true)
				}),
			},
			{
				use: "reviewers", short: "list the inbox's grants for reviewers",
				run: k.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					var list api.ContextGrantList
					if err := l.call(ctx, "GET", path+"/context-grants", nil, &list); err != nil {
						return err
					}
					return printContextGrants(out, list.Grants)
				}),
			},
			{
				use: "revoke ID", short: "end a grant, in one inbox with its key or else in all",
				run: k.either(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					id, err := oneArg(args, "ID")
					if err != nil {
						return err
					}
					if err := l.call(ctx, "DELETE", path+"/grants/"+pathSegment(id), nil, nil); err != nil {
						return notFoundAs(err, "there is no grant %q; postern grant list shows them", id)
					}
					_, err = fmt.Fprintln(out, "Revoked. Whoever held it opens nothing that arrives from now on; what had arrived before is to be taken as read.")
					return err
				}),
			},
		},
	}
}

// newContextGrant makes a context grant for a reviewer.
func newContextGrant(ctx context.Context, l *local, out *output, path, person, expires string) error {
	t, err := moment("expires", expires)
	if err != nil {
		return err
	}
	var made api.ContextGrant
	if err := l.call(ctx, "POST", path+"/context-grants", api.NewContextGrant{Person: person, ExpiresAt: t}, &made); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s  for %s, ends %s\n%s\n%s\n", made.ID, cell(made.Person), orNever(&made.ExpiresAt), made.Code, made.Notice)
	return err
}

func printContextGrants(out *output, list []api.ContextGrant) error {
	rows := [][]string{{"CREDENTIAL", "PERSON", "MADE", "REDEEMED", "ENDS"}}
	for _, g := range list {
		rows = append(rows, []string{g.ID, cell(g.Person), ago(g.CreatedAt), agoOrNever(g.RedeemedAt), in(&g.ExpiresAt)})
	}
	return out.rows(list, rows)
}
