// Package attest signs and verifies statements about runs: in-toto Statements, version
// 1, in DSSE envelopes, signed with Ed25519.
//
//   - in-toto Attestation Framework, Statement v1:
//     https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
//   - DSSE 1.0: https://github.com/secure-systems-lab/dsse
//
// It does no I/O and keeps no state. It does not decide what happened: package run
// does. It refuses a statement that contradicts itself.
package attest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// The types of a statement and of its envelope.
const (
	StatementType = "https://in-toto.io/Statement/v1"
	PredicateType = "https://postern.dev/run/v2"
	PayloadType   = "application/vnd.in-toto+json"
)

// formerPredicate is the type of the statements that earlier versions signed. Their clauses
// have no evidence in words; the rest is the same. They stay valid.
const formerPredicate = "https://postern.dev/run/v1"

// MaxSize bounds an envelope, in bytes.
const MaxSize = 4 << 20

var (
	// ErrMalformed means that the input is not a statement of a run. The text says
	// where.
	ErrMalformed = errors.New("malformed statement")
	// ErrKey means that none of the known keys could have signed the statement.
	ErrKey = errors.New("no known key has signed it")
	// ErrSignature means that a signature is invalid.
	ErrSignature = errors.New("the signature is invalid: the statement was changed, or another server signed it")
	// ErrContradiction means that a statement says things that cannot all be true.
	ErrContradiction = errors.New("the statement contradicts itself")
)

// A Statement is an in-toto Statement. Its predicate describes the run. Its subjects
// are the run's artifacts and the ends of the audit.
type Statement struct {
	Type          string    `json:"_type"`
	Subject       []Subject `json:"subject"`
	PredicateType string    `json:"predicateType"`
	Predicate     Run       `json:"predicate"`
}

// A Subject is something that a statement is about: an artifact of the run, or the
// first or last entry of the audit.
type Subject struct {
	Name   string            `json:"name"`
	Digest map[string]string `json:"digest"` // "sha256": hexadecimal
}

// The names of the subjects that are not artifacts. Paths of artifacts begin with "/".
const (
	SubjectGenesis = "audit:genesis"
	SubjectHead    = "audit:head"
)

// A Run is the predicate: what the server states about one run. Its texts may be
// hostile.
type Run struct {
	Run      string   `json:"run"` // "run_…"
	Server   string   `json:"server"`
	Project  string   `json:"project"`
	Sandbox  string   `json:"sandbox"` // empty if none was created
	Proposer string   `json:"proposer"`
	Outcome  string   `json:"outcome"` // succeeded, failed, violated, timed_out, cancelled or lost
	Reasons  []string `json:"reasons"`

	Contract Named  `json:"contract"`
	Boundary Named  `json:"boundary"` // without digest if the project had none
	Template Named  `json:"template"`
	Inputs   []File `json:"inputs"`

	Created time.Time `json:"created"`
	Started time.Time `json:"started,omitzero"` // zero if it did not start
	Ended   time.Time `json:"ended"`
	Issued  time.Time `json:"issued"` // when this statement was made

	Steps     []Step     `json:"steps"`
	Commands  Commands   `json:"commands"`
	Artifacts []Artifact `json:"artifacts"`
	Decisions []Decision `json:"decisions"`
	Clauses   []Clause   `json:"clauses"`
	Teardown  []Trace    `json:"teardown"`
	Audit     Audit      `json:"audit"`
}

// A Named is something with a name and a digest, "sha256:…".
type Named struct {
	Name   string `json:"name"`
	Digest string `json:"digest"`
}

// A File is an input of the run.
type File struct {
	Path   string `json:"path"`
	Size   int64  `json:"size"` // bytes
	SHA256 string `json:"sha256"`
}

// A Step is a command that the run was told to start. Its arguments are in the report,
// not in the statement.
type Step struct {
	SHA256 string `json:"sha256"` // of the arguments, each followed by a zero byte
	Exit   int    `json:"exit"`   // exit status; -1 if it did not start or was stopped
}

// Commands has the counts of the record of commands and the digest of its lines.
type Commands struct {
	Started  int64  `json:"started"`
	Refused  int64  `json:"refused"`
	Held     int64  `json:"held"`
	Digest   string `json:"digest"` // "sha256:…"; empty if there is no record
	Complete bool   `json:"complete"`
}

