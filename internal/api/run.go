package api

import "time"

// The states of a [Run].
const (
	RunDraft      = "draft"      // not all of its inputs were uploaded
	RunProposed   = "proposed"   // it waits for its review
	RunRefused    = "refused"    // it never started
	RunStarting   = "starting"   // its sandbox is being created
	RunRunning    = "running"    // its commands run
	RunCollecting = "collecting" // its artifacts are collected, then its sandbox is removed
	RunEnded      = "ended"
)

// The outcomes of a [Run] that has ended.
const (
	RunSucceeded = "succeeded"
	RunFailed    = "failed"    // a command failed, or something required is missing
	RunViolated  = "violated"  // it did, or tried, something that its contract does not allow
	RunTimedOut  = "timed_out" // it, or one of its commands, ran out of time
	RunCancelled = "cancelled"
	RunLost      = "lost" // the server stopped, or failed, while it ran
)

// Why a [Run] was refused.
const (
	RunRefusedByBoundary = "boundary"   // its contract is wider than the project's boundary
	RunRefusedByEvidence = "evidence"   // answers of the review are missing, or contradict the contract
	RunRefusedByReview   = "review"     // a person or a rule rejected it
	RunRefusedByTime     = "unreviewed" // nobody decided in time
)

// A NewRun proposes a run.
type NewRun struct {
	Contract     string     `json:"contract,omitempty"`      // name of a stored contract; or else ContractText
	ContractText string     `json:"contract_text,omitempty"` // a contract as YAML or JSON
	Task         string     `json:"task"`                    // what it is for, for the people who review it
	Commands     [][]string `json:"commands"`                // one after the other, each a list of arguments
	Inputs       []NewInput `json:"inputs,omitempty"`        // input files; their bytes are uploaded before the review
	Answers      RunAnswers `json:"answers,omitzero"`
}

// A NewInput announces a file that is copied into the sandbox of a run.
type NewInput struct {
	Path   string `json:"path"` // absolute; the contract must name it
	Size   int64  `json:"size"` // bytes
	SHA256 string `json:"sha256"`
}

// A RunInput is an input of a [Run].
type RunInput struct {
	Path     string `json:"path"`
	Size     int64  `json:"size"` // bytes
	SHA256   string `json:"sha256"`
	Received bool   `json:"received"` // its bytes were uploaded, and match SHA256
}

// RunAnswers are the answers to the questions of the review before a start. A field
// that is nil or empty is not answered.
type RunAnswers struct {
	Execution   *bool    `json:"execution,omitempty"`   // whether it executes code
	Network     *bool    `json:"network,omitempty"`     // whether it uses the network, packages included
	Files       *bool    `json:"files,omitempty"`       // whether it uses files of the caller, or writes files
	Credentials *bool    `json:"credentials,omitempty"` // whether it uses secrets
	Check       string   `json:"check,omitempty"`       // the smallest reversible check
	Timeout     string   `json:"timeout,omitempty"`     // what happens after a time-out
	Cleanup     string   `json:"cleanup,omitempty"`     // what is cleaned up, and how
	Export      string   `json:"export,omitempty"`      // what leaves the sandbox, and for whom
	Missing     []string `json:"missing,omitempty"`     // missing evidence; the run is refused unless it is empty
}

// RunNeeds is what a run needs. The server derives it from the contract.
type RunNeeds struct {
	Execution   bool `json:"execution"`
	Network     bool `json:"network"`
	Files       bool `json:"files"`
	Credentials bool `json:"credentials"`
}

// A Run is a job with a contract, in a sandbox of its own. Lists of runs leave out
// ContractText, Explain and Warnings.
type Run struct {
	ID             string             `json:"id"` // "run_…"
	State          string             `json:"state"`
	Outcome        string             `json:"outcome"`  // empty unless it has ended
	Refused        string             `json:"refused"`  // why it was refused: boundary, evidence, review or unreviewed; else empty
	Reason         string             `json:"reason"`   // for a person; may be empty
	Proposer       string             `json:"proposer"` // a principal
	Contract       string             `json:"contract"` // its name
	ContractDigest string             `json:"contract_digest"`
	ContractText   string             `json:"contract_text,omitempty"` // as it was proposed
	BoundaryDigest string             `json:"boundary_digest"`         // empty if the project has none
	Template       string             `json:"template"`
	Task           string             `json:"task"`
	Commands       [][]string         `json:"commands"`
	Inputs         []RunInput         `json:"inputs"`
	Answers        RunAnswers         `json:"answers"`
	Needs          RunNeeds           `json:"needs"`
	Explain        []string           `json:"explain,omitempty"` // what the contract allows, in sentences
	Warnings       []string           `json:"warnings,omitempty"`
	Action         string             `json:"action"`   // that reviews it; empty before it is proposed
	Approved       string             `json:"approved"` // earlier action, approved by a person, that covers this run; else empty
	Sandbox        string             `json:"sandbox"`  // empty before it is created
	CreatedAt      time.Time          `json:"created_at"`
	StartedAt      *time.Time         `json:"started_at"` // when its first command started
	EndedAt        *time.Time         `json:"ended_at"`
	ExitCode       *int               `json:"exit_code"` // of its last command; nil if none has ended
	Results        []RunCommandResult `json:"results"`   // of the commands that have started
	OutputBytes    int64              `json:"output_bytes"`
}

