package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
)

// A pgTx is a transaction on one connection to PostgreSQL. It begins with its turn in
// one round trip, and commits in one together with the statements of [Tx.Later].
type pgTx struct {
	conn  *sql.Conn
	later pgx.Batch
}

// updatePostgres is [DB.UpdateIn] on PostgreSQL.
func (db *DB) updatePostgres(ctx context.Context, turn Turn, fn func(tx *Tx) error) (err error) {
	p, err := db.beginTurn(ctx, turn)
	if err != nil {
		return err
	}
	done := false
	defer func() {
		// Also after a panic in fn. What is still open must not get to another caller.
		if !done {
			err = errors.Join(err, p.rollback(ctx))
		}
		if cerr := p.conn.Close(); !errors.Is(cerr, sql.ErrConnDone) { // it is closed if the connection is lost
			err = errors.Join(err, cerr)
		}
	}()
	tx := &Tx{conn: p.conn, pg: p, seals: db.seals, turn: turn, postgres: true}
	if err := db.clock.during(tx, fn); err != nil {
		return err
	}
	if err := p.commit(ctx); err != nil {
		return err
	}
	done = true
	for _, f := range tx.after {
		f()
	}
	return nil
}

// maxBegins is how many connections are tried that PostgreSQL has closed meanwhile.
const maxBegins = 3

// beginTurn begins a transaction and waits for its turn.
func (db *DB) beginTurn(ctx context.Context, turn Turn) (*pgTx, error) {
	for try := 1; ; try++ {
		conn, err := db.write.Conn(ctx)
		if err != nil {
			return nil, fmt.Errorf("begin: %w", err)
		}
		p := &pgTx{conn: conn}
		query, args := turn.statement()
		p.later.Queue(`begin`)
		p.later.Queue(query, args...)
		err = p.send(ctx)
		if err == nil {
			return p, nil
		}
		lost := errors.Is(err, driver.ErrBadConn)
		err = errors.Join(err, p.rollback(ctx))
		_ = conn.Close()                                   // an error says that it is closed
		if !lost || ctx.Err() != nil || try == maxBegins { // nothing was written, so it can be repeated
			return nil, fmt.Errorf("wait for the turn to write (%s): %w", turn, err)
		}
	}
}

// raw calls f with the connection. It returns [driver.ErrBadConn], and the connection
// is closed, if it is lost.
func (p *pgTx) raw(f func(c *pgx.Conn) error) error {
	var err error
	rerr := p.conn.Raw(func(dc any) error {
		c := dc.(*stdlib.Conn).Conn() //nolint:forcetypeassert // of our own connector
		if c.IsClosed() {
			return driver.ErrBadConn
		}
		if err = f(c); c.IsClosed() {
			return errors.Join(err, driver.ErrBadConn)
		}
		return nil
	})
	if err == nil {
		err = rerr
	}
	return err
}

// send runs the statements that were put off, in one round trip.
func (p *pgTx) send(ctx context.Context) error {
	if p.later.Len() == 0 {
		return nil
	}
	b := p.later
	p.later = pgx.Batch{}
	return p.raw(func(c *pgx.Conn) error { return c.SendBatch(ctx, &b).Close() })
}

// commitGrace is how long after the end of its context a commit that was sent may take.
const commitGrace = 10 * time.Second

// commit runs the statements that were put off and commits, in one round trip. Once it
// is sent, the end of ctx does not cut it short: nobody could say what became of it.
func (p *pgTx) commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	ctx, cancel := outlive(ctx, commitGrace)
	defer cancel()
	n := p.later.Len()
	p.later.Queue(`commit`)
	b := p.later
	p.later = pgx.Batch{}
	committing := false // PostgreSQL may have committed
	err := p.raw(func(c *pgx.Conn) error {
		r := c.SendBatch(ctx, &b)
		for range n {
			if _, err := r.Exec(); err != nil {
				// After an error of its own PostgreSQL runs none of the statements that follow.
				_, said := errors.AsType[*pgconn.PgError](err)
				committing = !said
				_ = r.Close() // it returns the same error
				return err
			}
		}
		committing = true
		tag, err := r.Exec()
		if err = errors.Join(err, r.Close()); err == nil && tag.String() != "COMMIT" {
			// It answers ROLLBACK if a statement failed whose error fn has passed over.
			return pgx.ErrTxCommitRollback
		}
		return err
	})
	if err != nil && committing {
		return fmt.Errorf("%w: %w", ErrCommit, err)
	}
	return err
}

// outlive returns a context that ends so much later than ctx.
func outlive(ctx context.Context, grace time.Duration) (_ context.Context, cancel context.CancelFunc) {
	later, end := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-later.Done():
		case <-time.After(grace):
			end()
		}
	})
	return later, func() { stop(); end() }
}

// rollback ends the transaction. If it cannot, it closes the connection, which ends
// the transaction as well.
func (p *pgTx) rollback(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err := p.conn.Raw(func(dc any) error {
		c := dc.(*stdlib.Conn).Conn() //nolint:forcetypeassert // of our own connector
		if c.IsClosed() || c.PgConn().TxStatus() == 'I' {
			return nil
		}
		if _, err := c.Exec(ctx, `rollback`); err != nil {
			return driver.ErrBadConn // closes it
		}
		return nil
	})
	if errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) {
		return nil // it is closed, and the transaction is over
	}
	return err
}
