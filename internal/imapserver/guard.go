package imapserver

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"postern/internal/mail"
)

// The limits of what a client sends.
const (
	maxLine        = 48 << 10 // octets of a line; RFC 9051 section 4 expects 8000
	maxText        = 4096     // octets of a literal that is no message
	maxTexts       = 64       // literals of a command
	maxStranger    = 16 << 10 // octets of a client that has not signed in
	maxAppend      = mail.MaxMessageBytes
	maxAppendShown = "35 MiB"
)

// A guard is a connection as go-imap sees it, after its TLS. It knows where commands
// and literals begin, and adds what that library does not have:
//
//   - a limit for literals. The library refuses a large one and reads on: what a
//     client meant as a message would be read as commands. The attack: a message
//     whose text is "a STORE 1:* +FLAGS \Deleted", which a program copies to Drafts.
//   - a limit of octets and time for those who have not signed in.
//   - the ID command (RFC 2971).
//   - SMALLER beside a date, which the library forgets.
//
// Read is called by one goroutine.
type guard struct {
	net.Conn // with TLS
	br       *bufio.Reader
	closed   chan struct{}
	once     sync.Once

	pending []byte // of a line that was read
	literal int64  // octets of a literal that are left
	within  bool   // the next line belongs to the same command
	texts   int    // literals of this command
	heard   int64  // octets before the sign-in
	end     time.Time

	trusted atomic.Bool // the client has signed in
	doomed  atomic.Bool // the conversation ends at its next read
	looks   atomic.Bool // the key of the session does not change the selected folder

	mu      sync.Mutex // guards what follows
	mute    bool       // suppress the greeting
	tag     string
	command string // in upper case, "UID FETCH"; empty before the first
}

func newGuard(conn net.Conn, end time.Time, mute bool) *guard {
	return &guard{Conn: conn, br: bufio.NewReaderSize(conn, maxLine), closed: make(chan struct{}), end: end, mute: mute}
}

// Close closes the connection, once.
func (g *guard) Close() error {
	g.once.Do(func() { close(g.closed) })
	return g.Conn.Close()
}

// SetReadDeadline keeps those who have not signed in within their time.
func (g *guard) SetReadDeadline(t time.Time) error {
	if !g.trusted.Load() && (t.IsZero() || t.After(g.end)) {
		t = g.end
	}
	return g.Conn.SetReadDeadline(t)
}

// current returns the command that is being served.
func (g *guard) current() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.command
}

// Read returns the client's octets as go-imap may see them.
func (g *guard) Read(p []byte) (int, error) {
	for {
		switch {
		case g.doomed.Load():
			return 0, io.EOF
		case len(g.pending) > 0:
			n := copy(p, g.pending)
			g.pending = g.pending[n:]
			return n, nil
		case g.literal > 0:
			n, err := g.br.Read(p[:min(int64(len(p)), g.literal)])
			g.literal -= int64(n)
			if !g.hear(n) {
				return 0, io.EOF
			}
			return n, err
		}
		if err := g.line(); err != nil {
			return 0, err
		}
	}
}

// hear counts what a stranger sends, and reports whether that is still little.
func (g *guard) hear(n int) bool {
	if g.trusted.Load() {
		return true
	}
	if g.heard += int64(n); g.heard > maxStranger {
		g.bye("too much was sent before the sign-in")
		return false
	}
	return true
}

func (g *guard) bye(format string, args ...any) {
	g.doomed.Store(true)
	g.say("* BYE " + fmt.Sprintf(format, args...))
}

// say writes a line of the guard's own. The library writes nothing meanwhile: it is
// waiting for a command.
func (g *guard) say(line string) {
	_ = g.SetWriteDeadline(time.Now().Add(10 * time.Second))
	_, _ = io.WriteString(g.Conn, line+"\r\n")
}

var literalForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`\{([0-9]{1,20})(\+?)\}\r?\n$`) })

// line reads one line. It is handed on, answered here, or ends the conversation.
func (g *guard) line() error {
	raw, err := g.br.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		g.bye("a line has more than %d octets", maxLine)
		return io.EOF
	}
	if err != nil {
		return err
	}
	if !g.hear(len(raw)) {
		return io.EOF
	}
	first := !g.within
	if first {
		g.begin(raw)
	}
	g.within = false
	if m := literalForm().FindSubmatch(raw); m != nil {
		if ok, err := g.openLiteral(string(m[1]), len(m[2]) > 0, first); !ok {
			return err
		}
	} else if first && g.current() == "ID" {
		g.identify(string(raw))
		return nil
	}
	if first && strings.HasSuffix(g.current(), "SEARCH") {
		raw = explicitSmaller(raw)
	}
	g.pending = bytes.Clone(raw)
	return nil
}

