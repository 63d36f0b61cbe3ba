package gvisor

import (
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	gvisorerofs "gvisor.dev/gvisor/pkg/sentry/fsimpl/erofs"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/runsc/boot"

	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
	"postern/internal/sandbox/sandboxtest"
)

func mustJSON(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// TestNamesAreGVisors: the server is built without the packages that these names
// come from.
func TestNamesAreGVisors(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{callPause, boot.ContMgrPause},
		{callResume, boot.ContMgrResume},
		{callSave, boot.ContMgrCheckpoint},
		{callSaveFiles, boot.ContMgrFSSave},
		{callLayer, boot.FsTarRootfsUpperLayer},
		{callStacks, boot.DebugStacks},
		{callWait, boot.ContMgrWait},
		{launch.AnnotationRootfs, boot.RootfsPrefix},
		{launch.Erofs, gvisorerofs.Name},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
	if got, want := uncompressed, statefile.CompressionLevelNone.ToMetadata(); !maps.Equal(got(), want) {
		t.Errorf("metadata of a save: got %v, want %v", got(), want)
	}
}

func TestFindCgroups(t *testing.T) {
	v2 := t.TempDir()
	if err := os.WriteFile(filepath.Join(v2, "cgroup.controllers"), []byte("cpuset cpu io memory hugetlb pids\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	bare := t.TempDir() // as it stands beside version 1
	if err := os.WriteFile(filepath.Join(bare, "cgroup.controllers"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	line := func(dir, kind, options string) string {
		return "30 25 0:26 / " + dir + " rw,relatime shared:4 - " + kind + " cgroup " + options + "\n"
	}
	v1 := line("/cg/memory", "cgroup", "rw,memory") + line("/cg/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct") + line("/cg/pids", "cgroup", "rw,pids")
	for _, c := range []struct {
		name, mounts string
		trees        []string
		err          string
	}{
		{"version 2", line(v2, "cgroup2", "rw"), []string{v2 + "/p"}, ""},
		{"version 1", v1, []string{"/cg/memory/p", "/cg/cpu,cpuacct/p", "/cg/pids/p"}, ""},
		{"both, 2 without controllers", line(bare, "cgroup2", "rw") + v1, []string{"/cg/memory/p", "/cg/cpu,cpuacct/p", "/cg/pids/p"}, ""},
		{"both, 2 with them", v1 + line(v2, "cgroup2", "rw"), []string{v2 + "/p"}, ""},
		{"one controller missing", line("/cg/memory", "cgroup", "rw,memory"), nil, `no mount has the controller "cpu"`},
		{"none", "22 1 0:20 / / rw - ext4 /dev/vda rw\nnonsense\n", nil, "mount cgroup2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, err := findCgroups(strings.NewReader(c.mounts), "p")
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Fatalf("got %v, want %q in it", err, c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := g.trees(); !slices.Equal(got, c.trees) {
				t.Errorf("got %v, want %v", got, c.trees)
			}
		})
	}
}

// TestCgroup2 checks what is written to which file, in an ordinary directory: the machine
// may not have cgroup version 2.
func TestCgroup2(t *testing.T) {
	root := t.TempDir()
	g := &cgroups{v2: true, roots: map[string]string{"memory": root, "cpu": root, "pids": root}, parent: "postern/abc"}
	if err := g.prepare(); err != nil {
		t.Fatal(err)
	}
	if err := g.create("box", limits{memory: 1 << 28, pids: 99}); err != nil {
		t.Fatal(err)
	}
	if err := g.limitCPU("box", 1.5); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		"cgroup.subtree_control":             "+memory +cpu +pids",
		"postern/cgroup.subtree_control":     "+memory +cpu +pids",
		"postern/abc/cgroup.subtree_control": "+memory +cpu +pids",
		"postern/abc/box/memory.max":         "268435456",
		"postern/abc/box/memory.swap.max":    "0",
		"postern/abc/box/memory.oom.group":   "1",
		"postern/abc/box/pids.max":           "99",
		"postern/abc/box/cpu.max":            "150000 100000",
	} {
		got, err := os.ReadFile(filepath.Join(root, file))
		if err != nil || string(got) != want {
			t.Errorf("%s: got %q, %v, want %q", file, got, err, want)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "postern/abc/box/memory.events"), []byte("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := g.oomKills("box"); got != 2 {
		t.Errorf("kills: got %d, want 2", got)
	}
	if got := g.oomKills("gone"); got != 0 {
		t.Errorf("kills of what is gone: got %d, want 0", got)
	}
	if ids, err := g.ids(); err != nil || !slices.Equal(ids, []string{"box"}) {
		t.Errorf("ids: got %v, %v", ids, err)
	}
	if err := g.create("box", limits{}); err == nil {
		t.Error("a cgroup that is there already: got no error")
	}
}

// TestOnlyItsOwnAreKilled: a process ID may have been reused since it was read.
func TestOnlyItsOwnAreKilled(t *testing.T) {
	root := t.TempDir()
	g := &cgroups{v2: true, roots: map[string]string{"memory": root, "cpu": root, "pids": root}, parent: "p"}
	if err := os.MkdirAll(filepath.Join(root, "p/box"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "p/box/cgroup.procs"), []byte("999999\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := g.killOne("box", os.Getpid(), map[int]int{}); err != nil { // we live on
		t.Error(err)
	}
}

func TestNewSaysWhatToDo(t *testing.T) {
	needRoot(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		conf Config
		want string
	}{
		{"no directory", Config{}, "no state directory"},
		{"a file", Config{StateDir: file}, "make state directory"},
		{"a comma would end gVisor's option", Config{StateDir: filepath.Join(t.TempDir(), "a,b")}, "configure gVisor"},
		{"a cgroup that is not ours", Config{StateDir: t.TempDir(), CgroupParent: "../.."}, "not a relative path"},
		{"negative", Config{StateDir: t.TempDir(), Starts: -1}, "must not be negative"},
	} {
		if _, err := New(slog.New(slog.DiscardHandler), c.conf); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q in it", c.name, err, c.want)
		}
	}
}

// TestNobodyReplacesTheProgramOfSandboxes: the attacker is root on the host, which is
// more than a sentry is that has broken out.
func TestNobodyReplacesTheProgramOfSandboxes(t *testing.T) {
	needRoot(t)
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	f, err := Seal(self)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := New(slog.New(slog.NewTextHandler(t.Output(), nil)), Config{StateDir: t.TempDir(), Program: f})
	if err != nil {
		t.Fatal(err)
	}
	s, _ := start(t, r, nil)
	exe := "/proc/" + strconv.Itoa(r.all[s.ID].sentry) + "/exe"
	if to, err := os.Readlink(exe); err != nil || !strings.HasPrefix(to, "/memfd:postern-runtime") {
		t.Errorf("the sentry executes %q, %v, want the sealed program", to, err)
	}
	for name, attack := range map[string]func() error{
		"open for writing": func() error {
			w, err := os.OpenFile(exe, os.O_WRONLY, 0)
			if err == nil {
				defer w.Close()
				_, err = w.WriteAt([]byte("#!/bin/sh"), 0)
			}
			return err
		},
		"truncate": func() error { return os.Truncate(exe, 0) },
		"write through the server's file": func() error {
			_, err := f.WriteAt([]byte("#!/bin/sh"), 0)
			return err
		},
		"map writable": func() error {
			_, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			return err
		},
		"remove the seals": func() error {
			_, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, 0)
			return err
		},
	} {
		if err := attack(); err == nil {
			t.Errorf("%s: got no error", name)
		}
	}
}

func TestCheckStatic(t *testing.T) {
	if err := checkStatic("/proc/self/exe"); err != nil {
		t.Errorf("this test: %v; run it with CGO_ENABLED=0", err)
	}
	if err := checkStatic("/bin/sh"); err == nil || !strings.Contains(err.Error(), "CGO_ENABLED=0") {
		t.Errorf("a dynamic program: %v", err)
	}
}

func TestStartRefuses(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	for _, c := range []struct {
		name   string
		change func(*sandbox.Spec)
		want   string
	}{
		{"an id that is a path", func(s *sandbox.Spec) { s.ID = "../../../../etc/passwd" }, "id"},
		{"an upper-case id", func(s *sandbox.Spec) { s.ID = "I" + s.ID[1:] }, "id"},
		{"an id with a line end", func(s *sandbox.Spec) { s.ID += "\n" }, "id"},
		{"a relative rootfs", func(s *sandbox.Spec) { s.Rootfs = "rootfs" }, "absolute"},
		{"a relative image", func(s *sandbox.Spec) { s.Image.Root = "image" }, "absolute"},
		{"a relative image of the guest", func(s *sandbox.Spec) { s.Image.Guest = "image" }, "absolute"},
		{"an image of the guest alone", func(s *sandbox.Spec) { s.Image.Root = "" }, "without one of the root"},
		{"a long host name", func(s *sandbox.Spec) { s.Hostname = strings.Repeat("a", 65) }, "hostname"},
		{"no processor", func(s *sandbox.Spec) { s.CPUs = 0 }, "CPUs"},
		{"not a number of processors", func(s *sandbox.Spec) { s.CPUs = math.NaN() }, "CPUs"},
		{"no memory", func(s *sandbox.Spec) { s.MemoryMB = 0 }, "MemoryMB"},
		{"more memory than there are numbers", func(s *sandbox.Spec) { s.MemoryMB = math.MaxInt64 }, "MemoryMB"},
		{"no disk", func(s *sandbox.Spec) { s.DiskMB = 0 }, "DiskMB"},
		{"no process", func(s *sandbox.Spec) { s.Processes = 0 }, "Processes"},
		{"an environment without a name", func(s *sandbox.Spec) { s.Env = []string{"=x"} }, "Env"},
		{"an environment with a zero byte", func(s *sandbox.Spec) { s.Env = []string{"A=\x00"} }, "Env"},
		{"an environment too large", func(s *sandbox.Spec) { s.Env = []string{"A=" + strings.Repeat("x", 2<<20)} }, "Env"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, link := newLink(t)
			s := specWith(t, link)
			c.change(&s)
			err := r.Start(t.Context(), s)
			if !errors.Is(err, sandbox.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q in it", err, c.want)
			}
			if err := link.Close(); !errors.Is(err, os.ErrClosed) {
				t.Error("the link is still open")
			}
		})
	}
	if f := footprintOf(t, r); !f.none() {
		t.Errorf("left: %v", f)
	}
}

func TestStartWithoutGuest(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	_, link := newLink(t)
	s := specWith(t, link)
	s.Rootfs, s.Image = t.TempDir(), sandbox.Image{}
	err := r.Start(t.Context(), s)
	if err == nil || !strings.Contains(err.Error(), "postern-guest") {
		t.Errorf("got %v, want that there is no guest", err)
	}
	if f := footprintOf(t, r); !f.none() {
		t.Errorf("left: %v", f)
	}
}

func TestStopRefusesPaths(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	precious := filepath.Join(r.conf.StateDir, "precious")
	if err := os.Mkdir(precious, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"", ".", "..", "precious", "../" + filepath.Base(r.conf.StateDir)} {
		if err := r.Stop(t.Context(), id); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("stop %q: got %v, want %v", id, err, sandbox.ErrInvalid)
		}
	}
	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
	if ids, err := r.List(t.Context()); err != nil || len(ids) != 0 {
		t.Errorf("list: got %v, %v, want none", ids, err)
	}
	// A cgroup alone, without a directory, is something left.
	id := sandboxtest.NewID()
	if err := os.MkdirAll(r.cgroups.dirs(id)[0], 0o755); err != nil {
		t.Fatal(err)
	}
	if ids, err := r.List(t.Context()); err != nil || !slices.Equal(ids, []string{id}) {
		t.Errorf("list: got %v, %v, want %v", ids, err, id)
	}
	if err := r.Stop(t.Context(), id); err != nil {
		t.Error(err)
	}
	if f := footprintOf(t, r); len(f.cgroups) != 0 {
		t.Errorf("left: %v", f)
	}
}

// TestReadWaitStatus is a table and no fuzz target: what go test -fuzz adds to
// gVisor's code is more than its smallest stacks hold, so it does not link.
func TestReadWaitStatus(t *testing.T) {
	for _, c := range []struct {
		name, said string
		want       unix.WaitStatus
		err        bool
	}{
		{"exited", `{"success":true,"err":"","result":1792}`, 1792, false},
		{"killed", `{"success":true,"result":9}`, 9, false},
		{"nothing", ``, 0, true},
		{"no answer", `{"success":false,"err":"no","result":9}`, 0, true},
		{"not JSON", `[`, 0, true},
		{"another type", `{"success":true,"result":"9"}`, 0, true},
		{"negative", `{"success":true,"result":-1}`, 0, true},
		{"too large", `{"success":true,"result":4294967296}`, 0, true},
		{"no end", `{"success":true,"err":"` + strings.Repeat("x", 1<<20), 0, true},
		{"an end after the limit", `{"success":true,"err":"` + strings.Repeat("x", 1<<20) + `","result":9}`, 0, true},
		{"deep", strings.Repeat(`{"result":`, 1000), 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			b, err := readReply(strings.NewReader(c.said), maxReply)
			var got unix.WaitStatus
			if err == nil {
				got, err = readWaitStatus(b)
			}
			if got != c.want || (err != nil) != c.err {
				t.Errorf("got %v, %v, want %v", got, err, c.want)
			}
		})
	}
}

func TestReasonFor(t *testing.T) {
	for _, c := range []struct {
		ws   unix.WaitStatus
		want string
	}{{7 << 8, "the guest exited with status 7"}, {9, "the guest was killed by signal 9"}, {0, "the guest exited with status 0"}} {
		if got := reasonFor(c.ws); got != c.want {
			t.Errorf("%d: got %q, want %q", c.ws, got, c.want)
		}
	}
}
