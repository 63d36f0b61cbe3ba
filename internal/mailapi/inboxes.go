package mailapi

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"regexp"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

var inboxRoutes = []route{
	{"GET", "/v1/inboxes", 0, (*Server).listInboxes},
	{"POST", "/v1/inboxes", maxBody, (*Server).createInbox},
	{"POST", "/v1/inboxes/{inbox}/messages", maxSend, (*Server).send},
}

type inboxJSON struct {
	ID        string      `json:"id"`
	Address   string      `json:"address"`
	Mode      policy.Mode `json:"mode"`
	CreatedAt time.Time   `json:"created_at"`
	Key       string      `json:"key,omitempty"` // in the answer to its creation, once
}

func inboxOf(b mailbox.Inbox) inboxJSON {
	return inboxJSON{ID: b.ID, Address: b.Address, Mode: b.Mode, CreatedAt: b.Created}
}

func (s *Server) listInboxes(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Inboxes(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	out := []inboxJSON{}
	for _, b := range list {
		out = append(out, inboxOf(b))
	}
	answer(w, http.StatusOK, map[string]any{"inboxes": out})
	return nil
}

func (s *Server) createInbox(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		Address string      `json:"address"`
		Mode    policy.Mode `json:"mode"`
	}
	if err := decode(r, &in); err != nil {
		return err
	}
	b, key, err := s.post.CreateInbox(r.Context(), c.Principal, mailbox.NewInbox{Address: in.Address, Mode: in.Mode}, c.key)
	if err != nil {
		return err
	}
	out := inboxOf(b)
	out.Key = key.Reveal()
	answer(w, http.StatusCreated, out)
	return nil
}

// open returns the key of the inbox that the request names, if the caller's
// credential opens it. Everybody else gets the same answer whether the inbox
// exists or not, so that nobody learns addresses by asking.
func (s *Server) open(r *http.Request, c caller) (*mailbox.Key, error) {
	b, err := s.own(r, c)
	if err != nil {
		return nil, err
	}
	return s.post.Open(r.Context(), c.Principal, c.key, b.ID)
}

// own returns the inbox that the request names if the caller's credential has a
// part in it.
func (s *Server) own(r *http.Request, c caller) (mailbox.Inbox, error) {
	if c.key == "" {
		return mailbox.Inbox{}, fmt.Errorf("a %s manages inboxes and opens none, only the inbox's own key (pib_…) does: %w", c.Kind, auth.ErrForbidden)
	}
	b, _, err := s.post.Reach(r.Context(), c.Principal, r.PathValue("inbox"))
	return b, err
}

// idForm is compiled when it is first needed: each part of a sandbox is this
// program, and would otherwise compile it as it starts.
var idForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z]{3}_[A-Z0-9]{10,40}$`) })

// id returns the id in the request's path. What has not the form of one is not
// found.
func id(r *http.Request) (string, error) {
	if v := r.PathValue("id"); idForm().MatchString(v) {
		return v, nil
	}
	return "", fmt.Errorf("id in the path: %w", store.ErrNotFound)
}

type sendJSON struct {
	To          []string `json:"to"`
	Cc          []string `json:"cc"`
	Bcc         []string `json:"bcc"`
	Subject     string   `json:"subject"`
	Text        string   `json:"text"`
	HTML        string   `json:"html"`
	InReplyTo   string   `json:"in_reply_to"`
	Attachments []struct {
		Name        string `json:"name"`
		Content     string `json:"content_base64"`
		ContentType string `json:"content_type"`
	} `json:"attachments"`
}

func (s *Server) send(w http.ResponseWriter, r *http.Request, c caller) error {
	if _, err := s.own(r, c); err != nil {
		return err
	}
	select {
	case s.sending <- struct{}{}:
		defer func() { <-s.sending }()
	case <-r.Context().Done():
		return r.Context().Err()
	}
	// The attack: bodies that trickle in and keep the others waiting.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(time.Minute)) // not every connection has deadlines
	var in sendJSON
	if err := decode(r, &in); err != nil {
		return err
	}
	d := mail.Draft{To: in.To, Cc: in.Cc, Bcc: in.Bcc, Subject: in.Subject, Text: in.Text, HTML: in.HTML, InReplyTo: in.InReplyTo}
	if in.InReplyTo != "" {
		d.References = []string{in.InReplyTo}
	}
	for i, a := range in.Attachments {
		data, err := base64.StdEncoding.DecodeString(a.Content)
		if err != nil {
			return fmt.Errorf("%w: attachments[%d].content_base64: is not base64", errRequest, i)
		}
		d.Attachments = append(d.Attachments, mail.Attachment{Name: a.Name, ContentType: a.ContentType, Data: data})
	}
	a, err := s.post.Send(r.Context(), c.Principal, "rest", d)
	if err != nil {
		return err
	}
	status := "pending_send_approval"
	switch a.State {
	case oversight.Pending:
	case oversight.Denied:
		return &blockedError{a.ID, a.Verdict}
	default:
		status = "approved"
	}
	w.Header().Set("Location", "/v1/actions/"+a.ID)
	answer(w, http.StatusAccepted, map[string]any{"id": a.ID, "status": status, "digest": a.Hex(), "created_at": a.Created})
	return nil
}
