package mailservice

import (
	"slices"

	"postern/internal/mail"
)

// sendgridSend reads Mail Send of the SendGrid API v3. Each personalization is a mail.
func sendgridSend(c content) ([]Mail, error) {
	r, v, err := c.json()
	if err != nil {
		return nil, err
	}
	o := r.object("", v)
	all := Mail{From: o.person("from", "email"), ReplyTo: o.addresses("reply_to_list"), Subject: o.text("subject"), SendAt: o.number("send_at")}
	if a := o.person("reply_to", "email"); a.Addr != "" {
		all.ReplyTo = append(all.ReplyTo, a)
	}
	for _, part := range o.objects("content") {
		switch kind := part.text("type"); {
		case kind == "text/plain" && all.Text == "":
			all.Text = part.text("value")
		case kind == "text/html" && all.HTML == "":
			all.HTML = part.text("value")
		default:
			r.fail("%s: %s, or a second one, cannot be shown", part.path("type"), mail.Printable(kind, 40))
		}
		part.end()
	}
	for _, f := range o.objects("attachments") {
		a := mail.Attachment{Name: f.text("filename"), ContentType: f.text("type"), Data: f.data("content")}
		f.note(&all, "disposition", "content_id")
		f.end()
		all.Attachments = append(all.Attachments, a)
	}
	o.headers(&all)
	o.note(&all, "categories", "custom_args", "batch_id", "asm", "ip_pool_name")
	sendgridSettings(o, &all)
	var out []Mail
	for _, p := range o.objects("personalizations") {
		m := all
		m.Fields = slices.Clone(all.Fields)
		m.To, m.Cc, m.Bcc = p.addresses("to"), p.addresses("cc"), p.addresses("bcc")
		if p.has("from") {
			m.From = p.person("from", "email")
		}
		if p.has("subject") {
			m.Subject = p.text("subject")
		}
		if p.has("send_at") {
			m.SendAt = p.number("send_at")
		}
		p.headers(&m)
		p.note(&m, "custom_args")
		// Substitutions change the text for who gets it. Clients write empty ones.
		if s, ok := p.child("substitutions"); ok {
			s.end()
		}
		if s, ok := p.child("dynamic_template_data"); ok {
			s.end()
		}
		p.end()
		out = append(out, m)
	}
	o.end()
	return out, r.err
}

// sendgridSettings reads the settings that change nothing of what a recipient reads.
func sendgridSettings(o object, m *Mail) {
	if s, ok := o.child("mail_settings"); ok {
		for _, name := range []string{"bypass_list_management", "bypass_spam_management", "bypass_bounce_management", "bypass_unsubscribe_management", "sandbox_mode"} {
			sendgridSwitch(s, m, name, true)
		}
		sendgridSwitch(s, m, "footer", false)
		s.end()
	}
	if s, ok := o.child("tracking_settings"); ok {
		sendgridSwitch(s, m, "click_tracking", true, "enable_text")
		sendgridSwitch(s, m, "open_tracking", true)
		sendgridSwitch(s, m, "subscription_tracking", false)
		sendgridSwitch(s, m, "ganalytics", false)
		s.end()
	}
}

// sendgridSwitch reads {"enable": …}. If it may not be on, it adds text of its own.
func sendgridSwitch(s object, m *Mail, name string, on bool, more ...string) {
	t, ok := s.child(name)
	if !ok {
		return
	}
	enabled := t.flag("enable")
	if enabled && !on {
		s.r.fail("%s: adds text to the mail", t.path("enable"))
	}
	if enabled {
		m.note(t.path("enable"), "true")
	}
	for _, field := range more {
		_ = t.flag(field)
	}
	t.end()
}
