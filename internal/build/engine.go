package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"postern/internal/erofs"
	"postern/internal/registry"
	"postern/internal/rootfs"
	"postern/internal/sandbox"
)

// The names of the first and the last phase of a build in log entries. The phases in
// between are numbered.
const (
	phaseBase = "base"
	finalize  = "finalize"
)

// engineVersion is part of every key. Increment it when the same steps produce other
// layers than before.
const engineVersion = "1"

// clamp is the latest modification time of files in layers, so that two builds of one
// definition have the same digests. ZIP archives cannot store earlier times.
var clamp = time.Date(1980, 1, 1, 0, 0, 0, 0, time.UTC) //nolint:gochecknoglobals // a constant

// defaultUser runs steps that name no user, and commands in sandboxes.
const defaultUser = "user"

// An engine runs one build. It is not safe for concurrent use.
type engine struct {
	s    *Service
	j    *job
	dir  string // of temporary files
	last string // key of the newest phase

	from     string       // path of the image that the build started from
	digest   string       // of that image, if it is the root file system of a project's template; else empty
	own      bool         // the image is one of the server's templates, whose file is elsewhere
	parent   string       // digest that the row records as the parent
	state    state        // after the newest step
	result   Result       // as far as it is known
	layers   []string     // digests of the steps' layers, without steps that changed nothing
	bench    Bench        // nil until a step needs it
	below    *rootfs.Tree // what the bench was booted from
	before   *os.File     // the bench's upper layer after the newest step; nil if there was none
	rebuilds bool         // a step was run, so all later steps run too
}

// A state is what a step passes to the next one in addition to files.
type state struct {
	env  map[string]string
	user string
	dir  string // absolute; empty means the user's home
}

