package mailapi

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"postern/internal/api"
	"postern/internal/door"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/quota"
	"postern/internal/semaphore"
)

// A sendServer serves proposals to send mail, and the limits of sending.
type sendServer struct {
	access
	sendSlots

	gate *oversight.Gate
	post *mailbox.PostOffice
}

func (s sendServer) routes() []route {
	return []route{
		{"POST", "/v1/inboxes/{inbox}/messages", maxSend, s.send},
		{"POST", "/v1/inboxes/{inbox}/messages/{id}/reply", maxSend, s.reply},
		{"POST", "/v1/inboxes/{inbox}/messages/{id}/forward", maxSend, s.forward},
		{"GET", "/v1/inboxes/{inbox}/sending", 0, s.getSending},
		{"POST", "/v1/inboxes/{inbox}/sending", maxBody, s.setSending},
		{"GET", "/v1/sending", 0, s.getSending},
		{"POST", "/v1/sending", maxBody, s.setSending},
		{"POST", "/v1/actions/{id}/revision", maxSend, s.revise},
		{"POST", "/v1/actions/{id}/cancel", 0, s.cancel},
	}
}

// outgoing returns what in asks for.
func outgoing(r *http.Request, in *api.NewMessage) (mailbox.Outgoing, error) {
	o := mailbox.Outgoing{
		Draft:  mail.Draft{To: in.To, Cc: in.Cc, Bcc: in.Bcc, Subject: in.Subject, Text: in.Text, HTML: in.HTML, Markdown: in.Markdown, InReplyTo: in.InReplyTo},
		SendAt: in.SendAt, Timing: mailbox.Timing(in.GateTiming), Bulk: in.Bulk, IdempotencyKey: in.IdempotencyKey, AllowDuplicate: in.AllowDuplicate,
	}
	if in.InReplyTo != "" {
		o.References = []string{in.InReplyTo}
	}
	if in.UndoSeconds != nil {
		undo, err := undoTime(*in.UndoSeconds)
		if err != nil {
			return o, err
		}
		o.Undo = &undo
	}
	for i, a := range in.Attachments {
		data, err := base64.StdEncoding.DecodeString(a.Content)
		if err != nil {
			return o, fmt.Errorf("%w: attachments[%d].content_base64: is not base64", errRequest, i)
		}
		o.Attachments = append(o.Attachments, mail.Attachment{Name: a.Name, ContentType: a.ContentType, Data: data})
	}
	key, err := idempotencyKey(r.Header)
	switch {
	case err != nil:
		return o, err
	case key != "" && in.IdempotencyKey != "" && key != in.IdempotencyKey:
		return o, fmt.Errorf("%w: idempotency_key: differs from the header Idempotency-Key; give one of the two", errRequest)
	case key != "":
		o.IdempotencyKey = key
	}
	return o, nil
}

func undoTime(n int64) (time.Duration, error) {
	if n < 0 || n > int64(quota.MaxUndo/time.Second) {
		return 0, fmt.Errorf("%w: undo_seconds: must be 0 to %d", errRequest, quota.MaxUndo/time.Second)
	}
	return time.Duration(n) * time.Second, nil
}

