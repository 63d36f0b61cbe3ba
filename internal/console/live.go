package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/store"
)

// Pages learn over server-sent events that they are out of date. Each stream
// polls once per beat, however many changes there were, so that a flood of
// proposals cannot cause a flood of events. Streams of a project share a poll.
const (
	beat       = time.Second
	recheck    = 15 * time.Second // longest time for which an ended session still gets events
	longest    = 10 * time.Minute // lifetime of a stream; the browser then reconnects
	maxStreams = 24               // concurrent streams per person
)

// errStreams means that too many pages of a person watch for changes.
var errStreams = errors.New("too many open pages watch for changes")

// A pulse is the cached mark of a project's queue.
type pulse struct {
	oversight.QueueMark
	at time.Time
}

// liveHandlers streams changes to open pages.
type liveHandlers struct{ *Server }

func (s liveHandlers) routes() []route {
	return []route{
		{"GET", "/console/events", views, s.events},
	}
}

// pulse returns the mark of who's queue, at most age old.
func (s liveHandlers) pulse(ctx context.Context, who auth.Principal, age time.Duration) (oversight.QueueMark, error) {
	s.mu.Lock()
	p, ok := s.pulses[who.Project]
	s.mu.Unlock()
	if ok && time.Since(p.at) < age {
		return p.QueueMark, nil
	}
	fresh, err := s.gate.QueueMark(ctx, who)
	if err != nil {
		return oversight.QueueMark{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pulses[who.Project] = pulse{fresh, time.Now()}
	return fresh, nil
}

// A beatEvent is an event that a stream sends to a page.
type beatEvent struct {
	Waiting int    `json:"waiting"`
	Mark    string `json:"mark"` // of what is watched
}

// observe returns the current event for a page that watches watch.
func (s liveHandlers) observe(ctx context.Context, who auth.Principal, watch string) (beatEvent, error) {
	p, err := s.pulse(ctx, who, beat/2)
	if err != nil {
		return beatEvent{}, err
	}
	e := beatEvent{p.Waiting, ""}
	switch watch {
	case "":
	case "queue":
		e.Mark = p.Mark
	default:
		if e.Mark, err = s.gate.Mark(ctx, who, watch); err != nil {
			return beatEvent{}, err
		}
	}
	return e, nil
}

// watched returns the mark that a page rendered now compares events with. It is
// never cached, so that a page does not miss a change made while it renders.
func (s *Server) watched(ctx context.Context, who auth.Principal, watch string) (string, error) {
	if watch == "queue" {
		p, err := s.gate.QueueMark(ctx, who)
		return p.Mark, err
	}
	return s.gate.Mark(ctx, who, watch)
}

// enter reserves one of who's streams and returns the function that frees it.
func (s liveHandlers) enter(who auth.Principal) (func(), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := who.Project + " " + who.ID
	if s.live[key] >= maxStreams {
		return nil, errStreams
	}
	s.live[key]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.live[key]--; s.live[key] == 0 {
			delete(s.live, key)
		}
	}, nil
}

// Close ends the streams. A server that shuts down would wait for them otherwise.
func (s *Server) Close() { s.closing.Do(func() { close(s.closed) }) }

// events streams to an open page the number of waiting actions and the mark of
// what the page watches. It carries no content; pages fetch that themselves.
func (s liveHandlers) events(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx, watch := r.Context(), r.URL.Query().Get("watch")
	if watch != "" && watch != "queue" && !actionID().MatchString(watch) {
		return fmt.Errorf("%w: watch must be queue or the id of an action", errForm)
	}
	leave, err := s.enter(who)
	if err != nil {
		return err
	}
	defer leave()
	now, err := s.observe(ctx, who, watch)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // keep proxies from buffering the stream
	rc := http.NewResponseController(w)
	say := func(text string) error {
		_ = rc.SetWriteDeadline(time.Now().Add(10 * time.Second)) // detect clients that vanished
		if _, err := fmt.Fprint(w, text); err != nil {
			return err
		}
		return rc.Flush()
	}
	tell := func(e beatEvent) error {
		b, err := json.Marshal(e)
		if err != nil {
			return err
		}
		return say("data: " + string(b) + "\n\n")
	}
	if say("retry: 3000\n\n") != nil || tell(now) != nil {
		return nil // the browser is gone
	}
	t := time.NewTicker(beat)
	defer t.Stop()
	for begun, checked := time.Now(), time.Now(); time.Since(begun) < longest; {
		select {
		case <-ctx.Done():
			return nil
		case <-s.closed:
			return nil
		case <-t.C:
		}
		if time.Since(checked) > recheck {
			// The session may have ended. The comment line keeps proxies from closing
			// an idle connection.
			if _, err := s.session(r); err != nil || say(": here\n\n") != nil {
				return nil // the status is already sent: end the stream, and the browser reconnects
			}
			checked = time.Now()
		}
		e, err := s.observe(ctx, who, watch)
		if err != nil {
			if ctx.Err() == nil && !errors.Is(err, store.ErrNotFound) {
				s.log.ErrorContext(ctx, "watch for changes", "err", err)
			}
			return nil // as above
		}
		if e != now {
			if now = e; tell(e) != nil {
				return nil
			}
		}
	}
	return nil
}
