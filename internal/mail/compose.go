package mail

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"mime"
	"mime/quotedprintable"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// A Draft is a message as an agent describes it.
type Draft struct {
	From string // the inbox's address, with or without a display name
	To   []string
	Cc   []string
	Bcc  []string
	// ReplyTo is where answers go instead of to From; may be empty. Reviewers
	// are shown it.
	ReplyTo string

	Subject string
	Text    string // plain text; made from HTML if empty
	HTML    string // a fragment; it is wrapped into a document. Empty means text only
	// Markdown is, instead of Text and HTML, both: it is the plain part as it
	// is, and what it is rendered to is the HTML part.
	Markdown string

	// Replied says that the message answers one that came (RFC 3834).
	Replied bool
	// Unsubscribe is where a recipient of bulk mail gets no more of it, an
	// https or a mailto URL; empty means that the message is no bulk mail.
	Unsubscribe string
	// OneClick says that a POST to Unsubscribe is enough (RFC 8058).
	OneClick bool

	InReplyTo  string   // message id of the message that is answered; may be empty
	References []string // message ids of the thread, oldest first; may be empty

	Attachments []Attachment
}

// An Attachment is a file in a message.
type Attachment struct {
	Name        string // a file name without any folder
	ContentType string // media type; empty means application/octet-stream
	Data        []byte

	// Of one that was read.
	Inline  bool   // mail programs show it with the text, if they can
	Charset string // that its type names; may be empty
}

// Compose returns exactly the bytes that will be sent for d, and to whom. The
// Message-ID ends in messageIDDomain; Date is now. A draft that cannot be
// written safely and unambiguously is refused with a [FieldError].
func Compose(d Draft, now time.Time, messageIDDomain string) (Envelope, error) {
	from, err := ParseAddress("from", d.From)
	if err != nil {
		return Envelope{}, err
	}
	if strings.ContainsRune(from.Name, '@') && !strings.EqualFold(from.Name, from.Addr) {
		return Envelope{}, fieldErr("from", "has a display name that looks like another address")
	}
	var env Envelope
	env.From = from.Addr
	lists := map[string][]Address{}
	for _, l := range []struct {
		name string
		list []string
	}{{"to", d.To}, {"cc", d.Cc}, {"bcc", d.Bcc}} {
		if len(l.list) > MaxRecipients {
			return Envelope{}, fieldErr(l.name, "has %d recipients, more than %d", len(l.list), MaxRecipients)
		}
		for i, s := range l.list {
			a, err := ParseAddress(fmt.Sprintf("%s[%d]", l.name, i), s)
			if err != nil {
				return Envelope{}, err
			}
			lists[l.name] = append(lists[l.name], a)
			if !slices.Contains(env.To, a.Addr) {
				env.To = append(env.To, a.Addr)
			}
		}
	}
	switch {
	case len(env.To) == 0:
		return Envelope{}, fieldErr("to", "has no recipient, and neither has cc or bcc")
	case len(env.To) > MaxRecipients:
		return Envelope{}, fieldErr("to", "has with cc and bcc %d recipients, more than %d", len(env.To), MaxRecipients)
	}
	if err := checkLine("subject", d.Subject); err != nil {
		return Envelope{}, err
	}
	if n := utf8.RuneCountInString(d.Subject); n > MaxSubject {
		return Envelope{}, fieldErr("subject", "has %d characters, more than %d", n, MaxSubject)
	}
	if _, err := CheckAddr("message id domain", "x@"+messageIDDomain); err != nil {
		return Envelope{}, err
	}

	var h bytes.Buffer
	fmt.Fprintf(&h, "Date: %s\r\n", now.UTC().Format(time.RFC1123Z))
	writeAddresses(&h, "From", []Address{from})
	if len(lists["to"])+len(lists["cc"]) == 0 {
		h.WriteString("To: undisclosed-recipients:;\r\n") // a header without any To looks broken to many filters
	}
	writeAddresses(&h, "To", lists["to"])
	writeAddresses(&h, "Cc", lists["cc"])
	if d.ReplyTo != "" {
		a, err := ParseAddress("reply_to", d.ReplyTo)
		if err != nil {
			return Envelope{}, err
		}
		writeAddresses(&h, "Reply-To", []Address{a})
	}
	h.WriteString("Subject:" + unstructured(d.Subject, len("Subject:")) + "\r\n")
	fmt.Fprintf(&h, "Message-ID: %s\r\n", newMessageID(messageIDDomain))
	if err := writeThread(&h, d); err != nil {
		return Envelope{}, err
	}
	if err := writeUnsubscribe(&h, d); err != nil {
		return Envelope{}, err
	}
	submitted := "auto-generated" // RFC 3834: nobody's vacation notice answers a program
	if d.Replied {
		submitted = "auto-replied"
	}
	h.WriteString("Auto-Submitted: " + submitted + "\r\nMIME-Version: 1.0\r\n")
	body, err := composeBody(d)
	if err != nil {
		return Envelope{}, err
	}
	env.Raw = append(h.Bytes(), body...)
	if err := CheckRaw(env.Raw); err != nil {
		return Envelope{}, err
	}
	return env, nil
}

