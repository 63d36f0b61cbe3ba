package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"postern/client"
	"postern/internal/audit"
)

const networkCommandHelp = `
The wall records each connection of a sandbox, each request that it inspects and
each refusal. Code in a sandbox that was refused can propose the hosts that it
needs; an owner decides (postern pending), and a permit then holds for a time. See
docs/reference/network.md.`

func networkCommand() *command {
	var c Config
	var follow, all bool
	var limit int
	var box string
	return &command{
		use: "network", short: "show what sandboxes connect to, and manage permits", long: networkCommandHelp,
		example: `
  postern network log i3kf0q2 --follow
  postern network permits
  postern network end prm_...`,
		flags: c.location,
		below: []*command{
			{
				use: "log SANDBOX", short: "show what a sandbox connected to and requested, and what was refused",
				long: `
Prints the connections, requests, refusals and captured mail conversations of a
sandbox, oldest first: time, what happened, method and URL or host, status, reason.
With --json each entry is a line of JSON. What a sandbox sent is part of it.`,
				facts: true,
				flags: func(fs *pflag.FlagSet) {
					fs.BoolVar(&follow, "follow", false, "go on and print what happens, until interrupted")
					fs.IntVar(&limit, "limit", 100, "at most so many `entries` of what has happened")
				},
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					id, err := oneArg(args, "SANDBOX")
					if err != nil {
						return err
					}
					if limit < 1 || limit > 1000 {
						return fmt.Errorf("%w: --limit: want 1 to 1000", errUsage)
					}
					return networkLog(ctx, l, out, id, limit, follow)
				}),
			},
			{
				use: "permits", short: "list what people have allowed sandboxes for a time", lists: true,
				flags: func(fs *pflag.FlagSet) {
					fs.BoolVar(&all, "all", false, "also those that have ended")
					fs.StringVar(&box, "sandbox", "", "those that hold for this `sandbox`")
				},
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					list, err := l.api.Permits.List(ctx, client.PermitQuery{Sandbox: box, All: all, Limit: 500})
					if err != nil {
						return err
					}
					rows := [][]string{{"PERMIT", "SANDBOX", "ALLOWS", "UNTIL", "BY"}}
					for _, p := range list {
						rows = append(rows, []string{p.ID, cmp.Or(p.Sandbox, "(all)"), permitAllows(p), permitEnd(p), p.Decider})
					}
					return out.rows(list, rows)
				}),
			},
			{
				use: "end PERMIT", short: "end a permit now; what it allowed is cut within a second",
				run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
					id, err := oneArg(args, "PERMIT")
					if err != nil {
						return err
					}
					if err := l.api.Permits.End(ctx, id); err != nil {
						return notFoundAs(err, "there is no permit %q; postern network permits lists them", id)
					}
					_, err = fmt.Fprintf(out, "%s has ended\n", id)
					return err
				}),
			},
		},
	}
}

// permitAllows returns what p is for, on one line.
func permitAllows(p client.Permit) string {
	if p.Kind == client.PermitSecret {
		return "secret " + p.Secret
	}
	parts := []string{strings.Join(p.Hosts, " ")}
	if len(p.Methods) > 0 {
		parts = append([]string{strings.Join(p.Methods, ",")}, parts...)
	}
	if len(p.Paths) > 0 {
		parts = append(parts, strings.Join(p.Paths, " "))
	}
	if p.Port != 0 {
		parts = append(parts, fmt.Sprintf("port %d", p.Port))
	}
	return strings.Join(parts, " ")
}

func permitEnd(p client.Permit) string {
	if p.EndedAt != nil {
		return "ended " + p.EndedAt.Local().Format(time.DateTime)
	}
	return p.Until.Local().Format(time.DateTime)
}

// networkVerbs are how the verbs of entries about a sandbox's network begin.
var networkVerbs = []string{"egress.", string(audit.SecretMisdirected), string(audit.SecretMasked), string(audit.SecretStayed)}

// networkLog prints the entries about the network of a sandbox.
func networkLog(ctx context.Context, l *local, out *output, id string, limit int, follow bool) error {
	var last int64
	for first := true; ; first = false {
		fresh, err := networkEntries(ctx, l, id, last, limit)
		if err != nil {
			return err
		}
		for _, e := range fresh {
			last = e.Seq
			if err := printNetwork(out, e); err != nil {
				return err
			}
		}
		switch {
		case first && len(fresh) == 0 && !out.json:
			if _, err := fmt.Fprintf(out, "Nothing is on record of the network of %s.\n", printable(id)); err != nil {
				return err
			}
		case !first:
			limit = 1000
		}
		if !follow {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}

// networkEntries returns the newest entries after one, the oldest first.
func networkEntries(ctx context.Context, l *local, id string, after int64, limit int) (out []client.AuditEntry, err error) {
	for _, verb := range networkVerbs {
		n := 0
		for e, err := range l.api.Audit.List(ctx, client.AuditQuery{Object: id, Verb: verb, Limit: min(limit, 1000)}) {
			if err != nil {
				return nil, err
			}
			if e.Seq <= after || n == limit {
				break
			}
			n++
			out = append(out, e)
		}
	}
	slices.SortFunc(out, func(a, b client.AuditEntry) int { return cmp.Compare(a.Seq, b.Seq) })
	return out[max(0, len(out)-limit):], nil
}

// printNetwork prints an entry on one line. Its text is hostile.
func printNetwork(out *output, e client.AuditEntry) error {
	if out.json {
		return out.line(e)
	}
	var d struct{ Proto, Name, Dst, Reason, Method, URL, Status, Count, Action string }
	_ = json.Unmarshal(e.Detail, &d) // what is not there is empty
	_, what, _ := strings.Cut(e.Verb, ".")
	where := cmp.Or(d.URL, d.Name)
	if d.URL == "" && d.Dst != "" {
		where = strings.TrimSpace(d.Name + " " + d.Dst)
	}
	parts := []string{e.At.Local().Format(time.DateTime), fmt.Sprintf("%-11s", what), strings.TrimSpace(d.Method + " " + where)}
	for _, p := range []string{d.Status, d.Reason, d.Action} {
		if p != "" {
			parts = append(parts, p)
		}
	}
	if d.Count != "" {
		parts = append(parts, d.Count+" times")
	}
	_, err := fmt.Fprintln(out, printable(strings.Join(parts, "  ")))
	return err
}
