package inspect

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"postern/internal/framing"
	"postern/internal/outgoing"
	"postern/internal/policy"
)

const (
	maxHeader  = 64 << 10 // bytes of a request's header
	maxStreams = 100      // concurrent requests on one connection
	protoH2    = "h2"
	protoH1    = "http/1.1"
)

// A Conn is a connection of a program that the wall has permitted.
type Conn struct {
	// Conn is the program's side. Bytes that were read to find the name are read
	// again.
	net.Conn
	// Host is the normalised name that the connection is for.
	Host string
	// Dst is the address that the program connected to. Its port is the port outside.
	Dst netip.AddrPort
	// TLS says that the program begins with a ClientHello for Host.
	TLS bool
	// Misdirected is the reason why every request is answered 421: the program
	// connected to an address that it got for another name. Empty: it did not.
	Misdirected string
	// Dial connects to the address that the wall has permitted. It may be called
	// several times, also concurrently.
	Dial func(ctx context.Context) (net.Conn, error)
	// Restrict decides on each request besides the other rules, for a connection that
	// only a permit for certain requests allows. It is called again when permits end.
	// Nil: nothing more is asked.
	Restrict func(r *outgoing.Request) policy.Verdict
}

// newTLS returns the configuration of the servers that a sandbox sees. Session
// tickets of one sandbox are worth nothing to another.
func (l *Link) newTLS() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{protoH2, protoH1},
		GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
			name, err := policy.Name(h.ServerName)
			if err != nil {
				return nil, err
			}
			return l.in.cfg.Leaf(l.who.ID, name)
		},
	}
}

// Serve answers the requests on c until it ends or ctx is done. It closes c.
func (l *Link) Serve(ctx context.Context, c Conn) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	bottom := &closing{Conn: c.Conn, closed: make(chan struct{})}
	defer bottom.Close()
	defer context.AfterFunc(ctx, func() { bottom.Close() })()
	s := &session{l: l, conn: c, ctx: ctx}
	defer s.close()
	front := net.Conn(bottom)
	h2 := false
	if c.TLS {
		t, err := l.handshake(ctx, bottom)
		if err != nil {
			l.report(ctx, Event{Kind: Denied, Dst: c.Dst, Scheme: "https", Host: c.Host, Reason: handshakeProblem(err)})
			return
		}
		h2 = t.ConnectionState().NegotiatedProtocol == protoH2
		front = t
	}
	srv := &http.Server{
		Handler: s, ErrorLog: slog.NewLogLogger(l.log.Handler(), slog.LevelDebug),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: time.Minute, // a client may connect before it has a request
		IdleTimeout:       l.in.cfg.Limits.Idle, MaxHeaderBytes: maxHeader,
		Protocols: new(http.Protocols),
		HTTP2:     &http.HTTP2Config{MaxConcurrentStreams: maxStreams, MaxReceiveBufferPerConnection: 4 << 20, MaxReceiveBufferPerStream: 1 << 20, MaxReadFrameSize: 256 << 10},
	}
	// Only what was agreed on in the handshake is spoken. In clear text there is no
	// HTTP/2: its requests could not have been read to find the name.
	srv.Protocols.SetHTTP1(!h2)
	srv.Protocols.SetUnencryptedHTTP2(h2)
	framing.Guard(srv)
	refused := func(err error) {
		l.report(ctx, Event{Kind: Denied, Dst: c.Dst, Scheme: s.scheme(), Host: c.Host, Reason: err.Error()})
	}
	_ = srv.Serve(framing.Watch(&once{conn: front, closed: bottom.closed}, refused)) // until the connection is closed
	cancel()
	s.requests.Wait()
}

// handshake terminates TLS.
func (l *Link) handshake(ctx context.Context, c net.Conn) (*tls.Conn, error) {
	if l.in.cfg.Leaf == nil {
		return nil, errors.New("this server has no certificate authority for sandboxes")
	}
	ctx, cancel := context.WithTimeout(ctx, l.in.cfg.Limits.Handshake)
	defer cancel()
	t := tls.Server(c, l.tls)
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return t, nil
}

// handshakeProblem says why the handshake with a program failed.
func handshakeProblem(err error) string {
	if why := ClientRefusal(err); why != "" {
		return why
	}
	return fmt.Sprintf("the TLS handshake with the client failed: %v", err)
}

// A session is the requests of one connection.
type session struct {
	l    *Link
	conn Conn
	ctx  context.Context //nolint:containedctx // the connection's, for dials that outlive the request that begins them

	requests sync.WaitGroup

	mu     sync.Mutex
	up     *http.Transport // HTTP/2 or HTTP/1.1; nil until it is needed
	upgrad *http.Transport // HTTP/1.1 alone, for upgrades; nil until it is needed
}

// close closes the connections outside.
func (s *session) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range []*http.Transport{s.up, s.upgrad} {
		if t != nil {
			t.CloseIdleConnections()
		}
	}
}

// transport returns the transport to the server. It connects to the permitted
// address only, whatever a request says.
func (s *session) transport(h1 bool) *http.Transport {
	s.mu.Lock()
	defer s.mu.Unlock()
	which := &s.up
	if h1 {
		which = &s.upgrad
	}
	if *which == nil {
		*which = s.newTransport(h1)
	}
	return *which
}

func (s *session) newTransport(h1 bool) *http.Transport {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		// The connection outlives the request for which it is made.
		dctx, cancel := context.WithCancel(s.ctx)
		defer cancel()
		defer context.AfterFunc(ctx, cancel)()
		return s.conn.Dial(dctx) //nolint:contextcheck // see above
	}
	t := &http.Transport{
		DialContext:            dial,
		DisableCompression:     true, // the program's Accept-Encoding is sent, and its answer comes as it is
		MaxConnsPerHost:        maxStreams,
		MaxIdleConnsPerHost:    4,
		IdleConnTimeout:        90 * time.Second,
		TLSHandshakeTimeout:    s.l.in.cfg.Limits.Handshake,
		ExpectContinueTimeout:  5 * time.Second,
		MaxResponseHeaderBytes: 1 << 20,
		WriteBufferSize:        16 << 10,
		ReadBufferSize:         16 << 10,
		TLSClientConfig:        &tls.Config{RootCAs: s.l.in.cfg.Roots, ServerName: s.conn.Host, MinVersion: tls.VersionTLS12},
		Protocols:              new(http.Protocols),
		HTTP2:                  &http.HTTP2Config{MaxReceiveBufferPerConnection: 4 << 20, MaxReceiveBufferPerStream: 1 << 20, MaxReadFrameSize: 256 << 10},
	}
	t.Protocols.SetHTTP1(true)
	t.Protocols.SetHTTP2(!h1)
	return t
}

// A closing connection says when it was closed.
type closing struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

// Close implements [net.Conn].
func (c *closing) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// CloseWrite ends the writing side, so that a program reads the last answer.
func (c *closing) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return errors.ErrUnsupported
}

// A once is a listener with one connection. When that is closed, it ends.
type once struct {
	mu     sync.Mutex
	conn   net.Conn
	closed chan struct{}
}

// Accept implements [net.Listener].
func (o *once) Accept() (net.Conn, error) {
	o.mu.Lock()
	c := o.conn
	o.conn = nil
	o.mu.Unlock()
	if c != nil {
		return c, nil
	}
	<-o.closed
	return nil, net.ErrClosed
}

// Close implements [net.Listener].
func (o *once) Close() error { return nil }

// Addr implements [net.Listener].
func (o *once) Addr() net.Addr { return net.TCPAddrFromAddrPort(netip.AddrPort{}) }
