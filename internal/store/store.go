// Package store opens the database and runs transactions on it.
//
// It knows the schema's history (the files in migrations) but not what the
// tables mean: each package that owns a table keeps the SQL for it beside the
// rules it serves. Every statement must be written in the subset of SQL that
// SQLite and PostgreSQL share: $1 parameters, RETURNING, ON CONFLICT, bigint,
// text, bytea and boolean columns, times as Unix microseconds.
//
// A committed transaction is durable: SQLite runs with its write-ahead log
// synced at each commit, PostgreSQL with its defaults.
package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"golang.org/x/sync/semaphore"
	_ "modernc.org/sqlite" // driver "sqlite"
)

// ErrNotFound is returned, possibly wrapped, when no row matches.
var ErrNotFound = errors.New("not found")

// ErrCommit means that a transaction failed in its last step: it may be in the
// database all the same, where the answer was lost, or who asked for it left
// before PostgreSQL had said so. What it refers to must not be removed.
var ErrCommit = errors.New("commit")

// DB is an open database. It is safe for concurrent use.
type DB struct {
	write *sql.DB
	read  *sql.DB // the same as write on PostgreSQL

	postgres bool
	writers  *semaphore.Weighted // on PostgreSQL; nil on SQLite

	seals *sealer // nil before [DB.UseKey]
}

// A process has so many connections to PostgreSQL, and so many of them may be
// held by transactions that write, which mostly wait for their turn. The rest is
// for who reads: nobody looks at a queue only after all that is being written,
// and a transaction that has its turn and looks something up in another, which
// it should not, does not wait for those that wait for it.
const (
	maxConnections = 16
	maxWriters     = 8
)

// turn makes PostgreSQL's transactions that write take turns, as SQLite's do.
// Nearly all of them append to the audit, whose one chain lets in one at a time
// anyway; taken there, in the middle, that lock and those of rows were found in
// both orders by two of them, and PostgreSQL ended one. Who reads does not wait.
const turn = `lock table migration in share row exclusive mode`

// Tx is a transaction. It is not safe for concurrent use and must not outlive
// the function it was passed to.
type Tx struct {
	*sql.Tx
	after []func()
	seals *sealer
}

// AfterCommit has f called when the transaction is committed, and not if it is
// rolled back. It is for waking who waits for what the transaction wrote; f must
// not begin another.
func (tx *Tx) AfterCommit(f func()) { tx.after = append(tx.after, f) }

// Open opens the database that source names and applies pending migrations.
// The source is a PostgreSQL URL (postgres://…) or the path of a SQLite file,
// which is created if needed. The error wraps [ErrNewerSchema] if a newer
// version of this program has migrated the database.
func Open(ctx context.Context, source string) (*DB, error) { return OpenAs(ctx, source, "") }

// OpenAs is [Open] for a program that knows its version, such as "postern
// v1.2.0", which is recorded with the migrations that it applies.
func OpenAs(ctx context.Context, source, program string) (*DB, error) {
	steps, err := readMigrations(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	return openMigrated(ctx, source, program, steps)
}

func openMigrated(ctx context.Context, source, program string, steps []migration) (*DB, error) {
	if !isPostgres(source) {
		if err := private(source, 0); err != nil {
			return nil, fmt.Errorf("open database: %w", err)
		}
	}
	db, err := open(source, "rwc")
	if err != nil {
		return nil, err
	}
	if err := db.migrate(ctx, program, steps); err != nil {
		return nil, errors.Join(fmt.Errorf("open database %s: %w", Redact(source), err), db.Close())
	}
	return db, nil
}

// OpenReadOnly opens an existing database for reading. It changes nothing in
// it, so it fits a copy that is under examination. The error wraps
// [ErrNewerSchema] as that of [Open] does: this program would take rows that a
// newer one sealed for forged ones.
func OpenReadOnly(ctx context.Context, source string) (*DB, error) {
	steps, err := readMigrations(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	db, err := open(source, "ro")
	if err != nil {
		return nil, err
	}
	err = db.read.PingContext(ctx)
	if err == nil {
		err = db.checkReadOnly(ctx, steps)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open database %s: %w", Redact(source), err), db.Close())
	}
	return db, nil
}

func isPostgres(source string) bool {
	return strings.HasPrefix(source, "postgres://") || strings.HasPrefix(source, "postgresql://")
}

func open(source, mode string) (*DB, error) {
	if isPostgres(source) {
		db, err := openPostgres(source)
		if err != nil {
			return nil, err
		}
		db.SetMaxOpenConns(maxConnections)
		return &DB{write: db, read: db, postgres: true, writers: semaphore.NewWeighted(maxWriters)}, nil
	}
	// A path may hold ? or %, so it goes through url.URL, not fmt.
	u := url.URL{Scheme: "file", OmitHost: true, Path: source}
	q := url.Values{"mode": {mode}, "_pragma": {"busy_timeout(10000)", "foreign_keys(1)"}}
	if mode != "ro" {
		q["_pragma"] = append(q["_pragma"], "journal_mode(WAL)", "synchronous(FULL)", "secure_delete(1)")
		q.Set("_txlock", "immediate")
	}
	u.RawQuery = q.Encode()
	w, err := sql.Open("sqlite", u.String())
	if err != nil {
		return nil, fmt.Errorf("open database %s: %w", source, err)
	}
	// SQLite has one writer. One connection turns SQLITE_BUSY into waiting.
	w.SetMaxOpenConns(1)
	if mode == "ro" {
		return &DB{write: w, read: w}, nil
	}
	q.Del("_txlock")
	u.RawQuery = q.Encode()
	r, err := sql.Open("sqlite", u.String())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open database %s: %w", source, err), w.Close())
	}
	r.SetMaxOpenConns(8)
	return &DB{write: w, read: r}, nil
}

// Close closes the database.
func (db *DB) Close() error {
	if db.read == db.write {
		return db.write.Close()
	}
	return errors.Join(db.read.Close(), db.write.Close())
}

// Forget makes sure that rows which were removed or changed are not in the
// files of the database any more: SQLite overwrites them, and has them in its
// write-ahead log until that is emptied. It does nothing on PostgreSQL, which
// keeps them until its autovacuum and in its own log for as long as that is kept.
func (db *DB) Forget(ctx context.Context) error {
	if db.read == db.write {
		return nil
	}
	var busy, frames, moved int
	if err := db.write.QueryRowContext(ctx, `pragma wal_checkpoint(truncate)`).Scan(&busy, &frames, &moved); err != nil {
		return fmt.Errorf("empty write-ahead log: %w", err)
	}
	if busy != 0 {
		return errors.New("empty write-ahead log: somebody reads it")
	}
	return nil
}

// Backup writes a consistent copy of a SQLite database to path, which must not
// exist. The database stays in use meanwhile.
func (db *DB) Backup(ctx context.Context, path string) error {
	if db.read == db.write {
		return errors.New("back up database: PostgreSQL has pg_dump for that")
	}
	if err := private(path, os.O_EXCL); err != nil {
		return fmt.Errorf("back up database: %w", err)
	}
	if _, err := db.read.ExecContext(ctx, `vacuum into $1`, path); err != nil {
		return errors.Join(fmt.Errorf("back up database: %w", err), os.Remove(path))
	}
	return nil
}

// private makes an empty file that is its owner's alone, and closes to others
// one that is there. SQLite itself leaves it to the umask. The attack: another
// user of the machine reads proposed mail and hashes in a copy of the database,
// or in one whose directory was there before.
func private(path string, flags int) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|flags, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Chmod(0o600), f.Close())
}

