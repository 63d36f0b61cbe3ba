package smtpclient

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
	"time"

	"postern/internal/mail"
)

// The server may be hostile. These bound what it can make this client read and
// report.
const (
	maxDetail     = 500      // octets of a reply that are reported
	maxReplyLine  = 4096     // octets
	maxReplyLines = 200      // lines of one reply
	maxPeerBytes  = 4 << 20  // octets from one server in all, TLS included
	pieceSize     = 32 << 10 // octets of one write of the message
)

// replyError is a reply with an unexpected code.
type replyError struct {
	code int
	text string
	to   string // the command, without its arguments
}

// Error returns the reply as the server gave it.
func (e *replyError) Error() string {
	return fmt.Sprintf("the server answered %s with: %d %s", e.to, e.code, e.text)
}

// conversation is one connection to a server, used by one goroutine.
type conversation struct {
	cfg  *Config
	ctx  context.Context // of this one delivery
	conn net.Conn
	r    *bufio.Reader
	ext  map[string]string // extension to its parameters
	stop func() bool       // of context.AfterFunc on ctx
	data bool              // within a message, where a QUIT would be text
}

// A target is a server to open a conversation with.
type target struct {
	addr    string // host:port
	host    string // name that its certificate is for
	tls     *tls.Config
	require bool // TLS, with a certificate that tls accepts
	dial    time.Duration
}

// open connects, greets and starts TLS if the server offers it.
func (c *Client) open(ctx context.Context, t target) (*conversation, error) {
	v, err := c.greet(ctx, t)
	if err != nil {
		return nil, err
	}
	_, offered := v.ext["STARTTLS"]
	switch {
	case !offered && t.require:
		v.close()
		return nil, errors.New("the server offers no STARTTLS and TLS is required")
	case !offered:
		return v, nil
	}
	tlsErr := v.startTLS(t)
	if tlsErr == nil {
		return v, nil
	}
	v.close()
	if t.require || ctx.Err() != nil {
		return nil, fmt.Errorf("start tls: %w", tlsErr)
	}
	// Continue in the clear, as without STARTTLS: an attacker who can break the
	// handshake can also remove the offer.
	return c.greet(ctx, t)
}

// greet connects to t, reads the greeting and says EHLO.
func (c *Client) greet(ctx context.Context, t target) (*conversation, error) {
	dctx, cancel := context.WithTimeout(ctx, min(t.dial, c.cfg.DialTimeout))
	defer cancel()
	conn, err := c.cfg.Dial(dctx, "tcp", t.addr)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", t.addr, err)
	}
	conn = &bounded{Conn: conn, left: maxPeerBytes}
	v := &conversation{cfg: &c.cfg, ctx: ctx, conn: conn, r: bufio.NewReaderSize(conn, maxReplyLine)}
	v.stop = context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	v.deadline(c.cfg.CommandTimeout)
	if _, err = v.expect(220, "the connection"); err == nil {
		err = v.hello()
	}
	if err != nil {
		v.close()
		return nil, err
	}
	return v, nil
}

// hello says EHLO, or HELO to a server that does not know EHLO, and reads the
// extensions.
func (v *conversation) hello() error {
	lines, err := v.command(250, "EHLO %s", v.cfg.Hostname)
	var r *replyError
	if errors.As(err, &r) && (r.code == 500 || r.code == 502) {
		v.ext = nil
		_, err = v.command(250, "HELO %s", v.cfg.Hostname)
		return err
	}
	if err != nil {
		return err
	}
	v.ext = map[string]string{}
	for _, l := range lines[1:] {
		word, params, _ := strings.Cut(l, " ")
		v.ext[strings.ToUpper(word)] = params
	}
	return nil
}

// startTLS upgrades the conversation to TLS. After an error the connection cannot
// be used.
func (v *conversation) startTLS(to target) error {
	if _, err := v.command(220, "STARTTLS"); err != nil {
		return err
	}
	if v.r.Buffered() > 0 {
		return errors.New("the server spoke before the TLS handshake") // the attack: replies injected before encryption
	}
	cfg := to.tls
	if cfg == nil {
		cfg = &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12} //nolint:gosec // opportunistic, see Config.TLS
	}
	cfg = cfg.Clone()
	if cfg.ServerName == "" {
		cfg.ServerName = to.host
	}
	t := tls.Client(v.conn, cfg)
	v.deadline(v.cfg.CommandTimeout)
	if err := t.HandshakeContext(v.ctx); err != nil {
		return err
	}
	v.conn, v.r = t, bufio.NewReaderSize(t, maxReplyLine)
	return v.hello() // RFC 3207 4.2: the state from before TLS is discarded
}

// deadline bounds the next step to d from now, or to the past if the context is
// done. The AfterFunc on the context sets a deadline too; the check after setting
// makes sure that the past one wins.
func (v *conversation) deadline(d time.Duration) {
	_ = v.conn.SetDeadline(time.Now().Add(d))
	if v.ctx.Err() != nil {
		_ = v.conn.SetDeadline(time.Unix(1, 0))
	}
}

// command sends a line and returns the reply's lines. want may be a whole code
// or its first two digits.
func (v *conversation) command(want int, format string, args ...any) ([]string, error) {
	v.deadline(v.cfg.CommandTimeout)
	line := fmt.Sprintf(format, args...)
	name, _, _ := strings.Cut(line, " ")
	if strings.ContainsAny(line, "\r\n") {
		return nil, fmt.Errorf("%w: %s has a line break", errUnsupported, name) // unreachable: Deliver has checked
	}
	if _, err := io.WriteString(v.conn, line+"\r\n"); err != nil {
		return nil, v.wrapError("send "+name, err)
	}
	return v.expect(want, name)
}

