// Package imapmail connects mailboxes of any provider over IMAP (RFC 3501, 9051) and
// mail submission (RFC 6409): a [connector.Provider].
//
// Both servers are named by a person, so both are hostile: TLS with a verified
// certificate is required, only public addresses are connected to unless the operator
// allows others, and every answer is bounded in time, in octets and in counts.
//
// This package must not decide what is sent or changed, and keeps nothing: what it
// knows between two calls is in the cursor.
package imapmail

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/connector"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/smtpclient"
)

// Kind is the kind of these connections.
const Kind connector.Kind = "imap"

// The keys of the public settings.
const (
	IMAP     = "imap"     // host:port; port 143 begins in the clear with STARTTLS, every other with TLS
	SMTP     = "smtp"     // host:port; ports 587 and 25 begin with STARTTLS, every other with TLS
	User     = "user"     // the name to sign in with; empty means the address
	Auth     = "auth"     // "password", or "xoauth2" where the credential is an access token; empty means password
	AuthServ = "authserv" // the name in the server's Authentication-Results; empty means that none is believed
	SentCopy = "sent"     // "append" puts a copy of what was sent into the folder Sent, "provider" relies on the provider; empty means append
)

// Config says how servers are reached.
type Config struct {
	// Hostname is the name that the SMTP client greets with. Required.
	Hostname string
	// Dial connects to a host:port, to allowed addresses alone. Required.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Roots are the authorities of the servers' certificates; nil means the system's.
	Roots *x509.CertPool
	// Poll is how long a change may stay unnoticed in folders other than the inbox, or
	// in all of them where the server has no IDLE; 0 means 1 min.
	Poll time.Duration
}

// An Opener opens mailboxes over IMAP. It is safe for concurrent use.
type Opener struct {
	conf Config
	smtp *smtpclient.Client
}

var _ connector.Opener = (*Opener)(nil)

// New returns an opener.
func New(c Config) (*Opener, error) {
	if c.Dial == nil {
		return nil, errors.New("configure mailboxes over IMAP: Dial is missing")
	}
	if c.Poll <= 0 {
		c.Poll = time.Minute
	}
	client, err := smtpclient.New(smtpclient.Config{Hostname: c.Hostname, Dial: c.Dial, CommandTimeout: time.Minute, FinalTimeout: 5 * time.Minute})
	if err != nil {
		return nil, err
	}
	return &Opener{c, client}, nil
}

// Prepare implements [connector.Opener].
func (o *Opener) Prepare(ctx context.Context, s connector.Settings) (connector.Settings, error) {
	public := map[string]string{}
	for k, v := range s.Public {
		switch k {
		case IMAP, SMTP, User, Auth, AuthServ, SentCopy:
		default:
			return s, fmt.Errorf("%w: settings: %.40q is unknown; want %s, %s, %s, %s, %s or %s", directory.ErrInvalid, k, IMAP, SMTP, User, Auth, AuthServ, SentCopy)
		}
		if v = strings.TrimSpace(v); v != "" {
			public[k] = v
		}
	}
	s.Public = public
	if err := check(&s); err != nil {
		return s, err
	}
	p := o.provider(s)
	defer func() { _ = p.Close() }()
	if err := p.connect(ctx); err != nil {
		return s, fmt.Errorf("%w: imap: %w", directory.ErrInvalid, err)
	}
	if _, err := p.folders(ctx); err != nil {
		return s, fmt.Errorf("%w: imap: %w", directory.ErrInvalid, err)
	}
	if err := o.smtp.CheckSubmission(ctx, p.submission()); err != nil {
		return s, fmt.Errorf("%w: smtp: %w", directory.ErrInvalid, signIn(err))
	}
	return s, nil
}

// check checks the settings that a person gave, without a connection.
func check(s *connector.Settings) error {
	bad := func(field, problem string) error {
		return fmt.Errorf("%w: %s: %s", directory.ErrInvalid, field, problem)
	}
	addr, err := mail.CheckAddr("address", s.Address)
	if err != nil {
		return fmt.Errorf("%w: %w", directory.ErrInvalid, err)
	}
	s.Address = strings.ToLower(addr)
	for _, k := range []string{IMAP, SMTP} {
		host, port, err := net.SplitHostPort(s.Public[k])
		if n, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || n == 0 || host == "" || len(host) > 253 || strings.ContainsAny(host, " \t\r\n/@\"\\") {
			return bad(k, "must be HOST:PORT, as imap.example.org:993 and smtp.example.org:465")
		}
		if a, err := netip.ParseAddr(host); err == nil && a.Zone() != "" {
			return bad(k, "an address must have no zone")
		}
	}
	if s.Public[User] == "" {
		s.Public[User] = s.Address
	}
	for _, k := range []string{User, AuthServ} {
		if v := s.Public[k]; len(v) > 320 || strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return bad(k, "must be at most 320 printable characters")
		}
	}
	switch s.Public[Auth] {
	case "", "password", "xoauth2":
	default:
		return bad(Auth, "must be password or xoauth2")
	}
	switch s.Public[SentCopy] {
	case "", "append", "provider":
	default:
		return bad(SentCopy, "must be append or provider")
	}
	if c := s.Credential; c == "" || len(c) > 8<<10 || strings.ContainsAny(c, "\x00\r\n") {
		return bad("credential", "must be 1 to 8192 bytes without line breaks: the password, or the access token")
	}
	return nil
}

// Open implements [connector.Opener].
func (o *Opener) Open(_ context.Context, s connector.Settings, _ func(context.Context, string) error) (connector.Provider, error) {
	if err := check(&s); err != nil {
		return nil, fmt.Errorf("%w: %w", connector.ErrSignIn, err)
	}
	return o.provider(s), nil
}

func (o *Opener) provider(s connector.Settings) *Provider { return &Provider{o: o, set: s} }

// tls returns the configuration for a host:port.
func (o *Opener) tls(addr string) *tls.Config {
	host, _, _ := net.SplitHostPort(addr)
	return &tls.Config{ServerName: host, RootCAs: o.conf.Roots, MinVersion: tls.VersionTLS12}
}

// implicit reports whether TLS begins with the first octet at an address, unless its
// port is one of those that begin in the clear.
func implicit(addr string, clear ...string) bool {
	_, port, _ := net.SplitHostPort(addr)
	return !slices.Contains(clear, port)
}

// signIn makes a refused account what the connector knows.
func signIn(err error) error {
	if errors.Is(err, smtpclient.ErrCredentials) {
		return fmt.Errorf("%w (%w)", connector.ErrSignIn, err)
	}
	return err
}
