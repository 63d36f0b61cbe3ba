package run_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/command"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/run"
	"postern/internal/sandbox"
	"postern/internal/store"
)

const report = `version: 1
name: report
commands:
  allow: [{run: python3 report.py}, {run: "true"}, {run: "sleep *"}]
files:
  write: [/work]
  inputs: [{path: /work/in/*, size: 1KiB}]
network: {allow: [api.example.com]}
limits: {time: 1m, output: 64KiB}
`

// A box is a sandbox of a fleet for tests.
type box struct {
	sandbox.Info
	confined sandbox.Confinement
	files    map[string]string
	dead     bool
	calls    []string // that need an order
}

// A fleet has sandboxes that run nothing. The function act plays the commands.
type fleet struct {
	mu    sync.Mutex
	boxes map[string]*box
	act   func(ctx context.Context, args []string, output func(stream byte, p []byte) error) (sandbox.Ended, error)
	fail  error // of Create, after Prepare
	// usage is what is measured of a sandbox; nil means nothing of interest.
	usage func(b *box) (sandbox.Usage, error)
}

// Usage measures a sandbox.
func (f *fleet) Usage(_ context.Context, id string) (sandbox.Usage, error) {
	b, err := f.get(id)
	if err != nil || f.usage == nil {
		return sandbox.Usage{Memory: 1 << 20}, err
	}
	return f.usage(b)
}

var _ run.Fleet = (*fleet)(nil)

func (f *fleet) Create(ctx context.Context, who auth.Principal, r sandbox.Request) (sandbox.Info, error) {
	f.mu.Lock()
	b := &box{Info: sandbox.Info{ID: fmt.Sprintf("i%d", len(f.boxes)+1), Project: who.Project, Template: r.Template, Metadata: r.Metadata, Contract: r.Contract, Egress: r.Egress, Options: r.Options}, files: map[string]string{}}
	f.boxes[b.ID] = b
	f.mu.Unlock()
	err := r.Prepare(ctx, b.Info)
	if err == nil {
		err = f.fail
	}
	if err != nil {
		f.mu.Lock()
		defer f.mu.Unlock()
		b.dead = true
		return sandbox.Info{}, err
	}
	return b.Info, nil
}

func (f *fleet) get(id string) (*box, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if b := f.boxes[id]; b != nil && !b.dead {
		return b, nil
	}
	return nil, sandbox.ErrNotFound
}

func (f *fleet) Get(_ context.Context, _ auth.Principal, id string) (sandbox.Info, error) {
	b, err := f.get(id)
	if err != nil {
		return sandbox.Info{}, err
	}
	return b.Info, nil
}

func (f *fleet) List(_ context.Context, who auth.Principal, _ bool) (out []sandbox.Info, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, b := range f.boxes {
		if !b.dead && b.Project == who.Project {
			out = append(out, b.Info)
		}
	}
	return out, nil
}

func (f *fleet) Kill(_ context.Context, _ auth.Principal, id string) error {
	b, err := f.get(id)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	b.dead = true
	return nil
}

func (f *fleet) Pause(context.Context, auth.Principal, string, bool) error { return nil }

func (f *fleet) Confine(_ context.Context, id string, c sandbox.Confinement) error {
	b, err := f.get(id)
	if err == nil {
		b.confined = c
	}
	return errors.Join(err, f.called(id, "confine"))
}

func (f *fleet) Settle(_ context.Context, id string) error { return f.called(id, "settle") }

func (f *fleet) called(id, what string) error {
	b, err := f.get(id)
	if err == nil {
		b.calls = append(b.calls, what)
	}
	return err
}

func (f *fleet) PutFile(_ context.Context, id, path string, r io.Reader) error {
	b, err := f.get(id)
	if err != nil {
		return err
	}
	v, err := io.ReadAll(r)
	b.files[path] = string(v)
	return err
}

func (f *fleet) RunCommand(ctx context.Context, id string, c sandbox.Command, output func(stream byte, p []byte) error) (sandbox.Ended, error) {
	if err := f.called(id, "command"); err != nil {
		return sandbox.Ended{}, err
	}
	if f.act == nil {
		return sandbox.Ended{PID: 7}, nil
	}
	return f.act(ctx, c.Args, output)
}

func (f *fleet) KillProcess(context.Context, string, int) error { return nil }
func (f *fleet) KillAll(_ context.Context, id string) error     { return f.called(id, "kill all") }
func (f *fleet) Gone(_ context.Context, s sandbox.Info) []sandbox.Trace {
	_, err := f.get(s.ID)
	return []sandbox.Trace{{What: "sandbox", Gone: err != nil}}
}

func (f *fleet) ListFiles(context.Context, string, []string, int) ([]sandbox.FileInfo, error) {
	return nil, nil
}

func (f *fleet) OpenFile(context.Context, string, string, int64) (io.ReadCloser, error) {
	return nil, errors.New("no files")
}

func (f *fleet) alive() (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, b := range f.boxes {
		if !b.dead {
			n++
		}
	}
	return n
}

// A binder records which sandboxes are bound.
type binder struct {
	fleet *fleet // learns the order of calls
	mu    sync.Mutex
	bound map[string]command.Binding
}

