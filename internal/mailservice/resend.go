package mailservice

import (
	"encoding/json"
	"strconv"

	"postern/internal/mail"
)

// resendSend reads Send Email of Resend.
func resendSend(c content) ([]Mail, error) {
	r, v, err := c.json()
	if err != nil {
		return nil, err
	}
	m := resendMail(r.object("", v))
	return []Mail{m}, r.err
}

// resendBatch reads Send Batch Emails: a list of the same.
func resendBatch(c content) ([]Mail, error) { return jsonList(c, resendMail) }

// jsonList reads a body that is a list of mails.
func jsonList(c content, read func(object) Mail) (out []Mail, err error) {
	r, v, err := c.json()
	if err != nil {
		return nil, err
	}
	list, ok := v.([]any)
	if !ok {
		return nil, unknown("the body is not a list")
	}
	for i, one := range list {
		out = append(out, read(r.object("["+strconv.Itoa(i)+"]", one)))
	}
	return out, r.err
}

func resendMail(o object) Mail {
	m := Mail{
		From: o.one("from"), To: o.several("to"), Cc: o.several("cc"), Bcc: o.several("bcc"), ReplyTo: o.several("reply_to"),
		Subject: o.text("subject"), Text: o.text("text"), HTML: o.text("html"), SendAt: o.text("scheduled_at"),
	}
	o.headers(&m)
	o.note(&m, "tags", "topic_id")
	for _, f := range o.objects("attachments") {
		a := mail.Attachment{Name: f.text("filename"), ContentType: f.text("content_type")}
		if _, text := f.fields["content"].(string); text {
			a.Data = f.data("content")
		} else if b, ok := f.child("content"); ok { // Node's Buffer
			a.Data = buffer(b)
		}
		if len(a.Data) == 0 {
			o.r.fail("%s: is empty, or elsewhere", f.path("content"))
		}
		f.note(&m, "content_id")
		f.end()
		m.Attachments = append(m.Attachments, a)
	}
	o.end()
	return m
}

// buffer reads {"type": "Buffer", "data": [1, 2, …]}.
func buffer(o object) (out []byte) {
	if o.text("type") != "Buffer" {
		o.r.fail("%s: is not bytes", o.at)
	}
	for _, v := range o.list("data") {
		n, ok := v.(json.Number)
		b, err := strconv.ParseUint(string(n), 10, 8)
		if !ok || err != nil {
			o.r.fail("%s: is not bytes", o.at)
			return nil
		}
		out = append(out, byte(b))
	}
	o.end()
	return out
}
