package gvisor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
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

// A footprint is what sandboxes of a runtime have on this machine.
type footprint struct{ processes, mounts, cgroups, files []string }

func (f footprint) String() string {
	return fmt.Sprintf("processes %q, mounts %q, cgroups %q, files %q", f.processes, f.mounts, f.cgroups, f.files)
}

func (f footprint) none() bool {
	return len(f.processes)+len(f.mounts)+len(f.cgroups)+len(f.files) == 0
}

// footprintOf is look, but for processes that have been killed and are not gone
// from the list of them all yet.
func footprintOf(t *testing.T, r *Runtime) footprint {
	t.Helper()
	f := look(t, r)
	for end := time.Now().Add(30 * time.Second); len(f.processes) > 0 && len(f.cgroups) == 0 && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		f.processes = look(t, r).processes
	}
	return f
}

// look looks at the machine without the runtime's help: at every process and
// every mount.
func look(t *testing.T, r *Runtime) (f footprint) {
	t.Helper()
	hash := filepath.Base(r.cgroups.parent)
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		cmd, _ := os.ReadFile(filepath.Join(p, "cmdline")) // it may end meanwhile
		cg, _ := os.ReadFile(filepath.Join(p, "cgroup"))
		stat, _ := os.ReadFile(filepath.Join(p, "stat"))
		_, after, _ := strings.Cut(string(stat), ") ") // state, parent
		of := strings.Fields(after)
		ours := len(of) > 1 && of[1] == strconv.Itoa(os.Getpid())
		if len(of) > 0 && of[0] == "Z" && !ours {
			continue // it has ended; who inherited it is in no hurry
		}
		launcher := ours && strings.HasPrefix(string(cmd), launch.Launcher)
		if launcher || strings.Contains(string(cmd), r.conf.StateDir) || strings.Contains(string(cg), hash) {
			f.processes = append(f.processes, filepath.Base(p)+" "+strings.ReplaceAll(string(cmd), "\x00", " "))
		}
	}
	m, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(m)) {
		if strings.Contains(l, r.conf.StateDir) || strings.Contains(l, "runsc") || strings.Contains(l, "gvisor") {
			f.mounts = append(f.mounts, l)
		}
	}
	for _, tree := range r.cgroups.trees() {
		es, err := os.ReadDir(tree)
		if err == nil {
			f.cgroups = append(f.cgroups, tree)
		}
		for _, e := range es {
			if e.IsDir() {
				f.cgroups = append(f.cgroups, filepath.Join(tree, e.Name()))
			}
		}
	}
	es, err := os.ReadDir(r.conf.StateDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		f.files = append(f.files, e.Name())
	}
	for _, dir := range []string{"/run", "/tmp", "/var/run"} { // where gVisor goes if it must
		s, _ := filepath.Glob(dir + "/runsc-i*.sock")
		f.files = append(f.files, s...)
	}
	links, err := os.ReadDir(r.conf.IDDir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range links {
		if at, err := os.Readlink(filepath.Join(r.conf.IDDir, e.Name())); err == nil && filepath.Dir(at) == r.conf.StateDir {
			f.files = append(f.files, "user id "+e.Name())
		}
	}
	return f
}

// childMain is a server that starts a sandbox, says so, and is killed.
func childMain() {
	r, err := New(slog.New(slog.DiscardHandler), Config{StateDir: os.Getenv("GVISOR_TEST_CHILD")})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	s := sandbox.Spec{
		ID: os.Args[1], Rootfs: os.Args[2], Image: sandbox.Image{Root: os.Args[3], Guest: os.Args[4]}, Hostname: "box", CPUs: 1, MemoryMB: 128, DiskMB: 16, Processes: 64,
		Link: os.NewFile(uintptr(p[1]), "link"), From: os.Getenv("GVISOR_TEST_FROM"),
	}
	if s.From != "" {
		for range 2 {
			if _, err := r.Prepare(context.Background(), []sandbox.Spec{s, s}); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
		}
	}
	fmt.Println("starting")
	err = r.Start(context.Background(), s)
	if err == nil {
		err = keepGate(r, s.ID)
	}
	fmt.Println("started", err)
	time.Sleep(10 * time.Minute)
	os.Exit(0)
}