// begin notes the command of a line. A line of one word continues AUTHENTICATE or
// ends IDLE.
func (g *guard) begin(raw []byte) {
	words := strings.Fields(string(raw[:min(len(raw), 200)]))
	if len(words) < 2 {
		return
	}
	tag, command := "", "?"
	if validTag(words[0]) {
		tag, command = words[0], strings.ToUpper(words[1])
		if command == "UID" && len(words) > 2 {
			command += " " + strings.ToUpper(words[2])
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tag, g.command, g.texts = tag, command, 0
}

// openLiteral takes a literal that a line announces, or refuses it.
func (g *guard) openLiteral(digits string, plus, first bool) (ok bool, err error) {
	g.mu.Lock()
	tag, command := g.tag, g.command
	g.mu.Unlock()
	size, err := strconv.ParseInt(digits, 10, 64)
	most := int64(maxText)
	if command == "APPEND" && g.trusted.Load() {
		most = maxAppend
	}
	g.texts++
	switch {
	case err == nil && size <= most && g.texts <= maxTexts && command != "ID":
		g.literal, g.within = size, true
		return true, nil
	case !plus && first && tag != "" && g.texts <= maxTexts:
		// The client waits, and has not sent it.
		limit := strconv.FormatInt(most, 10) + " octets"
		if most == maxAppend {
			limit = maxAppendShown
		}
		g.say(tag + " NO [TOOBIG] a literal has at most " + limit + " here")
		return false, nil
	default:
		// It is on its way, and must not be read as commands.
		g.bye("a literal of this command is too large, or not allowed here")
		return false, io.EOF
	}
}

// identify answers ID. What the client says of itself is not kept.
func (g *guard) identify(line string) {
	g.mu.Lock()
	tag := g.tag
	g.mu.Unlock()
	if len(strings.Fields(line)) < 3 {
		g.say(tag + " BAD ID takes a list or NIL")
		return
	}
	g.say(`* ID ("name" "Postern")`)
	g.say(tag + " OK ID completed")
}

var smallerForm = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`"(?:\\.|[^"\\])*"|(?i)([ (])SMALLER ([0-9]{1,18})`)
})

// explicitSmaller writes SMALLER as what it means, NOT LARGER. go-imap 2.0.0-beta.8
// forgets a SMALLER when a date or a LARGER follows.
func explicitSmaller(line []byte) []byte {
	if !bytes.Contains(bytes.ToUpper(line), []byte("SMALLER")) {
		return line
	}
	form := smallerForm()
	return form.ReplaceAllFunc(line, func(b []byte) []byte {
		m := form.FindSubmatch(b)
		if m[2] == nil {
			return b // within a quoted string
		}
		n, err := strconv.ParseInt(string(m[2]), 10, 64)
		if err != nil || n == 0 { // nothing is smaller than 0
			return append(m[1], "NOT ALL"...)
		}
		return fmt.Appendf(m[1], "NOT LARGER %d", n-1)
	})
}

const readWrite = " OK [READ-WRITE] SELECT completed\r\n"

// Write writes what go-imap answers: each line by one call.
func (g *guard) Write(p []byte) (int, error) {
	g.mu.Lock()
	mute, tag, command := g.mute, g.tag, g.command
	g.mute = false
	g.mu.Unlock()
	out := p
	switch {
	case mute: // the greeting: after STARTTLS there is none
		return len(p), nil
	case command == "" || command == "CAPABILITY" || command == "LOGIN" || command == "AUTHENTICATE":
		// Nothing of a message is written in these.
		out = bytes.Replace(p, []byte("CAPABILITY IMAP4rev2 IMAP4rev1"), []byte("CAPABILITY IMAP4rev2 IMAP4rev1 ID"), 1)
	case command == "SELECT" && g.looks.Load() && string(p) == tag+readWrite:
		out = []byte(tag + strings.Replace(readWrite, "READ-WRITE", "READ-ONLY", 1))
	}
	if _, err := g.Conn.Write(out); err != nil {
		return 0, err
	}
	return len(p), nil
}
