package inject

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"unicode/utf8"
)

// Shortest is the length in bytes from which a value is masked. A shorter one
// would be found by chance in any answer.
const Shortest = 6

const (
	// maskChar stands for each byte of a masked value.
	maskChar = '*'
	// leak is how many bytes of a value's beginning pass if an answer pauses
	// there. With none, each pause behind a byte with which a value begins would
	// hold the byte back, and with it the end of a WebSocket message.
	leak = 3
	// maskBuffer is how many bytes are read at a time.
	maskBuffer = 32 << 10
)

// A Mask overwrites values in what a server sends back, without a change of
// length: as they are, in upper and lower case and as HTTP and CGI write names,
// reversed, in hex (also with separators), in base64 (at each offset, both alphabets),
// in quoted-printable, with any bytes of them escaped, and with line breaks in them
// (see flexible).
//
// It stops servers that echo what they got. It does not stop a server that helps
// the sandbox, which could send a value in a code of its own.
type Mask struct {
	fixed []pattern
	flex  []flexible
	// spots[index[c]:index[c+1]] lists where the values of flex have the byte c.
	spots    []spot
	index    [257]int32
	first    [256]bool // flex can begin with the byte, as it is written
	before   [256]bool // flex can be broken, or its line break begin, behind the byte
	plain    int       // bytes of the longest of flex
	flexible int       // and of the longest as it is written
	// A window of min bytes is compared with the first min bytes of all patterns
	// at once (Wu and Manber): shift has how far it can move when it ends with
	// two bytes of a hash, and ends which patterns' windows end with them.
	min   int
	shift [pairs]uint8
	ends  map[uint16][]int
	long  int // bytes of the longest pattern
}

// A Guarded is a secret of a project whose value answers of its hosts are searched for,
// also in sandboxes without it, or what it was before it was changed.
type Guarded struct {
	ID     string // of the secret
	Name   string
	Hosts  []string // as of [Secret]
	Former int64    // revision of a former one; 0 means the present one
}

// ErrGone means that a [Guarded] secret does not exist any more.
var ErrGone = errors.New("the secret does not exist any more")

// At reports whether an answer of host could have the value. RuleHosts are those whose
// rules in the sandbox's network name the secret, see [Secret].
func (g *Guarded) At(host string, ruleHosts []string) bool {
	s := Secret{Hosts: g.Hosts, RuleHosts: ruleHosts}
	return s.Usable(host)
}

// A pattern is an encoding of a value with one spelling.
type pattern []byte

// A span is a masked part of a buffer.
type span struct{ start, end int }

const pairs = 1 << 13

func hash(a, b byte) uint16 { return uint16(a&0x7f)<<6 | uint16(b&0x3f) }

// NewMask returns a mask for values: their values and session tokens. Access key
// IDs are not secret.
func NewMask(values ...Value) *Mask {
	m := &Mask{ends: map[uint16][]int{}}
	for _, v := range values {
		m.add(v.Value)
		m.add(v.SessionToken)
	}
	slices.SortFunc(m.fixed, func(a, b pattern) int { return bytes.Compare(a, b) })
	m.fixed = slices.CompactFunc(m.fixed, func(a, b pattern) bool { return bytes.Equal(a, b) })
	slices.SortFunc(m.flex, func(a, b flexible) int { return bytes.Compare(a.value, b.value) })
	m.flex = slices.CompactFunc(m.flex, func(a, b flexible) bool { return bytes.Equal(a.value, b.value) })
	m.build()
	return m
}

