package gvisor

import (
	"bufio"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
	"postern/internal/sandbox/sandboxtest"
)

// A preparing is a runtime in which every second restore finds a prepared sandbox.
type preparing struct {
	*Runtime
	t      *testing.T
	starts int
}

func (p *preparing) Start(ctx context.Context, s sandbox.Spec) error {
	if p.starts++; s.From == "" || p.starts%2 == 0 {
		return p.Runtime.Start(ctx, s)
	}
	if _, err := p.Prepare(ctx, []sandbox.Spec{s}); err != nil {
		p.t.Errorf("prepare: %v", err)
	}
	return p.Runtime.Start(ctx, s)
}

// snapshotOf boots a sandbox in r, saves it and removes it.
func snapshotOf(t *testing.T, r *Runtime) string {
	t.Helper()
	s, h := start(t, r, nil)
	if got, err := h.get(t.Context(), "/remember?v=before"); err != nil {
		t.Fatalf("remember: %q, %v", got, err)
	}
	dir := filepath.Join(t.TempDir(), "snapshot")
	if err := r.Save(t.Context(), s.ID, dir, sandbox.SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := r.Stop(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	return dir
}

// prepare has n sandboxes wait in r and returns their names.
func prepare(t *testing.T, r *Runtime, n int) []string {
	t.Helper()
	_, link := newLink(t)
	s := specWith(t, link)
	for more := true; more; {
		var err error
		if more, err = r.Prepare(t.Context(), slices.Repeat([]sandbox.Spec{s}, n)); err != nil {
			t.Fatal(err)
		}
	}
	return waitingIn(r)
}

func waitingIn(r *Runtime) (out []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.prepared {
		out = append(out, p.name)
	}
	return out
}

func TestPreparedSandboxIsClaimed(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	dir := snapshotOf(t, r)
	waiting := prepare(t, r, 2)
	if ids, err := r.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("list: got %v, %v, want that nobody sees what was prepared", ids, err)
	}
	for _, w := range waiting {
		if b, err := os.ReadFile(filepath.Join(r.dir(w), logFile)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("output of what waits: got %q, %v, want that nothing has run", b, err)
		}
	}
	h, link := newLink(t)
	s := specWith(t, link)
	s.From, s.Hostname = dir, "claimer"
	begin := time.Now()
	if err := r.Start(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	t.Logf("restored in %v", time.Since(begin))
	h.ping(t)
	in := inside{t, h}
	if got, err := in.Remembered(); err != nil || got != "before" {
		t.Errorf("memory: got %q, %v", got, err)
	}
	if got, err := in.Hostname(); err != nil || got != "claimer" {
		t.Errorf("host name: got %q, %v, want that of the sandbox", got, err)
	}
	if got := r.name(s.ID); got != waiting[0] {
		t.Errorf("name: got %s, want %s", got, waiting[0])
	}
	if got := waitingIn(r); !slices.Equal(got, waiting[1:]) {
		t.Errorf("waiting: got %v, want %v", got, waiting[1:])
	}
	// Another process finds it by its ID, and leaves it alone.
	next := newRuntime(t, r.conf.StateDir)
	if ids, err := next.List(t.Context()); err != nil || !slices.Equal(ids, []string{s.ID}) {
		t.Errorf("list of the next process: got %v, %v", ids, err)
	}
	if u, err := next.Usage(t.Context(), s.ID); err != nil || u.Memory < 1<<20 {
		t.Errorf("usage: got %+v, %v", u, err)
	}
	ends := make(chan string, 1)
	go func() {
		reason, err := next.Wait(t.Context(), s.ID)
		if err != nil {
			t.Error(err)
		}
		ends <- reason
	}()
	again := filepath.Join(t.TempDir(), "again")
	if err := next.Save(t.Context(), s.ID, again, sandbox.SaveOptions{Keep: true}); err != nil {
		t.Fatal(err)
	}
	if err := next.Stop(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if got := <-ends; got != reasonStopped {
		t.Errorf("end: got %q", got)
	}
	if err := r.Stop(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if f := footprintOf(t, r); !f.none() {
		t.Errorf("left: %v", f) // the next process has removed what waited
	}
	// What was saved in it is a snapshot like others.
	h, link = newLink(t)
	s = specWith(t, link)
	s.From, s.Hostname = again, "slow"
	if err := r.Start(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	h.ping(t)
	if got, err := (inside{t, h}).Hostname(); err != nil || got != "slow" {
		t.Errorf("host name of a copy: got %q, %v", got, err)
	}
	if err := r.Stop(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
}

// TestKilledServerLeavesNothingPrepared: what waited ends without anybody's help, and
// the next server removes its files.
func TestKilledServerLeavesNothingPrepared(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	from := snapshotOf(t, r)
	id := sandboxtest.NewID()
	killedServerFrom(t, r.conf.StateDir, id, from, func(said *bufio.Reader) {
		for _, want := range []string{"starting\n", "started <nil>\n"} {
			if l, err := said.ReadString('\n'); err != nil || l != want {
				t.Fatalf("the server says %q, %v", l, err)
			}
		}
	})
	claimed := r.name(id)
	if claimed == id {
		t.Fatal("the server has not used what was prepared")
	}
	var left footprint
	others := func() (out []string) {
		left = look(t, r)
		for _, p := range left.processes {
			if strings.Contains(p, "postern-launcher") || strings.Contains(p, " runsc-") && !strings.Contains(p, claimed) {
				out = append(out, p)
			}
		}
		return out
	}
	for end := time.Now().Add(time.Minute); len(others()) > 0 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
	}
	if got := others(); len(got) > 0 {
		t.Errorf("after the kill: got %q, want nothing that waits", got)
	}
	if ids, err := r.List(t.Context()); err != nil || !slices.Equal(ids, []string{id}) {
		t.Errorf("list: got %v, %v, want %v", ids, err, id)
	}
	next := newRuntime(t, r.conf.StateDir)
	if f := look(t, next); len(f.processes) < 3 || slices.ContainsFunc(f.files, func(n string) bool { return preparedPattern.MatchString(n) && n != claimed }) {
		t.Errorf("at the next start: got %v, want the sandbox that runs and nothing else", f)
	}
	if err := next.Stop(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if f := footprintOf(t, next); !f.none() {
		t.Errorf("left: %v", f)
	}
}

// TestPreparedSandboxThatDiesIsNotMissed: a part of one that waits may end; the start
// that would have claimed it works all the same.
func TestPreparedSandboxThatDiesIsNotMissed(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	from := snapshotOf(t, r)
	for _, part := range []string{launch.Sentry, launch.Gofer, launch.Launcher} {
		for _, wait := range []bool{false, true} {
			name := prepare(t, r, 1)[0]
			launcher := strconv.Itoa(r.prepared[0].l.cmd.Process.Pid)
			pids, err := r.cgroups.pids(name)
			if err != nil {
				t.Fatal(err)
			}
			i := slices.IndexFunc(pids, func(p int) bool {
				cmd, _ := os.ReadFile("/proc/" + strconv.Itoa(p) + "/cmdline")
				stat, _ := os.ReadFile("/proc/" + strconv.Itoa(p) + "/stat")
				_, after, _ := strings.Cut(string(stat), ") ") // state, parent
				of := strings.Fields(after)
				// The sentry is a child of the launcher, and its stubs are its own.
				return strings.HasPrefix(string(cmd), part) && (part != launch.Sentry || len(of) > 1 && of[1] == launcher)
			})
			if i < 0 {
				continue // without a gofer
			}
			if err := unix.Kill(pids[i], unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			awaitEnd(t, pids[i]) // a restore that had begun would fail
			for end := time.Now().Add(time.Minute); wait && len(waitingIn(r)) > 0; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatalf("%s killed: it still waits", part)
				}
			}
			h, link := newLink(t)
			s := specWith(t, link)
			s.From = from
			if err := r.Start(t.Context(), s); err != nil {
				t.Fatalf("%s killed: %v", part, err)
			}
			h.ping(t)
			if err := r.Stop(t.Context(), s.ID); err != nil {
				t.Fatal(err)
			}
			if f := footprintOf(t, r); !f.none() {
				t.Errorf("%s killed: left %v", part, f)
			}
		}
	}
}

// TestPreparedSandboxMustFit: a sandbox with other limits, or one that boots or that
// nobody waits for, is started as if nothing was prepared; and one that fits is
// limited like any other.
func TestPreparedSandboxMustFit(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	from := snapshotOf(t, r)
	volume := t.TempDir()
	waiting := prepare(t, r, 1)
	for _, c := range []struct {
		name   string
		change func(*sandbox.Spec)
	}{
		{"a boot", func(s *sandbox.Spec) { s.From = "" }},
		{"more memory", func(s *sandbox.Spec) { s.MemoryMB *= 2 }},
		{"more processors", func(s *sandbox.Spec) { s.CPUs = 2 }},
		{"more disk", func(s *sandbox.Spec) { s.DiskMB *= 2 }},
		{"more processes", func(s *sandbox.Spec) { s.Processes *= 2 }},
		{"a boot with a volume", func(s *sandbox.Spec) {
			s.From, s.Mounts = "", []sandbox.Mount{{Source: volume, Destination: "/mnt/x"}}
		}},
		{"nobody waits", func(s *sandbox.Spec) { s.Unhurried = true }},
	} {
		_, link := newLink(t)
		s := specWith(t, link)
		s.From = from
		c.change(&s)
		if err := r.Start(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if got := waitingIn(r); !slices.Equal(got, waiting) {
			t.Errorf("%s: got %v that wait, want %v", c.name, got, waiting)
		}
		if err := r.Stop(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
	}
	h, link := newLink(t)
	s := specWith(t, link)
	s.From = from
	if err := r.Start(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	h.ping(t)
	if r.name(s.ID) != waiting[0] {
		t.Errorf("name: got %s, want %s", r.name(s.ID), waiting[0])
	}
	file := map[string][2]string{"memory": {"memory.limit_in_bytes", "memory.max"}, "pids": {"pids.max", "pids.max"}, "cpu": {"cpu.cfs_quota_us", "cpu.max"}}
	for controller, want := range map[string]string{
		"memory": strconv.FormatInt(hostLimits(s).memory, 10), "pids": strconv.FormatInt(hostLimits(s).pids, 10), "cpu": "100000",
	} {
		name := file[controller][0]
		if r.cgroups.v2 {
			name = file[controller][1]
		}
		b, err := os.ReadFile(filepath.Join(r.cgroups.roots[controller], r.cgroups.parent, waiting[0], name))
		if got, _, _ := strings.Cut(strings.TrimSpace(string(b)), " "); err != nil || got != want {
			t.Errorf("limit of %s: got %q, %v, want %s", controller, got, err, want)
		}
	}
	if got, want := h.do(t, 0, "cat", "/proc/meminfo"), "MemTotal:         262144 kB"; !strings.Contains(got, want) {
		t.Errorf("memory: got %q, want %q in it", got, want)
	}
	if got := h.do(t, 0, "fill", "/var/x", strconv.FormatInt(s.DiskMB+4, 10)); !strings.Contains(got, "no space left") {
		t.Errorf("disk: got %q, want that it is full", got)
	}
	if err := r.Stop(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	// The server's end is that none may wait.
	prepare(t, r, 2)
	if _, err := r.Prepare(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if f := footprintOf(t, r); !f.none() {
		t.Errorf("left: %v", f)
	}
}

// TestClaimOfAnotherSandboxIsRefused: what runs under an ID is not touched, and a link
// that this program has not made means nothing.
func TestClaimOfAnotherSandboxIsRefused(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	from := snapshotOf(t, r)
	prepare(t, r, 1)
	_, link := newLink(t)
	s := specWith(t, link)
	s.From = from
	if err := os.Mkdir(r.dir(s.ID), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context(), s); !errors.Is(err, fs.ErrExist) {
		t.Errorf("got %v, want that it exists", err)
	}
	if err := r.Stop(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if f := footprintOf(t, r); !f.none() {
		t.Errorf("left: %v", f)
	}
	for _, at := range []string{"../" + newPreparedName(), "/etc", sandboxtest.NewID()} {
		id := sandboxtest.NewID()
		if err := os.Symlink(at, r.dir(id)); err != nil {
			t.Fatal(err)
		}
		if got := r.name(id); got != id {
			t.Errorf("%s: got %s", at, got)
		}
	}
}

// TestHostileSnapshotInAPreparedSandbox: one that cannot be restored fails the start,
// runs nothing and leaves nothing; the next claim is not the same sandbox.
func TestHostileSnapshotInAPreparedSandbox(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	good := snapshotOf(t, r)
	bad := filepath.Join(t.TempDir(), "bad")
	if err := os.CopyFS(bad, os.DirFS(good)); err != nil {
		t.Fatal(err)
	}
	for _, name := range snapshotFiles(kindMemory)[:2] { // the kernel's state and the list of pages
		if err := os.WriteFile(filepath.Join(bad, name), []byte(strings.Repeat("hostile", 1000)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	waiting := prepare(t, r, 2)
	_, link := newLink(t)
	s := specWith(t, link)
	s.From = bad
	if err := r.Start(t.Context(), s); err == nil || strings.Contains(err.Error(), "not started within") {
		t.Errorf("got %v, want at once that it cannot be restored", err)
	}
	if got := waitingIn(r); !slices.Equal(got, waiting[1:]) {
		t.Errorf("waiting: got %v, want %v", got, waiting[1:])
	}
	h, link := newLink(t)
	s = specWith(t, link)
	s.From = good
	if err := r.Start(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	h.ping(t)
	if got := r.name(s.ID); got != waiting[1] {
		t.Errorf("name: got %s, want %s", got, waiting[1])
	}
	if err := r.Stop(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if f := footprintOf(t, r); !f.none() {
		t.Errorf("left: %v", f)
	}
}
