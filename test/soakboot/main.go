// Command soakboot boots sandboxes, many times, on a machine that has too much
// to do, and says which of them never answered and what they were doing. It
// boots cold, with the real guest behind the real wall, and asks the guest what
// the server asks first.
//
//	make soak-boot BOOTS=3000
//
// It needs root, and CGO_ENABLED=0 as every program that holds gVisor. Of each
// boot that hangs it writes a directory: the stacks of gVisor's kernel, the
// state of each thread on the host, and what the guest had said.
//
// It was made to find the one in some hundred boots, at a load of 20 to 40, whose
// guest seemed never to answer. In 4,036 cold boots, 306 with saved files and
// 1,500 restores at loads of 30 to 97 none did. What had been seen was a test that
// no longer asked (gvisor.TestPingOutlivesRefusals).
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/auth"
	"postern/internal/egress"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/sandbox/gvisor"
	"postern/internal/sandbox/launch"
	"postern/internal/sandbox/runsc"
)

// argv0Busy is the name under which this program is a process that only
// computes: the load.
const argv0Busy = "soakboot-busy"

func main() {
	if launch.IsPart(os.Args) {
		runsc.Main()
	}
	if os.Args[0] == argv0Busy {
		for n := uint64(1); n != 0; n += 2 {
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// settings are the command line.
type settings struct {
	boots    int
	parallel int
	load     int
	nice     int
	patience time.Duration
	slow     time.Duration
	template string
	rootfs   string
	image    sandbox.Image
	guest    string
	out      string
	source   string
	whole    time.Duration
}

func parse(args []string) (s settings, err error) {
	fs := flag.NewFlagSet("soakboot", flag.ContinueOnError)
	fs.IntVar(&s.boots, "boots", 3000, "boots in all")
	fs.IntVar(&s.parallel, "parallel", 4, "boots at the same time")
	fs.IntVar(&s.load, "load", 20, "busy processes beside them")
	fs.IntVar(&s.nice, "load-nice", 0, "niceness of the busy processes, above this program's own")
	fs.DurationVar(&s.patience, "patience", time.Minute, "after which a guest that has not answered hangs")
	fs.StringVar(&s.template, "template", "", "`directory` of a template (default: a root file system with nothing but the guest)")
	fs.StringVar(&s.guest, "guest", "cmd/postern/guestbin/postern-guest", "`file` of the guest, for the default root file system")
	fs.StringVar(&s.out, "out", "soakboot.out", "`directory` for what hung")
	fs.StringVar(&s.source, "from", "", "memory or files: start from those of one that answered (default: boot)")
	fs.DurationVar(&s.slow, "slow", 10*time.Second, "from when on it is said where a boot spent its time")
	fs.DurationVar(&s.whole, "for", 0, "end after this time, whatever was reached; 0 means never")
	if err := fs.Parse(args); err != nil {
		return s, err
	}
	if s.source != "" && s.source != "memory" && s.source != "files" {
		return s, fmt.Errorf("-from %q: want memory or files", s.source)
	}
	return s, nil
}

func run(ctx context.Context, args []string, out io.Writer) error {
	s, err := parse(args)
	if err != nil {
		return err
	}
	if s.whole > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.whole)
		defer cancel()
	}
	if err := os.MkdirAll(s.out, 0o700); err != nil {
		return err
	}
	if s.template != "" {
		if err := s.useTemplate(); err != nil {
			return err
		}
	} else {
		s.rootfs = filepath.Join(s.out, "rootfs")
		if err := smallRootfs(s.rootfs, s.guest); err != nil {
			return err
		}
	}
	if s.rootfs, err = filepath.Abs(s.rootfs); err != nil {
		return err
	}
	b, err := newBench(s, out) //nolint:contextcheck // as in postern up
	if err != nil {
		return err
	}
	stop, err := busy(ctx, s.load, s.nice)
	if err != nil {
		return err
	}
	defer stop()
	if s.source != "" {
		if err := b.prepare(ctx); err != nil {
			return err
		}
	}
	return b.all(ctx)
}

// useTemplate finds the images of the template.
func (s *settings) useTemplate() error {
	dir, err := filepath.Abs(s.template)
	if err != nil {
		return err
	}
	s.rootfs = filepath.Join(dir, "rootfs")
	for pattern, to := range map[string]*string{"root-*.erofs": &s.image.Root, "guest-*.erofs": &s.image.Guest} {
		have, err := filepath.Glob(filepath.Join(dir, "images", pattern))
		if err != nil || len(have) == 0 {
			return fmt.Errorf("template %s has no image %s: build it with \"make template\"", dir, pattern)
		}
		*to = have[0]
	}
	return nil
}

// smallRootfs makes a root file system with the guest and what it looks for.
func smallRootfs(dir, guest string) error {
	for _, d := range []string{"usr/local/sbin", "proc", "sys", "dev", "tmp", "run", "etc", "home/user", "var"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	b, err := os.ReadFile(guest)
	if err != nil {
		return fmt.Errorf("read guest (make build puts it there): %w", err)
	}
	return errors.Join(
		os.Chmod(filepath.Dir(dir), 0o755), //nolint:gosec // the gofer is not us
		os.WriteFile(filepath.Join(dir, "usr/local/sbin/postern-guest"), b, 0o755),
		os.WriteFile(filepath.Join(dir, "etc/passwd"), []byte("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"), 0o644),
		os.WriteFile(filepath.Join(dir, "etc/group"), []byte("root:x:0:\nuser:x:1000:\n"), 0o644),
	)
}

// busy starts n processes that compute until the returned function is called,
// or this program ends.
func busy(ctx context.Context, n, nice int) (stop func(), err error) {
	var all []*exec.Cmd
	stop = func() {
		for _, c := range all {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
	}
	for range n {
		c := exec.CommandContext(ctx, "/proc/self/exe")
		c.Args = []string{argv0Busy}
		c.Env = []string{"GOMAXPROCS=1"}
		c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := c.Start(); err != nil {
			stop()
			return nil, err
		}
		all = append(all, c)
		if nice > 0 {
			if err := unix.Setpriority(unix.PRIO_PROCESS, c.Process.Pid, nice); err != nil {
				stop()
				return nil, err
			}
		}
	}
	return stop, nil
}

// A bench boots sandboxes.
type bench struct {
	settings
	lines   io.Writer
	log     *slog.Logger
	state   string
	runtime *gvisor.Runtime
	wall    *egress.Wall
	from    string // snapshot; empty for a boot
	channel string // key of the guest in it

	started, hung, failed atomic.Int64
	mu                    sync.Mutex
	took                  []time.Duration
}

func newBench(s settings, out io.Writer) (*bench, error) {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	state, err := filepath.Abs(filepath.Join(s.out, "state"))
	if err != nil {
		return nil, err
	}
	r, err := gvisor.New(log, gvisor.Config{StateDir: state, StartTimeout: 5 * time.Minute, Starts: s.parallel, Launchers: 2})
	if err != nil {
		return nil, err
	}
	w, err := egress.New(log, egress.Config{Record: func(context.Context, auth.Principal, egress.Event) error { return nil }})
	if err != nil {
		return nil, err
	}
	return &bench{settings: s, lines: out, log: log, state: state, runtime: r, wall: w}, nil
}

// all boots until enough were, or ctx is done.
func (b *bench) all(ctx context.Context) error {
	begin := time.Now()
	var wg sync.WaitGroup
	for range b.parallel {
		wg.Go(func() {
			for ctx.Err() == nil {
				n := b.started.Add(1)
				if n > int64(b.boots) {
					b.started.Add(-1)
					return
				}
				b.once(ctx, int(n))
				if n%100 == 0 {
					b.report(begin)
				}
			}
		})
	}
	wg.Wait()
	b.report(begin)
	if n := b.hung.Load() + b.failed.Load(); n > 0 {
		return fmt.Errorf("%d did not come up", n)
	}
	return nil
}

func (b *bench) report(begin time.Time) {
	b.mu.Lock()
	d := slices.Sorted(slices.Values(b.took))
	b.mu.Unlock()
	at := func(of100 int) time.Duration {
		if len(d) == 0 {
			return 0
		}
		return d[min(len(d)-1, len(d)*of100/100)].Round(time.Millisecond)
	}
	load, _ := os.ReadFile("/proc/loadavg")
	fmt.Fprintf(b.lines, "%d answered, %d hung, %d failed to start in %v; p50 %v, p99 %v, longest %v; load %s", len(d), b.hung.Load(), b.failed.Load(),
		time.Since(begin).Round(time.Second), at(50), at(99), at(100), load)
}

// newID returns an id of a sandbox.
func newID(n int) string { return fmt.Sprintf("i%08d%012d", os.Getpid(), n) }

// once boots one sandbox and ends it.
func (b *bench) once(ctx context.Context, n int) {
	id := newID(n)
	begin := time.Now()
	defer b.end(id) //nolint:contextcheck // it ends although ctx has ended
	var p phases
	key, err := b.start(ctx, id)
	p.started = time.Since(begin)
	if err == nil {
		err = b.askNoting(ctx, id, key, b.patience, &p)
	} else if ctx.Err() == nil {
		b.failed.Add(1)
		b.log.ErrorContext(ctx, "start", "sandbox", id, "err", err)
		return
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		b.hung.Add(1)
		dir := filepath.Join(b.out, "hung-"+id)
		b.log.ErrorContext(ctx, "a guest does not answer", "sandbox", id, "boot", n, "err", err, "evidence", dir)
		if err := b.collect(ctx, id, key, dir); err != nil {
			b.log.ErrorContext(ctx, "collect evidence", "sandbox", id, "err", err)
		}
		return
	}
	took := time.Since(begin)
	if took > b.slow {
		b.log.WarnContext(ctx, "a slow boot", "sandbox", id, "took", took, "started_after", p.started, "dials", p.dials, "last_dial_took", p.dial, "answer_took", took-p.started-p.dialed)
	}
	b.mu.Lock()
	b.took = append(b.took, took)
	b.mu.Unlock()
}

// phases say where a boot spent its time.
type phases struct {
	started time.Duration // until the runtime said that the guest was started
	dials   int           // attempts to connect
	dial    time.Duration // that the last one took
	dialed  time.Duration // from the start until it was done
}

func (b *bench) end(id string) {
	b.wall.Detach(id)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := b.runtime.Stop(ctx, id); err != nil {
		b.log.ErrorContext(ctx, "stop", "sandbox", id, "err", err)
	}
}

// start starts a sandbox and returns the key of its guest's channel.
func (b *bench) start(ctx context.Context, id string) (key string, err error) {
	link, err := b.wall.Attach(ctx, auth.Principal{Kind: auth.Sandbox, ID: id, Project: "soak"}, policy.Egress{})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(id))
	err = b.runtime.Start(ctx, sandbox.Spec{
		ID: id, Rootfs: b.rootfs, Image: b.image, Hostname: id, CPUs: 2, MemoryMB: 1024, DiskMB: 256, Processes: 512, From: b.from,
		Env: []string{"POSTERN_CHANNEL_SHA256=" + hex.EncodeToString(sum[:])}, Link: link,
	})
	if b.from != "" && b.source == "memory" {
		return b.channel, err
	}
	return id, err
}

// prepare saves one that answered.
func (b *bench) prepare(ctx context.Context) error {
	id := newID(0)
	defer b.end(id) //nolint:contextcheck // it ends although ctx has ended
	key, err := b.start(ctx, id)
	if err == nil {
		err = b.ask(ctx, id, key, b.patience)
	}
	if err != nil {
		return fmt.Errorf("boot what others start from: %w", err)
	}
	dir, err := filepath.Abs(filepath.Join(b.out, "snapshot"))
	if err == nil {
		err = errors.Join(os.RemoveAll(dir), b.runtime.Save(ctx, id, dir, sandbox.SaveOptions{FilesOnly: b.source == "files"}))
	}
	b.from, b.channel = dir, id
	return err
}

// ask tells the guest who it is, as the server does.
func (b *bench) ask(ctx context.Context, id, key string, within time.Duration) error {
	return b.askNoting(ctx, id, key, within, &phases{})
}

func (b *bench) askNoting(ctx context.Context, id, key string, within time.Duration, p *phases) error {
	begin := time.Now()
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	sum := sha256.Sum256([]byte(id))
	body, err := json.Marshal(map[string]any{
		"envVars": map[string]string{}, "restored": b.from != "" && b.source == "memory", "channelSHA256": hex.EncodeToString(sum[:]), "defaultUser": "user",
		"sandboxID": id, "templateID": "soak", "timestamp": time.Now().UTC(),
	})
	if err != nil {
		return err
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		err := b.init(ctx, id, key, body, func(took time.Duration) {
			p.dials++
			p.dial, p.dialed = took, time.Since(begin)
		})
		if err == nil || !errors.Is(err, sandbox.ErrPortClosed) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

func (b *bench) init(ctx context.Context, id, key string, body []byte, dialed func(time.Duration)) error {
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://guest/init", bytes.NewReader(body))
	if err != nil {
		return err
	}
	q.Header.Set(sandbox.ChannelHeader, key)
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			begin := time.Now()
			c, err := b.wall.Dial(ctx, id, sandbox.GuestPort)
			dialed(time.Since(begin))
			return c, err
		},
	}}
	a, err := client.Do(q)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	said, err := io.ReadAll(io.LimitReader(a.Body, 1<<20))
	if a.StatusCode != http.StatusNoContent {
		return fmt.Errorf("status %d: %q", a.StatusCode, said)
	}
	return err
}

// collect writes down what a sandbox that hangs is doing.
func (b *bench) collect(ctx context.Context, id, key, dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	var errs []error
	put := func(name string, content []byte, err error) {
		if err != nil {
			content = fmt.Appendf(content, "\nerror: %v\n", err)
		}
		errs = append(errs, os.WriteFile(filepath.Join(dir, name), content, 0o600))
	}
	threads, err := b.threads(id)
	put("threads.txt", threads, err)
	stacks, err := b.call(ctx, id, "debug.Stacks", struct{}{})
	put("stacks.txt", stacks, err)
	procs, err := b.call(ctx, id, "containerManager.Processes", id)
	put("processes.json", procs, err)
	said, err := os.ReadFile(filepath.Join(b.state, id, "guest.log"))
	put("guest.log", said, err)
	// Is it the one connection, or all? A second one, and a third after a pause.
	for i := range 3 {
		err := b.ask(ctx, id, key, 10*time.Second)
		put(fmt.Sprintf("again-%d.txt", i), fmt.Appendf(nil, "%v\n", err), nil)
		if err == nil {
			break
		}
	}
	stacks, err = b.call(ctx, id, "debug.Stacks", struct{}{})
	put("stacks-later.txt", stacks, err)
	threads, err = b.threads(id)
	put("threads-later.txt", threads, err)
	// Go programs answer SIGQUIT with the stacks of their goroutines.
	_, err = b.call(ctx, id, "containerManager.Signal", map[string]any{"CID": id, "Signo": int(unix.SIGQUIT), "PID": 0, "Mode": 3})
	time.Sleep(5 * time.Second)
	said, rerr := os.ReadFile(filepath.Join(b.state, id, "guest.log"))
	put("guest-quit.log", said, errors.Join(err, rerr))
	stacks, err = b.call(ctx, id, "debug.Stacks", struct{}{})
	put("stacks-quit.txt", stacks, err)
	return errors.Join(errs...)
}

// threads describes each thread of a sandbox on the host.
func (b *bench) threads(id string) ([]byte, error) {
	var out bytes.Buffer
	procs, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		return nil, err
	}
	for _, p := range procs {
		g, err := os.ReadFile(p)
		if err != nil || !strings.Contains(string(g), id) {
			continue
		}
		proc := filepath.Dir(p)
		cmd, _ := os.ReadFile(filepath.Join(proc, "cmdline"))
		fmt.Fprintf(&out, "=== %s %.200q\n", proc, strings.ReplaceAll(string(cmd), "\x00", " "))
		tasks, _ := filepath.Glob(filepath.Join(proc, "task", "*"))
		for _, t := range tasks {
			fmt.Fprintf(&out, "--- %s\n", t)
			for _, f := range []string{"comm", "wchan", "syscall", "stack", "status", "schedstat"} {
				c, err := os.ReadFile(filepath.Join(t, f))
				if err != nil {
					c = []byte(err.Error())
				}
				if f == "status" {
					c = []byte(chosen(string(c)))
				}
				fmt.Fprintf(&out, "%s: %s\n", f, bytes.TrimSpace(c))
			}
		}
	}
	return out.Bytes(), nil
}

