package guest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"postern/internal/guest/processpb"
)

const (
	chunk = 32 << 10 // bytes of output in one event
	queue = 4        // events that wait for a client before the process does
)

// A process was started by a client. It is the leader of a session and process
// group of its own, so their number is its PID.
//
//	running ── exited ── ended
//
// It has exited when its main process has. It has ended when, in addition, no
// process holds its output any more: only then is there nothing left to send, and
// the end event is sent. A background process with the output attached keeps it in
// state exited, as in E2B's own guest.
type process struct {
	pid    int
	config *processpb.ProcessConfig
	tag    *string

	input   *os.File      // pipe or terminal to write to; nil if there is none
	writing chan struct{} // mutex for input that can be waited for with a context
	tty     *os.File      // master of the terminal; nil if there is none
	outputs []output

	mu     sync.Mutex
	kill   *time.Timer // fires at the deadline of the call that started it; nil if there is none
	subs   map[*subscriber]struct{}
	exited bool
	oom    bool // the guest killed one of its processes for memory
	end    *processpb.ProcessEvent_EndEvent
	signum int // signal that ended it; 0 if none
}

// An output is a stream that a process writes to.
type output struct {
	file *os.File
	wrap func([]byte) *processpb.ProcessEvent_DataEvent
}

// A subscriber is a client that is attached to a process.
type subscriber struct {
	events chan *processpb.ProcessEvent
	left   chan struct{} // closed when the client has disconnected
}

// A start is the description of a process to start.
type start struct {
	config   *processpb.ProcessConfig
	tag      *string
	account  account
	env      []string
	dir      string
	stdin    bool
	size     *pty.Winsize // size of the terminal; nil means pipes
	deadline time.Time    // when to kill it; zero means never
	exited   func()       // called when it has exited; nil for none. No held shell is used then.
	plain    bool         // no held shell is used: the kernel must see the command when it asks
	// cancelled is closed when the client no longer wants the process. In a bound guest it
	// ends the wait for a command that is held. Nil means never.
	cancelled <-chan struct{}
}

// launch starts a process with a first subscriber attached, who gets all of its
// output.
func (s *Server) launch(st start) (*process, *subscriber, error) {
	// The guest forks as root, to which RLIMIT_NPROC does not apply.
	s.bound.mu.RLock()
	unlock := sync.OnceFunc(s.bound.mu.RUnlock)
	defer unlock()
	v, err := s.viewLocked()
	if err != nil {
		return nil, nil, err
	}
	begin, asUser := os.StartProcess, as
	if v != nil {
		// A bound guest ignores the user that the client asks for, see view.go.
		begin, asUser, st.account = v.start, v.as, v.account
	}
	if most := or(s.bound.processes, s.conf.MaxProcesses); most > 0 && int64(s.table.count()) >= most {
		return nil, nil, startError(unix.EAGAIN, most)
	}
	kind, text, holdable := kindOf(st)
	holdable = holdable && st.exited == nil && v == nil && !st.plain
	next := func() {} // starts the shell of the next command
	if holdable {
		next = func() { s.holdShell(kind) }
		// The timer is for commands that run longer. It starts nothing after a shell
		// has been started at the end of this one.
		defer time.AfterFunc(holdDelay, next)
		if h := s.takeShell(&kind); h != nil && h.run(text) == nil {
			h.p.config, h.p.tag = st.config, st.tag
			return h.p, s.follow(h.p, h.child, st, next), nil
		}
	}
	path := st.config.GetCmd()
	if !strings.Contains(path, "/") {
		if path, err = findCommand(st, asUser); err != nil {
			return nil, nil, err
		}
	}
	p := &process{config: st.config, tag: st.tag, subs: map[*subscriber]struct{}{}, writing: make(chan struct{}, 1)}
	attr := &os.ProcAttr{Dir: st.dir, Env: st.env, Sys: &syscall.SysProcAttr{
		Setsid:     true,
		Credential: &syscall.Credential{Uid: st.account.uid, Gid: st.account.gid, Groups: st.account.more},
	}}
	theirs, err := p.open(st)
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
	}()
	if err != nil {
		p.close()
		return nil, nil, fmt.Errorf("open input and output: %w", err)
	}
	if p.tty != nil {
		attr.Files = []*os.File{theirs[0], theirs[0], theirs[0]}
		attr.Sys.Setctty, attr.Sys.Ctty = true, 0
	} else {
		attr.Files = theirs
	}
	fork := func(path string, argv []string) (*os.Process, error) {
		if v == nil || !v.starter {
			return begin(path, argv, attr)
		}
		return startHeld(st.cancelled, begin, unlock, path, argv, *attr)
	}
	child, err := fork(path, append([]string{st.config.GetCmd()}, st.config.GetArgs()...))
	if errors.Is(err, fs.ErrNotExist) {
		var shell string
		if shell, err = otherShell(st.config.GetCmd()); err == nil {
			child, err = fork(shell, append([]string{shell}, st.config.GetArgs()...))
		} else if !errors.Is(err, errNoShell) {
			err = fmt.Errorf("%s: %w", path, unix.ENOENT)
		}
	}
	if err != nil {
		p.close()
		// Check only after a failure: checking before would cost time at every
		// start.
		if derr := asUser(st.account, func() error { return checkDir(st.dir) }); derr != nil {
			return nil, nil, derr
		}
		if errors.Is(err, errNoShell) {
			return nil, nil, err
		}
		return nil, nil, startError(err, s.conf.MaxProcesses)
	}
	p.pid = child.Pid
	return p, s.follow(p, child, st, next), nil
}

