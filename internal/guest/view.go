package guest

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// A view is the mount namespace, with its own root, of the processes of a bound sandbox. It
// contains the template's system directories and the paths that the contract allows to read,
// all read-only, and writable directories, which are empty at first. It contains nothing
// else: neither home directories nor the guest's files.
//
// There is no helper program. One thread of the guest is in the namespace, and forks every
// process of the view, which inherits the namespace and the root. The thread has an empty
// bounding set and no_new_privs, so its children gain nothing from a set-user-ID program.
// Their user owns nothing in the template, so that the kernel answers EACCES where they may
// not write, as programs expect. The thread keeps root's effective capabilities to mount
// inputs.
//
// In gVisor a thread of the guest survives a snapshot with its namespace.
type view struct {
	account account
	dir     string      // working directory
	writes  []string    // paths of the writable directories
	opened  []*os.File  // the same directories, opened with O_PATH before any process ran
	work    string      // the guest's directory, outside of the view, for the files behind it
	jobs    chan func() // functions to call on the view's thread

	starter bool // processes execute the starter first
	started bool // a process has been started; used only on the view's thread

	inputsMu sync.Mutex
	inputs   map[string]bool // paths of the inputs, see [view.put]; guarded by inputsMu
}

// viewID is the user and group ID of a view's processes. It is above the ranges that adduser
// and systemd use, so that it owns nothing in a template.
const viewID = 65321

// viewUser is the name of that user in the view's /etc/passwd.
const viewUser = "run"

// systemDirs are the directories of the template that every view has.
var systemDirs = []string{"/bin", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/sbin", "/usr"}

// ownDirs are the directories that the guest creates itself in a view.
var ownDirs = []string{"/dev", "/proc", "/sys"}

// devices are the files of a view's /dev.
var devices = []string{"full", "null", "random", "tty", "urandom", "zero"}

const (
	readOnly   = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV
	readWrite  = unix.MS_NOSUID | unix.MS_NODEV
	aDevice    = unix.MS_NOSUID | unix.MS_NOEXEC
	unreadable = readOnly | unix.MS_NOEXEC
)

// below reports whether path is dir or lies in it. Both are clean.
func below(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

// A viewRequest is the body of POST /run/confine. All paths are absolute and clean.
type viewRequest struct {
	Contract  string   `json:"contract"` // "name@sha256:…"
	Read      []string `json:"read"`
	Write     []string `json:"write"`
	Deny      []string `json:"deny"`
	Dir       string   `json:"dir"`
	Processes int64    `json:"processes"` // 0 keeps the present limit
	MemoryMB  int64    `json:"memoryMB"`  // mebibytes; 0 keeps the present limit
}

// maxViewPaths is how many paths each field of a request may have.
const maxViewPaths = 256

// own reports whether the guest itself uses a path in a view.
//
// The attack: an input, or a file of the template, replaces the starter, which the host
// allows whatever the contract says, and does not record.
func own(path string) bool {
	return slices.ContainsFunc([]string{starterPath, inputsDir, "/.old", "/.cover"}, func(p string) bool { return below(path, p) })
}

// check returns an error if the request is invalid.
func (r *viewRequest) check() error {
	if r.Contract == "" || len(r.Contract) > 256 {
		return errors.New("contract: want its name and digest")
	}
	if r.Processes < 0 || r.MemoryMB < 0 || r.MemoryMB > 1<<30 {
		return errors.New("processes or memoryMB: negative or too large")
	}
	for field, paths := range map[string][]string{"read": r.Read, "write": r.Write, "deny": r.Deny, "dir": {r.Dir}} {
		if len(paths) > maxViewPaths {
			return fmt.Errorf("%s: has %d paths, at most %d are allowed", field, len(paths), maxViewPaths)
		}
		for _, p := range paths {
			if !filepath.IsAbs(p) || filepath.Clean(p) != p || len(p) > 1024 || strings.ContainsRune(p, 0) {
				return fmt.Errorf("%s: %.1024q is not an absolute, clean path of at most 1024 bytes", field, p)
			}
		}
	}
	for field, paths := range map[string][]string{"read": r.Read, "write": r.Write} {
		for _, p := range paths {
			if p == "/" {
				return fmt.Errorf("%s: the root directory cannot be named; name directories in it", field)
			}
			for _, dir := range ownDirs {
				if below(p, dir) {
					return fmt.Errorf("%s: %q is the sandbox's own", field, p)
				}
			}
			if own(p) {
				return fmt.Errorf("%s: %q is the guest's own", field, p)
			}
			if below(p, "/run/postern") || below("/run/postern", p) {
				return fmt.Errorf("%s: %q contains the guest's own files", field, p)
			}
		}
	}
	for _, p := range r.Write {
		if slices.Contains(systemDirs, p) {
			return fmt.Errorf("write: %q is a system directory, which is always there, read-only", p)
		}
	}
	return nil
}

// newView creates a view. The caller has ended all other processes of the sandbox. work is
// the guest's directory for the files behind the view.
func newView(r viewRequest, work string) (*view, error) {
	v := &view{work: work, writes: slices.Clone(r.Write), dir: r.Dir, jobs: make(chan func()), inputs: map[string]bool{}}
	slices.Sort(v.writes)
	v.writes = slices.Compact(v.writes)
	v.account = account{name: viewUser, uid: viewID, gid: viewID, home: r.Dir}
	made := make(chan error)
	go func() {
		// The thread is never unlocked: no other goroutine may run on it, and it ends
		// with this one.
		runtime.LockOSThread()
		err := v.enter(r)
		made <- err
		if err != nil {
			return
		}
		for f := range v.jobs { // ends with the guest
			f()
		}
	}()
	if err := <-made; err != nil {
		return nil, fmt.Errorf("make view: %w", err)
	}
	return v, nil
}

// do calls f on the view's thread, as root.
func (v *view) do(f func() error) error {
	var err error
	done := make(chan struct{})
	v.jobs <- func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("internal error: %v", p)
			}
		}()
		err = f()
	}
	<-done
	return err
}

