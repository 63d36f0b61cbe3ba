package mailservice

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"postern/internal/mail"
)

// sesSend reads SendEmail of the SES API v2.
func sesSend(c content) ([]Mail, error) {
	r, v, err := c.json("application/x-amz-json-1.1", "application/x-amz-json-1.0")
	if err != nil {
		return nil, err
	}
	o := r.object("", v)
	m := Mail{From: o.one("FromEmailAddress"), ReplyTo: o.several("ReplyToAddresses")}
	if d, ok := o.child("Destination"); ok {
		m.To, m.Cc, m.Bcc = d.several("ToAddresses"), d.several("CcAddresses"), d.several("BccAddresses")
		d.end()
	}
	o.note(&m, "FromEmailAddressIdentityArn", "FeedbackForwardingEmailAddress", "FeedbackForwardingEmailAddressIdentityArn", "EmailTags", "ConfigurationSetName", "EndpointId", "TenantName")
	body, ok := o.child("Content")
	if !ok {
		return nil, unknown("Content: is missing")
	}
	o.end()
	if raw, ok := body.child("Raw"); ok {
		data := raw.data("Data")
		raw.end()
		body.end()
		if r.err != nil {
			return nil, r.err
		}
		return sesRaw(m, data)
	}
	simple, ok := body.child("Simple")
	if !ok {
		r.fail("Content: has neither Simple nor Raw")
		return nil, r.err
	}
	body.end()
	m.Subject = sesText(simple, "Subject")
	if b, ok := simple.child("Body"); ok {
		m.Text, m.HTML = sesText(b, "Text"), sesText(b, "Html")
		b.end()
	}
	simple.headerList(&m, "Headers", "Name", "Value")
	for _, f := range simple.objects("Attachments") {
		a := mail.Attachment{Name: f.text("FileName"), ContentType: f.text("ContentType"), Data: f.data("RawContent")}
		f.note(&m, "ContentDisposition", "ContentId", "ContentDescription", "ContentTransferEncoding")
		f.end()
		m.Attachments = append(m.Attachments, a)
	}
	simple.end()
	return []Mail{m}, r.err
}

// sesText reads {"Data": …, "Charset": "UTF-8"}.
func sesText(o object, name string) string {
	t, ok := o.child(name)
	if !ok {
		return ""
	}
	if charset := t.text("Charset"); charset != "" && !strings.EqualFold(charset, "utf-8") {
		o.r.fail("%s: is not UTF-8", t.path("Charset"))
	}
	data := t.text("Data")
	t.end()
	return data
}

// sesRaw returns a message that SES sends for m. The recipients of the request, if
// there are any, replace those of the message's header.
func sesRaw(m Mail, raw []byte) ([]Mail, error) {
	to := slices.Concat(m.To, m.Cc, m.Bcc)
	if len(m.ReplyTo) > 0 {
		return nil, unknown("ReplyToAddresses: beside a message that is complete")
	}
	out, err := message(raw, to)
	if err != nil {
		return nil, err
	}
	if m.From.Addr != "" && m.From.Addr != out.From.Addr {
		out.note("Sender of the request", m.From.String())
	}
	out.Fields = append(out.Fields, m.Fields...)
	return []Mail{out}, nil
}

// member matches an element of a list in the query API.
var member = regexp.MustCompile(`^(.+)\.member\.([1-9][0-9]{0,2})$`)

// sesQuery reads SendEmail and SendRawEmail of the SES query API (version 2010-12-01).
func sesQuery(c content) ([]Mail, error) {
	if c.kind != "application/x-www-form-urlencoded" {
		return nil, unknown("Content-Type: %s is not a form", c.kind)
	}
	pairs, err := c.form()
	if err != nil {
		return nil, err
	}
	values, lists := map[string]string{}, map[string]map[int]string{}
	for _, p := range pairs {
		if m := member.FindStringSubmatch(p.name); m != nil {
			n, _ := strconv.Atoi(m[2])
			if lists[m[1]] == nil {
				lists[m[1]] = map[int]string{}
			}
			if _, twice := lists[m[1]][n]; twice {
				return nil, unknown("%s: stands twice", p.name)
			}
			lists[m[1]][n] = p.value
			continue
		}
		if _, twice := values[p.name]; twice {
			return nil, unknown("%s: stands twice", mail.Printable(p.name, 80))
		}
		values[p.name] = p.value
	}
	r := &reader{}
	take := func(name string) string {
		v := values[name]
		delete(values, name)
		return v
	}
	addresses := func(name string) (out []mail.Address) {
		for _, n := range slices.Sorted(maps.Keys(lists[name])) {
			a, err := mail.ParseAddress(name, lists[name][n])
			if err != nil {
				r.fail("%v", err)
			}
			out = append(out, a)
		}
		delete(lists, name)
		return out
	}
	text := func(name string) string {
		if charset := take(name + ".Charset"); charset != "" && !strings.EqualFold(charset, "utf-8") {
			r.fail("%s.Charset: is not UTF-8", name)
		}
		return take(name + ".Data")
	}
	m := Mail{}
	if v := take("Version"); v != "2010-12-01" {
		r.fail("Version: %s is not known", mail.Printable(v, 40))
	}
	if s := take("Source"); s != "" {
		if m.From, err = mail.ParseAddress("Source", s); err != nil {
			r.fail("%v", err)
		}
	}
	for _, name := range []string{"SourceArn", "FromArn", "ReturnPath", "ReturnPathArn", "ConfigurationSetName"} {
		if v := take(name); v != "" {
			m.note(name, v)
		}
	}
	var raw []byte
	switch action := take("Action"); action {
	case "SendEmail":
		m.To, m.Cc, m.Bcc = addresses("Destination.ToAddresses"), addresses("Destination.CcAddresses"), addresses("Destination.BccAddresses")
		m.ReplyTo = addresses("ReplyToAddresses")
		m.Subject, m.Text, m.HTML = text("Message.Subject"), text("Message.Body.Text"), text("Message.Body.Html")
	case "SendRawEmail":
		m.To = addresses("Destinations")
		if raw, err = decode64("RawMessage.Data", take("RawMessage.Data")); err != nil {
			return nil, err
		}
	default:
		r.fail("Action: the mail of %s cannot be shown", mail.Printable(action, 40))
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		r.fail("%s: its meaning is not known", mail.Printable(name, 80))
	}
	for _, name := range slices.Sorted(maps.Keys(lists)) {
		r.fail("%s: its meaning is not known", mail.Printable(name, 80))
	}
	switch {
	case r.err != nil:
		return nil, r.err
	case raw != nil:
		return sesRaw(m, raw)
	}
	return []Mail{m}, nil
}
