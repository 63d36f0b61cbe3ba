// Package policy decides, without doing any I/O, whether an action may go
// ahead, must not, or needs a person; and where a sandbox may connect.
package policy

import (
	"time"
)

// Effect is what a rule says about a request it matches.
type Effect string

// The effects. The zero Effect is not valid: an unmatched request is [Ask].
const (
	Allow Effect = "allow"
	Ask   Effect = "ask"
	Deny  Effect = "deny"
)

// A Request is what policy is asked about: an action, and what is known of it.
// It is kept as JSON with the action.
type Request struct {
	Kind     Kind         `json:"kind"`
	Mode     Mode         `json:"mode,omitempty"`
	Inbox    string       `json:"inbox,omitempty"`  // its address
	Via      string       `json:"via,omitempty"`    // the door
	From     string       `json:"from,omitempty"`   // of mail that arrives: the proved domain's address, or empty
	To       []string     `json:"to,omitempty"`     // every recipient, lower case, Bcc too
	Listed   bool         `json:"listed,omitempty"` // the inbox's allow list has them all
	Size     int64        `json:"size,omitempty"`   // bytes
	Files    []Attachment `json:"files,omitempty"`
	Flags    []string     `json:"flags,omitempty"`    // what content checks found, as package scan names it
	Sandbox  string       `json:"sandbox,omitempty"`  // that proposed it
	Template string       `json:"template,omitempty"` // that the sandbox is of
	History  History      `json:"history,omitzero"`

	Machines  []Machine `json:"machines,omitempty"`   // recipients that seem to be programs
	Answers   int64     `json:"answers,omitempty"`    // automatic answers of the last hour between the inbox and AnswersTo
	AnswersTo string    `json:"answers_to,omitempty"` // the recipient with the most of them

	Time   time.Time         `json:"time,omitzero"`
	Detail map[string]string `json:"detail,omitempty"` // what the kind alone has: the mode asked for, the address and port
	HTTP   *HTTP             `json:"http,omitempty"`   // of requests and of secrets that are put on them; else nil

	// What the queue and the reviewer's page read; rules do not.
	Findings []Finding `json:"findings,omitempty"` // what a reviewer should look at closely
	Subject  string    `json:"subject,omitempty"`  // of mail, with secrets masked
	Money    []string  `json:"money,omitempty"`    // words about money in it, as they stand in moneyWords of package mailbox
	Accounts []string  `json:"accounts,omitempty"` // keyed hashes of the bank accounts that it names

	Arguments map[string]any `json:"arguments,omitempty"` // of the call of a tool, as JSON has them
}

// HTTP is what policy knows of an HTTP request. Where a secret's value belongs it
// has the secret's sentinel.
type HTTP struct {
	Host    string              `json:"host"`   // lower case, without port
	Method  string              `json:"method"` // upper case
	Path    string              `json:"path"`   // escaped, normalized as in RFC 3986 section 6.2.2
	Query   map[string][]string `json:"query,omitempty"`
	Headers map[string]string   `json:"headers,omitempty"` // by names in lower case; several values are joined by ", "
	Secrets []string            `json:"secrets,omitempty"` // names of the secrets that are put in
}

// An Attachment is a file of a [Request].
type Attachment struct {
	Name string `json:"name"`
	Type string `json:"type"` // "application/pdf"
	Size int64  `json:"size"` // bytes
}

// History is what the inbox and the recipients have had with one another.
type History struct {
	Sent    int64 `json:"sent"`    // mails that reached the recipient that got the fewest
	Known   int   `json:"known"`   // recipients that got one before
	Replies bool  `json:"replies"` // each recipient has written to this inbox
}

// A Verdict is an effect and the rule it came from.
type Verdict struct {
	Effect Effect
	Rule   string // ID of the deciding rule, empty for the default
	Reason string // for a person
	Action string // ID of the action that a person decides on, if there is one

	// For Ask:
	Approvers int           // how many people must approve; 0 means one
	Who       []string      // names of people, or roles as "role:owner"; empty means whoever decides
	Within    time.Duration // after which it is denied; 0 means the default
	StepUp    bool          // deciders prove a second factor
	Chat      bool          // a linked chat account may decide

	Grave []string // kinds among the request's findings that an approver must tick
}
