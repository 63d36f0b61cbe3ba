package mailservice

import "postern/internal/mail"

// mailersendSend reads Send an email of MailerSend.
func mailersendSend(c content) ([]Mail, error) {
	r, v, err := c.json()
	if err != nil {
		return nil, err
	}
	m := mailersendMail(r.object("", v))
	return []Mail{m}, r.err
}

// mailersendBulk reads Send bulk emails: a list of the same.
func mailersendBulk(c content) ([]Mail, error) { return jsonList(c, mailersendMail) }

func mailersendMail(o object) Mail {
	m := Mail{
		From: o.person("from", "email"), To: o.addresses("to"), Cc: o.addresses("cc"), Bcc: o.addresses("bcc"),
		Subject: o.text("subject"), Text: o.text("text"), HTML: o.text("html"), SendAt: o.number("send_at"),
	}
	if a := o.person("reply_to", "email"); a.Addr != "" {
		m.ReplyTo = []mail.Address{a}
	}
	for _, f := range o.objects("attachments") {
		a := mail.Attachment{Name: f.text("filename"), Data: f.data("content")}
		f.note(&m, "disposition", "id")
		f.end()
		m.Attachments = append(m.Attachments, a)
	}
	o.headerList(&m, "headers", "name", "value")
	o.note(&m, "in_reply_to", "references", "tags", "precedence_bulk", "settings", "list_unsubscribe")
	// Clients write empty ones; others change the text for who gets it.
	for _, name := range []string{"variables", "personalization"} {
		if len(o.list(name)) > 0 {
			o.r.fail("%s: changes the text", o.path(name))
		}
	}
	o.r.literal(&m, "{{", "{%", "{$", "{#")
	o.end()
	return m
}
