package sandbox

import (
	"context"
	"time"

	"postern/internal/auth"
)

// StarterPath is the program of the guest that each process of a confined sandbox executes
// first. It executes the command in its own place, and nothing else. It must be allowed at
// once: while it is held, so is the guest. In a confined sandbox nobody can put another
// program there.
const StarterPath = "/.postern-start"

// An Exec is a program that is about to be started in a sandbox, as the sandbox's
// kernel sees it. Code inside can neither forge nor skip it. Names and arguments are
// hostile.
type Exec struct {
	PID    int32  // of the process, in the sandbox
	Parent int32  // PID of its parent; 0 if it has none
	Path   string // of the file, after symbolic links; empty if it has no name
	Name   string // as the caller wrote it: may be relative, or a symbolic link
	Dir    string // working directory
	Args   []string
	Env    []string
	// SHA256 is that of the file, if it is asked for, see [Observed]. Zero if it is not
	// known. Unless the file is Fixed, it may change once it was read.
	SHA256 [32]byte
	// Fixed says that the file is one of the template's: nothing in the sandbox has
	// written it.
	Fixed bool
	UID   uint32
	// Guest says that the process has run the guest's program until now: the guest starts
	// it. While it waits, so may the guest: all of it, since it shares its memory.
	Guest bool
	// Cut says that arguments or environment were longer than the kernel passes on.
	Cut  bool
	Time time.Time // the host's
}

// An Exit is the end of a process.
type Exit struct {
	PID    int32
	Code   int // exit code; 128 and the number of the signal if a signal ended it
	Time   time.Time
	Signal int // 0 if none
}

// An Open is a file that a process opened for writing, or tried to.
type Open struct {
	PID  int32
	Path string // absolute; hostile
	Err  int    // number of the error; 0 means success
	Time time.Time
}

// Commands judges and records what is started in sandboxes. Its methods are called by
// the runtime, concurrently, for sandboxes with an owner.
type Commands interface {
	// Exec decides whether a program may be started. It may block until a person has
	// decided; ctx ends with the sandbox, or with the process that waits.
	Exec(ctx context.Context, who auth.Principal, e Exec) (allow bool)
	Exited(who auth.Principal, e Exit)
	Opened(who auth.Principal, o Open)
	// Missed says that events of the sandbox were lost: its record is incomplete.
	Missed(who auth.Principal, n uint64)
}
