package api

import "time"

// A NewConnectCode asks for a code with which an agent connects itself.
type NewConnectCode struct {
	Address     string     `json:"address,omitempty"`      // as in [NewInbox]; empty: one is drawn
	DisplayName string     `json:"display_name,omitempty"` // of the inbox
	Mode        Mode       `json:"mode,omitempty"`         // of the inbox; empty: gated_send
	Scopes      []Scope    `json:"scopes,omitempty"`       // of the inbox's key; empty: full. They must include read
	ExpiresAt   *time.Time `json:"expires_at,omitempty"`   // of the code; nil: in 24 hours; 30 days away at most
}

// The states of a [ConnectCode].
const (
	ConnectOpen      = "open"
	ConnectUsed      = "used"
	ConnectExpired   = "expired"
	ConnectWithdrawn = "withdrawn"
)

// A ConnectCode creates one inbox for the first client that uses it.
type ConnectCode struct {
	ID           string     `json:"id"` // "ccd_…"; not the secret
	Address      string     `json:"address"`
	DisplayName  string     `json:"display_name"`
	Mode         Mode       `json:"mode"`
	Scopes       []Scope    `json:"scopes"`
	State        string     `json:"state"` // open, used, expired or withdrawn
	CreatedAt    time.Time  `json:"created_at"`
	CreatedBy    string     `json:"created_by"` // a principal
	ExpiresAt    time.Time  `json:"expires_at"`
	UsedAt       *time.Time `json:"used_at"`        // nil: it was not used
	Inbox        string     `json:"inbox"`          // id of the inbox that it made; empty before
	TriedAgainAt *time.Time `json:"tried_again_at"` // when it was last shown after its use: somebody else has it, too; nil: never

	// Only in the answer that created the code; the server does not keep it.
	Code   string `json:"code,omitempty"`   // "pcc_…": the secret
	Prompt string `json:"prompt,omitempty"` // a sentence to give to the agent; it has the code in it
}

// A ConnectCodeList is the connect codes of a project.
type ConnectCodeList struct {
	Codes []ConnectCode `json:"codes"`
}

// A Connect uses up a connect code.
type Connect struct {
	Code string `json:"code"`
}

// A Connected is the inbox that a connect code has made, with its key.
type Connected struct {
	ID          string  `json:"id"`
	Address     string  `json:"address"`
	DisplayName string  `json:"display_name"`
	Mode        Mode    `json:"mode"`
	Scopes      []Scope `json:"scopes"` // of the key
	Key         string  `json:"key"`    // "pib_…", shown this once
	Notice      string  `json:"notice"` // what losing it means, and where to read on
}
