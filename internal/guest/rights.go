package guest

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// unchanged is -1, which the kernel takes for "no change" of an ID.
const unchanged = ^uintptr(0)

// as calls f on a thread with a's effective identity. So the kernel checks every
// path that f uses as it would for a's processes. The attack: if root checked a
// path and then used it, a hostile process could replace a directory by a symbolic
// link in between.
//
// The real and the saved user stay root. So a's processes can neither signal nor
// trace the thread, and the thread can change back. On Linux setfsuid would do, but
// gVisor does not have it. Files that f opens keep a's rights wherever they are
// used. f must not start goroutines that access files.
func as(a account, f func() error) error {
	if a.uid == 0 {
		return f()
	}
	// The calling goroutine keeps its thread: handing f to another goroutine costs
	// more than all of these calls.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer func() { // also if f panics
		if becomeRoot() != nil {
			// The saved user is root, so this cannot fail. If it did, the thread
			// would serve other requests with a's rights, even after a recovered
			// panic. So end the program; the first process starts another one.
			os.Exit(1)
		}
	}()
	if err := become(a); err != nil {
		return fmt.Errorf("act as %s: %w", a.name, err)
	}
	return f()
}

// become gives the calling thread, and no other, a's effective identity. The
// functions in package syscall would change all threads, so it uses raw calls.
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
