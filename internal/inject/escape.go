package inject

import (
	"bytes"
	"unicode/utf16"
	"unicode/utf8"
)

// A flexible is a value that is found with any of its bytes escaped: %XX, \uXXXX
// and the short escapes of JSON, \xXX, and character references of HTML.
type flexible struct {
	value []byte
}

// longestEscape is how many bytes an escape has at most: two \uXXXX.
const longestEscape = 12

// longest is how long f can be written.
func (f *flexible) longest() int { return len(f.value)*8 + longestEscape }

// isMark reports whether an escape begins with c.
func isMark(c byte) bool { return c == '%' || c == '\\' || c == '&' }

// starts reports whether f could begin with c as it is written.
func (f *flexible) starts(c byte) bool { return c == f.value[0] || isMark(c) }

// What a comparison found.
type state int

const (
	differs state = iota
	equal
	partial // b ends before the value does
)

// match compares value with b[at:] and returns where it ends.
func match(value, b []byte, at int) (int, state) {
	for rest := value; len(rest) > 0; {
		if at >= len(b) {
			return at, partial
		}
		if isMark(b[at]) {
			var out [utf8.UTFMax]byte
			n, width, s := unescape(b[at:], &out)
			if s == equal && bytes.HasPrefix(rest, out[:n]) {
				rest, at = rest[n:], at+width
				continue
			}
			if s == partial {
				return at, partial
			}
		}
		if !same(b[at], rest[0]) {
			return at, differs
		}
		rest, at = rest[1:], at+1
	}
	return at, equal
}

// same compares c as it is written, in a form too, with a byte of a value.
func same(c, v byte) bool { return c == v || c == '+' && v == ' ' }

// endsWith reports whether b ends with v without escapes.
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
	case '%':
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
	case 'u':
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

// findEscaped appends the values of b that have an escape in them. It looks for
// the first one: all bytes of the value before it are written as they are.
func (m *Mask) findEscaped(spans []span, b []byte, from, seen int) []span {
	if len(m.flex) == 0 {
		return spans
	}
	marks := newMarks(b, from)
	for at := marks.next(from); at < len(b); at = marks.next(at + 1) {
		var out [utf8.UTFMax]byte
		if _, _, s := unescape(b[at:], &out); s != equal || !m.has[out[0]] {
			continue
		}
		for i := range m.flex {
			v := m.flex[i].value
			for j := bytes.IndexByte(v, out[0]); j >= 0; {
				if endsWith(b[from:at], v[:j]) {
					if end, s := match(v[j:], b, at); s == equal && end > seen {
						spans = append(spans, span{at - j, end})
					}
				}
				next := bytes.IndexByte(v[j+1:], out[0])
				if next < 0 {
					break
				}
				j += 1 + next
			}
		}
	}
	return spans
}

// marks steps from escape to escape.
type marks struct {
	b  []byte
	at [3]int // of the next %, \ and &
}

func newMarks(b []byte, from int) *marks {
	return &marks{b: b, at: [3]int{from - 1, from - 1, from - 1}}
}

// next returns the first mark at from or later, or len(b).
func (m *marks) next(from int) int {
	first := len(m.b)
	for i, c := range []byte{'%', '\\', '&'} {
		if m.at[i] < from {
			m.at[i] = len(m.b)
			if from < len(m.b) {
				if j := bytes.IndexByte(m.b[from:], c); j >= 0 {
					m.at[i] = from + j
				}
			}
		}
		first = min(first, m.at[i])
	}
	return first
}
