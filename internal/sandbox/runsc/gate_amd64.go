package runsc

import "golang.org/x/sys/unix"

// Numbers of system calls that some architectures do not have.
const (
	sysOpen  = unix.SYS_OPEN
	sysCreat = unix.SYS_CREAT
)
