package main

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

// inboxHooks is "postern inbox webhook …". These webhooks belong to the key
// that made them, and end with it; those of the project are "postern webhook".
func inboxHooks(k *keyed, name *string) *command {
	one := func(f func(ctx context.Context, l *local, path string, out *output) error) runner {
		return k.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
			id, err := oneArg(args, "ID")
			if err != nil {
				return err
			}
			return notFoundAs(f(ctx, l, path+"/webhooks/"+pathSegment(id), out), "the inbox has no webhook %q; postern inbox webhook list shows them", id)
		})
	}
	return &command{
		use: "webhook", short: "send events of the inbox to a URL, with its key", long: "",
		below: []*command{
			{
				use: "create URL", short: "make a webhook and print its secret, once", facts: true,
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(name, "name", "", "`name` of the webhook, for people (default: the URL's host)")
				},
				run: k.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					u, err := oneArg(args, "URL")
					if err != nil {
						return err
					}
					host, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(u, "https://"), "http://"), "/")
					var h api.Webhook
					if err := l.call(ctx, "POST", path+"/webhooks", newHook(u, cmp.Or(*name, host)), &h); err != nil {
						return err
					}
					_, err = fmt.Fprintf(out, "webhook  %s, %s\nsecret   %s\nThe secret is shown this once. Receivers verify signatures with it (Standard Webhooks).\n", h.ID, printable(h.URL), h.Secret)
					if err == nil && h.State == "waiting" {
						_, err = fmt.Fprintf(out, "Nothing is sent to it until a person allows its URL: postern approve %s\n", h.Action)
					}
					if err == nil && h.State == "disabled" {
						_, err = fmt.Fprintf(out, "It is disabled: %s\n", printable(h.Reason))
					}
					return err
				}),
			},
			{
				use: "list", short: "list the webhooks of the inbox", lists: true,
				run: k.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					var list api.WebhookList
					if err := l.call(ctx, "GET", path+"/webhooks", nil, &list); err != nil {
						return err
					}
					rows := [][]string{{"ID", "NAME", "STATE", "EVENTS", "URL"}}
					for _, h := range list.Webhooks {
						state := "enabled"
						if h.State == "waiting" {
							state = "waits for a person: " + printable(h.Action)
						}
						if !h.Enabled {
							state = strings.TrimSuffix("disabled: "+printable(h.Reason), ": ")
						}
						rows = append(rows, []string{h.ID, printable(h.Name), state, cmp.Or(strings.Join(h.Events, ","), "all"), printable(h.URL)})
					}
					return out.rows(list.Webhooks, rows)
				}),
			},
			{
				use: "delete ID", short: "delete a webhook",
				run: one(func(ctx context.Context, l *local, path string, _ *output) error {
					return l.call(ctx, "DELETE", path, nil, nil)
				}),
			},
			{
				use: "rotate ID", short: "make a new secret; the old one signs too for a day",
				run: one(func(ctx context.Context, l *local, path string, out *output) error {
					var h api.RotatedWebhook
					if err := l.call(ctx, "POST", path+"/rotation", map[string]any{}, &h); err != nil {
						return err
					}
					_, err := fmt.Fprintf(out, "secret   %s\nThe secret is shown this once. Until %s deliveries are signed with the old one, too.\n", h.Secret, orNever(&h.OldSecretUntil))
					return err
				}),
			},
			{
				use: "deliveries ID", short: "list what was sent", lists: true,
				run: one(func(ctx context.Context, l *local, path string, out *output) error {
					var list api.WebhookDeliveryList
					if err := l.call(ctx, "GET", path+"/deliveries", nil, &list); err != nil {
						return err
					}
					rows := [][]string{{"DELIVERY", "EVENT", "WHEN", "STATE", "ATTEMPTS", "ANSWER", "NEXT", "ERROR"}}
					for _, d := range list.Deliveries {
						answer, next := "-", "-"
						if d.Status != nil {
							answer = strconv.Itoa(*d.Status)
						}
						if d.NextAttemptAt != nil {
							next = in(d.NextAttemptAt)
						}
						rows = append(rows, []string{d.ID, d.Type, ago(d.CreatedAt), d.State, strconv.Itoa(d.Attempts), answer, next, printable(d.Error)})
					}
					return out.rows(list.Deliveries, rows)
				}),
			},
		},
	}
}

// newHook returns the request for a webhook with every type of event.
func newHook(url, name string) api.WebhookChange {
	return api.WebhookChange{URL: &url, Name: &name}
}
