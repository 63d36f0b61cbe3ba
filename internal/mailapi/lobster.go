package mailapi

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/door"
	"postern/internal/event"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/message"
	"postern/internal/oversight"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/webhook"
)

// A lobsterServer serves LobsterMail's paths.
type lobsterServer struct {
	access
	watcher
	sendSlots

	log     *slog.Logger
	db      *store.DB
	post    *mailbox.PostOffice
	hooks   *webhook.Hooks
	keys    keyAuth
	signups *signupLimiter
	conf    *Config
}

// What follows is LobsterMail's wire, for its unmodified client: paths with
// emails are LobsterMail's, those with messages our own. Its one token for all
// inboxes contradicts isolation. Here a token is an account: a grant that has a
// part in each inbox that it made itself and in no other. A key of an inbox
// works as a token too, for that inbox.
func (s lobsterServer) routes() []route {
	return []route{
		{"GET", "/v1/account", 0, s.lobsterAccount},
		{"POST", "/v1/verify/{provider}", maxBody, s.lobsterVerify},
		{"GET", "/v1/inboxes/{inbox}/emails", 0, s.lobsterEmails},
		{"GET", "/v1/inboxes/{inbox}/emails/poll", 0, s.lobsterPoll},
		{"GET", "/v1/inboxes/{inbox}/emails/{id}", 0, s.lobsterEmail},
		{"GET", "/v1/inboxes/{inbox}/emails/{id}/attachments/{index}", 0, s.lobsterAttachment},
		{"POST", "/v1/inboxes/{inbox}/emails/{id}/extract", 0, s.lobsterExtract},
		{"POST", "/v1/emails/send", maxSend, s.lobsterSend},
		{"GET", "/v1/emails/search", 0, s.lobsterSearch},
		{"GET", "/v1/webhooks", 0, s.lobsterWebhooks},
		{"POST", "/v1/webhooks", maxBody, s.lobsterCreateWebhook},
		{"DELETE", "/v1/webhooks/{id}", 0, s.lobsterDeleteWebhook},
	}
}

// lobsterOpenRoutes are for who has no token yet, or shows it otherwise.
func (s lobsterServer) openRoutes() []route {
	return []route{
		{"POST", "/v1/signup", 0, s.lobsterSignup},
		{"GET", "/v1/ws", 0, s.lobsterSocket},
	}
}

const (
	maxAccountInboxes = 25 // of an account that signed up by itself or was made for somebody
	maxPollSeconds    = 25
	lobsterRisk       = 0.5 // from which its client calls an email a risk
)

var errNotOffered = errors.New("this server does not offer that")

