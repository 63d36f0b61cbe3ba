package api

import "time"

// A ContextGrant lets one person see, in the console, what waiting actions of an inbox
// are about, and who sent what is in quarantine.
type ContextGrant struct {
	ID         string     `json:"id"`    // "crd_…"; another one after it was redeemed
	Inbox      string     `json:"inbox"` // id of the inbox
	Person     string     `json:"person"`
	CreatedAt  time.Time  `json:"created_at"`
	CreatedBy  string     `json:"created_by"` // a principal
	ExpiresAt  time.Time  `json:"expires_at"`
	RedeemedAt *time.Time `json:"redeemed_at"` // nil: its code was not used yet

	// Only in the answer that created it; the server does not keep them.
	Code   string `json:"code,omitempty"`   // "pcx_…"
	Notice string `json:"notice,omitempty"` // for people: what to do with it
}

// A ContextGrantList is the context grants of an inbox, the oldest first.
type ContextGrantList struct {
	Grants []ContextGrant `json:"grants"`
}

// A NewContextGrant asks for a context grant.
type NewContextGrant struct {
	Person    string     `json:"person"`     // name of the account that may redeem it
	ExpiresAt *time.Time `json:"expires_at"` // at most 366 days ahead
}
