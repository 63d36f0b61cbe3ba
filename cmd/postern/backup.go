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
	"postern/internal/store"
)

func backupCommand() *command {
	var c Config
	return &command{
		use: "backup FILE", short: "copy the database",
		long: `
Writes a consistent copy of the SQLite database to FILE, which must not exist,
while the server goes on. The blobs directory below the data directory holds the
sealed messages, artifacts the files of runs, and the file server.key the server's secret: copy them after it. With PostgreSQL (pg_dump) the file
server.id says whose the sandboxes and volumes on this disk are: keep it with them.
Volumes are in the volumes directory: copy their images while no server runs.
The record has an entry of it, and the console's overview says how old it is.
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
			// The copy is whole, whether or not the record can say so.
			if err := c.recordBackup(ctx, file); err != nil {
				fmt.Fprintln(os.Stderr, "note: the backup is complete, but the record does not have it:", err)
			}
			return nil
		},
	}
}

// recordBackup adds an entry that the database was copied to file. The copy is older, so it
// does not have it. The path is not recorded: it is of no use to those who read the record.
func (c Config) recordBackup(ctx context.Context, file string) error {
	info, err := os.Stat(file)
	if err != nil {
		return fmt.Errorf("look at the copy: %w", err)
	}
	return inDatabase(ctx, c, func(tx *store.Tx, who auth.Principal) error {
		return audit.Append(ctx, tx, who, audit.RecordBackup, audit.Database, audit.Fields{"bytes": strconv.FormatInt(info.Size(), 10)})
	})
}
