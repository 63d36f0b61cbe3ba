package mailservice

import (
	"strings"

	"postern/internal/mail"
)

// graphSend reads sendMail of Microsoft Graph: JSON, or a message in base64 with the
// type text/plain.
func graphSend(c content) ([]Mail, error) {
	if c.kind == "text/plain" {
		raw, err := decode64("body", string(c.body))
		if err != nil {
			return nil, err
		}
		m, err := message(raw, nil)
		return []Mail{m}, err
	}
	r, v, err := c.json()
	if err != nil {
		return nil, err
	}
	m := Mail{}
	o := r.object("", v)
	o.note(&m, "saveToSentItems")
	msg, ok := o.child("message")
	if !ok {
		return nil, unknown("message: is missing")
	}
	o.end()
	m.Subject = msg.text("subject")
	if b, ok := msg.child("body"); ok {
		switch kind := b.text("contentType"); {
		case strings.EqualFold(kind, "text"):
			m.Text = b.text("content")
		case strings.EqualFold(kind, "html"):
			m.HTML = b.text("content")
		default:
			r.fail("message.body.contentType: %s is neither text nor html", mail.Printable(kind, 40))
		}
		b.end()
	}
	for _, l := range []struct {
		name string
		to   *[]mail.Address
	}{{"toRecipients", &m.To}, {"ccRecipients", &m.Cc}, {"bccRecipients", &m.Bcc}, {"replyTo", &m.ReplyTo}} {
		for _, one := range msg.objects(l.name) {
			*l.to = append(*l.to, one.person("emailAddress", "address"))
			one.end()
		}
	}
	if from, ok := msg.child("from"); ok {
		m.From = from.person("emailAddress", "address")
		from.end()
	}
	if sender, ok := msg.child("sender"); ok {
		m.note("Sender", sender.person("emailAddress", "address").String())
		sender.end()
	}
	msg.headerList(&m, "internetMessageHeaders", "name", "value")
	for _, f := range msg.objects("attachments") {
		if t := f.text("@odata.type"); t != "#microsoft.graph.fileAttachment" {
			r.fail("%s: %s is not a file", f.path("@odata.type"), mail.Printable(t, 60))
		}
		a := mail.Attachment{Name: f.text("name"), ContentType: f.text("contentType"), Data: f.data("contentBytes"), Inline: f.flag("isInline")}
		f.note(&m, "contentId")
		f.end()
		m.Attachments = append(m.Attachments, a)
	}
	msg.note(&m, "importance", "isDeliveryReceiptRequested", "isReadReceiptRequested", "categories")
	msg.end()
	return []Mail{m}, r.err
}
