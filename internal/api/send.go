package api

import (
	"encoding/base64"
	"time"
)

// A Timing says when a person is asked about mail that has a time to leave.
type Timing string

// The timings. Empty means [GateFirst].
const (
	GateFirst     Timing = "gate_first"     // now; it leaves at its time if it is approved by then
	ScheduleFirst Timing = "schedule_first" // when its time has come
)

// A NewAttachment is a file of outgoing mail, with its content.
type NewAttachment struct {
	Name        string `json:"name"`
	Content     string `json:"content_base64"`
	ContentType string `json:"content_type,omitempty"` // empty: application/octet-stream
}

// Attach returns an attachment with the given content.
func Attach(name, contentType string, content []byte) NewAttachment {
	return NewAttachment{Name: name, ContentType: contentType, Content: base64.StdEncoding.EncodeToString(content)}
}

// A NewMessage proposes to send an email from an inbox. In a reply, To may be
// empty: it then goes to whom the message names. All recipients together are at
// most 50, all attachments at most 25 MiB.
type NewMessage struct {
	To          []string        `json:"to,omitempty"`
	Cc          []string        `json:"cc,omitempty"`
	Bcc         []string        `json:"bcc,omitempty"`
	Subject     string          `json:"subject,omitempty"`
	Text        string          `json:"text,omitempty"`        // plain text; empty: made from HTML
	HTML        string          `json:"html,omitempty"`        // a fragment
	Markdown    string          `json:"markdown,omitempty"`    // instead of Text and HTML
	InReplyTo   string          `json:"in_reply_to,omitempty"` // the Message-ID of the message that it answers
	Attachments []NewAttachment `json:"attachments,omitempty"`

	SendAt         time.Time `json:"send_at,omitzero"`          // not sooner than this, at most a year ahead; zero: at once
	GateTiming     Timing    `json:"gate_timing,omitempty"`     // only with SendAt
	UndoSeconds    *int64    `json:"undo_seconds,omitempty"`    // how long it can be cancelled after its approval; nil: the inbox's setting
	Bulk           bool      `json:"bulk,omitempty"`            // add List-Unsubscribe
	IdempotencyKey string    `json:"idempotency_key,omitempty"` // the header Idempotency-Key, by another name
	AllowDuplicate bool      `json:"allow_duplicate,omitempty"` // propose it even if the same was proposed a moment ago
}

// A Reply proposes to answer a message of the inbox.
type Reply struct {
	NewMessage

	ReplyAll bool `json:"reply_all,omitempty"`
	Quote    bool `json:"quote,omitempty"` // quote the message that it answers
}

// A RevisedMessage replaces a proposed message that has not left.
type RevisedMessage struct {
	NewMessage

	Version int64 `json:"version,omitempty"` // of the action that it replaces; 0: whichever is current
}

// The values of [Proposed.Status].
const (
	StatusPending   = "pending_send_approval" // waits for a person
	StatusScheduled = "scheduled"             // waits for its time
	StatusApproved  = "approved"              // policy allowed it
)

// A Proposed answers a proposal to send. Every status is a success.
type Proposed struct {
	ID        string     `json:"id"`     // of the action
	Status    string     `json:"status"` // pending_send_approval, scheduled or approved
	Digest    string     `json:"digest"` // SHA-256 of the envelope and the exact message, hexadecimal
	CreatedAt time.Time  `json:"created_at"`
	Version   int64      `json:"version"`
	SendAt    *time.Time `json:"send_at"` // it leaves no sooner; nil: at once
	DueAt     *time.Time `json:"due_at"`  // of an approved one: when it leaves; until then it can be cancelled
	Note      string     `json:"note"`    // what the reviewer is warned of; may be empty
}

// SendLimits are the limits of an inbox or a project. In all of them 0 means
// the server's limit and -1 means no limit.
type SendLimits struct {
	PerMinute  int64 `json:"per_minute"` // messages
	PerHour    int64 `json:"per_hour"`
	PerDay     int64 `json:"per_day"`
	Recipients int64 `json:"recipients_per_day"`
	Bytes      int64 `json:"bytes_per_day"`
}

