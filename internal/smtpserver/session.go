package smtpserver

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/emersion/go-smtp"
	"golang.org/x/sync/semaphore"

	"postern/internal/mail"
)

const (
	// maxRefused is how many refused recipients end a conversation. The attack: a
	// client that tries names without end.
	maxRefused = 100
	// maxHops is the number of Received fields above which a message is considered
	// to loop, RFC 5321 6.3.
	maxHops = 50
)

// session is the state of one conversation. BDAT reads a message in a second
// goroutine of go-smtp while RSET resets the session in the first: hence mu.
type session struct {
	s     *Server
	link  *link
	helo  string
	isTLS bool

	mu      sync.Mutex
	begun   bool // after MAIL
	from    string
	to      []string
	tooMany bool
	refused int
	account *Account // of a submission; nil until it has authenticated
	badAuth int
}

var _ smtp.Session = (*session)(nil)

// newSession returns the session for a connection: one with AUTH for sandboxes and
// submission, and one without for other servers.
func (s *Server) newSession(c *smtp.Conn) (smtp.Session, error) {
	conn := c.Conn()
	t, isTLS := conn.(*tls.Conn)
	if isTLS {
		conn = t.NetConn()
	}
	k, ok := conn.(*link)
	if !ok {
		return nil, &smtp.SMTPError{Code: 421, EnhancedCode: smtp.EnhancedCode{4, 3, 0}, Message: "internal error"} // unreachable
	}
	ses := &session{s: s, link: k, helo: c.Hostname(), isTLS: isTLS}
	switch {
	case k.captured:
		return capturedSession{ses}, nil
	case ses.submits():
		return submitSession{ses}, nil
	}
	return ses, nil
}

// submits reports whether the client submits mail, rather than delivers it.
func (ses *session) submits() bool { return ses.link.door != nil && ses.link.door.submission }

func reply(code int, enhanced smtp.EnhancedCode, format string, args ...any) *smtp.SMTPError {
	return &smtp.SMTPError{Code: code, EnhancedCode: enhanced, Message: oneLine(fmt.Sprintf(format, args...))}
}

// oneLine makes s one printable line. Parts of a reply may come from the client.
func oneLine(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, s)
	if len(s) > 400 { // RFC 5321 4.5.3.1.5: 512 octets a reply line
		s = strings.ToValidUTF8(s[:400], "")
	}
	return s
}

var errTemporary = reply(451, smtp.EnhancedCode{4, 3, 0}, "temporary failure, try again later")

// Reset forgets the transaction.
func (ses *session) Reset() {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	ses.begun, ses.from, ses.to, ses.tooMany = false, "", nil, false
}

// Logout ends the session.
func (ses *session) Logout() error { return nil }

// Mail begins a transaction.
func (ses *session) Mail(from string, _ *smtp.MailOptions) error {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	if ses.begun {
		// go-smtp would change the sender and keep the recipients.
		return reply(503, smtp.EnhancedCode{5, 5, 1}, "nested MAIL command")
	}
	if ses.submits() {
		if err := ses.maySubmitLocked(from); err != nil {
			return err
		}
	}
	if from != "" { // empty is the null reverse path of a bounce
		if _, err := path(from); err != nil {
			return reply(553, smtp.EnhancedCode{5, 1, 7}, "sender address: %v", err)
		}
	}
	ses.begun, ses.from = true, from
	return nil
}

// path checks an address of the envelope. go-smtp removes the quotes of a quoted
// local part and accepts control characters. An address that is not plain cannot
// be written into a trace field or an envelope, and is refused.
func path(addr string) (string, error) {
	a, err := mail.CheckAddr("address", addr)
	if fe, ok := errors.AsType[*mail.FieldError](err); ok {
		return "", errors.New(fe.Reason)
	}
	return a, err
}

// Rcpt adds a recipient.
func (ses *session) Rcpt(to string, _ *smtp.RcptOptions) error {
	ses.mu.Lock()
	defer ses.mu.Unlock()
	err := ses.rcptLocked(to)
	if err == nil {
		return nil
	}
	if ses.refused++; ses.refused > maxRefused {
		ses.link.doom()
		return reply(421, smtp.EnhancedCode{4, 7, 0}, "too many refused recipients")
	}
	// Clients on this machine are not slowed down: its own queue would wait.
	if k := ses.link; k.door != nil && !k.door.submission && (ses.s.tarLocal || !isLoopback(k.RemoteAddr())) {
		if !ses.s.pause(k, ses.s.names.NameGuess(host(k.RemoteAddr()))) {
			return reply(421, smtp.EnhancedCode{4, 7, 0}, "too many refused recipients")
		}
	}
	return err
}

