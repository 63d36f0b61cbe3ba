// Package storetest gives a test a migrated database of its own, on SQLite and
// on PostgreSQL. It is for tests only.
package storetest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/store"
)

// PostgresVar names the environment variable with the URL of a PostgreSQL
// server on which a test may create databases. The Makefile starts one and
// sets it; with it unset, tests run on SQLite alone and say so in their log.
const PostgresVar = "POSTERN_TEST_POSTGRES"

// SQLite returns a database in a temporary directory.
func SQLite(t testing.TB) *store.DB {
	t.Helper()
	file, err := migrated()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "postern.db")
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	return Open(t, path)
}

// Open opens the database that source names, with [Key], until the test ends.
func Open(t testing.TB, source string) *store.DB {
	t.Helper()
	db, err := store.Open(t.Context(), source)
	if err == nil {
		err = db.UseKey(Key)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// Again is db as a program sees it that starts anew, on the same connections.
func Again(t testing.TB, db *store.DB) *store.DB {
	t.Helper()
	again := *db
	if err := again.UseKey(Key); err != nil {
		t.Fatal(err)
	}
	return &again
}

// Another is db with another key than [Key], on the same connections, as whoever writes it without the server's key can at the most.
func Another(t testing.TB, db *store.DB) *store.DB {
	t.Helper()
	other := *db
	if err := other.UseKey([]byte("a key that an attacker has made up")); err != nil {
		t.Fatal(err)
	}
	return &other
}

// Key is the server's key with which the databases of tests seal their rows.
var Key = []byte("the key of tests seals their rows")

// sealed are tables whose rows are sealed, each as the package that owns it says.
var sealed = []store.Sealed{
	{Table: "action", Key: []string{"id"}, Omit: []string{"payload"}},
	{Table: "approval", Key: []string{"action_id", "version", "person"}},
	{Table: "delivery", Key: []string{"action_id", "n"}},
	{Table: "person", Key: []string{"id"}, Only: []string{"id", "project_id", "name", "password", "role", "email", "disabled_at", "changes"}},
	{Table: "person_change", Key: []string{"person_id", "at", "what"}},
	{Table: "session", Key: []string{"hash"}, Only: []string{"hash", "person_id", "id", "kind", "created_at", "expires_at", "strong_at"}},
	{Table: "setup", Key: []string{"hash"}, Only: []string{"hash", "project_id", "id", "role", "person_id", "created_by", "expires_at", "used_at"}},
	{Table: "inbox", Key: []string{"id"}, Only: []string{"id", "project_id", "mode"}},
	{Table: "allow_entry", Key: []string{"id"}},
}

// Reseal seals all rows as they are, as if the server itself had written what a
// test has just changed, such as a time that is to have come.
func Reseal(ctx context.Context, tx *store.Tx) error {
	for _, s := range sealed {
		if err := tx.Seal(ctx, s, "seal is not null"); err != nil {
			return err
		}
	}
	return nil
}

// migrated returns the file of an empty database. The migrations run once for
// all tests of a package: with the race detector they take a second.
var migrated = sync.OnceValues(func() (file []byte, err error) {
	dir, err := os.MkdirTemp("", "postern-storetest-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	path := filepath.Join(dir, "postern.db")
	db, err := store.Open(context.Background(), path)
	if err != nil {
		return nil, err
	}
	if err := db.Close(); err != nil { // with which its write-ahead log is in the file
		return nil, err
	}
	return os.ReadFile(path)
})

// Each runs fn once on SQLite and once on PostgreSQL, so that both obey the
// same rules.
func Each(t *testing.T, fn func(t *testing.T, db *store.DB)) {
	t.Helper()
	t.Run("sqlite", func(t *testing.T) { fn(t, SQLite(t)) })
	source := PostgresURL(t)
	if source == "" {
		t.Logf("%s is not set: not run on PostgreSQL", PostgresVar)
		return
	}
	t.Run("postgres", func(t *testing.T) {
		fn(t, Open(t, source))
	})
}

// PostgresURL returns the URL of an empty PostgreSQL database that is dropped
// when the test ends, or the empty string if there is no server for tests.
func PostgresURL(t testing.TB) string {
	t.Helper()
	server := os.Getenv(PostgresVar) //nolint:forbidigo // a test kit is configured by its environment
	if server == "" {
		return ""
	}
	ctx := context.WithoutCancel(t.Context()) // the clean-up comes after its end
	admin, err := sql.Open("pgx", server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { admin.Close() })
	name := "test_" + strings.ToLower(rand.Text()) // letters and digits: safe in the statements below
	if err := insist(ctx, admin, "create database "+name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := insist(ctx, admin, "drop database if exists "+name+" with (force)"); err != nil {
			t.Errorf("drop test database: %v", err)
		}
	})
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name
	return u.String()
}

// insist runs a statement on a server that many tests use. PostgreSQL waits five
// seconds for others to leave a database that it copies or drops, which is not
// long on a machine that is busy.
func insist(ctx context.Context, db *sql.DB, statement string) error {
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Second) {
		_, err := db.ExecContext(ctx, statement)
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}
