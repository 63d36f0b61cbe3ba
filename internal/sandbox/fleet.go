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
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// Config is what the operator sets for all sandboxes.
type Config struct {
	// Key is the server's secret. Tokens of sandboxes are derived from it, so
	// that they need not be stored and stay the same across restarts.
	Key []byte

	MaxSandboxes int           // at the same time, all projects together; 0 means 50
	MaxTimeout   time.Duration // longest life that can be asked for; 0 means 24 h
	StartTimeout time.Duration // until the guest must answer; 0 means 30 s

	CPUs      float64 // cores of each sandbox; 0 means 2
	MemoryMB  int64   // mebibytes of each sandbox; 0 means 1024
	DiskMB    int64   // mebibytes that each may write; 0 means 2048
	Processes int64   // of each sandbox; 0 means 512

	// Warmup says, for TCP ports of services that come up with a sandbox, how
	// long after its start a connection waits for them instead of being told
	// that the port is closed.
	Warmup map[uint16]time.Duration

	// OnEnd is called after a sandbox has ended; nil means nothing is called.
	OnEnd func(id string)
}

func (c *Config) setDefaults() error {
	if len(c.Key) < 32 {
		return errors.New("sandbox: the server's key has fewer than 32 bytes")
	}
	if c.CPUs < 0 || c.MemoryMB < 0 || c.DiskMB < 0 || c.Processes < 0 || c.MaxSandboxes < 0 {
		return errors.New("sandbox: a limit is negative")
	}
	c.MaxSandboxes = or(c.MaxSandboxes, 50)
	c.MaxTimeout = or(c.MaxTimeout, 24*time.Hour)
	c.StartTimeout = or(c.StartTimeout, 30*time.Second)
	c.CPUs = or(c.CPUs, 2)
	c.MemoryMB = or(c.MemoryMB, 1024)
	c.DiskMB = or(c.DiskMB, 2048)
	c.Processes = or(c.Processes, 512)
	if c.OnEnd == nil {
		c.OnEnd = func(string) {}
	}
	return nil
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

	watchers sync.WaitGroup // one for each live sandbox

	mu   sync.Mutex // guards live
	live map[string]*liveSandbox
}

// A liveSandbox is what memory holds of a sandbox between creating and ended.
type liveSandbox struct {
	since  time.Time // when it was asked for
	ready  bool      // written under Fleet.mu; the guest has been told who it is
	ending bool      // written under Fleet.mu; someone is ending it
	gone   chan struct{}
}

// New returns the fleet whose rows are in db. Call [Fleet.Recover] before use.
func New(log *slog.Logger, db *store.DB, r Runtime, n Network, c Config) (*Fleet, error) {
	if err := c.setDefaults(); err != nil {
		return nil, err
	}
	f := &Fleet{log: log, db: db, runtime: r, network: n, conf: c, live: map[string]*liveSandbox{}}
	f.http = &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			id, port, err := net.SplitHostPort(addr)
			if err != nil {
				return nil, err
			}
			p, err := strconv.ParseUint(port, 10, 16)
			if err != nil {
				return nil, err
			}
			return f.dialPatiently(ctx, id, uint16(p))
		},
		DisableCompression:  true, // bytes pass as they are
		MaxIdleConnsPerHost: 32,
		IdleConnTimeout:     90 * time.Second,
		WriteBufferSize:     128 << 10,
		ReadBufferSize:      128 << 10,
	}
	return f, nil
}

// Transport returns the way to services inside sandboxes: the host of a
// request's URL is "id:port".
func (f *Fleet) Transport() http.RoundTripper { return f.http }

// Dial connects to a TCP port inside a running sandbox.
func (f *Fleet) Dial(ctx context.Context, id string, port uint16) (net.Conn, error) {
	f.mu.Lock()
	l := f.live[id]
	ok := l != nil && l.ready && !l.ending
	f.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("dial %s: %w", id, ErrNotFound)
	}
	return f.network.Dial(ctx, id, port)
}

