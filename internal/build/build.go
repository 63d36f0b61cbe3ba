// Package build makes templates of projects from definitions: an image or a template
// to begin with, and steps that run in a sandbox. It stores templates, their builds,
// tags and logs.
//
// Each step's result is a layer with a key: the digest of what is below, of the step's
// arguments and of its files. A build that finds a layer with its key uses it.
package build

import (
	"errors"
	"time"

	"postern/internal/registry"
)

// The errors of this package. The texts name the field, the limit and the next step.
var (
	// ErrNotFound means that the project has no such template, build or tag, and that
	// none is published under that name.
	ErrNotFound = errors.New("template not found")
	// ErrForbidden means that it exists and belongs to another project.
	ErrForbidden = errors.New("the template belongs to another project")
	// ErrInvalid means that a request is malformed.
	ErrInvalid = errors.New("invalid request")
	// ErrBusy means that sandboxes, snapshots or other templates need it.
	ErrBusy = errors.New("the template is in use")
)

// A Template is a name under which a project builds.
type Template struct {
	ID      string // 20 lower-case letters and digits
	Project string
	Names   []string // without tags; the first one is the alias that E2B shows
	Public  bool     // other projects may start sandboxes from it

	Build    string // newest finished build, of the tag "default"; empty if there is none
	State    State  // of the newest build
	CPUs     float64
	MemoryMB int64 // mebibytes
	DiskMB   int64 // mebibytes that each sandbox may write

	Created, Updated time.Time
	Spawned          time.Time // last start of a sandbox; zero if there was none
	Spawns, Builds   int64     // sandboxes started, builds begun
}

// A State is where a build is. Its values are E2B's.
type State string

// The states of a build.
const (
	Waiting  State = "waiting"  // for its definition
	Building State = "building" // or waiting for another build to end
	Ready    State = "ready"
	Failed   State = "error"
)

// A Definition says what a template is made of.
type Definition struct {
	FromImage    string // reference of an OCI image, such as "debian:12"
	Credentials  registry.Credentials
	FromTemplate string // name, with or without a tag; one of FromImage and FromTemplate is set
	Steps        []Step
	StartCmd     string // runs in the background when a sandbox boots; empty means none
	ReadyCmd     string // exits with 0 once StartCmd is ready; empty means 20 s after the start
	Force        bool   // use no layers from earlier builds
}

// A Step is one instruction. Type is one of COPY, ADD, RUN, ENV, ARG, WORKDIR and USER,
// in any case.
type Step struct {
	Type      string
	Args      []string
	FilesHash string // of COPY: 64 hex digits; the digest under which the client uploaded the files
	Force     bool   // run this step, and so all later ones, also if its layer exists
}

// A Failure is why a build ended without a template.
type Failure struct {
	Message string
	Step    string // "base", "1", "2" … or "finalize"
	Entries []Entry
}

// An Entry is one line of a build's log.
type Entry struct {
	Time    time.Time
	Level   string // "debug", "info", "warn" or "error"
	Message string
	Step    string // as in Failure; empty if the line belongs to none
}

// A Status is how far a build is.
type Status struct {
	Template, Build string
	State           State
	Entries         []Entry
	Failure         *Failure // if State is Failed
}
