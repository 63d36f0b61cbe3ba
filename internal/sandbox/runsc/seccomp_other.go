//go:build !amd64

package runsc

import "gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"

// Empty for architectures that go generate has not been run for.

func sentryPrograms() map[string]precompiledseccomp.Program { return nil }
func goferPrograms() map[string]precompiledseccomp.Program  { return nil }
