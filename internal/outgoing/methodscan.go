package outgoing

import (
	"bytes"
	"slices"
	"strings"
	"unicode/utf8"
)

const (
	maxField = 512     // bytes of a name or value that is looked at
	maxBlock = 4 << 10 // bytes of the header of one part
	maxParts = 1000    // parts of one body
	maxDepth = 1000    // of JSON
)

// A MethodScan reads a body of any length for methods, as it passes. It looks at more than any one
// server does, so that no two of them read the body differently from it, and keeps little
// of it in memory.
type MethodScan struct {
	own     string
	found   *found
	readers []bodyReader
}

// A bodyReader reads a body as one kind of text.
type bodyReader interface {
	write(p []byte)
	end()
}

// NewMethodScan returns a scan of the body of r. It is nil if no server takes a body of
// its type for a form.
func NewMethodScan(r *Request) *MethodScan {
	s := &MethodScan{own: r.Method, found: &found{}}
	form, parts, text := kinds(r)
	if form {
		s.readers = append(s.readers, &formScan{found: s.found})
	}
	if parts {
		s.readers = append(s.readers, &partScan{found: s.found})
	}
	if text {
		s.readers = append(s.readers, &jsonScan{found: s.found, lenient: form})
	}
	if len(s.readers) == 0 {
		return nil
	}
	for _, v := range r.values("content-encoding") {
		if v = strings.ToLower(strings.TrimSpace(v)); v != "" && v != "identity" {
			s.found.doubt("its body is compressed: send it as it is")
		}
	}
	return s
}

// kinds returns as what servers may read the body of r. Only the type says that, in
// any of its fields; Rack reads a body without one as a form.
func kinds(r *Request) (form, parts, text bool) {
	values := r.values("content-type")
	for _, v := range values {
		v = strings.ToLower(v)
		form = form || strings.Contains(v, "urlencoded")
		if strings.Contains(v, "multipart") {
			parts = true
			// Rack reads one without a boundary as a form.
			form = form || len(values) > 1 || !bounded(v)
		}
		text = text || strings.Contains(v, "json")
		if before, after, ok := strings.Cut(v, "/"); !ok || strings.TrimSpace(before) == "" || strings.TrimSpace(after) == "" {
			return true, true, true
		}
	}
	if len(values) == 0 {
		return true, false, true
	}
	return form, parts, text
}

// bounded reports whether every parser finds a boundary in a type in lower case.
func bounded(v string) bool {
	before, after, ok := strings.Cut(v, "boundary=")
	after = strings.TrimPrefix(after, `"`)
	return ok && strings.HasPrefix(before, "multipart/") && !strings.Contains(after, "boundary") && after != "" && strings.Contains("abcdefghijklmnopqrstuvwxyz0123456789-_=", after[:1])
}

// Write reads the next bytes of the body. It never fails.
func (s *MethodScan) Write(p []byte) (int, error) {
	for _, r := range s.readers {
		r.write(p)
	}
	return len(p), nil
}

// End says that the body has ended.
func (s *MethodScan) End() {
	for _, r := range s.readers {
		r.end()
	}
}

// Problem says why what was read so far may mean another method than that of the request
// line. It is empty if it does not.
func (s *MethodScan) Problem() string {
	for _, m := range s.found.methods {
		if m != s.own {
			return "its body names the method " + m
		}
	}
	return s.found.unknown
}

// A start is the beginning of a name or value.
type start struct {
	b    []byte
	more bool // it is longer
}

func (f *start) add(c ...byte) {
	fits := min(len(c), maxField-len(f.b))
	f.b = append(f.b, c[:fits]...)
	f.more = f.more || fits < len(c)
}

func (f *start) reset() { f.b, f.more = f.b[:0], false }

// naming says whether f is a name for the method.
func (f *start) naming(found *found) naming {
	s := string(f.b)
	if !f.more {
		return overrideName(s)
	}
	// The attack: a name that begins with a thousand spaces.
	if i := strings.LastIndexByte(s, '%'); i > len(s)-6 {
		s = s[:i] // an escape that is cut
	}
	for range 3 {
		rest, _ := words(fold(s))
		if rest == "" || slices.ContainsFunc(methodWords, func(w string) bool { return strings.HasPrefix(w, rest) }) {
			found.doubt("the name of a field is too long")
		}
		s = decode(s)
	}
	return no
}

// value notes f as the value of a field that names a method.
func (f *start) value(found *found, n naming, text string) {
	if f.more && (n == surely || strings.TrimSpace(text) == "") {
		found.doubt("it names a method that is too long")
	}
	if !f.more {
		found.value(text, n == surely)
	}
}

