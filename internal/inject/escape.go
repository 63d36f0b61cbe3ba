package inject

import (
	"bytes"
	"unicode/utf16"
	"unicode/utf8"
)

// A flexible is a value that is found with any of its bytes escaped: %XX, \uXXXX
// and the short escapes of JSON, \xXX, octal and \u{X} of C and its successors, and
// character references of HTML. It is found with line breaks in it as well, which
// MIME, PEM and mail programs put into long texts: LF or CRLF, escaped or not, after
// the = of quoted-printable or not, and with indentation.
type flexible struct {
	value []byte
}

const (
	longestEscape = 12 // bytes of two \uXXXX
	widest        = 10 // bytes of the longest escape of a single byte
	longestBreak  = 64 // bytes of a line break and its indentation
	// A line that a value is broken into has this many bytes or more, on average.
	shortestLine = 16
)

// longest is how long f can be written.
func (f *flexible) longest() int {
	n := len(f.value)
	return n*widest + longestEscape + (n/shortestLine+1)*longestBreak
}

// markChars are the bytes with which an escape begins.
const markChars = "%\\&"

// isMark reports whether an escape begins with c.
func isMark(c byte) bool { return c == '%' || c == '\\' || c == '&' }

// What a comparison found.
type state int

const (
	differs state = iota
	equal
	partial // b ends before the value does
)

// match compares value[from:] with b[at:] and returns where it ends: at end or
// before it.
func match(value []byte, from int, b []byte, at, end int) (int, state) {
	for j := from; j < len(value); {
		if at >= end {
			return at, differs
		}
		if at >= len(b) {
			return at, partial
		}
		c, rest := b[at], value[j:]
		if isMark(c) || c == '=' {
			var out [utf8.UTFMax]byte
			n, width, s := unescape(b[at:], &out)
			if s == equal && bytes.HasPrefix(rest, out[:n]) {
				j, at = j+n, at+width
				continue
			}
			if s == equal && octet(out[:n]) == int(rest[0]) {
				j, at = j+1, at+width
				continue
			}
			if s == partial && c != '=' {
				return at, partial
			}
		}
		// An escaped line break goes before a byte of the value that is a mark: without
		// escapes the value is found anyway.
		if literal := same(c, rest[0]); !literal || isMark(c) {
			width := 0
			if j > 0 {
				width = lineBreak(b[at:])
			}
			if width > 0 {
				at += width
				continue
			}
			if !literal {
				return at, differs
			}
		}
		j, at = j+1, at+1
	}
	return at, equal
}

// octet returns the byte that a character of Latin-1 outside of ASCII stands for where
// each byte of a text is escaped by itself, or -1.
func octet(utf []byte) int {
	if len(utf) == 2 && (utf[0] == 0xc2 || utf[0] == 0xc3) {
		return int(utf[0]&3<<6 | utf[1]&0x3f)
	}
	return -1
}

// lineBreak returns the length of the line break with which b begins, with what
// continues the text on the next line, or 0. If b ends in it, it is all of b.
func lineBreak(b []byte) int {
	at, lines := 0, 0
	if b[0] == '=' { // a soft line break (RFC 2045 section 6.7)
		at = 1
	}
	for at < len(b) && at < longestBreak-longestEscape {
		c := b[at]
		switch {
		case c == '\r' || c == '\n':
			at++
			lines++
			continue
		case (c == ' ' || c == '\t') && lines > 0:
			at++
			continue
		case c == '\\' || c == '%' || c == '&':
			var out [utf8.UTFMax]byte
			_, width, s := unescape(b[at:], &out)
			if s == partial {
				return len(b)
			}
			if s == equal && (out[0] == '\r' || out[0] == '\n' || out[0] == '\t' && lines > 0) {
				at += width
				lines++
				continue
			}
		}
		if lines == 0 {
			return 0
		}
		return at
	}
	if lines == 0 && at < len(b) {
		return 0
	}
	return at
}

// same compares c as it is written, in a form too, with a byte of a value.
func same(c, v byte) bool { return c == v || c == '+' && v == ' ' }

// endsWith reports whether b ends with v without escapes and line breaks.
func endsWith(b, v []byte) bool {
	if len(v) > len(b) {
		return false
	}
	for i := 1; i <= len(v); i++ {
		if !same(b[len(b)-i], v[len(v)-i]) {
			return false
		}
	}
	return true
}

