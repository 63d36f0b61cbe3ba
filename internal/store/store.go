// Package store opens the database and runs transactions on it.
//
// It knows the schema's history (see migrate.go) but not what the tables mean:
// each package that owns a table keeps its SQL beside the rules that it implements.
// Every statement must be in the subset of SQL that SQLite and PostgreSQL share: $1
// parameters, RETURNING, ON CONFLICT, bigint, text, bytea and boolean columns,
// times as Unix microseconds.
//
// A committed transaction is durable: SQLite runs with its write-ahead log
// synced at each commit, PostgreSQL with its defaults.
package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/semaphore"
	_ "modernc.org/sqlite" // driver "sqlite"
)

// ErrNotFound is returned, possibly wrapped, when no row matches.
var ErrNotFound = errors.New("not found")

// ErrCommit means that the commit of a transaction failed. The transaction may be
// in the database all the same: the reply may have been lost, or PostgreSQL did not
// reply within 10 seconds of the context's end. So files and blobs that it refers to must be kept.
var ErrCommit = errors.New("commit")

// DB is an open database. It is safe for concurrent use.
type DB struct {
	write *sql.DB
	read  *sql.DB // the same as write on PostgreSQL

	postgres bool
	writers  *semaphore.Weighted // on PostgreSQL; nil on SQLite
	grouped  *writer             // on SQLite; nil on PostgreSQL and for reading alone

	seals *sealer // nil before [DB.UseKey]
	clock *clock  // see Memory
}

// The limits of a process's connections to PostgreSQL: in all, and in transactions
// that write, which may wait for their turn. The rest is reserved for
// reads. So reads do not queue behind writes, and a transaction that has its
// turn and starts a read in another one, which it should not, does not deadlock
// with those that wait for it.
const (
	maxConnections = 16
	maxWriters     = 8
)

// idleConnection is after how long an unused connection to PostgreSQL is closed.
const idleConnection = 2 * time.Minute

// Tx is a transaction. It is not safe for concurrent use and must not outlive
// the function it was passed to.
type Tx struct {
	conn  conn
	pg    *pgTx // of a transaction that writes to PostgreSQL; else nil
	after []func()
	seals *sealer
	turn  Turn

	postgres         bool
	writes           bool   // it has the one turn of SQLite
	snapshot         bool   // all that it reads is of one moment
	clock            *clock // see Memory
	begun            int64  // by clock; 0 means not yet
	number, numbered int64  // see Number
}

// A conn runs statements: a transaction, or a connection in one.
type conn interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// readOnly refuses statements that have no result: [DB.Look] has no turn.
type readOnly struct{ *sql.DB }

func (readOnly) ExecContext(context.Context, string, ...any) (sql.Result, error) {
	return nil, errors.New("a statement that writes outside of a transaction")
}

// ExecContext is that of [sql.Tx].
func (tx *Tx) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if err := tx.flush(ctx); err != nil {
		return nil, err
	}
	return tx.conn.ExecContext(ctx, query, args...)
}

// QueryContext is that of [sql.Tx].
func (tx *Tx) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if err := tx.flush(ctx); err != nil {
		return nil, err
	}
	return tx.conn.QueryContext(ctx, query, args...)
}

// QueryRowContext is that of [sql.Tx].
func (tx *Tx) QueryRowContext(ctx context.Context, query string, args ...any) Row {
	if err := tx.flush(ctx); err != nil {
		return failed{err}
	}
	return tx.conn.QueryRowContext(ctx, query, args...)
}

// A Row is the result of a query for one row, as [sql.Row].
type Row interface{ Scan(dest ...any) error }

// failed is the row of a query that could not be made.
type failed struct{ err error }

func (f failed) Scan(...any) error { return f.err }

// Later runs a statement of which only the effect matters, before the next one of tx
// that has a result, or its commit. On PostgreSQL all that were put off take one round
// trip, together with the commit. Its error is that of the statement before which it
// runs, or of the transaction.
func (tx *Tx) Later(ctx context.Context, query string, args ...any) error {
	if tx.pg == nil {
		_, err := tx.conn.ExecContext(ctx, query, args...)
		return err
	}
	tx.pg.later.Queue(query, args...)
	return nil
}

// flush runs what was put off.
func (tx *Tx) flush(ctx context.Context) error {
	if tx.pg == nil {
		return nil
	}
	return tx.pg.send(ctx)
}

// AfterCommit registers f to be called after the transaction is committed; it is
// not called after a rollback. It is for waking goroutines that wait for what the
// transaction wrote. f must not begin another transaction.
func (tx *Tx) AfterCommit(f func()) { tx.after = append(tx.after, f) }

