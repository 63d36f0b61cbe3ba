package event

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"postern/internal/store"
)

// A Watch wakes goroutines that wait for events of inboxes. It carries no data: a
// woken goroutine reads the database, and should also poll it at long intervals. It
// is safe for concurrent use.
type Watch struct {
	log *slog.Logger
	db  *store.DB

	mu      sync.Mutex
	waiting map[string]map[chan struct{}]bool // by inbox
}

// NewWatch returns a watch of the events in db. It notices events of other processes
// only while [Watch.Run] runs.
func NewWatch(log *slog.Logger, db *store.DB) *Watch {
	return &Watch{log: log, db: db, waiting: map[string]map[chan struct{}]bool{}}
}

// Wait returns a channel that receives a value when the inbox has new events, and a
// function that ends this. Call it before reading the database: events in between
// would be missed otherwise.
func (w *Watch) Wait(inbox string) (rung <-chan struct{}, stop func()) {
	c := make(chan struct{}, 1)
	return c, w.Join(inbox, c)
}

// Join is [Watch.Wait] with a channel of the caller, which may be used for several
// inboxes. Its capacity must be at least 1.
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

// Wake wakes the goroutines that wait for events of the inbox.
func (w *Watch) Wake(inbox string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wakeLocked(inbox)
}

// wakeLocked sends to the channels of an inbox. It never blocks: a channel with a
// value in it has a wake-up pending.
func (w *Watch) wakeLocked(inbox string) {
	for c := range w.waiting[inbox] {
		select {
		case c <- struct{}{}:
		default: // a wake-up is pending already
		}
	}
}

// idle reports whether nobody waits, so that there is nothing to poll for.
func (w *Watch) idle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.waiting) == 0
}

// pollTime is the longest delay after which events of another process are noticed.
const pollTime = 500 * time.Millisecond

// Run polls for events of other processes, while there are goroutines waiting, until
// ctx is done.
func (w *Watch) Run(ctx context.Context) error {
	t := time.NewTicker(pollTime)
	defer t.Stop()
	seen := int64(-1) // not known: the first poll wakes all once
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
			w.log.ErrorContext(ctx, "poll for new events", "err", err)
		}
	}
}

// poll wakes the inboxes with events above seen, and sets seen to the newest. If
// seen is negative it wakes all, since events may have been missed.
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
