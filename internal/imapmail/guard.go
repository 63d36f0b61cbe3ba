package imapmail

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
)

// A meter bounds what is read from a connection.
type meter struct {
	net.Conn
	left atomic.Int64
}

// Read reads until the bound is reached.
func (m *meter) Read(p []byte) (int, error) {
	left := m.left.Load()
	if left <= 0 {
		return 0, errors.New("the server sends too much")
	}
	n, err := m.Conn.Read(p[:min(int64(len(p)), left)])
	m.left.Add(int64(-n))
	return n, err
}

// errNested means that an answer has more parentheses than any that was asked for.
var errNested = errors.New("the server's answer is nested too deep")

// maxNested bounds the opening parentheses of the answer to one command, those in
// a message that is fetched too. The library describes each level in its error, so that
// the cost grows with the square of the depth. A message with more is left out.
const maxNested = 5000

// A guard bounds the opening parentheses that are read between two commands.
//
// The attack: imapclient reads nested lists by recursion without a bound, and an answer
// that nobody asked for as well. Sixteen megabytes of "(" are a stack of more than a
// gigabyte, which ends the whole process: no recover catches it. So the guard stands
// behind TLS, and does not try to tell lists from texts and literals, which the server
// could make the two read differently.
type guard struct {
	net.Conn
	greeting []byte // read before everything else
	nested   atomic.Int64
}

// Read reads until the bound is reached.
func (g *guard) Read(p []byte) (int, error) {
	if len(g.greeting) > 0 {
		n := copy(p, g.greeting)
		g.greeting = g.greeting[n:]
		return n, nil
	}
	n, err := g.Conn.Read(p)
	if g.nested.Add(int64(-bytes.Count(p[:n], []byte("(")))) < 0 {
		return 0, errNested
	}
	return n, err
}

// startTLS asks for TLS on a connection that begins in the clear (RFC 9051 6.2.1). It is
// done here so that the guard can stand behind TLS. What the server sent in the clear is
// forgotten: the connection starts from the beginning inside TLS.
func startTLS(ctx context.Context, conn net.Conn, conf *tls.Config) (net.Conn, error) {
	r := bufio.NewReaderSize(io.LimitReader(conn, 64<<10), 8<<10)
	line, err := r.ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("wait for the server's greeting: %w", err)
	}
	if !strings.HasPrefix(strings.ToUpper(line), "* OK") {
		return nil, fmt.Errorf("the server sent no greeting: %.100q", line)
	}
	if _, err := io.WriteString(conn, "s1 STARTTLS\r\n"); err != nil {
		return nil, err
	}
	for {
		if line, err = r.ReadString('\n'); err != nil {
			return nil, err
		}
		if rest, ours := strings.CutPrefix(strings.ToUpper(line), "S1 "); ours {
			if !strings.HasPrefix(rest, "OK") {
				return nil, fmt.Errorf("the server does not offer TLS: %.100q", line)
			}
			break
		}
	}
	if r.Buffered() > 0 { // the attack: answers put in before the encryption
		return nil, errors.New("the server spoke before the TLS handshake")
	}
	secure := tls.Client(conn, conf)
	if err := secure.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return secure, nil
}
