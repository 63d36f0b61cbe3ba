package extract

import (
	"bytes"
	"slices"
	"strings"
)

// idFields are header fields of identifiers, times and addresses. Their digits
// are not card numbers, and their addresses not a leaked list of people.
var idFields = []string{
	"message-id", "in-reply-to", "references", "content-id", "date", "content-type", "dkim-signature", "received",
	"from", "sender", "reply-to", "to", "cc", "bcc", "resent-message-id", "resent-from", "resent-to", "resent-cc", "resent-date", "autocrypt",
}

// Source reads a message as it is sent, byte by byte: each header field, the
// headers of its parts, preambles, epilogues and what stands between parts. It
// does not rely on the MIME structure, which programs read differently; what no
// program shows leaves as well. files are the parts that were read before.
func (w *Walker) Source(raw []byte, files [][]byte) {
	header, body := splitSource(raw)
	for len(header) > 0 {
		var field string
		field, header = nextField(header)
		name, value, ok := strings.Cut(field, ":")
		if !ok {
			name, value = "a malformed line", field
		}
		name = strings.TrimSpace(name)
		p := Place{Where: "the header " + Cut(name, 100), Source: true, IDs: slices.Contains(idFields, strings.ToLower(name))}
		w.Text(p, value)
		if ok && len(name) > minRun { // The attack: the name is the message.
			w.Text(p, name)
		}
	}
	p := Place{Where: "the source of the message", Source: true}
	// Parts without a transfer encoding stand in the body as they are.
	for _, f := range files {
		if len(f) < minRun || binaryBlock(f) < 0 {
			continue
		}
		if i := bytes.Index(body, f); i >= 0 {
			body = slices.Concat(body[:i], []byte("\n"), body[i+len(f):])
		}
	}
	if binaryBlock(body) >= 0 {
		w.visitor.Unread(p, UnknownFormat, "bytes that are neither text nor part of a file")
		w.strings(p, body)
		return
	}
	w.legacy(p, body)
	w.Text(p, withoutDelimiters(raw, body))
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
