package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"postern/internal/store"
)

// ErrOwned means that another server runs the sandboxes of the database.
var ErrOwned = errors.New("another server runs the sandboxes of this database")

// ownWait is how long a server waits for a predecessor that is still stopping.
const ownWait = 5 * time.Second

// Own makes the server with this ID the one that runs the sandboxes of db, until
// the returned hold is closed or the process ends. Its error wraps [ErrOwned] if
// another server runs them, and names that server's place. Sandboxes, snapshots and
// volumes are on one machine's disk: a second server would not find them and would
// record them as lost.
func Own(ctx context.Context, db *store.DB, id, place string) (*store.Hold, error) {
	h, err := db.Hold(ctx, "sandboxes", ownWait)
	if errors.Is(err, store.ErrHeld) {
		return nil, fmt.Errorf("%w%s", ErrOwned, owner(ctx, db))
	}
	if err != nil {
		return nil, err
	}
	err = db.Update(ctx, func(tx *store.Tx) error {
		if _, err := tx.ExecContext(ctx, `delete from sandbox_server`); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `insert into sandbox_server (id, place, started_at) values ($1, $2, $3)`, id, place, store.Time(time.Now())); err != nil {
			return err
		}
		if id == "" {
			return nil
		}
		for _, table := range []string{"sandbox", "snapshot", "volume"} { // written by a version without server IDs
			if _, err := tx.ExecContext(ctx, `update `+table+` set server_id = $1 where server_id = ''`, id); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("take over sandboxes: %w", err), h.Close(ctx))
	}
	return h, nil
}

// owner names the server that runs the sandboxes for an error text, or returns the
// empty string.
func owner(ctx context.Context, db *store.DB) (text string) {
	_ = db.View(ctx, func(tx *store.Tx) error {
		var place string
		var started int64
		err := tx.One(ctx, `select place, started_at from sandbox_server order by started_at desc limit 1`, nil, &place, &started)
		if err == nil {
			text = fmt.Sprintf(": %s, since %s", place, store.FromTime(started).Format(time.RFC3339))
		}
		return err
	})
	return text
}