// rcptLocked checks a recipient and adds it. For a sandbox or a submission every
// well-formed address is accepted: who may be written to is decided with the
// action.
func (ses *session) rcptLocked(to string) error {
	addr, err := path(to)
	if err != nil {
		return reply(553, smtp.EnhancedCode{5, 1, 3}, "recipient address: %v", err)
	}
	if len(ses.to) >= ses.s.cfg.MaxRecipients {
		if ses.link.captured || ses.submits() {
			// A mail server sends the rest later, a program does not. So nothing of the
			// message is accepted, and the program sees the refusal.
			ses.tooMany = true
			return reply(550, smtp.EnhancedCode{5, 5, 3}, "more than %d recipients, the message will be refused", ses.s.cfg.MaxRecipients)
		}
		return reply(452, smtp.EnhancedCode{4, 5, 3}, "too many recipients, the limit is %d", ses.s.cfg.MaxRecipients)
	}
	if !ses.link.captured && !ses.submits() {
		ctx, cancel := context.WithTimeout(ses.link.ctx, ses.s.cfg.HandTimeout)
		defer cancel()
		switch err := ses.s.cfg.Accepts(ctx, addr); {
		case errors.Is(err, ErrNoMailbox):
			if local, domain, _ := strings.Cut(addr, "@"); strings.EqualFold(local, "postmaster") || strings.EqualFold(local, "abuse") {
				// Tell complainants that the address is right but unread.
				return reply(550, smtp.EnhancedCode{5, 1, 1}, "nobody reads %s@%s yet", strings.ToLower(local), domain)
			}
			return reply(550, smtp.EnhancedCode{5, 1, 1}, "no such inbox here")
		case errors.Is(err, ErrRelay):
			return reply(550, smtp.EnhancedCode{5, 7, 1}, "relaying is not allowed")
		case err != nil:
			ses.s.log.Error("look up recipient", "err", err)
			return errTemporary
		}
	}
	ses.to = append(ses.to, addr)
	return nil
}

// Data reads a message and hands it over.
func (ses *session) Data(r io.Reader) error {
	ses.mu.Lock()
	env := mail.Envelope{From: ses.from, To: ses.to}
	tooMany := ses.tooMany
	ses.mu.Unlock()

	ses.link.beginData()
	raw, release, err := ses.read(r)
	defer release()
	ses.link.endData(err == nil)
	if err != nil {
		return err
	}
	if tooMany {
		return reply(550, smtp.EnhancedCode{5, 5, 3}, "RCPT TO: more than %d recipients, nothing was sent", ses.s.cfg.MaxRecipients)
	}
	room := ses.s.brought
	if ses.link.captured || ses.submits() {
		room = ses.s.proposed
	}
	leave, err := ses.s.acquireRoom(ses.link.ctx, room, int64(len(raw)))
	if err != nil {
		return errTemporary
	}
	defer leave()
	switch {
	case ses.link.captured:
		env.Raw = raw
		return ses.propose(env)
	case ses.submits():
		env.Raw = raw
		return ses.submit(env)
	}
	return ses.deliver(env, raw)
}

const (
	// maxHandled bounds the messages larger than smallMessage that are handed over
	// at the same time, in octets: once for incoming and once for proposed mail. Each
	// is copied several times while it is verified, scanned and sealed.
	maxHandled = 128 << 20
	// smallMessage is the size, in octets, up to which a message does not wait.
	smallMessage = 1 << 20
)

// acquireRoom acquires size octets of the semaphore room. It gives up when ctx ends
// or after HandTimeout; the client then retries later.
func (s *Server) acquireRoom(ctx context.Context, room *semaphore.Weighted, size int64) (leave func(), err error) {
	if size <= smallMessage {
		return func() {}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.HandTimeout)
	defer cancel()
	size = min(size, maxHandled)
	if err := room.Acquire(ctx, size); err != nil {
		return nil, fmt.Errorf("wait to hand message over: %w", err)
	}
	return func() { room.Release(size) }, nil
}

