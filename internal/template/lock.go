package template

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// lock waits until nobody else builds in this cache. The kernel releases the lock
// when its holder dies.
func (c *Cache) lock(ctx context.Context) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(c.cfg.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock cache: %w", err)
	}
	began, told := time.Now(), time.Time{}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock cache: %w", err), f.Close())
		}
		if time.Since(told) > 5*time.Second {
			fmt.Fprintf(c.cfg.Progress, "template %s: waiting for another process that builds (%d s)\n", c.recipe.name, int(time.Since(began).Seconds()))
			told = time.Now()
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("lock cache: %w", ctx.Err()), f.Close())
		case <-time.After(100 * time.Millisecond):
		}
	}
}