// lobsterAccount tells what a token may do. There are no tiers: all may send,
// and a person decides.
func (s lobsterServer) lobsterAccount(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Directory.Inboxes(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	var received int64
	since := time.Now().UTC()
	if c.key != "" {
		if since, err = s.post.Keys.Made(r.Context(), c.ID); err != nil {
			return err
		}
	}
	for _, b := range list {
		n, err := s.post.Count(r.Context(), b.ID)
		if err != nil {
			return err
		}
		received += n
	}
	limits := map[string]any{"maxInboxes": nil, "dailyEmailLimit": s.dailyLimit(r, c, list), "canSend": c.Kind == auth.Grant || c.Kind == auth.Agent}
	if c.Kind == auth.Grant {
		limits["maxInboxes"] = maxAccountInboxes
	}
	answer(w, http.StatusOK, map[string]any{
		"id": c.ID, "tier": 1, "tierName": string(c.Kind), "limits": limits,
		"usage":                map[string]any{"inboxCount": len(list), "totalEmailsReceived": received},
		"xVerificationPending": false, "createdAt": since, "lastActiveAt": time.Now().UTC(),
	})
	return nil
}

// dailyLimit returns how many emails a day the inboxes of a token may send
// together, 0 if it may send none or that is not limited.
func (s lobsterServer) dailyLimit(r *http.Request, c caller, list []directory.Inbox) (sum int64) {
	for _, b := range list {
		_, left, err := s.post.Quotas.Sends(r.Context(), c.Principal, b.ID)
		if err != nil {
			return 0 // who may not ask may not send
		}
		for _, q := range left {
			if q.Name == "inbox-day" {
				sum += q.Limit
			}
		}
	}
	return sum
}

func (s lobsterServer) lobsterVerify(w http.ResponseWriter, r *http.Request, _ caller) error {
	var in struct {
		Handle string `json:"handle"`
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{
		"status": "verified", "instructions": "There is nothing to verify here: every account may propose to send, and a person decides on each email.",
	})
	return nil
}

// room returns an error if an account has as many inboxes as it may.
func (s inboxServer) room(ctx context.Context, c caller) error {
	if c.Kind != auth.Grant {
		return nil
	}
	// Those that it has deleted count until they are gone: each keeps an
	// address, and a disk is full of them too.
	n, err := s.post.Keys.Opens(ctx, c.ID)
	if err == nil && n >= maxAccountInboxes {
		err = fmt.Errorf("this account has %d inboxes, with those that it deleted in the last days, which is the limit: %w", n, auth.ErrForbidden)
	}
	return err
}

// A lobsterInbox is what LobsterMail's client reads of an inbox, beside the id
// and the address.
type lobsterInbox struct {
	DisplayName *string    `json:"displayName"`
	Domain      string     `json:"domain"`
	IsActive    bool       `json:"isActive"`
	EmailCount  *int64     `json:"emailCount,omitempty"` // for accounts only; it is counted on each request
	ExpiresAt   *time.Time `json:"expiresAt"`
	CreatedAt   time.Time  `json:"createdAt"`
}

type lobsterFile struct {
	Filename    string `json:"filename"`
	ContentType string `json:"contentType"`
	S3Key       string `json:"s3Key"`     // always empty: there is no such thing
	Size        int64  `json:"sizeBytes"` // bytes
}

type lobsterSecurity struct {
	Risk  float64  `json:"injectionRiskScore"` // 0 to 1
	Flags []string `json:"flags"`              // the scan's categories
	SPF   *string  `json:"spf"`
	DKIM  *string  `json:"dkim"`
	DMARC *string  `json:"dmarc"`
}

// A lobsterMail is a message in LobsterMail's words. Addresses are bare: its
// client compares them with ===.
type lobsterMail struct {
	ID             string          `json:"id"`
	Inbox          string          `json:"inboxId"`
	Direction      string          `json:"direction"`
	From           string          `json:"from"`
	To             []string        `json:"to"`
	Cc             []string        `json:"cc"`
	Subject        string          `json:"subject"`
	Preview        string          `json:"preview"`
	Body           *string         `json:"body"` // null in lists
	IsRead         bool            `json:"isRead"`
	HasAttachments bool            `json:"hasAttachments"`
	Thread         string          `json:"threadId"`
	Attachments    []lobsterFile   `json:"attachments"`
	Security       lobsterSecurity `json:"security"`
	Status         string          `json:"status"`
	CreatedAt      time.Time       `json:"createdAt"`
	ReceivedAt     *time.Time      `json:"receivedAt"`
}

func lobsterOf(m message.Message) lobsterMail {
	out := lobsterMail{
		ID: m.ID, Inbox: m.Inbox, Direction: "inbound", From: bare(m.From), To: []string{}, Cc: []string{}, Subject: m.Subject, Preview: m.Preview,
		IsRead: slices.Contains(m.Labels, mailbox.LabelRead), HasAttachments: len(m.Attachments) > 0, Thread: m.Thread, Attachments: []lobsterFile{},
		Security: lobsterSecurity{Flags: []string{}}, Status: "received", CreatedAt: m.At, ReceivedAt: moment(m.At),
	}
	if m.Direction == message.Out {
		out.Direction, out.Status, out.ReceivedAt = "outbound", "sent", nil
	}
	for _, a := range m.To {
		out.To = append(out.To, bare(a))
	}
	for _, a := range m.Cc {
		out.Cc = append(out.Cc, bare(a))
	}
	for _, f := range m.Attachments {
		out.Attachments = append(out.Attachments, lobsterFile{Filename: f.Name, ContentType: f.ContentType, Size: int64(f.Size)})
	}
	if s := m.Security; s != nil {
		out.Security.Risk = s.Score
		for c := range s.Categories {
			out.Security.Flags = append(out.Security.Flags, string(c))
		}
		slices.Sort(out.Security.Flags)
		said := func(c mail.Check) *string {
			if c.Result == "" {
				return nil
			}
			return &c.Result
		}
		out.Security.SPF, out.Security.DKIM, out.Security.DMARC = said(s.Auth.SPF), said(s.Auth.DKIM), said(s.Auth.DMARC)
	}
	return out
}

// wholeOf is lobsterOf with the text as a person sees it: what is hidden from
// people is not for models either.
func wholeOf(m message.Message, raw []byte) lobsterMail {
	out := lobsterOf(m)
	p := mail.Read(raw)
	text := safeOf(messageOf(m), p.Text, p.HTML).SafeText
	out.Body = &text
	return out
}

// bare returns an address without its display name; what is not one address, as
// it is. The attack: a display name that reads like the address of somebody
// else.
func bare(s string) string {
	if a, err := mail.ParseAddress("address", s); err == nil {
		return a.Addr
	}
	return s
}

// instant returns a time of the query.
func instant(q url.Values, name string) (t time.Time, err error) {
	if v := q.Get(name); v != "" {
		if t, err = time.Parse(time.RFC3339, v); err != nil {
			return t, fmt.Errorf("%w: %s: must be a time as in 2026-01-02T15:04:05Z", errRequest, name)
		}
	}
	return t, nil
}

// direction returns a direction of the query; empty means both.
func direction(q url.Values) (message.Direction, error) {
	switch q.Get("direction") {
	case "":
		return "", nil
	case "inbound":
		return message.In, nil
	case "outbound":
		return message.Out, nil
	}
	return "", fmt.Errorf("%w: direction: must be inbound or outbound", errRequest)
}

func (s lobsterServer) lobsterEmails(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	n, err := limit(q, 20, 100)
	if err != nil {
		return err
	}
	l := mailbox.Listing{Limit: n, Cursor: q.Get("cursor")}
	if l.Since, err = instant(q, "since"); err != nil {
		return err
	}
	if l.Direction, err = direction(q); err != nil {
		return err
	}
	ms, next, err := s.post.List(r.Context(), c.Principal, k, l)
	if err != nil {
		return err
	}
	out := map[string]any{"data": lobstersOf(ms)}
	if next != "" {
		out["cursor"] = next // absent on the last page
	}
	answer(w, http.StatusOK, out)
	return nil
}

func lobstersOf(ms []message.Message) []lobsterMail {
	return each(ms, lobsterOf)
}

// lobsterPoll answers with what arrived since a time and fits, as soon as there
// is some, or with 204.
func (s lobsterServer) lobsterPoll(w http.ResponseWriter, r *http.Request, c caller) error {
	k, err := s.open(r, c)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	timeout, err := seconds(q, "timeout", maxPollSeconds, maxPollSeconds)
	if err != nil {
		return err
	}
	since, err := instant(q, "since")
	if err != nil {
		return err
	}
	if since.IsZero() {
		since = time.Now()
	}
	ctx, cancel := context.WithTimeout(r.Context(), timeout)
	defer cancel()
	out := []lobsterMail{}
	err = s.await(ctx, k.Inbox(), func() (bool, error) { //nolint:contextcheck // r's context is what is passed
		// Opened again: a key that was revoked during the wait reads nothing any more.
		k, err := s.open(r, c)
		if err != nil {
			return false, err
		}
		ms, _, err := s.post.List(r.Context(), c.Principal, k, mailbox.Listing{Limit: maxArrivals, Since: since, Direction: message.In})
		for _, m := range ms {
			e := lobsterOf(m)
			if (q.Get("from") == "" || strings.EqualFold(e.From, q.Get("from"))) && strings.Contains(e.Subject, q.Get("subject")) {
				out = append(out, e)
			}
		}
		return len(out) > 0, err
	})
	switch {
	case err != nil:
		return err
	case len(out) == 0:
		w.WriteHeader(http.StatusNoContent)
	default:
		answer(w, http.StatusOK, map[string]any{"data": out})
	}
	return nil
}

func (s lobsterServer) lobsterEmail(w http.ResponseWriter, r *http.Request, c caller) error {
	m, raw, done, err := s.message(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	answer(w, http.StatusOK, wholeOf(m, raw))
	return nil
}

// lobsterAttachment answers with an address that the client fetches without its
// token. What is in an inbox is sealed, and an address that opened it would be
// a key: so the address is the file itself (RFC 2397). Its type is none, since
// the sender chose it.
func (s lobsterServer) lobsterAttachment(w http.ResponseWriter, r *http.Request, c caller) error {
	f, done, err := s.attachment(w, r, c)
	if err != nil {
		return err
	}
	defer done()
	answer(w, http.StatusOK, map[string]any{
		"filename": f.Name, "contentType": door.FileType(f.ContentType), "sizeBytes": len(f.Data),
		"downloadUrl": "data:application/octet-stream;base64," + base64.StdEncoding.EncodeToString(f.Data),
	})
	return nil
}

func (s lobsterServer) lobsterExtract(_ http.ResponseWriter, r *http.Request, c caller) error {
	if _, err := s.watched(r, c); err != nil {
		return err
	}
	return fmt.Errorf("extraction: there is no model in this server; read the email and ask yours: %w", errNotOffered)
}

// A lobsterDraft is an email to be sent, in LobsterMail's words.
type lobsterDraft struct {
	From    string   `json:"from"` // names the inbox
	To      []string `json:"to"`
	Cc      []string `json:"cc"`
	Subject string   `json:"subject"`
	Body    struct {
		Text string `json:"text"`
		HTML string `json:"html"`
	} `json:"body"`
	ReplyTo     string `json:"replyTo"`
	InReplyTo   string `json:"inReplyTo"` // a Message-ID
	Thread      string `json:"threadId"`  // its newest message is answered, unless inReplyTo names one
	Attachments []struct {
		Filename    string `json:"filename"`
		ContentType string `json:"contentType"`
		Content     string `json:"content"` // base64
	} `json:"attachments"`
}

// lobsterSend proposes to send an email. Its client says that it is queued
// then; here the answer says whether it waits for a person.
func (s lobsterServer) lobsterSend(w http.ResponseWriter, r *http.Request, c caller) error {
	if c.key == "" || c.Kind != auth.Agent && c.Kind != auth.Grant {
		return fmt.Errorf("a %s does not send mail, only an inbox's key or a grant does: %w", c.Kind, auth.ErrForbidden)
	}
	done, err := s.begin(w, r, cmp.Or(c.Inbox, c.ID)) // which inbox, the body says
	if err != nil {
		return err
	}
	defer done()
	var in lobsterDraft
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	from, err := mail.ParseAddress("from", in.From)
	if err != nil {
		return err
	}
	o := mailbox.Outgoing{Inbox: from.Addr, Draft: mail.Draft{
		To: in.To, Cc: in.Cc, ReplyTo: in.ReplyTo, Subject: in.Subject, Text: in.Body.Text, HTML: in.Body.HTML, InReplyTo: in.InReplyTo,
	}}
	for i, a := range in.Attachments {
		data, err := base64.StdEncoding.DecodeString(a.Content)
		if err != nil {
			return fmt.Errorf("%w: attachments[%d].content: is not base64", errRequest, i)
		}
		o.Attachments = append(o.Attachments, mail.Attachment{Name: a.Filename, ContentType: a.ContentType, Data: data})
	}
	if o.IdempotencyKey, err = idempotencyKey(r.Header); err != nil {
		return err
	}
	if err := s.lobsterThread(r.Context(), c, in, &o); err != nil {
		return err
	}
	p, err := s.post.Send(r.Context(), c.Principal, "rest", o)
	if err != nil {
		return err
	}
	rateLimits(w.Header(), p.Left)
	status := "queued"
	switch p.State {
	case oversight.Denied:
		return &blockedError{p.ID, p.Verdict}
	case oversight.Pending:
		status = "pending_approval"
	case oversight.Scheduled, oversight.Approved, oversight.Executing, oversight.Done, oversight.Failed, oversight.Unknown, oversight.Cancelled:
	}
	w.Header().Set("Location", "/v1/actions/"+p.ID)
	answer(w, http.StatusAccepted, map[string]any{"id": p.ID, "status": status, "createdAt": p.Created})
	return nil
}

// lobsterThread sets what o answers.
func (s lobsterServer) lobsterThread(ctx context.Context, c caller, in lobsterDraft, o *mailbox.Outgoing) error {
	if in.InReplyTo != "" {
		o.References = []string{in.InReplyTo}
		return nil
	}
	if in.Thread == "" {
		return nil
	}
	if !idForm().MatchString(in.Thread) {
		return fmt.Errorf("%w: threadId: is not the id of a thread", errRequest)
	}
	k, err := s.post.Keys.Open(ctx, c.Principal, c.key, o.Inbox)
	if err != nil {
		return err
	}
	ms, err := s.post.Thread(ctx, c.Principal, k, in.Thread)
	if err != nil {
		return err
	}
	if last := ms[len(ms)-1]; last.MessageID != "" {
		o.InReplyTo, o.References = last.MessageID, append(slices.Clone(last.References), last.MessageID)
	}
	return nil
}

// lobsterHooks returns as whom the caller manages webhooks: of the inbox that
// is named, or of all that its token has a part in.
func (s lobsterServer) lobsterHooks(r *http.Request, c caller, inbox string) (auth.Principal, error) {
	who := c.Principal
	if c.Kind == auth.Agent && inbox == "" {
		inbox = who.Inbox // the only one that it has, and its scope there counts
	}
	if inbox == "" {
		return who, nil
	}
	if c.key == "" {
		return who, fmt.Errorf("a %s manages inboxes but cannot open them: %w", c.Kind, auth.ErrForbidden)
	}
	k, err := s.post.Keys.Open(r.Context(), c.Principal, c.key, inbox)
	if err != nil {
		return who, err
	}
	who.Inbox = k.Inbox()
	return who, keyring.May(k, seal.Manage)
}

type lobsterHook struct {
	ID        string       `json:"id"`
	URL       string       `json:"url"`
	Inbox     *string      `json:"inboxId"`
	Events    []event.Type `json:"events"`
	IsActive  bool         `json:"isActive"`
	Status    string       `json:"status"`   // active, waiting for a person, or disabled
	Action    string       `json:"actionId"` // that a person decides on; empty if none does
	CreatedAt time.Time    `json:"createdAt"`
	Secret    string       `json:"secret,omitempty"` // when it was made, once
}

func lobsterHookOf(h webhook.Webhook) lobsterHook {
	out := lobsterHook{ID: h.ID, URL: h.URL, Events: append([]event.Type{}, h.Events...), IsActive: h.State() == "active", Status: h.State(), Action: h.Waits, CreatedAt: h.Created}
	if h.Inbox != "" {
		out.Inbox = &h.Inbox
	}
	return out
}

func (s lobsterServer) lobsterWebhooks(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.hooks.List(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"data": each(list, lobsterHookOf)})
	return nil
}

func (s lobsterServer) lobsterCreateWebhook(w http.ResponseWriter, r *http.Request, c caller) error {
	var in struct {
		URL    string       `json:"url"`
		Inbox  string       `json:"inboxId"`
		Events []event.Type `json:"events"`
	}
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	who, err := s.lobsterHooks(r, c, in.Inbox)
	if err != nil {
		return err
	}
	if in.Events == nil {
		in.Events = []event.Type{"email.received"}
	}
	name := "LobsterMail"
	h, secret, err := s.hooks.CreateAs(r.Context(), who, webhook.Lobster, webhook.Change{Name: &name, URL: &in.URL, Events: in.Events})
	if err != nil {
		return err
	}
	out := lobsterHookOf(h)
	out.Secret = secret.Reveal()
	answer(w, http.StatusCreated, out)
	return nil
}

func (s lobsterServer) lobsterDeleteWebhook(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	h, err := s.hooks.Get(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	who, err := s.lobsterHooks(r, c, h.Inbox)
	if err != nil {
		return err
	}
	if err := s.hooks.Delete(r.Context(), who, id); err != nil {
		return err
	}
	answer(w, http.StatusOK, map[string]any{"id": id, "deleted": true}) // its client reads JSON from every answer
	return nil
}
