package multimail

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/door"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/scan"
	"postern/internal/seal"
	"postern/internal/store"
)

func (s *Server) emailRoutes() []route {
	return []route{
		{method: "GET", path: "/v1/mailboxes/{mailbox}/emails", serve: s.listEmails},
		{method: "GET", path: "/v1/mailboxes/{mailbox}/emails/{email}", serve: s.getEmail},
		{method: "GET", path: "/v1/mailboxes/{mailbox}/emails/{email}/attachments/{name}", serve: s.getAttachment},
		{method: "GET", path: "/v1/mailboxes/{mailbox}/emails/{email}/attachments/{name}/url", serve: s.getAttachmentURL},
		{method: "GET", path: "/v1/mailboxes/{mailbox}/emails/{email}/tags", serve: s.getTags},
		{method: "PUT", path: "/v1/mailboxes/{mailbox}/emails/{email}/tags", body: maxBody, serve: s.setTags},
		{method: "DELETE", path: "/v1/mailboxes/{mailbox}/emails/{email}/tags/{key}", serve: s.deleteTag},
		{method: "GET", path: "/v1/mailboxes/{mailbox}/threads/{thread}", serve: s.getThread},
	}
}

// The states of an email.
const (
	unread        = "unread"
	read          = "read"
	archived      = "archived"
	deleted       = "deleted"
	pendingScan   = "pending_scan" // it is on its way out and has not left
	pendingSend   = "pending_send_approval"
	pendingIn     = "pending_inbound_approval"
	scheduled     = "scheduled"
	sent          = "sent" // by the id of its action; its copy in the mailbox is read
	rejected      = "rejected"
	cancelled     = "cancelled"
	sendFailed    = "send_failed"
	spamFlagged   = "spam_flagged"
	spamConfirmed = "spam_quarantined"
)

// reportedSpam is the label of messages that a program reported as spam.
const reportedSpam = "reported-spam"

// A summary is what a list shows of an email. Addresses are bare. The attack: a
// display name that reads like the address of somebody else.
type summary struct {
	ID             string     `json:"id"`
	MailboxID      string     `json:"mailbox_id"`
	From           string     `json:"from"`
	To             []string   `json:"to"`
	Subject        string     `json:"subject"`
	Direction      string     `json:"direction"`
	Status         string     `json:"status"`
	SpamScore      *int       `json:"spam_score"` // 0 to 100: how much it looks like an attack
	SpamVerdict    *string    `json:"spam_verdict"`
	ReceivedAt     time.Time  `json:"received_at"`
	ThreadID       *string    `json:"thread_id"`
	HasAttachments bool       `json:"has_attachments"`
	DeliveredAt    *time.Time `json:"delivered_at"`
	BouncedAt      *time.Time `json:"bounced_at"`
	BounceType     *string    `json:"bounce_type"`
}

func bare(address string) string {
	if a, err := mail.ParseAddress("address", address); err == nil {
		return a.Addr
	}
	return address
}

func addrs(list []mail.Address) []string {
	return each(list, func(a mail.Address) string { return a.Addr })
}

func summaryOf(m message.Message) summary {
	out := summary{
		ID: m.ID, MailboxID: m.Inbox, From: bare(m.From), To: each(m.To, bare), Subject: m.Subject, Direction: "inbound", Status: unread,
		ReceivedAt: m.At, ThreadID: orNull(m.Thread), HasAttachments: len(m.Attachments) > 0,
	}
	has := func(label string) bool { return slices.Contains(m.Labels, label) }
	switch {
	case has(mailbox.LabelTrash):
		out.Status = deleted
	case has(reportedSpam):
		out.Status = spamConfirmed
	case has(mailbox.LabelArchived):
		out.Status = archived
	case has(mailbox.LabelRead):
		out.Status = read
	}
	if m.Direction == message.Out {
		out.Direction = "outbound"
	}
	if sec := m.Security; sec != nil {
		verdict := "clean"
		switch {
		case out.Status == spamConfirmed:
			verdict = "quarantined"
		case sec.Score >= scan.Flagged:
			verdict = "flagged"
		}
		out.SpamScore, out.SpamVerdict = new(int(sec.Score*100)), &verdict
	}
	return out
}

// heldOf is summaryOf for a message that waits for a person.
func heldOf(m message.Message) summary {
	out := summaryOf(m)
	out.Status, out.SpamVerdict = spamConfirmed, new("quarantined")
	if m.Security != nil && m.Security.Reason == message.ForMode {
		out.Status, out.SpamVerdict = pendingIn, nil
	}
	return out
}

