package gvisor

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
)

// The names under which this program starts itself. They are compared with
// argv[0], which is the choice of whoever executes a program: no argument that
// a person gives to postern can make it one of these.
const (
	argv0Launcher = "postern-launcher" // ours, see launcher.go
	argv0Sandbox  = "runsc-sandbox"    // gVisor's kernel, the sentry
	argv0Gofer    = "runsc-gofer"      // gVisor's file server
)

// umounter is the whole command line of the third thing that gVisor starts,
// a child of the sentry that unmounts /proc; it has no name of its own.
var umounter = []string{"/proc/self/exe", "umount", "--sync-fd=3", "/proc"}

// IsRuntime says whether args, a whole command line, are those of a part of a
// sandbox and not a person's. Then [Main] must run before anything else.
func IsRuntime(args []string) bool {
	if len(args) == 0 {
		return false
	}
	switch args[0] {
	case argv0Launcher, argv0Sandbox, argv0Gofer:
		return true
	}
	return slices.Equal(args, umounter)
}

// Main runs this process as the part of a sandbox that its command line names,
// and does not return. gVisor registers its flags on flag.CommandLine and
// panics if another one of the same name is there, which the parent sees only
// as "waiting for sandbox to start: EOF": whoever links this package must use
// flag sets of their own.
func Main() {
	collectLater()
	switch os.Args[0] {
	case argv0Launcher:
		launcherMain() // exits
	case argv0Sandbox:
		if err := needNoTracing(); err != nil {
			os.Exit(1) // nobody reads its stderr
		}
		os.Args = sentryArgs(os.Args)
	case argv0Gofer:
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

// collectLater keeps a part of a sandbox from collecting garbage while it
// starts, when it makes little and each round takes a tenth of the whole start.
// A sandbox that idles is as small as ever: it collects once it has started.
func collectLater() {
	usual := debug.SetGCPercent(400)
	time.AfterFunc(3*time.Second, func() { debug.SetGCPercent(usual) })
}

// needNoTracing makes gVisor leave the sentry no CAP_SYS_PTRACE, which it keeps
// for systrap if it drops capabilities by itself, see sentryArgs: systrap traces
// only its own children, for which no capability is needed.
func needNoTracing() error {
	systrap, err := platform.Lookup("systrap")
	if err != nil {
		return fmt.Errorf("find platform: %w", err)
	}
	platform.Register("systrap", untraced{systrap})
	return nil
}

type untraced struct{ platform.Constructor }

func (untraced) Requirements() platform.Requirements { return platform.Requirements{} }

// The annotations by which a specification tells the sentry what to show to
// the programs in the sandbox.
const (
	annotationMemory = "postern/memory-bytes"
	annotationCPUs   = "postern/cpus"
)

// sentryArgs adds to the sentry's command line what gVisor would take from a
// cgroup that it manages itself: the memory and processors to show inside. The
// cgroup is ours, and its memory limit is larger than what the sandbox may
// see, since it holds the sentry too. gVisor sizes a tmpfs by half of what it
// takes for the host's memory. A name of the machine's maker is
// replaced: it would tell the sandbox where it runs.
func sentryArgs(args []string) []string {
	if len(args) < 3 || !slices.Contains(args, "boot") {
		return args
	}
	// It has a user of its own from the start, with the rights that it needs to make a root
	// for itself. gVisor gives them up by executing this program once more,
	// 10 ms; with this flag it does so in all threads.
	add := []string{"--apply-caps=true", "--product-name=postern"}
	s := donatedSpec(args)
	if b := s.Annotations[annotationMemory]; b != "" {
		add = append(add, "--total-memory="+b, "--total-host-memory="+b)
	}
	if n := s.Annotations[annotationCPUs]; n != "" {
		add = append(add, "--cpu-num="+n)
	}
	// The launcher's option is not for the sentry: with it, the sentry would
	// leave the host's /proc mounted in its own root.
	args = slices.DeleteFunc(slices.Clone(args), func(a string) bool { return a == "--rootless=true" })
	// The last flag of a name counts; the last argument is the sandbox's id.
	return slices.Insert(args, len(args)-1, add...)
}

// donatedSpec reads the specification that the launcher left open for the
// sentry. Without one it is empty: the sentry says what is wrong with it.
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
		// Not os.NewFile: its finalizer would close the file under the sentry.
		// Not Read: the sentry reads the same file from its beginning.
		b := make([]byte, maxSpec)
		n, err := unix.Pread(fd, b, 0)
		if err != nil || json.Unmarshal(b[:n], &s) != nil {
			return specs.Spec{}
		}
		return s
	}
	return s
}
