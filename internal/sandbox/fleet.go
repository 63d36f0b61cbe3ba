package sandbox

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/event"
	"postern/internal/policy"
	"postern/internal/store"
)

// Config is what the operator sets for all sandboxes.
type Config struct {
	// Key is the server's secret. Tokens of sandboxes are derived from it, so
	// that they need not be stored and stay the same across restarts.
	Key []byte
	// Server is the id of this server among those that use the database: sandboxes
	// of others are not seen. Empty is an id too.
	Server string
	// Dir is the directory of snapshots. It must be this fleet's alone; it is
	// made if need be.
	Dir string
	// Base returns what a template gives to sandboxes. Its error wraps
	// [ErrNotFound] if there is no template of that id any more.
	Base func(ctx context.Context, template string) (Base, error)
	// Keeper holds the links of running sandboxes while no server runs; nil
	// means that they are lost with it.
	Keeper Keeper
	// Mount makes a volume ready for a sandbox; it is called at each start and
	// resume. Nil means that there are no volumes.
	Mount func(ctx context.Context, project, id string, v VolumeMount) (Mount, error)
	// Unmounted is called when a sandbox no longer has its volumes.
	Unmounted func(ctx context.Context, id string)

	MaxSandboxes int           // at the same time, all projects together; 0 means 50
	MaxTimeout   time.Duration // longest life that can be asked for; 0 means 24 h
	StartTimeout time.Duration // until the guest must answer; 0 means 30 s
	WarmTimeout  time.Duration // until the shell of a guest that is nobody's must have run; 0 means StartTimeout
	SaveTimeout  time.Duration // until a snapshot must be written; 0 means 2 min
	KeepPaused   time.Duration // after which a paused sandbox is killed; 0 means never
	MaxPaused    int           // paused at the same time, all projects together; 0 means 200
	MaxSnapshots int           // that callers made and did not delete, all projects together; 0 means 100
	KeepFreeMB   int64         // mebibytes of the disk of Dir that no pause, fork or snapshot may take; 0 means 512

	CPUs      float64 // cores of each sandbox; 0 means 2
	MemoryMB  int64   // mebibytes of each sandbox; 0 means 1024
	DiskMB    int64   // mebibytes that each may write; 0 means 2048
	Processes int64   // of each sandbox; 0 means 512

	// Prepare names templates whose snapshots are made when the fleet starts,
	// and not when they are first asked for.
	Prepare []string
	// Cold makes every sandbox boot, instead of going on from its template's
	// snapshot.
	Cold bool
	// Pool bounds the sandboxes that wait to be asked for.
	Pool PoolConfig
	// Snapshots lets callers make snapshots of their sandboxes.
	Snapshots bool

	// Warmup says, for TCP ports of services that come up with a sandbox, how
	// long after its start a connection waits for them instead of being told
	// that the port is closed.
	Warmup map[uint16]time.Duration

	// OnEnd is called after a sandbox has ended; nil means nothing is called.
	OnEnd func(id string)
}

// A Base is what a template gives to the sandboxes that start from it.
type Base struct {
	Rootfs string // directory that is the read-only lower layer of the root file system
	// Key changes whenever a sandbox that boots from the template would be
	// another one: with its files, and with the guest.
	Key string
	// Probes must succeed before a booted sandbox is worth a snapshot.
	Probes []Probe
}

// A Probe is an HTTP request that a service inside answers with 200 when it
// is ready.
type Probe struct {
	Port uint16
	Path string
}

func (c *Config) setDefaults() error {
	if len(c.Key) < 32 {
		return errors.New("sandbox: the server's key has fewer than 32 bytes")
	}
	if c.Dir == "" || c.Base == nil {
		return errors.New("sandbox: no directory for snapshots, or no templates")
	}
	if c.CPUs < 0 || c.MemoryMB < 0 || c.DiskMB < 0 || c.Processes < 0 || c.MaxSandboxes < 0 || c.MaxPaused < 0 || c.MaxSnapshots < 0 || c.KeepFreeMB < 0 {
		return errors.New("sandbox: a limit is negative")
	}
	c.MaxSandboxes = or(c.MaxSandboxes, 50)
	c.MaxPaused = or(c.MaxPaused, 200)
	c.MaxSnapshots = or(c.MaxSnapshots, 100)
	c.KeepFreeMB = or(c.KeepFreeMB, 512)
	c.MaxTimeout = or(c.MaxTimeout, 24*time.Hour)
	c.StartTimeout = or(c.StartTimeout, 30*time.Second)
	c.WarmTimeout = or(c.WarmTimeout, c.StartTimeout)
	c.SaveTimeout = or(c.SaveTimeout, 2*time.Minute)
	c.CPUs = or(c.CPUs, 2)
	c.MemoryMB = or(c.MemoryMB, 1024)
	c.DiskMB = or(c.DiskMB, 2048)
	c.Processes = or(c.Processes, 512)
	if c.OnEnd == nil {
		c.OnEnd = func(string) {}
	}
	return c.Pool.check()
}

func or[T comparable](v, zero T) T {
	var none T
	if v == none {
		return zero
	}
	return v
}