// Open opens the database that source names and applies pending migrations.
// The source is a PostgreSQL URL (postgres://…) or the path of a SQLite file,
// which is created if needed. The error wraps [ErrNewerSchema] if a newer
// version of this program has migrated the database.
//
// Program is the caller's name and version, such as "postern v1.2.0". It is
// recorded with the migrations that are applied; empty means unknown.
func Open(ctx context.Context, source, program string) (*DB, error) {
	steps, err := readMigrations(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	return openMigrated(ctx, source, program, steps)
}

// openMigrated is [Open] with the migrations as a parameter, for tests.
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
		return nil, errors.Join(withWay(fmt.Errorf("open database %s: %w", Redact(source), err), source), db.Close())
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
		return nil, errors.Join(withWay(fmt.Errorf("open database %s: %w", Redact(source), err), source), db.Close())
	}
	return db, nil
}

// isPostgres reports whether source is the URL of a PostgreSQL database.
func isPostgres(source string) bool {
	return strings.HasPrefix(source, "postgres://") || strings.HasPrefix(source, "postgresql://")
}

// open returns a database that is not migrated yet. The mode is SQLite's: "rwc" or
// "ro".
func open(source, mode string) (*DB, error) {
	if isPostgres(source) {
		db, err := openPostgres(source)
		if err != nil {
			return nil, err
		}
		db.SetMaxOpenConns(maxConnections)
		// The default keeps two: the others would be opened and closed for each
		// transaction, and each would prepare its statements again.
		db.SetMaxIdleConns(maxConnections)
		db.SetConnMaxIdleTime(idleConnection)
		return &DB{write: db, read: db, postgres: true, writers: semaphore.NewWeighted(maxWriters), clock: newClock()}, nil
	}
	// A path may hold ? or %, so it goes through url.URL, not fmt.
	u := url.URL{Scheme: "file", OmitHost: true, Path: source}
	q := url.Values{"mode": {mode}, "_pragma": {"busy_timeout(10000)", "foreign_keys(1)"}}
	if mode != "ro" {
		q["_pragma"] = append(q["_pragma"], "journal_mode(WAL)", "synchronous(FULL)", "secure_delete(1)")
		q.Set("_txlock", "immediate")
	}
	u.RawQuery = q.Encode()
	w, err := openSQLite(u.String())
	if err != nil {
		return nil, withWay(fmt.Errorf("open database %s: %w", source, err), source)
	}
	// SQLite has one writer. One connection turns SQLITE_BUSY into waiting.
	w.SetMaxOpenConns(1)
	if mode == "ro" {
		return &DB{write: w, read: w, clock: newClock()}, nil
	}
	q.Del("_txlock")
	u.RawQuery = q.Encode()
	r, err := openSQLite(u.String())
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open database %s: %w", source, err), w.Close())
	}
	r.SetMaxOpenConns(8)
	c := newClock()
	return &DB{write: w, read: r, grouped: &writer{conns: w, clock: c}, clock: c}, nil
}

// Close closes the database.
func (db *DB) Close() error {
	if db.read == db.write {
		return db.write.Close()
	}
	return errors.Join(db.read.Close(), db.write.Close())
}

// Forget removes deleted and overwritten rows from the files of the database.
// SQLite overwrites them in the main file, and this empties the write-ahead log,
// which still has them. It does nothing on PostgreSQL, which keeps such rows until
// its autovacuum runs, and in its log for as long as that is kept.
func (db *DB) Forget(ctx context.Context) error {
	if db.read == db.write {
		return nil
	}
	var busy, frames, moved int
	if err := db.write.QueryRowContext(ctx, `pragma wal_checkpoint(truncate)`).Scan(&busy, &frames, &moved); err != nil {
		return fmt.Errorf("empty write-ahead log: %w", err)
	}
	if busy != 0 {
		return errors.New("empty write-ahead log: a reader is using it")
	}
	return nil
}

// Backup writes a consistent copy of a SQLite database to path, which must not
// exist. The database stays in use meanwhile.
func (db *DB) Backup(ctx context.Context, path string) error {
	if db.read == db.write {
		return errors.New("back up database: use pg_dump for PostgreSQL")
	}
	if err := private(path, os.O_EXCL); err != nil {
		return fmt.Errorf("back up database: %w", err)
	}
	if _, err := db.read.ExecContext(ctx, `vacuum into $1`, path); err != nil {
		return errors.Join(fmt.Errorf("back up database: %w", err), os.Remove(path))
	}
	return nil
}

