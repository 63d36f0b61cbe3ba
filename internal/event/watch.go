package event

import (
	"context"
	"log/slog"
	"maps"
	"slices"
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

// Wake wakes the goroutines that wait for events of the inbox. It never blocks: a
// channel with a value in it has a wake-up pending.
func (w *Watch) Wake(inbox string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.waiting[inbox] {
		select {
		case c <- struct{}{}:
		default: // a wake-up is pending already
		}
	}
}

// awaited returns the inboxes that somebody waits for, sorted.
func (w *Watch) awaited() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Sorted(maps.Keys(w.waiting))
}

// pollTime is the longest delay after which events of another process are noticed.
const pollTime = 500 * time.Millisecond

// maxSeen bounds the numbers that a [Watch] remembers: those who wait come back soon.
const maxSeen = 10_000

// Run polls for events of other processes, while there are goroutines waiting, until
// ctx is done.
func (w *Watch) Run(ctx context.Context) error {
	t := time.NewTicker(pollTime)
	defer t.Stop()
	seen := map[string]int64{} // numbers by inbox, at the last poll while it was awaited
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		inboxes := w.awaited()
		if len(inboxes) == 0 {
			continue
		}
		heads, err := w.heads(ctx, inboxes)
		if err != nil {
			if ctx.Err() == nil {
				w.log.ErrorContext(ctx, "poll for new events", "err", err)
			}
			continue
		}
		if len(seen) > maxSeen {
			clear(seen)
		}
		for _, inbox := range inboxes {
			// An inbox that was never looked at may have new events: it is woken once.
			if last, ok := seen[inbox]; !ok || heads[inbox] > last {
				w.Wake(inbox)
			}
			seen[inbox] = heads[inbox]
		}
	}
}

// heads returns the numbers of the last events of inboxes.
func (w *Watch) heads(ctx context.Context, inboxes []string) (heads map[string]int64, err error) {
	err = w.db.View(ctx, func(tx *store.Tx) error {
		heads, err = Heads(ctx, tx, inboxes)
		return err
	})
	return heads, err
}