// add adds all encodings of v.
func (m *Mask) add(v []byte) {
	if len(v) < Shortest {
		return
	}
	put := func(b []byte) { m.fixed = append(m.fixed, b) }
	bend := func(b []byte) { m.flex = append(m.flex, flexible{bytes.Clone(b)}) }
	backwards := bytes.Clone(v)
	slices.Reverse(backwards)
	digits := []byte(hex.EncodeToString(v))
	for _, b := range [][]byte{
		bytes.Clone(v), bytes.ToLower(v), bytes.ToUpper(v), backwards, digits, bytes.ToUpper(digits),
		[]byte(url.QueryEscape(string(v))), []byte(url.PathEscape(string(v))),
	} {
		put(b)
	}
	for _, b := range nameForms(v) {
		put(b)
	}
	for _, separator := range []byte{':', ' '} {
		b := separated(digits, separator)
		put(b)
		put(bytes.ToUpper(b))
	}
	if b := quotedPrintable(v); !bytes.Equal(b, v) {
		put(b)
	}
	if b, err := encodeJSON(v); err == nil {
		put(b)
	}
	bend(v)
	bend(digits)
	if bytes.Contains(v, []byte(" ")) {
		// A form has + for a space, and some servers decode all of it but that.
		plus := bytes.ReplaceAll(v, []byte(" "), []byte("+"))
		put(plus)
		bend(plus)
	}
	for offset := range 3 {
		for _, alphabet := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			b := base64At(alphabet, v, offset)
			put(b)
			bend(b)
		}
	}
}

// nameForms returns v as programs write the names of fields that they have got: as Go
// and others do (Tok-Abc), also behind a prefix (tok-Abc), and as CGI does (TOK_ABC),
// which has one character for - and _.
func nameForms(v []byte) (out [][]byte) {
	for _, b := range [][]byte{bytes.Clone(v), bytes.ReplaceAll(v, []byte("_"), []byte("-"))} {
		begins := true
		for i, c := range b {
			switch {
			case begins && 'a' <= c && c <= 'z':
				b[i] = c - 'a' + 'A'
			case !begins && 'A' <= c && c <= 'Z':
				b[i] = c - 'A' + 'a'
			}
			begins = c == '-'
		}
		behind := bytes.Clone(b)
		if c := behind[0]; 'A' <= c && c <= 'Z' {
			behind[0] = c - 'A' + 'a'
		}
		out = append(out, b, behind)
	}
	return append(out, bytes.ReplaceAll(bytes.ToUpper(v), []byte("-"), []byte("_")), bytes.ReplaceAll(bytes.ToLower(v), []byte("_"), []byte("-")))
}

// separated returns hexadecimal digits with a separator between bytes.
func separated(digits []byte, separator byte) []byte {
	out := make([]byte, 0, len(digits)*3/2)
	for i := 0; i < len(digits); i += 2 {
		if i > 0 {
			out = append(out, separator)
		}
		out = append(out, digits[i:i+2]...)
	}
	return out
}

// quotedPrintable returns v with what must be escaped in quoted-printable (RFC 2045
// section 6.7).
func quotedPrintable(v []byte) (out []byte) {
	for _, c := range v {
		if c == '=' || c < ' ' && c != '\t' || c > '~' {
			out = append(out, '=', "0123456789ABCDEF"[c>>4], "0123456789ABCDEF"[c&15])
			continue
		}
		out = append(out, c)
	}
	return out
}

// base64At returns the characters that v alone decides when it stands offset
// bytes behind a multiple of three. At either end a character may be left out
// that has bits of a neighbour.
func base64At(e *base64.Encoding, v []byte, offset int) []byte {
	padded := append(make([]byte, offset, offset+len(v)), v...)
	out := make([]byte, e.EncodedLen(len(padded)))
	e.Encode(out, padded)
	clear(padded)
	return out[(offset*8+5)/6 : (offset+len(v))*8/6]
}

// build fills the tables.
func (m *Mask) build() {
	for _, p := range m.fixed {
		m.long = max(m.long, len(p))
		if m.min == 0 || len(p) < m.min {
			m.min = len(p)
		}
	}
	for _, f := range m.flex {
		m.plain = max(m.plain, len(f.value))
		m.flexible = max(m.flexible, f.longest())
	}
	m.long = max(m.long, m.flexible)
	m.indexFlex()
	m.min = min(m.min, 128)
	for i := range m.shift {
		m.shift[i] = uint8(max(m.min-1, 0)) // most pairs of bytes are in no pattern
	}
	for i, p := range m.fixed {
		for j := 1; j < m.min; j++ {
			h := hash(p[j-1], p[j])
			m.shift[h] = min(m.shift[h], uint8(m.min-1-j))
			if j == m.min-1 {
				m.ends[h] = append(m.ends[h], i)
			}
		}
	}
}

