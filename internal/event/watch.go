package event

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"postern/internal/store"
)

// A Watch wakes those who wait for events of inboxes. It only wakes: who is
// woken reads the database, and who is not reads it now and then all the same.
// It is safe for concurrent use.
type Watch struct {
	log *slog.Logger
	db  *store.DB

	mu      sync.Mutex
	waiting map[string]map[chan struct{}]bool // by inbox
}

// NewWatch returns a watch of the events in db. What other processes append is
// seen only while [Watch.Run] runs.
func NewWatch(log *slog.Logger, db *store.DB) *Watch {
	return &Watch{log: log, db: db, waiting: map[string]map[chan struct{}]bool{}}
}

// Wait returns a channel that something is sent to when the inbox has new
// events, and what ends that. Read the database after Wait, or what comes in
// between is missed.
func (w *Watch) Wait(inbox string) (rung <-chan struct{}, stop func()) {
	c := make(chan struct{}, 1)
	return c, w.Join(inbox, c)
}

// Join is [Watch.Wait] for who waits for several inboxes with one channel. It
// must have room for one.
func (w *Watch) Join(inbox string, c chan struct{}) (stop func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting[inbox] == nil {
		w.waiting[inbox] = map[chan struct{}]bool{}
	}
	w.waiting[inbox][c] = true
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if delete(w.waiting[inbox], c); len(w.waiting[inbox]) == 0 {
			delete(w.waiting, inbox)
		}
	}
}

// Wake wakes who waits for events of the inbox.
func (w *Watch) Wake(inbox string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wakeLocked(inbox)
}

func (w *Watch) wakeLocked(inbox string) {
	for c := range w.waiting[inbox] {
		select {
		case c <- struct{}{}:
		default: // it is rung already
		}
	}
}

func (w *Watch) idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.waiting) == 0
}

// pollTime is how late what another process appended is seen, at most.
const pollTime = 500 * time.Millisecond

// Run looks for what other processes append, for as long as somebody waits,
// until ctx is done.
func (w *Watch) Run(ctx context.Context) error {
	t := time.NewTicker(pollTime)
	defer t.Stop()
	seen := int64(-1) // nothing yet: everybody is woken once
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		if w.idle() {
			seen = -1
			continue
		}
		if err := w.poll(ctx, &seen); err != nil && ctx.Err() == nil {
			w.log.ErrorContext(ctx, "look for new events", "err", err)
		}
	}
}

func (w *Watch) poll(ctx context.Context, seen *int64) error {
	var inboxes []string
	var head int64
	err := w.db.View(ctx, func(tx *store.Tx) (err error) {
		if *seen < 0 {
			return tx.One(ctx, `select seq from event_head where id = 1`, nil, &head)
		}
		inboxes, head, err = Changed(ctx, tx, *seen)
		return err
	})
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if *seen < 0 {
		for inbox := range w.waiting {
			w.wakeLocked(inbox)
		}
	}
	for _, inbox := range inboxes {
		w.wakeLocked(inbox)
	}
	*seen = head
	return nil
}
