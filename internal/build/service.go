package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"postern/internal/auth"
	"postern/internal/registry"
	"postern/internal/sandbox"
	"postern/internal/store"
	"postern/internal/template"
)

// A Machine runs the steps of builds. Implementations are safe for concurrent use.
type Machine interface {
	// OpenBench boots a bench for who's project. The caller closes it.
	OpenBench(ctx context.Context, who auth.Principal, r sandbox.BenchRequest) (Bench, error)
	// MakeTemplateSnapshot boots a sandbox of the template, runs its start command,
	// waits until the ready command succeeds, and saves the sandbox. Output gets the
	// lines that both commands print.
	MakeTemplateSnapshot(ctx context.Context, template string, output func(line string)) error
	// ForgetTemplate removes the snapshot of MakeTemplateSnapshot, if there is one.
	ForgetTemplate(ctx context.Context, template string) error
}

var _ Bench = (*sandbox.Bench)(nil)

// A Bench is the sandbox of one build. Its methods are those of [sandbox.Bench].
type Bench interface {
	Run(ctx context.Context, c sandbox.Command, output func(stream, line string)) (code int, err error)
	Unpack(ctx context.Context, archive io.Reader, o sandbox.Unpack) error
	AddUser(ctx context.Context, name string, sudo bool) error
	MakeDir(ctx context.Context, path, user string) error
	WriteLayer(ctx context.Context, w *os.File) error
	Close() error
}

// An Own holds the server's own templates. Implementations are safe for concurrent use.
type Own interface {
	// Resolve returns the template that a client names. Its error wraps
	// [template.ErrNotFound] if there is none.
	Resolve(ctx context.Context, name string) (template.Template, error)
	// Lookup returns the ID of the template with a name, without building it. Its error
	// is that of Resolve.
	Lookup(name string) (id string, err error)
	// Build returns the templates with these names, and builds missing ones.
	Build(ctx context.Context, names ...string) ([]template.Template, error)
	// Base returns the base template, with the guest of this program.
	Base(ctx context.Context) (template.Template, error)
	// GuestDigest returns a digest of the guest.
	GuestDigest() string
}

var _ Own = (*template.Cache)(nil)

// A Puller fetches images, such as [registry.Puller]. Implementations are safe for
// concurrent use.
type Puller interface {
	Pull(ctx context.Context, ref string, c registry.Credentials, progress func(line string)) (registry.Image, error)
}

// Config holds the settings of a [Service].
type Config struct {
	// Server is the ID of this server among those that share the database. It may be
	// empty.
	Server string
	// Off says that this server runs no sandboxes: nothing can be built.
	Off bool
	// Dir holds all files. No other service may use it. It is created if missing.
	Dir string

	Builds           int // at once, over all projects; 0 means 2
	BuildsPerProject int // at once; 0 means Builds
	Queue            int // builds of one project in the queue; 0 means 20

	BuildTime time.Duration // of one build; 0 means 1 h
	StepTime  time.Duration // of one step; 0 means BuildTime

	MaxSteps     int     // of one definition; 0 means 1000
	MaxTemplates int     // of one project; 0 means 200
	MaxBuilds    int     // newest finished builds without a tag that each template keeps; 0 means 2
	MaxCPUs      float64 // cores of one template; 0 means 8
	MaxMemoryMB  int64   // memory of one template, mebibytes; 0 means 8192
	MaxDiskMB    int64   // disk of one template, mebibytes; 0 means 20480

	MaxProjectMB    int64         // images and layers of a project, mebibytes; 0 means 51200
	MaxUploadMB     int64         // one archive for COPY, mebibytes; 0 means 1024
	MaxUploadsMB    int64         // all archives of a project, mebibytes; 0 means 4096
	MaxLogLines     int           // of one build; 0 means 10000
	MaxLogBytes     int           // of one build's messages; 0 means 4 MiB
	KeepFreeMB      int64         // mebibytes on the disk of Dir that builds must leave free; 0 means 512
	KeepUnused      time.Duration // how long unused layers, uploads and pulled images are kept; 0 means 14 days
	SnapshotTimeout time.Duration // of the last phase; 0 means 15 min
}

