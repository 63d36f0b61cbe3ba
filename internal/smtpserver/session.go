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

	"github.com/emersion/go-sasl"
	"github.com/emersion/go-smtp"
	"golang.org/x/sync/semaphore"

	"postern/internal/mail"
)

const (
	// maxRefused is how many recipients may be refused in a conversation
	// before it is ended: a sender that tries names would go on for ever.
	maxRefused = 100
	// maxHops is when a message is taken to go round in a loop, RFC 5321 6.3.
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
	account *Account // who submits; nil until it has authenticated
	badAuth int
}

// capturedSession offers AUTH, which a session with another server must not.
type capturedSession struct{ *session }

var (
	_ smtp.Session     = (*session)(nil)
	_ smtp.AuthSession = capturedSession{}
)

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

// submits says whether the other end is a program that sends, and not a server
// that brings mail.
func (ses *session) submits() bool { return ses.link.door != nil && ses.link.door.submission }

func reply(code int, enhanced smtp.EnhancedCode, format string, args ...any) *smtp.SMTPError {
	return &smtp.SMTPError{Code: code, EnhancedCode: enhanced, Message: oneLine(fmt.Sprintf(format, args...))}
}

// oneLine keeps a reply to one printable line: part of it may come from what
// the client sent.
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
		// go-smtp would keep the recipients and change the sender under them.
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

// path checks an address of the envelope. go-smtp has taken quotes off a
// quoted local part and lets control characters through; what is not a plain
// address cannot be written into a trace field or an envelope and is refused.
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
	// Not this machine: a queue of ours would wait for us.
	if k := ses.link; k.door != nil && !k.door.submission && (ses.s.tarLocal || !isLoopback(k.RemoteAddr())) {
		if !ses.s.pause(k, ses.s.names.nameGuess(host(k.RemoteAddr()))) {
			return reply(421, smtp.EnhancedCode{4, 7, 0}, "too many refused recipients")
		}
	}
	return err
}

