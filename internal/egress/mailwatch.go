package egress

import (
	"bytes"
	"strings"
)

// A mailSign is a sign of a mail conversation (RFC 5321) in what a program sends.
// It is a bit set.
type mailSign uint8

const (
	helloFirst mailSign = 1 << iota // the first word is EHLO, HELO or LHLO
	helloMaybe                      // what came so far may become one of these
	askFirst                        // the first word is a command of SMTP that other protocols may have, too
	command                         // a line begins with a command of SMTP
	delivery                        // what follows could deliver mail, or is hidden from us
	recipient                       // a line begins with RCPT and what may follow that word
	hidden                          // what follows may be encrypted
)

const (
	maxLead = 64  // white space held back before the first word
	maxLine = 480 // bytes after which a server may start a new line: RFC 5321 §4.5.3.1.4 has 512
	maxWord = 40  // bytes compared at the start of a line
	maxTail = 24  // bytes compared at the end of a line

	maxBlock = 16 << 10 // bytes read in one go, so that they stay in the processor's cache

	// A server that has received this much, more than the buffers on the way hold,
	// and has not answered is not a mail server. It would have sent a greeting, or
	// an error for an unknown command.
	maxUnheard = 64 << 20
)

// A mailWatch reads what a program sends, line by line, for as long as the server
// could be a mail server. It looks for what every delivery needs instead of how a
// conversation begins: servers skip lines that they do not know, such as "GET /
// HTTP/1.1", and accept the mail that comes next. No server delivers without a RCPT
// command, so no line that a server could take for RCPT may pass. STARTTLS could
// hide such a line, so it may not pass either.
//
// The zero mailWatch is at the start of a connection.
type mailWatch struct {
	opening []byte // first bytes, at most 8
	decided bool   // the first word is known
	connect bool   // it was CONNECT
	lead    int    // bytes before and in the first word
	binary  bool   // some of them are not white space

	line []byte // start of the line, in upper case, without invisible bytes
	dull bool   // line needs no more attention
	col  int    // bytes of the line
	tail []byte // its last bytes
}

// read returns the signs in p, which continues what was read before.
func (m *mailWatch) read(p []byte) (s mailSign) {
	if n := 8 - len(m.opening); n > 0 {
		m.opening = append(m.opening, p[:min(n, len(p))]...)
	}
	// A server that does not look for line ends takes each packet for a command.
	packet := mailWatch{decided: true}
	s |= packet.segment(p[:min(len(p), maxWord)]) | packet.judge(true)
	s &= delivery | recipient | hidden
	for len(p) > 0 {
		b := p[:min(len(p), maxBlock)]
		end := len(b)
		if i := bytes.IndexByte(b, '\n'); i >= 0 {
			end = i
		}
		// Some servers end lines at a bare CR.
		if i := bytes.IndexByte(b[:end], '\r'); i >= 0 {
			end = i
		}
		s |= m.segment(b[:end])
		if p = p[end:]; end < len(b) {
			s |= m.endLine()
			p = p[1:]
		}
	}
	if !m.decided && !m.binary && couldHello(string(m.line)) {
		s |= helloMaybe
	}
	return s
}

// segment reads a part of a line without its end.
func (m *mailWatch) segment(p []byte) (s mailSign) {
	if !m.dull {
		s |= m.start(p)
	}
	if !m.decided {
		if m.lead += len(p); m.lead > maxLead {
			m.decided = true
		}
	}
	before := m.col
	m.col += len(p)
	if m.col > maxLine {
		// A server with a short buffer starts a new command in the middle of a
		// line.
		s |= longRecipient(m.tail, p)
	}
	if before == 0 || len(p) >= maxTail {
		m.tail = append(m.tail[:0], p[max(0, len(p)-maxTail):]...)
	} else {
		m.tail = append(m.tail, p...)
		m.tail = append(m.tail[:0], m.tail[max(0, len(m.tail)-maxTail):]...)
	}
	return s
}

