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

// An Init is the first process of a sandbox. It restarts the guest's server and the
// sandbox's services when they end, and waits for orphaned processes, as the kernel
// expects of process 1.
//
// It does as little as possible, since the sandbox ends with it.
type Init struct {
	// Server is the command line of the guest's server. It runs as root with the
	// environment of this process.
	Server []string
	// ServicesFile lists the services, one command line per line, split at spaces.
	// "#" starts a comment. The file may be missing.
	ServicesFile string
	// User runs the services.
	User string
	// Path is the services' PATH. Empty means Debian's default.
	Path string
	// MaxProcesses bounds the processes and threads of services. Zero means no
	// bound. It is the same limit as the server's: RLIMIT_NPROC counts per user.
	MaxProcesses int64
	// GenerationFile receives a random line before anything else is started, see
	// [Config.GenerationFile]. Empty means none.
	GenerationFile string
	// TrustRoot is the same as [Config.TrustRoot]. Init makes the files that the
	// services' environment names, and their places for the certificate.
	TrustRoot string
	// Log records starts and ends.
	Log *slog.Logger
}

// StateVariable is the environment variable with the number of the descriptor for
// [Config.State].
const StateVariable = "POSTERN_STATE_FD"

// The backoff of a process that keeps ending: doubled from first to last, and reset
// after it has run for settled.
const (
	firstBackoff = 100 * time.Millisecond
	lastBackoff  = 30 * time.Second
	settled      = 60 * time.Second
)

// A child is a process that is restarted when it ends.
type child struct {
	name    string
	start   func() (pid int, err error)
	pid     int       // 0 if it does not run
	since   time.Time // of its last start
	backoff time.Duration
	due     time.Time // when to start it again
}

// Run starts and watches the processes until ctx is done, then ends all processes
// of the sandbox.
func (i *Init) Run(ctx context.Context) error {
	if len(i.Server) == 0 {
		return errors.New("start init: no command for the server")
	}
	if os.Getpid() != 1 {
		// Only in tests, where it is not process 1: adopt orphans.
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("become a subreaper: %w", err)
		}
	}
	// Services read it when they start, so it must exist by then. An existing file
	// can be overwritten even if the disk is full later.
	if err := replaceFile(i.GenerationFile, newGeneration(), 0o644); err != nil {
		i.Log.ErrorContext(ctx, "cannot write generation", "error", err)
	}
	trust := trustStore{log: i.Log, root: i.TrustRoot}
	if err := trust.install(ctx, "", ""); err != nil {
		return err
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
		// Start the server in any case, so that the sandbox can be examined.
		i.Log.ErrorContext(ctx, "cannot read services", "error", err)
	}
	children = append(children, services...)

	dead, alone := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(dead, unix.SIGCHLD)
	defer signal.Stop(dead)
	signal.Notify(alone, aloneSignal)
	defer signal.Stop(alone)
	for {
		next := i.startDue(children, time.Now())
		select {
		case <-ctx.Done():
			return i.shutdown(children)
		case <-dead:
		case <-alone:
			// Only root can send the signal. The server sends it when the sandbox is
			// bound, and kills the services itself once it sees the mark.
			children = children[:1]
			if err := markAlone(state); err != nil {
				return fmt.Errorf("end services: %w", err)
			}
		case <-time.After(next):
		}
		i.reap(children)
	}
}

// startDue starts the processes that are due, and returns how long to wait until
// the next one is.
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

// fail schedules the next start of c.
func (c *child) fail(now time.Time) {
	if c.backoff == 0 || (!c.since.IsZero() && now.Sub(c.since) > settled) {
		c.backoff = firstBackoff
	} else {
		c.backoff = min(2*c.backoff, lastBackoff)
	}
	c.pid, c.since, c.due = 0, time.Time{}, now.Add(c.backoff)
}

// reap waits for all processes that have ended, children and orphans.
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

// shutdown sends SIGTERM to all processes, and SIGKILL after a while.
func (i *Init) shutdown(children []*child) error {
	// For process 1, -1 means the whole sandbox. In a test it would be the whole
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

// parseServices parses command lines, which must begin with an absolute path.
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

// trustEnv returns the variables of the trust stores for services.
func (i *Init) trustEnv() []string {
	if i.TrustRoot == "" {
		return nil
	}
	var env []string
	for k, v := range trustVariables(trustStore{log: i.Log, root: i.TrustRoot}.public()) {
		env = append(env, k+"="+v)
	}
	return env
}

// startService starts a service as its user, within the process limit. Its output
// goes to the log of this process.
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
		Env:   append([]string{"PATH=" + path, "HOME=" + a.home, "USER=" + a.name, "LOGNAME=" + a.name, "LANG=C.UTF-8"}, i.trustEnv()...),
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
