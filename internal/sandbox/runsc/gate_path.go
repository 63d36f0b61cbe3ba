package runsc

import (
	"path"

	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
)

// nameOf returns the path of an open file of a task, or "".
func nameOf(t *kernel.Task, fd int32) string {
	f := t.GetFile(fd)
	if f == nil {
		return "" // another thread has closed it
	}
	defer f.DecRef(t)
	return f.MappedName(t)
}

// wanted returns the absolute path that a task wanted to open, without regard to symbolic
// links. Another thread of the task may have changed it since.
func wanted(t *kernel.Task, dir int32, addr uint64) string {
	name, err := t.CopyInString(hostarch.Addr(addr), linux.PATH_MAX)
	if err != nil {
		return ""
	}
	if path.IsAbs(name) {
		return path.Clean(name)
	}
	if dir != linux.AT_FDCWD {
		return path.Join("/", nameOf(t, dir), name)
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

// openHowFlags reads the flags from the argument of openat2(2).
func openHowFlags(t *kernel.Task, addr uint64) uint64 {
	b := make([]byte, 8)
	if _, err := t.CopyInBytes(hostarch.Addr(addr), b); err != nil {
		return 0
	}
	return hostarch.ByteOrder.Uint64(b)
}
