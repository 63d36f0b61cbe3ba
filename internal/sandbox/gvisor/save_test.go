package gvisor

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
)

var allOptions = []sandbox.SaveOptions{{}, {Keep: true}, {FilesOnly: true}, {FilesOnly: true, Keep: true}, {Keep: true, Brief: true}}

// TestSaveToAFullDisk: saving fails and leaves no file, and the sandbox keeps running, even
// if it was to end after the save.
func TestSaveToAFullDisk(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	s, h := start(t, r, nil)
	in := inside{t, h}
	if err := in.Remember("here"); err != nil {
		t.Fatal(err)
	}
	if got := h.do(t, 0, "fill", "/var/some", "8"); got != "wrote 8, <nil>" {
		t.Fatalf("fill: %q", got)
	}
	for _, size := range []string{"16k", "512k", "4m"} { // not even the first file; the state; the pages
		disk := t.TempDir()
		if err := unix.Mount("tmpfs", disk, "tmpfs", 0, "size="+size); err != nil {
			t.Fatal(err)
		}
		for _, o := range allOptions {
			if err := r.Save(t.Context(), s.ID, disk+"/snapshot", o); err == nil {
				t.Errorf("save %+v to %s: got no error", o, size)
			} else {
				t.Logf("save %+v to %s: %v", o, size, err)
			}
			if es, err := os.ReadDir(disk); err != nil || len(es) != 0 {
				t.Errorf("save %+v to %s: left %v, %v", o, size, es, err)
			}
			h.ping(t)
			if got, err := in.Remembered(); err != nil || got != "here" {
				t.Errorf("after a save that failed: got %q, %v", got, err)
			}
		}
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			var st unix.Statfs_t
			err := unix.Statfs(disk, &st)
			if err == nil && st.Blocks-st.Bfree <= 1 {
				break
			}
			if err != nil || time.Now().After(end) {
				t.Errorf("the full disk: %d of %d blocks are still used, %v", st.Blocks-st.Bfree, st.Blocks, err)
				break
			}
		}
		if err := unix.Unmount(disk, unix.MNT_DETACH); err != nil { // gVisor may have an empty file open
			t.Errorf("unmount: %v", err)
		}
	}
	// With free space, it can be saved.
	dir := filepath.Join(t.TempDir(), "snapshot")
	if err := r.Save(t.Context(), s.ID, dir, sandbox.SaveOptions{Keep: true}); err != nil {
		t.Fatal(err)
	}
	_, h = start(t, r, func(s *sandbox.Spec) { s.From = dir })
	if got, err := (inside{t, h}).Remembered(); err != nil || got != "here" {
		t.Errorf("restored: got %q, %v", got, err)
	}
}

// TestSentryKilledWhileSaving: Save returns an error soon and leaves no file.
func TestSentryKilledWhileSaving(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	for n := range 12 {
		s, h := start(t, r, nil)
		if got, err := h.get(t.Context(), "/dirty?mib=64"); err != nil || got != "dirty" {
			t.Fatalf("dirty: %q, %v", got, err)
		}
		parent := t.TempDir()
		sentry, err := unix.PidfdOpen(instanceOf(r, s.ID).sentry, 0)
		if err != nil {
			t.Fatal(err)
		}
		var killing sync.WaitGroup
		killing.Go(func() {
			time.Sleep(rand.N(60 * time.Millisecond))
			_ = unix.PidfdSendSignal(sentry, unix.SIGKILL, nil, 0) // it may have ended
		})
		begin := time.Now()
		o := allOptions[n%len(allOptions)]
		err = r.Save(t.Context(), s.ID, parent+"/snapshot", o)
		if took := time.Since(begin); took > time.Minute { // it may be five
			t.Errorf("save %+v: took %v", o, took)
		}
		es, _ := os.ReadDir(parent)
		switch {
		case err != nil && len(es) != 0:
			t.Errorf("save %+v: got %v, and left %v", o, err, es)
		case err == nil && (len(es) != 1 || es[0].Name() != "snapshot"):
			t.Errorf("save %+v: got no error, and %v", o, es)
		}
		if reason, err := r.Wait(t.Context(), s.ID); err != nil || reason != reasonKilled && reason != reasonSaved {
			t.Errorf("save %+v: ended: got %q, %v", o, reason, err)
		}
		killing.Wait()
		unix.Close(sentry)
	}
}

