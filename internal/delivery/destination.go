package delivery

import (
	"context"
	"crypto/rand"
	"fmt"
	"time"

	"postern/internal/store"
)

const (
	// useTime is the lease of a connection slot: longer than the gate lets one
	// execution last. It matters only after a crash of a process that is not
	// started again; otherwise slots are released or freed at the start.
	useTime = 20 * time.Minute
	// maxSilence caps the backoff for a destination that does not answer.
	maxSilence = 10 * time.Minute
	// maxSlot bounds how far in the future a waiting batch is scheduled.
	maxSlot = 30 * time.Minute
)

// acquire takes a connection slot at a destination for a batch of n recipients.
// Otherwise it returns until when to wait, and why. The row of the destination
// is locked first, so the limits hold exactly across all processes on the
// database.
func (q *Queue) acquire(ctx context.Context, tx *store.Tx, h Hop, n int, now time.Time) (holder string, wait time.Time, why string, err error) {
	if h.Kind == HopLocal {
		return "", time.Time{}, "", nil
	}
	conf := &q.conf
	most, rate := conf.Connections, conf.PerMinute
	switch h.Kind {
	case HopRelay:
		most, rate = conf.RelayMax, 0 // the operator's own servers
	case HopProvider:
		most, rate = 1, 0 // it has limits of its own
	case HopLocal, HopDirect:
	}
	_, err = tx.ExecContext(ctx, `insert into destination (name, window_at, sent, failures, not_before, slot_at) values ($1, 0, 0, 0, 0, 0) on conflict do nothing`, h.Name)
	if err != nil {
		return "", time.Time{}, "", fmt.Errorf("make destination: %w", err)
	}
	var window, sent, notBefore, slot int64
	// A no-op update takes the row lock on both databases.
	err = tx.One(ctx, `update destination set failures = failures where name = $1 returning window_at, sent, not_before, slot_at`, []any{h.Name}, &window, &sent, &notBefore, &slot)
	if err != nil {
		return "", time.Time{}, "", fmt.Errorf("lock destination: %w", err)
	}
	var using int
	// Leases of crashed processes expire, so they do not count.
	err = tx.One(ctx, `select count(*) from destination_use where destination = $1 and until_at > $2`, []any{h.Name, store.Time(now)}, &using)
	if err != nil {
		return "", time.Time{}, "", fmt.Errorf("count uses of destination: %w", err)
	}
	if now.Sub(store.FromTime(window)) >= time.Minute {
		window, sent = store.Time(now), 0
	}
	// gap is the distance between two waiting batches.
	gap := time.Second
	if rate > 0 {
		gap = time.Minute / time.Duration(rate)
	}
	switch {
	case notBefore > store.Time(now):
		wait, why = store.FromTime(notBefore), "waits: "+h.Name+" did not answer the last attempt"
	case using >= most:
		wait, why = now.Add(2*time.Second), fmt.Sprintf("waits: %s already has %d connections from this server, which is the limit", h.Name, most)
	case rate > 0 && sent > 0 && sent+int64(n) > int64(rate):
		wait, why = store.FromTime(window).Add(time.Minute), fmt.Sprintf("waits: the limit for %s is %d messages a minute", h.Name, rate)
	}
	if !wait.IsZero() {
		// Stagger the waiting batches. Otherwise all would retry at the same
		// moment, again and again.
		if next := store.FromTime(slot); next.After(wait) {
			wait = next
		}
		if last := now.Add(maxSlot); wait.After(last) {
			wait = last
		}
		_, err = tx.ExecContext(ctx, `update destination set slot_at = $1 where name = $2`, store.Time(wait.Add(gap)), h.Name)
		if err != nil {
			return "", time.Time{}, "", fmt.Errorf("wait for destination: %w", err)
		}
		return "", wait, why, nil
	}
	holder = conf.Instance + "/" + rand.Text()
	if _, err = tx.ExecContext(ctx, `update destination set window_at = $1, sent = $2 where name = $3`, window, sent+int64(n), h.Name); err != nil {
		return "", time.Time{}, "", fmt.Errorf("use destination: %w", err)
	}
	_, err = tx.ExecContext(ctx, `insert into destination_use (destination, holder, until_at) values ($1, $2, $3)`, h.Name, holder, store.Time(now.Add(useTime)))
	if err != nil {
		return "", time.Time{}, "", fmt.Errorf("use destination: %w", err)
	}
	return holder, time.Time{}, "", nil
}

