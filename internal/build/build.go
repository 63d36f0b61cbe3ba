// Package build builds the templates of projects from definitions. A definition is an
// image or a template to start from, and steps that run in a sandbox. The package also
// stores templates, their builds, tags and logs.
//
// A build moves through these states and no others:
//
//	waiting ── building ── ready
//	               │
//	               └────── error
//
// Create inserts the row of a build that waits for its definition. Start stores the
// definition, without credentials, in the row. From then on the build is in the memory
// of this process: in the queue, or in an engine that runs it. If the process ends, the
// build has failed; [Service.Recover] records that.
//
// # Layers
//
// Each step's result is a layer: an archive of what the step changed. Its key is the
// digest of the previous step's key, the step's type and arguments, and the hash of the
// files that it copies. A build that finds a layer with its key uses it. So if a build
// fails, the next build of the definition continues after the last step that succeeded.
//
// # Files
//
// All files are below one directory:
//
//	work/<build>/             temporary files of a running or killed build
//	from/<key>.erofs          pulled images, ready to boot
//	steps/<digest>.tar        layers of steps
//	images/<digest>.erofs     root file systems of templates
//	uploads/<project>/<hash>  archives for COPY
//	pulled/                   layers of pulled images; belongs to package registry
//
// A file is written in work, synced and renamed before its row is written. So a row never
// names a missing or incomplete file. The sweep removes files without a row. A lock keeps
// it out between the rename and the insert.
//
// # Security
//
// Images, uploads and the programs of steps are hostile. They are never unpacked onto the
// host, and run in sandboxes only; see packages rootfs and sandbox. Credentials of
// registries are held in memory while the build runs, and are removed from log lines and
// errors.
//
// A project sees another project's template only if it is published, and never its logs,
// definition or layers. Layers and uploads are looked up by project. Otherwise "CACHED"
// would reveal what another project has built, and a guessed hash would give access to
// its files.
package build

import (
	"errors"
	"time"

	"postern/internal/registry"
	"postern/internal/sandbox"
)

// The errors of this package. Their texts name the field, the limit and what to do.
var (
	// ErrNotFound means that the project has no such template or tag, and no other
	// project has published one with that name.
	ErrNotFound = errors.New("template not found")
	// ErrNoBuild means that the template has no such build.
	ErrNoBuild = errors.New("build not found")
	// ErrForbidden means that another project owns the template and has published it.
	ErrForbidden = errors.New("the template belongs to another project")
	// ErrInvalid means that a request is malformed.
	ErrInvalid = errors.New("invalid request")
	// ErrNotWaiting means that the build was already started.
	ErrNotWaiting = errors.New("build is not in waiting state")
	// ErrBusy means that sandboxes, snapshots or a running build use the template.
	ErrBusy = errors.New("the template is in use")
	// ErrFull means that a limit of the project or the machine is reached.
	ErrFull = errors.New("limit reached")
	// ErrTooLarge means that an upload is larger than any upload may be. Waiting or
	// deleting something does not help.
	ErrTooLarge = errors.New("upload too large")
)

// A Template is a named template of a project, with all of its builds.
type Template struct {
	ID      string // 20 lower-case letters and digits
	Project string
	Team    string   // name of the project; "Team/Names[0]" names a public template for other projects
	Names   []string // without tags; E2B's clients show the first one as the alias
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

// A State is the state of a build. The values are E2B's.
type State string

// The states of a build.
const (
	Waiting  State = "waiting"  // for its definition
	Building State = "building" // running or in the queue
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
	Tags         []string // that the build gets when it is ready
	Definition   Definition
	Failure      *Failure
	Result       Result
	Image        string // digest of the root file system's image; empty before it is written
	Parent       string // digest of the image that it started from; empty before it is known

	Created, Started, Ended time.Time

	project, server string
}

// A Result holds what sandboxes take from a finished build.
type Result struct {
	Env      map[string]string `json:"env,omitempty"`
	User     string            `json:"user"`
	Dir      string            `json:"dir,omitempty"` // empty means the user's home
	StartCmd string            `json:"start_cmd,omitempty"`
	ReadyCmd string            `json:"ready_cmd,omitempty"`
	Probes   []sandbox.Probe   `json:"probes,omitempty"` // of services inherited from a template of the server
	Source   string            `json:"source,omitempty"` // digest of the OCI image's manifest; empty if it started from a template
	Layers   []string          `json:"layers,omitempty"` // digests of the layers of its steps
	Bytes    int64             `json:"bytes"`            // size of the image's file, without what it shares with others
}

// A Definition says what a template is made of.
type Definition struct {
	FromImage    string               `json:"from_image,omitempty"`    // reference of an OCI image, such as "debian:12"
	Credentials  registry.Credentials `json:"-"`                       // never stored
	Imported     *registry.Image      `json:"-"`                       // the image, if it was imported from a file; never stored
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
	FilesHash string   `json:"files_hash,omitempty"` // of COPY: 64 hex digits; the hash under which the client uploaded the files
	Force     bool     `json:"force,omitempty"`      // run this step and all later ones even if their layers exist
}

// A Failure says why a build failed.
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
	Step    string    `json:"step,omitempty"` // as in Failure; empty if the line belongs to no step
}

// A Status is the state of a build, with entries of its log.
type Status struct {
	Template, Build string
	State           State
	Entries         []Entry
	Failure         *Failure // if State is Failed
}

// A Request asks for a build.
type Request struct {
	Name     string   // of the template: "n", "n:tag" or "team/n:tag"
	Tags     []string // that the build gets when it is ready, besides the tag in Name; if there are none it gets "default"
	CPUs     float64  // cores of each sandbox; 0 means the server's default
	MemoryMB int64    // mebibytes of each sandbox; 0 means the server's default
	DiskMB   int64    // mebibytes that each sandbox may write; 0 means the server's default
}

// A Tag names one build of a template.
type Tag struct {
	Tag, Build string
	Created    time.Time
}

// Logs selects entries of a build's log.
type Logs struct {
	Offset int    // number of matching entries to skip
	Limit  int    // at most 100; 0 means 100
	Level  string // minimum level; empty means "debug"
}

// A Resolved is the template that a name refers to.
type Resolved struct {
	ID       string    // of the exact template, for a sandbox: "b" and the build's UUID without dashes, or an ID of the server's own templates
	Name     string    // without namespace and tag: "base", or Template.Names[0]
	Template *Template // nil for the server's own templates
}
