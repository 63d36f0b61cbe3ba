package mail

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"mime"
	"mime/quotedprintable"
	netmail "net/mail"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/net/html/charset"

	"postern/internal/extract"
)

const (
	maxDepth    = 16      // multiparts within multiparts
	maxParts    = 500     // parts of one message
	maxBody     = 4 << 20 // octets of all text, and of all HTML, that are decoded to be read
	maxIDs      = 200     // message ids of References
	maxWarnings = 50
)

// A Message is what was read from a message. All strings are valid UTF-8;
// those from the header have no control characters.
type Message struct {
	Header []Field // every field, in order

	From    []Address // one, unless somebody is playing
	Sender  []Address
	ReplyTo []Address
	To      []Address
	Cc      []Address
	Bcc     []Address // a Bcc header that should not be there
	Subject string
	Date    time.Time // zero if missing or unreadable

	MessageID  string   // with its angle brackets; may be empty
	InReplyTo  []string // message ids
	References []string // message ids

	AutoSubmitted string // RFC 3834: empty or "no" for a person's mail

	Text        string   // all plain text parts, lines ending in LF
	HTML        string   // all HTML parts, as they came: never show it without cleaning it
	HTMLParts   []string // the same, each for itself
	Attachments []Attachment

	// Warnings say where the message is not what it seems, or where two mail
	// programs would not read it alike.
	Warnings []string
}

// Digest returns the SHA-256 of the attachment's bytes in hexadecimal.
func (a Attachment) Digest() string { return digest(a.Data) }

// Parse reads a message. It fails with [ErrNotMessage] only for what has no
// header or is too large; everything else is read as well as it can be, and
// named in the warnings. Attachments share no memory with raw.
func Parse(raw []byte) (Message, error) {
	if len(raw) > maxParseBytes {
		return Message{}, fmt.Errorf("%w: it has more than %d octets", ErrNotMessage, maxParseBytes)
	}
	fields, body, problems, err := splitHeader(raw)
	if err != nil {
		return Message{}, err
	}
	if len(fields) == 0 {
		return Message{}, fmt.Errorf("%w: it has no header", ErrNotMessage)
	}
	unfold(fields)
	var m Message
	for _, p := range problems {
		m.warn("%s", p)
	}
	m.readHeader(fields)
	p := parser{m: &m}
	p.walk(fields, body, 0, false)
	m.Text = strings.TrimSuffix(m.Text, "\n")
	m.HTML = strings.TrimSuffix(m.HTML, "\n")
	return m, nil
}

func (m *Message) warn(format string, args ...any) {
	s := shown(fmt.Sprintf(format, args...))
	if len(m.Warnings) < maxWarnings && !slices.Contains(m.Warnings, s) {
		m.Warnings = append(m.Warnings, s)
	}
}

func (m *Message) readHeader(fields []field) {
	for _, f := range fields {
		m.Header = append(m.Header, Field{Name: shown(f.name), Value: shown(decodeWords(f.value))})
		if strings.HasPrefix(strings.ToLower(f.name), "resent-") {
			m.warn("the message has been resent (%s)", f.name)
		}
	}
	for _, name := range once {
		if n := count(fields, name); n > 1 {
			m.warn("the header %s stands %d times", name, n)
		}
	}
	for _, l := range []struct {
		name string
		list *[]Address
	}{{"From", &m.From}, {"Sender", &m.Sender}, {"Reply-To", &m.ReplyTo}, {"To", &m.To}, {"Cc", &m.Cc}, {"Bcc", &m.Bcc}} {
		for _, f := range fields {
			if !f.is(l.name) || len(*l.list) > 1000 {
				continue
			}
			list, ok := parseList(f.value)
			if !ok && f.value != "" && !emptyGroup(f.value) {
				m.warn("the header %s is not a proper list of addresses", l.name)
			}
			*l.list = append(*l.list, list...)
		}
		for _, a := range *l.list {
			if strings.ContainsRune(a.Name, '@') && a.Addr != "" && !strings.EqualFold(a.Name, a.Addr) {
				m.warn("in %s a name looks like another address: %s", l.name, a)
			}
			if !isASCII(a.Addr) {
				m.warn("in %s"+foreignIn+"%s", l.name, a)
			}
		}
	}
	switch {
	case len(m.From) == 0:
		m.warn("there is no From address")
	case len(m.From) > 1:
		m.warn("there are %d From addresses", len(m.From))
	}
	if count(fields, "Bcc") > 0 {
		m.warn("the message shows its Bcc header")
	}
	for _, f := range fields {
		if f.is("Subject") || f.is("From") || f.is("To") || f.is("Cc") {
			if d := decodeWords(f.value); controls(d) != "" {
				m.warn("the header %s hides the character %s", f.name, controls(d))
			}
		}
	}
	m.Subject = shown(decodeWords(first(fields, "Subject")))
	if d := first(fields, "Date"); d != "" {
		t, err := netmail.ParseDate(d)
		if err != nil {
			m.warn("the date cannot be read")
		}
		m.Date = t
	}
	if ids := messageIDs(first(fields, "Message-ID")); len(ids) > 0 {
		m.MessageID = ids[0]
	}
	m.InReplyTo = messageIDs(first(fields, "In-Reply-To"))
	m.References = messageIDs(first(fields, "References"))
	m.AutoSubmitted = shown(first(fields, "Auto-Submitted"))
}