// Wipe overwrites the values that m has, if it is not nil. It must not be used
// afterwards.
func (m *Mask) Wipe() {
	if m == nil {
		return
	}
	for _, p := range m.fixed {
		clear(p)
	}
	for _, f := range m.flex {
		clear(f.value)
	}
	m.fixed, m.flex, m.min = nil, nil, 0
}

// Header masks names and values of h in place and returns how many it masked. A name
// is compared without case, since HTTP programs change it, and removed. Trailers need
// a call of their own, and so do the names that announce them.
func (m *Mask) Header(h http.Header) int {
	hits := 0
	for name, values := range h {
		if m.inName(name) {
			delete(h, name)
			hits++
			continue
		}
		for i, v := range values {
			b := []byte(v)
			spans, n := merge(m.find(nil, b, 0, 0))
			for _, s := range spans {
				fill(b, s)
			}
			if n > 0 {
				values[i] = string(b)
				hits += n
			}
		}
	}
	return hits
}

// inName reports whether the name of a field has a value, in any case.
func (m *Mask) inName(name string) bool {
	if len(name) < m.min {
		return false
	}
	written := []byte(name)
	plain := make([]byte, 0, len(written)) // without escapes
	for at := 0; at < len(written); {
		if isMark(written[at]) {
			var out [utf8.UTFMax]byte
			if n, width, s := unescape(written[at:], &out); s == equal {
				plain, at = append(plain, out[:n]...), at+width
				continue
			}
		}
		plain, at = append(plain, written[at]), at+1
	}
	foldName(written)
	foldName(plain)
	has := func(p []byte) bool {
		if len(p) > len(name) {
			return false
		}
		p = bytes.Clone(p)
		defer clear(p)
		foldName(p)
		return bytes.Contains(written, p) || bytes.Contains(plain, p)
	}
	return slices.ContainsFunc(m.fixed, func(p pattern) bool { return has(p) }) || slices.ContainsFunc(m.flex, func(f flexible) bool { return has(f.value) })
}

// foldName makes the names equal that programs take for the same.
func foldName(b []byte) {
	for i, c := range b {
		switch {
		case 'A' <= c && c <= 'Z':
			b[i] = c - 'A' + 'a'
		case c == '_':
			b[i] = '-'
		}
	}
}

func fill(b []byte, s span) {
	for i := s.start; i < s.end; i++ {
		b[i] = maskChar
	}
}

// merge returns the spans in order and without overlaps, and their number.
func merge(spans []span) ([]span, int) {
	slices.SortFunc(spans, func(a, b span) int { return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(a.end, b.end)) })
	out := spans[:0]
	for _, s := range spans {
		if n := len(out); n > 0 && s.start < out[n-1].end {
			out[n-1].end = max(out[n-1].end, s.end)
			continue
		}
		out = append(out, s)
	}
	return out, len(out)
}

// find appends to spans the values of b that begin at from or later and end
// behind seen. They may overlap.
func (m *Mask) find(spans []span, b []byte, from, seen int) []span {
	if m.min == 0 {
		return spans
	}
	for pos := from + m.min - 1; pos < len(b); {
		if s := m.shift[hash(b[pos-1], b[pos])]; s > 0 {
			pos += int(s)
			continue
		}
		start := pos - m.min + 1
		for _, i := range m.ends[hash(b[pos-1], b[pos])] {
			if p := m.fixed[i]; bytes.HasPrefix(b[start:], p) && start+len(p) > seen {
				spans = append(spans, span{start, start + len(p)})
			}
		}
		pos++
	}
	return m.findEscaped(spans, b, from, seen)
}

// begins returns where the first value could begin of which b has only the
// beginning, or len(b).
func (m *Mask) begins(b []byte) int {
	first := len(b)
	for _, p := range m.fixed {
		from := max(len(b)-len(p)+1, 0)
		for from < first {
			i := bytes.IndexByte(b[from:first], p[0])
			if i < 0 {
				break
			}
			from += i
			if bytes.HasPrefix(p, b[from:]) {
				first = from
				break
			}
			from++
		}
	}
	// A value with nothing escaped can be so far from the end; each escape and line
	// break behind its beginning adds to that.
	far := m.plain
	for n := 1; n <= min(len(b), m.flexible) && n < far; n++ {
		from := len(b) - n
		switch c := b[from]; {
		case c == '\n' || c == '\r' || c == '%' || c == '&' || c == '\\' && (n == 1 || b[from+1] != '/' && b[from+1] != '"'):
			far += longestBreak
		case c == '\\', c == '=':
			far += widest
		}
		if from < first && m.first[b[from]] && m.beginsAt(b, from) {
			first = from
		}
	}
	return first
}

