package multimail

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"time"

	"postern/internal/door"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/seal"
)

func (s *Server) sendRoutes() []route {
	return []route{
		{method: "POST", path: "/v1/mailboxes/{mailbox}/send", body: maxSend, serve: s.send},
		{method: "POST", path: "/v1/mailboxes/{mailbox}/reply/{email}", body: maxSend, serve: s.reply},
		{method: "POST", path: "/v1/mailboxes/{mailbox}/emails/{email}/cancel", serve: s.cancel},
		{method: "PATCH", path: "/v1/mailboxes/{mailbox}/emails/{email}/schedule", body: maxBody, serve: s.reschedule},
	}
}

// An outgoing is an email to be sent, in MultiMail's words.
type outgoing struct {
	To          []string `json:"to"`
	Cc          []string `json:"cc"`
	Bcc         []string `json:"bcc"`
	Subject     string   `json:"subject"`
	Markdown    string   `json:"markdown"`
	Attachments []struct {
		Name        string `json:"name"`
		Content     string `json:"content_base64"`
		ContentType string `json:"content_type"`
	} `json:"attachments"`
	IdempotencyKey string `json:"idempotency_key"`
	SendAt         string `json:"send_at"`
	GateTiming     string `json:"gate_timing"`
}

func (in *outgoing) message() (o mailbox.Outgoing, err error) {
	if in.Markdown == "" {
		return o, fmt.Errorf("%w: markdown: is missing", errRequest)
	}
	o = mailbox.Outgoing{
		Draft:  mail.Draft{To: in.To, Cc: in.Cc, Bcc: in.Bcc, Subject: in.Subject, Markdown: in.Markdown},
		Timing: mailbox.Timing(in.GateTiming), IdempotencyKey: in.IdempotencyKey,
	}
	if o.SendAt, err = sendAt(in.SendAt); err != nil {
		return o, err
	}
	for i, a := range in.Attachments {
		data, err := base64.StdEncoding.DecodeString(a.Content)
		if err != nil {
			return o, fmt.Errorf("%w: attachments[%d].content_base64: is not base64", errRequest, i)
		}
		o.Attachments = append(o.Attachments, mail.Attachment{Name: a.Name, ContentType: a.ContentType, Data: data})
	}
	return o, nil
}

func sendAt(v string) (t time.Time, err error) {
	if v == "" {
		return t, nil
	}
	if t, err = time.Parse(time.RFC3339, v); err != nil || v[len(v)-1] != 'Z' {
		return t, fmt.Errorf("%w: send_at: must be a time in UTC as in 2026-01-02T15:04:05Z", errRequest)
	}
	return t, nil
}

// proposing returns the inbox that the request names, in which the caller's
// credential may propose. It needs no key: what is proposed is not sealed.
func (s *Server) proposing(r *http.Request, c caller) (id string, err error) {
	b, scope, err := s.own(r, c)
	if err == nil && !scope.Includes(seal.Send) {
		err = keyring.Lacks(b.ID, scope, seal.Send)
	}
	return b.ID, err
}

// room makes room for one more request with a large body, until done is called.
func (s *Server) room(w http.ResponseWriter, r *http.Request, inbox string) (done func(), err error) {
	if done, err = s.sending.Acquire(r.Context(), inbox); err != nil {
		return nil, err
	}
	// The attack: bodies that trickle in and keep the others waiting.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(time.Minute)) // not every connection has deadlines
	return done, nil
}

func (s *Server) send(w http.ResponseWriter, r *http.Request, c caller) error {
	inbox, err := s.proposing(r, c)
	if err != nil {
		return err
	}
	done, err := s.room(w, r, inbox)
	if err != nil {
		return err
	}
	defer done()
	var in outgoing
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	o, err := in.message()
	if err != nil {
		return err
	}
	o.Inbox = inbox
	p, err := s.post.Send(r.Context(), c.Principal, "rest", o)
	if err != nil {
		return err
	}
	return answerSend(w, p, "")
}

func (s *Server) reply(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c, readAndSend)
	if err != nil {
		return err
	}
	id, err := email(r)
	if err != nil {
		return err
	}
	m, err := s.post.Listed(r.Context(), c.Principal, k, id)
	if err != nil {
		return err
	}
	done, err := s.room(w, r, k.Inbox())
	if err != nil {
		return err
	}
	defer done()
	var in outgoing
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if len(in.To) > 0 || in.Subject != "" {
		return fmt.Errorf("%w: to, subject: are taken from the email that is answered; use /send for others", errRequest)
	}
	o, err := in.message()
	if err != nil {
		return err
	}
	o.Inbox, o.Key, o.ReplyTo = k.Inbox(), k, id
	p, err := s.post.Send(r.Context(), c.Principal, "rest", o)
	if err != nil {
		return err
	}
	return answerSend(w, p, m.Thread)
}