func (ses *session) rcptLocked(to string) error {
	addr, err := path(to)
	if err != nil {
		return reply(553, smtp.EnhancedCode{5, 1, 3}, "recipient address: %v", err)
	}
	if len(ses.to) >= ses.s.cfg.MaxRecipients {
		if ses.link.captured || ses.submits() {
			// No program sends the rest later, as a server does: it must hear
			// that nothing of this message will be sent.
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
				// Whoever has a complaint shall not think that he has mistyped it.
				return reply(550, smtp.EnhancedCode{5, 1, 1}, "nobody reads %s of %s yet", strings.ToLower(local), domain)
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
	// maxHandled bounds the messages larger than smallMessage that other servers
	// have brought and that are handed over at the same time, in octets, and as
	// many of those that agents propose: each is copied several times while it is
	// judged, cleaned and sealed.
	maxHandled = 128 << 20
	// smallMessage is how many octets a message has that need not wait.
	smallMessage = 1 << 20
)

// acquireRoom waits until room has place for a message of so many octets. It ends
// with ctx or after HandTimeout: then its sender keeps it.
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
// undoes dot-stuffing; everything else that a server somewhere takes for an
// end of line, and so perhaps for an end of message, is a bare CR or LF and
// refused here. What go-smtp would drop unseen, dotCR looks for before.
func (ses *session) read(r io.Reader) (raw []byte, release func(), err error) {
	held := int64(0)
	whose := ses.bufferOwner()
	release = func() {
		ses.s.buffered.Add(-held)
		ses.s.shares.add(whose, -held)
	}
	var buf bytes.Buffer
	// go-smtp fills the whole of what it is given before it returns. Octet by
	// octet a bare CR is seen at once, and not when a sender, which believes
	// that it has ended its message, has hung up.
	var one [1]byte
	prev := byte(0)
	wire, err := wireOf(r)
	if err != nil {
		ses.s.log.Error("read message", "err", err)
		return nil, release, errTemporary
	}
	for {
		if (prev == '\n' || buf.Len() == 0) && dotCR(wire) {
			return nil, release, errBare
		}
		n, err := r.Read(one[:])
		if n == 1 {
			c := one[0]
			if (c == '\n') != (prev == '\r') {
				return nil, release, errBare
			}
			prev = c
			buf.WriteByte(c)
			if more := int64(buf.Cap()) - held; more > 0 {
				held += more
				mine := ses.s.shares.add(whose, more)
				// The attack: one machine, or one sandbox, that sends a few large
				// messages slowly, and nobody else's mail is taken meanwhile.
				if ses.s.buffered.Add(more) > ses.s.cfg.MaxBufferBytes || whose != "" && mine > ses.s.cfg.MaxBufferBytes/4 {
					return nil, release, reply(452, smtp.EnhancedCode{4, 3, 1}, "too much mail at once, try again later")
				}
			}
		}
		var known *smtp.SMTPError
		switch {
		case err == nil:
			if int64(buf.Len()) > ses.s.cfg.MaxMessageBytes { // BDAT
				return nil, release, smtp.ErrDataTooLarge
			}
		case errors.Is(err, io.EOF):
			if prev == '\r' {
				return nil, release, reply(550, smtp.EnhancedCode{5, 6, 0}, "message ends in a bare CR")
			}
			return buf.Bytes(), release, nil
		case errors.As(err, &known):
			return nil, release, known
		case errors.Is(err, smtp.ErrTooLongLine):
			return nil, release, reply(554, smtp.EnhancedCode{5, 6, 0}, "message has too long a line")
		default:
			return nil, release, reply(451, smtp.EnhancedCode{4, 4, 2}, "message was not received to its end")
		}
	}
}

var errBare = reply(550, smtp.EnhancedCode{5, 6, 0}, "message has a bare CR or LF; every line must end in CR LF")

// wireOf returns what go-smtp reads a message of DATA from, in front of its
// undoing of dots, or nil for one of BDAT, which has none. go-smtp does not
// hand it out, so it is taken from its reader; that reader's type is not
// exported either. Should it change, messages are refused until this follows.
func wireOf(r io.Reader) (*bufio.Reader, error) {
	if _, ok := r.(*io.PipeReader); ok {
		return nil, nil //nolint:nilnil // chunks have no dots
	}
	if v := reflect.Indirect(reflect.ValueOf(r)); v.Kind() == reflect.Struct {
		if f := v.FieldByName("r"); f.IsValid() && f.Type() == reflect.TypeFor[*bufio.Reader]() {
			return (*bufio.Reader)(f.UnsafePointer()), nil
		}
	}
	return nil, fmt.Errorf("go-smtp reads messages by a %T, which is not known here", r)
}

// dotCR reports whether the line that begins here is a dot and a CR without a
// LF. go-smtp drops these two octets: the message would not be what was sent,
// and CR LF dot CR CR LF, where some servers see an end, would be lines like
// any other. It waits for no octet that the end of a message does not have.
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

// bufferOwner returns under whose name a message is counted while it is received, or
// nothing for a mail server on this machine, which brings everybody's.
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

// bufferShares are octets by whose they are. They are safe for concurrent use.
type bufferShares struct {
	mu sync.Mutex
	by map[string]int64
}

// add adds n to what whose has, and returns it.
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

func (ses *session) deliver(env mail.Envelope, raw []byte) error {
	if hops(raw) > maxHops {
		return reply(554, smtp.EnhancedCode{5, 4, 6}, "message goes round in a loop, it has more than %d Received fields", maxHops)
	}
	env.Raw = append(ses.trace(env, time.Now()), raw...)
	ctx, cancel := context.WithTimeout(ses.link.ctx, ses.s.cfg.HandTimeout)
	defer cancel()
	if err := ses.s.cfg.Deliver(ctx, env, ses.peer()); err != nil {
		return ses.errorReply(err, 554, ses.peer().Remote.String())
	}
	return nil
}

// errorReply is the reply to a message that was not taken. A field that is wrong
// is answered with code: 554 to another server, 550 to who wrote the message
// (RFC 5321, section 4.2.3). What went wrong on our side is logged, not told.
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

// peer returns who is at the other end.
func (ses *session) peer() Peer {
	p := Peer{Helo: ses.helo, TLS: ses.isTLS}
	if a, ok := ses.link.RemoteAddr().(*net.TCPAddr); ok {
		p.Remote = netip.AddrPortFrom(a.AddrPort().Addr().Unmap(), a.AddrPort().Port())
	}
	return p
}

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

// trace returns the fields that RFC 5321 4.4 asks for. The name that the
// client gave itself is not to be believed and may hold anything.
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
	if len(env.To) == 1 { // with more, one would learn of another's Bcc
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

// AuthMechanisms offers what programs ask for.
func (capturedSession) AuthMechanisms() []string { return []string{"PLAIN", "LOGIN", "XOAUTH2"} }

// Auth accepts any credential and does not look at it: who it is that speaks
// is known by the sandbox's link, and a secret that a program was given for
// some server out there is none of our business.
func (capturedSession) Auth(mech string) (sasl.Server, error) {
	switch mech {
	case "PLAIN", "XOAUTH2":
		return &acceptAnyAuth{asks: [][]byte{nil}, initial: true}, nil
	case "LOGIN":
		return &acceptAnyAuth{asks: [][]byte{[]byte("Username:"), []byte("Password:")}, initial: true}, nil
	}
	return nil, smtp.ErrAuthUnknownMechanism
}

// acceptAnyAuth asks as often as the mechanism does and lets everybody in.
type acceptAnyAuth struct {
	asks    [][]byte
	initial bool // the next response may have come with the command
}

// Next drops a response and returns the next challenge.
func (a *acceptAnyAuth) Next(response []byte) (challenge []byte, done bool, err error) {
	if response != nil && a.initial {
		a.asks = a.asks[1:] // RFC 4954: the initial response answers the first challenge
	}
	a.initial = false
	if len(a.asks) == 0 {
		return nil, true, nil
	}
	challenge, a.asks = a.asks[0], a.asks[1:]
	return challenge, false, nil
}