// Fleet is all sandboxes of this machine. It is safe for concurrent use.
type Fleet struct {
	log     *slog.Logger
	db      *store.DB
	runtime Runtime
	network Network
	conf    Config
	http    *http.Transport // dials "id:port" through network

	workers   sync.WaitGroup // goroutines that outlive a call
	templates templateSnapshots
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
	f.templates.all = map[string]*templateSnapshot{}
	f.pool.wake = make(chan struct{}, 1)
	return f, nil
}

// derive returns a token of one sandbox for one purpose, in hexadecimal.
func (f *Fleet) derive(purpose, id string) string {
	m := hmac.New(sha256.New, f.conf.Key)
	m.Write([]byte(purpose + "\x00" + id))
	return hex.EncodeToString(m.Sum(nil))
}

// AccessToken returns the token that opens the sandbox's data plane.
func (f *Fleet) AccessToken(id string) auth.Secret { return auth.Secret(f.derive("access", id)) }

// TrafficToken returns the token that opens the sandbox's other ports when its
// public traffic is not allowed.
func (f *Fleet) TrafficToken(id string) auth.Secret { return auth.Secret(f.derive("traffic", id)) }

// ChannelKey returns what the host shows the guest with each request. The
// guest holds only its hash, so nothing that can be read inside the sandbox
// speaks for the host.
func (f *Fleet) ChannelKey(id string) auth.Secret { return auth.Secret(f.derive("channel", id)) }

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

// A Request asks for a sandbox.
type Request struct {
	Template string            // its id
	Snapshot string            // id of a snapshot to go on from, of the same template; empty means the template's own
	Metadata map[string]string // at most 100 entries and 64 KiB
	EnvVars  map[string]string // likewise
	Egress   policy.Egress     // where it may connect, within the project's ceiling
	Inbox    string            // id of the inbox it may propose for, or empty
	Options  Options
}

// CheckTimeout returns an error that wraps [ErrInvalid] unless a sandbox may
// live for d.
func (f *Fleet) CheckTimeout(d time.Duration) error {
	if d <= 0 {
		return fmt.Errorf("%w: timeout must be greater than 0", ErrInvalid)
	}
	if d > f.conf.MaxTimeout {
		return fmt.Errorf("%w: timeout is %d s; at most %d s are allowed", ErrInvalid, int64(d.Seconds()), int64(f.conf.MaxTimeout.Seconds()))
	}
	return nil
}

func (f *Fleet) check(r Request) error {
	if err := f.CheckTimeout(r.Options.Timeout); err != nil {
		return err
	}
	switch o := r.Options; {
	case o.FilesOnly && !o.AutoPause:
		return fmt.Errorf("%w: autoPauseMemory: false needs autoPause", ErrInvalid)
	case o.FilesOnly && o.AutoResume:
		return fmt.Errorf("%w: autoResume: a sandbox that was paused without its memory is not resumed by traffic: want autoPauseMemory true", ErrInvalid)
	case o.AutoResume && !o.AutoPause:
		return fmt.Errorf("%w: autoResume: needs autoPause", ErrInvalid)
	}
	if len(r.Options.Volumes) > 0 && f.conf.Mount == nil {
		return fmt.Errorf("%w: volumeMounts: this server has no volumes", ErrInvalid)
	}
	if err := checkMap("metadata", r.Metadata); err != nil {
		return err
	}
	for k := range r.EnvVars {
		// Asked by the guest too, for whom it is too late to be told by name.
		if k == "" || strings.Contains(k, "=") {
			return fmt.Errorf("%w: envVars: %q is not a name of an environment variable", ErrInvalid, k)
		}
	}
	return checkMap("envVars", r.EnvVars)
}

func checkMap(field string, m map[string]string) error {
	size := 0
	for k, v := range m {
		if slices.Contains([]byte(k+v), 0) {
			return fmt.Errorf("%w: %s[%q] holds a NUL byte", ErrInvalid, field, k)
		}
		size += len(k) + len(v)
	}
	if len(m) > 100 || size > 64<<10 {
		return fmt.Errorf("%w: %s has %d entries and %d bytes; at most 100 entries and 65536 bytes are allowed", ErrInvalid, field, len(m), size)
	}
	return nil
}

