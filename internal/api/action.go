package api

import "time"

// A State is where an [Action] stands.
type State string

// The states. See docs/oversight.md for the moves between them.
const (
	StateScheduled State = "scheduled" // waits for its time, and is judged then
	StatePending   State = "pending"   // waits for a person
	StateDenied    State = "denied"    // by policy, a person or the end of its time
	StateApproved  State = "approved"  // will be carried out
	StateExecuting State = "executing" // is being carried out
	StateDone      State = "done"
	StateFailed    State = "failed"
	StateUnknown   State = "unknown"   // interrupted: a person has to say whether it happened
	StateCancelled State = "cancelled" // by its proposer or a person
)

// Settled reports whether nothing more becomes of an action in state s by
// itself.
func (s State) Settled() bool {
	return s == StateDenied || s == StateDone || s == StateFailed || s == StateUnknown || s == StateCancelled
}

// An Action is a proposed effect on the outside world, such as sending an email.
type Action struct {
	ID        string     `json:"id"`   // "act_…"
	Kind      string     `json:"kind"` // "email.send"
	State     State      `json:"state"`
	Inbox     string     `json:"inbox"`      // id; empty for those of the whole project
	Via       string     `json:"via"`        // the interface that proposed it: mcp, rest, smtp, …
	Digest    string     `json:"digest"`     // SHA-256 of exactly what would leave, hexadecimal
	CreatedAt time.Time  `json:"created_at"` // when it was proposed
	DecidedAt *time.Time `json:"decided_at"` // nil: not yet
	Reason    string     `json:"reason"`     // of the decision; the policy's if policy denied it
	Result    string     `json:"result"`     // of the execution, for people
	SendAt    *time.Time `json:"send_at"`    // it leaves no sooner; nil: at once
	AskAt     *time.Time `json:"ask_at"`     // people are asked no sooner; nil: at once
	DueAt     *time.Time `json:"due_at"`     // of an approved one: when it leaves or is retried; until then it can be cancelled
	Note      string     `json:"note"`       // what the reviewer is warned of; may be empty

	ExpiresAt *time.Time `json:"expires_at"` // while it waits for a person: when it is denied
	Approvals int        `json:"approvals"`  // by people, of the current version
	Approvers int        `json:"approvers"`  // how many approvals it needs
	Missing   string     `json:"missing"`    // for people: what it still waits for; else empty

	*Review // nil unless the caller is a person
}

// A Review is the part of an [Action] that only people see.
type Review struct {
	Version  int64    `json:"version"`  // to pass to a decision
	Proposer string   `json:"proposer"` // a principal: "agent:crd_…"
	Rule     string   `json:"rule"`     // of the policy; may be empty
	Verdict  string   `json:"verdict"`  // why policy asks, allows or denies, for people
	Decider  string   `json:"decider"`  // a principal; empty: nobody decided yet
	Attempts int64    `json:"attempts"` // executions that were begun
	Author   string   `json:"author"`   // the person who edited it last; may be empty
	Who      []string `json:"who"`      // names and roles that are asked; empty: everybody who decides
	StepUp   bool     `json:"step_up"`  // who approves proves a second factor
	Stopped  string   `json:"stopped"`  // the kill switch that stops it, for people; may be empty
	Context  string   `json:"context"`  // what its proposer chose to show beside it; hostile
	Assignee string   `json:"assignee"` // the person who was asked to look at it; may be empty
	View     *View    `json:"view,omitempty"`
}

// A View is what a reviewer decides on: exactly what would leave. An agent wrote
// it; all of it may be hostile. Lists do not have it.
type View struct {
	Title      string   `json:"title"`
	Fields     []Field  `json:"fields"`
	Text       string   `json:"text"`
	Notes      []string `json:"notes"` // warnings by the server
	Files      []File   `json:"files"`
	Unroutable []string `json:"no_way_out"` // domains of recipients to which this server has no route

	Findings []ActionFinding `json:"findings"` // what to look at closely, grave ones first
}

// An ActionFinding is something that a reviewer should look at closely. Its texts may be
// hostile.
type ActionFinding struct {
	ID      string `json:"id"`      // for [Decision.Seen]
	Kind    string `json:"kind"`    // "lookalike", "hidden_recipient", "second_account", "secret", or a content flag
	Subject string `json:"subject"` // the address, file or host that it is about; may be empty
	Title   string `json:"title"`
	Text    string `json:"text"`
	Tick    string `json:"tick"` // what the approver must confirm; empty if it is not grave
}

// An ActionList is actions, the newest first.
type ActionList struct {
	Actions []Action `json:"actions"`
}

// A Decision approves or rejects one version of an action.
type Decision struct {
	Version int64  `json:"version"` // as shown
	Digest  string `json:"digest"`  // as shown
	Approve *bool  `json:"approve"` // required
	Reason  string `json:"reason,omitempty"`
	// Seen are the IDs of the findings that the person ticked. An approval must have
	// those of all findings with a tick.
	Seen []string `json:"seen,omitempty"`
	// Allow is what is allowed together with the approval; nil means nothing more than
	// this action. Where it cannot be allowed, nothing is approved.
	Allow *Allowance `json:"allow,omitempty"`
}