// keepGate sends a duplicate of a sandbox's gate to the test, which never receives it. The
// duplicate stays open in the socket's queue, as it would in a keeper.
func keepGate(r *Runtime, id string) error {
	g, err := r.Gate(id)
	if err != nil {
		return err
	}
	defer g.Close()
	return unix.Sendmsg(3, []byte{0}, unix.UnixRights(int(g.Fd())), nil, 0)
}

// killedServer runs childMain and kills it at a moment that until decides.
func killedServer(t *testing.T, state, id string, until func(said *bufio.Reader)) {
	t.Helper()
	killedServerFrom(t, state, id, "", until)
}

// killedServerFrom is killedServer; if from is not empty, it has two sandboxes wait
// before it starts one from this snapshot.
func killedServerFrom(t *testing.T, state, id, from string, until func(said *bufio.Reader)) {
	t.Helper()
	dir, err := rootfs()
	if err != nil {
		t.Fatal(err)
	}
	image, err := rootImage()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command("/proc/self/exe", id, dir, image.Root, image.Guest)
	c.Env = append(os.Environ(), "GVISOR_TEST_CHILD="+state, "GVISOR_TEST_FROM="+from)
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	keeper, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(keeper[0]) })
	theirs := os.NewFile(uintptr(keeper[1]), "keeper")
	defer theirs.Close()
	c.ExtraFiles = []*os.File{theirs}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	until(bufio.NewReader(out))
	if err := c.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = c.Wait() // killed
}