// follow attaches the first subscriber to a process that has been started, waits for
// its end and then calls next.
func (s *Server) follow(p *process, child *os.Process, st start, next func()) *subscriber {
	sub := p.subscribe()
	if !st.deadline.IsZero() {
		p.expire(time.Until(st.deadline))
	}
	s.table.add(p)
	begin := time.Now()
	s.logStart(p, st.account)
	go func() {
		p.wait(child, st.exited)
		s.table.ended(p)
		s.logEnd(p, time.Since(begin))
		next()
	}()
	return sub
}

// open creates the pipes or the terminal of a process and returns the process's
// ends.
func (p *process) open(st start) (theirs []*os.File, err error) {
	if st.size != nil {
		master, slave, err := openTerminal()
		if err != nil {
			return nil, err
		}
		p.tty, p.input = master, master
		p.outputs = []output{{master, func(b []byte) *processpb.ProcessEvent_DataEvent {
			return &processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Pty{Pty: b}}
		}}}
		theirs = []*os.File{slave}
		// The user must own it: programs that ask for a password open it again by
		// name.
		return theirs, errors.Join(slave.Chown(int(st.account.uid), -1), pty.Setsize(master, st.size))
	}
	if st.stdin {
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		theirs = append(theirs, r)
		p.input = w
	} else {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return nil, err
		}
		theirs = append(theirs, null)
	}
	for _, wrap := range []func([]byte) *processpb.ProcessEvent_DataEvent{
		func(b []byte) *processpb.ProcessEvent_DataEvent {
			return &processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Stdout{Stdout: b}}
		},
		func(b []byte) *processpb.ProcessEvent_DataEvent {
			return &processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Stderr{Stderr: b}}
		},
	} {
		r, w, err := os.Pipe()
		if err != nil {
			return theirs, err
		}
		theirs = append(theirs, w)
		p.outputs = append(p.outputs, output{r, wrap})
	}
	return theirs, nil
}

// openTerminal opens a terminal whose master supports read deadlines; the one of
// package pty does not.
func openTerminal() (master, slave *os.File, err error) {
	blocking, slave, err := pty.Open()
	if err != nil {
		return nil, nil, err
	}
	defer blocking.Close()
	fd, err := unix.FcntlInt(blocking.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		slave.Close()
		return nil, nil, err
	}
	return os.NewFile(uintptr(fd), "ptmx"), slave, nil
}

// checkDir returns the reason why a process cannot start in a directory, with the
// user's rights.
func checkDir(dir string) error {
	switch fi, err := os.Stat(dir); {
	case errors.Is(err, fs.ErrNotExist):
		return invalid("cwd '%s' does not exist", dir)
	case err != nil:
		return err
	case !fi.IsDir():
		return invalid("cwd '%s' is not a directory", dir)
	}
	return nil
}

// findCommand looks up a program in PATH with the user's rights.
func findCommand(st start, as func(account, func() error) error) (path string, err error) {
	err = as(st.account, func() error {
		if err := checkDir(st.dir); err != nil {
			return err
		}
		cmd := st.config.GetCmd()
		for _, kv := range st.env {
			if list, ok := strings.CutPrefix(kv, "PATH="); ok {
				for _, dir := range filepath.SplitList(list) {
					p := filepath.Join(dir, cmd)
					if fi, err := os.Stat(p); err == nil && fi.Mode().IsRegular() && fi.Mode()&0o111 != 0 && filepath.IsAbs(p) {
						path = p
						return nil
					}
				}
			}
		}
		return invalid("command '%s' is not in PATH", cmd)
	})
	return path, err
}

