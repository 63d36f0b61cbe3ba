package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

const quarantineHelp = `
postern quarantine list         lists mail that arrived and waits for a person
postern quarantine release ID   lets it into its inbox, as new
postern quarantine drop ID      removes it for good

Mail waits if the scan's score reaches --quarantine-score, or if the domain that
it claims to be from asks for that when its sender is not proved (DMARC). What
the mail says is sealed to its inbox: shown are the score, what was found, who
the sender was proved to be, the size and the time. The inbox's own key may look
at it, fenced, and cannot release it. Each decision is in the audit.

What a score means, and what it does not: docs/reference/scan.md.`

func quarantineCommand() *command {
	var c Config
	return group("quarantine", "list|release ID|drop ID [flags]", "decide about mail that looks like an attack", quarantineHelp,
		func(fs *pflag.FlagSet) { c.location(fs) },
		map[string]runner{
			"list": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				return listQuarantine(ctx, l, out)
			}),
			"release": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				return settleHeld(ctx, l, args, out, "release", "Released: it is in its inbox, as new.")
			}),
			"drop": onServer(&c, func(ctx context.Context, l *local, args []string, out io.Writer) error {
				return settleHeld(ctx, l, args, out, "drop", "Dropped: it is gone.")
			}),
		})
}

func settleHeld(ctx context.Context, l *local, args []string, out io.Writer, verb, done string) error {
	id, err := oneArg(args, "ID")
	if err != nil {
		return err
	}
	if err := l.call(ctx, "POST", "/v1/quarantine/"+pathSegment(id)+"/"+verb, nil, nil); err != nil {
		return notFoundAs(err, "no message %q is held, or not any more; postern quarantine list shows them", id)
	}
	_, err = fmt.Fprintln(out, done)
	return err
}

func listQuarantine(ctx context.Context, l *local, out io.Writer) error {
	var list struct {
		Held []struct {
			ID, Inbox, Reason     string
			CreatedAt             time.Time `json:"created_at"`
			Size                  int64
			Score                 float64
			Categories            map[string]float64
			SPF, DKIM, DMARC, ARC string
		}
		Next string `json:"next_cursor"`
	}
	if err := l.call(ctx, "GET", "/v1/quarantine?limit=200", nil, &list); err != nil {
		return err
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
	if err := table(out, rows); err != nil || list.Next == "" {
		return err
	}
	_, err = fmt.Fprintln(out, "There are more; these are the newest 200.")
	return err
}