// A BatchDecision is one [Decision] of several. It cannot allow anything more.
type BatchDecision struct {
	ID      string `json:"id"`
	Version int64  `json:"version"`
	Digest  string `json:"digest"`
	Approve *bool  `json:"approve"`
	Reason  string `json:"reason,omitempty"`

	Seen []string `json:"seen,omitempty"` // see [Decision]
}

// Decisions are at most 100 decisions in one request.
type Decisions struct {
	Decisions []BatchDecision `json:"decisions"`
}

// A DecisionResult is what became of one decision of a batch.
type DecisionResult struct {
	ID     string  `json:"id"`
	Error  string  `json:"error"`  // a problem's code; empty: it was recorded
	Detail string  `json:"detail"` // for people
	Action *Action `json:"action"` // as it is now; nil if the decision was not recorded
}

// DecisionResults answers [Decisions], in their order.
type DecisionResults struct {
	Decisions []DecisionResult `json:"decisions"`
}

// A Resolution says what became of an action in state unknown: done (it
// happened), failed (it did not) or approved (it did not, try again).
type Resolution struct {
	Version int64  `json:"version"`
	State   State  `json:"state"`
	Reason  string `json:"reason"` // required
}

// An Approval is one person's approval of one version of an action.
type Approval struct {
	Version int64     `json:"version"`
	Person  string    `json:"person"`
	At      time.Time `json:"at"`
	Reason  string    `json:"reason"`
	Seen    []string  `json:"seen"` // IDs of the findings that the person ticked
}

// An ApprovalList is the approvals of an action.
type ApprovalList struct {
	Approvals []Approval `json:"approvals"`
}

// A Comment is what a person said about an action.
type Comment struct {
	ID      string    `json:"id"`
	Person  string    `json:"person"` // a principal; keys see "person"
	At      time.Time `json:"at"`
	Text    string    `json:"text"`
	ToAgent bool      `json:"to_agent"` // the proposer may read it
}

// A CommentList is the comments on an action, the oldest first.
type CommentList struct {
	Comments []Comment `json:"comments"`
}

// A NewComment adds a comment.
type NewComment struct {
	Text    string `json:"text"`
	ToAgent bool   `json:"to_agent,omitempty"`
}

// An Edit changes a proposed email before it is decided. Nil fields stay as they
// are. It makes a new version, which needs approvals anew.
type Edit struct {
	Version int64     `json:"version"`
	To      *[]string `json:"to,omitempty"`
	Cc      *[]string `json:"cc,omitempty"`
	Bcc     *[]string `json:"bcc,omitempty"`
	Subject *string   `json:"subject,omitempty"`
	Text    *string   `json:"text,omitempty"`
	Drop    []int     `json:"drop,omitempty"` // indexes of files to remove
}

// A Revision is one version of what an action would do.
type Revision struct {
	Version int64     `json:"version"`
	Author  string    `json:"author"` // a principal
	At      time.Time `json:"at"`
	Digest  string    `json:"digest"`
	Current bool      `json:"current"`
	Kept    bool      `json:"kept"`    // its content is still stored
	Changes []Change  `json:"changes"` // since the revision before; empty if the content of either is gone
}

// A Change is one field that differs between two revisions.
type Change struct {
	Field string `json:"field"`
	Old   string `json:"old"`
	New   string `json:"new"`
}

// A RevisionList is the revisions of an action, the oldest first.
type RevisionList struct {
	Revisions []Revision `json:"revisions"`
}

// The scopes of a [Switch].
const (
	SwitchInbox      = "inbox"
	SwitchCapability = "capability" // a kind of action
	SwitchDomain     = "domain"     // of recipients
	SwitchProject    = "project"
	SwitchEverything = "everything"
)

// A Switch is a kill switch that is on.
type Switch struct {
	ID      string     `json:"id"`
	Scope   string     `json:"scope"`  // inbox, capability, domain, project or everything
	Target  string     `json:"target"` // an inbox's id, a kind of action or a domain; else empty
	Reason  string     `json:"reason"`
	By      string     `json:"by"` // a principal
	At      time.Time  `json:"at"`
	Until   *time.Time `json:"until"`   // nil: until it is turned off
	Stopped int64      `json:"stopped"` // approved actions that it stopped when it was turned on
}

// A SwitchList is the kill switches that are on.
type SwitchList struct {
	Switches []Switch `json:"switches"`
}

// A NewSwitch turns a kill switch on.
type NewSwitch struct {
	Scope  string     `json:"scope"`
	Target string     `json:"target,omitempty"`
	Reason string     `json:"reason"`          // required
	Until  *time.Time `json:"until,omitempty"` // nil: until it is turned off
}
