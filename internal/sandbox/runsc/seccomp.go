package runsc

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

// installSeccompPrograms registers the seccomp programs that gVisor's module lacks,
// since gVisor's own build and not go generate creates them. Without them each
// start of a sandbox compiles its programs, in 13 to 40 ms. A program is looked up
// by a name that includes its parameters. One that does not match (none does in a
// build with cgo) is not found, and gVisor compiles it: slower, but never wrong.
func installSeccompPrograms() {
	sentry.GetPrecompiled("") // uses up the sync.Once that clears the map
	registeredSentry = sentryPrograms()
	gofer.GetPrecompiled("")
	registeredGofer = goferPrograms()
}
