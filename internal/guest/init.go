package guest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// An Init is the first process of a sandbox. It keeps the guest's server and
// the sandbox's services running and waits for every process that lost its
// parent, as the kernel expects of the first one.
//
// It does as little as it can: if it ends, so does the sandbox.
type Init struct {
	// Server is the command line of the guest's server. It runs as root, with
	// the environment of this process.
	Server []string
	// ServicesFile lists the services, one command line a line, split at
	// blanks; "#" starts a comment. It need not exist.
	ServicesFile string
	// User runs the services.
	User string
	// Path is the services' PATH. Empty means Debian's default.
	Path string
	// MaxProcesses bounds the processes and threads of services. Zero means no
	// bound. It is the same limit as the server's: they share a cgroup.
	MaxProcesses int64
	// GenerationFile gets a random line before anything else starts, see
	// [Config.GenerationFile]. Empty means none.
	GenerationFile string
	// Log is told about starts and ends.
	Log *slog.Logger
}

// StateVariable names, in the server's environment, the descriptor of what it
// must remember, see [Config.State].
const StateVariable = "POSTERN_STATE_FD"

// The backoff of what keeps dying: doubled from the first to the last, and
// back to the first after it has run for as long as settled.
const (
	firstBackoff = 100 * time.Millisecond
	lastBackoff  = 30 * time.Second
	settled      = 60 * time.Second
)

// A child is a process that is started again when it ends.
type child struct {
	name    string
	start   func() (pid int, err error)
	pid     int       // 0 when it does not run
	since   time.Time // of its start
	backoff time.Duration
	due     time.Time // when to start it, if it does not run
}

// Run runs until ctx is done, then ends all processes of the sandbox.
func (i *Init) Run(ctx context.Context) error {
	if len(i.Server) == 0 {
		return errors.New("start init: no command for the server")
	}
	if os.Getpid() != 1 {
		// In tests: adopt orphans as the first process would.
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("become a subreaper: %w", err)
		}
	}
	// Services look at it when they start, so it is there before they are; and
	// one that is there can be written over when the disk is full.
	if err := replaceFile(i.GenerationFile, newGeneration(), 0o644); err != nil {
		i.Log.ErrorContext(ctx, "cannot write generation", "error", err)
	}
	state, err := newStateFile()
	if err != nil {
		return err
	}
	defer state.Close()
	spawn := newSpawner(i.Log, i.MaxProcesses)
	children := []*child{{name: "server", start: func() (int, error) {
		return syscall.ForkExec(i.Server[0], i.Server, &syscall.ProcAttr{
			Dir: "/", Env: append(os.Environ(), StateVariable+"=3"),
			Files: []uintptr{0, 1, 2, state.Fd()}, Sys: &syscall.SysProcAttr{Setsid: true},
		})
	}}}
	services, err := i.services(spawn)
	if err != nil {
		// The server still has to come up: somebody must be able to look.
		i.Log.ErrorContext(ctx, "cannot read services", "error", err)
	}
	children = append(children, services...)

	dead := make(chan os.Signal, 1)
	signal.Notify(dead, unix.SIGCHLD)
	defer signal.Stop(dead)
	for {
		next := i.startDue(children, time.Now())
		select {
		case <-ctx.Done():
			return i.shutdown(children)
		case <-dead:
		case <-time.After(next):
		}
		i.reap(children)
	}
}

// startDue starts what is to run and returns when to look again at the latest.
func (i *Init) startDue(children []*child, now time.Time) time.Duration {
	next := time.Minute
	for _, c := range children {
		if c.pid != 0 {
			continue
		}
		if wait := c.due.Sub(now); wait > 0 {
			next = min(next, wait)
			continue
		}
		pid, err := c.start()
		if err != nil {
			c.fail(now)
			next = min(next, c.backoff)
			i.Log.Error("cannot start", "name", c.name, "error", err, "again_in", c.backoff)
			continue
		}
		c.pid, c.since = pid, now
		i.Log.Info("started", "name", c.name, "pid", pid)
	}
	return next
}