// giveBack undoes acquire for a conversation that does not start after all.
func (q *Queue) giveBack(ctx context.Context, tx *store.Tx, h Hop, holder string, n int) error {
	if _, err := tx.ExecContext(ctx, `delete from destination_use where destination = $1 and holder = $2`, h.Name, holder); err != nil {
		return fmt.Errorf("give destination back: %w", err)
	}
	if _, err := tx.ExecContext(ctx, `update destination set sent = sent - $1 where name = $2`, n, h.Name); err != nil {
		return fmt.Errorf("give destination back: %w", err)
	}
	return nil
}

// release frees a connection slot. Answered says whether the server replied at
// all: after repeated silence, all batches leave the destination alone for a
// time that doubles, up to [maxSilence].
func (q *Queue) release(ctx context.Context, tx *store.Tx, h Hop, holder string, answered bool, now time.Time) error {
	if h.Kind == HopLocal {
		return nil
	}
	if _, err := tx.ExecContext(ctx, `delete from destination_use where destination = $1 and holder = $2`, h.Name, holder); err != nil {
		return fmt.Errorf("release destination: %w", err)
	}
	if answered {
		_, err := tx.ExecContext(ctx, `update destination set failures = 0, not_before = 0, slot_at = 0 where name = $1 and failures > 0`, h.Name)
		if err != nil {
			return fmt.Errorf("release destination: %w", err)
		}
		return nil
	}
	var failures int64
	err := tx.One(ctx, `update destination set failures = failures + 1 where name = $1 returning failures`, []any{h.Name}, &failures)
	if err != nil {
		return fmt.Errorf("release destination: %w", err)
	}
	if failures < 3 { // a single lost connection is not an outage
		return nil
	}
	silence := min(q.conf.FirstRetry<<min(failures-3, 10), maxSilence)
	_, err = tx.ExecContext(ctx, `update destination set not_before = $1 where name = $2`, store.Time(now.Add(silence)), h.Name)
	if err != nil {
		return fmt.Errorf("release destination: %w", err)
	}
	return nil
}

// FreeDestinations frees the slots that a former process of this instance held,
// and expired leases. It is called once, before the gate runs.
func (q *Queue) FreeDestinations(ctx context.Context) error {
	return q.db.Update(ctx, func(tx *store.Tx) error {
		prefix := q.conf.Instance + "/"
		_, err := tx.ExecContext(ctx, `delete from destination_use where substr(holder, 1, length($1)) = $1 or until_at < $2`, prefix, store.Time(time.Now()))
		if err != nil {
			return fmt.Errorf("free destinations: %w", err)
		}
		return nil
	})
}

const (
	keepSent = 60 * 24 * time.Hour // how long a report can be matched to a sent message
	keepIdle = 24 * time.Hour      // how long the state of an idle destination is kept
)

// Forget deletes records that no delivery and no report needs any more. The
// sending days of a domain stay, since they prove that its warm-up is over;
// there are few of them.
func (q *Queue) Forget(ctx context.Context, now time.Time) error {
	return q.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `delete from sent_message where sent_at < $1`, store.Time(now.Add(-keepSent)))
		if err != nil {
			return fmt.Errorf("forget sent messages: %w", err)
		}
		_, err = tx.ExecContext(ctx, `delete from destination where window_at < $1 and not_before < $2 and slot_at < $2
			and not exists (select 1 from destination_use u where u.destination = destination.name)`,
			store.Time(now.Add(-keepIdle)), store.Time(now))
		if err != nil {
			return fmt.Errorf("forget destinations: %w", err)
		}
		return nil
	})
}
