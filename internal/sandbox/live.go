package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"postern/internal/auth"
)

// A liveSandbox is what memory holds of a sandbox that has a part on this
// machine, or whose state is being changed. Whoever changes its state has
// claimed it; others read only what Fleet.mu guards.
type liveSandbox struct {
	id    string
	claim chan struct{} // holds one element while someone has claimed it
	gone  chan struct{} // closed when this is no longer in Fleet.live

	// Written by who has claimed it, under Fleet.mu.
	up      bool               // the machine's part is there
	mounted bool               // it has volumes
	ready   bool               // the guest has been told who it is, so others may dial
	since   time.Time          // when it came up
	traffic Traffic            // how its ports may be reached
	run     context.CancelFunc // ends the watch over the machine's part

	// Written by its watch under Fleet.mu, when it has ended by itself.
	dead    bool
	onDeath context.CancelCauseFunc // of whoever waits for its guest

	// Guarded by Fleet.mu.
	ending int                // how many wait to end it
	cancel context.CancelFunc // of the claimer's work
}

// claim takes a sandbox for the caller alone, and waits while someone else has
// it, as long as ctx allows. The context that it returns is for the work: it
// ends when somebody wants to end the sandbox, and not with ctx, so that a
// caller who leaves does not leave a change of state half done. claim knows
// nothing of rows: what is claimed need not exist.
func (f *Fleet) claim(ctx context.Context, id string) (context.Context, *liveSandbox, error) {
	for {
		f.mu.Lock()
		l := f.live[id]
		if l == nil && f.closed {
			f.mu.Unlock()
			return nil, nil, fmt.Errorf("%w: sandbox %s: the server is stopping", ErrBusy, id)
		}
		if l == nil {
			l = &liveSandbox{id: id, claim: make(chan struct{}, 1), gone: make(chan struct{})}
			f.live[id] = l
		}
		f.mu.Unlock()
		select {
		case l.claim <- struct{}{}:
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("%w: sandbox %s", ErrBusy, id)
		}
		f.mu.Lock()
		if f.live[id] != l { // it went while we waited
			f.mu.Unlock()
			<-l.claim
			continue
		}
		work, cancel := context.WithCancel(context.WithoutCancel(ctx))
		if l.ending > 0 {
			cancel() // who ends it is waiting for its turn
		}
		l.cancel = cancel
		f.mu.Unlock()
		return work, l, nil
	}
}

// claimFor is claim for who, whose project's the sandbox must be. What it
// returns of the sandbox is as it was when it was claimed.
func (f *Fleet) claimFor(ctx context.Context, who auth.Principal, id string) (context.Context, *liveSandbox, Info, error) {
	// First without waiting for a sandbox that is another's.
	if _, err := f.Get(ctx, who, id); err != nil {
		return nil, nil, Info{}, err
	}
	work, l, err := f.claim(ctx, id)
	if err != nil {
		return nil, nil, Info{}, err
	}
	s, err := f.Get(work, who, id)
	if err != nil {
		f.release(l)
		return nil, nil, Info{}, err
	}
	return work, l, s, nil
}

// release gives a claimed sandbox back.
func (f *Fleet) release(l *liveSandbox) {
	f.mu.Lock()
	l.cancel()
	if !l.up {
		delete(f.live, l.id)
		close(l.gone)
	}
	f.mu.Unlock()
	<-l.claim
}

// claimToEnd is claim for who ends the sandbox: work on it is broken off, and
// the caller's own leaving breaks nothing off.
func (f *Fleet) claimToEnd(ctx context.Context, id string) (*liveSandbox, error) {
	f.mu.Lock()
	was := f.live[id]
	if was != nil {
		was.ending++
		if was.cancel != nil {
			was.cancel()
		}
	}
	f.mu.Unlock()
	_, l, err := f.claim(context.WithoutCancel(ctx), id)
	if was != nil {
		// Its turn has come. It may yet find that it should not end, and then
		// others must be able to work on it.
		f.mu.Lock()
		was.ending--
		f.mu.Unlock()
	}
	return l, err
}

// setReady lets others dial a sandbox, or no longer.
func (f *Fleet) setReady(l *liveSandbox, ready bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l.ready = ready
}

// Traffic returns how the ports of a sandbox may be reached, also of one that
// is paused. It is false for one that has ended.
func (f *Fleet) Traffic(id string) (Traffic, bool) {
	f.mu.Lock()
	if l := f.live[id]; l != nil && l.ready {
		defer f.mu.Unlock()
		return l.traffic, true
	}
	f.mu.Unlock()
	s, err := f.rows.row(f.background, id)
	if err != nil || !slices.Contains(alive, s.State) {
		return Traffic{}, false
	}
	return s.Options.Traffic, true
}

// untilDeath returns a context that ends when the machine's part of a claimed
// sandbox does, so that nobody waits for a guest that is no more.
func (f *Fleet) untilDeath(ctx context.Context, l *liveSandbox) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	f.mu.Lock()
	defer f.mu.Unlock()
	l.onDeath = cancel
	if l.dead {
		cancel(errDied)
	}
	return ctx, func() {
		f.mu.Lock()
		l.onDeath = nil
		f.mu.Unlock()
		cancel(nil)
	}
}

// errDied is the end of a sandbox that ended before it could be waited for.
var errDied = errors.New("the sandbox has ended")

// died reports whether the machine's part of a sandbox has ended by itself.
func (f *Fleet) died(l *liveSandbox) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return l.dead
}
