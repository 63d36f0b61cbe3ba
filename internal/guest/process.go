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
	queue = 4        // events that wait for a client before the process has to
)

// A process is one that a client started. It is in a session and process group
// of its own, whose number is its pid.
//
//	running ── exited ── ended
//
// It has exited when its main process has, and ended when in addition nobody
// holds its output any more: only then is there nothing left to tell, and the
// end event is sent. (What was put into the background with its output
// attached keeps it exited, as with E2B's own guest.)
type process struct {
	pid    int
	config *processpb.ProcessConfig
	tag    *string

	input   *os.File      // the pipe or terminal to write to, nil without one
	writing chan struct{} // holds one token while somebody writes to input
	tty     *os.File      // the terminal's master, nil without one
	outputs []output

	mu     sync.Mutex
	kill   *time.Timer // for the deadline of the call that started it; nil without one
	subs   map[*subscriber]struct{}
	exited bool
	oom    bool // the guest killed one of its processes for memory
	end    *processpb.ProcessEvent_EndEvent
}

// An output is one of the streams that a process writes to.
type output struct {
	file *os.File
	wrap func([]byte) *processpb.ProcessEvent_DataEvent
}

// A subscriber is a client that is attached to a process.
type subscriber struct {
	events chan *processpb.ProcessEvent
	left   chan struct{} // closed when the client has gone
}

// A start says what to run, as whom, and with what.
type start struct {
	config   *processpb.ProcessConfig
	tag      *string
	account  account
	env      []string
	dir      string
	stdin    bool
	size     *pty.Winsize // a terminal of this size; nil for pipes
	deadline time.Time    // when to kill it; zero for never
}

// launch starts a process with its first subscriber attached, so that the
// client misses nothing.
func (s *Server) launch(st start) (*process, *subscriber, error) {
	// The guest forks as root, which RLIMIT_NPROC does not bind.
	if most := s.conf.MaxProcesses; most > 0 && int64(s.table.count()) >= most {
		return nil, nil, startError(unix.EAGAIN, most)
	}
	path := st.config.GetCmd()
	if !strings.Contains(path, "/") {
		var err error
		if path, err = findCommand(st); err != nil {
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
	child, err := os.StartProcess(path, append([]string{st.config.GetCmd()}, st.config.GetArgs()...), attr)
	if err != nil {
		p.close()
		// Only now: to look before is an error less in a hundred starts, and time
		// in each.
		if derr := as(st.account, func() error { return checkDir(st.dir) }); derr != nil {
			return nil, nil, derr
		}
		return nil, nil, startError(err, s.conf.MaxProcesses)
	}
	p.pid = child.Pid
	sub := p.subscribe()
	if !st.deadline.IsZero() {
		p.expire(time.Until(st.deadline))
	}
	s.table.add(p)
	begin := time.Now()
	s.logStart(p, st.account)
	go func() {
		p.wait(child)
		s.table.ended(p)
		s.logEnd(p, time.Since(begin))
	}()
	return p, sub, nil
}

// open makes the pipes or the terminal of a process and returns its ends.
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
		// Its user may open it again by name, as programs that ask for a
		// password do.
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

// openTerminal makes a terminal whose master's reads can be given a deadline:
// the one of package pty blocks.
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

// checkDir says what is wrong with a directory to start in, with the rights of
// who asks.
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

// findCommand returns the path of a program that is in PATH, with the rights of
// who will run it.
func findCommand(st start) (path string, err error) {
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

// startError says what a failed fork or exec means for the client.
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

// close closes our ends.
func (p *process) close() {
	for _, o := range p.outputs {
		o.file.Close()
	}
	if p.input != nil {
		p.input.Close() // also wakes whoever is writing
	}
}

// wait sees the process to its end.
func (p *process) wait(child *os.Process) {
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
	if p.tty != nil {
		// A terminal has no end that tells us that nobody writes any more. What
		// is in it is read, then it is closed and hangs up on who is left.
		p.drain()
	}
	readers.Wait()
	p.finish(state, err)
	p.close()
}

// clockStep is the most that a pause of the sandbox takes from a deadline.
const clockStep = time.Second

// expire kills the process when it has run for as long as it may. The time in
// which the sandbox is paused does not count, as it does not with E2B: a
// command with a minute to go that is paused for an hour has a minute to go. But
// gVisor's clocks, also the monotonic one, jump over the pause. So the time is
// taken in steps, and a step that took far longer than it should counts as one.
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

// ranFor is for how long the sandbox ran while elapsed passed on the clock and
// a timer was set to step. A busy machine may be late by some seconds.
func ranFor(elapsed, step time.Duration) time.Duration {
	if elapsed > step+5*time.Second {
		return step
	}
	return elapsed
}

// pump hands on what the process writes. It reads no more until every attached
// client has room: so the guest holds a bounded amount and the process waits
// for its slowest reader, as it would on a pipe. Without clients what is
// written is dropped: the process must go on.
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
				return // drained
			}
			p.drain()
		}
	}
}

// drain lets the terminal's reader stop when it has nothing to read for a
// moment.
func (p *process) drain() {
	if p.tty.SetReadDeadline(time.Now().Add(50*time.Millisecond)) != nil {
		p.tty.Close()
	}
}

// publish waits until all attached clients have taken ev or gone.
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

func (s *subscriber) send(ev *processpb.ProcessEvent) {
	select {
	case s.events <- ev:
	case <-s.left:
	}
}

// subscribe attaches a client. The events end with the end event, at once if
// the process has ended already.
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

// unsubscribe detaches a client. The process goes on.
func (p *process) unsubscribe(s *subscriber) {
	p.mu.Lock()
	delete(p.subs, s)
	p.mu.Unlock()
	close(s.left)
}

// ended returns how the process has ended, nil if it has not.
func (p *process) ended() *processpb.ProcessEvent_EndEvent {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.end
}

func endEvent(e *processpb.ProcessEvent_EndEvent) *processpb.ProcessEvent {
	return &processpb.ProcessEvent{Event: &processpb.ProcessEvent_End{End: e}}
}

// finish tells all attached clients, and those who attach later, the end.
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

// signal signals the process and all of its group: a shell's children too, who
// would otherwise go on and hold its output.
func (p *process) signal(sig unix.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.end != nil {
		return errGone
	}
	if err := unix.Kill(-p.pid, sig); errors.Is(err, unix.ESRCH) {
		return errGone
	} else if err != nil {
		return fmt.Errorf("signal process %d: %w", p.pid, err)
	}
	return nil
}

// write writes to the process's input. It waits while the process does not
// read, until ctx is done.
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

// takeInput waits until nobody else writes. The caller gives the token back.
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

// closeInput lets the process read the end of its input, after what is being
// written. Closing it twice is not an error.
func (p *process) closeInput(ctx context.Context) error {
	if err := p.takeInput(ctx); err != nil {
		return err
	}
	p.input.Close()
	<-p.writing
	return nil
}
