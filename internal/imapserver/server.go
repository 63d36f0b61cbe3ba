// Package imapserver shows an inbox to mail programs over IMAP4rev2 (RFC 9051) and
// IMAP4rev1 (RFC 3501). The user is the inbox's address, and the password one of its
// keys or a grant over it.
//
// It reads, searches, labels, moves and takes drafts. It sends nothing, and shows
// nothing of what is in quarantine. What goes to the archive or the trash goes by the
// gate, as with every other door.
//
// The protocol is implemented by emersion/go-imap. [guard] and [session] close what
// that library leaves open: commands before TLS, the identification of programs,
// limits on literals and on what strangers may send, the text of a message that is
// read as commands, patterns and structures that take for ever.
package imapserver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/emersion/go-imap/v2"
	engine "github.com/emersion/go-imap/v2/imapserver"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/scrub"
	"postern/internal/semaphore"
	"postern/internal/store"
	"postern/internal/tarpit"
)

// Config is the configuration of a [Server].
type Config struct {
	DB   *store.DB           // required
	Post *mailbox.PostOffice // required
	Gate *oversight.Gate     // required
	TLS  *tls.Config         // required: no command but STARTTLS is served without
	// Scrub is notified when mail is open in this process; nil means that the
	// memory that it leaves is not overwritten.
	Scrub *scrub.Scrubber

	MaxConnections int           // at the same time; zero means 400
	MaxPerHost     int           // of those, from one address or IPv6 network; zero means 60
	MaxPerInbox    int           // of those, signed in to one inbox; zero means 20
	LoginTime      time.Duration // until a client has signed in; zero means 1 minute
	CheckTime      time.Duration // how late a connection ends after its key did, at most; zero means 5 seconds
}

// A Server is safe for concurrent use.
type Server struct {
	log *slog.Logger
	cfg Config

	engine  *engine.Server
	ready   chan net.Conn // connections with TLS, for the engine
	guesses *tarpit.Pit
	hosts   *semaphore.PerKey // connections
	inboxes *semaphore.PerKey // connections that are signed in
	bulk    *semaphore.Keyed  // large messages in memory
	seeking *semaphore.Keyed  // searches

	stopping chan struct{}
	ended    sync.WaitGroup // connections

	mu      sync.Mutex
	closing bool
	pausing int               // conversations that are being slowed down
	links   map[net.Conn]bool // every open connection
}

const (
	largeMessage = 1 << 20 // bytes from which on a message waits for its turn
	maxBulk      = 16
	maxBulkEach  = 2 // of one inbox
	maxSeeking   = 4
	maxSeekEach  = 2
)

// New returns a server that does nothing until Serve is called.
func New(log *slog.Logger, cfg Config) (*Server, error) {
	if cfg.DB == nil || cfg.Post == nil || cfg.Gate == nil || cfg.TLS == nil {
		return nil, errors.New("configure imap server: needs DB, Post, Gate and TLS")
	}
	if cfg.Scrub == nil {
		cfg.Scrub = &scrub.Scrubber{}
	}
	for _, d := range []struct {
		v   *int
		std int
	}{{&cfg.MaxConnections, 400}, {&cfg.MaxPerHost, 60}, {&cfg.MaxPerInbox, 20}} {
		if *d.v <= 0 {
			*d.v = d.std
		}
	}
	if cfg.LoginTime <= 0 {
		cfg.LoginTime = time.Minute
	}
	if cfg.CheckTime <= 0 {
		cfg.CheckTime = 5 * time.Second
	}
	s := &Server{
		log: log, cfg: cfg, ready: make(chan net.Conn), guesses: tarpit.New(time.Minute),
		hosts: semaphore.NewPerKey(cfg.MaxPerHost), inboxes: semaphore.NewPerKey(cfg.MaxPerInbox),
		bulk: semaphore.New(maxBulk, maxBulkEach), seeking: semaphore.New(maxSeeking, maxSeekEach),
		stopping: make(chan struct{}), links: map[net.Conn]bool{},
	}
	//exhaustive:ignore
	caps := imap.CapSet{
		imap.CapIMAP4rev2: {}, imap.CapIMAP4rev1: {}, imap.CapNamespace: {}, imap.CapUIDPlus: {}, imap.CapESearch: {}, imap.CapSearchRes: {},
		imap.CapListExtended: {}, imap.CapListStatus: {}, imap.CapMove: {}, imap.CapStatusSize: {}, imap.CapBinary: {}, imap.CapChildren: {},
		imap.CapSpecialUse: {}, imap.CapLiteralPlus: {},
	}
	s.engine = engine.New(&engine.Options{
		NewSession: s.newSession,
		Caps:       caps,
		// The engine sees no connection before its TLS has begun.
		InsecureAuth: true,
		Logger:       libraryLog{log},
	})
	go func() { _ = s.engine.Serve(feed{s}) }() // until Shutdown
	return s, nil
}