// emptyGroup says whether v is like "undisclosed-recipients:;", which
// net/mail reads as no list at all.
func emptyGroup(v string) bool {
	name, rest, ok := strings.Cut(v, ":")
	return ok && strings.TrimSpace(rest) == ";" && !strings.ContainsAny(name, `@<>",`)
}

func messageIDs(v string) []string {
	var ids []string
	for len(ids) < maxIDs {
		i := strings.IndexByte(v, '<')
		if i < 0 {
			return ids
		}
		n := strings.IndexByte(v[i:], '>')
		if n < 0 {
			return ids
		}
		if id := v[i : i+n+1]; len(id) > 2 && len(id) < 1000 && !strings.ContainsAny(id[1:], "< \t") && controls(id) == "" && utf8.ValidString(id) {
			ids = append(ids, id)
		}
		v = v[i+n+1:]
	}
	return ids
}

type parser struct {
	m     *Message
	parts int
}

func (p *parser) walk(fields []field, body []byte, depth int, digestPart bool) {
	if p.parts++; p.parts > maxParts {
		p.m.warn("there are more than %d parts; the rest was not read", maxParts)
		return
	}
	if depth > 0 {
		for _, name := range once {
			if strings.HasPrefix(name, "Content-") && count(fields, name) > 1 {
				p.m.warn("the header %s of a part stands twice", name)
			}
		}
	}
	ct := first(fields, "Content-Type")
	mediaType, params := p.mediaType(ct, digestPart)
	if strings.HasPrefix(mediaType, "multipart/") {
		boundary := params["boundary"]
		if l := strings.ToLower(ct); strings.Contains(l, "boundary*") {
			// The attack: two boundaries, of which some programs know the one
			// and some the other, and so two messages in one.
			p.m.warn("a multipart's boundary is written so that programs read it differently: %s", quote(ct))
		}
		if e := first(fields, "Content-Transfer-Encoding"); e != "" && !slices.Contains([]string{"7bit", "8bit", "binary"}, strings.ToLower(e)) {
			p.m.warn("a multipart has a transfer encoding: %s", quote(e))
		}
		switch {
		case boundary == "" || len(boundary) > 200:
			p.m.warn("a multipart has no usable boundary; it is shown as a file")
		case depth >= maxDepth:
			p.m.warn("there are more than %d levels of parts; the rest was not read", maxDepth)
		default:
			p.walkParts(mediaType, boundary, body, depth)
			return
		}
		mediaType = "application/octet-stream"
	}
	p.leaf(fields, mediaType, params, body)
}

func (p *parser) mediaType(ct string, digestPart bool) (string, map[string]string) {
	if ct == "" {
		if digestPart {
			return "message/rfc822", nil
		}
		return "text/plain", nil
	}
	if s, err := parseStructured(ct); err == nil && strings.Contains(s.value, "/") {
		return s.value, s.params
	}
	t, params, err := mime.ParseMediaType(ct)
	if err == nil && strings.Contains(t, "/") {
		return t, params
	}
	// Mail programs read on where RFC 2045 ends, so must we: else a part that
	// they show would be hidden here.
	p.m.warn("a Content-Type is malformed: %s", quote(ct))
	t, rest, _ := strings.Cut(ct, ";")
	t = strings.ToLower(strings.TrimSpace(t))
	if strings.Count(t, "/") != 1 || strings.ContainsAny(t, " \t\"") {
		return "text/plain", nil
	}
	params = map[string]string{}
	for kv := range strings.SplitSeq(rest, ";") {
		k, v, _ := strings.Cut(kv, "=")
		k = strings.ToLower(strings.TrimSpace(k))
		if _, dup := params[k]; !dup {
			params[k] = strings.Trim(strings.TrimSpace(v), `"`)
		}
	}
	return t, params
}