// statusOfAction returns the state of an email that has not left, or of one by the id
// of its action.
func statusOfAction(a oversight.Action) string {
	switch a.State {
	case oversight.Scheduled:
		return scheduled
	case oversight.Pending:
		return pendingSend
	case oversight.Denied:
		return rejected
	case oversight.Cancelled:
		return cancelled
	case oversight.Failed, oversight.Unknown:
		return sendFailed
	case oversight.Done:
		return sent
	case oversight.Approved, oversight.Executing:
	}
	if a.SendAt.After(time.Now()) {
		return scheduled
	}
	return pendingScan
}

// waiting are the states of actions whose email has no copy in the mailbox.
var waiting = []oversight.State{
	oversight.Scheduled, oversight.Pending, oversight.Denied, oversight.Approved, oversight.Executing, oversight.Failed, oversight.Unknown, oversight.Cancelled,
}

// proposed returns an email that was proposed, and what it says. The content is not
// kept for ever; then only the recipients are known.
func (s *Server) proposed(a oversight.Action, address string) (summary, mail.Message) {
	out := summary{
		ID: a.ID, MailboxID: a.Inbox, From: address, To: append([]string{}, a.Request.To...), Direction: "outbound", Status: statusOfAction(a), ReceivedAt: a.Created,
		HasAttachments: len(a.Request.Files) > 0,
	}
	if len(a.Payload) == 0 || mailbox.ByRequest(a.Payload) {
		return out, mail.Message{}
	}
	env, err := mail.ParsePayload(a.Payload)
	if err != nil { // unreachable: we composed or checked it
		return out, mail.Message{}
	}
	p := mail.Read(env.Raw)
	out.To, out.Subject, out.HasAttachments = addrs(p.To), p.Subject, len(p.Attachments) > 0
	return out, p
}

