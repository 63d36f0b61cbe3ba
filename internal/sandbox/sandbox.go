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
// The row is written before anything is started and its end is recorded after
// everything is gone, so that after a crash each process, mount or cgroup that
// is left on the machine belongs to a row that says it should not be there, or
// to none: [Fleet.Recover] takes back what still runs and removes the rest.
//
// Most sandboxes are not booted but go on from the template's snapshot, made of
// one that was booted, belonged to nobody and never ran anything of a user's.
// Some of these wait, already restored, to be asked for (pool.go). A snapshot's
// guest is told that it is another one now before anyone else may speak to it.
//
// Whoever changes a sandbox's state has claimed it (live.go), so that changes
// of one sandbox come one after the other; traffic into it asks only whether it
// is ready.
package sandbox

import (
	"context"
	"errors"
	"net"
	"os"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
)

// The errors of this package, one for each answer that a door can give.
var (
	// ErrNotFound means that there is no such sandbox, or no longer.
	ErrNotFound = errors.New("sandbox not found")
	// ErrPortClosed means that nothing listens on the port in the sandbox.
	ErrPortClosed = errors.New("the port is not open")
	// ErrFull means that there may be no more sandboxes, paused ones or
	// snapshots; the text says of what there are how many.
	ErrFull = errors.New("a limit is reached")
	// ErrInvalid means that a request cannot be taken; the text names the
	// field and the limit.
	ErrInvalid = errors.New("invalid request")
	// ErrPaused means that the sandbox is paused and nothing may wake it but
	// its owner.
	ErrPaused = errors.New("the sandbox is paused")
	// ErrNotResumed means that a paused sandbox could not go on and stays
	// paused. The record says why.
	ErrNotResumed = errors.New("the sandbox could not be resumed and stays paused; its entries in the audit say why")
	// ErrBusy means that the sandbox is changing its state; the same request
	// may succeed soon.
	ErrBusy = errors.New("the sandbox is changing its state")
)

// A Spec says what a [Runtime] is to run.
type Spec struct {
	ID       string // "i" and 20 lower-case letters and digits
	Rootfs   string // directory that is the read-only lower layer of the root file system
	Hostname string

	CPUs      float64 // cores
	MemoryMB  int64   // mebibytes, for all of the sandbox
	DiskMB    int64   // mebibytes that may be written to the root file system and /tmp together
	Processes int64   // processes and threads

	// From is a directory that [Runtime.Save] wrote, perhaps from a sandbox
	// with another id. The sandbox goes on where that one was, or, if only
	// files were saved, boots with them. Rootfs must have the content that it
	// had then. A sandbox that goes on from memory has the Hostname and Link of
	// this Spec, shows MemoryMB to those inside and is held by its MemoryMB, CPUs
	// and Processes from outside; the number of processors that it shows, and
	// what it may write and start inside, are those of the Spec that was saved.
	// Empty means a boot from Rootfs alone.
	From string
	// Mounts are directories of the host that appear inside. A sandbox that goes
	// on from memory must have those that it had when it was saved, from
	// whatever sources; [Runtime.Start] returns an error that wraps
	// [ErrInvalid] if it has not. One that boots, also with saved files, may
	// have any.
	Mounts []Mount

	// Env is the environment of the guest. It holds no secret. A sandbox that
	// goes on from memory keeps the one that it had.
	Env []string
	// Link is the sandbox's end of its only network link, from
	// [Network.Attach]. Start takes it over and closes it, also when it fails.
	Link *os.File
}

// A Mount is a directory of the host inside a sandbox. No program in it is run
// with its owner's rights (nosuid), and no device, pipe or socket of the host's
// can be opened in it.
// What is mounted below Source on the host is not seen.
type Mount struct {
	Source      string // absolute, on the host
	Destination string // absolute and clean, inside; made if it is not there
	ReadOnly    bool
}

// SaveOptions say what [Runtime.Save] does.
type SaveOptions struct {
	// FilesOnly leaves memory and processes out: what is started from it boots
	// with the files that were written.
	FilesOnly bool
	// Keep leaves the sandbox running. Without it the sandbox has ended when
	// Save returns without an error, and Stop frees what it held.
	Keep bool
}

// Usage is what a sandbox takes of this machine.
type Usage struct {
	CPU    time.Duration // processor time since it was started or restored
	Memory int64         // bytes, what runs it included
	Disk   int64         // bytes that it has written and not removed
}

