package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"postern/internal/sandbox"
	"postern/internal/store"
)

func (c *Config) runsSandboxes() bool { return c.Sandboxes != "off" }

// own makes this server the one that runs the sandboxes of the database.
func (d *daemon) own(ctx context.Context) (err error) {
	if d.conf.Database != "" { // a SQLite database has one server, that of its directory
		if d.server, err = serverID(d.conf.Data); err != nil {
			return err
		}
	}
	data, err := filepath.Abs(d.conf.Data)
	if err != nil {
		data = d.conf.Data
	}
	d.hold, err = sandbox.Own(ctx, d.db, d.server, "the one on "+hostname()+" with --data "+data)
	if errors.Is(err, sandbox.ErrOwned) {
		return fmt.Errorf("--database: %w; stop that server, or start this one with --sandboxes=off, for mail and people alone", err)
	}
	return err
}

// serverID returns the id of the server with the data directory dir. Everything
// on this disk belongs to that server, wherever the disk is moved.
func serverID(dir string) (string, error) {
	path := filepath.Join(dir, "server.id")
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		b = []byte("srv_" + rand.Text() + "\n")
		err = store.WriteFile(path, b, 0o600)
	}
	if err != nil {
		return "", fmt.Errorf("id of the server: %w", err)
	}
	id := strings.TrimSpace(string(b))
	if !strings.HasPrefix(id, "srv_") || len(id) < 20 {
		return "", fmt.Errorf("id of the server: %s holds %q, want srv_ and letters, as the server wrote it", path, id)
	}
	return id, nil
}

// recoverSandboxes cleans up the sandboxes of a former process.
func (d *daemon) recoverSandboxes(ctx context.Context) error {
	if !d.conf.runsSandboxes() {
		return nil
	}
	if err := d.fleet.Recover(ctx); err != nil {
		return err
	}
	alive, err := d.runtime.List(ctx)
	if err != nil {
		return err
	}
	return d.vols.Recover(ctx, alive)
}