// Serve serves mail programs on l until Shutdown, which makes it return nil. With
// implicit a conversation begins with TLS (RFC 8314); otherwise with STARTTLS, and
// until then no other command is served. It closes l.
func (s *Server) Serve(l net.Listener, implicit bool) error {
	defer l.Close()
	go func() {
		<-s.stopping
		l.Close()
	}()
	for {
		conn, err := l.Accept()
		select {
		case <-s.stopping:
			if err == nil {
				conn.Close()
			}
			return nil
		default:
		}
		if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
			continue
		}
		if err != nil {
			return fmt.Errorf("serve imap: %w", err)
		}
		release, ok := s.admit(conn)
		if !ok {
			refuse(conn, implicit)
			continue
		}
		s.ended.Go(func() {
			defer release()
			defer conn.Close()
			s.converse(conn, implicit)
		})
	}
}

// admit takes a place for a connection.
func (s *Server) admit(conn net.Conn) (release func(), ok bool) {
	// The attack: one idle machine that keeps all others out.
	leave, ok := s.hosts.TryAcquire(host(conn.RemoteAddr()))
	if !ok {
		return nil, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing || len(s.links) >= s.cfg.MaxConnections {
		leave()
		return nil, false
	}
	s.links[conn] = true
	return func() {
		leave()
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.links, conn)
	}, true
}

// refuse tells a client that there is no room. One that speaks TLS could not read it.
func refuse(conn net.Conn, implicit bool) {
	if !implicit {
		// The socket buffer of a new connection has room for this line.
		_ = conn.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = conn.Write([]byte("* BYE [UNAVAILABLE] too many connections, try again later\r\n"))
	}
	conn.Close()
}

// converse serves one connection to its end.
func (s *Server) converse(conn net.Conn, implicit bool) {
	end := time.Now().Add(s.cfg.LoginTime)
	_ = conn.SetDeadline(end)
	if !implicit && !beginTLS(conn) {
		linger(conn)
		return
	}
	encrypted := tls.Server(conn, s.cfg.TLS)
	if err := encrypted.Handshake(); err != nil { //nolint:noctx // the connection has a deadline, and Shutdown closes it
		s.log.Debug("imap conversation ended", "detail", err.Error())
		return
	}
	_ = conn.SetDeadline(time.Time{})
	g := newGuard(encrypted, end, !implicit)
	select {
	case s.ready <- g:
		<-g.closed
	case <-s.stopping:
	}
}

// Shutdown stops listening, ends every conversation with a BYE, and returns when all
// connections are closed. If ctx is done first it returns the context's error.
func (s *Server) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	first := !s.closing
	if first {
		s.closing = true
		close(s.stopping)
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		s.ended.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(2 * time.Second): // sessions have said BYE, or cannot
	case <-ctx.Done():
	}
	s.mu.Lock()
	for conn := range s.links {
		conn.Close()
	}
	s.mu.Unlock()
	select {
	case <-done:
		if !first {
			return nil
		}
		return s.engine.Close()
	case <-ctx.Done():
		return fmt.Errorf("shut down imap server: %w", ctx.Err())
	}
}

// feed is the listener of the engine.
type feed struct{ s *Server }

// Accept returns the next connection whose TLS has begun.
func (f feed) Accept() (net.Conn, error) {
	select {
	case conn := <-f.s.ready:
		return conn, nil
	case <-f.s.stopping:
		return nil, net.ErrClosed
	}
}

// Close does nothing: Shutdown ends the feed.
func (f feed) Close() error { return nil }

// Addr returns no address.
func (f feed) Addr() net.Addr { return &net.TCPAddr{} }

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

// libraryLog receives the log of go-imap: hang-ups and recovered panics.
type libraryLog struct{ log *slog.Logger }

// Printf logs one line. What a client has sent may be in it.
func (l libraryLog) Printf(format string, v ...any) {
	msg := mail.PrintableLines(fmt.Sprintf(format, v...), 2000)
	if strings.HasPrefix(format, "panic") {
		l.log.Error("imap conversation panicked", "detail", msg)
		return
	}
	l.log.Debug("imap conversation", "detail", msg)
}