// key returns the digest of parts. Each part is preceded by its length, so that moving
// text from one part to the next changes the digest.
func key(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:", len(p))
		_, _ = io.WriteString(h, p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// build runs a job and records that it is ready. Its error is a [stepError] if the phase
// is known.
func (s *Service) build(ctx context.Context, j *job) (err error) {
	e := &engine{s: s, j: j, dir: filepath.Join(s.conf.Dir, workDir, j.b.ID), state: state{env: map[string]string{}, user: defaultUser}}
	if err := os.Mkdir(e.dir, 0o700); err != nil {
		return s.outward(ctx, j, phaseBase, err)
	}
	defer func() {
		if cerr := e.close(); cerr != nil {
			s.log.WarnContext(ctx, "clean up after a build", "build", j.b.ID, "err", cerr)
		}
	}()
	if err := e.base(ctx); err != nil {
		return s.outward(ctx, j, phaseBase, err)
	}
	force := j.b.Definition.Force
	for i, st := range j.b.Definition.Steps {
		force = force || st.Force
		if err := e.step(ctx, i, st, force); err != nil {
			return s.outward(ctx, j, stepName(i), err)
		}
	}
	return s.outward(ctx, j, finalize, e.finish(ctx))
}

// errUser marks errors whose text is shown to the user who started the build.
var errUser = errors.New("")

// userError returns an error whose text is shown to the user who started the build.
func userError(format string, args ...any) error {
	return fmt.Errorf("%w"+format, append([]any{errUser}, args...)...)
}

// outward returns the error of a phase as the build's status shows it. Internal errors may
// name paths of the host, so only the operator sees their text, in the server's log.
func (s *Service) outward(ctx context.Context, j *job, step string, err error) error {
	if err == nil || ctx.Err() != nil {
		return wrapStep(step, err)
	}
	for _, known := range []error{errUser, ErrInvalid, ErrNotFound, ErrFull, registry.ErrInvalid, registry.ErrDenied, registry.ErrNotFound, registry.ErrUnreachable, registry.ErrFull, rootfs.ErrInvalid, sandbox.ErrInvalid, sandbox.ErrFull, sandbox.ErrNoShell} {
		if errors.Is(err, known) {
			return wrapStep(step, err)
		}
	}
	s.log.ErrorContext(ctx, "build", "template", j.t.ID, "build", j.b.ID, "step", step, "err", j.journal.scrub(err.Error(), 4<<10))
	return wrapStep(step, fmt.Errorf("an internal error occurred: build again; the operator finds the cause in the server's log, with build %s", j.b.ID))
}

func wrapStep(step string, err error) error {
	if err == nil {
		return nil
	}
	return &stepError{step: step, err: err}
}

// close ends the bench and removes temporary files. Later calls do nothing.
func (e *engine) close() error {
	var errs []error
	if e.bench != nil {
		errs = append(errs, e.bench.Close())
	}
	if e.below != nil {
		errs = append(errs, e.below.Close())
	}
	if e.before != nil {
		errs = append(errs, e.before.Close())
	}
	e.bench, e.below, e.before = nil, nil, nil
	return errors.Join(append(errs, os.RemoveAll(e.dir))...)
}

// say logs the first line of a phase.
func (e *engine) say(step, prefix, text string, cached bool) {
	line := fmt.Sprintf("[%s] %s [%s]", prefix, text, e.last)
	if cached {
		line = "CACHED " + line
	}
	e.j.journal.add("info", step, line)
}

// base finds or makes what the first step starts from.
func (e *engine) base(ctx context.Context) error {
	d := e.j.b.Definition
	begin := e.fromImage
	if d.FromTemplate != "" {
		begin = e.fromTemplate
	}
	if err := begin(ctx, d); err != nil {
		return err
	}
	// E2B has a phase for this. Here the tree already has the user.
	e.last = key(e.last, "DEFAULT USER", defaultUser)
	e.say(phaseBase, phaseBase, "DEFAULT USER "+defaultUser, true)
	return nil
}

// fromTemplate starts from a template of the server or the project, or a published one.
func (e *engine) fromTemplate(ctx context.Context, d Definition) error {
	name, _ := strings.CutSuffix(strings.ToLower(d.FromTemplate), ":"+defaultTag)
	if _, err := e.s.own.Lookup(name); err == nil {
		if err := e.fromOwn(ctx, name); err != nil {
			return err
		}
	} else {
		r, err := e.s.Resolve(ctx, e.j.who, d.FromTemplate)
		if err != nil {
			return err
		}
		if err := e.fromBuild(ctx, r.ID); err != nil {
			return err
		}
	}
	env, err := json.Marshal(e.state.env)
	if err != nil {
		return err
	}
	e.last = key(engineVersion, "template", e.parent, string(env), e.state.dir)
	e.say(phaseBase, phaseBase, "FROM TEMPLATE "+d.FromTemplate, true)
	return nil
}

// fromOwn starts from a template of the server, which it builds first if it is missing.
func (e *engine) fromOwn(ctx context.Context, name string) error {
	ts, err := e.s.own.Build(ctx, name)
	if err != nil {
		return err
	}
	if len(ts) != 1 {
		return fmt.Errorf("template %s: got %d", name, len(ts))
	}
	t := ts[0]
	if t.RootImage == "" {
		return userError("template %s has no image on this server to start from; ask the operator to run \"postern template build\"", t.Name)
	}
	e.from, e.own = t.RootImage, true
	e.parent = strings.TrimSuffix(strings.TrimPrefix(filepath.Base(t.RootImage), "root-"), ".erofs")
	if t.Ready != nil {
		e.result.Probes = []sandbox.Probe{{Port: t.Ready.Port, Path: t.Ready.Path}}
	}
	return nil
}

// fromBuild starts from a finished build.
func (e *engine) fromBuild(ctx context.Context, id string) error {
	build, _ := ParseSandboxID(id)
	b, err := e.s.readBuild(ctx, build)
	if err != nil {
		return err
	}
	if b.server != e.s.conf.Server {
		return userError("the template's image is on another server")
	}
	r := b.Result
	e.from, e.digest, e.parent = e.s.imagePath(b.Image), b.Image, b.Image
	e.result.Probes, e.result.StartCmd, e.result.ReadyCmd = r.Probes, r.StartCmd, r.ReadyCmd
	e.state.env, e.state.dir = maps.Clone(r.Env), r.Dir
	if e.state.env == nil {
		e.state.env = map[string]string{}
	}
	return nil
}

// fromImage starts from an image of a registry.
func (e *engine) fromImage(ctx context.Context, d Definition) error {
	if e.s.images == nil {
		return userError("this server pulls no images: start from a template")
	}
	if err := e.s.room(0); err != nil {
		return err
	}
	var i registry.Image
	var err error
	if d.Imported != nil {
		i = *d.Imported
	} else if i, err = e.s.images.Pull(ctx, d.FromImage, d.Credentials, func(line string) { e.j.journal.add("debug", phaseBase, line) }); err != nil {
		return err
	}
	if e.state.env, err = imageEnv(i.Env); err != nil {
		return err
	}
	e.parent, e.result.Source = i.Digest, i.Digest
	e.last = key(engineVersion, "image", provisionVersion, i.Digest)
	// The registry has given this caller the image's manifest, so the cached image
	// reveals nothing new. All projects share it.
	e.from = filepath.Join(e.s.conf.Dir, fromDir, e.last+".erofs")
	unlock := e.s.lockPull(e.last)
	defer unlock()
	now := time.Now()
	if err := os.Chtimes(e.from, now, now); err == nil {
		_ = os.Chtimes(strings.TrimSuffix(e.from, ".erofs")+layersSuffix, now, now)
		e.say(phaseBase, phaseBase, "FROM "+d.FromImage, true)
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	e.say(phaseBase, phaseBase, "FROM "+d.FromImage, false)
	e.j.journal.add("info", phaseBase, "Provisioning sandbox template")
	return e.provision(ctx, i)
}

// provisionVersion is part of the key. Increment it when [rootfs.Tree.Provision] changes.
const provisionVersion = "2"

// provision makes an image of the pulled layers.
func (e *engine) provision(ctx context.Context, i registry.Image) (err error) {
	t := rootfs.New()
	defer func() { err = errors.Join(err, t.Close()) }()
	for n, l := range i.Layers {
		if err := applyFile(t, l.Path); err != nil {
			return fmt.Errorf("layer %d of the image: %w", n+1, err)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	if err := t.Provision(); err != nil {
		return err
	}
	path, _, err := e.writeImage(ctx, t)
	if err != nil {
		return err
	}
	if err := e.listLayers(i); err != nil {
		return err
	}
	return publish(path, e.from)
}

// listLayers records the layers that were pulled for an image. They are kept as long as
// the image, because other images share them.
func (e *engine) listLayers(i registry.Image) error {
	var ids []string
	for _, l := range i.Layers {
		ids = append(ids, l.DiffID)
	}
	text, err := json.Marshal(ids)
	if err != nil {
		return err
	}
	name := filepath.Join(e.dir, "layers.json")
	if err := os.WriteFile(name, text, 0o600); err != nil {
		return err
	}
	return os.Rename(name, strings.TrimSuffix(e.from, ".erofs")+layersSuffix)
}

// applyFile applies the layer in a file.
func applyFile(t *rootfs.Tree, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return t.Apply(f, rootfs.Limits{})
}

// writeImage writes a tree as an image to a temporary file, and syncs it.
func (e *engine) writeImage(ctx context.Context, t *rootfs.Tree) (path, digest string, err error) {
	f, err := os.CreateTemp(e.dir, "image-")
	if err != nil {
		return "", "", err
	}
	d, err := e.writeTree(ctx, t, f)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = e.s.room(0)
	}
	if err != nil {
		return "", "", errors.Join(err, ignoreMissing(os.Remove(f.Name())))
	}
	return f.Name(), d.String(), nil
}

// writeTree writes a tree to the empty file f of this build's directory. The image takes
// what it can from the one that the build started from: it shares its blocks, if the file
// system can, or it is joined with it, if the kernel can.
func (e *engine) writeTree(ctx context.Context, t *rootfs.Tree, f *os.File) (erofs.Digest, error) {
	base := t.Base()
	if base == nil || e.s.cannotJoin.Load() || base.CanClone(f) {
		return t.WriteImage(ctx, f)
	}
	d, err := t.WriteJoined(ctx, f)
	if errors.Is(err, errors.ErrUnsupported) {
		return t.WriteImage(ctx, f)
	}
	if err != nil {
		return d, err
	}
	for _, part := range base.Files() {
		if err := e.takePart(part, base.Digest); err != nil {
			return d, fmt.Errorf("share image %s: %w", part, err)
		}
	}
	i, err := erofs.Open(f.Name())
	if err == nil {
		return d, i.Close()
	}
	if !errors.Is(err, erofs.ErrJoin) {
		return d, err
	}
	e.s.cannotJoin.Store(true)
	e.s.log.InfoContext(ctx, "each template takes the disk space of a whole image", "why", err)
	if err := f.Truncate(0); err != nil {
		return d, err
	}
	return t.WriteImage(ctx, f)
}

// takePart links a part of an image into this build's directory. There no sweep removes
// it.
func (e *engine) takePart(part, base erofs.Digest) error {
	to := filepath.Join(e.dir, erofs.PartName(part))
	err := os.Link(e.s.imagePath(part.String()), to)
	if errors.Is(err, fs.ErrNotExist) && part == base {
		// A template of the server, or a pulled image.
		if err = os.Link(e.from, to); err != nil && !errors.Is(err, fs.ErrExist) {
			err = copyFile(e.from, to) // on another file system
		}
	}
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// takeParts links the parts of an existing image into this build's directory.
func (e *engine) takeParts(path string) error {
	parts, err := erofs.Parts(path)
	if err != nil {
		return err
	}
	for _, part := range parts {
		if err := e.takePart(part, erofs.Digest{}); err != nil {
			return err
		}
	}
	return nil
}

// publishParts makes the parts of this build's image permanent. The caller holds s.files
// until a row names the image.
func (e *engine) publishParts(path string) error {
	parts, err := erofs.Parts(path)
	if err != nil {
		return err
	}
	for _, part := range parts {
		err := os.Link(filepath.Join(e.dir, erofs.PartName(part)), e.s.imagePath(part.String()))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// copyFile copies a file and syncs the copy. What it leaves after an error is the caller's.
func copyFile(from, to string) error {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Sync(), w.Close())
}

// maxEnv is the limit for a template's environment, in bytes. The kernel's limit for a
// process is similar.
const maxEnv = 64 << 10

// imageEnv reads the environment of an image, which is hostile.
func imageEnv(list []string) (map[string]string, error) {
	env := map[string]string{}
	for _, l := range list {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" || strings.ContainsRune(l, 0) {
			continue // as container runtimes do
		}
		env[k] = strings.ToValidUTF8(v, "")
	}
	return env, checkEnv(env)
}

// checkEnv returns an error if an environment is too large.
func checkEnv(env map[string]string) error {
	n := 0
	for k, v := range env {
		n += len(k) + len(v) + 2
	}
	if n > maxEnv {
		return userError("the environment has %d bytes, at most %d are allowed", n, maxEnv)
	}
	return nil
}

// A pull makes one image in fromDir. Other builds that need the same image wait for it.
type pull struct {
	sync.Mutex

	users int // guarded by Service.mu
}

// lockPull lets one build at a time make the image with a key.
func (s *Service) lockPull(key string) (unlock func()) {
	s.mu.Lock()
	p := s.pulls[key]
	if p == nil {
		p = &pull{}
		s.pulls[key] = p
	}
	p.users++
	s.mu.Unlock()
	p.Lock()
	return func() {
		p.Unlock()
		s.mu.Lock()
		defer s.mu.Unlock()
		if p.users--; p.users == 0 {
			delete(s.pulls, key)
		}
	}
}

// tree returns the tree of what the build began from and the layers so far. The caller
// closes it.
func (e *engine) tree() (_ *rootfs.Tree, err error) {
	t, err := rootfs.Open(e.from)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.Close())
		}
	}()
	for _, l := range e.layers {
		if err := applyFile(t, e.s.layerPath(l)); err != nil {
			return nil, fmt.Errorf("layer %s: %w", l, err)
		}
	}
	return t, nil
}

// open boots the bench, unless it runs.
func (e *engine) open(ctx context.Context) error {
	if e.bench != nil {
		return nil
	}
	if err := e.s.room(0); err != nil {
		return err
	}
	t, err := e.tree()
	if err != nil {
		return err
	}
	e.below = t
	root := e.from
	if len(e.layers) > 0 {
		if root, err = e.benchImage(ctx, t); err != nil {
			return err
		}
	}
	guest, err := e.s.own.Base(ctx)
	if err != nil {
		return err
	}
	b := e.j.b
	left := e.s.conf.BuildTime
	if at, ok := ctx.Deadline(); ok {
		left = time.Until(at)
	}
	e.bench, err = e.s.machine.OpenBench(ctx, e.j.who, sandbox.BenchRequest{
		Base: sandbox.Base{Rootfs: filepath.Join(e.s.conf.Dir, emptyDir), Image: sandbox.Image{Root: root, Guest: guest.GuestImage}, Key: "bench " + b.ID},
		CPUs: b.CPUs, MemoryMB: b.MemoryMB, DiskMB: max(b.DiskMB, e.s.conf.MaxDiskMB), Timeout: left + time.Minute,
	})
	if err != nil {
		e.bench = nil
		return fmt.Errorf("start a sandbox for the build's steps: %w", err)
	}
	return nil
}

// benchImage returns an image of t. If one exists, it is linked to a name in this build's
// directory, so that the sweep does not remove it. Otherwise it writes one.
func (e *engine) benchImage(ctx context.Context, t *rootfs.Tree) (path string, err error) {
	path = filepath.Join(e.dir, "bench.erofs")
	e.s.files.RLock()
	digest, err := e.findImage(ctx)
	if err == nil && digest != "" {
		if err = os.Link(e.s.imagePath(digest), path); err == nil {
			err = e.takeParts(path)
		}
	}
	e.s.files.RUnlock()
	if err != nil || digest != "" {
		return path, err
	}
	path, _, err = e.writeImage(ctx, t)
	return path, err
}

// finish writes the final image, makes the memory snapshot and records the build as ready.
func (e *engine) finish(ctx context.Context) error {
	s, b := e.s, &e.j.b
	e.last = key(e.last, "FINALIZE")
	e.say(finalize, finalize, "Finalizing template build", false)
	if e.bench != nil {
		// The next sandbox needs its memory.
		err := e.bench.Close()
		if e.bench = nil; err != nil {
			return err
		}
	}
	d := b.Definition
	if d.StartCmd != "" || d.ReadyCmd != "" {
		e.result.StartCmd, e.result.ReadyCmd = d.StartCmd, d.ReadyCmd
	}
	e.result.Env, e.result.User, e.result.Dir, e.result.Layers = e.state.env, e.state.user, e.state.dir, e.layers
	if err := e.publishImage(ctx); err != nil {
		return err
	}
	if err := e.close(); err != nil {
		return err
	}
	id := SandboxID(b.ID)
	if err := e.snapshot(ctx, id); err != nil {
		return err
	}
	// Flush before the state changes: a client stops reading the log when the build has ended.
	e.j.journal.add("info", "", fmt.Sprintf("Build finished, took %s", time.Since(e.j.begin).Truncate(time.Second)))
	if err := e.j.journal.flush(ctx); err != nil {
		return errors.Join(err, s.machine.ForgetTemplate(context.WithoutCancel(ctx), id))
	}
	if err := s.recordReady(ctx, e); err != nil {
		return errors.Join(err, s.machine.ForgetTemplate(context.WithoutCancel(ctx), id))
	}
	return nil
}

// snapshot makes the memory snapshot, with the start command running.
func (e *engine) snapshot(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, e.s.conf.SnapshotTimeout, errTimeout)
	defer cancel()
	say := func(line string) { e.j.journal.add("info", finalize, line) }
	r := e.result
	if r.StartCmd != "" {
		say("Running start command: " + r.StartCmd)
	}
	if r.ReadyCmd != "" {
		say("Waiting for template to be ready: " + r.ReadyCmd)
	}
	err := e.s.machine.MakeTemplateSnapshot(ctx, id, func(line string) { say("[start] [stdout]: " + line) })
	if se, ok := errors.AsType[*sandbox.StartError](err); ok {
		return userError("%s", se.Reason)
	}
	if err != nil {
		return err
	}
	if r.StartCmd != "" || r.ReadyCmd != "" {
		say("Template is ready")
	}
	return nil
}

// imageKey returns the key of the current image: what the build started from with the
// layers so far. Layers are named by digest, so the key determines the image.
func (e *engine) imageKey() string {
	return "image " + key(append([]string{engineVersion, filepath.Base(e.from)}, e.layers...)...)
}

// findImage returns the digest of the image with the current key, if this project has
// made one. The caller holds s.files until a row names the image.
func (e *engine) findImage(ctx context.Context) (digest string, err error) {
	if e.digest != "" && len(e.layers) == 0 {
		return e.digest, nil
	}
	digest, err = e.s.findRow(ctx, e.j.who.Project, e.imageKey())
	if err != nil || digest == "" {
		return "", err
	}
	if _, err := os.Stat(e.s.imagePath(digest)); err != nil {
		return "", ignoreMissing(err)
	}
	return digest, nil
}

// publishImage writes the root file system's image and its row.
func (e *engine) publishImage(ctx context.Context) error {
	if ok, err := e.reuseImage(ctx); ok || err != nil {
		return err
	}
	t, err := e.tree()
	if err != nil {
		return err
	}
	path, digest, err := e.writeImage(ctx, t)
	if err := errors.Join(err, t.Close()); err != nil {
		return err
	}
	s := e.s
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	if err := s.makeRoom(ctx, e.j.who.Project, st.Size()); err != nil {
		return err
	}
	s.files.RLock()
	defer s.files.RUnlock()
	if err := e.publishParts(path); err != nil {
		return err
	}
	if err := publishOnce(path, s.imagePath(digest)); err != nil {
		return err
	}
	if err := s.recordLayer(ctx, e.j.who.Project, e.imageKey(), digest, 0); err != nil {
		return err
	}
	return e.useImage(ctx, digest)
}

// reuseImage uses an existing image, if there is one.
func (e *engine) reuseImage(ctx context.Context) (bool, error) {
	e.s.files.RLock()
	defer e.s.files.RUnlock()
	digest, err := e.findImage(ctx)
	if err != nil || digest == "" {
		return false, err
	}
	return true, e.useImage(ctx, digest)
}

// useImage writes the row of an image. The caller holds s.files.
func (e *engine) useImage(ctx context.Context, digest string) error {
	st, err := os.Stat(e.s.imagePath(digest))
	if err != nil {
		return err
	}
	e.result.Bytes, e.j.b.Image, e.j.b.Parent = st.Size(), digest, e.parent
	return e.s.recordImage(ctx, e)
}
