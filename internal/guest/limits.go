package guest

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// A spawner starts processes of users, all inside one limit: RLIMIT_NPROC, which
// gVisor enforces for each user, also for root. It binds whoever has neither
// CAP_SYS_ADMIN nor CAP_SYS_RESOURCE, so these are taken from all that is
// started, for good.
//
// The guest itself must be above it: Go's runtime ends a program that cannot
// have another thread, so under root's limit a fork bomb of root's would take
// the guest with it, and then the sandbox. So whoever starts a sandbox grants
// the first process CAP_SYS_RESOURCE, and CAP_SETPCAP to take it from the
// others.
//
// What was tried and dropped: gVisor's own pids cgroup. It needs CAP_SYS_ADMIN,
// its version 1 charges one hierarchy of a task picked at random, and at its
// limit no client can start a command either.
type spawner struct {
	jobs chan func()
	quit chan struct{} // closed by stop
	once sync.Once
	log  *slog.Logger
	max  int64 // 0: no limit
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

// run forks for start. Its thread has no capability to give on, and never does
// anything else.
func (s *spawner) run(ready chan<- struct{}) {
	runtime.LockOSThread()
	if err := dropCapabilities(); err != nil {
		s.log.Error("cannot take capabilities from processes", "error", err)
	}
	if s.max > 0 {
		lim := unix.Rlimit{Cur: uint64(s.max), Max: uint64(s.max)}
		// For the whole guest: it is inherited.
		if err := unix.Setrlimit(unix.RLIMIT_NPROC, &lim); err != nil {
			s.log.Error("cannot limit processes", "error", err)
		}
	}
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

func isDir(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.IsDir()
}
