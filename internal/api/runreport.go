package api

import "time"

// The states of a [RunArtifact].
const (
	ArtifactWaiting  = "waiting"  // for a decision
	ArtifactReleased = "released" // its bytes can be downloaded
	ArtifactRejected = "rejected" // a person or a rule rejected it
	ArtifactRefused  = "refused"  // it is not what the contract promised; nobody was asked
	ArtifactExpired  = "expired"  // nobody decided in time
	ArtifactRemoved  = "removed"  // it was released, and is no longer kept
)

// A RunArtifact is a file of a run that matched an artifact of its contract. Path and
// Name come from the sandbox, escaped; Findings may contain hostile text.
type RunArtifact struct {
	N         int        `json:"n"`      // from 1
	Path      string     `json:"path"`   // in the sandbox; "\n" and other special characters are escaped
	Name      string     `json:"name"`   // of the download
	Type      string     `json:"type"`   // that the contract promised
	Found     string     `json:"found"`  // type of its content
	Size      int64      `json:"size"`   // bytes
	SHA256    string     `json:"sha256"` // hexadecimal; empty if it was not read
	State     string     `json:"state"`
	Reason    string     `json:"reason"` // for a person; may be empty
	Review    string     `json:"review"` // person, flagged or policy
	Flags     []string   `json:"flags"`
	Findings  []string   `json:"findings"`
	Action    string     `json:"action"`     // that decides on it; empty if it was refused at once
	Decider   string     `json:"decider"`    // a principal; empty if a rule decided, or nobody yet
	DecidedAt *time.Time `json:"decided_at"` // nil while it waits
	CreatedAt time.Time  `json:"created_at"`
}

// A RunArtifactList lists the artifacts of a run in the order of their numbers.
type RunArtifactList struct {
	Artifacts []RunArtifact `json:"artifacts"`
	Missing   []string      `json:"missing"`    // patterns of the contract whose required artifacts are missing
	Collected bool          `json:"collected"`  // the list has been made
	Why       string        `json:"incomplete"` // why it is not complete; else empty
}

// The verdicts of a [RunClause].
const (
	ClauseKept        = "kept"
	ClauseViolated    = "violated"
	ClauseNotVerified = "not_verified" // evidence is missing or incomplete
)

// The ranks of the evidence of a [RunClause].
const (
	RankKernel = "kernel" // observed by the sandbox's kernel, out of reach of its code
	RankWall   = "wall"   // observed by the wall, the sandbox's only link
	RankHost   = "host"   // done or measured by the server
	RankGuest  = "guest"  // reported by the guest inside the sandbox
	RankNone   = "none"   // no evidence
)

// A RunClause is one clause of the contract with its verdict.
type RunClause struct {
	ID      string `json:"id"`
	Text    string `json:"text"` // what the contract says, in plain sentences
	Verdict string `json:"verdict"`
	Rank    string `json:"rank"`
	// Evidence is what decided, in words: a record, a measurement, a search. It is "none"
	// with the rank none, and empty in a report of an older server.
	Evidence string `json:"evidence"`
	Because  string `json:"because"`
}

// A RunReport describes what happened in a run. It contains neither output nor contents
// of files. Texts from the sandbox, such as arguments and paths, may be hostile.
type RunReport struct {
	Run       string     `json:"run"`
	Contract  string     `json:"contract"` // its name
	Digest    string     `json:"contract_digest"`
	Boundary  string     `json:"boundary_digest"` // empty if the project had none
	Template  string     `json:"template"`
	Image     string     `json:"image"` // digest of the template's root file system; may be empty
	Sandbox   string     `json:"sandbox"`
	Proposer  string     `json:"proposer"`
	Outcome   string     `json:"outcome"`
	Reason    string     `json:"reason"`
	CreatedAt time.Time  `json:"created_at"`
	StartedAt *time.Time `json:"started_at"` // nil if it did not start
	EndedAt   *time.Time `json:"ended_at"`

	Kept        int `json:"kept"` // number of clauses
	Violated    int `json:"violated"`
	NotVerified int `json:"not_verified"`

	Clauses   []RunClause        `json:"clauses"`
	Results   []RunCommandResult `json:"results"` // of the commands that it was told to start
	Programs  RunPrograms        `json:"programs"`
	Writes    []RunWrite         `json:"writes"`
	Files     []RunFile          `json:"files"`
	Network   []RunContact       `json:"network"`
	Secrets   []RunSecret        `json:"secrets"`
	Mails     []RunMail          `json:"mails"`
	Limits    []RunLimit         `json:"limits"` // that were reached
	Usage     RunUsage           `json:"usage"`
	Artifacts []RunArtifact      `json:"artifacts"`
	Decisions []RunDecision      `json:"decisions"`
	Teardown  []RunTrace         `json:"teardown"`
	Signed    bool               `json:"signed"` // a signed statement exists
	Cut       []string           `json:"cut"`    // names of the lists that were shortened
}

