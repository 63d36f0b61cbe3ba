package gvisor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
)

// Usage implements [sandbox.Runtime]. It asks the host's kernel and not the
// sandbox, which might lie.
func (r *Runtime) Usage(ctx context.Context, id string) (u sandbox.Usage, err error) {
	if !idPattern.MatchString(id) {
		return u, fmt.Errorf("measure sandbox %q: %w", id, sandbox.ErrNotFound)
	}
	if err := ctx.Err(); err != nil {
		return u, fmt.Errorf("measure sandbox %s: %w", id, err)
	}
	pids, err := r.cgroups.pids(id)
	if err != nil {
		return u, fmt.Errorf("measure sandbox %s: %w", id, err)
	}
	if len(pids) == 0 || r.saved(id) {
		return u, fmt.Errorf("measure sandbox %s: %w", id, sandbox.ErrNotFound)
	}
	if u.CPU, err = r.cgroups.cpuUsed(id); err != nil {
		return u, fmt.Errorf("measure sandbox %s: %w", id, err)
	}
	if u.Memory, err = r.cgroups.memoryUsed(id); err != nil {
		return u, fmt.Errorf("measure sandbox %s: %w", id, err)
	}
	if u.MemoryMost, err = r.cgroups.memoryMost(id); err != nil {
		return u, fmt.Errorf("measure sandbox %s: %w", id, err)
	}
	u.MemoryKills = r.cgroups.oomKills(id)
	u.Disk = written(pids)
	return u, nil
}

// written returns the size of the unnamed file that holds what a sandbox has
// written: the largest unnamed regular file that its sentry has open on a disk. It
// is 0 if the sentry has ended.
func written(pids []int) (most int64) {
	for _, p := range pids {
		proc := "/proc/" + strconv.Itoa(p)
		cmd, err := os.ReadFile(filepath.Join(proc, "cmdline"))
		if name, _, _ := strings.Cut(string(cmd), "\x00"); err != nil || name != launch.Sentry {
			continue
		}
		fds, err := os.ReadDir(filepath.Join(proc, "fd"))
		if err != nil || len(fds) == 0 {
			continue
		}
		for _, fd := range fds {
			file := filepath.Join(proc, "fd", fd.Name())
			// The sandbox's memory is an unnamed file, too.
			if l, err := os.Readlink(file); err != nil || !strings.Contains(l, launch.Filestore) {
				continue
			}
			var st unix.Stat_t
			if unix.Stat(file, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink == 0 {
				most = max(most, st.Blocks*512)
			}
		}
		return most // the stubs have the sentry's name
	}
	return most
}

func readNumber(file string) (int64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

// readField returns the number after name in a file with lines "name number".
func readField(file, name string) (int64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for l := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(l), name+" "); ok {
			return strconv.ParseInt(v, 10, 64)
		}
	}
	return 0, fmt.Errorf("read %s: no %s", file, name)
}

// cpuUsed returns the processor time of a sandbox.
func (g *cgroups) cpuUsed(id string) (time.Duration, error) {
	if g.v2 {
		µs, err := readField(g.file(id, "cpu", "cpu.stat"), "usage_usec")
		return time.Duration(µs) * time.Microsecond, err
	}
	ns, err := readNumber(g.file(id, "cpuacct", "cpuacct.usage"))
	return time.Duration(ns), err
}

// memoryRoom returns how many more bytes may be charged to a sandbox before its limit
// is reached. The page cache counts as used, even if the kernel would reclaim it.
func (g *cgroups) memoryRoom(id string) (int64, error) {
	name := "memory.usage_in_bytes"
	if g.v2 {
		name = "memory.current"
	}
	used, err := readNumber(g.file(id, "memory", name))
	if err != nil {
		return 0, err
	}
	limit, err := g.memoryMost(id)
	return limit - used, err
}

// memoryMost returns how many bytes may be charged to a sandbox.
func (g *cgroups) memoryMost(id string) (int64, error) {
	if g.v2 {
		return readNumber(g.file(id, "memory", "memory.max"))
	}
	return readNumber(g.file(id, "memory", "memory.limit_in_bytes"))
}

// memoryUsed returns the memory of a sandbox without the part of the page cache
// that the kernel would reclaim.
func (g *cgroups) memoryUsed(id string) (int64, error) {
	name := "memory.usage_in_bytes"
	if g.v2 {
		name = "memory.current"
	}
	used, err := readNumber(g.file(id, "memory", name))
	if err != nil {
		return 0, err
	}
	idle, err := readField(g.file(id, "memory", "memory.stat"), "inactive_file")
	if err != nil {
		return 0, err
	}
	return max(0, used-idle), nil
}
