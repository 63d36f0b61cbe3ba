//go:build !amd64

package gvisor

import "gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"

// Empty where nobody has run go generate yet.

func sentryPrograms() map[string]precompiledseccomp.Program { return nil }
func goferPrograms() map[string]precompiledseccomp.Program  { return nil }