func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}

// startError converts the error of a failed fork or exec for the client.
func startError(err error, max int64) error {
	switch {
	case errors.Is(err, unix.EAGAIN) && max > 0:
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("the sandbox is at its limit of %d processes and threads", max))
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("start process: %w", err))
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOEXEC), errors.Is(err, unix.E2BIG):
		return invalid("start process: %w", err)
	}
	return fmt.Errorf("start process: %w", err)
}

// close closes our ends of input and output.
func (p *process) close() {
	for _, o := range p.outputs {
		o.file.Close()
	}
	if p.input != nil {
		p.input.Close() // also wakes a blocked writer
	}
}

// wait waits for the end of the process, and calls exited, unless it is nil, when it
// has exited.
func (p *process) wait(child *os.Process, exited func()) {
	var readers sync.WaitGroup
	for _, o := range p.outputs {
		readers.Go(func() { p.pump(o) })
	}
	state, err := child.Wait()
	p.mu.Lock()
	p.exited = true
	if p.kill != nil {
		p.kill.Stop()
	}
	p.mu.Unlock()
	if exited != nil {
		exited()
	}
	if p.tty != nil {
		// A terminal does not report that all writers have closed it. So read what
		// is in it, then close it, which hangs up on the remaining processes.
		p.drain()
	}
	readers.Wait()
	p.finish(state, err)
	p.close()
}

// clockStep is the most that a pause of the sandbox counts against a deadline.
const clockStep = time.Second

// expire kills the process at its deadline. As in E2B, time in which the sandbox is
// paused does not count: a command with a minute left before a pause of an hour has
// a minute left after it. But all clocks in gVisor jump over a pause, also the
// monotonic one. So the time is measured in steps, and a step that took far too
// long counts as one.
func (p *process) expire(left time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.exited {
		return
	}
	begin, step := time.Now(), min(left, clockStep)
	p.kill = time.AfterFunc(step, func() {
		if left := left - ranFor(time.Since(begin), step); left > 0 {
			p.expire(left)
			return
		}
		_ = p.signal(unix.SIGKILL)
	})
}

// ranFor returns how long the sandbox ran while elapsed passed on the clock and a
// timer was set to step. A busy machine may be late by a few seconds.
func ranFor(elapsed, step time.Duration) time.Duration {
	if elapsed > step+5*time.Second {
		return step
	}
	return elapsed
}

// pump sends the output of the process to its clients. It reads on only when every
// client has room, so that the guest buffers a bounded amount and the process waits
// for its slowest reader, as with a pipe. Output without clients is dropped, since
// the process must not block.
func (p *process) pump(o output) {
	buf := make([]byte, chunk)
	for {
		n, err := o.file.Read(buf)
		if n > 0 {
			p.mu.Lock()
			any := len(p.subs) > 0
			p.mu.Unlock()
			if any {
				data := append([]byte(nil), buf[:n]...)
				p.publish(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Data{Data: o.wrap(data)}})
			}
		}
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return // EOF, or EIO from a terminal that hung up
		}
		p.mu.Lock()
		exited := p.exited
		p.mu.Unlock()
		if p.tty != nil && exited {
			if err != nil {
				return // the terminal has been drained
			}
			p.drain()
		}
	}
}

// drain stops the terminal's reader once it has had nothing to read for a moment.
func (p *process) drain() {
	if p.tty.SetReadDeadline(time.Now().Add(50*time.Millisecond)) != nil {
		p.tty.Close()
	}
}

// publish waits until all attached clients have received ev or disconnected.
func (p *process) publish(ev *processpb.ProcessEvent) {
	p.mu.Lock()
	subs := make([]*subscriber, 0, len(p.subs))
	for s := range p.subs {
		subs = append(subs, s)
	}
	p.mu.Unlock()
	for _, s := range subs {
		s.send(ev)
	}
}

// send passes an event to the client. It blocks until the client has room or has
// disconnected.
func (s *subscriber) send(ev *processpb.ProcessEvent) {
	select {
	case s.events <- ev:
	case <-s.left:
	}
}

