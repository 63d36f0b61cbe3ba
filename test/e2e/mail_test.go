package e2e

import (
	"bufio"
	"fmt"
	"net"
	"net/textproto"
	"time"
)

// A mailer is an SMTP conversation of another mail server with Postern.
type mailer struct {
	net.Conn
	replies textproto.Reader
}

// dialMail connects and reads the greeting.
func dialMail(addr string) (*mailer, error) {
	conn, err := net.DialTimeout("tcp", addr, time.Minute)
	if err != nil {
		return nil, err
	}
	m := &mailer{Conn: conn, replies: textproto.Reader{R: bufio.NewReader(conn)}}
	if err = m.say("", 220); err == nil {
		err = m.say("EHLO example.com", 250)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return m, nil
}

// say sends a line, unless it is empty, and returns an error unless the reply
// has the code.
func (m *mailer) say(line string, code int) error {
	if line != "" {
		if _, err := m.Write([]byte(line + "\r\n")); err != nil {
			return err
		}
	}
	_, _, err := m.replies.ReadResponse(code)
	return err
}

// deliver sends one message. Its lines must end in CR LF and not begin with a dot.
func (m *mailer) deliver(to, subject, text string) error {
	message := "From: bob@example.com\r\nTo: " + to + "\r\nSubject: " + subject + "\r\nMessage-ID: <" + subject + "@example.com>\r\n\r\n" + text + "."
	for _, step := range []struct {
		line string
		code int
	}{{"MAIL FROM:<bob@example.com>", 250}, {"RCPT TO:<" + to + ">", 250}, {"DATA", 354}, {message, 250}} {
		if err := m.say(step.line, step.code); err != nil {
			return fmt.Errorf("%.20s: %w", step.line, err)
		}
	}
	return nil
}
