package gvisor

import (
	"context"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
)

// TestDangerousSystemCallsAreRefused: what root inside may not do, and a user even less.
func TestDangerousSystemCallsAreRefused(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	_, h := start(t, r, nil)
	for _, c := range []struct{ name, cmd string }{
		{"make a device", "mknod"},
		{"mount a tmpfs", "mount"},
		{"mount a directory elsewhere", "mountbind"},
		{"forge packets", "raw"},
		{"read packets", "packet"},
		{"trace the guest", "ptrace"},
		{"set the clock", "settime"},
		{"load a kernel module", "module"},
		{"raise the limit of processes", "nproc"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, uid := range []int{0, 1000} {
				if got := h.do(t, uid, c.cmd); !strings.Contains(got, "error: operation not permitted") {
					t.Errorf("user %d: got %q, want that it is refused", uid, got)
				}
			}
		})
	}
}

func TestHostIsOutOfReach(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	s, h := start(t, r, nil)
	found := strings.Fields(h.do(t, 0, "escape"))
	// What the root file system has, and nothing of the host's.
	allowed := []string{"usr", "proc", "sys", "dev", "tmp", "mnt", "etc", "var", os.DevNull}
	for _, f := range found {
		kind, _, _ := strings.Cut(f, ":") // "host:" are the guest's standard files
		if !slices.Contains(allowed, f) && !slices.Contains([]string{"pipe", "socket", "host", "anon_inode"}, kind) {
			t.Errorf("found %q", f)
		}
	}
	for _, f := range []string{"/proc/1/root/root", "/proc/1/root" + r.dir(s.ID), r.dir(s.ID), s.Rootfs, "/etc/passwd", "/proc/1/root/etc/passwd", "/sys/fs/cgroup/memory"} {
		if got := h.do(t, 0, "ls", f); !strings.Contains(got, "error:") {
			t.Errorf("list %s: got %q, want an error", f, got)
		}
	}
	if got := h.do(t, 0, "cat", "/proc/1/environ"); strings.Contains(got, "swordfish") {
		t.Errorf("environment of the first process: %q", got)
	}
	for _, f := range []string{"/proc/version", "/proc/cmdline", "/proc/cpuinfo", "/proc/mounts", "/proc/self/mountinfo"} {
		host, _ := os.Hostname()
		if got := h.do(t, 0, "cat", f); strings.Contains(got, r.conf.StateDir) || host != "" && len(host) > 3 && strings.Contains(got, host) {
			t.Errorf("%s tells of the host: %q", f, got)
		}
	}
}

// TestLowerLayerStaysAsItIs: what one sandbox writes, also over what the root
// file system has, is seen by no other and not by the host.
func TestLowerLayerStaysAsItIs(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	a, ha := start(t, r, nil)
	_, hb := start(t, r, nil)
	for _, d := range []string{"/etc", "/tmp"} {
		if got, want := ha.do(t, 0, "fill", d+"/mark", "1"), "wrote 1, <nil>"; got != want {
			t.Errorf("write in %s: got %q, want %q", d, got, want)
		}
		if got := hb.do(t, 0, "ls", d); strings.Contains(got, "mark") {
			t.Errorf("the neighbour's %s: got %q", d, got)
		}
		if m, _ := filepath.Glob(filepath.Join(a.Rootfs, d, "mark")); len(m) > 0 {
			t.Errorf("on the host: %v", m)
		}
	}
}

// A machine is what a bomb must not use up.
type machine struct {
	memoryMB, diskMB int64 // free
	tasks            int   // of the whole machine
}

