package sandbox

import (
	"context"

	"postern/internal/auth"
)

// Waiting returns how many sandboxes wait to be asked for, and how many bytes
// of memory they take.
func (f *Fleet) Waiting() (n int, memory int64) {
	f.pool.mu.Lock()
	defer f.pool.mu.Unlock()
	for _, w := range f.pool.warm {
		memory += w.memory
	}
	return len(f.pool.warm), memory
}

// EndInVain is what comes of a sandbox whose time is up and is made longer at
// the same moment: when its turn comes it should not end any more.
func (f *Fleet) EndInVain(ctx context.Context, who auth.Principal, id string) error {
	return f.kill(ctx, who, id, "its time was up", func(Info) bool { return false })
}
