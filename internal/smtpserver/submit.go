package smtpserver

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"

	"github.com/emersion/go-sasl"
	"github.com/emersion/go-smtp"

	"postern/internal/auth"
	"postern/internal/mail"
)

// ErrCredentials is what [Config.Authenticate] returns for a wrong name or
// password: 535 5.7.8.
var ErrCredentials = errors.New("wrong name or password")

// An Account is an authenticated client of submission.
type Account struct {
	Who     auth.Principal
	Address string // the only sender that it may use
}

// ServeSubmission accepts messages from programs that authenticate (RFC 6409) on l
// until Shutdown, which makes it return nil. With implicit a conversation begins
// with TLS (RFC 8314), otherwise STARTTLS is offered. Without TLS only clients on
// this machine may authenticate. It closes l.
func (s *Server) ServeSubmission(l net.Listener, implicit bool) error {
	if s.cfg.Authenticate == nil || implicit && s.cfg.TLS == nil {
		l.Close()
		return errors.New("serve submission: no Authenticate, or no TLS, is configured")
	}
	return s.serve(l, &door{submission: true, implicit: implicit})
}

// submitSession adds AUTH to a session, if the connection is secure.
type submitSession struct{ *session }

var _ smtp.AuthSession = submitSession{}

// secure reports whether a password may be sent: over TLS, or on this machine.
func (ses *session) secure() bool {
	return ses.isTLS || ses.peer().Remote.Addr().IsLoopback()
}

// AuthMechanisms offers none on an insecure connection, so that clients do not send
// the password.
func (ses submitSession) AuthMechanisms() []string {
	if !ses.secure() {
		return nil
	}
	return []string{sasl.Plain, sasl.Login}
}

// Auth begins to authenticate.
func (ses submitSession) Auth(mech string) (sasl.Server, error) {
	if !ses.secure() {
		return nil, reply(538, smtp.EnhancedCode{5, 7, 11}, "encryption is required, begin with STARTTLS")
	}
	switch mech {
	case sasl.Plain:
		return &plain{check: ses.login}, nil
	case sasl.Login:
		return &login{check: ses.login}, nil
	}
	return nil, smtp.ErrAuthUnknownMechanism
}

// plain is RFC 4616.
type plain struct {
	asked bool
	check func(user, password string) error
}

var errMalformedAuth = reply(501, smtp.EnhancedCode{5, 5, 2}, "malformed credentials")

// Next reads the one response.
func (p *plain) Next(response []byte) (challenge []byte, done bool, err error) {
	if response == nil && !p.asked {
		p.asked = true
		return nil, false, nil
	}
	parts := bytes.Split(response, []byte{0})
	if len(parts) != 3 || len(response) > 2000 {
		return nil, true, errMalformedAuth
	}
	if as := string(parts[0]); as != "" && as != string(parts[1]) {
		return nil, true, reply(535, smtp.EnhancedCode{5, 7, 8}, "an authorization identity other than the user is not supported")
	}
	return nil, true, p.check(string(parts[1]), string(parts[2]))
}

// login is AUTH LOGIN, which Outlook and others use; no RFC specifies it.
type login struct {
	user  *string
	begun bool
	check func(user, password string) error
}

// Next asks for the name, then for the password.
func (l *login) Next(response []byte) (challenge []byte, done bool, err error) {
	switch {
	case response == nil && !l.begun:
		l.begun = true
		return []byte("Username:"), false, nil
	case len(response) > 1000:
		return nil, true, errMalformedAuth
	case l.user == nil:
		l.begun = true
		user := string(response)
		l.user = &user
		return []byte("Password:"), false, nil
	}
	return nil, true, l.check(*l.user, string(response))
}

// maxBadAuth is how many wrong passwords end a conversation.
const maxBadAuth = 3

// login checks a name and a password. The tarpit delays the reply to clients that
// have failed before.
func (ses submitSession) login(user, password string) error {
	s, from := ses.s, ses.peer()
	h := host(ses.link.RemoteAddr())
	wait, leave, ok := s.guesses.Enter(h, user)
	if !ok {
		ses.link.doom()
		return reply(421, smtp.EnhancedCode{4, 7, 0}, "too many wrong passwords from your address, try again later")
	}
	defer leave()
	if !s.pause(ses.link, wait) {
		return reply(421, smtp.EnhancedCode{4, 7, 0}, "too many wrong passwords, try again later")
	}
	ctx, cancel := context.WithTimeout(ses.link.ctx, s.cfg.HandTimeout)
	defer cancel()
	a, err := s.cfg.Authenticate(ctx, user, password, from)
	switch {
	case errors.Is(err, ErrCredentials):
		s.guesses.Guess(h, user)
		ses.mu.Lock()
		defer ses.mu.Unlock()
		if ses.badAuth++; ses.badAuth >= maxBadAuth {
			ses.link.doom()
		}
		return reply(535, smtp.EnhancedCode{5, 7, 8}, "wrong name or password: use the inbox's address as name and its key as password")
	case err != nil:
		s.log.Error("authenticate submission", "err", err, "remote", from.Remote.String())
		return reply(454, smtp.EnhancedCode{4, 7, 0}, "temporary failure, try again later")
	}
	s.guesses.Welcome(h, user)
	ses.mu.Lock()
	defer ses.mu.Unlock()
	ses.account = &a
	return nil
}

// maySubmitLocked checks the sender of MAIL FROM.
func (ses *session) maySubmitLocked(from string) error {
	switch a := ses.account; {
	case a == nil && !ses.secure():
		return reply(530, smtp.EnhancedCode{5, 7, 0}, "begin with STARTTLS, then authenticate")
	case a == nil:
		return reply(530, smtp.EnhancedCode{5, 7, 0}, "authenticate first")
	default:
		// The attack: the key of one inbox sends as another.
		if addr, err := path(from); err != nil || !sameAddress(addr, a.Address) {
			return reply(553, smtp.EnhancedCode{5, 7, 1}, "this key may only send as <%s>", a.Address)
		}
	}
	return nil
}

// sameAddress compares addresses without regard to ASCII case.
func sameAddress(a, b string) bool {
	return len(a) == len(b) && bytes.EqualFold([]byte(a), []byte(b))
}

// submit hands a submitted message to Submit.
func (ses *session) submit(env mail.Envelope) error {
	ses.mu.Lock()
	account := *ses.account // Mail has seen that it is there
	ses.mu.Unlock()
	ctx, cancel := context.WithTimeout(ses.link.ctx, ses.s.cfg.HandTimeout)
	defer cancel()
	said, err := ses.s.cfg.Submit(ctx, account, env, ses.peer())
	if err != nil {
		return ses.errorReply(err, 550, account.Who.String())
	}
	return reply(250, smtp.EnhancedCode{2, 0, 0}, "%s", said)
}

// isLoopback reports whether a peer is on this machine.
func isLoopback(a net.Addr) bool {
	ap, err := netip.ParseAddrPort(a.String())
	return err == nil && ap.Addr().Unmap().IsLoopback()
}
