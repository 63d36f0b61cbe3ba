package sandbox

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// space accounts for the disk that unfinished saves may still need.
//
// The attack: paused sandboxes and snapshots use only disk, so a caller with a
// project key could make them without limit. The database is usually on the same
// disk. If that is full nothing can be recorded, and the server stops working for
// all projects.
type space struct {
	mu    sync.Mutex
	taken int64 // bytes
}

// takeSpace reserves disk for a copy of a sandbox. The caller calls done when the
// copy has been written. The error wraps ENOSPC, like that of a full disk, if the
// copy could leave less than KeepFreeMB free.
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
	// What other saves have written so far is counted twice, which errs on the safe
	// side.
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
