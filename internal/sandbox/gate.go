package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"postern/internal/auth"
)

// A Watcher judges and records the programs that are started in one sandbox. Its methods
// are called concurrently.
type Watcher interface {
	// Exec decides whether a program may be started. It may block; ctx ends with the
	// sandbox, or when the process no longer waits.
	Exec(ctx context.Context, e Exec) (allow bool)
	// Exited reports the end of a process.
	Exited(e Exit)
	// Opened reports an open or another use of a path, as far as [Observed] says so.
	Opened(o Open)
	// Missed reports that n events were lost.
	Missed(n uint64)
}

// Observed says what the kernel of a sandbox reports in addition to the programs that
// are started.
type Observed struct {
	Opens   bool // attempts to open files for writing, and to make, remove, rename and link them
	Reads   bool // files that are opened for reading
	Digests bool // the SHA-256 of each program's file
}

// A Gatekeeper is a [Runtime] whose sandboxes ask before they start a program, see
// [Spec.Watch]. Its methods return an error that wraps [ErrNotFound] if there is no such
// sandbox, or if it has no gate.
type Gatekeeper interface {
	// Gate returns a duplicate of the host's end of a sandbox's gate: the socket on which
	// it asks. It is for a [Keeper]: the caller closes it and must not read it. While
	// nobody answers, each start of a program waits. When the last duplicate is closed,
	// the sandbox ends.
	Gate(id string) (*os.File, error)
	// AdoptGate makes w judge a sandbox that a previous server process started. It
	// duplicates host, which the caller closes.
	AdoptGate(id string, host *os.File, w Watcher) error
	// Observe makes the sandbox report what o names from now on, in addition to what it
	// reports already.
	Observe(ctx context.Context, id string, o Observed) error
	// Settle returns when the sandbox's watcher has been given everything that the kernel
	// reported before the call, and has answered every question that it asked before.
	Settle(ctx context.Context, id string) error
}

// A watcher passes the events of a sandbox with an owner on to [Config.Commands].
type watcher struct {
	commands Commands // nil allows everything
	// who is the sandbox. It is nil until the sandbox has an owner: until then only its
	// template's programs run.
	who atomic.Pointer[auth.Principal]
}

var _ Watcher = (*watcher)(nil)

// setOwner makes w report on s, unless s has no owner or is a bench.
func (w *watcher) setOwner(s Info) {
	if s.Project == "" || s.bench {
		return
	}
	who := s.Principal()
	w.who.Store(&who)
}

// judge returns who judges the sandbox, and the sandbox. It returns false if nobody does.
func (w *watcher) judge() (Commands, auth.Principal, bool) {
	who := w.who.Load()
	if w.commands == nil || who == nil {
		return nil, auth.Principal{}, false
	}
	return w.commands, *who, true
}

func (w *watcher) Exec(ctx context.Context, e Exec) bool {
	c, who, ok := w.judge()
	return !ok || c.Exec(ctx, who, e)
}

func (w *watcher) Exited(e Exit) {
	if c, who, ok := w.judge(); ok {
		c.Exited(who, e)
	}
}

func (w *watcher) Opened(o Open) {
	if c, who, ok := w.judge(); ok {
		c.Opened(who, o)
	}
}

func (w *watcher) Missed(n uint64) {
	if c, who, ok := w.judge(); ok {
		c.Missed(who, n)
	}
}

// gateName is the name of a sandbox's gate in the keeper. The name of its link is its ID.
func gateName(id string) string { return "exec-" + id }

// keepGate gives the host's end of a sandbox's gate to the keeper.
func (f *Fleet) keepGate(ctx context.Context, id string) error {
	g, ok := f.runtime.(Gatekeeper)
	if f.conf.Keeper == nil || !ok {
		return nil
	}
	h, err := g.Gate(id)
	if err != nil {
		return fmt.Errorf("keep gate: %w", err)
	}
	defer h.Close()
	if err := f.conf.Keeper.Put(ctx, gateName(id), h); err != nil {
		// As with a link: without the keeper a crash of the server ends the sandbox.
		f.log.WarnContext(ctx, "keep gate", "sandbox", id, "err", err)
	}
	return nil
}

// adoptGate makes the fleet judge the programs of a recovered sandbox again. It returns why
// that is not possible, or the empty string.
func (f *Fleet) adoptGate(ctx context.Context, s Info, gate *os.File) (why string) {
	g, ok := f.runtime.(Gatekeeper)
	if !ok {
		return ""
	}
	if gate == nil {
		if s.Contract != "" {
			return "the record of its commands was lost"
		}
		f.log.WarnContext(ctx, "no gate: an older version started this sandbox, and its programs are not recorded", "sandbox", s.ID)
		return ""
	}
	w := &watcher{commands: f.conf.Commands}
	w.setOwner(s)
	if err := g.AdoptGate(s.ID, gate, w); err != nil {
		return err.Error()
	}
	return ""
}

// observe makes the kernel of a sandbox report what o names to [Config.Commands].
func (f *Fleet) observe(ctx context.Context, id string, o Observed) error {
	g, ok := f.runtime.(Gatekeeper)
	if !ok {
		return errors.New("this runtime reports no commands")
	}
	if err := g.Observe(ctx, id, o); err != nil {
		return fmt.Errorf("observe sandbox %s: %w", id, err)
	}
	return nil
}

// Settle returns when [Config.Commands] has been given everything that the kernel of a
// sandbox had reported before the call, and has answered every question that it had asked,
// also those of processes that have ended since.
func (f *Fleet) Settle(ctx context.Context, id string) error {
	g, ok := f.runtime.(Gatekeeper)
	if !ok {
		return nil
	}
	if err := g.Settle(ctx, id); err != nil {
		return fmt.Errorf("settle sandbox %s: %w", id, err)
	}
	return nil
}
