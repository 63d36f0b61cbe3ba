package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"postern/internal/auth"
	"postern/internal/tracing"
)

// A liveSandbox is the state in memory of a sandbox that runs on this machine or
// whose state is being changed. Whoever changes the state holds the claim.
// Everybody else reads only fields that Fleet.mu guards.
type liveSandbox struct {
	id    string
	claim chan struct{} // a semaphore of one: holds an element while the sandbox is claimed
	gone  chan struct{} // closed when this is no longer in Fleet.live

	// Written by the holder of the claim, under Fleet.mu.
	up      bool                    // the machine's part exists, at least partly
	mounted bool                    // it has volumes
	spent   func()                  // takes down what is up and has been saved, see release; nil if it has not
	ready   bool                    // the guest has been initialised, so others may dial
	since   time.Time               // when it was started
	bench   context.CancelCauseFunc // ends it if it is a bench; else nil. Written once, with the claim
	traffic Traffic                 // how its ports may be reached
	// processes is the contract's limit on processes and threads; 0 means none.
	processes int64
	watcher   *watcher           // judges its commands; nil if a previous server started it
	run       context.CancelFunc // stops the watch over the machine's part

	// Written by the watch under Fleet.mu, when the sandbox has ended unasked.
	dead    bool
	onDeath context.CancelCauseFunc // cancels the wait for the guest; nil while nobody waits

	// Guarded by Fleet.mu.
	ending int                // callers that wait to end it
	cancel context.CancelFunc // cancels the work of the claim's holder
}

// claim gives the caller the exclusive right to change the state of a sandbox. It
// waits while somebody else has it, until ctx is done. The returned context is for
// the work. It is canceled when somebody wants to end the sandbox, but not when ctx
// is: a caller that disconnects must not leave a change of state half done. Claim
// does not look at rows, so id need not exist.
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
		if f.live[id] != l { // it was removed while we waited
			f.mu.Unlock()
			<-l.claim
			continue
		}
		work, cancel := context.WithCancel(context.WithoutCancel(ctx))
		if l.ending > 0 {
			cancel() // somebody waits to end it
		}
		l.cancel = cancel
		f.mu.Unlock()
		return work, l, nil
	}
}

// claimFor is claim for a sandbox of who's project. The returned Info was read
// after the claim.
func (f *Fleet) claimFor(ctx context.Context, who auth.Principal, id string) (context.Context, *liveSandbox, Info, error) {
	// Check before waiting, so that one project cannot wait on another's sandbox.
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
	tracing.About(work, s.Project, s.ID)
	return work, l, s, nil
}

// release gives a claim back, and forgets the sandbox if nothing of it runs. The
// machine's part of a paused sandbox is taken down first, in the background: whoever
// claims the sandbox next waits for that, but not the caller that paused it. If the
// server is killed meanwhile, [Fleet.Recover] finds a paused sandbox's processes and
// removes them.
func (f *Fleet) release(l *liveSandbox) {
	f.mu.Lock()
	l.cancel()
	if end := l.spent; end != nil {
		f.mu.Unlock()
		f.workers.Go(func() {
			end()
			f.release(l)
		})
		return
	}
	if !l.up {
		delete(f.live, l.id)
		close(l.gone)
	}
	f.mu.Unlock()
	<-l.claim
}

// claimToEnd is claim for a caller that ends the sandbox. It cancels the work of
// the present holder. The caller's own context does not matter: an end is carried
// out even if the caller disconnects.
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
		// Our turn has come. The caller may still decide not to end the sandbox,
		// and then others must be able to work on it.
		f.mu.Lock()
		was.ending--
		f.mu.Unlock()
	}
	return l, err
}

// setReady allows or forbids others to dial a sandbox.
func (f *Fleet) setReady(l *liveSandbox, ready bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l.ready = ready
}

// trafficOf returns how the ports of a sandbox may be reached.
func trafficOf(s Info) Traffic {
	t := s.Options.Traffic
	t.Contract = s.Contract
	return t
}

// Traffic returns how the ports of a sandbox may be reached, also of a paused one.
// It returns false for a sandbox that has ended.
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
	t := trafficOf(s)
	t.Asleep = s.State == Paused && !s.Restart
	return t, true
}

// untilDeathOf calls cancel when the claimed sandbox dies, until done is called.
func (f *Fleet) untilDeathOf(l *liveSandbox, cancel context.CancelCauseFunc) (done func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l.onDeath = cancel
	if l.dead {
		cancel(errDied)
	}
	return func() {
		f.mu.Lock()
		l.onDeath = nil
		f.mu.Unlock()
	}
}

// untilDeath returns a context that is canceled when the claimed sandbox dies, so
// that nobody waits for the guest of a dead sandbox.
func (f *Fleet) untilDeath(ctx context.Context, l *liveSandbox) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := f.untilDeathOf(l, cancel)
	return ctx, func() {
		done()
		cancel(nil)
	}
}

// errDied is the cause of a context for a sandbox that was dead already.
var errDied = errors.New("the sandbox has ended")

// died reports whether a sandbox has ended unasked.
func (f *Fleet) died(l *liveSandbox) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return l.dead
}
