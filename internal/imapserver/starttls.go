package imapserver

import (
	"io"
	"net"
	"strings"
	"time"
)

const (
	maxClearLine  = 512 // octets of a command before TLS
	maxClearLines = 20
	clearCaps     = "CAPABILITY IMAP4rev2 IMAP4rev1 STARTTLS LOGINDISABLED"
)

// beginTLS speaks with a client that has not begun TLS, until STARTTLS. It serves
// nothing else, and reports whether TLS follows.
//
// The attack (CVE-2011-0411 and many like it): somebody in between sends commands
// before TLS begins, which the server reads as the client's once it has. So octets are
// read one at a time, and none that came before TLS is left for after it.
func beginTLS(conn net.Conn) bool {
	say := func(s string) bool {
		_, err := io.WriteString(conn, s+"\r\n")
		return err == nil
	}
	if !say("* OK [" + clearCaps + "] Postern") {
		return false
	}
	for range maxClearLines {
		line, ok := readLine(conn, maxClearLine)
		if !ok {
			say("* BYE a command before TLS has at most 512 octets")
			return false
		}
		tag, command, _ := strings.Cut(line, " ")
		if !validTag(tag) {
			say("* BAD a command begins with a tag")
			continue
		}
		name, arguments, _ := strings.Cut(strings.ToUpper(command), " ")
		switch {
		case name == "STARTTLS" && arguments == "":
			return say(tag + " OK begin TLS now")
		case name == "CAPABILITY" && arguments == "":
			say("* " + clearCaps)
			say(tag + " OK done")
		case name == "NOOP" && arguments == "":
			say(tag + " OK done")
		case name == "LOGOUT":
			say("* BYE see you")
			say(tag + " OK done")
			return false
		case name == "LOGIN" || name == "AUTHENTICATE":
			// What it sent is not read: it may have been the key.
			say(tag + " NO [PRIVACYREQUIRED] begin with STARTTLS; a key that came with this command was sent in the clear: renew it")
		default:
			say(tag + " BAD begin with STARTTLS")
		}
	}
	say("* BYE too many commands before TLS")
	return false
}

// readLine reads one line of at most most octets, one octet at a time.
func readLine(r io.Reader, most int) (line string, ok bool) {
	var b strings.Builder
	var one [1]byte
	for b.Len() <= most {
		if _, err := io.ReadFull(r, one[:]); err != nil {
			return "", false
		}
		if one[0] == '\n' {
			return strings.TrimSuffix(b.String(), "\r"), true
		}
		b.WriteByte(one[0])
	}
	return "", false
}

// validTag reports whether s may be the tag of a command. It is written into replies.
func validTag(s string) bool {
	if s == "" || len(s) > 64 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c >= 0x7f || strings.IndexByte(`(){%*"\]+`, c) >= 0 {
			return false
		}
	}
	return true
}

// linger reads the input of a client that is being disconnected. Closing a socket with
// unread input resets the connection, and the client may lose the last reply.
func linger(conn net.Conn) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok || tcp.CloseWrite() != nil {
		return
	}
	_ = tcp.SetReadDeadline(time.Now().Add(time.Second))
	_, _ = io.Copy(io.Discard, io.LimitReader(tcp, 64<<10))
}
