package sandbox

import (
	"context"
	"errors"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// Config is what the operator sets for all sandboxes.
type Config struct {
	// Key is the server's secret, at least 32 bytes. The tokens of sandboxes are
	// derived from it.
	Key []byte
	// Server is the ID of this server among those that use the database. The fleet
	// ignores the sandboxes of other servers. Empty is a valid ID.
	Server string
	// Dir is the directory of snapshots. No other fleet may use it. New creates it
	// if it does not exist.
	Dir string
	// Base returns what a template gives to its sandboxes. Its error wraps
	// [ErrNoTemplate] if the template does not exist any more.
	Base func(ctx context.Context, template string) (Base, error)
	// CheckTemplate returns an error that wraps [ErrNoTemplate] if the template of a new
	// sandbox does not exist any more. It is called in the transaction that records the
	// sandbox, which excludes all others. Nil means that templates are never deleted.
	CheckTemplate func(ctx context.Context, tx *store.Tx, template string) error
	// Authority returns the certificate, in PEM, of the certificate authority that
	// programs in a sandbox trust. It must always be the same for one ID. Nil means
	// that sandboxes have none.
	Authority func(sandbox string) []byte
	// Keeper holds the links of running sandboxes while no server runs. Nil means
	// that running sandboxes are lost when the server crashes.
	Keeper Keeper
	// Commands judges and records the programs that are started in sandboxes with an
	// owner. Nil allows everything and records nothing.
	Commands Commands
	// Environment returns the environment that the new sandbox s gets. env is what its
	// creator asked for, or, if s is a copy of a running sandbox, what the sandbox from
	// has. It is called once the ID of s is known, and an error ends the creation. Nil
	// leaves environments as they are.
	Environment func(ctx context.Context, s Info, from string, env map[string]string) (map[string]string, error)
	// Inboxes lends inboxes to sandboxes. Nil means that a request with an inbox
	// key is refused.
	Inboxes Inboxes
	// CheckEgress returns an error unless a sandbox of who's project may have e, which
	// is valid in itself: it checks what e names. Nil means no check.
	CheckEgress func(ctx context.Context, who auth.Principal, e policy.Egress) error
	// BenchEgress is where the steps of builds may connect.
	BenchEgress policy.Egress
	// BenchEnv is the environment of the steps of builds, below the template's.
	BenchEnv map[string]string
	// CheckVolumes returns an error unless a sandbox of the project may mount
	// these volumes. It is called before anything is started. Nil means no check.
	CheckVolumes func(ctx context.Context, project string, vs []VolumeMount) error
	// Mount makes a volume ready for the sandbox id. It is called at each start
	// and resume. Nil means that the server has no volumes.
	Mount func(ctx context.Context, project, id string, v VolumeMount) (Mount, error)
	// Unmounted is called when a sandbox has released its volumes. It must be set
	// if Mount is.
	Unmounted func(ctx context.Context, id string)

	MaxSandboxes int           // on this machine at the same time, over all projects; 0 means 50
	MaxBenches   int           // open at the same time; 0 means 4
	MaxTimeout   time.Duration // longest lifetime that a caller may request; 0 means 24 h
	StartTimeout time.Duration // in which the guest must answer after a start; 0 means 30 s
	WarmTimeout  time.Duration // for the warm-up shell of a pooled guest; 0 means StartTimeout
	SaveTimeout  time.Duration // in which a snapshot must be written; 0 means 2 min
	PerAgent     int           // living sandboxes of one agent that it has created itself; 0 means that agents create none
	KeepPaused   time.Duration // after which a paused sandbox is killed; 0 means never
	MaxPaused    int           // paused at the same time, over all projects; 0 means 200
	MaxSnapshots int           // made by callers and not deleted, over all projects; 0 means 100
	KeepFreeMB   int64         // mebibytes on the disk of Dir that a pause, fork or snapshot must leave free; 0 means 512. With half of it left the sandbox that has written most ends

	CPUs      float64 // cores of each sandbox; 0 means 2
	MemoryMB  int64   // mebibytes of each sandbox; 0 means 1024
	DiskMB    int64   // mebibytes that each sandbox may write; 0 means 10240
	Processes int64   // processes and threads of each sandbox; 0 means 512

	// ReadyTimeout is how long a template's ready command may take to succeed while the
	// template is made; 0 means 10 min. StartWait is how long a template without one is
	// given after its start command has begun; 0 means 20 s.
	ReadyTimeout, StartWait time.Duration

	// Prepare names the templates whose snapshots are made when the fleet starts
	// instead of at their first use. The pool holds sandboxes of the first one.
	Prepare []string
	// Cold boots every sandbox instead of restoring its template's snapshot.
	Cold bool
	// Pool bounds the pooled sandboxes.
	Pool PoolConfig
	// Prepared is how many sandboxes wait without content, so that a start from memory
	// that finds the pool empty, a resume and a fork only have to restore. They fit
	// the last such starts of ten minutes, and beyond these sandboxes of the first
	// template in Prepare with the limits above. Each takes about 15 MiB and, once,
	// about 0.1 s of processor time. 0 means none.
	Prepared int
	// Snapshots lets callers make snapshots of their sandboxes.
	Snapshots bool

	// Warmup maps the TCP port of a service that starts with the sandbox to how
	// long after the start a connection waits for it. Connections to other closed
	// ports fail at once.
	Warmup map[uint16]time.Duration
}

// Inboxes lends the inbox of a sandbox to it, so that it can read mail.
// Implementations are safe for concurrent use.
type Inboxes interface {
	// CheckLoan returns an error unless credential opens the inbox of the sandbox.
	CheckLoan(ctx context.Context, sandbox auth.Principal, credential auth.Secret) error
	// Lend lets the sandbox read its inbox until Return. The credential stays on
	// the host. Who is the caller that hands it over.
	Lend(ctx context.Context, who, sandbox auth.Principal, credential auth.Secret) error
	// Return ends the loan of a sandbox. It does nothing if there is none.
	Return(sandboxID string)
}

// A Base is what a template gives to the sandboxes that start from it.
type Base struct {
	Rootfs string // directory that is the read-only lower layer of the root file system
	Image  Image  // the same in files, which starts faster; may be zero
	// Key changes whenever the files of the template or the guest change.
	Key string
	// Probes must succeed before a snapshot of a booted sandbox is worth taking.
	Probes []Probe

	// Project is whose template it is. Empty means the server's own. The start command
	// runs with the network rules of that project's builds while the template is made.
	Project string

	CPUs     float64 // cores; 0 means the server's default
	MemoryMB int64   // mebibytes; 0 means the server's default
	DiskMB   int64   // mebibytes that a sandbox may write; 0 means the server's default

	Env  map[string]string // of commands, below what the creator asks for
	User string            // runs commands of requests without a user; empty means "user"
	Dir  string            // where commands of requests without a directory start, absolute; empty means the user's home

	// StartCmd is a shell command that User runs in the background when a sandbox boots.
	// Empty means none. A sandbox that is restored from memory has it running already.
	StartCmd string
	// ReadyCmd is a shell command that succeeds once StartCmd is ready. Empty means that
	// it is ready 20 s after its start.
	ReadyCmd string
}

// sized returns b with the limits that its sandboxes have.
func (c *Config) sized(b Base) Base {
	b.CPUs, b.MemoryMB, b.DiskMB = or(b.CPUs, c.CPUs), or(b.MemoryMB, c.MemoryMB), or(b.DiskMB, c.DiskMB)
	return b
}

// base returns what a template gives to its sandboxes, with their limits.
func (f *Fleet) base(ctx context.Context, template string) (Base, error) {
	b, err := f.conf.Base(ctx, template)
	return f.conf.sized(b), err
}

// A Probe is an HTTP request that a service inside answers with 200 when it
// is ready.
type Probe struct {
	Port uint16
	Path string
}

func (c *Config) setDefaults() error {
	if len(c.Key) < 32 {
		return errors.New("sandbox: the server's key has fewer than 32 bytes")
	}
	if c.Dir == "" || c.Base == nil {
		return errors.New("sandbox: no directory for snapshots, or no templates")
	}
	if c.Prepared < 0 || c.CPUs < 0 || c.MemoryMB < 0 || c.DiskMB < 0 || c.Processes < 0 || c.MaxSandboxes < 0 || c.MaxPaused < 0 || c.MaxSnapshots < 0 || c.MaxBenches < 0 || c.KeepFreeMB < 0 {
		return errors.New("sandbox: a limit is negative")
	}
	c.MaxSandboxes = or(c.MaxSandboxes, 50)
	c.MaxBenches = or(c.MaxBenches, 4)
	c.MaxPaused = or(c.MaxPaused, 200)
	c.MaxSnapshots = or(c.MaxSnapshots, 100)
	c.KeepFreeMB = or(c.KeepFreeMB, 512)
	c.MaxTimeout = or(c.MaxTimeout, 24*time.Hour)
	c.StartTimeout = or(c.StartTimeout, 30*time.Second)
	c.WarmTimeout = or(c.WarmTimeout, c.StartTimeout)
	c.ReadyTimeout = or(c.ReadyTimeout, 10*time.Minute)
	c.StartWait = or(c.StartWait, 20*time.Second)
	c.SaveTimeout = or(c.SaveTimeout, 2*time.Minute)
	c.CPUs = or(c.CPUs, 2)
	c.MemoryMB = or(c.MemoryMB, 1024)
	c.DiskMB = or(c.DiskMB, 10240)
	c.Processes = or(c.Processes, 512)
	return c.Pool.check()
}

// or returns v, or unset if v is zero.
func or[T comparable](v, unset T) T {
	var zero T
	if v == zero {
		return unset
	}
	return v
}
