package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync"
	"time"
)

// ErrHeld means that another process holds the name.
var ErrHeld = errors.New("held by another process")

// A Hold is a lock by name, which one process of a database holds at a time. It
// ends with the process, also with kill -9: it is an advisory lock of a PostgreSQL
// session, which ends with its connection or, if the machine is gone, after half a
// minute of failed TCP keepalives. A SQLite database belongs to one process anyway.
// It is safe for concurrent use.
type Hold struct {
	db   *DB
	name string

	mu   sync.Mutex // guards conn
	conn *sql.Conn  // nil on SQLite, and while the hold is lost
}

// holdPoll is the interval of attempts to take a hold, and holdLook that of checks
// that it is still ours.
const (
	holdPoll = 50 * time.Millisecond
	holdLook = 2 * time.Second
)

// Hold takes name, and waits for it if another process has it: one that was killed
// has it until its connection ends. The error wraps [ErrHeld] if another process
// still has it after wait.
func (db *DB) Hold(ctx context.Context, name string, wait time.Duration) (*Hold, error) {
	h := &Hold{db: db, name: name}
	for begun := time.Now(); ; {
		err := h.take(ctx)
		if err == nil || !errors.Is(err, ErrHeld) || time.Since(begun) >= wait {
			if err != nil {
				return nil, fmt.Errorf("hold %s: %w", name, err)
			}
			return h, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(holdPoll):
		}
	}
}

// lock takes PostgreSQL's advisory lock for a name. The schema is part of the key,
// since several installations may be schemas of one database.
const lock = `pg_try_advisory_lock(hashtextextended(current_schema() || ' ' || $1, 0))`

// take makes one attempt to get the lock, on a connection that it then keeps. The
// keepalives are set so that PostgreSQL notices a dead machine within half a
// minute.
func (h *Hold) take(ctx context.Context) error {
	if !h.db.postgres {
		return nil
	}
	conn, err := h.db.write.Conn(ctx)
	if err != nil {
		return err
	}
	for k, v := range map[string]string{"tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "4", "idle_session_timeout": "0"} {
		// Best effort: not every version or pooler knows all of these.
		_, _ = conn.ExecContext(ctx, `select set_config($1, $2, false)`, k, v)
	}
	var ok bool
	if err = conn.QueryRowContext(ctx, `select `+lock, h.name).Scan(&ok); err == nil && !ok {
		err = ErrHeld
	}
	if err != nil {
		return errors.Join(err, conn.Close())
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.conn = conn
	return nil
}

// Run keeps the hold until ctx is done. After a lost connection it takes the hold
// again, and returns an error that wraps [ErrHeld] if another process has it by
// then.
func (h *Hold) Run(ctx context.Context) error {
	t := time.NewTicker(holdLook)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		if !h.db.postgres || h.ping(ctx) {
			continue
		}
		if err := h.take(ctx); errors.Is(err, ErrHeld) {
			return fmt.Errorf("hold %s: %w", h.name, err)
		} // other errors: the database is unreachable, probably for others too
	}
}

// ping reports whether the session with the lock is alive.
func (h *Hold) ping(ctx context.Context) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.conn == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var one int
	if err := h.conn.QueryRowContext(ctx, `select 1`).Scan(&one); err == nil {
		return true
	} else if ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled) {
		return true // the server stops
	}
	_ = h.discardLocked(ctx)
	return false
}

// discardLocked releases the lock and closes the session. A session that returned
// to the pool with the lock would hold it for nobody.
func (h *Hold) discardLocked(ctx context.Context) error {
	if h.conn == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_, err := h.conn.ExecContext(ctx, `select pg_advisory_unlock_all()`)
	if err != nil {
		// Its state is unknown, so the pool must not use it again.
		_ = h.conn.Raw(func(any) error { return driver.ErrBadConn })
	}
	err = errors.Join(err, h.conn.Close())
	h.conn = nil
	return err
}

// Close releases the name, also if ctx has ended.
func (h *Hold) Close(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.discardLocked(ctx)
}
