package main

import (
	"context"
	"path/filepath"

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
			defer db.Close()
			return db.Backup(ctx, file)
		},
	}
}
