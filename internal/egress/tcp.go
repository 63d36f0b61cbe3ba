package egress

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"postern/internal/outgoing"
	"postern/internal/policy"
	"postern/internal/sandbox"
)

// An insideConn is a connection of a program in the sandbox. Its local address is
// the destination that the program aimed at.
type insideConn struct {
	*gonet.TCPConn
	ep tcpip.Endpoint
}

// abort resets the connection, so that the program does not take what it has read
// for all of the data.
func (c *insideConn) abort() { c.ep.Abort() }

// accept answers the handshake. It returns nil if the program has given up.
func accept(r *tcp.ForwarderRequest) *insideConn {
	var wq waiter.Queue
	ep, e := r.CreateEndpoint(&wq)
	r.Complete(false)
	if e != nil {
		return nil
	}
	return &insideConn{gonet.NewTCPConn(&wq, ep), ep}
}

// handleTCP decides on a connection whose handshake has not been answered yet.
func (a *attached) handleTCP(ctx context.Context, r *tcp.ForwarderRequest) {
	id := r.ID()
	dst := netip.AddrPortFrom(netip.AddrFrom4(id.LocalAddress.As4()), id.LocalPort)
	refuse := func(reason string) {
		a.refuse(ctx, "tcp", dst, a.standIns.of(dst.Addr()), reason)
		r.Complete(true)
	}
	select {
	case a.slots <- struct{}{}:
		defer func() { <-a.slots }()
	default:
		refuse(fmt.Sprintf("the sandbox has %d connections open, which is the limit", cap(a.slots)))
		return
	}
	switch p := dst.Port(); {
	case p == 53:
		// Our resolver answers in place of every DNS server that the sandbox may
		// connect to. Other DNS servers must not seem reachable: a program that
		// tries 8.8.8.8 to detect Internet access would find it.
		if v := a.mayAsk(dst); v.Effect != policy.Allow {
			refuse(v.Reason)
		} else if c := accept(r); c != nil {
			a.serveDNSStream(ctx, c, dst)
		}
	case smtpPort(p):
		switch {
		case a.w.cfg.SMTP == nil:
			refuse("mail from this sandbox is not accepted")
		case a.who.Inbox == "":
			refuse("this sandbox has no inbox to send mail from; attach one at creation with the metadata entry postern.inbox")
		default:
			if c := accept(r); c != nil {
				a.capture(ctx, c, dst, nil)
			}
		}
	case dst.Addr() == sandbox.LinkGateway:
		if a.inner == nil || p != 80 && (p != 443 || a.w.cfg.Leaf == nil) {
			refuse(dst.Addr().String() + " has no service at this port")
		} else if c := accept(r); c != nil {
			a.inner.serve(c, p == 443)
		}
	default:
		a.handleOut(ctx, r, dst)
	}
}

// mayAsk decides on a connection to a DNS server.
func (a *attached) mayAsk(dst netip.AddrPort) policy.Verdict {
	if dst.Addr() == sandbox.LinkGateway {
		return policy.Verdict{Effect: policy.Allow}
	}
	return a.rules.Load().Connect(a.connection(dst, a.names.of(dst.Addr())))
}

