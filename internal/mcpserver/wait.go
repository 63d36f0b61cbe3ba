package mcpserver

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"postern/internal/event"
	"postern/internal/message"
	"postern/internal/store"
)

const (
	maxWaiting     = 1000             // concurrent waiting calls
	maxWaitingEach = 4                // of one caller
	lookTime       = 5 * time.Second  // polling interval, in case a wake-up is lost
	tellTime       = 10 * time.Second // between two progress notices
	maxArrivals    = 20               // messages of one answer
)

var errCrowded = fmt.Errorf("too many calls wait already: at most %d of one caller at the same time; let one end, or ask without waiting", maxWaitingEach)

// waiting returns how long to wait at most.
func waiting(field string, seconds int) (time.Duration, error) {
	if seconds < 0 || seconds > maxWait {
		return 0, fmt.Errorf("%w: %s: must be 0 to %d", errArgument, field, maxWait)
	}
	return time.Duration(seconds) * time.Second, nil
}

// progressOf returns a function that tells the caller of req how far its call
// has come, if it asked to be told.
func progressOf(req *mcp.CallToolRequest) func(ctx context.Context, done, total float64, message string) {
	token := req.Params.GetProgressToken()
	if token == nil || req.Session == nil {
		return nil
	}
	return func(ctx context.Context, done, total float64, message string) {
		// A lost progress notice is harmless: the answer follows.
		_ = req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: done, Total: total, Message: message})
	}
}

// await calls look until it finds something: each time that the inbox has new
// events, and now and then. The end of the time is no error. It ends early if
// the caller leaves or the server stops.
func (s *Server) await(ctx context.Context, c caller, inbox string, most time.Duration, look func() (found bool, err error)) error {
	leave, err := s.enter(c.who.String())
	if err != nil {
		return err
	}
	defer leave()
	rung, stop := s.post.Events().Wait(inbox)
	defer stop()
	begin := time.Now()
	end := time.NewTimer(most)
	defer end.Stop()
	again := time.NewTicker(lookTime)
	defer again.Stop()
	tell := time.NewTicker(tellTime)
	defer tell.Stop()
	if c.progress != nil {
		c.progress(ctx, 0, most.Seconds(), "waiting")
	}
	for {
		found, err := look()
		if err != nil || found {
			return err
		}
		select {
		case <-rung:
		case <-again.C:
		case <-tell.C:
			if c.progress != nil {
				c.progress(ctx, time.Since(begin).Seconds(), most.Seconds(), "still waiting")
			}
		case <-end.C:
			return nil
		case <-s.closing:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// enter counts one more call that waits as name, until leave is called.
func (s *Server) enter(name string) (leave func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waits >= maxWaiting || s.waiting[name] >= maxWaitingEach {
		return nil, errCrowded
	}
	s.waits++
	s.waiting[name]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.waits--
		if s.waiting[name]--; s.waiting[name] == 0 {
			delete(s.waiting, name)
		}
	}, nil
}

type waitArgs struct {
	Inbox   string `json:"inbox"`
	After   string `json:"after"`
	Timeout *int   `json:"timeoutSeconds"`
}

type arrivedData struct {
	inboxData
	After    string `json:"after" jsonschema:"give it as after to the next call, and no message is missed"`
	TimedOut bool   `json:"timedOut"`
}

// waitForEmail answers with what arrived after a mark or a message, as soon as
// there is something, and with nothing when the time is over.
func (s *Server) waitForEmail(ctx context.Context, c caller, in waitArgs) (out reply[arrivedData], err error) {
	seconds := 30
	if in.Timeout != nil {
		seconds = *in.Timeout
	}
	most, err := waiting("timeoutSeconds", seconds)
	if err != nil {
		return out, err
	}
	k, err := c.key(ctx, in.Inbox)
	if err != nil {
		return out, err
	}
	last, err := s.mark(ctx, k.Inbox(), in.After)
	if err != nil {
		return out, err
	}
	var ms []message.Message
	more := false
	err = s.await(ctx, c, k.Inbox(), most, func() (bool, error) {
		var es []event.Event
		err := s.db.View(ctx, func(tx *store.Tx) (err error) {
			es, err = event.OfInbox(ctx, tx, k.Inbox(), last, maxArrivals, event.MessageReceived)
			return err
		})
		if err != nil || len(es) == 0 {
			return false, err
		}
		// Opened anew: who lost its key while it waited reads nothing any more.
		k, err := c.key(ctx, in.Inbox)
		if err != nil {
			return false, err
		}
		last, more = es[len(es)-1].Seq, len(es) == maxArrivals
		for _, e := range es {
			m, err := s.post.Listed(ctx, c.who, k, e.Object)
			if errors.Is(err, store.ErrNotFound) { // it is gone already
				continue
			}
			if err != nil {
				return false, err
			}
			ms = append(ms, m)
		}
		return len(ms) > 0, nil
	})
	if err != nil {
		return out, err
	}
	after := fmt.Sprintf("evt:%d", last)
	head := fmt.Sprintf("%d messages arrived, oldest first. To wait for more call wait_for_email with after %q.", len(ms), after)
	if len(ms) == 0 {
		head = fmt.Sprintf("Nothing arrived in %d seconds. To wait on call wait_for_email with after %q.", seconds, after)
	}
	l := listing(ms, head, more)
	out.Text, out.Data = l.Text, arrivedData{l.Data, after, len(ms) == 0}
	return out, nil
}

// mark returns the number of the event that after names: what an answer gave,
// or a message. Empty is the newest event.
func (s *Server) mark(ctx context.Context, inbox, after string) (seq int64, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		switch {
		case after == "":
			seq, err = event.Last(ctx, tx, inbox)
		case idForm().MatchString(after):
			seq, err = event.SeqOf(ctx, tx, inbox, after)
		default:
			number, ok := strings.CutPrefix(after, "evt:")
			if seq, err = strconv.ParseInt(number, 10, 64); !ok || err != nil || seq < 0 {
				err = store.ErrNotFound
			}
		}
		return err
	})
	if errors.Is(err, store.ErrNotFound) {
		return 0, fmt.Errorf("%w: after: must be what the answer before gave, or the id of a message that arrived not long ago", errArgument)
	}
	return seq, err
}