// An Artifact is a file that matched an artifact of the contract. State is its state
// when the statement was made; it may be released later.
type Artifact struct {
	Path   string `json:"path"` // escaped, as the report shows it
	Type   string `json:"type"` // that the contract promises
	Size   int64  `json:"size"` // bytes
	SHA256 string `json:"sha256"`
	State  string `json:"state"`
	Action string `json:"action"` // ID of the action that decides on it; empty if it was refused at once
}

// A Decision is the result of one action of the run.
type Decision struct {
	Action  string    `json:"action"`
	Kind    string    `json:"kind"`
	State   string    `json:"state"`
	Digest  string    `json:"digest"`  // "sha256:…" of the action's payload
	Decider string    `json:"decider"` // a principal; empty if a rule decided, or nobody yet
	Rule    string    `json:"rule"`    // ID of the rule that decided; may be empty
	Decided time.Time `json:"decided,omitzero"`
}

// The verdicts of a [Clause].
const (
	Kept        = "kept"
	Violated    = "violated"
	NotVerified = "not_verified"
)

// Verdicts returns the verdicts.
func Verdicts() []string { return []string{Kept, Violated, NotVerified} }

// The ranks of evidence, strongest first.
const (
	RankKernel = "kernel" // observed by the sandbox's kernel, out of reach of its code
	RankWall   = "wall"   // observed by the wall, the sandbox's only link
	RankHost   = "host"   // done or measured by the server
	RankGuest  = "guest"  // reported by the guest inside the sandbox
	RankNone   = "none"   // no evidence
)

// Ranks returns the ranks.
func Ranks() []string { return []string{RankKernel, RankWall, RankHost, RankGuest, RankNone} }

// A Clause is one clause of the contract with its verdict.
type Clause struct {
	ID      string `json:"id"`
	Verdict string `json:"verdict"`
	Rank    string `json:"rank"`
	// Evidence is what decided, in words; "none" with [RankNone].
	Evidence string `json:"evidence,omitempty"`
	Because  string `json:"because"`
}

// A Trace is one thing that the sandbox could have left behind, and whether it was
// found.
type Trace struct {
	What   string    `json:"what"`
	Gone   bool      `json:"gone"`
	Detail string    `json:"detail"`
	At     time.Time `json:"at,omitzero"`
}

// An Audit identifies the server's audit when the statement was made: its first and its
// last entry, and the root of the tree over all entries.
type Audit struct {
	Genesis string `json:"genesis"` // hash of entry 1, hexadecimal
	Seq     int64  `json:"seq"`     // number of the last entry
	Head    string `json:"head"`    // its hash, hexadecimal
	Root    string `json:"root"`    // root of the tree of Seq entries, base64
}

// ClauseIDs returns the IDs of the clauses that every statement has, in order.
func ClauseIDs() []string {
	return []string{"commands", "files", "inputs", "network", "packages", "credentials", "mail", "limits", "on_failure", "artifacts", "teardown"}
}

// Outcomes returns the outcomes of a run.
func Outcomes() []string {
	return []string{"succeeded", "failed", "violated", "timed_out", "cancelled", "lost"}
}

// New returns the statement of r.
func New(r Run) Statement {
	s := Statement{Type: StatementType, PredicateType: PredicateType, Predicate: r}
	s.Subject = append(s.Subject, sum(SubjectGenesis, r.Audit.Genesis), sum(SubjectHead, r.Audit.Head))
	for _, a := range r.Artifacts {
		s.Subject = append(s.Subject, sum(a.Path, a.SHA256))
	}
	return s
}

func sum(name, hex string) Subject {
	return Subject{Name: name, Digest: map[string]string{"sha256": hex}}
}

