package gvisor

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// cgroups locates this machine's cgroups for sandboxes: one directory per sandbox
// in one tree (version 2), or in one tree per controller (version 1). Membership in
// the cgroup says which processes belong to a sandbox: a process cannot leave it,
// and unlike a process ID it cannot come to mean another process.
type cgroups struct {
	v2     bool
	roots  map[string]string // controller → mount point; the same for all in version 2
	parent string            // path below each root of the directories that are only ours

	// name returns the name of a sandbox's directories, see Runtime.name. Nil means its ID.
	name func(id string) string
}

// controllers limit a sandbox. In version 1 one more measures processor time.
var (
	controllers  = []string{"memory", "cpu", "pids"}
	controllers1 = []string{"memory", "cpu", "pids", "cpuacct"}
)

const cpuPeriod = 100_000 // microseconds

// ownCgroups finds the cgroup file systems of this process. The kernel's list of
// mounts may miss some if mounts change while it is read, so a missing one is
// looked for again.
func ownCgroups(parent string) (g *cgroups, err error) {
	for range 3 {
		b, readErr := os.ReadFile("/proc/self/mountinfo")
		if readErr != nil {
			return nil, fmt.Errorf("read mounts: %w", readErr)
		}
		if g, err = findCgroups(bytes.NewReader(b), parent); err == nil {
			break
		}
	}
	return g, err
}

// findCgroups parses the mounts of this process (/proc/self/mountinfo).
func findCgroups(mountinfo io.Reader, parent string) (*cgroups, error) {
	v1 := map[string]string{}
	sc := bufio.NewScanner(mountinfo)
	for sc.Scan() {
		before, after, ok := strings.Cut(sc.Text(), " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		if !ok || len(f) < 5 || len(g) < 3 {
			continue
		}
		dir := strings.ReplaceAll(f[4], `\040`, " ")
		switch g[0] {
		case "cgroup2":
			// Beside those of version 1 there may be a version 2 mount without
			// controllers.
			have, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
			if err != nil || !containsAll(strings.Fields(string(have)), controllers) {
				continue
			}
			roots := map[string]string{}
			for _, c := range controllers {
				roots[c] = dir
			}
			return &cgroups{v2: true, roots: roots, parent: parent}, nil
		case "cgroup":
			for o := range strings.SplitSeq(g[2], ",") {
				if slices.Contains(controllers1, o) && v1[o] == "" {
					v1[o] = dir
				}
			}
		}
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	for _, c := range controllers1 {
		if v1[c] == "" {
			return nil, fmt.Errorf("find cgroups: no mount has the controller %q, without which a sandbox cannot be limited; "+
				"mount cgroup2 at /sys/fs/cgroup with memory, cpu and pids, or run the container privileged with the host's cgroups", c)
		}
	}
	return &cgroups{roots: v1, parent: parent}, nil
}

func containsAll(have, want []string) bool {
	for _, w := range want {
		if !slices.Contains(have, w) {
			return false
		}
	}
	return true
}

// trees returns the distinct parents of our cgroups.
func (g *cgroups) trees() []string {
	var out []string
	for _, c := range controllers1 {
		if g.roots[c] == "" { // version 2 measures with the same controller
			continue
		}
		if d := filepath.Join(g.roots[c], g.parent); !slices.Contains(out, d) {
			out = append(out, d)
		}
	}
	return out
}

func (g *cgroups) dirs(id string) []string {
	t := g.trees()
	if g.name != nil {
		id = g.name(id)
	}
	for i := range t {
		t[i] = filepath.Join(t[i], id)
	}
	return t
}

func (g *cgroups) file(id, controller, name string) string {
	if g.name != nil {
		id = g.name(id)
	}
	return filepath.Join(g.roots[controller], g.parent, id, name)
}

// prepare creates the parents of our cgroups, and so shows that it can.
func (g *cgroups) prepare() error {
	for _, t := range g.trees() { // another process may remove a parent during MkdirAll
		err := os.MkdirAll(t, 0o755)
		for try := 0; errors.Is(err, fs.ErrNotExist) && try < 100; try++ {
			err = os.MkdirAll(t, 0o755)
		}
		if err != nil {
			return fmt.Errorf("make cgroup: %w; postern needs root and a writable cgroup file system", err)
		}
	}
	if !g.v2 {
		return nil
	}
	root := g.roots["memory"]
	d := root
	for _, p := range append(strings.Split(g.parent, "/"), "") {
		err := enable(d)
		if errors.Is(err, unix.EBUSY) && d == root {
			// A cgroup with processes of its own cannot delegate controllers. In a
			// container the visible root is such a cgroup, and we are in it. Move
			// its processes to a child, as nested container engines do.
			if err = evacuate(root); err == nil {
				err = enable(d)
			}
		}
		if err != nil {
			return fmt.Errorf("enable cgroup controllers in %s: %w; no process may be in that cgroup (with systemd, run postern in a unit with Delegate=yes)", d, err)
		}
		d = filepath.Join(d, p)
	}
	return nil
}

func enable(dir string) error {
	return os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+strings.Join(controllers, " +")), 0)
}