// SendSettings are how an inbox or a project sends.
type SendSettings struct {
	UndoSeconds int64      `json:"undo_seconds"` // 0 to 120; of an inbox
	Limits      SendLimits `json:"limits"`
}

// A Quota is what is left of one limit.
type Quota struct {
	Name          string `json:"name"` // "inbox-minute", "project-day-bytes"
	Limit         int64  `json:"limit"`
	Left          int64  `json:"left"`
	WindowSeconds int64  `json:"window_seconds"`
	ResetsIn      int64  `json:"resets_in"` // seconds
}

// SendStatus is the settings that hold, with the server's limits where none are
// set, and what is left of each limit.
type SendStatus struct {
	SendSettings

	Left []Quota `json:"left"`
}

// A NewDraft is the content of a draft. Everything may be missing until the
// draft is sent.
type NewDraft struct {
	To          []string        `json:"to,omitempty"`
	Cc          []string        `json:"cc,omitempty"`
	Bcc         []string        `json:"bcc,omitempty"`
	Subject     string          `json:"subject,omitempty"`
	Text        string          `json:"text,omitempty"`
	HTML        string          `json:"html,omitempty"`
	Markdown    string          `json:"markdown,omitempty"`    // instead of Text and HTML
	InReplyTo   string          `json:"in_reply_to,omitempty"` // a Message-ID
	ReplyTo     string          `json:"reply_to,omitempty"`    // id of the message of the inbox that it answers
	ReplyAll    bool            `json:"reply_all,omitempty"`
	Quote       bool            `json:"quote,omitempty"`
	Forward     string          `json:"forward,omitempty"` // id of the message of the inbox that it forwards
	Attachments []NewAttachment `json:"attachments,omitempty"`
}

// A DraftUpdate replaces the content of a draft.
type DraftUpdate struct {
	NewDraft

	Version         int64 `json:"version"`                    // the one that is replaced
	KeepAttachments []int `json:"keep_attachments,omitempty"` // indexes of files of that version to keep, before new ones
}

// A DraftVersion names a version of a draft.
type DraftVersion struct {
	ID      string `json:"id"`
	Version int64  `json:"version"`
}

// A Draft is a draft without the content of its files.
type Draft struct {
	ID          string    `json:"id"` // "drf_…"
	Inbox       string    `json:"inbox"`
	Version     int64     `json:"version"` // 1 at first
	CreatedAt   time.Time `json:"created_at"`
	UpdatedAt   time.Time `json:"updated_at"`
	Size        int64     `json:"size"` // bytes
	To          []string  `json:"to"`
	Cc          []string  `json:"cc"`
	Bcc         []string  `json:"bcc"`
	Subject     string    `json:"subject"`
	Preview     string    `json:"preview"`
	ReplyTo     string    `json:"reply_to"` // id of a message; may be empty
	Forward     string    `json:"forward"`  // id of a message; may be empty
	Attachments []File    `json:"attachments"`

	*DraftContent // nil in lists
}

// DraftContent is what lists of drafts leave out.
type DraftContent struct {
	Text      string `json:"text"`
	HTML      string `json:"html"`
	Markdown  string `json:"markdown"`
	InReplyTo string `json:"in_reply_to"`
	ReplyAll  bool   `json:"reply_all"`
	Quote     bool   `json:"quote"`
}

// A DraftList is one page of drafts, the most recently updated first.
type DraftList struct {
	Drafts     []Draft `json:"drafts"`
	NextCursor string  `json:"next_cursor"`
}

// A SendDraft proposes to send a draft. The fields other than Version are those
// of [NewMessage].
type SendDraft struct {
	Version        int64     `json:"version"`
	SendAt         time.Time `json:"send_at,omitzero"`
	GateTiming     Timing    `json:"gate_timing,omitempty"`
	UndoSeconds    *int64    `json:"undo_seconds,omitempty"`
	Bulk           bool      `json:"bulk,omitempty"`
	AllowDuplicate bool      `json:"allow_duplicate,omitempty"`
}
