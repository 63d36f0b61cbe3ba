// Package sandbox creates, tracks and ends sandboxes.
//
// A sandbox moves through these states and no others:
//
//	creating ── running ── pausing ── paused
//	    │          │ └──────<─┘          │
//	    │          └──── resuming ───────┘
//	    │
//	  failed     from all of them: killed, or
//	             lost, when the machine's part died without being asked
//
// The row is written before anything is started, and the end is recorded after
// everything is gone. So after a crash each process, mount or cgroup that is left
// on the machine has a row in a wrong state, or none. [Fleet.Recover] takes
// back what still runs and removes the rest.
//
// Most sandboxes are restored from their template's snapshot instead of booted.
// That snapshot is of a sandbox that had no owner and never ran code of a user.
// Some sandboxes are restored in advance and wait in a pool (pool.go). A restored
// guest is told its new identity before anybody else may talk to it (guest.go).
//
// Whoever changes the state of a sandbox holds its claim (live.go), so that changes
// of one sandbox happen one after the other. Traffic into a sandbox takes no claim;
// it only checks that the sandbox is ready.
package sandbox

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
)

// The errors of this package. There is one for each answer that a door can give.
var (
	// ErrNotFound means that the sandbox does not exist or has ended.
	ErrNotFound = errors.New("sandbox not found")
	// ErrNoTemplate means that the sandbox's template does not exist any more.
	ErrNoTemplate = errors.New("the template was deleted; choose another one")
	// ErrPortClosed means that nothing listens on the port in the sandbox.
	ErrPortClosed = errors.New("the port is not open")
	// ErrFull means that a limit on sandboxes, paused sandboxes or snapshots is
	// reached. The text names the limit.
	ErrFull = errors.New("a limit is reached")
	// ErrInvalid means that a request is malformed. The text names the field and
	// its limit.
	ErrInvalid = errors.New("invalid request")
	// ErrPaused means that the sandbox is paused and only its owner may resume it.
	ErrPaused = errors.New("the sandbox is paused")
	// ErrRunning means that the sandbox runs, and the request was to resume it.
	ErrRunning = errors.New("is already running")
	// ErrNotResumed means that a paused sandbox could not be resumed and stays
	// paused. The reason is in the record.
	ErrNotResumed = errors.New("the sandbox could not be resumed and stays paused; its audit entries say why")
	// ErrBusy means that the state of the sandbox is being changed. The same
	// request may succeed soon.
	ErrBusy = errors.New("the sandbox is changing its state")
)

// A Spec describes a sandbox for a [Runtime].
type Spec struct {
	ID       string // "i" and 20 lower-case letters and digits
	Rootfs   string // directory that is the read-only lower layer of the root file system
	Image    Image  // the same as Rootfs in files that the sandbox's kernel reads itself
	Hostname string

	CPUs      float64 // cores
	MemoryMB  int64   // mebibytes, for everything in the sandbox
	DiskMB    int64   // mebibytes that may be written to the root file system and /tmp together
	Processes int64   // processes and threads

	// From is a directory that [Runtime.Save] wrote, possibly from a sandbox with
	// another ID. If it holds memory, the sandbox continues where the saved one
	// was. If it holds files only, the sandbox boots with them. The content of
	// Rootfs must be what it was at the time. A sandbox restored from memory uses
	// images if the saved one did: those of the same names, in the directory of
	// Image.
	//
	// A sandbox restored from memory takes Hostname, Link, MemoryMB, CPUs and Processes
	// from this Spec. Two things stay as in the saved one: the number of processors
	// visible inside, and the limits that the kernel inside enforces on disk and
	// processes.
	//
	// Empty means a boot from Rootfs alone.
	From string
	// Mounts are directories of the host that appear inside. A sandbox restored
	// from memory must have the same destinations as the saved one; the sources may
	// differ. Otherwise [Runtime.Start] returns an error that wraps [ErrInvalid]. A
	// sandbox that boots may have any mounts.
	Mounts []Mount

	// LargestMB is the size, in mebibytes, of the largest file that may be written, so that
	// WriteLayer can read it, see [Layerer]. The kernel of the sandbox may use twice as
	// much memory in addition: it reads into garbage-collected memory. 0 means that the
	// disk is the only limit.
	//
	// The attack: a file of holes takes no disk, but its kernel reads it as a whole.
	LargestMB int64

	// Env is the environment of the guest. It must not hold secrets, since
	// everything inside can read it. A sandbox restored from memory keeps its old
	// one.
	Env []string
	// Unhurried says that nobody waits for the sandbox, so Start leaves prepared ones
	// to others, see [Preparer].
	Unhurried bool
	// Link is the sandbox's end of its only network link, from [Network.Attach].
	// Start takes ownership and closes it, also if it fails.
	Link *os.File
	// Watch judges each program before it is started in the sandbox, also those that the
	// guest starts, if the runtime is a [Gatekeeper]. Nil allows everything.
	Watch Watcher
}

