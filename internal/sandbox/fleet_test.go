package sandbox_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// A link is a fake network: each sandbox's guest is an HTTP server of this test.
type link struct {
	mu       sync.Mutex // guards the three below
	attached map[string]net.Listener
	inits    map[string]initRequest
	owners   map[string]auth.Principal

	silent  int    // so many of the guests to come take connections and never answer
	spoke   bool   // something has come out of each sandbox
	deaf    bool   // the guest never listens
	stopped bool   // the guest takes connections and never answers
	refuse  error  // of every Attach; nil means none
	cold    bool   // the guest never has its shell warm
	binds   string // the contract that each guest says confines it; empty means none

	ask func() // called when a guest is asked for its environment; nil means nothing is
}

// told returns the latest init request to the guest of a sandbox.
func (l *link) told(id string) initRequest {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.inits[id]
}

func (l *link) owner(id string) auth.Principal {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.owners[id]
}

// links returns the number of attached links.
func (l *link) links() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.attached)
}

type initRequest struct {
	channel string
	kept    bool // the environment was left as it is

	EnvVars       map[string]string
	Restored      bool
	ChannelSHA256 string
	SandboxID     string
}

func (l *link) Attach(_ context.Context, who auth.Principal, _ policy.Egress) (*os.File, error) {
	if l.refuse != nil {
		return nil, l.refuse
	}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	silent := l.silent > 0
	l.silent--
	l.mu.Unlock()
	if !l.deaf && !l.stopped && !silent {
		go func() {
			_ = http.Serve(lis, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/envs" {
					if l.ask != nil {
						l.ask()
					}
					l.mu.Lock()
					defer l.mu.Unlock()
					_ = json.NewEncoder(w).Encode(l.inits[who.ID].EnvVars)
					return
				}
				if r.URL.Path == "/run/state" {
					_ = json.NewEncoder(w).Encode(map[string]any{"contract": l.binds, "view": l.binds != ""})
					return
				}
				if r.URL.Path == "/warm" && l.cold {
					<-r.Context().Done()
					return
				}
				in := initRequest{channel: r.Header.Get(sandbox.ChannelHeader)}
				if r.URL.Path == "/init" && json.NewDecoder(r.Body).Decode(&in) == nil {
					l.mu.Lock()
					if in.EnvVars == nil {
						in.EnvVars, in.kept = l.inits[who.ID].EnvVars, true
					}
					l.inits[who.ID] = in
					l.mu.Unlock()
				}
				w.WriteHeader(http.StatusNoContent)
			}))
		}()
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.attached[who.ID], l.owners[who.ID] = lis, who
	return os.Open(os.DevNull)
}

func (l *link) Adopt(ctx context.Context, who auth.Principal, e policy.Egress, _ *os.File) error {
	f, err := l.Attach(ctx, who, e)
	if err == nil {
		f.Close()
	}
	return err
}

func (l *link) Handle(id string) (*os.File, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.attached[id] == nil {
		return nil, sandbox.ErrNotFound
	}
	return os.Open(os.DevNull)
}

func (l *link) Update(_ context.Context, who auth.Principal, _ policy.Egress) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.attached[who.ID] == nil {
		return sandbox.ErrNotFound
	}
	l.owners[who.ID] = who
	return nil
}

func (l *link) MuteIfSilent(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.attached[id] != nil && !l.spoke
}

func (l *link) Detach(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if lis := l.attached[id]; lis != nil {
		lis.Close()
	}
	delete(l.attached, id)
}

func (l *link) Dial(ctx context.Context, id string, port uint16) (net.Conn, error) {
	l.mu.Lock()
	lis := l.attached[id]
	l.mu.Unlock()
	if lis == nil {
		return nil, sandbox.ErrNotFound
	}
	if l.deaf || port != sandbox.GuestPort {
		return nil, sandbox.ErrPortClosed
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", lis.Addr().String())
}

// loans is a fake of the inboxes: it lends whatever it is given.
type loans struct {
	mu     sync.Mutex // guards what follows
	lent   map[string]auth.Secret
	check  error  // of every CheckLoan
	fail   error  // of every Lend
	during func() // called in Lend; nil means nothing is
	ended  chan string
}

func (l *loans) CheckLoan(_ context.Context, _ auth.Principal, _ auth.Secret) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.check
}

