package sandbox

import (
	"context"
	"crypto/rand"
	"encoding/json"
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

// Fleet is all sandboxes of this machine. Its methods check the caller's rights,
// and are safe for concurrent use.
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
	prepared  preparer
	space     space
	benches   chan struct{} // semaphore of open benches

	background context.Context //nolint:containedctx // for workers that no call waits for; canceled by stop
	stop       context.CancelFunc

	mu     sync.Mutex // guards what follows, and the fields that liveSandbox names
	live   map[string]*liveSandbox
	closed bool // the server is stopping and starts nothing new
	ender  Ender

	failedWakes map[string]failedWake // by sandbox ID; only recent ones
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
	f.benches = make(chan struct{}, c.MaxBenches)
	f.http = f.newTransport()
	f.tokens = tokens{c.Key}
	f.rows = registry{db, &f.conf}
	f.templates.fleet, f.templates.all = f, map[string]*templateSnapshot{}
	f.pool.fleet, f.pool.wake = f, make(chan struct{}, 1)
	f.prepared.fleet, f.prepared.wake = f, make(chan struct{}, 1)
	return f, nil
}

// random returns 20 lower-case letters and digits, 103 bits.
func random() string {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	b := make([]byte, 20)
	rand.Read(b)
	for i := range b {
		b[i] = letters[int(b[i])%len(letters)] // the bias costs less than one bit
	}
	return string(b)
}

// newID returns the ID of a new sandbox, and newExecution the ID of one of its
// runs.
func newID() string        { return "i" + random() }
func newExecution() string { return "x" + random() }

// keepLink gives the host's end of a sandbox's link to the keeper.
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
		// The sandbox works without the keeper, but a crash of the server would end
		// it.
		f.log.WarnContext(ctx, "keep link", "sandbox", id, "err", err)
	}
	return nil
}

// watch waits in the background for the machine's part of a sandbox to end. If
// nobody asked for that end, it records the sandbox as lost.
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
		// takeDown cancels ctx before it stops the runtime, so an expected end
		// stops here. The claim's own context is not used below: cleaning up must
		// not be interrupted by a second end, which might find the server already
		// closed.
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
		case errors.Is(err, ErrNotFound): // a pooled sandbox has no row
			err = f.takeDown(work, l)
		case err == nil:
			err = f.finish(work, l, system(s), s, Lost, reason)
		}
		if err != nil {
			f.log.ErrorContext(work, "end lost sandbox", "sandbox", l.id, "err", err)
		}
	})
}

// takeDown removes the machine's part of a claimed sandbox: link, processes,
// mounts. It does nothing if there is none, and returns an error if something could
// not be removed.
func (f *Fleet) takeDown(ctx context.Context, l *liveSandbox) error {
	f.mu.Lock()
	up, run := l.up, l.run
	l.ready, l.run, l.dead, l.spent = false, nil, false, nil
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
		f.conf.Keeper.Drop(gateName(l.id))
	}
	// If something stays behind, the runtime still lists it, and the next Recover
	// tries again.
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

// An Ender is told before a running sandbox that a contract binds is ended, so that it can
// take the last evidence. Calls are concurrent, and delay the end.
type Ender interface {
	Ending(ctx context.Context, s Info)
}

// BeforeEnd makes e learn of the ends of bound sandboxes. Call it before [Fleet.Recover].
func (f *Fleet) BeforeEnd(e Ender) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ender = e
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

// finish takes a claimed sandbox down, ends its loan, and records its end as to.
// Its error wraps [ErrNotFound] if the sandbox had ended before.
func (f *Fleet) finish(ctx context.Context, l *liveSandbox, who auth.Principal, s Info, to State, reason string) error {
	f.mu.Lock()
	ender := f.ender
	f.mu.Unlock()
	if ender != nil && s.Contract != "" && s.State == Running && to == Killed {
		ender.Ending(ctx, s)
	}
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

// Kill ends a sandbox of who's project, also one that is paused. Its error wraps
// [ErrNotFound] if there is none or it has ended.
func (f *Fleet) Kill(ctx context.Context, who auth.Principal, id string) error {
	if err := auth.Need(who, auth.Reviewer); err != nil {
		return err
	}
	if _, err := f.Get(ctx, who, id); err != nil {
		return err
	}
	return f.kill(ctx, who, id, "killed", func(Info) bool { return true })
}

// kill ends a sandbox unless, when its turn has come, still says that it should not
// end any more. For example its life may have been extended in between.
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

// mayManage refuses agents and sandboxes: only the project's key and people manage
// sandboxes.
func mayManage(who auth.Principal) error {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return fmt.Errorf("%s may not manage sandboxes: %w", who, auth.ErrForbidden)
	}
	return nil
}

