package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"postern/internal/api"
)

const draftHelp = `
Drafts are sealed like mail: nobody without the inbox's key reads them. What is
sent leaves a draft in place no more.

  echo 'Dear Bob,' | postern draft save --to bob@example.com --subject Offer
  postern draft send drf_...
` + keyedHelp

func draftCommand() *command {
	var k keyed
	var p proposal
	one := func(f func(ctx context.Context, l *local, path string, out *output) error) runner {
		return k.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
			id, err := oneArg(args, "ID")
			if err != nil {
				return err
			}
			return notFoundAs(f(ctx, l, path+"/drafts/"+pathSegment(id), out), "the inbox has no draft %q; postern draft list shows them", id)
		})
	}
	return &command{
		use: "draft", short: "keep emails for later", long: draftHelp,
		flags: k.flags,
		below: []*command{
			{
				use: "save", short: "save a draft, with the flags of postern send", flags: p.contentFlags,
				run: k.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					body, err := p.draft(os.Stdin)
					if err != nil {
						return err
					}
					l.http.Timeout = 5 * time.Minute
					var d api.Draft
					if err := l.call(ctx, "POST", path+"/drafts", body, &d); err != nil {
						return err
					}
					_, err = fmt.Fprintf(out, "%s  saved\n", d.ID)
					return err
				}),
			},
			{
				use: "list", short: "list drafts", lists: true,
				run: k.withKey(func(ctx context.Context, l *local, path string, args []string, out *output) error {
					if err := noArgs(args); err != nil {
						return err
					}
					var list api.DraftList
					if err := l.call(ctx, "GET", path+"/drafts?limit=100", nil, &list); err != nil {
						return err
					}
					rows := [][]string{{"ID", "CHANGED", "TO", "SUBJECT"}}
					for _, d := range list.Drafts {
						rows = append(rows, []string{d.ID, ago(d.UpdatedAt), cut(strings.Join(d.To, ", "), 40), cut(d.Subject, 60)})
					}
					return out.rows(list.Drafts, rows)
				}),
			},
			{
				use: "show ID", short: "print a draft", facts: true,
				run: one(func(ctx context.Context, l *local, path string, out *output) error {
					var d api.Draft
					if err := l.call(ctx, "GET", path, nil, &d); err != nil {
						return err
					}
					return out.facts(d, func() error { return printDraft(out, d) })
				}),
			},
			{
				use: "send ID", short: "propose to send a draft; it is held until a person approves it", flags: p.leavingFlags,
				run: one(func(ctx context.Context, l *local, path string, out *output) error {
					body, err := p.leaving()
					if err != nil {
						return err
					}
					l.http.Timeout = 5 * time.Minute
					var a api.Proposed
					if err := l.call(ctx, "POST", path+"/send", body, &a); err != nil {
						return err
					}
					_, err = fmt.Fprintf(out, "%s  %s\ndigest %s\n", a.ID, a.Status, a.Digest)
					return err
				}),
			},
			{
				use: "delete ID", short: "delete a draft",
				run: one(func(ctx context.Context, l *local, path string, _ *output) error {
					return l.call(ctx, "DELETE", path, nil, nil)
				}),
			},
		},
	}
}

func printDraft(out *output, d api.Draft) error {
	for _, f := range [][2]string{{"id", d.ID}, {"to", strings.Join(d.To, ", ")}, {"cc", strings.Join(d.Cc, ", ")}, {"bcc", strings.Join(d.Bcc, ", ")}, {"subject", d.Subject}} {
		if f[1] != "" {
			fmt.Fprintf(out, "%-9s %s\n", f[0], printable(f[1]))
		}
	}
	for _, a := range d.Attachments {
		fmt.Fprintf(out, "%-9s %s, %s\n", "file", printable(a.Name), megabytes(a.Size))
	}
	fmt.Fprintln(out)
	if d.DraftContent == nil {
		return nil
	}
	for l := range strings.SplitSeq(strings.TrimRight(d.Text+d.Markdown+d.HTML, "\n"), "\n") {
		if _, err := fmt.Fprintln(out, printable(l)); err != nil {
			return err
		}
	}
	return nil
}
