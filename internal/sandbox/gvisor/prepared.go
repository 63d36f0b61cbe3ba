package gvisor

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
)

// A prepared sandbox has all that a sandbox has, except for what runs in it: cgroup,
// user, directory, namespaces, a sentry that waits, and a gofer if it needs one. A start from a snapshot
// of memory claims one and only has to restore.
//
// It has a name of its own, "p" and 20 letters and digits: of its directory, of its
// cgroup and of gVisor's container. A claim is a symbolic link in the state directory,
// from the sandbox's ID to this name, and the link is made before anything of the
// sandbox is. So a sandbox is found by its ID also after a restart of the server (see
// Runtime.name), and a directory without a link belongs to no sandbox: New removes it.
//
// The launcher waits with the sandbox. If its socket is closed, because the server has
// ended in whatever way, it kills everything that it made.
//
// No code but gVisor's and ours has run in a prepared sandbox, and its sentry has read
// nothing but a specification from us. So the sentry that reads the snapshot is what it
// would be without preparation, with the same rights, in a cgroup with the same limits.
type prepared struct {
	name    string
	like    shape
	l       *launcher
	gate    *gate         // has no watcher: nothing runs yet
	watched chan struct{} // closed when watch has returned
	died    bool          // set before watched is closed
}

// A shape is what must be the same in a prepared sandbox and in the one that claims it.
// What else a specification holds is given at the claim: ID, host name, link, snapshot
// and the processor quota. Env does not matter, since memory has its own. Sandboxes with
// mounts, and those that boot, cannot be prepared.
type shape struct {
	rootfs    string // without symbolic links
	image     sandbox.Image
	cpus      float64
	memoryMB  int64
	diskMB    int64
	processes int64
}

func shapeOf(s sandbox.Spec, rootfs string) shape {
	return shape{rootfs: rootfs, image: s.Image, cpus: s.CPUs, memoryMB: s.MemoryMB, diskMB: s.DiskMB, processes: s.Processes}
}

var _ sandbox.Preparer = (*Runtime)(nil)

// preparedHost is the host name of a prepared sandbox, which nothing ever sees.
const preparedHost = "prepared"

var preparedPattern = regexp.MustCompile(`^p[a-z0-9]{20}$`)

func newPreparedName() string {
	return "p" + strings.ToLower(rand.Text()[:20]) // 100 bits
}

// name returns the name of a sandbox's directory, cgroup and container: its ID unless
// it was prepared. The name of a prepared sandbox is its own name.
func (r *Runtime) name(id string) string {
	at, err := os.Readlink(filepath.Join(r.conf.StateDir, id))
	if err != nil || !preparedPattern.MatchString(at) {
		return id
	}
	return at
}

// Prepare implements [sandbox.Preparer].
func (r *Runtime) Prepare(ctx context.Context, specs []sandbox.Spec) (more bool, err error) {
	r.preparing.Lock()
	defer r.preparing.Unlock()
	lacking := make([]shape, len(specs))
	for i, s := range specs {
		if err := checkLimits(s); err != nil {
			return false, err
		}
		rootfs, err := filepath.EvalSymlinks(s.Rootfs)
		if err != nil {
			return false, fmt.Errorf("find root file system: %w", err)
		}
		lacking[i] = shapeOf(s, rootfs)
	}
	specs = slices.Clone(specs)
	r.mu.Lock()
	var keep, surplus []*prepared
	for _, p := range slices.Backward(r.prepared) { // the newest ones stay
		if i := slices.Index(lacking, p.like); i >= 0 {
			keep = append(keep, p)
			lacking, specs = slices.Delete(lacking, i, i+1), slices.Delete(specs, i, i+1)
		} else {
			surplus = append(surplus, p)
		}
	}
	slices.Reverse(keep)
	r.prepared = keep
	r.mu.Unlock()
	for _, p := range surplus {
		p.hush()
		err = errors.Join(err, r.dismiss(ctx, p))
	}
	if err != nil || len(lacking) == 0 {
		return false, err
	}
	p, err := r.prepare(ctx, specs[0], lacking[0])
	if err != nil {
		return false, fmt.Errorf("prepare a sandbox: %w", err)
	}
	r.mu.Lock()
	r.prepared = append(r.prepared, p)
	r.mu.Unlock()
	go r.watchPrepared(p) //nolint:gosec,contextcheck // it lives as long as p waits
	return len(lacking) > 1, nil
}

// prepare makes one.
func (r *Runtime) prepare(ctx context.Context, s sandbox.Spec, like shape) (_ *prepared, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, r.conf.StartTimeout, fmt.Errorf("not prepared within %v", r.conf.StartTimeout))
	defer cancel()
	p := &prepared{name: newPreparedName(), like: like, watched: make(chan struct{})}
	dir := r.dir(p.name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.dismiss(ctx, p))
			if p.l != nil && p.l.errs.String() != "" {
				err = fmt.Errorf("%w (gVisor says: %s)", err, p.l.errs.String())
			}
		}
	}()
	user, err := r.ids.take(p.name)
	if err != nil {
		return nil, err
	}
	s.Hostname, s.Env, s.Mounts = preparedHost, nil, nil
	if err := writeSpec(dir, ociSpec(s, like.rootfs, dir)); err != nil {
		return nil, err
	}
	if err := r.cgroups.create(p.name, hostLimits(s)); err != nil {
		return nil, err
	}
	out, err := makeLog(dir)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	if p.l, err = r.newLauncher(false); err != nil {
		return nil, err
	}
	stop := p.l.killAtEnd(ctx)
	defer stop()
	order := launch.Order{
		Prepare: true, User: user, ID: p.name, Dir: dir, Cgroups: r.cgroups.procsFiles(p.name), Flags: flags(s, dir), Image: s.Image.Root != "",
	}
	files, release, err := r.joined.add(&order, []*os.File{out}, s.Image)
	if err != nil {
		return nil, err
	}
	defer release()
	g, theirs, err := r.newGate(nil) //nolint:contextcheck // the gate lives as long as the sandbox
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	p.gate, order.Gate = g, true
	files = append(files, theirs)
	if err := p.l.tell(ctx, order, files...); err != nil {
		return nil, err
	}
	if _, err := p.l.hear(ctx); err != nil {
		return nil, err
	}
	if err := g.awaitHello(ctx); err != nil {
		return nil, err
	}
	if !stop() {
		return nil, context.Cause(ctx)
	}
	return p, nil
}

