package egress

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// keepStart is how many of a server's first bytes are kept: enough for the random
// bytes of a TLS ServerHello.
const keepStart = 64

// errMail means that a program began a mail conversation on a connection that was
// not captured.
var errMail = errors.New("a mail conversation")

// splice copies bytes in both directions until both sides have ended. It owns both
// connections. What the program sends goes through g, if it is not nil, and then
// through a mailWatch. Head is what was read of it before.
func (a *attached) splice(ctx context.Context, f *flow, in *insideConn, up net.Conn, head []byte, g gate) {
	s := &splicing{a: a, f: f, in: in, up: up, more: make(chan struct{}), greeted: make(chan struct{}), downDone: make(chan struct{})}
	s.toServer.s = s
	stop := context.AfterFunc(ctx, s.abort)
	defer stop()
	defer f.idle(a.w.cfg.Limits.Idle).Stop()
	go s.down()
	if g == nil {
		g = passAll
	} else {
		s.gated = true
	}
	err := g(s, head)
	if err == nil {
		err = s.toServer.flush()
	}
	var refused *refusedError
	switch {
	case errors.Is(err, errMail) && !s.gated && !s.toServer.left && a.w.cfg.SMTP != nil:
		s.hangUp()
		a.captureLate(ctx, in, f.dst, s.toServer.held, s.hasGreeted())
		return
	case errors.Is(err, errMail):
		a.ledger.add(ctx, Event{
			Kind: Cut, Proto: "tcp", Dst: f.dst, Name: strings.Join(f.conn.Names, " "),
			Reason: "mail on a connection that did not begin with EHLO: send it to port 25, 465, 587 or 2525",
		})
		s.abort()
	case errors.As(err, &refused):
		a.refuse(ctx, "tcp", f.dst, refused.name, refused.reason)
		s.refuse(refused)
	case err != nil && !errors.Is(err, io.EOF): // a program may end its side at any point
		s.abort()
	default:
		closeWrite(up)
	}
	<-s.downDone
	in.Close()
	up.Close()
}

// splicing is the state of one splice.
type splicing struct {
	a        *attached
	f        *flow
	in       *insideConn
	up       net.Conn
	gated    bool // g, and not the program, writes to toServer
	toServer upward
	ours     atomic.Bool // the program gets no more of the server's bytes, only ours
	downDone chan struct{}
	greeted  chan struct{} // closed when the server's first bytes have been written to the program

	mu    sync.Mutex
	start []byte        // the server's first bytes, at most keepStart
	more  chan struct{} // closed and replaced when start has grown
}

// down copies from the server into the sandbox.
func (s *splicing) down() {
	defer close(s.downDone)
	buf := make([]byte, 4<<10)
	var err error
	for kept := 0; kept < keepStart && err == nil; {
		var n int
		if n, err = s.up.Read(buf); n == 0 {
			continue
		}
		s.f.last.Store(time.Now().UnixNano())
		// Before the write: otherwise the program could react before we know to
		// what.
		s.hear(buf[:min(n, keepStart-kept)])
		_, werr := s.in.Write(buf[:n])
		err = errors.Join(err, werr)
		if kept == 0 && werr == nil {
			close(s.greeted)
		}
		kept += n
	}
	if err == nil {
		err = pump(s.in, s.up, &s.f.last)
	}
	switch {
	case s.ours.Load():
	case err == nil || errors.Is(err, io.EOF):
		closeWrite(s.in)
	default:
		s.abort()
	}
}

// hear keeps the server's first bytes.
func (s *splicing) hear(p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.start = append(s.start, p...)
	close(s.more)
	s.more = make(chan struct{})
}

// said returns the server's first bytes, and a channel that is closed when there
// are more.
func (s *splicing) said() ([]byte, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.start, s.more
}

// listen returns the server's first bytes when they are enough, the server has
// ended or the time is over.
func (s *splicing) listen(limit time.Duration, enough func([]byte) bool) []byte {
	t := time.NewTimer(limit)
	defer t.Stop()
	for {
		b, more := s.said()
		if enough(b) {
			return b
		}
		select {
		case <-more:
		case <-s.downDone:
			b, _ = s.said()
			return b
		case <-t.C:
			return b
		}
	}
}

// hangUp ends the server's side and keeps the program's. Bytes already received
// from the server still reach the program.
func (s *splicing) hangUp() {
	if b, _ := s.said(); len(b) > 0 {
		select {
		case <-s.greeted:
		case <-s.downDone:
		case <-time.After(handshake):
		}
	}
	s.ours.Store(true)
	s.up.Close()
	_ = s.in.SetWriteDeadline(time.Now()) // do not wait for a server that floods
	<-s.downDone
	_ = s.in.SetWriteDeadline(time.Time{})
}

