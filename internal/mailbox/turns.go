package mailbox

import (
	"context"
	"sync"
)

// Turns let a few work at a time, and nobody take every place. The attack: one
// inbox's connections that read slowly, or come by the thousand, while all
// others wait behind them. Turns are safe for concurrent use.
type Turns struct {
	all  chan struct{}
	each int

	mu sync.Mutex // guards by
	by map[string]*line
}

// A line is who works, or waits to, under one name.
type line struct {
	places chan struct{}
	n      int
}

// NewTurns returns turns of which most are taken at a time, and each by one name.
func NewTurns(most, each int) *Turns {
	return &Turns{all: make(chan struct{}, most), each: each, by: map[string]*line{}}
}

// Take waits for a turn until ctx is done. Done must be called at its end, and
// may be again.
func (t *Turns) Take(ctx context.Context, name string) (done func(), err error) {
	t.mu.Lock()
	l := t.by[name]
	if l == nil {
		l = &line{places: make(chan struct{}, t.each)}
		t.by[name] = l
	}
	l.n++
	t.mu.Unlock()
	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if l.n--; l.n == 0 {
			delete(t.by, name)
		}
	}
	select {
	case l.places <- struct{}{}:
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
	select {
	case t.all <- struct{}{}:
	case <-ctx.Done():
		<-l.places
		leave()
		return nil, ctx.Err()
	}
	return sync.OnceFunc(func() {
		<-t.all
		<-l.places
		leave()
	}), nil
}

// How many large messages are in memory at a time, each of them several times:
// sealed, opened, decoded.
const (
	maxReading     = 6
	maxReadingEach = 2 // of one inbox
)

// Reading waits until a message of an inbox may be read as a whole; call done
// when its bytes are not needed any more. It is for all doors together.
func (m *PostOffice) Reading(ctx context.Context, inbox string) (done func(), err error) {
	return m.reading.Take(ctx, inbox)
}
