// Package run performs runs: jobs with a written contract, in sandboxes of their own.
//
//	draft ── proposed ──┬─ refused
//	                    └─ starting ── running ── collecting ── ended
//
// Each run is reviewed before it starts (an action of kind run.start). Only files that
// its contract names leave its sandbox (actions of kind file.export). It ends with a
// report and a signed statement.
//
// Each change of state is recorded before its effect. Nothing runs twice: if the server
// stops while a run is under way, the run is lost, and its sandbox is removed. The host
// decides everything; what the guest reports is evidence of lower rank.
package run

import (
	"cmp"
	"errors"
	"time"

	"postern/internal/api"
	"postern/internal/contract"
)

var (
	// ErrInvalid means that a proposal is invalid. The text names the field and the
	// limit.
	ErrInvalid = errors.New("invalid run")
	// ErrRefused means that a run was recorded as refused before anybody was asked,
	// because of the boundary or of missing evidence. [RefusedError] has the run.
	ErrRefused = errors.New("the run is refused")
	// ErrReview means that a sandbox cannot be created before a person has approved its
	// contract. [ReviewError] names the action.
	ErrReview = errors.New("the contract waits for its review")
	// ErrState means that the state of a run does not allow the operation.
	ErrState = errors.New("its state does not allow this")
	// ErrFull means that a limit on runs is reached. The text names it.
	ErrFull = errors.New("a limit on runs is reached")
	// ErrRunFailed is wrapped by the errors of steps after the commands that make a run
	// fail. Their text becomes its reason.
	ErrRunFailed = errors.New("the run has failed")
)

// A FullError is an [ErrFull] after which the caller may try again, once Wait is over.
type FullError struct {
	Text string
	Wait time.Duration // after which it may be tried again
}

// Error implements error.
func (e *FullError) Error() string { return ErrFull.Error() + ": " + e.Text }

// Unwrap returns [ErrFull].
func (*FullError) Unwrap() error { return ErrFull }

// A RefusedError is an [ErrRefused] with its run.
type RefusedError struct{ Run Run }

// Error implements error.
func (e *RefusedError) Error() string { return "the run is refused: " + e.Run.Reason }

// Unwrap returns [ErrRefused].
func (*RefusedError) Unwrap() error { return ErrRefused }

// A ReviewError is an [ErrReview] with the action that waits.
type ReviewError struct {
	Action string
	Denied string // why it was denied; empty while it waits
}

// Error implements error.
func (e *ReviewError) Error() string {
	if e.Denied != "" {
		return "the review rejected the contract (" + e.Action + "): " + e.Denied
	}
	return "a person must approve the contract first (" + e.Action + "): try again once it is approved"
}

// Unwrap returns [ErrReview].
func (*ReviewError) Unwrap() error { return ErrReview }

// A State is a state of a run.
type State string

// The states; see the package comment.
const (
	Draft      State = api.RunDraft
	Proposed   State = api.RunProposed
	Refused    State = api.RunRefused
	Starting   State = api.RunStarting
	Running    State = api.RunRunning
	Collecting State = api.RunCollecting
	Ended      State = api.RunEnded
)

// An Outcome is how a run has ended.
type Outcome string

// The outcomes. The empty one is that of a run that has not ended.
const (
	Succeeded Outcome = api.RunSucceeded
	Failed    Outcome = api.RunFailed
	Violated  Outcome = api.RunViolated
	TimedOut  Outcome = api.RunTimedOut
	Cancelled Outcome = api.RunCancelled
	Lost      Outcome = api.RunLost
)

// Over reports whether s is final.
func (s State) Over() bool { return s == Refused || s == Ended }

// A Run is a job with a contract. Task, commands, paths and answers are the proposer's
// and may be hostile.
type Run struct {
	ID             string
	Project        string
	Proposer       string // a principal
	Inbox          string // of an agent that proposed it; else empty
	Via            string // interface by which it was proposed
	State          State
	Outcome        Outcome
	Refused        string // why it was refused; else empty
	Reason         string // for a person
	Contract       *contract.Contract
	ContractText   string // as it was proposed
	ContractDigest string // "sha256:…"
	BoundaryDigest string // empty if none was set
	Task           string
	Commands       [][]string
	Inputs         []Input
	Answers        api.RunAnswers
	Action         string // that reviews it
	Approved       string // earlier approved action that covers it
	Sandbox        string // empty before it was created
	Created        time.Time
	Started        time.Time // when its first command started
	Ended          time.Time
	Version        int64
	Results        []Result

	payload   []byte    // of Action: what was approved
	scope     string    // see [Run.scopeOf]
	template  string    // ID of the build that the contract's template stands for
	begun     time.Time // when a server claimed it; zero before that
	kept      time.Time // until when its sandbox is kept paused
	cancelled string    // who cancelled it; else empty
	evidence  Evidence
}

