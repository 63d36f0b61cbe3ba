package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// A hook describes a webhook of the project, as E2B's wire does.
type hook struct {
	ID             string   `json:"id"`
	Name           string   `json:"name"`
	URL            string   `json:"url"`
	Enabled        bool     `json:"enabled"`
	Events         []string `json:"events"`
	DisabledReason string   `json:"disabledReason,omitempty"`
	Secret         string   `json:"signatureSecret,omitempty"` // only in the answer that created it
}

// A hookDelivery describes one event that was sent to a webhook.
type hookDelivery struct {
	ID            string     `json:"id"`
	EventType     string     `json:"eventType"`
	SandboxID     string     `json:"sandboxId"`
	Status        string     `json:"status"`
	Error         string     `json:"error,omitempty"`
	Attempts      int        `json:"attempts"`
	Response      int        `json:"responseStatusCode,omitempty"` // HTTP status of the last answer; 0: none
	DurationMS    float64    `json:"durationMs"`                   // of the last attempt
	CreatedAt     time.Time  `json:"createdAt"`
	NextAttemptAt *time.Time `json:"nextAttemptAt,omitempty"`
}

const webhookHelp = `
A webhook is a URL to which the server POSTs each event in the life of a
sandbox: created, updated, paused, resumed, checkpointed, killed. The body is
JSON. Verify it with any library for Standard Webhooks and the secret as it was
printed (headers webhook-id, webhook-timestamp, webhook-signature), or as E2B
documents it (header e2b-signature). With a secret of your own that does not
begin with whsec_, the library's format is "raw".

What is not answered with 2xx within 10 seconds is sent again, for a day, at
growing intervals; a message may therefore come twice: webhook-id stays the
same. Order is not promised. After three days without a success, or on 410, the
webhook is disabled, and the audit says so.

A URL must be https and lead to a public address, whatever its name resolves
to, unless the server runs with --webhook-private. Redirects are not followed.
The secret is kept encrypted under the server's key (server.key in the data
directory).`

func webhookCommand() *command {
	var c Config
	var name, secret, events string
	var limit int
	enable := func(on bool) runner {
		return onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			id, err := oneArg(args, "ID")
			if err != nil {
				return err
			}
			return noHook(id, l.call(ctx, "PATCH", "/events/webhooks/"+pathSegment(id), map[string]any{"enabled": on}, nil))
		})
	}
	return &command{
		use: "webhook", short: "send events to a URL", long: webhookHelp,
		flags: c.location,
		below: []*command{
			{
				use: "create URL", short: "make a webhook and print its secret, once", facts: true,
				flags: func(fs *pflag.FlagSet) {
					fs.StringVar(&name, "name", "", "what to call it (default: the URL's host)")
					fs.StringVar(&events, "events", "", "`types` of events between commas, such as created,killed (default: all)")
					fs.StringVar(&secret, "secret", "", "sign with this `text` of 16 to 256 characters; others on this machine may see it in the list of processes (default: one is made)")
				},
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					u, err := oneArg(args, "URL")
					if err != nil {
						return err
					}
					return createHook(ctx, l, out, u, name, events, secret)
				}),
			},
			{use: "list", short: "list the webhooks", lists: true, run: onServer(&c, listHooks)},
			{use: "enable ID", short: "send events again after the server disabled a webhook", run: enable(true)},
			{use: "disable ID", short: "stop sending events until the webhook is enabled", run: enable(false)},
			{
				use: "delete ID", short: "delete a webhook and its deliveries",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, _ *output) error {
					id, err := oneArg(args, "ID")
					if err != nil {
						return err
					}
					return noHook(id, l.call(ctx, "DELETE", "/events/webhooks/"+pathSegment(id), nil, nil))
				}),
			},
			{
				use: "deliveries ID", short: "list what was sent, newest first", lists: true,
				flags: func(fs *pflag.FlagSet) {
					fs.IntVar(&limit, "limit", 20, "at most so many, up to 100")
				},
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					id, err := oneArg(args, "ID")
					if err != nil {
						return err
					}
					return listDeliveries(ctx, l, out, id, limit)
				}),
			},
			{
				use: "redeliver ID DELIVERY", short: "send a delivery again",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if len(args) != 2 {
						return fmt.Errorf("%w: want ID and DELIVERY, got %d arguments", errUsage, len(args))
					}
					err := l.call(ctx, "POST", "/events/webhooks/"+pathSegment(args[0])+"/deliveries/"+pathSegment(args[1])+"/redeliver", nil, nil)
					if errors.Is(err, errNotFound) {
						return fmt.Errorf("webhook %q has no delivery %q; postern webhook deliveries shows them", args[0], args[1])
					}
					return err
				}),
			},
		},
	}
}

