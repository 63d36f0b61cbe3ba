package gvisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/control/client"
	gvlog "gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/flag"
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

// A launchOrder is the request to a launcher, as JSON on its socket.
type launchOrder struct {
	ID      string
	Dir     string   // the sandbox's directory, with config.json
	Cgroups []string // cgroup.procs files to enter first
	Flags   []string // gVisor's configuration
	From    kind     // kind of the snapshot in the third file; empty means a boot without one
	Direct  bool     // read the snapshot's pages without the page cache
	Cover   bool     // overlay the root file system, see coverRootfs
	User    uint32   // user and group id of the host that the sandbox runs as, see newContainer
}

// A launchReply is the answer. The processes in it exist until the launcher has
// seen its socket closed, so their IDs are still valid.
type launchReply struct {
	Sentry, Gofer int
	Phase         string // what failed, if Err is set
	Err           string
}

const (
	launcherSocketFD = 3
	maxSpec          = 1 << 20 // bytes of config.json
)

// A launcher is a started launcher process that waits for its order.
type launcher struct {
	cmd  *exec.Cmd
	conn *net.UnixConn
	errs tail // its standard error; complete after dismiss
}

// newLauncher starts a launcher. If private is set it has a mount namespace of its
// own, whose mounts are not visible in ours.
func newLauncher(private bool) (*launcher, error) {
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
	l := &launcher{conn: conn.(*net.UnixConn)} //nolint:forcetypeassert // it is a unix socket
	l.cmd = exec.Command("/proc/self/exe")     //nolint:noctx // it may wait longer than any request
	l.cmd.Args = []string{argv0Launcher}
	l.cmd.Env = []string{} // none of our environment
	l.cmd.Dir = "/"
	l.cmd.Stderr = &l.errs
	l.cmd.ExtraFiles = []*os.File{theirs}
	// In its own session, so that a Ctrl-C at our terminal does not reach it.
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
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
	if err := l.cmd.Wait(); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return fmt.Errorf("run launcher: %w", err)
	}
	return nil
}

// errNotTold means that the order did not reach the launcher.
var errNotTold = errors.New("tell launcher")

// launch makes the launcher start the sandbox of order, with out as its standard
// output and error, and waits for the launcher's end. It returns the launcher's
// standard error for the log.
func (l *launcher) launch(ctx context.Context, order launchOrder, link, out, from *os.File, received func(launchReply) error) (said string, err error) {
	stop := context.AfterFunc(ctx, func() {
		_ = l.conn.SetDeadline(time.Unix(1, 0))
		_ = l.cmd.Process.Kill() // it may have ended
	})
	defer func() {
		stop()
		if derr := l.dismiss(); err == nil && derr != nil {
			err = because(ctx, derr) // it may have been killed after its answer
		}
		said = l.errs.String()
	}()
	b, err := json.Marshal(order)
	if err != nil {
		return "", fmt.Errorf("encode order: %w", err)
	}
	fds := []int{int(link.Fd()), int(out.Fd())}
	if from != nil {
		fds = append(fds, int(from.Fd()))
	}
	n, _, err := l.conn.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	runtime.KeepAlive(link)
	runtime.KeepAlive(out)
	runtime.KeepAlive(from)
	if n == 0 && err != nil && ctx.Err() == nil {
		return "", fmt.Errorf("%w: %w", errNotTold, err)
	}
	if err == nil && n < len(b) {
		_, err = l.conn.Write(b[n:])
	}
	if err != nil {
		return "", fmt.Errorf("tell launcher: %w", because(ctx, err))
	}
	var reply launchReply
	if err := json.NewDecoder(io.LimitReader(l.conn, 1<<16)).Decode(&reply); err != nil {
		return "", fmt.Errorf("hear from launcher: %w", because(ctx, err))
	}
	if reply.Err != "" {
		return "", fmt.Errorf("%s: %s", reply.Phase, reply.Err)
	}
	return "", received(reply)
}

// launch starts a sandbox with a waiting launcher, if there is one.
func (r *Runtime) launch(ctx context.Context, order launchOrder, link, out, from *os.File, received func(launchReply) error) (said string, err error) {
	if !order.Cover {
		select {
		case l := <-r.waiting:
			said, err = l.launch(ctx, order, link, out, from, received)
			if !errors.Is(err, errNotTold) {
				return said, err
			}
			// Something has killed it while it waited.
		default:
		}
	}
	l, err := newLauncher(order.Cover)
	if err != nil {
		return "", err
	}
	return l.launch(ctx, order, link, out, from, received)
}

