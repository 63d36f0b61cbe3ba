package runsc

import "golang.org/x/sys/unix"

// Numbers of system calls that some architectures do not have.
const (
	sysOpen    = unix.SYS_OPEN
	sysCreat   = unix.SYS_CREAT
	sysMkdir   = unix.SYS_MKDIR
	sysRmdir   = unix.SYS_RMDIR
	sysUnlink  = unix.SYS_UNLINK
	sysRename  = unix.SYS_RENAME
	sysLink    = unix.SYS_LINK
	sysSymlink = unix.SYS_SYMLINK
	sysMknod   = unix.SYS_MKNOD
)
