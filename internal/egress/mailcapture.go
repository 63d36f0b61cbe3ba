package egress

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"time"

	"postern/internal/inspect"
)

// handshake bounds the TLS handshake of a captured connection, and the wait for a
// mail server's greeting.
const handshake = 10 * time.Second

// tlsMailPort is the port on which a mail conversation begins with TLS, RFC 8314.
const tlsMailPort = 465

// smtpPort reports whether p is a port for mail: 25, its TLS variant 465, and the
// submission ports.
func smtpPort(p uint16) bool { return p == 25 || p == tlsMailPort || p == 587 || p == 2525 }

// capture hands a connection to a mail port to Config.SMTP, whatever its address.
func (a *attached) capture(ctx context.Context, in *insideConn, dst netip.AddrPort, seen []byte) {
	a.ledger.addLater(ctx, Event{Kind: Captured, Proto: "tcp", Dst: dst, Name: a.standIns.of(dst.Addr()), Reason: "mail waits here for a decision, wherever it was to go"}, func() {})
	var c net.Conn = in
	defer c.Close()
	defer context.AfterFunc(ctx, in.abort)()
	secure := a.mailTLS(dst)
	if dst.Port() == tlsMailPort && len(seen) == 0 {
		t, err := a.mailHandshake(ctx, in, secure)
		if err != nil {
			a.refuse(ctx, "tcp", dst, a.mailName(dst), handshakeProblem(err))
			return
		}
		c, secure = t, nil
	}
	a.w.cfg.SMTP(ctx, a.who, dst, c, seen, secure)
}

// mailName returns the name of the mail server that the program believes to be at dst:
// that of a stand-in, one that our resolver gave the address for, or the address.
func (a *attached) mailName(dst netip.AddrPort) string {
	if name := a.standIns.of(dst.Addr()); name != "" {
		return name
	}
	for _, name := range a.names.of(dst.Addr()) {
		return name
	}
	return dst.Addr().String()
}

// mailTLS returns the configuration of TLS on a captured connection to dst. Programs
// verify the name that they were told to connect to, so the certificate is for any name
// that they ask for. It is worth nothing elsewhere: only the programs of this sandbox
// trust the authority, and only this wall has its connections.
func (a *attached) mailTLS(dst netip.AddrPort) *tls.Config {
	if a.w.cfg.Leaf == nil {
		return nil
	}
	return &tls.Config{
		MinVersion:             tls.VersionTLS12,
		SessionTicketsDisabled: true, // each connection has a configuration of its own
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			return a.w.cfg.Leaf(a.who.ID, cmp.Or(hello.ServerName, a.mailName(dst)))
		},
	}
}

var errNoMailTLS = errors.New("this server has no certificates for mail: use port 25 or 587")

// mailHandshake begins TLS on a connection to port 465.
func (a *attached) mailHandshake(ctx context.Context, in *insideConn, t *tls.Config) (net.Conn, error) {
	if t == nil {
		return nil, errNoMailTLS
	}
	c := tls.Server(in, t)
	ctx, cancel := context.WithTimeout(ctx, handshake)
	defer cancel()
	return c, c.HandshakeContext(ctx)
}

// handshakeProblem returns why there was no TLS on port 465, for the record and for who
// wrote the program. It is one of few fixed texts, since programs choose what they send.
func handshakeProblem(err error) string {
	if why := inspect.ClientRefusal(err); why != "" {
		return why
	}
	var plain tls.RecordHeaderError
	switch {
	case errors.Is(err, errNoMailTLS):
		return errNoMailTLS.Error()
	case errors.As(err, &plain), errors.Is(err, context.DeadlineExceeded):
		return "the program did not begin with TLS, as port 465 needs; without TLS, or with STARTTLS, use port 587 or 25"
	}
	return "the TLS handshake failed"
}

// captureLate is capture for a connection on which the program has already sent
// something. If no server has greeted the program, captureLate does.
func (a *attached) captureLate(ctx context.Context, in *insideConn, dst netip.AddrPort, seen []byte, greeted bool) {
	if !greeted {
		_ = in.SetWriteDeadline(time.Now().Add(handshake))
		if _, err := in.Write([]byte("220 " + Name + " ESMTP\r\n")); err != nil {
			in.abort()
			return
		}
		_ = in.SetWriteDeadline(time.Time{})
	}
	a.capture(ctx, in, dst, seen)
}
