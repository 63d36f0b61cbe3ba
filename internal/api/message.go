package api

import "time"

// A Direction says whether a message was received or sent.
type Direction string

// The directions.
const (
	DirectionIn  Direction = "in"
	DirectionOut Direction = "out"
)

// A File describes an attachment without its content. A sender or an agent
// chose the name and the type.
type File struct {
	Name        string `json:"name"`
	ContentType string `json:"content_type"`
	Size        int64  `json:"size"`   // bytes
	SHA256      string `json:"sha256"` // hexadecimal
}

// A Field is a name and its value, such as a header field.
type Field struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// A Message is an email in an inbox as lists show it. Long fields are cut, and
// the sender wrote all of them: treat them as hostile.
type Message struct {
	ID          string    `json:"id"`     // "msg_…"
	Inbox       string    `json:"inbox"`  // id
	Thread      string    `json:"thread"` // "thr_…"
	Direction   Direction `json:"direction"`
	CreatedAt   time.Time `json:"created_at"` // when the server stored it, not its Date field
	Size        int64     `json:"size"`       // bytes
	Labels      []string  `json:"labels"`
	From        string    `json:"from"`
	To          []string  `json:"to"`
	Cc          []string  `json:"cc"`
	Subject     string    `json:"subject"`
	Preview     string    `json:"preview"`
	MessageID   string    `json:"message_id"` // the Message-ID field
	InReplyTo   []string  `json:"in_reply_to"`
	References  []string  `json:"references"` // the oldest first
	Attachments []File    `json:"attachments"`
	Warnings    []string  `json:"warnings"` // for people: where the message is not what it seems
	Security    *Security `json:"security"` // nil for sent messages
}

// A MessageList is one page of messages, the newest first.
type MessageList struct {
	Messages   []Message `json:"messages"`
	NextCursor string    `json:"next_cursor"`
}

// A SearchResult is one page of messages that match a query.
type SearchResult struct {
	Messages   []Message `json:"messages"`
	NextCursor string    `json:"next_cursor"`
	// Complete says that nothing is missing on this page. Otherwise an empty list does
	// not mean that there is nothing: repeat the same search.
	Complete bool       `json:"complete"`
	Pending  int        `json:"pending"`        // messages that are not in the index yet and were not searched
	Behind   *time.Time `json:"pending_before"` // when the newest of these was stored; nil if there are none
}

// Arrivals are the messages that a wait ended with. The list is empty if the
// time ran out.
type Arrivals struct {
	Messages []Message `json:"messages"`
	After    string    `json:"after"` // position to pass to the next wait
}

// SafeContent is a message in the form that an agent should read.
type SafeContent struct {
	SafeText  string   `json:"safe_text"`  // without text that is hidden from people
	HTMLClean string   `json:"html_clean"` // without scripts, styles, links, pictures and hidden text
	Fenced    string   `json:"fenced"`     // sender, subject, file names and SafeText between marks that no mail can contain
	LeftOut   []string `json:"left_out"`   // for people: what Text and HTML have and these fields do not
}

// A FullMessage is one message with its content. Text and HTML are as the
// sender wrote them; an agent should read Fenced.
type FullMessage struct {
	Message
	SafeContent

	Headers []Field `json:"headers"` // in their order, the topmost first
	Text    string  `json:"text"`
	HTML    string  `json:"html"`
}

// Security is the result of sender authentication and of the content scan of a
// received message. A low score proves nothing.
type Security struct {
	Score       float64            `json:"score"`      // 0 to 1
	Categories  map[string]float64 `json:"categories"` // those above 0; from 0.5 a category counts as found
	Findings    []Finding          `json:"findings"`   // the highest scores first, at most 20; empty in lists
	SPF         string             `json:"spf"`        // a result of RFC 8601; empty: not checked
	DKIM        string             `json:"dkim"`
	DMARC       string             `json:"dmarc"`
	ARC         string             `json:"arc"`
	Quarantined bool               `json:"quarantined"` // it was held for a person
}

// A Finding is one reason for a score.
type Finding struct {
	Category string  `json:"category"` // "instruction_override"
	Rule     string  `json:"rule"`     // "override_previous"
	Score    float64 `json:"score"`    // 0 to 1
	Where    string  `json:"where"`    // subject, from, text, html, attachment name or attachment
	Detail   string  `json:"detail"`   // such as "decoded from base64"; may be empty
	Excerpt  string  `json:"excerpt"`  // the text that was found; at most 160 bytes, hostile
}

// A Thread is a conversation of an inbox.
type Thread struct {
	ID        string    `json:"id"`
	Inbox     string    `json:"inbox"`
	UpdatedAt time.Time `json:"updated_at"`    // when its newest message was stored
	Messages  int       `json:"message_count"` // without those in the trash
	Unread    int       `json:"unread_count"`
	Newest    Message   `json:"newest"`
}

// A ThreadList is one page of threads, the most recently updated first.
type ThreadList struct {
	Threads    []Thread `json:"threads"`
	NextCursor string   `json:"next_cursor"`
}

// A FullThread is a thread with its messages, the oldest first.
type FullThread struct {
	ID       string    `json:"id"`
	Inbox    string    `json:"inbox"`
	Messages []Message `json:"messages"`
}

// A Label is a label and how many messages have it.
type Label struct {
	Name     string `json:"name"`
	System   bool   `json:"system"` // set by the server, such as "sent"
	Messages int    `json:"message_count"`
}

// A LabelList is the labels of an inbox.
type LabelList struct {
	Labels []Label `json:"labels"`
}

// A LabelChange adds and removes labels of messages.
type LabelChange struct {
	IDs    []string `json:"ids"` // of messages
	Add    []string `json:"add,omitempty"`
	Remove []string `json:"remove,omitempty"`
}

// A LabelledMessage is the labels of a message after a [LabelChange].
type LabelledMessage struct {
	ID     string   `json:"id"`
	Labels []string `json:"labels"`
}

// LabelledMessages answers a [LabelChange].
type LabelledMessages struct {
	Messages []LabelledMessage `json:"messages"`
}

// A Held is a message in quarantine as those who manage inboxes see it. It has
// nothing that the sender wrote.
type Held struct {
	ID         string             `json:"id"`
	Inbox      string             `json:"inbox"`
	CreatedAt  time.Time          `json:"created_at"`
	Size       int64              `json:"size"` // bytes
	Score      float64            `json:"score"`
	Reason     string             `json:"reason"` // score, policy (of the sender's domain, by DMARC) or mode (gated_all)
	Categories map[string]float64 `json:"categories"`
	SPF        string             `json:"spf"` // a result of RFC 8601; empty: not checked
	DKIM       string             `json:"dkim"`
	DMARC      string             `json:"dmarc"`
	ARC        string             `json:"arc"`
	Action     string             `json:"action"` // whose decision lets it in; empty: release or drop it instead
}

// A HeldList is one page of the quarantine.
type HeldList struct {
	Held       []Held `json:"held"`
	NextCursor string `json:"next_cursor"`
}

// A HeldMessage is a message in quarantine as its inbox's key sees it. It has no
// unfiltered text.
type HeldMessage struct {
	Message
	SafeContent
}