// RunPrograms is the record of all programs that were started in the sandbox.
type RunPrograms struct {
	Started  int64        `json:"started"`
	Refused  int64        `json:"refused"`
	Held     int64        `json:"held"` // starts that waited for a person
	Missed   int64        `json:"missed"`
	Complete bool         `json:"complete"`
	Digest   string       `json:"digest"` // of the record's lines, "sha256:…"
	List     []RunProgram `json:"list"`   // the newest, bounded
}

// A RunProgram is a program that was started, or refused, in the sandbox.
type RunProgram struct {
	At       time.Time `json:"at"`
	Path     string    `json:"path"`
	Args     []string  `json:"args"`
	Verdict  string    `json:"verdict"` // allowed or refused
	Why      string    `json:"why"`
	ExitCode *int      `json:"exit_code"` // nil if it was not started or did not exit
	Micros   int64     `json:"duration_us"`
}

// A RunWrite is a path that programs opened for writing, or tried to.
type RunWrite struct {
	Path    string `json:"path"`
	Count   int64  `json:"count"`
	Refused int64  `json:"refused"` // of Count
	Error   string `json:"error"`   // of the last refusal; else empty
}

// A RunFile is a path that programs made, removed, renamed, linked or read, or tried to. Of
// what is read, symbolic links are resolved; other paths are as a program wrote them.
type RunFile struct {
	Op      string `json:"op"` // read, mkdir, rmdir, unlink, rename, link, symlink, mknod or truncate
	Path    string `json:"path"`
	To      string `json:"to,omitempty"` // where rename, link and symlink lead
	Count   int64  `json:"count"`
	Refused int64  `json:"refused"` // of Count
	Error   string `json:"error"`   // of the last refusal; else empty
}

// A RunContact is a connection or a request that the wall recorded.
type RunContact struct {
	At      time.Time `json:"at"`
	What    string    `json:"what"` // verb of the audit: egress.connected, egress.denied, egress.request, …
	Host    string    `json:"host"`
	Address string    `json:"address"` // with the port
	Method  string    `json:"method"`
	URL     string    `json:"url"`
	Status  string    `json:"status"`
	Bytes   int64     `json:"bytes"`
	Count   int64     `json:"count"`
	Denied  bool      `json:"denied"`
	Reason  string    `json:"reason"`
}

// A RunSecret is a secret of the run with the number of requests to its hosts.
type RunSecret struct {
	Name    string `json:"name"`
	Uses    int64  `json:"uses"`
	Action  string `json:"action"` // by which a person allowed it; may be empty
	Decider string `json:"decider"`
}

// A RunMail is mail that the run proposed.
type RunMail struct {
	Action string `json:"action"`
	Kind   string `json:"kind"`
	State  State  `json:"state"`
}

// A RunLimit is a limit that was reached.
type RunLimit struct {
	Name  string    `json:"name"`
	Limit int64     `json:"limit"`
	Seen  int64     `json:"seen"`
	At    time.Time `json:"at"`
}

// RunUsage is the maximum that was measured of the run.
type RunUsage struct {
	MemoryBytes int64 `json:"memory_bytes"`
	DiskBytes   int64 `json:"disk_bytes"`
	CPUMicros   int64 `json:"cpu_us"`
	OutputBytes int64 `json:"output_bytes"`
	Samples     int   `json:"samples"`
}

// A RunDecision is an action of the run.
type RunDecision struct {
	Action    string     `json:"action"`
	Kind      string     `json:"kind"`
	State     State      `json:"state"`
	Digest    string     `json:"digest"`
	Decider   string     `json:"decider"` // a principal; empty if a rule decided, or nobody yet
	Rule      string     `json:"rule"`
	Reason    string     `json:"reason"`
	CreatedAt time.Time  `json:"created_at"`
	DecidedAt *time.Time `json:"decided_at"`
}

// A RunTrace is one thing that the run's sandbox could have left behind, and whether it
// was found.
type RunTrace struct {
	What   string    `json:"what"`
	Gone   bool      `json:"gone"`
	Detail string    `json:"detail"`
	At     time.Time `json:"at"`
}
