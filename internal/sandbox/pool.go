package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// PoolConfig bounds the pooled sandboxes: restored in advance, so that Create
// finds one that is ready. The zero PoolConfig is no pool.
type PoolConfig struct {
	Min      int   // pooled at all times
	Max      int   // pooled while demand is high
	MemoryMB int64 // mebibytes that all pooled sandboxes together may use, even if that means fewer than Min
}

func (p PoolConfig) check() error {
	if p.Min < 0 || p.Max < p.Min || p.MemoryMB < 0 {
		return errors.New("sandbox: a limit of the pool is negative, or its minimum is above its maximum")
	}
	return nil
}

// A pool holds the pooled sandboxes. They have no owner, may connect nowhere and
// have never run anything but what the template starts, so any project can get
// any of them.
type pool struct {
	fleet *Fleet
	wake  chan struct{} // holds one element if there may be work

	mu    sync.Mutex
	warm  []*warmSandbox // oldest first
	takes []take         // in the last keepWindow, oldest first
}

// A take is a request for a pooled sandbox.
type take struct {
	key   string // of the template
	asked string // the name that the creator used for it
	at    time.Time
}

// A warmSandbox is one in the pool. The pool holds its claim.
type warmSandbox struct {
	ctx    context.Context // of its claim
	live   *liveSandbox
	key    string // of its template
	memory int64  // bytes that it uses
}

const (
	// demandWindow is the time over which demand is counted. The pool holds as many
	// sandboxes of a template as were requested in it, within its limits.
	demandWindow = 10 * time.Second
	// keepWindow is how long after the last request for a template one of its sandboxes
	// is pooled.
	keepWindow = time.Minute
	// maxTakes bounds how many requests are remembered.
	maxTakes = 1024
)

// poke wakes fill.
func (p *pool) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// take removes and returns a pooled sandbox of a template, or nil.
func (p *pool) take(key, asked string) *warmSandbox {
	defer p.poke()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.takes = append(p.takes, take{key, asked, time.Now()})
	if over := len(p.takes) - maxTakes; over > 0 {
		p.takes = slices.Delete(p.takes, 0, over)
	}
	for i, w := range p.warm {
		if w.key == key && !p.fleet.died(w.live) {
			p.warm = slices.Delete(p.warm, i, i+1)
			return w
		}
	}
	return nil
}

// handOver turns a pooled sandbox into the one that s describes.
func (f *Fleet) handOver(ctx context.Context, l *liveSandbox, s Info, base Base, body initBody) error {
	ctx, cancel := context.WithTimeout(ctx, f.conf.StartTimeout/firstShare) // the caller can start another one
	defer cancel()
	ctx, done := f.untilDeath(ctx, l)
	defer done()
	defer f.prepared.begin()()
	f.mu.Lock()
	l.since, l.traffic = time.Now(), trafficOf(s)
	l.watcher.setOwner(s) // before its owner can run anything
	f.mu.Unlock()
	// The network rules come first. No code of the new owner runs before the guest
	// has been initialised.
	if err := f.network.Update(ctx, s.Principal(), s.Egress); err != nil {
		return fmt.Errorf("hand over link: %w", err)
	}
	return f.initGuest(ctx, s, base, s.ID, body)
}

// fill keeps the pool at its size until ctx is done, then empties it.
func (p *pool) fill(ctx context.Context) {
	t := time.NewTicker(demandWindow / 4)
	defer t.Stop()
	defer p.empty(context.WithoutCancel(ctx))
	for ctx.Err() == nil {
		if p.step(ctx) {
			continue // there may be more to do
		}
		select {
		case <-ctx.Done():
		case <-p.wake:
			p.delayRefill(ctx)
		case <-t.C:
		}
	}
}

// refillDelay is how long a refill waits after a sandbox was taken, as long as
// another one is left: the new owner is about to run something, and a restore at
// the same moment would compete with it for the processors.
const refillDelay = 250 * time.Millisecond

// delayRefill waits for refillDelay unless the pool has none of the template that was
// wanted last.
func (p *pool) delayRefill(ctx context.Context) {
	p.mu.Lock()
	left := map[string]bool{}
	for _, w := range p.warm {
		left[w.key] = true
	}
	last := ""
	if len(p.takes) > 0 {
		last = p.takes[len(p.takes)-1].key
	}
	p.mu.Unlock()
	if !left[last] {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(refillDelay):
	}
}

