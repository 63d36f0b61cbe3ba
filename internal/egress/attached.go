package egress

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"postern/internal/auth"
	"postern/internal/inspect"
	"postern/internal/policy"
	"postern/internal/sandbox"
)

const nic = 1

// attached is the wall's side of one sandbox. Each has a network stack of its own,
// so that no sandbox can see or use up anything of another.
type attached struct {
	w     *Wall
	log   *slog.Logger
	who   auth.Principal
	link  *link
	stack *stack.Stack
	end   context.CancelFunc // cancels everything that the sandbox has open

	rules     atomic.Pointer[policy.Outbound]
	ledger    *ledger
	names     *names
	standIns  *standIns
	newConns  *rate.Limiter
	questions *rate.Limiter
	slots     chan struct{} // semaphore of TCP connections
	udpSlots  chan struct{} // semaphore of DNS sockets
	inner     *innerServer  // nil without Config.Inner
	web       *inspect.Link // nil without Config.Inspect
	denials   denials
	voice     voice
	wg        sync.WaitGroup

	mu     sync.Mutex
	flows  map[*flow]struct{} // connections to the outside
	closed bool
}

// A flow is a connection to the outside. It exists from before the dial.
type flow struct {
	conn  policy.Connection // what policy allowed
	dst   netip.AddrPort    // address that the sandbox connected to
	asked policy.Connection // what Config.Permit was asked about
	why   string            // reason of Config.Permit; empty if the lists decided
	// inspected means that each request on it is inspected, so that a grant for
	// requests allows it.
	inspected bool
	// other means that it was looked at and shows another protocol than TLS and HTTP.
	other   bool
	allowed string // reason of the lists or of a grant
	cancel  context.CancelFunc
	last    atomic.Int64 // Unix nanoseconds of the last byte
}

// idle closes f when it has carried no byte for limit.
func (f *flow) idle(limit time.Duration) *time.Timer {
	var t *time.Timer
	ready := make(chan struct{})
	t = time.AfterFunc(limit, func() {
		<-ready
		quiet := time.Since(time.Unix(0, f.last.Load()))
		if quiet >= limit {
			f.cancel()
			return
		}
		t.Reset(limit - quiet)
	})
	close(ready)
	return t
}

// newAttached starts a stack on the host's end of a link. It takes ownership of
// host, also if it fails.
func newAttached(ctx context.Context, w *Wall, who auth.Principal, rules *policy.Outbound, host *os.File) (*attached, error) {
	ctx, cancel := context.WithCancel(ctx)
	lim := w.cfg.Limits
	a := &attached{
		w: w, log: w.log.With("sandbox", who.ID), who: who, end: cancel,
		names:     newNames(),
		standIns:  newStandIns(),
		newConns:  rate.NewLimiter(rate.Limit(lim.NewConnections), 4*lim.NewConnections),
		questions: rate.NewLimiter(rate.Limit(lim.Questions), 4*lim.Questions),
		slots:     make(chan struct{}, lim.Connections),
		udpSlots:  make(chan struct{}, lim.UDPFlows),
		flows:     map[*flow]struct{}{},
	}
	a.rules.Store(rules)
	a.ledger = newLedger(a.log, lim.Records, lim.Window, func(ctx context.Context, e Event) error { return w.cfg.Record(ctx, who, e) })
	if w.cfg.Inspect != nil {
		a.web = w.cfg.Inspect.Link(who, rules.Egress(), func(ctx context.Context, e inspect.Event) { a.reportRequest(ctx, e) })
	}
	var err error
	if a.link, err = newLink(host, func(p []byte) bool { return a.inspect(ctx, p) && a.voice.may(p) }); err == nil {
		err = a.newStack(ctx)
	}
	if err != nil {
		cancel()
		host.Close()
		return nil, err
	}
	if w.cfg.Inner != nil {
		a.inner = serveInner(ctx, a.log, w.cfg.Inner(who), a.innerTLS())
	}
	return a, nil
}

