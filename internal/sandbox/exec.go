package sandbox

import (
	"context"
	"time"

	"postern/internal/auth"
)

// StarterPath is the guest's program that each process of a confined sandbox executes
// first. It only executes the command in its place. [Commands] must allow it at once,
// because the guest is blocked until it is started. In a confined sandbox nobody can replace
// it.
const StarterPath = "/.postern-start"

// LauncherPath is the guest's program that becomes the shell of a client's next command,
// before that command is known.
const LauncherPath = "/run/postern/launcher"

// PlainHeader makes the guest start a request's command without a prepared shell, so that
// the kernel sees the command's text when it asks.
const PlainHeader = "X-Postern-Plain"

// An Exec is a program that is about to be started in a sandbox, as the sandbox's
// kernel sees it. Code in the sandbox can neither forge nor avoid it. Names, arguments and
// environment are hostile.
type Exec struct {
	PID    int32  // of the process, in the sandbox
	Parent int32  // PID of its parent; 0 if it has none
	Path   string // of the file, with symbolic links resolved; empty if it has no known path
	Name   string // path as the caller wrote it; may be relative, or a symbolic link
	Dir    string // working directory
	Args   []string
	Env    []string
	// SHA256 is the digest of the file if [Observed.Digests] is set. Zero means that it is
	// not known. A file that is not Fixed may change after it was read.
	SHA256 [32]byte
	// Fixed reports that the file is the template's: nothing in the sandbox has written it.
	Fixed bool
	UID   uint32
	// Guest reports that the process ran the guest's program until now, so the guest is
	// starting it. The process still shares the guest's memory: while it waits for a
	// verdict, the whole guest may be blocked.
	Guest bool
	// Cut reports that a path, the arguments or the environment were too long, and that
	// something is missing.
	Cut  bool
	Time time.Time // by the host's clock
}

// An Exit is the end of a process.
type Exit struct {
	PID    int32
	Code   int // exit code; 128 plus the signal's number if a signal ended it
	Time   time.Time
	Signal int // 0 if none
}

// An Open is a process's attempt to open a file for writing, or to use a path in another
// way.
type Open struct {
	PID int32
	// Op is empty for an open for writing, or else read, mkdir, rmdir, unlink, rename, link,
	// symlink, mknod or truncate. Hostile.
	Op   string
	Path string // absolute; hostile; empty if it is not known. Only of opens links are resolved.
	To   string // where rename, link and symlink lead; hostile
	Err  int    // errno; 0 means success
	Time time.Time
}

// Commands judges and records the programs that are started in sandboxes with an owner.
// Its methods are called concurrently.
type Commands interface {
	// Exec decides whether a program may be started. It may block until a person has
	// decided; ctx ends with the sandbox, or with the process that waits.
	Exec(ctx context.Context, who auth.Principal, e Exec) (allow bool)
	// Exited reports the end of a process.
	Exited(who auth.Principal, e Exit)
	// Opened reports an open or another use of a path, as far as [Observed] says so.
	Opened(who auth.Principal, o Open)
	// Missed reports that n events of the sandbox were lost: its record is incomplete.
	Missed(who auth.Principal, n uint64)
}
