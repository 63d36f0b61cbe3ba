package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// An inboxHook is what the API tells of a webhook of an inbox.
type inboxHook struct {
	ID, Name, URL, Reason, Secret string
	State                         string
	Action                        string `json:"action_id"`
	Events                        []string
	Enabled                       bool
}

// inboxHooks is "postern inbox webhook …". These webhooks belong to the key
// that made them, and end with it; those of the project are "postern webhook".
func inboxHooks(k *keyed, name *string) runner {
	one := func(f func(ctx context.Context, l *local, path string, out io.Writer) error) runner {
		return k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
			id, err := oneArg(args, "ID")
			if err != nil {
				return err
			}
			return notFoundAs(f(ctx, l, path+"/webhooks/"+pathSegment(id), out), "the inbox has no webhook %q; postern inbox webhook list shows them", id)
		})
	}
	return verbs("inbox webhook", "create URL|list|delete ID|rotate ID|deliveries ID", map[string]runner{
		"create": k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
			u, err := oneArg(args, "URL")
			if err != nil {
				return err
			}
			host, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(u, "https://"), "http://"), "/")
			var h inboxHook
			if err := l.call(ctx, "POST", path+"/webhooks", map[string]any{"url": u, "name": cmp.Or(*name, host)}, &h); err != nil {
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
		"list": k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
			if err := noArgs(args); err != nil {
				return err
			}
			var list struct{ Webhooks []inboxHook }
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
			return table(out, rows)
		}),
		"delete": one(func(ctx context.Context, l *local, path string, _ io.Writer) error {
			return l.call(ctx, "DELETE", path, nil, nil)
		}),
		"rotate": one(func(ctx context.Context, l *local, path string, out io.Writer) error {
			var h struct {
				Secret string
				Until  *time.Time `json:"old_secret_until"`
			}
			if err := l.call(ctx, "POST", path+"/rotation", map[string]any{}, &h); err != nil {
				return err
			}
			_, err := fmt.Fprintf(out, "secret   %s\nThe secret is shown this once. Until %s deliveries are signed with the old one, too.\n", h.Secret, orNever(h.Until))
			return err
		}),
		"deliveries": one(func(ctx context.Context, l *local, path string, out io.Writer) error {
			var list struct {
				Deliveries []struct {
					ID, Event, Type, State, Error string
					Attempts                      int
					Status                        *int
					CreatedAt                     time.Time  `json:"created_at"`
					NextAttemptAt                 *time.Time `json:"next_attempt_at"`
				}
			}
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
					next = orNever(d.NextAttemptAt)
				}
				rows = append(rows, []string{d.ID, d.Type, ago(d.CreatedAt), d.State, strconv.Itoa(d.Attempts), answer, next, printable(d.Error)})
			}
			return table(out, rows)
		}),
	})
}