// An Image is a root file system in EROFS images: files of the host that no sandbox can
// write, which the kernel of a sandbox maps and reads without another process. The
// name of an image must change with its content. A runtime may ignore it and use the
// directory of the same content. The zero value means that there is only the directory.
type Image struct {
	Root  string // absolute path of the image
	Guest string // absolute path of an image of a single file, the guest; empty if Root includes it
}

// A Mount is a directory of the host inside a sandbox. Set-user-ID bits in it have
// no effect, and devices, pipes and sockets of the host in it cannot be opened.
// File systems that are mounted below Source on the host are not visible.
type Mount struct {
	Source      string // absolute, on the host
	Destination string // absolute and clean, inside; created if missing
	ReadOnly    bool
}

// SaveOptions say how [Runtime.Save] saves.
type SaveOptions struct {
	// FilesOnly leaves out memory and processes. A sandbox started from the result
	// boots.
	FilesOnly bool
	// Keep leaves the sandbox running. Without it the sandbox never runs again once
	// Save succeeds; its processes may still be ending. Stop waits for them and frees
	// its resources.
	Keep bool
	// Brief says that the result is used at once and then removed, so it need not
	// survive a crash of the machine. If it is small it stays in the machine's memory.
	// The sandbox stands still for a shorter time then.
	Brief bool
}

// Usage is how much of this machine a sandbox uses.
type Usage struct {
	CPU    time.Duration // processor time since it was started or restored
	Memory int64         // bytes, including the sandbox's own kernel
	// MemoryMost is the limit of the host's kernel on Memory in bytes: [Spec.MemoryMB] and
	// what the sandbox's own kernel may take besides. 0 means that it is not known.
	MemoryMost int64
	// MemoryKills is how many processes the host's kernel has ended for lack of memory.
	MemoryKills int64
	// Disk is how many bytes of the host's disk hold what was written and not removed. With
	// the blocks by which the host's file system finds them it can exceed [Spec.DiskMB] by
	// one in a hundred.
	Disk int64
}

// A Runtime runs sandboxes on this machine. Implementations are safe for concurrent
// use. Calls for one ID are never concurrent, except for Stop, which may come at
// any time.
type Runtime interface {
	// Start returns when the first process of the sandbox, the guest, has been
	// started. The guest may not answer yet. If Start fails nothing stays behind.
	Start(ctx context.Context, s Spec) error
	// Stop ends the sandbox and frees everything that it held on this machine:
	// processes, mounts, cgroups, namespaces and files. It also works for a sandbox
	// that another process of this program started. Stopping a sandbox that does
	// not exist is not an error.
	Stop(ctx context.Context, id string) error
	// Save writes the sandbox to dir, so that [Spec.From] can start from it any
	// number of times, on any machine with the same version of this program and the
	// same root file system. Dir is an absolute path that does not exist; its
	// parent does.
	//
	// If Save succeeds, everything is synced to disk unless it is brief. After an error or a crash dir does
	// not exist, and the sandbox continues unless it has ended for another reason.
	// Without Keep the sandbox stands still from the moment that is saved, so nothing
	// that it does afterwards can be lost. Save ignores ctx once it has begun. Its error
	// wraps [ErrNotFound] if there is no such sandbox.
	Save(ctx context.Context, id, dir string, o SaveOptions) error
	// Usage measures the sandbox. Its error wraps [ErrNotFound] if there is no such
	// sandbox or it has ended.
	Usage(ctx context.Context, id string) (Usage, error)
	// Wait blocks until the sandbox has ended or ctx is done. It returns the reason
	// in words for a person:
	//
	//   - "stopped" after Stop, "saved" after Save without Keep
	//   - "out of memory"
	//   - "killed": somebody else ended the sandbox's kernel
	//   - "the record of its commands was lost", see [Gatekeeper]
	//   - "the guest exited with status 7", "the guest was killed by signal 9"
	//   - "ended": another process of this program started it, so the reason is unknown
	//
	// Its error wraps [ErrNotFound] if there is no such sandbox. The process that started
	// a sandbox can wait for it until it is stopped, also after its end.
	Wait(ctx context.Context, id string) (reason string, err error)
	// List returns the IDs of all sandboxes that have left anything on this
	// machine, also those that another process started.
	List(ctx context.Context) ([]string, error)
}

