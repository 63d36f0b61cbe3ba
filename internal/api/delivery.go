package api

import "time"

// A DeliveryState is where a message stands for one recipient.
type DeliveryState string

// The states of a [Delivery].
const (
	DeliveryQueued     DeliveryState = "queued"
	DeliverySending    DeliveryState = "sending"
	DeliveryDelivered  DeliveryState = "delivered" // the next server has accepted it
	DeliveryDeferred   DeliveryState = "deferred"  // will be retried
	DeliveryBounced    DeliveryState = "bounced"
	DeliverySuppressed DeliveryState = "suppressed" // not sent: the recipient is on the suppression list
	DeliveryUncertain  DeliveryState = "uncertain"  // interrupted after the data was sent
	DeliveryCancelled  DeliveryState = "cancelled"
)

// A Delivery is what became of a sent message for one recipient.
type Delivery struct {
	Recipient    string        `json:"recipient"` // its address; empty once the message is erased
	State        DeliveryState `json:"state"`
	Code         int           `json:"code"`   // of the last SMTP reply; 0: none
	Status       string        `json:"status"` // enhanced status code of it (RFC 3463); may be empty
	Detail       string        `json:"detail"` // what happened; the words of other servers may be hostile
	Remote       string        `json:"remote"` // the server that said so; may be empty
	Attempts     int64         `json:"attempts"`
	FirstAt      *time.Time    `json:"first_at"` // first attempt; nil: none yet
	LastAt       *time.Time    `json:"last_at"`
	NextAt       *time.Time    `json:"next_at"`       // next attempt; nil: none is planned
	SettledAt    *time.Time    `json:"settled_at"`    // nil: not final
	ComplainedAt *time.Time    `json:"complained_at"` // when the recipient reported it as spam
}

// A DeliveryList is the deliveries of an action.
type DeliveryList struct {
	Deliveries []Delivery `json:"deliveries"`
}

// An Address is one email address in a body. Addresses are not in paths, since
// paths are logged.
type Address struct {
	Address string `json:"address"`
}

// SuppressionCounts is the size of the suppression list by reason.
type SuppressionCounts struct {
	Counts map[string]int `json:"counts"`
}

// A Suppression is why nothing is sent to an address.
type Suppression struct {
	Reason    string    `json:"reason"`
	Inbox     string    `json:"inbox"` // whose mail caused it; may be empty
	CreatedAt time.Time `json:"created_at"`
}

// A Suspension stops an inbox or a domain from sending, since too much of its
// mail bounced or was reported as spam.
type Suspension struct {
	Scope       string    `json:"scope"` // id of an inbox, or a domain
	Reason      string    `json:"reason"`
	SuspendedAt time.Time `json:"suspended_at"`
}

// A SuspensionList is the suspensions of the project.
type SuspensionList struct {
	Suspensions []Suspension `json:"suspensions"`
}

// A Lift ends a suspension.
type Lift struct {
	Reason string `json:"reason"` // required, at most 1000 bytes
}

// A SigningKey is the public half of a key that signs outgoing mail or
// statements.
type SigningKey struct {
	ID        string     `json:"id"`   // the selector of a DKIM key; "k" of a statement's
	Kind      string     `json:"kind"` // dkim-rsa, dkim-ed25519 or statement
	CreatedAt time.Time  `json:"created_at"`
	From      time.Time  `json:"from"`  // when it begins to sign
	Until     *time.Time `json:"until"` // when its successor does; nil: it has none
	InUse     bool       `json:"in_use"`
	Name      string     `json:"name"`             // of the TXT record to publish; empty for a statement's key
	Record    string     `json:"record"`           // its text
	Found     *bool      `json:"found,omitempty"`  // after a check: whether DNS has exactly this record
	Detail    string     `json:"detail,omitempty"` // of the check
}

// A SigningKeyList is the signing keys of a domain.
type SigningKeyList struct {
	Keys []SigningKey `json:"keys"`
}

// A SigningDomainList is the domains that have signing keys.
type SigningDomainList struct {
	Domains []string `json:"domains"`
}
