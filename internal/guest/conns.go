package guest

import (
	"bytes"
	"context"
	"io"
	"net"
	"sync"
)

// maxLocalConns bounds the connections that come from inside the sandbox. The
// host's are not bounded here: it bounds itself.
const maxLocalConns = 256

// conns are the connections to the guest's port, also those that have become
// tunnels, of which the HTTP server no longer knows.
//
// It closes connections that come from the sandbox itself when there are too
// many. Without that any process could use up the guest's descriptors by
// connecting and saying nothing.
type conns struct {
	mu    sync.Mutex
	open  map[*conn]struct{}
	local int // of those, from inside the sandbox
}

// A conn is one of them. It is a TCP connection with all its methods, so that
// the kernel can copy where it knows how.
type conn struct {
	*net.TCPConn
	set   *conns
	local bool

	// What was read ahead; empty on a connection that is not busy. Reads do not
	// run side by side: net/http sees to that.
	ahead []byte  // not handed on yet
	whole *[]byte // the buffer that it is in, nil without one
	busy  bool    // the last read found as much as it could take
}

// readAhead is what is read at once from a busy connection, in bytes. net/http
// reads 4 KiB and the rest of a chunk in turn, which for an upload in chunks are
// three system calls where one will do: it took more time than all else.
const readAhead = 128 << 10

var aheadBuffers = sync.Pool{New: func() any { b := make([]byte, readAhead); return &b }}

// Read implements [net.Conn].
func (n *conn) Read(p []byte) (int, error) {
	if len(n.ahead) == 0 {
		// net/http waits with one byte for a client to leave or to ask again: no
		// buffer is held for that.
		if !n.busy || len(p) == 1 || len(p) >= readAhead {
			got, err := n.TCPConn.Read(p)
			n.busy = got == len(p) && got > 1
			return got, err
		}
		n.whole = aheadBuffers.Get().(*[]byte)
		got, err := n.TCPConn.Read(*n.whole)
		n.busy = got > len(p)
		n.ahead = (*n.whole)[:got]
		if got == 0 {
			n.release()
			return 0, err
		}
	}
	got := copy(p, n.ahead)
	if n.ahead = n.ahead[got:]; len(n.ahead) == 0 {
		n.release()
	}
	return got, nil
}

func (n *conn) release() {
	aheadBuffers.Put(n.whole)
	n.ahead, n.whole = nil, nil
}

// rest is what comes from now on, without reading ahead.
func (n *conn) rest() io.Reader {
	if len(n.ahead) == 0 {
		return n.TCPConn
	}
	return io.MultiReader(bytes.NewReader(n.ahead), n.TCPConn) // the buffer goes with the connection
}

// listen returns l with its connections in the set.
func (c *conns) listen(l net.Listener) net.Listener { return &connListener{l, c} }

// closeBut closes all connections but one.
func (c *conns) closeBut(stays *conn) {
	c.mu.Lock()
	var list []*conn
	for o := range c.open {
		if o != stays {
			list = append(list, o)
		}
	}
	c.mu.Unlock()
	for _, o := range list {
		o.Close()
	}
}

// add reports false, and adds nothing, if there are too many.
func (c *conns) add(n *conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n.local && c.local >= maxLocalConns {
		return false
	}
	if n.local {
		c.local++
	}
	if c.open == nil {
		c.open = map[*conn]struct{}{}
	}
	c.open[n] = struct{}{}
	return true
}

// Close implements [net.Conn].
func (n *conn) Close() error {
	n.set.mu.Lock()
	if _, open := n.set.open[n]; open {
		delete(n.set.open, n)
		if n.local {
			n.set.local--
		}
	}
	n.set.mu.Unlock()
	return n.TCPConn.Close()
}

type connListener struct {
	net.Listener
	set *conns
}

// Accept implements [net.Listener].
func (l *connListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		tcp, ok := c.(*net.TCPConn)
		if !ok {
			return c, nil // unreachable: the guest listens on TCP only
		}
		n := &conn{TCPConn: tcp, set: l.set, local: isLocal(tcp)}
		if l.set.add(n) {
			return n, nil
		}
		tcp.Close()
	}
}

// isLocal reports whether both ends of c are in the sandbox: one is loopback,
// or the address is the same.
func isLocal(c net.Conn) bool {
	here, ok1 := c.LocalAddr().(*net.TCPAddr)
	there, ok2 := c.RemoteAddr().(*net.TCPAddr)
	return ok1 && ok2 && (here.IP.IsLoopback() || there.IP.IsLoopback() || here.IP.Equal(there.IP))
}

type connKey struct{}

// withConn lets a handler know the connection that its request came on, which
// net/http does not tell.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// connOf returns the connection of a request, nil if it is not known.
func connOf(ctx context.Context) *conn {
	c, _ := ctx.Value(connKey{}).(*conn)
	return c
}
