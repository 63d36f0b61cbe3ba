package mailapi

import (
	"bytes"
	"fmt"
	"mime"
	"net/http"
	"strings"
	"time"

	"postern/internal/api"
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

// download makes an answer something to keep, which no browser shows as a page
// of this server's or runs. Name is one of ours or was made safe.
func download(w http.ResponseWriter, contentType, name string) {
	h := w.Header()
	h.Set("Content-Type", contentType)
	disposition := mime.FormatMediaType("attachment", map[string]string{"filename": name})
	if disposition == "" {
		disposition = "attachment"
	}
	h.Set("Content-Disposition", disposition)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
}

func (s messageServer) getRaw(w http.ResponseWriter, r *http.Request, c caller) error {
	m, raw, done, err := s.message(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	download(w, "message/rfc822", m.ID+".eml")
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(raw))
	return nil
}

func (s messageServer) getAttachment(w http.ResponseWriter, r *http.Request, c caller) error {
	f, done, err := s.attachment(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	download(w, fileType(f.ContentType), fileName(f.Name))
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.Data))
	return nil
}

// fileType returns the media type that a sender gave a file, unless it is one
// that browsers and mail programs run, or read as something else than a file.
func fileType(claimed string) string {
	const none = "application/octet-stream"
	t, _, err := mime.ParseMediaType(claimed)
	if err != nil {
		return none
	}
	main, sub, ok := strings.Cut(t, "/")
	switch {
	case !ok || main == "multipart" || main == "message" || main == "model":
		return none
	case strings.Contains(sub, "html"), strings.Contains(sub, "xml"), strings.Contains(sub, "script"), strings.Contains(sub, "css"), strings.Contains(sub, "wasm"), strings.Contains(sub, "multipart"), strings.Contains(sub, "shockwave"):
		return none
	}
	return t
}

// fileName returns a name that is safe to create in any folder. [mail.Read] has
// taken folders and unseen characters out of it.
func fileName(name string) string {
	// The attacks: .bashrc, a device's name, "report.pdf ..", options of commands.
	name = strings.TrimRight(strings.Map(func(r rune) rune {
		if strings.ContainsRune(`/\:*?"<>|`, r) || r < ' ' {
			return '_'
		}
		return r
	}, name), ". ")
	if name == "" || strings.ContainsRune(".-~ ", rune(name[0])) {
		name = "_" + name
	}
	base, _, _ := strings.Cut(strings.ToUpper(name), ".")
	base = strings.TrimRight(base, " ")
	if len(base) == 3 && strings.Contains("CON PRN AUX NUL", base) || len(base) == 4 && (strings.HasPrefix(base, "COM") || strings.HasPrefix(base, "LPT")) {
		name = "_" + name
	}
	return name
}
