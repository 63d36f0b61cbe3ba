package guest

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Where the guest mounts cgroups if nobody has. Only root may enter.
const (
	cgroupMount = "/run/postern/pids"   // version 1, the pids controller alone
	unifiedDir  = "/run/postern/cgroup" // version 2
	usersGroup  = "postern-users"       // the group of all users' processes, in either
)

// A spawner starts processes of users, all inside one limit, which has two
// parts:
//
//   - A cgroup with the pids controller, which also counts what has left its
//     session, lost its parent or become another user. A process is in it from
//     its first instruction: moving it after the fork would leave it a moment
//     to fork outside. With version 2 the kernel clones into the group; with
//     version 1 a thread forks that is in the group, alone of the guest's.
//   - RLIMIT_NPROC, which counts by user. It does not bind who has
//     CAP_SYS_ADMIN or CAP_SYS_RESOURCE, so processes of users cannot have
//     them, root's included. gVisor needs this part: its version 1 charges one
//     hierarchy of a task picked at random, and so enforces one fork in seven.
//     Ask it for version 2.
//
// The guest itself must be outside of both: Go's runtime ends a program that
// cannot have another thread, so under root's own RLIMIT_NPROC a fork bomb of
// root's takes the guest with it, and then the sandbox. So whoever starts a
// sandbox grants the first process CAP_SYS_RESOURCE, and CAP_SETPCAP to take it
// from the others.
type spawner struct {
	jobs chan func()
	quit chan struct{} // closed by stop
	once sync.Once
	log  *slog.Logger
	max  int64    // 0: no limit
	dir  *os.File // the group of version 2, nil if that is not there

	limited string // what limits, for the log and tests: "cgroup2", "cgroup", "rlimit" or "none"
}

func newSpawner(log *slog.Logger, max int64) *spawner {
	return &spawner{jobs: make(chan func()), quit: make(chan struct{}), log: log, max: max}
}

// prepare sets the limit and starts the thread that forks, once.
func (s *spawner) prepare() {
	s.once.Do(func() {
		if err := closeOnExec(); err != nil {
			s.log.Error("cannot keep open files from processes", "error", err)
		}
		ready := make(chan struct{})
		go s.run(ready)
		<-ready
	})
}

// start is os.StartProcess inside the limit.
func (s *spawner) start(path string, args []string, attr *os.ProcAttr) (*os.Process, error) {
	s.prepare()
	var p *os.Process
	var err error
	done := make(chan struct{})
	job := func() {
		if s.dir != nil {
			attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(s.dir.Fd())
		}
		p, err = os.StartProcess(path, args, attr)
		close(done)
	}
	select {
	case s.jobs <- job:
		<-done
		return p, err
	case <-s.quit:
		return nil, errors.New("the guest is stopping")
	}
}

// stop ends the thread that forks. It is called once, and start fails from
// then on.
func (s *spawner) stop() { close(s.quit) }

// run forks for start. Its thread joins the group and never does anything
// else.
func (s *spawner) run(ready chan<- struct{}) {
	runtime.LockOSThread()
	s.limited = "none"
	if err := dropCapabilities(); err != nil {
		s.log.Error("cannot take capabilities from processes", "error", err)
	}
	if s.max > 0 {
		lim := unix.Rlimit{Cur: uint64(s.max), Max: uint64(s.max)}
		// For the whole guest: it is inherited, and the guest has the
		// capabilities that it does not bind.
		if err := unix.Setrlimit(unix.RLIMIT_NPROC, &lim); err != nil {
			s.log.Error("cannot limit processes by user", "error", err)
		} else {
			s.limited = "rlimit"
		}
		s.limitByGroup()
	}
	s.log.Info("processes are limited", "by", s.limited, "max", s.max)
	close(ready)
	for {
		select {
		case f := <-s.jobs:
			f()
		case <-s.quit:
			return // locked still, so the thread ends
		}
	}
}

// closeOnExec keeps what this process was started with, beyond its standard
// streams, from the processes that it starts: a directory of the host's that a
// runtime forgot to close would be a way out of the sandbox.
func closeOnExec() error {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, d := range fds {
		if fd, err := strconv.Atoi(d.Name()); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}

// dropCapabilities takes from the calling thread, and so from all that it
// starts, what would lift RLIMIT_NPROC. It takes them out of the bounding set,
// so that sudo does not give them back.
func dropCapabilities() error {
	for _, c := range []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_SYS_RESOURCE} {
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil {
			if in, rerr := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0); rerr == nil && in == 0 {
				continue
			}
			return fmt.Errorf("drop capability %d: %w", c, err)
		}
	}
	return nil
}

