package gvisor

//go:generate go run gen_seccomp.go

import (
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	sentry "gvisor.dev/gvisor/runsc/boot/filter"
	gofer "gvisor.dev/gvisor/runsc/fsgofer/filter"
)

//go:linkname registeredSentry gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var registeredSentry map[string]precompiledseccomp.Program

//go:linkname registeredGofer gvisor.dev/gvisor/runsc/fsgofer/filter.precompiledPrograms
var registeredGofer map[string]precompiledseccomp.Program

// installSeccompPrograms puts back what gVisor's module lacks, since it is
// made by gVisor's own build and not by go generate: without them each start
// of a sandbox compiles its programs, 13 to 40 ms. A program is looked up by a
// name that says for what it was compiled, so one that does not fit (as all do
// not in a build with cgo) is not found and gVisor compiles: slower, never
// wrong.
func installSeccompPrograms() {
	sentry.GetPrecompiled("") // spends the sync.Once that empties the map
	registeredSentry = sentryPrograms()
	gofer.GetPrecompiled("")
	registeredGofer = goferPrograms()
}