func TestKilledServerLeavesWhatStopRemoves(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	before := footprintOf(t, r)
	id := sandboxtest.NewID()
	killedServer(t, r.conf.StateDir, id, func(said *bufio.Reader) {
		for range 2 {
			l, err := said.ReadString('\n')
			if err != nil || l != "starting\n" && l != "started <nil>\n" {
				t.Fatalf("the server says %q, %v", l, err)
			}
		}
	})
	left := footprintOf(t, r)
	if len(left.processes) < 3 || len(left.cgroups) == 0 || len(left.files) == 0 {
		t.Errorf("after the kill: got %v, want a sandbox that goes on", left)
	}
	ids, err := r.List(t.Context())
	if err != nil || !slices.Equal(ids, []string{id}) {
		t.Errorf("list: got %v, %v, want %v", ids, err, id)
	}
	begin := time.Now()
	for range 2 {
		if err := r.Stop(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("removed in %v", time.Since(begin))
	if after := footprintOf(t, r); after.String() != before.String() || !after.none() {
		t.Errorf("after the stop: got %v, want %v", after, before)
	}
}

// sentryOf is the sentry among the processes of a sandbox: those in which its
// code runs have its name, and are its children.
func sentryOf(t *testing.T, pids []int) int {
	t.Helper()
	for _, p := range pids {
		proc := "/proc/" + strconv.Itoa(p)
		cmd, _ := os.ReadFile(proc + "/cmdline")
		stat, _ := os.ReadFile(proc + "/stat")
		_, after, _ := strings.Cut(string(stat), ") ")
		of := strings.Fields(after)
		if !strings.HasPrefix(string(cmd), launch.Sentry) || len(of) < 2 {
			continue
		}
		if parent, err := strconv.Atoi(of[1]); err == nil && !slices.Contains(pids, parent) {
			return p
		}
	}
	t.Fatalf("no sentry among %v", pids)
	return 0
}

// awaitEnd returns when a process has ended: its files are closed then.
func awaitEnd(t *testing.T, pid int) {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // it is no more
	}
	defer unix.Close(fd)
	for end := time.Now().Add(time.Minute); !hasEnded(fd, 100); {
		if time.Now().After(end) {
			t.Fatalf("process %d does not end", pid)
		}
	}
}

// TestAnotherServerGoesOn: the next process says why a sandbox that a killed
// one started has ended, and its guest may write to its log meanwhile.
func TestAnotherServerGoesOn(t *testing.T) {
	needRoot(t)
	for _, c := range []struct {
		name string
		end  func(t *testing.T, r *Runtime, id string)
		want string
	}{
		{"stopped", func(t *testing.T, r *Runtime, id string) {
			if err := r.Stop(t.Context(), id); err != nil {
				t.Error(err)
			}
		}, reasonStopped},
		{"saved", func(t *testing.T, r *Runtime, id string) {
			if err := r.Save(t.Context(), id, filepath.Join(t.TempDir(), "snapshot"), sandbox.SaveOptions{}); err != nil {
				t.Error(err)
			}
		}, reasonSaved},
		{"killed", func(t *testing.T, r *Runtime, id string) {
			pids, err := r.cgroups.pids(id)
			if err != nil {
				t.Error(err)
			}
			// The sentry first: it would say of what it runs that it was killed.
			sentry := sentryOf(t, pids)
			if err := unix.Kill(sentry, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			awaitEnd(t, sentry)
			for _, p := range pids {
				if p != sentry {
					_ = unix.Kill(p, unix.SIGKILL) // one may end with another
				}
			}
		}, reasonKilled},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRuntime(t, t.TempDir())
			id := sandboxtest.NewID()
			killedServer(t, r.conf.StateDir, id, func(said *bufio.Reader) {
				for range 2 {
					if l, err := said.ReadString('\n'); err != nil || l != "starting\n" && l != "started <nil>\n" {
						t.Fatalf("the server says %q, %v", l, err)
					}
				}
			})
			// The guest says that it is up, perhaps only now.
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			ends := make(chan string)
			go func() {
				reason, err := r.Wait(ctx, id)
				if err != nil {
					t.Error(err)
				}
				ends <- reason
			}()
			for b := []byte(nil); !strings.Contains(string(b), "guest up"); time.Sleep(10 * time.Millisecond) {
				b, _ = os.ReadFile(filepath.Join(r.dir(id), logFile))
				if ctx.Err() != nil {
					t.Fatalf("the log: %q", b)
				}
			}
			c.end(t, r, id)
			if got := <-ends; got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
			if err := r.Stop(t.Context(), id); err != nil {
				t.Error(err)
			}
			if f := footprintOf(t, r); !f.none() {
				t.Errorf("left: %v", f)
			}
			if all := instances(r); len(all) != 0 {
				t.Errorf("instances left: %v", all)
			}
		})
	}
}

func TestServerKilledWhileStarting(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	from := snapshotOf(t, r)
	for i := range 25 {
		id, from := sandboxtest.NewID(), from
		if i%3 != 0 {
			from = ""
		}
		killedServerFrom(t, r.conf.StateDir, id, from, func(said *bufio.Reader) {
			if l, err := said.ReadString('\n'); err != nil || l != "starting\n" {
				t.Fatalf("the server says %q, %v", l, err)
			}
			time.Sleep(rand.N(150 * time.Millisecond))
		})
		ids, err := r.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, id := range ids {
			if err := r.Stop(t.Context(), id); err != nil {
				t.Errorf("stop: %v", err)
			}
		}
		if from != "" {
			newRuntime(t, r.conf.StateDir) // the next server removes what waited
		}
		// A launcher that was about to enter the cgroup finds none and ends.
		var after footprint
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if after = look(t, r); after.none() {
				break
			}
		}
		if !after.none() {
			t.Fatalf("round %d: left %v", i, after)
		}
	}
}

