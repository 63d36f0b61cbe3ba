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
	Count int           // newest so many of each project; 0 means 100,000
}

// Prune removes what is older than r allows, and reports how many events that
// were. One that no webhook has been given yet stays.
func Prune(ctx context.Context, db *store.DB, r Retention) (int64, error) {
	if r.Age == 0 {
		r.Age = 30 * 24 * time.Hour
	}
	if r.Count == 0 {
		r.Count = 100_000
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
		rows, err := tx.QueryContext(ctx, `select project_id from event group by project_id having count(*) > $1`, r.Count)
		if err != nil {
			return err
		}
		defer rows.Close()
		var projects []string
		for rows.Next() {
			var p string
			if err := rows.Scan(&p); err != nil {
				return err
			}
			projects = append(projects, p)
		}
		if err := rows.Err(); err != nil {
			return err
		}
		for _, p := range projects {
			res, err := tx.ExecContext(ctx, `delete from event where project_id = $1 and routed_at > 0 and
				at < (select at from event where project_id = $1 order by at desc, id desc limit 1 offset $2)`, p, r.Count-1)
			if err != nil {
				return err
			}
			n, err := res.RowsAffected()
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

// Run prunes each hour until ctx is done.
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
