package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// TestBackupIsRecorded: the record says when the database was copied, once for each copy,
// and a copy that failed is not there.
func TestBackupIsRecorded(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	key, err := serverKey(dir)
	if err != nil {
		t.Fatal(err)
	}
	db, err := store.Open(ctx, filepath.Join(dir, "postern.db"), "")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.UseKey(key); err != nil {
		t.Fatal(err)
	}
	err = db.Update(ctx, func(tx *store.Tx) error {
		_, _, err := auth.NewProject(ctx, tx, "one")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "copy.db")
	for _, want := range []int{0, 1} { // the second time the file exists
		var out, errs bytes.Buffer
		if got := run(ctx, []string{"backup", "--data", dir, file}, &out, &errs); got != want {
			t.Fatalf("status %d, want %d: %s%s", got, want, &out, &errs)
		}
	}
	if i, err := os.Stat(file); err != nil || i.Size() == 0 {
		t.Fatalf("the copy: %v", err)
	}
	var entries []audit.Entry
	err = audit.View(ctx, db, func(tx *store.Tx) error {
		entries, err = audit.List(ctx, tx, audit.Query{Object: audit.Database, Verb: string(audit.RecordBackup)})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 || !strings.Contains(entries[0].Detail, `"bytes"`) || strings.Contains(entries[0].Detail, "copy.db") {
		t.Errorf("entries: %+v, want one, with the size and without the path", entries)
	}
}
