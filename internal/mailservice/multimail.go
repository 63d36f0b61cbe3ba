package mailservice

import "postern/internal/mail"

// multimailSend reads the sending of MultiMail. The mailbox of the path is the sender.
func multimailSend(c content) ([]Mail, error) {
	r, v, err := c.json()
	if err != nil {
		return nil, err
	}
	o := r.object("", v)
	m := Mail{To: o.several("to"), Cc: o.several("cc"), Bcc: o.several("bcc"), Subject: o.text("subject"), Markdown: o.text("markdown"), SendAt: o.text("send_at")}
	for _, f := range o.objects("attachments") {
		a := mail.Attachment{Name: f.text("name"), ContentType: f.text("content_type"), Data: f.data("content_base64")}
		f.end()
		m.Attachments = append(m.Attachments, a)
	}
	o.note(&m, "idempotency_key", "gate_timing")
	o.end()
	return []Mail{m}, r.err
}
