package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
)

// A gate is the host's end of the socket on which the kernel of a sandbox asks before it
// starts a program, see [launch.Event]. One goroutine reads the socket. Each question is
// answered in a goroutine of its own, so that one that waits for a person delays no other.
//
// The kernel may be compromised: its messages are bounded and parsed as hostile. A
// compromised kernel can start programs without asking, and the gate cannot prevent that;
// the rest of the isolation does not depend on the gate.
type gate struct {
	conn    *net.UnixConn
	buffers *sync.Pool    // of *[launch.MaxEvent]byte
	greeted chan struct{} // closed when the kernel has said hello
	done    chan struct{} // closed when read has returned
	err     error         // why read returned, once done is closed; io.EOF if the kernel closed its end
	ctx     context.Context
	cancel  context.CancelFunc

	mu      sync.Mutex
	w       sandbox.Watcher // nil allows everything
	asked   map[uint64]question
	bytes   int                      // size of all questions in asked
	last    uint64                   // ID of the last command
	waiting map[uint64]chan struct{} // commands that the kernel has not carried out yet
	// skip is the ID of an [launch.Again] that the kernel has not carried out yet; 0 means
	// none. Until then questions are ignored, since the kernel will repeat them.
	skip uint64
}

// A question is an exec that waits for its verdict.
type question struct {
	cancel   context.CancelFunc
	size     int           // size of its message in bytes
	answered chan struct{} // closed when the watcher has answered
}

// Limits of the questions of one sandbox that wait at the same time. Questions beyond them
// are refused.
const (
	maxAsked      = 512
	maxAskedBytes = 16 << 20
)

func newGateBuffer() any { return new([launch.MaxEvent]byte) }

// gateBuffer is the size in bytes of the socket's buffer towards the host. It must hold a
// whole message, and has room for more so that bursts do not block.
const gateBuffer = 512 << 10

// reasonRecord is the reason of the end of a sandbox whose gate was closed or sent a
// malformed message.
const reasonRecord = "the record of its commands was lost"

// newGate creates a gate. The caller closes theirs, the sandbox's end, after handing it
// over.
func (r *Runtime) newGate(w sandbox.Watcher) (g *gate, theirs *os.File, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make gate: %w", err)
	}
	ours := os.NewFile(uintptr(pair[0]), "gate")
	theirs = os.NewFile(uintptr(pair[1]), "gate-end")
	defer ours.Close()
	// This needs CAP_NET_ADMIN, which root in a container may lack. The default size is
	// enough for one message.
	_ = unix.SetsockoptInt(pair[1], unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, gateBuffer)
	const least = launch.MaxEvent + 1024
	n, err := unix.GetsockoptInt(pair[1], unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err == nil && n < least {
		err = fmt.Errorf("its buffer has %d bytes, want %d: raise net.core.wmem_default", n, least)
	}
	if err != nil {
		theirs.Close()
		return nil, nil, fmt.Errorf("make gate: %w", err)
	}
	if g, err = r.openGate(ours, w); err != nil {
		theirs.Close()
		return nil, nil, err
	}
	go g.read()
	return g, theirs, nil
}

// openGate returns a gate that uses a duplicate of ours, the host's end. The caller starts
// read.
func (r *Runtime) openGate(ours *os.File, w sandbox.Watcher) (*gate, error) {
	c, err := net.FileConn(ours)
	if err != nil {
		return nil, fmt.Errorf("open gate: %w", err)
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("open gate: it is not a Unix socket")
	}
	g := &gate{
		conn: conn, buffers: &r.buffers, w: w, greeted: make(chan struct{}), done: make(chan struct{}),
		asked: map[uint64]question{}, waiting: map[uint64]chan struct{}{},
	}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	return g, nil
}

// close closes the host's end and cancels all questions.
func (g *gate) close() {
	g.cancel()
	_ = g.conn.Close() // no unsent data matters
}

// setWatcher makes w answer the questions from now on.
func (g *gate) setWatcher(w sandbox.Watcher) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.w = w
}

// awaitHello waits for the kernel's hello. It shows that the sandbox has a gate: gVisor
// starts a sandbox even if it could not create one.
func (g *gate) awaitHello(ctx context.Context) error {
	select {
	case <-g.greeted:
		return nil
	case <-g.done:
		return fmt.Errorf("open gate: %w", g.err)
	case <-ctx.Done():
		return fmt.Errorf("open gate: %w", context.Cause(ctx))
	}
}

// read reads events until the gate is closed.
func (g *gate) read() {
	defer close(g.done)
	defer g.cancel()
	raw, err := g.conn.SyscallConn()
	for err == nil {
		var e launch.Event
		var n int
		if e, n, err = g.next(raw); err == nil {
			err = g.handle(e, n)
		}
	}
	g.err = err
}

