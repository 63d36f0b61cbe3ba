// Package build makes templates of projects from definitions: an image or a template
// to begin with, and steps that run in a sandbox. It stores templates, their builds,
// tags and logs.
//
// A build moves through these states and no others:
//
//	waiting ── building ── ready
//	               │
//	               └────── error
//
// Create makes the row of a build that waits for its definition. Start gives it one.
// From then on the definition, without credentials, is in the row, and the build is in
// the memory of this process: in the queue, or in an engine that runs it. If the process
// ends, the build has failed; [Service.Recover] records that.
//
// # Layers
//
// Each step's result is a layer: an archive of what the step changed. Its key is the
// digest of the key below, of the step's type and arguments, and of the files that it
// copies. A build that finds a layer with its key uses it. So a build that failed goes
// on, when it is started again, after the last step that succeeded.
//
// # Files
//
// All files are below one directory:
//
//	work/<build>/             of a build that runs, or that was killed
//	from/<key>.erofs          images that were pulled, ready to be booted
//	steps/<digest>.tar        what steps changed
//	images/<digest>.erofs     root file systems of templates
//	uploads/<project>/<hash>  archives for COPY
//	layers/                   of images, which belong to package registry
//
// A file is written in work, flushed to disk and renamed, and only then its row is
// written. So a row never names a file that is missing or incomplete. Files without a
// row are removed by the sweep, which excludes that step with a lock.
//
// # What is hostile
//
// Images, uploads and whatever runs in a step. Nothing of them is unpacked onto the host
// and nothing of them runs outside of a sandbox; see packages rootfs and sandbox.
// Credentials of registries are in memory only, while the build runs. They are removed
// from each line of the log and from errors.
//
// A project sees neither the templates of another, unless these are published, nor their
// logs, definitions and layers. Layers and uploads are looked up by project: otherwise
// "CACHED" would tell what somebody else has built, and a guessed hash would give their
// files.
package build

import (
	"errors"
	"time"

	"postern/internal/registry"
	"postern/internal/sandbox"
)

// The errors of this package. The texts name the field, the limit and the next step.
var (
	// ErrNotFound means that the project has no such template or tag, and that none
	// is published under that name.
	ErrNotFound = errors.New("template not found")
	// ErrNoBuild means that the template has no such build.
	ErrNoBuild = errors.New("build not found")
	// ErrForbidden means that it is published by another project.
	ErrForbidden = errors.New("the template belongs to another project")
	// ErrInvalid means that a request is malformed.
	ErrInvalid = errors.New("invalid request")
	// ErrNotWaiting means that the build has been started before.
	ErrNotWaiting = errors.New("build is not in waiting state")
	// ErrBusy means that sandboxes, snapshots or a build that runs need it.
	ErrBusy = errors.New("the template is in use")
	// ErrFull means that a limit of the project or the machine is reached.
	ErrFull = errors.New("limit reached")
)

