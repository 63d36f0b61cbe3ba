package guest

import (
	"context"
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
