package template

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// A build has two stages. The first installs the packages, which takes minutes. Its
// result is kept, compressed. The second puts the recipe's files on top, runs its
// scripts and makes the image; it takes some seconds. So a new version of a small file
// does not install packages again.

// epoch is the time of each file that a build makes. Those that it unpacks keep theirs.
var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// build builds the template of r. The caller holds the lock.
func (c *Cache) build(ctx context.Context, r recipe, out io.Writer) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("build: must run as root (it makes device files and files of other users)")
	}
	sources, err := c.sources(r)
	if err != nil {
		return fmt.Errorf("build: %w", err)
	}
	if err := c.sweep(); err != nil {
		return fmt.Errorf("build: %w", err)
	}
	dir, err := os.MkdirTemp(c.cfg.Dir, "build-")
	if err != nil {
		return fmt.Errorf("build: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.discard(dir))
		}
	}()
	logFile, err := os.Create(filepath.Join(c.cfg.Dir, "build.log"))
	if err != nil {
		return fmt.Errorf("build: %w", err)
	}
	defer logFile.Close()

	began := time.Now()
	p := newProgress(out, r.name, logFile)
	stop := p.start()
	defer stop()
	rootfs := filepath.Join(dir, "rootfs")
	if err := c.install(ctx, p, r, dir, rootfs, sources); err != nil {
		return err
	}
	p.phase("setting up the system")
	if err := c.finish(ctx, p, r, rootfs, sources); err != nil {
		return err
	}
	p.phase("writing the image")
	t, err := c.seal(ctx, r, dir, rootfs)
	if err != nil {
		return fmt.Errorf("build: %w", err)
	}
	if err := c.publish(dir, t.ID); err != nil {
		return fmt.Errorf("build: %w", err)
	}
	stop()
	took := time.Since(began).Round(time.Second)
	fmt.Fprintf(out, "template %s: built in %s: %d packages, %d MB\n", t.Name, took, t.Packages, t.Bytes/1e6)
	c.log.InfoContext(ctx, "template built", "id", t.ID, "took", took, "bytes", t.Bytes)
	return nil
}

// packed returns the path of the recipe's installed packages.
func (c *Cache) packed(r recipe) string {
	return filepath.Join(c.cfg.Dir, "packages", r.packagesKey()[:32]+".tar.zst")
}

// install makes rootfs, with the recipe's packages installed: those of an earlier build
// if it had the same ones.
func (c *Cache) install(ctx context.Context, p *progress, r recipe, dir, rootfs string, sources []source) error {
	packed, err := os.Open(c.packed(r))
	if err == nil {
		p.phase("unpacking the packages")
		err := unpack(ctx, packed, rootfs)
		if err := errors.Join(err, packed.Close()); err != nil {
			return fmt.Errorf("unpack installed packages: %w", err)
		}
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("open installed packages: %w", err)
	}
	mmdebstrap, err := exec.LookPath("mmdebstrap")
	if err != nil {
		return fmt.Errorf("build: %w; install it with: apt-get install --no-install-recommends mmdebstrap", err)
	}
	began := time.Now()
	if err := c.debootstrap(ctx, p, r, mmdebstrap, dir, rootfs, sources); err != nil {
		return err
	}
	if err := c.addNPM(ctx, p, r, rootfs); err != nil {
		return err
	}
	p.phase("keeping the packages for the next build")
	if err := emptyDir(rootfs, "var/cache/apt/archives"); err != nil {
		return fmt.Errorf("keep installed packages: %w", err)
	}
	if err := clamp(rootfs, began); err != nil {
		return fmt.Errorf("keep installed packages: %w", err)
	}
	if err := pack(ctx, rootfs, filepath.Join(dir, "packed"), c.packed(r)); err != nil {
		return fmt.Errorf("keep installed packages: %w", err)
	}
	return c.forgetDownloads()
}

// sources returns where to get the recipe's packages. It returns none on a host of
// another release, or of Ubuntu: then mmdebstrap uses Debian's own mirrors, and
// verifies them with the keys in Debian's keyring.
func (c *Cache) sources(r recipe) ([]source, error) {
	if c.cfg.Sources != "" {
		s := parseSources(c.cfg.Sources, r.suite)
		if len(s) == 0 {
			return nil, fmt.Errorf("read configured package sources: none of them is for Debian %s", r.suite)
		}
		return s, nil
	}
	s, err := hostSources(c.etcApt, r.suite)
	if err != nil {
		return nil, fmt.Errorf("read the host's package sources: %w", err)
	}
	return s, nil
}

