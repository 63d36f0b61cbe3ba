package sandbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/policy"
	"postern/internal/store"
)

// Fleet is all sandboxes of this machine. It is safe for concurrent use.
type Fleet struct {
	log     *slog.Logger
	db      *store.DB
	runtime Runtime
	network Network
	conf    Config
	http    *http.Transport // dials "id:port" through network
	tokens

	rows      registry
	workers   sync.WaitGroup // goroutines that outlive a call
	templates templates
	pool      pool
	space     space

	background context.Context //nolint:containedctx // of workers that no call waits for; ends with stop
	stop       context.CancelFunc

	mu     sync.Mutex // guards what follows, and what liveSandbox says
	live   map[string]*liveSandbox
	closed bool // the server is stopping: nothing new is begun

	failedWakes map[string]failedWake // by sandbox, as many as failed lately
}

// New returns the fleet whose rows are in db. Call [Fleet.Recover] before use.
func New(log *slog.Logger, db *store.DB, r Runtime, n Network, c Config) (*Fleet, error) {
	if err := c.setDefaults(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of snapshots: %w", err)
	}
	f := &Fleet{log: log, db: db, runtime: r, network: n, conf: c, live: map[string]*liveSandbox{}, failedWakes: map[string]failedWake{}}
	f.background, f.stop = context.WithCancel(context.Background())
	f.http = f.newTransport()
	f.tokens = tokens{c.Key}
	f.rows = registry{db, &f.conf}
	f.templates.fleet, f.templates.all = f, map[string]*templateSnapshot{}
	f.pool.fleet, f.pool.wake = f, make(chan struct{}, 1)
	return f, nil
}

// random returns 20 letters and digits.
func random() string {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	b := make([]byte, 20)
	rand.Read(b)
	for i := range b {
		b[i] = letters[int(b[i])%len(letters)] // the bias costs less than one of 103 bits
	}
	return string(b)
}

func newID() string        { return "i" + random() }
func newExecution() string { return "x" + random() }

// keepLink has the keeper hold the host's end of a sandbox's link.
func (f *Fleet) keepLink(ctx context.Context, id string) error {
	if f.conf.Keeper == nil {
		return nil
	}
	h, err := f.network.Handle(id)
	if err != nil {
		return fmt.Errorf("keep link: %w", err)
	}
	defer h.Close()
	if err := f.conf.Keeper.Put(ctx, id, h); err != nil {
		// The sandbox works without; it would not outlive a crash of ours.
		f.log.WarnContext(ctx, "keep link", "sandbox", id, "err", err)
	}
	return nil
}

// watch waits in the background until the machine's part of a sandbox is gone
// and, if nobody asked for that, records it as lost.
func (f *Fleet) watch(l *liveSandbox) {
	ctx, cancel := context.WithCancel(context.Background())
	f.mu.Lock()
	l.run = cancel
	f.mu.Unlock()
	f.workers.Go(func() {
		defer cancel()
		reason, err := f.runtime.Wait(ctx, l.id)
		if err != nil {
			reason = err.Error()
		}
		f.mu.Lock()
		if ctx.Err() == nil {
			l.dead = true
			if l.onDeath != nil {
				l.onDeath(fmt.Errorf("the sandbox ended: %s", reason))
			}
		}
		f.mu.Unlock()
		f.pool.poke()
		// Whoever takes it down ends ctx first. An end is not broken off for
		// another, which might find the server closed.
		_, l, err := f.claim(ctx, l.id)
		if err != nil {
			return
		}
		defer f.release(l)
		if ctx.Err() != nil {
			return
		}
		work := context.WithoutCancel(ctx)
		s, err := f.rows.row(work, l.id)
		switch {
		case errors.Is(err, ErrNotFound): // it waited to be asked for
			err = f.takeDown(work, l)
		case err == nil:
			err = f.finish(work, l, system(s), s, Lost, reason)
		}
		if err != nil {
			f.log.ErrorContext(work, "end lost sandbox", "sandbox", l.id, "err", err)
		}
	})
}

