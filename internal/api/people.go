package api

import "time"

// A Role is what a person may do. Each includes those after it.
type Role string

// The roles.
const (
	RoleOwner    Role = "owner"    // manages people, modes, policy, switches, domains and keys
	RoleReviewer Role = "reviewer" // decides on actions and quarantine, and turns kill switches on
	RoleViewer   Role = "viewer"   // sees
)

// A Session is who is signed in.
type Session struct {
	Person    string     `json:"person"`
	Role      Role       `json:"role"`
	StrongAt  *time.Time `json:"strong_at"` // last proof of a second factor; nil: never
	ExpiresAt *time.Time `json:"expires_at,omitempty"`
	Token     string     `json:"token,omitempty"` // "pse_…"; only in the answer that began the session
}

// A SignIn begins a session.
type SignIn struct {
	Name     string `json:"name"`
	Password string `json:"password"`
	Code     string `json:"code,omitempty"` // of an authenticator app, or a recovery code; for those who have a second factor
}

// A StepUp proves a second factor within a session.
type StepUp struct {
	Code string `json:"code"`
}

// A Person is somebody with an account, as owners see it.
type Person struct {
	Name          string     `json:"name"`
	Role          Role       `json:"role"`
	Email         string     `json:"email"` // for notices; may be empty
	CreatedAt     time.Time  `json:"created_at"`
	DisabledAt    *time.Time `json:"disabled_at"` // nil: may sign in
	TOTP          bool       `json:"totp"`        // has an authenticator app
	Passkeys      int        `json:"passkeys"`
	RecoveryCodes int        `json:"recovery_codes"` // unused ones
	Sessions      int        `json:"sessions"`
	OperatorFrom  *time.Time `json:"operator_from"` // since when the operator at the machine counts as this person; may lie in the future; nil: not linked
}

// A PersonList is the people of the project.
type PersonList struct {
	People []Person `json:"people"`
}

// A PersonChange changes a person's role or email address, one at a time.
type PersonChange struct {
	Role  *Role   `json:"role,omitempty"`
	Email *string `json:"email,omitempty"`
}

// An Invitation is a one-time link that makes an account or sets a new password.
type Invitation struct {
	ID        string     `json:"id"`
	Role      Role       `json:"role"`
	Person    string     `json:"person"` // who gets a new password; empty: makes an account
	Email     string     `json:"email"`
	CreatedBy string     `json:"created_by"`
	CreatedAt *time.Time `json:"created_at"` // nil: not known
	ExpiresAt time.Time  `json:"expires_at"`
	Path      string     `json:"path,omitempty"` // of the link, below the console's address; only in the answer that created it
	// URL is the whole link, at the address that the operator configured or where the
	// server listens; only in the answer that created it.
	URL string `json:"url,omitempty"`
}

// An InvitationList is the open invitations.
type InvitationList struct {
	Invitations []Invitation `json:"invitations"`
}

// A NewInvitation invites somebody.
type NewInvitation struct {
	Role  Role   `json:"role"`
	Email string `json:"email,omitempty"`
}

// A NotifyChannels is how one person is notified about what waits.
type NotifyChannels struct {
	Person   string     `json:"person"`
	Role     Role       `json:"role"`
	Email    string     `json:"email"`
	Telegram string     `json:"telegram"`  // the linked account, by the name that it had then
	LinkedAt *time.Time `json:"linked_at"` // nil: not linked
	Failed   string     `json:"failed"`    // why the newest notice did not arrive; may be empty
}

// A NotifyStatus is which channels the server has, and those of each person.
type NotifyStatus struct {
	Mail     bool             `json:"mail"`
	Telegram bool             `json:"telegram"`
	People   []NotifyChannels `json:"people"`
}

// A NamedPerson names a person in a request.
type NamedPerson struct {
	Person string `json:"person"`
}

// A NotifyTest is the result of a test notice on one channel.
type NotifyTest struct {
	Channel string `json:"channel"` // mail or telegram
	Sent    bool   `json:"sent"`
	Detail  string `json:"detail"` // for people
}

// A NotifyTestList is the results of a test, by channel.
type NotifyTestList struct {
	Channels []NotifyTest `json:"channels"`
}

// A TelegramCode links a Telegram chat to a person: they send it to the bot.
type TelegramCode struct {
	Code      string    `json:"code"` // secret
	Bot       string    `json:"bot"`  // the bot's name
	ExpiresAt time.Time `json:"expires_at"`
}
