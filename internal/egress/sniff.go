package egress

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"postern/internal/policy"
)

// sniffed is what the first bytes of a connection say about where it is going.
type sniffed struct {
	head    []byte // what was read
	tls     bool
	http    bool
	name    string // normalised; empty if none is named
	problem string // why it cannot be let through, for a person; else empty
}

// maxHead bounds how much of a connection is read to find its name. A TLS
// record ends at 16 KiB, an HTTP server's patience with headers usually sooner.
const maxHead = 17 << 10

// sniff reads until the name is clear, or it is clear that there will be none,
// or conn's deadline or maxHead are over.
func sniff(conn io.Reader) sniffed {
	head := make([]byte, 0, 2048)
	var need int // bytes without which there is no sense in looking again
	for {
		if len(head) >= need {
			var s sniffed
			if s, need = parseHead(head); need == 0 {
				return s
			}
		}
		if len(head) >= maxHead {
			s, _ := parseHead(head)
			s.problem = fmt.Sprintf("no host name in the first %d bytes", maxHead)
			return s
		}
		if len(head) == cap(head) {
			head = append(make([]byte, 0, 2*cap(head)), head...)
		}
		n, err := conn.Read(head[len(head):cap(head)])
		head = head[:len(head)+n]
		if err != nil && n == 0 {
			s, _ := parseHead(head)
			if (s.tls || s.http) && s.name == "" && s.problem == "" {
				s.problem = "the connection's first message is not complete"
			}
			return s
		}
	}
}

// parseHead reads the first bytes of a connection. If need is not zero the name
// may still come, in no less than need bytes: a sandbox that sends them one by
// one must not make us read all of them each time.
func parseHead(b []byte) (s sniffed, need int) {
	s.head = b
	switch {
	case len(b) == 0:
		return s, 1
	case smtpStart(b, true) == smtpYes:
		return s, 0
	case smtpStart(b, false) == smtpMore:
		return s, len(b) + 1
	case b[0] == 0x16:
		s.tls = true
		name, problem, need := serverName(b)
		if s.setName(name); problem != "" {
			s.problem = problem
		}
		return s, need
	case looksHTTP(b):
		s.http = true
		end := bytes.Index(b, []byte("\r\n\r\n"))
		if end < 0 {
			if end = bytes.Index(b, []byte("\n\n")); end < 0 {
				return s, len(b) + 1
			}
		}
		name, problem := httpHost(b[:end])
		if s.setName(name); problem != "" {
			s.problem = problem
		}
		return s, 0
	default:
		return s, 0
	}
}

func (s *sniffed) setName(name string) {
	if name == "" {
		return
	}
	n, err := policy.Name(name)
	if err != nil {
		s.name, s.problem = clip(name), err.Error()
		return
	}
	s.name = n
}

// looksHTTP says whether b begins, as far as it goes, like an HTTP/1 request: a
// method and a space.
func looksHTTP(b []byte) bool {
	for i, c := range b {
		switch {
		case c == ' ':
			return i > 0
		case i >= 20 || c < 'A' || c > 'Z':
			return false
		}
	}
	return true
}

// httpHost returns the host of a request's header. It must be the same for
// every server that reads it: where they could differ there is a problem.
func httpHost(header []byte) (host, problem string) {
	lines := strings.Split(strings.ReplaceAll(string(header), "\r\n", "\n"), "\n")
	method, rest, _ := strings.Cut(lines[0], " ")
	target, proto, ok := strings.Cut(rest, " ")
	if !ok || !strings.HasPrefix(proto, "HTTP/") {
		return "", "the HTTP request line is malformed"
	}
	if method == http.MethodConnect {
		// The host would be a proxy, and what it is asked for is beyond policy.
		return hostOnly(target), "HTTP CONNECT through an allowed host is not allowed"
	}
	if method == "PRI" {
		return "", "HTTP/2 without TLS names no host at its start"
	}
	var found []string
	// RFC 9112 §3.2.2: the target's host wins over the Host field.
	if _, after, ok := strings.Cut(target, "://"); ok && !strings.HasPrefix(target, "/") {
		authority, _, _ := strings.Cut(after, "/")
		authority, _, _ = strings.Cut(authority, "?")
		found = append(found, hostOnly(authority))
	}
	for _, l := range lines[1:] {
		k, v, ok := strings.Cut(l, ":")
		if ok && strings.EqualFold(strings.TrimSpace(k), "host") {
			if k != strings.TrimSpace(k) {
				return "", "the HTTP Host field is malformed"
			}
			found = append(found, hostOnly(strings.TrimSpace(v)))
		}
	}
	if len(found) == 0 {
		return "", ""
	}
	for _, f := range found[1:] {
		if !strings.EqualFold(strings.TrimSuffix(f, "."), strings.TrimSuffix(found[0], ".")) {
			return found[0], "the HTTP request names two hosts"
		}
	}
	return found[0], ""
}

// hostOnly takes user and port off an authority.
func hostOnly(s string) string {
	s = s[strings.LastIndexByte(s, '@')+1:]
	if h, _, err := net.SplitHostPort(s); err == nil {
		return h
	}
	return s
}

