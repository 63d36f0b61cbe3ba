package api

import "time"

// An Effect is what policy says about a request.
type Effect string

// The effects.
const (
	Allow Effect = "allow"
	Ask   Effect = "ask"
	Deny  Effect = "deny"
)

// A PolicyVersion is a version of the project's policy.
type PolicyVersion struct {
	Version   int64      `json:"version"`    // 0: the policy that is built in
	Digest    string     `json:"digest"`     // SHA-256 of its text, hexadecimal
	CreatedAt *time.Time `json:"created_at"` // since when it holds; nil for the one that is built in
	Author    string     `json:"author"`     // a principal
	Decider   string     `json:"decider"`    // a principal
	Action    string     `json:"action"`     // that put it in force
	Reason    string     `json:"reason"`     // the author's

	*PolicyText // nil in lists
}

// PolicyText is the content of a policy.
type PolicyText struct {
	Text  string `json:"text"`  // YAML; see docs/policy.md
	Tests string `json:"tests"` // YAML; may be empty
}

// A PolicyList is versions of the policy, the newest first.
type PolicyList struct {
	Versions []PolicyVersion `json:"versions"`
}

// A NewPolicy proposes a policy. The answer is an [Action] that an owner
// decides on.
type NewPolicy struct {
	Text     string `json:"text"`
	Tests    string `json:"tests,omitempty"`
	Reason   string `json:"reason,omitempty"`
	Replaces string `json:"replaces,omitempty"` // digest of the version that it was written against; empty: any
}

// An Evaluation asks what a policy says about a request and about tests. It has
// no effects.
type Evaluation struct {
	Text    *string        `json:"text,omitempty"` // nil: the policy in force
	Tests   string         `json:"tests,omitempty"`
	Request *PolicyRequest `json:"request,omitempty"`
}

// A PolicyRequest is what the conditions of a policy are evaluated over. See
// docs/policy.md.
type PolicyRequest struct {
	Kind     string            `json:"kind"`             // "email.send"
	Mode     Mode              `json:"mode,omitempty"`   // empty: gated_send in requests about email
	Inbox    string            `json:"inbox,omitempty"`  // its address
	Via      string            `json:"via,omitempty"`    // mcp, rest, smtp, …
	From     string            `json:"from,omitempty"`   // of incoming mail: the authenticated address
	To       []string          `json:"to,omitempty"`     // every recipient, also those in Bcc
	Listed   bool              `json:"listed,omitempty"` // the allow list has all recipients
	Size     int64             `json:"size,omitempty"`   // bytes
	Files    []PolicyFile      `json:"files,omitempty"`
	Flags    []string          `json:"flags,omitempty"`    // findings of the content checks
	Sandbox  string            `json:"sandbox,omitempty"`  // that proposed it
	Template string            `json:"template,omitempty"` // of that sandbox
	History  PolicyHistory     `json:"history,omitzero"`
	Time     time.Time         `json:"time,omitzero"` // zero: now
	Detail   map[string]string `json:"detail,omitempty"`
}

// A PolicyFile is a file of a [PolicyRequest].
type PolicyFile struct {
	Name string `json:"name"`
	Type string `json:"type"` // "application/pdf"
	Size int64  `json:"size"` // bytes
}

// PolicyHistory is earlier mail between the inbox and the recipients.
type PolicyHistory struct {
	Sent    int64 `json:"sent"`    // messages delivered to the recipient that got the fewest
	Known   int   `json:"known"`   // recipients that got one before
	Replies bool  `json:"replies"` // every recipient has written to the inbox
}

// A Verdict is what policy says.
type Verdict struct {
	Effect    Effect   `json:"effect"`
	Rule      string   `json:"rule"` // that decided, or the inbox's mode; may be empty
	Reason    string   `json:"reason"`
	Approvers int      `json:"approvers"` // people who must approve; 0 unless Effect is ask
	Who       []string `json:"who"`       // names or roles; empty: everybody who decides
	Within    string   `json:"within"`    // after which it is denied: "4h0m0s"; empty: the server's default
	StepUp    bool     `json:"step_up"`   // who decides proves a second factor
}

// A PolicyStep is what became of one rule in an evaluation.
type PolicyStep struct {
	Rule    string `json:"rule"`
	Line    int    `json:"line"`    // in the policy's text
	Outcome string `json:"outcome"` // "matched", "did not match", "is about other kinds" or "could not be evaluated: …"
	Cost    uint64 `json:"cost"`    // of its condition, in CEL's units
}

// A PolicyTest is the result of one test of a policy.
type PolicyTest struct {
	Name    string  `json:"name"`
	Line    int     `json:"line"` // in the tests' text
	Passed  bool    `json:"passed"`
	Problem string  `json:"problem"` // for people: how the verdict differs; empty if it passed
	Verdict Verdict `json:"verdict"`
}

// An EvaluationResult answers an [Evaluation].
type EvaluationResult struct {
	Verdict *Verdict     `json:"verdict"` // nil if there was no request
	Steps   []PolicyStep `json:"steps"`
	Tests   []PolicyTest `json:"tests"`
}
