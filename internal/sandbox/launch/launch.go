// Package launch is what the server and the parts of a sandbox know of each other:
// under which names a part is executed, what a launcher is told and what it
// answers.
//
// Both programs import it, so it must not import gVisor's kernel, which the server
// is built without, or anything of the server.
package launch

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"time"

	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"
)

// The names under which the program of a sandbox's parts is executed. They are
// compared with argv[0], which only the caller of exec chooses: no argument on a
// command line can select one of them.
const (
	Launcher = "postern-launcher" // ours, see [Order]
	Sentry   = "runsc-sandbox"    // gVisor's kernel
	Gofer    = "runsc-gofer"      // gVisor's file server
)

// umounter is the command line of gVisor's third kind of process, a child of the
// sentry that unmounts /proc. It has no name of its own.
var umounter = []string{"/proc/self/exe", "umount", "--sync-fd=3", "/proc"}

// IsPart reports whether args, a complete command line, belong to a part of a
// sandbox.
func IsPart(args []string) bool {
	if len(args) == 0 {
		return false
	}
	switch args[0] {
	case Launcher, Sentry, Gofer:
		return true
	}
	return slices.Equal(args, umounter)
}

const (
	// SocketFD is the launcher's descriptor of its socket to the server.
	SocketFD = 3
	// MaxSpec is the size limit of a sandbox's config.json, in bytes.
	MaxSpec = 1 << 20
	// LeastID is the smallest user or group ID that a sandbox may have on the
	// host. Those below are the system's own users.
	LeastID = 1000
)

// The annotations in a specification that tell the sentry what to show to programs
// inside.
const (
	AnnotationMemory = "postern/memory-bytes"
	AnnotationCPUs   = "postern/cpus"
)

// The names that gVisor gives to what a root file system in an image consists of.
const (
	AnnotationRootfs = "dev.gvisor.spec.rootfs." // begins the names of annotations about it
	Erofs            = "erofs"                   // the type of a mount
	// Filestore begins the name that the file for a sandbox's writes has for the
	// moment before it is unlinked.
	Filestore = "runsc-filestore-"
)

// A Kind is the kind of content of a snapshot.
type Kind string

// The kinds of snapshots.
const (
	Memory Kind = "memory" // the memory of a running sandbox, with its files
	Files  Kind = "files"  // what it had written to its root file system
)

// An Order is the request to a launcher, as JSON on its socket.
type Order struct {
	ID      string
	Dir     string   // the sandbox's directory, with config.json
	Cgroups []string // cgroup.procs files to enter first
	Flags   []string // gVisor's configuration
	From    Kind     // kind of the snapshot in the third file; empty means a boot without one
	Direct  bool     // read the snapshot's pages without the page cache
	Image   bool     // the root file system is an image
	Joined  bool     // and the next file is that image, see [postern/internal/erofs.WriteJoined]
	Gate    bool     // the last file is the sandbox's end of its gate, see [Event]
	Cover   bool     // overlay the root file system, so that mount points can be created
	User    uint32   // user and group id of the host that the sandbox runs as
	Link    Link

	// Prepare says to make the sandbox, to answer, and to wait for a second order. That
	// has Claim, and of the fields above only From, Direct and Link.
	Prepare, Claim bool
	Hostname       string // of a second order
}

// Files returns how many files come with the order: those of the link, the output, the
// snapshot, the image and the gate that it needs.
func (o Order) Files() int {
	n := 3
	switch {
	case o.Prepare: // the output
		n = 1
	case o.Claim || o.From == "": // the link and the snapshot, or the link and the output
		n = 2
	}
	if o.Joined {
		n++
	}
	if o.Gate {
		n++
	}
	return n
}

// A Link is the addresses of a sandbox's link, its only way out.
type Link struct {
	Address, Gateway netip.Addr
	Network          netip.Prefix
	MTU              int // bytes
}

// A Reply is the answer. The processes in it exist until the launcher has seen its
// socket closed, so their IDs are still valid.
type Reply struct {
	Sentry, Gofer int    // process IDs; Gofer is 0 if there is none
	Phase         string // what failed, if Err is set
	Err           string
	Phases        []Phase // what took how long
}

// A Phase is a part of a start.
type Phase struct {
	Name       string
	Start, End time.Time
}

// Configure parses gVisor's flags.
func Configure(flags []string) (*config.Config, error) {
	fs := flag.NewFlagSet("gvisor", flag.ContinueOnError)
	fs.SetOutput(io.Discard) // otherwise it prints hundreds of lines of help
	config.RegisterFlags(fs)
	if err := fs.Parse(flags); err != nil {
		return nil, fmt.Errorf("parse flags: %w", err)
	}
	return config.NewFromFlags(fs)
}
