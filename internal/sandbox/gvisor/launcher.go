package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox/launch"
)

// A launcher is a child process of ours that exists for one start. It is gVisor's
// parent in our place, because gVisor passes on much of its parent:
//
//   - the environment, which for a server holds the database's password, to
//     the gofer;
//   - standard input and output, taken from the global os.Stdin and os.Stdout, to the
//     guest: in our process two concurrent starts would have to take turns;
//   - the cgroup: a parent in the sandbox's own cgroup cannot start anything outside
//     it, so there is no moment in which the sentry is not limited;
//   - everything that a bug could leave open or in memory.
//
// It costs one more start of this program, about 10 ms, unless one is waiting since
// the last start. It costs nothing once the sandbox runs.

// A launcher is a started launcher process that waits for its order.
type launcher struct {
	log   *slog.Logger
	cmd   *exec.Cmd
	pidfd int // of its process; -1 if the kernel has none
	conn  *net.UnixConn
	said  *json.Decoder // of its answers
	errs  tail          // its standard error; complete after dismiss
}

// newLauncher starts a launcher. If private is set it has a mount namespace of its own,
// whose mounts are not visible in ours.
func (r *Runtime) newLauncher(private bool) (*launcher, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make socket pair: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "launcher"), os.NewFile(uintptr(pair[1]), "launcher-end")
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, fmt.Errorf("prepare socket: %w", err)
	}
	l := &launcher{log: r.log, conn: conn.(*net.UnixConn), said: json.NewDecoder(io.LimitReader(conn, 1<<16))} //nolint:forcetypeassert // it is a unix socket
	l.cmd = exec.Command(r.program)                                                                            //nolint:noctx // it may wait longer than any request
	l.cmd.Args = []string{launch.Launcher}
	l.cmd.Env = []string{} // none of our environment
	l.cmd.Dir = "/"
	l.cmd.Stderr = &l.errs
	l.cmd.ExtraFiles = []*os.File{theirs}
	// In its own session, so that a Ctrl-C at our terminal does not reach it.
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, PidFD: &l.pidfd}
	if private {
		l.cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	}
	// The sentry inherits the launcher's standard error only if something goes
	// wrong. Do not wait for it then.
	l.cmd.WaitDelay = time.Second
	if err := l.cmd.Start(); err != nil {
		l.conn.Close()
		return nil, fmt.Errorf("start launcher: %w", err)
	}
	return l, nil
}

// dismiss closes the launcher's socket, which ends it, and waits for its end.
func (l *launcher) dismiss() error {
	l.conn.Close()
	if l.pidfd >= 0 {
		unix.Close(l.pidfd)
		l.pidfd = -1
	}
	if err := l.cmd.Wait(); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return fmt.Errorf("run launcher: %w", err)
	}
	return nil
}

// errNotTold means that the order did not reach the launcher.
var errNotTold = errors.New("tell launcher")

// launch makes the launcher start the sandbox of order, with the files that
// [launch.Order.Files] describes, and dismisses the launcher. If it fails it returns the
// launcher's standard error for the log.
func (l *launcher) launch(ctx context.Context, order launch.Order, files []*os.File, received func(launch.Reply) error) (said string, err error) {
	stop := l.killAtEnd(ctx)
	defer func() { said, err = l.finish(ctx, stop, err) }()
	if err := l.tell(ctx, order, files...); err != nil {
		return "", err
	}
	reply, err := l.hear(ctx)
	if err != nil {
		return "", err
	}
	return "", received(reply)
}

// killAtEnd kills the launcher when ctx is done, unless stop was called before.
func (l *launcher) killAtEnd(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		_ = l.conn.SetDeadline(time.Unix(1, 0))
		_ = l.cmd.Process.Kill() // it may have ended
	})
}

// finish dismisses a launcher after its last order, which had the result err. After a
// success it does not wait for the launcher's end, which nobody needs. Until then a process
// of root's is in the sandbox's cgroup. It reads nothing more but our socket, and the
// sandbox's user may neither signal nor trace it.
func (l *launcher) finish(ctx context.Context, stop func() bool, err error) (said string, _ error) {
	// If the launcher was killed after its answer, the processes that it named may
	// have ended before we held them. While it lives, their IDs are theirs.
	if stop() && err == nil && l.pidfd >= 0 && !hasEnded(l.pidfd, 0) {
		go func() {
			_ = l.dismiss() // it has done what it was for
			if said := l.errs.String(); said != "" {
				l.log.DebugContext(ctx, "gVisor on the start of a sandbox", "said", said)
			}
		}()
		return "", nil
	}
	if derr := l.dismiss(); err == nil && derr != nil {
		err = because(ctx, derr)
	}
	return l.errs.String(), err
}

// tell sends an order.
func (l *launcher) tell(ctx context.Context, order launch.Order, files ...*os.File) error {
	b, err := json.Marshal(order)
	if err != nil {
		return fmt.Errorf("encode order: %w", err)
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	n, _, err := l.conn.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	runtime.KeepAlive(files)
	if n == 0 && err != nil && ctx.Err() == nil {
		return fmt.Errorf("%w: %w", errNotTold, err)
	}
	if err == nil && n < len(b) {
		_, err = l.conn.Write(b[n:])
	}
	if err != nil {
		return fmt.Errorf("tell launcher: %w", because(ctx, err))
	}
	return nil
}

// hear returns the launcher's next answer.
func (l *launcher) hear(ctx context.Context) (reply launch.Reply, err error) {
	if err := l.said.Decode(&reply); err != nil {
		return reply, fmt.Errorf("hear from launcher: %w", because(ctx, err))
	}
	if reply.Err != "" {
		return reply, fmt.Errorf("%s: %s", reply.Phase, reply.Err)
	}
	return reply, nil
}

// launch starts a sandbox with a waiting launcher, if there is one.
func (r *Runtime) launch(ctx context.Context, order launch.Order, files []*os.File, received func(launch.Reply) error) (said string, err error) {
	if !order.Cover {
		select {
		case l := <-r.waiting:
			said, err = l.launch(ctx, order, files, received)
			if !errors.Is(err, errNotTold) {
				return said, err
			}
			// Something has killed it while it waited.
		default:
		}
	}
	l, err := r.newLauncher(order.Cover)
	if err != nil {
		return "", err
	}
	return l.launch(ctx, order, files, received)
}

// await starts launchers for the next starts, as many as may wait.
func (r *Runtime) await() {
	for len(r.waiting) < cap(r.waiting) {
		l, err := r.newLauncher(false)
		if err != nil {
			r.log.Warn("start a launcher in advance", "err", err)
			return
		}
		select {
		case r.waiting <- l:
		default: // another start was faster
			_ = l.dismiss() // it reports an error, since it had no order
		}
	}
}

// because returns the cause of ctx's end if ctx is done, and otherwise err.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// tail keeps the last bytes written to it.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	const keep = 8 << 10
	t.b = append(t.b, p...)
	if over := len(t.b) - keep; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string { return strings.TrimSpace(string(t.b)) }
