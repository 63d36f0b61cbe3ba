package gmail

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"postern/internal/connector"
	"postern/internal/mail"
)

// The quota units of the requests. https://developers.google.com/workspace/gmail/api/reference/quota
const (
	unitsProfile = 1
	unitsList    = 5
	unitsGet     = 5
	unitsModify  = 5
	unitsHistory = 2
	unitsLabels  = 1
	unitsSend    = 100
)

// maxInline is the size of a message, in bytes, up to which it is sent within JSON. A
// larger one is uploaded.
const maxInline = 3 << 20

// identifier is how the IDs of messages, threads and labels look. They stand in paths.
var identifier = regexp.MustCompile(`^[A-Za-z0-9_-]{1,200}$`)

// A Profile is what Gmail says about a mailbox.
type Profile struct {
	Address   string // lower case
	Messages  int    // how many there are
	HistoryID string // of its newest change
}

// Profile asks whose the mailbox is.
func (m *Mailbox) Profile(ctx context.Context) (Profile, error) {
	var p struct {
		EmailAddress  string `json:"emailAddress"`
		MessagesTotal int    `json:"messagesTotal"`
		HistoryID     string `json:"historyId"`
	}
	if err := m.call(ctx, request{method: http.MethodGet, path: "profile", units: unitsProfile}, &p); err != nil {
		return Profile{}, fmt.Errorf("read profile: %w", err)
	}
	addr, err := mail.CheckAddr("address of the mailbox", p.EmailAddress)
	if err != nil {
		return Profile{}, fmt.Errorf("read profile: %w: %w", ErrRefused, err)
	}
	if !historyID(p.HistoryID) {
		return Profile{}, fmt.Errorf("read profile: %w: its history has no ID", ErrRefused)
	}
	return Profile{Address: strings.ToLower(addr), Messages: max(p.MessagesTotal, 0), HistoryID: p.HistoryID}, nil
}

func historyID(s string) bool {
	_, err := strconv.ParseUint(s, 10, 64)
	return err == nil
}

// A message is a message in Gmail's JSON.
type message struct {
	ID       string   `json:"id"`
	ThreadID string   `json:"threadId"`
	LabelIDs []string `json:"labelIds"`
	Date     string   `json:"internalDate"` // milliseconds since 1970
	Raw      string   `json:"raw"`          // base64url
}

func (g message) at() time.Time {
	n, err := strconv.ParseInt(g.Date, 10, 64)
	if err != nil || n <= 0 || n > 253402300799000 { // year 9999
		return time.Time{}
	}
	return time.UnixMilli(n).UTC()
}

// get returns a message, with its bytes if raw.
func (m *Mailbox) get(ctx context.Context, id string, raw bool) (message, []byte, error) {
	if !identifier.MatchString(id) {
		return message{}, nil, fmt.Errorf("message %q: %w", mail.Printable(id, 80), connector.ErrGone)
	}
	r := request{method: http.MethodGet, path: "messages/" + id, query: url.Values{"format": {"minimal"}}, units: unitsGet}
	if raw {
		r.query.Set("format", "raw")
		r.most = maxRaw
	}
	var g message
	if err := m.call(ctx, r, &g); err != nil {
		return message{}, nil, fmt.Errorf("get message %s: %w", id, err)
	}
	if g.ID != id {
		return message{}, nil, fmt.Errorf("get message %s: %w: it answers about another one", id, ErrRefused)
	}
	if !raw {
		return g, nil, nil
	}
	b, err := base64.URLEncoding.DecodeString(g.Raw)
	if err != nil { // some servers leave the padding out
		b, err = base64.RawURLEncoding.DecodeString(strings.TrimRight(g.Raw, "="))
	}
	g.Raw = ""
	switch {
	case err != nil:
		return message{}, nil, fmt.Errorf("get message %s: %w: its bytes are not base64url", id, ErrRefused)
	case len(b) > connector.MaxMessage:
		return message{}, nil, fmt.Errorf("get message %s: %w", id, connector.ErrTooLarge)
	}
	return g, b, nil
}

// A page is one page of a list of messages.
type page struct {
	Messages []message `json:"messages"`
	Next     string    `json:"nextPageToken"`
	Estimate int       `json:"resultSizeEstimate"`
}

// list returns a page of the messages that q finds, spam and trash included, the newest
// first.
func (m *Mailbox) list(ctx context.Context, q, token string, most int) (page, error) {
	v := url.Values{"maxResults": {strconv.Itoa(min(max(most, 1), 500))}, "includeSpamTrash": {"true"}}
	if q != "" {
		v.Set("q", q)
	}
	if token != "" {
		v.Set("pageToken", token)
	}
	var p page
	if err := m.call(ctx, request{method: http.MethodGet, path: "messages", query: v, units: unitsList}, &p); err != nil {
		return page{}, fmt.Errorf("list messages: %w", err)
	}
	return p, nil
}

// plainMessageID is a Message-ID that can stand in a search. The attack: a Message-ID
// with operators of Gmail's search language.
var plainMessageID = regexp.MustCompile(`^[A-Za-z0-9.!#$%&'*+/=?^_~@-]{3,500}$`)

