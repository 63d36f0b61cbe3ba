package imapserver

import (
	"bytes"
	"encoding/base64"
	"errors"
	"io"
	"mime"
	"mime/quotedprintable"
	"strings"
)

// The limits of a structure. What is beyond them is one part of unknown type.
const (
	maxDepth = 16  // parts within parts
	maxParts = 500 // of one message
)

// A part is a message or a part of one, as octets of the message: nothing is copied,
// so that programs get what was signed and hashed.
type part struct {
	raw    []byte // header and body
	header []byte // with the empty line that ends it
	body   []byte

	kind, subtype string // in lower case
	params        map[string]string
	children      []*part // of a multipart
	message       *part   // of a message/rfc822
}

// parse reads the structure of a message. It never fails.
//
// The attack: parts within parts, a hundred thousand deep, for which a reader that
// calls itself runs out of stack, and the server ends.
func parse(raw []byte) *part {
	left := maxParts
	return parsePart(raw, "text", "plain", 0, &left)
}

func parsePart(raw []byte, kind, subtype string, depth int, left *int) *part {
	*left--
	p := &part{raw: raw, kind: kind, subtype: subtype}
	p.header, p.body = splitHeader(raw)
	if v, ok := p.field("Content-Type"); ok {
		full, params, err := mime.ParseMediaType(v)
		if err == nil || errors.Is(err, mime.ErrInvalidMediaParameter) {
			if k, s, ok := strings.Cut(full, "/"); ok {
				p.kind, p.subtype, p.params = k, s, params
			}
		}
	}
	deep := depth >= maxDepth || *left <= 0
	switch {
	case p.kind == "multipart" && !deep:
		p.parseChildren(depth, left)
	case p.kind == "message" && (p.subtype == "rfc822" || p.subtype == "global") && !p.encoded() && !deep:
		p.message = parsePart(p.body, "text", "plain", depth+1, left)
	case p.kind == "multipart", p.kind == "message" && (p.subtype == "rfc822" || p.subtype == "global"):
		p.kind, p.subtype, p.params = "application", "octet-stream", nil
	}
	return p
}

// parseChildren splits a multipart at its boundary (RFC 2046, 5.1.1).
func (p *part) parseChildren(depth int, left *int) {
	kind, subtype := "text", "plain"
	if p.subtype == "digest" {
		kind, subtype = "message", "rfc822"
	}
	boundary := p.params["boundary"]
	begin := -1
	for at := 0; at < len(p.body) && boundary != ""; {
		end := len(p.body)
		if i := bytes.IndexByte(p.body[at:], '\n'); i >= 0 {
			end = at + i + 1
		}
		is, last := delimits(p.body[at:end], boundary)
		if is {
			if begin >= 0 && *left > 0 {
				p.children = append(p.children, parsePart(withoutEnd(p.body[begin:at]), kind, subtype, depth+1, left))
			}
			begin = end
			if last {
				begin = -1
				break
			}
		}
		at = end
	}
	if begin >= 0 && begin < len(p.body) && *left > 0 { // the last boundary is missing
		p.children = append(p.children, parsePart(p.body[begin:], kind, subtype, depth+1, left))
	}
	if len(p.children) == 0 {
		p.kind, p.subtype, p.params = "application", "octet-stream", nil
	}
}

// delimits reports whether a line is a boundary, and whether it is the last one.
func delimits(line []byte, boundary string) (is, last bool) {
	if !bytes.HasPrefix(line, []byte("--")) || !bytes.HasPrefix(line[2:], []byte(boundary)) {
		return false, false
	}
	rest := line[2+len(boundary):]
	if bytes.HasPrefix(rest, []byte("--")) {
		rest, last = rest[2:], true
	}
	return len(bytes.TrimSpace(rest)) == 0, last
}

// withoutEnd takes off the end of line that belongs to the boundary below.
func withoutEnd(b []byte) []byte {
	return bytes.TrimSuffix(bytes.TrimSuffix(b, []byte("\n")), []byte("\r"))
}

// splitHeader splits at the first empty line, which stays with the header.
func splitHeader(raw []byte) (header, body []byte) {
	for at := 0; at < len(raw); {
		i := bytes.IndexByte(raw[at:], '\n')
		if i < 0 {
			break
		}
		if line := raw[at : at+i]; len(line) == 0 || len(line) == 1 && line[0] == '\r' {
			return raw[:at+i+1], raw[at+i+1:]
		}
		at += i + 1
	}
	return raw, raw[len(raw):]
}

// fields yields each field of a header: its name, and all of its octets.
func fields(header []byte) func(yield func(name string, raw []byte) bool) {
	return func(yield func(name string, raw []byte) bool) {
		for len(header) > 0 {
			end := 0
			for end < len(header) {
				i := bytes.IndexByte(header[end:], '\n')
				if i < 0 {
					end = len(header)
					break
				}
				end += i + 1
				if end >= len(header) || header[end] != ' ' && header[end] != '\t' {
					break
				}
			}
			raw := header[:end]
			header = header[end:]
			name, _, ok := bytes.Cut(raw, []byte(":"))
			if !ok || len(bytes.TrimSpace(raw)) == 0 {
				continue
			}
			if !yield(string(bytes.TrimSpace(name)), raw) {
				return
			}
		}
	}
}

// field returns the first field with a name, unfolded.
func (p *part) field(name string) (string, bool) {
	for n, raw := range fields(p.header) {
		if strings.EqualFold(n, name) {
			_, v, _ := bytes.Cut(raw, []byte(":"))
			return strings.TrimSpace(strings.NewReplacer("\r", "", "\n", "").Replace(string(v))), true
		}
	}
	return "", false
}

// encoding returns the transfer encoding in lower case.
func (p *part) encoding() string {
	v, _ := p.field("Content-Transfer-Encoding")
	v, _, _ = strings.Cut(v, ";")
	if v = strings.ToLower(strings.TrimSpace(v)); v == "" {
		return "7bit"
	}
	return v
}

// encoded reports whether the body is not octets as they are.
func (p *part) encoded() bool {
	switch p.encoding() {
	case "7bit", "8bit", "binary":
		return false
	}
	return true
}

// decoded returns the body without its transfer encoding, and false for one that is
// not known.
func (p *part) decoded() (body []byte, known bool) {
	switch p.encoding() {
	case "7bit", "8bit", "binary":
		return p.body, true
	case "quoted-printable":
		b, err := io.ReadAll(quotedprintable.NewReader(bytes.NewReader(p.body)))
		return b, err == nil
	case "base64":
		clean := bytes.Map(func(r rune) rune {
			if r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '+' || r == '/' {
				return r
			}
			return -1
		}, p.body)
		out := make([]byte, base64.RawStdEncoding.DecodedLen(len(clean)))
		n, err := base64.RawStdEncoding.Decode(out, clean)
		return out[:n], err == nil
	}
	return nil, false
}

// find returns the part with a number such as 2.1, as RFC 9051 section 6.4.5.1 counts
// them: those of a message within a message follow its own number.
func (p *part) find(path []int) *part {
	whole := p // the message that is being counted in
	for i, n := range path {
		if i > 0 {
			if whole = p.message; whole == nil {
				whole = p
			}
		}
		switch {
		case len(whole.children) > 0 && n >= 1 && n <= len(whole.children):
			p = whole.children[n-1]
		case len(whole.children) == 0 && n == 1 && (i == 0 || p.message != nil):
			p = whole // the only part of a message that has no parts is its body
		default:
			return nil
		}
	}
	return p
}