// A formScan reads the pairs of a form, or of a query. Some servers take ";" for "&".
type formScan struct {
	found *found

	name, text start
	inValue    bool
	naming     naming
	headers    bool // the value is header fields
	charset    bool // the value is a character set
}

func (s *formScan) write(p []byte) {
	for _, c := range p {
		switch {
		case c == '&' || c == ';':
			s.pair()
		case c == '=' && !s.inValue:
			s.inValue = true
			s.naming = s.name.naming(s.found)
			if len(s.name.b) > 0 && !s.name.more && (s.name.b[0] == '$' || s.name.b[0] == '%' || s.name.b[0] == '_') {
				plain := decode(string(s.name.b))
				s.headers, s.charset = fold(plain) == "httpheaders", plain == "_charset_"
			}
		case !s.inValue:
			s.name.add(c)
		case s.naming != no || s.headers || s.charset:
			s.text.add(c)
		}
	}
}

// pair ends a pair.
func (s *formScan) pair() {
	text := ""
	if len(s.text.b) > 0 {
		text = decode(string(s.text.b))
	}
	switch {
	case !s.inValue:
	case s.naming != no:
		s.text.value(s.found, s.naming, text)
	case s.headers:
		if s.text.more {
			s.found.doubt("it has too many header fields in a parameter")
		}
		for line := range strings.SplitSeq(text, "\n") {
			name, value, _ := strings.Cut(line, ":")
			s.found.header(strings.TrimSpace(name), value)
		}
	case s.charset && !plainCharset(text):
		s.found.doubt("its character set " + clip(text) + " is not known here")
	}
	s.name.reset()
	s.text.reset()
	s.inValue, s.naming, s.headers, s.charset = false, no, false, false
}

func (s *formScan) end() { s.pair() }

// A jsonScan reads a text in JSON, or several one after another. It looks at the names of
// the outermost object, of each object in an outermost list, and of each in a list of
// requests (OData, Microsoft Graph, Facebook).
type jsonScan struct {
	found   *found
	lenient bool // the body need not be JSON: its type does not say so

	stack  []byte // of { and [
	state  jsonState
	failed bool
	began  bool

	str      bool // in a string
	escape   int  // bytes of an escape that are read
	unit     rune
	key      bool // the string is a name
	text     start
	naming   naming // of the name before the value
	under    naming // of a name of which the value is a list or an object,
	at       int    // and the depth of that
	requests int    // the depth of a list of requests, 0 for none
	list     bool   // the name before the value is that of a list of requests
}

type jsonState int

const (
	wantValue jsonState = iota
	wantName
	wantColon
	wantComma
)

