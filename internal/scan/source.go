package scan

import (
	"bytes"
	"slices"
	"strings"
)

// idFields are header fields of identifiers and times: their digits make no
// number of a card, and their addresses no list of people.
var idFields = []string{
	"message-id", "in-reply-to", "references", "content-id", "date", "content-type", "dkim-signature", "received",
	"from", "sender", "reply-to", "to", "cc", "bcc", "resent-message-id", "resent-from", "resent-to", "resent-cc", "resent-date", "autocrypt",
}

// source reads a message as it leaves, octet for octet: each header field, the
// headers of its parts, and what stands before, between and behind these. It
// does not rely on the structure: programs read it differently, and what none
// shows leaves all the same. files are the parts that were read already.
func (s *sniffer) source(raw []byte, files []OutgoingFile) {
	header, body := splitSource(raw)
	for len(header) > 0 {
		var field string
		field, header = nextField(header)
		name, value, ok := strings.Cut(field, ":")
		if !ok {
			name, value = "a malformed line", field
		}
		name = strings.TrimSpace(name)
		p := place{where: "the header " + cut(name, 100), source: true, ids: slices.Contains(idFields, strings.ToLower(name))}
		s.prose(p, value)
		if ok && len(name) > minRun { // The attack: the name is the message.
			s.prose(p, name)
		}
	}
	p := place{where: "the source of the message", source: true}
	// Files that stand in it as their octets are have been read as such.
	for _, f := range files {
		if len(f.Data) < minRun || oddBlock(f.Data) < 0 {
			continue
		}
		if i := bytes.Index(body, f.Data); i >= 0 {
			body = slices.Concat(body[:i], []byte("\n"), body[i+len(f.Data):])
		}
	}
	if oddBlock(body) >= 0 {
		s.unread(p, "unknown_format", "octets that are neither text nor part of a file")
		s.strings(p, body)
		return
	}
	s.legacy(p, body)
	s.prose(p, withoutDelimiters(raw, body))
}

func splitSource(raw []byte) (header string, body []byte) {
	for at := 0; at < len(raw); {
		n := bytes.IndexByte(raw[at:], '\n')
		if n < 0 {
			break
		}
		if line := bytes.TrimRight(raw[at:at+n], "\r"); len(line) == 0 {
			return string(raw[:at]), raw[at+n+1:]
		}
		at += n + 1
	}
	return string(raw), nil
}

// nextField returns the first field of a header with its folded lines.
func nextField(header string) (field, rest string) {
	for at := 0; ; {
		n := strings.IndexByte(header[at:], '\n')
		if n < 0 {
			return header, ""
		}
		at += n + 1
		if at == len(header) || header[at] != ' ' && header[at] != '\t' {
			return header[:at], header[at:]
		}
	}
}

// withoutDelimiters returns the body without the delimiters of its parts, in
// which programs put rows of digits.
func withoutDelimiters(raw, body []byte) string {
	text := string(body)
	for at, n := 0, 0; n < 100; n++ {
		i := bytes.IndexByte(raw[at:], '=')
		if i < 0 {
			break
		}
		at += i + 1
		if at < 9 || !strings.EqualFold(string(raw[at-9:at]), "boundary=") {
			n--
			continue
		}
		value := string(raw[at:min(len(raw), at+202)])
		if quoted, ok := strings.CutPrefix(value, `"`); ok {
			value, _, _ = strings.Cut(quoted, `"`)
		} else if j := strings.IndexAny(value, " \t\r\n;"); j >= 0 {
			value = value[:j]
		}
		// Nothing else is left out. The attack: a token for a delimiter.
		if len(value) >= 8 && strings.Trim(value, "=_-.0123456789") == "" {
			text = strings.ReplaceAll(text, value, "")
		}
	}
	return text
}
