package mailapi

import (
	"bytes"
	"fmt"
	"net/http"
	"time"

	"postern/internal/api"
	"postern/internal/door"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/message"
)

// A messageServer serves messages.
type messageServer struct {
	access

	post *mailbox.PostOffice
}

func (s messageServer) routes() []route {
	return []route{
		{"GET", "/v1/inboxes/{inbox}/messages", 0, s.listMessages},
		{"GET", "/v1/inboxes/{inbox}/messages/{id}", 0, s.getMessage},
		{"GET", "/v1/inboxes/{inbox}/messages/{id}/raw", 0, s.getRaw},
		{"GET", "/v1/inboxes/{inbox}/messages/{id}/attachments/{index}", 0, s.getAttachment},
	}
}

func fileOf(f mail.File) api.File {
	return api.File{Name: f.Name, ContentType: f.ContentType, Size: int64(f.Size), SHA256: f.SHA256}
}

func messageOf(m message.Message) api.Message {
	return api.Message{
		ID: m.ID, Inbox: m.Inbox, Thread: m.Thread, Direction: api.Direction(m.Direction), CreatedAt: m.At, Size: m.Size, Labels: append([]string{}, m.Labels...),
		From: m.From, To: append([]string{}, m.To...), Cc: append([]string{}, m.Cc...), Subject: m.Subject, Preview: m.Preview, MessageID: m.MessageID,
		InReplyTo: append([]string{}, m.InReplyTo...), References: append([]string{}, m.References...),
		Attachments: each(m.Attachments, fileOf), Warnings: append([]string{}, m.Warnings...), Security: securityOf(m.Security),
	}
}

func messagesOf(ms []message.Message) []api.Message {
	return each(ms, messageOf)
}

func (s messageServer) listMessages(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	n, err := limit(q, 50, 200)
	if err != nil {
		return err
	}
	l := mailbox.Listing{Limit: n, Cursor: q.Get("cursor"), Label: q.Get("label")}
	switch v := q.Get("unread"); v {
	case "", "false":
	case "true":
		l.Unread = true
	default:
		return fmt.Errorf("%w: unread: must be true or false", errRequest)
	}
	ms, next, err := s.post.List(r.Context(), c.Principal, k, l)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.MessageList{Messages: messagesOf(ms), NextCursor: next})
	return nil
}

func (s messageServer) getMessage(w http.ResponseWriter, r *http.Request, c caller) error {
	m, raw, done, err := s.message(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	answer(w, http.StatusOK, parsedOf(m, raw))
	return nil
}

func parsedOf(m message.Message, raw []byte) api.FullMessage {
	p := mail.Read(raw)
	out := api.FullMessage{Message: messageOf(m), Headers: []api.Field{}, Text: p.Text, HTML: p.HTML}
	out.Warnings = append([]string{}, p.Warnings...)
	// A list of messages shows the first of many files and says so; here are all.
	for _, a := range p.Attachments[min(len(p.Attachments), len(out.Attachments)):] {
		out.Attachments = append(out.Attachments, api.File{Name: a.Name, ContentType: a.ContentType, Size: int64(len(a.Data)), SHA256: a.Digest()})
	}
	for _, f := range p.Header {
		out.Headers = append(out.Headers, api.Field{Name: f.Name, Value: f.Value})
	}
	if m.Security != nil {
		out.Security.Findings = append(out.Security.Findings, findingsOf(m.Security.Findings)...)
	}
	out.SafeContent = safeOf(out.Message, p.Text, p.HTML)
	return out
}

func (s messageServer) getRaw(w http.ResponseWriter, r *http.Request, c caller) error {
	m, raw, done, err := s.message(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	door.Download(w, "message/rfc822", m.ID+".eml")
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(raw))
	return nil
}

func (s messageServer) getAttachment(w http.ResponseWriter, r *http.Request, c caller) error {
	f, done, err := s.attachment(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	door.Download(w, door.FileType(f.ContentType), door.FileName(f.Name))
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.Data))
	return nil
}