// Update runs fn in a transaction, committing if fn returns nil and rolling
// back otherwise; of an [ErrCommit] it is not known which. It must not be called
// from within fn. Transactions that write take turns, whoever runs them: keep
// what takes long out of fn.
func (db *DB) Update(ctx context.Context, fn func(tx *Tx) error) error {
	if db.writers == nil {
		return db.run(ctx, db.write, nil, fn) // SQLite has one writer
	}
	if err := db.writers.Acquire(ctx, 1); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer db.writers.Release(1)
	return db.run(ctx, db.write, nil, func(tx *Tx) error {
		if _, err := tx.ExecContext(ctx, turn); err != nil {
			return fmt.Errorf("wait for the turn to write: %w", err)
		}
		return fn(tx)
	})
}

// View runs fn in a transaction that sees one state of the database and
// changes nothing.
func (db *DB) View(ctx context.Context, fn func(tx *Tx) error) error {
	o := &sql.TxOptions{ReadOnly: true}
	if db.postgres {
		o.Isolation = sql.LevelRepeatableRead // each statement would see a state of its own; SQLite's never do
	}
	return db.run(ctx, db.read, o, fn)
}

func (db *DB) run(ctx context.Context, conns *sql.DB, o *sql.TxOptions, fn func(tx *Tx) error) error {
	stx, err := conns.BeginTx(ctx, o)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	tx := &Tx{Tx: stx, seals: db.seals}
	if err := fn(tx); err != nil {
		// A transaction whose context ended is rolled back already.
		if rerr := tx.Rollback(); rerr != nil && !errors.Is(rerr, sql.ErrTxDone) {
			return errors.Join(err, fmt.Errorf("rollback: %w", rerr))
		}
		return ended(ctx, err)
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("%w: %w", ErrCommit, ended(ctx, err))
	}
	for _, f := range tx.after {
		f()
	}
	return nil
}

// ended returns err, and where it only says that the transaction is over since
// ctx is, the error of ctx too: a caller who left is no failure of ours.
func ended(ctx context.Context, err error) error {
	if errors.Is(err, sql.ErrTxDone) && ctx.Err() != nil {
		return fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return err
}

// One runs a query that must match a row and scans it. It returns
// [ErrNotFound] if none matches.
func (tx *Tx) One(ctx context.Context, query string, args []any, dest ...any) error {
	return NotFound(tx.QueryRowContext(ctx, query, args...).Scan(dest...))
}

// List runs a query and returns what scan makes of each row, whose columns it
// reads as [sql.Rows.Scan] does.
func List[T any](ctx context.Context, tx *Tx, scan func(row func(...any) error) (T, error), query string, args ...any) (out []T, err error) {
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		v, err := scan(rows.Scan)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, rows.Err()
}

func scanString(row func(...any) error) (s string, err error) {
	err = row(&s)
	return s, err
}

// Strings runs a query of one text column and returns it, row by row.
func (tx *Tx) Strings(ctx context.Context, query string, args ...any) ([]string, error) {
	return List(ctx, tx, scanString, query, args...)
}

// NotFound returns [ErrNotFound] for the driver's error that no row matched,
// and other errors as they are.
func NotFound(err error) error {
	if errors.Is(err, sql.ErrNoRows) {
		return ErrNotFound
	}
	return err
}

// Changed runs a statement and reports whether it changed any row.
func (tx *Tx) Changed(ctx context.Context, query string, args ...any) (bool, error) {
	res, err := tx.ExecContext(ctx, query, args...)
	if err != nil {
		return false, err
	}
	n, err := res.RowsAffected()
	return n > 0, err
}

// Time returns t as it is stored: Unix microseconds; the zero Time is 0.
func Time(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// FromTime is the inverse of [Time], in UTC.
func FromTime(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us).UTC()
}

// Flag returns b as it is stored where it is summed or compared: 0 or 1.
func Flag(b bool) int {
	if b {
		return 1
	}
	return 0
}
