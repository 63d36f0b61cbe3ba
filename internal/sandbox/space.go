package sandbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

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

const (
	// guardEvery is the interval at which the free disk is measured.
	guardEvery = 2 * time.Second
	// leastBlamed is how many bytes a sandbox must have written to be ended for a full
	// disk. If none has, something else fills the disk.
	leastBlamed = 64 << 20
)

// guardDisk ends the sandbox that has written most when less than half of KeepFreeMB is
// free, until ctx is done.
//
// The attack: each sandbox may write DiskMB, and the machine has less than all of them
// together. Many that write as much as they may would fill the disk, and then nothing
// can be recorded for any project.
func (f *Fleet) guardDisk(ctx context.Context) {
	t := time.NewTicker(guardEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			if err := f.relieveDisk(ctx); err != nil && ctx.Err() == nil {
				f.log.ErrorContext(ctx, "guard the disk", "err", err)
			}
		}
	}
}

// relieveDisk is one check of guardDisk.
func (f *Fleet) relieveDisk(ctx context.Context) error {
	var st unix.Statfs_t
	if err := unix.Statfs(f.conf.Dir, &st); err != nil {
		return fmt.Errorf("measure disk: %w", err)
	}
	free := int64(st.Bavail) * st.Bsize
	if free >= f.conf.KeepFreeMB<<20/2 {
		return nil
	}
	f.mu.Lock()
	up := map[string]context.CancelCauseFunc{} // what ends a bench, by ID; nil for others
	for id, l := range f.live {
		if l.up {
			up[id] = l.bench
		}
	}
	f.mu.Unlock()
	worst, most := "", int64(leastBlamed)
	for _, id := range slices.Sorted(maps.Keys(up)) { // of two that use the same, always the same one
		u, err := f.runtime.Usage(ctx, id)
		if err == nil && u.Disk >= most {
			worst, most = id, u.Disk
		}
	}
	if worst == "" {
		f.log.WarnContext(ctx, "the disk is nearly full, and not because of sandboxes", "mebibytes_free", free>>20)
		return nil
	}
	reason := fmt.Sprintf("the disk of this machine was nearly full, and this sandbox used most of it: %d MiB", most>>20)
	f.log.ErrorContext(ctx, "end a sandbox since the disk is nearly full", "sandbox", worst, "mebibytes_free", free>>20, "mebibytes_used", most>>20)
	if end := up[worst]; end != nil {
		end(errors.New(reason))
		return nil
	}
	err := f.kill(ctx, system(Info{}), worst, reason, func(Info) bool { return true })
	if errors.Is(err, ErrNotFound) { // it has ended, or is pooled and has written nothing
		return nil
	}
	return err
}