// Create makes a sandbox for who's project and returns when its guest answers.
func (f *Fleet) Create(ctx context.Context, who auth.Principal, r Request) (Info, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Info{}, err
	}
	if err := f.check(r); err != nil {
		return Info{}, err
	}
	base, err := f.conf.Base(ctx, r.Template)
	if err != nil {
		return Info{}, err
	}
	// Asked again with the row. Without this one, what is refused would first have
	// cost a sandbox that waited, and another restore in its place.
	if err := f.db.View(ctx, func(tx *store.Tx) error { return f.room(ctx, tx) }); err != nil {
		return Info{}, fmt.Errorf("create sandbox: %w", err)
	}
	s := Info{
		ID: newID(), Project: who.Project, Template: r.Template, State: Creating, Metadata: r.Metadata, Inbox: r.Inbox, Egress: r.Egress,
		Options: r.Options, Execution: newExecution(),
		CPUs: f.conf.CPUs, MemoryMB: f.conf.MemoryMB, DiskMB: f.conf.DiskMB, Started: time.Now(),
	}
	var from source
	if r.Snapshot != "" {
		n, err := f.snapshot(ctx, who, r.Snapshot)
		if err != nil {
			return Info{}, err
		}
		from = source{dir: f.dir(n.ID), channel: n.Sandbox}
		s.CPUs, s.MemoryMB, s.DiskMB = n.cpus, n.memoryMB, n.diskMB
	}
	// A sandbox that waits, and the template's snapshot, have no volumes; memory
	// goes on only with the mounts that it had.
	var warm *warmSandbox
	if r.Snapshot == "" && len(r.Options.Volumes) == 0 {
		if warm = f.takeWarm(base.Key); warm != nil {
			s.ID = warm.live.id
		} else {
			from = f.templateSource(r.Template, base)
		}
	}
	return f.create(ctx, who, s, base, from, warm, initBody{EnvVars: environment(r.EnvVars)})
}

// environment is what the guest is told: never nil, which would leave what the
// snapshot had.
func environment(env map[string]string) map[string]string {
	if env == nil {
		return map[string]string{}
	}
	return env
}

// create records a sandbox, brings it up and answers for both.
func (f *Fleet) create(caller context.Context, who auth.Principal, s Info, base Base, from source, warm *warmSandbox, body initBody) (_ Info, err error) {
	timeout := s.Options.Timeout
	s.Ends = s.Started.Add(f.conf.StartTimeout)
	var ctx context.Context //nolint:contextcheck // a sandbox that waited has been claimed, with a context, since it was made
	var l *liveSandbox
	if warm != nil {
		ctx, l = warm.ctx, warm.live
	} else if ctx, l, err = f.claim(caller, s.ID); err != nil {
		return Info{}, err
	}
	defer f.release(l)
	// Who asked for it and left would never learn its id.
	stop := context.AfterFunc(caller, l.cancel)
	defer stop()
	if err := f.insert(ctx, who, s); err != nil {
		return Info{}, errors.Join(err, f.takeDown(context.WithoutCancel(ctx), l))
	}
	whole, cancel := context.WithTimeout(ctx, f.conf.StartTimeout)
	defer cancel()
	if warm != nil {
		if err = f.handOver(whole, l, s, body); err != nil {
			err = errors.Join(err, f.takeDown(context.WithoutCancel(ctx), l))
			f.log.WarnContext(ctx, "hand over a waiting sandbox", "sandbox", s.ID, "err", err)
			from, warm = f.templateSource(s.Template, base), nil
		}
	}
	if warm == nil && from.template {
		err = f.bringUpFast(whole, l, s, base, from, body)
		if err != nil && whole.Err() == nil {
			// The template's snapshot is a means to be fast, not a condition.
			err = errors.Join(err, f.takeDown(ctx, l))
			f.log.WarnContext(ctx, "start from a template's snapshot; booting instead", "sandbox", s.ID, "err", err)
			f.dropTemplateSnapshot(ctx, base.Key)
			err = f.bringUp(whole, l, s, base, source{}, body)
		}
	} else if warm == nil {
		err = f.bringUp(whole, l, s, base, from, body)
	}
	if err == nil {
		s.Started = time.Now().UTC().Truncate(time.Microsecond)
		s.Ends = s.Started.Add(timeout)
		err = f.record(ctx, who, &s, change{
			from: []State{Creating}, to: Running, verb: audit.SandboxRunning, event: event.Created, fields: audit.Fields{"ends": s.Ends.Format(time.RFC3339)},
		})
	}
	if err != nil {
		err = fmt.Errorf("start sandbox %s: %w", s.ID, err)
		// The caller may be gone; what was begun is taken back all the same.
		return Info{}, errors.Join(err, f.finish(context.WithoutCancel(ctx), l, system(s), s, Failed, err.Error()))
	}
	f.setReady(l, true)
	return s, nil
}

// A source is what a sandbox is started from. The zero source is a boot.
type source struct {
	dir      string // of a snapshot
	channel  string // the sandbox whose channel key the guest in it has
	files    bool   // it holds files only, so the guest boots
	template bool   // it is its template's own
}

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
		s, err := f.row(work, l.id)
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
	rerr := f.record(ctx, who, &s, change{
		from: []State{Creating, Running, Pausing, Paused, Resuming}, to: to,
		verb: ended(to), event: event.Killed, fields: audit.Fields{"reason": reason},
	})
	if rerr != nil {
		return errors.Join(err, rerr)
	}
	f.conf.OnEnd(s.ID)
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
	s, err := f.row(ctx, id)
	if err != nil {
		return err
	}
	if !slices.Contains(alive, s.State) || !still(s) {
		return fmt.Errorf("end %s: %w", id, ErrNotFound)
	}
	return f.finish(ctx, l, who, s, Killed, reason)
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
	err := f.record(ctx, who, &s, change{
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
	err = f.record(ctx, who, &s, change{
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