// answerSend answers a proposal. MultiMail scans after it has answered, so its first
// status is always pending_scan. Here the scan is done, and the status is the next.
func answerSend(w http.ResponseWriter, p mailbox.Proposed, thread string) error {
	if p.State == oversight.Denied {
		return &blockedError{p.ID, p.Verdict}
	}
	if p.Replayed {
		answer(w, http.StatusOK, map[string]any{"id": p.ID, "status": "already_sent", "idempotent": true})
		return nil
	}
	messages := map[string]string{
		pendingSend: "A person decides. Do not send it again.",
		scheduled:   "It leaves at its time, if it is approved by then.",
		pendingScan: "It is on its way. Do not send it again.",
	}
	status := statusOfAction(p.Action)
	out := map[string]any{"id": p.ID, "status": status, "thread_id": orNull(thread), "message": messages[status]}
	if p.Note != "" {
		out["note"] = p.Note
	}
	answer(w, http.StatusAccepted, out)
	return nil
}

// proposal returns the email that the request names, which has not become a message.
func (s *Server) proposal(r *http.Request, c caller) (oversight.Action, error) {
	inbox, err := s.proposing(r, c)
	if err != nil {
		return oversight.Action{}, err
	}
	id, err := email(r)
	if err != nil {
		return oversight.Action{}, err
	}
	if !actionForm().MatchString(id) {
		return oversight.Action{}, fmt.Errorf("%w: only an email that has not left (act_…) can be cancelled or changed; mail that arrived and waits is released or dropped by a person", errConflict)
	}
	return s.action(r.Context(), c, inbox, id)
}

func (s *Server) cancel(w http.ResponseWriter, r *http.Request, c caller) error {
	a, err := s.proposal(r, c)
	if err != nil {
		return err
	}
	if a.State != oversight.Cancelled {
		if a, err = s.post.Cancel(r.Context(), c.Principal, a.ID); err != nil {
			return err
		}
	}
	answer(w, http.StatusOK, map[string]any{"id": a.ID, "status": statusOfAction(a)})
	return nil
}

// reschedule changes an email that has not left. What is changed is a new email to
// its reviewers: nobody has approved these bytes.
func (s *Server) reschedule(w http.ResponseWriter, r *http.Request, c caller) error {
	a, err := s.proposal(r, c)
	if err != nil {
		return err
	}
	var in struct {
		SendAt   string    `json:"send_at"`
		To       *[]string `json:"to"`
		Cc       *[]string `json:"cc"`
		Bcc      *[]string `json:"bcc"`
		Subject  *string   `json:"subject"`
		Markdown *string   `json:"markdown"`
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	edit := mail.Edit{To: in.To, Cc: in.Cc, Bcc: in.Bcc, Subject: in.Subject, Text: in.Markdown}
	if edit.Empty() && in.SendAt == "" {
		return fmt.Errorf("%w: body: contains nothing to change", errRequest)
	}
	if len(a.Payload) == 0 || mailbox.ByRequest(a.Payload) {
		return fmt.Errorf("email %s: %w", a.ID, oversight.ErrTooLate)
	}
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		return fmt.Errorf("edit email %s: %w", a.ID, err)
	}
	d, err := edit.Draft(env)
	if err != nil {
		return err
	}
	o := mailbox.Outgoing{Draft: d, SendAt: a.SendAt, Bulk: d.Unsubscribe != ""}
	o.Unsubscribe, o.OneClick = "", false // the way out is made for the new recipients
	if !a.AskAt.IsZero() {
		o.Timing = mailbox.ScheduleFirst
	}
	if in.SendAt != "" {
		if o.SendAt, err = sendAt(in.SendAt); err != nil {
			return err
		}
	}
	p, err := s.post.Revise(r.Context(), c.Principal, "rest", a.ID, a.Version, o)
	if err != nil {
		return err
	}
	if p.State == oversight.Denied {
		return &blockedError{p.ID, p.Verdict}
	}
	answer(w, http.StatusOK, map[string]any{"id": p.ID, "status": statusOfAction(p.Action), "send_at": orNull(p.SendAt)})
	return nil
}
