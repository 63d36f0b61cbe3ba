package egress

import (
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"time"

	"postern/internal/policy"
)

// sniffed is what the first bytes of a connection reveal about its destination.
type sniffed struct {
	head    []byte // bytes read so far
	mail    bool   // a mail conversation
	tls     bool
	http    bool
	ssh     bool
	ech     bool   // the TLS ClientHello can hide another name (RFC 9849)
	name    string // normalised; empty if there is none
	problem string // why it is refused, for a person; empty if it is not
}

// maxHead bounds how many bytes are read to find the name, except in HTTP. A TLS
// record has at most 16 KiB.
const maxHead = 17 << 10

// sniff reads on after head until it has found a name, or knows that there is none,
// or conn's deadline or a limit is reached. A protocol that is not mail, TLS or SSH
// must be HTTP: in an unknown protocol nobody could say which name a server sees.
func sniff(conn io.Reader, head []byte) sniffed {
	if cap(head) == 0 {
		head = make([]byte, 0, 2048)
	}
	var scan headScan
	var need int // bytes without which another attempt is pointless
	for {
		if len(head) >= need {
			var s sniffed
			if s, need = parseHead(head, &scan); need == 0 {
				return s
			}
		}
		if len(head) == cap(head) {
			head = append(make([]byte, 0, 2*cap(head)), head...)
		}
		n, err := conn.Read(head[len(head):cap(head)])
		head = head[:len(head)+n]
		if err != nil && n == 0 {
			s, _ := parseHead(head, &scan)
			if s.name == "" && s.problem == "" && len(head) > 0 {
				s.problem = "the connection's first message is not complete"
			}
			return s
		}
	}
}

// parseHead parses the first bytes of a connection. If need is not zero, the name
// may still come but needs at least need bytes. So a sandbox that sends byte by
// byte does not make us parse everything each time.
func parseHead(b []byte, scan *headScan) (s sniffed, need int) {
	s.head = b
	if len(b) == 0 {
		return s, 1
	}
	if b[0] == 0x16 {
		s.tls = true
		name, problem, ech, end, need := serverName(b)
		if s.setName(name); problem != "" {
			s.problem = problem
		}
		s.ech = ech
		if end == 0 && problem == "" && len(b) >= maxHead {
			s.problem = fmt.Sprintf("no host name in the first %d bytes", maxHead)
			return s, 0
		}
		return s, need
	}
	if scan.lines == 0 {
		var m mailWatch
		switch sign := m.read(b[:min(len(b), 2*maxLead)]); {
		case sign&helloFirst != 0:
			s.mail = true
			return s, 0
		case sign&helloMaybe != 0:
			return s, len(b) + 1
		}
	}
	const ssh = "SSH-"
	if n := min(len(b), len(ssh)); string(b[:n]) == ssh[:n] {
		if s.ssh = n == len(ssh); s.ssh {
			return s, 0
		}
		return s, len(ssh)
	}
	s.http = tokenByte(b[0]) || b[0] == ' ' || b[0] == '\r' || b[0] == '\n'
	end, problem := scan.next(b)
	switch {
	case problem != "" && !s.http:
		s.problem = "the program speaks neither HTTP, TLS nor SSH; on ports 80 and 443 a name allows only these: allow the address"
		return s, 0
	case problem != "":
		s.problem = problem
		return s, 0
	case end == 0:
		return s, len(b) + 1
	}
	r := parseRequest(b[:end])
	if s.setName(r.host); r.problem != "" {
		s.problem = r.problem
	}
	return s, 0
}

// proves reports whether the connection shows the one host that it is for: it begins
// with TLS or HTTP, and names a host in clear text and in a form that all servers read
// alike. With ECH, the host can be another one nevertheless.
func (s *sniffed) proves() bool { return (s.tls || s.http) && s.name != "" && s.problem == "" }

// setName sets the normalised name. A malformed name is a problem.
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

