package sandboxtest

import (
	"context"
	"fmt"
	"os"

	"postern/internal/sandbox"
)

var _ sandbox.Gatekeeper = (*Fake)(nil)

// Exec simulates the start of a program in a sandbox. It asks the sandbox's watcher, and
// reports whether the program is started. A sandbox that does not exist starts nothing.
func (f *Fake) Exec(ctx context.Context, id string, e sandbox.Exec) bool {
	w, ok := f.watcher(id)
	return ok && (w == nil || w.Exec(ctx, e))
}

// Exit simulates the end of a process in a sandbox.
func (f *Fake) Exit(id string, e sandbox.Exit) {
	if w, _ := f.watcher(id); w != nil {
		w.Exited(e)
	}
}

// Open simulates opening a file for writing. The watcher is told if opens are observed.
func (f *Fake) Open(id string, o sandbox.Open) {
	if w, _ := f.watcher(id); w != nil && f.Observed(id).Opens {
		w.Opened(o)
	}
}

// Miss simulates the loss of n events of a sandbox.
func (f *Fake) Miss(id string, n uint64) {
	if w, _ := f.watcher(id); w != nil {
		w.Missed(n)
	}
}

// watcher returns the watcher of a sandbox, which may be nil, and whether the sandbox exists.
func (f *Fake) watcher(id string) (sandbox.Watcher, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.all[id]
	if s == nil || s.hasEnded() {
		return nil, false
	}
	return s.spec.Watch, true
}

// Gate implements [sandbox.Gatekeeper].
func (f *Fake) Gate(id string) (*os.File, error) {
	if _, ok := f.watcher(id); !ok {
		return nil, fmt.Errorf("gate of sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	return os.Open(os.DevNull)
}

// AdoptGate implements [sandbox.Gatekeeper].
func (f *Fake) AdoptGate(id string, _ *os.File, w sandbox.Watcher) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.all[id]
	if s == nil {
		return fmt.Errorf("adopt gate of sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	s.spec.Watch = w
	return nil
}

// Observe implements [sandbox.Gatekeeper].
func (f *Fake) Observe(_ context.Context, id string, o sandbox.Observed) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.all[id]
	if s == nil {
		return fmt.Errorf("observe sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	s.observed.Opens = s.observed.Opens || o.Opens
	s.observed.Digests = s.observed.Digests || o.Digests
	return nil
}

// Settle implements [sandbox.Gatekeeper]: [Fake.Exec] returns with the answer.
func (f *Fake) Settle(_ context.Context, id string) error {
	if _, ok := f.watcher(id); !ok {
		return fmt.Errorf("settle sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	return nil
}

// Observed returns what a sandbox was told to report.
func (f *Fake) Observed(id string) sandbox.Observed {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.all[id]; s != nil {
		return s.observed
	}
	return sandbox.Observed{}
}
