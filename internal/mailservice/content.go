package mailservice

import (
	"bytes"
	"encoding/base64"
	"maps"
	"mime"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"postern/internal/mail"
	"postern/internal/outgoing"
)

// A content is the body of a request with its type.
type content struct {
	r      *outgoing.Request
	kind   string            // media type in lower case
	params map[string]string // its parameters
	body   []byte
}

func contentOf(r *outgoing.Request) (content, error) {
	v := r.Header.Get("Content-Type")
	kind, params, err := mime.ParseMediaType(v)
	if err != nil {
		return content{}, unknown("Content-Type: %s cannot be read", mail.Printable(v, 80))
	}
	if c, ok := params["charset"]; ok && !strings.EqualFold(c, "utf-8") {
		return content{}, unknown("Content-Type: charset %s is not UTF-8", mail.Printable(c, 40))
	}
	delete(params, "charset")
	c := content{r: r, kind: kind, params: params, body: r.Body}
	if !strings.HasPrefix(kind, "multipart/") && len(params) > 0 {
		return content{}, unknown("Content-Type: has parameters whose meaning is not known")
	}
	return c, nil
}

// json returns the body as JSON. Kinds are other names of its type.
func (c content) json(kinds ...string) (*reader, any, error) {
	if c.kind != "application/json" && !slices.Contains(kinds, c.kind) {
		return nil, nil, unknown("Content-Type: %s is not application/json", c.kind)
	}
	return parseJSON(c.body)
}

// A pair is a field of a form. File says that it has a file name.
type pair struct {
	name, value string
	file        bool
	filename    string
	kind        string // media type of a part; may be empty
}

// form returns the fields of the body, in order.
func (c content) form() ([]pair, error) {
	switch c.kind {
	case "application/x-www-form-urlencoded":
		return parseForm(string(c.body))
	case "multipart/form-data":
		parts, err := c.parts()
		if err != nil {
			return nil, err
		}
		var out []pair
		for _, p := range parts {
			f, err := p.field()
			if err != nil {
				return nil, err
			}
			out = append(out, f)
		}
		return out, nil
	}
	return nil, unknown("Content-Type: %s is not a form", c.kind)
}

// parseForm reads pairs as application/x-www-form-urlencoded, without anything that
// programs read differently.
func parseForm(s string) (out []pair, err error) {
	if s == "" {
		return nil, nil
	}
	for one := range strings.SplitSeq(s, "&") {
		name, value, ok := strings.Cut(one, "=")
		if !ok || name == "" || strings.ContainsAny(one, "; \t\r\n") {
			return nil, unknown("form: %s is not name=value", mail.Printable(one, 80))
		}
		p := pair{}
		if p.name, err = url.QueryUnescape(name); err != nil {
			return nil, unknown("form: %s is not properly escaped", mail.Printable(name, 80))
		}
		if p.value, err = url.QueryUnescape(value); err != nil {
			return nil, unknown("form: the value of %s is not properly escaped", mail.Printable(name, 80))
		}
		if !utf8.ValidString(p.name) || !utf8.ValidString(p.value) {
			return nil, unknown("form: %s is not UTF-8", mail.Printable(name, 80))
		}
		out = append(out, p)
	}
	return out, nil
}

// A part is a part of a multipart body.
type part struct {
	header map[string]string // by name in lower case; each once
	body   []byte
}