// A Runtime runs sandboxes on this machine. Implementations are safe for
// concurrent use; calls for one id are not made concurrently, but for Stop,
// which may come at any time.
type Runtime interface {
	// Start returns when the sandbox's first process (the guest) has been
	// started; it may not answer yet. If Start fails nothing stays behind.
	Start(ctx context.Context, s Spec) error
	// Stop ends the sandbox and frees all that it held on this machine:
	// processes, mounts, cgroups, namespaces and files. It works for a sandbox
	// that another process of this program started. Stopping a sandbox that is
	// not there is not an error.
	Stop(ctx context.Context, id string) error
	// Save writes the sandbox to dir, an absolute path that nothing has yet and
	// whose parent is there, so that [Spec.From] can start from it, as often as
	// is wanted and on any machine with the same version of this program and
	// the same content of the root file system. When it returns without an error all is on
	// disk; after an error, or a crash, nothing has that path, and the sandbox
	// goes on, if it has not ended for another reason. What it did before Save
	// returned and after the moment that was saved is never lost unnoticed:
	// without Keep it does not run meanwhile. Save is not broken off by ctx once
	// it has begun. It returns an error that wraps [ErrNotFound] if there is no
	// such sandbox.
	Save(ctx context.Context, id, dir string, o SaveOptions) error
	// Usage says what the sandbox takes of this machine. It returns an error
	// that wraps [ErrNotFound] if there is no such sandbox, or it has ended.
	Usage(ctx context.Context, id string) (Usage, error)
	// Wait blocks until the sandbox has ended for whatever reason, or ctx is
	// done, and returns why in words for a person: "stopped" by Stop, "saved" by
	// Save without Keep, "out of memory", "killed" (its kernel was ended by
	// somebody else), "the guest exited with status 7", "the guest was killed by
	// signal 9", or "ended" if another process of this program started it and
	// nobody can say. It returns an error that wraps [ErrNotFound] if there is
	// no such sandbox, or no longer; a sandbox that has ended is there until it
	// is stopped, for the process that started it.
	Wait(ctx context.Context, id string) (reason string, err error)
	// List returns the ids of all sandboxes of which anything is left on this
	// machine, whoever started them.
	List(ctx context.Context) ([]string, error)
}

// An Examiner is a [Runtime] that can describe what an unresponsive sandbox is
// doing.
type Examiner interface {
	// Examine writes what the sandbox is doing to a file, and returns a summary of
	// one line and the file's name. It takes a few seconds at most and returns what
	// it has by then. What it writes cannot be trusted.
	Examine(ctx context.Context, id string) (summary, file string)
}

// A Keeper holds the host's ends of links while no server runs, so that the
// next one can go on with the sandboxes that are left.
type Keeper interface {
	// Put has the keeper hold a duplicate of f for the sandbox id.
	Put(ctx context.Context, id string, f *os.File) error
	// Drop closes what is held for a sandbox.
	Drop(id string)
	// All returns duplicates of all that is held, by sandbox. The caller
	// closes them.
	All(ctx context.Context) (map[string]*os.File, error)
}

// A Network is each sandbox's only way to the outside. Implementations are
// safe for concurrent use.
type Network interface {
	// Attach makes the link of a sandbox. Its owner is who, as the audit and
	// whatever it connects to will know it. The caller closes the file.
	Attach(ctx context.Context, who auth.Principal, e policy.Egress) (*os.File, error)
	// Adopt is Attach for a link that is there already, from a former process
	// of this program: host is a descriptor of the host's end, as [Network.Handle]
	// gave it. Adopt works on a duplicate; the caller closes host. Nobody else
	// may read the link from then on.
	Adopt(ctx context.Context, who auth.Principal, e policy.Egress, host *os.File) error
	// Handle returns a duplicate of the host's end of a link, for whoever keeps
	// it over the end of this process. The caller closes it and must not read
	// it. It returns an error that wraps [ErrNotFound] if the sandbox is not
	// attached.
	Handle(id string) (*os.File, error)
	// Update replaces the rules of the sandbox who.ID and, if who differs from
	// what it was, its owner. Connections that the rules forbid are cut; a new
	// owner begins with none: all are reset, those of Dial too. It returns an
	// error that wraps [ErrNotFound] if the sandbox is not attached.
	Update(ctx context.Context, who auth.Principal, e policy.Egress) error
	// MuteIfSilent reports whether the sandbox has sent nothing since it was
	// attached, apart from answers to Dial. If so, it drops everything that the
	// sandbox sends from now on. It returns false if the sandbox is not attached.
	MuteIfSilent(id string) bool
	// Detach closes the link and every connection over it. Detaching a sandbox
	// that is not attached does nothing.
	Detach(id string)
	// Dial connects to a TCP port inside the sandbox, also one that listens on
	// its loopback only. It returns an error that wraps [ErrNotFound] if the
	// sandbox is not attached and [ErrPortClosed] if nothing listens.
	Dial(ctx context.Context, id string, port uint16) (net.Conn, error)
}