// Get returns a sandbox of who's project that lives, also one that is paused. The
// sandboxes of other projects are not found.
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

// List returns the living sandboxes of who's project, newest first. With all it
// includes those that have ended, up to 500 in total.
func (f *Fleet) List(ctx context.Context, who auth.Principal, all bool) ([]Info, error) {
	if err := mayManage(who); err != nil {
		return nil, err
	}
	if all {
		return f.rows.list(ctx, `where project_id = $1 order by started_at desc, id limit 500`, who.Project)
	}
	return f.rows.list(ctx, `where project_id = $1 and state in (`+quoted(alive)+`) order by started_at desc, id`, who.Project)
}

// SetTimeout makes a sandbox of who's project end d from now. With extend it never
// shortens its life.
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

// setTimeout is SetTimeout for a sandbox that the caller has claimed.
func (f *Fleet) setTimeout(ctx context.Context, who auth.Principal, s Info, d time.Duration, extend bool) (Info, error) {
	if s.State != Running {
		return Info{}, fmt.Errorf("set timeout of %s: %w", s.ID, ErrPaused)
	}
	ends, err := s.limitEnd(time.Now().Add(max(d, 0)))
	if err != nil {
		return Info{}, err
	}
	if extend && ends.Before(s.Ends) {
		return s, nil
	}
	s.Ends = ends
	err = f.rows.record(ctx, who, &s, change{
		from: []State{Running}, to: Running, verb: audit.SandboxTimeout, event: event.Updated, fields: audit.Fields{"ends": s.Ends.UTC().Format(time.RFC3339)},
	})
	return s, err
}

// SetEgress replaces the network rules of a sandbox of who's project. Its identity
// tokens, attached secrets and package registries stay as it was created with them.
// Connections that the new rules forbid are cut.
func (f *Fleet) SetEgress(ctx context.Context, who auth.Principal, id string, e policy.Egress) error {
	if err := auth.Need(who, auth.Owner); err != nil {
		return err
	}
	ctx, l, s, err := f.claimFor(ctx, who, id)
	if err != nil {
		return err
	}
	defer f.release(l)
	if err := s.refuseIfBound("change of the network"); err != nil {
		return err
	}
	old := s.Egress
	e.Tokens, e.Secrets, e.Packages = old.Tokens, old.Secrets, old.Packages
	if err := e.Validate(); err != nil {
		return err
	}
	if f.conf.CheckEgress != nil {
		if err := f.conf.CheckEgress(ctx, who, e); err != nil {
			return err
		}
	}
	redacted, err := json.Marshal(e.Redacted())
	if err != nil {
		return err
	}
	s.Egress = e
	// The network first, then the record: if the server crashes in between, the
	// sandbox has the new rules and not more than its owner asked for.
	if l.up {
		if err := f.network.Update(ctx, s.Principal(), e); err != nil {
			return fmt.Errorf("update network of %s: %w", id, err)
		}
	}
	err = f.rows.record(ctx, who, &s, change{
		from: []State{Running, Paused}, to: s.State, verb: audit.SandboxNetwork, event: event.Updated,
		fields: audit.Fields{"allow": fmt.Sprint(e.AllowOut), "deny": fmt.Sprint(e.DenyOut), "internet": strconv.FormatBool(e.Internet), "egress": string(redacted)},
	})
	if err != nil && l.up {
		err = errors.Join(err, f.network.Update(ctx, s.Principal(), old))
	}
	return err
}

// dir returns the directory of a snapshot.
func (f *Fleet) dir(name string) string { return filepath.Join(f.conf.Dir, name) }

// discard removes the files of a snapshot. An empty name means no snapshot.
func (f *Fleet) discard(name string) error {
	if name == "" {
		return nil
	}
	if err := errors.Join(os.RemoveAll(f.dir(name)), os.RemoveAll(f.dir(name)+".json")); err != nil {
		return fmt.Errorf("remove snapshot: %w", err)
	}
	return nil
}

// system returns the fleet itself as the actor of an audit entry about s.
func system(s Info) auth.Principal {
	return auth.Principal{Kind: auth.System, ID: "fleet", Project: s.Project}
}
