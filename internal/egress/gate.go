package egress

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/http"
	"slices"

	"postern/internal/policy"
)

// A gate reads what a program sends on a connection, which begins with head, and
// writes to s.toServer what may pass. It returns nil or io.EOF when the program has
// ended its side. Its error may be a *refusedError or errMail.
//
// If policy allowed a connection by name only, the name is proved only for the
// first message. Gates ensure that no later message is for another name.
type gate func(s *splicing, head []byte) error

// A refusedError is the reason for ending a connection that had been accepted.
type refusedError struct {
	name   string // requested host; empty if unknown
	reason string
	status int // HTTP status of the answer; zero means a reset
}

// Error implements error.
func (r *refusedError) Error() string { return r.reason }

// passAll is a gate that lets everything pass.
func passAll(s *splicing, head []byte) error {
	if len(head) > 0 {
		if _, err := s.toServer.Write(head); err != nil {
			return err
		}
	}
	return pump(&s.toServer, s.in, &s.f.last)
}

// gateFor returns the gate for a connection to an allowed name that began with
// first.
func (a *attached) gateFor(ctx context.Context, first *sniffed) gate {
	if first.tls {
		return func(s *splicing, head []byte) error { return sameHello(s, head, first.name) }
	}
	return func(s *splicing, head []byte) error { return a.requests(ctx, s, head, first.name) }
}

// requests is a gate that forwards requests for one host. It parses each request
// itself, so that it judges all of them, also on a kept-alive connection and with
// pipelining.
func (a *attached) requests(ctx context.Context, s *splicing, buf []byte, name string) error {
	for n := 0; ; n++ {
		var scan headScan
		end, problem := scan.next(buf)
		for end == 0 && problem == "" {
			var err error
			if buf, err = s.readMore(buf); err != nil {
				return err // an incomplete request is not forwarded
			}
			end, problem = scan.next(buf)
		}
		if problem != "" {
			return &refusedError{"", problem, http.StatusForbidden}
		}
		head := buf[:end]
		r := parseRequest(head)
		if err := a.judgeRequest(ctx, &r, name); err != nil {
			return err
		}
		// After an upgrade the host is unknown: in h2c each request has a host of
		// its own. Only WebSocket stays with the named host. Its upgrade must be
		// the first request, since then the answer to it is known without parsing
		// answers.
		websocket := r.websocket && n == 0
		if r.upgrade && !websocket {
			head = withoutUpgrade(head)
		}
		if _, err := s.toServer.Write(head); err != nil {
			return err
		}
		var err error
		if buf, err = s.body(buf[end:], r.length); err != nil {
			return err
		}
		if websocket {
			const switching = "HTTP/1.1 101"
			if b := s.listen(a.w.cfg.Limits.Idle, func(b []byte) bool { return len(b) >= len(switching) }); bytes.HasPrefix(b, []byte(switching)) {
				return passAll(s, buf)
			}
		}
	}
}

// judgeRequest returns a *refusedError if r is not for name.
func (a *attached) judgeRequest(ctx context.Context, r *request, name string) error {
	n, err := policy.Name(r.host)
	v := a.resolve(ctx, n)
	switch {
	case r.problem != "":
		return &refusedError{r.host, r.problem, http.StatusForbidden}
	case r.host == "":
		return &refusedError{"", "the HTTP request names no host", http.StatusForbidden}
	case err != nil:
		return &refusedError{r.host, err.Error(), http.StatusForbidden}
	case n == name:
		return nil
	case v.Effect != policy.Allow:
		return &refusedError{n, v.Reason, http.StatusForbidden}
	default:
		// RFC 9110 §15.5.20: the client may repeat the request on another
		// connection.
		return &refusedError{n, fmt.Sprintf("this connection is for %s: a request for %s needs its own", name, n), http.StatusMisdirectedRequest}
	}
}

// body forwards a request's body, which begins in buf. It has length bytes or is
// chunked. It returns what was read after the body.
func (s *splicing) body(buf []byte, length int64) (rest []byte, err error) {
	var c chunked
	for {
		var n int
		var over bool
		var problem string
		if length < 0 {
			n, over, problem = c.next(buf)
		} else {
			n = int(min(int64(len(buf)), length))
			length -= int64(n)
			over = length == 0
		}
		if problem != "" {
			return nil, &refusedError{"", problem, http.StatusForbidden}
		}
		if n > 0 {
			if _, err := s.toServer.Write(buf[:n]); err != nil {
				return nil, err
			}
		}
		if over {
			return buf[n:], nil
		}
		if n < cap(buf) || n >= 256<<10 {
			buf = buf[:0]
		} else {
			buf = make([]byte, 0, 2*n) // grows with the body, see pump
		}
		if buf, err = s.readMore(buf); err != nil {
			return nil, err
		}
	}
}

// readMore appends the next bytes of the program to buf.
func (s *splicing) readMore(buf []byte) ([]byte, error) {
	if cap(buf)-len(buf) < 512 {
		buf = append(make([]byte, 0, max(8<<10, 2*len(buf))), buf...)
	}
	n, err := s.read(buf[len(buf):cap(buf)])
	return buf[:len(buf)+n], err
}