func (l *loans) Lend(_ context.Context, _, s auth.Principal, key auth.Secret) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.during != nil {
		l.during()
	}
	if l.fail == nil {
		l.lent[s.ID] = key
	}
	return l.fail
}

func (l *loans) Return(id string) {
	l.mu.Lock()
	delete(l.lent, id)
	l.mu.Unlock()
	if l.ended != nil {
		l.ended <- id
	}
}

// all returns the ids of the sandboxes that an inbox is lent to.
func (l *loans) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.lent))
}

type fixture struct {
	t       *testing.T
	db      *store.DB
	runtime *sandboxtest.Fake
	process *process
	link    *link
	fleet   *sandbox.Fleet
	conf    sandbox.Config
	loans   *loans
	ended   chan string // ids of sandboxes that have ended; nil if a test does not care

	who, stranger auth.Principal
}

func setup(t *testing.T, db *store.DB, change func(*sandbox.Config)) *fixture {
	t.Helper()
	f := &fixture{
		t: t, db: db, runtime: &sandboxtest.Fake{}, ended: make(chan string, 100),
		link: &link{attached: map[string]net.Listener{}, inits: map[string]initRequest{}, owners: map[string]auth.Principal{}},
	}
	f.conf = sandboxtest.Config(t)
	f.loans = &loans{lent: map[string]auth.Secret{}, ended: f.ended}
	f.conf.Inboxes = f.loans
	if change != nil {
		change(&f.conf)
	}
	f.open()
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		for i, p := range []*auth.Principal{&f.who, &f.stranger} {
			id, _, err := auth.NewProject(t.Context(), tx, fmt.Sprint("project", i))
			if err != nil {
				return err
			}
			*p = auth.Principal{Kind: auth.Project, ID: "crd_1", Project: id}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// A process is one program's view of the machine. A killed one gets no more news.
type process struct {
	*sandboxtest.Fake
	killed chan struct{}
	held   chan struct{} // Stop waits until it is closed; nil means that it does not wait
	saves  chan struct{} // Save waits until it is closed; nil means that it does not wait
}

func (p *process) Save(ctx context.Context, id, dir string, o sandbox.SaveOptions) error {
	if p.saves != nil {
		<-p.saves
	}
	return p.Fake.Save(ctx, id, dir, o)
}

// Stop of a killed process does nothing.
func (p *process) Stop(ctx context.Context, id string) error {
	if p.held != nil {
		select {
		case <-p.held:
		case <-p.killed:
			return nil
		}
	}
	return p.Fake.Stop(ctx, id)
}

func (p *process) Wait(ctx context.Context, id string) (string, error) {
	reason, err := p.Fake.Wait(ctx, id)
	select {
	case <-p.killed:
		<-ctx.Done()
	default:
	}
	return reason, err
}

// open replaces the fleet by a new one, like the start of a program after the
// previous one was killed.
func (f *fixture) open() {
	if f.process != nil {
		close(f.process.killed)
	}
	f.process = &process{Fake: f.runtime, killed: make(chan struct{})}
	fleet, err := sandbox.New(slog.New(slog.NewTextHandler(f.t.Output(), nil)), f.db, f.process, f.link, f.conf)
	if err != nil {
		f.t.Fatal(err)
	}
	f.fleet = fleet
}

func (f *fixture) create(r sandbox.Request) sandbox.Info {
	f.t.Helper()
	if r.Options.Timeout == 0 {
		r.Options.Timeout = time.Hour
	}
	s, err := f.fleet.Create(f.t.Context(), f.who, r)
	if err != nil {
		f.t.Fatal(err)
	}
	return s
}

// run runs the fleet until stop is called, which waits for its end.
func (f *fixture) run() (stop func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	done := make(chan error)
	go func() { done <- f.fleet.Run(ctx) }()
	return func() {
		cancel()
		<-done
	}
}

// verbs returns what the audit holds about a sandbox, oldest first.
func (f *fixture) verbs(id string) (out []string) {
	f.t.Helper()
	err := audit.View(f.t.Context(), f.db, func(tx *store.Tx) error {
		es, err := audit.List(f.t.Context(), tx, audit.Query{Object: id})
		for _, e := range slices.Backward(es) {
			out = append(out, string(e.Verb))
		}
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return out
}

func TestSandboxIsItsProjectsUntilItEnds(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		ctx := t.Context()
		s := f.create(sandbox.Request{Template: "base", Metadata: map[string]string{"k": "v"}, EnvVars: map[string]string{"A": "b"}, Inbox: "ibx_1"})

		// The guest was told who it is over the channel, whose key it does not hold.
		in := f.link.told(s.ID)
		spec, _ := f.runtime.Spec(s.ID)
		sum := sha256.Sum256([]byte(in.channel))
		if in.EnvVars["A"] != "b" || in.EnvVars["E2B_SANDBOX_ID"] != s.ID || !slices.Contains(spec.Env, "POSTERN_CHANNEL_SHA256="+hex.EncodeToString(sum[:])) {
			t.Errorf("init %+v, environment %v", in, spec.Env)
		}
		if strings.Contains(strings.Join(spec.Env, " "), in.channel) {
			t.Error("the guest holds the channel's key")
		}
		if got, err := f.fleet.Get(ctx, f.who, s.ID); err != nil || got.Metadata["k"] != "v" || got.State != sandbox.Running || got.Inbox != "ibx_1" {
			t.Errorf("Get = %+v, %v", got, err)
		}
		// Another project sees nothing of it, and an agent's key manages none.
		if _, err := f.fleet.Get(ctx, f.stranger, s.ID); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("another project's Get = %v", err)
		}
		if err := f.fleet.Kill(ctx, f.stranger, s.ID); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("another project's Kill = %v", err)
		}
		if _, err := f.fleet.List(ctx, auth.Principal{Kind: auth.Agent, Project: f.who.Project}, false); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("an agent's List = %v", err)
		}
		if f.fleet.AccessToken(s.ID) == f.fleet.TrafficToken(s.ID) || f.fleet.AccessToken(s.ID) == f.fleet.ChannelKey(s.ID) {
			t.Error("two purposes share a token")
		}

		// Two kills: one of them did it.
		var wg sync.WaitGroup
		errs := make(chan error, 2)
		for range 2 {
			wg.Go(func() { errs <- f.fleet.Kill(ctx, f.who, s.ID) })
		}
		wg.Wait()
		if a, b := <-errs, <-errs; (a == nil) == (b == nil) {
			t.Errorf("two kills: %v, %v", a, b)
		}
		if id := <-f.ended; id != s.ID {
			t.Errorf("Return(%s)", id)
		}
		if _, err := f.fleet.Dial(ctx, s.ID, sandbox.GuestPort); !errors.Is(err, sandbox.ErrNotFound) {
			t.Errorf("Dial after the end = %v", err)
		}
		if got, want := f.verbs(s.ID), []string{"sandbox.create", "sandbox.running", "sandbox.killed"}; !slices.Equal(got, want) {
			t.Errorf("audit = %v, want %v", got, want)
		}
	})
}

