package outgoing

import (
	"slices"
	"strings"
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
		if rest == "" || slices.ContainsFunc(methodWords(), func(w string) bool { return strings.HasPrefix(w, rest) }) {
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
