package statement

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"slices"
	"strings"
)

const (
	maxMessage = 80 << 20  // octets of a message
	maxHeader  = 256 << 10 // octets of its header
)

// A message is what is signed: its header field by field, and its body.
type message struct {
	fields []headerField
	body   []byte
}

type headerField struct {
	name string
	raw  string // with its name, folded as it stands, without the last line end
}

// read splits a message. Lines may end in LF alone: files are kept so.
func read(raw []byte) (*message, error) {
	if len(raw) > maxMessage {
		return nil, errors.New("the message is too large")
	}
	m := &message{}
	// The line with which an mbox begins a message is not of the message.
	if bytes.HasPrefix(raw, []byte("From ")) {
		if i := bytes.IndexByte(raw, '\n'); i >= 0 {
			raw = raw[i+1:]
		}
	}
	for pos := 0; ; {
		if pos > maxHeader {
			return nil, errors.New("the header is too large")
		}
		if pos >= len(raw) {
			return m, nil
		}
		end, next := len(raw), len(raw)
		if i := bytes.IndexByte(raw[pos:], '\n'); i >= 0 {
			end, next = pos+i, pos+i+1
		}
		line := strings.TrimSuffix(string(raw[pos:end]), "\r")
		pos = next
		switch {
		case line == "":
			m.body = raw[pos:]
			return m, nil
		case strings.ContainsAny(line, "\r\x00"):
			return nil, errors.New("the header holds a bare CR or a NUL")
		case line[0] == ' ' || line[0] == '\t':
			if len(m.fields) == 0 {
				return nil, errors.New("the header begins with a continuation line")
			}
			m.fields[len(m.fields)-1].raw += "\r\n" + line
			continue
		}
		name, _, ok := strings.Cut(line, ":")
		name = strings.TrimRight(name, " \t")
		if !ok || name == "" || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return nil, errors.New("a line of the header is no field")
		}
		if len(m.fields) >= 1000 {
			return nil, errors.New("the header has more than 1000 fields")
		}
		m.fields = append(m.fields, headerField{name, line})
	}
}

func (m *message) count(name string) (n int) {
	for _, f := range m.fields {
		if strings.EqualFold(f.name, name) {
			n++
		}
	}
	return n
}

func (m *message) last(name string) string {
	for _, f := range slices.Backward(m.fields) {
		if strings.EqualFold(f.name, name) {
			return f.raw
		}
	}
	return ""
}

func (m *message) value(name string) string {
	_, v, _ := strings.Cut(m.last(name), ":")
	return strings.TrimSpace(unfold(v))
}

func unfold(s string) string { return strings.NewReplacer("\r", "", "\n", "").Replace(s) }

// digest returns the SHA-256 of the named fields, each time the lowest that
// was not taken before, and of the statement's own field up to its signature:
// RFC 6376 3.7 with the relaxed form of 3.4.2.
func (m *message) digest(names []string, own string) []byte {
	h := sha256.New()
	taken := map[string]int{}
	for _, name := range names {
		skip := taken[name]
		taken[name]++
		for _, f := range slices.Backward(m.fields) {
			if !strings.EqualFold(f.name, name) {
				continue
			}
			if skip > 0 {
				skip--
				continue
			}
			h.Write([]byte(relaxedField(f.raw) + "\r\n"))
			break
		}
	}
	h.Write([]byte(relaxedField(own)))
	return h.Sum(nil)
}

// relaxedField returns a field as RFC 6376 3.4.2 has it, without a line end.
func relaxedField(raw string) string {
	name, v, _ := strings.Cut(raw, ":")
	return strings.ToLower(strings.TrimRight(name, " \t")) + ":" + string(bytes.Trim(squeeze([]byte(unfold(v))), " "))
}

// squeeze makes one space of each run of spaces and tabs.
func squeeze(b []byte) []byte {
	out := make([]byte, 0, len(b))
	for i, c := range b {
		if c != ' ' && c != '\t' {
			out = append(out, c)
		} else if i == 0 || b[i-1] != ' ' && b[i-1] != '\t' {
			out = append(out, ' ')
		}
	}
	return out
}

// bodyHash returns the SHA-256 of the body as RFC 6376 3.4.4 has it, in base64.
func (m *message) bodyHash() string {
	h := sha256.New()
	empty := 0 // lines that count only if one that is not empty follows
	for rest := m.body; len(rest) > 0; {
		line := rest
		if i := bytes.IndexByte(rest, '\n'); i >= 0 {
			line, rest = rest[:i], rest[i+1:]
		} else {
			rest = nil
		}
		line = bytes.TrimRight(squeeze(bytes.TrimSuffix(line, []byte("\r"))), " ")
		if len(line) == 0 {
			empty++
			continue
		}
		for ; empty > 0; empty-- {
			h.Write([]byte("\r\n"))
		}
		h.Write(line)
		h.Write([]byte("\r\n"))
	}
	return base64.StdEncoding.EncodeToString(h.Sum(nil))
}
