package gmail

import (
	"bytes"
	"fmt"
	"maps"
	"mime"
	"regexp"
	"slices"
	"strings"
	"sync"

	"postern/internal/mail"
)

// Gmail has no envelope: who receives a message is what its To, Cc and Bcc fields say.
// So what was approved for some recipients must name exactly these, in a form that no
// two programs read differently.
//
// The attack: a message that was approved for one recipient, with another in its To
// field, in a comment, a group, a quoted name or a second field.

// handOver returns what is given to Gmail for e: its bytes, and before them a Bcc field
// for the recipients that they do not name, which Gmail takes off. The error is a
// [mail.FieldError].
func handOver(e mail.Envelope) ([]byte, error) {
	header, _, ok := bytes.Cut(e.Raw, []byte("\r\n\r\n"))
	if !ok {
		return nil, fieldError("header", "does not end")
	}
	fields, err := fieldsOf(string(header))
	if err != nil {
		return nil, err
	}
	named := map[string]bool{}
	seen := map[string]bool{}
	for _, f := range fields {
		name := strings.ToLower(f.name)
		switch {
		case name == "bcc", strings.HasPrefix(name, "resent-"), name == "apparently-to":
			return nil, fieldError(f.name+" header", "cannot be sent through Gmail, which would also send the message to the recipients that it names")
		case name == "to", name == "cc", name == "from", name == "sender":
			if seen[name] {
				return nil, fieldError(f.name+" header", "appears more than once")
			}
			seen[name] = true
			list, err := strictList(f.name, f.value)
			if err != nil {
				return nil, err
			}
			if name == "from" || name == "sender" {
				if len(list) != 1 || !strings.EqualFold(list[0], e.From) {
					return nil, fieldError(f.name+" header", "must be <%s> alone: Gmail sends for its own account", e.From)
				}
				continue
			}
			for _, a := range list {
				named[fold(a)] = true
			}
		}
	}
	if !seen["from"] {
		return nil, fieldError("From header", "is missing")
	}
	var hidden []string
	for _, to := range e.To {
		if !named[fold(to)] {
			if !plainAddress().MatchString(to) {
				return nil, fieldError("bcc", "%q cannot be written in the header, which Gmail needs", mail.Printable(to, 100))
			}
			hidden = append(hidden, to)
		}
	}
	for _, a := range slices.Sorted(maps.Keys(named)) {
		if !slices.ContainsFunc(e.To, func(to string) bool { return fold(to) == a }) {
			return nil, fieldError("To header", "names %s, which is not a recipient: Gmail sends to everybody whom the header names", mail.Printable(a, 200))
		}
	}
	if len(hidden) == 0 {
		return e.Raw, nil
	}
	out := []byte("Bcc: " + strings.Join(hidden, ",\r\n ") + "\r\n")
	return append(out, e.Raw...), nil
}

// fold returns an address with its domain in lower case: the local part may be
// anybody else's in another case.
func fold(a string) string {
	at := strings.LastIndexByte(a, '@') + 1
	return a[:at] + strings.ToLower(a[at:])
}

func fieldError(field, format string, args ...any) error {
	return &mail.FieldError{Field: field, Reason: fmt.Sprintf(format, args...)}
}

// A headerField is a field of a header with its value unfolded.
type headerField struct{ name, value string }

// fieldsOf splits a header. It refuses lines that are no field: a program may take them
// for the end of the header, or for a field all the same.
func fieldsOf(header string) (list []headerField, err error) {
	for line := range strings.SplitSeq(header, "\r\n") {
		if strings.ContainsAny(line, "\r\n\x00") {
			return nil, fieldError("header", "has a line that does not end in CR LF")
		}
		if line != "" && (line[0] == ' ' || line[0] == '\t') {
			if len(list) == 0 || strings.Trim(line, " \t") == "" {
				return nil, fieldError("header", "has a continuation line without a field")
			}
			list[len(list)-1].value += line
			continue
		}
		name, value, ok := strings.Cut(line, ":")
		if !ok || name == "" || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return nil, fieldError("header", "has the line %.60q, which is not a field", mail.Printable(line, 60))
		}
		list = append(list, headerField{name, value})
	}
	return list, nil
}

var (
	// plainAddress is an address that needs no quotes and no brackets.
	plainAddress = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`^` + addrPattern + `$`)
	})
	// strictMailbox is one mailbox: an address, or a name and an address in angle
	// brackets. There are no comments, groups, routes or backslashes.
	strictMailbox = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`^(?:(` + addrPattern + `)|(?:("[^"\\<>@;:\x00-\x1f\x7f]*"|[^"\\<>@;:,()\[\]\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*<(` + addrPattern + `)>))$`)
	})
)

const addrPattern = `[^\s"\\<>@;:,()\[\]\x00-\x1f\x7f]+@[^\s"\\<>@;:,()\[\]\x00-\x1f\x7f]+`

// strictList returns the addresses of a field's value, which every program reads in the
// same way.
func strictList(field, value string) (list []string, err error) {
	v := strings.Trim(value, " \t")
	if v == "" || strings.EqualFold(v, "undisclosed-recipients:;") || strings.EqualFold(v, "undisclosed-recipients: ;") {
		return nil, nil
	}
	for _, one := range splitCommas(v) {
		one = strings.Trim(one, " \t")
		m := strictMailbox().FindStringSubmatch(one)
		if m == nil {
			return nil, fieldError(field+" header", "has %q, which not every program reads in the same way, so Gmail might send to somebody else: write name <address>, without comments, groups and backslashes", mail.Printable(one, 100))
		}
		name, err := new(mime.WordDecoder).DecodeHeader(m[2])
		if err != nil || strings.ContainsAny(name, "<>@") {
			// The attack: an address within an encoded word.
			return nil, fieldError(field+" header", "has the name %q, which looks like another address", mail.Printable(m[2], 100))
		}
		list = append(list, m[1]+m[3])
	}
	return list, nil
}

// splitCommas splits at commas that are not within quotes.
func splitCommas(v string) (list []string) {
	start, quoted := 0, false
	for i := range len(v) {
		switch {
		case v[i] == '"':
			quoted = !quoted
		case v[i] == ',' && !quoted:
			list = append(list, v[start:i])
			start = i + 1
		}
	}
	return append(list, v[start:])
}