func (b *binder) Bind(id string, v command.Binding) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.bound[id]; ok {
		return errors.New("bound already")
	}
	b.bound[id] = v
	return b.fleet.called(id, "bind")
}

func (b *binder) Unbind(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.bound, id)
}

func (b *binder) of(id string) command.Binding {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bound[id]
}

type fixture struct {
	t     *testing.T
	log   *slog.Logger
	db    *store.DB
	key   []byte
	blobs *store.Blobs
	book  *rulebook.Book
	gate  *oversight.Gate
	fleet *fleet
	binds *binder
	runs  *run.Service

	owner, keyed auth.Principal // a person and the key of one project
	foreign      auth.Principal // the key of another

	build string // of the template base
}

func setup(t *testing.T, db *store.DB) *fixture {
	t.Helper()
	f := &fixture{t: t, log: slog.New(slog.NewTextHandler(t.Output(), nil)), db: db, key: make([]byte, 32), fleet: &fleet{boxes: map[string]*box{}}}
	f.binds = &binder{fleet: f.fleet, bound: map[string]command.Binding{}}
	f.owner = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann"}
	f.keyed = auth.Principal{Kind: auth.Project, ID: "k1"}
	f.foreign = auth.Principal{Kind: auth.Project, ID: "k2"}
	err := db.Update(t.Context(), func(tx *store.Tx) (err error) {
		if f.owner.Project, _, err = auth.NewProject(t.Context(), tx, "one"); err != nil {
			return err
		}
		f.foreign.Project, _, err = auth.NewProject(t.Context(), tx, "two")
		return err
	})
	f.keyed.Project = f.owner.Project
	if err == nil {
		f.blobs, err = store.OpenBlobs(t.TempDir())
	}
	if err != nil {
		t.Fatal(err)
	}
	f.restart()
	return f
}

// restart replaces the server on f.db by another one.
func (f *fixture) restart() {
	f.t.Helper()
	f.book = rulebook.New(f.log, f.db)
	f.gate = oversight.NewGate(f.log, f.db, f.book)
	f.gate.Handle(policy.KindChange, f.book)
	var err error
	f.binds = &binder{fleet: f.fleet, bound: map[string]command.Binding{}}
	f.runs, err = run.New(f.log, f.db, f.gate, run.Config{
		Key: f.key, Blobs: f.blobs, Fleet: f.fleet, Commands: f.binds, Usage: f.fleet.Usage,
		Template: func(_ context.Context, _ auth.Principal, name string) (string, string, error) {
			if name != "base" {
				return "", "", errors.New("there is no such template")
			}
			return "tbase" + f.build, "sha256:aa", nil
		},
	})
	if err != nil {
		f.t.Fatal(err)
	}
	f.gate.Handle(policy.KindRun, f.runs)
	f.gate.Bound(f.runs.Bound)
}

// overwrite puts other bytes in the place of a blob, as somebody who can write the disk
// does.
func (f *fixture) overwrite(id string, data []byte) error {
	return errors.Join(f.blobs.Delete(id), f.blobs.Put(id, data))
}

// serve performs runs until the returned function is called.
func (f *fixture) serve() (stop func()) {
	ctx, cancel := context.WithCancel(f.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = f.runs.Run(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// decide decides on the review of r, and executes the action.
func (f *fixture) decide(r run.Run, approve bool) {
	f.t.Helper()
	a, err := f.gate.Action(f.t.Context(), f.owner, r.Action)
	if err != nil {
		f.t.Fatal(err)
	}
	d := oversight.Decision{ID: a.ID, Version: a.Version, Digest: a.Hex(), Approve: approve, Reason: "seen"}
	if err := f.gate.Decide(f.t.Context(), f.owner, d); err != nil {
		f.t.Fatal(err)
	}
	f.execute()
}

func (f *fixture) execute() {
	f.t.Helper()
	if _, err := f.gate.RunOne(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) get(id string) run.Run {
	f.t.Helper()
	r, err := f.runs.Get(f.t.Context(), f.owner, id)
	if err != nil {
		f.t.Fatal(err)
	}
	return r
}

// until waits until a run is in a state.
func (f *fixture) until(id string, want run.State) run.Run {
	f.t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if r := f.get(id); r.State == want {
			return r
		}
	}
	f.t.Fatalf("run is %+v, want %s", f.get(id), want)
	return run.Run{}
}

func (f *fixture) propose(who auth.Principal, p run.Proposal) run.Run {
	f.t.Helper()
	r, err := f.runs.Propose(f.t.Context(), who, "rest", p)
	if err != nil {
		f.t.Fatal(err)
	}
	return r
}

func input(path, content string) run.Input {
	sum := sha256.Sum256([]byte(content))
	return run.Input{Path: path, Size: int64(len(content)), SHA256: hex.EncodeToString(sum[:])}
}

// job returns the proposal of a command, by default true, with the contract report.
func job(args ...string) run.Proposal {
	if len(args) == 0 {
		args = []string{"true"}
	}
	return run.Proposal{Text: report, Task: "make the report", Commands: [][]string{args}}
}

func kinds(list []run.Event) (out []string) {
	for _, e := range list {
		out = append(out, e.Kind+" "+e.State)
	}
	return slices.Compact(out)
}
