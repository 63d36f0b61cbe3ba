// Package contract reads, checks and compares the contracts of runs: YAML files that
// say what one job may do (commands, files, network, credentials, mail, limits), what
// happens when it fails, and what may come out of it.
//
// It is pure. Package run starts what a contract describes; the sandbox's kernel, its
// view of files and the wall enforce it.
package contract

import (
	"errors"
	"time"
)

var (
	// ErrInvalid means that a contract cannot be read or cannot be enforced. The text
	// names the field, the limit and what to write instead.
	ErrInvalid = errors.New("invalid contract")
	// ErrWider means that a contract allows something that its boundary does not. The
	// text names the clause.
	ErrWider = errors.New("the contract is wider than its boundary")
)

// Version is the version of the format that this package reads.
const Version = 1

// MaxSize is the size limit of a contract, in bytes.
const MaxSize = 64 << 10

// A Contract says what a run may do. What a clause does not name is not allowed. The
// zero value of a clause allows nothing, except where its comment says otherwise.
type Contract struct {
	Version     int          `json:"version" yaml:"version"`
	Name        string       `json:"name" yaml:"name"` // lower-case letters, digits and "-"
	Description string       `json:"description,omitzero" yaml:"description,omitempty"`
	Template    string       `json:"template,omitzero" yaml:"template,omitempty"` // name, name:tag or name@sha256:…; empty means base
	Commands    Commands     `json:"commands,omitzero" yaml:"commands,omitempty"`
	Files       Files        `json:"files,omitzero" yaml:"files,omitempty"`
	Network     Network      `json:"network,omitzero" yaml:"network,omitempty"`
	Packages    []Package    `json:"packages,omitzero" yaml:"packages,omitempty"`
	Credentials []Credential `json:"credentials,omitzero" yaml:"credentials,omitempty"`
	Mail        Mail         `json:"mail,omitzero" yaml:"mail,omitempty"`
	Limits      Limits       `json:"limits,omitzero" yaml:"limits,omitempty"`
	OnFailure   OnFailure    `json:"on_failure,omitzero" yaml:"on_failure,omitempty"`
	Artifacts   []Artifact   `json:"artifacts,omitzero" yaml:"artifacts,omitempty"`
	Teardown    Teardown     `json:"teardown,omitzero" yaml:"teardown,omitempty"`
}

// Commands are the programs that the run may start, also by its children. Deny wins.
type Commands struct {
	Allow []Command `json:"allow,omitzero" yaml:"allow,omitempty"`
	Deny  []string  `json:"deny,omitzero" yaml:"deny,omitempty"` // patterns, as in Command.Run
}

// A Command allows the start of a program.
type Command struct {
	// Run is a pattern of a command line: words separated by spaces, quoted as in a
	// shell. The first word is a name, which stands for the program of that name in the
	// template's own program directories, or an absolute path. In the other words "*"
	// stands for any text within one argument; a last word "**" stands for any further
	// arguments, also none.
	Run  string   `json:"run" yaml:"run"`
	Max  int      `json:"max,omitzero" yaml:"max,omitempty"`   // starts; 0 means any number
	Time Duration `json:"time,omitzero" yaml:"time,omitempty"` // of each start; 0 means until the run's end
	// Ask holds each start until a person has decided (kind process.exec).
	Ask bool `json:"ask,omitzero" yaml:"ask,omitempty"`
}

// Files says what the run sees of the file system. The template's system directories
// (/usr, /bin, /lib, /etc, …) are always there, read-only.
type Files struct {
	Read  []string `json:"read,omitzero" yaml:"read,omitempty"`   // absolute paths, read-only
	Write []string `json:"write,omitzero" yaml:"write,omitempty"` // absolute paths of directories, empty at the start
	// Deny hides paths below Read, Write and the system directories.
	Deny   []string `json:"deny,omitzero" yaml:"deny,omitempty"`
	Inputs []Input  `json:"inputs,omitzero" yaml:"inputs,omitempty"`
	// Dir is the working directory; empty means the first of Write, else "/".
	Dir string `json:"dir,omitzero" yaml:"dir,omitempty"`
}

