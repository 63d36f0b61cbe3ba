// Package smtpserver is the SMTP server for three kinds of clients: other mail
// servers, which bring messages for inboxes; programs with the key of an inbox,
// which submit messages; and programs in sandboxes, which believe that they talk to
// a mail server on the Internet.
//
// It accepts messages and hands them over. It relays for nobody, sends nothing
// itself, and does not reveal internal errors to clients. It replies 250 to a
// message only after the function that it was handed to has returned without an
// error, so that every accepted message is durable. [Inboxes] has these functions
// for production.
//
// The protocol is implemented by emersion/go-smtp. [link] and [session] close what
// that library leaves open: bare CR and LF, which smuggle a second message past a
// server that treats them as line ends; unlimited commands and refused recipients;
// slow senders; a second MAIL within a transaction.
//
// A sandbox may end lines with a bare LF, as many programs do. That smuggles nothing:
// see [lineEnds].
package smtpserver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/emersion/go-smtp"
	"golang.org/x/sync/semaphore"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/tarpit"
)

// Errors of [Config.Accepts]. Any other error is a temporary failure.
var (
	// ErrNoMailbox means that the domain is ours and has no such inbox: 550 5.1.1.
	ErrNoMailbox = errors.New("no such inbox here")
	// ErrRelay means that the domain is not ours: 550 5.7.1.
	ErrRelay = errors.New("relaying is not allowed")
)

// A Peer describes the client of a conversation.
type Peer struct {
	Remote netip.AddrPort // zero if it is not known
	Helo   string         // argument of HELO or EHLO; hostile
	TLS    bool           // the conversation is encrypted
}

// A RefusalError is an error that sets the reply to the client.
type RefusalError struct {
	Code     int    // 450 to 452 for a temporary failure, 550 to 554 for a permanent one
	Enhanced [3]int // RFC 3463
	Reason   string // one line, sent to the client
}

// Error returns the reason.
func (r *RefusalError) Error() string { return r.Reason }

// Config is the configuration of a [Server]. Serve needs Accepts and Deliver,
// ServeConn needs Propose, ServeSubmission needs Authenticate and Submit. The
// functions are called concurrently.
type Config struct {
	// Hostname is the name that the server greets with and writes into the
	// Received field. Required.
	Hostname string

	// Accepts returns nil if there is an inbox for rcpt, an error that wraps
	// [ErrNoMailbox] or [ErrRelay], or another error for a temporary failure.
	Accepts func(ctx context.Context, rcpt string) error
	// Deliver takes responsibility for a message: when it returns nil the message
	// must be durable. A [mail.FieldError] refuses the message permanently, a
	// [RefusalError] as it says; after any other error the sender will retry. env.Raw
	// begins with the Return-Path and Received fields of this server; env.From is
	// empty for a bounce.
	Deliver func(ctx context.Context, env mail.Envelope, from Peer) error

	// Propose handles a message that the sandbox who sent to dst. The only check of
	// env so far is that it has no bare CR or LF: Propose makes it safe with
	// [mail.FromCaptured]. The string is sent with the reply 250. A
	// [mail.FieldError] or a [RefusalError] is sent too; any other error becomes a
	// temporary failure without details.
	Propose func(ctx context.Context, who auth.Principal, dst netip.AddrPort, env mail.Envelope) (said string, err error)

	// Authenticate returns the account with this name and password, or
	// [ErrCredentials].
	Authenticate func(ctx context.Context, user, password string, from Peer) (Account, error)
	// Submit handles a message that a has submitted from an address of a's. As for
	// Propose, Submit does all other checks, and its results are sent in the same
	// way. When it returns nil the message must be durable.
	Submit func(ctx context.Context, a Account, env mail.Envelope, from Peer) (said string, err error)

	// TLS offers STARTTLS to other mail servers and for submission; nil offers none.
	TLS *tls.Config

	MaxMessageBytes int64         // octets of one message; zero means [mail.MaxMessageBytes]
	MaxRecipients   int           // of one message; zero means [mail.MaxRecipients]
	MaxConnections  int           // at the same time, for each listener; zero means 200
	MaxPerHost      int           // of those, from one address or IPv6 network; zero means 50
	MaxBufferBytes  int64         // octets of messages being received at the same time, at most a quarter from one sender; zero means 512 MiB
	IdleTimeout     time.Duration // for the next command or the next read of a message; zero means 5 minutes
	DataTimeout     time.Duration // for one whole message; zero means 10 minutes
	HandTimeout     time.Duration // for each call of the functions above; zero means 1 minute
}

// A Server is safe for concurrent use.
type Server struct {
	log *slog.Logger
	cfg Config

	buffered atomic.Int64 // octets of messages being received now
	shares   bufferShares // of these, octets by sender
	// Semaphores of the octets of large messages that are being handed over. They
	// are separate for incoming and proposed mail. The attack: strangers with slow
	// DNS, whose verification takes all the room, keep agents from sending.
	brought, proposed *semaphore.Weighted

	pausing  atomic.Int64 // conversations that are being slowed down
	guesses  *tarpit.Pit  // for credentials
	names    *tarpit.Pit  // for recipients
	tarLocal bool         // slow down clients on this machine as well; for tests
	stopping chan struct{}

	mu      sync.Mutex
	closing bool
	links   map[*link]bool // every open conversation
	servers map[*smtp.Server]bool
}

