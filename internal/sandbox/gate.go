package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"

	"postern/internal/auth"
)

// A Watcher judges and records what is started in one sandbox. Its methods are called
// concurrently.
type Watcher interface {
	// Exec decides whether a program may be started. It may block; ctx ends with the
	// sandbox, or when the process does not wait any more.
	Exec(ctx context.Context, e Exec) (allow bool)
	Exited(e Exit)
	Opened(o Open)
	// Missed says that so many events were lost.
	Missed(n uint64)
}

// Observed says what the kernel of a sandbox reports in addition to the programs that
// are started.
type Observed struct {
	Opens   bool // files that are opened for writing, or that a process tried to open so
	Digests bool // the SHA-256 of each program's file
}

// A Gatekeeper is a [Runtime] whose sandboxes ask before they start a program, see
// [Spec.Watch]. Its methods return an error that wraps [ErrNotFound] if there is no such
// sandbox, or if it does not ask.
type Gatekeeper interface {
	// Gate returns a duplicate of the host's end of what a sandbox asks on, for a
	// [Keeper]. The caller closes it and must not read it. While nobody answers, each
	// start of a program in the sandbox waits. When the last duplicate is closed the
	// sandbox ends.
	Gate(id string) (*os.File, error)
	// AdoptGate makes w judge a sandbox that a previous process of this program started.
	// It works on a duplicate of host, which the caller closes.
	AdoptGate(id string, host *os.File, w Watcher) error
	// Observe makes the sandbox report more from now on. What it reports already stays.
	Observe(ctx context.Context, id string, o Observed) error
}

// A watcher passes on to the fleet's judge what happens in a sandbox with an owner.
type watcher struct {
	commands Commands // nil allows everything
	// who is the sandbox. Nil means that nobody owns it yet: it runs what its template
	// starts, and code of nobody else.
	who atomic.Pointer[auth.Principal]
}

var _ Watcher = (*watcher)(nil)

// belong makes the sandbox s the one that is judged.
func (w *watcher) belong(s Info) {
	if s.Project == "" || s.bench {
		return
	}
	who := s.Principal()
	w.who.Store(&who)
}

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

// gateName is the name of a sandbox's gate in the keeper, where the sandbox's link has
// its ID.
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

// adoptGate makes the fleet judge again what is started in a recovered sandbox. It
// returns why that is not possible, or the empty string.
func (f *Fleet) adoptGate(ctx context.Context, s Info, gate *os.File) (why string) {
	g, ok := f.runtime.(Gatekeeper)
	if !ok {
		return ""
	}
	if gate == nil {
		if s.Contract != "" {
			return "the record of its commands was lost"
		}
		f.log.WarnContext(ctx, "an older program started this sandbox: what runs in it is not recorded", "sandbox", s.ID)
		return ""
	}
	w := &watcher{commands: f.conf.Commands}
	w.belong(s)
	if err := g.AdoptGate(s.ID, gate, w); err != nil {
		return err.Error()
	}
	return ""
}

// observe makes the kernel of a sandbox report more to [Config.Commands] from now on.
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
// sandbox had reported before the call.
func (f *Fleet) Settle(ctx context.Context, id string) error {
	if _, ok := f.runtime.(Gatekeeper); !ok {
		return nil
	}
	return f.observe(ctx, id, Observed{}) // the answer comes after the reports
}