func evacuate(root string) error {
	leaf := filepath.Join(root, "postern-server")
	if err := os.MkdirAll(leaf, 0o755); err != nil {
		return fmt.Errorf("make cgroup: %w", err)
	}
	pids, err := readPids(filepath.Join(root, "cgroup.procs"))
	if err != nil {
		return err
	}
	for _, p := range pids {
		err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte(strconv.Itoa(p)), 0)
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("move process %d: %w", p, err)
		}
	}
	return nil
}

// tidy removes the parents if they are empty, so that a runtime without sandboxes
// leaves nothing behind.
func (g *cgroups) tidy() {
	for _, t := range g.trees() {
		_ = os.Remove(t) // EBUSY if they are in use
	}
}

// limits are the resource limits of a sandbox.
type limits struct {
	memory int64 // bytes
	pids   int64 // threads
}

// create creates a sandbox's cgroup without processes.
func (g *cgroups) create(id string, l limits) error {
	for _, d := range g.dirs(id) {
		// An existing one may hold processes of another sandbox.
		err := os.Mkdir(d, 0o755)
		for try := 0; errors.Is(err, fs.ErrNotExist) && try < 100; try++ {
			// The parent is removed with the last sandbox, possibly just now.
			if err = g.prepare(); err == nil {
				err = os.Mkdir(d, 0o755)
			}
		}
		if err != nil {
			return fmt.Errorf("make cgroup: %w", err)
		}
	}
	memory, pids := strconv.FormatInt(l.memory, 10), strconv.FormatInt(l.pids, 10)
	set := [][3]string{{"pids", "pids.max", pids}, {"memory", "memory.max", memory}, {"memory", "memory.oom.group", "1"}}
	may := [][3]string{{"memory", "memory.swap.max", "0"}}
	if !g.v2 {
		set = [][3]string{{"pids", "pids.max", pids}, {"memory", "memory.limit_in_bytes", memory}}
		may = [][3]string{{"memory", "memory.memsw.limit_in_bytes", memory}}
	}
	for _, s := range set {
		if err := os.WriteFile(g.file(id, s[0], s[1]), []byte(s[2]), 0); err != nil {
			return fmt.Errorf("limit cgroup: %w", err)
		}
	}
	for _, s := range may { // missing if the kernel does not account for swap
		if err := os.WriteFile(g.file(id, s[0], s[1]), []byte(s[2]), 0); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("limit cgroup: %w", err)
		}
	}
	return nil
}

// limitCPU is separate from create: the work of starting is ours, and with half a
// core it would take twice as long.
func (g *cgroups) limitCPU(id string, cpus float64) error {
	quota := strconv.FormatInt(max(1000, int64(cpus*cpuPeriod)), 10) // the kernel's minimum is 1 ms
	if g.v2 {
		return os.WriteFile(g.file(id, "cpu", "cpu.max"), []byte(quota+" "+strconv.Itoa(cpuPeriod)), 0)
	}
	return errors.Join(
		os.WriteFile(g.file(id, "cpu", "cpu.cfs_period_us"), []byte(strconv.Itoa(cpuPeriod)), 0),
		os.WriteFile(g.file(id, "cpu", "cpu.cfs_quota_us"), []byte(quota), 0))
}

// procsFiles returns the files through which a process enters the cgroup.
func (g *cgroups) procsFiles(id string) []string {
	f := g.dirs(id)
	for i := range f {
		f[i] = filepath.Join(f[i], "cgroup.procs")
	}
	return f
}

// oomKills returns how often the kernel killed a process of the cgroup for lack of
// memory.
func (g *cgroups) oomKills(id string) int64 {
	name := "memory.oom_control"
	if g.v2 {
		name = "memory.events"
	}
	b, err := os.ReadFile(g.file(id, "memory", name))
	if err != nil {
		return 0
	}
	for l := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(l), "oom_kill "); ok {
			n, _ := strconv.ParseInt(v, 10, 64) // written by the kernel
			return n
		}
	}
	return 0
}

// ids returns the IDs of the sandboxes that have any part of a cgroup.
func (g *cgroups) ids() ([]string, error) {
	var out []string
	for _, t := range g.trees() {
		es, err := os.ReadDir(t)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list cgroups: %w", err)
		}
		for _, e := range es {
			if e.IsDir() && !slices.Contains(out, e.Name()) {
				out = append(out, e.Name())
			}
		}
	}
	return out, nil
}

