//go:build !amd64

package runsc

// Numbers of system calls that this architecture does not have. They are placeholders that
// no call uses, within the range of gVisor's table.
const (
	sysOpen = 1023 - iota
	sysCreat
	sysMkdir
	sysRmdir
	sysUnlink
	sysRename
	sysLink
	sysSymlink
	sysMknod
)