// newStack creates the stack at the end of the link and starts reading from it.
func (a *attached) newStack(ctx context.Context) error {
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol},
	})
	// The most that a connection can buffer when its other side is slow. A sandbox
	// whose connections are all stuck holds this much times Limits.Connections.
	const buf, most = 256 << 10, 1 << 20
	var sack tcpip.TCPSACKEnabled = true
	var moderate tcpip.TCPModerateReceiveBufferOption = true
	// Each sandbox has all ports for itself, and a link delays no packet.
	timeWait := tcpip.TCPTimeWaitTimeoutOption(2 * time.Second)
	linger := tcpip.TCPLingerTimeoutOption(10 * time.Second)
	for _, o := range []tcpip.SettableTransportProtocolOption{
		&sack, &moderate, &timeWait, &linger,
		&tcpip.TCPReceiveBufferSizeRangeOption{Min: 4 << 10, Default: buf, Max: most},
		&tcpip.TCPSendBufferSizeRangeOption{Min: 4 << 10, Default: buf, Max: most},
	} {
		if e := s.SetTransportProtocolOption(tcp.ProtocolNumber, o); e != nil {
			return fmt.Errorf("set up stack: %T: %s", o, e)
		}
	}
	gateway := tcpip.AddrFrom4(sandbox.LinkGateway.As4())
	forward := tcp.NewForwarder(s, buf, 2*cap(a.slots), func(r *tcp.ForwarderRequest) {
		if a.enter() {
			defer a.wg.Done()
			a.handleTCP(ctx, r)
		} else {
			r.Complete(false)
		}
	})
	s.SetTransportProtocolHandler(tcp.ProtocolNumber, forward.HandlePacket)
	s.SetTransportProtocolHandler(udp.ProtocolNumber, udp.NewForwarder(s, func(r *udp.ForwarderRequest) bool {
		return a.handleUDP(ctx, r)
	}).HandlePacket)
	// The interface accepts packets for any address and sends from any.
	e := s.CreateNICWithOptions(nic, a.link, stack.NICOptions{Name: "sandbox", Disabled: true})
	if e == nil {
		e = s.AddProtocolAddress(nic, tcpip.ProtocolAddress{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: gateway.WithPrefix()}, stack.AddressProperties{})
	}
	if e == nil {
		e = s.SetPromiscuousMode(nic, true)
	}
	if e == nil {
		e = s.SetSpoofing(nic, true)
	}
	if e == nil {
		s.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}})
		a.stack = s
		e = s.EnableNIC(nic)
	}
	if e != nil {
		a.link.stop()
		s.Destroy()
		return fmt.Errorf("set up stack: %s", e)
	}
	return nil
}

// enter counts a running handler, which close waits for. It returns false if the
// sandbox is being detached.
func (a *attached) enter() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return false
	}
	a.wg.Add(1)
	return true
}

// close ends the link and records what was counted.
func (a *attached) close() {
	a.stop()
	a.settle(context.Background())
}

// stop ends everything on the link, and then this end of it. The reader stops
// first, so that no new connections arrive. Then each open connection is reset,
// since a program inside that only reads would otherwise wait forever.
func (a *attached) stop() {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.end()
	a.link.halt()
	a.stack.Close()
	a.link.stop()
}

// settle waits a limited time for the handlers that stop has ended, and then
// records what was counted.
func (a *attached) settle(ctx context.Context) {
	if a.inner != nil {
		a.inner.close()
	}
	done := make(chan struct{})
	go func() {
		a.wg.Wait()
		close(done)
		a.stack.Wait()
	}()
	select {
	case <-done:
	case <-time.After(2 * time.Second):
		// A handshake without an answer has a longer time-out of its own.
		a.log.DebugContext(ctx, "detached with handlers still ending")
	}
	a.ledger.end(ctx, true)
}

// refuse records a refusal. The caller then refuses the connection.
func (a *attached) refuse(ctx context.Context, proto string, dst netip.AddrPort, name, reason string) {
	a.log.DebugContext(ctx, "denied", "proto", proto, "dst", dst, "name", name, "reason", reason)
	a.denied(proto, dst, name, reason)
	a.ledger.add(ctx, Event{Kind: Denied, Proto: proto, Dst: dst, Name: name, Reason: reason})
}

// connection describes a connection to dst for policy, with the names that are
// known for it.
func (a *attached) connection(dst netip.AddrPort, names []string) policy.Connection {
	return policy.Connection{Addr: dst, Names: names, Own: a.w.closedOwn(dst)}
}

