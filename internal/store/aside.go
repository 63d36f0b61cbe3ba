package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/jackc/pgx/v5/pgconn"
)

// Aside runs fn in a transaction that writes without taking its turn: beside those of
// [DB.Update]. It is for rows that no transaction of Update locks for longer than a
// statement; fn sees what they have committed, statement by statement. On SQLite,
// which has one writer, it is Update. The turn of tx covers no project.
func (db *DB) Aside(ctx context.Context, fn func(tx *Tx) error) error {
	tx := db.begun(Turn{task: "view"})
	if db.grouped != nil {
		return db.grouped.run(ctx, tx, fn)
	}
	return db.run(ctx, db.write, nil, tx, fn)
}

// Concurrent reports whether transactions of several writers may run at the same time:
// on PostgreSQL, not on SQLite.
func (tx *Tx) Concurrent() bool { return tx.postgres }

// Concurrent is [Tx.Concurrent] of the database's transactions.
func (db *DB) Concurrent() bool { return db.postgres }

// Cluster returns what distinguishes a PostgreSQL database from copies of it: the
// identifier of its cluster, the timeline, which a recovery to an earlier moment and the
// promotion of a standby change, and the number of a table, which is another one in a
// database that was restored from a dump. It is empty for SQLite. A user who may not
// read the first two gets the last one alone.
func (db *DB) Cluster(ctx context.Context, table string) (string, error) {
	if !db.postgres {
		return "", nil
	}
	var oid string
	if err := db.read.QueryRowContext(ctx, `select $1::regclass::oid::text`, table).Scan(&oid); err != nil {
		return "", fmt.Errorf("identify database: %w", err)
	}
	var system, timeline string
	err := db.read.QueryRowContext(ctx, `select (select system_identifier::text from pg_control_system()), (select timeline_id::text from pg_control_checkpoint())`).Scan(&system, &timeline)
	if e, ok := errors.AsType[*pgconn.PgError](err); ok && e.Code == "42501" { // insufficient privilege
		return oid, nil
	}
	if err != nil {
		return "", fmt.Errorf("identify database: %w", err)
	}
	return system + " " + timeline + " " + oid, nil
}

// Number names something that tx inserts: a random number of tx, never 0, and how many
// were numbered in tx before.
func (tx *Tx) Number() (number, n int64) {
	for tx.number == 0 {
		tx.number = rand.Int64() //nolint:gosec // a name, no secret: seals cover it
	}
	tx.numbered++
	return tx.number, tx.numbered - 1
}

// TryLock takes a lock by name until tx ends, and reports whether it has it: false if
// another transaction does. On SQLite it always has it.
func (tx *Tx) TryLock(ctx context.Context, name string) (ok bool, err error) {
	if !tx.postgres {
		return true, nil
	}
	// The schema is part of the key: several installations may be schemas of one database.
	err = tx.One(ctx, `select pg_try_advisory_xact_lock(hashtextextended(current_schema() || ' ' || $1, 0))`, []any{name}, &ok)
	return ok, err
}

// Vacuum has PostgreSQL clean a table from which many rows were removed: scans read
// those as well, until autovacuum comes. On SQLite it does nothing.
func (db *DB) Vacuum(ctx context.Context, table string) error {
	if !db.postgres {
		return nil
	}
	if _, err := db.write.ExecContext(ctx, `vacuum (analyze, truncate off) `+table); err != nil {
		return fmt.Errorf("vacuum %s: %w", table, err)
	}
	return nil
}
