package guest

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// unchanged is -1 where the kernel expects an id.
const unchanged = ^uintptr(0)

// as calls f on a thread whose effective identity is a's, so that the kernel
// checks every path that f touches as it would for a's own processes. Checking
// first and acting as root afterwards would be a race that a hostile process
// wins by swapping a directory for a symbolic link in between.
//
// The real and the saved user stay root, so a's processes can neither signal
// nor trace the thread, and it can come back. setfsuid would do less harm on
// Linux, but gVisor has no such call. What f opens keeps a's rights wherever
// it is used later; f must not start goroutines that touch files.
func as(a account, f func() error) error {
	if a.uid == 0 {
		return f()
	}
	// The calling goroutine keeps its thread: handing f to another one costs
	// more than all of these calls.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer func() { // also if f panics
		if becomeRoot() != nil {
			// unreachable: the saved user is root. The thread would go on for others
			// with a's rights, and whatever recovers from a panic would let it. So
			// the program ends, and the first process starts another one.
			os.Exit(1)
		}
	}()
	if err := become(a); err != nil {
		return fmt.Errorf("act as %s: %w", a.name, err)
	}
	return f()
}

// become gives the calling thread, and no other of the process, the effective
// identity of a. The raw calls matter: the ones in package syscall change all
// threads.
func become(a account) error {
	if err := setGroups(a.more); err != nil {
		return err
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, unchanged, uintptr(a.gid), unchanged); e != 0 {
		return fmt.Errorf("set group: %w", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, unchanged, uintptr(a.uid), unchanged); e != 0 {
		return fmt.Errorf("set user: %w", e)
	}
	return nil
}

func becomeRoot() error {
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, unchanged, 0, unchanged); e != 0 {
		return fmt.Errorf("set user: %w", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, unchanged, 0, unchanged); e != 0 {
		return fmt.Errorf("set group: %w", e)
	}
	return setGroups(nil)
}

func setGroups(ids []uint32) error {
	var first unsafe.Pointer
	if len(ids) > 0 {
		first = unsafe.Pointer(&ids[0])
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(ids)), uintptr(first), 0); e != 0 {
		return fmt.Errorf("set groups: %w", e)
	}
	return nil
}
