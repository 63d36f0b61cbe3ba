package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"postern/client"
	"postern/internal/api"
)

const quarantineHelp = `
Mail is held if the scan's score reaches --quarantine-score, or if the sender is
not authenticated and the domain in its From field asks for quarantine (DMARC).
The content is sealed to its inbox: shown are the score, the findings, the
authentication results, the size and the time. The inbox's own key may read it,
fenced, and cannot release it. Each decision is in the record.

What a score means, and what it does not: docs/reference/scan.md.`

func quarantineCommand() *command {
	var c Config
	return &command{
		use: "quarantine", short: "decide about mail that looks like an attack", long: quarantineHelp,
		flags: c.location,
		below: []*command{
			{
				use: "list", short: "list messages that wait for a person", lists: true,
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					return listQuarantine(ctx, l, out)
				}),
			},
			{
				use: "release ID", short: "deliver a message to its inbox, as new",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					return settleHeld(ctx, l, args, out, (*client.QuarantineService).Release, "Released: it is in its inbox, as new.")
				}),
			},
			{
				use: "drop ID", short: "delete a message for good",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					return settleHeld(ctx, l, args, out, (*client.QuarantineService).Drop, "Dropped: it is gone.")
				}),
			},
		},
	}
}

func settleHeld(ctx context.Context, l *local, args []string, out *output, do func(*client.QuarantineService, context.Context, string) error, done string) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	if err := do(l.api.Quarantine, ctx, id); err != nil {
		return notFoundAs(err, "no message %q is held, or not any more; postern quarantine list shows them", id)
	}
	_, err = fmt.Fprintln(out, done)
	return err
}

func listQuarantine(ctx context.Context, l *local, out *output) error {
	var list api.HeldList
	if err := l.call(ctx, "GET", "/v1/quarantine?limit=200", nil, &list); err != nil {
		return err
	}
	if out.json {
		return out.object(list.Held)
	}
	if len(list.Held) == 0 {
		_, err := fmt.Fprintln(out, "Nothing is held.")
		return err
	}
	addresses, err := l.addresses(ctx)
	if err != nil {
		return err
	}
	rows := [][]string{{"ID", "WHEN", "INBOX", "SIZE", "SCORE", "HELD FOR", "FOUND", "SENDER"}}
	for _, h := range list.Held {
		to := addresses[h.Inbox]
		if to == "" {
			to = h.Inbox
		}
		var found, proofs []string
		for _, c := range slices.Sorted(maps.Keys(h.Categories)) {
			if h.Categories[c] >= 0.5 {
				found = append(found, fmt.Sprintf("%s %.2f", c, h.Categories[c]))
			}
		}
		for _, p := range [][2]string{{"dmarc", h.DMARC}, {"dkim", h.DKIM}, {"spf", h.SPF}, {"arc", h.ARC}} {
			if p[1] != "" {
				proofs = append(proofs, p[0]+"="+p[1])
			}
		}
		rows = append(rows, []string{
			h.ID, ago(h.CreatedAt), printable(to), strconv.FormatInt(h.Size, 10), fmt.Sprintf("%.2f", h.Score), h.Reason, strings.Join(found, ", "), printable(strings.Join(proofs, " ")),
		})
	}
	if err := out.table(rows); err != nil || list.NextCursor == "" {
		return err
	}
	_, err = fmt.Fprintln(out, "There are more; these are the newest 200.")
	return err
}
