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
// program, see [launch.Event]. Each sentry has one.
//
// Tasks never touch the socket. They put messages into a queue, which one goroutine writes
// to the socket, and wait for a verdict, which another goroutine reads. So a task that
// waits can be killed, or stopped to be saved, even if nobody reads the socket.
//
// If the host's end is closed, nobody can judge or record what is started. Then the sentry
// exits, which ends the sandbox.
type gate struct {
	seccheck.SinkDefaults
	fd int // the socket, in blocking mode

	wake chan struct{} // wakes the writer; buffered, so that a wake-up is never lost

	// mu is acquired with locks of the sentry held, so no code of the sentry is called
	// while it is held.
	mu      sync.Mutex
	last    uint64 // ID of the latest exec
	waiting map[uint64]*verdict
	queue   []queued
	events  int    // droppable messages in the queue
	missed  uint64 // dropped messages that are not reported yet

	opens       bool        // opens are reported; used only by the reader
	files       bool        // so are other changes of files
	reads       atomic.Bool // so are opens for reading
	withDigests atomic.Bool // execs carry the digest of their program
	digests     digests
}

// A queued message waits to be written to the socket.
type queued struct {
	msg       []byte
	droppable bool
}

// A verdict is the answer that a task waits for.
type verdict struct {
	msg   []byte        // the encoded exec, in case it must be repeated
	ready chan struct{} // closed when allow is set
	allow bool
}

var _ seccheck.Sink = (*gate)(nil)

// maxEvents bounds the exits and opens in the queue. Beyond it they are dropped, counted
// and reported as missed. Each has at most a little more than 4 KiB.
const maxEvents = 4096

// interruptGrace is how long an interrupted task still waits for its verdict before it
// gives up and asks again. Without it a program with a fast timer would never get a verdict.
const interruptGrace = 20 * time.Millisecond

// donateGate makes the sentry that conf describes ask on socket. The launcher calls it,
// because gVisor collects the sentry's files there.
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

// registerGate registers the gate with the sentry. If the sentry cannot create it, gVisor
// logs the error and starts without a gate; so the host waits for the gate's hello.
func registerGate() {
	seccheck.RegisterSink(seccheck.SinkDesc{
		Name: gateName,
		New: func(_ map[string]any, socket *fd.FD) (seccheck.Sink, error) {
			if socket == nil {
				return nil, errors.New("the gate has no socket")
			}
			startGate(socket.Release())
			// startGate has added the gate with its points. gVisor adds the returned
			// sink without any.
			return unusedSink{}, nil
		},
	})
}

// unusedSink is a sink that gVisor calls for nothing.
type unusedSink struct{ seccheck.SinkDefaults }

func (unusedSink) Name() string { return gateName }

