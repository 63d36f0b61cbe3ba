package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/pflag"

	"postern/client"
	"postern/internal/api"
)

const personHelp = `
An owner manages people, modes, policy, domains and keys. A reviewer decides on
what waits, stops things and lets mail out of quarantine. A viewer looks, and
changes nothing. A project keeps an owner who can come in. Nobody is deleted:
the record names people. Changing a role, disabling and resetting end the
person's sessions at once.

Hand a link to the person it is for and nobody else: whoever opens it first, has
what it gives. It works once, within a day.

Examples:

  postern person invite --role reviewer --email rita@example.com
  postern person role rita owner
` + personalHelp

func personCommand() *command {
	var p personal
	var role, email string
	on := func(do func(*client.PeopleService, context.Context, string) error, done string) runner {
		return p.onServer(func(ctx context.Context, l *local, args []string, out *output) error {
			name, err := oneArg(args, "NAME")
			if err != nil {
				return err
			}
			if err := do(l.api.People, ctx, name); err != nil {
				return noPerson(err, name)
			}
			_, err = fmt.Fprintln(out, done)
			return err
		})
	}
	return &command{
		use: "person", short: "manage who may decide", long: personHelp,
		flags: p.flags,
		below: []*command{
			{
				use: "list", short: "list the people of the project", lists: true,
				run: p.onServer(func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					list, err := l.api.People.List(ctx)
					if err != nil {
						return err
					}
					rows := [][]string{{"NAME", "ROLE", "SECOND FACTOR", "SESSIONS", "MADE", "EMAIL"}}
					for _, p := range list {
						rows = append(rows, []string{p.Name, standing(p), factors(p), strconv.Itoa(p.Sessions), ago(p.CreatedAt), cell(p.Email)})
					}
					return out.rows(list, rows)
				}),
			},
			{
				use: "invite", short: "print a one-time link for a new account",
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(&role, "role", "reviewer", "owner, reviewer or viewer")
					fs.StringVar(&email, "email", "", "where to write to them of what waits")
				},
				run: p.onServer(func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					v, err := l.api.People.Invite(ctx, api.NewInvitation{Role: api.Role(role), Email: email})
					if err != nil {
						return err
					}
					return printLink(out, v, "a new "+string(v.Role))
				}),
			},
			{
				use: "invitations", short: "list the links that can still be used", lists: true,
				run: p.onServer(func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					list, err := l.api.People.Invitations(ctx)
					if err != nil {
						return err
					}
					rows := [][]string{{"ID", "FOR", "BY", "ENDS"}}
					for _, v := range list {
						what := "a new " + string(v.Role)
						if v.Person != "" {
							what = "a new password of " + v.Person
						}
						rows = append(rows, []string{v.ID, what, first(v.CreatedBy, "the first start"), in(&v.ExpiresAt)})
					}
					return out.rows(list, rows)
				}),
			},
			{
				use: "withdraw ID", short: "invalidate a link",
				run: p.onServer(func(ctx context.Context, l *local, args []string, out *output) error {
					id, err := oneArg(args, "ID")
					if err != nil {
						return err
					}
					if err := l.api.People.Withdraw(ctx, id); err != nil {
						return notFoundAs(err, "there is no link %q that can be used; postern person invitations lists them", id)
					}
					_, err = fmt.Fprintln(out, "It opens nothing now.")
					return err
				}),
			},
			{
				use: "role NAME ROLE", short: "change the role of a person",
				run: p.onServer(func(ctx context.Context, l *local, args []string, out *output) error {
					if len(args) != 2 {
						return fmt.Errorf("%w: want NAME ROLE, got %d arguments", errUsage, len(args))
					}
					if err := l.api.People.Update(ctx, args[0], api.PersonChange{Role: new(api.Role(args[1]))}); err != nil {
						return noPerson(err, args[0])
					}
					_, err := fmt.Fprintf(out, "%s is %s now. Their sessions have ended.\n", args[0], args[1])
					return err
				}),
			},
			{
				use: "email NAME ADDRESS", short: "set the address at which a person is notified",
				run: p.onServer(func(ctx context.Context, l *local, args []string, out *output) error {
					if len(args) != 2 {
						return fmt.Errorf("%w: want NAME ADDRESS, got %d arguments", errUsage, len(args))
					}
					if err := l.api.People.Update(ctx, args[0], api.PersonChange{Email: &args[1]}); err != nil {
						return noPerson(err, args[0])
					}
					_, err := fmt.Fprintln(out, "Notices of waiting actions go there.")
					return err
				}),
			},
			{use: "disable NAME", short: "keep a person from signing in", run: on((*client.PeopleService).Disable, "Disabled. Their sessions have ended.")},
			{use: "enable NAME", short: "let a disabled person sign in again", run: on((*client.PeopleService).Enable, "Enabled.")},
			{use: "reset NAME", short: "remove second factors that a person has lost", run: on((*client.PeopleService).ResetFactors, "Reset. Their sessions have ended; their password alone signs in until they set a second factor up.")},
			{
				use: "link-operator NAME", short: "say that the operator at the machine is this person",
				run: on((*client.PeopleService).LinkOperator, "The operator counts as this person for actions that are proposed from 24 hours on, or once the person confirms it in the console, under their name."),
			},
			{use: "unlink-operator NAME", short: "say that the operator is no longer this person", run: on((*client.PeopleService).UnlinkOperator, "Unlinked. Approvals over the local socket of what still waits count for nobody.")},
			{
				use: "password NAME", short: "print a one-time link for choosing another password",
				run: p.onServer(func(ctx context.Context, l *local, args []string, out *output) error {
					name, err := oneArg(args, "NAME")
					if err != nil {
						return err
					}
					v, err := l.api.People.NewPasswordLink(ctx, name)
					if err != nil {
						return noPerson(err, name)
					}
					return printLink(out, v, "a new password of "+name)
				}),
			},
		},
	}
}

func noPerson(err error, name string) error {
	return notFoundAs(err, "there is nobody called %q; postern person list shows who there is", name)
}

// printLink shows a link, which is not shown again.
func printLink(out *output, v api.Invitation, what string) error {
	link, where := v.URL, ""
	if link == "" { // a server that does not say where it is
		link, where = v.Path, ", below the console's address"
	}
	_, err := fmt.Fprintf(out, "%s\nThis is the link for %s%s, until %s:\n  %s\n", v.ID, what, where, v.ExpiresAt.Local().Format("2006-01-02 15:04"), printable(link))
	return err
}

func standing(p api.Person) string {
	if p.DisabledAt != nil {
		return string(p.Role) + ", disabled"
	}
	if p.OperatorFrom != nil {
		return string(p.Role) + ", operator"
	}
	return string(p.Role)
}

func factors(p api.Person) string {
	switch {
	case p.TOTP && p.Passkeys > 0:
		return fmt.Sprintf("app, %d passkeys", p.Passkeys)
	case p.TOTP:
		return "app"
	case p.Passkeys > 0:
		return fmt.Sprintf("%d passkeys", p.Passkeys)
	}
	return "none"
}