// as calls f on the view's thread, with the rights of the view's user.
func (v *view) as(_ account, f func() error) error {
	return v.do(func() error { return as(v.account, f) })
}

// start is os.StartProcess in the view.
func (v *view) start(path string, args []string, attr *os.ProcAttr) (p *os.Process, err error) {
	err = v.do(func() error {
		if err := v.begin(); err != nil {
			return err
		}
		p, err = os.StartProcess(path, args, attr)
		return err
	})
	return p, err
}

// begin prepares the view for its first process. It removes the source of inputs from the
// view, and forbids mounting. Later calls do nothing.
func (v *view) begin() error {
	if v.started {
		return nil
	}
	if err := errors.Join(unix.Unmount(inputsDir, unix.MNT_DETACH), os.Remove(inputsDir)); err != nil {
		return fmt.Errorf("remove inputs: %w", err)
	}
	if err := forbidNamespaces(); err != nil {
		return err
	}
	v.started = true
	return nil
}

// inputsDir is where the guest's directory of inputs is mounted in a view until the first
// process.
const inputsDir = "/.inputs"

// A binding is a bind mount in a view.
type binding struct {
	target string
	source *os.File // opened with O_PATH
	dir    bool
	flags  uintptr
	exact  bool // no component of the target may be a symbolic link
}