// dialPatiently is Dial that waits for services that are still coming up.
func (f *Fleet) dialPatiently(ctx context.Context, id string, port uint16) (net.Conn, error) {
	for {
		c, err := f.Dial(ctx, id, port)
		if !errors.Is(err, ErrPortClosed) || !f.warmingUp(id, port) {
			return c, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (f *Fleet) warmingUp(id string, port uint16) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.live[id]
	return l != nil && time.Since(l.since) < f.conf.Warmup[port]
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

func newID() string {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	b := make([]byte, 20)
	rand.Read(b)
	for i := range b {
		b[i] = letters[int(b[i])%len(letters)] // the bias costs less than one of 103 bits
	}
	return "i" + string(b)
}

// A Request asks for a sandbox.
type Request struct {
	Template string            // its id
	Rootfs   string            // its root file system
	Metadata map[string]string // at most 100 entries and 64 KiB
	EnvVars  map[string]string // likewise
	Timeout  time.Duration     // until it is killed
	Egress   policy.Egress     // where it may connect, within the project's ceiling
	Inbox    string            // id of the inbox it may propose for, or empty
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
	if err := f.CheckTimeout(r.Timeout); err != nil {
		return err
	}
	if err := checkMap("metadata", r.Metadata); err != nil {
		return err
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
	if err := f.check(r); err != nil {
		return Info{}, err
	}
	s := Info{
		ID: newID(), Project: who.Project, Template: r.Template, State: Creating, Metadata: r.Metadata, Inbox: r.Inbox, Egress: r.Egress,
		CPUs: f.conf.CPUs, MemoryMB: f.conf.MemoryMB, DiskMB: f.conf.DiskMB, Started: time.Now(),
	}
	s.Ends = s.Started.Add(f.conf.StartTimeout)
	if err := f.insert(ctx, who, s); err != nil {
		return Info{}, err
	}
	l := &liveSandbox{since: s.Started, gone: make(chan struct{})}
	f.mu.Lock()
	f.live[s.ID] = l
	f.mu.Unlock()

	if err := f.start(ctx, s, r); err != nil {
		// The caller may be gone; what was begun is taken back all the same.
		ctx := context.WithoutCancel(ctx)
		return Info{}, errors.Join(fmt.Errorf("start sandbox %s: %w", s.ID, err), f.end(ctx, system(s), s.ID, Failed, err.Error()))
	}
	s, err := f.running(ctx, s, r.Timeout)
	if err != nil {
		ctx := context.WithoutCancel(ctx)
		return Info{}, errors.Join(err, f.end(ctx, system(s), s.ID, Failed, err.Error()))
	}
	f.watchers.Go(func() { f.watch(context.WithoutCancel(ctx), s) })
	return s, nil
}

// start brings the machine's part up, until the guest has been told who it is.
func (f *Fleet) start(ctx context.Context, s Info, r Request) error {
	ctx, cancel := context.WithTimeout(ctx, f.conf.StartTimeout)
	defer cancel()
	link, err := f.network.Attach(ctx, s.Principal(), r.Egress)
	if err != nil {
		return fmt.Errorf("attach network: %w", err)
	}
	channel := sha256.Sum256([]byte(f.ChannelKey(s.ID)))
	err = f.runtime.Start(ctx, Spec{
		ID: s.ID, Rootfs: r.Rootfs, Hostname: s.ID, Link: link,
		CPUs: f.conf.CPUs, MemoryMB: f.conf.MemoryMB, DiskMB: f.conf.DiskMB, Processes: f.conf.Processes,
		Env: []string{"POSTERN_CHANNEL_SHA256=" + hex.EncodeToString(channel[:])},
	})
	if err != nil {
		return fmt.Errorf("start runtime: %w", err)
	}
	env := maps.Clone(r.EnvVars)
	if env == nil {
		env = map[string]string{}
	}
	env["E2B_SANDBOX"], env["E2B_SANDBOX_ID"], env["E2B_TEMPLATE_ID"] = "true", s.ID, r.Template
	return f.initGuest(ctx, s.ID, env)
}

func (f *Fleet) setReady(id string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.live[id]
	if l == nil || l.ending {
		return false
	}
	l.ready = true
	return true
}

// watch waits until the sandbox is gone and, if nobody asked for that, records
// it as lost.
func (f *Fleet) watch(ctx context.Context, s Info) {
	reason, err := f.runtime.Wait(ctx, s.ID)
	if err != nil {
		reason = err.Error()
	}
	if err := f.end(ctx, system(s), s.ID, Lost, reason); err != nil && !errors.Is(err, ErrNotFound) {
		f.log.ErrorContext(ctx, "end lost sandbox", "sandbox", s.ID, "err", err)
	}
}

// Kill ends a sandbox of who's project. It returns [ErrNotFound] if there is
// none, or no longer.
func (f *Fleet) Kill(ctx context.Context, who auth.Principal, id string) error {
	if _, err := f.Get(ctx, who, id); err != nil {
		return err
	}
	return f.end(context.WithoutCancel(ctx), who, id, Killed, "killed")
}

// end takes down the machine's part and then records the end, once. Who comes
// second waits for the first and gets ErrNotFound.
func (f *Fleet) end(ctx context.Context, who auth.Principal, id string, to State, reason string) error {
	f.mu.Lock()
	l := f.live[id]
	if l == nil {
		f.mu.Unlock()
		return fmt.Errorf("end %s: %w", id, ErrNotFound)
	}
	if l.ending {
		f.mu.Unlock()
		<-l.gone
		return fmt.Errorf("end %s: %w", id, ErrNotFound)
	}
	l.ending = true
	f.mu.Unlock()

	f.network.Detach(id)
	err := f.runtime.Stop(ctx, id)
	if err != nil {
		err = fmt.Errorf("stop %s: %w", id, err)
		f.log.ErrorContext(ctx, "stop sandbox", "sandbox", id, "err", err)
	}
	// The row is closed even if something stays behind: the runtime's List
	// still names it and the next Recover tries again.
	err = errors.Join(err, f.ended(ctx, who, id, to, reason))
	f.mu.Lock()
	delete(f.live, id)
	f.mu.Unlock()
	close(l.gone)
	f.conf.OnEnd(id)
	return err
}

// SetTimeout makes a sandbox of who's project end after d from now. With
// extend it never makes the life shorter.
func (f *Fleet) SetTimeout(ctx context.Context, who auth.Principal, id string, d time.Duration, extend bool) (Info, error) {
	if d > f.conf.MaxTimeout {
		return Info{}, f.CheckTimeout(d)
	}
	s, err := f.Get(ctx, who, id)
	if err != nil {
		return Info{}, err
	}
	ends := time.Now().Add(max(d, 0))
	if extend && ends.Before(s.Ends) {
		return s, nil
	}
	s.Ends = ends
	return s, f.setEnds(ctx, who, s)
}

// Run ends sandboxes whose time is up, until ctx is done; then it ends all.
func (f *Fleet) Run(ctx context.Context) error {
	t := time.NewTicker(250 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			// Their links end in this process: they cannot outlive it.
			f.endAll(context.WithoutCancel(ctx), "the server was stopped")
			f.watchers.Wait()
			return ctx.Err()
		case <-t.C:
		}
		ids, err := f.expired(ctx)
		if err != nil {
			f.log.ErrorContext(ctx, "find expired sandboxes", "err", err)
			continue
		}
		for _, s := range ids {
			// Each in its own goroutine: one slow end must not delay the others.
			f.watchers.Go(func() {
				err := f.end(context.WithoutCancel(ctx), system(s), s.ID, Killed, "its time was up")
				if err != nil && !errors.Is(err, ErrNotFound) {
					f.log.ErrorContext(ctx, "end expired sandbox", "sandbox", s.ID, "err", err)
				}
			})
		}
	}
}

func (f *Fleet) endAll(ctx context.Context, reason string) {
	f.mu.Lock()
	ids := slices.Collect(maps.Keys(f.live))
	f.mu.Unlock()
	var wg sync.WaitGroup
	for _, id := range ids {
		wg.Go(func() {
			who := auth.Principal{Kind: auth.System, ID: "fleet"}
			if err := f.end(ctx, who, id, Killed, reason); err != nil && !errors.Is(err, ErrNotFound) {
				f.log.ErrorContext(ctx, "end sandbox", "sandbox", id, "err", err)
			}
		})
	}
	wg.Wait()
}

// Recover removes what a former process left on this machine and records the
// sandboxes that it ran as lost. It is called once, before anything else.
func (f *Fleet) Recover(ctx context.Context) error {
	left, err := f.runtime.List(ctx)
	if err != nil {
		return fmt.Errorf("list what is left: %w", err)
	}
	for _, id := range left {
		if err := f.runtime.Stop(ctx, id); err != nil {
			return fmt.Errorf("remove what is left of sandbox %s: %w", id, err)
		}
		f.log.InfoContext(ctx, "removed what was left of a sandbox", "sandbox", id)
	}
	return f.loseAll(ctx, "the server stopped without ending it; it was removed at the next start")
}

func system(s Info) auth.Principal {
	return auth.Principal{Kind: auth.System, ID: "fleet", Project: s.Project}
}