var (
	messageForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^msg_[A-Z0-9]{10,40}$`) })
	actionForm  = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^act_[A-Z0-9]{10,40}$`) })
	idForm      = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z]{3}_[A-Z0-9]{10,40}$`) })
)

// id returns a parameter of the path that is an id. What has not the form of one is
// not found.
func id(r *http.Request, name string) (string, error) {
	if v := r.PathValue(name); idForm().MatchString(v) {
		return v, nil
	}
	return "", fmt.Errorf("%s in the path: %w", name, store.ErrNotFound)
}

// email returns what the path names in a mailbox, if it has the form of an email's id.
func email(r *http.Request) (string, error) {
	v := r.PathValue("email")
	if messageForm().MatchString(v) || actionForm().MatchString(v) {
		return v, nil
	}
	return "", fmt.Errorf("email in the path: %w", store.ErrNotFound)
}

// action returns an email that the mailbox of k proposed.
func (s *Server) action(ctx context.Context, c caller, inbox, id string) (oversight.Action, error) {
	who := c.Principal
	who.Inbox = inbox // the caller has shown that it has a part in it
	a, err := s.gate.Action(ctx, who, id)
	if err == nil && (a.Inbox != inbox || a.Kind != mailbox.SendKind) {
		err = fmt.Errorf("email %s: %w", id, store.ErrNotFound)
	}
	return a, err
}

// A whole is one email with what it says.
type whole struct {
	summary

	Cc          []string          `json:"cc"`
	Markdown    string            `json:"markdown"`
	Attachments []attachment      `json:"attachments"`
	ApprovedAt  *time.Time        `json:"approved_at"`
	ApprovedBy  *string           `json:"approved_by"` // null: agents do not learn who decides
	Reason      *string           `json:"reason"`      // why it was rejected, cancelled or failed
	Tags        map[string]string `json:"tags"`
}

type attachment struct {
	Name        string `json:"name"`
	Size        int    `json:"size"` // bytes
	ContentType string `json:"content_type"`
}

// names returns a name for each file, all different: a path names a file by it.
func names(files []mail.Attachment) []string {
	out, seen := make([]string, len(files)), map[string]bool{}
	for i, f := range files {
		name := cmp.Or(f.Name, "attachment")
		for n := 2; seen[name]; n++ {
			name = fmt.Sprintf("%s (%d)", cmp.Or(f.Name, "attachment"), n)
		}
		out[i], seen[name] = name, true
	}
	return out
}

// shown adds to an email what p says: the text as a person sees it, because what is
// hidden from people is not for models either.
func shown(sum summary, p mail.Message) whole {
	out := whole{summary: sum, Cc: addrs(p.Cc), Attachments: []attachment{}, Tags: map[string]string{}}
	out.Markdown = scan.Read(p.Text, p.HTML).Text
	if len(out.Markdown) > mail.MaxText {
		out.Markdown = strings.ToValidUTF8(out.Markdown[:mail.MaxText], "")
	}
	for i, name := range names(p.Attachments) {
		out.Attachments = append(out.Attachments, attachment{name, len(p.Attachments[i].Data), p.Attachments[i].ContentType})
	}
	return out
}

// content returns the email that the request names, and its content. Call done once
// it is answered.
func (s *Server) content(w http.ResponseWriter, r *http.Request, c caller) (k *seal.Key, sum summary, p mail.Message, done func(), err error) {
	fail := func(err error) (*seal.Key, summary, mail.Message, func(), error) {
		return nil, summary{}, mail.Message{}, nil, err
	}
	if k, err = s.open(r, c, seal.Read); err != nil {
		return fail(err)
	}
	id, err := email(r)
	if err != nil {
		return fail(err)
	}
	leave, err := s.post.Reading(r.Context(), k.Inbox())
	if err != nil {
		return fail(err)
	}
	free := door.Patient(w, answerTime)
	done = func() { free(); leave() }
	if actionForm().MatchString(id) {
		b, _, err := s.own(r, c)
		if err == nil {
			var a oversight.Action
			if a, err = s.action(r.Context(), c, b.ID, id); err == nil {
				sum, p = s.proposed(a, b.Address)
				return k, sum, p, done, nil
			}
		}
		done()
		return fail(err)
	}
	m, raw, err := s.post.Message(r.Context(), c.Principal, k, id)
	if err == nil {
		return k, summaryOf(m), mail.Read(raw), done, nil
	}
	if m, raw, err := s.post.HeldMessage(r.Context(), c.Principal, k, id); err == nil {
		return k, heldOf(m), mail.Read(raw), done, nil
	}
	done()
	return fail(err)
}

func (s *Server) getEmail(w http.ResponseWriter, r *http.Request, c caller) error {
	k, sum, p, done, err := s.content(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	out := shown(sum, p)
	if actionForm().MatchString(sum.ID) {
		if err := s.addDecision(r, c, k, &out); err != nil {
			return err
		}
	} else if tags, err := s.post.Tags(r.Context(), c.Principal, k, sum.ID); err == nil { // a message that is held has none
		out.Tags = tags
	}
	if out.Status == unread && k.Allows(seal.Send) { // a reading key changes nothing
		if _, err := s.post.Label(r.Context(), c.Principal, k, []string{sum.ID}, []string{mailbox.LabelRead}, nil); err != nil {
			return err
		}
		out.Status = read
	}
	answer(w, http.StatusOK, out)
	return nil
}

// addDecision adds what became of a proposed email. Who decided is not told.
func (s *Server) addDecision(r *http.Request, c caller, k *seal.Key, out *whole) error {
	a, err := s.action(r.Context(), c, k.Inbox(), out.ID)
	if err != nil {
		return err
	}
	reason := cmp.Or(a.Reason, a.ResultForProposer())
	if a.State == oversight.Denied && a.Decider == "" {
		reason = a.Verdict
	}
	out.Reason = orNull(reason)
	switch a.State {
	case oversight.Approved, oversight.Executing, oversight.Done, oversight.Failed, oversight.Unknown:
		out.ApprovedAt = orNull(a.Decided)
	case oversight.Scheduled, oversight.Pending, oversight.Denied, oversight.Cancelled:
	}
	who := c.Principal
	who.Inbox = k.Inbox()
	ds, err := s.post.Deliveries(r.Context(), who, a.ID)
	if err != nil {
		return err
	}
	for _, d := range ds {
		switch d.State {
		case oversight.PartDelivered:
			out.DeliveredAt = orNull(d.Settled)
		case oversight.PartBounced:
			out.BouncedAt, out.BounceType = orNull(d.Settled), new("hard")
		default: // it is on its way, or was not sent
		}
	}
	return nil
}

func (s *Server) getThread(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c, seal.Read)
	if err != nil {
		return err
	}
	thread, err := id(r, "thread")
	if err != nil {
		return err
	}
	ms, err := s.post.Thread(r.Context(), c.Principal, k, thread)
	if err != nil {
		return err
	}
	seen, participants := map[string]bool{}, []string{}
	for _, m := range ms {
		for _, a := range slices.Concat([]string{m.From}, m.To, m.Cc) {
			if a = bare(a); !seen[strings.ToLower(a)] {
				seen[strings.ToLower(a)] = true
				participants = append(participants, a)
			}
		}
	}
	last := ms[len(ms)-1]
	answer(w, http.StatusOK, map[string]any{
		"thread_id": thread, "message_count": len(ms), "participants": participants, "last_activity": last.At,
		"has_unanswered_inbound": last.Direction == message.In, "emails": each(ms, summaryOf),
	})
	return nil
}

// moment returns a time of the query.
func moment(q url.Values, name string) (t time.Time, err error) {
	v := q.Get(name)
	if v == "" {
		return t, nil
	}
	for _, form := range []string{time.RFC3339, "2006-01-02"} {
		if t, err = time.Parse(form, v); err == nil {
			return t, nil
		}
	}
	return t, fmt.Errorf("%w: %s: must be a time as in 2026-01-02T15:04:05Z", errRequest, name)
}
