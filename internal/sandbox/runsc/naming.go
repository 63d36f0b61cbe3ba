package runsc

import (
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/abi/linux"
	"gvisor.dev/gvisor/pkg/context"
	"gvisor.dev/gvisor/pkg/fd"
	"gvisor.dev/gvisor/pkg/hostarch"
	"gvisor.dev/gvisor/pkg/sentry/arch"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/platform"
)

// This file gives a prepared sandbox its host name. gVisor takes the name from the
// specification that the sentry read when it started, and then the name of a prepared
// sandbox was not known. A restore can hand the sentry a file, that of the platform's
// device, which systrap does not have. So the launcher passes the name as this file,
// and the sentry sets it in each restored task before the task runs any code.

// A namer is the launcher's view of the platform.
type namer struct {
	platform.Constructor
	name string // empty means that there is no device
}

func (n *namer) register() (err error) {
	if n.Constructor, err = platform.Lookup("systrap"); err == nil {
		platform.Register("systrap", n)
	}
	return err
}

// OpenDevice implements [platform.Constructor].
func (n *namer) OpenDevice(path string) (*fd.FD, error) {
	if n.name == "" {
		return n.Constructor.OpenDevice(path)
	}
	f, err := unix.MemfdCreate("postern-name", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make file of the host name: %w", err)
	}
	if _, err := unix.Pwrite(f, []byte(n.name), 0); err != nil {
		unix.Close(f)
		return nil, fmt.Errorf("write host name: %w", err)
	}
	return fd.New(f), nil
}

// New implements [platform.Constructor]. The sentry calls it at its start and at a
// restore.
func (s *systrap) New(o platform.Options) (platform.Platform, error) {
	s.prepare()
	p, err := s.Constructor.New(o)
	if err != nil || o.DeviceFile == nil || o.DeviceFile.FD() < 0 {
		return p, err
	}
	defer o.DeviceFile.Close()
	b := make([]byte, linux.UTSLen)
	n, err := unix.Pread(o.DeviceFile.FD(), b, 0)
	if err != nil {
		return nil, fmt.Errorf("read host name: %w", err)
	}
	return &naming{Platform: p, name: string(b[:n])}, nil
}

// naming is a platform that names the tasks of a restore.
type naming struct {
	platform.Platform
	name string
	runs atomic.Bool // a restored task runs, so there are no further ones
}

// NewContext implements [platform.Platform].
func (n *naming) NewContext(ctx context.Context) platform.Context {
	c := n.Platform.NewContext(ctx)
	if n.runs.Load() {
		return c
	}
	return &unnamed{Context: c, naming: n}
}

// unnamed is the context of a restored task.
type unnamed struct {
	platform.Context
	naming *naming
	done   bool // only the task itself uses it
}

// Switch implements [platform.Context]. A task that runs code has always called it.
func (u *unnamed) Switch(ctx context.Context, mm platform.MemoryManager, ac *arch.Context64, cpu int32) (*linux.SignalInfo, hostarch.AccessType, error) {
	if !u.done {
		u.done = true
		u.naming.runs.Store(true)
		if uts := kernel.UTSNamespaceFromContext(ctx); uts != nil {
			// As gVisor does: a name that a program inside has set stays.
			uts.RestoreSpecValues(u.naming.name, "")
			uts.DecRef(ctx)
		}
	}
	return u.Context.Switch(ctx, mm, ac, cpu)
}