// chosen are the lines of a status that say what a thread does.
func chosen(status string) string {
	var out []string
	for l := range strings.Lines(status) {
		for _, p := range []string{"State", "Tgid", "TracerPid", "Sig", "Shd", "voluntary", "nonvoluntary", "Uid"} {
			if strings.HasPrefix(l, p) {
				out = append(out, strings.TrimSpace(l))
			}
		}
	}
	return strings.Join(out, "; ")
}

// call speaks to a sandbox's kernel on its control socket.
func (b *bench) call(ctx context.Context, id, method string, arg any) ([]byte, error) {
	dir, err := os.Open(filepath.Join(b.state, id))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	conn, err := (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(int(dir.Fd()))+"/runsc-"+id+".sock")
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return nil, err
	}
	q, err := json.Marshal(map[string]any{"method": method, "arg": arg})
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(q); err != nil {
		return nil, err
	}
	var reply struct {
		Success bool            `json:"success"`
		Err     string          `json:"err"`
		Result  json.RawMessage `json:"result"`
	}
	if err := json.NewDecoder(io.LimitReader(conn, 16<<20)).Decode(&reply); err != nil {
		return nil, err
	}
	if !reply.Success {
		return nil, errors.New(reply.Err)
	}
	var text string
	if json.Unmarshal(reply.Result, &text) == nil {
		return []byte(text), nil
	}
	return reply.Result, nil
}
