package runsc

import (
	"path"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/vfs"
)

// pathOfFD returns the path of a task's open file, or "" if it has none.
func pathOfFD(t *kernel.Task, fd int32) string {
	f := t.GetFile(fd)
	if f == nil {
		return "" // another thread has closed it
	}
	defer f.DecRef(t)
	return f.MappedName(t)
}

// pathInNamespace returns the path of a file from the root of a task's mount namespace, which
// only the guest can change, or "" if it is not below it. [vfs.FileDescription.MappedName]
// begins at the task's own root directory, which root inside may choose.
func pathInNamespace(t *kernel.Task, f *vfs.FileDescription) string {
	root := t.MountNamespace().Root(t)
	if !root.Ok() {
		return ""
	}
	defer root.DecRef(t)
	name, _ := t.Kernel().VFS().PathnameReachable(t, root, f.VirtualDentry()) // "" if there is none
	return name
}

// requestedPath returns the absolute path that a task tried to open. Symbolic links are not
// resolved. Another thread may have changed the path in memory since the call.
func requestedPath(t *kernel.Task, dir int32, addr uint64) string {
	name, err := t.CopyInString(hostarch.Addr(addr), linux.PATH_MAX)
	if err != nil {
		return ""
	}
	if path.IsAbs(name) {
		return path.Clean(name)
	}
	if dir != linux.AT_FDCWD {
		return path.Join("/", pathOfFD(t, dir), name)
	}
	root, wd := t.FSContext().RootDirectory(), t.FSContext().WorkingDirectory()
	defer root.DecRef(t)
	defer wd.DecRef(t)
	if !root.Ok() || !wd.Ok() {
		return path.Join("/", name)
	}
	at, _ := t.Kernel().VFS().PathnameWithDeleted(t, root, wd) // "" if there is none
	return path.Join("/", at, name)
}

// textAt returns the text at an address of a task, or "" if it cannot be read.
func textAt(t *kernel.Task, addr uint64) string {
	s, err := t.CopyInString(hostarch.Addr(addr), linux.PATH_MAX)
	if err != nil {
		return ""
	}
	return s
}

// openHowFlags reads the flags from the argument of openat2(2).
func openHowFlags(t *kernel.Task, addr uint64) uint64 {
	b := make([]byte, 8)
	if _, err := t.CopyInBytes(hostarch.Addr(addr), b); err != nil {
		return 0
	}
	return hostarch.ByteOrder.Uint64(b)
}