// enter creates the view and moves the calling thread into it.
func (v *view) enter(r viewRequest) (err error) {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	root := filepath.Join(v.work, "root")
	if err := os.MkdirAll(root, 0o700); err != nil {
		return err
	}
	// The root holds only mount points.
	if err := unix.Mount("tmpfs", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,size=4m"); err != nil {
		return fmt.Errorf("mount root: %w", err)
	}
	// Sources are opened before the root changes, so that symbolic links resolve as in the
	// template. Targets are resolved afterwards, as they will be for the processes. The
	// attack: a link in the template leads a denied path past its cover, or a mount out of
	// the view.
	var bs []binding
	defer func() {
		for _, b := range bs {
			b.source.Close()
		}
	}()
	add := func(target, source string, flags uintptr) error {
		f, err := openPath(source)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		} else if err != nil {
			return err
		}
		fi, err := f.Stat()
		if err != nil {
			f.Close()
			return err
		}
		bs = append(bs, binding{target: target, source: f, dir: fi.IsDir(), flags: flags})
		return nil
	}
	links := map[string]string{}
	for _, d := range systemDirs {
		if to, err := os.Readlink(d); err == nil {
			links[d] = to
		} else if err := add(d, d, readOnly); err != nil {
			return err
		}
	}
	for _, p := range r.Read {
		if slices.ContainsFunc(systemDirs, func(d string) bool { return below(p, d) }) || slices.Contains(v.writes, p) {
			continue
		}
		if err := direct(p); errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return fmt.Errorf("read: %w", err)
		}
		if err := add(p, p, readOnly); err != nil {
			return fmt.Errorf("read %q: %w", p, err)
		}
		bs[len(bs)-1].exact = true
	}
	for i, p := range v.writes {
		backing := filepath.Join(v.work, "write", strconv.Itoa(i))
		if err := errors.Join(os.MkdirAll(backing, 0o700), os.Chown(backing, viewID, viewID), os.Chmod(backing, 0o755)); err != nil {
			return err
		}
		if err := add(p, backing, readWrite); err != nil {
			return err
		}
		bs[len(bs)-1].exact = true
	}
	for _, name := range devices {
		if err := add("/dev/"+name, "/dev/"+name, aDevice); err != nil {
			return err
		}
	}
	if err := errors.Join(add("/dev/pts", "/dev/pts", aDevice), add("/sys", "/sys", readOnly|unix.MS_NOEXEC), v.writeUsers(add)); err != nil {
		return err
	}
	if err := os.MkdirAll(v.inputsFrom(), 0o700); err != nil {
		return err
	}
	if err := add(inputsDir, v.inputsFrom(), readOnly); err != nil {
		return err
	}
	if err := v.pivot(root); err != nil {
		return err
	}
	for link, to := range links {
		if err := os.Symlink(to, link); err != nil {
			return err
		}
	}
	if err := v.makeDev(); err != nil {
		return err
	}
	if b := starterImage(); len(b) > 0 {
		if err := os.WriteFile(starterPath, b, 0o555); err != nil {
			return err
		}
		v.starter = true
	}
	// Outer directories first.
	slices.SortStableFunc(bs, func(a, b binding) int { return strings.Count(a.target, "/") - strings.Count(b.target, "/") })
	for _, b := range bs {
		if err := v.show(b); err != nil {
			return fmt.Errorf("show %q: %w", b.target, err)
		}
	}
	if err := v.cover(append(slices.Clone(r.Deny), guestProgram)); err != nil {
		return err
	}
	for _, b := range bs { // last, because the mounts within them needed mount points
		if err := unix.Mount("", b.target, "", unix.MS_REMOUNT|unix.MS_BIND|b.flags, ""); err != nil {
			return fmt.Errorf("protect %q: %w", b.target, err)
		}
	}
	if err := errors.Join(unix.Unmount("/.old", unix.MNT_DETACH), os.Remove("/.old")); err != nil {
		return fmt.Errorf("leave the old root: %w", err)
	}
	if err := os.MkdirAll(v.dir, 0o755); err != nil && !errors.Is(err, unix.EROFS) {
		return fmt.Errorf("dir: %w", err)
	}
	for _, w := range v.writes {
		d, err := openPath(w)
		if err != nil {
			return err
		}
		v.opened = append(v.opened, d)
	}
	return v.loseRights()
}

// guestProgram is the path of the guest's program in a sandbox.
const guestProgram = "/usr/local/sbin/postern-guest"

