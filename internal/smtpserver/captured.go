package smtpserver

import (
	"bytes"
	"crypto/rand"
	"fmt"

	"github.com/emersion/go-sasl"
	"github.com/emersion/go-smtp"
)

// capturedSession adds AUTH to a session. Go-smtp offers it to sessions that
// implement [smtp.AuthSession], which the one for other servers must not.
type capturedSession struct{ *session }

var _ smtp.AuthSession = capturedSession{}

// AuthMechanisms offers the mechanisms that programs commonly use. A program that can
// choose takes CRAM-MD5, with which the password never leaves it.
func (capturedSession) AuthMechanisms() []string {
	return []string{"CRAM-MD5", sasl.Plain, sasl.Login, "XOAUTH2", sasl.OAuthBearer}
}

// Auth accepts any credential without reading it. The sandbox is identified by its
// link, and the secret belongs to a server on the Internet.
func (c capturedSession) Auth(mech string) (sasl.Server, error) {
	switch mech {
	case sasl.Plain, "XOAUTH2", sasl.OAuthBearer:
		return &acceptAnyAuth{asks: [][]byte{nil}, initial: true}, nil
	case sasl.Login:
		return &acceptAnyAuth{asks: [][]byte{[]byte("Username:"), []byte("Password:")}, initial: true}, nil
	case "CRAM-MD5": // RFC 2195; it has no initial response
		return &acceptAnyAuth{asks: [][]byte{fmt.Appendf(nil, "<%s@%s>", rand.Text(), c.s.cfg.Hostname)}}, nil
	}
	return nil, smtp.ErrAuthUnknownMechanism
}

// acceptAnyAuth sends the challenges of a mechanism and accepts any response.
type acceptAnyAuth struct {
	asks    [][]byte // challenges that are left
	initial bool     // the next response may have come with the command
}

// Next drops a response and returns the next challenge.
func (a *acceptAnyAuth) Next(response []byte) (challenge []byte, done bool, err error) {
	if response != nil && a.initial {
		a.asks = a.asks[1:] // RFC 4954: the initial response answers the first challenge
	}
	a.initial = false
	if len(a.asks) == 0 {
		return nil, true, nil
	}
	challenge, a.asks = a.asks[0], a.asks[1:]
	return challenge, false, nil
}

// lineEnds checks the line ends of a message, and gathers it with CR LF.
//
// Outside, a bare LF is refused as RFC 5321 section 2.3.8 wants. Programs in a sandbox
// send it all the time: Python's sendmail(message.as_bytes()), curl with a file. From
// them it is taken as CR LF, if lenient is true. Why that smuggles nothing: an LF never
// ends the message, since go-smtp has looked for CR LF dot CR LF before; nothing is
// relayed as it was read, since a reviewer sees the message that was parsed from the
// corrected lines, and exactly that is composed, hashed, and sent later with its dots
// stuffed anew.
//
// A bare CR is refused from everybody.
type lineEnds struct {
	lenient bool
	stuffed bool // the message comes by DATA, where clients double dots at the beginning of lines

	prev byte // the last octet that was gathered; 0 at the beginning
	dots int  // 1 at the beginning of a line after a bare LF, 2 after a dot there, else 0
}

// add gathers one more octet. It returns false if the message must be refused.
func (l *lineEnds) add(buf *bytes.Buffer, c byte) bool {
	if c != '\n' && l.prev == '\r' {
		return false
	}
	if c == '\n' && l.prev != '\r' {
		if !l.lenient {
			return false
		}
		buf.WriteString("\r\n")
		l.prev, l.dots = '\n', 1
		return true
	}
	// go-smtp undoes the stuffing of dots only after CR LF. Python doubles the dot after a
	// bare LF too; curl does not. So of two dots one is taken off, and a single one, which
	// only curl sends, stays.
	was := l.dots
	l.dots = 0
	if c == '.' && was == 1 {
		l.dots = 2
	}
	if c == '.' && was == 2 && l.stuffed {
		return true
	}
	l.prev = c
	buf.WriteByte(c)
	return true
}
