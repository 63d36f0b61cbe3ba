package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox/launch"
)

// An instance is a sandbox that this process started, or found and watches.
type instance struct {
	id      string
	cancel  context.CancelFunc // cancels its start
	started chan struct{}      // closed when Start is about to return
	ended   chan struct{}      // closed when all its processes have gone

	// Set by take before started is closed. Zero if the sandbox was found. The
	// gofer's are also zero if there is none.
	sentry, gofer     int
	sentryFD, goferFD *os.File // pidfds: readable when the process has ended

	drained chan struct{} // closed when the log is complete; nil if there is none
	log     *os.File
	output  func(id string) io.WriteCloser // second destination of the guest's output; may be nil

	// gate is nil if the sandbox has none. It is set before started is closed or, if a
	// previous process started the sandbox, under mu.
	gate *gate

	mu     sync.Mutex
	asked  string // reason of an end that was requested
	reason string // final once ended is closed
}

const (
	reasonStopped = "stopped"
	reasonSaved   = "saved"
	reasonMemory  = "out of memory"
	reasonKilled  = "killed"

	logBytes = 1 << 20 // of a sandbox's log
)

// take opens pidfds of the processes. The launcher, their parent, still exists, so
// their IDs cannot have been reused.
func (i *instance) take(r launch.Reply) error {
	hold := func(pid int) (*os.File, error) {
		fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
		if err != nil {
			return nil, fmt.Errorf("hold process %d: %w", pid, err)
		}
		return os.NewFile(uintptr(fd), "pidfd"), nil
	}
	i.sentry, i.gofer = r.Sentry, r.Gofer
	var err error
	if i.sentryFD, err = hold(r.Sentry); err != nil {
		return err
	}
	if r.Gofer != 0 {
		i.goferFD, err = hold(r.Gofer)
	}
	return err
}

// will sets the reason of a requested end. The first one counts.
func (i *instance) will(reason string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.asked == "" {
		i.asked = reason
	}
}

// stop sets the reason to "stopped".
func (i *instance) stop() {
	i.will(reasonStopped)
	i.cancel()
}

func (i *instance) end(reason string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.reason = reason
	if i.asked != "" {
		i.reason = i.asked
	}
	if i.log != nil {
		i.log.Close()
	}
	if i.gate != nil {
		i.gate.close()
	}
	close(i.ended)
}

// release closes what this process holds of an ended sandbox.
func (i *instance) release() {
	if i.drained != nil {
		<-i.drained
	}
	for _, f := range []*os.File{i.sentryFD, i.goferFD} {
		if f != nil {
			reap(int(f.Fd()), time.Second)
			f.Close()
		}
	}
}

// watch waits for the sandbox's end and cleans up.
func (i *instance) watch(r *Runtime) {
	status, err := r.waitGuest(context.Background(), i.id)
	if i.sentryFD != nil {
		i.waitSentry()
	} else {
		r.waitForeign(i.id, err == nil)
	}
	reason := reasonKilled
	if err == nil {
		reason = reasonFor(status)
	}
	if r.cgroups.oomKills(i.id) > 0 {
		reason = reasonMemory
	}
	// The gofer outlives the sentry by a moment. Without its sentry it is of no
	// use, so end it as well.
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if err := r.cgroups.kill(ctx, i.id); err != nil {
		r.log.WarnContext(ctx, "end what is left of a sandbox", "sandbox", i.id, "err", err)
	}
	i.release()
	i.mu.Lock()
	asked := i.asked
	i.mu.Unlock()
	if asked == "" {
		r.log.WarnContext(ctx, "sandbox ended", "sandbox", i.id, "reason", reason, "said", i.logTail())
	}
	i.end(reason)
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, err := os.Lstat(r.dir(i.id)); errors.Is(err, fs.ErrNotExist) && i.sentryFD == nil && r.all[i.id] == i {
		delete(r.all, i.id) // it was stopped before Stop knew of this instance
	}
}

// waitGuest asks the sentry for the exit status of the guest. It returns an error
// if the sentry ends without an answer.
func (r *Runtime) waitGuest(ctx context.Context, id string) (unix.WaitStatus, error) {
	b, err := r.call(ctx, id, callWait, r.name(id))
	if err != nil {
		return 0, err
	}
	return readWaitStatus(b)
}

