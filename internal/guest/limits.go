package guest

import (
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Processes of users run under one limit: RLIMIT_NPROC, which gVisor enforces per
// user, also for root. It does not apply to processes with CAP_SYS_ADMIN or
// CAP_SYS_RESOURCE. So these are removed from the bounding set of everything that
// is started, so that sudo cannot restore them. The bounding set takes effect when
// a program is executed; the guest itself keeps its capabilities.
//
// The guest must be exempt from the limit. Go's runtime ends a program that cannot
// create a thread, so a fork bomb of root would end the guest, and with it the
// sandbox. So the runtime grants the first process CAP_SYS_RESOURCE, and
// CAP_SETPCAP to remove it from the others.
//
// Tried and dropped: gVisor's pids cgroup. It needs CAP_SYS_ADMIN, its version 1
// charges one hierarchy of a task picked at random, and at its limit clients cannot
// start commands either.

// prepareServer removes the extra rights from everything that this process starts
// from now on. It changes all of its threads, which works only without cgo; the
// guest is built without. The first process hands each start to a dedicated thread
// instead, which costs more than much of the start itself.
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

// QuietChildren has the kernel send no SIGCHLD to this process. Go's runtime handles
// every signal, and in gVisor the delivery of one takes a fifth of the time of a
// short command. Only the program of the server may call it: [Init] needs the
// signal. Children are waited for as before.
func QuietChildren() {
	const noChildStop = 1                                                          // SA_NOCLDSTOP: also not when a held shell stops
	action := struct{ handler, flags, restorer, mask uintptr }{flags: noChildStop} // SIG_DFL
	_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(unix.SIGCHLD), uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
}

func limitProcesses(log *slog.Logger, most int64) {
	if most <= 0 {
		return
	}
	lim := unix.Rlimit{Cur: uint64(most), Max: uint64(most)}
	// It also applies to this process, and is inherited.
	if err := unix.Setrlimit(unix.RLIMIT_NPROC, &lim); err != nil {
		log.Error("cannot limit processes", "error", err)
	}
}

// A spawner starts services for the first process, which itself must keep its
// capabilities for the server.
type spawner struct {
	jobs chan func()
	once sync.Once
	log  *slog.Logger
	max  int64 // 0 means no limit
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

// start is os.StartProcess within the limit.
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

// run forks for start, on a thread without the capabilities, which does nothing
// else.
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
	for f := range s.jobs { // ends with the first process
		f()
	}
}

// closeOnExec marks all descriptors beyond standard error as close-on-exec. If a
// runtime forgot to close a directory of the host, a process with it could leave
// the sandbox.
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

// dropCapabilities calls drop for each capability in the bounding set that only the
// guest may have: those that exempt from RLIMIT_NPROC, and those for views, see view.go.
// CAP_SETPCAP is the last, because dropping needs it.
//
// CAP_SYS_CHROOT stays: sshd, apk and pacman call chroot(2). The boundary is the sandbox
// and never a root directory inside, and the kernel gives no path to programs below another
// root, see execEvent in package runsc. The attack: below a root of its own, a program
// passes for the guest or for another one that a rule names. Programs that a contract binds
// have no capability at all, and cannot call chroot(2), see seccomp.go.
func dropCapabilities(drop func(capability uintptr) unix.Errno) error {
	for _, c := range []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_SYS_RESOURCE, unix.CAP_SETPCAP} {
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