// beginsAt reports whether b[from:] is the beginning of a value of flex.
func (m *Mask) beginsAt(b []byte, from int) bool {
	c, also := b[from], -1
	if isMark(c) {
		var out [utf8.UTFMax]byte
		n, _, s := unescape(b[from:], &out)
		if s == partial {
			return true
		}
		if s == equal {
			also = octet(out[:n])
			c = out[0]
		}
	}
	next := byte(0)
	if c == b[from] && from+1 < len(b) && !isMark(b[from+1]) && b[from+1] != '=' {
		next = b[from+1]
	}
	for i := range m.flex {
		f := &m.flex[i]
		if v := f.value[0]; v != c && v != b[from] && int(v) != also || next > ' ' && !same(next, f.value[1]) {
			continue
		}
		if _, state := match(f.value, 0, b, from, from+f.longest()); state == partial {
			return true
		}
	}
	return false
}

// Reader returns a reader of r with all values masked. It has r's length and
// returns r's errors. It holds back only what may be the beginning of a value.
func (m *Mask) Reader(r io.Reader) *MaskedReader { return &MaskedReader{mask: m, r: r} }

// A MaskedReader reads an answer without values.
type MaskedReader struct {
	mask *Mask
	r    io.Reader
	err  error
	hits int

	// buf has the last bytes that were returned, what may be returned, and what
	// is held back.
	buf   []byte
	sent  int // all before it has been returned
	ready int // all before it may be returned
	first int // a value can begin here
	spans []span
}

// Hits returns how many values have been masked so far.
func (r *MaskedReader) Hits() int { return r.hits }

// Read implements io.Reader.
func (r *MaskedReader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if r.mask.min == 0 {
		return r.r.Read(p)
	}
	for idle := 0; r.sent == r.ready; {
		if r.err != nil {
			return 0, r.err
		}
		if idle == 100 {
			return 0, io.ErrNoProgress
		}
		if r.fetch() == 0 {
			idle++
		}
	}
	n := copy(p, r.buf[r.sent:r.ready])
	for _, s := range r.spans {
		s.start, s.end = max(s.start-r.sent, 0), min(s.end-r.sent, n)
		if s.start < s.end {
			fill(p, s)
		}
	}
	r.sent += n
	return n, nil
}

// fetch reads more, looks for values in it, and returns how many bytes it read.
func (r *MaskedReader) fetch() int {
	if r.buf == nil {
		r.buf = make([]byte, 0, maskBuffer+2*r.mask.long)
	}
	if drop := min(r.sent, r.first); drop > 0 {
		r.buf = r.buf[:copy(r.buf, r.buf[drop:])]
		r.sent -= drop
		r.first -= drop
		spans := r.spans[:0]
		for _, s := range r.spans {
			if s.end > drop {
				spans = append(spans, span{max(s.start-drop, 0), s.end - drop})
			}
		}
		r.spans = spans
	}
	seen := len(r.buf)
	n, err := r.r.Read(r.buf[seen:cap(r.buf)])
	if n < 0 || n > cap(r.buf)-seen {
		n, err = 0, errors.New("read answer: its reader returned an impossible length")
	}
	r.buf, r.err = r.buf[:seen+n], err
	if n > 0 {
		before := len(r.spans)
		found, count := merge(r.mask.find(nil, r.buf, 0, seen))
		if count > 0 {
			r.spans, count = merge(append(r.spans, found...))
			r.hits += max(count-before, 0) // it may join two that were found before
		}
	}
	r.ready, r.first = len(r.buf), len(r.buf)
	if r.err == nil {
		r.first = r.mask.begins(r.buf)
		// Line breaks at the end do not count: events end with some.
		if len(bytes.TrimRight(r.buf[r.first:], "\r\n")) > leak {
			r.ready = max(r.first, r.sent)
		}
	}
	return n
}