func (s *jsonScan) write(p []byte) {
	for i := 0; i < len(p) && !s.failed; i++ {
		if s.str && s.escape == 0 {
			// Most of a body is strings.
			j := bytes.IndexAny(p[i:], `"\`)
			if j < 0 {
				j = len(p) - i
			}
			if s.wanted() {
				s.text.add(p[i : i+min(j, maxField+1)]...)
			}
			if i += j; i == len(p) {
				return
			}
		}
		s.byte(p[i])
	}
}

func (s *jsonScan) fail() {
	s.failed = true
	if !s.lenient {
		s.found.doubt("its body is not JSON as everybody reads it")
	}
}

// wanted reports whether the string that is read matters.
func (s *jsonScan) wanted() bool {
	return s.key && s.outer() || !s.key && (s.naming != no || s.under == surely)
}

// outer reports whether the innermost object is one whose names matter.
func (s *jsonScan) outer() bool {
	d := len(s.stack)
	return d == 1 || d == 2 && s.stack[0] == '[' || s.requests > 0 && d == s.requests+1
}

func (s *jsonScan) byte(c byte) {
	switch {
	case s.str:
		s.inString(c)
		return
	case c == ' ' || c == '\t' || c == '\r' || c == '\n':
		return
	case !s.began && (c == 0xef || c == 0xbb || c == 0xbf): // a byte order mark
		return
	}
	s.began = true
	inObject := len(s.stack) > 0 && s.stack[len(s.stack)-1] == '{'
	switch c {
	case '"':
		if s.state == wantColon || s.state == wantComma && len(s.stack) > 0 {
			s.fail()
			return
		}
		s.str, s.key = true, s.state == wantName
		s.text.reset()
	case '{', '[':
		if s.state == wantName || s.state == wantColon || s.state == wantComma && len(s.stack) > 0 || len(s.stack) >= maxDepth {
			s.fail()
			return
		}
		if s.naming == surely && s.under == no {
			s.under, s.at = surely, len(s.stack)
		}
		s.stack = append(s.stack, c)
		if s.list && c == '[' {
			s.requests = len(s.stack)
		}
		s.naming, s.list = no, false
		if s.state = wantValue; c == '{' {
			s.state = wantName
		}
	case '}', ']':
		if len(s.stack) == 0 || (c == '}') != inObject || s.state == wantColon {
			s.fail()
			return
		}
		s.stack = s.stack[:len(s.stack)-1]
		if s.under != no && len(s.stack) <= s.at {
			s.under = no
		}
		if len(s.stack) < s.requests {
			s.requests = 0
		}
		s.value()
	case ':':
		if s.state != wantColon {
			s.fail()
			return
		}
		s.state = wantValue
	case ',':
		if s.state != wantComma || len(s.stack) == 0 {
			s.fail()
			return
		}
		if s.state = wantValue; inObject {
			s.state = wantName
		}
	default: // a number, true, false, null
		letter := c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '-' || c == '+' || c == '.'
		if s.state == wantName || s.state == wantColon || !letter {
			s.fail()
			return
		}
		s.value()
	}
}

// value ends a value.
func (s *jsonScan) value() { s.state, s.naming, s.list = wantComma, no, false }

// inString reads a byte of a string.
func (s *jsonScan) inString(c byte) {
	switch {
	case s.escape == 0 && c == '"':
		s.str = false
		s.ended()
	case s.escape == 0 && c == '\\':
		s.escape, s.unit = 1, 0
	case s.escape == 0: // unreachable
	case s.escape == 1 && c == 'u':
		s.escape = 2
	case s.escape == 1:
		s.escape = 0
		if i := strings.IndexByte(`bfnrt"\/`, c); i < 0 {
			s.fail()
		} else if s.wanted() {
			s.text.add("\b\f\n\r\t\"\\/"[i])
		}
	default:
		n, ok := hexNumber(string(c))
		if !ok {
			s.fail()
			return
		}
		s.unit = s.unit<<4 | n
		if s.escape++; s.escape == 6 {
			s.escape = 0
			if s.wanted() {
				s.text.add(utf8.AppendRune(nil, s.unit)...)
			}
		}
	}
}

// ended ends a string.
func (s *jsonScan) ended() {
	if s.key {
		s.state, s.naming, s.list = wantColon, no, false
		if s.outer() {
			s.naming = s.text.naming(s.found)
			s.list = len(s.stack) == 1 && (string(s.text.b) == "requests" || string(s.text.b) == "batch")
		}
		return
	}
	if n := max(s.naming, s.under); n != no {
		s.text.value(s.found, n, string(s.text.b))
	}
	s.value()
}

func (s *jsonScan) end() {
	if !s.failed && (s.str || len(s.stack) > 0) {
		s.fail()
	}
}

// A partScan reads the parts of a multipart body. It does not look for their boundaries,
// about which parsers differ, but for what names a part, wherever it stands.
type partScan struct {
	found *found

	buf   []byte
	parts int
	named bool // some part names the method,
	coded bool // and some part is encoded or has a character set
}

func (s *partScan) write(p []byte) {
	s.buf = append(s.buf, p...)
	s.read(false)
}

func (s *partScan) end() { s.read(true) }

// read reads what can be read of buf. The last of it can be the beginning of something.
func (s *partScan) read(last bool) {
	low := make([]byte, len(s.buf)) // of ASCII alone, so that its offsets are those of buf
	for i, c := range s.buf {
		if low[i] = c; 'A' <= c && c <= 'Z' {
			low[i] = c + 'a' - 'A'
		}
	}
	if bytes.Contains(low, []byte("application/http")) {
		s.found.doubt("its body has requests in it")
	}
	s.coded = s.coded || bytes.Contains(low, []byte("content-transfer-encoding")) || bytes.Contains(low, []byte("charset"))
	for {
		i, n := disposition(low)
		if i < 0 {
			keep := max(0, len(s.buf)-32) // more than the longest of these words
			s.buf = append(s.buf[:0], s.buf[keep:]...)
			break
		}
		if !s.part(s.buf[i:], low[i:], n, last) {
			s.buf = append(s.buf[:0], s.buf[i:]...)
			break
		}
		s.buf, low = s.buf[i+n:], low[i+n:]
	}
	if s.named && s.coded {
		s.found.doubt("its body has a method, and parts in another encoding")
	}
}

// disposition returns where a part is named, and the length of the word that says so. Rack
// takes Content-ID for a name.
func disposition(low []byte) (at, n int) {
	const begin = "content-"
	for at = 0; ; at += len(begin) {
		i := bytes.Index(low[at:], []byte(begin))
		if i < 0 {
			return -1, 0
		}
		at += i
		for _, w := range []string{"disposition", "id"} {
			if bytes.HasPrefix(low[at+len(begin):], []byte(w)) {
				return at, len(begin) + len(w)
			}
		}
	}
}

// part reads a part from what names it on, of which the first n bytes say that. It
// returns false if more of the body is needed.
func (s *partScan) part(b, low []byte, n int, last bool) bool {
	const most = maxBlock + 64 // the blank line is after the block
	end, value, strict := blankLine(b[:min(len(b), most)])
	if end < 0 {
		if len(b) < most && !last {
			return false
		}
		if len(b) >= most && bytes.HasPrefix(bytes.TrimLeft(b[n:], " \t"), []byte(":")) {
			s.found.doubt("the header of a part is too long")
		}
		end, value, strict = min(len(b), most), min(len(b), most), false
	}
	best := no
	for _, name := range partNames(b[n:end], low[n:end], n == len("content-id")) {
		if strings.Contains(name, "=?") {
			s.found.doubt("the name of a part is encoded")
		}
		best = max(best, overrideName(name))
	}
	if best == no {
		s.count()
		return true
	}
	rest := b[value:min(len(b), value+maxField+4)]
	stop := bytes.Index(rest, []byte("\r\n--"))
	if stop < 0 && len(rest) < maxField+4 && !last {
		return false
	}
	s.count()
	s.named = true
	if !strict || stop < 0 || stop > maxField {
		// The attack: lines that end in LF or CR alone, so that another parser finds the value
		// elsewhere.
		s.found.doubt("its body has a method in a part that parsers read differently")
		return true
	}
	s.found.value(string(rest[:stop]), best == surely)
	return true
}

func (s *partScan) count() {
	if s.parts++; s.parts > maxParts {
		s.found.doubt("its body has too many parts")
	}
}

// blankLine returns where the first blank line of b begins, and where what follows it
// does. Strict means that all lines up to there end in CR LF, and are not folded.
func blankLine(b []byte) (end, after int, strict bool) {
	strict = true
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case c == '\r':
			strict = strict && i+1 < len(b) && b[i+1] == '\n'
			continue
		case c != '\n':
			continue
		}
		strict = strict && i > 0 && b[i-1] == '\r'
		j := i + 1
		for j < len(b) && (b[j] == ' ' || b[j] == '\t' || b[j] == '\r') {
			j++
		}
		if j < len(b) && b[j] == '\n' {
			return i, j + 1, strict && string(b[i+1:j+1]) == "\r\n"
		}
		strict = strict && j == i+1
	}
	return -1, 0, false
}

