package sandbox

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// A space is what saves that are under way may still write to the disk.
//
// Paused sandboxes and snapshots take nothing of this machine but its disk, and
// whoever holds a project's key could make them without end. On the same disk
// is, mostly, the database: when that cannot be written nothing can be recorded,
// so nothing works, for nobody.
type space struct {
	mu    sync.Mutex
	taken int64 // bytes
}

// takeSpace returns an error that wraps ENOSPC, as a full disk's own, unless a copy of a sandbox
// fits on the disk and leaves free what must stay free. The caller calls done
// when the copy has been written.
func (f *Fleet) takeSpace(ctx context.Context, id string) (done func(), err error) {
	u, err := f.runtime.Usage(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("measure %s: %w", id, err)
	}
	need := u.Memory + u.Disk
	p := &f.space
	p.mu.Lock()
	defer p.mu.Unlock()
	var st unix.Statfs_t
	if err := unix.Statfs(f.conf.Dir, &st); err != nil {
		return nil, fmt.Errorf("measure disk of snapshots: %w", err)
	}
	// What others have begun to write is counted twice: too much, never too little.
	free := int64(st.Bavail)*st.Bsize - p.taken
	if free-need < f.conf.KeepFreeMB<<20 {
		return nil, fmt.Errorf("a copy of %s may take %d MiB of the disk, of which %d MiB are free and %d MiB must stay so: %w",
			id, need>>20, max(free, 0)>>20, f.conf.KeepFreeMB, unix.ENOSPC)
	}
	p.taken += need
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.taken -= need
	}, nil
}
