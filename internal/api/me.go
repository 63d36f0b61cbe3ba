package api

// A Me says who calls, what the caller may do, and what is left of its limits.
type Me struct {
	Kind   string   `json:"kind"`           // sandbox, agent, grant, recovery, project or person
	ID     string   `json:"id"`             // of the sandbox or the credential, or the person's name
	Role   string   `json:"role,omitempty"` // of a person
	Scopes []string `json:"scopes"`         // in its inbox: read, draft, send, or full for all and more; manage for a project's key, decide for a reviewer; may be empty

	CanRead    bool   `json:"can_read"`              // the caller can read mail now
	ReadDetail string `json:"read_detail,omitempty"` // why it cannot

	Inbox   *OwnInbox   `json:"inbox,omitempty"`   // the caller's own; absent for who has none or several
	Inboxes []string    `json:"inboxes,omitempty"` // addresses that a grant covers
	Sending *SendStatus `json:"sending,omitempty"` // of Inbox: its limits, and what is left
	Queue   *Queue      `json:"queue,omitempty"`   // of Inbox
	Message *MessageMax `json:"message,omitempty"` // of Inbox
	Tools   []string    `json:"tools,omitempty"`   // offered over the Model Context Protocol unless the client asks for others
}

// An OwnInbox is what a caller needs to know of its inbox to write and read mail.
type OwnInbox struct {
	ID          string `json:"id"`
	Address     string `json:"address"` // the only sender that it may use
	DisplayName string `json:"display_name"`
	Mode        Mode   `json:"mode"`
	ModeReason  string `json:"mode_reason"` // of its last change; may be empty
	MaxBytes    int64  `json:"max_bytes"`   // stored mail that it may hold
}

// A Queue is how much of an inbox waits for a person.
type Queue struct {
	Waiting int `json:"waiting"` // actions that wait for a decision or for their time
	Limit   int `json:"limit"`   // actions of one kind that may wait
}

// A MessageMax bounds one message that is proposed.
type MessageMax struct {
	Recipients      int   `json:"recipients"`       // To, Cc and Bcc together
	Subject         int   `json:"subject"`          // characters
	Text            int   `json:"text"`             // characters of each body
	AttachmentBytes int64 `json:"attachment_bytes"` // all together, before encoding
}