func writeThread(h *bytes.Buffer, d Draft) error {
	if d.InReplyTo != "" {
		id, err := checkID("in_reply_to", d.InReplyTo)
		if err != nil {
			return err
		}
		h.WriteString("In-Reply-To: " + id + "\r\n")
	}
	refs := d.References
	if len(refs) > 50 { // RFC 5322 lets a long thread be shortened; the first and the newest make the tree
		refs = append([]string{refs[0]}, refs[len(refs)-49:]...)
	}
	for i, r := range refs {
		id, err := checkID(fmt.Sprintf("references[%d]", i), r)
		if err != nil {
			return err
		}
		if i == 0 {
			h.WriteString("References:")
		} else {
			h.WriteString("\r\n")
		}
		h.WriteString(" " + id)
	}
	if len(refs) > 0 {
		h.WriteString("\r\n")
	}
	return nil
}

// writeUnsubscribe writes the fields of RFC 2369 and RFC 8058.
func writeUnsubscribe(h *bytes.Buffer, d Draft) error {
	if d.Unsubscribe == "" {
		return nil
	}
	u := d.Unsubscribe
	web := strings.HasPrefix(u, "https://") || strings.HasPrefix(u, "http://")
	if err := checkLine("unsubscribe", u); err != nil {
		return err
	}
	if !web && !strings.HasPrefix(u, "mailto:") || len(u) > 500 || !isASCII(u) || strings.ContainsAny(u, "<> \t,") {
		return fieldErr("unsubscribe", "%s is not an address for it", quote(u))
	}
	h.WriteString("List-Unsubscribe: <" + u + ">\r\n")
	if d.OneClick && web {
		h.WriteString("List-Unsubscribe-Post: List-Unsubscribe=One-Click\r\n")
	}
	return nil
}

func checkID(field, id string) (string, error) {
	if err := checkLine(field, id); err != nil {
		return "", err
	}
	inner := strings.TrimSuffix(strings.TrimPrefix(id, "<"), ">")
	if inner == "" || len(inner) > 900 || strings.ContainsAny(inner, "<> \t()") || strings.IndexFunc(inner, func(r rune) bool { return r >= utf8.RuneSelf }) >= 0 {
		return "", fieldErr(field, "%s is not a message id", quote(id))
	}
	return "<" + inner + ">", nil
}

func writeAddresses(h *bytes.Buffer, name string, list []Address) {
	for i, a := range list {
		if i == 0 {
			h.WriteString(name + ":")
		} else {
			h.WriteString(",\r\n")
		}
		switch {
		case a.Name == "":
			h.WriteString(" " + a.Addr)
		case isASCII(a.Name):
			h.WriteString(` "` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(a.Name) + `" <` + a.Addr + ">")
		default:
			h.WriteString(" " + encodedWords(a.Name) + "\r\n <" + a.Addr + ">")
		}
	}
	if len(list) > 0 {
		h.WriteString("\r\n")
	}
}

