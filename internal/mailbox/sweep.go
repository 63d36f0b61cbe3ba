package mailbox

import (
	"context"
	"fmt"
	"time"

	"postern/internal/store"
)

const (
	// sweepAge is how old a blob without a row must be to be removed: until then
	// somebody may be about to commit the row.
	sweepAge  = time.Hour
	sweepStep = 6 * time.Hour
)

// RunSweep removes what crashes have left behind, now and from time to time,
// until ctx ends: a sealed message is durable before its row is, so that a stop
// in between leaves it with none.
func (m *PostOffice) RunSweep(ctx context.Context) error {
	t := time.NewTicker(sweepStep)
	defer t.Stop()
	for {
		n, err := m.Sweep(ctx, time.Now().Add(-sweepAge))
		if err != nil && ctx.Err() == nil {
			m.log.ErrorContext(ctx, "sweep mail", "err", err)
		}
		if n > 0 {
			m.log.InfoContext(ctx, "removed sealed messages that a crash had left without a row", "count", n)
		}
		if err := m.forgetHeard(ctx); err != nil && ctx.Err() == nil {
			m.log.ErrorContext(ctx, "forget who wrote", "err", err)
		}
		if err := m.Delivery.Forget(ctx, time.Now()); err != nil && ctx.Err() == nil {
			m.log.ErrorContext(ctx, "forget deliveries", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// Sweep removes the blobs that are older than a moment and that no row names,
// and returns how many there were.
func (m *PostOffice) Sweep(ctx context.Context, before time.Time) (removed int, err error) {
	err = m.cfg.Blobs.Old(before, func(ids []string) error {
		named, err := m.named(ctx, ids)
		if err != nil {
			return err
		}
		for _, id := range ids {
			if named[id] {
				continue
			}
			if err := m.cfg.Blobs.Delete(id); err != nil {
				return err
			}
			removed++
		}
		return ctx.Err()
	})
	return removed, err
}

// named returns which of the blobs a row names.
func (m *PostOffice) named(ctx context.Context, ids []string) (map[string]bool, error) {
	args := make([]any, len(ids))
	for i, id := range ids {
		args[i] = id
	}
	named := map[string]bool{}
	err := m.db.View(ctx, func(tx *store.Tx) error {
		for _, h := range holdings {
			if h.blob == "" {
				continue
			}
			found, err := tx.Strings(ctx, `select `+h.blob+` from `+h.table+` where `+h.blob+` in (`+store.Places(1, len(ids))+`)`, args...)
			if err != nil {
				return err
			}
			for _, id := range found {
				named[id] = true
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("find rows of blobs: %w", err)
	}
	return named, nil
}
