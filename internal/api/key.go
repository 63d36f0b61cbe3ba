package api

import "time"

// A Scope is what a credential may do in one inbox: one of these, or several that are
// separated by spaces.
type Scope string

// The scopes.
const (
	ScopeRead    Scope = "read"    // open mail and drafts
	ScopeDraft   Scope = "draft"   // write, replace and delete drafts
	ScopeSend    Scope = "send"    // propose what is sent or changed; opens nothing
	ScopePropose Scope = "propose" // the former name of read, draft and send together
	ScopeFull    Scope = "full"    // all of these, and manage the inbox, its keys and its grants
	ScopeRecover Scope = "recover" // make a new key of the inbox: recovery keys only
)

// The kinds of a [Credential].
const (
	CredentialKey      = "key"      // "pib_…"
	CredentialGrant    = "grant"    // "pgr_…"
	CredentialRecovery = "recovery" // "prk_…"
)

// A Credential says what one key, grant or recovery key may do in one inbox. A
// grant over several inboxes is listed once for each of them.
type Credential struct {
	ID        string     `json:"id"`    // "crd_…"; not the secret
	Inbox     string     `json:"inbox"` // id of the inbox
	Kind      string     `json:"kind"`  // key, grant or recovery
	Name      string     `json:"name"`
	Scope     Scope      `json:"scope"`  // propose for read, draft and send together
	Scopes    []Scope    `json:"scopes"` // the same as a list: full or recover alone, or some of read, draft and send
	Tools     []string   `json:"tools"`  // the only tools that it may call; empty: all that its scopes permit
	CreatedAt time.Time  `json:"created_at"`
	CreatedBy string     `json:"created_by"` // a principal; empty: not known
	UsedAt    *time.Time `json:"used_at"`    // last use, accurate to ten minutes; nil: never
	ExpiresAt *time.Time `json:"expires_at"` // nil: never
	Account   bool       `json:"account"`    // the grant of an [Account]: it opens each inbox that it makes

	// Only in the answer that created the credential; the server does not keep them.
	Key    string `json:"key,omitempty"`    // the secret
	Notice string `json:"notice,omitempty"` // for people: what losing it means
}

// A KeyList is the keys and recovery keys of an inbox.
type KeyList struct {
	Keys []Credential `json:"keys"`
}

// A GrantList is grants, one element for each grant and inbox.
type GrantList struct {
	Grants []Credential `json:"grants"`
}

// A NewKey asks for a key of an inbox.
type NewKey struct {
	Name      string     `json:"name,omitempty"`       // for people
	Scope     Scope      `json:"scope,omitempty"`      // empty, with Scopes empty: full for a key, read for a grant
	Scopes    []Scope    `json:"scopes,omitempty"`     // the same as a list
	Tools     []string   `json:"tools,omitempty"`      // the only tools that it may call; empty: all; not with scope full
	ExpiresAt *time.Time `json:"expires_at,omitempty"` // nil: never; a grant needs one, at most 366 days ahead
}

// A NewGrant asks for a grant over an inbox, or adds the inbox to a grant.
type NewGrant struct {
	NewKey

	Grant string `json:"grant,omitempty"` // id of the grant that gets the inbox; empty: make a new grant
}

// A Recover asks for a new key of an inbox. The caller shows the recovery key.
type Recover struct {
	RevokeOthers bool `json:"revoke_others,omitempty"` // end every other key and grant of the inbox
}

// An Account is a grant that opens the inboxes it makes and no others.
type Account struct {
	ID        string     `json:"id"` // "crd_…"
	Name      string     `json:"name"`
	CreatedAt time.Time  `json:"created_at"`
	CreatedBy string     `json:"created_by"` // a principal
	UsedAt    *time.Time `json:"used_at"`    // nil: never
	Inboxes   int        `json:"inbox_count"`
	Token     string     `json:"token,omitempty"` // the secret; only in the answer that created it
}

// An AccountList is the accounts of the project.
type AccountList struct {
	Accounts []Account `json:"accounts"`
}

// A NewAccount asks for an account.
type NewAccount struct {
	Name string `json:"name,omitempty"`
}