// expect reads a reply and returns a [replyError] if its code is not want.
func (v *conversation) expect(want int, name string) ([]string, error) {
	code, lines, err := v.reply()
	if err != nil {
		return nil, v.wrapError("read the reply to "+name, err)
	}
	if code != want && (want >= 100 || code/10 != want) {
		return nil, &replyError{code: code, text: strings.Join(lines, " "), to: name}
	}
	return lines, nil
}

// wrapError puts the end of the context before the timeout that it caused.
func (v *conversation) wrapError(what string, err error) error {
	if c := context.Cause(v.ctx); c != nil {
		err = c
	}
	return fmt.Errorf("%s: %w", what, err)
}

var errReply = errors.New("the server's reply is malformed")

// reply reads one reply, RFC 5321 4.2.
func (v *conversation) reply() (code int, lines []string, err error) {
	for len(lines) < maxReplyLines {
		b, err := v.r.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			return 0, nil, fmt.Errorf("%w: a line is too long", errReply)
		} else if err != nil {
			if errors.Is(err, io.EOF) {
				err = errors.New("the server has closed the connection")
			}
			return 0, nil, err
		}
		line := strings.TrimRight(string(b), "\r\n")
		if len(line) < 3 || strings.Trim(line[:3], "0123456789") != "" || len(line) > 3 && line[3] != ' ' && line[3] != '-' {
			return 0, nil, errReply
		}
		n := int(line[0]-'0')*100 + int(line[1]-'0')*10 + int(line[2]-'0')
		if n < 200 || n > 599 || len(lines) > 0 && n != code {
			return 0, nil, errReply
		}
		code = n
		text := ""
		if len(line) > 4 {
			text = line[4:]
		}
		lines = append(lines, text)
		if len(line) == 3 || line[3] == ' ' {
			return code, lines, nil
		}
	}
	return 0, nil, fmt.Errorf("%w: it has too many lines", errReply)
}

// body sends the message, dot-stuffed, without the final dot.
func (v *conversation) body(parts ...[]byte) error {
	v.data = true
	w := bufio.NewWriterSize(pieces{v}, pieceSize)
	for _, raw := range parts { // each begins at the start of a line
		if len(raw) > 0 && raw[0] == '.' {
			_ = w.WriteByte('.') // errors of w stay until Flush
		}
		for {
			i := bytes.Index(raw, []byte("\r\n."))
			if i < 0 {
				break
			}
			_, _ = w.Write(raw[:i+2])
			_ = w.WriteByte('.')
			raw = raw[i+2:]
		}
		_, _ = w.Write(raw)
	}
	if err := w.Flush(); err != nil {
		// The server may have refused the message and hung up. It has not seen the dot,
		// so its reply decides.
		if v.ctx.Err() == nil {
			v.deadline(time.Second)
			if code, lines, rerr := v.reply(); rerr == nil {
				return &replyError{code: code, text: strings.Join(lines, " "), to: "the message"}
			}
		}
		return v.wrapError("send the message", err)
	}
	return nil
}

// pieces gives each write its own deadline.
type pieces struct{ v *conversation }

// Write sends a piece of the message.
func (p pieces) Write(b []byte) (int, error) {
	p.v.deadline(p.v.cfg.CommandTimeout)
	return p.v.conn.Write(b)
}

// finish writes the final dot and waits for the reply that decides the outcome.
func (v *conversation) finish(ds []*mail.Delivery) {
	// From here the context is ignored: without the reply the outcome would be
	// uncertain.
	if !v.stop() || v.ctx.Err() != nil {
		setOutcome(ds, mail.NotSent, "%v", v.wrapError("send the end of the message", context.Canceled))
		return
	}
	_ = v.conn.SetDeadline(time.Now().Add(v.cfg.CommandTimeout))
	if _, err := io.WriteString(v.conn, ".\r\n"); err != nil {
		// After an error the kernel has not accepted all three octets, or the TLS record
		// with them is incomplete.
		setOutcome(ds, mail.NotSent, "send the end of the message: %v", err)
		return
	}
	_ = v.conn.SetDeadline(time.Now().Add(v.cfg.FinalTimeout))
	code, lines, err := v.reply()
	v.data = err != nil
	text := strings.Join(lines, " ")
	r := &replyError{code: code, text: text, to: "the message"}
	switch {
	case err != nil:
		setOutcome(ds, mail.Uncertain, "the message was sent completely, but no valid reply came: %v", err)
		return
	case code/100 == 2:
		setOutcome(ds, mail.Accepted, "%d %s", code, text)
	case code/100 == 4:
		setOutcome(ds, mail.NotSent, "%v", r)
	case code/100 == 5:
		setOutcome(ds, mail.Refused, "%v", r)
	default:
		setOutcome(ds, mail.Uncertain, "the message was sent completely, but the reply is unexpected: %d %s", code, text)
	}
	r.setCodes(ds)
}

// close sends QUIT, without waiting for the reply, and closes the connection.
func (v *conversation) close() {
	v.stop()
	if !v.data && v.ctx.Err() == nil {
		_ = v.conn.SetDeadline(time.Now().Add(time.Second))
		_, _ = io.WriteString(v.conn, "QUIT\r\n")
	}
	_ = v.conn.Close()
}

// bounded is a connection with a limit on the octets that are read.
type bounded struct {
	net.Conn
	left int
}

// Read reads until the bound is reached.
func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("%w: the server sends too much", errReply)
	}
	n, err := b.Conn.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}
