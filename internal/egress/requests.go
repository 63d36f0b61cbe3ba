package egress

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"postern/internal/inspect"
	"postern/internal/outgoing"
	"postern/internal/policy"
)

// inspects reports whether requests of any host are inspected for this sandbox.
func (a *attached) inspects(ctx context.Context) bool {
	return a.web != nil && a.web.Any(ctx)
}

// wants reports whether the requests to host must be inspected.
func (a *attached) wants(ctx context.Context, host string) bool {
	return host != "" && a.inspects(ctx) && a.web.Wants(ctx, host)
}

// inspected reports whether a host is inspected: its requests by a rule, a secret, a
// policy or as mail, or since it is a registry, or since only a grant for requests opens
// it.
func (a *attached) inspected(ctx context.Context, host string, dst netip.AddrPort) bool {
	return a.wants(ctx, host) || a.rules.Load().Packages().Host(host) || a.onlyRequests(ctx, host, dst)
}

// inspectedAt returns an inspected host for which our resolver gave the address of dst,
// or "".
//
// At such an address, on every port, only a connection passes that proves which host it
// is for. The attack: a connection that shows no name, a false one or hides it (ECH, RFC
// 9849), or that begins with another protocol, in which TLS or HTTP follows, reaches
// the host, and nobody judges its requests. What is not known to be harmless is
// refused: there are more protocols than anybody can list.
func (a *attached) inspectedAt(ctx context.Context, dst netip.AddrPort) string {
	if a.web == nil {
		return ""
	}
	for _, n := range a.names.ever(dst.Addr()) {
		if a.inspected(ctx, n, dst) {
			return n
		}
	}
	return ""
}

// unproved is the reason to refuse a connection to an address of an inspected host that
// does not prove which host it is for.
func unproved(host string) string {
	return "requests to " + host + " are inspected, and it shares this address: the connection must begin with TLS or HTTP, and name its host in clear text; for other protocols, the creator of the sandbox has to name the address in allowOut"
}

// misnamed is unproved for a connection that names a host to which it may not go.
func misnamed(host, name, why string) string {
	return "requests to " + host + " are inspected, and the connection goes to its address and names " + name + ": " + why
}

// serveRequests gives an open flow to the inspector.
func (a *attached) serveRequests(ctx context.Context, f *flow, in *insideConn, s *sniffed, host string, restrict func(*outgoing.Request) policy.Verdict) {
	defer context.AfterFunc(ctx, in.abort)()
	defer f.idle(a.w.cfg.Limits.Idle).Stop()
	c := inspect.Conn{
		Conn: &activeConn{Conn: &headConn{insideConn: in, head: s.head}, last: &f.last}, Host: host, Dst: f.dst, TLS: s.tls, Restrict: restrict,
		Dial: func(ctx context.Context) (net.Conn, error) {
			up, err := a.dialOut(ctx, f, f.conn.Addr)
			if err != nil {
				return nil, err
			}
			if !s.tls {
				return a.watchMail(ctx, f, up), nil
			}
			return &activeConn{Conn: up, last: &f.last}, nil
		},
	}
	// The name that the DNS was asked for, if it was, must be the same.
	if asked := a.names.of(f.dst.Addr()); len(asked) > 0 && !slices.Contains(asked, host) {
		c.Misdirected = "the connection is to the address of " + strings.Join(asked, ", ") + ", and names " + host
	}
	a.web.Serve(ctx, c)
}

// uninspected returns the host whose requests must be inspected if f is a connection
// to it that is not, or "".
func (a *attached) uninspected(ctx context.Context, f *flow) string {
	if f.inspected || a.web == nil || f.other && a.rules.Load().ByAddress(f.dst.Addr()) {
		return ""
	}
	names := f.conn.Names
	if len(names) == 0 {
		names = a.names.ever(f.dst.Addr())
	}
	if i := slices.IndexFunc(names, func(n string) bool { return a.inspected(ctx, n, f.dst) }); i >= 0 {
		return names[i]
	}
	return ""
}

// granted returns what decides on the requests of a connection to a registry, or of
// one that only a grant for requests allows.
func (a *attached) granted(ctx context.Context) func(r *outgoing.Request) policy.Verdict {
	g, ok := a.w.cfg.Grants.(RequestGranter)
	return func(r *outgoing.Request) policy.Verdict {
		v := policy.Verdict{Effect: policy.Deny, Reason: "permits for requests cannot be checked"}
		if p := a.rules.Load().Packages(); p.Host(r.Host) {
			if v = reading(p, r); v.Effect == policy.Allow {
				return v
			}
			if ok { // a person may have allowed more than reading
				if permitted := a.find(ctx, g, r); permitted.Effect == policy.Allow {
					return permitted
				}
			}
			return v
		}
		if ok {
			v = a.find(ctx, g, r)
		}
		return v
	}
}

// reading decides on a request to a registry, which is only read, by each method that the
// registry could read from it.
func reading(p *policy.Packages, r *outgoing.Request) (v policy.Verdict) {
	methods, unknown := r.Methods()
	for _, m := range methods {
		if v = p.Judge(r.Host, m, r.Path); v.Effect != policy.Allow {
			return v
		}
	}
	if unknown != "" {
		return policy.Verdict{Effect: policy.Deny, Rule: v.Rule, Reason: "packages are only read, and a registry could read another method from the request, since " + unknown}
	}
	return v
}

