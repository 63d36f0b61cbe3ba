package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/lineage"
	"postern/internal/store"
)

func backupCommand() *command {
	var c Config
	return &command{
		use: "backup FILE", at: onThisMachine, short: "copy the database",
		long: `
Writes a consistent copy of the SQLite database to FILE, which must not exist,
while the server goes on. Then copy these from the data directory: blobs (sealed
messages), artifacts and runs (files of runs), and server.key (the server's secret).
Copy the images in volumes while no server runs. With PostgreSQL use pg_dump, and
keep the file server.id with the sandboxes and volumes on this disk: it says whose
they are.

A server that starts on a copy asks people again about everything that was approved
in it: the original may have sent it since.

The record gets an entry, and the console's overview shows the age of the backup.
"postern audit verify --file FILE" examines the copy.`,
		flags: c.location,
		run: func(ctx context.Context, args []string, _ *output) error {
			file, err := oneArg(args, "FILE")
			if err != nil {
				return err
			}
			if file, err = filepath.Abs(file); err != nil {
				return err
			}
			db, err := store.Open(ctx, c.source(), "postern "+revision())
			if err != nil {
				return err
			}
			err = db.Backup(ctx, file)
			if err := errors.Join(err, db.Close()); err != nil {
				return err
			}
			if err := stampBackup(ctx, file); err != nil {
				return errors.Join(err, os.Remove(file))
			}
			// The copy is complete even if this fails.
			if err := c.recordBackup(ctx, file); err != nil {
				fmt.Fprintln(os.Stderr, "note: the backup is complete, but the record has no entry of it:", err)
			}
			return nil
		},
	}
}

// stampBackup makes a backup one that a server takes for a copy, also in the data directory that it
// is from.
func stampBackup(ctx context.Context, file string) error {
	db, err := store.Open(ctx, file, "postern "+revision())
	if err != nil {
		return fmt.Errorf("stamp backup: %w", err)
	}
	return errors.Join(lineage.Stamp(ctx, db), db.Close())
}

// recordBackup adds an entry that the database was copied to file. The copy is older, so it
// does not have the entry. The path is left out, because it is of no use to readers of the record.
func (c *Config) recordBackup(ctx context.Context, file string) error {
	info, err := os.Stat(file)
	if err != nil {
		return fmt.Errorf("look at the copy: %w", err)
	}
	return inDatabase(ctx, *c, func(tx *store.Tx, who auth.Principal) error {
		return audit.Append(ctx, tx, who, audit.RecordBackup, audit.Database, audit.Fields{"bytes": strconv.FormatInt(info.Size(), 10)})
	})
}