// wantedLocked returns how many sandboxes of each template should be pooled, by key: as many as
// were requested lately, of the first template in Prepare at least the minimum, and
// together at most the maximum.
func (p *pool) wantedLocked(first string) map[string]int {
	want := map[string]int{}
	p.takes = slices.DeleteFunc(p.takes, func(t take) bool { return time.Since(t.at) > keepWindow })
	for _, t := range p.takes {
		if n := want[t.key]; n == 0 && t.key != first || time.Since(t.at) <= demandWindow {
			want[t.key] = n + 1
		}
	}
	c := p.fleet.conf.Pool
	least := min(c.Min, c.Max)
	if first != "" {
		want[first] = max(want[first], least)
	}
	for {
		sum, most := 0, ""
		for key, n := range want {
			sum += n
			if key == first && n <= least {
				continue
			}
			// The template with the most gives one up; of equal ones that which comes
			// first by name, so that it is always the same.
			if m := want[most]; most == "" || n > m || n == m && key < most {
				most = key
			}
		}
		if sum <= c.Max || most == "" {
			return want
		}
		if want[most]--; want[most] == 0 {
			delete(want, most)
		}
	}
}

// step adds or removes one sandbox if the pool has the wrong ones, and reports
// whether it did.
func (p *pool) step(ctx context.Context) bool {
	f := p.fleet
	first := ""
	if len(f.conf.Prepare) > 0 {
		first = f.templates.keyOf(f.conf.Prepare[0])
	}
	p.mu.Lock()
	want := p.wantedLocked(first)
	have := map[string]int{}
	var held, largest int64
	for _, w := range p.warm {
		have[w.key]++
		held, largest = held+w.memory, max(largest, w.memory)
	}
	limit := f.conf.Pool.MemoryMB << 20
	var surplus *warmSandbox
	for i, w := range p.warm {
		if have[w.key] > want[w.key] || held > limit || f.died(w.live) || f.templates.prepared(w.key) == nil {
			surplus = w
			p.warm = slices.Delete(p.warm, i, i+1)
			break
		}
	}
	p.mu.Unlock()
	if surplus != nil {
		p.dismiss(ctx, surplus)
		return true
	}
	if held+largest > limit {
		return false
	}
	// The template that lacks most first.
	keys := slices.SortedFunc(maps.Keys(want), func(a, b string) int {
		return cmp.Or(cmp.Compare(want[b]-have[b], want[a]-have[a]), cmp.Compare(a, b))
	})
	for _, key := range keys {
		if have[key] >= want[key] {
			return false
		}
		if t := f.templates.prepared(key); t != nil {
			return p.add(ctx, t, held)
		}
	}
	return false
}

// add restores one sandbox of a template into a pool that holds so many bytes, and
// reports whether it did.
func (p *pool) add(ctx context.Context, t *templateSnapshot, held int64) bool {
	f, limit := p.fleet, p.fleet.conf.Pool.MemoryMB<<20
	w, err := p.restore(ctx, t)
	if err != nil {
		if ctx.Err() == nil {
			f.log.WarnContext(ctx, "fill the pool of sandboxes", "template", t.template, "err", err)
			f.templates.drop(ctx, t.base.Key)
		}
		return false
	}
	if held+w.memory > limit {
		// Only a restored sandbox shows how much memory one needs. If not even one
		// fits, the next attempt waits for the next request.
		f.log.WarnContext(ctx, "a pooled sandbox uses more memory than the pool may", "template", t.template, "mebibytes", w.memory>>20, "limit", f.conf.Pool.MemoryMB)
		p.dismiss(ctx, w)
		return false
	}
	p.mu.Lock()
	p.warm = append(p.warm, w)
	p.mu.Unlock()
	return true
}

// asked returns the name that was last used for a template, or "". A pooled sandbox whose
// environment has the name that its owner will use need not be told another one. Its
// first command then finds a shell that is ready.
func (p *pool) asked(key string) (name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.takes {
		if t.key == key {
			name = t.asked
		}
	}
	return name
}

// restore starts a sandbox without owner from the template's snapshot.
func (p *pool) restore(ctx context.Context, t *templateSnapshot) (_ *warmSandbox, err error) {
	f := p.fleet
	s := f.unowned(t.template, t.base)
	s.Asked = p.asked(t.base.Key)
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
			p.dismiss(ctx, w)
		}
	}()
	if err := f.bringUp(ctx, l, s, t.base, t.from, initBody{EnvVars: environment(t.base.Env)}); err != nil {
		return nil, err
	}
	f.warmGuest(ctx, s.ID)
	u, err := f.runtime.Usage(ctx, s.ID)
	w.memory = u.Memory
	return w, err
}

// dismiss ends a pooled sandbox.
func (p *pool) dismiss(ctx context.Context, w *warmSandbox) {
	ctx = context.WithoutCancel(ctx)
	if err := p.fleet.takeDown(ctx, w.live); err != nil {
		p.fleet.log.WarnContext(ctx, "end a pooled sandbox", "sandbox", w.live.id, "err", err)
	}
	p.fleet.release(w.live)
}

// empty ends all pooled sandboxes.
func (p *pool) empty(ctx context.Context) {
	p.mu.Lock()
	all := p.warm
	p.warm = nil
	p.mu.Unlock()
	var wg sync.WaitGroup
	for _, w := range all {
		wg.Go(func() { p.dismiss(ctx, w) })
	}
	wg.Wait()
}
