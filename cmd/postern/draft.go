package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

const draftHelp = `
postern draft save         saves a draft, with the flags of postern send
postern draft list         lists them
postern draft show ID      prints one
postern draft send ID      proposes to send it; it is held until a person approves
postern draft delete ID    removes one

Drafts are sealed like mail: nobody without the inbox's key reads them. What is
sent leaves a draft in place no more.

  echo 'Dear Bob,' | postern draft save --to bob@example.com --subject Offer
  postern draft send drf_...
` + keyedHelp

// A savedDraft is what the API tells of one.
type savedDraft struct {
	ID, Subject, Preview, Text, HTML, Markdown string
	To, Cc, Bcc                                []string
	Version                                    int64

	UpdatedAt   time.Time `json:"updated_at"`
	Attachments []struct {
		Name string
		Size int64
	}
}

func draftCommand() *command {
	var k keyed
	var p proposal
	one := func(f func(ctx context.Context, l *local, path string, out io.Writer) error) runner {
		return k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
			id, err := oneArg(args, "ID")
			if err != nil {
				return err
			}
			return notFoundAs(f(ctx, l, path+"/drafts/"+pathSegment(id), out), "the inbox has no draft %q; postern draft list shows them", id)
		})
	}
	return group("draft", "save|list|show ID|send ID|delete ID [flags]", "keep emails for later", draftHelp,
		func(fs *pflag.FlagSet) { p.flags(&k, fs) }, map[string]runner{
			"save": k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				body, err := p.draft(os.Stdin)
				if err != nil {
					return err
				}
				l.http.Timeout = 5 * time.Minute
				var d savedDraft
				if err := l.call(ctx, "POST", path+"/drafts", body, &d); err != nil {
					return err
				}
				_, err = fmt.Fprintf(out, "%s  saved\n", d.ID)
				return err
			}),
			"list": k.withKey(func(ctx context.Context, l *local, path string, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				var list struct{ Drafts []savedDraft }
				if err := l.call(ctx, "GET", path+"/drafts?limit=100", nil, &list); err != nil {
					return err
				}
				rows := [][]string{{"ID", "CHANGED", "TO", "SUBJECT"}}
				for _, d := range list.Drafts {
					rows = append(rows, []string{d.ID, ago(d.UpdatedAt), cut(strings.Join(d.To, ", "), 40), cut(d.Subject, 60)})
				}
				return table(out, rows)
			}),
			"show": one(func(ctx context.Context, l *local, path string, out io.Writer) error {
				var d savedDraft
				if err := l.call(ctx, "GET", path, nil, &d); err != nil {
					return err
				}
				return d.print(out)
			}),
			"send": one(func(ctx context.Context, l *local, path string, out io.Writer) error {
				body, err := p.leaving()
				if err != nil {
					return err
				}
				l.http.Timeout = 5 * time.Minute
				var a struct{ ID, Status, Digest string }
				if err := l.call(ctx, "POST", path+"/send", body, &a); err != nil {
					return err
				}
				_, err = fmt.Fprintf(out, "%s  %s\ndigest %s\n", a.ID, a.Status, a.Digest)
				return err
			}),
			"delete": one(func(ctx context.Context, l *local, path string, _ io.Writer) error {
				return l.call(ctx, "DELETE", path, nil, nil)
			}),
		})
}

func (d *savedDraft) print(out io.Writer) error {
	for _, f := range [][2]string{{"id", d.ID}, {"to", strings.Join(d.To, ", ")}, {"cc", strings.Join(d.Cc, ", ")}, {"bcc", strings.Join(d.Bcc, ", ")}, {"subject", d.Subject}} {
		if f[1] != "" {
			fmt.Fprintf(out, "%-9s %s\n", f[0], printable(f[1]))
		}
	}
	for _, a := range d.Attachments {
		fmt.Fprintf(out, "%-9s %s, %s\n", "file", printable(a.Name), megabytes(a.Size))
	}
	fmt.Fprintln(out)
	for l := range strings.SplitSeq(strings.TrimRight(d.Text+d.Markdown+d.HTML, "\n"), "\n") {
		if _, err := fmt.Fprintln(out, printable(l)); err != nil {
			return err
		}
	}
	return nil
}