// limitByGroup makes the group and has processes start in it.
func (s *spawner) limitByGroup() {
	dir, err := makeUnifiedGroup(s.max)
	if err == nil {
		s.dir, s.limited = dir, "cgroup2"
		return
	}
	s.log.Info("no cgroup of version 2", "error", err)
	if err := joinPidsGroup(s.max); err != nil {
		s.log.Warn("no cgroup of version 1", "error", err)
		return
	}
	s.limited = "cgroup"
}

// makeUnifiedGroup makes the group in a hierarchy of version 2 whose pids
// controller can be used.
func makeUnifiedGroup(max int64) (group *os.File, err error) {
	root := "/sys/fs/cgroup"
	if !isFile(filepath.Join(root, "cgroup.controllers")) {
		if root = unifiedDir; !isFile(filepath.Join(root, "cgroup.controllers")) {
			if err := os.MkdirAll(root, 0o700); err != nil {
				return nil, fmt.Errorf("make mount point: %w", err)
			}
			if err := unix.Mount("cgroup2", root, "cgroup2", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
				return nil, fmt.Errorf("mount: %w", err)
			}
			defer func() {
				if err != nil {
					_ = unix.Unmount(root, unix.MNT_DETACH)
				}
			}()
		}
	}
	if b, err := os.ReadFile(filepath.Join(root, "cgroup.controllers")); err != nil || !slices.Contains(strings.Fields(string(b)), "pids") {
		return nil, errors.New("it has no pids controller")
	}
	control := filepath.Join(root, "cgroup.subtree_control")
	if b, err := os.ReadFile(control); err != nil || !slices.Contains(strings.Fields(string(b)), "pids") {
		if err := os.WriteFile(control, []byte("+pids"), 0o644); err != nil {
			return nil, fmt.Errorf("enable the pids controller: %w", err)
		}
	}
	dir := filepath.Join(root, usersGroup)
	if err := makeGroup(dir, max); err != nil {
		return nil, err
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open cgroup: %w", err)
	}
	return f, nil
}

func makeGroup(dir string, max int64) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make cgroup: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "pids.max"), []byte(strconv.FormatInt(max, 10)), 0o644); err != nil {
		return fmt.Errorf("limit cgroup: %w", err)
	}
	return nil
}

// joinPidsGroup puts the calling thread into the group of version 1.
func joinPidsGroup(max int64) error {
	root, err := pidsHierarchy()
	if err != nil {
		return err
	}
	dir := filepath.Join(root, usersGroup)
	if err := makeGroup(dir, max+1); err != nil { // one more, for this thread
		return err
	}
	// "tasks" moves a thread, "cgroup.procs" would move all of the guest.
	if err := os.WriteFile(filepath.Join(dir, "tasks"), []byte(strconv.Itoa(unix.Gettid())), 0o644); err != nil {
		return fmt.Errorf("join cgroup: %w", err)
	}
	return nil
}

// pidsHierarchy returns this process's directory in the pids controller,
// mounting the controller if nobody has. Only root may write there.
func pidsHierarchy() (string, error) {
	own := "/"
	if b, err := os.ReadFile("/proc/self/cgroup"); err == nil {
		for line := range strings.Lines(string(b)) {
			f := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if len(f) == 3 && f[1] == "pids" {
				own = f[2]
			}
		}
	}
	for _, dir := range []string{"/sys/fs/cgroup/pids", cgroupMount} {
		if d := filepath.Join(dir, own); isDir(d) && isFile(filepath.Join(d, "tasks")) {
			return d, nil
		}
		if isFile(filepath.Join(dir, "tasks")) {
			return dir, nil
		}
	}
	if err := os.MkdirAll(cgroupMount, 0o700); err != nil {
		return "", fmt.Errorf("make mount point: %w", err)
	}
	if err := unix.Mount("cgroup", cgroupMount, "cgroup", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "pids"); err != nil {
		return "", fmt.Errorf("mount the pids controller: %w", err)
	}
	return cgroupMount, nil
}

func isDir(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.IsDir()
}

func isFile(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Mode().IsRegular()
}
