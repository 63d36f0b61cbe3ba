package imapmail

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/emersion/go-imap/v2"
	"github.com/emersion/go-imap/v2/imapclient"
	"github.com/emersion/go-sasl"

	"postern/internal/connector"
	"postern/internal/mail"
)

// The server is hostile. These bound what one command can cost.
const (
	commandTime = time.Minute
	fetchTime   = 5 * time.Minute
	graceTime   = 5 * time.Second // of a command after its context has ended; see Wait
	answerBytes = 16 << 20        // octets of the answer to a command, and of what comes unasked
	maxFolders  = 300
	maxUIDs     = 500_000 // of one folder
)

// A Provider is one mailbox. It connects at its first call. After an error it must be
// closed.
type Provider struct {
	o   *Opener
	set connector.Settings

	conn   *meter
	guard  *guard
	c      *imapclient.Client
	caps   imap.CapSet
	news   chan struct{} // the server has announced something
	boxes  []folder      // as the server listed them last
	chosen string        // the selected folder; empty if there is none
	picked *imap.SelectData
}

var _ connector.Provider = (*Provider)(nil)

// do runs one command. If ctx ends or the command takes too long, the connection is
// closed, and the command fails.
func (p *Provider) do(ctx context.Context, what string, limit time.Duration, octets int64, f func() error) error {
	p.conn.left.Store(octets)
	if p.guard != nil {
		p.guard.nested.Store(maxNested)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = p.conn.Close() })
	err := f()
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return p.fail(what, err)
}

// fail describes an error for a person. What the server wrote is quoted, printable and
// bounded, and never if it could repeat the credential.
func (p *Provider) fail(what string, err error) error {
	text := mail.Printable(err.Error(), 300)
	if c := p.set.Credential; c != "" && strings.Contains(err.Error(), c) {
		text = "the server's answer is withheld: it repeats the password"
	}
	if strings.Contains(err.Error(), errNested.Error()) { // the library does not wrap
		return fmt.Errorf("%s: %w", what, errNested)
	}
	if ie, ok := errors.AsType[*imap.Error](err); ok && passes(ie.Code) {
		return &connector.RetryError{After: time.Minute, Err: fmt.Errorf("%s: %s", what, text)}
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%s: %w", what, err)
	}
	return fmt.Errorf("%s: %s", what, text)
}

// passes reports whether a refusal is of the moment (RFC 5530, section 3).
func passes(code imap.ResponseCode) bool {
	return slices.Contains([]imap.ResponseCode{imap.ResponseCodeLimit, imap.ResponseCodeUnavailable, imap.ResponseCodeInUse, imap.ResponseCodeServerBug}, code)
}

// connect connects and signs in, once.
func (p *Provider) connect(ctx context.Context) error {
	if p.c != nil {
		return nil
	}
	addr := p.set.Public[IMAP]
	dctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	raw, err := p.o.conf.Dial(dctx, "tcp", addr)
	if err != nil {
		return p.fail("connect to "+addr, err)
	}
	p.conn = &meter{Conn: raw}
	p.news = make(chan struct{}, 1)
	announce := func() {
		select {
		case p.news <- struct{}{}:
		default:
		}
	}
	options := &imapclient.Options{
		UnilateralDataHandler: &imapclient.UnilateralDataHandler{
			Expunge: func(uint32) { announce() },
			Mailbox: func(*imapclient.UnilateralDataMailbox) { announce() },
			Fetch: func(m *imapclient.FetchMessageData) {
				_, _ = m.Collect() // bounded by the meter
				announce()
			},
		},
	}
	err = p.do(ctx, "connect to "+addr, commandTime, answerBytes, func() error {
		if implicit(addr, "143") {
			secure := tls.Client(p.conn, p.o.tls(addr))
			if err := secure.HandshakeContext(dctx); err != nil {
				return err
			}
			p.guard = &guard{Conn: secure}
		} else {
			secure, err := startTLS(dctx, p.conn, p.o.tls(addr))
			if err != nil {
				return err
			}
			p.guard = &guard{Conn: secure, greeting: []byte("* OK behind TLS\r\n")}
		}
		p.guard.nested.Store(maxNested)
		p.c = imapclient.New(p.guard, options)
		return p.c.WaitGreeting()
	})
	if err != nil {
		return err
	}
	return p.login(ctx)
}

// login signs in and learns what the server can.
func (p *Provider) login(ctx context.Context) error {
	err := p.do(ctx, "sign in", commandTime, answerBytes, func() error {
		var err error
		if p.set.Public[Auth] == "xoauth2" {
			err = p.c.Authenticate(xoauth2{p.set.Public[User], p.set.Credential})
		} else if p.c.Caps().Has(imap.AuthCap("PLAIN")) {
			err = p.c.Authenticate(sasl.NewPlainClient("", p.set.Public[User], p.set.Credential))
		} else {
			err = p.c.Login(p.set.Public[User], p.set.Credential).Wait()
		}
		if ie, ok := errors.AsType[*imap.Error](err); ok && ie.Type == imap.StatusResponseTypeNo && !passes(ie.Code) {
			return connector.ErrSignIn
		}
		if err == nil {
			p.caps = p.c.Caps()
		}
		return err
	})
	if err != nil && strings.Contains(err.Error(), connector.ErrSignIn.Error()) {
		return connector.ErrSignIn
	}
	return err
}

// xoauth2 is the client's side of the mechanism XOAUTH2.
type xoauth2 struct{ user, token string }

// Start implements [sasl.Client].
func (x xoauth2) Start() (string, []byte, error) {
	return "XOAUTH2", []byte("user=" + x.user + "\x01auth=Bearer " + x.token + "\x01\x01"), nil
}

// Next implements [sasl.Client]: it acknowledges the reason of a refusal.
func (x xoauth2) Next([]byte) ([]byte, error) { return []byte{}, nil }

// pick selects a folder; if again is true, it selects it once more even if
// it is selected already, so that the server's view is fresh.
func (p *Provider) pick(ctx context.Context, name string, again bool) (*imap.SelectData, error) {
	if p.chosen == name && !again {
		return p.picked, nil
	}
	err := p.do(ctx, "open folder "+mail.Printable(name, 60), commandTime, answerBytes, func() (err error) {
		p.picked, err = p.c.Select(name, &imap.SelectOptions{CondStore: p.caps.Has(imap.CapCondStore)}).Wait()
		return err
	})
	if err != nil {
		p.chosen = ""
		return nil, err
	}
	p.chosen = name
	return p.picked, nil
}

// Close implements [connector.Provider].
func (p *Provider) Close() error {
	if p.conn == nil {
		return nil
	}
	p.conn.left.Store(answerBytes)
	err := p.conn.Close()
	if p.c != nil {
		_ = p.c.Close() // it only reports that the connection is closed
	}
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// Revoke implements [connector.Provider]: a password cannot be withdrawn here.
func (p *Provider) Revoke(context.Context) error { return nil }