// unstructured returns the value of an unstructured field, with its leading
// space, folded. used is the length of what stands before it on the line.
func unstructured(s string, used int) string {
	if s == "" {
		return ""
	}
	longest := 0
	for w := range strings.SplitSeq(s, " ") {
		longest = max(longest, len(w))
	}
	// White space at an end or in a row would be lost or a line of its own.
	if !isASCII(s) || longest > 500 || strings.Contains(s, "=?") || strings.ContainsRune(s, '\t') || strings.Contains(s, "  ") || strings.Trim(s, " ") != s {
		return " " + encodedWords(s)
	}
	var b strings.Builder
	for w := range strings.SplitSeq(s, " ") {
		if used+1+len(w) > 76 && b.Len() > 0 {
			b.WriteString("\r\n")
			used = 0
		}
		b.WriteString(" " + w)
		used += 1 + len(w)
	}
	return b.String()
}

// encodedWords writes s as RFC 2047 words, one a line, also when it is ASCII:
// what looks like an encoded word must not be decoded by who receives it.
func encodedWords(s string) string {
	var words []string
	for len(s) > 0 {
		n := min(len(s), 42) // 42 bytes are 56 characters of base64, a word of 68
		for n < len(s) && !utf8.RuneStart(s[n]) {
			n--
		}
		words = append(words, "=?utf-8?B?"+base64.StdEncoding.EncodeToString([]byte(s[:n]))+"?=")
		s = s[n:]
	}
	return strings.Join(words, "\r\n ")
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// entity returns a MIME part: header, empty line, body.
func entity(contentType, encoding, disposition string, body []byte) []byte {
	var b bytes.Buffer
	b.WriteString("Content-Type: " + contentType + "\r\n")
	if encoding != "" {
		b.WriteString("Content-Transfer-Encoding: " + encoding + "\r\n")
	}
	if disposition != "" {
		b.WriteString("Content-Disposition: " + disposition + "\r\n")
	}
	b.WriteString("\r\n")
	b.Write(body)
	return b.Bytes()
}

func multipart(subtype string, parts ...[]byte) []byte {
	boundary := "=_" + rand.Text() // "=_" is never in quoted-printable or base64 text
	var b bytes.Buffer
	for _, p := range parts {
		b.WriteString("--" + boundary + "\r\n")
		b.Write(p)
		b.WriteString("\r\n")
	}
	b.WriteString("--" + boundary + "--\r\n")
	return entity(`multipart/`+subtype+`; boundary="`+boundary+`"`, "", "", b.Bytes())
}

func composeBody(d Draft) ([]byte, error) {
	for _, t := range []struct{ field, s string }{{"text", d.Text}, {"html", d.HTML}, {"markdown", d.Markdown}} {
		switch n := utf8.RuneCountInString(t.s); {
		case n > MaxText:
			return nil, fieldErr(t.field, "has %d characters, more than %d", n, MaxText)
		case !utf8.ValidString(t.s):
			return nil, fieldErr(t.field, "is not valid UTF-8")
		case strings.IndexByte(t.s, 0) >= 0:
			return nil, fieldErr(t.field, "contains a NUL character")
		}
	}
	if d.Markdown != "" {
		if d.Text != "" || d.HTML != "" {
			return nil, fieldErr("markdown", "is given together with text or html, and is both")
		}
		var err error
		if d.HTML, err = markdownHTML(d.Markdown); err != nil {
			return nil, err
		}
		d.Text = d.Markdown
	}
	text := d.Text
	if text == "" && d.HTML != "" {
		text = htmlText(d.HTML, true).text
	}
	body := textEntity("text/plain", text)
	if d.HTML != "" {
		body = multipart("alternative", body, textEntity("text/html", document(d.HTML)))
	}
	if len(d.Attachments) == 0 {
		return body, nil
	}
	parts, total := [][]byte{body}, 0
	for i, a := range d.Attachments {
		field := fmt.Sprintf("attachments[%d]", i)
		if total += len(a.Data); total > MaxAttachmentsBytes {
			return nil, fieldErr("attachments", "have together more than %d octets", MaxAttachmentsBytes)
		}
		p, err := attachmentEntity(field, a)
		if err != nil {
			return nil, err
		}
		parts = append(parts, p)
	}
	return multipart("mixed", parts...), nil
}

func textEntity(mediaType, s string) []byte {
	s = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(s)
	plain := isASCII(s)
	for line := range strings.SplitSeq(s, "\n") {
		if len(line) > 76 || strings.TrimRight(line, " \t") != line || strings.HasPrefix(line, "From ") || controls(line) != "" {
			plain = false
		}
	}
	s = strings.ReplaceAll(s, "\n", "\r\n")
	if !strings.HasSuffix(s, "\r\n") {
		s += "\r\n"
	}
	if plain {
		return entity(mediaType+"; charset=utf-8", "7bit", "", []byte(s))
	}
	var b bytes.Buffer
	w := quotedprintable.NewWriter(&b)
	w.Write([]byte(s)) //nolint:errcheck // a bytes.Buffer takes everything
	w.Close()
	return entity(mediaType+"; charset=utf-8", "quoted-printable", "", b.Bytes())
}

func attachmentEntity(field string, a Attachment) ([]byte, error) {
	if err := checkLine(field+".name", a.Name); err != nil {
		return nil, err
	}
	switch {
	case a.Name == "" || a.Name == "." || a.Name == "..":
		return nil, fieldErr(field+".name", "is not a file name")
	case len(a.Name) > 255:
		return nil, fieldErr(field+".name", "is longer than 255 octets")
	case strings.ContainsAny(a.Name, `/\`):
		return nil, fieldErr(field+".name", "%s contains a path separator", quote(a.Name))
	case controls(a.Name) != "" || strings.ContainsRune(a.Name, '\t') || strings.Contains(a.Name, "=?"):
		return nil, fieldErr(field+".name", "%s contains a control character or =?", quote(a.Name))
	}
	mediaType := "application/octet-stream"
	if a.ContentType != "" {
		if err := checkLine(field+".content_type", a.ContentType); err != nil {
			return nil, err
		}
		t, _, err := mime.ParseMediaType(a.ContentType)
		if err != nil || !strings.Contains(t, "/") || len(t) > 127 || strings.HasPrefix(t, "multipart/") {
			return nil, fieldErr(field+".content_type", "%s is not a media type of a file", quote(a.ContentType))
		}
		if !strings.HasPrefix(t, "message/") { // RFC 2046 5.2.1 forbids base64 for these
			mediaType = t
		}
	}
	disposition := mime.FormatMediaType("attachment", map[string]string{"filename": a.Name})
	if disposition == "" {
		return nil, fieldErr(field+".name", "%s cannot be written in a header", quote(a.Name))
	}
	const width = 57 // bytes, 76 characters
	body := make([]byte, 0, len(a.Data)*4/3+len(a.Data)/width*2+8)
	for data := a.Data; len(data) > 0; {
		n := min(width, len(data))
		body = base64.StdEncoding.AppendEncode(body, data[:n])
		body = append(body, "\r\n"...)
		data = data[n:]
	}
	return entity(mediaType, "base64", disposition, body), nil
}

// newMessageID returns a random Message-ID at a domain, with its brackets (RFC 5322, section
// 3.6.4). Its random part is in two pieces: the content checks decode longer ones, and one in
// a thousand would look like an encrypted message.
func newMessageID(domain string) string {
	s := strings.ToLower(rand.Text())
	return "<" + s[:len(s)/2] + "." + s[len(s)/2:] + "@" + domain + ">"
}