// debootstrap installs the recipe's packages into rootfs.
func (c *Cache) debootstrap(ctx context.Context, p *progress, r recipe, mmdebstrap, dir, rootfs string, sources []source) error {
	p.phase("reading package lists")
	apt := filepath.Join(c.cfg.Dir, "apt")
	args := []string{
		mmdebstrap, "--verbose", "--mode=root", "--format=directory", "--variant=" + r.variant,
		"--aptopt=Acquire::Languages \"none\"",
		// apt's own user cannot read the directory.
		"--aptopt=APT::Sandbox::User \"root\"",
		// A build that a power cut interrupts is thrown away, so dpkg need not
		// flush each file. Everything is flushed once at the end.
		"--dpkgopt=force-unsafe-io",
		// Reuse the packages of earlier builds. apt verifies them like downloads.
		"--skip=download/empty", "--skip=essential/unlink",
		`--setup-hook=mkdir -p "$1/var/cache/apt/archives" && find ` + quote(apt) + ` -name "*.deb" -exec ln -t "$1/var/cache/apt/archives" {} +`,
		`--customize-hook=find "$1/var/cache/apt/archives" -name "*.deb" -exec ln -f -t ` + quote(apt) + ` {} +`,
	}
	if len(r.packages) > 0 {
		args = append(args, "--include="+strings.Join(r.packages, ","))
	}
	for _, e := range r.exclude {
		args = append(args, "--dpkgopt=path-exclude="+e)
	}
	opts, err := hostAcquire(ctx)
	if err != nil {
		return fmt.Errorf("read the host's apt configuration: %w", err)
	}
	for _, o := range opts {
		args = append(args, "--aptopt="+o)
	}
	var list strings.Builder
	for _, s := range sources {
		list.WriteString(s.line())
	}
	if len(sources) > 0 {
		args = append(args, r.suite, rootfs, "-")
	} else {
		keys, err := filepath.Glob(c.keyring)
		if err != nil || len(keys) == 0 {
			return fmt.Errorf("install packages: /etc/apt names no source of Debian %s, and there is no %s to verify other sources with; install it with: apt-get install --no-install-recommends debian-archive-keyring", r.suite, c.keyring)
		}
		args = append(args, "--keyring="+keys[0], r.suite, rootfs)
	}
	// In namespaces of its own: mmdebstrap mounts /proc and parts of /dev below
	// rootfs. If it is killed these mounts must disappear with it, otherwise the
	// removal of its leftovers would reach the host's /dev.
	cmd := jail(ctx, syscall.CLONE_NEWNS|syscall.CLONE_NEWPID,
		`mount --make-rprivate / && mount -t proc proc /proc && exec "$@"`, args...)
	cmd.Dir = dir
	// What it leaves when it is killed, such as a keyring, is removed with the rest
	// of the build.
	tmp := filepath.Join(dir, "tmp")
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return fmt.Errorf("install packages: %w", err)
	}
	cmd.Env = append(cmd.Env, "TMPDIR="+tmp)
	cmd.Stdin = strings.NewReader(list.String())
	if err := p.run(cmd); err != nil {
		return fmt.Errorf("install packages: %w", err)
	}
	if err := os.RemoveAll(tmp); err != nil {
		return fmt.Errorf("install packages: %w", err)
	}
	return nil
}

// hostAcquire returns the host's apt settings for downloads: proxies, certificates,
// whether dates are checked. Settings that weaken signatures are not copied.
func hostAcquire(ctx context.Context) ([]string, error) {
	out, err := exec.CommandContext(ctx, "apt-config", "dump", "Acquire").Output()
	if err != nil {
		return nil, err
	}
	var opts []string
	for _, l := range lines(string(out)) {
		for _, prefix := range []string{"Acquire::http::", "Acquire::https::", "Acquire::Check-", "Acquire::Retries ", "Acquire::Force"} {
			if strings.HasPrefix(l, prefix) {
				opts = append(opts, l)
			}
		}
	}
	return opts, nil
}

