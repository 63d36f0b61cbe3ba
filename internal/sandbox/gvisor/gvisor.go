// Package gvisor is the [sandbox.Runtime] of this machine. Each sandbox has a
// kernel of its own, gVisor's sentry, in a process with nearly no access to the
// host.
//
// The parts of a sandbox are processes of another program, which is gVisor and
// nothing else: see package runsc.
//
// On this machine a sandbox is:
//
//   - two or more processes in a cgroup of their own: the sentry, and its stubs, in
//     which the code of the sandbox runs. If the root file system is a directory, or
//     directories are mounted, there is also the gofer, which serves them to the
//     sentry. They have their own namespaces, except for the gofer's user namespace.
//     All run as one user of the host that nothing else uses, and none as root (see
//     ids). At its start, and for a moment after, the launcher is in the cgroup too,
//     which is root's;
//   - a directory below the state directory, with specification, control socket and
//     log;
//   - an unnamed file for what the sandbox writes.
//
// There are no mounts, interfaces or other files on the host. Mounts of a sandbox are
// in mount namespaces of its own. The directory is created first and removed last, so
// List always finds what a crash leaves. Stop removes it and looks only at the
// cgroup: process IDs that were written down could mean other processes by then.
//
// A snapshot is a directory that Save made: snapshot.json, which this program
// wrote, and files that the sentry wrote through descriptors that it was given, and
// that only a sentry reads. A sentry may be compromised, so these files may hold
// anything, and this program takes no number, name or length from them.
//
// The sentry that restores them is a new one, without capabilities, in the namespaces
// and the cgroup of the new sandbox. It reads the header and the list of pages before
// its seccomp filter is in force, and the state of the kernel afterwards. So a hostile
// snapshot can do what code that has broken out of its sandbox's kernel can do, and
// nothing to the host or to other sandboxes.
//
// But the restored sandbox is no better than the saved one. A snapshot does not protect
// those who start from it against its author, and whoever can read it can read
// everything that was in memory. That is why templates are saved before any code of a
// user has run, and why the files have mode 0600.
//
// The package must not decide what may run or who may ask. It gives a sandbox no
// way to the outside but the link that it is handed.
package gvisor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
	"postern/internal/tracing"
)

// Config holds the settings of a [Runtime].
type Config struct {
	// StateDir holds a directory for each sandbox. What sandboxes write is stored
	// on its file system. No other runtime may use it. It is created if it does not
	// exist.
	StateDir string
	// Program is the program of the parts of sandboxes, cmd/postern-runtime, as
	// [Seal] returns it. It must stay open. Nil means the program that is running,
	// as in tests; then its main function must begin with
	//
	//	if launch.IsPart(os.Args) {
	//		runsc.Main()
	//	}
	Program *os.File
	// StartTimeout is how long a start may take; 0 means 30 s.
	StartTimeout time.Duration
	// Starts is how many sandboxes are started at the same time; further ones wait.
	// 0 means twice the number of processors.
	Starts int
	// Launchers is how many processes wait in advance for the next starts, after
	// the first one. Each needs about 10 MiB and saves a start 10 ms. They end with
	// this process. 0 means none.
	Launchers int
	// IDs are the user and group IDs of this machine that sandboxes run as, each
	// sandbox as one of its own. Nothing else on the machine may use them. The zero
	// range means DefaultIDs.
	IDs IDRange
	// IDDir records which of them are in use; empty means /run/postern/uids.
	// Runtimes with overlapping ranges must use the same directory.
	IDDir string
	// CgroupParent is the path of our cgroups below each cgroup mount; empty means
	// "postern". Runtimes with other state directories may use the same one.
	CgroupParent string
	// Output returns where to write the output of a sandbox's guest in addition to
	// its log. It is closed when the sandbox ends. Nil means nowhere.
	Output func(id string) io.WriteCloser
}

// A Runtime runs sandboxes on this machine.
type Runtime struct {
	log      *slog.Logger
	conf     Config
	program  string // file of the parts of sandboxes
	cgroups  *cgroups
	ids      *ids
	starting chan struct{}  // semaphore of starts in progress
	waiting  chan *launcher // launchers for the next starts
	joined   joinedImages
	buffers  sync.Pool // of *[launch.MaxEvent]byte, shared by the gates

	preparing sync.Mutex // held by Prepare

	mu       sync.Mutex
	all      map[string]*instance // by sandbox ID; from Start until Stop
	removed  map[string]removed   // by sandbox ID; the last maxRemoved sandboxes, for Search
	started  map[[2]uint64]int    // number of starts per snapshot, by its directory's device and inode
	prepared []*prepared          // that wait for a claim, oldest first
}

