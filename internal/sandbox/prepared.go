package sandbox

import (
	"context"
	"slices"
	"sync"
	"time"
)

// preparer keeps prepared sandboxes in the runtime, see [Preparer], for all starts from
// memory that somebody waits for: from a snapshot when the pool is empty, from a user's
// snapshot, resumes and forks. The pool itself leaves them to others.
//
// They follow demand: one fits each of the last starts. Where there were too few starts
// they fit the first template.
type preparer struct {
	fleet *Fleet
	wake  chan struct{} // holds one element if there may be work

	mu     sync.Mutex
	busy   int          // starts and hand-overs in progress
	last   time.Time    // when the last one ended
	recent []recentSpec // of the last starts from memory, at most conf.Prepared, the oldest first
}

// A recentSpec is what a sandbox must be like that could have been used at a time.
type recentSpec struct {
	spec Spec
	at   time.Time
}

const (
	// prepareLatest is how long starts can put off preparing others.
	prepareLatest = 2 * time.Second
	// prepareAgain is the interval at which the prepared sandboxes are compared with
	// what the template needs, and the pause after an error.
	prepareAgain = 10 * time.Second
	// preparedWindow is how long a start counts. It bounds how long the files of a
	// template that was deleted stay on the disk.
	preparedWindow = 10 * time.Minute
)

// frame returns the part of a sandbox's Spec that must fit a prepared one.
func (f *Fleet) frame(base Base, cpus float64, memoryMB, diskMB int64) Spec {
	return Spec{Rootfs: base.Rootfs, Image: base.Image, CPUs: cpus, MemoryMB: memoryMB, DiskMB: diskMB, Processes: f.conf.Processes}
}

// use notes that somebody waits for a start that could use a prepared sandbox with the
// frame s.
func (p *preparer) use(s Spec) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.recent = append(p.recent, recentSpec{s, time.Now()})
	if over := len(p.recent) - p.fleet.conf.Prepared; over > 0 {
		p.recent = slices.Delete(p.recent, 0, over)
	}
}

// begin notes that somebody waits for a sandbox, until the returned function is called.
// Preparing others meanwhile would compete with it for the processors.
func (p *preparer) begin() (end func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.busy++
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
		if _, err := r.Prepare(context.WithoutCancel(ctx), nil); err != nil {
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
	var specs []Spec
	p.mu.Lock()
	p.recent = slices.DeleteFunc(p.recent, func(r recentSpec) bool { return time.Since(r.at) > preparedWindow })
	for _, r := range slices.Backward(p.recent) {
		specs = append(specs, r.spec)
	}
	p.mu.Unlock()
	if f.conf.Cold && len(specs) == 0 {
		return r.Prepare(ctx, nil) // nothing here starts from memory
	}
	if lacking := f.conf.Prepared - len(specs); lacking > 0 {
		base, err := f.base(ctx, f.conf.Prepare[0])
		if err != nil {
			return false, err
		}
		first := f.frame(base, base.CPUs, base.MemoryMB, base.DiskMB)
		specs = append(specs, slices.Repeat([]Spec{first}, lacking)...)
	}
	if more, err = r.Prepare(ctx, specs); err != nil && p.forget() {
		f.log.InfoContext(ctx, "prepare sandboxes of the first template only", "err", err)
		return true, nil
	}
	return more, err
}

// forget forgets the last starts, since the template of one may have been deleted, and
// reports whether there were any.
func (p *preparer) forget() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	had := len(p.recent) > 0
	p.recent = nil
	return had
}
