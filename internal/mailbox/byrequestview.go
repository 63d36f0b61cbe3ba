package mailbox

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/leak"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/store"
)

// showRequest is what a person sees of a send by request: the mails that it makes the
// service send, and the request itself.
func (m *PostOffice) showRequest(a oversight.Action) (oversight.View, error) {
	q, err := OpenRequest(a.Payload, a.Created)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	v := oversight.View{Raw: a.Payload}
	note := func(n string) {
		if !slices.Contains(v.Notes, n) {
			v.Notes = append(v.Notes, n)
		}
	}
	masked := false
	for i := range q.Mails {
		prefix := ""
		if len(q.Mails) > 1 {
			prefix = fmt.Sprintf("Email %d: ", i+1)
		}
		s, err := m.showOne(&v, &q, i, prefix, note)
		if err != nil {
			return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
		}
		title, text := leak.Redact(s.Subject), leak.Redact(s.Text)
		masked = masked || title != s.Subject || text != s.Text
		if len(q.Mails) == 1 {
			v.Title, v.Text = title, text
			break
		}
		v.Text += fmt.Sprintf("--- Email %d of %d, to %s: %s ---\n%s\n\n", i+1, len(q.Mails), strings.Join(slices.Concat(s.To, s.Cc, s.Bcc), ", "), title, text)
	}
	if len(q.Mails) > 1 {
		v.Title = fmt.Sprintf("%d emails by %s", len(q.Mails), q.Service)
	}
	v.Fields = append(v.Fields, oversight.Field{Name: "Leaves by", Value: "HTTPS request to " + q.Request.Host + " (" + q.Service + "), exactly as below"})
	for _, u := range q.Request.Uses {
		v.Fields = append(v.Fields, oversight.Field{Name: "Secret", Value: u.Secret + " in " + u.Where})
	}
	if masked {
		v.Partial = "secrets are masked"
		note("secrets are masked in this view; if approved, the request leaves with them unmasked")
	}
	return v, nil
}

// showOne adds the mail with index i to v, except its subject and text.
func (m *PostOffice) showOne(v *oversight.View, q *Requested, i int, prefix string, note func(string)) (mail.Summary, error) {
	one, env := &q.Mails[i], q.Envelopes[i]
	s, err := mail.Describe(env)
	if err != nil {
		return s, err
	}
	p, err := mail.Parse(env.Raw)
	if err != nil {
		return s, err
	}
	add := func(name string, values ...string) {
		for _, value := range values {
			if value != "" {
				v.Fields = append(v.Fields, oversight.Field{Name: prefix + name, Value: value})
			}
		}
	}
	from := s.From
	if one.From.Addr == "" {
		from = "the address of the account at " + q.Service
	}
	add("From", from)
	add("To", s.To...)
	add("Cc", s.Cc...)
	add("Bcc", s.Bcc...)
	if len(one.ReplyTo) > 0 {
		for _, to := range one.ReplyTo {
			add("Reply-To", to.String())
		}
	} else {
		add("Reply-To", s.ReplyTo...)
	}
	add("Subject", leak.Redact(s.Subject))
	if one.SendAt != "" {
		add("Sent at", one.SendAt+" ("+q.Service+" sends it then)")
	}
	for _, f := range one.Fields {
		add(f.Name, leak.Redact(f.Value))
	}
	if one.Raw != nil {
		masked := false
		for _, f := range s.Fields {
			value := leak.Redact(f.Value)
			masked = masked || value != f.Value
			add(f.Name, value)
		}
		if masked {
			v.Partial = "secrets are masked"
		}
		if s.Unclear != "" {
			v.Partial = s.Unclear
		}
	}
	for _, n := range s.Notes {
		if !strings.Contains(n, "envelope says that it is from") {
			note(prefix + n)
		}
	}
	if s.HTML && v.HTML == nil && len(q.Mails) == 1 {
		v.HTML = []byte(p.HTML)
	}
	found := m.leaks(p, env.Raw)
	for _, f := range found.Flags {
		if !slices.Contains(v.Flags, string(f)) {
			v.Flags = append(v.Flags, string(f))
		}
	}
	for _, r := range found.Findings {
		note("found: " + r.String())
	}
	for _, f := range s.Attachments {
		v.Files = append(v.Files, oversight.File{Name: f.Name, Type: f.ContentType, Size: int64(f.Size), SHA256: f.SHA256, Open: true})
	}
	return s, nil
}

// openRequestFile returns a file of the mails of a request.
func openRequestFile(a oversight.Action, index int) (oversight.File, []byte, error) {
	q, err := OpenRequest(a.Payload, time.Now())
	if err != nil {
		return oversight.File{}, nil, fmt.Errorf("open file of action %s: %w", a.ID, err)
	}
	n := index
	for _, env := range q.Envelopes {
		p, err := mail.Parse(env.Raw)
		if err != nil {
			return oversight.File{}, nil, fmt.Errorf("open file of action %s: %w", a.ID, err)
		}
		s, err := mail.Describe(env)
		if err != nil {
			return oversight.File{}, nil, fmt.Errorf("open file of action %s: %w", a.ID, err)
		}
		if n >= 0 && n < len(p.Attachments) && n < len(s.Attachments) {
			f := s.Attachments[n]
			return oversight.File{Name: f.Name, Type: f.ContentType, Size: int64(f.Size), SHA256: f.SHA256, Open: true}, p.Attachments[n].Data, nil
		}
		n -= len(p.Attachments)
	}
	return oversight.File{}, nil, fmt.Errorf("file %d of action %s: %w", index, a.ID, store.ErrNotFound)
}