// Check returns an error that wraps [ErrMalformed] or [ErrContradiction] unless s is
// well-formed and consistent. [Sign] and [Verify] call it.
func (s *Statement) Check() error {
	r := &s.Predicate
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{ErrContradiction}, args...)...)
	}
	switch {
	case s.Type != StatementType:
		return fmt.Errorf("%w: _type is %.80q, want %s", ErrMalformed, s.Type, StatementType)
	case s.PredicateType != PredicateType && s.PredicateType != formerPredicate:
		return fmt.Errorf("%w: predicateType is %.80q, want %s", ErrMalformed, s.PredicateType, PredicateType)
	case !strings.HasPrefix(r.Run, "run_"):
		return fmt.Errorf("%w: run is %.80q, want an ID that begins with run_", ErrMalformed, r.Run)
	case !slices.Contains(Outcomes(), r.Outcome):
		return fmt.Errorf("%w: outcome is %.80q, want one of %s", ErrMalformed, r.Outcome, strings.Join(Outcomes(), ", "))
	case r.Issued.IsZero() || r.Ended.IsZero():
		return fmt.Errorf("%w: issued and ended must be times", ErrMalformed)
	case r.Issued.Before(r.Ended) || r.Ended.Before(r.Created) || !r.Started.IsZero() && (r.Started.Before(r.Created) || r.Ended.Before(r.Started)):
		return bad("its times are not in the order created, started, ended, issued")
	}
	for name, d := range map[string]string{"contract.digest": r.Contract.Digest, "boundary.digest": r.Boundary.Digest, "commands.digest": r.Commands.Digest} {
		if d == "" && name != "contract.digest" {
			continue
		}
		if hex, ok := strings.CutPrefix(d, "sha256:"); !ok || !isSum(hex) {
			return fmt.Errorf("%w: %s is %.80q, want sha256: and 64 hexadecimal digits", ErrMalformed, name, d)
		}
	}
	want := New(*r).Subject
	if len(want) != len(s.Subject) {
		return bad("it has %d subjects, but its predicate names %d", len(s.Subject), len(want))
	}
	names := map[string]bool{}
	for i, have := range s.Subject {
		switch {
		case have.Name != want[i].Name || len(have.Digest) != 1 || have.Digest["sha256"] != want[i].Digest["sha256"]:
			return bad("subject %.100q differs from the predicate's", have.Name)
		case !isSum(have.Digest["sha256"]):
			return fmt.Errorf("%w: the digest of subject %.100q is not a SHA-256", ErrMalformed, have.Name)
		case names[have.Name]:
			return bad("it has two subjects %.100q", have.Name)
		case i > 1 && !strings.HasPrefix(have.Name, "/"):
			return fmt.Errorf("%w: artifact %.100q has no absolute path", ErrMalformed, have.Name)
		}
		names[have.Name] = true
	}
	return s.checkClauses()
}

// checkClauses checks that the verdicts are consistent with the rest of the predicate.
func (s *Statement) checkClauses() error {
	r := &s.Predicate
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{ErrContradiction}, args...)...)
	}
	if len(r.Clauses) != len(ClauseIDs()) {
		return fmt.Errorf("%w: it has %d clauses, want %d", ErrMalformed, len(r.Clauses), len(ClauseIDs()))
	}
	verdicts := map[string]string{}
	for i, c := range r.Clauses {
		switch {
		case c.ID != ClauseIDs()[i]:
			return fmt.Errorf("%w: clause %d is %.40q, want %s", ErrMalformed, i+1, c.ID, ClauseIDs()[i])
		case !slices.Contains(Verdicts(), c.Verdict) || !slices.Contains(Ranks(), c.Rank):
			return fmt.Errorf("%w: clause %s has verdict %.40q of rank %.40q", ErrMalformed, c.ID, c.Verdict, c.Rank)
		case (c.Evidence == "") != (s.PredicateType == formerPredicate):
			return fmt.Errorf("%w: clause %s has evidence %.60q in a statement of type %s", ErrMalformed, c.ID, c.Evidence, s.PredicateType)
		case (c.Evidence == "none") != (c.Rank == RankNone) && s.PredicateType != formerPredicate:
			return bad("clause %s has the rank %s and the evidence %.60q", c.ID, c.Rank, c.Evidence)
		case c.Verdict == Kept && c.Rank == RankNone:
			return bad("clause %s is kept without evidence", c.ID)
		case c.Verdict == Kept && r.Outcome == "lost":
			return bad("clause %s is kept, but the server lost the run", c.ID)
		case c.Verdict == Violated && r.Outcome == "succeeded" && c.ID != "teardown": // the teardown comes after the outcome
			return bad("clause %s is violated, but the run succeeded", c.ID)
		}
		verdicts[c.ID] = c.Verdict
	}
	if !r.Commands.Complete && verdicts["commands"] == Kept {
		return bad("clause commands is kept, but the record of commands is not complete")
	}
	for _, t := range r.Teardown {
		if !t.Gone && verdicts["teardown"] == Kept {
			return bad("clause teardown is kept, but %.100q was found", t.What)
		}
	}
	if len(r.Teardown) == 0 && verdicts["teardown"] == Kept && r.Sandbox != "" {
		return bad("clause teardown is kept, but nothing was looked for")
	}
	return nil
}

// isSum reports whether s is a SHA-256 in lower-case hexadecimal.
func isSum(s string) bool {
	return len(s) == 64 && !strings.ContainsFunc(s, func(c rune) bool { return (c < '0' || c > '9') && (c < 'a' || c > 'f') })
}
