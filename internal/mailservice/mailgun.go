package mailservice

import (
	"maps"
	"slices"
	"strings"

	"postern/internal/mail"
)

// mailgunOptions are the sending options that change nothing of what a recipient reads.
var mailgunOptions = []string{
	"o:tag", "o:dkim", "o:testmode", "o:tracking", "o:tracking-clicks", "o:tracking-opens", "o:require-tls", "o:skip-verification", "o:sending-ip", "o:sending-ip-pool",
	"o:deliverytime-optimize-period", "o:time-zone-localize", "o:secondary-dkim", "o:secondary-dkim-public", "o:suppress-headers",
}

// mailgunSend reads Send an email of Mailgun, a form.
func mailgunSend(c content) ([]Mail, error) {
	pairs, err := c.form()
	if err != nil {
		return nil, err
	}
	r, m := &reader{}, Mail{}
	variables := ""
	seen := map[string]bool{}
	for _, p := range pairs {
		file := p.name == "attachment" || p.name == "inline"
		if file != p.file {
			r.fail("%s: is or is not a file", mail.Printable(p.name, 80))
		}
		if seen[p.name] && !slices.Contains([]string{"to", "cc", "bcc", "attachment", "inline", "o:tag"}, p.name) {
			r.fail("%s: stands twice", mail.Printable(p.name, 80))
		}
		seen[p.name] = true
		if file {
			m.Attachments = append(m.Attachments, mail.Attachment{Name: p.filename, ContentType: p.kind, Data: []byte(p.value)})
			continue
		}
		if p.name == "recipient-variables" {
			variables = p.value
			continue
		}
		mailgunField(r, &m, p)
	}
	if r.err != nil {
		return nil, r.err
	}
	if variables != "" {
		return mailgunEach(m, variables)
	}
	r.literal(&m, "%recipient")
	return []Mail{m}, r.err
}

// mailgunField reads a field that is no file.
func mailgunField(r *reader, m *Mail, p pair) {
	addresses := func(to *[]mail.Address) {
		list, err := mail.ParseAddresses(p.name, p.value)
		if err != nil {
			r.fail("%v", err)
		}
		*to = append(*to, list...)
	}
	switch p.name {
	case "from":
		a, err := mail.ParseAddress(p.name, p.value)
		if err != nil {
			r.fail("%v", err)
		}
		m.From = a
	case "to":
		addresses(&m.To)
	case "cc":
		addresses(&m.Cc)
	case "bcc":
		addresses(&m.Bcc)
	case "h:Reply-To":
		addresses(&m.ReplyTo)
	case "subject":
		m.Subject = p.value
	case "text":
		m.Text = p.value
	case "html":
		m.HTML = p.value
	case "o:deliverytime":
		m.SendAt = p.value
	default:
		header, ok := strings.CutPrefix(p.name, "h:")
		switch {
		case ok:
			r.header(m, header, p.value)
		case slices.Contains(mailgunOptions, p.name), strings.HasPrefix(p.name, "v:"):
			m.note(p.name, p.value)
		default:
			r.fail("%s: its meaning is not known", mail.Printable(p.name, 80))
		}
	}
}

// mailgunEach returns the mail of each recipient of a batch: Mailgun replaces
// %recipient.NAME% by the recipient's variable, and each sees only themselves in To.
func mailgunEach(m Mail, variables string) (out []Mail, err error) {
	r, v, err := parseJSON([]byte(variables))
	if err != nil {
		return nil, err
	}
	if len(m.Cc)+len(m.Bcc) > 0 {
		return nil, unknown("recipient-variables: beside Cc or Bcc")
	}
	o := r.object("recipient-variables", v)
	for _, to := range m.To {
		one := m
		one.To, one.Fields = []mail.Address{to}, slices.Clone(m.Fields)
		o.read[to.Addr] = true
		vars := r.object("recipient-variables", o.fields[to.Addr])
		var pairs []string
		for _, name := range slices.Sorted(maps.Keys(vars.fields)) {
			pairs = append(pairs, "%recipient."+name+"%", plain(vars.fields[name]))
		}
		fill := strings.NewReplacer(pairs...)
		one.Subject, one.Text, one.HTML = fill.Replace(m.Subject), fill.Replace(m.Text), fill.Replace(m.HTML)
		r.literal(&one, "%recipient")
		out = append(out, one)
	}
	o.end()
	return out, r.err
}

// mailgunMIME reads Send an email in MIME format: the message is a file, and the
// recipients are those of the form.
func mailgunMIME(c content) ([]Mail, error) {
	pairs, err := c.form()
	if err != nil {
		return nil, err
	}
	r, m := &reader{}, Mail{}
	var raw []byte
	for _, p := range pairs {
		switch {
		case p.name == "message" && raw == nil && p.value != "":
			raw = []byte(p.value)
		case p.file:
			r.fail("%s: is a file", mail.Printable(p.name, 80))
		case p.name == "to", strings.HasPrefix(p.name, "o:"), strings.HasPrefix(p.name, "v:"):
			mailgunField(r, &m, p)
		default:
			r.fail("%s: its meaning is not known", mail.Printable(p.name, 80))
		}
	}
	if len(m.To) == 0 {
		r.fail("to: is missing")
	}
	if r.err != nil {
		return nil, r.err
	}
	out, err := message(raw, m.To)
	out.SendAt, out.Fields = m.SendAt, append(out.Fields, m.Fields...)
	return []Mail{out}, err
}