// idempotencyKey returns the key of a request (draft-ietf-httpapi-idempotency-key-header):
// a string in quotation marks. Many clients leave those out.
func idempotencyKey(h http.Header) (string, error) {
	values := h.Values("Idempotency-Key")
	if len(values) == 0 {
		return "", nil
	}
	bad := fmt.Errorf(`%w: header Idempotency-Key: must be one string of at most 255 visible characters, as in "8e03978e"`, errRequest)
	v := strings.TrimSpace(values[0])
	if len(values) > 1 {
		return "", bad
	}
	if inner, ok := strings.CutPrefix(v, `"`); ok {
		if inner, ok = strings.CutSuffix(inner, `"`); !ok {
			return "", bad
		}
		v = strings.NewReplacer(`\"`, `"`, `\\`, `\`).Replace(inner)
	}
	if v == "" || len(v) > 255 || strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r > '~' }) {
		return "", bad
	}
	return v, nil
}

// sendSlots bounds the requests with large bodies that are served at the same
// time.
type sendSlots struct{ slots *semaphore.Keyed }

// begin makes room for one more request with a large body, until done is called.
func (s sendSlots) begin(w http.ResponseWriter, r *http.Request, inbox string) (done func(), err error) {
	done, err = s.slots.Acquire(r.Context(), inbox)
	if err != nil {
		return nil, err
	}
	// The attack: bodies that trickle in and keep the others waiting.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(time.Minute)) // not every connection has deadlines
	return done, nil
}

func (s sendServer) send(w http.ResponseWriter, r *http.Request, c caller) error {
	b, err := s.own(r, c)
	if err != nil {
		return err
	}
	done, err := s.begin(w, r, b.ID)
	if err != nil {
		return err
	}
	defer done()
	var in api.NewMessage
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	o, err := outgoing(r, &in)
	if err != nil {
		return err
	}
	o.Inbox = b.ID
	p, err := s.post.Send(r.Context(), c.Principal, "rest", o)
	if err != nil {
		return err
	}
	return answerSend(w, p)
}

func (s sendServer) reply(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.Reply
	return s.about(w, r, c, &in, &in.NewMessage, func(o *mailbox.Outgoing, id string) {
		o.ReplyTo, o.ReplyAll, o.Quote = id, in.ReplyAll, in.Quote
	})
}

func (s sendServer) forward(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.NewMessage
	return s.about(w, r, c, &in, &in, func(o *mailbox.Outgoing, id string) { o.Forward = id })
}

// about proposes to send something about a message of the inbox. In is read
// from the request, and common is what of it all requests have.
func (s sendServer) about(w http.ResponseWriter, r *http.Request, c caller, in any, common *api.NewMessage, what func(*mailbox.Outgoing, string)) error {
	k, id, err := s.item(r, c)
	if err != nil {
		return err
	}
	done, err := s.begin(w, r, k.Inbox())
	if err != nil {
		return err
	}
	defer done()
	if err := door.Decode(r, in); err != nil {
		return err
	}
	o, err := outgoing(r, common)
	if err != nil {
		return err
	}
	o.Inbox, o.Key = k.Inbox(), k
	what(&o, id)
	p, err := s.post.Send(r.Context(), c.Principal, "rest", o)
	if err != nil {
		return err
	}
	return answerSend(w, p)
}

// revise puts another message in the place of one that has not left.
func (s sendServer) revise(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	// Before a large body is read: a caller without access learns nothing.
	who, err := s.post.As(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	a, err := s.gate.Action(r.Context(), who, id)
	if err != nil {
		return err
	}
	done, err := s.begin(w, r, a.Inbox)
	if err != nil {
		return err
	}
	defer done()
	var in api.RevisedMessage
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	o, err := outgoing(r, &in.NewMessage)
	if err != nil {
		return err
	}
	p, err := s.post.Revise(r.Context(), c.Principal, "rest", id, in.Version, o)
	if err != nil {
		return err
	}
	return answerSend(w, p)
}

// cancel takes back what has not begun to leave.
func (s sendServer) cancel(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	a, err := s.post.Cancel(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, actionOf(c, a))
	return nil
}

func answerSend(w http.ResponseWriter, p mailbox.Proposed) error {
	rateLimits(w.Header(), p.Left)
	if p.Replayed {
		w.Header().Set("Idempotency-Replayed", "true")
	}
	status := api.StatusApproved
	switch p.State {
	case oversight.Pending:
		status = api.StatusPending
	case oversight.Scheduled:
		status = api.StatusScheduled
	case oversight.Denied:
		return &blockedError{p.ID, p.Verdict}
	case oversight.Approved, oversight.Executing, oversight.Done, oversight.Failed, oversight.Unknown, oversight.Cancelled:
	}
	w.Header().Set("Location", "/v1/actions/"+p.ID)
	answer(w, http.StatusAccepted, api.Proposed{
		ID: p.ID, Status: status, Digest: p.Hex(), CreatedAt: p.Created, Version: p.Version, SendAt: moment(p.SendAt), DueAt: moment(p.Due), Note: p.Note,
	})
	return nil
}

// wholeSeconds returns d in whole seconds, no sooner.
func wholeSeconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

// rateLimits sets the headers that tell what is left of which limit
// (draft-ietf-httpapi-ratelimit-headers).
func rateLimits(h http.Header, left []quota.Quota) {
	var policy, now []string
	seen := map[string]bool{}
	for _, q := range left {
		if seen[q.Name] {
			continue
		}
		seen[q.Name] = true
		unit := ""
		switch {
		case strings.HasSuffix(q.Name, "-bytes"):
			unit = `;qu="content-bytes"`
		case strings.HasSuffix(q.Name, "-recipients"):
			unit = `;qu="recipients"`
		}
		name := strconv.Quote(q.Name)
		policy = append(policy, fmt.Sprintf("%s;q=%d;w=%d%s", name, q.Limit, wholeSeconds(q.Window), unit))
		now = append(now, fmt.Sprintf("%s;r=%d;t=%d", name, q.Left, wholeSeconds(q.Resets)))
	}
	if len(policy) > 0 {
		h.Set("RateLimit-Policy", strings.Join(policy, ", "))
		h.Set("RateLimit", strings.Join(now, ", "))
	}
}

// getSending tells how an inbox sends, or, with no inbox in the path, the project.
func (s sendServer) getSending(w http.ResponseWriter, r *http.Request, c caller) error {
	set, left, err := s.post.Quotas.Sends(r.Context(), c.Principal, r.PathValue("inbox"))
	if err != nil {
		return err
	}
	rateLimits(w.Header(), left)
	answer(w, http.StatusOK, sendStatusOf(set, left))
	return nil
}

func sendStatusOf(set quota.Sending, left []quota.Quota) api.SendStatus {
	out := api.SendStatus{SendSettings: api.SendSettings{UndoSeconds: int64(set.Undo / time.Second), Limits: api.SendLimits(set.Limits)}, Left: []api.Quota{}}
	for _, q := range left {
		out.Left = append(out.Left, api.Quota{Name: q.Name, Limit: q.Limit, Left: q.Left, WindowSeconds: wholeSeconds(q.Window), ResetsIn: wholeSeconds(q.Resets)})
	}
	return out
}

func (s sendServer) setSending(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.SendSettings
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	undo, err := undoTime(in.UndoSeconds)
	if err != nil {
		return err
	}
	if err := s.post.Quotas.SetSending(r.Context(), c.Principal, r.PathValue("inbox"), quota.Sending{Undo: undo, Limits: quota.Limits(in.Limits)}); err != nil {
		return err
	}
	return s.getSending(w, r, c)
}
