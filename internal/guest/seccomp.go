package guest

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// namespaces are the flags of clone(2) and unshare(2) that create namespaces.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// mountCalls are the system calls that change which file a path leads to.
var mountCalls = []uint32{
	unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT, unix.SYS_SETNS,
	unix.SYS_OPEN_TREE, unix.SYS_MOVE_MOUNT, unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR,
}

// forbidNamespaces keeps the calling thread, and all processes that it starts, from
// creating namespaces and from mounting.
//
// The attack: any user may create a user namespace, in which it is root, and mount one
// program of the template over another. Then a judge of paths would mistake a shell for ls.
// Programs of a run do not need namespaces of their own.
func forbidNamespaces() error {
	const (
		number, arch, first               = 0, 4, 16 // offsets in struct seccomp_data: of the call, of its ABI, and of the low half of its first argument
		load, equal, greater, anyBit, end = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K,
			unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, unix.BPF_RET | unix.BPF_K
		x32   = 0x40000000 // bit of the numbers of the x32 ABI
		allow = unix.SECCOMP_RET_ALLOW
		deny  = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
		none  = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	)
	p := []unix.SockFilter{
		{Code: load, K: arch},
		{Code: equal, K: auditArch, Jt: 1},
		{Code: end, K: deny}, // another ABI numbers its calls differently
		{Code: load, K: number},
		{Code: greater, K: x32, Jf: 1},
		{Code: end, K: deny},
		// The flags of clone3 are in memory, which a filter cannot read. Libraries fall
		// back to clone.
		{Code: equal, K: unix.SYS_CLONE3, Jf: 1},
		{Code: end, K: none},
	}
	for _, call := range []uint32{unix.SYS_CLONE, unix.SYS_UNSHARE} {
		p = append(p,
			unix.SockFilter{Code: equal, K: call, Jf: 4},
			unix.SockFilter{Code: load, K: first},
			unix.SockFilter{Code: anyBit, K: namespaces, Jf: 1},
			unix.SockFilter{Code: end, K: deny},
			unix.SockFilter{Code: end, K: allow})
	}
	for _, call := range mountCalls {
		p = append(p, unix.SockFilter{Code: equal, K: call, Jf: 1}, unix.SockFilter{Code: end, K: deny})
	}
	p = append(p, unix.SockFilter{Code: end, K: allow})
	prog := unix.SockFprog{Len: uint16(len(p)), Filter: &p[0]}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0); err != nil {
		return fmt.Errorf("forbid namespaces: %w", err)
	}
	return nil
}
