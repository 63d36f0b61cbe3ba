package sandbox

import (
	"context"
	"sync"
	"time"
)

// preparer keeps prepared sandboxes in the runtime, see [Preparer], for all starts from
// memory that somebody waits for: from a snapshot when the pool is empty, from a user's
// snapshot, resumes and forks. The pool itself leaves them to others.
type preparer struct {
	fleet *Fleet
	wake  chan struct{} // holds one element if there may be work

	mu     sync.Mutex
	busy   int       // starts and hand-overs in progress
	last   time.Time // when the last one ended
	wanted bool      // somebody has waited for a start from memory
}

const (
	// prepareLatest is how long starts can put off preparing others.
	prepareLatest = 2 * time.Second
	// prepareAgain is the interval at which the prepared sandboxes are compared with
	// what the template needs, and the pause after an error.
	prepareAgain = 10 * time.Second
)

// begin notes that somebody waits for a sandbox, until the returned function is called.
// Preparing others meanwhile would compete with it for the processors.
func (p *preparer) begin(from source) (end func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy++
	p.wanted = p.wanted || from.dir != "" && !from.files
	return func() {
		p.mu.Lock()
		p.busy--
		p.last = time.Now()
		p.mu.Unlock()
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}
}

// fill keeps sandboxes prepared until ctx is done, then removes them.
func (p *preparer) fill(ctx context.Context) {
	r, ok := p.fleet.runtime.(Preparer)
	if !ok || p.fleet.conf.Prepared == 0 || len(p.fleet.conf.Prepare) == 0 {
		return
	}
	defer func() {
		if _, err := r.Prepare(context.WithoutCancel(ctx), Spec{}, 0); err != nil {
			p.fleet.log.WarnContext(ctx, "remove prepared sandboxes", "err", err)
		}
	}()
	t := time.NewTicker(prepareAgain)
	defer t.Stop()
	for more := true; ctx.Err() == nil; {
		if !more {
			select {
			case <-ctx.Done():
				return
			case <-p.wake:
			case <-t.C:
			}
		}
		if !p.calm(ctx) {
			return
		}
		var err error
		if more, err = p.step(ctx, r); err != nil && ctx.Err() == nil {
			p.fleet.log.WarnContext(ctx, "prepare sandboxes; starts take longer", "err", err)
			select {
			case <-ctx.Done():
			case <-time.After(prepareAgain):
			}
		}
	}
}

// calm returns true when no start has been in progress for refillDelay, or has been put
// off for prepareLatest; false if ctx is done.
func (p *preparer) calm(ctx context.Context) bool {
	for end := time.Now().Add(prepareLatest); ; {
		p.mu.Lock()
		wait := refillDelay - time.Since(p.last)
		if p.busy > 0 {
			wait = refillDelay
		}
		p.mu.Unlock()
		wait = min(wait, time.Until(end))
		if wait <= 0 {
			return ctx.Err() == nil
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(wait):
		}
	}
}

// step prepares one sandbox if there are too few, and reports whether there are still.
func (p *preparer) step(ctx context.Context, r Preparer) (more bool, err error) {
	f := p.fleet
	p.mu.Lock()
	wanted := p.wanted
	p.mu.Unlock()
	if f.conf.Cold && !wanted {
		return false, nil // nothing here starts from memory
	}
	base, err := f.base(ctx, f.conf.Prepare[0])
	if err != nil {
		return false, err
	}
	return r.Prepare(ctx, Spec{
		Rootfs: base.Rootfs, Image: base.Image, CPUs: base.CPUs, MemoryMB: base.MemoryMB, DiskMB: base.DiskMB, Processes: f.conf.Processes,
	}, f.conf.Prepared)
}