// A Preparer is a [Runtime] that can do in advance the part of a restore that does
// not depend on what is restored.
type Preparer interface {
	// Prepare makes at most one sandbox that waits for a Start from memory, so that
	// one waits for a Start of each of specs. Of these only the root file system and
	// the limits count. Earlier ones come first. Prepare removes sandboxes that wait
	// for none of specs, and reports whether there are still too few.
	//
	// They belong to nobody: List does not know them, and they end with this process,
	// however it ends.
	Prepare(ctx context.Context, specs []Spec) (more bool, err error)
}

// An Examiner is a [Runtime] that can describe what an unresponsive sandbox is
// doing.
type Examiner interface {
	// Examine writes a description to a file, and returns a summary of one line and
	// the file's name. It takes a few seconds at most and returns what it has found
	// by then. The content comes from the sandbox and cannot be trusted.
	Examine(ctx context.Context, id string) (summary, file string)
}

// A Searcher is a [Runtime] that can look for what a sandbox left on the machine.
type Searcher interface {
	// Search looks on the machine for everything that Stop removes, without relying on
	// the result of Stop. A search that fails reports its trace as not gone.
	Search(ctx context.Context, id string) []Trace
}

// A Layerer is a [Runtime] that can read what a sandbox has written.
type Layerer interface {
	// WriteLayer writes all that the sandbox has written to its root file system as a
	// tar archive of at most so many bytes, as of one moment. Names begin with "./";
	// directories come before what is in them. A removed file is a character device
	// 0:0, or a hard link to one, and a directory that hides the one below has the extended attribute
	// trusted.overlay.opaque. Sockets are left out. The archive is hostile.
	//
	// The sandbox stands still meanwhile, and continues also after an error. Its
	// kernel reads each file into its memory as a whole.
	WriteLayer(ctx context.Context, id string, w io.Writer, most int64) error
}

// A Keeper holds the host's ends of links while no server runs, so that the next
// server can take back the sandboxes.
type Keeper interface {
	// Put gives the keeper a duplicate of f for the sandbox id.
	Put(ctx context.Context, id string, f *os.File) error
	// Drop closes what is held for a sandbox.
	Drop(id string)
	// All returns duplicates of all links that the keeper holds, by sandbox ID. The
	// caller closes them.
	All(ctx context.Context) (map[string]*os.File, error)
}

// A Network is the only way of a sandbox to the outside. Implementations are safe
// for concurrent use.
type Network interface {
	// Attach creates the link of the sandbox who and returns the sandbox's end.
	// Audit entries and inner servers see connections from the link as who's. The
	// caller closes the file.
	Attach(ctx context.Context, who auth.Principal, e policy.Egress) (*os.File, error)
	// Adopt is Attach for the link of a previous process of this program. Host is a
	// duplicate of the host's end from [Network.Handle]. Adopt works on a duplicate
	// of its own, and the caller closes host. From then on nobody else may read the
	// link.
	Adopt(ctx context.Context, who auth.Principal, e policy.Egress, host *os.File) error
	// Handle returns a duplicate of the host's end of a link, for a keeper. The
	// caller closes it and must not read it. Its error wraps [ErrNotFound] if the
	// sandbox is not attached.
	Handle(id string) (*os.File, error)
	// Update replaces the rules of the sandbox who.ID, and its owner if who has
	// changed. Connections that the rules forbid are cut. For a new owner all
	// connections are reset, including those of Dial. Its error wraps [ErrNotFound]
	// if the sandbox is not attached.
	Update(ctx context.Context, who auth.Principal, e policy.Egress) error
	// MuteIfSilent reports whether the sandbox has sent nothing since it was
	// attached, apart from replies to Dial. If so, it drops everything that the
	// sandbox sends from now on. It returns false if the sandbox is not attached.
	MuteIfSilent(id string) bool
	// Detach closes the link and every connection over it. It does nothing if the
	// sandbox is not attached.
	Detach(id string)
	// Dial connects to a TCP port inside the sandbox. Its error wraps [ErrNotFound]
	// if the sandbox is not attached, and [ErrPortClosed] if nothing listens.
	Dial(ctx context.Context, id string, port uint16) (net.Conn, error)
}