func TestStopWhileSaving(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	for n := range 8 {
		s, h := start(t, r, nil)
		if got, err := h.get(t.Context(), "/dirty?mib=64"); err != nil || got != "dirty" {
			t.Fatalf("dirty: %q, %v", got, err)
		}
		parent := t.TempDir()
		saved := make(chan error, 1)
		go func() { saved <- r.Save(t.Context(), s.ID, parent+"/snapshot", allOptions[n%len(allOptions)]) }()
		time.Sleep(rand.N(60 * time.Millisecond))
		if err := r.Stop(t.Context(), s.ID); err != nil {
			t.Error(err)
		}
		err := <-saved
		if es, _ := os.ReadDir(parent); err != nil && len(es) != 0 {
			t.Errorf("save: got %v, and left %v", err, es)
		}
		if f := footprintOf(t, r); !f.none() {
			t.Errorf("left: %v", f)
		}
	}
}

func TestSnapshotsThatDoNotFit(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	s, _ := start(t, r, nil)
	dir := filepath.Join(t.TempDir(), "snapshot")
	if err := r.Save(t.Context(), s.ID, dir, sandbox.SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, snapshotFile)
	right, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	change := func(f func(*snapshot)) func() {
		return func() {
			var snap snapshot
			if err := json.Unmarshal(right, &snap); err != nil {
				t.Fatal(err)
			}
			f(&snap)
			if err := os.WriteFile(file, mustJSON(snap), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	write := func(name, content string) func() {
		return func() {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		name   string
		change func()
		want   string
	}{
		{"another format", change(func(s *snapshot) { s.Format++ }), "another version of postern"},
		{"another gVisor", change(func(s *snapshot) { s.GVisor = "v0.0.0-2030" }), "only by the version that wrote it"},
		{"another kind", change(func(s *snapshot) { s.Kind = "music" }), `"music"`},
		{"memory that is said to be files", change(func(s *snapshot) { s.Kind = kindFiles }), "no such file"},
		{"no JSON", write(snapshotFile, "{"), snapshotFile},
		{"a state that is empty", func() { write(snapshotFile, string(right))(); write("checkpoint.img", "")() }, "restore sandbox"},
		{"a state that is something else", write("checkpoint.img", strings.Repeat("garbage ", 1000)), "restore sandbox"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.change()
			_, link := newLink(t)
			s := specWith(t, link)
			s.From = dir
			// And soon: else it would be said that it had not started in time.
			err := r.Start(t.Context(), s)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q in it", err, c.want)
			}
		})
	}
	if err := r.Stop(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if f := footprintOf(t, r); !f.none() {
		t.Errorf("left: %v", f)
	}
}

func TestVersionIsTheModules(t *testing.T) {
	b, err := os.ReadFile("../../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(b), "gvisor.dev/gvisor "+gvisorVersion+"\n") {
		t.Errorf("gvisorVersion is %s, and go.mod has another: change it with the module", gvisorVersion)
	}
}

// TestRestoreWithOtherLimits: a restored sandbox takes some fields of its own
// specification and keeps others of the saved one.
func TestRestoreWithOtherLimits(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	s, _ := start(t, r, nil)
	dir := filepath.Join(t.TempDir(), "snapshot")
	if err := r.Save(t.Context(), s.ID, dir, sandbox.SaveOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		memory int64
		shown  string
	}{{128, "MemTotal:         131072 kB"}, {512, "MemTotal:         524288 kB"}} {
		o, h := start(t, r, func(o *sandbox.Spec) { o.From, o.MemoryMB, o.CPUs, o.DiskMB = dir, c.memory, 2, s.DiskMB/2 })
		if got := h.do(t, 0, "cat", "/proc/meminfo"); !strings.Contains(got, c.shown) {
			t.Errorf("memory: got %q, want %q in it", got, c.shown)
		}
		limit, err := readNumber(r.cgroups.file(o.ID, "memory", map[bool]string{true: "memory.max", false: "memory.limit_in_bytes"}[r.cgroups.v2]))
		if want := hostLimits(o).memory; err != nil || limit != want {
			t.Errorf("limit of memory: got %d, %v, want %d", limit, err, want)
		}
		if got, want := h.do(t, 0, "cpus"), "1"; got != want {
			t.Errorf("processors: got %s, want %s, as saved", got, want)
		}
		if got := h.do(t, 0, "fill", "/var/x", strconv.FormatInt(s.DiskMB-4, 10)); !strings.HasSuffix(got, "<nil>") {
			t.Errorf("disk: got %q, want room for %d MiB, as saved", got, s.DiskMB-4)
		}
	}
}

// TestMountsHoldNoDanger: set-user-ID programs and device files in a mount give no
// privileges and no way to the host.
func TestMountsHoldNoDanger(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	src := t.TempDir()
	if err := os.Chmod(src, 0o777); err != nil {
		t.Fatal(err)
	}
	fs, err := rootfs()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(filepath.Join(fs, guestArgs[0]))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []struct {
		name string
		make func(path string) error
	}{
		{"setuid", func(p string) error {
			return errors.Join(os.WriteFile(p, program, 0o755), os.Chmod(p, 0o755|os.ModeSetuid))
		}},
		{"mem", func(p string) error { return unix.Mknod(p, unix.S_IFCHR|0o666, 1<<8|1) }},
		{"disk", func(p string) error {
			var st unix.Stat_t
			return errors.Join(unix.Stat("/", &st), unix.Mknod(p, unix.S_IFBLK|0o666, int(st.Dev)))
		}},
		{"fifo", func(p string) error { return unix.Mkfifo(p, 0o666) }},
		{"link", func(p string) error { return os.Symlink("/etc/hostname", p) }},
	} {
		if err := f.make(filepath.Join(src, f.name)); err != nil {
			t.Fatal(err)
		}
	}
	l, err := net.Listen("unix", filepath.Join(src, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	below := filepath.Join(src, "below") // something else of the host's
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", below, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(below, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	if err := os.WriteFile(filepath.Join(below, "secret"), []byte("swordfish"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, h := start(t, r, func(s *sandbox.Spec) { s.Mounts = []sandbox.Mount{{Source: src, Destination: "/mnt/vol"}} })
	if got, want := h.do(t, 1000, "exec", "/mnt/vol/setuid", "euid"), "1000"; got != want {
		t.Errorf("a program of root's: got %q, want that it runs as %s", got, want)
	}
	for _, f := range []string{"mem", "disk", "fifo", "link", "socket", "below/secret"} {
		if got := h.do(t, 0, "cat", "/mnt/vol/"+f); !strings.Contains(got, "error:") {
			t.Errorf("read %s: got %q, want an error", f, got)
		}
	}
	if got := h.do(t, 0, "dial", "/mnt/vol/socket"); !strings.Contains(got, "error:") {
		t.Errorf("connect to a socket of the host's: got %q, want an error", got)
	}
	if f := footprintOf(t, r); len(f.mounts) != 0 {
		t.Errorf("mounts on the host: %q", f.mounts)
	}
}

func TestMountsThatAreRefused(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	here := t.TempDir()
	for _, d := range []string{"", "/", "mnt", "/mnt/", "/mnt/../etc", "/proc", "/proc/self", "/sys/x", "/dev", "/dev/shm", "/usr/local/sbin", "/usr/local", "/usr", "/mnt/a\nb"} {
		_, link := newLink(t)
		s := specWith(t, link)
		s.Mounts = []sandbox.Mount{{Source: here, Destination: d}}
		if err := r.Start(t.Context(), s); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("a mount at %q: got %v, want %v", d, err, sandbox.ErrInvalid)
		}
	}
	for _, m := range [][]sandbox.Mount{
		{{Source: "relative", Destination: "/mnt"}},
		{{Source: here + "/missing", Destination: "/mnt"}},
		{{Source: here, Destination: "/mnt"}, {Source: here, Destination: "/mnt"}},
	} {
		_, link := newLink(t)
		s := specWith(t, link)
		s.Mounts = m
		if err := r.Start(t.Context(), s); err == nil {
			t.Errorf("mounts %v: got no error", m)
		}
	}
	if f := footprintOf(t, r); !f.none() {
		t.Errorf("left: %v", f)
	}
}
