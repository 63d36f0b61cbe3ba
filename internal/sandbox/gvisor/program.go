package gvisor

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Seal returns a file in memory with program as its content, which can be executed
// and which nobody can change, not even root: a sentry that has broken out of its
// seccomp filter cannot replace the program of the other sandboxes through
// /proc/self/exe. The file has no name, so nothing is left of it once the last
// process that executes it has ended, and a later version of the server does not
// change the program of running sandboxes.
func Seal(program io.Reader) (*os.File, error) {
	const name = "postern-runtime"
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_EXEC)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3, where every such file can be executed
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if errors.Is(err, unix.EACCES) {
		return nil, errors.New("this machine forbids to execute files in memory, which sandboxes need: set vm.memfd_noexec to 0 or 1")
	}
	if err != nil {
		return nil, fmt.Errorf("make file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := io.Copy(f, program); err != nil {
		f.Close()
		return nil, fmt.Errorf("write runtime to memory: %w", err)
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_WRITE|unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL); err != nil {
		f.Close()
		return nil, fmt.Errorf("seal runtime: %w", err)
	}
	return f, nil
}

// path returns a path of f for this process and its children. It has the number of
// this process and not "self": a child has other files under the same numbers just
// before it executes a program.
func path(f *os.File) string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd()) }

// checkStatic refuses a program that needs a dynamic linker. The parts of a sandbox
// execute their program where there is none, and the only symptom would be that no
// sandbox starts.
func checkStatic(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("examine program of sandboxes: %w", err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return errors.New("the program of sandboxes is linked dynamically and could start none: build it with CGO_ENABLED=0, as make build does")
		}
	}
	return nil
}
