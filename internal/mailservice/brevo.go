package mailservice

import (
	"slices"

	"postern/internal/mail"
)

// brevoSend reads Send a transactional email of Brevo. Each of messageVersions is a
// mail.
func brevoSend(c content) ([]Mail, error) {
	r, v, err := c.json()
	if err != nil {
		return nil, err
	}
	o := r.object("", v)
	all := Mail{From: o.person("sender", "email"), Subject: o.text("subject"), Text: o.text("textContent"), HTML: o.text("htmlContent"), SendAt: o.text("scheduledAt")}
	brevoPeople(o, &all)
	for _, f := range o.objects("attachment") {
		// A file by its URL is not in the request.
		a := mail.Attachment{Name: f.text("name"), Data: f.data("content")}
		f.end()
		all.Attachments = append(all.Attachments, a)
	}
	o.headers(&all)
	o.note(&all, "tags", "batchId")
	versions := o.objects("messageVersions")
	o.end()
	out := []Mail{}
	for _, p := range versions {
		m := all
		m.Fields = slices.Clone(all.Fields)
		m.To, m.Cc, m.Bcc = nil, nil, nil
		brevoPeople(p, &m)
		for _, t := range []struct {
			name string
			to   *string
		}{{"subject", &m.Subject}, {"textContent", &m.Text}, {"htmlContent", &m.HTML}} {
			if p.has(t.name) {
				*t.to = p.text(t.name)
			}
		}
		p.end()
		out = append(out, m)
	}
	switch {
	case len(versions) == 0:
		out = append(out, all)
	case len(all.Recipients()) > 0:
		// Whether these get one as well, the documentation does not say.
		r.fail("messageVersions: beside recipients of all")
	}
	for i := range out {
		r.literal(&out[i], "{{", "{%", "{#")
	}
	return out, r.err
}

func brevoPeople(o object, m *Mail) {
	m.To, m.Cc, m.Bcc = o.addresses("to"), o.addresses("cc"), o.addresses("bcc")
	if a := o.person("replyTo", "email"); a.Addr != "" {
		m.ReplyTo = []mail.Address{a}
	}
}