// subscribe attaches a client. Its events end with the end event, which comes at
// once if the process has ended.
func (p *process) subscribe() *subscriber {
	s := &subscriber{events: make(chan *processpb.ProcessEvent, queue), left: make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.end != nil {
		s.events <- endEvent(p.end)
		return s
	}
	p.subs[s] = struct{}{}
	return s
}

// unsubscribe detaches a client. The process continues.
func (p *process) unsubscribe(s *subscriber) {
	p.mu.Lock()
	delete(p.subs, s)
	p.mu.Unlock()
	close(s.left)
}

// ended returns the end event, or nil if the process has not ended.
func (p *process) ended() *processpb.ProcessEvent_EndEvent {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.end
}

// endSignal returns the signal that ended the process, or 0 if none has.
func (p *process) endSignal() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.signum
}

func endEvent(e *processpb.ProcessEvent_EndEvent) *processpb.ProcessEvent {
	return &processpb.ProcessEvent{Event: &processpb.ProcessEvent_End{End: e}}
}

// finish sends the end event to all clients, and keeps it for later ones.
func (p *process) finish(state *os.ProcessState, err error) {
	e := &processpb.ProcessEvent_EndEvent{ExitCode: -1}
	message := ""
	switch {
	case err != nil:
		e.Status, message = "unknown", err.Error()
	default:
		e.ExitCode, e.Exited, e.Status = int32(state.ExitCode()), state.Exited(), state.String()
		if !state.Success() {
			message = e.Status
		}
	}
	p.mu.Lock()
	if p.oom && message != "" {
		message = "out of memory"
	}
	if message != "" {
		e.Error = &message
	}
	if err == nil {
		if w, ok := state.Sys().(syscall.WaitStatus); ok && w.Signaled() {
			p.signum = int(w.Signal())
		}
	}
	p.end = e
	subs := p.subs
	p.subs = nil
	p.mu.Unlock()
	for s := range subs {
		s.send(endEvent(e))
	}
}

var (
	errGone    = errors.New("the process has ended")
	errNoInput = errors.New("the process was started without input, or its input is closed")
)

// signal signals the process group. A shell's children would otherwise continue and
// keep its output open. A kill of a terminal reaches all of its session: a shell with job
// control puts each job into a group of its own, and the attack is a job in the background
// that outlives the person's right.
func (p *process) signal(sig unix.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.end != nil {
		return errGone
	}
	if sig == unix.SIGKILL && p.tty != nil {
		killSession(p.pid)
	}
	if err := unix.Kill(-p.pid, sig); errors.Is(err, unix.ESRCH) {
		return errGone
	} else if err != nil {
		return fmt.Errorf("signal process %d: %w", p.pid, err)
	}
	return nil
}

// killSession kills the processes of a session but its first, whose ID it has: while that
// lives, no other session has the ID. What has left the session goes on.
func killSession(leader int) {
	for range 20 { // a process may start others while the list is read
		found := false
		procs, _ := readProcs("/proc") // what cannot be read goes on
		for _, p := range procs {
			if p.session == leader && p.pid != leader && !p.dead && unix.Kill(p.pid, unix.SIGKILL) == nil {
				found = true
			}
		}
		if !found {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// write writes to the process's input. It blocks while the process does not read,
// until ctx is done.
func (p *process) write(ctx context.Context, b []byte) error {
	if err := p.takeInput(ctx); err != nil {
		return err
	}
	defer func() { <-p.writing }()
	stop := context.AfterFunc(ctx, func() { _ = p.input.SetWriteDeadline(time.Unix(1, 0)) })
	_, err := p.input.Write(b)
	if !stop() {
		_ = p.input.SetWriteDeadline(time.Time{})
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, unix.EPIPE), errors.Is(err, os.ErrClosed), errors.Is(err, unix.EIO):
		return errNoInput
	}
	return fmt.Errorf("write to process %d: %w", p.pid, err)
}

// takeInput locks the input for writing. The caller unlocks it.
func (p *process) takeInput(ctx context.Context) error {
	if p.input == nil {
		return errNoInput
	}
	select {
	case p.writing <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// closeInput closes the input after the current write. Closing it twice is not an
// error.
func (p *process) closeInput(ctx context.Context) error {
	if err := p.takeInput(ctx); err != nil {
		return err
	}
	p.input.Close()
	<-p.writing
	return nil
}