// serverName returns the server name in a TLS ClientHello (RFC 8446 §4.1.2, RFC
// 6066 §3), which may span several records, and where it ends. If it is incomplete,
// need is how many bytes it needs.
func serverName(b []byte) (name, problem string, ech bool, end, need int) {
	const bad = "the TLS ClientHello is malformed"
	var hello []byte
	for at := 0; ; {
		if len(b) < at+5 {
			return "", "", false, 0, at + 5
		}
		n := int(binary.BigEndian.Uint16(b[at+3:]))
		if b[at] != 0x16 || b[at+1] != 3 || n == 0 || n > 1<<14 {
			return "", bad, false, 0, 0
		}
		if len(b) < at+5+n {
			return "", "", false, 0, at + 5 + n
		}
		hello = append(hello, b[at+5:at+5+n]...)
		at += 5 + n
		if len(hello) < 4 {
			continue
		}
		want := 4 + int(hello[1])<<16 + int(hello[2])<<8 + int(hello[3])
		switch {
		case hello[0] != 1:
			return "", bad, false, 0, 0
		case want > maxHead:
			return "", "the TLS ClientHello is too long", false, 0, 0
		case len(hello) > want:
			// RFC 8446 §5.1: the record must end with the message.
			return "", bad, false, 0, 0
		case len(hello) == want:
			name, problem, ech = helloName(hello[4:])
			return name, problem, ech, at, 0
		}
	}
}

// helloName returns the server name in the body of a ClientHello. It refuses a
// ClientHello that servers could parse differently.
func helloName(p []byte) (name, problem string, ech bool) {
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
		return "", bad, false
	}
	p = p[34:]                         // version and random
	for _, l := range []int{1, 2, 1} { // session ID, cipher suites, compression methods
		if _, ok := take(l); !ok {
			return "", bad, false
		}
	}
	if len(p) == 0 {
		return "", "", false
	}
	exts, ok := take(2)
	if !ok {
		return "", bad, false
	}
	p = exts
	for len(p) > 0 {
		if len(p) < 2 {
			return "", bad, false
		}
		typ := binary.BigEndian.Uint16(p)
		p = p[2:]
		ext, ok := take(2)
		if !ok {
			return "", bad, false
		}
		if typ == 0xfe0d {
			ech = true // encrypted_client_hello, which may be grease (RFC 9849 §6.2)
		}
		if typ != 0 {
			continue
		}
		if name != "" {
			return name, "the TLS ClientHello names two servers", false
		}
		// One list with one entry of type host_name. No client sends anything else.
		if len(ext) < 5 || int(binary.BigEndian.Uint16(ext)) != len(ext)-2 || ext[2] != 0 || int(binary.BigEndian.Uint16(ext[3:])) != len(ext)-5 {
			return "", bad, false
		}
		name = string(ext[5:])
	}
	return name, "", ech
}

// refuse tells the program the reason in its own protocol, and closes the
// connection.
func (s *sniffed) refuse(c *insideConn, reason string) {
	switch {
	case s.tls:
		// RFC 8446 §6: a fatal alert, access_denied.
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		_, _ = c.Write([]byte{0x15, 3, 3, 0, 2, 2, 49})
	case s.http:
		forbid(c, http.StatusForbidden, reason)
	default:
		c.abort()
	}
}

// forbid answers a request and closes the connection after a moment, in which the
// program reads the answer. If it closed with unread input, the program's kernel
// would discard the answer.
func forbid(c *insideConn, status int, reason string) {
	_ = c.SetDeadline(time.Now().Add(time.Second))
	body := "Postern: " + printable(reason) + "\n"
	_, _ = fmt.Fprintf(c, "HTTP/1.1 %d %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", status, http.StatusText(status), len(body), body)
	_ = c.CloseWrite()
	_, _ = io.Copy(io.Discard, io.LimitReader(c, 1<<20))
	_ = c.Close()
}