var _ sandbox.Runtime = (*Runtime)(nil)

// stopTimeout bounds the removal of a sandbox if the caller sets no limit or has
// gone.
const stopTimeout = 20 * time.Second

// New checks that this machine can run sandboxes; its error says what to change if
// not. It starts nothing, and leaves existing sandboxes for List and Stop. It removes
// what an earlier process prepared and no sandbox has claimed.
func New(log *slog.Logger, conf Config) (*Runtime, error) {
	if conf.StateDir == "" {
		return nil, errors.New("no state directory for sandboxes")
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("sandboxes need root, to make cgroups and namespaces: run postern as root")
	}
	program := "/proc/self/exe"
	if conf.Program != nil {
		program = path(conf.Program)
	}
	if err := checkStatic(program); err != nil {
		return nil, err
	}
	if conf.StartTimeout < 0 || conf.Starts < 0 || conf.Launchers < 0 {
		return nil, errors.New("StartTimeout, Starts and Launchers must not be negative")
	}
	if conf.StartTimeout == 0 {
		conf.StartTimeout = 30 * time.Second
	}
	if conf.Starts == 0 {
		conf.Starts = 2 * runtime.NumCPU()
	}
	if conf.CgroupParent == "" {
		conf.CgroupParent = "postern"
	}
	if !filepath.IsLocal(conf.CgroupParent) {
		return nil, fmt.Errorf("cgroup parent %q is not a relative path", conf.CgroupParent)
	}
	if conf.IDs == (IDRange{}) {
		conf.IDs = DefaultIDs()
	}
	if conf.IDDir == "" {
		conf.IDDir = "/run/postern/uids"
	}
	if err := errors.Join(conf.IDs.check(), conf.IDs.checkUnused()); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(conf.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("make state directory: %w", err)
	}
	dir, err := filepath.Abs(conf.StateDir)
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("find state directory: %w", err)
	}
	conf.StateDir = dir
	if _, err := launch.Configure(flags(sandbox.Spec{DiskMB: 1}, dir)); err != nil {
		return nil, fmt.Errorf("configure gVisor for state directory %s: %w", dir, err)
	}
	// Another Postern on this machine has another state directory. Its sandboxes
	// are not ours to list or stop.
	sum := sha256.Sum256([]byte(dir))
	cg, err := ownCgroups(filepath.Join(conf.CgroupParent, hex.EncodeToString(sum[:6])))
	if err != nil {
		return nil, err
	}
	if err := cg.prepare(); err != nil {
		return nil, err
	}
	used, err := openIDs(conf.IDDir, conf.IDs, dir)
	if err != nil {
		return nil, err
	}
	r := &Runtime{
		log: log, conf: conf, program: program, cgroups: cg, ids: used,
		starting: make(chan struct{}, conf.Starts), all: map[string]*instance{}, started: map[[2]uint64]int{},
		waiting: make(chan *launcher, conf.Launchers),
	}
	cg.name = r.name
	r.buffers.New = newGateBuffer
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if err := r.removeUnclaimed(ctx); err != nil {
		return nil, err
	}
	cg.tidy()
	return r, nil
}

