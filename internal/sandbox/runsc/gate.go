package runsc

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/errors/linuxerr"
	"gvisor.dev/gvisor/pkg/fd"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/seccheck"
	pb "gvisor.dev/gvisor/pkg/sentry/seccheck/points/points_go_proto"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"

	"postern/internal/sandbox/launch"
)

// gateName is the name of the gate among gVisor's sinks.
const gateName = "postern-gate"

// A gate is the sentry's end of the socket on which it asks the host before it starts a
// program, see [launch.Event]. There is one for each sentry, for all that runs in it.
//
// Tasks only put messages into a queue, which one goroutine writes, and wait for another
// one that reads. So nothing that a task does blocks when nobody reads the socket: a task
// that waits can be killed, and can be stopped to be saved.
//
// If the host's end is gone, nobody can judge or record what is started. Then the sentry
// ends, and the sandbox with it.
type gate struct {
	seccheck.SinkDefaults
	fd int // of the socket, which blocks

	wake chan struct{} // holds an element if there may be something in the queue

	mu      sync.Mutex // taken under locks of the kernel: nothing is called with it
	last    uint64     // ID of the latest exec
	waiting map[uint64]*verdict
	queue   []queued
	events  int    // in the queue that may be dropped
	missed  uint64 // dropped and not reported yet

	opens    bool        // are reported. Only the reader uses it
	digested atomic.Bool // programs have digests
	digests  digests
}

// A queued message is one that is to be written.
type queued struct {
	msg       []byte
	droppable bool
}

// A verdict is what a task waits for.
type verdict struct {
	msg   []byte        // the exec, to be repeated
	ready chan struct{} // closed when allow is set
	allow bool
}

var _ seccheck.Sink = (*gate)(nil)

// maxEvents bounds how many exits and opens wait to be written: beyond it they are
// dropped, counted, and reported as missed. Each has at most 4 KiB.
const maxEvents = 4096

// graceful is how long a task that was interrupted waits on for its verdict, before it
// gives it up and asks again. Otherwise a program with a fast timer would never get one.
const graceful = 20 * time.Millisecond

// donateGate makes the sentry that conf is for ask on socket. It belongs into the
// launcher, where gVisor looks for files for the sentry.
func donateGate(conf *config.Config, socket *os.File) (release func(), err error) {
	b, err := json.Marshal(boot.InitConfig{TraceSession: seccheck.SessionConfig{
		Name: seccheck.DefaultSessionName, Sinks: []seccheck.SinkConfig{{Name: gateName}},
	}})
	if err != nil {
		return nil, fmt.Errorf("describe gate: %w", err)
	}
	n, err := unix.MemfdCreate("gate", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make file for gate: %w", err)
	}
	f := os.NewFile(uintptr(n), "gate")
	if _, err := f.Write(b); err != nil {
		f.Close()
		return nil, fmt.Errorf("describe gate: %w", err)
	}
	seccheck.RegisterSink(seccheck.SinkDesc{
		Name:  gateName,
		Setup: func(map[string]any) (*os.File, error) { return socket, nil }, // gVisor closes it
		New:   func(map[string]any, *fd.FD) (seccheck.Sink, error) { return nil, errors.ErrUnsupported },
	})
	conf.PodInitConfig = fmt.Sprintf("/proc/self/fd/%d", n)
	return func() { f.Close() }, nil
}

// registerGate lets the sentry make its gate. If it does not, gVisor only logs it and
// starts without, so the host waits for the gate's hello.
func registerGate() {
	seccheck.RegisterSink(seccheck.SinkDesc{
		Name: gateName,
		New: func(_ map[string]any, socket *fd.FD) (seccheck.Sink, error) {
			if socket == nil {
				return nil, errors.New("the gate has no socket")
			}
			startGate(socket.Release())
			// gVisor appends what this returns, without the points that the gate wants.
			return unusedSink{}, nil
		},
	})
}

// unusedSink takes the place of a sink that is not needed. It allows everything.
type unusedSink struct{ seccheck.SinkDefaults }

func (unusedSink) Name() string { return gateName }

func startGate(fd int) {
	g := &gate{fd: fd, wake: make(chan struct{}, 1), waiting: map[uint64]*verdict{}}
	g.put(launch.Event{Kind: launch.Hello}, false)
	// The points are given by their numbers: gVisor would have to describe all of them to
	// find them by their names, see skipTracePoints.
	seccheck.Global.AppendSink(g, []seccheck.PointReq{
		{Pt: seccheck.PointExecve, Fields: seccheck.FieldSet{
			Local:   seccheck.MakeFieldMask(seccheck.FieldSentryExecveBinaryInfo),
			Context: seccheck.MakeFieldMask(seccheck.FieldCtxtThreadGroupID, seccheck.FieldCtxtParentThreadGroupID, seccheck.FieldCtxtCwd, seccheck.FieldCtxtCredentials),
		}},
		{Pt: seccheck.PointExitNotifyParent, Fields: seccheck.FieldSet{Context: seccheck.MakeFieldMask(seccheck.FieldCtxtThreadGroupID)}},
	})
	go g.write()
	go g.read()
}

