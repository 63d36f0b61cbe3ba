package mailauth

import (
	"bytes"
	"crypto/sha256"
	"hash"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// A header holds a message's header fields in order, and its body.
type header struct {
	fields []headerField
	body   []byte
}

// A headerField is one field as it stands in the message.
type headerField struct {
	name string // lower case
	raw  []byte // the whole field, with its line ends
}

// value returns the value of f without surrounding white space.
func (f headerField) value() string {
	return strings.TrimSpace(string(f.raw[bytes.IndexByte(f.raw, ':')+1:]))
}

// splitMessage splits a message whose lines end in CR LF. If the header is malformed or
// too long, it returns no fields and no body, so that nothing can be authenticated.
func splitMessage(raw []byte) (h header) {
	for pos := 0; pos < len(raw); {
		next := len(raw)
		if i := bytes.Index(raw[pos:], []byte("\r\n")); i >= 0 {
			next = pos + i + 2
		}
		line := raw[pos:next]
		if len(bytes.TrimRight(line, "\r\n")) == 0 {
			h.body = raw[next:]
			return h
		}
		if n := len(h.fields); (line[0] == ' ' || line[0] == '\t') && n > 0 {
			f := &h.fields[n-1]
			f.raw = raw[pos-len(f.raw) : next]
		} else if colon := bytes.IndexByte(line, ':'); colon > 0 && n < maxFields && pos < maxHeader {
			h.fields = append(h.fields, headerField{name: strings.ToLower(strings.TrimRight(string(line[:colon]), " \t")), raw: line})
		} else {
			// The attack: verifier and mail program disagree on where the header ends.
			return header{}
		}
		pos = next
	}
	return h
}

// relaxedField canonicalizes a header field, RFC 6376 section 3.4.2.
func relaxedField(raw []byte) []byte {
	name, value, ok := bytes.Cut(raw, []byte(":"))
	if !ok {
		return raw
	}
	out := make([]byte, 0, len(raw))
	out = append(out, bytes.ToLower(bytes.TrimRight(name, " \t"))...)
	out = append(out, ':')
	space, begun := false, false
	for _, c := range value {
		switch c {
		case ' ', '\t', '\r', '\n':
			space = true
		default:
			if space && begun {
				out = append(out, ' ')
			}
			space, begun = false, true
			out = append(out, c)
		}
	}
	return append(out, '\r', '\n')
}

func canonicalField(raw []byte, relaxed bool) []byte {
	if relaxed {
		return relaxedField(raw)
	}
	return raw
}

// withoutSignature returns a signature field with an empty b= and without its line end:
// this is the form that was signed (RFC 6376, section 3.7).
func withoutSignature(raw []byte, relaxed bool) []byte {
	colon := bytes.IndexByte(raw, ':') + 1
	var out []byte
	out = append(out, raw[:colon]...)
	for i, tag := range bytes.Split(raw[colon:], []byte(";")) {
		if i > 0 {
			out = append(out, ';')
		}
		if eq := bytes.IndexByte(tag, '='); eq >= 0 && string(bytes.TrimSpace(tag[:eq])) == "b" {
			out = append(out, tag[:eq+1]...)
			continue
		}
		out = append(out, tag...)
	}
	return bytes.TrimRight(canonicalField(out, relaxed), "\r\n")
}

// A counter hashes the first limit octets written to it and counts all.
type counter struct {
	hash  hash.Hash
	limit int64 // octets to hash; negative for all
	total int64
}

// write adds p to the hash, up to the limit.
func (c *counter) write(p []byte) {
	if room := c.limit - c.total; c.limit < 0 || int64(len(p)) <= room {
		c.hash.Write(p)
	} else if room > 0 {
		c.hash.Write(p[:room])
	}
	c.total += int64(len(p))
}

var crlf = []byte("\r\n")

// hashBody returns the SHA-256 of the first limit octets of the canonical body,
// RFC 6376 section 3.4, and how many octets it has.
func hashBody(body []byte, relaxed bool, limit int64) (sum []byte, total int64) {
	c := &counter{hash: sha256.New(), limit: limit}
	empty := 0 // pending empty lines: those at the end of the body are not hashed
	var canonical []byte
	for len(body) > 0 {
		line, rest, _ := bytes.Cut(body, crlf)
		body = rest
		if relaxed {
			canonical = relaxedLine(canonical[:0], line)
			line = canonical
		}
		if len(line) == 0 {
			empty++
			continue
		}
		for ; empty > 0; empty-- {
			c.write(crlf)
		}
		c.write(line)
		c.write(crlf)
	}
	if c.total == 0 && !relaxed {
		c.write(crlf) // section 3.4.3: simple hashes an empty body as one empty line
	}
	return c.hash.Sum(nil), c.total
}

// relaxedLine appends line to out. It replaces each run of white space by one space and
// removes trailing white space.
func relaxedLine(out, line []byte) []byte {
	for len(line) > 0 {
		i := bytes.IndexAny(line, " \t")
		if i < 0 {
			return append(out, line...)
		}
		out = append(out, line[:i]...)
		line = bytes.TrimLeft(line[i:], " \t")
		if len(line) > 0 {
			out = append(out, ' ')
		}
	}
	return out
}

// bodyHashes hashes a body once for each canonicalization and length that signatures
// use. It is safe for concurrent use.
type bodyHashes struct {
	body []byte

	mu    sync.Mutex // guards known
	known map[bodyKind]bodySum
}

type bodyKind struct {
	relaxed bool
	limit   int64
}

type bodySum struct {
	sum   []byte
	total int64
}

// get returns the hash and the length of the canonical body. ok is false if more than
// [maxBodyHashes] different hashes are requested.
func (b *bodyHashes) get(relaxed bool, limit int64) (sum []byte, total int64, ok bool) {
	b.mu.Lock() // held while hashing: other signatures mostly need the same hash
	defer b.mu.Unlock()
	k := bodyKind{relaxed, limit}
	s, known := b.known[k]
	if !known {
		if len(b.known) == maxBodyHashes {
			return nil, 0, false
		}
		s.sum, s.total = hashBody(b.body, relaxed, limit)
		if b.known == nil {
			b.known = map[bodyKind]bodySum{}
		}
		b.known[k] = s
	}
	return s.sum, s.total, true
}

// printable returns s as one line of printable text of at most most bytes. The attack:
// control characters from DNS or the message in a header field or on a terminal.
func printable(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
	for len(s) > most {
		_, n := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-n]
	}
	return s
}