// next reads one event and returns it with its size in bytes. It holds no buffer while it
// waits, because most sandboxes are idle.
func (g *gate) next(raw syscall.RawConn) (e launch.Event, n int, err error) {
	rerr := raw.Read(func(fd uintptr) bool {
		b := g.buffers.Get().(*[launch.MaxEvent]byte) //nolint:forcetypeassert // the pool holds nothing else
		defer g.buffers.Put(b)
		var flags int
		// No buffer for control messages: descriptors that the sandbox sends are dropped.
		n, _, flags, _, err = unix.Recvmsg(int(fd), b[:], nil, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR):
			return errors.Is(err, unix.EINTR)
		case err != nil:
		case n == 0:
			err = io.EOF
		case flags&unix.MSG_TRUNC != 0:
			err = errors.New("a message is too long")
		default:
			e, err = launch.ParseEvent(b[:n])
		}
		return true
	})
	if rerr != nil {
		return e, 0, fmt.Errorf("read gate: %w", rerr)
	}
	if errors.Is(err, unix.EINTR) {
		return g.next(raw)
	}
	return e, n, err
}

// handle processes an event of n bytes.
func (g *gate) handle(e launch.Event, n int) error {
	select {
	case <-g.greeted:
	default:
		if e.Kind != launch.Hello {
			return errors.New("the first message is not a hello")
		}
		close(g.greeted)
		return nil
	}
	g.mu.Lock()
	w := g.w
	g.mu.Unlock()
	switch e.Kind {
	case launch.Hello:
		return errors.New("a second hello")
	case launch.Exec:
		g.ask(w, e, n)
	case launch.GiveUp:
		g.mu.Lock()
		if q, ok := g.asked[e.ID]; ok {
			q.cancel() // the goroutine that answers it removes it
		}
		g.mu.Unlock()
	case launch.Done:
		g.mu.Lock()
		if g.skip == e.ID {
			g.skip = 0
		}
		if c := g.waiting[e.ID]; c != nil {
			delete(g.waiting, e.ID)
			close(c)
		}
		g.mu.Unlock()
	case launch.Exit:
		if w != nil {
			w.Exited(exitOf(e))
		}
	case launch.Open:
		if w != nil {
			w.Opened(sandbox.Open{PID: e.PID, Path: e.Path, Err: int(e.Code), Time: time.Now()})
		}
	case launch.File:
		if w != nil {
			w.Opened(sandbox.Open{PID: e.PID, Op: e.Name, Path: e.Path, To: e.Dir, Err: int(e.Code), Time: time.Now()})
		}
	case launch.Missed:
		if w != nil {
			w.Missed(e.ID)
		}
	}
	return nil
}

// exitOf decodes the wait status of an exit event.
func exitOf(e launch.Event) sandbox.Exit {
	x := sandbox.Exit{PID: e.PID, Time: time.Now()}
	if ws := unix.WaitStatus(e.Code); ws.Signaled() {
		x.Signal = int(ws.Signal())
		x.Code = 128 + x.Signal
	} else {
		x.Code = ws.ExitStatus()
	}
	return x
}

// ask passes an exec to the watcher, and sends the verdict to the kernel.
func (g *gate) ask(w sandbox.Watcher, e launch.Event, n int) {
	ctx, cancel := context.WithCancel(g.ctx)
	g.mu.Lock()
	_, twice := g.asked[e.ID]
	full := len(g.asked) >= maxAsked || g.bytes+n > maxAskedBytes
	if twice || g.skip != 0 || full {
		skip := twice || g.skip != 0
		g.mu.Unlock()
		cancel()
		if skip {
			return // it is being answered already, or will be repeated
		}
		// The attack: a sandbox floods the host with questions to use up its memory.
		if w != nil {
			w.Missed(1)
		}
		g.answer(e.ID, false)
		return
	}
	answered := make(chan struct{})
	g.asked[e.ID] = question{cancel, n, answered}
	g.bytes += n
	g.mu.Unlock()
	go func() {
		defer cancel()
		allow := w == nil || w.Exec(ctx, sandbox.Exec{
			PID: e.PID, Parent: e.Parent, Path: e.Path, Name: e.Name, Dir: e.Dir, Args: e.Args, Env: e.Env,
			SHA256: e.SHA256, Fixed: e.Fixed, UID: e.UID, Cut: e.Cut, Guest: e.Guest, Time: time.Now(),
		})
		close(answered)
		// The attack: a kernel floods the host with questions and reads no verdict. So a
		// question counts until its verdict is written.
		g.answer(e.ID, allow)
		g.mu.Lock()
		delete(g.asked, e.ID)
		g.bytes -= n
		g.mu.Unlock()
	}()
}

// answer sends a verdict to the kernel. An error is ignored: it means that the gate is
// closed, and then the sandbox has ended or is being ended.
func (g *gate) answer(id uint64, allow bool) {
	_, _ = g.conn.Write(launch.Command{Kind: launch.Verdict, ID: id, Allow: allow}.Append(nil))
}