func startGate(fd int) {
	g := &gate{fd: fd, wake: make(chan struct{}, 1), waiting: map[uint64]*verdict{}}
	g.put(launch.Event{Kind: launch.Hello}, false)
	// The points are given by number. To find them by name gVisor would have to describe
	// all of them, see skipTracePoints.
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

// Execve implements [seccheck.Sink]. Its error is what execve(2) returns.
func (g *gate) Execve(ctx context.Context, _ seccheck.FieldSet, info *pb.ExecveInfo) error {
	t, ok := ctx.(*kernel.Task)
	if !ok {
		return linuxerr.EACCES
	}
	e := execEvent(t, info)
	if g.withDigests.Load() {
		e.SHA256 = g.digests.of(t, e, info)
	}
	id, v := g.ask(e)
	err := t.Block(v.ready)
	if err != nil && !t.Killed() {
		timer := time.NewTimer(interruptGrace)
		select {
		case <-v.ready:
			err = nil
		case <-timer.C:
		}
		timer.Stop()
	}
	if err != nil && !g.giveUp(id, v) {
		// The task was killed, has a signal to handle, or is about to be saved. If it
		// still exists afterwards, it restarts the call, also in a restored copy.
		return linuxerr.ERESTARTNOINTR
	}
	if !v.allow {
		return linuxerr.EACCES
	}
	return nil
}

// guestProgram is the program that serves in a sandbox.
const guestProgram = "/usr/local/sbin/postern-guest"

// execEvent returns the event for a program that a task is about to start.
func execEvent(t *kernel.Task, info *pb.ExecveInfo) launch.Event {
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
	// A newly forked process still has its parent's program.
	if f := t.MemoryManager().Executable(); f != nil {
		e.Guest = pathInNamespace(t, f) == guestProgram
		f.DecRef(t)
	}
	if strings.HasPrefix(e.Path, "/dev/fd/") {
		// execveat(2) of a descriptor. The sentry does not tell which file it is, and
		// the caller chose the text after the number.
		e.Path = ""
	} else if e.Path == "" {
		// The attack: root changes its root directory to one with its own file
		// /usr/local/sbin/postern-guest, or has a program of the template read its own
		// libraries. Or a user mounts an overlay in namespaces of its own, and starts its
		// files from outside by /proc/PID/root. A patch of gVisor, in patches/gvisor, leaves
		// out the path of such a file: here another thread may have changed the root again.
		e.Fixed = false
	}
	// The attack: in a user namespace of its own a process can mount an overlay whose lower
	// layer it has written, and change its root. Then neither the path nor the layer of a
	// file identifies it. A task that has changed its root started other files by descriptor.
	if t.UserNamespace() != t.Kernel().RootUserNamespace() || t.IsChrooted() {
		e.Path, e.Fixed, e.Guest = "", false, false
	}
	return e
}

// ask queues an exec for the host, and returns the verdict to wait for.
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

// giveUp withdraws an exec, and reports whether its verdict had already arrived.
func (g *gate) giveUp(id uint64, v *verdict) (answered bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-v.ready:
		return true
	default:
	}
	delete(g.waiting, id)
	// An exec that is still in the queue is removed from it.
	if i := slices.IndexFunc(g.queue, func(q queued) bool { return len(q.msg) > 0 && &q.msg[0] == &v.msg[0] }); i >= 0 {
		g.queue = slices.Delete(g.queue, i, i+1)
		return false
	}
	g.queue = append(g.queue, queued{msg: (&launch.Event{Kind: launch.GiveUp, ID: id}).Append(nil)})
	g.poke()
	return false
}

// ExitNotifyParent implements [seccheck.Sink]. It is called with locks of the sentry held.
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

