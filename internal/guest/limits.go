package guest

import (
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Processes of users are started inside one limit: RLIMIT_NPROC, which gVisor
// enforces for each user, also for root. It binds whoever has neither
// CAP_SYS_ADMIN nor CAP_SYS_RESOURCE, so these are taken from all that is
// started, for good: out of the bounding set, so that sudo does not give them
// back. The set counts when a program is executed; the guest keeps what it has.
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

// prepareServer makes all that this process starts from now on ordinary. It is
// done to all of its threads, which works without cgo only, as the guest is
// built: to hand each start to a thread of its own, as the first process does,
// costs more than much of the start itself.
func prepareServer(log *slog.Logger, most int64) {
	if err := closeOnExec(); err != nil {
		log.Error("cannot keep open files from processes", "error", err)
	}
	drop := func(c uintptr) unix.Errno {
		_, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0, 0, 0, 0)
		return e
	}
	if err := dropCapabilities(drop); err != nil {
		log.Error("cannot take capabilities from processes", "error", err)
	}
	limitProcesses(log, most)
}

func limitProcesses(log *slog.Logger, most int64) {
	if most <= 0 {
		return
	}
	lim := unix.Rlimit{Cur: uint64(most), Max: uint64(most)}
	// For this process too: it is inherited.
	if err := unix.Setrlimit(unix.RLIMIT_NPROC, &lim); err != nil {
		log.Error("cannot limit processes", "error", err)
	}
}

// A spawner starts services for the first process, which itself must go on
// starting the server with everything.
type spawner struct {
	jobs chan func()
	once sync.Once
	log  *slog.Logger
	max  int64 // 0: no limit
}

func newSpawner(log *slog.Logger, max int64) *spawner {
	return &spawner{jobs: make(chan func()), log: log, max: max}
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
	s.jobs <- job
	<-done
	return p, err
}

// run forks for start. Its thread has no capability to give on, and never does
// anything else.
func (s *spawner) run(ready chan<- struct{}) {
	runtime.LockOSThread()
	drop := func(c uintptr) unix.Errno {
		_, _, e := unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0, 0, 0, 0)
		return e
	}
	if err := dropCapabilities(drop); err != nil {
		s.log.Error("cannot take capabilities from processes", "error", err)
	}
	limitProcesses(s.log, s.max)
	close(ready)
	for f := range s.jobs { // it lasts as long as the first process
		f()
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

// dropCapabilities takes what would lift RLIMIT_NPROC out of the bounding set,
// by a call of drop for each capability that is in it.
func dropCapabilities(drop func(capability uintptr) unix.Errno) error {
	for _, c := range []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_SYS_RESOURCE} {
		if in, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, c, 0, 0, 0); err == nil && in == 0 {
			continue
		}
		if e := drop(c); e != 0 {
			return fmt.Errorf("drop capability %d: %w", c, e)
		}
	}
	return nil
}

func isDir(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.IsDir()
}