// read reads a message to its end. go-smtp ends it only at CR LF dot CR LF and
// undoes dot-stuffing. The attack (SMTP smuggling): some servers treat a bare CR or
// LF as the end of a line, and so can see the end of a message elsewhere. So both
// are refused, but for LF from a sandbox, see [lineEnds]. dotCR finds those that
// go-smtp would drop.
func (ses *session) read(r io.Reader) (raw []byte, release func(), err error) {
	held := int64(0)
	whose := ses.bufferOwner()
	release = func() {
		ses.s.buffered.Add(-held)
		ses.s.shares.add(whose, -held)
	}
	var buf bytes.Buffer
	// go-smtp fills the whole buffer before it returns. Reading single octets finds
	// a bare CR at once, instead of after a sender that believes to have ended its
	// message has hung up.
	var one [1]byte
	wire, err := wireOf(r)
	if err != nil {
		ses.s.log.Error("read message", "err", err)
		return nil, release, errTemporary
	}
	var known *smtp.SMTPError // here, because it is allocated: not once for each octet
	ends := lineEnds{lenient: ses.link.captured, stuffed: wire != nil}
	for {
		if (ends.prev == '\n' || buf.Len() == 0) && dotCR(wire) {
			return nil, release, errBare
		}
		n, err := r.Read(one[:])
		if n == 1 {
			if !ends.add(&buf, one[0]) {
				return nil, release, errBare
			}
			if more := int64(buf.Cap()) - held; more > 0 {
				held += more
				mine := ses.s.shares.add(whose, more)
				// The attack: one machine or sandbox sends a few large messages slowly, and
				// takes all buffers meanwhile.
				if ses.s.buffered.Add(more) > ses.s.cfg.MaxBufferBytes || whose != "" && mine > ses.s.cfg.MaxBufferBytes/4 {
					return nil, release, reply(452, smtp.EnhancedCode{4, 3, 1}, "too much mail at the same time, try again later")
				}
			}
		}
		switch {
		case err == nil:
			if int64(buf.Len()) > ses.s.cfg.MaxMessageBytes { // BDAT
				return nil, release, smtp.ErrDataTooLarge
			}
		case errors.Is(err, io.EOF):
			if ends.prev == '\r' {
				return nil, release, reply(550, smtp.EnhancedCode{5, 6, 0}, "message ends in a bare CR")
			}
			return buf.Bytes(), release, nil
		case errors.As(err, &known):
			return nil, release, known
		case errors.Is(err, smtp.ErrTooLongLine):
			return nil, release, reply(554, smtp.EnhancedCode{5, 6, 0}, "message has a line that is too long")
		default:
			return nil, release, reply(451, smtp.EnhancedCode{4, 4, 2}, "message was not received completely")
		}
	}
}

var errBare = reply(550, smtp.EnhancedCode{5, 6, 0}, "message has a bare CR or LF; every line must end in CR LF")

// wireOf returns the reader from which go-smtp reads a DATA message before it undoes
// dot-stuffing, or nil for BDAT, which has none. go-smtp does not export it, so it
// is taken from a private field by reflection. If a new version changes that field,
// messages are refused until this is adapted.
func wireOf(r io.Reader) (*bufio.Reader, error) {
	if _, ok := r.(*io.PipeReader); ok {
		return nil, nil //nolint:nilnil // chunks have no dots
	}
	if v := reflect.Indirect(reflect.ValueOf(r)); v.Kind() == reflect.Struct {
		if f := v.FieldByName("r"); f.IsValid() && f.Type() == reflect.TypeFor[*bufio.Reader]() {
			return (*bufio.Reader)(f.UnsafePointer()), nil
		}
	}
	return nil, fmt.Errorf("go-smtp reads messages by a %T, which this version does not know", r)
}

// dotCR reports whether the next line is a dot and a CR without a LF. go-smtp drops
// these two octets, so that the message would differ from what was sent; and some
// servers see an end of message in CR LF dot CR CR LF. It only waits for octets
// that the end of a message has as well.
func dotCR(wire *bufio.Reader) bool {
	if wire == nil {
		return false
	}
	for n, want := range []byte(".\r") {
		if b, err := wire.Peek(n + 1); err != nil || b[n] != want {
			return false
		}
	}
	b, err := wire.Peek(3)
	return err == nil && b[2] != '\n'
}

// bufferOwner returns the key under which the buffers of a message are counted. It
// is empty for a mail server on this machine, which brings mail of many senders.
func (ses *session) bufferOwner() string {
	switch k := ses.link; {
	case k.captured:
		return k.who.String()
	case !ses.submits() && isLoopback(k.RemoteAddr()) && !ses.s.tarLocal:
		return ""
	default:
		return host(k.RemoteAddr())
	}
}

// bufferShares counts octets by [session.bufferOwner]. It is safe for concurrent
// use.
type bufferShares struct {
	mu sync.Mutex
	by map[string]int64
}

