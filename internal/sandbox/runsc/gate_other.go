//go:build !amd64

package runsc

// Calls that only some architectures have. Numbers that are never used, below the
// greatest one that gVisor knows.
const (
	sysOpen  = 1022
	sysCreat = 1023
)
