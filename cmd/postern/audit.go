package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/store"
)

func auditCommand() *command {
	var c Config
	var file, head, verb, object string
	var limit int
	open := func(ctx context.Context) (*store.DB, error) {
		source := c.source()
		if file != "" {
			// The working directory of whoever typed the path is what it is relative to.
			abs, err := filepath.Abs(file)
			if err != nil {
				return nil, err
			}
			source = abs
		}
		if file != "" || c.Database == "" {
			// SQLite says no more than that it was unable to open the file.
			f, err := os.Open(source)
			if err != nil {
				return nil, fmt.Errorf("open database: %w", err)
			}
			if err := f.Close(); err != nil {
				return nil, err
			}
		}
		return store.OpenReadOnly(ctx, source)
	}
	return group("audit", "list|verify [flags]", "show or verify the record of what happened", `
postern audit list     prints the newest entries, oldest of them first
postern audit verify   checks the whole chain and prints its head

Every verdict, decision and effect is an entry, chained to the one before it by
a SHA-256, so that a change to any entry shows. Verify names the first bad one
and then exits with status 1. Whoever can write the whole database could also
write a new chain: note the head that verify prints somewhere else and give it
to a later verify with --head.

Both read the database without changing it; --file examines a copy.`,
		func(fs *flag.FlagSet) {
			c.location(fs)
			fs.StringVar(&file, "file", "", "read this SQLite `file` instead of the server's database")
			fs.StringVar(&head, "head", "", "verify: `SEQ:HASH` that an earlier verify printed and that the chain must contain")
			fs.StringVar(&verb, "verb", "", "list: only entries whose verb begins with `text`, such as egress. or action.approve")
			fs.StringVar(&object, "object", "", "list: only entries about the thing with this `id`")
			fs.IntVar(&limit, "limit", 200, "list: at most so many `entries`")
		}, map[string]func(context.Context, []string, io.Writer) error{
			"verify": func(ctx context.Context, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				var known audit.Head
				if head != "" {
					var err error
					if known, err = audit.ParseHead(head); err != nil {
						return fmt.Errorf("%w: --head: %w", errUsage, err)
					}
				}
				db, err := open(ctx)
				if err != nil {
					return err
				}
				defer db.Close()
				return db.View(ctx, func(tx *store.Tx) error {
					h, err := audit.Verify(ctx, tx, known)
					if err != nil {
						return err
					}
					_, err = fmt.Fprintf(out, "the audit chain holds: %d entries\nhead %s\n", h.Seq, h)
					return err
				})
			},
			"list": func(ctx context.Context, args []string, out io.Writer) error {
				if err := noArgs(args); err != nil {
					return err
				}
				db, err := open(ctx)
				if err != nil {
					return err
				}
				defer db.Close()
				return db.View(ctx, func(tx *store.Tx) error {
					entries, err := audit.List(ctx, tx, audit.Query{Verb: verb, Object: object, Limit: limit})
					if err != nil {
						return err
					}
					for _, e := range slices.Backward(entries) {
						printEntry(out, e)
					}
					return nil
				})
			},
		})
}

func printEntry(out io.Writer, e audit.Entry) {
	var f audit.Fields
	if err := json.Unmarshal([]byte(e.Detail), &f); err != nil {
		f = audit.Fields{"detail": e.Detail}
	}
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(f)) {
		parts = append(parts, fmt.Sprintf("%s=%q", k, f[k])) // %q: hostile text stays on its line
	}
	fmt.Fprintf(out, "%6d  %s  %-34s %-18s %-30q %s\n", e.Seq, e.At.UTC().Format(time.DateTime), e.Actor, e.Verb, e.Object, strings.Join(parts, " "))
}