// An Input is a file that is put in before the start, read-only.
type Input struct {
	Path     string `json:"path" yaml:"path"`                            // absolute; may end in "/*" or "/**"
	Size     Size   `json:"size,omitzero" yaml:"size,omitempty"`         // largest; 0 means 16 MiB
	SHA256   string `json:"sha256,omitzero" yaml:"sha256,omitempty"`     // hexadecimal; empty means any content
	Required bool   `json:"required,omitzero" yaml:"required,omitempty"` // the run is refused without it
}

// Network says where the run may connect: the wall's rules.
type Network struct {
	Allow []string `json:"allow,omitzero" yaml:"allow,omitempty"` // host, *.host, address or prefix
	Deny  []string `json:"deny,omitzero" yaml:"deny,omitempty"`   // addresses and prefixes
}

// A Package names a package manager that may install.
type Package struct {
	Manager string `json:"manager" yaml:"manager"`                  // npm, pypi, debian, go or crates
	Pinned  bool   `json:"pinned,omitzero" yaml:"pinned,omitempty"` // only exact versions may be named on its command line
}

// A Credential lets the wall put a secret on requests to some hosts.
type Credential struct {
	Secret   string   `json:"secret" yaml:"secret"` // its name
	Hosts    []string `json:"hosts" yaml:"hosts"`
	Header   string   `json:"header,omitzero" yaml:"header,omitempty"`     // empty means Authorization
	Approval string   `json:"approval,omitzero" yaml:"approval,omitempty"` // always, first or never; empty means always
}

// Mail says what mail the run may propose.
type Mail struct {
	Inbox string `json:"inbox,omitzero" yaml:"inbox,omitempty"` // ID or address
	Max   int    `json:"max,omitzero" yaml:"max,omitempty"`     // messages; 0 with an inbox means 1
}

// Limits bound the run. Zero values mean the defaults of [Contract.Limited].
type Limits struct {
	Time      Duration `json:"time,omitzero" yaml:"time,omitempty"`
	Memory    Size     `json:"memory,omitzero" yaml:"memory,omitempty"`
	CPUs      float64  `json:"cpus,omitzero" yaml:"cpus,omitempty"`
	Disk      Size     `json:"disk,omitzero" yaml:"disk,omitempty"`
	Output    Size     `json:"output,omitzero" yaml:"output,omitempty"` // standard output and error together
	Processes int      `json:"processes,omitzero" yaml:"processes,omitempty"`
}

// OnFailure says what happens when a command of the run fails.
type OnFailure struct {
	Exit   string `json:"exit,omitzero" yaml:"exit,omitempty"`     // stop (also if empty) or continue, after a non-zero exit
	Stderr Size   `json:"stderr,omitzero" yaml:"stderr,omitempty"` // most of standard error that goes back to a model; 0 means 2 KiB
	// Output keeps standard output and error beside the record, redacted and bounded.
	Output bool `json:"output,omitzero" yaml:"output,omitempty"`
}

// An Artifact is a file that may leave the sandbox.
type Artifact struct {
	Path     string `json:"path" yaml:"path"`                            // absolute; "*" stands for text within one name
	Type     string `json:"type" yaml:"type"`                            // csv, json, text, markdown, html, pdf, png, jpeg, parquet, zip or any
	Size     Size   `json:"size,omitzero" yaml:"size,omitempty"`         // largest; 0 means 16 MiB
	Required bool   `json:"required,omitzero" yaml:"required,omitempty"` // the run fails without it
	Review   string `json:"review,omitzero" yaml:"review,omitempty"`     // person (also if empty), flagged (a person only where the scan finds something) or policy
}

// Teardown says what happens to the sandbox after the run.
type Teardown struct {
	Keep Duration `json:"keep,omitzero" yaml:"keep,omitempty"` // paused for so long; 0 destroys it at once
}

// A Duration is a time span, written "90s", "10m" or "2h".
type Duration time.Duration

// A Size is a number of bytes, written "512KiB", "16MiB", "1GiB" or "1000".
type Size int64