func noHook(id string, err error) error {
	if errors.Is(err, errNotFound) {
		return fmt.Errorf("there is no webhook %q; postern webhook list shows them", id)
	}
	return err
}

func createHook(ctx context.Context, l *local, out *output, u, name, events, secret string) error {
	host, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(u, "https://"), "http://"), "/")
	body := map[string]any{"url": u, "name": cmp.Or(name, host)}
	if secret != "" {
		body["signatureSecret"] = secret
	}
	var types []string
	for t := range strings.SplitSeq(cmp.Or(events, "created,updated,paused,resumed,checkpointed,killed"), ",") {
		t = strings.TrimSpace(t)
		if !strings.Contains(t, ".") {
			t = "sandbox.lifecycle." + t
		}
		types = append(types, t)
	}
	body["events"] = types
	var h hook
	if err := l.call(ctx, "POST", "/events/webhooks", body, &h); err != nil {
		return err
	}
	if out.json {
		return out.object(h)
	}
	if _, err := fmt.Fprintf(out, "webhook  %s, %s\n", h.ID, printable(h.URL)); err != nil || h.Secret == "" {
		return err
	}
	_, err := fmt.Fprintf(out, "secret   %s\nThe secret is shown this once. Receivers verify signatures with it.\n", h.Secret)
	return err
}

func listHooks(ctx context.Context, l *local, args []string, out *output) error {
	if err := noArgs(args); err != nil {
		return err
	}
	var hooks []hook
	if err := l.call(ctx, "GET", "/events/webhooks", nil, &hooks); err != nil {
		return err
	}
	rows := [][]string{{"ID", "NAME", "STATE", "EVENTS", "URL"}}
	for _, h := range hooks {
		state := "enabled"
		if !h.Enabled {
			state = "disabled"
			if h.DisabledReason != "" {
				state += ": " + h.DisabledReason
			}
		}
		rows = append(rows, []string{h.ID, printable(h.Name), state, strings.ReplaceAll(strings.Join(h.Events, ","), "sandbox.lifecycle.", ""), printable(h.URL)})
	}
	return out.rows(hooks, rows)
}

func listDeliveries(ctx context.Context, l *local, out *output, id string, limit int) error {
	var ds []hookDelivery
	path := "/events/webhooks/" + pathSegment(id) + "/deliveries?limit=" + strconv.Itoa(limit)
	if err := noHook(id, l.call(ctx, "GET", path, nil, &ds)); err != nil {
		return err
	}
	rows := [][]string{{"DELIVERY", "EVENT", "SANDBOX", "WHEN", "STATUS", "ATTEMPTS", "ANSWER", "TOOK", "NEXT", "ERROR"}}
	for _, d := range ds {
		answer, next := "-", "-"
		if d.Response != 0 {
			answer = strconv.Itoa(d.Response)
		}
		if d.NextAttemptAt != nil {
			next = in(d.NextAttemptAt)
		}
		rows = append(rows, []string{
			d.ID, strings.TrimPrefix(d.EventType, "sandbox.lifecycle."), d.SandboxID, ago(d.CreatedAt), d.Status,
			strconv.Itoa(d.Attempts), answer, fmt.Sprintf("%.0f ms", d.DurationMS), next, printable(d.Error),
		})
	}
	return out.rows(ds, rows)
}