// A headConn is a connection of which head has been read.
type headConn struct {
	*insideConn
	head []byte
}

// Read implements [net.Conn].
func (c *headConn) Read(p []byte) (int, error) {
	if len(c.head) > 0 {
		n := copy(p, c.head)
		c.head = c.head[n:]
		return n, nil
	}
	return c.insideConn.Read(p)
}

// An activeConn notes when it carried a byte.
type activeConn struct {
	net.Conn
	last *atomic.Int64
}

// Read implements [net.Conn].
func (c *activeConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.last.Store(time.Now().UnixNano())
	return n, err
}

// Write implements [net.Conn].
func (c *activeConn) Write(p []byte) (int, error) {
	c.last.Store(time.Now().UnixNano())
	return c.Conn.Write(p)
}

// CloseWrite ends the writing side.
func (c *activeConn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// A watchedConn is a connection in clear text that requests leave by. The attack:
// a server that skips lines it does not know takes a mail conversation out of the
// body of a request.
type watchedConn struct {
	net.Conn
	s     *splicing
	heard int
	mail  func()
}

// watchMail returns a connection that ends when mail is sent on it.
func (a *attached) watchMail(ctx context.Context, f *flow, up net.Conn) net.Conn {
	up = &activeConn{Conn: up, last: &f.last}
	s := &splicing{a: a, f: f, up: up, gated: true, more: make(chan struct{}), greeted: make(chan struct{}), downDone: make(chan struct{})}
	s.toServer.s = s
	return &watchedConn{Conn: up, s: s, mail: func() {
		a.ledger.add(ctx, Event{
			Kind: Cut, Proto: "tcp", Dst: f.dst, Name: strings.Join(f.conn.Names, " "),
			Reason: "mail in a request: send it to port 25, 465, 587 or 2525",
		})
	}}
}

// Read implements [net.Conn].
func (c *watchedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 && c.heard < keepStart {
		c.s.hear(p[:min(n, keepStart-c.heard)])
		c.heard += n
	}
	return n, err
}

// Write implements [net.Conn].
func (c *watchedConn) Write(p []byte) (int, error) {
	n, err := c.s.toServer.Write(p)
	if errors.Is(err, errMail) {
		c.mail()
		c.Close()
	}
	return n, err
}

// handleOther decides on a connection that is allowed, c, to a port that is not of the
// web, at an address of hidden, which is inspected. It must prove which host it is for.
// An inspected one is inspected at every port. Another one is judged by its name, and we
// dial what that resolves to, as on the web's ports.
//
// Other protocols pass only if the sandbox's list has the address itself.
func (a *attached) handleOther(ctx context.Context, in *insideConn, dst netip.AddrPort, c policy.Connection, hidden string) {
	defer in.Close()
	defer context.AfterFunc(ctx, in.abort)()
	byAddress := len(c.Names) == 0 && a.rules.Load().ByAddress(dst.Addr())
	s, raw := a.look(in, byAddress)
	if s.mail && a.w.cfg.SMTP != nil {
		a.captureLate(ctx, in, dst, s.head, false)
		return
	}
	refuse := func(name, reason string) {
		a.refuse(ctx, "tcp", dst, name, reason)
		s.refuse(in, reason)
	}
	host := ""
	var restrict func(*outgoing.Request) policy.Verdict
	var g gate
	switch {
	case raw && len(s.head) == 0:
		g = notWebFirst
	case raw:
	case s.proves() && (!s.ech || a.inspected(ctx, s.name, dst)):
		to, v := a.resolveFor(ctx, s.name, dst)
		if v.Effect != policy.Allow {
			refuse(s.name, misnamed(hidden, s.name, v.Reason))
			return
		}
		c = a.connection(to, []string{s.name})
		v, only := a.connect(ctx, c)
		switch {
		case v.Effect != policy.Allow:
			refuse(s.name, misnamed(hidden, s.name, v.Reason))
			return
		case only:
			host, restrict = s.name, a.granted(ctx)
		case a.wants(ctx, s.name):
			host = s.name
		default:
			g = a.gateFor(ctx, &s)
		}
	default:
		refuse(s.name, unproved(hidden))
		return
	}
	w := a.permit(ctx, c)
	if w.verdict.Effect != policy.Allow {
		refuse(strings.Join(w.asked.Names, " "), w.verdict.Reason)
		return
	}
	w.inspected, w.other = host != "", raw
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

// look reads the first message of a connection. If mayRaw is set, it may be of any
// protocol or not come; then raw is true, and s has what was read.
func (a *attached) look(in *insideConn, mayRaw bool) (s sniffed, raw bool) {
	defer func() { _ = in.SetReadDeadline(time.Time{}) }()
	head := make([]byte, 0, 2048)
	if mayRaw {
		_ = in.SetReadDeadline(time.Now().Add(a.w.cfg.Limits.FirstByte))
		n, _ := in.Read(head[:cap(head)])
		head = head[:n]
		if n == 0 || shapeOf(head) == shapeOther {
			return sniffed{head: head}, true
		}
	}
	_ = in.SetReadDeadline(time.Now().Add(a.w.cfg.Limits.SniffTimeout))
	s = sniff(in, head)
	return s, mayRaw && !s.mail && shapeOf(s.head) == shapeOther
}