// An Input is a file that is copied into the sandbox before the start.
type Input struct {
	Path     string `json:"path"`
	Size     int64  `json:"size"`
	SHA256   string `json:"sha256"` // hexadecimal
	Received bool   `json:"received"`
	Blob     string `json:"blob,omitempty"` // ID of its bytes
}

// A Result is the result of one command.
type Result struct {
	Command []string  `json:"command"`
	Started time.Time `json:"started"`
	Ended   time.Time `json:"ended"`            // zero while it runs
	Exit    *int      `json:"exit,omitempty"`   // nil unless it has exited
	Signal  int       `json:"signal,omitempty"` // that ended it; 0 means none
	Stdout  int64     `json:"stdout"`           // bytes
	Stderr  int64     `json:"stderr"`           // bytes
	Tail    string    `json:"tail,omitempty"`   // end of standard error, redacted; hostile
	Output  string    `json:"output,omitempty"` // end of standard output, redacted; only if the contract stores it; hostile
	Reason  string    `json:"reason,omitempty"` // why the server ended it or did not start it
}

// A Proposal proposes a run.
type Proposal struct {
	Contract string // name of a stored contract; or else Text
	Text     string // a contract, YAML or JSON
	Task     string
	Commands [][]string
	Inputs   []Input // path, size and digest
	Answers  api.RunAnswers
}

// An Event is something that happened in a run.
type Event = api.RunEvent

// A Query selects runs.
type Query struct {
	State    State  // empty means every state
	Contract string // name; empty means every contract
	Limit    int    // 0 means 50, at most 200
}

// A Stored is one version of a contract, or of a boundary, in the database.
type Stored struct {
	Name    string
	Version int64
	Text    string
	Digest  string
	At      time.Time
	By      string // a principal
	*contract.Contract
}

// API returns r as the API has it.
func (r *Run) API() api.Run {
	out := r.Brief()
	out.ContractText = r.ContractText
	if r.Contract != nil {
		out.Explain, out.Warnings = r.Contract.Explain(), r.Contract.Warnings()
	}
	return out
}

// Brief returns r as the API's lists have it.
func (r *Run) Brief() api.Run {
	out := api.Run{
		ID: r.ID, State: string(r.State), Outcome: string(r.Outcome), Refused: r.Refused, Reason: r.Reason, Proposer: r.Proposer,
		ContractDigest: r.ContractDigest, BoundaryDigest: r.BoundaryDigest, Task: r.Task, Commands: r.Commands, Inputs: []api.RunInput{}, Answers: r.Answers,
		Action: r.Action, Approved: r.Approved, Sandbox: r.Sandbox, CreatedAt: r.Created, StartedAt: moment(r.Started), EndedAt: moment(r.Ended), Results: []api.RunCommandResult{},
	}
	if c := r.Contract; c != nil {
		out.Contract, out.Template, out.Needs = c.Name, cmp.Or(c.Template, "base"), needs(c)
	}
	for _, in := range r.Inputs {
		out.Inputs = append(out.Inputs, api.RunInput{Path: in.Path, Size: in.Size, SHA256: in.SHA256, Received: in.Received})
	}
	for _, v := range r.Results {
		out.Results = append(out.Results, api.RunCommandResult{
			Command: v.Command, StartedAt: v.Started, EndedAt: moment(v.Ended), ExitCode: v.Exit, Signal: v.Signal, StdoutBytes: v.Stdout, StderrBytes: v.Stderr, Stderr: v.Tail, Stdout: v.Output, Reason: v.Reason,
		})
		out.OutputBytes += v.Stdout + v.Stderr
		if v.Exit != nil {
			out.ExitCode = v.Exit
		}
	}
	return out
}

// moment returns a pointer to t, or nil if t is zero.
func moment(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// needs derives from a contract what its runs need.
func needs(c *contract.Contract) api.RunNeeds {
	return api.RunNeeds{
		Execution: len(c.Commands.Allow) > 0, Network: len(c.Network.Allow) > 0 || len(c.Packages) > 0,
		Files: len(c.Files.Read) > 0 || len(c.Files.Write) > 0 || len(c.Files.Inputs) > 0, Credentials: len(c.Credentials) > 0,
	}
}
