// Package contract parses, checks and compares the contracts of runs. A contract is a
// YAML file that lists what one job may do (commands, files, network, credentials,
// mail, limits), what happens when it fails, and which files may leave the sandbox.
//
// It does no I/O. Package run starts what a contract describes. The sandbox's kernel,
// its view of files and the wall enforce it.
package contract

import (
	"errors"
	"time"
)

var (
	// ErrInvalid means that a contract cannot be parsed or cannot be enforced. The text
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

// A Contract lists what a run may do. What a clause does not name is not allowed. The
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

// Commands lists the programs that the run and its child processes may start. Deny
// takes precedence over Allow.
type Commands struct {
	Allow []Command `json:"allow,omitzero" yaml:"allow,omitempty"`
	Deny  []string  `json:"deny,omitzero" yaml:"deny,omitempty"` // patterns, as in Command.Run
}

// A Command allows the start of a program.
type Command struct {
	// Run is a command-line pattern: words separated by spaces, quoted as in a shell.
	// The first word is either an absolute path or the name of a program in the
	// template's program directories. In the other words "*" matches any text within one
	// argument. A final word "**" matches any further arguments, including none; "**"
	// alone matches every command line.
	Run  string   `json:"run" yaml:"run"`
	Max  int      `json:"max,omitzero" yaml:"max,omitempty"`   // number of starts; 0 means no limit
	Time Duration `json:"time,omitzero" yaml:"time,omitempty"` // for each start; 0 means until the run ends
	// Ask holds each start until a person has decided (kind process.exec).
	Ask bool `json:"ask,omitzero" yaml:"ask,omitempty"`
}

// Files lists the parts of the file system that the run sees. The template's system
// directories (/usr, /bin, /lib, /etc, …) are always visible, read-only.
type Files struct {
	Read  []string `json:"read,omitzero" yaml:"read,omitempty"`   // absolute paths, read-only
	Write []string `json:"write,omitzero" yaml:"write,omitempty"` // absolute paths of directories, initially empty
	// Deny hides paths below Read, Write and the system directories.
	Deny   []string `json:"deny,omitzero" yaml:"deny,omitempty"`
	Inputs []Input  `json:"inputs,omitzero" yaml:"inputs,omitempty"`
	// Dir is the working directory; empty means the first of Write, or "/" if there is
	// none.
	Dir string `json:"dir,omitzero" yaml:"dir,omitempty"`
	// RecordReads adds the files that are opened for reading to the record and the report.
	// What is made, changed and removed is always there.
	RecordReads bool `json:"record_reads,omitzero" yaml:"record_reads,omitempty"`
}

// An Input allows a file to be copied into the sandbox before the start. The run cannot
// change it.
type Input struct {
	Path     string `json:"path" yaml:"path"`                            // absolute; "*" matches text within one name; may end in "/**"
	Size     Size   `json:"size,omitzero" yaml:"size,omitempty"`         // maximum; 0 means 16 MiB
	SHA256   string `json:"sha256,omitzero" yaml:"sha256,omitempty"`     // hexadecimal; empty means any content
	Required bool   `json:"required,omitzero" yaml:"required,omitempty"` // the run is refused without it
}

// Network lists the destinations that the run may connect to. The wall enforces it.
type Network struct {
	Allow []string `json:"allow,omitzero" yaml:"allow,omitempty"` // host, *.host, either with :port, address or prefix
	Deny  []string `json:"deny,omitzero" yaml:"deny,omitempty"`   // addresses and prefixes
}

// A Package allows a package manager to install packages.
type Package struct {
	Manager string `json:"manager" yaml:"manager"`                  // npm, pypi, debian, go or crates
	Pinned  bool   `json:"pinned,omitzero" yaml:"pinned,omitempty"` // its command lines must name exact versions
}

// A Credential lets the wall add a secret to requests to the listed hosts.
type Credential struct {
	Secret   string   `json:"secret" yaml:"secret"` // its name
	Hosts    []string `json:"hosts" yaml:"hosts"`
	Header   string   `json:"header,omitzero" yaml:"header,omitempty"`     // empty means Authorization
	Approval string   `json:"approval,omitzero" yaml:"approval,omitempty"` // always, first or never; empty means always
}

// Mail limits the messages that the run may propose.
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
	Exit   string `json:"exit,omitzero" yaml:"exit,omitempty"`     // after a non-zero exit status: stop (the default) or continue
	Stderr Size   `json:"stderr,omitzero" yaml:"stderr,omitempty"` // maximum of standard error that is returned to a model; 0 means 2 KiB
	// Output stores the end of standard output with the run, redacted. The end of
	// standard error is stored in any case.
	Output bool `json:"output,omitzero" yaml:"output,omitempty"`
}

// An Artifact is a file that may leave the sandbox.
type Artifact struct {
	Path     string `json:"path" yaml:"path"`                            // absolute; "*" matches text within one name; may end in "/**"
	Type     string `json:"type" yaml:"type"`                            // csv, json, text, markdown, html, pdf, png, jpeg, parquet, zip or any
	Size     Size   `json:"size,omitzero" yaml:"size,omitempty"`         // maximum; 0 means 16 MiB
	Required bool   `json:"required,omitzero" yaml:"required,omitempty"` // the run fails without it
	Review   string `json:"review,omitzero" yaml:"review,omitempty"`     // person (the default), flagged (a person only if the scan has findings) or policy
}

// Teardown says what happens to the sandbox after the run.
type Teardown struct {
	Keep Duration `json:"keep,omitzero" yaml:"keep,omitempty"` // how long to keep it, paused; 0 destroys it at once
}

// A Duration is a time span, written "90s", "10m" or "2h".
type Duration time.Duration

// A Size is a number of bytes, written "512KiB", "16MiB", "1GiB" or "1000".
type Size int64