// Name implements [seccheck.Sink].
func (*gate) Name() string { return gateName }

// Execve implements [seccheck.Sink]. Its error becomes that of the call.
func (g *gate) Execve(ctx context.Context, _ seccheck.FieldSet, info *pb.ExecveInfo) error {
	t, ok := ctx.(*kernel.Task)
	if !ok {
		return linuxerr.EACCES
	}
	e := describe(t, info)
	if g.digested.Load() {
		e.SHA256 = g.digests.of(t, e, info)
	}
	id, v := g.ask(e)
	err := t.Block(v.ready)
	if err != nil && !t.Killed() {
		timer := time.NewTimer(graceful)
		select {
		case <-v.ready:
			err = nil
		case <-timer.C:
		}
		timer.Stop()
	}
	if err != nil && !g.giveUp(id, v) {
		// The task was killed, has a signal to handle, or is about to be saved. It
		// starts the call again if it still exists then, also in a copy.
		return linuxerr.ERESTARTNOINTR
	}
	if !v.allow {
		return linuxerr.EACCES
	}
	return nil
}

// guestProgram is the program that serves in a sandbox.
const guestProgram = "/usr/local/sbin/postern-guest"

// describe says what a task is about to start.
func describe(t *kernel.Task, info *pb.ExecveInfo) launch.Event {
	e := launch.Event{
		Kind: launch.Exec, Path: info.BinaryPath, Name: info.Execfn, Args: info.Argv, Env: info.Env,
		Fixed: info.BinaryOverlayfsLower && !info.BinaryOverlayfsUpper && !info.BinaryInMemfd,
	}
	if d := info.ContextData; d != nil {
		e.PID, e.Parent, e.Dir = d.ThreadGroupId, d.ParentThreadGroupId, d.Cwd
		if d.Credentials != nil {
			e.UID = d.Credentials.EffectiveUid
		}
	}
	// A process that is just forked has what its parent has.
	if f := t.MemoryManager().Executable(); f != nil {
		e.Guest = f.MappedName(t) == guestProgram
		f.DecRef(t)
	}
	if strings.HasPrefix(e.Path, "/dev/fd/") {
		// execveat(2) of a descriptor. The kernel does not say what is behind it, and
		// the text after the number is the caller's.
		e.Path = ""
	}
	// The attack: whoever has a user namespace of his own can mount, there, an overlay
	// whose lower layer he has written, and change his root. Then neither says anything.
	if t.UserNamespace() != t.Kernel().RootUserNamespace() {
		e.Path, e.Fixed, e.Guest = "", false, false
	}
	return e
}

// ask puts a question to the host.
func (g *gate) ask(e launch.Event) (id uint64, v *verdict) {
	g.mu.Lock()
	g.last++
	e.ID = g.last
	v = &verdict{ready: make(chan struct{}), msg: e.Append(nil)}
	g.waiting[e.ID] = v
	g.queue = append(g.queue, queued{msg: v.msg})
	g.mu.Unlock()
	g.poke()
	return e.ID, v
}

// giveUp takes a question back, and reports whether it was answered before.
func (g *gate) giveUp(id uint64, v *verdict) (answered bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-v.ready:
		return true
	default:
	}
	delete(g.waiting, id)
	// If it has not been written yet it need not be.
	if i := slices.IndexFunc(g.queue, func(q queued) bool { return len(q.msg) > 0 && &q.msg[0] == &v.msg[0] }); i >= 0 {
		g.queue = slices.Delete(g.queue, i, i+1)
		return false
	}
	g.queue = append(g.queue, queued{msg: (&launch.Event{Kind: launch.GiveUp, ID: id}).Append(nil)})
	g.poke()
	return false
}

// ExitNotifyParent implements [seccheck.Sink]. It is called with locks of the kernel.
func (g *gate) ExitNotifyParent(_ context.Context, _ seccheck.FieldSet, info *pb.ExitNotifyParentInfo) error {
	g.put(launch.Event{Kind: launch.Exit, PID: info.GetContextData().GetThreadGroupId(), Code: info.ExitStatus}, true)
	return nil
}

// put puts an event into the queue.
func (g *gate) put(e launch.Event, droppable bool) {
	msg := e.Append(nil)
	g.mu.Lock()
	if droppable && g.events >= maxEvents {
		g.missed++
		g.mu.Unlock()
		return
	}
	if droppable {
		g.events++
	}
	g.queue = append(g.queue, queued{msg, droppable})
	g.mu.Unlock()
	g.poke()
}

// poke wakes the writer.
func (g *gate) poke() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// next takes the next message from the queue, or nil.
func (g *gate) next() []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.queue) == 0 {
		g.queue = nil // it may have been long
		if g.missed == 0 {
			return nil
		}
		e := launch.Event{Kind: launch.Missed, ID: g.missed}
		g.missed = 0
		return e.Append(nil)
	}
	q := g.queue[0]
	g.queue[0] = queued{}
	g.queue = g.queue[1:]
	if q.droppable {
		g.events--
	}
	return q.msg
}

