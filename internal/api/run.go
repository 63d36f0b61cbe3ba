package api

import "time"

// The states of a [Run].
const (
	RunDraft      = "draft"      // inputs are to come
	RunProposed   = "proposed"   // it waits for its review
	RunRefused    = "refused"    // it never started
	RunStarting   = "starting"   // its sandbox is made
	RunRunning    = "running"    // its commands run
	RunCollecting = "collecting" // its files are listed, its sandbox is removed
	RunEnded      = "ended"
)

// The outcomes of a [Run] that has ended.
const (
	RunSucceeded = "succeeded"
	RunFailed    = "failed"    // a command failed, or something required is missing
	RunViolated  = "violated"  // it did, or tried, what its contract does not allow
	RunTimedOut  = "timed_out" // never a reason for a wider contract
	RunCancelled = "cancelled"
	RunLost      = "lost" // the server stopped, or failed, while it ran
)

// Why a [Run] was refused.
const (
	RunRefusedByBoundary = "boundary"   // its contract is wider than the project's boundary
	RunRefusedByEvidence = "evidence"   // answers of the review are missing, or contradict the contract
	RunRefusedByReview   = "review"     // a person or a rule said no
	RunRefusedByTime     = "unreviewed" // nobody decided in time
)

// A NewRun proposes a run.
type NewRun struct {
	Contract     string     `json:"contract,omitempty"`      // name of a stored contract, or
	ContractText string     `json:"contract_text,omitempty"` // a contract as YAML or JSON
	Task         string     `json:"task"`                    // what it is for, for the people who review it
	Commands     [][]string `json:"commands"`                // one after the other, each a list of arguments
	Inputs       []NewInput `json:"inputs,omitempty"`        // files to be put in; their bytes are uploaded before the review
	Answers      RunAnswers `json:"answers,omitzero"`
}

// A NewInput announces a file that is put into the sandbox of a run.
type NewInput struct {
	Path   string `json:"path"` // absolute; the contract names it
	Size   int64  `json:"size"` // bytes
	SHA256 string `json:"sha256"`
}

// A RunInput is an input of a [Run].
type RunInput struct {
	Path     string `json:"path"`
	Size     int64  `json:"size"` // bytes
	SHA256   string `json:"sha256"`
	Received bool   `json:"received"` // its bytes are here, and match
}

// RunAnswers are the answers to the questions of the review before a start. What is
// nil or empty is not answered.
type RunAnswers struct {
	Execution   *bool    `json:"execution,omitempty"`   // does it need to execute code
	Network     *bool    `json:"network,omitempty"`     // the network, packages included
	Files       *bool    `json:"files,omitempty"`       // files of the caller, or to write files
	Credentials *bool    `json:"credentials,omitempty"` // secrets
	Check       string   `json:"check,omitempty"`       // the smallest check that can be undone
	Timeout     string   `json:"timeout,omitempty"`     // what happens when its time is over
	Cleanup     string   `json:"cleanup,omitempty"`     // what is cleaned up, and how
	Export      string   `json:"export,omitempty"`      // what leaves, and for whom
	Missing     []string `json:"missing,omitempty"`     // evidence that is missing: the run is refused unless it is empty
}

