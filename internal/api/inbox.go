package api

import (
	"encoding/json"
	"time"
)

// A Mode is how closely people watch an inbox. See docs/modes.md.
type Mode string

// The modes, the strictest first.
const (
	ModeReadOnly   Mode = "read_only"  // nothing is sent
	ModeGatedAll   Mode = "gated_all"  // outgoing and incoming mail wait for a person
	ModeGatedSend  Mode = "gated_send" // outgoing mail waits for a person unless the allow list has its recipients; the default
	ModeMonitored  Mode = "monitored"  // outgoing mail is sent, and overseers get a copy
	ModeAutonomous Mode = "autonomous" // outgoing mail is sent
)

// AutoSubmitted says whether mail of an inbox has the field Auto-Submitted (RFC 3834).
type AutoSubmitted string

// The values of [AutoSubmitted].
const (
	SubmittedAlways     AutoSubmitted = "always"          // all its mail has it; the default
	SubmittedUnapproved AutoSubmitted = "unless_approved" // mail that a person approved leaves without it
)

// An Inbox is an agent's mail address and what the server knows about it.
type Inbox struct {
	ID          string     `json:"id"` // "ibx_…"
	Address     string     `json:"address"`
	DisplayName string     `json:"display_name"`
	Mode        Mode       `json:"mode"`
	ModeAt      *time.Time `json:"mode_at"`     // last change of Mode; nil: never changed
	ModeReason  string     `json:"mode_reason"` // of that change; may be empty
	CreatedAt   time.Time  `json:"created_at"`
	ExpiresAt   *time.Time `json:"expires_at"` // when it is deleted; nil: never
	DeletedAt   *time.Time `json:"deleted_at"` // nil: it is not deleted
	PurgeAt     *time.Time `json:"purge_at"`   // of a deleted inbox: when its mail is erased
	MaxBytes    int64      `json:"max_bytes"`  // stored mail that it may hold

	AutoSubmitted AutoSubmitted `json:"auto_submitted"` // whether its mail has the field Auto-Submitted

	// Only in the answer that created the inbox; the server does not keep them.
	Key         string `json:"key,omitempty"`          // "pib_…": opens the inbox
	RecoveryKey string `json:"recovery_key,omitempty"` // "prk_…": makes a new key
	Notice      string `json:"notice,omitempty"`       // for people: what losing the keys means
}

// An InboxList is one page of inboxes, by address.
type InboxList struct {
	Inboxes    []Inbox `json:"inboxes"`
	NextCursor string  `json:"next_cursor"`
}

// A NewInbox asks for an inbox.
type NewInbox struct {
	Address     string     `json:"address,omitempty"` // with or without a domain; empty: the server picks one
	Next        bool       `json:"next,omitempty"`    // if Address is taken, take one like it
	DisplayName string     `json:"display_name,omitempty"`
	Mode        Mode       `json:"mode,omitempty"`         // empty: gated_send
	ExpiresAt   *time.Time `json:"expires_at,omitempty"`   // nil: never
	MaxBytes    int64      `json:"max_bytes,omitempty"`    // 0: the server's default
	RecoveryKey bool       `json:"recovery_key,omitempty"` // also make a recovery key
}

// An InboxChange changes an inbox. Nil fields stay as they are. A mode is
// changed in a request of its own, and only to a stricter one; see [ModeCode]
// and [ModeRequest] for the other direction.
type InboxChange struct {
	DisplayName *string         `json:"display_name,omitempty"`
	ExpiresAt   json.RawMessage `json:"expires_at,omitempty"` // made by [ExpireAt] or [NeverExpire]
	MaxBytes    *int64          `json:"max_bytes,omitempty"`

	AutoSubmitted *AutoSubmitted `json:"auto_submitted,omitempty"` // only an owner changes it

	Mode       *Mode  `json:"mode,omitempty"`
	ModeReason string `json:"mode_reason,omitempty"` // only with Mode
}

// ExpireAt returns the value of [InboxChange.ExpiresAt] that deletes the inbox
// at t.
func ExpireAt(t time.Time) json.RawMessage {
	return json.RawMessage(t.UTC().AppendFormat(nil, `"`+time.RFC3339Nano+`"`))
}

// NeverExpire returns the value of [InboxChange.ExpiresAt] that removes the end
// of an inbox.
func NeverExpire() json.RawMessage { return json.RawMessage("null") }

// A NewModeCode asks for a code that raises an inbox to a less strict mode.
// Only owners make codes.
type NewModeCode struct {
	Mode   Mode   `json:"mode"`
	Reason string `json:"reason"` // required
}

// A ModeCode raises the mode of an inbox once.
type ModeCode struct {
	Code      string    `json:"code"` // secret
	Mode      Mode      `json:"mode"`
	ExpiresAt time.Time `json:"expires_at"`
}

// A ModeUpgrade shows the code of a [ModeCode].
type ModeUpgrade struct {
	Code string `json:"code"`
}

// A ModeRequest asks an owner for a less strict mode. The answer is an [Action].
type ModeRequest struct {
	TargetMode Mode   `json:"target_mode"`
	Reason     string `json:"reason,omitempty"`
}

// An AllowEntry is one entry of an inbox's allow list.
type AllowEntry struct {
	ID        string     `json:"id"`
	Pattern   string     `json:"pattern"` // "bob@example.com", or "*@example.com" for that domain without those below it
	CreatedAt time.Time  `json:"created_at"`
	CreatedBy string     `json:"created_by,omitempty"` // a principal; shown to people and project keys only
	Action    string     `json:"action"`               // by which the agent asked for it; may be empty
	ExpiresAt *time.Time `json:"expires_at"`           // nil: never
	Files     bool       `json:"files"`                // it covers mail with files too
}

// An AllowList is an inbox's allow list.
type AllowList struct {
	Entries []AllowEntry `json:"allowlist"`
}

// A NewAllowEntry adds to an allow list.
type NewAllowEntry struct {
	Pattern   string     `json:"pattern"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"` // nil: never
}

// An AllowRequest asks an owner for an entry. The answer is an [Action].
type AllowRequest struct {
	Pattern   string     `json:"pattern"`
	ExpiresAt *time.Time `json:"expires_at,omitempty"` // nil: never
	Reason    string     `json:"reason,omitempty"`
}

// Overseers are the addresses that get copies of what a monitored inbox sends.
type Overseers struct {
	Addresses []string `json:"addresses"`
}

// A Contact is somebody with whom an inbox has exchanged mail. Senders chose
// the name and the address.
type Contact struct {
	Address  string    `json:"address"`
	Name     string    `json:"name"`     // of the newest message; may be empty
	Received int       `json:"received"` // messages from them
	Sent     int       `json:"sent"`     // messages to them
	LastAt   time.Time `json:"last_at"`
}

// A ContactList is one page of contacts.
type ContactList struct {
	Contacts   []Contact `json:"contacts"`
	NextCursor string    `json:"next_cursor"`
}