// byMessageID returns the message with a Message-ID, without angle brackets; no ID if
// there is none.
func (m *Mailbox) byMessageID(ctx context.Context, id, within string) (message, error) {
	id = strings.Trim(id, "<>")
	if !plainMessageID.MatchString(id) {
		return message{}, nil
	}
	p, err := m.list(ctx, strings.TrimSpace("rfc822msgid:"+id+" "+within), "", 2)
	if err != nil || len(p.Messages) == 0 || !identifier.MatchString(p.Messages[0].ID) || !identifier.MatchString(p.Messages[0].ThreadID) {
		return message{}, err
	}
	return p.Messages[0], nil
}

// modify adds labels to a message and takes labels off, by their IDs.
func (m *Mailbox) modify(ctx context.Context, id string, add, remove []string) error {
	if len(add)+len(remove) == 0 {
		return nil
	}
	body := struct {
		Add    []string `json:"addLabelIds,omitempty"`
		Remove []string `json:"removeLabelIds,omitempty"`
	}{add, remove}
	if err := m.call(ctx, request{method: http.MethodPost, path: "messages/" + id + "/modify", body: body, units: unitsModify}, nil); err != nil {
		return fmt.Errorf("label message %s: %w", id, err)
	}
	return nil
}

// trash puts a message into the trash, or takes it out.
func (m *Mailbox) trash(ctx context.Context, id string, in bool) error {
	verb := "untrash"
	if in {
		verb = "trash"
	}
	if err := m.call(ctx, request{method: http.MethodPost, path: "messages/" + id + "/" + verb, units: unitsModify}, nil); err != nil {
		return fmt.Errorf("%s message %s: %w", verb, id, err)
	}
	return nil
}

// send gives Gmail the bytes of a message, as part of a thread if one is named, and
// returns its ID, which is empty if the answer could not be read. The error wraps
// errUncertain if it may have been sent.
func (m *Mailbox) send(ctx context.Context, raw []byte, thread string) (id string, err error) {
	r := request{method: http.MethodPost, path: "messages/send", units: unitsSend, effect: true}
	about := struct {
		Raw    string `json:"raw,omitempty"`
		Thread string `json:"threadId,omitempty"`
	}{Thread: thread}
	if len(raw) <= maxInline {
		about.Raw = base64.URLEncoding.EncodeToString(raw)
		r.body = about
	} else if err := r.attach(raw, thread); err != nil {
		return "", err
	}
	var g message
	err = m.call(ctx, r, &g)
	if errors.Is(err, errUnreadable) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("send message: %w", err)
	}
	if !identifier.MatchString(g.ID) {
		return "", nil
	}
	return g.ID, nil
}

// attach makes r an upload of raw: a part of JSON, then the message.
func (r *request) attach(raw []byte, thread string) error {
	var b bytes.Buffer
	b.Grow(len(raw) + 1000)
	w := multipart.NewWriter(&b)
	part, err := w.CreatePart(textproto.MIMEHeader{"Content-Type": {"application/json; charset=UTF-8"}})
	if err != nil {
		return fmt.Errorf("encode upload: %w", err)
	}
	about := "{}"
	if thread != "" {
		about = fmt.Sprintf("{%q:%q}", "threadId", thread)
	}
	if _, err = part.Write([]byte(about)); err == nil {
		part, err = w.CreatePart(textproto.MIMEHeader{"Content-Type": {"message/rfc822"}})
	}
	if err == nil {
		_, err = part.Write(raw)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return fmt.Errorf("encode upload: %w", err)
	}
	r.upload, r.query, r.raw, r.contentType = true, url.Values{"uploadType": {"multipart"}}, b.Bytes(), "multipart/related; boundary="+w.Boundary()
	return nil
}

// A history is a page of what has changed.
type history struct {
	Records []struct {
		ID       string    `json:"id"`
		Messages []message `json:"messages"`
		Added    []changed `json:"messagesAdded"`
		Deleted  []changed `json:"messagesDeleted"`
		On       []changed `json:"labelsAdded"`
		Off      []changed `json:"labelsRemoved"`
	} `json:"history"`
	Next string `json:"nextPageToken"`
	ID   string `json:"historyId"`
}

type changed struct {
	Message message `json:"message"`
}

// history returns a page of the changes since an ID. It returns [connector.ErrCursor]
// if Gmail has forgotten them.
func (m *Mailbox) history(ctx context.Context, since, token string, most int) (history, error) {
	v := url.Values{"startHistoryId": {since}, "maxResults": {strconv.Itoa(most)}}
	if token != "" {
		v.Set("pageToken", token)
	}
	var h history
	err := m.call(ctx, request{method: http.MethodGet, path: "history", query: v, units: unitsHistory}, &h)
	if errors.Is(err, connector.ErrGone) {
		return history{}, fmt.Errorf("list history: %w", connector.ErrCursor)
	}
	if err != nil {
		return history{}, fmt.Errorf("list history: %w", err)
	}
	if !historyID(h.ID) {
		return history{}, fmt.Errorf("list history: %w: it has no ID", ErrRefused)
	}
	return h, nil
}
