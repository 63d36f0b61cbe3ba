package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

// A writer runs the transactions that write to SQLite, one after the other. Those that
// wait for their turn while one runs become members of one transaction of the
// database, and share its sync: SQLite's log is synced once for all of them. A member
// returns from its commit when the commit of the group is durable. No member waits for
// further members to arrive.
//
//	open ── member ── another waits ──▶ member ── … ── none waits, or groupMax ──▶ commit, all return
//	           └ its function fails: back to its savepoint, the others stay
//
// Members see the writes of earlier members, as if those were committed. If the commit
// fails, it fails for all members.
type writer struct {
	conns *sql.DB
	clock *clock // of the database

	waiting atomic.Int64 // callers that will get the turn
	turn    sync.Mutex   // held by the member that runs; guards group
	group   *group       // nil if no transaction is open
}

// groupMax bounds the members of one transaction, so that the first ones return soon.
const groupMax = 64

// A group is a transaction with its members.
type group struct {
	tx      *sql.Tx
	members int           // that were kept
	done    chan struct{} // closed after the end of tx
	err     error         // of the commit; set before done is closed
}

// run runs fn as a member of a transaction and returns when that is durable. tx is what
// fn gets. It waits for its turn, not longer than ctx lives.
func (w *writer) run(ctx context.Context, tx *Tx, fn func(tx *Tx) error) error {
	if err := w.take(ctx); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	g, err := w.member(ctx, tx, fn)
	if err != nil {
		return err
	}
	<-g.done
	if g.err != nil {
		return fmt.Errorf("%w: %w", ErrCommit, g.err)
	}
	for _, f := range tx.after {
		f()
	}
	return nil
}

// take waits for the turn. The attack: a flood of requests that are cancelled leaves a
// transaction open for members that never come. So a caller that gives up leaves
// somebody behind who ends what is open.
func (w *writer) take(ctx context.Context) error {
	w.waiting.Add(1)
	if w.turn.TryLock() {
		w.waiting.Add(-1)
		if ctx.Err() == nil {
			return nil
		}
		w.pass()
		return ctx.Err()
	}
	got := make(chan struct{})
	gone := make(chan struct{})
	go func() {
		w.turn.Lock()
		w.waiting.Add(-1)
		select {
		case got <- struct{}{}:
		case <-gone:
			w.pass()
		}
	}()
	select {
	case <-got:
		if ctx.Err() == nil {
			return nil
		}
		w.pass()
	case <-ctx.Done():
		close(gone)
	}
	return ctx.Err()
}

// member runs fn in the open transaction, or a new one, and passes the turn on.
func (w *writer) member(ctx context.Context, tx *Tx, fn func(tx *Tx) error) (joined *group, err error) {
	defer w.pass()
	if w.group == nil {
		// A transaction of several members must not end with the context of one.
		stx, err := w.conns.BeginTx(context.WithoutCancel(ctx), nil)
		if err != nil {
			return nil, fmt.Errorf("begin: %w", err)
		}
		w.group = &group{tx: stx, done: make(chan struct{})}
	}
	g := w.group
	if g.members > 0 { // the first one is undone with the whole transaction
		if _, err := g.tx.ExecContext(context.WithoutCancel(ctx), `savepoint member`); err != nil {
			return nil, fmt.Errorf("begin: %w", err)
		}
	}
	kept := false
	defer func() {
		if kept {
			return
		}
		if rerr := w.undo(context.WithoutCancel(ctx), g); rerr != nil { // also if fn panics
			err = errors.Join(err, fmt.Errorf("rollback: %w", rerr))
		}
	}()
	tx.conn, tx.writes = uncancelled{g.tx}, true
	if err := w.clock.during(tx, fn); err != nil {
		return nil, ended(ctx, err)
	}
	// database/sql would not commit for a caller who has gone.
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if g.members > 0 {
		if _, err := g.tx.ExecContext(context.WithoutCancel(ctx), `release savepoint member`); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCommit, err)
		}
	}
	kept = true
	g.members++
	return g, nil
}

// undo undoes what the running member did.
func (w *writer) undo(ctx context.Context, g *group) error {
	if g.members == 0 {
		w.group = nil
		return g.tx.Rollback()
	}
	_, err := g.tx.ExecContext(ctx, `rollback to savepoint member`)
	if err == nil {
		_, err = g.tx.ExecContext(ctx, `release savepoint member`)
	}
	if err != nil {
		// SQLite has ended the transaction, as after a full disk, or it is unclear what
		// stands in it. So nothing of it is kept.
		w.group = nil
		g.err = errors.Join(err, g.tx.Rollback())
		close(g.done)
	}
	return err
}

// pass ends the turn. It commits unless somebody waits who can share the sync.
func (w *writer) pass() {
	defer w.turn.Unlock()
	g := w.group
	if g == nil || g.members < groupMax && w.waiting.Load() > 0 {
		return
	}
	w.group = nil
	g.err = g.tx.Commit()
	close(g.done)
}

// uncancelled runs the statements of a member to their end. The attack: SQLite undoes
// the whole transaction, that of the other members too, if a statement that writes is
// interrupted; so a client would undo what others do by hanging up. It begins no
// statement after the context's end.
type uncancelled struct{ tx *sql.Tx }

func (u uncancelled) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return u.tx.ExecContext(context.WithoutCancel(ctx), query, args...)
}

func (u uncancelled) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return u.tx.QueryContext(context.WithoutCancel(ctx), query, args...)
}

func (u uncancelled) QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row {
	if ctx.Err() == nil {
		ctx = context.WithoutCancel(ctx)
	}
	return u.tx.QueryRowContext(ctx, query, args...)
}
