package egress

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"postern/internal/sandbox"
)

// An innerServer serves http://postern.internal and https://postern.internal to one
// sandbox. It is its own server's listener: connections come from the stack.
type innerServer struct {
	srv   *http.Server
	tls   *tls.Config
	conns chan net.Conn
	stop  chan struct{}
	once  sync.Once
}

// serveInner starts the inner server of one sandbox.
func serveInner(ctx context.Context, log *slog.Logger, h http.Handler, t *tls.Config) *innerServer {
	in := &innerServer{tls: t, conns: make(chan net.Conn), stop: make(chan struct{})}
	in.srv = &http.Server{
		Handler: innerHost(h), ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
	}
	go func() { _ = in.srv.Serve(in) }() // until close
	return in
}

// innerTLS returns the configuration of https://postern.internal. The certificate is for
// its own names alone: a program that asks for another host at this address gets none.
func (a *attached) innerTLS() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{"http/1.1"},
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			host := strings.ToLower(strings.TrimSuffix(hello.ServerName, "."))
			if host == "" { // the program has only the address
				host = sandbox.LinkGateway.String()
			}
			if !isInner(host) {
				return nil, fmt.Errorf("%.100q is not this server's name", hello.ServerName)
			}
			return a.w.cfg.Leaf(a.who.ID, host)
		},
	}
}

// isInner reports whether host is a name of the inner server.
func isInner(host string) bool { return host == Name || host == sandbox.LinkGateway.String() }

// innerHost refuses requests for other hosts. The attack is DNS rebinding: a web
// page in a browser inside, whose own name resolves to the gateway, would otherwise
// be of one origin with this server.
func innerHost(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		port := ":80"
		if r.TLS != nil {
			port = ":443"
		}
		host := strings.TrimSuffix(strings.TrimSuffix(strings.ToLower(r.Host), port), ".")
		if !isInner(host) {
			http.Error(w, "this server only answers to http://"+Name+" and https://"+Name, http.StatusMisdirectedRequest)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// Accept implements [net.Listener].
func (in *innerServer) Accept() (net.Conn, error) {
	select {
	case c := <-in.conns:
		return c, nil
	case <-in.stop:
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener].
func (in *innerServer) Close() error {
	in.once.Do(func() { close(in.stop) })
	return nil
}

// Addr implements [net.Listener].
func (in *innerServer) Addr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.AddrPortFrom(sandbox.LinkGateway, 80))
}

// serve hands c to the server, in TLS if secure is true, and returns when c has been
// closed. The server bounds the handshake by its ReadHeaderTimeout.
func (in *innerServer) serve(c net.Conn, secure bool) {
	k := &closeNotifyConn{Conn: c, closed: make(chan struct{})}
	var conn net.Conn = k
	if secure {
		conn = tls.Server(k, in.tls)
	}
	select {
	case in.conns <- conn:
		select {
		case <-k.closed:
		case <-in.stop:
		}
	case <-in.stop:
		c.Close()
	}
}

// close ends the inner server and its connections.
func (in *innerServer) close() {
	in.Close()
	if err := in.srv.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return
	}
}

// A closeNotifyConn reports when it was closed.
type closeNotifyConn struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

// Close implements [net.Conn].
func (c *closeNotifyConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}
