package event

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"postern/internal/store"
)

// Retention says how long events are kept.
type Retention struct {
	Age   time.Duration // 0 means 30 days
	Count int           // sandbox events kept of each project; 0 means 100,000
	Inbox int           // events kept of each inbox; 0 means 10,000
}

// Prune deletes the events that r does not keep and returns their number. Events not yet
// routed to webhooks are kept: deleting them would lose deliveries.
func Prune(ctx context.Context, db *store.DB, r Retention) (int64, error) {
	if r.Age == 0 {
		r.Age = 30 * 24 * time.Hour
	}
	if r.Count == 0 {
		r.Count = 100_000
	}
	if r.Inbox == 0 {
		r.Inbox = 10_000
	}
	var removed int64
	err := db.Update(ctx, func(tx *store.Tx) error {
		res, err := tx.ExecContext(ctx, `delete from event where at < $1 and routed_at > 0`, store.Time(time.Now().Add(-r.Age)))
		if err != nil {
			return err
		}
		if removed, err = res.RowsAffected(); err != nil {
			return err
		}
		for _, of := range []struct {
			column, where string
			count         int
		}{{"project_id", "seq = 0", r.Count}, {"inbox_id", "seq > 0", r.Inbox}} {
			n, err := pruneCount(ctx, tx, of.column, of.where, of.count)
			if err != nil {
				return err
			}
			removed += n
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("prune events: %w", err)
	}
	return removed, nil
}

// pruneCount deletes all but the newest count events of each value of column, among the
// events that match the condition where.
func pruneCount(ctx context.Context, tx *store.Tx, column, where string, count int) (removed int64, err error) {
	owners, err := tx.Strings(ctx, `select `+column+` from event where `+where+` group by `+column+` having count(*) > $1`, count)
	if err != nil {
		return 0, err
	}
	for _, id := range owners {
		res, err := tx.ExecContext(ctx, `delete from event where `+column+` = $1 and `+where+` and routed_at > 0 and
			at < (select at from event where `+column+` = $1 and `+where+` order by at desc, id desc limit 1 offset $2)`, id, count-1)
		if err != nil {
			return 0, err
		}
		n, err := res.RowsAffected()
		if err != nil {
			return 0, err
		}
		removed += n
	}
	return removed, nil
}

// Run prunes at once and then every hour, until ctx is done.
func Run(ctx context.Context, log *slog.Logger, db *store.DB, r Retention) error {
	t := time.NewTicker(time.Hour)
	defer t.Stop()
	for {
		if n, err := Prune(ctx, db, r); err != nil && ctx.Err() == nil {
			log.ErrorContext(ctx, "prune events", "err", err)
		} else if n > 0 {
			log.InfoContext(ctx, "pruned events", "count", n)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}
