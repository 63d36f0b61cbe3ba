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
	"gvisor.dev/gvisor/runsc/boot"
)

// An instance is a sandbox that this process started, or found and waits for.
type instance struct {
	id      string
	cancel  context.CancelFunc // of its start
	started chan struct{}      // closed when Start is about to return
	ended   chan struct{}      // closed when all its processes are gone

	// Set by take, before started is closed; 0 and nil if it was found.
	sentry, gofer     int
	sentryFD, goferFD *os.File // pidfds: readable when the process has ended

	drained chan struct{} // closed when the log is complete; nil if there is none
	log     *os.File
	output  func(id string) io.WriteCloser // where else what it says goes; may be nil

	mu     sync.Mutex
	asked  string // why it will have ended, if we end it
	reason string // final once ended is closed
}

const (
	reasonStopped = "stopped"
	reasonSaved   = "saved"
	reasonMemory  = "out of memory"
	reasonKilled  = "killed"

	logBytes = 1 << 20 // of a sandbox's log
)

// take gets hold of the processes while the launcher, their parent, still
// keeps their numbers from being used again.
func (i *instance) take(r launchReply) error {
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
	i.goferFD, err = hold(r.Gofer)
	return err
}

// will makes reason that of the coming end. The first one counts.
func (i *instance) will(reason string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.asked == "" {
		i.asked = reason
	}
}

// stop makes the reason of the coming end that it was asked for.
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
	close(i.ended)
}

// release gives back what this process holds of the sandbox, which has ended.
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

// watch sees the sandbox to its end.
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
	// The gofer outlives the sentry by moments. Without a sentry nothing is
	// left to keep, and what is left would be one more leak to explain.
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
		delete(r.all, i.id) // it was stopped before Stop knew of us
	}
}

// waitGuest asks the sentry for the end of its first process. It returns an
// error if the sentry ends without having said.
func (r *Runtime) waitGuest(ctx context.Context, id string) (unix.WaitStatus, error) {
	b, err := r.call(ctx, id, boot.ContMgrWait, id)
	if err != nil {
		return 0, err
	}
	return readWaitStatus(b)
}

// readWaitStatus reads the sentry's answer, which is not to be trusted.
func readWaitStatus(b []byte) (unix.WaitStatus, error) {
	var status uint32
	if err := json.Unmarshal(b, &status); err != nil {
		return 0, fmt.Errorf("ask sentry: %w", err)
	}
	return unix.WaitStatus(status), nil
}

// reasonFor is the end of the guest in words.
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
		// The runtime's poller waits for the descriptor, not a thread.
		err = c.Read(func(fd uintptr) bool { return hasEnded(int(fd), 0) })
	}
	for err != nil && !hasEnded(int(i.sentryFD.Fd()), 1000) {
	}
}

func hasEnded(pidfd, timeoutMS int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, timeoutMS)
	return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
}

const (
	logFile = "guest.log" // what the guest has said
	logFifo = "guest.out" // how it gets there
)

// openLog makes the file for what the guest writes on its standard output and
// error, and returns what to give it. It is not the file: root inside could
// fill the host's disk by /proc/1/fd/1. It is a pipe with a name, and open for
// reading too: when this process is killed a guest that writes gets no signal,
// and the next process reads on.
func (i *instance) openLog(dir string) (*os.File, error) {
	fifo := filepath.Join(dir, logFifo)
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		return nil, fmt.Errorf("make log: %w", err)
	}
	fd, err := unix.Open(fifo, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	w := os.NewFile(uintptr(fd), fifo)
	if err := i.followLog(dir); err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// followLog writes down what the guest says from now on.
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

// drain copies the first limit bytes of r to w, and reads on: a guest must not
// come to a halt over its log. After the limit it rests before each read, so
// that a flood costs the host nothing.
func drain(w io.Writer, r io.Reader, limit int64, rest time.Duration) {
	_, _ = io.Copy(w, io.LimitReader(r, limit)) // a full disk is no reason to stop reading
	b := make([]byte, 64<<10)
	for {
		if _, err := r.Read(b); err != nil {
			return
		}
		time.Sleep(rest)
	}
}

// logTail is the end of the sandbox's log.
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