// readWaitStatus parses the sentry's answer, which is hostile.
func readWaitStatus(b []byte) (unix.WaitStatus, error) {
	var status uint32
	if err := json.Unmarshal(b, &status); err != nil {
		return 0, fmt.Errorf("ask sentry: %w", err)
	}
	return unix.WaitStatus(status), nil
}

// reasonFor describes the end of the guest.
func reasonFor(ws unix.WaitStatus) string {
	if ws.Signaled() {
		return fmt.Sprintf("the guest was killed by signal %d", int(ws.Signal()))
	}
	return fmt.Sprintf("the guest exited with status %d", ws.ExitStatus())
}

// waitSentry returns when the sentry has ended.
func (i *instance) waitSentry() {
	c, err := i.sentryFD.SyscallConn()
	if err == nil {
		// Go's poller waits for the descriptor, which needs no thread.
		err = c.Read(func(fd uintptr) bool { return hasEnded(int(fd), 0) })
	}
	for err != nil && !hasEnded(int(i.sentryFD.Fd()), 1000) {
	}
}

// hasEnded reports whether the process has ended, waiting up to timeoutMS
// milliseconds.
func hasEnded(pidfd, timeoutMS int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, timeoutMS)
	return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
}

const (
	logFile = "guest.log" // output of the guest
	logFifo = "guest.out" // pipe through which it is written
)

// openLog creates the log of the guest's output, and returns the file to give to
// the guest. That is not the log itself: through /proc/1/fd/1 root inside could
// fill the host's disk. It is a named pipe, opened for reading as well: if this
// process is killed, a guest that writes gets no SIGPIPE, and the next process can
// continue reading.
func (i *instance) openLog(dir string) (*os.File, error) {
	w, err := makeLog(dir)
	if err != nil {
		return nil, err
	}
	if err := i.followLog(dir); err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// makeLog makes the named pipe and opens its writing end.
func makeLog(dir string) (*os.File, error) {
	fifo := filepath.Join(dir, logFifo)
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		return nil, fmt.Errorf("make log: %w", err)
	}
	fd, err := unix.Open(fifo, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	return os.NewFile(uintptr(fd), fifo), nil
}

// followLog copies the guest's output to the log from now on.
func (i *instance) followLog(dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, logFile), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	r, err := os.OpenFile(filepath.Join(dir, logFifo), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		f.Close()
		return fmt.Errorf("open log: %w", err)
	}
	var have int64
	if st, err := f.Stat(); err == nil {
		have = st.Size()
	}
	i.log, i.drained = f, make(chan struct{})
	go func() {
		defer close(i.drained)
		defer r.Close()
		if i.output == nil {
			drain(f, r, max(0, logBytes-have), 20*time.Millisecond)
			return
		}
		w := i.output(i.id)
		defer w.Close()
		drain(f, io.TeeReader(r, w), max(0, logBytes-have), 20*time.Millisecond)
	}()
	return nil
}

// unfollowLog takes back followLog, before another log of the same sandbox. Nothing
// writes to the pipe any more.
func (i *instance) unfollowLog() {
	if i.log == nil {
		return
	}
	<-i.drained
	i.log.Close()
	i.log, i.drained = nil, nil
}

// drain copies the first limit bytes of r to w, and then keeps reading, since a
// guest must not block on its log. Beyond the limit it sleeps for rest before each
// read, so that a flood costs the host nothing.
func drain(w io.Writer, r io.Reader, limit int64, rest time.Duration) {
	_, _ = io.Copy(w, io.LimitReader(r, limit)) // keep reading even if the disk is full
	b := make([]byte, 64<<10)
	for {
		if _, err := r.Read(b); err != nil {
			return
		}
		time.Sleep(rest)
	}
}

// logTail returns the end of the sandbox's log.
func (i *instance) logTail() string {
	const most = 2 << 10
	if i.log == nil {
		return ""
	}
	st, err := i.log.Stat()
	if err != nil {
		return ""
	}
	b := make([]byte, most)
	n, err := i.log.ReadAt(b, max(0, st.Size()-most))
	if err != nil && !errors.Is(err, io.EOF) {
		return ""
	}
	return string(b[:n])
}
