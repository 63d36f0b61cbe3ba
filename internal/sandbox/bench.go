package sandbox

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"time"

	"postern/internal/auth"
)

// A BenchRequest asks for a bench.
type BenchRequest struct {
	Base     Base          // what it starts from; StartCmd and ReadyCmd do not run
	CPUs     float64       // cores; 0 means the server's default
	MemoryMB int64         // mebibytes; 0 means the server's default
	DiskMB   int64         // mebibytes that all steps together may write; 0 means the server's default
	Timeout  time.Duration // lifetime, greater than 0
}

// A Command is a program to run on a bench. There is no shell unless Args names one.
type Command struct {
	Args []string          // at least one; the first is a path, or a name to be found in PATH
	User string            // empty means root
	Dir  string            // absolute; empty means the user's home
	Env  map[string]string // in addition to the template's
}

// Unpack says where the files of an archive go. The archive has the files that were
// copied, under the names that they have in the context.
type Unpack struct {
	Source string       // path in the archive of what is copied, without glob patterns; empty or "." means everything
	Dest   string       // a trailing slash means into this directory; relative to Dir
	User   string       // owner of everything that is made; empty means root
	Mode   *fs.FileMode // permissions of the copied files; nil keeps those of the archive
	Dir    string       // absolute; empty means the user's home
}

// A Bench is a sandbox in which the steps of a build run. It belongs to the project,
// but is not one of its sandboxes: it is not listed, cannot be reached from outside
// and has a limit of its own. It has no inbox and no secrets. It ends with Close, at its
// timeout, or with the server, whatever comes first.
//
// Its methods are not safe for concurrent use, except for Close.
type Bench struct {
	ID string
}

// ErrNoShell means that the root file system has no shell.
var ErrNoShell = errors.New("the template has no shell; run a program by its path")

var errNoBench = errors.New("benches are not implemented yet")

// OpenBench boots a bench for who's project.
func (f *Fleet) OpenBench(ctx context.Context, who auth.Principal, r BenchRequest) (*Bench, error) {
	return nil, errNoBench
}

// Run runs a command and returns its exit code when it has ended. Whatever it left
// running is killed. Output gets each line without its end; stream is "stdout" or
// "stderr".
func (b *Bench) Run(ctx context.Context, c Command, output func(stream, line string)) (code int, err error) {
	return 0, errNoBench
}

// Unpack copies the files of a tar archive, plain or compressed with gzip, as COPY does:
// a file to the path Dest, or into it if that ends with a slash; a directory's content
// into Dest. Its error wraps [ErrInvalid] if the archive is malformed, leads out of Dest
// or has nothing at Source.
func (b *Bench) Unpack(ctx context.Context, archive io.Reader, o Unpack) error { return errNoBench }

// AddUser makes a user with a home and a shell unless there is one of that name. With
// sudo it may become root without a password.
func (b *Bench) AddUser(ctx context.Context, name string, sudo bool) error { return errNoBench }

// MakeDir makes a directory, which may exist, and those above it. User owns all that
// were made; empty means root.
func (b *Bench) MakeDir(ctx context.Context, path, user string) error { return errNoBench }

// WriteLayer writes everything that has been written on the bench so far as a tar
// archive, sorted as the kernel has it. Names begin with "./". A removed file is a
// character device 0:0, and a directory that hides the one below has the extended
// attribute trusted.overlay.opaque. What the guest wrote for this one sandbox is not in
// it. The archive is hostile.
func (b *Bench) WriteLayer(ctx context.Context, w *os.File) error { return errNoBench }

// Close ends the bench. Closing it twice is not an error.
func (b *Bench) Close() error { return nil }

// MakeTemplateSnapshot boots a sandbox from a template, runs its start command, waits
// until it is ready and saves it, so that the template's next sandboxes start from
// there. Output gets what the start command and the ready command print. Its error is
// the start command's failure, with the last lines.
func (f *Fleet) MakeTemplateSnapshot(ctx context.Context, template string, output func(line string)) error {
	return errNoBench
}