// A Template is a name under which a project builds.
type Template struct {
	ID      string // 20 lower-case letters and digits
	Project string
	Team    string   // name of the project; "Team/Names[0]" names a public template for other projects
	Names   []string // without tags; the first one is the alias that E2B shows
	Public  bool     // other projects may start sandboxes from it

	Build    string // newest finished build, of the tag "default"; empty if there is none
	Newest   string // newest build, in any state
	State    State  // of the newest build
	CPUs     float64
	MemoryMB int64 // mebibytes
	DiskMB   int64 // mebibytes that each sandbox may write

	Created, Updated time.Time
	CreatedBy        string    // a principal
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

// A Build is one build of a template.
type Build struct {
	ID, Template string
	State        State
	CPUs         float64
	MemoryMB     int64    // mebibytes
	DiskMB       int64    // mebibytes
	Tags         []string // that it was asked for
	Definition   Definition
	Failure      *Failure
	Result       Result
	Image        string // digest of the root file system's image; empty before it is written
	Parent       string // digest of the image that it began from; empty before it is known

	Created, Started, Ended time.Time

	project, server string
}

// A Result is what a build gives to its sandboxes.
type Result struct {
	Env      map[string]string `json:"env,omitempty"`
	User     string            `json:"user"`
	Dir      string            `json:"dir,omitempty"` // empty means the user's home
	StartCmd string            `json:"start_cmd,omitempty"`
	ReadyCmd string            `json:"ready_cmd,omitempty"`
	Probes   []sandbox.Probe   `json:"probes,omitempty"` // of services that it has from a template of the server
	Source   string            `json:"source,omitempty"` // digest of the OCI image's manifest; empty if it began from a template
	Layers   []string          `json:"layers,omitempty"` // digests of the layers of its steps
	Bytes    int64             `json:"bytes"`            // size of the image
}

// A Definition says what a template is made of.
type Definition struct {
	FromImage    string               `json:"from_image,omitempty"`    // reference of an OCI image, such as "debian:12"
	Credentials  registry.Credentials `json:"-"`                       // never stored
	Imported     *registry.Image      `json:"-"`                       // what FromImage names, if a file brought it; never stored
	FromTemplate string               `json:"from_template,omitempty"` // name, with or without a tag; one of FromImage and FromTemplate is set
	Steps        []Step               `json:"steps,omitempty"`
	StartCmd     string               `json:"start_cmd,omitempty"` // runs in the background when a sandbox boots; empty means none
	ReadyCmd     string               `json:"ready_cmd,omitempty"` // exits with 0 once StartCmd is ready; empty means 20 s after the start
	Force        bool                 `json:"force,omitempty"`     // use no layers from earlier builds
}

// A Step is one instruction. Type is one of COPY, ADD, RUN, ENV, ARG, WORKDIR and USER,
// in any case.
type Step struct {
	Type      string   `json:"type"`
	Args      []string `json:"args,omitempty"`
	FilesHash string   `json:"files_hash,omitempty"` // of COPY: 64 hex digits; the digest under which the client uploaded the files
	Force     bool     `json:"force,omitempty"`      // run this step, and so all later ones, also if its layer exists
}

// A Failure is why a build ended without a template.
type Failure struct {
	Message string  `json:"message"`
	Step    string  `json:"step,omitempty"`    // "base", "1", "2" … or "finalize"
	Entries []Entry `json:"entries,omitempty"` // the last lines of that step
}

// An Entry is one line of a build's log.
type Entry struct {
	Time    time.Time `json:"time"`
	Level   string    `json:"level"` // "debug", "info", "warn" or "error"
	Message string    `json:"message"`
	Step    string    `json:"step,omitempty"` // as in Failure; empty if the line belongs to none
}

// A Status is how far a build is.
type Status struct {
	Template, Build string
	State           State
	Entries         []Entry
	Failure         *Failure // if State is Failed
}

// A Request asks for a build.
type Request struct {
	Name     string   // of the template: "n", "n:tag" or "team/n:tag"
	Tags     []string // that the build gets when it is ready, besides the tag of Name; none means "default"
	CPUs     float64  // cores of each sandbox; 0 means the server's default
	MemoryMB int64    // mebibytes of each sandbox; 0 means the server's default
	DiskMB   int64    // mebibytes that each sandbox may write; 0 means the server's default
}

// A Tag is a name of a build of a template.
type Tag struct {
	Tag, Build string
	Created    time.Time
}

// Logs selects entries of a build's log.
type Logs struct {
	Offset int    // entries to leave out, of those that are selected
	Limit  int    // at most 100; 0 means 100
	Level  string // least level; empty means "debug"
}

// A Resolved is what a name stands for.
type Resolved struct {
	ID       string    // of the exact template, for a sandbox: "b" and the build's UUID without dashes, or an ID of the server's own templates
	Name     string    // without namespace and tag: "base", or Template.Names[0]
	Template *Template // nil for the server's own templates
}
