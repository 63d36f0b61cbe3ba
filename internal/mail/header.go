package mail

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/html/charset"

	"postern/internal/extract"
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

func (f field) is(name string) bool { return strings.EqualFold(f.name, name) }

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
	for pos := 0; ; {
		if pos >= len(raw) {
			return fields, nil, problems, nil
		}
		if pos > maxHeaderBytes || len(fields) > maxHeaderFields {
			return nil, nil, nil, fmt.Errorf("%w: the header has more than %d octets or %d fields", ErrNotMessage, maxHeaderBytes, maxHeaderFields)
		}
		end, next := len(raw), len(raw)
		if i := bytes.IndexByte(raw[pos:], '\n'); i >= 0 {
			end, next = pos+i, pos+i+1
			if i > 0 && raw[end-1] == '\r' {
				end--
			} else {
				problem("a header line ends in LF without CR")
			}
		}
		line := raw[pos:end]
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
		colon := bytes.IndexByte(line, ':')
		name := ""
		if colon > 0 {
			name = string(bytes.TrimRight(line[:colon], " \t"))
			if len(name) != colon {
				problem("a header field has white space before its colon")
			}
		}
		if name == "" || strings.IndexFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f }) >= 0 {
			if len(fields) == 0 && bytes.HasPrefix(line, []byte("From ")) {
				problem("the message begins with an mbox line")
				pos = next
				continue
			}
			problem("the header ends without an empty line")
			return fields, raw[pos:], problems, nil
		}
		fields = append(fields, field{name: name, raw: raw[pos:next]})
		pos = next
	}
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

var wordDecoder = &mime.WordDecoder{CharsetReader: func(label string, r io.Reader) (io.Reader, error) {
	e, name := charset.Lookup(label)
	if e == nil || name == "replacement" {
		return nil, fmt.Errorf("unknown charset %q", label)
	}
	return e.NewDecoder().Reader(r), nil
}}

// decodeWords decodes RFC 2047 words; what cannot be decoded stays as it is.
func decodeWords(s string) string {
	d, err := wordDecoder.DecodeHeader(s)
	if err != nil {
		d = s
	}
	if !utf8.ValidString(d) {
		d = strings.ToValidUTF8(d, "\ufffd")
	}
	return d
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
		case r == '\t' || r == '\n' && multiline, !extract.Hidden(before, r):
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, "\\u{%x}", r)
			r = 0 // nothing joins it
		}
		before = r
	}
	return b.String()
}