// finish writes the recipe's files and runs its script, inside the new system and
// without network.
func (c *Cache) finish(ctx context.Context, p *progress, r recipe, rootfs string, sources []source) error {
	root, err := os.OpenRoot(rootfs)
	if err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	defer root.Close()
	began := time.Now()
	const script = "/opt/postern-finish.sh"
	// In the guest's place is an empty file, over which its image is mounted.
	files := append([]file{{script, finishProlog + r.finish}, {GuestPath, ""}}, r.files...)
	if len(sources) > 0 { // otherwise mmdebstrap has written its own
		var list strings.Builder
		for _, s := range sources {
			list.WriteString(s.public().line())
		}
		files = append(files, file{"/etc/apt/sources.list", list.String()})
	}
	place := func(name string) error {
		if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	for _, f := range files {
		if err := place(f.path[1:]); err != nil {
			return fmt.Errorf("set up: %w", err)
		}
		if err := copyFile(root, f.path[1:], strings.NewReader(f.text), 0o644, epoch); err != nil {
			return fmt.Errorf("set up: %w", err)
		}
	}
	for _, l := range r.links {
		if err := place(l.path[1:]); err != nil {
			return fmt.Errorf("set up: %w", err)
		}
		if err := root.Symlink(l.text, l.path[1:]); err != nil {
			return fmt.Errorf("set up: %w", err)
		}
	}
	cmd := jail(ctx, syscall.CLONE_NEWNS|syscall.CLONE_NEWPID|syscall.CLONE_NEWNET|syscall.CLONE_NEWUTS,
		`mount --make-rprivate / && mount -t proc proc "$1/proc" && hostname sandbox && exec chroot "$1" /bin/sh "$2"`, rootfs, script)
	cmd.Dir = "/"
	if err := p.run(cmd); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	if err := root.Remove(script[1:]); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	if err := clamp(rootfs, began); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return nil
}

// finishProlog begins the recipe's script. The variable is the time that programs write
// instead of the present one. Python is not told: it would compile to files that it
// compares with their source at each import.
var finishProlog = fmt.Sprintf(`set -eu
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
umask 022
export SOURCE_DATE_EPOCH=%d
python3() { env -u SOURCE_DATE_EPOCH /usr/bin/python3 "$@"; }
`, epoch.Unix())

// clamp gives each file below dir that has changed since a time the time epoch, so that
// the result does not depend on when it was built. Other times lose their fractions of
// a second.
func clamp(dir string, since time.Time) error {
	since = since.Truncate(time.Second)
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		i, err := d.Info()
		if err != nil {
			return err
		}
		t := i.ModTime().Truncate(time.Second)
		if !t.Before(since) {
			t = epoch
		}
		at := []unix.Timespec{{Sec: t.Unix()}, {Sec: t.Unix()}}
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, path, at, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return &os.PathError{Op: "set times", Path: path, Err: err}
		}
		return nil
	})
}

// pack writes the directory dir to the file name, by way of the file tmp. A process that
// is killed leaves all of it or nothing.
func pack(ctx context.Context, dir, tmp, name string) (err error) {
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	z, err := zstd.NewWriter(f)
	if err != nil {
		return err
	}
	// Extended attributes are not kept, as in an image.
	cmd := jail(ctx, 0, `exec tar -c --sort=name --numeric-owner --format=gnu -C "$1" .`, dir)
	if err := errors.Join(runWith(cmd, nil, z), z.Close(), f.Sync()); err != nil {
		return err
	}
	if err := os.Rename(tmp, name); err != nil {
		return err
	}
	return syncDir(filepath.Dir(name))
}

// unpack makes the directory dir from what pack has written.
func unpack(ctx context.Context, packed io.Reader, dir string) error {
	z, err := zstd.NewReader(packed)
	if err != nil {
		return err
	}
	defer z.Close()
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	return runWith(jail(ctx, 0, `exec tar -x --numeric-owner -p -C "$1"`, dir), z, nil)
}