// start reads the start of a line. Known servers skip white space and invisible
// bytes, and clear the eighth bit.
func (m *mailWatch) start(p []byte) mailSign {
	if len(p) > maxLine-m.col {
		p, m.dull = p[:max(0, maxLine-m.col)], true // see longRecipient
	}
	for _, c := range p {
		c &= 0x7f
		switch {
		case c < ' ' && c != '\t' || c == 0x7f:
			m.binary = m.binary || !m.decided
			continue
		case (c == ' ' || c == '\t') && len(m.line) == 0:
			continue
		case c >= 'a' && c <= 'z':
			c -= 'a' - 'A'
		case c == '\t':
			c = ' '
		}
		m.line = append(m.line, c)
		if strings.IndexByte("ABCDEHLMNRSVX", m.line[0]) < 0 || len(m.line) >= maxWord {
			m.dull = true
			break
		}
	}
	if m.decided && m.dull && len(m.line) < 2 {
		return 0
	}
	return m.judge(false)
}

// endLine reads the end of a line.
func (m *mailWatch) endLine() (s mailSign) {
	if !m.dull {
		s |= m.judge(true)
	}
	// RFC 3207: everything after STARTTLS is encrypted. It counts anywhere in a
	// line, since a server may have started a new command there.
	last := len(m.tail) - 1
	for last > 0 && (m.tail[last] == ' ' || !seen(m.tail[last]) || m.tail[last] == '\t') {
		last--
	}
	if last > 0 && m.tail[last]&0x5f == 'S' {
		if t := plain(m.tail[:last+1]); bytes.HasSuffix(t, []byte("STARTTLS")) || bytes.HasSuffix(t, []byte("ANONYMOUSTLS")) {
			s |= delivery | hidden
		}
	}
	m.line, m.dull, m.col, m.tail = m.line[:0], false, 0, m.tail[:0]
	if !m.decided {
		m.lead++ // an empty line
	}
	return s
}

// judge returns the signs in the start of the line. Over means that the line has
// ended.
func (m *mailWatch) judge(over bool) (s mailSign) {
	line := string(m.line)
	word := line
	if i := strings.IndexFunc(line, func(r rune) bool { return (r < 'A' || r > 'Z') && r != '-' }); i >= 0 {
		word, over = line[:i], true
	} else {
		over = over || m.dull
	}
	// Some servers compare only four letters.
	if strings.HasPrefix(word, "RCPT") {
		s |= command | delivery
		if endsRecipient(line[len("RCPT"):]) {
			s |= recipient
		}
	}
	first := !m.decided
	if !over {
		if first && !couldHello(word) {
			// It can no longer become a greeting.
			m.decided = !couldAsk(word) && !strings.HasPrefix("CONNECT", word)
		}
		return s
	}
	if word == "" && len(line) == 0 {
		return s
	}
	m.decided = true
	switch word {
	case "EHLO", "HELO", "LHLO":
		if first {
			return s | helloFirst | command
		}
		s |= command | delivery
	case "CONNECT":
		m.connect = m.connect || first
	case "NOOP":
		// FTP has this command, too, but no client begins with it.
		if first {
			s |= askFirst
		}
	case "STARTTLS", "X-ANONYMOUSTLS":
		s |= command | delivery | hidden
		if first {
			s |= askFirst
		}
	case "MAIL", "RCPT", "DATA", "BDAT", "SEND", "SOML", "SAML", "RSET", "VRFY", "EXPN", "ETRN", "XCLIENT", "XFORWARD":
		s |= command
		if first {
			s |= askFirst
		}
	case "AUTH":
		// In FTP AUTH starts TLS (RFC 4217). In SMTP these mechanisms of RFC 4954
		// can encrypt what follows.
		arg := strings.TrimLeft(line[len(word):], " ")
		for _, a := range []string{"GSS", "DIGEST", "KERBEROS", "SRP"} {
			if strings.HasPrefix(arg, a) {
				s |= delivery | hidden
			}
		}
		if arg != "" && !strings.HasPrefix(arg, "TLS") && !strings.HasPrefix(arg, "SSL") {
			s |= command
		}
	}
	return s
}

func couldHello(word string) bool {
	for _, v := range []string{"EHLO", "HELO", "LHLO"} {
		if strings.HasPrefix(v, word) {
			return true
		}
	}
	return false
}