// Start implements [sandbox.Runtime].
func (r *Runtime) Start(ctx context.Context, s sandbox.Spec) error {
	if s.Link != nil {
		defer s.Link.Close()
	}
	if err := check(s); err != nil {
		return err
	}
	rootfs, err := filepath.EvalSymlinks(s.Rootfs)
	if err != nil {
		return fmt.Errorf("find root file system: %w", err)
	}
	s.Mounts = slices.Clone(s.Mounts) // do not change the caller's
	for i, m := range s.Mounts {
		if s.Mounts[i].Source, err = filepath.EvalSymlinks(m.Source); err != nil {
			return fmt.Errorf("find mount: %w", err)
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, r.conf.StartTimeout, fmt.Errorf("not started within %v", r.conf.StartTimeout))
	defer cancel()
	i := &instance{id: s.ID, output: r.conf.Output, cancel: cancel, started: make(chan struct{}), ended: make(chan struct{})}
	r.mu.Lock()
	if r.all[s.ID] != nil {
		r.mu.Unlock()
		return fmt.Errorf("start sandbox %s: it is there already", s.ID)
	}
	r.all[s.ID] = i
	r.mu.Unlock()

	made, err := r.start(ctx, i, s, rootfs)
	if err == nil {
		err = i.gate.awaitHello(ctx)
	}
	if err == nil && ctx.Err() != nil { // stopped at the last moment
		err = context.Cause(ctx)
	}
	if err == nil {
		go i.watch(r) //nolint:gosec,contextcheck // the watch lives as long as the sandbox, not as the request
		go i.watchGate(r, i.gate)
		close(i.started)
		go r.await()
		return nil
	}
	clean, done := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer done()
	var rmErr error
	if made {
		rmErr = r.remove(clean, i.id)
	}
	i.release()
	i.end("not started")
	r.mu.Lock()
	delete(r.all, i.id)
	r.mu.Unlock()
	close(i.started)
	return errors.Join(fmt.Errorf("start sandbox %s: %w", s.ID, err), rmErr)
}

// start starts a sandbox, by claiming a prepared one if one fits. It reports whether
// anything of it was made. If not, there may be another sandbox of the same ID, which
// another process of this program started. Then nothing of it may be touched.
func (r *Runtime) start(ctx context.Context, i *instance, s sandbox.Spec, rootfs string) (made bool, err error) {
	_, end := tracing.Begin(ctx, "wait for a turn")
	select {
	case r.starting <- struct{}{}:
		defer func() { <-r.starting }()
	case <-ctx.Done():
		end(context.Cause(ctx))
		return false, context.Cause(ctx)
	}
	end(nil)
	order := launch.Order{Link: launch.Link{Address: sandbox.LinkAddress, Gateway: sandbox.LinkGateway, Network: sandbox.LinkNetwork, MTU: sandbox.LinkMTU}}
	var from *os.File
	if s.From != "" {
		f, snap, err := openSnapshot(s.From, s)
		if err != nil {
			return false, err
		}
		defer f.Close()
		from, order.From, order.Direct = f, snap.Kind, r.readsDirect(f)
		if s.Image, err = snap.image(s.Image); err != nil {
			return false, err
		}
	}
	var p *prepared
	if order.From == kindMemory && len(s.Mounts) == 0 && !s.Unhurried {
		p = r.take(ctx, shapeOf(s, rootfs))
	}
	var said string
	if p != nil {
		if err := r.claim(ctx, p, s.ID); err != nil {
			return false, err
		}
		said, err = r.startPrepared(ctx, i, p, s, order, from)
		if errors.Is(err, errNotTold) {
			r.log.WarnContext(ctx, "use a prepared sandbox; starting another", "sandbox", s.ID, "err", err, "said", said)
			if err := r.remove(ctx, s.ID); err != nil {
				return true, err
			}
			i.unfollowLog()
			p.gate.close()
			i.gate, p = nil, nil
		}
	}
	if p == nil {
		// The directory marks the sandbox as ours.
		if err := os.Mkdir(r.dir(s.ID), 0o700); err != nil {
			return false, err
		}
		said, err = r.startNew(ctx, i, s, rootfs, order, from)
	}
	if said != "" {
		r.log.DebugContext(ctx, "gVisor on the start of a sandbox", "sandbox", s.ID, "said", said)
	}
	if err != nil {
		return true, err
	}
	if err := r.cgroups.limitCPU(s.ID, s.CPUs); err != nil {
		return true, fmt.Errorf("limit processors: %w", err)
	}
	return true, nil
}

// startNew starts a sandbox whose directory exists.
func (r *Runtime) startNew(ctx context.Context, i *instance, s sandbox.Spec, rootfs string, order launch.Order, from *os.File) (said string, err error) {
	dir := r.dir(s.ID)
	user, err := r.ids.take(s.ID)
	if err != nil {
		return "", err
	}
	order.User, order.ID, order.Dir, order.Cgroups, order.Flags = user, s.ID, dir, r.cgroups.procsFiles(s.ID), flags(s, dir)
	order.Image, order.Cover = s.Image.Root != "", s.Image.Root == "" && len(s.Mounts) > 0
	if err := writeSpec(dir, ociSpec(s, rootfs, dir)); err != nil {
		return "", err
	}
	if err := r.cgroups.create(s.ID, hostLimits(s)); err != nil {
		return "", err
	}
	out, err := i.openLog(dir)
	if err != nil {
		return "", err
	}
	defer out.Close()
	files := []*os.File{s.Link, out}
	if from != nil {
		files = append(files, from)
	}
	files, release, err := r.joined.add(&order, files, s.Image)
	if err != nil {
		return "", err
	}
	defer release()
	g, theirs, err := r.newGate(s.Watch) //nolint:contextcheck // the gate lives as long as the sandbox
	if err != nil {
		return "", err
	}
	defer theirs.Close()
	i.gate, order.Gate = g, true
	files = append(files, theirs)
	return r.launch(ctx, order, files, func(reply launch.Reply) error {
		trace(ctx, reply)
		return i.take(reply)
	})
}

// trace adds what a launcher has measured to the operation of ctx.
func trace(ctx context.Context, reply launch.Reply) {
	for _, p := range reply.Phases {
		tracing.Add(ctx, p.Name, p.Start, p.End)
	}
}

func (r *Runtime) dir(id string) string { return filepath.Join(r.conf.StateDir, id) }

// Stop implements [sandbox.Runtime].
func (r *Runtime) Stop(ctx context.Context, id string) error {
	if !idPattern.MatchString(id) {
		// It becomes a path, and no other ID can exist.
		return fmt.Errorf("%w: id %q", sandbox.ErrInvalid, id)
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	r.mu.Lock()
	i := r.all[id]
	r.mu.Unlock()
	defer r.joined.drop()
	if i != nil {
		i.stop()
		select { // a start in progress gives up and cleans up
		case <-i.started:
		case <-ctx.Done():
			return fmt.Errorf("stop sandbox %s: %w", id, context.Cause(ctx))
		}
	}
	if err := r.remove(ctx, id); err != nil {
		return fmt.Errorf("stop sandbox %s: %w", id, err)
	}
	if i != nil {
		select { // its processes are gone, so this takes only moments
		case <-i.ended:
		case <-ctx.Done():
			return fmt.Errorf("stop sandbox %s: %w", id, context.Cause(ctx))
		}
		r.mu.Lock()
		if r.all[id] == i {
			delete(r.all, id)
		}
		r.mu.Unlock()
	}
	return nil
}

// remove frees everything that a sandbox holds. Its directory, or the link to it, is
// removed last: as long as anything is left, List finds it.
func (r *Runtime) remove(ctx context.Context, id string) error {
	name := r.name(id)
	r.remember(id, name)
	if err := r.cgroups.kill(ctx, name); err != nil {
		return err
	}
	if err := r.cgroups.remove(ctx, name); err != nil {
		return err
	}
	if err := r.ids.give(name); err != nil {
		return err
	}
	if err := os.RemoveAll(r.dir(name)); err != nil {
		return fmt.Errorf("remove directory: %w", err)
	}
	if name == id {
		return nil
	}
	if err := os.Remove(r.dir(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove claim: %w", err)
	}
	return nil
}

// Wait implements [sandbox.Runtime].
func (r *Runtime) Wait(ctx context.Context, id string) (string, error) {
	i, err := r.find(id) //nolint:contextcheck // a watch lasts longer than this call
	if err != nil {
		return "", fmt.Errorf("wait for sandbox %q: %w", id, err)
	}
	select {
	case <-i.ended:
		return i.reason, nil
	case <-ctx.Done():
		return "", fmt.Errorf("wait for sandbox %s: %w", id, context.Cause(ctx))
	}
}

// find returns the instance of a sandbox. If another process of this program
// started the sandbox, it is watched from now on as if this one had.
func (r *Runtime) find(id string) (*instance, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := r.all[id]; i != nil {
		return i, nil
	}
	if !idPattern.MatchString(id) {
		return nil, sandbox.ErrNotFound
	}
	pids, err := r.cgroups.pids(id)
	if err != nil {
		return nil, err
	}
	if len(pids) == 0 {
		return nil, sandbox.ErrNotFound
	}
	i := &instance{id: id, output: r.conf.Output, cancel: func() {}, started: make(chan struct{}), ended: make(chan struct{})}
	close(i.started)
	if err := i.followLog(r.dir(id)); err != nil { // the start may have failed before the log existed
		r.log.Warn("read a sandbox's log", "sandbox", id, "err", err)
	}
	r.all[id] = i
	go i.watch(r)
	return i, nil
}

// waitForeign returns when a sandbox of another process has ended. The kernel does
// not notify us of that, so it polls. A sentry whose guest has exited is given
// little time.
func (r *Runtime) waitForeign(id string, exited bool) {
	for end := time.Now().Add(5 * time.Second); !exited || time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		pids, err := r.cgroups.pids(id)
		if err == nil && len(pids) == 0 {
			return
		}
		if err != nil {
			r.log.Warn("look for a sandbox's processes", "sandbox", id, "err", err)
		}
	}
}

// List implements [sandbox.Runtime].
func (r *Runtime) List(context.Context) ([]string, error) {
	ids, err := r.cgroups.ids()
	if err != nil {
		return nil, err
	}
	es, err := os.ReadDir(r.conf.StateDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list sandboxes: %w", err)
	}
	for _, e := range es {
		ids = append(ids, e.Name())
	}
	ids = slices.DeleteFunc(ids, func(id string) bool { return !idPattern.MatchString(id) })
	slices.Sort(ids)
	return slices.Compact(ids), nil
}
