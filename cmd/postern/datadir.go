package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

const lockPoll = 20 * time.Millisecond

// lockData makes sure that one server alone works on a data directory: two
// would take each other's running actions for interrupted ones.
func lockData(dir string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock data directory: %w", err)
	}
	// A server that was killed while it started a process has left the lock to
	// that one until it executes its program: moments.
	for wait := 3 * time.Second; unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil; wait -= lockPoll {
		if wait <= 0 {
			return nil, errors.Join(fmt.Errorf("another server is running on %s", dir), f.Close())
		}
		time.Sleep(lockPoll)
	}
	return func() { f.Close() }, nil
}

// serverKey returns the secret from which tokens of sandboxes are derived,
// making it at the first start.
func serverKey(dir string) ([]byte, error) {
	path := filepath.Join(dir, "server.key")
	key, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		key = make([]byte, 32)
		rand.Read(key)
		err = store.WriteFile(path, key, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("server key: %w", err)
	}
	if len(key) != 32 {
		return nil, fmt.Errorf("server key: %s has %d bytes, want 32", path, len(key))
	}
	return key, nil
}

// A firstStart is what bootstrap made that is shown once.
type firstStart struct {
	project string
	key     auth.Secret // empty unless the project was made now
	setup   auth.Secret // empty if there is an account already
}

func bootstrap(ctx context.Context, db *store.DB) (f firstStart, err error) {
	err = db.Update(ctx, func(tx *store.Tx) error {
		f.project, err = auth.FirstProject(ctx, tx)
		if errors.Is(err, store.ErrNotFound) {
			f.project, f.key, err = auth.NewProject(ctx, tx, "default")
			if err == nil {
				who := auth.Principal{Kind: auth.System, ID: "setup", Project: f.project}
				err = audit.Append(ctx, tx, who, audit.ProjectCreate, f.project, audit.Fields{"name": "default"})
			}
		}
		if err != nil {
			return err
		}
		people, err := auth.HasPeople(ctx, tx, f.project)
		if err != nil || people {
			return err
		}
		f.setup, err = auth.NewSetup(ctx, tx, f.project)
		return err
	})
	return f, err
}
