package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
)

// The bounds of what one connection keeps: prepared statements, and queries that were
// used once. Lists of values make as many queries as they have lengths.
const (
	maxStatements = 400
	maxOnce       = 400
)

// openSQLite opens SQLite so that each connection keeps its statements prepared: to
// parse one takes longer than to run it.
func openSQLite(dsn string) (*sql.DB, error) {
	plain, err := sql.Open("sqlite", dsn) // connects to nothing; it knows the driver
	if err != nil {
		return nil, err
	}
	d := plain.Driver()
	if err := plain.Close(); err != nil {
		return nil, err
	}
	return sql.OpenDB(keeping{d, dsn}), nil
}

// keeping is a [driver.Connector] whose connections keep their statements.
type keeping struct {
	driver driver.Driver
	dsn    string
}

func (k keeping) Driver() driver.Driver { return k.driver }

func (k keeping) Connect(context.Context) (driver.Conn, error) {
	c, err := k.driver.Open(k.dsn)
	if err != nil {
		return nil, err
	}
	s, ok := c.(sqlite)
	if !ok { // unreachable: TestStatementsAreKept
		return nil, errors.Join(fmt.Errorf("open database: %T cannot keep statements", c), c.Close())
	}
	return &keeper{sqlite: s, kept: map[string]*kept{}, once: map[string]bool{}}, nil
}

// sqlite is what the connections of modernc.org/sqlite are.
type sqlite interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.Pinger
	driver.SessionResetter
	driver.Validator
}

// A keeper is a connection that keeps its statements. As every connection, it is used
// by one goroutine at a time.
type keeper struct {
	sqlite

	kept map[string]*kept // by query
	once map[string]bool  // queries that were used once
}

// A kept is a prepared statement.
type kept struct {
	driver.Stmt

	busy bool // its rows are being read
}

// statement returns the prepared statement of a query, or nil if there is none that is
// free. It prepares a query at its second use: some are used once in a lifetime.
func (k *keeper) statement(ctx context.Context, query string) (*kept, error) {
	if s := k.kept[query]; s != nil && !s.busy {
		return s, nil
	} else if s != nil || len(k.kept) >= maxStatements {
		return nil, nil //nolint:nilnil // it runs as if none were prepared
	}
	if !k.once[query] {
		if len(k.once) >= maxOnce {
			clear(k.once)
		}
		k.once[query] = true
		return nil, nil //nolint:nilnil // as above
	}
	delete(k.once, query)
	stmt, err := k.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	k.kept[query] = &kept{Stmt: stmt}
	return k.kept[query], nil
}

// ExecContext implements [driver.ExecerContext].
func (k *keeper) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	s, err := k.statement(ctx, query)
	if err != nil {
		return nil, err
	}
	if s == nil {
		return k.sqlite.ExecContext(ctx, query, args)
	}
	return s.Stmt.(driver.StmtExecContext).ExecContext(ctx, args)
}

// QueryContext implements [driver.QueryerContext].
func (k *keeper) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	s, err := k.statement(ctx, query)
	if err != nil {
		return nil, err
	}
	if s == nil {
		return k.sqlite.QueryContext(ctx, query, args)
	}
	rows, err := s.Stmt.(driver.StmtQueryContext).QueryContext(ctx, args)
	if err != nil {
		return nil, err
	}
	s.busy = true
	return &keptRows{Rows: rows, of: s}, nil
}

// Close implements [driver.Conn].
func (k *keeper) Close() error {
	var errs []error
	for _, s := range k.kept {
		errs = append(errs, s.Close())
	}
	return errors.Join(append(errs, k.sqlite.Close())...)
}

// keptRows are rows of a prepared statement, which is free again after their end.
type keptRows struct {
	driver.Rows

	of *kept
}

// Close implements [driver.Rows].
func (r *keptRows) Close() error {
	r.of.busy = false
	return r.Rows.Close()
}