// write writes the queue to the host. It blocks while the socket is full.
func (g *gate) write() {
	for range g.wake {
		for msg := g.next(); msg != nil; msg = g.next() {
			n, err := unix.Write(g.fd, msg)
			for errors.Is(err, unix.EINTR) {
				n, err = unix.Write(g.fd, msg)
			}
			if err != nil || n != len(msg) {
				endLost()
			}
		}
	}
}

// read carries out what the host says.
func (g *gate) read() {
	b := make([]byte, 64)
	for {
		n, err := unix.Read(g.fd, b)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			endLost()
		}
		c, err := launch.ParseCommand(b[:n])
		if err != nil {
			endLost()
		}
		switch c.Kind {
		case launch.Verdict:
			g.decide(c)
		case launch.Again:
			g.repeat(c)
		case launch.Observe:
			g.observe(c)
			g.put(launch.Event{Kind: launch.Done, ID: c.ID}, false)
		}
	}
}

// endLost ends the sandbox, whose record nobody keeps any more.
func endLost() { os.Exit(1) }

// decide gives a verdict to the task that waits for it.
func (g *gate) decide(c launch.Command) {
	g.mu.Lock()
	defer g.mu.Unlock()
	v := g.waiting[c.ID]
	if v == nil {
		return // it was given up
	}
	delete(g.waiting, c.ID)
	v.allow = c.Allow
	close(v.ready)
}

// repeat asks again everything that waits. What is in the queue has not been asked yet,
// so it is asked once, after the mark.
func (g *gate) repeat(c launch.Command) {
	g.mu.Lock()
	asked := map[*byte]bool{}
	ids := make([]uint64, 0, len(g.waiting))
	for id, v := range g.waiting {
		ids = append(ids, id)
		asked[&v.msg[0]] = true
	}
	slices.Sort(ids)
	g.queue = slices.DeleteFunc(g.queue, func(q queued) bool { return asked[&q.msg[0]] })
	g.queue = append(g.queue, queued{msg: (&launch.Event{Kind: launch.Done, ID: c.ID}).Append(nil)})
	for _, id := range ids {
		g.queue = append(g.queue, queued{msg: g.waiting[id].msg})
	}
	g.mu.Unlock()
	g.poke()
}

// observe reports more from now on.
func (g *gate) observe(c launch.Command) {
	if c.Digests {
		g.digested.Store(true)
	}
	if c.Opens && !g.opens {
		g.opens = true
		seccheck.Global.AppendSink(&openSink{gate: g}, openPoints())
	}
}

// An openSink reports files that are opened for writing.
type openSink struct {
	seccheck.SinkDefaults
	gate *gate
}

func (*openSink) Name() string { return gateName + "-opens" }

// openPoints are the ends of the calls that open files. gVisor's descriptions of them copy
// the path, also of files that are only read; so these are the raw ones.
func openPoints() (points []seccheck.PointReq) {
	for _, n := range []uintptr{unix.SYS_OPENAT, unix.SYS_OPENAT2, sysOpen, sysCreat} {
		points = append(points, seccheck.PointReq{
			Pt:     seccheck.GetPointForSyscall(seccheck.SyscallRawExit, n),
			Fields: seccheck.FieldSet{Context: seccheck.MakeFieldMask(seccheck.FieldCtxtThreadGroupID)},
		})
	}
	return points
}

// RawSyscall implements [seccheck.Sink].
func (s *openSink) RawSyscall(ctx context.Context, _ seccheck.FieldSet, info *pb.Syscall) error {
	t, ok := ctx.(*kernel.Task)
	if !ok || info.Exit == nil {
		return nil
	}
	dir, path, flags := int32(linux.AT_FDCWD), info.Arg1, info.Arg2
	switch uintptr(info.Sysno) {
	case sysOpen:
	case sysCreat:
		flags = unix.O_CREAT | unix.O_WRONLY | unix.O_TRUNC
	case unix.SYS_OPENAT:
		dir, path, flags = int32(info.Arg1), info.Arg2, info.Arg3
	case unix.SYS_OPENAT2:
		dir, path, flags = int32(info.Arg1), info.Arg2, openHowFlags(t, info.Arg3)
	default:
		return nil
	}
	if flags&(unix.O_ACCMODE|unix.O_CREAT|unix.O_TRUNC) == 0 || flags&unix.O_PATH != 0 {
		return nil
	}
	e := launch.Event{Kind: launch.Open, PID: info.GetContextData().GetThreadGroupId(), Code: int32(info.Exit.Errorno)}
	if e.Code == 0 {
		e.Path = nameOf(t, int32(info.Exit.Result)) // after symbolic links
	} else {
		e.Path = wanted(t, dir, path)
	}
	s.gate.put(e, true)
	return nil
}
