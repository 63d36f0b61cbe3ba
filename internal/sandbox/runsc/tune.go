package runsc

import (
	"runtime"
	"sync"
	_ "unsafe" // for go:linkname

	_ "gvisor.dev/gvisor/pkg/gomaxprocs"
	_ "gvisor.dev/gvisor/pkg/sentry/seccheck"
)

// What gVisor has no options for. The names are checked by the linker, and their
// effect by tests.

//go:linkname baseProcessors gvisor.dev/gvisor/pkg/gomaxprocs.base
var baseProcessors int

// keepProcessors makes GOMAXPROCS stay what it is, which is the number of the
// sandbox's processors. gVisor adds 128 while it reads pages of a snapshot, one for
// each worker. Go never returns what 130 processors and their collectors have
// allocated, 8 MiB, and the network link gets a goroutine with buffers for each,
// which the next snapshot holds as well.
//
// gVisor changes GOMAXPROCS only after it was told a base. It holds a lock for that,
// which is not needed here: it has told the base, and nothing else has started.
func keepProcessors() {
	n := baseProcessors
	if n == 0 {
		return // by an earlier call
	}
	baseProcessors = 0
	if runtime.GOMAXPROCS(0) != n { // it is reading files already
		runtime.GOMAXPROCS(n)
	}
}

//go:linkname tracePoints gvisor.dev/gvisor/pkg/sentry/seccheck.initOnce
var tracePoints sync.Once

// skipTracePoints keeps gVisor from describing all of its trace points, which takes 3 ms.
// The gate names its points by number, and nothing else uses them.
func skipTracePoints() { tracePoints.Do(func() {}) }
