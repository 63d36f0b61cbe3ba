package mail

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// entity accounts for raw[start:end], a message or a part: its header, the empty
// line, its body. Part is empty for the message, or like "2.1".
func (c *accountant) entity(start, end, depth int, part string) error {
	// The line end before a delimiter belongs to the delimiter. It ends the header
	// of a part that has no body.
	fields, body, problems, err := splitHeader(c.raw[start:end])
	where := in(part, "header")
	if err != nil {
		return fieldErr(where, "%v", err)
	}
	if len(problems) > 0 {
		return fieldErr(where, "%s", problems[0])
	}
	size := 0
	for _, f := range fields {
		size += len(f.raw)
	}
	if size > maxOutHeader && !c.inner {
		return fieldErr(where, "has %d octets, more than %d", size, maxOutHeader)
	}
	// The attack: fields without end in each of hundreds of parts, which are shown and
	// which nobody reads.
	if c.headers += size; c.headers > maxOutHeaders && !c.inner {
		return fieldErr(where, "has, with those of the other parts, more than %d octets", maxOutHeaders)
	}
	unfold(fields)
	counted, shownParts := c.Unshown, len(c.Parts)
	if err := c.header(fields, part); err != nil {
		return err
	}
	from := end - len(body)
	if body == nil {
		from = end
	}
	bodiless := from == end && from-start == size && depth > 0 && (size == 0 || c.raw[end-1] == '\n')
	if from-start-size != 2 && !bodiless {
		return fieldErr(where, "is not ended by an empty line")
	}
	c.use(from, Syntax)
	s, err := contentType(fields)
	if err != nil {
		return fieldErr(in(part, "Content-Type header"), "is malformed: %v", err)
	}
	encoding := strings.ToLower(first(fields, "Content-Transfer-Encoding"))
	main, sub, _ := strings.Cut(s.value, "/")
	if main == "multipart" || main == "message" {
		if encoding == "base64" || encoding == "quoted-printable" {
			return fieldErr(in(part, "Content-Transfer-Encoding header"), "must be 7bit or 8bit for %s", quote(s.value))
		}
	}
	if s.params["boundary"] != "" && main != "multipart" {
		// The attack: some programs go by the boundary, whatever the type is.
		return fieldErr(in(part, "Content-Type header"), "has a boundary, and %s is not a multipart", quote(s.value))
	}
	switch {
	case main == "multipart":
		return c.multipart(s, from, end, depth, part)
	case main == "message" && (sub == "partial" || sub == "external-body"):
		// The recipient's program assembles it from content that no reviewer sees.
		return fieldErr(in(part, "Content-Type header"), "%s is not allowed in a message that is sent from here", quote(s.value))
	}
	shownText, err := c.leaf(fields, s, encoding, from, end, part)
	if err == nil && depth > 0 && shownText == "" && c.Unshown == counted && len(c.Parts) == shownParts {
		// A sequence of many empty parts could encode data.
		c.count(size+2, "empty parts")
	}
	return err
}

func contentType(fields []field) (structured, error) {
	v := first(fields, "Content-Type")
	if v == "" {
		return structured{value: "text/plain"}, nil
	}
	s, err := parseStructured(v)
	if err == nil && (strings.Count(s.value, "/") != 1 || strings.Trim(s.value, "/") != s.value) {
		err = fmt.Errorf("%s is not a media type", quote(s.value))
	}
	return s, err
}

// leaf accounts for the body of a part that has no parts, and returns what of
// it is shown or listed.
func (c *accountant) leaf(fields []field, s structured, encoding string, from, end int, part string) (string, error) {
	body := c.raw[from:end]
	switch encoding {
	case "base64":
		if err := c.base64(body); err != nil {
			return "", fieldErr(in(part, "body"), "%v", err)
		}
	case "quoted-printable":
		if err := c.quotedPrintable(body); err != nil {
			return "", fieldErr(in(part, "body"), "%v", err)
		}
	}
	files := len(c.p.m.Attachments)
	before := len(c.p.m.Text) + len(c.p.m.HTML)
	c.p.m.Warnings = nil
	c.p.leaf(fields, s.value, s.params, body)
	if len(c.p.m.Attachments) > files {
		if d, err := parseStructured(first(fields, "Content-Disposition")); err == nil && s.params["name"] != "" && d.params["filename"] != "" && decodeWords(s.params["name"]) != decodeWords(d.params["filename"]) {
			c.Parts = append(c.Parts, Field{Name: in(part, "other file name"), Value: shown(decodeWords(s.params["name"]))})
		}
		c.use(end, Listed)
		return "file", nil
	}
	// Decoded once more, strictly: what is not in its charset is read in as many
	// ways as there are programs.
	text, err := decodeCharset(cmp.Or(s.params["charset"], "utf-8"), c.p.decode(encoding, body))
	if err != nil {
		return "", fieldErr(in(part, "body"), "%v", err)
	}
	for _, w := range c.p.m.Warnings {
		if !strings.Contains(w, "NUL") {
			return "", fieldErr(in(part, "body"), "%s", w)
		}
	}
	if text = plainLines(text); !strings.HasSuffix(c.p.m.Text, text) && !strings.HasSuffix(c.p.m.HTML, text) {
		// The attack: a charset that is read in one way where a message is checked, and in
		// another where it is shown.
		return "", fieldErr(in(part, "body"), "is not shown as the charset %s says; write utf-8", quote(s.params["charset"]))
	}
	c.use(end, Shown)
	if len(c.p.m.Text)+len(c.p.m.HTML) == before || len(bytes.TrimSpace(body)) == 0 {
		return "", nil
	}
	return "text", nil
}