// A Service builds and stores the templates of all projects. It is safe for concurrent
// use.
type Service struct {
	log     *slog.Logger
	db      *store.DB
	machine Machine
	own     Own
	images  Puller
	conf    Config

	born time.Time // older work was left by an earlier process

	// files is held shared while a file is published and its row written, and
	// exclusively by the sweep.
	files sync.RWMutex

	// cannotJoin says that the kernel cannot join images, see [erofs.WriteJoined].
	cannotJoin atomic.Bool

	mu        sync.Mutex
	queue     []*job           // guarded by mu
	jobs      map[string]*job  // by build: those in the queue and those that run; guarded by mu
	closed    bool             // Run has ended; guarded by mu
	uploading map[string]int64 // bytes of them, by project; guarded by mu
	wake      chan struct{}    // holds an element when the queue has changed
	sweeps    chan struct{}    // holds an element when a sweep is due
	pulls     map[string]*pull // by key of an image in from: one makes it; guarded by mu

	exports, imports chan struct{} // hold an element for each that runs
}

// New returns a service. It starts nothing. Images may be nil: then every image is
// refused.
func New(log *slog.Logger, db *store.DB, machine Machine, own Own, images Puller, conf Config) (*Service, error) {
	if conf.Dir == "" || machine == nil || own == nil {
		return nil, errors.New("build: no directory, machine or templates of the server")
	}
	conf.Builds = or(conf.Builds, 2)
	conf.BuildsPerProject = or(conf.BuildsPerProject, conf.Builds)
	conf.Queue = or(conf.Queue, 20)
	conf.BuildTime = or(conf.BuildTime, time.Hour)
	conf.StepTime = or(conf.StepTime, conf.BuildTime)
	conf.MaxSteps = or(conf.MaxSteps, 1000)
	conf.MaxTemplates = or(conf.MaxTemplates, 200)
	conf.MaxBuilds = or(conf.MaxBuilds, 2)
	conf.MaxProjectMB = or(conf.MaxProjectMB, 50<<10)
	conf.MaxCPUs = or(conf.MaxCPUs, 8)
	conf.MaxMemoryMB = or(conf.MaxMemoryMB, 8192)
	conf.MaxDiskMB = or(conf.MaxDiskMB, 20480)
	conf.MaxUploadMB = or(conf.MaxUploadMB, 1024)
	conf.MaxUploadsMB = or(conf.MaxUploadsMB, 4096)
	conf.MaxLogLines = or(conf.MaxLogLines, 10_000)
	conf.MaxLogBytes = or(conf.MaxLogBytes, 4<<20)
	conf.KeepFreeMB = or(conf.KeepFreeMB, 512)
	conf.KeepUnused = or(conf.KeepUnused, 14*24*time.Hour)
	conf.SnapshotTimeout = or(conf.SnapshotTimeout, 15*time.Minute)
	if conf.Builds < 0 || conf.BuildsPerProject < 0 || conf.Queue < 0 || conf.MaxSteps < 0 || conf.MaxTemplates < 0 || conf.MaxBuilds < 0 || conf.BuildTime < 0 || conf.StepTime < 0 {
		return nil, errors.New("build: a limit is negative")
	}
	var err error
	if conf.Dir, err = filepath.Abs(conf.Dir); err != nil {
		return nil, fmt.Errorf("find directory for templates: %w", err)
	}
	for _, d := range []string{"", workDir, fromDir, layersDir, imagesDir, uploadsDir, emptyDir} {
		if err := os.MkdirAll(filepath.Join(conf.Dir, d), 0o700); err != nil {
			return nil, fmt.Errorf("make directory for templates: %w", err)
		}
	}
	return &Service{
		born: time.Now(),
		log:  log, db: db, machine: machine, own: own, images: images, conf: conf,
		jobs: map[string]*job{}, wake: make(chan struct{}, 1), pulls: map[string]*pull{},
		sweeps: make(chan struct{}, 1), uploading: map[string]int64{}, exports: make(chan struct{}, 2), imports: make(chan struct{}, 1),
	}, nil
}

// or returns v, or unset if v is zero.
func or[T comparable](v, unset T) T {
	var zero T
	if v == zero {
		return unset
	}
	return v
}

// mayRead returns an error unless who may see the project's templates.
func mayRead(who auth.Principal) error {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return fmt.Errorf("%s may not see templates: %w", who, auth.ErrForbidden)
	}
	return nil
}

// mayManage returns an error unless who may change the project's templates. Changing a
// template means running code in each sandbox that starts from it.
func mayManage(who auth.Principal) error {
	if err := mayRead(who); err != nil {
		return err
	}
	return auth.Need(who, auth.Owner)
}

// onFleet is the [Machine] of a fleet.
type onFleet struct{ *sandbox.Fleet }

// OnFleet returns a machine that runs its benches on f.
func OnFleet(f *sandbox.Fleet) Machine { return onFleet{f} }

func (m onFleet) OpenBench(ctx context.Context, who auth.Principal, r sandbox.BenchRequest) (Bench, error) {
	b, err := m.Fleet.OpenBench(ctx, who, r)
	if err != nil {
		return nil, err
	}
	return b, nil
}