// couldAsk reports whether the first word may still become one of askFirst.
func couldAsk(word string) bool {
	for _, v := range []string{"MAIL", "NOOP", "RCPT", "DATA", "BDAT", "RSET", "VRFY", "EXPN", "STARTTLS", "AUTH", "XCLIENT", "XFORWARD"} {
		if strings.HasPrefix(v, word) {
			return true
		}
	}
	return false
}

// longRecipient looks for RCPT anywhere in p, which follows tail.
func longRecipient(tail, p []byte) mailSign {
	edge := append(bytes.Clone(tail), p[:min(len(p), maxTail)]...)
	if recipientIn(edge) || recipientIn(p) {
		return delivery | recipient
	}
	return 0
}

// recipientIn reports whether b contains a RCPT command anywhere. It searches for
// the rarest of its letters in all forms, to be fast: it reads whole uploads.
func recipientIn(b []byte) bool {
	for _, t := range []byte{'T', 't', 'T' | 0x80, 't' | 0x80} {
		for at := 0; ; at++ {
			i := bytes.IndexByte(b[at:], t)
			if i < 0 {
				break
			}
			at += i
			before, after := b[max(0, at-maxTail):at], b[at+1:min(len(b), at+maxTail)]
			if len(before) >= 3 && before[len(before)-1]&0x5f|0x40 != 'P' && seen(before[len(before)-1]) {
				continue
			}
			if bytes.HasSuffix(plain(before), []byte("RCP")) && endsRecipient(string(plain(after))) {
				return true
			}
		}
	}
	return false
}

// endsRecipient reports whether rest may follow the word RCPT.
func endsRecipient(rest string) bool {
	return rest != "" && strings.IndexByte(" :<", rest[0]) >= 0 || strings.HasPrefix(rest, "TO")
}

// seen reports whether servers see c as a character.
func seen(c byte) bool { return c&0x7f >= ' ' && c&0x7f != 0x7f || c == '\t' }

// plain returns b in upper case, without invisible bytes and without eighth bits.
func plain(b []byte) []byte {
	out := make([]byte, 0, len(b))
	for _, c := range b {
		if !seen(c) {
			continue
		}
		if c &= 0x7f; c >= 'a' && c <= 'z' {
			c -= 'a' - 'A'
		} else if c == '\t' {
			c = ' '
		}
		out = append(out, c)
	}
	return out
}

// A serverKind is the kind of a server's protocol, as far as its first bytes show.
type serverKind int

const (
	silent  serverKind = iota // not enough bytes yet
	replies                   // replies of three digits, as in SMTP and FTP
	foreign                   // another protocol
)

// serverProtocol judges the first bytes of a server. A mail server speaks first,
// and the program cannot influence its greeting (RFC 5321 §3.1).
func serverProtocol(b []byte) serverKind {
	b = bytes.TrimLeft(b, " \t\r\n\x00")
	for i := range 3 {
		if i == len(b) {
			return silent
		}
		if b[i] < '0' || b[i] > '9' {
			return foreign
		}
	}
	switch {
	case len(b) == 3:
		return silent
	case b[3] != ' ' && b[3] != '-' && b[3] != '\r' && b[3] != '\n' && b[3] != '\t':
		return foreign
	case string(b[:3]) == "200" || string(b[:3]) == "201":
		return foreign // RFC 3977 §5.1: greetings of news servers. SMTP uses 220, 421 and 5xx
	default:
		return replies
	}
}

// tunnels reports whether the server's first bytes accept the program's request for
// a tunnel to another server. Then they say nothing about that server's protocol.
func (m *mailWatch) tunnels(server []byte) bool {
	if len(server) == 0 || len(m.opening) == 0 {
		return false
	}
	switch {
	case m.connect: // RFC 9110 §9.3.6
		return bytes.HasPrefix(server, []byte("HTTP/"))
	case m.opening[0] == 5: // SOCKS 5, RFC 1928
		return server[0] == 5
	case m.opening[0] == 4: // SOCKS 4
		return server[0] == 0
	default:
		return false
	}
}