// handleOut decides on a connection to the outside.
func (a *attached) handleOut(ctx context.Context, r *tcp.ForwarderRequest, dst netip.AddrPort) {
	rules := a.rules.Load()
	if name := a.standIns.of(dst.Addr()); name != "" {
		v := a.resolve(ctx, name)
		if v.Effect == policy.Allow {
			v.Reason = name + " was not allowed when it was looked up; it is now: look it up again"
		}
		a.refuse(ctx, "tcp", dst, name, v.Reason)
		r.Complete(true)
		return
	}
	c := a.connection(dst, nil)
	v := rules.Connect(c)
	web := dst.Port() == 80 || dst.Port() == 443 || rules.Packages().Port(dst.Port())
	if v.Effect == policy.Allow && web && (a.w.cfg.Permit != nil && a.w.cfg.Permit.Names(ctx, a.who) || a.inspects(ctx)) {
		if in := accept(r); in != nil {
			a.handleNamed(ctx, in, dst)
		}
		return
	}
	only := false // for certain requests
	if v.Effect != policy.Allow && a.mayByName(ctx, c) {
		// Only a name can allow it: a name that our resolver gave this address for,
		// or, on the web's ports, one that the connection itself shows.
		if web {
			if in := accept(r); in != nil {
				a.handleNamed(ctx, in, dst)
			}
			return
		}
		c.Names = a.names.of(dst.Addr())
		v, only = a.connect(ctx, c)
	} else if v.Effect != policy.Allow {
		// No name opens this port. The reason says of which host that is.
		if c.Names = a.names.of(dst.Addr()); len(c.Names) > 0 {
			v.Reason = rules.Connect(c).Reason
		}
	}
	hidden := a.inspectedAt(ctx, dst)
	if only && hidden == "" {
		v = a.connectPlain(ctx, c)
	}
	if v.Effect != policy.Allow {
		a.refuse(ctx, "tcp", dst, strings.Join(c.Names, " "), v.Reason)
		r.Complete(true)
		return
	}
	if hidden != "" {
		if in := accept(r); in != nil {
			a.handleOther(ctx, in, dst, c, hidden)
		}
		return
	}
	w := a.permit(ctx, c)
	if w.verdict.Effect != policy.Allow {
		a.refuse(ctx, "tcp", dst, strings.Join(w.asked.Names, " "), w.verdict.Reason)
		r.Complete(true)
		return
	}
	ctx, f := a.open(ctx, c, dst, w)
	if f == nil {
		r.Complete(true)
		return
	}
	defer a.done(f)
	// The handshake is answered only after the dial, so that a refusal or time-out
	// outside is one inside, too.
	up, err := a.dialOut(ctx, f, dst)
	if err != nil {
		r.Complete(true)
		return
	}
	in := accept(r)
	if in == nil {
		up.Close()
		return
	}
	var g gate
	if !web && (len(c.Names) > 0 || a.inspects(ctx)) {
		g = func(s *splicing, head []byte) error { return a.byFirstMessage(ctx, s, head) }
	}
	a.splice(ctx, f, in, up, nil, g)
}

// A ruling is the decision of Config.Permit on a connection.
type ruling struct {
	asked   policy.Connection
	verdict policy.Verdict
	// Of flow.
	inspected, other bool
}

// permit asks Config.Permit. If a connection is allowed by its address, Permit gets
// the names that our resolver gave for it.
func (a *attached) permit(ctx context.Context, c policy.Connection) ruling {
	if a.w.cfg.Permit == nil {
		return ruling{asked: c, verdict: policy.Verdict{Effect: policy.Allow}}
	}
	if len(c.Names) == 0 {
		c.Names = a.names.of(c.Addr.Addr())
	}
	return ruling{asked: c, verdict: a.w.cfg.Permit.Permit(ctx, a.who, c)}
}

