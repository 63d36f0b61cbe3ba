package mailservice

import "postern/internal/mail"

// postmarkSend reads Send a single email of Postmark.
func postmarkSend(c content) ([]Mail, error) {
	r, v, err := c.json()
	if err != nil {
		return nil, err
	}
	m := postmarkMail(r.object("", v))
	return []Mail{m}, r.err
}

// postmarkBatch reads Send batch emails: a list of the same.
func postmarkBatch(c content) ([]Mail, error) { return jsonList(c, postmarkMail) }

func postmarkMail(o object) Mail {
	m := Mail{
		From: o.one("From"), To: o.several("To"), Cc: o.several("Cc"), Bcc: o.several("Bcc"), ReplyTo: o.several("ReplyTo"),
		Subject: o.text("Subject"), Text: o.text("TextBody"), HTML: o.text("HtmlBody"),
	}
	o.headerList(&m, "Headers", "Name", "Value")
	for _, f := range o.objects("Attachments") {
		a := mail.Attachment{Name: f.text("Name"), ContentType: f.text("ContentType"), Data: f.data("Content")}
		f.note(&m, "ContentID")
		_ = f.number("ContentLength")
		f.end()
		m.Attachments = append(m.Attachments, a)
	}
	o.note(&m, "Tag", "Metadata", "MessageStream", "TrackOpens", "TrackLinks")
	o.end()
	return m
}
