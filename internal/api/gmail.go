package api

import "time"

// A NewGmailSignIn begins a sign-in at Google, with an OAuth client of the person's own.
type NewGmailSignIn struct {
	ClientID     string `json:"client_id"`
	ClientSecret string `json:"client_secret,omitempty"` // empty: the client has none
	RedirectURI  string `json:"redirect_uri,omitempty"`  // where Google sends the browser; empty: another device signs in
	LoginHint    string `json:"login_hint,omitempty"`    // address of the account
}

// String implements [fmt.Stringer]: a secret is not printed.
func (NewGmailSignIn) String() string { return "[sign-in]" }

// GoString implements [fmt.GoStringer].
func (NewGmailSignIn) GoString() string { return "[sign-in]" }

// A GmailSignIn waits for the person.
type GmailSignIn struct {
	SignIn    string    `json:"sign_in"`             // opaque, encrypted; to be sent back at the end
	URL       string    `json:"url"`                 // where the person goes
	UserCode  string    `json:"user_code,omitempty"` // the person types it there, on the other device
	Interval  int64     `json:"interval,omitempty"`  // seconds between two attempts to finish, on another device
	ExpiresAt time.Time `json:"expires_at"`
}

// A NewGmailMailbox ends a sign-in and connects the mailbox.
type NewGmailMailbox struct {
	SignIn string `json:"sign_in"`
	State  string `json:"state,omitempty"` // from the redirect
	Code   string `json:"code,omitempty"`  // likewise
	Error  string `json:"error,omitempty"` // likewise: why there is no code

	Connection  string     `json:"connection,omitempty"` // sign in again for this one: its id, or the inbox's id or address
	DisplayName string     `json:"display_name,omitempty"`
	Mode        Mode       `json:"mode,omitempty"`  // of the inbox; empty: gated_send
	Since       *time.Time `json:"since,omitempty"` // take in only messages from then on; nil: all
	Most        int        `json:"most,omitempty"`  // take in at most so many, the newest; 0: 1000
}

// String implements [fmt.Stringer]: a code is not printed.
func (NewGmailMailbox) String() string { return "[sign-in]" }

// GoString implements [fmt.GoStringer].
func (NewGmailMailbox) GoString() string { return "[sign-in]" }

// The states of a [GmailMailbox].
const (
	GmailPending   = "pending"   // the person has not answered on the other device
	GmailConnected = "connected" // the mailbox is an inbox now
)

// A GmailMailbox says what came of a sign-in.
type GmailMailbox struct {
	Status     string `json:"status"`
	Connection string `json:"connection,omitempty"` // id
	Inbox      string `json:"inbox,omitempty"`      // id
	Address    string `json:"address,omitempty"`
	Key        string `json:"key,omitempty"` // of the inbox; shown this once
	Notice     string `json:"notice,omitempty"`
}