// takeDown removes the machine's part of a sandbox, as far as there is one.
func (f *Fleet) takeDown(ctx context.Context, l *liveSandbox) error {
	f.mu.Lock()
	up, run := l.up, l.run
	l.ready, l.run, l.dead = false, nil, false
	f.mu.Unlock()
	if !up {
		return nil
	}
	if run != nil {
		run()
	}
	f.network.Detach(l.id)
	if f.conf.Keeper != nil {
		f.conf.Keeper.Drop(l.id)
	}
	// If something stays behind the runtime's List still names it, and the
	// next Recover tries again.
	err := f.runtime.Stop(ctx, l.id)
	if err != nil {
		err = fmt.Errorf("stop %s: %w", l.id, err)
		f.log.ErrorContext(ctx, "stop sandbox", "sandbox", l.id, "err", err)
	}
	if l.mounted {
		f.conf.Unmounted(ctx, l.id)
	}
	f.mu.Lock()
	l.up, l.mounted = false, false
	f.mu.Unlock()
	return err
}

// ended returns the verb of the entry about a sandbox that ended in state s.
func ended(s State) audit.Verb {
	switch s {
	case Failed:
		return audit.SandboxFailed
	case Lost:
		return audit.SandboxLost
	case Killed, Creating, Running, Pausing, Paused, Resuming:
	}
	return audit.SandboxKilled
}

// finish takes a claimed sandbox down and records its end. Its error wraps
// [ErrNotFound] if it had ended before.
func (f *Fleet) finish(ctx context.Context, l *liveSandbox, who auth.Principal, s Info, to State, reason string) error {
	err := f.takeDown(ctx, l)
	saved := s.saved
	s.end(reason)
	rerr := f.rows.record(ctx, who, &s, change{
		from: []State{Creating, Running, Pausing, Paused, Resuming}, to: to,
		verb: ended(to), event: event.Killed, fields: audit.Fields{"reason": reason},
	})
	if f.conf.Inboxes != nil {
		f.conf.Inboxes.Return(s.ID) // also if the end could not be recorded: the key must not stay open
	}
	if rerr != nil {
		return errors.Join(err, rerr)
	}
	return errors.Join(err, f.discard(saved))
}

// Kill ends a sandbox of who's project, paused or not. It returns
// [ErrNotFound] if there is none, or no longer.
func (f *Fleet) Kill(ctx context.Context, who auth.Principal, id string) error {
	if err := auth.Need(who, auth.Reviewer); err != nil {
		return err
	}
	if _, err := f.Get(ctx, who, id); err != nil {
		return err
	}
	return f.kill(ctx, who, id, "killed", func(Info) bool { return true })
}

// kill ends a sandbox if it is still one that should end.
func (f *Fleet) kill(ctx context.Context, who auth.Principal, id, reason string, still func(Info) bool) error {
	ctx = context.WithoutCancel(ctx)
	l, err := f.claimToEnd(ctx, id)
	if err != nil {
		return err
	}
	defer f.release(l)
	s, err := f.rows.row(ctx, id)
	if err != nil {
		return err
	}
	if !slices.Contains(alive, s.State) || !still(s) {
		return fmt.Errorf("end %s: %w", id, ErrNotFound)
	}
	return f.finish(ctx, l, who, s, Killed, reason)
}

func mayManage(who auth.Principal) error {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return fmt.Errorf("%s may not manage sandboxes: %w", who, auth.ErrForbidden)
	}
	return nil
}

// Get returns a sandbox of who's project that lives, paused or not. Those of
// other projects are not found.
func (f *Fleet) Get(ctx context.Context, who auth.Principal, id string) (Info, error) {
	if err := mayManage(who); err != nil {
		return Info{}, err
	}
	s, err := f.rows.row(ctx, id)
	if err != nil {
		return Info{}, err
	}
	if s.Project != who.Project || !slices.Contains(alive, s.State) {
		return Info{}, fmt.Errorf("sandbox %s: %w", id, ErrNotFound)
	}
	return s, nil
}