// A door is one listener to the outside. Each has its own limits, so that a flood
// at one does not block another. The server's mu guards the counts.
type door struct {
	submission bool
	implicit   bool // a conversation begins with TLS
	conns      int  // of MaxConnections
	byHost     map[string]int
}

// New returns a server that does nothing until Serve or ServeConn is called.
func New(log *slog.Logger, cfg Config) (*Server, error) {
	if cfg.Hostname == "" || strings.ContainsAny(cfg.Hostname, " \t\r\n") {
		return nil, fmt.Errorf("configure smtp server: hostname %q is not a host name", cfg.Hostname)
	}
	if (cfg.Accepts == nil) != (cfg.Deliver == nil) || (cfg.Authenticate == nil) != (cfg.Submit == nil) || cfg.Deliver == nil && cfg.Propose == nil && cfg.Submit == nil {
		return nil, errors.New("configure smtp server: needs Accepts and Deliver, or Authenticate and Submit, or Propose")
	}
	def := func(v *int64, d int64) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&cfg.MaxMessageBytes, mail.MaxMessageBytes)
	def(&cfg.MaxBufferBytes, 512<<20)
	def((*int64)(&cfg.IdleTimeout), int64(5*time.Minute))
	def((*int64)(&cfg.DataTimeout), int64(10*time.Minute))
	def((*int64)(&cfg.HandTimeout), int64(time.Minute))
	if cfg.MaxRecipients <= 0 {
		cfg.MaxRecipients = mail.MaxRecipients
	}
	if cfg.MaxConnections <= 0 {
		cfg.MaxConnections = 200
	}
	if cfg.MaxPerHost <= 0 {
		cfg.MaxPerHost = 50
	}
	return &Server{
		log: log, cfg: cfg, brought: semaphore.NewWeighted(maxHandled), proposed: semaphore.NewWeighted(maxHandled), guesses: tarpit.New(time.Minute), names: tarpit.New(20 * time.Second), stopping: make(chan struct{}),
		links: map[*link]bool{}, servers: map[*smtp.Server]bool{},
	}, nil
}

// Serve receives mail from other servers on l until Shutdown, which makes it
// return nil. It closes l.
func (s *Server) Serve(l net.Listener) error {
	if s.cfg.Deliver == nil {
		l.Close()
		return errors.New("serve smtp: no Deliver is configured")
	}
	return s.serve(l, &door{})
}

// serve accepts conversations on l for the door d, until Shutdown.
func (s *Server) serve(l net.Listener, d *door) error {
	defer l.Close()
	d.byHost = map[string]int{}
	srv := s.engine(s.cfg.TLS, d.submission) // a session offers AUTH only where it is safe
	if !s.add(srv) {
		return nil
	}
	defer s.remove(srv)
	return srv.Serve(&listener{Listener: l, s: s, door: d})
}

// ServeConn serves the sandbox who, which believes to be connected to a mail server
// at dst, until the client hangs up or ctx is done. It accepts every recipient and
// any credential, which it discards unread; messages go only to Propose. seen is
// what was already read from conn: if it is not empty the client does not wait for
// a greeting and gets none. STARTTLS is offered with startTLS, unless that is nil.
// ServeConn closes conn.
func (s *Server) ServeConn(ctx context.Context, who auth.Principal, dst netip.AddrPort, conn net.Conn, seen []byte, startTLS *tls.Config) {
	defer conn.Close()
	if s.cfg.Propose == nil {
		s.log.ErrorContext(ctx, "captured smtp but no Propose is configured", "who", who.String())
		return
	}
	k := s.newLink(conn)
	k.ctx, k.captured, k.who, k.dst, k.seen, k.mute = ctx, true, who, dst, seen, len(seen) > 0
	srv := s.engine(startTLS, true)
	if !s.add(srv) {
		return
	}
	defer s.remove(srv)
	defer context.AfterFunc(ctx, func() { k.Close() })()
	s.track(k)
	_ = srv.Serve(&oneListener{k: k}) // ends when the link is closed
	_ = srv.Shutdown(context.WithoutCancel(ctx))
}

// Shutdown stops listening, waits for messages that are being received, sends idle
// clients a 421, and returns when all connections are closed. If ctx is done first
// it closes them and returns the context's error.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	if !s.closing {
		close(s.stopping)
	}
	s.closing = true
	var servers []*smtp.Server
	for srv := range s.servers {
		servers = append(servers, srv)
	}
	for k := range s.links {
		k.closeWhenIdle()
	}
	s.mu.Unlock()
	for _, srv := range servers {
		if err := srv.Shutdown(ctx); err != nil && !errors.Is(err, smtp.ErrServerClosed) && ctx.Err() != nil {
			s.mu.Lock()
			left := slices.Collect(maps.Keys(s.links))
			s.mu.Unlock()
			for _, k := range left { // without s.mu, which Close takes, and without lingering
				k.Conn.Close()
				k.Close()
			}
			return fmt.Errorf("shut down smtp server: %w", err)
		}
	}
	return nil
}