// A RunCommandResult is the result of one command of a run.
type RunCommandResult struct {
	Command     []string   `json:"command"`
	StartedAt   time.Time  `json:"started_at"`
	EndedAt     *time.Time `json:"ended_at"`  // nil while it runs
	ExitCode    *int       `json:"exit_code"` // nil while it runs, and if it was not started
	Signal      int        `json:"signal"`    // that ended it; 0 means none
	StdoutBytes int64      `json:"stdout_bytes"`
	StderrBytes int64      `json:"stderr_bytes"`
	Stderr      string     `json:"stderr"`           // the end of standard error, redacted; hostile text
	Stdout      string     `json:"stdout,omitempty"` // the end of standard output, redacted, if the contract stores it; hostile text
	Reason      string     `json:"reason"`           // why the server ended it or did not start it; else empty
}

// A RunList lists runs, newest first.
type RunList struct {
	Runs []Run `json:"runs"`
}

// What a [RunEvent] is about.
const (
	RunEventState     = "state"     // the run has a new state
	RunEventDecision  = "decision"  // its review was decided
	RunEventCommand   = "command"   // a command started
	RunEventExit      = "exit"      // a command ended
	RunEventOutput    = "output"    // bytes of output so far
	RunEventLimit     = "limit"     // a limit was reached
	RunEventViolation = "violation" // the run tried to start a program that the contract does not allow, or was over a limit
	RunEventArtifact  = "artifact"  // a file was listed, released or refused
)

// A RunEvent is something that happened in a run.
type RunEvent struct {
	N        int64     `json:"n"` // from 1
	At       time.Time `json:"at"`
	Kind     string    `json:"kind"`
	Text     string    `json:"text"`                // for a person; parts of it may be hostile
	State    string    `json:"state,omitempty"`     // of the run, in events of kind state
	Outcome  string    `json:"outcome,omitempty"`   // likewise
	Command  int       `json:"command,omitempty"`   // its number, from 1
	ExitCode *int      `json:"exit_code,omitempty"` // of a command that ended
	Bytes    int64     `json:"bytes,omitempty"`
	Action   string    `json:"action,omitempty"` // to be decided, or decided
	Artifact int       `json:"artifact,omitempty"`
}

// A RunEventList lists the next events of a run, oldest first, at most 200.
type RunEventList struct {
	Events []RunEvent `json:"events"`
	State  string     `json:"state"` // of the run, now
}

// A Contract is a version of a stored contract. Lists leave out Text, Explain and
// Warnings.
type Contract struct {
	Name      string    `json:"name"`
	Version   int64     `json:"version"` // from 1
	Digest    string    `json:"digest"`
	Text      string    `json:"text,omitempty"` // YAML or JSON, as it was stored
	CreatedAt time.Time `json:"created_at"`
	CreatedBy string    `json:"created_by"` // a principal
	Explain   []string  `json:"explain,omitempty"`
	Warnings  []string  `json:"warnings,omitempty"`
}

// A ContractList lists the newest versions of the project's contracts, by name.
type ContractList struct {
	Contracts []Contract `json:"contracts"`
}

// A ContractText is a contract, or a boundary, to be stored.
type ContractText struct {
	Text string `json:"text"` // YAML or JSON
}

// A Boundary is the contract that limits all contracts of a project: none may be wider.
type Boundary struct {
	Digest    string    `json:"digest"`
	Text      string    `json:"text"`
	CreatedAt time.Time `json:"created_at"`
	CreatedBy string    `json:"created_by"` // a principal
	Explain   []string  `json:"explain"`
}
