package mailapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"postern/internal/api"
	"postern/internal/event"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/seal"
	"postern/internal/store"
)

// An eventServer serves the events of an inbox and waits for mail.
type eventServer struct {
	access
	watcher

	post *mailbox.PostOffice
}

func (s eventServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/events", 0, s.listEvents},
		{"GET", "/v1/inboxes/{inbox}/messages/wait", 0, s.waitForMessages},
	}
}

const (
	maxWait     = 60               // seconds of a long poll
	lookTime    = 10 * time.Second // polling interval, in case a wake-up is lost
	maxWaiting  = 2000             // who wait at the same time, sockets too
	maxEach     = 32               // of them for one inbox or with one key
	maxPage     = 100              // events of one answer
	maxArrivals = 50               // messages of one answer to a long poll
)

// A crowd counts waiting requests and sockets. The attack: one key that opens
// connections until nobody else can.
type crowd struct {
	mu      sync.Mutex
	all     int
	granted int // of them sockets of grants
	by      map[string]int
}

// enter adds one waiter under name, or returns [errCrowded] if there are most of
// that name already. The caller must call leave when the wait ends.
func (c *crowd) enter(name string, most int) (leave func(), err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all >= maxWaiting || c.by[name] >= most {
		return nil, fmt.Errorf("at most %d at the same time: %w", most, errCrowded)
	}
	c.all++
	c.by[name]++
	return sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.all--
		if c.by[name]--; c.by[name] == 0 {
			delete(c.by, name)
		}
	}), nil
}

// enterSocket is enter for a WebSocket. All keys of one inbox share a limit, since
// a key can make a hundred others. All grants share one too, for the same reason.
func (c *crowd) enterSocket(who caller) (leave func(), err error) {
	if who.Inbox != "" {
		return c.enter("sockets of "+who.Inbox, maxEach)
	}
	one, err := c.enter("sockets of "+who.ID, maxEach)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	full := c.granted >= maxWaiting/2
	if !full {
		c.granted++
	}
	c.mu.Unlock()
	if full {
		one()
		return nil, fmt.Errorf("at most %d of all grants at the same time: %w", maxWaiting/2, errCrowded)
	}
	return sync.OnceFunc(func() {
		one() // not leave, which is this function by then
		c.mu.Lock()
		defer c.mu.Unlock()
		c.granted--
	}), nil
}

// A watcher waits for events of inboxes.
type watcher struct {
	db      *store.DB
	post    *mailbox.PostOffice
	crowd   *crowd
	closing <-chan struct{} // closed when the server stops
}

// await calls look until it finds something, each time that the inbox has new
// events, until ctx is done or the server stops; the end of the time is no
// error. Look may be called when there is nothing new.
func (s watcher) await(ctx context.Context, inbox string, look func() (found bool, err error)) error {
	leave, err := s.crowd.enter(inbox, maxEach)
	if err != nil {
		return err
	}
	defer leave()
	rung, stop := s.post.Events().Wait(inbox)
	defer stop()
	t := time.NewTicker(lookTime)
	defer t.Stop()
	for {
		found, err := look()
		if err != nil || found {
			return err
		}
		select {
		case <-rung:
		case <-t.C:
		case <-s.closing:
			return nil
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return nil
			}
			return ctx.Err()
		}
	}
}

// seconds returns the query's parameter name as a time.
func seconds(q url.Values, name string, unset, most int) (time.Duration, error) {
	if !q.Has(name) {
		return time.Duration(unset) * time.Second, nil
	}
	n, err := strconv.Atoi(q.Get(name))
	if err != nil || n < 0 || n > most {
		return 0, fmt.Errorf("%w: %s: must be 0 to %d seconds", errRequest, name, most)
	}
	return time.Duration(n) * time.Second, nil
}

// A mark is a place in the events of an inbox, as callers hand it back: the
// number of the last event that they have seen.
func mark(seq int64) string { return strconv.FormatInt(seq, 10) }

// after returns the number of the event that v names: what an answer gave as
// after, the id of an event, or that of a message or action. An empty v is the
// newest event, if fresh is said, and else the beginning.
func (s watcher) after(ctx context.Context, inbox, v string, fresh bool) (seq int64, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		switch {
		case v == "" && fresh:
			seq, err = event.Last(ctx, tx, inbox)
		case v == "":
		case idForm().MatchString(v):
			seq, err = event.SeqOf(ctx, tx, inbox, v)
		default:
			seq, err = strconv.ParseInt(v, 10, 64)
			if err != nil || seq < 0 {
				err = store.ErrNotFound
			}
		}
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		return 0, fmt.Errorf("%w: after: must be what the answer before gave, or the id of a message or an event that is kept still", errRequest)
	}
	return seq, err
}

func (s watcher) history(ctx context.Context, inbox string, after int64, limit int, types ...event.Type) (es []event.Event, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		es, err = event.OfInbox(ctx, tx, inbox, after, limit, types...)
		return err
	})
	return es, err
}

// listEvents answers with what happened to an inbox, oldest first.
func (s eventServer) listEvents(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.watched(r, c)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	n, err := limit(q, maxPage, maxPage)
	if err != nil {
		return err
	}
	timeout, err := seconds(q, "timeout", 0, maxWait)
	if err != nil {
		return err
	}
	last, err := s.after(r.Context(), b.ID, q.Get("after"), false)
	if err != nil {
		return err
	}
	es, err := s.history(r.Context(), b.ID, last, n)
	if err == nil && len(es) == 0 && timeout > 0 {
		ctx, cancel := context.WithTimeout(r.Context(), timeout)
		defer cancel()
		err = s.await(ctx, b.ID, func() (bool, error) { //nolint:contextcheck // r's context is what is passed
			es, err = s.history(r.Context(), b.ID, last, n)
			return len(es) > 0, err
		})
		// Checked again: the key may have been revoked during the wait.
		if _, lost := s.watched(r, c); lost != nil {
			return lost
		}
	}
	if err != nil {
		return err
	}
	if len(es) > 0 {
		last = es[len(es)-1].Seq
	}
	answer(w, http.StatusOK, map[string]any{"events": append([]event.Event{}, es...), "after": mark(last)})
	return nil
}

// waitForMessages answers with what arrived after a message or a mark, as soon
// as there is something, and with nothing when the time is over.
func (s eventServer) waitForMessages(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	timeout, err := seconds(q, "timeout", 30, maxWait)
	if err != nil {
		return err
	}
	last, err := s.after(r.Context(), k.Inbox(), q.Get("after"), true)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	out := []api.Message{}
	err = s.await(ctx, k.Inbox(), func() (bool, error) { //nolint:contextcheck // r's context is what is passed
		es, err := s.history(r.Context(), k.Inbox(), last, maxArrivals, event.MessageReceived)
		if err != nil || len(es) == 0 {
			return false, err
		}
		// Checked again: a key that was revoked during the wait must not read.
		k, err := s.open(r, c)
		if err != nil {
			return false, err
		}
		last = es[len(es)-1].Seq
		ms, err := s.arrived(r.Context(), c, k, es)
		for _, m := range ms {
			out = append(out, messageOf(m))
		}
		return len(out) > 0, err
	})
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.Arrivals{Messages: out, After: mark(last)})
	return nil
}

// arrived returns the messages that events are about, but for those that are
// not there any more.
func (s watcher) arrived(ctx context.Context, c caller, k *seal.Key, es []event.Event) (out []message.Message, err error) {
	for _, e := range es {
		m, err := s.post.Listed(ctx, c.Principal, k, e.Object)
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}
