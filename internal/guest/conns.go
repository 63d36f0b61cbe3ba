package guest

import (
	"bytes"
	"context"
	"io"
	"net"
	"sync"
)

// maxLocalConns bounds the connections from inside the sandbox. The host limits its
// own.
const maxLocalConns = 256

// conns is the set of connections to the guest's port. It includes tunnels, which
// the HTTP server no longer tracks.
//
// The attack: a process in the sandbox opens connections and sends nothing, until
// the guest has no descriptors left. So there is a limit for connections from
// inside, beyond which new ones are closed.
type conns struct {
	mu    sync.Mutex
	open  map[*conn]struct{}
	local int // how many of them are from inside the sandbox
}

// A conn is a connection in the set. It has all methods of a TCP connection, so
// that the kernel can copy data directly where that is possible.
type conn struct {
	*net.TCPConn
	set   *conns
	local bool

	// Data that was read ahead. An idle connection has none. Reads are never
	// concurrent, since net/http does not do that.
	ahead []byte  // not returned by Read yet
	whole *[]byte // buffer of ahead; nil if there is none
	busy  bool    // the last read filled its buffer
}

// readAhead is how many bytes are read at once from a busy connection. net/http
// alternates between reads of 4 KiB and of the rest of a chunk. For a chunked
// upload that made three system calls instead of one, which took more time than
// everything else.
const readAhead = 128 << 10

var aheadBuffers = sync.Pool{New: func() any { b := make([]byte, readAhead); return &b }}

// Read implements [net.Conn].
func (n *conn) Read(p []byte) (int, error) {
	if len(n.ahead) == 0 {
		// net/http waits with a buffer of one byte for the client to disconnect or
		// to send another request. That needs no buffer of ours.
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

// rest returns the remaining data, without reading ahead.
func (n *conn) rest() io.Reader {
	if len(n.ahead) == 0 {
		return n.TCPConn
	}
	return io.MultiReader(bytes.NewReader(n.ahead), n.TCPConn) // the buffer is freed with the connection
}

// listen returns a listener that adds its connections to the set.
func (c *conns) listen(l net.Listener) net.Listener { return &connListener{l, c} }

// closeBut closes all connections except one.
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

// add returns false if there are too many connections; then it does not add n.
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
			return c, nil // the guest listens on TCP only
		}
		n := &conn{TCPConn: tcp, set: l.set, local: isLocal(tcp)}
		if l.set.add(n) {
			return n, nil
		}
		tcp.Close()
	}
}

// isLocal reports whether both ends of c are in the sandbox: the addresses are
// loopback, or the same.
func isLocal(c net.Conn) bool {
	here, ok1 := c.LocalAddr().(*net.TCPAddr)
	there, ok2 := c.RemoteAddr().(*net.TCPAddr)
	return ok1 && ok2 && (here.IP.IsLoopback() || there.IP.IsLoopback() || here.IP.Equal(there.IP))
}

// connKey is the context key of a request's connection.
type connKey struct{}

// withConn adds the connection to the context of its requests, since net/http does
// not expose it.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// connOf returns the connection of a request, or nil if it is unknown.
func connOf(ctx context.Context) *conn {
	c, _ := ctx.Value(connKey{}).(*conn)
	return c
}
