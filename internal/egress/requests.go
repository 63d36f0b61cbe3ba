package egress

import (
	"bytes"
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

// wantedAt returns a host whose requests must be inspected and for which our
// resolver gave addr, or "".
//
// The attack: a connection that shows no name, or hides it (ECH, RFC 9849), goes to
// such a host by its address, and nobody judges its requests.
func (a *attached) wantedAt(ctx context.Context, addr netip.Addr) string {
	if !a.inspects(ctx) {
		return ""
	}
	names := a.names.of(addr)
	if i := slices.IndexFunc(names, func(n string) bool { return a.web.Wants(ctx, n) }); i >= 0 {
		return names[i]
	}
	return ""
}

// unnamed is the reason to refuse a connection that may be for a host whose requests
// are inspected.
func unnamed(host string) string {
	return "requests to " + host + " are inspected, and it shares this address: the connection must name its host, in clear text"
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
	if f.inspected || f.other || !a.inspects(ctx) {
		return ""
	}
	names := f.conn.Names
	if len(names) == 0 {
		names = a.names.of(f.dst.Addr())
	}
	if i := slices.IndexFunc(names, func(n string) bool { return a.web.Wants(ctx, n) }); i >= 0 {
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

// handleOther decides on a connection that the lists allow, c, to a port that is not
// of the web, at an address of a host whose requests are inspected. TLS and HTTP are
// inspected there as well, whichever the port. Other protocols pass.
func (a *attached) handleOther(ctx context.Context, in *insideConn, dst netip.AddrPort, c policy.Connection) {
	defer in.Close()
	defer context.AfterFunc(ctx, in.abort)()
	head := make([]byte, 1, 2048)
	_ = in.SetReadDeadline(time.Now().Add(a.w.cfg.Limits.FirstByte))
	n, _ := in.Read(head[:1])
	s := sniffed{}
	if head = head[:n]; n > 0 {
		_ = in.SetReadDeadline(time.Now().Add(a.w.cfg.Limits.SniffTimeout))
		s = sniff(in, head)
	}
	_ = in.SetReadDeadline(time.Time{})
	refuse := func(name, reason string) {
		a.refuse(ctx, "tcp", dst, name, reason)
		s.refuse(in, reason)
	}
	host := ""
	switch {
	case s.mail: // the wall watches for it below
	case (s.tls || s.http) && s.problem == "" && a.wants(ctx, s.name):
		to, v := a.resolveFor(ctx, s.name, dst)
		if v.Effect != policy.Allow {
			refuse(s.name, v.Reason)
			return
		}
		c, host = a.connection(to, []string{s.name}), s.name
	case (s.tls || s.http && webLike(s.head)) && s.hides():
		refuse(s.name, unnamed(a.wantedAt(ctx, dst.Addr())))
		return
	}
	w := a.permit(ctx, c)
	if w.verdict.Effect != policy.Allow {
		refuse(strings.Join(w.asked.Names, " "), w.verdict.Reason)
		return
	}
	w.inspected, w.other = host != "", host == ""
	ctx, f := a.open(ctx, c, dst, w)
	if f == nil {
		return
	}
	defer a.done(f)
	if host != "" {
		a.serveRequests(ctx, f, in, &s, host, nil)
		return
	}
	up, err := a.dialOut(ctx, f, c.Addr)
	if err != nil {
		in.abort()
		return
	}
	if len(s.head) > 0 {
		a.splice(ctx, f, in, up, s.head, nil)
		return
	}
	a.splice(ctx, f, in, up, nil, notWebFirst)
}

// notWebFirst is a gate for a connection on which the program sent nothing at first.
// The attack: it waits until the wall has stopped to look, and then begins with TLS or
// HTTP.
func notWebFirst(s *splicing, buf []byte) error {
	for {
		var err error
		if buf, err = s.readMore(buf); err != nil {
			return err
		}
		if start, _ := s.said(); len(start) > 0 {
			s.gated = false
			return passAll(s, buf) // the server speaks first: it is no web server
		}
		switch {
		case buf[0] == 0x16 || webLike(buf):
			return &refusedError{reason: "requests to this host are inspected: a program must send the first byte of a request at once"}
		case !maybeWeb(buf):
			s.gated = false
			return passAll(s, buf)
		}
	}
}

// webLike reports whether the bytes at the start of a connection are those of an HTTP
// request for a server that is not strict.
func webLike(b []byte) bool {
	b = bytes.TrimLeft(b, " \t\r\n\x00")
	line, _, _ := bytes.Cut(b, []byte("\n"))
	if bytes.Contains(bytes.ToUpper(line), []byte("HTTP/")) || len(b) == 0 {
		return true
	}
	word, _, ok := bytes.Cut(line, []byte(" "))
	return ok && slices.Contains([]string{"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"}, strings.ToUpper(string(word)))
}

// maybeWeb reports whether more bytes could show an HTTP request.
func maybeWeb(b []byte) bool {
	b = bytes.TrimLeft(b, " \t\r\n\x00")
	return !bytes.ContainsFunc(b, func(r rune) bool { return r < ' ' || r > '~' }) && (len(b) <= 32 || bytes.IndexByte(b, ' ') >= 0) && len(b) < maxRequestHead
}
