package store

import (
	"context"
	"io/fs"
)

// FormerNames are formerNames, for tests.
var FormerNames = formerNames

// Migrations are the files of the schema's history.
func Migrations() fs.FS { return migrations }

// OpenFiles opens a database as a program of version program does whose
// migrations are files.
func OpenFiles(ctx context.Context, source, program string, files fs.FS) (*DB, error) {
	steps, err := readMigrations(files, "migrations")
	if err != nil {
		return nil, err
	}
	return openMigrated(ctx, source, program, steps)
}

// Kept returns how many values of a name a Memory keeps.
func (m *Memory) Kept(name string) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k := m.findLocked(name); k != nil; k = k.before {
		n++
	}
	return n
}
