package guest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// PortHeader is set in the answer to a failed CONNECT: "closed" if nothing listens
// on the port.
const PortHeader = "X-Postern-Port"

// maxTunnels bounds the open tunnels.
const maxTunnels = 1024

// tunnel connects the host to a port on the sandbox's loopback, where many programs
// listen by default and which the link cannot reach:
//
//	CONNECT 127.0.0.1:PORT HTTP/1.1
//
// After status 200 the connection carries the port's bytes; each direction is
// closed separately. The guest adds no buffering, so a slow reader slows down the
// writer.
func (s *Server) tunnel(w http.ResponseWriter, r *http.Request) error {
	port, err := tunnelPort(r.Host)
	if err != nil {
		return badRequest(err)
	}
	hijacker, ok := w.(http.Hijacker)
	if !ok || r.ProtoMajor != 1 {
		return &statusError{http.StatusHTTPVersionNotSupported, errors.New("a tunnel needs HTTP/1.1")}
	}
	select {
	case s.tunnels <- struct{}{}:
		defer func() { <-s.tunnels }()
	default:
		return &statusError{http.StatusServiceUnavailable, fmt.Errorf("%d tunnels are open already", maxTunnels)}
	}
	there, err := dialLoopback(r.Context(), port)
	if err != nil {
		if errors.Is(err, unix.ECONNREFUSED) {
			w.Header().Set(PortHeader, "closed")
			return &statusError{http.StatusBadGateway, fmt.Errorf("nothing listens on port %d", port)}
		}
		return &statusError{http.StatusBadGateway, fmt.Errorf("connect to port %d: %w", port, err)}
	}
	defer there.Close()
	c, buffered, err := hijacker.Hijack()
	if err != nil {
		return fmt.Errorf("take over connection: %w", err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Time{}) // the header's deadline was set
	if _, err := io.WriteString(c, "HTTP/1.1 200 Connected\r\n\r\n"); err != nil {
		return nil // the host has disconnected
	}
	here, ok := c.(*conn)
	if !ok {
		return nil // all connections come from [conns]
	}
	join(here, there, buffered.Reader)
	return nil
}

// tunnelBuffers are small, since an idle tunnel holds two.
var tunnelBuffers = sync.Pool{New: func() any { b := make([]byte, 16<<10); return &b }}

// join copies in both directions until both have ended. Early holds what here has
// already sent.
func join(here *conn, there *net.TCPConn, early *bufio.Reader) {
	closeBoth := func() {
		here.Close()
		there.Close()
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if n := early.Buffered(); n > 0 {
			if _, err := io.CopyN(there, early, int64(n)); err != nil {
				closeBoth()
				return
			}
		}
		pass(there, here.rest(), closeBoth)
	})
	wg.Go(func() { pass(here.TCPConn, there, closeBoth) })
	wg.Wait()
}

// pass copies from one connection to the other. At the end of the input it closes
// the other's write side, so that the other can still answer. After an error it
// closes both, since the working one would otherwise wait forever.
func pass(to *net.TCPConn, from io.Reader, closeBoth func()) {
	b := tunnelBuffers.Get().(*[]byte)
	defer tunnelBuffers.Put(b)
	if _, err := io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{from}, *b); err == nil && to.CloseWrite() == nil {
		return
	}
	closeBoth()
}

// dialLoopback connects to a port of the sandbox over IPv4, or over IPv6 if nothing
// listens there: some programs listen on ::1 only.
func dialLoopback(ctx context.Context, port uint16) (*net.TCPConn, error) {
	dialer := net.Dialer{Timeout: 5 * time.Second}
	var first error
	for _, ip := range []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback} {
		c, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(ip.String(), strconv.Itoa(int(port))))
		if err == nil {
			return c.(*net.TCPConn), nil
		}
		if first == nil || errors.Is(first, unix.ECONNREFUSED) && !unavailable(err) {
			first = err
		}
	}
	return nil, first
}

// unavailable reports whether an address cannot be reached at all. In a sandbox
// without IPv6 that is so for ::1, and says nothing about the port.
func unavailable(err error) bool {
	return errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EAFNOSUPPORT)
}

// tunnelPort parses the target of a CONNECT. Only loopback addresses are allowed:
// the guest must not be a way around the wall.
func tunnelPort(target string) (uint16, error) {
	host, port, err := net.SplitHostPort(target)
	if err != nil {
		return 0, fmt.Errorf("the target is not HOST:PORT: %w", err)
	}
	if host != "127.0.0.1" && host != "::1" && host != "localhost" {
		return 0, fmt.Errorf("the target %q is not the loopback", host)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("the port %q is not between 1 and 65535", port)
	}
	return uint16(n), nil
}