// command sends a command and waits until the kernel has carried it out. If begin is not
// nil, it is called with the command's ID before the command is sent.
func (g *gate) command(ctx context.Context, c launch.Command, begin func(id uint64)) error {
	done := make(chan struct{})
	g.mu.Lock()
	g.last++
	c.ID = g.last
	g.waiting[c.ID] = done
	if begin != nil {
		begin(c.ID)
	}
	g.mu.Unlock()
	if _, err := g.conn.Write(c.Append(nil)); err != nil {
		return fmt.Errorf("tell sandbox: %w", err)
	}
	select {
	case <-done:
		return nil
	case <-g.done:
		return fmt.Errorf("tell sandbox: %w", g.err)
	case <-ctx.Done():
		return fmt.Errorf("tell sandbox: %w", context.Cause(ctx))
	}
}

// watchGate ends a sandbox that goes on after its gate was closed.
func (i *instance) watchGate(r *Runtime, g *gate) {
	<-g.done
	if errors.Is(g.err, io.EOF) || errors.Is(g.err, net.ErrClosed) || errors.Is(g.err, unix.ECONNRESET) {
		// Usually the sandbox is ending anyway, for a reason of its own.
		select {
		case <-i.ended:
			return
		case <-time.After(gateGrace):
		}
	}
	r.log.Warn("end a sandbox whose gate is closed", "sandbox", i.id, "err", g.err)
	i.will(reasonRecord)
	if err := r.cgroups.signal(i.id); err != nil {
		r.log.Error("end a sandbox whose gate is closed", "sandbox", i.id, "err", err)
	}
}

// gateGrace is how long the runtime waits for a sandbox to exit after its gate has closed.
// Then it kills the sandbox.
const gateGrace = 5 * time.Second

// gateOf returns the gate of a sandbox.
func (r *Runtime) gateOf(id string) (*gate, error) {
	r.mu.Lock()
	i := r.all[id]
	r.mu.Unlock()
	if i == nil {
		return nil, fmt.Errorf("gate of sandbox %q: %w", id, sandbox.ErrNotFound)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.gate == nil {
		return nil, fmt.Errorf("gate of sandbox %s: an older version started it without one (%w)", id, sandbox.ErrNotFound)
	}
	return i.gate, nil
}

var _ sandbox.Gatekeeper = (*Runtime)(nil)

// Gate implements [sandbox.Gatekeeper].
func (r *Runtime) Gate(id string) (*os.File, error) {
	g, err := r.gateOf(id)
	if err != nil {
		return nil, err
	}
	f, err := g.conn.File()
	if err != nil {
		return nil, fmt.Errorf("gate of sandbox %s: %w", id, err)
	}
	return f, nil
}

// AdoptGate implements [sandbox.Gatekeeper].
func (r *Runtime) AdoptGate(id string, host *os.File, w sandbox.Watcher) error {
	i, err := r.find(id)
	if err != nil {
		return fmt.Errorf("adopt gate of sandbox %q: %w", id, err)
	}
	g, err := r.openGate(host, w)
	if err != nil {
		return err
	}
	close(g.greeted) // the previous server has read the hello
	i.mu.Lock()
	if i.gate != nil {
		i.mu.Unlock()
		g.close()
		return fmt.Errorf("adopt gate of sandbox %s: it is already open", id)
	}
	i.gate = g
	i.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), resumeTimeout)
	defer cancel()
	go g.read()
	go i.watchGate(r, g)
	// The previous server may have read questions that it never answered.
	return g.command(ctx, launch.Command{Kind: launch.Again}, func(id uint64) { g.skip = id })
}

// Observe implements [sandbox.Gatekeeper].
func (r *Runtime) Observe(ctx context.Context, id string, o sandbox.Observed) error {
	g, err := r.gateOf(id)
	if err != nil {
		return err
	}
	return g.command(ctx, launch.Command{Kind: launch.Observe, Opens: o.Opens, Digests: o.Digests, Files: o.Opens, Reads: o.Reads}, nil)
}

// Settle implements [sandbox.Gatekeeper].
func (r *Runtime) Settle(ctx context.Context, id string) error {
	g, err := r.gateOf(id)
	if err != nil {
		return err
	}
	return g.settle(ctx)
}

// settle returns when the watcher has been given everything that the kernel reported
// before the call, and has answered every question that it asked before.
func (g *gate) settle(ctx context.Context) error {
	// The kernel carries out a command after the reports that it made before, and read
	// passes them on in order.
	if err := g.command(ctx, launch.Command{Kind: launch.Observe}, nil); err != nil {
		return err
	}
	g.mu.Lock()
	var open []chan struct{}
	for _, q := range g.asked {
		open = append(open, q.answered)
	}
	g.mu.Unlock()
	for _, answered := range open {
		select {
		case <-answered:
		case <-ctx.Done():
			return fmt.Errorf("await the answer to a question: %w", context.Cause(ctx))
		}
	}
	return nil
}
