package api

import "time"

// The kinds of a [Secret].
const (
	SecretPlain = "value" // one text
	SecretAWS   = "aws"   // an access key pair; requests are signed anew with it
)

// When a person is asked about the use of a [Secret].
const (
	SecretAlways = "always" // for each request
	SecretFirst  = "first"  // for the first request of each sandbox
	SecretNever  = "never"
)

// A Secret is a credential that the wall puts on requests of sandboxes. No answer
// has its value.
type Secret struct {
	ID         string            `json:"id"` // "sec_…"
	Name       string            `json:"name"`
	Kind       string            `json:"kind"`     // value or aws
	Hosts      []string          `json:"hosts"`    // hosts and *.hosts; empty: the rules of sandboxes alone
	Env        string            `json:"env"`      // environment variable of sandboxes to which it is attached
	Approval   string            `json:"approval"` // always, first or never
	Headers    []string          `json:"headers"`  // header fields that may have the value
	Places     []SecretPlace     `json:"places"`   // other places in requests that an owner has opened
	Metadata   map[string]string `json:"metadata"`
	Version    int64             `json:"version"` // of the value, from 1
	CreatedAt  time.Time         `json:"created_at"`
	CreatedBy  string            `json:"created_by"`
	UpdatedAt  time.Time         `json:"updated_at"`
	RotatedAt  *time.Time        `json:"rotated_at"`   // nil: never
	LastUsedAt *time.Time        `json:"last_used_at"` // to the minute; nil: never
}

// A SecretPlace is a place in requests, beside header fields, where the value of a
// secret may stand if the placeholder is all of it.
type SecretPlace struct {
	Host   string `json:"host"`           // "host" or "*.host"
	Method string `json:"method"`         // upper case
	Path   string `json:"path"`           // escaped; a * at its end stands for anything; in the path with one {secret}
	In     string `json:"in"`             // path, query, cookie, form or json
	Name   string `json:"name,omitempty"` // of the parameter, cookie or field; for json a JSON Pointer; empty for path
}

// A SecretList is the secrets of the project, by name.
type SecretList struct {
	Secrets []Secret `json:"secrets"`
}

// A SecretValue is a value to store: Value for the kind value, the other fields for
// the kind aws.
type SecretValue struct {
	Value           string `json:"value,omitempty"`
	AccessKeyID     string `json:"access_key_id,omitempty"`
	SecretAccessKey string `json:"secret_access_key,omitempty"`
	SessionToken    string `json:"session_token,omitempty"` // may be empty
}

// String implements [fmt.Stringer]: a value is not printed.
func (SecretValue) String() string { return "[secret]" }

// GoString implements [fmt.GoStringer].
func (SecretValue) GoString() string { return "[secret]" }

// A NewSecret creates a secret.
type NewSecret struct {
	Name string `json:"name"`
	Kind string `json:"kind,omitempty"` // empty means value
	SecretValue
	Hosts    []string          `json:"hosts,omitempty"`
	Env      string            `json:"env,omitempty"`      // empty means the name in capitals
	Approval string            `json:"approval,omitempty"` // empty means never
	Headers  []string          `json:"headers,omitempty"`  // empty means Authorization, and the field that the hosts are known to use
	Places   []SecretPlace     `json:"places,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// A SecretChange changes a secret. What is nil stays.
type SecretChange struct {
	Hosts    *[]string         `json:"hosts,omitempty"`
	Env      *string           `json:"env,omitempty"`
	Approval *string           `json:"approval,omitempty"`
	Headers  *[]string         `json:"headers,omitempty"`
	Places   *[]SecretPlace    `json:"places,omitempty"`
	Metadata map[string]string `json:"metadata,omitempty"`
}
