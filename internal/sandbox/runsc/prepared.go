package runsc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox/launch"
)

// awaitClaim is the launcher's wait, in which the sandbox is complete and nothing runs
// in it. It returns the second order and its files. If there will be none, or a part of
// the sandbox has ended, it ends the sandbox and this process.
func awaitClaim(s *os.File, made launch.Order, reply launch.Reply) (launch.Order, []*os.File) {
	giveUp := func(err error) {
		killOthers(made.Cgroups)
		fmt.Fprintln(os.NewFile(2, "stderr"), err) // the server may be gone
		os.Exit(1)
	}
	watch := []unix.PollFd{{Fd: int32(s.Fd()), Events: unix.POLLIN}}
	for _, pid := range []int{reply.Sentry, reply.Gofer} {
		if pid == 0 {
			continue // a sandbox may have no gofer
		}
		fd, err := unix.PidfdOpen(pid, 0) // a child of ours, not reaped yet
		if err != nil {
			giveUp(fmt.Errorf("hold process %d: %w", pid, err))
		}
		watch = append(watch, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	ended := func() bool {
		return slices.ContainsFunc(watch[1:], func(p unix.PollFd) bool { return p.Revents != 0 })
	}
	poll := func(timeout int) {
		_, err := unix.Poll(watch, timeout)
		for errors.Is(err, unix.EINTR) {
			_, err = unix.Poll(watch, timeout)
		}
		if err == nil && ended() {
			err = errors.New("a part of the sandbox has ended")
		}
		if err != nil {
			giveUp(err)
		}
	}
	if err := say(s, reply); err != nil {
		giveUp(err)
	}
	poll(-1)
	order, files, err := readOrder(s)
	if err != nil { // the server has ended, or does not want this sandbox any more
		giveUp(err)
	}
	poll(0)
	// From here on the server takes the sandbox for started.
	if err := say(s, launch.Reply{}); err != nil {
		giveUp(err)
	}
	for _, p := range watch[1:] {
		unix.Close(int(p.Fd))
	}
	return order, files
}

// killOthers kills all processes of a sandbox but this one, which is in its cgroup. It
// returns when they are gone, or after some seconds.
func killOthers(procs []string) {
	self := os.Getpid()
	for end := time.Now().Add(killTimeout); time.Now().Before(end); time.Sleep(time.Millisecond) {
		left := false
		for _, f := range procs {
			pids, err := readPids(f)
			left = left || err != nil
			for _, p := range pids {
				if p == self || p == 0 {
					continue
				}
				left = true
				killIn(f, p)
			}
		}
		if !left {
			return
		}
	}
}

// killIn kills a process if it is still in a cgroup, see cgroups.killOne.
func killIn(procs string, pid int) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // it has ended
	}
	defer unix.Close(fd)
	pids, err := readPids(procs)
	if err == nil && slices.Contains(pids, pid) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) // it may have ended
	}
}

// killTimeout bounds how long a launcher waits for the end of what it killed.
const killTimeout = 10 * time.Second

// readPids reads a cgroup.procs file. A cgroup that does not exist has no processes.
func readPids(file string) (pids []int, err error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	for f := range strings.FieldsSeq(string(b)) {
		p, err := strconv.Atoi(f)
		if err != nil {
			return nil, fmt.Errorf("list processes: %w", err)
		}
		pids = append(pids, p)
	}
	return pids, err
}
