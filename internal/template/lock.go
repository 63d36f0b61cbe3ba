package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// errLocked means that somebody else builds.
var errLocked = errors.New("another process builds")

// tryLock locks the cache for builds. Its error wraps errLocked if somebody else has.
// The kernel releases the lock when its holder dies.
func (c *Cache) tryLock() (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(c.cfg.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock cache: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return func() { _ = f.Close() }, nil
	}
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		err = errLocked
	}
	return nil, errors.Join(fmt.Errorf("lock cache: %w", err), f.Close())
}

// lock waits until nobody else builds in this cache. Name is of the template
// that waits, which is written to out.
func (c *Cache) lock(ctx context.Context, name string, out io.Writer) (unlock func(), err error) {
	began, told := time.Now(), time.Time{}
	for {
		unlock, err := c.tryLock()
		if !errors.Is(err, errLocked) {
			return unlock, err
		}
		if time.Since(told) > 5*time.Second {
			fmt.Fprintf(out, "template %s: waiting for another process that builds (%d s)\n", name, int(time.Since(began).Seconds()))
			told = time.Now()
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("lock cache: %w", ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}
