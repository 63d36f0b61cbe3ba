package api

import "time"

// The kinds of a [Permit].
const (
	PermitNetwork = "network" // connections and requests to hosts
	PermitSecret  = "secret"  // the use of a secret
	// Made together with an approval. They open nothing: they answer the rule that asked.
	PermitConnection = "connection" // connections to a host and port
	PermitRequest    = "request"    // requests with a method to a host and path
)

// A Permit is what a person has allowed sandboxes for a time.
type Permit struct {
	ID        string     `json:"id"`      // "prm_…"
	Kind      string     `json:"kind"`    // network, secret, connection or request
	Sandbox   string     `json:"sandbox"` // id; empty: every sandbox of the project
	Hosts     []string   `json:"hosts"`   // host or *.host
	Methods   []string   `json:"methods"` // empty: every method
	Paths     []string   `json:"paths"`   // patterns; empty: every path
	Port      int        `json:"port"`    // 0: 443 and 80
	Secret    string     `json:"secret"`  // id of the secret, for kind secret; else empty
	Why       string     `json:"why"`     // what the program said; for connection and request the rule that is answered, "rule ID"
	CreatedAt time.Time  `json:"created_at"`
	Until     time.Time  `json:"until"`
	Action    string     `json:"action"`   // id of the action that asked for it
	Decider   string     `json:"decider"`  // a principal; empty for callers in sandboxes
	EndedAt   *time.Time `json:"ended_at"` // nil: nobody ended it
	EndedBy   string     `json:"ended_by"` // a principal; empty for callers in sandboxes
}

// A PermitList is permits, the newest first.
type PermitList struct {
	Permits []Permit `json:"permits"`
}

// A NarrowedProposal replaces a proposal for a network permit before it is decided.
// It may allow nothing that the proposal does not.
type NarrowedProposal struct {
	Version int64    `json:"version"` // of the action, as shown
	Hosts   []string `json:"hosts"`
	Methods []string `json:"methods,omitempty"`
	Paths   []string `json:"paths,omitempty"`
	Port    int      `json:"port,omitempty"`
	For     string   `json:"for,omitempty"`   // 30m, 2h or 7d
	Scope   string   `json:"scope,omitempty"` // sandbox or project
}

// A NetworkProposal is what a program in a sandbox asked to be allowed, as it reads
// it: as it was narrowed.
type NetworkProposal struct {
	ID        string     `json:"id"` // of the action
	State     State      `json:"state"`
	Hosts     []string   `json:"hosts"`
	Methods   []string   `json:"methods"`
	Paths     []string   `json:"paths"`
	Port      int        `json:"port"`
	For       string     `json:"for"`
	Scope     string     `json:"scope"`
	Why       string     `json:"why"`
	Narrowed  bool       `json:"narrowed"` // a person changed it
	CreatedAt time.Time  `json:"created_at"`
	DecidedAt *time.Time `json:"decided_at"`
	ExpiresAt *time.Time `json:"expires_at"` // while it waits: when it is denied
	Reason    string     `json:"reason"`     // of the decision
	Permit    *Permit    `json:"permit"`     // nil until it is approved
	Next      string     `json:"next"`       // what to do, in words
}

// A NetworkProposalList is the proposals of a sandbox, the newest first.
type NetworkProposalList struct {
	Proposals []NetworkProposal `json:"proposals"`
}

// A Denial is a refusal by the wall. Part of its text comes from the sandbox.
type Denial struct {
	Time   time.Time `json:"time"`
	Kind   string    `json:"kind"`             // request, connection, dns, cut, secret.misdirected, placeholder or a protocol
	Host   string    `json:"host"`             // name, or address and port
	Method string    `json:"method,omitempty"` // of a request
	Path   string    `json:"path,omitempty"`   // of a request, without the query
	Reason string    `json:"reason"`
	Rule   string    `json:"rule,omitempty"`   // id of the deciding rule
	Action string    `json:"action,omitempty"` // id of the action that a person decides on
}

// A DenialList is the last refusals of a sandbox, the newest first; at most 100.
type DenialList struct {
	Denials []Denial `json:"denials"`
	Ask     string   `json:"ask"` // where to propose what is needed
}
