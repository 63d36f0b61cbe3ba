package api

import "time"

// The types of events.
const (
	EventInboxCreated       = "inbox.created"
	EventInboxDeleted       = "inbox.deleted"
	EventMessageReceived    = "message.received"
	EventMessageQuarantined = "message.quarantined"
	EventMessageSent        = "message.sent"
	EventMessageDelivered   = "message.delivered"
	EventMessageDeferred    = "message.deferred"
	EventMessageBounced     = "message.bounced"
	EventMessageComplained  = "message.complained"
	EventOversightPending   = "oversight.pending"
	EventOversightApproved  = "oversight.approved"
	EventOversightRejected  = "oversight.rejected"
	EventOversightCancelled = "oversight.cancelled"
	EventOversightExpired   = "oversight.expired"
	EventOversightCommented = "oversight.commented"
	EventInboxModeChanged   = "inbox.mode_changed"
	EventSwitchOn           = "switch.on"
	EventSwitchOff          = "switch.off"
)

// An Event is something that happened to an inbox. Data has ids and states, and
// nothing that a sender wrote.
type Event struct {
	ID        string         `json:"id"` // "evt_…"
	Type      string         `json:"type"`
	Timestamp time.Time      `json:"timestamp"`
	Inbox     string         `json:"inbox"` // id
	Data      map[string]any `json:"data"`  // by type: message, action, state, reason, mode, …
}

// An EventList is events, the oldest first.
type EventList struct {
	Events []Event `json:"events"`
	After  string  `json:"after"` // position to pass to the next request
}

// A Webhook is a URL to which the events of an inbox are sent.
type Webhook struct {
	ID         string    `json:"id"`
	Name       string    `json:"name"`
	URL        string    `json:"url"`
	Events     []string  `json:"events"` // types
	Enabled    bool      `json:"enabled"`
	State      string    `json:"state"`      // active, waiting (for a person to approve the URL) or disabled
	Action     string    `json:"action_id"`  // that asks a person to approve the URL; may be empty
	Reason     string    `json:"reason"`     // why the server disabled it; may be empty
	Credential string    `json:"credential"` // that made it; the webhook ends with it
	CreatedAt  time.Time `json:"created_at"`
	Secret     string    `json:"secret,omitempty"` // signs what is sent; only in the answer that created it
}

// A WebhookList is the webhooks of an inbox.
type WebhookList struct {
	Webhooks []Webhook `json:"webhooks"`
}

// A WebhookChange makes or changes a webhook. Nil fields stay as they are, or
// get the default of a new one.
type WebhookChange struct {
	Name    *string  `json:"name,omitempty"`
	URL     *string  `json:"url,omitempty"`    // a new one needs it
	Events  []string `json:"events,omitempty"` // of a new one: nil means all
	Enabled *bool    `json:"enabled,omitempty"`
}

// A WebhookRotation replaces the secret of a webhook.
type WebhookRotation struct {
	OverlapSeconds *int64 `json:"overlap_seconds,omitempty"` // how long both secrets sign; nil: a day
}

// A RotatedWebhook has the new secret of a webhook.
type RotatedWebhook struct {
	ID             string    `json:"id"`
	Secret         string    `json:"secret"`
	OldSecretUntil time.Time `json:"old_secret_until"`
}

// A WebhookDelivery is one event sent to one webhook.
type WebhookDelivery struct {
	ID            string     `json:"id"`
	Event         string     `json:"event"` // id
	Type          string     `json:"type"`
	State         string     `json:"state"` // waiting, delivered or failed
	Attempts      int        `json:"attempts"`
	Status        *int       `json:"status"`      // HTTP status of the last answer; nil: none
	Duration      *float64   `json:"duration_ms"` // of the last attempt, in milliseconds; nil: none
	Error         string     `json:"error"`       // of the last attempt; may be empty
	CreatedAt     time.Time  `json:"created_at"`
	LastAttemptAt *time.Time `json:"last_attempt_at"`
	NextAttemptAt *time.Time `json:"next_attempt_at"`
}

// A WebhookDeliveryList is one page of deliveries, the newest first.
type WebhookDeliveryList struct {
	Deliveries []WebhookDelivery `json:"deliveries"`
	NextCursor string            `json:"next_cursor"`
}