// open registers a flow before it is dialled, so that update finds it. It returns
// nil if the rules have changed and no longer allow it.
func (a *attached) open(ctx context.Context, c policy.Connection, dst netip.AddrPort, w ruling) (context.Context, *flow) {
	ctx, cancel := context.WithCancel(ctx)
	f := &flow{conn: c, dst: dst, cancel: cancel, asked: w.asked, why: w.verdict.Reason, inspected: w.inspected, other: w.other}
	f.last.Store(time.Now().UnixNano())
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		cancel()
		return ctx, nil
	}
	a.flows[f] = struct{}{}
	a.mu.Unlock()
	// The rules may have changed, a grant may have ended or a switch may have been
	// turned on since it was decided. Either that finds this flow registered, or this
	// check finds it.
	v := a.mayContinue(ctx, f)
	if v.Effect != policy.Allow {
		a.refuse(ctx, "tcp", dst, strings.Join(f.asked.Names, " "), v.Reason)
		a.done(f)
		return ctx, nil
	}
	f.allowed = v.Reason
	return ctx, f
}

// mayContinue decides whether f is still allowed. The reason of an allowed one is
// that of the lists, or of a grant.
func (a *attached) mayContinue(ctx context.Context, f *flow) policy.Verdict {
	v, inspect := a.connect(ctx, f.conn)
	if v.Effect != policy.Allow || inspect && !f.inspected {
		return policy.Verdict{Effect: policy.Deny, Rule: v.Rule, Reason: cmp.Or(v.Reason, "it is not allowed")}
	}
	if host := a.uninspected(ctx, f); host != "" {
		return policy.Verdict{Effect: policy.Deny, Reason: "requests to " + host + " are inspected now: connect again"}
	}
	if a.w.cfg.Permit != nil {
		if p := a.w.cfg.Permit.MayContinue(ctx, a.who, f.asked); p.Effect != policy.Allow {
			return p
		}
	}
	return v
}

// recheck ends the connections and requests that are no longer allowed, and the
// connections to hosts whose requests must be inspected now.
func (a *attached) recheck(ctx context.Context) {
	a.mu.Lock()
	flows := slices.Collect(maps.Keys(a.flows))
	a.mu.Unlock()
	if a.web != nil {
		a.web.Recheck(ctx)
	}
	for _, f := range flows {
		if v := a.mayContinue(ctx, f); v.Effect != policy.Allow {
			f.cancel()
			a.ledger.add(ctx, Event{Kind: Cut, Proto: "tcp", Dst: f.dst, Name: strings.Join(f.asked.Names, " "), Reason: v.Reason})
		}
	}
}

// done removes a flow that has ended.
func (a *attached) done(f *flow) {
	f.cancel()
	a.mu.Lock()
	delete(a.flows, f)
	a.mu.Unlock()
}

// update installs new rules, and ends the connections and requests that they do not
// allow.
func (a *attached) update(ctx context.Context, rules *policy.Outbound) {
	a.mu.Lock()
	// A connection that left in another way must not stay: its creator believes that
	// everything goes through the new proxy.
	moved := !sameProxy(a.rules.Load().Egress().Proxy, rules.Egress().Proxy)
	a.rules.Store(rules)
	flows := slices.Collect(maps.Keys(a.flows))
	a.mu.Unlock()
	if a.web != nil {
		a.web.Update(ctx, rules.Egress())
	}
	for _, f := range flows {
		v := a.mayContinue(ctx, f)
		if moved {
			v = policy.Verdict{Effect: policy.Deny, Reason: "the sandbox's proxy has changed"}
		}
		if v.Effect != policy.Allow {
			f.cancel()
			a.ledger.add(ctx, Event{Kind: Cut, Proto: "tcp", Dst: f.dst, Name: strings.Join(f.asked.Names, " "), Reason: v.Reason})
		}
	}
}

// dialIn connects to a port of the sandbox.
func (a *attached) dialIn(ctx context.Context, port uint16) (net.Conn, error) {
	addr := tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFrom4(sandbox.LinkAddress.As4()), Port: port}
	c, err := gonet.DialContextTCP(ctx, a.stack, addr, ipv4.ProtocolNumber)
	switch {
	case err == nil:
		return c, nil
	case ctx.Err() != nil:
		return nil, fmt.Errorf("connect to port %d of %s: %w", port, a.who.ID, ctx.Err())
	case strings.HasSuffix(err.Error(), (&tcpip.ErrConnectionRefused{}).String()):
		return nil, fmt.Errorf("connect to port %d of %s: %w", port, a.who.ID, sandbox.ErrPortClosed)
	default:
		return nil, fmt.Errorf("connect to port %d of %s: %w", port, a.who.ID, err)
	}
}