func TestManyStartsLeaveNothing(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	cycle := func() {
		h, link := newLink(t)
		s := specWith(t, link)
		if err := r.Start(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		h.ping(t)
		if err := r.Stop(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
	}
	cycle()
	files, goroutines := holdings(t)
	for range times(t, 50) { // POSTERN_TEST_CYCLES=20 makes it 1000
		cycle()
	}
	holdsNoMore(t, files, goroutines)
	if f := footprintOf(t, r); !f.none() {
		t.Errorf("left: %v", f)
	}
	kids, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
	if err == nil && len(kids) > 0 {
		t.Errorf("children left: %s", kids)
	}
	if all := instances(r); len(all) != 0 {
		t.Errorf("instances left: %v", all)
	}
}

// TestOrphansAreReaped: in a container the server may be process 1 and inherit orphans.
func TestOrphansAreReaped(t *testing.T) {
	needRoot(t)
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0); err != nil {
			t.Error(err)
		}
	}()
	r := newRuntime(t, t.TempDir())
	s, _ := start(t, r, nil)
	i := instanceOf(r, s.ID)
	begin := time.Now()
	if err := r.Stop(t.Context(), s.ID); err != nil { // it would wait in vain for what nobody reaps
		t.Fatal(err)
	}
	t.Logf("stopped in %v", time.Since(begin))
	killedByHand, _ := start(t, r, nil)
	j := instanceOf(r, killedByHand.ID)
	if err := unix.Kill(j.sentry, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-j.ended
	for _, pid := range []int{i.sentry, i.gofer, j.sentry, j.gofer} {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil {
			t.Errorf("a zombie is left: %s", b)
		}
	}
}

func TestSlowStartIsGivenUp(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	for _, limit := range []time.Duration{time.Millisecond, 15 * time.Millisecond, 40 * time.Millisecond} {
		r, err := New(slog.New(slog.NewTextHandler(t.Output(), nil)), Config{StateDir: dir, StartTimeout: limit})
		if err != nil {
			t.Fatal(err)
		}
		_, link := newLink(t)
		s := specWith(t, link)
		begin := time.Now()
		err = r.Start(t.Context(), s)
		if err == nil && limit > time.Millisecond { // a fast machine
			err = r.Stop(t.Context(), s.ID)
			if err != nil {
				t.Fatal(err)
			}
		} else if err == nil || !strings.Contains(err.Error(), "not started within") {
			t.Errorf("start within %v: got %v, want that it was given up", limit, err)
		}
		if took := time.Since(begin); took > time.Minute {
			t.Errorf("start within %v: took %v", limit, took)
		}
		if f := footprintOf(t, r); !f.none() {
			t.Errorf("start within %v: left %v", limit, f)
		}
	}
}

// TestNothingOfOursIsHandedOn: a part of a sandbox has no file, environment
// or capability that it does not need, also if we opened a file carelessly.
func TestNothingOfOursIsHandedOn(t *testing.T) {
	needRoot(t)
	t.Setenv("POSTERN_TEST_SECRET", "swordfish")
	careless, err := unix.Open("/etc/passwd", unix.O_RDONLY, 0) // no O_CLOEXEC
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(careless)
	sock, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0) // no SOCK_CLOEXEC
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(sock)
	ours := map[string]string{} // what we have open, by its name in /proc
	es, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		if l, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && l != os.DevNull && !strings.HasPrefix(l, "anon_inode") {
			ours[l] = e.Name()
		}
	}
	r := newRuntime(t, t.TempDir())
	s, h := start(t, r, nil)
	var host unix.Stat_t
	if err := unix.Stat("/", &host); err != nil {
		t.Fatal(err)
	}
	for _, pid := range processes(t, r, s.ID) {
		proc := "/proc/" + strconv.Itoa(pid)
		cmd, _ := os.ReadFile(proc + "/cmdline")
		name, _, _ := strings.Cut(string(cmd), "\x00")
		fds, err := os.ReadDir(proc + "/fd")
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // one of those in which code runs may end
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			p := proc + "/fd/" + fd.Name()
			l, err := os.Readlink(p)
			if err != nil {
				continue
			}
			if _, ok := ours[l]; ok {
				t.Errorf("%s (%d) has our %s", name, pid, l)
			}
			var st unix.Stat_t
			if unix.Stat(p, &st) == nil && st.Dev == host.Dev && st.Ino == host.Ino {
				t.Errorf("%s (%d) has the host's root directory open", name, pid)
			}
		}
		env, err := os.ReadFile(proc + "/environ")
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(env), "swordfish") || strings.Contains(string(env), "PATH") {
			t.Errorf("%s (%d) has our environment: %q", name, pid, env)
		}
		status, err := os.ReadFile(proc + "/status")
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if name == launch.Gofer {
			continue // it serves files of any owner
		}
		tasks, err := filepath.Glob(proc + "/task/*/status") // each thread has its own
		if err != nil || len(tasks) == 0 && unix.Kill(pid, 0) == nil {
			t.Errorf("%s (%d): threads: %v, %v", name, pid, tasks, err)
		}
		for _, task := range tasks {
			b, err := os.ReadFile(task)
			for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
				if err == nil && !strings.Contains(string(b), set+":\t0000000000000000\n") {
					t.Errorf("%s (%d) has capabilities:\n%s", name, pid, b)
				}
			}
		}
		if !strings.Contains(string(status), "Seccomp:\t2") {
			t.Errorf("%s (%d) has no seccomp filter:\n%s", name, pid, status)
		}
	}
	if env := h.do(t, 0, "env"); strings.Contains(env, "swordfish") {
		t.Errorf("the guest has our environment: %q", env)
	}
}

