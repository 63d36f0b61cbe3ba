package store

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFullDiskIsKnown fills a database to its limit.
func TestFullDiskIsKnown(t *testing.T) {
	ctx := t.Context()
	db, err := Open(ctx, filepath.Join(t.TempDir(), "postern.db"), "test")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	write := func(statement string, args ...any) error {
		return db.Update(ctx, func(tx *Tx) error {
			_, err := tx.ExecContext(ctx, statement, args...)
			return err
		})
	}
	if err := write(`create table filling (id text, b text)`); err != nil {
		t.Fatal(err)
	}
	if err := write(`pragma max_page_count = 1`); err != nil { // that is: no more than now
		t.Fatal(err)
	}
	for range 200 {
		if err = write(`insert into filling (id, b) values ('x', $1)`, strings.Repeat("b", 100_000)); err != nil {
			break
		}
	}
	if !DiskFull(err) || Damaged(err) {
		t.Errorf("a full database: %v", err)
	}
	for _, err := range []error{unix.ENOSPC, unix.EDQUOT, &os.PathError{Op: "write", Path: "x", Err: unix.ENOSPC}} {
		if !DiskFull(err) {
			t.Errorf("%v is not known", err)
		}
	}
	if DiskFull(nil) || DiskFull(ErrNotFound) || DiskFull(unix.EIO) {
		t.Error("another error is taken for a full disk")
	}
}

// TestDamagedDatabaseNamesTheWayForward opens files that are no database any more.
func TestDamagedDatabaseNamesTheWayForward(t *testing.T) {
	ctx := t.Context()
	for name, damage := range map[string]func(b []byte) []byte{
		"the schema":       func(b []byte) []byte { copy(b[100:], strings.Repeat("x", 3000)); return b },
		"no database":      func([]byte) []byte { return []byte(strings.Repeat("not a database ", 1000)) },
		"half of the file": func(b []byte) []byte { return b[:len(b)/2] },
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "postern.db")
			db, err := Open(ctx, file, "test")
			if err != nil {
				t.Fatal(err)
			}
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, damage(b), 0o600); err != nil {
				t.Fatal(err)
			}
			db, err = Open(ctx, file, "test")
			if err == nil {
				db.Close()
				if name == "half of the file" { // what is missing is noticed when it is read
					return
				}
			}
			for _, want := range []string{"damaged", "PRAGMA integrity_check", "restore", "backup"} {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%v does not say %q", err, want)
				}
			}
		})
	}
}
