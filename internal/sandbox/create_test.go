package sandbox_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// mounts is a fake of the volumes: it counts the sandboxes that have each mounted.
type mounts struct {
	dir string

	mu    sync.Mutex // guards what follows
	check error      // of every CheckVolumes
	fail  error      // of every Mount after the first
	held  map[string]int
}

func (m *mounts) use(c *sandbox.Config) {
	c.CheckVolumes = func(context.Context, string, []sandbox.VolumeMount) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.check
	}
	c.Mount = func(_ context.Context, _, id string, v sandbox.VolumeMount) (sandbox.Mount, error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.held[id] > 0 && m.fail != nil {
			return sandbox.Mount{}, m.fail
		}
		m.held[id]++
		return sandbox.Mount{Source: m.dir, Destination: v.Path}, nil
	}
	c.Unmounted = func(_ context.Context, id string) {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.held, id)
	}
}

// all returns the ids of the sandboxes that have volumes mounted.
func (m *mounts) all() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.held))
}

// TestFailedCreateUndoesEachStep breaks each step of a create in turn. Whatever
// the steps before it did is undone: no link, no process, no volume, no loan.
func TestFailedCreateUndoesEachStep(t *testing.T) {
	boom := errors.New("boom")
	good := sandbox.Request{
		Inbox: "ibx_1", InboxKey: "pib_x",
		Options: sandbox.Options{Timeout: time.Minute, Volumes: []sandbox.VolumeMount{{Name: "a", Path: "/a"}, {Name: "b", Path: "/b"}}},
	}
	with := func(change func(*sandbox.Request)) sandbox.Request {
		r := good
		change(&r)
		return r
	}
	for _, tt := range []struct {
		name   string
		broken func(*fixture, *mounts)
		req    sandbox.Request
		want   error
		loan   bool // the error is about the inbox key
		row    bool // it got as far as a row, which then says that it failed
	}{
		{name: "no timeout", req: sandbox.Request{}, want: sandbox.ErrInvalid},
		{name: "timeout above the limit", req: with(func(r *sandbox.Request) { r.Options.Timeout = 25 * time.Hour }), want: sandbox.ErrInvalid},
		{name: "too much metadata", req: with(func(r *sandbox.Request) { r.Metadata = map[string]string{"x": strings.Repeat("x", 65<<10)} }), want: sandbox.ErrInvalid},
		{name: "variable with empty name", req: with(func(r *sandbox.Request) { r.EnvVars = map[string]string{"": "x"} }), want: sandbox.ErrInvalid},
		{name: "variable with equals sign", req: with(func(r *sandbox.Request) { r.EnvVars = map[string]string{"a=b": "x"} }), want: sandbox.ErrInvalid},
		{name: "variable with NUL", req: with(func(r *sandbox.Request) { r.EnvVars = map[string]string{"x": "a\x00b"} }), want: sandbox.ErrInvalid},
		{name: "check of volumes", broken: func(_ *fixture, m *mounts) { m.check = boom }, req: good, want: boom},
		{name: "check of the inbox key", broken: func(f *fixture, _ *mounts) { f.loans.check = boom }, req: good, want: boom, loan: true},
		{name: "template", req: with(func(r *sandbox.Request) { r.Template = "gone" }), want: sandbox.ErrNoTemplate},
		{name: "snapshot", req: with(func(r *sandbox.Request) { r.Snapshot = "s1" }), want: sandbox.ErrNoSnapshot},
		{name: "second of two mounts", broken: func(_ *fixture, m *mounts) { m.fail = boom }, req: good, want: boom, row: true},
		{name: "link", broken: func(f *fixture, _ *mounts) { f.link.refuse = boom }, req: good, want: boom, row: true},
		{name: "runtime", broken: func(f *fixture, _ *mounts) { f.runtime.FailStart(boom) }, req: good, want: boom, row: true},
		{name: "guest", broken: func(f *fixture, _ *mounts) { f.link.deaf = true }, req: good, want: context.DeadlineExceeded, row: true},
		{name: "loan", broken: func(f *fixture, _ *mounts) { f.loans.fail = boom }, req: good, want: boom, loan: true, row: true},
		{name: "record that it runs", broken: func(f *fixture, _ *mounts) {
			f.loans.during = func() { f.exec(`update sandbox set state = 'lost'`) }
		}, req: good, want: sandbox.ErrNotFound, row: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := &mounts{dir: t.TempDir(), held: map[string]int{}}
			f := setup(t, storetest.SQLite(t), func(c *sandbox.Config) {
				if tt.name == "guest" {
					c.StartTimeout = 300 * time.Millisecond
				}
				m.use(c)
			})
			if tt.broken != nil {
				tt.broken(f, m)
			}
			_, err := f.fleet.Create(t.Context(), f.who, tt.req)
			if !errors.Is(err, tt.want) {
				t.Errorf("Create = %v, want %v", err, tt.want)
			}
			if loan, ok := errors.AsType[*sandbox.LoanError](err); ok != tt.loan || ok && !errors.Is(loan.Err, boom) {
				t.Errorf("Create = %v; want an error of the loan: %t", err, tt.loan)
			}
			left, _ := f.runtime.List(t.Context())
			if f.link.links() != 0 || len(left) != 0 || len(f.fleet.Live()) != 0 {
				t.Errorf("left: %d links, runtime %v, live %v", f.link.links(), left, f.fleet.Live())
			}
			if v, l := m.all(), f.loans.all(); len(v) != 0 || len(l) != 0 {
				t.Errorf("left: volumes of %v, loans of %v", v, l)
			}
			all, err := f.fleet.List(t.Context(), f.who, true)
			if err != nil || (len(all) == 1) != tt.row || tt.row && all[0].State != sandbox.Failed && all[0].State != sandbox.Lost {
				t.Errorf("rows: %+v, %v", all, err)
			}
		})
	}
}