// private creates an empty file with mode 0600, or sets that mode on an existing
// one. SQLite itself would use the umask. The attack: another user of the machine
// reads proposed mail and password hashes in a copy of the database, or in a data
// directory that existed before with wide permissions.
func private(path string, flags int) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|flags, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Chmod(0o600), f.Close())
}

// Update is [DB.UpdateIn] with the turn [All].
func (db *DB) Update(ctx context.Context, fn func(tx *Tx) error) error {
	return db.UpdateIn(ctx, All(), fn)
}

// UpdateIn runs fn in a transaction, when it is its turn across all processes. It
// commits if fn returns nil and rolls back otherwise; after [ErrCommit] either may have
// happened. It must not be called from within fn. Others wait for the turn meanwhile:
// keep slow work out of fn.
func (db *DB) UpdateIn(ctx context.Context, turn Turn, fn func(tx *Tx) error) error {
	if db.writers == nil { // SQLite has one writer
		tx := db.begun(turn)
		if db.grouped == nil {
			return db.run(ctx, db.write, nil, tx, fn)
		}
		return db.grouped.run(ctx, tx, fn)
	}
	if err := db.writers.Acquire(ctx, 1); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer db.writers.Release(1)
	return ended(ctx, db.updatePostgres(ctx, turn, fn))
}

// Peek runs one query outside of a transaction and scans the row that it returns. It
// returns [ErrNotFound] if none matches.
func (db *DB) Peek(ctx context.Context, query string, args []any, dest ...any) error {
	return NotFound(db.read.QueryRowContext(ctx, query, args...).Scan(dest...))
}

// Look runs fn, which only reads, outside of a transaction: each statement sees what is
// committed by then. It is cheaper than [DB.View] for what is looked at again before
// anything follows from it.
func (db *DB) Look(_ context.Context, fn func(tx *Tx) error) error {
	return db.clock.during(&Tx{conn: readOnly{db.read}, seals: db.seals, turn: Turn{task: "view"}, postgres: db.postgres}, fn)
}

// View runs fn in a read-only transaction that sees one snapshot of the database.
func (db *DB) View(ctx context.Context, fn func(tx *Tx) error) error {
	o := &sql.TxOptions{ReadOnly: true}
	if db.postgres {
		o.Isolation = sql.LevelRepeatableRead // the default gives each statement its own snapshot; SQLite never does
	}
	tx := db.begun(Turn{task: "view"})
	tx.snapshot = true
	return db.run(ctx, db.read, o, tx, fn)
}

// begun returns a transaction that has a turn, and no connection yet.
func (db *DB) begun(turn Turn) *Tx {
	return &Tx{seals: db.seals, turn: turn, postgres: db.postgres}
}

// run runs fn in one transaction tx on conns, and calls the functions of
// [Tx.AfterCommit] after the commit.
func (db *DB) run(ctx context.Context, conns *sql.DB, o *sql.TxOptions, tx *Tx, fn func(tx *Tx) error) error {
	stx, err := conns.BeginTx(ctx, o)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	tx.conn = stx
	if err := db.clock.during(tx, fn); err != nil {
		// database/sql has already rolled back a transaction whose context ended.
		if rerr := stx.Rollback(); rerr != nil && !errors.Is(rerr, sql.ErrTxDone) {
			return errors.Join(err, fmt.Errorf("rollback: %w", rerr))
		}
		return ended(ctx, err)
	}
	if err := stx.Commit(); err != nil {
		return fmt.Errorf("%w: %w", ErrCommit, ended(ctx, err))
	}
	for _, f := range tx.after {
		f()
	}
	return nil
}

// ended adds the error of ctx to err, if err only says that the transaction or its
// connection is over because ctx ended. So callers can tell a cancelled request from a failure.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, sql.ErrTxDone) || errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone)) {
		return fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return err
}

// One runs a query that must match a row and scans it. It returns
// [ErrNotFound] if none matches.
func (tx *Tx) One(ctx context.Context, query string, args []any, dest ...any) error {
	return NotFound(tx.QueryRowContext(ctx, query, args...).Scan(dest...))
}

// List runs a query and returns the results of scan, which is called for each row
// with a function like [sql.Rows.Scan].
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

// Places returns n parameters of a query from $first on, such as "$2, $3".
func Places(first, n int) string {
	var b strings.Builder
	for i := range n {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString("$" + strconv.Itoa(first+i))
	}
	return b.String()
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

// Flag returns b as 0 or 1, for columns that are summed or compared.
func Flag(b bool) int {
	if b {
		return 1
	}
	return 0
}