// partNames returns the names in the header of a part, without quotes and however they are
// written: name=x, name="x", name*=utf-8”x, also where they stand in a quoted text.
func partNames(b, low []byte, id bool) (out []string) {
	if id {
		line, _, _ := bytes.Cut(bytes.TrimLeft(b, " \t:"), []byte("\n"))
		out = append(out, strings.Trim(string(line), "<> \t\r\""))
	}
	for at := 0; ; {
		i := bytes.Index(low[at:], []byte("name"))
		if i < 0 {
			return out
		}
		at += i + len("name")
		before := at - len("name") - 1
		if before >= 0 && (low[before] >= 'a' && low[before] <= 'z' || low[before] >= '0' && low[before] <= '9') {
			continue // filename
		}
		v := bytes.TrimLeft(b[at:], " \t\r\n")
		extended := bytes.HasPrefix(v, []byte("*"))
		if v = bytes.TrimLeft(v, "*0123456789 \t\r\n"); !bytes.HasPrefix(v, []byte("=")) {
			continue
		}
		v = bytes.TrimLeft(v[1:], " \t\r\n")
		if extended {
			// In pieces or in another character set (RFC 2231, RFC 8187), which few clients
			// write: whatever it is could be one.
			out = append(out, "=?")
		}
		quote := len(v) > 0 && (v[0] == '"' || v[0] == '\'')
		var text []byte
		for k := 0; k < len(v) && len(text) < maxField; k++ {
			switch c := v[k]; {
			case quote && k > 0 && c == v[0] && v[k-1] != '\\', !quote && c == ';', c == '\n' && !quote:
				k = len(v)
			case c != '\\' && c != '\r' && c != '\n':
				text = append(text, c)
			}
		}
		out = append(out, strings.Trim(string(text), "\"' \t"))
	}
}