// parts splits a multipart body (RFC 2046 §5.1). It has nothing before the first
// boundary and nothing after the last, and no line begins like a boundary without
// being one: the places where two programs see two lists of parts.
func (c content) parts() ([]part, error) {
	boundary := c.params["boundary"]
	for _, name := range slices.Sorted(maps.Keys(c.params)) {
		if name != "boundary" && (name != "type" || c.kind != "multipart/related") {
			return nil, unknown("Content-Type: parameter %s: its meaning is not known", mail.Printable(name, 80))
		}
	}
	if boundary == "" || len(boundary) > 70 || strings.ContainsAny(boundary, " \t\r\n\"\\") {
		return nil, unknown("Content-Type: its boundary cannot be used")
	}
	body := append([]byte("\r\n"), c.body...)
	body = bytes.TrimSuffix(body, []byte("\r\n"))
	sections := bytes.Split(body, []byte("\n--"+boundary))
	// The attack: a boundary after a bare LF or CR, which some programs accept.
	if n := bytes.Count(body, []byte("--"+boundary)); n != len(sections)-1 || len(sections) < 3 {
		return nil, unknown("multipart: its boundaries are not clear")
	}
	var out []part
	for i, s := range sections {
		switch last := i == len(sections)-1; {
		case !last && !bytes.HasSuffix(s, []byte("\r")):
			return nil, unknown("multipart: a boundary does not follow CR LF")
		case i == 0 && len(s) != 1:
			return nil, unknown("multipart: text before its first part")
		case i == 0:
			continue
		case last && string(s) != "--":
			return nil, unknown("multipart: text after its last part")
		case last:
			continue
		}
		s, ok := bytes.CutPrefix(s, []byte("\r\n"))
		if !ok {
			return nil, unknown("multipart: text behind a boundary")
		}
		s = s[:len(s)-1] // the CR of the next boundary
		p, err := parsePart(s)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

var partHeader = regexp.MustCompile(`^([A-Za-z][A-Za-z-]*): ?([^\x00-\x1f\x7f]*)$`)

func parsePart(s []byte) (part, error) {
	p := part{header: map[string]string{}}
	for {
		line, rest, ok := bytes.Cut(s, []byte("\r\n"))
		if !ok {
			return p, unknown("multipart: a part has no empty line after its header")
		}
		s = rest
		if len(line) == 0 {
			p.body = s
			return p, nil
		}
		m := partHeader.FindSubmatch(line)
		if m == nil || !utf8.Valid(line) {
			return p, unknown("multipart: %s is not a header field of a part", mail.Printable(string(line), 80))
		}
		name := strings.ToLower(string(m[1]))
		if _, twice := p.header[name]; twice {
			return p, unknown("multipart: a part has two fields %s", name)
		}
		p.header[name] = strings.TrimSpace(string(m[2]))
	}
}

// disposition is how clients write it (RFC 7578 §4.2). Whatever else RFC 6266 allows,
// programs read differently.
var disposition = regexp.MustCompile(`^form-data; name="([^"\\%]*)"(; filename="([^"\\]*)")?$`)

func (p part) field() (pair, error) {
	m := disposition.FindStringSubmatch(p.header["content-disposition"])
	if m == nil {
		return pair{}, unknown("multipart: Content-Disposition %s: its meaning is not known", mail.Printable(p.header["content-disposition"], 80))
	}
	f := pair{name: m[1], value: string(p.body), file: m[2] != "", filename: m[3]}
	for _, name := range slices.Sorted(maps.Keys(p.header)) {
		v := p.header[name]
		switch name {
		case "content-disposition":
		case "content-type":
			kind, params, err := mime.ParseMediaType(v)
			if err != nil || len(params) > 1 || len(params) == 1 && !strings.EqualFold(params["charset"], "utf-8") {
				return pair{}, unknown("multipart: Content-Type %s: its meaning is not known", mail.Printable(v, 80))
			}
			f.kind = kind
		default:
			return pair{}, unknown("multipart: header %s of a part: its meaning is not known", name)
		}
	}
	if !f.file && (f.kind != "" && f.kind != "text/plain" || !utf8.ValidString(f.value)) {
		return pair{}, unknown("multipart: field %s is not text", mail.Printable(f.name, 80))
	}
	return f, nil
}

// decode64 decodes base64 of the standard alphabet, with padding and without spaces.
func decode64(name, s string) ([]byte, error) {
	b, err := base64.StdEncoding.Strict().DecodeString(s)
	if err != nil || strings.ContainsAny(s, "\r\n") {
		return nil, unknown("%s: is not base64", name)
	}
	return b, nil
}

// message returns a mail of a message as RFC 5322 has it. Its recipients are to, or
// those of its header if there are none.
func message(raw []byte, to []mail.Address) (Mail, error) {
	if !bytes.Contains(raw, []byte("\r")) {
		// Programs write it with bare LF, and services read it as lines.
		raw = bytes.ReplaceAll(raw, []byte("\n"), []byte("\r\n"))
	}
	if !bytes.HasSuffix(raw, []byte("\r\n")) {
		raw = append(bytes.Clone(raw), "\r\n"...)
	}
	if err := mail.CheckRaw(raw); err != nil {
		return Mail{}, unknown("%v", err)
	}
	p, err := mail.Parse(raw)
	if err != nil {
		return Mail{}, unknown("the message cannot be read: %v", err)
	}
	m := Mail{Raw: raw, To: to}
	switch {
	case len(to) == 0:
		m.To, m.Cc, m.Bcc = p.To, p.Cc, p.Bcc
	case len(p.Bcc) > 0:
		return Mail{}, unknown("the message has a Bcc header beside the recipients of the request")
	}
	for _, list := range [][]mail.Address{m.To, m.Cc, m.Bcc} {
		for _, a := range list {
			if a.Addr == "" {
				return Mail{}, unknown("the message has the recipient %s, which is not an address", a)
			}
		}
	}
	if len(p.From) > 1 || len(p.From) == 1 && p.From[0].Addr == "" {
		return Mail{}, unknown("the message has a From that is not an address")
	}
	if len(p.From) == 1 {
		m.From = p.From[0]
	}
	return m, nil
}