// add adds n to the octets of whose and returns the sum.
func (s *bufferShares) add(whose string, n int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by == nil {
		s.by = map[string]int64{}
	}
	s.by[whose] += n
	sum := s.by[whose]
	if sum == 0 {
		delete(s.by, whose)
	}
	return sum
}

// deliver hands a message from another server to Deliver.
func (ses *session) deliver(env mail.Envelope, raw []byte) error {
	if hops(raw) > maxHops {
		return reply(554, smtp.EnhancedCode{5, 4, 6}, "message loops: it has more than %d Received fields", maxHops)
	}
	env.Raw = append(ses.trace(env, time.Now()), raw...)
	ctx, cancel := context.WithTimeout(ses.link.ctx, ses.s.cfg.HandTimeout)
	defer cancel()
	if err := ses.s.cfg.Deliver(ctx, env, ses.peer()); err != nil {
		return ses.errorReply(err, 554, ses.peer().Remote.String())
	}
	return nil
}

// errorReply returns the reply for an error of Deliver or Submit. code is that for a
// wrong field: 554 for another server, 550 for the author of the message (RFC 5321,
// section 4.2.3). Internal errors are logged and become a temporary failure.
func (ses *session) errorReply(err error, code int, from string) error {
	var fe *mail.FieldError
	var no *RefusalError
	switch {
	case errors.As(err, &no):
		return no.reply()
	case errors.As(err, &fe):
		return reply(code, smtp.EnhancedCode{5, 6, 0}, "%v", fe)
	}
	ses.s.log.Error("take message", "err", err, "from", from)
	return errTemporary
}

func (r *RefusalError) reply() *smtp.SMTPError {
	return reply(r.Code, smtp.EnhancedCode(r.Enhanced), "%s", r.Reason)
}

// peer describes the client.
func (ses *session) peer() Peer {
	p := Peer{Helo: ses.helo, TLS: ses.isTLS}
	if a, ok := ses.link.RemoteAddr().(*net.TCPAddr); ok {
		p.Remote = netip.AddrPortFrom(a.AddrPort().Addr().Unmap(), a.AddrPort().Port())
	}
	return p
}

// propose hands a captured message to Propose.
func (ses *session) propose(env mail.Envelope) error {
	ctx, cancel := context.WithTimeout(ses.link.ctx, ses.s.cfg.HandTimeout)
	defer cancel()
	said, err := ses.s.cfg.Propose(ctx, ses.link.who, ses.link.dst, env)
	var fe *mail.FieldError
	var no *RefusalError
	switch {
	case errors.As(err, &no):
		return no.reply()
	case errors.As(err, &fe):
		return reply(550, smtp.EnhancedCode{5, 7, 1}, "%v", fe)
	case err != nil:
		ses.s.log.Error("propose captured message", "err", err, "who", ses.link.who.String())
		return errTemporary
	}
	return reply(250, smtp.EnhancedCode{2, 0, 0}, "%s", said)
}

// trace returns the fields that RFC 5321 4.4 requires. The client's HELO name is
// hostile text.
func (ses *session) trace(env mail.Envelope, now time.Time) []byte {
	helo := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-.:[]_", r) {
			return r
		}
		return '?'
	}, ses.helo)
	if len(helo) > 255 {
		helo = helo[:255]
	}
	remote := "unknown"
	if a, ok := ses.link.RemoteAddr().(*net.TCPAddr); ok {
		remote = a.AddrPort().Addr().Unmap().String()
		if strings.Contains(remote, ":") {
			remote = "IPv6:" + remote
		}
	}
	with := "ESMTP"
	if ses.isTLS {
		with = "ESMTPS"
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "Return-Path: <%s>\r\nReceived: from %s ([%s])\r\n\tby %s with %s id %s", env.From, helo, remote, ses.s.cfg.Hostname, with, strings.ToLower(rand.Text()))
	if len(env.To) == 1 { // with more, a recipient would learn of others in Bcc
		fmt.Fprintf(&b, "\r\n\tfor <%s>", env.To[0])
	}
	fmt.Fprintf(&b, ";\r\n\t%s\r\n", now.UTC().Format(time.RFC1123Z))
	return b.Bytes()
}

// hops counts the Received fields of the header.
func hops(raw []byte) int {
	n := 0
	for len(raw) > 0 {
		line, rest, _ := bytes.Cut(raw, []byte("\r\n"))
		if len(line) == 0 {
			break
		}
		if len(line) >= 9 && bytes.EqualFold(line[:9], []byte("received:")) {
			n++
		}
		raw = rest
	}
	return n
}