// next removes and returns the next message to write. It returns nil if there is none.
func (g *gate) next() []byte {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.queue) == 0 {
		g.queue = nil // free the memory of a long queue
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

// write writes the queue to the socket. It blocks while the socket is full.
func (g *gate) write() {
	for range g.wake {
		for msg := g.next(); msg != nil; msg = g.next() {
			n, err := unix.Write(g.fd, msg)
			for errors.Is(err, unix.EINTR) {
				n, err = unix.Write(g.fd, msg)
			}
			if err != nil || n != len(msg) {
				exitLost()
			}
		}
	}
}

// read carries out the commands of the host.
func (g *gate) read() {
	b := make([]byte, 64)
	for {
		n, err := unix.Read(g.fd, b)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n <= 0 {
			exitLost()
		}
		c, err := launch.ParseCommand(b[:n])
		if err != nil {
			exitLost()
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

// exitLost ends the sandbox, because its commands can no longer be judged and recorded.
func exitLost() { os.Exit(1) }

// decide gives a verdict to the task that waits for it.
func (g *gate) decide(c launch.Command) {
	g.mu.Lock()
	defer g.mu.Unlock()
	v := g.waiting[c.ID]
	if v == nil {
		return // the task has given up
	}
	delete(g.waiting, c.ID)
	v.allow = c.Allow
	close(v.ready)
}

// repeat asks the host again for each verdict that a task waits for. Execs that are still
// in the queue have not been sent yet: they move behind the Done message and are sent once.
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

// observe starts the additional reports that c asks for.
func (g *gate) observe(c launch.Command) {
	if c.Digests {
		g.withDigests.Store(true)
	}
	if c.Reads {
		g.reads.Store(true)
	}
	if (c.Opens || c.Reads) && !g.opens {
		g.opens = true
		seccheck.Global.AppendSink(&openSink{gate: g}, exits(unix.SYS_OPENAT, unix.SYS_OPENAT2, sysOpen, sysCreat))
	}
	if c.Files && !g.files {
		g.files = true
		seccheck.Global.AppendSink(&fileSink{gate: g}, exits(unix.SYS_MKDIRAT, unix.SYS_UNLINKAT, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2, unix.SYS_LINKAT, unix.SYS_SYMLINKAT, unix.SYS_MKNODAT, unix.SYS_TRUNCATE,
			sysMkdir, sysRmdir, sysUnlink, sysRename, sysLink, sysSymlink, sysMknod))
	}
}

// An openSink reports files that are opened for writing, and for reading if the host wants
// that.
type openSink struct {
	seccheck.SinkDefaults
	gate *gate
}

func (*openSink) Name() string { return gateName + "-opens" }

// exits returns the exits of system calls. They are the raw points, because gVisor's typed
// ones copy each path, also of files that are only read, and do not have all calls.
func exits(calls ...uintptr) (points []seccheck.PointReq) {
	for _, n := range calls {
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
	e := launch.Event{Kind: launch.Open, PID: info.GetContextData().GetThreadGroupId(), Code: int32(info.Exit.Errorno)}
	if flags&(unix.O_ACCMODE|unix.O_CREAT|unix.O_TRUNC) == 0 || flags&unix.O_PATH != 0 {
		// Failed reads are the searches of interpreters, by the thousand.
		if !s.gate.reads.Load() || e.Code != 0 || flags&(unix.O_PATH|unix.O_DIRECTORY) != 0 {
			return nil
		}
		e.Kind, e.Name = launch.File, "read"
	}
	if e.Code == 0 {
		e.Path = pathOfFD(t, int32(info.Exit.Result)) // with symbolic links resolved
	} else {
		e.Path = requestedPath(t, dir, path)
	}
	s.gate.put(e, true)
	return nil
}

// A fileSink reports calls that change directories: what is made, removed, renamed and
// linked. Its paths are as the program wrote them, without symbolic links resolved, and are
// read after the call: another thread may have changed them in memory meanwhile.
type fileSink struct {
	seccheck.SinkDefaults
	gate *gate
}

func (*fileSink) Name() string { return gateName + "-files" }

// RawSyscall implements [seccheck.Sink].
func (s *fileSink) RawSyscall(ctx context.Context, _ seccheck.FieldSet, info *pb.Syscall) error {
	t, ok := ctx.(*kernel.Task)
	if !ok || info.Exit == nil {
		return nil
	}
	const cwd = linux.AT_FDCWD
	e := launch.Event{Kind: launch.File, PID: info.GetContextData().GetThreadGroupId(), Code: int32(info.Exit.Errorno)}
	one := func(what string, dir int32, path uint64) { e.Name, e.Path = what, requestedPath(t, dir, path) }
	two := func(what string, dir int32, path uint64, toDir int32, to uint64) {
		one(what, dir, path)
		e.Dir = requestedPath(t, toDir, to)
	}
	switch a, b := info.Arg1, info.Arg2; uintptr(info.Sysno) {
	case sysMkdir:
		one("mkdir", cwd, a)
	case unix.SYS_MKDIRAT:
		one("mkdir", int32(a), b)
	case sysRmdir:
		one("rmdir", cwd, a)
	case sysUnlink:
		one("unlink", cwd, a)
	case unix.SYS_UNLINKAT:
		one("unlink", int32(a), b)
		if info.Arg3&unix.AT_REMOVEDIR != 0 {
			e.Name = "rmdir"
		}
	case sysRename:
		two("rename", cwd, a, cwd, b)
	case unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2:
		two("rename", int32(a), b, int32(info.Arg3), info.Arg4)
	case sysLink:
		two("link", cwd, a, cwd, b)
	case unix.SYS_LINKAT:
		two("link", int32(a), b, int32(info.Arg3), info.Arg4)
	case sysSymlink:
		one("symlink", cwd, b)
		e.Dir = textAt(t, a)
	case unix.SYS_SYMLINKAT:
		one("symlink", int32(b), info.Arg3)
		e.Dir = textAt(t, a)
	case sysMknod:
		one("mknod", cwd, a)
	case unix.SYS_MKNODAT:
		one("mknod", int32(a), b)
	case unix.SYS_TRUNCATE:
		one("truncate", cwd, a)
	default:
		return nil
	}
	s.gate.put(e, true)
	return nil
}