// serverName returns the server name of a TLS ClientHello (RFC 8446 §4.1.2,
// RFC 6066 §3), which may be spread over several records, or how many bytes it
// needs.
func serverName(b []byte) (name, problem string, need int) {
	const bad = "the TLS ClientHello is malformed"
	var hello []byte
	for at := 0; ; {
		if len(b) < at+5 {
			return "", "", at + 5
		}
		n := int(binary.BigEndian.Uint16(b[at+3:]))
		if b[at] != 0x16 || b[at+1] != 3 || n == 0 || n > 1<<14 {
			return "", bad, 0
		}
		if len(b) < at+5+n {
			return "", "", at + 5 + n
		}
		hello = append(hello, b[at+5:at+5+n]...)
		at += 5 + n
		if len(hello) < 4 {
			continue
		}
		want := 4 + int(hello[1])<<16 + int(hello[2])<<8 + int(hello[3])
		switch {
		case hello[0] != 1:
			return "", bad, 0
		case want > maxHead:
			return "", "the TLS ClientHello is too long", 0
		case len(hello) >= want:
			name, problem = helloName(hello[4:want])
			return name, problem, 0
		}
	}
}

func helloName(p []byte) (name, problem string) {
	const bad = "the TLS ClientHello is malformed"
	take := func(lenBytes int) ([]byte, bool) {
		if len(p) < lenBytes {
			return nil, false
		}
		n := 0
		for _, c := range p[:lenBytes] {
			n = n<<8 | int(c)
		}
		p = p[lenBytes:]
		if len(p) < n {
			return nil, false
		}
		var v []byte
		v, p = p[:n], p[n:]
		return v, true
	}
	if len(p) < 34 {
		return "", bad
	}
	p = p[34:]                         // version and random
	for _, l := range []int{1, 2, 1} { // session, cipher suites, compression
		if _, ok := take(l); !ok {
			return "", bad
		}
	}
	if len(p) == 0 {
		return "", ""
	}
	exts, ok := take(2)
	if !ok {
		return "", bad
	}
	p = exts
	for len(p) > 0 {
		if len(p) < 2 {
			return "", bad
		}
		typ := binary.BigEndian.Uint16(p)
		p = p[2:]
		ext, ok := take(2)
		if !ok {
			return "", bad
		}
		if typ != 0 {
			continue
		}
		if name != "" {
			return name, "the TLS ClientHello names two servers"
		}
		// One list with one entry of type host_name: nobody sends another.
		if len(ext) < 5 || int(binary.BigEndian.Uint16(ext)) != len(ext)-2 || ext[2] != 0 || int(binary.BigEndian.Uint16(ext[3:])) != len(ext)-5 {
			return "", bad
		}
		name = string(ext[5:])
	}
	return name, ""
}

// refuse tells the program why, in its own protocol, and hangs up.
func (s *sniffed) refuse(c *insideConn, reason string) {
	_ = c.SetWriteDeadline(time.Now().Add(time.Second))
	switch {
	case s.tls:
		// RFC 8446 §6: a fatal alert, access_denied.
		_, _ = c.Write([]byte{0x15, 3, 3, 0, 2, 2, 49})
	case s.http:
		body := "Postern: " + printable(reason) + "\n"
		_, _ = fmt.Fprintf(c, "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(body), body)
	default:
		c.abort()
	}
}

// smtpAnswer says whether bytes begin a mail conversation.
type smtpAnswer int

const (
	smtpNo smtpAnswer = iota
	smtpMore
	smtpAsk // if the server is a mail server
	smtpYes
)

// maxBlank is how much white space mail servers are taken to suffer at first.
const maxBlank = 64

// smtpStart reads the first bytes that a program sent. mail says that the
// server greeted like a mail server, "220" (and also like an FTP server).
func smtpStart(b []byte, mail bool) smtpAnswer {
	start := b[:min(len(b), maxBlank+1)]
	blank := len(start) - len(bytes.TrimLeft(start, " \t\r\n"))
	if blank > maxBlank {
		return smtpNo
	}
	b = b[blank:min(len(b), blank+16)] // no word of interest is longer
	end := bytes.IndexFunc(b, func(r rune) bool { return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') })
	whole := end >= 0
	if !whole {
		end = len(b)
	}
	if end > 8 {
		return smtpNo
	}
	word := strings.ToUpper(string(b[:end]))
	matches := func(verbs []string) (yes bool) {
		for _, v := range verbs {
			yes = yes || v == word || !whole && strings.HasPrefix(v, word)
		}
		return yes
	}
	switch {
	case matches([]string{"EHLO", "HELO", "LHLO"}):
		if whole {
			return smtpYes
		}
		return smtpMore
	// Servers take these without a greeting from the client, and FTP clients
	// do not begin with them.
	case matches([]string{"MAIL", "NOOP", "RSET", "VRFY", "EXPN", "STARTTLS", "RCPT", "DATA", "BDAT", "XCLIENT", "XFORWARD"}):
		switch {
		case mail && whole:
			return smtpYes
		case mail:
			return smtpMore
		case whole:
			return smtpAsk
		default:
			return smtpNo // a program that sends one letter must not wait for ever
		}
	default:
		return smtpNo
	}
}