// hasGreeted reports whether the program has received the server's first bytes.
func (s *splicing) hasGreeted() bool {
	select {
	case <-s.greeted:
		return true
	default:
		return false
	}
}

// refuse answers a refused request, after the answers to the requests before it.
func (s *splicing) refuse(r *refusedError) {
	if r.status == 0 {
		s.abort()
		return
	}
	s.ours.Store(true)
	closeWrite(s.up)
	select {
	case <-s.downDone:
		forbid(s.in, r.status, r.reason)
	case <-time.After(handshake):
		s.abort()
	}
}

// abort resets both sides.
func (s *splicing) abort() {
	s.in.abort()
	if t, ok := s.up.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	s.up.Close()
}

// upward writes to the server. Nothing that could deliver mail passes until the
// server has shown that it is not a mail server.
type upward struct {
	s     *splicing
	watch mailWatch
	free  bool // the server speaks another protocol
	sent  int64
	skip  int // how many of the next bytes have been sent already

	mu   sync.Mutex
	held []byte // not sent yet
	left bool   // something was sent
	over bool   // nothing more may be sent
	hold *time.Timer
}

// Write implements [io.Writer]. Its error is errMail if p must not be sent. Then
// held ends with p.
func (u *upward) Write(p []byte) (int, error) {
	if u.skip > 0 {
		n := min(u.skip, len(p))
		u.skip -= n
		if n == len(p) {
			return n, nil
		}
		m, err := u.Write(p[n:])
		return n + m, err
	}
	if u.free {
		return u.s.up.Write(p)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.hold != nil {
		u.hold.Stop()
		u.hold = nil
	}
	sign := u.watch.read(p)
	u.sent += int64(len(p))
	switch wait, mail := u.judge(sign); {
	case mail:
		u.held, u.over = append(u.held, p...), true
		return 0, errMail
	case wait:
		// A word that is sent letter by letter, or a program that waits for an
		// answer to an incomplete word.
		u.held = append(u.held, p...)
		u.hold = time.AfterFunc(u.s.a.w.cfg.Limits.SniffTimeout, func() { _ = u.flush() })
		return len(p), nil
	}
	if err := u.flushLocked(); err != nil {
		return 0, err
	}
	u.left = true
	return u.s.up.Write(p)
}

// judge decides on bytes with these signs: wait for more bytes, treat them as mail,
// or send them.
func (u *upward) judge(sign mailSign) (wait, mail bool) {
	start, _ := u.s.said()
	t, tunnel := serverProtocol(start), u.watch.tunnels(start)
	if sign&helloFirst != 0 && t != foreign {
		return false, true
	}
	if t == silent && sign&(delivery|askFirst) != 0 {
		// It depends on the server, so wait for its first bytes, for a limited
		// time. A program that waits for an answer to the bytes held here waits in
		// vain, but otherwise a server that greets slowly would deliver the mail.
		start = u.s.listen(u.s.a.w.cfg.Limits.SniffTimeout, func(b []byte) bool { return serverProtocol(b) != silent || u.watch.tunnels(b) })
		t, tunnel = serverProtocol(start), u.watch.tunnels(start)
	}
	switch {
	case tunnel:
		// The other end of the tunnel may be a mail server, whatever comes first.
		return false, sign&(recipient|hidden) != 0
	case t == foreign:
		u.free = true
		return false, false
	case t == replies:
		return sign&helloMaybe != 0 && !u.left, sign&(command|askFirst|delivery) != 0
	default:
		u.free = u.sent > maxUnheard && sign&delivery == 0
		return sign&helloMaybe != 0 && !u.left, sign&delivery != 0
	}
}

// flush sends the bytes held back.
func (u *upward) flush() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.flushLocked()
}

// flushLocked sends the bytes held back, as the gate has allowed them.
func (u *upward) flushLocked() error {
	if len(u.held) == 0 || u.over {
		return nil
	}
	p := u.held
	u.held, u.left = nil, true
	_, err := u.s.up.Write(p)
	return err
}

// read reads from the program.
func (s *splicing) read(p []byte) (int, error) {
	n, err := s.in.Read(p)
	if n > 0 {
		s.f.last.Store(time.Now().UnixNano())
		return n, nil // the next read returns the error again
	}
	return n, err
}

// pump copies until src ends. Its buffer grows with the traffic: most connections
// are quiet, and each one waits with its buffer.
func pump(dst io.Writer, src io.Reader, last *atomic.Int64) error {
	buf := make([]byte, 8<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			last.Store(time.Now().UnixNano())
			if _, werr := dst.Write(buf[:n]); werr != nil {
				return werr
			}
			if n == len(buf) && n < 256<<10 {
				buf = make([]byte, 2*n)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// closeWrite ends our side of a connection and leaves the other side's open.
func closeWrite(c io.Closer) {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		_ = w.CloseWrite()
		return
	}
	c.Close()
}
