package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/api"
)

func commentCommand() *command {
	var c Config
	var agent bool
	return &command{
		use: "comment ID TEXT", short: "say something about an action without deciding on it",
		long: `
Puts a comment beside an action, which everybody who reviews it sees. With
--agent the agent that proposed it may read it too, without your name; it is told
that there is one.`,
		flags: func(fs *pflag.FlagSet) {
			c.location(fs)
			fs.BoolVar(&agent, "agent", false, "let the agent that proposed it read the comment")
		},
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			if len(args) != 2 {
				return fmt.Errorf("%w: want ID and TEXT, got %d arguments", errUsage, len(args))
			}
			in := api.NewComment{Text: args[1], ToAgent: agent}
			if err := l.call(ctx, "POST", "/v1/actions/"+pathSegment(args[0])+"/comments", in, nil); err != nil {
				return noAction(err, args[0])
			}
			_, err := fmt.Fprintln(out, "commented on", printable(args[0]))
			return err
		}),
	}
}

func editCommand() *command {
	var c Config
	var subject, file, to, cc, bcc string
	var drop intList
	var given map[string]bool
	return &command{
		use: "edit ID", short: "change an email that waits for a person",
		long: `
Changes an email that waits, and prints what differs. It gets a new digest and
policy is asked anew; it leaves only when that digest is approved, by
"postern approve ID". What had been approved before counts no more. Flags that
are left out leave things as they are.`,
		flags: func(fs *pflag.FlagSet) {
			c.location(fs)
			set := func(name, usage string, to *string) {
				fs.Func(name, usage, func(s string) error {
					if given == nil {
						given = map[string]bool{}
					}
					*to, given[name] = s, true
					return nil
				})
			}
			set("subject", "the new subject, a `text`", &subject)
			set("text-file", "`file` with the new text; - is the standard input", &file)
			set("to", "the new recipients, `addresses` separated by commas", &to)
			set("cc", "likewise those of Cc; may be empty, as may be bcc", &cc)
			set("bcc", "likewise those of Bcc", &bcc)
			fs.Var(&drop, "drop", "take out the file with this `number`, 0 for the first; may be given again")
		},
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			id, err := oneAction(args)
			if err != nil {
				return err
			}
			if len(given) == 0 && len(drop) == 0 {
				return fmt.Errorf("%w: say what is to be changed", errUsage)
			}
			a, err := l.action(ctx, id)
			if err != nil {
				return err
			}
			in := map[string]any{"version": a.Version}
			if given["subject"] {
				in["subject"] = subject
			}
			if given["text-file"] {
				text, err := readText(file)
				if err != nil {
					return err
				}
				in["text"] = text
			}
			for name, value := range map[string]string{"to": to, "cc": cc, "bcc": bcc} {
				if given[name] {
					in[name] = splitAddresses(value)
				}
			}
			if len(drop) > 0 {
				in["drop"] = drop
			}
			if err := l.call(ctx, "POST", "/v1/actions/"+a.ID+"/edit", in, nil); err != nil {
				return err
			}
			if err := l.printChanges(ctx, a.ID, true, out); err != nil {
				return err
			}
			// Policy was asked anew, and need not have asked a person.
			if a, err = l.action(ctx, id); err != nil {
				return err
			}
			if a.State != "pending" {
				_, err = fmt.Fprintf(out, "it is %s now: %s\n", a.State, printable(a.Verdict))
				return err
			}
			_, err = fmt.Fprintf(out, "it waits for an approval of what it is now: postern approve %s\n", a.ID)
			return err
		}),
	}
}

// An intList is a flag that may be given again.
type intList []int

func (l *intList) String() string { return strings.Trim(fmt.Sprint(*l), "[]") }

// Type implements [pflag.Value].
func (*intList) Type() string { return "numbers" }

// Set implements [pflag.Value].
func (l *intList) Set(s string) error {
	var n int
	if _, err := fmt.Sscanf(s, "%d", &n); err != nil || n < 0 {
		return errors.New("want a number, 0 or more")
	}
	*l = append(*l, n)
	return nil
}

// readText returns a file's content as text of at most a megabyte.
func readText(name string) (string, error) {
	from := os.Stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return "", err
		}
		defer f.Close()
		from = f
	}
	b, err := io.ReadAll(io.LimitReader(from, 1<<20+1))
	if err == nil && len(b) > 1<<20 {
		err = fmt.Errorf("%s is larger than a megabyte", name)
	}
	return string(b), err
}

func splitAddresses(s string) []string {
	out := []string{}
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}

// printChanges prints what each revision of an action changed, or only the last.
func (l *local) printChanges(ctx context.Context, id string, last bool, out *output) error {
	var list api.RevisionList
	if err := l.call(ctx, "GET", "/v1/actions/"+pathSegment(id)+"/revisions", nil, &list); err != nil {
		return noAction(err, id)
	}
	if out.json {
		return out.object(list.Revisions)
	}
	for i, r := range list.Revisions {
		if last && i < len(list.Revisions)-1 {
			continue
		}
		note := ""
		if !r.Kept {
			note = ", kept no longer"
		}
		fmt.Fprintf(out, "version %d by %s, %s, digest %s%s\n", r.Version, printable(r.Author), ago(r.At), r.Digest, note)
		for _, c := range r.Changes {
			if c.Old != "" || c.New == "" {
				fmt.Fprintf(out, "  - %s: %s\n", c.Field, printable(c.Old))
			}
			if c.New != "" {
				fmt.Fprintf(out, "  + %s: %s\n", c.Field, printable(c.New))
			}
		}
	}
	return nil
}

func revisionsCommand() *command {
	var c Config
	return &command{
		use: "revisions ID", short: "show how an action came to be what it is", lists: true,
		long: `
Shows each revision of an action, by its agent or by a person, and what it
changed: a line with - was there before, one with + is there since.`,
		flags: c.location,
		run: onServer(&c, func(ctx context.Context, l *local, args []string, out *output) error {
			id, err := oneAction(args)
			if err != nil {
				return err
			}
			return l.printChanges(ctx, id, false, out)
		}),
	}
}