// engine returns a server of go-smtp with this server's limits.
func (s *Server) engine(t *tls.Config, offersAuth bool) *smtp.Server {
	srv := smtp.NewServer(smtp.BackendFunc(s.newSession))
	srv.Domain = s.cfg.Hostname
	srv.TLSConfig = t
	srv.MaxMessageBytes = s.cfg.MaxMessageBytes
	srv.ReadTimeout = s.cfg.IdleTimeout
	srv.WriteTimeout = time.Minute
	srv.EnableSMTPUTF8 = true
	srv.AllowInsecureAuth = offersAuth
	// RFC 5321 4.5.3.1.6 says 1000, real mail has more. This bounds the memory
	// for one line; a longer one ends the conversation.
	srv.MaxLineLength = 64 << 10
	srv.ErrorLog = libraryLog{s.log}
	return srv
}

// add registers srv for Shutdown. It returns false if Shutdown was called.
func (s *Server) add(srv *smtp.Server) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closing {
		s.servers[srv] = true
	}
	return !s.closing
}

func (s *Server) remove(srv *smtp.Server) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.servers, srv)
}

func (s *Server) track(k *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.links[k] = true
	if s.closing {
		k.closeWhenIdle()
	}
}

// untrack removes a conversation and frees its place at the door. It is
// idempotent.
func (s *Server) untrack(k *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := k.door; s.links[k] && d != nil {
		d.conns--
		h := host(k.RemoteAddr())
		if d.byHost[h]--; d.byHost[h] == 0 {
			delete(d.byHost, h)
		}
	}
	delete(s.links, k)
}

// listener counts the conversations with the outside.
type listener struct {
	net.Listener
	s    *Server
	door *door
}

// Accept returns the next connection for which there is room.
func (l *listener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		l.s.mu.Lock()
		d, h := l.door, host(conn.RemoteAddr())
		// The attack: one idle machine that keeps all others out.
		ok := d.conns < l.s.cfg.MaxConnections && d.byHost[h] < l.s.cfg.MaxPerHost
		if ok {
			d.conns++
			d.byHost[h]++
		}
		l.s.mu.Unlock()
		if ok {
			k := l.s.newLink(conn)
			k.door = d
			l.s.track(k)
			if d.implicit {
				return tls.Server(k, l.s.cfg.TLS), nil
			}
			return k, nil
		}
		if d.implicit { // a TLS client could not read the reply
			conn.Close()
			continue
		}
		// The socket buffer of a new connection has room for this line.
		_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = conn.Write([]byte("421 4.7.0 " + l.s.cfg.Hostname + " too many connections, try again later\r\n"))
		conn.Close()
	}
}

// host returns the address of a peer without its port. For IPv6 it returns the /64
// network, since a machine can use any address of its network.
func host(a net.Addr) string {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return a.String()
	}
	ip := ap.Addr().Unmap()
	if ip.Is6() {
		if p, err := ip.Prefix(64); err == nil {
			return p.String()
		}
	}
	return ip.String()
}

// oneListener yields one connection, and an error once that is closed.
type oneListener struct {
	k    *link
	done bool
}

// Accept returns the connection, then waits for its end.
func (l *oneListener) Accept() (net.Conn, error) {
	if !l.done {
		l.done = true
		return l.k, nil
	}
	<-l.k.closed
	return nil, net.ErrClosed
}

// Close closes the connection.
func (l *oneListener) Close() error { return nil }

// Addr returns our end of the connection.
func (l *oneListener) Addr() net.Addr { return l.k.LocalAddr() }

// libraryLog receives the log of go-smtp: hang-ups and recovered panics.
type libraryLog struct{ log *slog.Logger }

// Printf logs one line.
func (l libraryLog) Printf(format string, v ...any) {
	msg := fmt.Sprintf(format, v...)
	// go-smtp 0.25.1 sets its session to nil when it hangs up, and then calls it for
	// commands that were pipelined after QUIT, or for a BDAT in progress. It recovers,
	// and nothing is accepted. The attack: clients fill the log with such errors. A
	// panic in this program has its frames in the message.
	forgotten := strings.Contains(msg, "nil pointer") && !strings.Contains(msg, "postern/internal/")
	if strings.HasPrefix(format, "panic") && !forgotten {
		l.log.Error("smtp conversation panicked", "detail", msg)
		return
	}
	l.log.Debug("smtp conversation ended", "detail", msg)
}

// Println logs one line.
func (l libraryLog) Println(v ...any) { l.Printf("%s", fmt.Sprint(v...)) }