// fail sets when to start c again.
func (c *child) fail(now time.Time) {
	if c.backoff == 0 || (!c.since.IsZero() && now.Sub(c.since) > settled) {
		c.backoff = firstBackoff
	} else {
		c.backoff = min(2*c.backoff, lastBackoff)
	}
	c.pid, c.since, c.due = 0, time.Time{}, now.Add(c.backoff)
}

// reap waits for every process that has ended, ours or orphaned.
func (i *Init) reap(children []*child) {
	for {
		var st unix.WaitStatus
		pid, err := unix.Wait4(-1, &st, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		for _, c := range children {
			if c.pid == pid {
				c.fail(time.Now())
				i.Log.Warn("ended", "name", c.name, "pid", pid, "status", int(st), "again_in", c.backoff)
			}
		}
	}
}

// shutdown asks all processes to end, then ends them.
func (i *Init) shutdown(children []*child) error {
	// As the first process, -1 is the whole sandbox; in a test it would be the
	// machine.
	send := func(sig unix.Signal) {
		if os.Getpid() == 1 {
			_ = unix.Kill(-1, sig)
			return
		}
		for _, c := range children {
			if c.pid != 0 {
				_ = unix.Kill(-c.pid, sig)
			}
		}
	}
	send(unix.SIGTERM)
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		i.reap(children)
		if _, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); errors.Is(err, unix.ECHILD) {
			return nil
		}
	}
	send(unix.SIGKILL)
	return nil
}

// services reads the list of services.
func (i *Init) services(spawn *spawner) ([]*child, error) {
	f, err := os.Open(i.ServicesFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer f.Close()
	lines, err := parseServices(f)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", i.ServicesFile, err)
	}
	a, err := lookupAccount(i.User)
	if err != nil {
		return nil, err
	}
	var list []*child
	for _, args := range lines {
		if fi, err := os.Stat(args[0]); err != nil || fi.Mode()&0o111 == 0 || !fi.Mode().IsRegular() {
			i.Log.Warn("service is not an executable file", "path", args[0])
			continue
		}
		list = append(list, &child{name: filepath.Base(args[0]), start: func() (int, error) { return i.startService(spawn, a, args) }})
	}
	return list, nil
}

// parseServices reads command lines, which must start with an absolute path.
func parseServices(r io.Reader) ([][]string, error) {
	var list [][]string
	sc := bufio.NewScanner(r)
	for n := 1; sc.Scan(); n++ {
		line, _, _ := strings.Cut(sc.Text(), "#")
		args := strings.Fields(line)
		if len(args) == 0 {
			continue
		}
		if !filepath.IsAbs(args[0]) {
			return nil, fmt.Errorf("line %d: %q is not an absolute path", n, args[0])
		}
		list = append(list, args)
	}
	return list, sc.Err()
}

// startService starts a service inside the limit, as its user. What it writes
// goes where this process's own log goes.
func (i *Init) startService(spawn *spawner, a account, args []string) (int, error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	path := i.Path
	if path == "" {
		path = defaultPath
	}
	dir := a.home
	if !isDir(dir) {
		dir = "/"
	}
	p, err := spawn.start(args[0], args, &os.ProcAttr{
		Dir:   dir,
		Env:   []string{"PATH=" + path, "HOME=" + a.home, "USER=" + a.name, "LOGNAME=" + a.name, "LANG=C.UTF-8"},
		Files: []*os.File{null, os.Stderr, os.Stderr},
		Sys: &syscall.SysProcAttr{
			Setsid:     true,
			Credential: &syscall.Credential{Uid: a.uid, Gid: a.gid, Groups: a.more},
		},
	})
	if err != nil {
		return 0, err
	}
	pid := p.Pid
	return pid, p.Release() // reap waits for it
}
