package imapserver

import (
	"bytes"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/emersion/go-imap/v2"
)

// FuzzPart: the structure of any message is read within its limits, and every section
// is made of its octets.
func FuzzPart(f *testing.F) {
	for _, s := range []string{
		"", "\r\n", "Subject: x", "Subject: x\r\n\r\nbody",
		"Content-Type: multipart/mixed; boundary=x\r\n\r\npre\r\n--x\r\n\r\none\r\n--x\r\nContent-Type: message/rfc822\r\n\r\nSubject: i\r\n\r\ntwo\r\n--x--\r\nafter",
		"Content-Type: multipart/digest; boundary=\"a b\"\r\n\r\n--a b\r\n\r\nSubject: i\r\n\r\ntwo\r\n--a b--",
		"Content-Type: message/rfc822\r\n\r\nContent-Type: message/rfc822\r\n\r\nContent-Type: multipart/x; boundary=-\r\n\r\n---\r\n-----",
		"Content-Type: text/plain; name*=utf-8''%ff; charset=\"\r\n\x00\"\r\nContent-Transfer-Encoding: base64\r\n\r\n====",
		"From: a:b, <c@d>;\r\nDate: x\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n=\r\n=3D=x",
	} {
		f.Add([]byte(s), 1, 2)
	}
	f.Fuzz(func(t *testing.T, raw []byte, one, two int) {
		p := parse(raw)
		n := 0
		var walk func(p *part, depth int)
		walk = func(p *part, depth int) {
			if n++; n > 2*maxParts || depth > 2*maxDepth {
				t.Fatal("it has no limits")
			}
			if !bytes.Equal(append(bytes.Clone(p.header), p.body...), p.raw) || !bytes.Contains(raw, p.raw) {
				t.Fatalf("a part has octets that are not its message's: %q", p.raw)
			}
			for _, c := range p.children {
				walk(c, depth+1)
			}
			if p.message != nil {
				walk(p.message, depth+1)
			}
		}
		walk(p, 0)
		p.envelope()
		if m, ok := p.structure().(*imap.BodyStructureMultiPart); ok && len(m.Children) == 0 {
			t.Error("a multipart without parts: the library panics")
		}
		for _, path := range [][]int{nil, {one}, {one, two}, {two, one, 1}} {
			for _, s := range []imap.PartSpecifier{imap.PartSpecifierNone, imap.PartSpecifierHeader, imap.PartSpecifierText, imap.PartSpecifierMIME} {
				b := p.section(&imap.FetchItemBodySection{Part: path, Specifier: s, HeaderFields: []string{"subject"}, Partial: &imap.SectionPartial{Offset: int64(one), Size: int64(two)}})
				if bytes.IndexByte(b, 0) >= 0 {
					t.Error("a literal has a NUL")
				}
			}
			p.binary(path, nil)
		}
	})
}

// silent is a connection that says something and hears nothing.
type silent struct {
	net.Conn
	io.Reader
}

func (silent) Write(p []byte) (int, error)        { return len(p), nil }
func (silent) SetWriteDeadline(time.Time) error   { return nil }
func (s silent) Read(p []byte) (n int, err error) { return s.Reader.Read(p) }
func (silent) Close() error                       { return nil }
func (silent) RemoteAddr() net.Addr               { return &net.TCPAddr{} }
func (silent) SetReadDeadline(time.Time) error    { return nil }

// FuzzGuard: what the guard hands on is what was sent, less whole lines.
func FuzzGuard(f *testing.F) {
	for _, s := range []string{
		"a NOOP\r\n", "a ID NIL\r\nb NOOP\r\n", "a LOGIN {3}\r\nabc {2+}\r\nde\r\n", "a APPEND x {99999999999}\r\nb NOOP\r\n", "a SEARCH SMALLER 5 SINCE 1-Jan-2020\r\n",
		"a SEARCH TEXT \"x SMALLER 5\" SMALLER 0\r\n", "a UID SEARCH {1+}\r\n\n SMALLER 1\r\n", "\r\n\r\n", "a {1+}\r\n", "a IDLE\r\nDONE\r\n", "{0}\r\n{0+}\r\n",
	} {
		f.Add([]byte(s), true)
	}
	f.Fuzz(func(t *testing.T, said []byte, trusted bool) {
		g := newGuard(silent{Reader: bytes.NewReader(said)}, time.Now().Add(time.Hour), false)
		g.trusted.Store(trusted)
		got, _ := io.ReadAll(g)
		if len(got) > len(said)+8*bytes.Count(bytes.ToUpper(said), []byte("SMALLER")) {
			t.Errorf("%q became %q", said, got)
		}
		if !trusted && len(got) > maxStranger+8*bytes.Count(bytes.ToUpper(said), []byte("SMALLER")) {
			t.Errorf("a stranger was heard for %d octets", len(got))
		}
	})
}

// FuzzPattern compares the matcher of LIST with one that tries each way.
func FuzzPattern(f *testing.F) {
	for _, p := range []string{"*", "%", "INBOX", "A*e", "*r*i*", "", "%%x"} {
		f.Add(p)
	}
	var slow func(name, pattern string) bool
	slow = func(name, pattern string) bool {
		switch {
		case pattern == "":
			return name == ""
		case pattern[0] == '*' || pattern[0] == '%':
			return slow(name, pattern[1:]) || name != "" && slow(name[1:], pattern)
		}
		return name != "" && name[0] == pattern[0] && slow(name[1:], pattern[1:])
	}
	f.Fuzz(func(t *testing.T, pattern string) {
		if len(pattern) > 12 || strings.Count(pattern, "*")+strings.Count(pattern, "%") > 6 {
			return
		}
		for _, s := range shownFolders() {
			if got, want := matches(s.name, pattern), slow(s.name, pattern); got != want {
				t.Errorf("matches(%q, %q) = %v, want %v", s.name, pattern, got, want)
			}
		}
	})
}
