package imapserver

import (
	"bytes"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/emersion/go-imap/v2"

	"postern/internal/mail"
)

// section returns the octets that BODY[…] asks for, or nil if there are none.
func (p *part) section(s *imap.FetchItemBodySection) []byte {
	is := p.find(s.Part)
	if is == nil {
		return nil
	}
	var out []byte
	switch s.Specifier {
	case imap.PartSpecifierNone:
		if out = is.body; len(s.Part) == 0 {
			out = is.raw
		}
	case imap.PartSpecifierMIME:
		out = is.header
	case imap.PartSpecifierHeader, imap.PartSpecifierText:
		if len(s.Part) > 0 {
			if is = is.message; is == nil {
				return nil // only a message has them
			}
		}
		if out = is.body; s.Specifier == imap.PartSpecifierHeader {
			out = chosenFields(is.header, s.HeaderFields, s.HeaderFieldsNot)
		}
	}
	return piece(withoutNUL(out), s.Partial)
}

// chosenFields returns the fields of a header that are asked for, all if none are.
func chosenFields(header []byte, only, not []string) []byte {
	if len(only) == 0 && len(not) == 0 {
		return header
	}
	names := map[string]bool{}
	for _, n := range slices.Concat(only, not) {
		names[strings.ToLower(n)] = true
	}
	var b bytes.Buffer
	for name, raw := range fields(header) {
		if names[strings.ToLower(name)] == (len(only) > 0) {
			b.Write(raw)
			if !bytes.HasSuffix(raw, []byte("\n")) {
				b.WriteString("\r\n")
			}
		}
	}
	b.WriteString("\r\n")
	return b.Bytes()
}

// withoutNUL returns b as a literal may hold it (RFC 9051, section 4.3).
func withoutNUL(b []byte) []byte {
	if bytes.IndexByte(b, 0) < 0 {
		return b
	}
	return bytes.ReplaceAll(b, []byte{0}, []byte{0x80})
}

// piece returns a part of b. The numbers are the client's.
func piece(b []byte, p *imap.SectionPartial) []byte {
	if p == nil {
		return b
	}
	from := min(max(p.Offset, 0), int64(len(b)))
	return b[from : from+min(max(p.Size, 0), int64(len(b))-from)]
}

// binary returns the octets that BINARY[…] asks for, and false if the transfer
// encoding of the part is not known (RFC 9051, section 6.4.5.2).
func (p *part) binary(path []int, partial *imap.SectionPartial) (b []byte, known bool) {
	is := p.find(path)
	switch {
	case is == nil:
		return nil, true
	case len(path) == 0:
		return piece(is.raw, partial), true
	}
	b, known = is.decoded()
	return piece(b, partial), known
}

// structure returns BODYSTRUCTURE.
func (p *part) structure() imap.BodyStructure {
	var disposition *imap.BodyStructureDisposition
	if v, ok := p.field("Content-Disposition"); ok {
		if value, params, ok := disposed(v); ok {
			disposition = &imap.BodyStructureDisposition{Value: value, Params: plainParams(params)}
		}
	}
	var language []string
	if v, ok := p.field("Content-Language"); ok {
		for l := range strings.SplitSeq(v, ",") {
			if l = line(strings.TrimSpace(l)); l != "" && len(language) < 20 {
				language = append(language, l)
			}
		}
	}
	location, _ := p.field("Content-Location")
	if len(p.children) > 0 {
		m := &imap.BodyStructureMultiPart{
			Subtype:  line(p.subtype),
			Extended: &imap.BodyStructureMultiPartExt{Params: plainParams(p.params), Disposition: disposition, Language: language, Location: line(location)},
		}
		for _, c := range p.children {
			m.Children = append(m.Children, c.structure())
		}
		return m
	}
	id, _ := p.field("Content-Id")
	description, _ := p.field("Content-Description")
	s := &imap.BodyStructureSinglePart{
		Type: line(p.kind), Subtype: line(p.subtype), Params: plainParams(p.params), ID: line(id), Description: line(description), Encoding: line(p.encoding()),
		Size: uint32(len(p.body)), Extended: &imap.BodyStructureSinglePartExt{Disposition: disposition, Language: language, Location: line(location)},
	}
	lines := int64(bytes.Count(p.body, []byte("\n")))
	switch {
	case p.message != nil:
		s.MessageRFC822 = &imap.BodyStructureMessageRFC822{Envelope: p.message.envelope(), BodyStructure: p.message.structure(), NumLines: lines}
	case p.kind == "text":
		s.Text = &imap.BodyStructureText{NumLines: lines}
	}
	return s
}

// line returns s as one line of bounded length.
func line(s string) string { return mail.Printable(s, 1000) }

// plainParams returns parameters as they may be written: names and values outside of
// ASCII by RFC 2231.
func plainParams(params map[string]string) map[string]string {
	out := map[string]string{}
	for _, k := range slices.Sorted(maps.Keys(params)) {
		if len(out) >= 50 {
			break
		}
		v := line(params[k])
		if strings.ContainsFunc(v, func(r rune) bool { return r > '~' }) {
			out[line(k)+"*"] = "utf-8''" + strings.ReplaceAll(url.QueryEscape(v), "+", "%20")
			continue
		}
		out[line(k)] = v
	}
	return out
}

// envelope returns ENVELOPE of a message.
func (p *part) envelope() *imap.Envelope {
	header := p.header
	if !bytes.HasSuffix(header, []byte("\n\r\n")) {
		header = append(bytes.Clone(header), "\r\n\r\n"...)
	}
	m := mail.Read(header)
	return &imap.Envelope{
		Date: m.Date, Subject: m.Subject, From: people(m.From), Sender: people(m.Sender), ReplyTo: people(m.ReplyTo),
		To: people(m.To), Cc: people(m.Cc), Bcc: people(m.Bcc), InReplyTo: bare(m.InReplyTo), MessageID: strings.Join(bare([]string{m.MessageID}), ""),
	}
}

// bare returns message ids without their brackets.
func bare(ids []string) (out []string) {
	for _, id := range ids {
		if id = strings.Trim(line(id), "<> "); id != "" {
			out = append(out, id)
		}
	}
	return out
}

// people returns addresses for an envelope. An address without a domain gets one: in
// an envelope one without is the name of a group.
func people(as []mail.Address) (out []imap.Address) {
	for _, a := range as {
		if a.Addr == "" && a.Name == "" {
			continue
		}
		box, domain := a.Addr, "invalid"
		if i := strings.LastIndexByte(a.Addr, '@'); i >= 0 && i < len(a.Addr)-1 {
			box, domain = a.Addr[:i], a.Addr[i+1:]
		}
		if box == "" {
			box = "unknown"
		}
		out = append(out, imap.Address{Name: line(a.Name), Mailbox: line(box), Host: line(domain)})
	}
	return out
}
