// Package framing refuses HTTP/1 requests whose end two programs could see in
// different places, and closes their connections.
//
// The attack is request smuggling: if a request has both Content-Length and
// Transfer-Encoding, a proxy in front of this server may use one and this server
// the other. The rest of a body for the proxy is then a request of its own here,
// which no rule of the proxy has judged, and whose answer goes to another client
// on the same connection. net/http uses Transfer-Encoding, removes Content-Length
// before a handler can see it, and keeps the connection. So this package checks
// the octets before net/http reads them.
//
// There is one rule instead of a list of tricks: framing that RFC 9112 does not
// define is refused, even where the RFC allows a recipient to be lenient. Nothing
// else about a request is judged here.
package framing

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

// Guard makes srv serve what [Listener] returns. Its Handler must be set.
func Guard(srv *http.Server) {
	next := srv.Handler
	srv.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connKey{}).(*conn); ok && r.TLS == nil {
			r.TLS = c.tlsState()
		}
		next.ServeHTTP(w, r)
	})
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		return context.WithValue(ctx, connKey{}, c)
	}
	srv.ConnState = func(c net.Conn, s http.ConnState) {
		if c, ok := c.(*conn); ok && s == http.StateHijacked {
			c.released.Store(true) // a WebSocket, for example: no requests follow
		}
	}
}

type connKey struct{}

// Listener returns a listener that checks the connections of l, which speak HTTP
// or, if l is of package crypto/tls, HTTP over TLS. Its server must be given to
// [Guard], or WebSockets fail. HTTP/2 has no such ambiguity and passes; the server
// must enable unencrypted HTTP/2, since it cannot see the TLS.
func Listener(l net.Listener) net.Listener { return &listener{l, nil} }

// Watch is like [Listener], and calls refused with the reason of each refusal, before
// the request is answered.
func Watch(l net.Listener, refused func(error)) net.Listener { return &listener{l, refused} }

type listener struct {
	net.Listener
	refused func(error) // may be nil
}

// Accept implements [net.Listener].
func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c, told: l.refused}, nil
}

// A conn checks what is read from it.
type conn struct {
	net.Conn
	told  func(error) // may be nil
	watch watch       // used by Read alone, which net/http never calls twice at a time

	released atomic.Bool
	refused  atomic.Pointer[Error] // why nothing more is read
}

// Read returns the octets before a refused one, and then an error that net/http
// answers with 400 before it closes the connection.
func (c *conn) Read(p []byte) (int, error) {
	if c.released.Load() {
		return c.Conn.Read(p)
	}
	if err := c.refused.Load(); err != nil {
		return 0, err
	}
	n, err := c.Conn.Read(p)
	if re, ok := errors.AsType[tls.RecordHeaderError](err); ok && re.Conn != nil {
		_, _ = io.WriteString(re.Conn, "HTTP/1.0 400 Bad Request\r\nConnection: close\r\n\r\nthis port speaks https: begin the URL with https://\n")
	}
	if n == 0 {
		return n, err
	}
	good, bad := c.watch.feed(p[:n])
	if bad == nil {
		if c.watch.state == passing {
			c.released.Store(true)
		}
		return n, err
	}
	c.refused.Store(bad)
	if c.told != nil {
		c.told(bad)
	}
	return good, bad
}

// libraryAnswer is net/http's answer to a request that it cannot read.
const libraryAnswer = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n400 Bad Request"

// Write writes p, but replaces net/http's answer to a refused request by one
// that gives the reason.
func (c *conn) Write(p []byte) (int, error) {
	bad := c.refused.Load()
	if bad == nil || string(p) != libraryAnswer {
		return c.Conn.Write(p)
	}
	body, err := json.Marshal(map[string]any{"code": http.StatusBadRequest, "message": bad.Error()})
	if err != nil { // unreachable
		body = []byte("{}")
	}
	if _, err := fmt.Fprintf(c.Conn, "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(body), body); err != nil {
		return 0, err
	}
	return len(p), nil
}

// ReadFrom implements [io.ReaderFrom], so that bodies are copied as they would
// be without this package.
func (c *conn) ReadFrom(r io.Reader) (int64, error) { return io.Copy(c.Conn, r) }

// CloseWrite closes the writing side.
func (c *conn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// Close closes the connection. After a refused request it reads the input first:
// closing a socket with unread input could discard the answer.
func (c *conn) Close() error {
	if c.refused.Load() != nil && c.CloseWrite() == nil {
		_ = c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		_, _ = io.Copy(io.Discard, io.LimitReader(c.Conn, 1<<20))
	}
	return c.Conn.Close()
}

func (c *conn) tlsState() *tls.ConnectionState {
	t, ok := c.Conn.(*tls.Conn)
	if !ok {
		return nil
	}
	s := t.ConnectionState()
	return &s
}
