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

// How pages learn that they are not true any more. A stream asks for what its
// page shows each beat, however many moves there were, so that a flood of
// proposals makes no flood of events; streams of one project share an answer.
const (
	beat       = time.Second
	recheck    = 15 * time.Second // how long a session that has ended still learns that something moved
	longest    = 10 * time.Minute // the browser then asks again
	maxStreams = 24               // of one person
)

// errStreams means that a person watches with too many pages.
var errStreams = errors.New("too many pages of yours are open and watch for changes")

// A pulse is how the queue of a project stood a moment ago.
type pulse struct {
	oversight.QueueMark
	at time.Time
}

// liveHandlers streams changes to open pages.
type liveHandlers struct{ *Server }

func (s liveHandlers) routes() []route {
	return []route{
		{"GET", "/console/events", looks, s.events},
	}
}

// pulse returns how who's queue stands, or stood a moment ago.
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

// A beatEvent is what a stream tells a page.
type beatEvent struct {
	Waiting int    `json:"waiting"`
	Mark    string `json:"mark"` // of what is watched
}

// observe returns how what a page watches stands.
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

// watched returns what a page that shows now is to wait for a change of.
func (s *Server) watched(ctx context.Context, who auth.Principal, watch string) (string, error) {
	if watch == "queue" {
		p, err := s.gate.QueueMark(ctx, who)
		return p.Mark, err
	}
	return s.gate.Mark(ctx, who, watch)
}

// enter counts a stream of who's and returns what ends it.
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

// Close ends the streams, for which a server that shuts down would wait.
func (s *Server) Close() { s.closing.Do(func() { close(s.closed) }) }

// events tells a page, for as long as it is open, how many actions wait and how
// what it watches stands. It carries no content: what has changed is on pages.
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
	w.Header().Set("X-Accel-Buffering", "no") // a proxy between must not collect
	rc := http.NewResponseController(w)
	say := func(text string) error {
		_ = rc.SetWriteDeadline(time.Now().Add(10 * time.Second)) // a reader that is gone without a word
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
			// Signed out, or revoked, meanwhile. And a proxy ends what says nothing.
			if _, err := s.session(r); err != nil || say(": here\n\n") != nil {
				return nil // the status was sent: the stream ends, and the browser asks again
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