func TestLogIsBounded(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	s, h := start(t, r, nil)
	// Nobody inside may write there for the guest, root without its capabilities
	// included; so it does it itself.
	if out, err := h.get(t.Context(), "/flood"); err != nil {
		t.Errorf("flood: %q, %v", out, err)
	}
	h.ping(t)
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		st, err := os.Stat(filepath.Join(r.dir(s.ID), "guest.log"))
		if err != nil {
			t.Fatal(err)
		}
		if st.Size() > logBytes || time.Now().After(end) {
			t.Fatalf("log: got %d bytes, want at most %d, and some", st.Size(), logBytes)
		}
		if st.Size() >= 1<<16 { // what was written last may still be on its way
			break
		}
	}
}

// TestDrainKeepsReading: drain reads on after the limit or an error, so that the writer
// never blocks.
func TestDrainKeepsReading(t *testing.T) {
	for _, c := range []struct {
		name string
		w    io.Writer
		want int
	}{{"bounded", &strings.Builder{}, 10}, {"a full disk", failing{}, 0}} {
		t.Run(c.name, func(t *testing.T) {
			r, w := io.Pipe()
			done := make(chan struct{})
			go func() { defer close(done); drain(c.w, r, 10, 0) }()
			for range 100 {
				if _, err := w.Write([]byte("0123456")); err != nil {
					t.Fatal(err)
				}
			}
			w.Close()
			<-done
			if b, ok := c.w.(*strings.Builder); ok && b.Len() != c.want {
				t.Errorf("got %d bytes, want %d", b.Len(), c.want)
			}
		})
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, unix.ENOSPC }

// TestManyDescriptorsOfTheServer: files that the server has open without close-on-exec, as
// gVisor's libraries do, do not shift the descriptors of a sandbox. The sentry needs the
// numbers 253 to 255 and does not start if one of them is taken.
func TestManyDescriptorsOfTheServer(t *testing.T) {
	needRoot(t)
	for range 300 {
		fd, err := unix.Eventfd(0, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
	}
	r := newRuntime(t, t.TempDir())
	s, _ := start(t, r, nil)
	es, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.all[s.ID].sentry))
	if err != nil || len(es) == 0 {
		t.Fatalf("descriptors of the sentry: got %v, %v", es, err)
	}
	for _, e := range es {
		if n, err := strconv.Atoi(e.Name()); err != nil || n > 255 {
			t.Errorf("the sentry has descriptor %s", e.Name())
		}
	}
}