// List returns the sandboxes of who's project that live, newest first; with
// all also those that ended, as far as 500 go.
func (f *Fleet) List(ctx context.Context, who auth.Principal, all bool) ([]Info, error) {
	if err := mayManage(who); err != nil {
		return nil, err
	}
	if all {
		return f.rows.list(ctx, `where project_id = $1 order by started_at desc, id limit 500`, who.Project)
	}
	return f.rows.list(ctx, `where project_id = $1 and state in (`+quoted(alive)+`) order by started_at desc, id`, who.Project)
}

// SetTimeout makes a sandbox of who's project end after d from now. With
// extend it never makes the life shorter.
func (f *Fleet) SetTimeout(ctx context.Context, who auth.Principal, id string, d time.Duration, extend bool) (Info, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Info{}, err
	}
	if d > f.conf.MaxTimeout {
		return Info{}, f.CheckTimeout(d)
	}
	ctx, l, s, err := f.claimFor(ctx, who, id)
	if err != nil {
		return Info{}, err
	}
	defer f.release(l)
	return f.setTimeout(ctx, who, s, d, extend)
}

// setTimeout is SetTimeout for who has claimed the sandbox.
func (f *Fleet) setTimeout(ctx context.Context, who auth.Principal, s Info, d time.Duration, extend bool) (Info, error) {
	if s.State != Running {
		return Info{}, fmt.Errorf("set timeout of %s: %w", s.ID, ErrPaused)
	}
	ends := time.Now().Add(max(d, 0))
	if extend && ends.Before(s.Ends) {
		return s, nil
	}
	s.Ends = ends
	err := f.rows.record(ctx, who, &s, change{
		from: []State{Running}, to: Running, verb: audit.SandboxTimeout, event: event.Updated, fields: audit.Fields{"ends": s.Ends.UTC().Format(time.RFC3339)},
	})
	return s, err
}

// SetEgress replaces where a sandbox of who's project may connect. Connections
// that it may no longer have are cut.
func (f *Fleet) SetEgress(ctx context.Context, who auth.Principal, id string, e policy.Egress) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	if err := e.Validate(); err != nil {
		return err
	}
	ctx, l, s, err := f.claimFor(ctx, who, id)
	if err != nil {
		return err
	}
	defer f.release(l)
	old := s.Egress
	s.Egress = e
	// First what narrows, then what is recorded: a failure in between leaves
	// the sandbox with less than the record says, never with more.
	if l.up {
		if err := f.network.Update(ctx, s.Principal(), e); err != nil {
			return fmt.Errorf("update network of %s: %w", id, err)
		}
	}
	err = f.rows.record(ctx, who, &s, change{
		from: []State{Running, Paused}, to: s.State, verb: audit.SandboxNetwork, event: event.Updated,
		fields: audit.Fields{"allow": fmt.Sprint(e.AllowOut), "deny": fmt.Sprint(e.DenyOut), "internet": strconv.FormatBool(e.Internet)},
	})
	if err != nil && l.up {
		err = errors.Join(err, f.network.Update(ctx, s.Principal(), old))
	}
	return err
}

// dir returns the directory of a snapshot.
func (f *Fleet) dir(name string) string { return filepath.Join(f.conf.Dir, name) }

// discard removes a snapshot's files; "" is none.
func (f *Fleet) discard(name string) error {
	if name == "" {
		return nil
	}
	if err := errors.Join(os.RemoveAll(f.dir(name)), os.RemoveAll(f.dir(name)+".json")); err != nil {
		return fmt.Errorf("remove snapshot: %w", err)
	}
	return nil
}

func system(s Info) auth.Principal {
	return auth.Principal{Kind: auth.System, ID: "fleet", Project: s.Project}
}
