// Package storetest gives a test a migrated database of its own, on SQLite and
// on PostgreSQL. It is for tests only.
package storetest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/store"
)

// PostgresVar names the environment variable with the URL of a PostgreSQL
// server on which a test may create databases. The Makefile starts one and
// sets it; with it unset, tests run on SQLite alone and say so in their log.
const PostgresVar = "POSTERN_TEST_POSTGRES"

// SQLite returns a migrated database in a temporary directory, which is in memory
// where the machine has such a file system: SQLite syncs each commit, and a test
// that makes hundreds of them would mostly wait for the disk.
func SQLite(t testing.TB) *store.DB {
	t.Helper()
	file, err := migrated()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(memoryDir(t), "postern.db")
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	return Open(t, path)
}

// memoryDir returns a directory that is removed when the test ends, in /dev/shm
// if that has room: in a container it may be as small as 64 MiB.
func memoryDir(t testing.TB) string {
	t.Helper()
	const room = 1 << 30 // bytes
	var fs unix.Statfs_t
	err := unix.Statfs("/dev/shm", &fs)
	if err != nil || fs.Bavail*uint64(fs.Bsize) < room {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp("/dev/shm", "postern-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove test database: %v", err)
		}
	})
	return dir
}

// Open opens the database that source names, with [Key], until the test ends.
func Open(t testing.TB, source string) *store.DB {
	t.Helper()
	db, err := store.Open(t.Context(), source, "")
	if err == nil {
		err = db.UseKey(Key)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// Reopen returns db as a restarted program sees it, on the same connections.
func Reopen(t testing.TB, db *store.DB) *store.DB {
	t.Helper()
	again := *db
	if err := again.UseKey(Key); err != nil {
		t.Fatal(err)
	}
	return &again
}

// WithOtherKey returns db with another key than [Key], on the same connections. It
// stands for an attacker who can write the database but does not have the server's key.
func WithOtherKey(t testing.TB, db *store.DB) *store.DB {
	t.Helper()
	other := *db
	if err := other.UseKey([]byte("a key that an attacker has made up")); err != nil {
		t.Fatal(err)
	}
	return &other
}

// Key is the server's key in tests, which seals rows.
var Key = []byte("the key of tests seals their rows")

// sealed lists the tables with sealed rows, as the packages that own them define them.
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

// Reseal seals all rows again, as if the server had written what a test has just
// changed, such as a time that the test has moved into the past.
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
	db, err := store.Open(context.Background(), path, "")
	if err != nil {
		return nil, err
	}
	if err := db.Close(); err != nil { // checkpoints the write-ahead log into the file
		return nil, err
	}
	return os.ReadFile(path)
})

// Each runs fn once on SQLite and once on PostgreSQL, so that both must pass the same
// test.
func Each(t *testing.T, fn func(t *testing.T, db *store.DB)) {
	t.Helper()
	t.Run("sqlite", func(t *testing.T) { fn(t, SQLite(t)) })
	source := os.Getenv(PostgresVar) //nolint:forbidigo // a test kit is configured by its environment
	if source == "" {
		t.Logf("%s is not set: not run on PostgreSQL", PostgresVar)
		return
	}
	t.Run("postgres", func(t *testing.T) {
		fn(t, Open(t, createDatabase(t, source, postgresTemplate(t, source))))
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
	return createDatabase(t, server, "template1")
}

// createDatabase creates a copy of the database template on the server, to be
// dropped when the test ends, and returns its URL. PostgreSQL's default strategy
// writes each copied page to its log too, which takes twice as long.
func createDatabase(t testing.TB, server, template string) string {
	t.Helper()
	ctx := context.WithoutCancel(t.Context()) // clean-up runs after the test's context is done
	admin, err := sql.Open("pgx", server)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { admin.Close() })
	name := "test_" + strings.ToLower(rand.Text()) // letters and digits: safe in the statements below
	if err := execRetry(ctx, admin, "create database "+name+" template "+template+" strategy file_copy"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := execRetry(ctx, admin, "drop database if exists "+name+" with (force)"); err != nil {
			t.Errorf("drop test database: %v", err)
		}
	})
	return databaseURL(t, server, name)
}

func databaseURL(t testing.TB, server, name string) string {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name
	return u.String()
}

// templateLock is the key of the advisory lock under which test processes that
// share a server create the template.
const templateLock = 0x506f7374

// postgresTemplate returns the name of a migrated database on the server, which
// is created if needed: copying it takes a fifth of the time of the migrations.
// It is shared by all test processes on the server and stays there. Its name
// holds a hash of the migrations, so that a server that outlives an edit of them
// gets another.
func postgresTemplate(t testing.TB, server string) string {
	t.Helper()
	name, err := templateName()
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	admin, err := sql.Open("pgx", server)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	exists := func(q interface {
		QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	},
	) (found bool) {
		if err := q.QueryRowContext(ctx, `select exists (select from pg_database where datname = $1)`, name).Scan(&found); err != nil {
			t.Fatal(err)
		}
		return found
	}
	if exists(admin) {
		return name
	}
	lock, err := admin.Conn(ctx) // closed with its session, which ends the lock
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if _, err := lock.ExecContext(ctx, `select pg_advisory_lock($1)`, templateLock); err != nil {
		t.Fatal(err)
	}
	if exists(lock) {
		return name
	}
	// Migrated under another name: a process that is killed leaves no template
	// that is only half migrated.
	unfinished := name + "_unfinished"
	for _, statement := range []string{"drop database if exists " + unfinished + " with (force)", "create database " + unfinished} {
		if err := execRetry(ctx, lock, statement); err != nil {
			t.Fatal(err)
		}
	}
	db, err := store.Open(ctx, databaseURL(t, server, unfinished), "")
	if err == nil {
		err = db.Close()
	}
	if err == nil {
		err = execRetry(ctx, lock, "alter database "+unfinished+" rename to "+name)
	}
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// templateName returns the name of the template for the migrations in the source.
var templateName = sync.OnceValues(func() (string, error) {
	dir, err := os.Getwd() // of a test: its package's directory
	for err == nil {
		if _, missing := os.Stat(filepath.Join(dir, "go.mod")); missing == nil {
			break
		}
		if dir == filepath.Dir(dir) {
			err = errors.New("the test does not run in its package's directory: there is no go.mod above it")
		}
		dir = filepath.Dir(dir)
	}
	if err != nil {
		return "", err
	}
	files, err := filepath.Glob(filepath.Join(dir, "internal/store/migrations/*.sql"))
	if err != nil || len(files) == 0 {
		return "", fmt.Errorf("find the migrations: %w, %d files", err, len(files))
	}
	hash := sha256.New()
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(hash, "%s %d\n%s", filepath.Base(f), len(b), b)
	}
	return fmt.Sprintf("postern_template_%x", hash.Sum(nil)[:8]), nil
})

// execRetry runs a statement and retries it for two minutes. PostgreSQL waits only five
// seconds for other sessions to leave a database that it copies or drops, which is too
// short on a busy machine.
func execRetry(ctx context.Context, db execer, statement string) error {
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Second) {
		_, err := db.ExecContext(ctx, statement)
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

// An execer is a [sql.DB] or one [sql.Conn] of it.
type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}