// unescape decodes the escape with which b begins: n bytes of out, written in
// width.
func unescape(b []byte, out *[utf8.UTFMax]byte) (n, width int, s state) {
	switch b[0] {
	case '%', '=':
		c, s := digits(b[1:], 2, 16)
		out[0] = byte(c)
		return 1, 3, s
	case '\\':
		return backslash(b, out)
	}
	return reference(b, out)
}

// digits parses exactly n digits.
func digits(b []byte, n int, base byte) (rune, state) {
	v := rune(0)
	for i := range n {
		if i >= len(b) {
			return 0, partial
		}
		d := unhex(b[i])
		if d >= base {
			return 0, differs
		}
		v = v*rune(base) + rune(d)
	}
	return v, equal
}

func backslash(b []byte, out *[utf8.UTFMax]byte) (n, width int, s state) {
	if len(b) < 2 {
		return 0, 0, partial
	}
	if b[1] >= '0' && b[1] <= '3' {
		if c, s := digits(b[1:], 3, 8); s != differs {
			out[0] = byte(c)
			return 1, 4, s
		}
	}
	const short, means = `nrtbfav0"'\/`, "\n\r\t\b\f\a\v\x00\"'\\/"
	if i := bytes.IndexByte([]byte(short), b[1]); i >= 0 {
		out[0] = means[i]
		return 1, 2, equal
	}
	switch b[1] {
	case 'x':
		c, s := digits(b[2:], 2, 16)
		out[0] = byte(c)
		return 1, 4, s
	case 'U':
		c, s := digits(b[2:], 8, 16)
		return utf8.EncodeRune(out[:], c), 10, s
	case 'u':
		if len(b) > 2 && b[2] == '{' {
			return braced(b, out)
		}
		c, s := digits(b[2:], 4, 16)
		if s != equal {
			return 0, 0, s
		}
		width = 6
		if utf16.IsSurrogate(c) {
			if len(b) < 8 {
				return 0, 0, partial
			}
			low, s := digits(b[8:], 4, 16)
			if b[6] != '\\' || b[7] != 'u' || s == differs {
				return 0, 0, differs
			}
			if s == partial {
				return 0, 0, partial
			}
			c, width = utf16.DecodeRune(c, low), longestEscape
		}
		return utf8.EncodeRune(out[:], c), width, equal
	}
	return 0, 0, differs
}

// braced decodes \u{X}, with one to six digits.
func braced(b []byte, out *[utf8.UTFMax]byte) (n, width int, s state) {
	c := rune(0)
	for i, d := range b[3:] {
		switch {
		case d == '}' && i > 0:
			return utf8.EncodeRune(out[:], c), i + 4, equal
		case i == 6 || unhex(d) > 15:
			return 0, 0, differs
		}
		c = c<<4 | rune(unhex(d))
	}
	if len(b) > 9 {
		return 0, 0, differs
	}
	return 0, 0, partial
}

// reference decodes a character reference of HTML.
func reference(b []byte, out *[utf8.UTFMax]byte) (n, width int, s state) {
	const longest = 8
	end := bytes.IndexByte(b[:min(len(b), longest)], ';')
	if end < 0 {
		if len(b) < longest && isReference(b[1:]) {
			return 0, 0, partial
		}
		return 0, 0, differs
	}
	name := b[1:end]
	switch string(name) {
	case "amp":
		out[0] = '&'
	case "lt":
		out[0] = '<'
	case "gt":
		out[0] = '>'
	case "quot":
		out[0] = '"'
	case "apos":
		out[0] = '\''
	default:
		if len(name) < 2 || name[0] != '#' {
			return 0, 0, differs
		}
		base := byte(10)
		if name = name[1:]; name[0] == 'x' || name[0] == 'X' {
			name, base = name[1:], 16
		}
		c, s := digits(name, len(name), base)
		if s != equal || len(name) == 0 {
			return 0, 0, differs
		}
		return utf8.EncodeRune(out[:], c), end + 1, equal
	}
	return 1, end + 1, equal
}

// isReference reports whether a character reference can begin with & and b. In a
// query and most text it cannot.
func isReference(b []byte) bool {
	for _, name := range []string{"amp", "lt", "gt", "quot", "apos"} {
		if bytes.HasPrefix([]byte(name), b) {
			return true
		}
	}
	if b[0] != '#' {
		return false
	}
	for _, c := range b[1:] {
		if unhex(c) > 15 && c != 'x' && c != 'X' {
			return false
		}
	}
	return true
}