func lookAtMachine(t *testing.T, dir string) (m machine) {
	t.Helper()
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(b), "MemAvailable:")
	kb, err := strconv.ParseInt(strings.Fields(after)[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	m.memoryMB = kb >> 10
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	m.diskMB = int64(st.Bavail) * st.Bsize >> 20
	b, err = os.ReadFile("/proc/loadavg")
	if err != nil {
		t.Fatal(err)
	}
	_, total, _ := strings.Cut(strings.Fields(string(b))[3], "/")
	if m.tasks, err = strconv.Atoi(total); err != nil {
		t.Fatal(err)
	}
	return m
}

// TestBombsStayInTheSandbox lets one sandbox do its worst for some seconds while a neighbour
// must answer, and the machine must keep what it has. Others may work on the
// machine meanwhile, so its bounds leave room.
func TestBombsStayInTheSandbox(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	const memoryMB, diskMB, processes = 256, 64, 128
	_, neighbour := start(t, r, nil)
	for _, c := range []struct {
		name string
		uid  int
		args []string
		ends string // why the sandbox ends, if it does; else it must answer
	}{
		{"fork bomb", 1000, []string{"bomb"}, ""},
		{"fork bomb of root", 0, []string{"bomb"}, "any"}, // the guest may be among those that get no process
		{"fork bomb of many users", 0, []string{"spread"}, "any"},
		{"memory bomb", 1000, []string{"memory", "100000"}, reasonMemory},
		{"root file system", 0, []string{"fill", "/var/x", "1000"}, ""},
		{"/tmp", 1000, []string{"fill", "/tmp/x", "1000"}, ""},
		{"unlinked file", 1000, []string{"fill", "/tmp/x", "1000", "unlink"}, ""},
		{"/dev/shm", 1000, []string{"fill", "/dev/shm/x", "1000"}, ""},
		{"/dev", 0, []string{"fill", "/dev/x", "1000"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, h := start(t, r, func(s *sandbox.Spec) { s.MemoryMB, s.DiskMB, s.Processes = memoryMB, diskMB, processes })
			before := lookAtMachine(t, r.conf.StateDir)
			limit := 6 * time.Second
			if c.args[0] == "fill" || c.ends == reasonMemory { // they come to an end
				limit = 2 * time.Minute
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			if c.ends == reasonMemory {
				go func() { // nobody answers any more when it has ended
					_, _ = r.Wait(ctx, s.ID)
					cancel()
				}()
			}
			said := make(chan string, 1)
			go func() {
				q := url.Values{"uid": {strconv.Itoa(c.uid)}, "a": c.args}
				got, _ := h.get(ctx, "/do?"+q.Encode()) // a bomb has no answer
				said <- got
			}()
			var slowest time.Duration
			worst := before
			for done := false; !done; {
				begin := time.Now()
				neighbour.ping(t)
				slowest = max(slowest, time.Since(begin))
				m := lookAtMachine(t, r.conf.StateDir)
				worst.memoryMB, worst.diskMB, worst.tasks = min(worst.memoryMB, m.memoryMB), min(worst.diskMB, m.diskMB), max(worst.tasks, m.tasks)
				select {
				case got := <-said:
					done = true
					if c.args[0] == "fill" {
						n, full := strings.CutPrefix(got, "wrote ")
						n, _, _ = strings.Cut(n, ",")
						wrote, err := strconv.Atoi(n)
						if !full || err != nil || wrote > memoryMB/2+1 || !strings.Contains(got, "no space left on device") {
							t.Errorf("filled: got %q, want no space left", got)
						}
					}
				case <-time.After(50 * time.Millisecond):
				}
			}
			t.Logf("neighbour's slowest answer %v; free memory %d → %d MiB, free disk %d → %d MiB, tasks %d → %d", slowest,
				before.memoryMB, worst.memoryMB, before.diskMB, worst.diskMB, before.tasks, worst.tasks)
			wait := map[string]time.Duration{"": 2 * time.Second, "any": time.Millisecond, reasonMemory: 2 * time.Minute}[c.ends]
			if c.args[0] == "fill" {
				wait = 300 * time.Millisecond // nothing goes on in it
			}
			alive, stop := context.WithTimeout(t.Context(), wait)
			defer stop()
			reason, err := r.Wait(alive, s.ID)
			switch {
			case c.ends == "" && !errors.Is(err, context.DeadlineExceeded):
				t.Errorf("ended: %q, %v, want that it goes on", reason, err)
			case c.ends == "":
				h.ping(t)
			case c.ends == "any":
				t.Logf("ended: %q, %v", reason, err)
			case reason != c.ends:
				t.Errorf("ended: got %q, %v, want %q", reason, err, c.ends)
			}
			begin := time.Now()
			if err := r.Stop(t.Context(), s.ID); err != nil {
				t.Errorf("stop: %v", err)
			}
			t.Logf("stopped in %v", time.Since(begin))
			// What the sandbox took it has given back; what others on the machine
			// have begun to take meanwhile they mostly still have.
			after := lookAtMachine(t, r.conf.StateDir)
			const room = 3000 // what others may have taken for just as long
			if lost := min(before.memoryMB, after.memoryMB) - worst.memoryMB; lost > memoryMB+overheadMB(processes)+room {
				t.Errorf("the machine lost %d MiB of memory", lost)
			}
			if lost := min(before.diskMB, after.diskMB) - worst.diskMB; lost > diskMB+room {
				t.Errorf("the machine lost %d MiB of disk", lost)
			}
			if more := worst.tasks - max(before.tasks, after.tasks); int64(more) > hostLimits(s).pids+1000 {
				t.Errorf("the machine had %d more tasks", more)
			}
		})
	}
	neighbour.ping(t)
}

// TestDiskIsOneBudget: the root file system and /tmp share what may be
// written, and what is removed can be written again.
func TestDiskIsOneBudget(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	_, h := start(t, r, func(s *sandbox.Spec) { s.DiskMB = 32 })
	first := h.do(t, 0, "fill", "/var/a", "20")
	second := h.do(t, 0, "fill", "/tmp/b", "20")
	if first != "wrote 20, <nil>" || !strings.Contains(second, "no space left") {
		t.Errorf("got %q and %q, want the second to find no space", first, second)
	}
	if got := h.do(t, 0, "fill", "/var/a", "10"); got != "wrote 10, <nil>" {
		t.Errorf("after making room: got %q", got)
	}
}

func TestWhyASandboxEnds(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	for _, c := range []struct {
		name string
		end  func(t *testing.T, s sandbox.Spec, h *host)
		want string
	}{
		{"the guest exits", func(t *testing.T, _ sandbox.Spec, h *host) {
			// The sandbox may end before the connection breaks, so the request may hang.
			go func() { _, _ = h.get(t.Context(), "/exit") }()
		}, "the guest exited with status 7"},
		{"the sentry is killed", func(t *testing.T, s sandbox.Spec, _ *host) {
			if err := unix.Kill(instanceOf(r, s.ID).sentry, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}, reasonKilled},
		{"stopped", func(t *testing.T, s sandbox.Spec, _ *host) {
			go func() {
				if err := r.Stop(context.Background(), s.ID); err != nil {
					t.Error(err)
				}
			}()
		}, reasonStopped},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, h := start(t, r, nil)
			i := instanceOf(r, s.ID)
			c.end(t, s, h)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			select {
			case <-i.ended:
			case <-ctx.Done():
				t.Fatal("it does not end")
			}
			if i.reason != c.want {
				t.Errorf("got %q, want %q", i.reason, c.want)
			}
		})
	}
}

// TestProcessorsAreLimited: two busy threads get the half core that they may.
func TestProcessorsAreLimited(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	s, h := start(t, r, func(s *sandbox.Spec) { s.CPUs = 0.5 })
	used := func() (ticks int) {
		pids, err := r.cgroups.pids(s.ID)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range pids {
			b, _ := os.ReadFile("/proc/" + strconv.Itoa(p) + "/stat")
			_, after, ok := strings.Cut(string(b), ") ")
			if f := strings.Fields(after); ok && len(f) > 12 {
				user, _ := strconv.Atoi(f[11])
				system, _ := strconv.Atoi(f[12])
				ticks += user + system
			}
		}
		return ticks
	}
	for range 2 {
		go func() { _, _ = h.get(t.Context(), "/do?uid=0&a=spin&a=1h") }()
	}
	busy := used() + 50
	for end := time.Now().Add(2 * time.Minute); used() < busy; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("two that are busy use no processor")
		}
	}
	begin := time.Now() // before the first look: what comes in between makes it less, not more
	before := used()
	time.Sleep(2 * time.Second)
	if got := float64(used()-before) / 100 / time.Since(begin).Seconds(); got > 0.65 {
		t.Errorf("got %.2f cores, want 0.5", got)
	}
}