// emptyDir removes what is in the directory name below rootfs.
func emptyDir(rootfs, name string) error {
	root, err := os.OpenRoot(rootfs)
	if err != nil {
		return err
	}
	defer root.Close()
	es, err := fs.ReadDir(root.FS(), name)
	if err != nil {
		return err
	}
	for _, e := range es {
		if err := root.RemoveAll(filepath.Join(name, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// runWith runs a command of jail. Its error includes what it wrote to its standard error.
func runWith(cmd *exec.Cmd, in io.Reader, out io.Writer) error {
	runtime.LockOSThread() // see progress.run
	defer runtime.UnlockOSThread()
	var said bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("tar: %w; it says: %.2000s", err, strings.TrimSpace(said.String()))
	}
	return nil
}

func syncDir(name string) error {
	d, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// seal makes the image of a finished root file system, writes its description, empties
// rootfs and flushes everything to disk.
func (c *Cache) seal(ctx context.Context, r recipe, dir, rootfs string) (Template, error) {
	t := Template{ID: r.id(), Name: r.name, Built: time.Now().UTC().Truncate(time.Second), Ready: r.ready}
	status, err := os.ReadFile(filepath.Join(rootfs, "var/lib/dpkg/status"))
	if err != nil {
		return Template{}, err
	}
	t.Packages = strings.Count(string(status), "\nStatus: install ok installed\n") + len(r.npm)
	if t.Bytes, err = makeRootImage(ctx, dir, rootfs); err != nil {
		return Template{}, err
	}
	b, err := json.MarshalIndent(t, "", "  ")
	if err != nil {
		return Template{}, err
	}
	if err := os.WriteFile(filepath.Join(dir, "template.json"), b, 0o600); err != nil {
		return Template{}, err
	}
	if err := os.WriteFile(filepath.Join(dir, "in-use"), nil, 0o600); err != nil {
		return Template{}, err
	}
	// The image has it all. gVisor wants a directory to be there.
	if err := removeTree(rootfs); err != nil {
		return Template{}, err
	}
	if err := os.Mkdir(rootfs, 0o755); err != nil {
		return Template{}, err
	}
	d, err := os.Open(dir)
	if err != nil {
		return Template{}, err
	}
	defer d.Close()
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		return Template{}, fmt.Errorf("flush %s: %w", dir, err)
	}
	return t, nil
}

// publish renames a sealed build to its ID.
func (c *Cache) publish(dir, id string) error {
	templates := filepath.Join(c.cfg.Dir, "templates")
	if err := os.Rename(dir, filepath.Join(templates, id)); err != nil {
		return err
	}
	return syncDir(templates)
}

// sweep removes what killed builds and prunes have left. The caller holds the lock,
// so none of them is running.
func (c *Cache) sweep() error {
	left, err := filepath.Glob(filepath.Join(c.cfg.Dir, "build-*"))
	if err != nil {
		return err
	}
	fetches, err := filepath.Glob(filepath.Join(c.cfg.Dir, "npm", "fetch-*"))
	if err != nil {
		return err
	}
	for _, dir := range append(left, fetches...) {
		c.log.Info("removing what an interrupted build left", "dir", dir)
		if err := c.discard(dir); err != nil {
			return err
		}
	}
	return nil
}

// discard removes a build, but keeps the packages that it has downloaded.
func (c *Cache) discard(dir string) error {
	// apt moves a package to this directory when it is complete.
	debs, _ := filepath.Glob(filepath.Join(dir, "rootfs/var/cache/apt/archives/*.deb"))
	for _, d := range debs {
		if err := os.Rename(d, filepath.Join(c.cfg.Dir, "apt", filepath.Base(d))); err != nil {
			c.log.Debug("keep downloaded package", "error", err)
		}
	}
	return removeTree(dir)
}

// removeTree removes a directory unless something is mounted in it: whatever that
// is, it must not be removed.
func removeTree(dir string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	for l := range strings.Lines(string(mounts)) {
		if f := strings.Fields(l); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			return fmt.Errorf("remove %s: something is mounted at %s; unmount it", dir, f[4])
		}
	}
	return os.RemoveAll(dir)
}

// forgetDownloads removes the packages that were downloaded: they are installed, and
// kept so.
func (c *Cache) forgetDownloads() error {
	for _, pattern := range []string{"apt/*.deb", "npm/*.tgz"} {
		have, err := filepath.Glob(filepath.Join(c.cfg.Dir, pattern))
		if err != nil {
			return err
		}
		for _, h := range have {
			if err := os.Remove(h); err != nil {
				return err
			}
		}
	}
	return nil
}

// jail returns a command that runs a shell script with args in namespaces of its
// own. It and all its children are killed when ctx is done or this process dies:
// the kernel ends a PID namespace with its first process.
func jail(ctx context.Context, namespaces uintptr, script string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/bin/sh", append([]string{"-euc", script, "sh"}, args...)...)
	// Not our environment: it may hold secrets, and the result must not depend on
	// it.
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// quote quotes s for a shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// run runs cmd and follows its output. Its error includes the errors in the output.
func (p *progress) run(cmd *exec.Cmd) error {
	// Pdeathsig is sent when the thread that started the process ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		_ = r.Close()
		if errors.Is(err, syscall.EPERM) {
			return fmt.Errorf("start %s in namespaces of its own: %w; inside a container this needs CAP_SYS_ADMIN", cmd.Path, err)
		}
		return err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.follow(r)
	}()
	err = cmd.Wait()
	select {
	case <-done:
	case <-time.After(cmd.WaitDelay):
	}
	_ = r.Close()
	<-done
	if err != nil {
		return fmt.Errorf("%w%s", err, p.complaint())
	}
	return nil
}

// follow reads output line by line until it ends.
func (p *progress) follow(r io.Reader) {
	in := bufio.NewReaderSize(r, 64<<10)
	for {
		// A line that does not fit is read in pieces.
		l, err := in.ReadSlice('\n')
		if len(l) > 0 {
			p.line(string(bytes.TrimRight(l, "\r\n")))
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}