// A spot is a byte of a flexible.
type spot struct{ flex, at int32 }

// indexFlex fills the tables that find spots by their bytes.
func (m *Mask) indexFlex() {
	for _, f := range m.flex {
		m.first[f.value[0]] = true
		for _, c := range f.value {
			m.index[int(c)+1]++
			m.before[c] = true
		}
	}
	m.before['\r'], m.before['='] = true, true
	for _, c := range []byte(markChars) {
		m.first[c] = true
	}
	for c := range 256 {
		m.index[c+1] += m.index[c]
	}
	next := m.index
	m.spots = make([]spot, m.index[256])
	for i, f := range m.flex {
		for j, c := range f.value {
			m.spots[next[c]] = spot{int32(i), int32(j)}
			next[c]++
		}
	}
}

// of returns where the values of flex have c.
func (m *Mask) of(c byte) []spot { return m.spots[m.index[c]:m.index[int(c)+1]] }

// findEscaped appends the values of b that have an escape or a line break in them. It
// looks for the first one: all bytes of the value before it are written as they are.
func (m *Mask) findEscaped(spans []span, b []byte, from, seen int) []span {
	if len(m.flex) == 0 {
		return spans
	}
	for _, mark := range []byte(markChars + "\n") {
		for at := from; ; at++ {
			i := bytes.IndexByte(b[at:], mark)
			if i < 0 {
				break
			}
			at += i
			switch {
			case mark == '\n':
				if at > from && m.before[b[at-1]] {
					spans = m.findBroken(spans, b, from, at, seen)
				}
			case at+1 < len(b) && mayEscape(mark, b[at+1]):
				spans = m.findMarked(spans, b, from, at, seen)
			}
		}
	}
	return spans
}

// mayEscape reports whether an escape can begin with mark and next. It keeps most of
// binary data and of text from being looked at more closely.
func mayEscape(mark, next byte) bool {
	switch mark {
	case '%':
		return unhex(next) <= 15
	case '&':
		return next == '#' || next == 'a' || next == 'l' || next == 'g' || next == 'q'
	}
	switch next {
	case '0', '1', '2', '3', 'n', 'r', 't', 'b', 'f', 'a', 'v', '"', '\'', '\\', '/', 'x', 'u', 'U':
		return true
	}
	return false
}

// findMarked appends the values of b whose first escape is at at.
func (m *Mask) findMarked(spans []span, b []byte, from, at, seen int) []span {
	var out [utf8.UTFMax]byte
	n, _, s := unescape(b[at:], &out)
	if s != equal {
		return spans
	}
	spans = m.findAt(spans, b, from, at, seen, out[0])
	if o := octet(out[:n]); o >= 0 {
		spans = m.findAt(spans, b, from, at, seen, byte(o))
	}
	if out[0] == '\n' || out[0] == '\r' {
		spans = m.findBroken(spans, b, from, at, seen)
	}
	return spans
}

// findAt appends the values of b whose first escape is at at and stands for c.
func (m *Mask) findAt(spans []span, b []byte, from, at, seen int, c byte) []span {
	for _, p := range m.of(c) {
		f, j := &m.flex[p.flex], int(p.at)
		if !endsWith(b[from:at], f.value[:j]) {
			continue
		}
		if end, s := match(f.value, j, b, at, at-j+f.longest()); s == equal && end > seen {
			spans = append(spans, span{at - j, end})
		}
	}
	return spans
}

// findBroken appends the values of b whose first line break has its end of line at at.
func (m *Mask) findBroken(spans []span, b []byte, from, at, seen int) []span {
	if at > from && b[at] == '\n' && b[at-1] == '\r' {
		at--
	}
	if at == from || !m.before[b[at-1]] {
		return spans
	}
	next := at + lineBreak(b[at:])
	if next >= len(b) {
		return spans
	}
	literal := !isMark(b[next]) && b[next] != '='
	// Behind a soft line break is =, with which a value can also end its line.
	for _, before := range []int{at, at - 1} {
		if before <= from || before < at && b[before] != '=' {
			break
		}
		for _, p := range m.of(b[before-1]) {
			f, j := &m.flex[p.flex], int(p.at)+1
			if j == len(f.value) || literal && !same(b[next], f.value[j]) || !endsWith(b[from:before], f.value[:j]) {
				continue
			}
			if end, s := match(f.value, j, b, next, before-j+f.longest()); s == equal && end > seen {
				spans = append(spans, span{before - j, end})
			}
		}
	}
	return spans
}
