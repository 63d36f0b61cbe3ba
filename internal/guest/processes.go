package guest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"postern/internal/guest/processpb"
)

// keptEnds is how many ended processes Connect still reports the end of.
const keptEnds = 256

// A processTable holds the processes that clients started.
type processTable struct {
	mu      sync.Mutex
	running map[int]*process // by PID; not ended
	recent  []*process       // ended, oldest first
}

func (t *processTable) init() { t.running = map[int]*process{} }

func (t *processTable) add(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.running[p.pid] = p
}

// ended moves a process to the list of ended ones.
func (t *processTable) ended(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.running[p.pid] == p { // otherwise the PID has been reused
		delete(t.running, p.pid)
	}
	t.recent = append(t.recent, p)
	if len(t.recent) > keptEnds {
		t.recent = slices.Delete(t.recent, 0, len(t.recent)-keptEnds)
	}
}

func (t *processTable) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.running)
}

func (t *processTable) list() []*process {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]*process, 0, len(t.running))
	for _, p := range t.running {
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b *process) int { return cmp.Compare(a.pid, b.pid) })
	return list
}

// find returns the process that sel selects; with late also an ended one.
func (t *processTable) find(sel *processpb.ProcessSelector, late bool) (*process, error) {
	var match func(*process) bool
	var name string
	switch s := sel.GetSelector().(type) {
	case *processpb.ProcessSelector_Pid:
		match, name = func(p *process) bool { return p.pid == int(s.Pid) }, fmt.Sprintf("pid %d", s.Pid)
	case *processpb.ProcessSelector_Tag:
		match, name = func(p *process) bool { return p.tag != nil && *p.tag == s.Tag }, fmt.Sprintf("tag %q", s.Tag)
	default:
		return nil, invalid("the request names no process: give a pid or a tag")
	}
	// Several may have one tag: always the same of them is found.
	for _, p := range t.list() {
		if match(p) {
			return p, nil
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if late {
		for _, p := range slices.Backward(t.recent) {
			if match(p) {
				return p, nil
			}
		}
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("process with %s not found", name))
}

// processes serves [processpb.ProcessHandler].
type processes struct{ s *Server }

var _ processpb.ProcessHandler = (*processes)(nil)

// List implements [processpb.ProcessHandler].
func (h *processes) List(_ context.Context, _ *connect.Request[processpb.ListRequest]) (*connect.Response[processpb.ListResponse], error) {
	res := &processpb.ListResponse{}
	for _, p := range h.s.table.list() {
		res.Processes = append(res.Processes, &processpb.ProcessInfo{Config: p.config, Pid: uint32(p.pid), Tag: p.tag})
	}
	return connect.NewResponse(res), nil
}

// Start implements [processpb.ProcessHandler].
func (h *processes) Start(ctx context.Context, req *connect.Request[processpb.StartRequest], stream *connect.ServerStream[processpb.StartResponse]) error {
	every, err := keepalive(req.Header())
	if err != nil {
		return err
	}
	st, err := h.readStart(ctx, req)
	if err != nil {
		return rpcError(err)
	}
	p, sub, err := h.s.launch(st)
	if err != nil {
		return rpcError(err)
	}
	return p.follow(ctx, sub, every, func(ev *processpb.ProcessEvent) error {
		return stream.Send(&processpb.StartResponse{Event: ev})
	})
}

// readStart checks a Start request and returns what to start.
func (h *processes) readStart(ctx context.Context, req *connect.Request[processpb.StartRequest]) (start, error) {
	m := req.Msg
	a, err := h.s.caller(req.Header())
	if err != nil {
		return start{}, err
	}
	if m.GetProcess().GetCmd() == "" {
		return start{}, invalid("process.cmd is empty")
	}
	for k, v := range m.GetProcess().GetEnvs() {
		if err := checkEnv(k, v); err != nil {
			return start{}, invalid("process.envs: %w", err)
		}
	}
	dir := h.s.startDir(a)
	if m.GetProcess().GetCwd() != "" {
		dir, err = h.s.resolve(a, m.GetProcess().GetCwd())
		if err != nil {
			return start{}, invalid("process.cwd: %w", err)
		}
	}
	st := start{
		config: m.GetProcess(), tag: m.Tag, account: a, dir: dir,
		env:       h.s.environ(a, m.GetProcess().GetEnvs()),
		stdin:     m.Stdin == nil || m.GetStdin(),
		plain:     req.Header().Get(PlainHeader) != "",
		cancelled: ctx.Done(),
	}
	if m.GetPty() != nil {
		if st.size, err = winsize(m.GetPty()); err != nil {
			return start{}, err
		}
	}
	// The deadline belongs to the process, and applies also if the client
	// disconnects.
	st.deadline, _ = ctx.Deadline()
	return st, nil
}

// winsize returns the requested size of a terminal, or nil for pipes.
func winsize(p *processpb.PTY) (*pty.Winsize, error) {
	cols, rows := p.GetSize().GetCols(), p.GetSize().GetRows()
	if cols > 1<<16-1 || rows > 1<<16-1 {
		return nil, invalid("pty.size: at most 65535 columns and rows")
	}
	return &pty.Winsize{Cols: uint16(cols), Rows: uint16(rows)}, nil
}

// Connect implements [processpb.ProcessHandler].
func (h *processes) Connect(ctx context.Context, req *connect.Request[processpb.ConnectRequest], stream *connect.ServerStream[processpb.ConnectResponse]) error {
	every, err := keepalive(req.Header())
	if err != nil {
		return err
	}
	p, err := h.s.table.find(req.Msg.GetProcess(), true)
	if err != nil {
		return err
	}
	return p.follow(ctx, p.subscribe(), every, func(ev *processpb.ProcessEvent) error {
		return stream.Send(&processpb.ConnectResponse{Event: ev})
	})
}

// follow sends the events of p until its end or until the client disconnects.
func (p *process) follow(ctx context.Context, sub *subscriber, every time.Duration, send func(*processpb.ProcessEvent) error) error {
	defer p.unsubscribe(sub)
	first := &processpb.ProcessEvent{Event: &processpb.ProcessEvent_Start{Start: &processpb.ProcessEvent_StartEvent{Pid: uint32(p.pid)}}}
	if err := send(first); err != nil {
		return err
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		var ev *processpb.ProcessEvent
		select {
		case ev = <-sub.events:
			tick.Reset(every)
		case <-tick.C:
			ev = &processpb.ProcessEvent{Event: &processpb.ProcessEvent_Keepalive{Keepalive: &processpb.ProcessEvent_KeepAlive{}}}
		case <-ctx.Done():
			return contextError(ctx)
		}
		if err := send(ev); err != nil {
			return err
		}
		if ev.GetEnd() != nil {
			return nil
		}
	}
}

// contextError converts the end of a context for the client.
func contextError(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the call's deadline has passed"))
	}
	return connect.NewError(connect.CodeCanceled, ctx.Err())
}

// keepalive returns the interval of keepalive events on a silent stream, from the
// header in seconds that clients set. The default is 90 s.
func keepalive(h http.Header) (time.Duration, error) {
	v := h.Get("Keepalive-Ping-Interval")
	if v == "" {
		return 90 * time.Second, nil
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 || n > 24*60*60 {
		return 0, invalid("Keepalive-Ping-Interval: %q is not between 1 and 86400 seconds", v)
	}
	return time.Duration(n) * time.Second, nil
}

// Update implements [processpb.ProcessHandler].
func (h *processes) Update(_ context.Context, req *connect.Request[processpb.UpdateRequest]) (*connect.Response[processpb.UpdateResponse], error) {
	p, err := h.s.table.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if req.Msg.GetPty() != nil {
		size, err := winsize(req.Msg.GetPty())
		if err != nil {
			return nil, err
		}
		if p.tty == nil {
			return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has no terminal"))
		}
		if err := pty.Setsize(p.tty, size); err != nil {
			return nil, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("resize terminal: %w", err))
		}
	}
	return connect.NewResponse(&processpb.UpdateResponse{}), nil
}

// SendInput implements [processpb.ProcessHandler].
func (h *processes) SendInput(ctx context.Context, req *connect.Request[processpb.SendInputRequest]) (*connect.Response[processpb.SendInputResponse], error) {
	p, err := h.s.table.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if err := p.give(ctx, req.Msg.GetInput()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&processpb.SendInputResponse{}), nil
}

// StreamInput implements [processpb.ProcessHandler].
func (h *processes) StreamInput(ctx context.Context, stream *connect.ClientStream[processpb.StreamInputRequest]) (*connect.Response[processpb.StreamInputResponse], error) {
	var p *process
	for stream.Receive() {
		switch ev := stream.Msg().GetEvent().(type) {
		case *processpb.StreamInputRequest_Start:
			var err error
			if p, err = h.s.table.find(ev.Start.GetProcess(), false); err != nil {
				return nil, err
			}
		case *processpb.StreamInputRequest_Data:
			if p == nil {
				return nil, invalid("data came before the start that names the process")
			}
			if err := p.give(ctx, ev.Data.GetInput()); err != nil {
				return nil, err
			}
		default: // keepalive
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&processpb.StreamInputResponse{}), nil
}

// give writes an input message to the process.
func (p *process) give(ctx context.Context, in *processpb.ProcessInput) error {
	var b []byte
	switch v := in.GetInput().(type) {
	case *processpb.ProcessInput_Stdin:
		if p.tty != nil {
			return connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has a terminal: send pty, not stdin"))
		}
		b = v.Stdin
	case *processpb.ProcessInput_Pty:
		if p.tty == nil {
			return connect.NewError(connect.CodeFailedPrecondition, errors.New("the process has no terminal: send stdin, not pty"))
		}
		b = v.Pty
	default:
		return invalid("input is neither stdin nor pty")
	}
	err := p.write(ctx, b)
	switch {
	case errors.Is(err, errNoInput):
		return connect.NewError(connect.CodeFailedPrecondition, err)
	case err != nil && ctx.Err() != nil:
		return contextError(ctx)
	}
	return rpcError(err)
}

// SendSignal implements [processpb.ProcessHandler].
func (h *processes) SendSignal(_ context.Context, req *connect.Request[processpb.SendSignalRequest]) (*connect.Response[processpb.SendSignalResponse], error) {
	p, err := h.s.table.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	var sig unix.Signal
	switch req.Msg.GetSignal() {
	case processpb.Signal_SIGNAL_SIGTERM:
		sig = unix.SIGTERM
	case processpb.Signal_SIGNAL_SIGKILL:
		sig = unix.SIGKILL
	default:
		return nil, invalid("signal: only SIGTERM and SIGKILL can be sent")
	}
	if err := p.signal(sig); errors.Is(err, errGone) {
		return nil, connect.NewError(connect.CodeNotFound, err)
	} else if err != nil {
		return nil, rpcError(err)
	}
	return connect.NewResponse(&processpb.SendSignalResponse{}), nil
}

// CloseStdin implements [processpb.ProcessHandler].
func (h *processes) CloseStdin(ctx context.Context, req *connect.Request[processpb.CloseStdinRequest]) (*connect.Response[processpb.CloseStdinResponse], error) {
	p, err := h.s.table.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if p.tty != nil {
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("a terminal's input cannot be closed: send Ctrl+D (0x04)"))
	}
	if err := p.closeInput(ctx); errors.Is(err, errNoInput) {
		return nil, connect.NewError(connect.CodeFailedPrecondition, err)
	} else if err != nil {
		return nil, contextError(ctx)
	}
	return connect.NewResponse(&processpb.CloseStdinResponse{}), nil
}
