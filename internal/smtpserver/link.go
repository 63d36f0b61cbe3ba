package smtpserver

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"postern/internal/auth"
)

// maxReplies bounds the reply lines of one conversation, and so its commands:
// go-smtp would answer NOOP for ever.
const maxReplies = 20_000

// After a refusal the rest of the message is read and discarded, so that the sender
// gets the reply instead of a reset connection. These bound how long that may take.
const (
	drainIdle  = 3 * time.Second
	drainTotal = 60 * time.Second
)

type phase int

const (
	commands phase = iota // between messages
	data                  // a message is being read
	drain                 // the rest of a refused message is being discarded
)

// A link is the connection of a conversation. It adds the limits that go-smtp does
// not have: the time for a whole message, the number of commands, and the rest of a
// refused message. When it is doomed every Read returns a timeout, after which
// go-smtp replies 421 and hangs up. This is the only way to end a conversation from
// outside of go-smtp.
type link struct {
	net.Conn
	s      *Server
	closed chan struct{}
	once   sync.Once

	door *door // nil for a captured conversation; set before it begins

	// Of a captured conversation; set before it begins. The context is stored here
	// because go-smtp cannot pass one.
	ctx      context.Context
	captured bool
	who      auth.Principal
	dst      netip.AddrPort

	seen []byte // octets that were read before; used only by Read
	mute bool   // suppress the greeting; used only by Write

	mu      sync.Mutex
	phase   phase
	until   time.Time // end of data and drain
	closing bool
	doomed  bool
	replies int
}

func (s *Server) newLink(conn net.Conn) *link {
	return &link{Conn: conn, s: s, ctx: context.Background(), closed: make(chan struct{})}
}

// Read reads with the deadline of the phase that the conversation is in.
func (k *link) Read(p []byte) (int, error) {
	k.mu.Lock()
	if k.doomed {
		k.mu.Unlock()
		return 0, os.ErrDeadlineExceeded
	}
	if len(k.seen) > 0 {
		n := copy(p, k.seen)
		k.seen = k.seen[n:]
		k.mu.Unlock()
		return n, nil
	}
	ph := k.phase
	if ph != commands {
		idle := k.s.cfg.IdleTimeout
		if ph == drain {
			idle = min(idle, drainIdle)
		}
		d := time.Now().Add(idle)
		if d.After(k.until) {
			d = k.until
		}
		_ = k.Conn.SetReadDeadline(d)
	}
	k.mu.Unlock()
	n, err := k.Conn.Read(p)
	if err != nil && ph != commands {
		// The end of the message is unknown now. What follows must not be parsed as
		// commands, since the sender means it as text.
		k.doom()
	}
	return n, err
}

// Write writes a reply.
func (k *link) Write(p []byte) (int, error) {
	k.mu.Lock()
	if k.replies++; k.replies > maxReplies {
		k.doomed = true
	}
	k.mu.Unlock()
	n := len(p)
	if k.mute {
		i := bytes.IndexByte(p, '\n') + 1
		if i == 0 {
			return n, nil
		}
		k.mute = false
		if p = p[i:]; len(p) == 0 {
			return n, nil
		}
	}
	if m, err := k.Conn.Write(p); err != nil {
		return n - len(p) + m, err
	}
	return n, nil
}

// SetReadDeadline is called by go-smtp before it waits for a command.
func (k *link) SetReadDeadline(t time.Time) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.phase == drain {
		k.phase = commands
		k.doomed = k.doomed || k.closing
	}
	if k.doomed {
		t = time.Now().Add(-time.Second)
	}
	return k.Conn.SetReadDeadline(t)
}

// Close closes the connection, once.
func (k *link) Close() error {
	k.once.Do(func() {
		k.s.untrack(k)
		k.linger()
		close(k.closed)
	})
	return k.Conn.Close()
}

// linger reads the input of a client that is being disconnected. Closing a socket
// with unread input resets the connection, and the client may lose the last reply.
func (k *link) linger() {
	k.mu.Lock()
	doomed := k.doomed
	k.mu.Unlock()
	tcp, ok := k.Conn.(*net.TCPConn)
	if !doomed || !ok || tcp.CloseWrite() != nil {
		return
	}
	_ = tcp.SetReadDeadline(time.Now().Add(time.Second))
	_, _ = io.Copy(io.Discard, io.LimitReader(tcp, 4<<20))
}

// doom ends the conversation at its next read.
func (k *link) doom() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.doomed = true
}

// closeWhenIdle ends the conversation now, or after the message that is being
// received.
func (k *link) closeWhenIdle() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closing = true
	if k.phase == commands {
		k.doomed = true
		_ = k.Conn.SetReadDeadline(time.Now().Add(-time.Second))
	}
}

// beginData starts the data phase with its deadline.
func (k *link) beginData() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.phase, k.until = data, time.Now().Add(k.s.cfg.DataTimeout)
}

// endData ends the data phase: the message was read completely, or it was refused
// before its end.
func (k *link) endData(complete bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if complete {
		k.phase = commands
		k.doomed = k.doomed || k.closing
		return
	}
	k.phase, k.until = drain, time.Now().Add(drainTotal)
}
