package sandboxtest

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"

	"postern/internal/sandbox"
)

// A Fake is a [sandbox.Runtime] in memory that runs nothing. The zero value is
// ready. Two processes of a program on one machine are two users of one Fake.
type Fake struct {
	mu   sync.Mutex
	all  map[string]*fakeSandbox
	fail error
}

type fakeSandbox struct {
	spec   sandbox.Spec
	ended  chan struct{}
	reason string // final once ended is closed
}

var _ sandbox.Runtime = (*Fake)(nil)

// FailStart makes every later Start fail with err; nil ends that.
func (f *Fake) FailStart(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = err
}

// Die ends a sandbox as if by itself. What is left of it stays in List until
// it is stopped.
func (f *Fake) Die(id, reason string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.all[id]; s != nil {
		s.endLocked(reason)
	}
}

// Spec returns what a sandbox was started with.
func (f *Fake) Spec(id string) (sandbox.Spec, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.all[id]
	if s == nil {
		return sandbox.Spec{}, false
	}
	return s.spec, true
}

func (s *fakeSandbox) endLocked(reason string) {
	select {
	case <-s.ended:
	default:
		s.reason = reason
		close(s.ended)
	}
}

// Start implements [sandbox.Runtime].
func (f *Fake) Start(ctx context.Context, s sandbox.Spec) error {
	if s.Link != nil {
		defer s.Link.Close()
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("start sandbox: %w", err)
	}
	if _, err := os.Stat(s.Rootfs); err != nil {
		return fmt.Errorf("find root file system: %w", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail != nil {
		return f.fail
	}
	if f.all[s.ID] != nil {
		return fmt.Errorf("start sandbox %s: it is there already", s.ID)
	}
	if f.all == nil {
		f.all = map[string]*fakeSandbox{}
	}
	f.all[s.ID] = &fakeSandbox{spec: s, ended: make(chan struct{})}
	return nil
}

// Stop implements [sandbox.Runtime].
func (f *Fake) Stop(_ context.Context, id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.all[id]; s != nil {
		s.endLocked("stopped")
		delete(f.all, id)
	}
	return nil
}

// Wait implements [sandbox.Runtime].
func (f *Fake) Wait(ctx context.Context, id string) (string, error) {
	f.mu.Lock()
	s := f.all[id]
	f.mu.Unlock()
	if s == nil {
		return "", fmt.Errorf("wait for sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	select {
	case <-s.ended:
		return s.reason, nil
	case <-ctx.Done():
		return "", fmt.Errorf("wait for sandbox %s: %w", id, ctx.Err())
	}
}

// List implements [sandbox.Runtime].
func (f *Fake) List(context.Context) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Sorted(maps.Keys(f.all)), nil
}