func (p *parser) walkParts(mediaType, boundary string, body []byte, depth int) {
	parts, outside, closed := splitParts(body, boundary)
	if outside > maxOutside {
		p.m.warn("%d octets stand before or after the parts, where mail programs do not show them", outside)
	}
	if !closed {
		p.m.warn("a multipart does not end")
	}
	if len(parts) == 0 {
		p.m.warn("a multipart has no parts")
	}
	for _, raw := range parts {
		if p.parts >= maxParts {
			p.m.warn("there are more than %d parts; the rest was not read", maxParts)
			return
		}
		fields, content, problems, err := splitHeader(raw)
		if err != nil {
			p.parts++
			p.m.warn("a part has too long a header; it was not read")
			continue
		}
		for _, s := range problems {
			p.m.warn("in a part: %s", s)
		}
		unfold(fields)
		p.checkPartHeader(fields)
		p.walk(fields, content, depth+1, mediaType == "multipart/digest")
	}
}

// What mail programs do not show is not shown to a reviewer either, and could
// carry out what was never approved. So there may not be much of it without a
// warning.
const (
	maxOutside    = 200  // octets around the parts: "This is a message in MIME format."
	maxPartHeader = 2000 // octets
)

// likeText ends the note about a file that mail programs show.
const likeText = " like the text itself: read it, too"

// aboutPart begins the note about a part's header that is shown nowhere.
const aboutPart = "a part has a header"

func (p *parser) checkPartHeader(fields []field) {
	size := 0
	for _, f := range fields {
		if size += len(f.raw); len(f.name) < 8 || !strings.EqualFold(f.name[:8], "Content-") {
			p.m.warn(aboutPart+" field that is not shown: %s", quote(f.name))
		}
	}
	if size > maxPartHeader {
		p.m.warn(aboutPart+" of %d octets, which is not shown", size)
	}
}

// splitParts cuts a multipart body at its boundary lines. outside is the number
// of octets that are in no part.
func splitParts(body []byte, boundary string) (parts [][]byte, outside int, closed bool) {
	delim := []byte("--" + boundary)
	start := -1
	for pos := 0; pos < len(body) && len(parts) <= maxParts; {
		next := len(body)
		if i := bytes.IndexByte(body[pos:], '\n'); i >= 0 {
			next = pos + i + 1
		}
		rest, ok := bytes.CutPrefix(body[pos:next], delim)
		last := ok && bytes.HasPrefix(rest, []byte("--"))
		if last {
			rest = rest[2:]
		}
		if ok && len(bytes.Trim(rest, " \t\r\n")) == 0 {
			if start >= 0 {
				end := pos // the line end before the boundary belongs to it
				if end > start && body[end-1] == '\n' {
					end--
				}
				if end > start && body[end-1] == '\r' {
					end--
				}
				parts = append(parts, body[start:end])
			} else {
				outside = len(bytes.TrimSpace(body[:pos]))
			}
			if last {
				return parts, outside + len(bytes.TrimSpace(body[next:])), true
			}
			start = next
		}
		pos = next
	}
	if start >= 0 && start < len(body) {
		parts = append(parts, body[start:])
	}
	return parts, outside, false
}

func (p *parser) leaf(fields []field, mediaType string, params map[string]string, body []byte) {
	data := p.decode(first(fields, "Content-Transfer-Encoding"), body)
	disposition, dparams := "", map[string]string(nil)
	if cd := first(fields, "Content-Disposition"); cd != "" {
		if s, err := parseStructured(cd); err == nil {
			disposition, dparams = s.value, s.params
		} else if disposition, dparams, err = mime.ParseMediaType(cd); err != nil {
			disposition, _, _ = strings.Cut(strings.ToLower(cd), ";")
			disposition = strings.TrimSpace(disposition)
			p.m.warn("a Content-Disposition is malformed: %s", quote(cd))
		}
	}
	name := dparams["filename"]
	if name == "" {
		name = params["name"]
	}
	if disposition != "attachment" && name == "" {
		switch mediaType {
		case "text/plain":
			p.m.Text = p.text(p.m.Text, params["charset"], data)
			return
		case "text/html":
			before := len(p.m.HTML)
			p.m.HTML = p.text(p.m.HTML, params["charset"], data)
			p.m.HTMLParts = append(p.m.HTMLParts, p.m.HTML[before:])
			return
		}
	}
	safe := p.fileName(decodeWords(name), mediaType)
	if main, _, _ := strings.Cut(mediaType, "/"); disposition != "attachment" && (main == "text" || main == "message") {
		p.m.warn("mail programs show the file %s"+likeText, quote(safe))
	}
	p.m.Attachments = append(p.m.Attachments, Attachment{
		Name:        safe,
		ContentType: shown(mediaType),
		Data:        data,
		Inline:      disposition != "attachment",
		Charset:     params["charset"],
	})
}

