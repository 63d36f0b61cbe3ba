package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

func setupCommand() *command {
	var c Config
	var project string
	return &command{
		use: "setup", at: onThisMachine, short: "print a link with which a person makes an account",
		long: `
Prints the path of a one-time link below the server's address. Whoever opens it
first, within a day, makes an account that decides what may leave: give it only
to that person. A link that was made before stays valid until it is used.`,
		flags: func(fs *pflag.FlagSet) {
			c.location(fs)
			fs.StringVar(&project, "project", "", "`id` of the project whose owner the account is (default: the oldest)")
		},
		run: func(ctx context.Context, args []string, out *output) error {
			if err := noArgs(args); err != nil {
				return err
			}
			return inDatabase(ctx, c, func(tx *store.Tx, who auth.Principal) error {
				if project != "" {
					if _, err := auth.ProjectName(ctx, tx, project); err != nil {
						return fmt.Errorf("there is no project %q; postern project list shows them", project)
					}
					who.Project = project
				}
				_, token, err := auth.NewInvitation(ctx, tx, auth.Invitation{Project: who.Project, Role: auth.Owner, CreatedBy: who.String()})
				if err != nil {
					return err
				}
				if err := audit.Append(ctx, tx, who, audit.SetupCreate, who.Project, nil); err != nil {
					return err
				}
				base, err := os.ReadFile(filepath.Join(c.Data, pagesFile))
				if err != nil && !errors.Is(err, fs.ErrNotExist) {
					return fmt.Errorf("read the console's address: %w", err)
				}
				if len(base) == 0 {
					fmt.Fprintln(os.Stderr, "This is below the console's address; postern up prints that.")
				}
				_, err = fmt.Fprintf(out, "%s/console/setup?token=%s\n", printable(strings.TrimSpace(string(base))), token.Reveal())
				return err
			})
		},
	}
}

// inDatabase runs f in the database of a server that may be running or not.
func inDatabase(ctx context.Context, c Config, f func(*store.Tx, auth.Principal) error) error {
	if err := onThisMachine.reachable(); err != nil {
		return err
	}
	db, err := store.Open(ctx, c.source(), "postern "+revision())
	if err != nil {
		return err
	}
	defer db.Close()
	key, err := serverKey(c.Data)
	if err != nil {
		return err
	}
	if err := db.UseKey(key); err != nil {
		return err
	}
	err = db.Update(ctx, func(tx *store.Tx) error {
		project, err := auth.FirstProject(ctx, tx)
		if err != nil {
			return fmt.Errorf("there is no project in %s yet; start the server once with postern up", store.Redact(c.source()))
		}
		return f(tx, auth.Principal{Kind: auth.Person, ID: "local", Project: project, Role: auth.Owner, Operator: true})
	})
	if err != nil {
		return err
	}
	// It is done, whether its entry is in the chain already or not. No server may be
	// running that puts it there.
	if err := audit.Settle(ctx, db); err != nil {
		fmt.Fprintln(os.Stderr, "note: the entry in the record is pending until a server starts:", err)
	}
	return nil
}
