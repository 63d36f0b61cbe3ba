package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"postern/internal/api"
	"postern/internal/directory"
)

const domainHelp = `
Agents get addresses in the server's mail domain without any of this. To give
them addresses in a domain of your own, say mail.example.com:

  postern domain add mail.example.com
  # publish the records at your DNS provider, then
  postern domain verify mail.example.com
  postern inbox create sales@mail.example.com

The text record _postern.<domain> proves that the domain is yours. Leave it
there: when it is gone for a day, the domain is lost. Then it no longer sends,
but receives for another 14 days, so that a slip loses no mail; after that
somebody else may claim it. MX brings mail here; SPF, DKIM and DMARC make
others believe what you send. The records are looked at by themselves every six
hours, and every change is in the record (postern audit list).

A public suffix such as co.uk, a name of this server's, and a name below another
project's domain are refused. docs/tasks/mail-domain.md tells the whole of it.`

func domainCommand() *command {
	var c Config
	return &command{
		use: "domain", short: "bring your own domains for inboxes", long: domainHelp,
		flags: c.location,
		below: []*command{
			{
				use: "add NAME", short: "claim a domain and print what to publish",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					name, err := oneArg(args, "NAME")
					if err != nil {
						return err
					}
					d, err := l.api.Domains.Add(ctx, name)
					if err != nil {
						return err
					}
					fmt.Fprintf(out, "%s is claimed. Publish these records at your DNS provider:\n\n", domainName(d))
					if err := printRecords(ctx, l, out, d.ID); err != nil {
						return err
					}
					_, err = fmt.Fprintf(out, "\nThen: postern domain verify %s\n", d.Domain)
					return err
				}),
			},
			{
				use: "list", short: "list the domains and their states", lists: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					list, err := l.api.Domains.List(ctx)
					if err != nil {
						return err
					}
					rows := [][]string{{"DOMAIN", "STATE", "CHECKED", "NEXT CHECK", "ID", "PROBLEM"}}
					for _, d := range list {
						rows = append(rows, []string{domainName(d), string(d.State), agoOrNever(d.CheckedAt), in(d.NextCheckAt), d.ID, cell(d.Problem)})
					}
					return out.rows(list, rows)
				}),
			},
			{
				use: "records NAME", short: "print the DNS records, each with what was found", facts: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					d, err := findDomain(ctx, l, args)
					if err != nil {
						return err
					}
					if err := printRecords(ctx, l, out, d.ID); err != nil || out.json {
						return err
					}
					have, err := l.addresses(ctx)
					if err != nil {
						return err
					}
					for _, address := range directory.Operated(d.Domain) {
						if !slices.Contains(slices.Collect(maps.Values(have)), address) {
							fmt.Fprintf(out, "; %s is refused until you make it: postern inbox create %s\n", address, address)
						}
					}
					return nil
				}),
			},
			{
				use: "verify NAME", short: "check the DNS now and say what is wrong",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					d, err := findDomain(ctx, l, args)
					if err != nil {
						return err
					}
					if d, err = l.api.Domains.Verify(ctx, d.ID); err != nil {
						return err
					}
					if err := printRecords(ctx, l, out, d.ID); err != nil {
						return err
					}
					fmt.Fprintf(out, "\n%s is %s", domainName(d), d.State)
					switch d.State {
					case "verified":
						_, err = fmt.Fprintln(out, ": inboxes in it receive and send.")
					case "degraded":
						_, err = fmt.Fprintln(out, ": inboxes can be made in it, but mail may not arrive or be distrusted; see above.")
					case "lost":
						_, err = fmt.Fprintln(out, ": it receives for a time and does not send. Publish the proof again.")
					default:
						_, err = fmt.Fprintln(out, ": it is not proved to be yours yet. DNS changes take minutes to hours.")
					}
					return err
				}),
			},
			{
				use: "remove NAME", short: "give a domain up; it must have no inboxes left",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					d, err := findDomain(ctx, l, args)
					if err != nil {
						return err
					}
					if err := l.api.Domains.Remove(ctx, d.ID); err != nil {
						return err
					}
					_, err = fmt.Fprintf(out, "%s is given up: mail for it is refused from now on.\n", domainName(d))
					return err
				}),
			},
		},
	}
}

// domainName is the domain as the DNS knows it, and as people write it.
func domainName(d api.Domain) string {
	if d.Unicode != d.Domain && d.Unicode != "" {
		return d.Domain + " (" + printable(d.Unicode) + ")"
	}
	return d.Domain
}

// findDomain finds a domain by its id or by its name in either form.
func findDomain(ctx context.Context, l *local, args []string) (api.Domain, error) {
	name, err := oneArg(args, "NAME")
	if err != nil {
		return api.Domain{}, err
	}
	list, err := l.api.Domains.List(ctx)
	if err != nil {
		return api.Domain{}, err
	}
	for _, d := range list {
		if d.ID == name || strings.EqualFold(d.Domain, strings.TrimSuffix(name, ".")) || strings.EqualFold(d.Unicode, name) {
			return d, nil
		}
	}
	return api.Domain{}, fmt.Errorf("the project has no domain %q; postern domain list shows them", name)
}

func printRecords(ctx context.Context, l *local, out *output, id string) error {
	list, err := l.api.Domains.Records(ctx, id)
	if err != nil {
		return err
	}
	if out.json {
		return out.object(list)
	}
	for _, r := range list.Records {
		value := r.Value
		if r.Priority > 0 {
			value = fmt.Sprintf("%d %s", r.Priority, value)
		}
		state := r.Result
		if r.Need == "optional" {
			state = "optional, " + state
		}
		// One line that can be copied into a zone file, and below it what was found.
		if r.Type == "TXT" {
			value = zoneText(value)
		}
		if _, err := fmt.Fprintf(out, "; %s: %s\n%s. %s %s%s\n", r.Kind, state, r.Name, r.Type, printable(value), map[bool]string{true: ".", false: ""}[r.Type == "MX"]); err != nil {
			return err
		}
		if r.Result != "ok" && r.Result != "unchecked" && (r.Need != "optional" || r.Result != "missing") {
			fmt.Fprintf(out, ";   %s\n", printable(cmp.Or(r.Detail, r.Result)))
			for _, f := range r.Found {
				fmt.Fprintf(out, ";   the DNS has: %s\n", printable(f))
			}
		}
	}
	return nil
}

// zoneText writes a text as a zone file has it: in strings of at most 255
// octets (RFC 1035 section 3.3), which a DKIM key with RSA needs.
func zoneText(s string) string {
	var parts []string
	for len(s) > 255 {
		parts = append(parts, `"`+s[:255]+`"`)
		s = s[255:]
	}
	return strings.Join(append(parts, `"`+s+`"`), " ")
}