func TestCreateStopsAtTheLimit(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, func(c *sandbox.Config) { c.MaxSandboxes = 3 })
		var wg sync.WaitGroup
		errs := make(chan error, 8)
		for range 8 {
			wg.Go(func() {
				_, err := f.fleet.Create(t.Context(), f.who, sandbox.Request{Options: sandbox.Options{Timeout: time.Minute}})
				errs <- err
			})
		}
		wg.Wait()
		close(errs)
		made := 0
		for err := range errs {
			if err == nil {
				made++
			} else if !errors.Is(err, sandbox.ErrFull) {
				t.Errorf("Create = %v, want ErrFull", err)
			}
		}
		if made != 3 {
			t.Errorf("%d were made, want 3", made)
		}
	})
}

func TestSandboxEndsWhenItsTimeIsUp(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	ctx, cancel := context.WithCancel(t.Context())
	brief := sandbox.Request{Options: sandbox.Options{Timeout: 10 * time.Millisecond}}
	extended, long, short := f.create(brief), f.create(sandbox.Request{}), f.create(brief)
	if _, err := f.fleet.SetTimeout(ctx, f.who, extended.ID, time.Hour, false); err != nil {
		t.Fatal(err)
	}
	// Connecting never shortens a life.
	if s, err := f.fleet.SetTimeout(ctx, f.who, long.ID, time.Millisecond, true); err != nil || !s.Ends.Equal(long.Ends) {
		t.Errorf("extending made it end at %v, %v, want %v", s.Ends, err, long.Ends)
	}
	if _, err := f.fleet.SetTimeout(ctx, f.who, long.ID, 48*time.Hour, false); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("a timeout of two days: %v", err)
	}
	// Only now is anybody's time looked at: the first life was over before the
	// other's, but for what was made of it meanwhile.
	done := make(chan error)
	go func() { done <- f.fleet.Run(ctx) }()
	if id := <-f.ended; id != short.ID {
		t.Errorf("%s ended, want %s", id, short.ID)
	}
	if live, want := f.fleet.Live(), slices.Sorted(slices.Values([]string{long.ID, extended.ID})); !slices.Equal(live, want) {
		t.Errorf("live: %v, want %v", live, want)
	}
	// When the server stops, the rest is frozen, and Run waits for it.
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Run = %v", err)
	}
	if left, _ := f.runtime.List(t.Context()); len(left) != 0 {
		t.Errorf("left on the machine: %v", left)
	}
	for _, id := range []string{long.ID, extended.ID} {
		if got := f.state(id); got != sandbox.Paused {
			t.Errorf("%s is %s, want that it was frozen", id, got)
		}
	}
}