// RunNeeds are what the contract of a run allows, as the server derives it.
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
	Outcome        string             `json:"outcome"`  // of one that has ended; else empty
	Refused        string             `json:"refused"`  // why one was refused: boundary, evidence, review or unreviewed; else empty
	Reason         string             `json:"reason"`   // for a person; may be empty
	Proposer       string             `json:"proposer"` // a principal
	Contract       string             `json:"contract"` // its name
	ContractDigest string             `json:"contract_digest"`
	ContractText   string             `json:"contract_text,omitempty"` // as it was proposed
	BoundaryDigest string             `json:"boundary_digest"`         // empty: the project has none
	Template       string             `json:"template"`
	Task           string             `json:"task"`
	Commands       [][]string         `json:"commands"`
	Inputs         []RunInput         `json:"inputs"`
	Answers        RunAnswers         `json:"answers"`
	Needs          RunNeeds           `json:"needs"`
	Explain        []string           `json:"explain,omitempty"` // what the contract allows, in sentences
	Warnings       []string           `json:"warnings,omitempty"`
	Action         string             `json:"action"`   // by which it is reviewed; empty before it is proposed
	Approved       string             `json:"approved"` // earlier action that a person approved and that this run does not go beyond; else empty
	Sandbox        string             `json:"sandbox"`  // empty before it is made
	CreatedAt      time.Time          `json:"created_at"`
	StartedAt      *time.Time         `json:"started_at"` // of its first command
	EndedAt        *time.Time         `json:"ended_at"`
	ExitCode       *int               `json:"exit_code"` // of its last command; nil: none has ended
	Results        []RunCommandResult `json:"results"`   // of the commands that have begun
	OutputBytes    int64              `json:"output_bytes"`
}

// A RunCommandResult is what became of one command of a run.
type RunCommandResult struct {
	Command     []string   `json:"command"`
	StartedAt   time.Time  `json:"started_at"`
	EndedAt     *time.Time `json:"ended_at"`  // nil while it runs
	ExitCode    *int       `json:"exit_code"` // nil while it runs, and if it was not started
	Signal      int        `json:"signal"`    // that ended it; 0 means none
	StdoutBytes int64      `json:"stdout_bytes"`
	StderrBytes int64      `json:"stderr_bytes"`
	Stderr      string     `json:"stderr"`           // the end of standard error, redacted; hostile text
	Stdout      string     `json:"stdout,omitempty"` // the end of standard output, redacted, if the contract has it kept; hostile text
	Reason      string     `json:"reason"`           // why the server ended it or did not start it; else empty
}

// A RunList is runs, the newest first.
type RunList struct {
	Runs []Run `json:"runs"`
}

// What a [RunEvent] is about.
const (
	RunEventState     = "state"     // the run has a new state
	RunEventDecision  = "decision"  // its review was decided
	RunEventCommand   = "command"   // a command began
	RunEventExit      = "exit"      // a command ended
	RunEventOutput    = "output"    // bytes of output so far
	RunEventLimit     = "limit"     // a limit was reached
	RunEventViolation = "violation" // something was tried that the contract does not allow
	RunEventArtifact  = "artifact"  // a file was listed, released or refused
)

// A RunEvent is something that happened in a run.
type RunEvent struct {
	N        int64     `json:"n"` // from 1
	At       time.Time `json:"at"`
	Kind     string    `json:"kind"`
	Text     string    `json:"text"`                // for a person; parts of it may be hostile
	State    string    `json:"state,omitempty"`     // the run's, of kind state
	Outcome  string    `json:"outcome,omitempty"`   // likewise
	Command  int       `json:"command,omitempty"`   // its number, from 1
	ExitCode *int      `json:"exit_code,omitempty"` // of a command that ended
	Bytes    int64     `json:"bytes,omitempty"`
	Action   string    `json:"action,omitempty"` // to be decided, or decided
	Artifact int       `json:"artifact,omitempty"`
}

// A RunEventList is the next events of a run, the oldest first; at most 200.
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

// A ContractList is the newest versions of the project's contracts, by name.
type ContractList struct {
	Contracts []Contract `json:"contracts"`
}

// A ContractText is a contract, or a boundary, to be stored.
type ContractText struct {
	Text string `json:"text"` // YAML or JSON
}

// A Boundary is the contract that no contract of the project may be wider than.
type Boundary struct {
	Digest    string    `json:"digest"`
	Text      string    `json:"text"`
	CreatedAt time.Time `json:"created_at"`
	CreatedBy string    `json:"created_by"` // a principal
	Explain   []string  `json:"explain"`
}