// base64 refuses what is not base64 from its beginning to its end. The attack:
// octets after the padding, or between the lines, which one program leaves out
// and another decodes.
func (c *accountant) base64(body []byte) error {
	lines := bytes.Split(bytes.TrimRight(body, "\r\n"), []byte("\r\n"))
	c.count(len(body)-len(bytes.TrimRight(body, "\r\n"))-6, "empty lines")
	for i, l := range lines {
		if i < len(lines)-1 && len(l) != len(lines[0]) {
			c.count(1, "lines of uneven length")
		}
	}
	all := bytes.Join(lines, nil)
	out := make([]byte, base64.StdEncoding.DecodedLen(len(all)))
	if _, err := base64.StdEncoding.Strict().Decode(out, all); err != nil || bytes.ContainsAny(all, "\r\n") {
		return errors.New("is not proper base64: only its letters, in whole groups of four, and nothing after its end")
	}
	return nil
}

// quotedPrintable refuses what RFC 2045 6.7 does not let be written. Spaces at
// the end of a line, and what is spelled now in one way and now in another, are counted.
func (c *accountant) quotedPrintable(body []byte) error {
	var digits [2]int           // of hexadecimal, in small letters and in capitals
	var plain, encoded [128]int // how often a mark stands for itself and encoded
	for line := range bytes.SplitSeq(body, []byte("\r\n")) {
		trimmed := bytes.TrimRight(line, " \t")
		c.count(len(line)-len(trimmed), "spaces at the end of lines")
		if len(trimmed) < len(line) && bytes.HasSuffix(trimmed, []byte("=")) {
			return errors.New("is not proper quoted-printable: a = at the end of a line has spaces after it")
		}
		for i := 0; i < len(trimmed); i++ {
			switch b := trimmed[i]; {
			case b >= 0x80 || b < ' ' && b != '\t':
				return fmt.Errorf("is not proper quoted-printable: it has the octet %#02x, which must be encoded", b)
			case b == '=' && i == len(trimmed)-1: // it goes on on the next line
				if i < minBroken {
					c.count(1, "lines that are broken early")
				}
			case b != '=':
				plain[b]++
			case i+2 >= len(trimmed):
				return errors.New("is not proper quoted-printable: two hexadecimal digits must follow a =")
			default:
				x, err := strconv.ParseUint(string(trimmed[i+1:i+3]), 16, 8)
				if err != nil {
					return errors.New("is not proper quoted-printable: two hexadecimal digits must follow a =")
				}
				if i > 0 && (x >= 'a' && x <= 'z' || x >= 'A' && x <= 'Z' || x >= '0' && x <= '9') {
					c.count(1, "letters that need not be encoded")
				}
				if x < 0x80 && i > 0 && i+3 < len(trimmed) { // programs encode what is at the end of a line
					encoded[x]++
				}
				for _, d := range trimmed[i+1 : i+3] {
					switch {
					case d >= 'a':
						digits[0]++
					case d >= 'A':
						digits[1]++
					}
				}
				i += 2
			}
		}
	}
	c.count(min(digits[0], digits[1]), "digits in small letters and in capitals")
	for x := range plain {
		if x > ' ' && !isAlnum(byte(x)) {
			c.count(min(plain[x], encoded[x]), "marks that are encoded in one place and not in another")
		}
	}
	return nil
}

func isAlnum(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9'
}

// minBroken is how long a line is that is broken without being at its end. Programs
// break after 70 octets and more, or at a word before that.
const minBroken = 45

// maxMultiparts bounds the multiparts of a message: each of its lines is compared
// with each boundary.
const maxMultiparts = 50

// preambles are the sentences that programs write before the first part.
var preambles = []string{
	"This is a multi-part message in MIME format.",
	"This is a multipart message in MIME format.",
	"This is a MIME-encapsulated message",
	"This is a MIME-encapsulated message.",
	"This is a multi-part message in MIME format",
	"This is a cryptographically signed message in MIME format.",
	"This is an OpenPGP/MIME signed message (RFC 4880 and 3156)",
	"This is an OpenPGP/MIME encrypted message (RFC 4880 and 3156)",
	"This is an S/MIME signed message",
	"This message is in MIME format.",
}

