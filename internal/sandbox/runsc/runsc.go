// Package runsc is the program of a sandbox's processes on the host: gVisor's
// sentry and gofer, and the launcher that starts them. It is a program of its own,
// because each of these processes would otherwise initialize all packages of the
// server.
//
// It must not import the server's packages. Package gvisor tells its launchers what
// to start.
package runsc

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"

	"postern/internal/sandbox/launch"
)

// Main runs the part of a sandbox that the command line names, and does not return.
// gVisor registers its flags on flag.CommandLine and panics if a flag of the same
// name exists. The parent then sees only "waiting for sandbox to start: EOF". So
// programs that link this package must use flag sets of their own.
func Main() {
	collectLater(func() {})
	if name, err := unix.BytePtrFromString(os.Args[0]); err == nil {
		// For ps and top, which would show "exe".
		_ = unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(name)), 0, 0, 0)
	}
	switch os.Args[0] {
	case launch.Launcher:
		launcherMain() // exits
	case launch.Sentry:
		if err := adaptSystrap(); err != nil {
			os.Exit(1) // nobody reads its stderr
		}
		skipTracePoints()
		registerGate()
		os.Args = sentryArgs(os.Args)
	case launch.Gofer:
		if err := leaveRoot(); err != nil {
			os.Exit(1) // nobody reads its stderr
		}
	}
	installSeccompPrograms()
	cli.Run(nil, map[util.SubCommand]string{
		new(sentrycmd.Boot): "", new(cmd.Gofer): "", new(sentrycmd.Umount): "",
	}, nil)
	os.Exit(1) // unreachable
}

// collectLater disables garbage collection while a part of a sandbox starts or is
// restored. That allocates little, but each collection costs a tenth of its time.
// Three seconds later a sentry returns to the host what its start no longer needs:
// 6 MiB after a restore, which it would otherwise keep. The others have nothing to
// return. It calls then before.
func collectLater(then func()) {
	const usual, start = 100, 400 // percent, see debug.SetGCPercent
	debug.SetGCPercent(start)
	sentry := os.Args[0] == launch.Sentry
	time.AfterFunc(3*time.Second, func() {
		then()
		debug.SetGCPercent(usual)
		if sentry {
			debug.FreeOSMemory()
		}
	})
}

// adaptSystrap puts our systrap in the place of gVisor's.
func adaptSystrap() error {
	usual, err := platform.Lookup("systrap")
	if err != nil {
		return fmt.Errorf("find platform: %w", err)
	}
	platform.Register("systrap", &systrap{Constructor: usual})
	return nil
}

// systrap is gVisor's platform of that name.
type systrap struct {
	platform.Constructor
	processors int // GOMAXPROCS; zero before the start
}

// Requirements removes CAP_SYS_PTRACE from the sentry. gVisor keeps it for systrap
// when the sentry drops its capabilities itself (see sentryArgs), but systrap
// traces only its own children, which needs no capability.
func (*systrap) Requirements() platform.Requirements { return platform.Requirements{} }

// prepare prepares this process for a start or, the second time, for a restore. A
// restore has just begun to load the pages of memory. With one more processor for
// Go that is as fast as with 128, and the one thread that decodes the kernel is not
// kept waiting, nor are the first processes of the sandbox.
func (s *systrap) prepare() {
	keepProcessors()
	if s.processors == 0 {
		s.processors = runtime.GOMAXPROCS(0)
		return // Main has called collectLater
	}
	runtime.GOMAXPROCS(s.processors + 1)
	collectLater(func() { runtime.GOMAXPROCS(s.processors) })
}

// sentryArgs adds flags to the sentry's command line: the memory and processors to
// show inside, which gVisor would take from a cgroup that it manages itself. The
// cgroup is ours, and its memory limit includes the sentry, so it is larger than
// what the sandbox may see. gVisor also sizes a tmpfs by half of the memory that it
// is told. The name of the machine's manufacturer is replaced, since it reveals
// where the sandbox runs.
func sentryArgs(args []string) []string {
	if len(args) < 3 || !slices.Contains(args, "boot") {
		return args
	}
	// The sentry starts as a user of its own, with the capabilities that it needs
	// to set up its root. By default gVisor drops them by executing this program
	// once more, which takes 10 ms. With this flag it drops them in all threads
	// instead.
	add := []string{"--apply-caps=true", "--product-name=postern"}
	s := donatedSpec(args)
	if b := s.Annotations[launch.AnnotationMemory]; b != "" {
		add = append(add, "--total-memory="+b, "--total-host-memory="+b)
	}
	if n := s.Annotations[launch.AnnotationCPUs]; n != "" {
		add = append(add, "--cpu-num="+n)
	}
	// The launcher's option must not reach the sentry, which would leave the host's
	// /proc mounted in its own root.
	args = slices.DeleteFunc(slices.Clone(args), func(a string) bool { return a == "--rootless=true" })
	for i, a := range args {
		if flag, ok := filestoreFlag(a); ok {
			args[i] = flag
		}
	}
	for i, a := range args {
		if flag, ok := filestoreFlag(a); ok {
			args[i] = flag
		}
	}
	// The last flag of a name counts. The last argument is the sandbox's ID.
	return slices.Insert(args, len(args)-1, add...)
}

// donatedSpec reads the specification that the launcher left open for the sentry.
// If there is none it returns an empty one, and the sentry reports the error.
func donatedSpec(args []string) (s specs.Spec) {
	for i, a := range args {
		v, ok := strings.CutPrefix(strings.TrimLeft(a, "-"), "spec-fd")
		if !ok {
			continue
		}
		if v, ok = strings.CutPrefix(v, "="); !ok && i+1 < len(args) {
			v = args[i+1]
		}
		fd, err := strconv.Atoi(v)
		if err != nil {
			return s
		}
		// Not os.NewFile, whose finalizer would close the file under the sentry.
		// Not Read, since the sentry reads the same file from its start.
		b := make([]byte, launch.MaxSpec)
		n, err := unix.Pread(fd, b, 0)
		if err != nil || json.Unmarshal(b[:n], &s) != nil {
			return specs.Spec{}
		}
		return s
	}
	return s
}
