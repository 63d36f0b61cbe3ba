package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// PoolConfig bounds the sandboxes that are restored before anybody asks for
// them, so that a create finds one that waits. The zero PoolConfig has none.
type PoolConfig struct {
	Min      int   // that wait at all times
	Max      int   // that wait when many are asked for
	MemoryMB int64 // mebibytes that those that wait may take of this machine together, whatever Min says
}

func (p PoolConfig) check() error {
	if p.Min < 0 || p.Max < p.Min || p.MemoryMB < 0 {
		return errors.New("sandbox: the pool's limits are negative, or its least is over its most")
	}
	return nil
}

// A pool is the sandboxes that wait. They belong to nobody, may connect to
// nothing and have never run anything but what the template starts.
type pool struct {
	wake chan struct{} // holds one element if there may be work

	mu    sync.Mutex
	warm  []*warmSandbox // oldest first
	takes []time.Time    // when one was asked for, in the last demandWindow
}

// A warmSandbox waits, claimed, to be handed over.
type warmSandbox struct {
	ctx    context.Context // of its claim
	live   *liveSandbox
	key    string // of its template
	memory int64  // bytes that it takes
}

// demandWindow is how far back demand is looked at: the pool is as large as the
// number of sandboxes asked for in it, within its limits.
const demandWindow = 10 * time.Second

func (p *pool) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// takeWarm returns a sandbox of a template that waits, or nil.
func (f *Fleet) takeWarm(key string) *warmSandbox {
	p := &f.pool
	defer p.poke()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.takes = append(p.takes, time.Now())
	if over := len(p.takes) - f.conf.Pool.Max - 1; over > 0 {
		p.takes = slices.Delete(p.takes, 0, over) // more would change nothing
	}
	for i, w := range p.warm {
		if w.key == key && !f.died(w.live) {
			p.warm = slices.Delete(p.warm, i, i+1)
			return w
		}
	}
	return nil
}

// handOver makes a sandbox that waited the one that s describes.
func (f *Fleet) handOver(ctx context.Context, l *liveSandbox, s Info, body initBody) error {
	ctx, cancel := context.WithTimeout(ctx, f.conf.StartTimeout/firstShare) // the caller can start another
	defer cancel()
	ctx, done := f.untilDeath(ctx, l)
	defer done()
	f.mu.Lock()
	l.since, l.traffic = time.Now(), s.Options.Traffic
	f.mu.Unlock()
	// Its rules first: nothing of a user's runs before the guest is told.
	if err := f.network.Update(ctx, s.Principal(), s.Egress); err != nil {
		return fmt.Errorf("hand over link: %w", err)
	}
	return f.initGuest(ctx, s, s.ID, body)
}

// fillPool keeps the pool as it should be until ctx is done, then empties it.
func (f *Fleet) fillPool(ctx context.Context) {
	t := time.NewTicker(demandWindow / 4)
	defer t.Stop()
	defer f.emptyPool(context.WithoutCancel(ctx))
	for ctx.Err() == nil {
		if f.poolStep(ctx) {
			continue // there may be more to do
		}
		select {
		case <-ctx.Done():
		case <-f.pool.wake:
			f.letOwnersBegin(ctx)
		case <-t.C:
		}
	}
}

// refillAfter is how long the pool is not refilled after one was taken, as long
// as another waits: its owner is about to run something, and a restore at the
// same moment would take the processors from that.
const refillAfter = 250 * time.Millisecond

func (f *Fleet) letOwnersBegin(ctx context.Context) {
	f.pool.mu.Lock()
	waiting := len(f.pool.warm)
	f.pool.mu.Unlock()
	if waiting == 0 {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(refillAfter):
	}
}

// poolStep adds or removes one sandbox if that is wanted, and reports whether
// it did.
func (f *Fleet) poolStep(ctx context.Context) bool {
	t := f.poolTemplate()
	if t == nil {
		return false
	}
	p := &f.pool
	p.mu.Lock()
	p.takes = slices.DeleteFunc(p.takes, func(at time.Time) bool { return time.Since(at) > demandWindow })
	want := min(max(f.conf.Pool.Min, len(p.takes)), f.conf.Pool.Max)
	have := len(p.warm)
	var held, largest int64
	for _, w := range p.warm {
		held, largest = held+w.memory, max(largest, w.memory)
	}
	limit := f.conf.Pool.MemoryMB << 20
	var surplus *warmSandbox
	for i, w := range p.warm {
		if have > want || held > limit || f.died(w.live) || w.key != t.base.Key {
			surplus = w
			p.warm = slices.Delete(p.warm, i, i+1)
			break
		}
	}
	p.mu.Unlock()
	switch {
	case surplus != nil:
		f.dismiss(ctx, surplus)
		return true
	case have >= want || held+largest > limit:
		return false
	}
	w, err := f.warmUp(ctx, t)
	if err != nil {
		if ctx.Err() == nil {
			f.log.WarnContext(ctx, "fill the pool of waiting sandboxes", "err", err)
			f.dropTemplateSnapshot(ctx, t.base.Key)
		}
		return false
	}
	if held+w.memory > limit {
		// The first one shows what one takes. None fits: none is tried again
		// before the next demand.
		f.log.WarnContext(ctx, "a waiting sandbox takes more memory than the pool may have", "mebibytes", w.memory>>20, "limit", f.conf.Pool.MemoryMB)
		f.dismiss(ctx, w)
		return false
	}
	p.mu.Lock()
	p.warm = append(p.warm, w)
	p.mu.Unlock()
	return true
}

// poolTemplate is the template whose sandboxes wait: the first of those that
// are prepared, if its snapshot is there.
func (f *Fleet) poolTemplate() *templateSnapshot {
	f.templates.mu.Lock()
	defer f.templates.mu.Unlock()
	for _, t := range f.templates.all {
		if slices.Index(f.conf.Prepare, t.template) == 0 && t.from.dir != "" {
			c := *t
			return &c
		}
	}
	return nil
}

// warmUp restores a sandbox that belongs to nobody.
func (f *Fleet) warmUp(ctx context.Context, t *templateSnapshot) (_ *warmSandbox, err error) {
	s := f.nobodys(t.template)
	work, l, err := f.claim(ctx, s.ID)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, l.cancel)
	defer stop()
	ctx = work
	w := &warmSandbox{ctx: ctx, live: l, key: t.base.Key}
	defer func() {
		if err != nil {
			f.dismiss(ctx, w)
		}
	}()
	if err := f.bringUp(ctx, l, s, t.base, t.from, initBody{EnvVars: environment(nil)}); err != nil {
		return nil, err
	}
	f.warmGuest(ctx, s.ID)
	u, err := f.runtime.Usage(ctx, s.ID)
	w.memory = u.Memory
	return w, err
}

// dismiss ends a sandbox that nobody needs.
func (f *Fleet) dismiss(ctx context.Context, w *warmSandbox) {
	ctx = context.WithoutCancel(ctx)
	if err := f.takeDown(ctx, w.live); err != nil {
		f.log.WarnContext(ctx, "end a waiting sandbox", "sandbox", w.live.id, "err", err)
	}
	f.release(w.live)
}

func (f *Fleet) emptyPool(ctx context.Context) {
	f.pool.mu.Lock()
	all := f.pool.warm
	f.pool.warm = nil
	f.pool.mu.Unlock()
	var wg sync.WaitGroup
	for _, w := range all {
		wg.Go(func() { f.dismiss(ctx, w) })
	}
	wg.Wait()
}