// multipart accounts for a body of parts.
func (c *accountant) multipart(s structured, from, end, depth int, part string) error {
	boundary := s.params["boundary"]
	where := in(part, "multipart")
	switch {
	case depth >= maxDepth:
		return fieldErr(where, "is more than %d levels deep", maxDepth)
	case boundary == "" || len(boundary) > 70 || strings.Trim(boundary, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz'()+_,-./:=? ") != "" || strings.HasSuffix(boundary, " "):
		return fieldErr(where, "needs a boundary of 1 to 70 of the characters that RFC 2046 allows")
	}
	if c.boundaries = append(c.boundaries, boundary); len(c.boundaries) > maxMultiparts {
		return fieldErr(where, "is one of more than %d", maxMultiparts)
	}
	delim := []byte("--" + boundary)
	n, start := 0, -1 // of the part
	for pos := from; pos < end; {
		next := end
		if i := bytes.IndexByte(c.raw[pos:end], '\n'); i >= 0 {
			next = pos + i + 1
		}
		rest, ok := bytes.CutPrefix(c.raw[pos:next], delim)
		if !ok {
			pos = next
			continue
		}
		rest = bytes.TrimSuffix(rest, []byte("\r\n"))
		last := string(rest) == "--"
		if len(rest) > 0 && !last || start < 0 && last {
			// The attack: a line that some programs take for a delimiter.
			return fieldErr(where, "has a line that begins with its boundary and is no delimiter, or ends before it begins")
		}
		c.delimiters[pos] = true
		if start < 0 {
			c.preamble(from, pos)
		} else {
			n++
			if err := c.part(start, pos, depth, part, n); err != nil {
				return err
			}
		}
		c.use(next, Syntax)
		if last {
			return c.epilogue(next, end, where)
		}
		start, pos = next, next
	}
	return fieldErr(where, "does not end: the line %s is missing", quote(string(delim)+"--"))
}

// part accounts for the part that begins at start and whose delimiter is at pos.
func (c *accountant) part(start, pos, depth int, parent string, n int) error {
	name := strconv.Itoa(n)
	if parent != "" {
		name = parent + "." + name
	}
	if c.p.parts++; c.p.parts > maxParts {
		return fieldErr(in(name, "message"), "has more than %d parts", maxParts)
	}
	if pos-start < 2 {
		return fieldErr(in(name, "header"), "is not ended by an empty line")
	}
	if err := c.entity(start, pos-2, depth+1, name); err != nil {
		return err
	}
	c.use(pos, Syntax)
	return nil
}

func (c *accountant) preamble(from, to int) {
	text := bytes.TrimSpace(c.raw[from:to])
	if len(text) == 0 || slices.Contains(preambles, string(text)) {
		c.count(to-from-len(text)-4, "empty lines")
		c.use(to, Syntax)
		return
	}
	c.count(to-from, "words before the first part, which mail programs do not show")
	c.use(to, Counted)
}

// epilogue refuses everything after the last part except empty lines. The attack:
// another delimiter and another part, which programs show that do not stop at
// the end.
func (c *accountant) epilogue(from, to int, where string) error {
	rest := c.raw[from:to]
	if len(bytes.Trim(rest, " \t\r\n")) > 0 {
		return fieldErr(where, "goes on after its last part: leave out %s", quote(string(bytes.TrimSpace(rest))))
	}
	c.count(len(rest)-4, "empty lines")
	c.use(to, Syntax)
	return nil
}

// checkDelimiters refuses boundaries if a line could belong to two of them, and
// lines that begin with a boundary but are no delimiters.
func (c *accountant) checkDelimiters() error {
	for i, a := range c.boundaries {
		for _, b := range c.boundaries[i+1:] {
			if strings.HasPrefix(a, b) || strings.HasPrefix(b, a) {
				return fieldErr("multipart", "has the boundary %s, and there is %s, too: one must not begin with the other", quote(b), quote(a))
			}
		}
	}
	if len(c.boundaries) == 0 {
		return nil
	}
	for pos := 0; pos < len(c.raw); {
		next := len(c.raw)
		if i := bytes.IndexByte(c.raw[pos:], '\n'); i >= 0 {
			next = pos + i + 1
		}
		if rest, ok := bytes.CutPrefix(c.raw[pos:next], []byte("--")); ok && !c.delimiters[pos] {
			for _, b := range c.boundaries {
				if bytes.HasPrefix(rest, []byte(b)) {
					return fieldErr("multipart", "the line %s begins with a boundary, and is no delimiter where it stands", quote(strings.TrimSpace(string(c.raw[pos:next]))))
				}
			}
		}
		pos = next
	}
	return nil
}
