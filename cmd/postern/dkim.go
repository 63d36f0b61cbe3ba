package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"postern/client"
	"postern/internal/api"
)

func dkimCommand() *command {
	var c Config
	verb := func(do func(*client.SigningService, context.Context, string) ([]api.SigningKey, error), one bool) runner {
		return onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			names, err := signingDomains(ctx, l, args, one)
			if err != nil {
				return err
			}
			all := map[string][]api.SigningKey{}
			for i, name := range names {
				keys, err := do(l.api.Signing, ctx, name)
				if err := notFoundAs(err, "this server signs nothing for %q; postern dkim list shows the domains for which it does", name); err != nil {
					return err
				}
				all[name] = keys
				if out.json {
					continue
				}
				if i > 0 {
					fmt.Fprintln(out)
				}
				if err := printKeys(out, name, keys); err != nil {
					return err
				}
			}
			if out.json {
				return out.object(all)
			}
			return nil
		})
	}
	return &command{
		use: "dkim", short: "the keys that sign what leaves", long: `
Each message is signed twice (DKIM with RSA-2048 and with Ed25519) and carries a
signed statement. check and rotate need DOMAIN where there are several.
To rotate: run rotate, publish the new records at your DNS provider, run check;
or wait two days, after which the new keys sign in any case. Leave the former
records there for a week, since mail that is under way is checked with them; then
run remove and take them out of the DNS. The keys of statements are published by
the server itself, also former ones.`,
		flags: c.location,
		below: []*command{
			{use: "list [DOMAIN]", short: "print the keys and the DNS records to publish", facts: true, run: verb((*client.SigningService).Keys, false)},
			{use: "check [DOMAIN]", short: "look the records up; new keys that are published sign from now on", facts: true, run: verb((*client.SigningService).Check, true)},
			{use: "rotate [DOMAIN]", short: "make the next keys, to be published before they sign", facts: true, run: verb((*client.SigningService).Rotate, true)},
			{
				use: "remove DOMAIN KEY", short: "stop publishing a former key",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if len(args) != 2 {
						return fmt.Errorf("%w: want DOMAIN and KEY, got %d arguments", errUsage, len(args))
					}
					if err := l.api.Signing.Remove(ctx, args[0], args[1]); err != nil {
						return err
					}
					_, err := fmt.Fprintf(out, "%s of %s is published no more; take its record out of the DNS\n", args[1], args[0])
					return err
				}),
			},
		},
	}
}

// signingDomains returns the named domain, or else all domains of the caller. If
// one is set there must be exactly one.
func signingDomains(ctx context.Context, l *local, args []string, one bool) ([]string, error) {
	if len(args) > 0 {
		name, err := oneArg(args, "DOMAIN")
		return []string{name}, err
	}
	list, err := l.api.Signing.Domains(ctx)
	if err != nil {
		return nil, err
	}
	switch {
	case len(list) == 0:
		return nil, errors.New("this server signs for no domain of yours; add one with postern domain add DOMAIN")
	case one && len(list) > 1:
		return nil, fmt.Errorf("%w: DOMAIN is missing: there are keys of %s", errUsage, strings.Join(list, ", "))
	}
	return list, nil
}

func printKeys(out *output, domain string, keys []api.SigningKey) error {
	rows := [][]string{{"KEY", "KIND", "STATE", "SINCE"}}
	for _, k := range keys {
		state := "former"
		switch {
		case k.InUse:
			state = "signs"
		case k.From.After(time.Now()):
			state = "signs from " + k.From.Local().Format("2006-01-02 15:04") + ", or once it is published and checked"
		}
		if k.Found != nil {
			state += "; " + k.Detail
		}
		rows = append(rows, []string{k.ID, k.Kind, state, ago(k.CreatedAt)})
	}
	if err := out.table(rows); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nDNS records of %s:\n", domain)
	for _, k := range keys {
		if k.Name != "" {
			fmt.Fprintf(out, "  %s. TXT %q\n", k.Name, k.Record)
		}
	}
	return nil
}
