package api

import "time"

// A ReviewQueue is one page of the actions that wait for a person.
type ReviewQueue struct {
	Actions    []QueuedAction `json:"actions"`
	NextCursor string         `json:"next_cursor"` // empty on the last page
	Total      int            `json:"total"`       // that the query selects, on all pages
	Counts     QueueCounts    `json:"counts"`
}

// QueueCounts count waiting actions that the person has not snoozed, whatever the
// query selects.
type QueueCounts struct {
	Waiting int            `json:"waiting"`
	Kinds   map[string]int `json:"kinds"`
	Inboxes map[string]int `json:"inboxes"` // by id; "" for actions of no inbox
	Grave   int            `json:"grave"`   // with a grave finding
	Soon    int            `json:"soon"`    // whose time to be decided ends within a day
	Snoozed int            `json:"snoozed"` // that the person has snoozed; not in the other counts
}

// A QueuedAction is an [Action] that waits, without its view.
type QueuedAction struct {
	Action

	Risk    int      `json:"risk"`    // the higher, the more closely it should be looked at
	Reasons []string `json:"reasons"` // of Risk, for people; may be hostile
	Snooze  *Snooze  `json:"snooze"`  // nil unless the person has put it off
}

// A Snooze says until when a person has put an action off.
type Snooze struct {
	Until    time.Time `json:"until"`
	OnAnswer bool      `json:"on_answer"` // it comes back earlier when its agent writes it anew
	At       time.Time `json:"at"`        // when it was snoozed
}

// A NewSnooze puts an action off, at most 30 days. One of the two is required.
type NewSnooze struct {
	Until    *time.Time `json:"until,omitempty"`     // nil with OnAnswer: as long as it waits
	OnAnswer bool       `json:"on_answer,omitempty"` // it comes back when its agent writes it anew
}

// An Allowance is what a person allows together with an approval: the recipient of mail,
// or what is like a request or a connection, until a time. Exactly one of Address and
// Domain is set.
type Allowance struct {
	Address string    `json:"address,omitempty"` // of a recipient of mail, or the host
	Domain  string    `json:"domain,omitempty"`  // of mail: all addresses in the domain of a recipient
	Path    string    `json:"path,omitempty"`    // of a request: its path, or "/v1/*" for everything below; else empty
	Files   bool      `json:"files,omitempty"`   // also mail with files
	Until   time.Time `json:"until"`             // at most 90 days ahead
}