// TestCreateLendsInbox: the inbox is lent when Create returns, and only until the
// sandbox ends.
func TestCreateLendsInbox(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	s := f.create(sandbox.Request{Inbox: "ibx_1", InboxKey: "pib_x"})
	other := f.create(sandbox.Request{Inbox: "ibx_1"})
	if got := f.loans.all(); !slices.Equal(got, []string{s.ID}) {
		t.Errorf("lent to %v, want %s alone", got, s.ID)
	}
	if _, _, err := f.fleet.Connect(t.Context(), f.who, other.ID, sandbox.ConnectRequest{Timeout: time.Minute, InboxKey: "pib_x"}); err != nil {
		t.Error(err)
	}
	for _, id := range []string{s.ID, other.ID} {
		if err := f.fleet.Kill(t.Context(), f.who, id); err != nil {
			t.Error(err)
		}
	}
	if got := f.loans.all(); len(got) != 0 {
		t.Errorf("still lent to %v", got)
	}
}

// TestRefusedLoanLeavesSandboxRunning: Connect with a bad key fails, but does not
// cost the sandbox.
func TestRefusedLoanLeavesSandboxRunning(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	s := f.create(sandbox.Request{Inbox: "ibx_1"})
	f.loans.fail = errors.New("boom")
	_, _, err := f.fleet.Connect(t.Context(), f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute, InboxKey: "pib_x"})
	if _, ok := errors.AsType[*sandbox.LoanError](err); !ok {
		t.Errorf("Connect = %v, want an error of the loan", err)
	}
	if got := f.state(s.ID); got != sandbox.Running {
		t.Errorf("state %s, want running", got)
	}
}

// TestLoanEndsWithSandbox: a sandbox that is killed while its creator's request
// lends an inbox to it must not leave the key open, since its end comes only once.
func TestLoanEndsWithSandbox(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	s := f.create(sandbox.Request{Inbox: "ibx_1"})
	killed := make(chan error, 1)
	f.loans.during = func() {
		go func() { killed <- f.fleet.Kill(t.Context(), f.who, s.ID) }()
		time.Sleep(50 * time.Millisecond) // the kill must be able to overtake if nothing prevents it
	}
	_, _, err := f.fleet.Connect(t.Context(), f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute, InboxKey: "pib_x"})
	if err != nil {
		t.Error(err)
	}
	if err := <-killed; err != nil {
		t.Error(err)
	}
	if got := f.loans.all(); len(got) != 0 {
		t.Errorf("still lent to %v", got)
	}
	_, _, err = f.fleet.Connect(t.Context(), f.who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute, InboxKey: "pib_x"})
	if got := f.loans.all(); !errors.Is(err, sandbox.ErrNotFound) || len(got) != 0 {
		t.Errorf("Connect after the end = %v, lent to %v", err, got)
	}
}

// exec changes rows behind the fleet's back.
func (f *fixture) exec(query string) {
	err := f.db.Update(context.Background(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(context.Background(), query)
		return err
	})
	if err != nil {
		f.t.Error(err)
	}
}

var _ sandbox.Inboxes = (*loans)(nil)
