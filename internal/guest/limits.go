package guest

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// cgroupMount is where the guest mounts the pids controller if nobody has.
const cgroupMount = "/run/postern/pids"

// A spawner starts processes of users, all inside one limit.
//
// The limit is a cgroup of the pids controller, which also counts what has
// left its session, lost its parent or become root by sudo; RLIMIT_NPROC, which
// counts by user and lets root through, is set as well, and is all there is
// where cgroups cannot be mounted. The guest itself is outside of both: a fork
// bomb can keep new processes from starting but not the guest from answering.
//
// A process is in the group from its first instruction: it is forked by a
// thread that is in the group, alone of the guest's. (Moving it after the fork
// would leave it a moment to fork outside.)
type spawner struct {
	jobs chan func()
	quit chan struct{} // closed by stop
	once sync.Once
	log  *slog.Logger
	max  int64 // 0: no limit

	limited string // what limits, for the log and tests: "cgroup", "rlimit" or "none"
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
	if s.max > 0 {
		lim := unix.Rlimit{Cur: uint64(s.max), Max: uint64(s.max)}
		// For the whole guest: it is inherited, and does not bind root.
		if err := unix.Setrlimit(unix.RLIMIT_NPROC, &lim); err != nil {
			s.log.Warn("cannot limit processes by user", "error", err)
		} else {
			s.limited = "rlimit"
		}
		if err := joinPidsGroup(s.max); err != nil {
			s.log.Warn("cannot limit processes by cgroup", "error", err)
		} else {
			s.limited = "cgroup"
		}
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

// joinPidsGroup puts the calling thread into the group of users' processes and
// limits it to max processes and threads.
func joinPidsGroup(max int64) error {
	root, err := pidsHierarchy()
	if err != nil {
		return err
	}
	dir := filepath.Join(root, "postern-users")
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make cgroup: %w", err)
	}
	// One more, for this thread.
	if err := os.WriteFile(filepath.Join(dir, "pids.max"), []byte(strconv.FormatInt(max+1, 10)), 0o644); err != nil {
		return fmt.Errorf("limit cgroup: %w", err)
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