func readPids(file string) ([]int, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) { // removed in between
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var out []int
	for f := range strings.FieldsSeq(string(b)) {
		p, err := strconv.Atoi(f)
		if err != nil {
			return nil, fmt.Errorf("list processes: %w", err)
		}
		out = append(out, p)
	}
	return out, nil
}

// pids returns the processes of a sandbox.
func (g *cgroups) pids(id string) ([]int, error) {
	var out []int
	for _, f := range g.procsFiles(id) {
		ps, err := readPids(f)
		if err != nil {
			return nil, err
		}
		for _, p := range ps {
			if p != 0 && !slices.Contains(out, p) { // 0 stands for a process of another PID namespace
				out = append(out, p)
			}
		}
	}
	return out, nil
}

// kill kills every process of the sandbox and returns when none is left. New ones
// may appear in between, so it repeats until there are none.
func (g *cgroups) kill(ctx context.Context, id string) error {
	held := map[int]int{} // process ID → pidfd
	ends := time.Duration(0)
	defer func() {
		for _, fd := range held {
			reap(fd, ends)
			unix.Close(fd)
		}
	}()
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		pids, err := g.pids(id)
		if err == nil && len(pids) == 0 {
			ends = time.Second // all have left their cgroup, which happens shortly before their end
		}
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, p := range pids {
			if err := g.killOne(id, p, held); err != nil {
				return err
			}
		}
		if g.v2 { // cgroup.kill, since Linux 5.14
			_ = os.WriteFile(g.file(id, "pids", "cgroup.kill"), []byte("1"), 0)
		}
		// Their pidfds tell when they have ended; how long to sleep would be a guess.
		if waitEnded(held, wait); ctx.Err() != nil {
			return fmt.Errorf("end processes %v: %w", pids, context.Cause(ctx))
		}
	}
}

// signal sends SIGKILL to every process of the sandbox and does not wait for their
// end. Processes that start at the same moment may be missed: kill must follow.
func (g *cgroups) signal(id string) error {
	held := map[int]int{}
	defer func() {
		for _, fd := range held {
			unix.Close(fd)
		}
	}()
	pids, err := g.pids(id)
	for _, p := range pids {
		err = errors.Join(err, g.killOne(id, p, held))
	}
	return err
}

// waitEnded returns when the processes of the pidfds have ended, after within at the
// latest. If they have ended already it sleeps, since the kernel has yet to remove
// them from their cgroup.
func waitEnded(held map[int]int, within time.Duration) {
	begin := time.Now()
	for _, fd := range held {
		for left := within; left > 0 && !hasEnded(fd, int(left.Milliseconds())+1); left = within - time.Since(begin) {
		}
	}
	if time.Since(begin) < time.Millisecond {
		time.Sleep(within)
	}
}

// killOne kills the process p if it belongs to the sandbox. Between reading its ID
// and the signal the process may end, and the ID may be given to another process of
// the machine. So it opens a pidfd first, and checks the cgroup again afterwards.
func (g *cgroups) killOne(id string, p int, held map[int]int) error {
	if _, done := held[p]; done {
		return nil
	}
	fd, err := unix.PidfdOpen(p, 0)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open process %d: %w", p, err)
	}
	pids, err := g.pids(id)
	if err != nil || !slices.Contains(pids, p) {
		unix.Close(fd)
		return err
	}
	held[p] = fd
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", p, err)
	}
	return nil
}

// reap waits for an ended process if it is our child. In a container we may be
// process 1, which inherits all orphans. It waits up to within for a process that
// is about to end.
func reap(pidfd int, within time.Duration) {
	for end := time.Now().Add(within); !hasEnded(pidfd, 10) && time.Now().Before(end); {
	}
	_ = unix.Waitid(unix.P_PIDFD, pidfd, nil, unix.WEXITED|unix.WNOHANG, nil) // ECHILD if it is not our child
}

// remove removes the cgroup of a sandbox without processes. The kernel may keep it
// busy for a moment after the last one has gone.
func (g *cgroups) remove(ctx context.Context, id string) error {
	for _, d := range g.dirs(id) {
		for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
			err := os.Remove(d)
			if err == nil || errors.Is(err, fs.ErrNotExist) {
				break
			}
			if !errors.Is(err, unix.EBUSY) {
				return fmt.Errorf("remove cgroup: %w", err)
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("remove cgroup: %w", err)
			case <-time.After(wait):
			}
			// A launcher may have entered after the kill.
			if err := g.kill(ctx, id); err != nil {
				return err
			}
		}
	}
	g.tidy()
	return nil
}
