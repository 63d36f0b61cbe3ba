package runsc

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/control/client"
	gvlog "gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"

	"postern/internal/sandbox/launch"
)

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
		if err != nil || fd <= launch.SocketFD {
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
	s := os.NewFile(launch.SocketFD, "server")
	reply := serveLaunch(s)
	err := say(s, reply)
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

// say answers the server.
func say(s *os.File, reply launch.Reply) error {
	b, err := json.Marshal(reply)
	if err != nil {
		return err
	}
	_, err = s.Write(b)
	return err
}

// readOrder reads an order and its files.
func readOrder(s *os.File) (order launch.Order, files []*os.File, err error) {
	b, rights := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(5*4))
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
	if len(files) != order.Files() {
		return order, nil, fmt.Errorf("receive files: got %d, want %d", len(files), order.Files())
	}
	return order, files, nil
}

func serveLaunch(s *os.File) (r launch.Reply) {
	var phases []launch.Phase
	last := time.Now()
	done := func(name string) {
		now := time.Now()
		phases = append(phases, launch.Phase{Name: name, Start: last, End: now})
		last = now
	}
	fail := func(phase string, err error) launch.Reply { return launch.Reply{Phase: phase, Err: err.Error()} }
	unix.CloseOnExec(launch.SocketFD)
	if err := closeInherited(); err != nil {
		return fail("close descriptors", err)
	}
	order, files, err := readOrder(s)
	if err != nil {
		return fail("read order", err)
	}
	last = time.Now() // it may have waited for the order
	// gVisor gets the snapshot as a number only. Without this the file would be
	// collected, and closed, while gVisor reads it.
	defer func() { runtime.KeepAlive(files) }()
	var gate *os.File
	if order.Gate {
		gate, files = files[len(files)-1], files[:len(files)-1]
	}
	var link *os.File
	out := files[0]
	if !order.Prepare {
		link, out = files[0], files[1]
	}
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
	done("enter cgroup")
	// The path of the control socket must be short (108 bytes), and the data
	// directory's path may be long.
	dir, err := os.Open(order.Dir)
	if err != nil {
		return fail("open sandbox directory", err)
	}
	defer dir.Close()
	conf, err := launch.Configure(append(order.Flags, fmt.Sprintf("--root=/proc/self/fd/%d", dir.Fd())))
	if err != nil {
		return fail("configure gVisor", err)
	}
	if gate != nil {
		release, err := donateGate(conf, gate)
		if err != nil {
			return fail("hand over gate", err)
		}
		defer release()
	}
	b, err := os.ReadFile(filepath.Join(order.Dir, "config.json"))
	if err != nil {
		return fail("read specification", err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(b, &spec); err != nil {
		return fail("read specification", err)
	}
	if order.Joined {
		// The server's opening of the image: another one would have pages of its own in
		// the page cache. Only this process looks at the path; the sentry gets a file.
		spec.Annotations[launch.AnnotationRootfs+"source"] = fmt.Sprintf("/proc/self/fd/%d", files[len(files)-1].Fd())
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
	if order.From == launch.Files {
		args.FSRestoreImagePath = from
	}
	if order.Image && !needsGofer(&spec) {
		f, err := newFilestore(order.Dir)
		if err != nil {
			return fail("make file for writes", err)
		}
		defer f.Close()
		args.PassFiles = map[int]*os.File{filestoreNumber: f}
	}
	var naming namer
	if order.Prepare {
		// If the server has been killed, writing to our standard error must not end
		// this process before it has ended the sandbox.
		signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)
		if err := naming.register(); err != nil {
			return fail("find platform", err)
		}
	}
	c, err := newContainer(conf, args, order.User)
	if err != nil {
		return fail("create sandbox", err)
	}
	done("create sandbox")
	if order.Prepare {
		order, files = awaitClaim(s, order, launch.Reply{Sentry: c.Sandbox.Getpid(), Gofer: c.GoferPid.Load(), Phases: phases})
		phases, last = nil, time.Now()
		naming.name, link = order.Hostname, files[0]
		from = fmt.Sprintf("/proc/self/fd/%d", files[1].Fd())
	}
	if order.From == launch.Memory {
		// The guest runs while its pages are still being read. Pages that it needs
		// are read first.
		const background = true
		if err := c.Restore(conf, from, order.Direct, background, networkArgs(order.Link, link, true)); err != nil {
			return fail("restore sandbox", err)
		}
		done("restore sandbox")
	} else {
		if err := connectLink(c, order.Link, link); err != nil {
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
		done("start guest")
	}
	return launch.Reply{Sentry: c.Sandbox.Getpid(), Gofer: c.GoferPid.Load(), Phases: phases}
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
	if id < launch.LeastID {
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
	if uid < launch.LeastID || gid < launch.LeastID {
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

func connectLink(c *container.Container, as launch.Link, link *os.File) error {
	defer link.Close()
	conn, err := client.ConnectTo(c.Sandbox.GetControlSocketPath())
	if err != nil {
		return fmt.Errorf("connect to sentry: %w", err)
	}
	defer conn.Close()
	if err := conn.Call(boot.ContMgrSetNetworkArgs, networkArgs(as, link, false), nil); err != nil {
		return fmt.Errorf("hand over link: %w", err)
	}
	return nil
}
