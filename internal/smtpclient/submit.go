package smtpclient

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"postern/internal/mail"
)

// ErrCredentials means that a submission server refuses the user or the password.
var ErrCredentials = errors.New("the server refuses the user or the password")

// A Submission is a server that takes the mail of one account (RFC 6409), always over
// TLS with a verified certificate.
type Submission struct {
	Addr     string      // host:port
	Implicit bool        // TLS from the first octet (RFC 8314); else STARTTLS, which must be offered
	TLS      *tls.Config // nil means the system's authorities; the name in Addr is verified
	User     string
	Password string // for PLAIN or LOGIN
	Token    string // an OAuth access token for XOAUTH2; if it is set, Password is not used
}

// Submit sends env through a submission server and returns the outcomes in the order
// of env.To, as [Client.Deliver] does. An error means that nothing was sent; it wraps
// [ErrCredentials] if the account was refused.
func (c *Client) Submit(ctx context.Context, s Submission, env mail.Envelope) ([]mail.Delivery, error) {
	for _, part := range [][]byte{env.Prefix, env.Raw} {
		if err := mail.CheckRaw(part); err != nil {
			return nil, fmt.Errorf("submit message: %w", err)
		}
	}
	if _, err := (mail.Envelope{From: env.From, To: env.To}).Payload(); err != nil {
		return nil, fmt.Errorf("submit message: %w", err)
	}
	v, err := c.signIn(ctx, s)
	if err != nil {
		return nil, err
	}
	all := make([]mail.Delivery, len(env.To))
	ds := make([]*mail.Delivery, len(env.To))
	for i, to := range env.To {
		all[i] = mail.Delivery{Recipient: to, Outcome: mail.NotSent, Remote: s.Addr}
		ds[i] = &all[i]
	}
	v.deliver(env, ds)
	return all, nil
}

// CheckSubmission signs in to a submission server and leaves.
func (c *Client) CheckSubmission(ctx context.Context, s Submission) error {
	v, err := c.signIn(ctx, s)
	if err != nil {
		return err
	}
	v.close()
	return nil
}

// signIn opens a conversation that is encrypted and authenticated.
func (c *Client) signIn(ctx context.Context, s Submission) (*conversation, error) {
	host, _, err := net.SplitHostPort(s.Addr)
	if err != nil {
		return nil, fmt.Errorf("submit message: %w", err)
	}
	conf := s.TLS
	if conf == nil {
		conf = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	t := target{addr: s.Addr, host: host, tls: conf, require: true, dial: c.cfg.DialTimeout}
	var v *conversation
	if s.Implicit {
		v, err = c.greetTLS(ctx, t)
	} else {
		v, err = c.open(ctx, t)
	}
	if err != nil {
		return nil, err
	}
	if err := v.authenticate(s); err != nil {
		v.close()
		return nil, err
	}
	return v, nil
}

// greetTLS is greet on a connection that begins with TLS.
func (c *Client) greetTLS(ctx context.Context, t target) (*conversation, error) {
	over := *c
	conf := t.tls.Clone()
	if conf.ServerName == "" {
		conf.ServerName = t.host
	}
	dial := c.cfg.Dial
	over.cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		secure := tls.Client(&bounded{Conn: conn, left: maxPeerBytes}, conf)
		if err := secure.HandshakeContext(ctx); err != nil {
			return nil, errors.Join(fmt.Errorf("start tls: %w", err), conn.Close())
		}
		return secure, nil
	}
	v, err := over.greet(ctx, t)
	if err != nil {
		return nil, err
	}
	v.r = bufio.NewReaderSize(v.conn, maxReplyLine)
	return v, nil
}

// authenticate signs in (RFC 4954). The attack: a server without TLS, or one that
// repeats the password in its reply, which then stands in a log.
func (v *conversation) authenticate(s Submission) error {
	offered := strings.Fields(strings.ToUpper(v.ext["AUTH"]))
	encode := func(t string) string { return base64.StdEncoding.EncodeToString([]byte(t)) }
	var err error
	switch {
	case s.Token != "":
		if !slices.Contains(offered, "XOAUTH2") {
			return errors.New("the server offers no XOAUTH2 to sign in with")
		}
		_, err = v.command(235, "AUTH XOAUTH2 %s", encode("user="+s.User+"\x01auth=Bearer "+s.Token+"\x01\x01"))
		var r *replyError
		if errors.As(err, &r) && r.code == 334 { // the reason, which an empty line acknowledges
			_, err = v.command(235, "")
		}
	case slices.Contains(offered, "PLAIN"):
		_, err = v.command(235, "AUTH PLAIN %s", encode("\x00"+s.User+"\x00"+s.Password))
	case slices.Contains(offered, "LOGIN"):
		if _, err = v.command(334, "AUTH LOGIN"); err == nil {
			if _, err = v.command(334, "%s", encode(s.User)); err == nil {
				_, err = v.command(235, "%s", encode(s.Password))
			}
		}
	default:
		return errors.New("the server offers no way to sign in that this client knows (PLAIN, LOGIN)")
	}
	var r *replyError
	if !errors.As(err, &r) {
		return err
	}
	if r.code/100 == 5 || r.code == 334 {
		return fmt.Errorf("%w (code %d)", ErrCredentials, r.code)
	}
	return fmt.Errorf("the server does not let this account in now (code %d)", r.code)
}