// watchPrepared drops p if it ends while it waits.
func (r *Runtime) watchPrepared(p *prepared) {
	// The launcher says nothing before it gets an order, so this returns when the
	// launcher has ended, or when hush has set a deadline.
	_, err := p.l.conn.Read(make([]byte, 1))
	p.died = !errors.Is(err, os.ErrDeadlineExceeded)
	close(p.watched)
	if !p.died {
		return
	}
	r.mu.Lock()
	n := len(r.prepared)
	r.prepared = slices.DeleteFunc(r.prepared, func(q *prepared) bool { return p == q })
	mine := len(r.prepared) < n // otherwise somebody has taken it, and dismisses it
	r.mu.Unlock()
	if mine {
		err := r.dismiss(context.Background(), p)
		r.log.Warn("a prepared sandbox ended", "name", p.name, "said", p.l.errs.String(), "err", err)
	}
}

// hush ends the watch over p, which the caller has removed from the list.
func (p *prepared) hush() {
	_ = p.l.conn.SetReadDeadline(time.Unix(1, 0))
	<-p.watched
	_ = p.l.conn.SetReadDeadline(time.Time{})
}

// dismiss ends a prepared sandbox that nobody has claimed, and removes all of it.
func (r *Runtime) dismiss(ctx context.Context, p *prepared) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if p.gate != nil {
		p.gate.close()
	}
	if p.l != nil {
		_ = p.l.dismiss() // it reports an error, since it had no order
	}
	if err := r.remove(ctx, p.name); err != nil {
		return fmt.Errorf("remove prepared sandbox %s: %w", p.name, err)
	}
	return nil
}

// take returns a prepared sandbox of a shape, or nil.
func (r *Runtime) take(ctx context.Context, like shape) *prepared {
	for {
		r.mu.Lock()
		i := slices.IndexFunc(r.prepared, func(p *prepared) bool { return p.like == like })
		if i < 0 {
			r.mu.Unlock()
			return nil
		}
		p := r.prepared[i]
		r.prepared = slices.Delete(r.prepared, i, i+1)
		r.mu.Unlock()
		if p.hush(); !p.died {
			return p
		}
		if err := r.dismiss(ctx, p); err != nil {
			r.log.WarnContext(ctx, "remove a prepared sandbox that ended", "err", err)
		}
	}
}

// claim makes p the sandbox with this ID.
func (r *Runtime) claim(ctx context.Context, p *prepared, id string) error {
	// Like Mkdir, this fails if there is a sandbox of this ID.
	if err := os.Symlink(p.name, r.dir(id)); err != nil {
		return errors.Join(fmt.Errorf("claim a prepared sandbox: %w", err), r.dismiss(ctx, p))
	}
	return nil
}

// startPrepared restores a snapshot into a claimed sandbox. If its error wraps
// errNotTold nothing has been restored.
func (r *Runtime) startPrepared(ctx context.Context, i *instance, p *prepared, s sandbox.Spec, order launch.Order, from *os.File) (said string, err error) {
	stop := p.l.killAtEnd(ctx)
	defer func() { said, err = p.l.finish(ctx, stop, err) }()
	if err := i.followLog(r.dir(s.ID)); err != nil {
		return "", fmt.Errorf("%w: %w", errNotTold, err)
	}
	i.gate = p.gate
	i.gate.setWatcher(s.Watch)
	order.Claim, order.Hostname = true, s.Hostname
	if err := p.l.tell(ctx, order, s.Link, from); err != nil {
		return "", err
	}
	// The launcher begins only once it has said so. If it does not, it is dead or
	// about to end itself.
	if _, err := p.l.hear(ctx); err != nil {
		if ctx.Err() == nil {
			err = fmt.Errorf("%w: %w", errNotTold, err)
		}
		return "", err
	}
	reply, err := p.l.hear(ctx)
	if err != nil {
		return "", err
	}
	trace(ctx, reply)
	return "", i.take(reply)
}

// removeUnclaimed removes what earlier processes of this program prepared.
func (r *Runtime) removeUnclaimed(ctx context.Context) error {
	es, err := os.ReadDir(r.conf.StateDir)
	if err != nil {
		return fmt.Errorf("list prepared sandboxes: %w", err)
	}
	names, err := r.cgroups.ids()
	if err != nil {
		return err
	}
	claimed := map[string]bool{}
	for _, e := range es {
		if name := r.name(e.Name()); name == e.Name() {
			names = append(names, name)
		} else {
			claimed[name] = true
		}
	}
	slices.Sort(names)
	for _, n := range slices.Compact(names) {
		if !preparedPattern.MatchString(n) || claimed[n] {
			continue
		}
		if rerr := r.remove(ctx, n); rerr != nil {
			err = errors.Join(err, fmt.Errorf("remove prepared sandbox %s: %w", n, rerr))
		}
	}
	return err
}
