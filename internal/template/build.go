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
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// build builds the template of the recipe. The caller holds the lock.
func (c *Cache) build(ctx context.Context) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("build: must run as root (it makes device files and files of other users)")
	}
	mmdebstrap, err := exec.LookPath("mmdebstrap")
	if err != nil {
		return fmt.Errorf("build: %w; install it with: apt-get install --no-install-recommends mmdebstrap", err)
	}
	sources, err := c.sources()
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
	p := newProgress(c.cfg.Progress, c.recipe.name, logFile)
	stop := p.start()
	defer stop()
	rootfs := filepath.Join(dir, "rootfs")
	if err := c.debootstrap(ctx, p, mmdebstrap, dir, rootfs, sources); err != nil {
		return err
	}
	p.phase("setting up the system")
	if err := c.finish(ctx, p, rootfs, sources); err != nil {
		return err
	}
	p.phase("writing to disk")
	t, err := c.seal(dir, rootfs)
	if err != nil {
		return fmt.Errorf("build: %w", err)
	}
	if err := c.publish(dir, t.ID); err != nil {
		return fmt.Errorf("build: %w", err)
	}
	stop()
	took := time.Since(began).Round(time.Second)
	fmt.Fprintf(c.cfg.Progress, "template %s: built in %s: %d packages, %d MB\n", t.Name, took, t.Packages, t.Bytes/1e6)
	c.log.InfoContext(ctx, "template built", "id", t.ID, "took", took, "bytes", t.Bytes)
	return nil
}

// sources returns where to get the recipe's packages. It returns none on a host of
// another release, or of Ubuntu: then mmdebstrap uses Debian's own mirrors, and
// verifies them with the keys in Debian's keyring.
func (c *Cache) sources() ([]source, error) {
	if c.cfg.Sources != "" {
		s := parseSources(c.cfg.Sources, c.recipe.suite)
		if len(s) == 0 {
			return nil, fmt.Errorf("read configured package sources: none of them is for Debian %s", c.recipe.suite)
		}
		return s, nil
	}
	s, err := hostSources(c.etcApt, c.recipe.suite)
	if err != nil {
		return nil, fmt.Errorf("read the host's package sources: %w", err)
	}
	return s, nil
}

// debootstrap installs the recipe's packages into rootfs.
func (c *Cache) debootstrap(ctx context.Context, p *progress, mmdebstrap, dir, rootfs string, sources []source) error {
	p.phase("reading package lists")
	apt := filepath.Join(c.cfg.Dir, "apt")
	args := []string{
		mmdebstrap, "--verbose", "--mode=root", "--format=directory", "--variant=" + c.recipe.variant,
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
	if len(c.recipe.packages) > 0 {
		args = append(args, "--include="+strings.Join(c.recipe.packages, ","))
	}
	for _, e := range c.recipe.exclude {
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
		args = append(args, c.recipe.suite, rootfs, "-")
	} else {
		keys, err := filepath.Glob(c.keyring)
		if err != nil || len(keys) == 0 {
			return fmt.Errorf("install packages: /etc/apt names no source of Debian %s, and there is no %s to verify other sources with; install it with: apt-get install --no-install-recommends debian-archive-keyring", c.recipe.suite, c.keyring)
		}
		args = append(args, "--keyring="+keys[0], c.recipe.suite, rootfs)
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
func (c *Cache) finish(ctx context.Context, p *progress, rootfs string, sources []source) error {
	root, err := os.OpenRoot(rootfs)
	if err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	defer root.Close()
	const script = "/opt/postern-finish.sh"
	files := append([]file{{script, c.recipe.finish}}, c.recipe.files...)
	if len(sources) > 0 { // otherwise mmdebstrap has written its own
		var list strings.Builder
		for _, s := range sources {
			list.WriteString(s.public().line())
		}
		files = append(files, file{"/etc/apt/sources.list", list.String()})
	}
	for _, f := range files {
		name := f.path[1:]
		if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return fmt.Errorf("set up: %w", err)
		}
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("set up: %w", err)
		}
		if err := writeFile(root, name, []byte(f.text), 0o644); err != nil {
			return fmt.Errorf("set up: %w", err)
		}
	}
	cmd := jail(ctx, syscall.CLONE_NEWNS|syscall.CLONE_NEWPID|syscall.CLONE_NEWNET|syscall.CLONE_NEWUTS,
		`mount --make-rprivate / && mount -t proc proc "$1/proc" && hostname sandbox && exec chroot "$1" /bin/sh "$2"`, rootfs, script)
	cmd.Dir = "/"
	if err := p.run(cmd); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return root.Remove(script[1:])
}

// seal writes the description of a finished root file system and flushes everything
// to disk.
func (c *Cache) seal(dir, rootfs string) (Template, error) {
	t := Template{ID: c.recipe.id(), Name: c.recipe.name, Built: time.Now().UTC().Truncate(time.Second)}
	status, err := os.ReadFile(filepath.Join(rootfs, "var/lib/dpkg/status"))
	if err != nil {
		return Template{}, err
	}
	debs := installedDebs(string(status))
	t.Packages = len(debs)
	if t.Bytes, err = diskUsage(rootfs); err != nil {
		return Template{}, err
	}
	if err := c.forgetDebs(debs); err != nil {
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
	d, err := os.Open(dir)
	if err != nil {
		return Template{}, err
	}
	defer d.Close()
	// One call instead of an fsync for each of twenty thousand files.
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
	d, err := os.Open(templates)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// sweep removes what killed builds and prunes have left. The caller holds the lock,
// so none of them is running.
func (c *Cache) sweep() error {
	left, err := filepath.Glob(filepath.Join(c.cfg.Dir, "build-*"))
	if err != nil {
		return err
	}
	for _, dir := range left {
		fmt.Fprintf(c.cfg.Progress, "template %s: removing what an interrupted build left\n", c.recipe.name)
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

// forgetDebs removes the downloaded packages that the newest build did not use.
func (c *Cache) forgetDebs(used []string) error {
	have, err := filepath.Glob(filepath.Join(c.cfg.Dir, "apt", "*.deb"))
	if err != nil {
		return err
	}
	for _, h := range have {
		if !slices.Contains(used, filepath.Base(h)) {
			if err := os.Remove(h); err != nil {
				return err
			}
		}
	}
	return nil
}

// installedDebs returns apt's file names for the packages in dpkg's status file.
func installedDebs(status string) []string {
	var out []string
	for stanza := range strings.SplitSeq(status, "\n\n") {
		f := fields(stanza)
		if f["package"] == "" || !strings.HasSuffix(f["status"], " installed") {
			continue
		}
		out = append(out, f["package"]+"_"+strings.ReplaceAll(f["version"], ":", "%3a")+"_"+f["architecture"]+".deb")
	}
	return out
}

// diskUsage returns the bytes that a directory uses on disk.
func diskUsage(dir string) (int64, error) {
	var n int64
	seen := map[uint64]bool{} // inodes: a file may have several names
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		i, err := d.Info()
		if err != nil {
			return err
		}
		if st, ok := i.Sys().(*syscall.Stat_t); ok && !seen[st.Ino] {
			seen[st.Ino] = st.Nlink > 1
			n += st.Blocks * 512
		}
		return nil
	})
	return n, err
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