// handleNamed decides on a web connection by the name that the connection shows.
func (a *attached) handleNamed(ctx context.Context, in *insideConn, dst netip.AddrPort) {
	defer in.Close()
	defer context.AfterFunc(ctx, in.abort)()
	_ = in.SetReadDeadline(time.Now().Add(a.w.cfg.Limits.SniffTimeout))
	s := sniff(in, nil)
	_ = in.SetReadDeadline(time.Time{})
	if s.mail && a.w.cfg.SMTP != nil {
		a.captureLate(ctx, in, dst, s.head, false)
		return
	}
	refuse := func(name, reason string) {
		a.refuse(ctx, "tcp", dst, name, reason)
		s.refuse(in, reason)
	}
	c := a.connection(dst, nil)
	var g gate
	host := "" // whose requests are inspected
	// The attack: a ClientHello or a request that servers read differently, to an
	// address that is allowed whatever its name.
	if s.problem != "" && a.wants(ctx, s.name) {
		refuse(s.name, s.problem)
		return
	}
	hidden := a.inspectedAt(ctx, dst)
	switch {
	case hidden == "":
	case s.proves() && (!s.ech || a.inspected(ctx, s.name, dst)):
	case s.ssh && a.rules.Load().ByAddress(dst.Addr()):
		g = sshOnly
	default:
		refuse(s.name, unproved(hidden))
		return
	}
	// The address may be allowed whatever its name, see handleOut.
	anyName := a.rules.Load().Connect(c).Effect == policy.Allow
	switch {
	case s.mail && !anyName:
		refuse("", "mail from this sandbox is not accepted")
		return
	case s.problem != "" && !anyName:
		refuse(s.name, s.problem)
		return
	case s.name != "" && s.problem == "":
		// The sandbox may send any name to any address. So the name decides, and we
		// dial the address that we resolve it to.
		to, v := a.resolveFor(ctx, s.name, dst)
		switch {
		case v.Effect == policy.Allow:
			c, g = a.connection(to, []string{s.name}), a.gateFor(ctx, &s)
			if a.wants(ctx, s.name) {
				host = s.name
			}
			// The name hides another, which may be a host at the address that it has.
			if s.ech && to != dst && !a.inspected(ctx, s.name, to) {
				if hidden := a.inspectedAt(ctx, to); hidden != "" {
					refuse(s.name, unproved(hidden))
					return
				}
			}
		case hidden != "":
			refuse(s.name, misnamed(hidden, s.name, v.Reason))
			return
		case anyName && a.mayResolveOutside(ctx, s.name) && !a.wants(ctx, s.name):
			// The name may not be resolved, so it proves nothing about the address,
			// but the address itself is allowed.
		default:
			refuse(s.name, v.Reason)
			return
		}
	case anyName: // no name is proved, and none is needed
	case s.tls || s.http:
		// Many names share an address, and the request is for one of them without
		// naming it.
		refuse("", "the connection names no host")
		return
	default:
		// SSH, or a protocol in which the server speaks first: use what our
		// resolver knows.
		c.Names = a.names.of(dst.Addr())
		if v := a.connectPlain(ctx, c); v.Effect != policy.Allow {
			refuse(strings.Join(c.Names, " "), v.Reason)
			return
		}
		if g = func(s *splicing, head []byte) error { return a.serverFirst(ctx, s, head) }; s.ssh {
			g = sshOnly
		}
	}
	// A grant for requests allows the connection only if they are inspected.
	var restrict func(*outgoing.Request) policy.Verdict
	switch v, ins := a.connect(ctx, c); {
	case v.Effect == policy.Allow && ins && a.web != nil && (s.tls || s.http) && s.name != "" && s.problem == "":
		host, restrict = s.name, a.granted(ctx)
	default:
		if v := a.connectPlain(ctx, c); v.Effect != policy.Allow {
			refuse(strings.Join(c.Names, " "), v.Reason)
			return
		}
	}
	w := a.permit(ctx, c)
	w.inspected, w.other = host != "", !s.tls && !s.http
	if w.verdict.Effect != policy.Allow {
		refuse(strings.Join(w.asked.Names, " "), w.verdict.Reason)
		return
	}
	ctx, f := a.open(ctx, c, dst, w)
	if f == nil {
		return
	}
	defer a.done(f)
	if host != "" {
		a.serveRequests(ctx, f, in, &s, host, restrict)
		return
	}
	up, err := a.dialOut(ctx, f, c.Addr)
	if err != nil {
		in.abort()
		return
	}
	a.splice(ctx, f, in, up, s.head, g)
}

// mayResolveOutside reports whether Config.Permit would allow resolving name.
func (a *attached) mayResolveOutside(ctx context.Context, name string) bool {
	return a.w.cfg.Permit == nil || a.w.cfg.Permit.Lookup(ctx, a.who, name).Effect == policy.Allow
}

// resolveFor returns the address to dial for a name that was seen on a connection
// to dst. It is dst itself if the name resolves to it.
func (a *attached) resolveFor(ctx context.Context, name string, dst netip.AddrPort) (netip.AddrPort, policy.Verdict) {
	addrs, v, err := a.lookup(ctx, name, dst.Port())
	if err != nil {
		return dst, policy.Verdict{Effect: policy.Deny, Reason: "no address was found for " + name}
	}
	if v.Effect != policy.Allow {
		return dst, v
	}
	if slices.Contains(addrs, dst.Addr()) {
		return dst, v
	}
	return netip.AddrPortFrom(addrs[0], dst.Port()), v
}

// dialOut records that a destination is allowed, and connects to it. The attack: code
// that talks to somebody in the moment before the server or its database dies, so that
// nobody ever reads of it. So what cannot be recorded is not connected.
func (a *attached) dialOut(ctx context.Context, f *flow, to netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, a.w.cfg.Limits.DialTimeout)
	defer cancel()
	err := a.ledger.acknowledge(ctx, Event{Kind: Connected, Proto: "tcp", Dst: f.dst, Name: strings.Join(f.conn.Names, " "), Dialed: to, Reason: cmp.Or(f.why, f.allowed)})
	if err != nil {
		a.log.WarnContext(ctx, "allowed connection refused", "dst", f.dst, "err", err)
		return nil, err
	}
	up, err := a.dial(ctx, to)
	if err != nil {
		a.log.DebugContext(ctx, "allowed connection failed", "dst", f.dst, "dialed", to, "err", err)
		return nil, err
	}
	return up, nil
}