// TestExtendedSandboxCanStillBeUsed: a sandbox that was extended at the moment when
// it was to end works as before.
func TestExtendedSandboxCanStillBeUsed(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	s := f.create(sandbox.Request{})
	if err := f.fleet.EndInVain(t.Context(), f.who, s.ID); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("an end in vain = %v", err)
	}
	if err := f.fleet.Pause(t.Context(), f.who, s.ID, false); err != nil {
		t.Error(err)
	}
}

func TestDeadSandboxIsRecordedAsLost(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	s := f.create(sandbox.Request{})
	f.runtime.Die(s.ID, "out of memory")
	<-f.ended
	all, err := f.fleet.List(t.Context(), f.who, true)
	if err != nil || len(all) != 1 || all[0].State != sandbox.Lost || !strings.Contains(all[0].Reason, "out of memory") {
		t.Errorf("List = %+v, %v", all, err)
	}
	if f.link.links() != 0 {
		t.Error("its link is still there")
	}
}

// TestRecoverRemovesWhatAKilledServerLeft: without a keeper nothing of a killed
// server can be taken back, so it is removed and recorded as lost.
func TestRecoverRemovesWhatAKilledServerLeft(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		a, b := f.create(sandbox.Request{}), f.create(sandbox.Request{})
		f.open() // another program on the same database and machine
		if err := f.fleet.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		if left, _ := f.runtime.List(t.Context()); len(left) != 0 {
			t.Errorf("left on the machine: %v", left)
		}
		for _, id := range []string{a.ID, b.ID} {
			if got := f.verbs(id); !slices.Contains(got, "sandbox.lost") {
				t.Errorf("audit of %s = %v", id, got)
			}
		}
		if live, err := f.fleet.List(t.Context(), f.who, false); err != nil || len(live) != 0 {
			t.Errorf("still listed: %v, %v", live, err)
		}
	})
}
