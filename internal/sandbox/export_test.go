package sandbox

import (
	"context"

	"postern/internal/auth"
)

// Pooled returns the number of pooled sandboxes, and how many bytes of memory they
// use.
func (f *Fleet) Pooled() (n int, memory int64) {
	f.pool.mu.Lock()
	defer f.pool.mu.Unlock()
	for _, w := range f.pool.warm {
		memory += w.memory
	}
	return len(f.pool.warm), memory
}

// EndInVain does what happens when a sandbox is extended at the moment when its
// life ends: when its turn comes it should not end any more.
func (f *Fleet) EndInVain(ctx context.Context, who auth.Principal, id string) error {
	return f.kill(ctx, who, id, "its time was up", func(Info) bool { return false })
}

// FilterLayer and ReadFrames read what comes from a bench.
var (
	FilterLayer  = filterLayer
	ReadFrames   = readFrames
	ParseListing = parseListing
)

// RelieveDisk is one check of the disk.
func (f *Fleet) RelieveDisk(ctx context.Context) error { return f.relieveDisk(ctx) }

// PooledOf returns the number of pooled sandboxes of the template with a key.
func (f *Fleet) PooledOf(key string) (n int) {
	f.pool.mu.Lock()
	defer f.pool.mu.Unlock()
	for _, w := range f.pool.warm {
		if w.key == key {
			n++
		}
	}
	return n
}
