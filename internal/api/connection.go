package api

import "time"

// The states of a [Connection].
const (
	ConnectionSyncing   = "syncing"
	ConnectionConnected = "connected"
	ConnectionPaused    = "paused"
	ConnectionSignIn    = "sign_in" // the provider refuses the credential
	ConnectionRevoked   = "revoked" // ended; its credential is deleted
)

// A Connection joins an inbox to a mailbox at another provider. No answer has its
// credential.
type Connection struct {
	ID        string            `json:"id"` // "con_…"
	Inbox     string            `json:"inbox"`
	Address   string            `json:"address"`
	Kind      string            `json:"kind"`     // imap or gmail
	Settings  map[string]string `json:"settings"` // hosts and names; the kind's own keys
	State     string            `json:"state"`
	Problem   string            `json:"problem"`  // the last error, for a person; may be empty
	Since     *time.Time        `json:"since"`    // older messages were not taken; nil: no bound
	Most      int               `json:"most"`     // so many older messages at most
	Done      int64             `json:"done"`     // of the synchronisation from the beginning
	Total     int64             `json:"total"`    // 0: unknown
	LeftOut   int64             `json:"left_out"` // messages that were not taken in
	CreatedAt time.Time         `json:"created_at"`
	CreatedBy string            `json:"created_by"`
	SyncedAt  *time.Time        `json:"synced_at"` // when it was up to date last; nil: never
	RetryAt   *time.Time        `json:"retry_at"`  // when it is tried again after an error; nil: nothing is put off

	// Only in the answer that created it; the server does not keep it.
	Key    string `json:"key,omitempty"`    // "pib_…": opens the inbox
	Notice string `json:"notice,omitempty"` // for people
}

// A ConnectionList is the connections of the project, by address.
type ConnectionList struct {
	Connections []Connection `json:"connections"`
}

// A ConnectionCredential is what signs in at a provider.
type ConnectionCredential struct {
	Settings   map[string]string `json:"settings,omitempty"`
	Credential string            `json:"credential"` // the password, or what the kind has in its place
}

// String implements [fmt.Stringer]: the credential is not printed.
func (ConnectionCredential) String() string { return "[secret]" }

// GoString implements [fmt.GoStringer].
func (ConnectionCredential) GoString() string { return "[secret]" }

// A NewConnection connects a mailbox that exists at a provider.
type NewConnection struct {
	Kind    string `json:"kind"`
	Address string `json:"address"`
	ConnectionCredential

	Since       *time.Time `json:"since,omitempty"`
	Most        int        `json:"most,omitempty"` // 0: 1000
	DisplayName string     `json:"display_name,omitempty"`
	Mode        Mode       `json:"mode,omitempty"`      // empty: gated_send
	MaxBytes    int64      `json:"max_bytes,omitempty"` // 0: as much as possible
}