// fileTitle returns a name that is safe to create in a folder: the sender wrote it.
func fileTitle(name string) string {
	safe := name[strings.LastIndexAny(name, `/\`)+1:]
	var before rune
	safe = strings.Map(func(r rune) rune {
		last := before
		before = r
		if extract.Hidden(last, r) || r == utf8.RuneError || r == ':' {
			return -1
		}
		return r
	}, safe)
	for len(safe) > 200 {
		_, n := utf8.DecodeLastRuneInString(safe)
		safe = safe[:len(safe)-n]
	}
	return strings.Trim(safe, " ")
}

func (p *parser) fileName(name, mediaType string) string {
	safe := fileTitle(name)
	if safe != name {
		p.m.warn("an attachment had an unsafe name: %s", quote(name))
	}
	if strings.Trim(safe, ".") == "" {
		safe = fmt.Sprintf("attachment-%d", len(p.m.Attachments)+1)
		if mediaType == "message/rfc822" {
			safe += ".eml"
		}
	}
	return safe
}

// decode undoes a transfer encoding. It always copies.
func (p *parser) decode(encoding string, body []byte) []byte {
	switch strings.ToLower(strings.TrimSpace(encoding)) {
	case "base64":
		clean := make([]byte, 0, len(body))
		padded, after, odd := false, false, false
		for _, c := range body {
			switch {
			case c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '+' || c == '/':
				if padded {
					after = true
					continue
				}
				clean = append(clean, c)
			case c == '=':
				padded = true
			case c != '\r' && c != '\n' && c != ' ' && c != '\t':
				odd = true
			}
		}
		if after {
			p.m.warn("base64 goes on after its end; what follows was not read")
		}
		if odd || len(clean)%4 == 1 {
			p.m.warn("base64 has characters that do not belong")
		}
		if len(clean)%4 == 1 { // a lone last character carries no whole byte
			clean = clean[:len(clean)-1]
		}
		out, err := base64.RawStdEncoding.AppendDecode(nil, clean)
		if err != nil {
			p.m.warn("base64 cannot be read to its end")
		}
		return out
	case "quoted-printable":
		out, err := io.ReadAll(quotedprintable.NewReader(bytes.NewReader(body)))
		if err != nil {
			// The library stops at the first error; programs show the rest.
			p.m.warn("quoted-printable is malformed; the part is shown undecoded from there")
			out = lenientQP(body)
		}
		return out
	case "", "7bit", "8bit", "binary":
	default:
		p.m.warn("a transfer encoding is unknown: %s", quote(encoding))
	}
	return bytes.Clone(body)
}

func lenientQP(body []byte) []byte {
	out := make([]byte, 0, len(body))
	hex := func(c byte) int {
		i := strings.IndexByte("0123456789ABCDEFabcdef", c)
		if i > 15 {
			i -= 6
		}
		return i
	}
	for i := 0; i < len(body); i++ {
		c := body[i]
		if c == '=' {
			if i+2 < len(body) && hex(body[i+1]) >= 0 && hex(body[i+2]) >= 0 {
				out = append(out, byte(hex(body[i+1])<<4|hex(body[i+2])))
				i += 2
				continue
			}
			if rest := bytes.TrimLeft(body[i+1:], " \t\r"); len(rest) > 0 && rest[0] == '\n' {
				i = len(body) - len(rest)
				continue
			}
		}
		out = append(out, c)
	}
	return out
}

// text appends a text part that is in the given charset to what was read before.
func (p *parser) text(before, label string, data []byte) string {
	var s string
	switch label = strings.ToLower(strings.TrimSpace(label)); {
	case slices.Contains([]string{"", "utf-8", "utf8", "us-ascii"}, label), label == "ascii" && utf8.Valid(data):
		s = string(data)
	default:
		e, name := charset.Lookup(label)
		if e == nil || name == "replacement" {
			p.m.warn("a charset is unknown: %s", quote(label))
			s = string(data)
			break
		}
		if len(data) > maxBody {
			data = data[:maxBody]
			p.m.warn("a text is longer than %d octets; the rest is not shown", maxBody)
		}
		out, err := e.NewDecoder().Bytes(data)
		if err != nil {
			p.m.warn("a text is not in the charset that it names")
			out = data
		}
		s = string(out)
	}
	if !utf8.ValidString(s) {
		p.m.warn("a text is not in the charset that it names")
		s = strings.ToValidUTF8(s, "\ufffd")
	}
	s = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(s)
	if strings.IndexByte(s, 0) >= 0 {
		p.m.warn("a text contains NUL characters")
		s = strings.ReplaceAll(s, "\x00", "\ufffd")
	}
	if len(before)+len(s) > maxBody {
		p.m.warn("a text is longer than %d octets; the rest is not shown", maxBody)
		s = strings.ToValidUTF8(s[:max(0, maxBody-len(before))], "")
	}
	if before != "" && !strings.HasSuffix(before, "\n") {
		before += "\n"
	}
	return before + s
}