// openPath opens a file or directory with O_PATH.
func openPath(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// direct returns an error if a component of a path is a symbolic link.
//
// The attack: a contract names a harmless path, but a link in the template leads it to
// another one. Reviewers and boundaries see only the path that the contract names.
func direct(path string) error {
	real, err := filepath.EvalSymlinks(path)
	if err == nil && real != path {
		err = badRequest(fmt.Errorf("%.1024q leads through a symbolic link to %.1024q: name that path instead", path, real))
	}
	return err
}

// pivot makes a directory the root. The old root is at /.old, and the old /proc at /proc.
func (v *view) pivot(root string) error {
	for _, d := range []string{".old", "proc"} {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	// MS_REC, because what is mounted below /proc hides parts of it.
	if err := unix.Mount("/proc", filepath.Join(root, "proc"), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	if err := unix.Chdir(root); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", ".old"); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	return nil
}

// makeDev creates /dev without the devices.
func (v *view) makeDev() error {
	if err := os.Mkdir("/dev", 0o755); err != nil {
		return err
	}
	// Without MS_NODEV, since the devices are bind-mounted in it.
	if err := unix.Mount("tmpfs", "/dev", "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=755,size=64k"); err != nil {
		return fmt.Errorf("mount /dev: %w", err)
	}
	for name, to := range map[string]string{"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"} {
		if err := os.Symlink(to, "/dev/"+name); err != nil {
			return err
		}
	}
	return nil
}

// show binds the source to the target. The mount is still writable: enter protects it later.
func (v *view) show(b binding) error {
	if err := v.makeFixed(b.target, b.dir); err != nil {
		return err
	}
	if b.exact {
		if err := direct(b.target); err != nil {
			return err
		}
	}
	return unix.Mount("/proc/self/fd/"+strconv.Itoa(int(b.source.Fd())), b.target, "", unix.MS_BIND, "")
}

// mountPoint creates a directory or an empty file as a mount point, unless it exists.
func mountPoint(path string, dir bool) error {
	if dir {
		return os.MkdirAll(path, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o444)
	if err != nil {
		return err
	}
	return f.Close()
}

// writeUsers adds the view's user to its /etc/passwd and /etc/group.
func (v *view) writeUsers(add func(target, source string, flags uintptr) error) error {
	for name, line := range map[string]string{
		"/etc/passwd": fmt.Sprintf("%s:x:%d:%d::%s:/bin/sh\n", viewUser, viewID, viewID, strings.NewReplacer(":", "", "\n", "").Replace(v.dir)),
		"/etc/group":  fmt.Sprintf("%s:x:%d:\n", viewUser, viewID),
	} {
		b, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a template need not have users
		} else if err != nil {
			return err
		}
		if len(b) > 0 && b[len(b)-1] != '\n' {
			b = append(b, '\n')
		}
		own := filepath.Join(v.work, filepath.Base(name))
		if err := os.WriteFile(own, append(b, line...), 0o644); err != nil {
			return err
		}
		if err := add(name, own, readOnly); err != nil {
			return err
		}
	}
	return nil
}

// cover hides paths. It mounts an empty file or directory without permissions on each. A
// path in a writable directory that does not exist is created and hidden, because a process
// could create it otherwise.
func (v *view) cover(paths []string) error {
	const from = "/.cover"
	if err := os.Mkdir(from, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", from, "tmpfs", readWrite, "mode=700,size=64k"); err != nil {
		return fmt.Errorf("mount cover: %w", err)
	}
	if err := errors.Join(os.Mkdir(from+"/dir", 0), os.WriteFile(from+"/file", nil, 0)); err != nil {
		return err
	}
	for _, p := range paths {
		if err := v.coverOne(p, from); err != nil {
			return fmt.Errorf("deny %q: %w", p, err)
		}
	}
	return errors.Join(unix.Unmount(from, unix.MNT_DETACH), os.Remove(from))
}

// coverOne hides a path with the empty file or directory in from. If the path is a symbolic
// link, it hides the link's target.
func (v *view) coverOne(path, from string) error {
	fi, err := os.Stat(path)
	dir := err == nil && fi.IsDir()
	switch {
	case errors.Is(err, fs.ErrNotExist) && slices.ContainsFunc(v.writes, func(w string) bool { return below(path, w) }):
		if err := v.makeFixed(path, true); err != nil {
			return err
		}
		dir = true
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return nil // it does not exist, and no process can create it
	case err != nil:
		return err
	}
	source := from + "/file"
	if dir {
		source = from + "/dir"
	}
	return bindMount(source, path, unreadable)
}

// bindMount mounts source on target as well. The kernel takes the flags of such a mount only
// in a second step.
func bindMount(source, target string, flags uintptr) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	return unix.Mount("", target, "", unix.MS_REMOUNT|unix.MS_BIND|flags, "")
}

// makeFixed creates a mount point and the directories above it. Those in a writable
// directory become mount points themselves.
//
// The attack: a process renames the directory of an input or of a denied path, and creates
// another one in its place. A mount point cannot be renamed.
func (v *view) makeFixed(path string, dir bool) error {
	var made []string
	for p := filepath.Dir(path); p != "/" && !slices.Contains(v.writes, p); p = filepath.Dir(p) {
		if _, err := os.Lstat(p); errors.Is(err, fs.ErrNotExist) {
			made = append(made, p)
		}
	}
	if err := mountPoint(path, dir); err != nil {
		return err
	}
	for _, p := range slices.Backward(made) {
		if !slices.ContainsFunc(v.writes, func(w string) bool { return below(p, w) }) {
			continue
		}
		if err := bindMount(p, p, readWrite); err != nil {
			return err
		}
	}
	return nil
}

// loseRights drops all capabilities from the calling thread's bounding set and sets
// no_new_privs, so that its children have no privileges.
func (v *view) loseRights() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
		if in, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0); err != nil || in == 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	return nil
}

// inputsFrom returns the guest's directory of inputs, outside of the view.
func (v *view) inputsFrom() string { return filepath.Join(v.work, "in") }

// put mounts a file of inputsFrom in the view, read-only. It fails once a process was started.
func (v *view) put(path, name string) error {
	return v.do(func() error {
		if v.started {
			return &statusError{http.StatusConflict, errors.New("inputs can be added only before the first command")}
		}
		if own(path) {
			return badRequest(fmt.Errorf("path: %.1024q is the guest's own", path))
		}
		if v.isInput(path) {
			return &statusError{http.StatusConflict, fmt.Errorf("another input has the path %.1024q", path)}
		}
		if err := v.makeFixed(path, false); err != nil {
			return err
		}
		if err := direct(path); err != nil {
			return err
		}
		if fi, err := os.Lstat(path); err != nil || !fi.Mode().IsRegular() {
			return badRequest(fmt.Errorf("%.1024q exists and is not a regular file, so an input cannot replace it", path))
		}
		if err := bindMount(filepath.Join(inputsDir, name), path, readOnly); err != nil {
			return err
		}
		v.inputsMu.Lock()
		defer v.inputsMu.Unlock()
		v.inputs[path] = true
		return nil
	})
}
