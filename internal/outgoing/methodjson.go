package outgoing

import (
	"bytes"
	"strings"
	"unicode/utf8"
)

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
