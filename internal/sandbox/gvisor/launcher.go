package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
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

// A launcher is a child of ours that lives for one start. It is gVisor's
// parent instead of us because gVisor hands much of its parent on:
//
//   - the environment, which for a server holds the database's password, to
//     the gofer;
//   - standard input and output, taken from the global os.Stdin and os.Stdout,
//     to the guest: in our process two starts at once would have to take turns;
//   - the cgroup: a parent in the sandbox's own cgroup cannot start anything
//     outside it, so there is no moment in which the sentry is not limited;
//   - all that a bug could leave open or in memory.
//
// It costs one more start of this program, about 10 ms, and costs nothing
// once the sandbox runs.

// A launchOrder is what a launcher is told, as JSON on its socket.
type launchOrder struct {
	ID      string
	Dir     string   // of the sandbox, with config.json
	Cgroups []string // cgroup.procs files to enter before anything else
	Flags   []string // gVisor's configuration
	From    kind     // of the snapshot that is its third file; empty: a boot without one
	Direct  bool     // read the snapshot's pages past the page cache
	Cover   bool     // the root file system, see coverRootfs
}

// A launchReply is what it answers. The processes exist until the launcher has
// seen its socket closed, so their numbers still mean them.
type launchReply struct {
	Sentry, Gofer int
	Phase         string // what was being done, if Err is set
	Err           string
}

const (
	launcherSocketFD = 3
	launcherLinkFD   = 4
	launcherFromFD   = 5       // directory of the snapshot, if there is one
	maxSpec          = 1 << 20 // bytes of a specification
)

// launch starts the sandbox that order describes. Its standard output and
// error are out. What the launcher itself says on its standard error is
// returned for the log.
func launch(ctx context.Context, order launchOrder, link, out, from *os.File, received func(launchReply) error) (said string, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("make socket pair: %w", err)
	}
	if err := unix.SetNonblock(pair[0], true); err != nil { // deadlines need it
		return "", fmt.Errorf("prepare socket: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "launcher"), os.NewFile(uintptr(pair[1]), "launcher-end")
	defer ours.Close()
	defer theirs.Close()

	var errs tail
	c := exec.CommandContext(ctx, "/proc/self/exe")
	c.Args = []string{argv0Launcher}
	c.Env = []string{} // nothing of ours
	c.Dir = "/"
	c.Stdout, c.Stderr = out, &errs
	c.ExtraFiles = []*os.File{theirs, link}
	if from != nil {
		c.ExtraFiles = append(c.ExtraFiles, from)
	}
	// Its own session: a Ctrl-C at our terminal is not meant for it.
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if order.Cover {
		// What is mounted in a namespace of its own never comes to ours.
		c.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	}
	// The sentry inherits the launcher's standard error only if something goes
	// wrong; do not wait for it then.
	c.WaitDelay = time.Second
	if err := c.Start(); err != nil {
		return "", fmt.Errorf("start launcher: %w", because(ctx, err))
	}
	theirs.Close()
	defer func() {
		ours.Close() // it ends when it sees this
		if werr := c.Wait(); err == nil && werr != nil && !errors.Is(werr, exec.ErrWaitDelay) {
			err = fmt.Errorf("run launcher: %w", werr)
		}
		said = errs.String()
	}()

	stop := context.AfterFunc(ctx, func() { _ = ours.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := json.NewEncoder(ours).Encode(order); err != nil {
		return "", fmt.Errorf("tell launcher: %w", because(ctx, err))
	}
	var reply launchReply
	if err := json.NewDecoder(io.LimitReader(ours, 1<<16)).Decode(&reply); err != nil {
		return "", fmt.Errorf("hear from launcher: %w", because(ctx, err))
	}
	if reply.Err != "" {
		return "", fmt.Errorf("%s: %s", reply.Phase, reply.Err)
	}
	return "", received(reply)
}

// because is err, or what ended ctx if that was its cause.
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

// launcherMain is the launcher's side. It exits.
func launcherMain() {
	s := os.NewFile(launcherSocketFD, "server")
	reply := serveLaunch(s)
	err := json.NewEncoder(s).Encode(reply)
	if err == nil {
		// Stay, unreaped and so unmistakable, until the server has hold of
		// the processes, or is gone.
		_, err = s.Read(make([]byte, 1))
	}
	if reply.Err != "" || err != nil && !errors.Is(err, io.EOF) {
		os.Exit(1)
	}
	os.Exit(0)
}

func serveLaunch(s *os.File) (r launchReply) {
	fail := func(phase string, err error) launchReply { return launchReply{Phase: phase, Err: err.Error()} }
	var order launchOrder
	if err := json.NewDecoder(s).Decode(&order); err != nil {
		return fail("read order", err)
	}
	unix.CloseOnExec(launcherSocketFD)
	unix.CloseOnExec(launcherLinkFD)
	if order.From != "" {
		unix.CloseOnExec(launcherFromFD)
	}
	// gVisor's own words go to our standard error, which the server reads;
	// os.Stderr itself becomes the guest's.
	gvlog.SetTarget(gvlog.GoogleEmitter{Writer: &gvlog.Writer{Next: os.NewFile(2, "stderr")}})
	gvlog.SetLevel(gvlog.Warning)
	os.Stderr = os.Stdout
	for _, f := range order.Cgroups {
		if err := os.WriteFile(f, []byte("0"), 0); err != nil {
			return fail("enter cgroup", err)
		}
	}
	// The path to the sandbox's control socket must be short (108 bytes), and
	// that of the data directory is not ours to choose.
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
	// The directory that the server has opened, whatever its path means now.
	from := fmt.Sprintf("/proc/self/fd/%d", launcherFromFD)
	if order.From == kindFiles {
		args.FSRestoreImagePath = from
	}
	c, err := container.New(conf, args)
	if err != nil {
		return fail("create sandbox", err)
	}
	link := os.NewFile(launcherLinkFD, "link")
	if order.From == kindMemory {
		// The guest goes on while its pages are still being read: those that it
		// asks for come first.
		const background = true
		if err := c.Restore(conf, from, order.Direct, background, networkArgs(link, true)); err != nil {
			return fail("restore sandbox", err)
		}
	} else {
		if err := connectLink(c, link); err != nil {
			return fail("connect link", err)
		}
		// gVisor would now set up the network again, from the host's. It leaves
		// one of type "host" alone; to the sentry, which is long running, this
		// says nothing.
		start := *conf
		start.Network = config.NetworkHost
		if err := c.Start(&start); err != nil {
			return fail("start guest", err)
		}
	}
	return launchReply{Sentry: c.Sandbox.Getpid(), Gofer: c.GoferPid.Load()}
}

func configure(flags []string) (*config.Config, error) {
	fs := flag.NewFlagSet("gvisor", flag.ContinueOnError)
	fs.SetOutput(io.Discard) // or it prints hundreds of lines of help
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