// sameHello is a gate for a TLS connection that began with a ClientHello for name.
// The server may ask for a second ClientHello (RFC 8446 §4.1.2). It is in clear
// text and must be for the same name. Everything after it is encrypted.
func sameHello(s *splicing, buf []byte, name string) error {
	_, _, _, end, _ := serverName(buf)
	if _, err := s.toServer.Write(buf[:end]); err != nil {
		return err
	}
	buf = slices.Clone(buf[end:])
	left := 0 // bytes left of a record that is being forwarded
	for {
		k := min(left, len(buf))
		if k > 0 {
			if _, err := s.toServer.Write(buf[:k]); err != nil {
				return err
			}
			buf, left = buf[k:], left-k
		}
		start, _ := s.said()
		if again, known := isHelloRetry(start); known && !again {
			return passAll(s, buf)
		}
		if len(buf) < 5 {
			var err error
			if buf, err = s.readMore(buf); err != nil {
				return err
			}
			continue
		}
		switch n := int(binary.BigEndian.Uint16(buf[3:])); buf[0] {
		case 0x14, 0x15, 0x17: // change_cipher_spec for middleboxes, an alert, early data
			left = 5 + n
			continue
		case 0x16:
		default:
			return &refusedError{name: name, reason: "the TLS connection is malformed"}
		}
		start = s.listen(s.a.w.cfg.Limits.Idle, func(b []byte) bool { _, known := isHelloRetry(b); return known })
		if again, known := isHelloRetry(start); known && !again {
			continue
		}
		second, problem, _, end, need := serverName(buf)
		if need > len(buf) && len(buf) < 2*maxHead {
			var err error
			if buf, err = s.readMore(buf); err != nil {
				return err
			}
			continue
		}
		n, err := policy.Name(second)
		if end == 0 || problem != "" || err != nil || n != name {
			return &refusedError{name: clip(second), reason: "the second TLS ClientHello is not for " + name}
		}
		return passAll(s, buf)
	}
}

// isHelloRetry reports whether a server's first bytes are a HelloRetryRequest, if
// they show it.
func isHelloRetry(start []byte) (yes, known bool) {
	const at = 5 + 4 + 2 // record header, message header, version
	// RFC 8446 §4.1.3: a ServerHello with these random bytes.
	random := [...]byte{
		0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
		0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
	}
	switch {
	case len(start) > 0 && start[0] != 0x16:
		return false, true // an alert, or not TLS
	case len(start) < at+len(random):
		return false, false
	default:
		return bytes.Equal(start[at:at+len(random)], random[:]), true
	}
}

// sshOnly is a gate for a connection that began like SSH (RFC 4253 §4.2). It
// forwards the first line, and the rest only after the server has shown that it
// speaks SSH: a web server could take what follows for a request.
func sshOnly(s *splicing, buf []byte) error {
	end := bytes.IndexByte(buf, '\n')
	for ; end < 0; end = bytes.IndexByte(buf, '\n') {
		if len(buf) > 255 {
			return &refusedError{reason: "the first line of the SSH connection is too long"}
		}
		var err error
		if buf, err = s.readMore(buf); err != nil {
			return err
		}
	}
	if _, err := s.toServer.Write(buf[:end+1]); err != nil {
		return err
	}
	const ssh = "SSH-"
	if b := s.listen(handshake, func(b []byte) bool { return len(b) >= len(ssh) }); !bytes.HasPrefix(b, []byte(ssh)) {
		return &refusedError{reason: "the server does not speak SSH, as the program does"}
	}
	return passAll(s, buf[end+1:])
}

// serverFirst is a gate for a connection on which the program sent nothing at
// first. If the server speaks first it is not a web server. Otherwise the program's
// first bytes are judged like those at the start of a connection.
func (a *attached) serverFirst(ctx context.Context, s *splicing, buf []byte) error {
	buf, err := s.readMore(buf)
	if err != nil {
		return err
	}
	if start, _ := s.said(); len(start) > 0 {
		if !s.greetedByOther() {
			return &refusedError{reason: "the connection names no host"}
		}
		s.gated = false
		return passAll(s, buf)
	}
	first := sniff(s.in, buf)
	v := a.connectPlain(ctx, a.connection(s.f.conn.Addr, []string{first.name}))
	status := 0
	if first.http {
		status = http.StatusForbidden
	}
	switch {
	case first.mail:
		s.gated, s.toServer.held = false, first.head
		return errMail
	case first.problem != "":
		return &refusedError{first.name, first.problem, status}
	case first.ssh:
		return sshOnly(s, first.head)
	case first.name == "":
		return &refusedError{"", "the connection names no host", status}
	case v.Effect != policy.Allow:
		return &refusedError{first.name, v.Reason, status}
	case a.wants(ctx, first.name):
		// The attack: a program waits until the wall has stopped to look for a name.
		return &refusedError{first.name, "requests to " + first.name + " are inspected: a program must send the first bytes of a connection at once", status}
	case !slices.Contains(s.f.conn.Names, first.name):
		return &refusedError{first.name, "the address is not a known address of " + first.name, status}
	default:
		return a.gateFor(ctx, &first)(s, first.head)
	}
}