// await starts launchers for the next starts, as many as may wait.
func (r *Runtime) await() {
	for len(r.waiting) < cap(r.waiting) {
		l, err := newLauncher(false)
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

// closeInherited closes descriptors that a library in the server opened without
// close-on-exec. With them, new descriptors would get high numbers, and the sentry
// does not start if one of its files has a number from 253 on, which it uses for
// standard input and output.
func closeInherited() error {
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("list descriptors: %w", err)
	}
	for _, e := range es {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= launcherSocketFD {
			continue
		}
		// This process opens everything with close-on-exec.
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			unix.Close(fd)
		}
	}
	return nil
}

// launcherMain is the main function of a launcher. It does not return.
func launcherMain() {
	s := os.NewFile(launcherSocketFD, "server")
	reply := serveLaunch(s)
	err := json.NewEncoder(s).Encode(reply)
	if err == nil {
		// Stay as the parent until the server has opened pidfds of the processes,
		// or is gone. Until then their IDs cannot be reused.
		_, err = s.Read(make([]byte, 1))
	}
	if reply.Err != "" || err != nil && !errors.Is(err, io.EOF) {
		os.Exit(1)
	}
	os.Exit(0)
}

// readOrder reads the order and its files: the link, the output and, if the order
// says so, the snapshot.
func readOrder(s *os.File) (order launchOrder, files []*os.File, err error) {
	b, rights := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(3*4))
	n, m, _, _, err := unix.Recvmsg(int(s.Fd()), b, rights, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return order, nil, fmt.Errorf("receive: %w", err)
	}
	if err := json.NewDecoder(io.MultiReader(bytes.NewReader(b[:n]), s)).Decode(&order); err != nil {
		return order, nil, err
	}
	msgs, err := unix.ParseSocketControlMessage(rights[:m])
	if err != nil {
		return order, nil, fmt.Errorf("receive files: %w", err)
	}
	for _, msg := range msgs {
		fds, err := unix.ParseUnixRights(&msg)
		if err != nil {
			return order, nil, fmt.Errorf("receive files: %w", err)
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	want := 2
	if order.From != "" {
		want = 3
	}
	if len(files) != want {
		return order, nil, fmt.Errorf("receive files: got %d, want %d", len(files), want)
	}
	return order, files, nil
}

func serveLaunch(s *os.File) (r launchReply) {
	fail := func(phase string, err error) launchReply { return launchReply{Phase: phase, Err: err.Error()} }
	unix.CloseOnExec(launcherSocketFD)
	if err := closeInherited(); err != nil {
		return fail("close descriptors", err)
	}
	order, files, err := readOrder(s)
	if err != nil {
		return fail("read order", err)
	}
	// gVisor gets the third file as a number only. Without this the file would be
	// collected, and closed, while gVisor reads it.
	defer runtime.KeepAlive(files)
	link, out := files[0], files[1]
	if err := unix.Dup3(int(out.Fd()), 1, 0); err != nil {
		return fail("set output", err)
	}
	out.Close()
	// gVisor's own messages go to our standard error, which the server reads.
	// os.Stderr itself becomes the guest's.
	gvlog.SetTarget(gvlog.GoogleEmitter{Writer: &gvlog.Writer{Next: os.NewFile(2, "stderr")}})
	gvlog.SetLevel(gvlog.Warning)
	os.Stderr = os.Stdout
	for _, f := range order.Cgroups {
		if err := os.WriteFile(f, []byte("0"), 0); err != nil {
			return fail("enter cgroup", err)
		}
	}
	// The path of the control socket must be short (108 bytes), and the data
	// directory's path may be long.
	dir, err := os.Open(order.Dir)
	if err != nil {
		return fail("open sandbox directory", err)
	}
	defer dir.Close()
	conf, err := configure(append(order.Flags, fmt.Sprintf("--root=/proc/self/fd/%d", dir.Fd())))
	if err != nil {
		return fail("configure gVisor", err)
	}
	b, err := os.ReadFile(filepath.Join(order.Dir, "config.json"))
	if err != nil {
		return fail("read specification", err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(b, &spec); err != nil {
		return fail("read specification", err)
	}
	if order.Cover {
		if err := coverRootfs(spec.Root.Path, order.Dir); err != nil {
			return fail("prepare mounts", err)
		}
	}
	args := container.Args{ID: order.ID, Spec: &spec, BundleDir: order.Dir}
	// The directory that the server has opened, even if its path has changed.
	var from string
	if order.From != "" {
		from = fmt.Sprintf("/proc/self/fd/%d", files[2].Fd())
	}
	if order.From == kindFiles {
		args.FSRestoreImagePath = from
	}
	c, err := newContainer(conf, args, order.User)
	if err != nil {
		return fail("create sandbox", err)
	}
	if order.From == kindMemory {
		// The guest runs while its pages are still being read. Pages that it needs
		// are read first.
		const background = true
		if err := c.Restore(conf, from, order.Direct, background, networkArgs(link, true)); err != nil {
			return fail("restore sandbox", err)
		}
	} else {
		if err := connectLink(c, link); err != nil {
			return fail("connect link", err)
		}
		// gVisor would now set up the network again, from the host's. With type
		// "host" it does not. The sentry, which is running already, does not see
		// this setting.
		start := *conf
		start.Network = config.NetworkHost
		if err := c.Start(&start); err != nil {
			return fail("start guest", err)
		}
	}
	return launchReply{Sentry: c.Sandbox.Getpid(), Gofer: c.GoferPid.Load()}
}

// newContainer starts the processes of a sandbox with id as their user and group on
// the host. The kernel lets processes of one user signal and trace each other. So
// two sandboxes must not have the same user, and nothing else on the host may use
// theirs.
//
// gVisor has one user for all sandboxes, nobody. But with its option "rootless" it
// uses the real user of its parent. So this process temporarily sets its real user
// to id and keeps root as its effective user. The option also assumes two things
// that are not true here. First, that the sentry cannot unmount its /proc: see
// sentryArgs. Second, that the owner of standard input and output inside cannot be
// changed. That is not necessary: the sentry does not reopen them, and the input is
// the host's /dev/null.
func newContainer(conf *config.Config, args container.Args, id uint32) (*container.Container, error) {
	if id < leastID {
		return nil, fmt.Errorf("%d is not a user for sandboxes", id)
	}
	// The sandbox must not have the supplementary groups of the server's user.
	if err := syscall.Setgroups(nil); err != nil {
		return nil, fmt.Errorf("leave groups: %w", err)
	}
	if err := realUser(int(id)); err != nil {
		return nil, err
	}
	as := *conf
	as.Rootless = true
	c, err := container.New(&as, args)
	return c, errors.Join(err, realUser(0))
}

// realUser sets the real user and group of this process.
func realUser(id int) error {
	if err := syscall.Setregid(id, 0); err != nil {
		return fmt.Errorf("set group: %w", err)
	}
	if err := syscall.Setreuid(id, 0); err != nil {
		return fmt.Errorf("set user: %w", err)
	}
	return nil
}

// leaveRoot gives up root: the real user of this process, which the launcher has
// set, becomes its only one. It keeps capabilities: the gofer itself drops all but
// those that it needs to serve files. As root it could also signal other processes
// of root that it sees.
func leaveRoot() error {
	uid, gid := os.Getuid(), os.Getgid()
	if uid < leastID || gid < leastID {
		return fmt.Errorf("%d:%d is not a user for sandboxes", uid, gid)
	}
	const noSetuidFixup = 1 << 2 // SECBIT_NO_SETUID_FIXUP, capabilities(7)
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_SET_SECUREBITS, noSetuidFixup, 0); errno != 0 {
		return fmt.Errorf("keep capabilities: %w", errno)
	}
	if err := syscall.Setresgid(gid, gid, gid); err != nil {
		return fmt.Errorf("set group: %w", err)
	}
	if err := syscall.Setresuid(uid, uid, uid); err != nil {
		return fmt.Errorf("set user: %w", err)
	}
	return nil
}

func configure(flags []string) (*config.Config, error) {
	fs := flag.NewFlagSet("gvisor", flag.ContinueOnError)
	fs.SetOutput(io.Discard) // otherwise it prints hundreds of lines of help
	config.RegisterFlags(fs)
	if err := fs.Parse(flags); err != nil {
		return nil, fmt.Errorf("parse flags: %w", err)
	}
	return config.NewFromFlags(fs)
}

func connectLink(c *container.Container, link *os.File) error {
	defer link.Close()
	conn, err := client.ConnectTo(c.Sandbox.GetControlSocketPath())
	if err != nil {
		return fmt.Errorf("connect to sentry: %w", err)
	}
	defer conn.Close()
	if err := conn.Call(boot.ContMgrSetNetworkArgs, networkArgs(link, false), nil); err != nil {
		return fmt.Errorf("hand over link: %w", err)
	}
	return nil
}
