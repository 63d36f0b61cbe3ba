package egress

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"

	"postern/internal/policy"
)

// This file looks at what begins late, on connections to ports that are not of the web.

// notWebFirst is a gate for a connection on which the program sent nothing at first.
// The attack: it waits until the wall has stopped to look, and then begins with TLS or
// HTTP.
func notWebFirst(s *splicing, buf []byte) error {
	o := opening{s: s, buf: buf}
	switch web, err := o.read(); {
	case err != nil:
		return err
	case web:
		return &refusedError{reason: "requests to this host are inspected: a program must send the first byte of a request at once"}
	}
	return passAll(s, nil)
}

// greetedByOther reports whether the server has spoken first, and not as a web server
// does that gives up waiting.
func (s *splicing) greetedByOther() bool {
	start, _ := s.said()
	web := []byte("HTTP/")
	return len(start) > 0 && !bytes.HasPrefix(start, web[:min(len(web), len(start))]) && start[0] != 0x15 && start[0] != 0x16
}

// An opening is what a program sends at first on a connection through a gate, until it
// shows a shape. What has been read is sent on before that: no server acts on a request
// line that has not ended, and the program may wait for an answer to its first word.
type opening struct {
	s    *splicing
	buf  []byte
	sent int // bytes of buf that have been sent on
}

// read reads until the shape of the opening is known, and reports whether it is that of
// TLS or HTTP. If it is not, all that was read has been sent on. The end of what the
// program sends is not an error.
func (o *opening) read() (web bool, err error) {
	o.s.gated = false // it is the program that writes, so mail can be captured
	for {
		if o.buf, err = o.s.readMore(o.buf); errors.Is(err, io.EOF) {
			return false, nil
		} else if err != nil {
			return false, err
		}
		sh := shapeOther
		if !o.s.greetedByOther() {
			sh = shapeOf(o.buf)
		}
		if sh == shapeWeb {
			return true, nil
		}
		// Each read is written at once: some servers take each packet for a line.
		if _, err := o.s.toServer.Write(o.buf[o.sent:]); err != nil {
			return false, err
		}
		if o.sent = len(o.buf); sh == shapeOther {
			return false, nil
		}
	}
}

// byFirstMessage is a gate for a connection to a port that is not of the web, at an
// address that is not known to be of an inspected host. TLS and HTTP are judged by the
// host that they name. Other protocols pass, and so does TLS without a server name: that
// our resolver gave the address, or that the lists have it, is all that is known of them.
//
// The attacks: a port that is opened for one host of a server with many names; and an
// inspected host at an address that our resolver did not give.
func (a *attached) byFirstMessage(ctx context.Context, s *splicing, buf []byte) error {
	o := opening{s: s, buf: buf}
	switch web, err := o.read(); {
	case err != nil:
		return err
	case !web:
		return passAll(s, nil)
	}
	first := sniff(s.in, o.buf)
	reason, judged := a.misplaced(ctx, s.f, &first)
	s.toServer.skip = o.sent
	switch {
	case reason != "" && first.http:
		return &refusedError{first.name, reason, http.StatusForbidden}
	case reason != "":
		return &refusedError{first.name, reason, 0}
	case judged:
		s.gated = true
		return a.gateFor(ctx, &first)(s, first.head)
	}
	return passAll(s, first.head)
}

// misplaced returns why a connection that begins with first, which has the shape of TLS
// or HTTP, may not go where f goes, or "". Judged means that it may since it is for the
// host that it names.
func (a *attached) misplaced(ctx context.Context, f *flow, first *sniffed) (reason string, judged bool) {
	switch {
	case first.name != "" && a.inspected(ctx, first.name, f.dst):
		return "requests to " + first.name + " are inspected, and this is not known as its address: look the name up with the sandbox's resolver, and connect to what it answers", false
	case len(f.conn.Names) == 0 || first.mail:
		return "", false
	case first.problem != "":
		return first.problem + "; if it has to pass, the creator of the sandbox names the address in allowOut", false
	case first.name == "" && first.tls:
		return "", false
	case first.name == "":
		return "the HTTP request names no host", false
	}
	if !slices.Contains(f.conn.Names, first.name) {
		switch to, v := a.resolveFor(ctx, first.name, f.dst); {
		case v.Effect != policy.Allow:
			return v.Reason, false
		case to != f.dst:
			return "the address is not a known address of " + first.name + ": look the name up, and connect to what the resolver answers", false
		}
	}
	if v := a.connectPlain(ctx, a.connection(f.conn.Addr, []string{first.name})); v.Effect != policy.Allow {
		return v.Reason, false
	}
	return "", true
}

// A shape is what the first bytes of a connection look like, to a server that is not
// strict.
type shape int

const (
	shapeOpen  shape = iota // more bytes could show TLS or HTTP
	shapeWeb                // TLS or HTTP
	shapeOther              // another protocol
)

// shapeOf returns the shape of bytes at the start of a connection.
func shapeOf(b []byte) shape {
	if len(b) > 0 && b[0] == 0x16 {
		return shapeWeb
	}
	t := bytes.TrimLeft(b, " \t\r\n\x00")
	if len(t) == 0 {
		if len(b) > maxBlank {
			return shapeOther
		}
		return shapeOpen
	}
	line, _, ended := bytes.Cut(t, []byte("\n"))
	word, _, spaced := bytes.Cut(line, []byte(" "))
	printable := !bytes.ContainsFunc(bytes.TrimSuffix(line, []byte("\r")), func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f })
	switch {
	case bytes.Contains(bytes.ToUpper(line), []byte("HTTP/")),
		// In lower case they are words of other protocols.
		spaced && slices.Contains([]string{"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"}, string(word)):
		return shapeWeb
	case ended || !printable || !spaced && len(line) > maxMethod || len(line) > maxRequestHead:
		return shapeOther
	}
	return shapeOpen
}

const (
	maxMethod = 32 // bytes of the longest method that a server may know
	maxBlank  = 64 // bytes that a server may skip before a request
)
