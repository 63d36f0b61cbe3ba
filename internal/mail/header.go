package mail

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// A Field is one header field of a message that was read.
type Field struct {
	Name  string // as it was written
	Value string // unfolded and decoded; control characters made visible
}

// field is a header field as it stands in the bytes.
type field struct {
	name  string
	value string // unfolded, not decoded
	raw   []byte // with its line ends
}

// is compares the length, too: folded, the long s of "ſubject" is an s.
func (f field) is(name string) bool {
	return len(f.name) == len(name) && strings.EqualFold(f.name, name)
}

// once lists the fields that RFC 5322 3.6 and RFC 2045 allow at most once.
// A second one is how a reader and a mail program are made to see two
// different messages: some take the first and some the last.
var once = []string{
	"From", "Sender", "Reply-To", "To", "Cc", "Bcc", "Subject", "Date", "Message-ID", "In-Reply-To", "References",
	"MIME-Version", "Content-Type", "Content-Transfer-Encoding", "Content-Disposition", "Content-ID",
}

// ErrNotMessage is returned for bytes that cannot be read as a message at all.
var ErrNotMessage = errors.New("not a mail message")

// splitHeader splits a message or a part of one. Each oddity of the syntax
// that programs disagree about is named in problems.
func splitHeader(raw []byte) (fields []field, body []byte, problems []string, err error) {
	problem := func(s string) {
		if slices.Contains(problems, s) {
			return
		}
		problems = append(problems, s)
	}
	end := headerEnd{raw: raw}
	for pos := 0; ; {
		if pos >= len(raw) {
			return fields, nil, problems, nil
		}
		if pos > maxHeaderBytes || len(fields) > maxHeaderFields {
			return nil, nil, nil, fmt.Errorf("%w: the header has more than %d octets or %d fields", ErrNotMessage, maxHeaderBytes, maxHeaderFields)
		}
		line, next := cutLine(raw, pos)
		if next > pos && raw[next-1] == '\n' && next-pos == len(line)+1 {
			problem("a header line ends in LF without CR")
		}
		switch {
		case len(line) == 0:
			return fields, raw[next:], problems, nil
		case bytes.ContainsAny(line, "\r\x00"):
			problem("the header contains a bare CR or a NUL")
		}
		if line[0] == ' ' || line[0] == '\t' {
			if len(fields) == 0 {
				problem("the header begins with a continuation line")
				return fields, raw[pos:], problems, nil
			}
			if len(bytes.TrimLeft(line, " \t")) == 0 {
				// Some programs take this for the end of the header.
				problem("the header has a line of nothing but white space")
			}
			f := &fields[len(fields)-1]
			f.raw = raw[pos-len(f.raw) : next]
			pos = next
			continue
		}
		name, proper := fieldName(line)
		if name != "" && len(name) != bytes.IndexByte(line, ':') {
			problem("a header field has white space before its colon")
		}
		if !proper {
			if len(fields) == 0 && bytes.HasPrefix(line, []byte("From ")) {
				problem("the message begins with an mbox line")
				pos = next
				continue
			}
			if !end.goesOn(pos, name) {
				problem("the header ends without an empty line")
				return fields, raw[pos:], problems, nil
			}
			// Most programs read on to the empty line, others take this line for the
			// first of the text: fields that only some see stay fields here.
			problem("a line of the header is no field; some mail programs show it and what follows as text: " + quote(string(line)))
			if name == "" {
				for pos = next; pos < len(raw) && (raw[pos] == ' ' || raw[pos] == '\t'); { // its continuation is no field's
					_, pos = cutLine(raw, pos)
				}
				continue
			}
		}
		fields = append(fields, field{name: name, raw: raw[pos:next]})
		pos = next
	}
}

// cutLine returns the line at pos without its end, and where the next one begins.
func cutLine(raw []byte, pos int) (line []byte, next int) {
	i := bytes.IndexByte(raw[pos:], '\n')
	if i < 0 {
		return raw[pos:], len(raw)
	}
	return bytes.TrimSuffix(raw[pos:pos+i], []byte("\r")), pos + i + 1
}

// fieldName returns the name of the field in a line, without white space before its
// colon, or nothing if there is none. Proper says that it is as RFC 5322 3.6.8 says.
func fieldName(line []byte) (name string, proper bool) {
	colon := bytes.IndexByte(line, ':')
	if colon <= 0 {
		return "", false
	}
	name = string(bytes.TrimRight(line[:colon], " \t"))
	return name, name != "" && strings.IndexFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f }) < 0
}

// A headerEnd finds out, once, how far the header of raw goes.
type headerEnd struct {
	raw   []byte
	known bool
	empty int // where the empty line begins, or -1
	last  int // where the last proper field before it begins, or -1
}

// goesOn reports whether the header goes on at pos, where a line is that is no
// proper field. It does if it has an empty line to end it and the line has the name of
// a field in letters that are not ASCII, or a proper field follows. Else it is text:
// "Dear Ann: …".
func (h *headerEnd) goesOn(pos int, name string) bool {
	if !h.known {
		h.known, h.empty, h.last = true, -1, -1
		for at := pos; at < min(len(h.raw), maxHeaderBytes); {
			line, next := cutLine(h.raw, at)
			if len(line) == 0 {
				h.empty = at
				break
			}
			if _, proper := fieldName(line); proper && line[0] != ' ' && line[0] != '\t' {
				h.last = at
			}
			at = next
		}
	}
	return h.empty >= 0 && (h.last > pos || name != "" && !strings.ContainsAny(name, " \t"))
}

// unfold fills in the values of fields: done once each, since appending line
// by line would be quadratic in a header of ten thousand continuation lines.
func unfold(fields []field) {
	for i := range fields {
		f := &fields[i]
		v := f.raw[bytes.IndexByte(f.raw, ':')+1:]
		v = bytes.ReplaceAll(v, []byte("\r\n"), nil)
		v = bytes.ReplaceAll(v, []byte("\n"), nil)
		f.value = strings.Trim(string(v), " \t")
	}
}

func first(fields []field, name string) string {
	for _, f := range fields {
		if f.is(name) {
			return f.value
		}
	}
	return ""
}

func count(fields []field, name string) int {
	n := 0
	for _, f := range fields {
		if f.is(name) {
			n++
		}
	}
	return n
}

// shown returns one line of text with every unseen character made visible, so
// that neither a terminal nor a page can be steered by it.
func shown(s string) string {
	if controls(s) == "" && utf8.ValidString(s) {
		return s
	}
	return visible(s, false)
}

// Printable returns s as one line of at most most octets that neither a
// terminal nor a page can be steered by. For what a peer says.
func Printable(s string, most int) string {
	if s = shown(s); len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

// PrintableLines returns s with each line as [Printable] gives it, of at most
// most octets, and the ends of the lines as they were.
func PrintableLines(s string, most int) string {
	lines := strings.Split(strings.ReplaceAll(s, "\r\n", "\n"), "\n")
	for i, l := range lines {
		lines[i] = Printable(l, most)
	}
	return strings.Join(lines, "\n")
}

func visible(s string, multiline bool) string {
	var b strings.Builder
	var before rune
	for _, r := range strings.ToValidUTF8(s, "\ufffd") {
		switch {
		case r == '\t' || r == '\n' && multiline, !hiddenAfter(before, r):
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, "\\u{%x}", r)
		}
		before = r
	}
	return b.String()
}
