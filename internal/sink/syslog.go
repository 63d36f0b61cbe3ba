package sink

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/audit"
)

// The maximum length of a message, in bytes. RFC 5425 and 5426 recommend that receivers
// accept 8192 bytes over TLS and 2048 over UDP. A longer entry is sent without its
// detail: a truncated line could not be parsed.
const (
	maxStream   = 8192
	maxDatagram = 2048
)

// A syslog sends RFC 5424 messages.
type syslog struct {
	network string // udp, tcp, tls, unix
	addr    string
	host    string // this machine's name, in each message
	tls     *tls.Config

	resolver *net.Resolver

	conn   net.Conn
	raw    syscall.Conn // the connection below TLS; nil for datagrams
	stream bool         // messages are framed by their length (RFC 6587)
}

var _ target = (*syslog)(nil)

func newSyslog(network string, u *url.URL, conf Config) (*syslog, error) {
	s := &syslog{network: network, addr: u.Host, host: conf.Host, resolver: conf.Resolver}
	switch network {
	case "unix":
		if s.addr = u.Path; u.Host != "" || s.addr == "" {
			return nil, errors.New("sink syslog+unix: want syslog+unix:///dev/log")
		}
		return s, nil
	case "udp", "tcp", "tls":
	default:
		return nil, fmt.Errorf("sink syslog+%s: want udp, tcp, tls or unix", network)
	}
	name, port, err := net.SplitHostPort(u.Host)
	if n, perr := strconv.Atoi(port); err != nil || name == "" || perr != nil || n < 1 || n > 65535 {
		return nil, fmt.Errorf("sink syslog+%s: %q is not host:port", network, u.Host)
	}
	if u.Path != "" && u.Path != "/" {
		return nil, fmt.Errorf("sink syslog+%s: it has no path", network)
	}
	if network == "tls" {
		if s.tls, err = tlsConfig(u.Query()); err != nil {
			return nil, err
		}
		s.tls.ServerName = name
	}
	return s, nil
}

// tlsConfig returns a configuration with the files ca, cert and key of a sink's URL.
func tlsConfig(q url.Values) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca := q.Get("ca"); ca != "" {
		b, err := os.ReadFile(ca)
		if err != nil {
			return nil, fmt.Errorf("sink: ca: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(b) {
			return nil, fmt.Errorf("sink: ca: %s holds no certificate", ca)
		}
	}
	if cert, key := q.Get("cert"), q.Get("key"); cert != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("sink: cert, key: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// open connects unless a connection is open. A local socket may be a datagram or a
// stream socket: open tries a datagram first, as most daemons use that.
func (s *syslog) open(ctx context.Context) (err error) {
	if s.conn != nil {
		return nil
	}
	d := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second, Resolver: s.resolver}
	switch s.network {
	case "unix":
		s.stream = false
		s.conn, err = d.DialContext(ctx, "unixgram", s.addr)
		if errors.Is(err, unix.EPROTOTYPE) {
			s.stream = true
			s.conn, err = d.DialContext(ctx, "unix", s.addr)
		}
	case "udp":
		s.conn, err = d.DialContext(ctx, "udp", s.addr)
	default:
		s.stream = true
		s.conn, err = d.DialContext(ctx, "tcp", s.addr)
	}
	if err != nil {
		return err
	}
	if s.stream {
		s.raw, _ = s.conn.(syscall.Conn)
	}
	if s.tls == nil {
		return nil
	}
	// RFC 5425, section 5.2: verify the server's name against its certificate.
	c := tls.Client(s.conn, s.tls)
	if err := c.HandshakeContext(ctx); err != nil {
		return errors.Join(err, s.Close())
	}
	s.conn = c
	return nil
}

// Close implements [target].
func (s *syslog) Close() error {
	if s.conn == nil {
		return nil
	}
	err := s.conn.Close()
	s.conn, s.raw = nil, nil
	return err
}

// Send implements [target].
func (s *syslog) Send(ctx context.Context, list []Record) error {
	if err := s.open(ctx); err != nil {
		return fmt.Errorf("connect to syslog: %w", err)
	}
	if until, ok := ctx.Deadline(); ok {
		if err := s.conn.SetDeadline(until); err != nil {
			return fmt.Errorf("send to syslog: %w", err)
		}
	}
	most := maxStream
	if s.network == "udp" {
		most = maxDatagram
	}
	var frame []byte
	for _, r := range list {
		msg, err := audit.Syslog(r.Entry, r.Hash, s.host, most)
		if err != nil {
			return err
		}
		if !s.stream {
			if _, err := s.conn.Write(msg); err != nil {
				return fmt.Errorf("send to syslog: %w", err)
			}
			continue
		}
		// RFC 6587, section 3.4.1: octet counting, since a message may contain line ends.
		frame = strconv.AppendInt(frame, int64(len(msg)), 10)
		frame = append(frame, ' ')
		frame = append(frame, msg...)
	}
	if !s.stream {
		return s.refused()
	}
	if _, err := s.conn.Write(frame); err != nil {
		return fmt.Errorf("send to syslog: %w", err)
	}
	return s.drained(ctx)
}

// refused returns the ICMP error for a UDP datagram if one arrives within 20 ms, which
// shows that nothing listens on the port. UDP has no other sign of a lost message.
func (s *syslog) refused() error {
	if s.network != "udp" {
		return nil
	}
	if err := s.conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		return fmt.Errorf("send to syslog: %w", err)
	}
	var b [1]byte
	if _, err := s.conn.Read(b[:]); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("send to syslog: %w", err)
	}
	return nil
}

// drained waits until the other side has acknowledged all that was written.
// Syslog itself acknowledges nothing: what a write has returned for may still
// be in a buffer of this machine when the connection breaks, and would be lost.
func (s *syslog) drained(ctx context.Context) error {
	if s.raw == nil {
		return nil
	}
	rc, err := s.raw.SyscallConn()
	if err != nil {
		return fmt.Errorf("send to syslog: %w", err)
	}
	for {
		left, gone := 0, false
		var ierr error
		err := rc.Control(func(fd uintptr) {
			left, ierr = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ)
			// The other side may have closed before it read: then what it
			// acknowledged is lost.
			polled := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
			if n, perr := unix.Poll(polled, 0); perr == nil && n > 0 {
				gone = polled[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
			}
		})
		if err := errors.Join(err, ierr); err != nil {
			return fmt.Errorf("send to syslog: %w", err)
		}
		if gone {
			return errors.New("send to syslog: the other side has closed the connection")
		}
		if left == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("send to syslog: %d bytes are not acknowledged: %w", left, ctx.Err())
		case <-time.After(2 * time.Millisecond):
		}
	}
}
