package gvisor

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/egress"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/sandbox/sandboxtest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// realGuestPath is where realGuest is, until TestMain removes it.
func realGuestPath() string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("postern-guest-%d", os.Getpid()))
}

// realGuest is the program that sandboxes have.
var realGuest = sync.OnceValues(func() (string, error) {
	c := exec.Command("go", "build", "-o", realGuestPath(), "postern/cmd/postern-guest")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build guest: %w: %s", err, out)
	}
	return realGuestPath(), nil
})

// distroless makes a root file system that holds nothing but two users, the guest, and a
// program that does what the test says.
func distroless(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	g, err := realGuest()
	if err != nil {
		t.Fatal(err)
	}
	test, err := rootfs()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"usr/local/sbin", "proc", "sys", "dev", "tmp", "etc", "home/user", "run", "bin"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for to, from := range map[string]string{"usr/local/sbin/postern-guest": g, "bin/tool": filepath.Join(test, "usr/local/sbin/postern-guest")} {
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, to), b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
		"etc/group":  "root:x:0:\nuser:x:1000:\n", "etc/hosts": "127.0.0.1 localhost\n", "etc/doomed": "x\n", "tmp/keep": "",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	err = errors.Join(os.Chmod(dir, 0o755), os.Chmod(filepath.Join(dir, "tmp"), 0o1777), os.Chown(filepath.Join(dir, "home/user"), 1000, 1000))
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// newFleet returns a fleet on real sandboxes, whose templates are bases; on a runtime of
// its own unless one is given.
func newFleet(t *testing.T, bases map[string]sandbox.Base, change func(*sandbox.Config), on ...*Runtime) (*sandbox.Fleet, auth.Principal, *Runtime) {
	t.Helper()
	db := storetest.SQLite(t)
	who := auth.Principal{Kind: auth.Project, ID: "crd_1"}
	err := db.Update(t.Context(), func(tx *store.Tx) error {
		id, _, err := auth.NewProject(t.Context(), tx, "project")
		who.Project = id
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	wall, err := egress.New(log, egress.Config{Record: func(context.Context, auth.Principal, egress.Event) error { return nil }})
	if err != nil {
		t.Fatal(err)
	}
	var r *Runtime
	if len(on) > 0 {
		r = on[0]
	} else {
		r = newRuntime(t, t.TempDir())
	}
	conf := sandboxtest.Config(t)
	conf.MemoryMB, conf.DiskMB, conf.CPUs, conf.Processes = 256, 64, 1, 256
	conf.StartTimeout = time.Minute
	conf.BenchEgress = policy.Egress{}
	conf.Base = func(_ context.Context, template string) (sandbox.Base, error) {
		b, ok := bases[template]
		if !ok {
			return b, sandbox.ErrNotFound
		}
		return b, nil
	}
	if change != nil {
		change(&conf)
	}
	f, err := sandbox.New(log, db, r, wall, conf)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-ended
		if left, err := r.List(context.Background()); err != nil || len(left) > 0 {
			t.Errorf("left on the machine: %q, %v", left, err)
		}
	})
	return f, who, r
}

// entry is one of an archive.
type entry struct {
	name, content, link string
	kind                byte
	mode                int64
}

// archive returns a tar archive.
func archive(t *testing.T, es ...entry) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range es {
		if e.kind == 0 {
			e.kind = tar.TypeReg
		}
		if e.mode == 0 {
			e.mode = 0o644
		}
		h := &tar.Header{Name: e.name, Typeflag: e.kind, Linkname: e.link, Mode: e.mode, Size: int64(len(e.content)), ModTime: time.Unix(1e9, 0)}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

// layerOf returns the entries of a bench's layer by name, without the slashes around it.
func layerOf(t *testing.T, b *sandbox.Bench) map[string]*tar.Header {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "layer"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := b.WriteLayer(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	out := map[string]*tar.Header{}
	for tr := tar.NewReader(f); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		out[strings.Trim(strings.TrimPrefix(h.Name, "./"), "/")] = h
	}
}

// TestBenchesRunStepsInAnyImage: an image without a shell, without useradd and without
// tar. What the steps write is in the layer, and nothing that is the sandbox's own.
func TestBenchesRunStepsInAnyImage(t *testing.T) {
	needRoot(t)
	f, who, r := newFleet(t, nil, nil)
	base := sandbox.Base{Rootfs: distroless(t), Key: "k", Env: map[string]string{"COLOUR": "green", "PATH": "/bin"}}
	ctx := t.Context()
	begin := time.Now()
	b, err := f.OpenBench(ctx, who, sandbox.BenchRequest{Base: base, Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("open: %v", time.Since(begin))
	defer b.Close()
	run := func(c sandbox.Command) (code int, out []string, err error) {
		begin := time.Now()
		code, err = b.Run(ctx, c, func(stream, line string) { out = append(out, stream+": "+line) })
		t.Logf("%q: %v", c.Args, time.Since(begin))
		return code, out, err
	}

	code, out, err := run(sandbox.Command{Args: []string{"tool", "env"}, Env: map[string]string{"MORE": "x"}, User: "user"})
	if err != nil || code != 0 {
		t.Fatalf("env: %d, %v", code, err)
	}
	for _, want := range []string{"stdout: COLOUR=green", "stdout: MORE=x", "stdout: HOME=/home/user", "stdout: PATH=/bin"} {
		if !slices.Contains(out, want) {
			t.Errorf("env: %q lacks %q", out, want)
		}
	}
	if i := slices.IndexFunc(out, func(l string) bool { return strings.Contains(l, b.ID) || strings.Contains(l, "E2B_") }); i >= 0 {
		t.Errorf("env: %q names the sandbox", out[i])
	}
	if code, out, err := run(sandbox.Command{Args: []string{"tool", "euid"}, User: "user"}); err != nil || code != 0 || !slices.Equal(out, []string{"stdout: 1000"}) {
		t.Errorf("euid: %d, %q, %v", code, out, err)
	}
	if code, out, err := run(sandbox.Command{Args: []string{"/bin/tool", "cat", "/none"}}); err != nil || code != 1 || len(out) == 0 {
		t.Errorf("a failing command: %d, %q, %v", code, out, err)
	}
	if _, _, err := run(sandbox.Command{Args: []string{"tool"}, User: "root123"}); err == nil || err.Error() != "unauthenticated: invalid username: 'root123'" {
		t.Errorf("unknown user: %v", err)
	}
	if _, _, err := run(sandbox.Command{Args: []string{"none"}}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("no such program: %v", err)
	}

	for _, step := range []struct {
		name string
		err  error
	}{
		{"add user", b.AddUser(ctx, "worker", true)},
		{"add user again", b.AddUser(ctx, "worker", false)},
		{"make directory", b.MakeDir(ctx, "/srv/a/b", "worker")},
		{"copy a directory", b.Unpack(ctx, archive(t, entry{name: "app", kind: tar.TypeDir, mode: 0o755}, entry{name: "app/x", content: "1", mode: 0o755},
			entry{name: "app/l", kind: tar.TypeSymlink, link: "/nowhere"}, entry{name: "app/h", kind: tar.TypeLink, link: "app/x"}, entry{name: "other", content: "no"}),
			sandbox.Unpack{Source: "app", Dest: "/srv/app", User: "worker"})},
		{"copy a file into a directory", b.Unpack(ctx, archive(t, entry{name: "d/f", content: "2"}), sandbox.Unpack{Source: "d/f", Dest: "into/", Dir: "/srv"})},
		{"copy a file to a path", b.Unpack(ctx, gzipped(t, archive(t, entry{name: "f", content: "3"})), sandbox.Unpack{Source: "f", Dest: "/srv/named", Mode: new(fs.FileMode)})},
	} {
		if step.err != nil {
			t.Errorf("%s: %v", step.name, step.err)
		}
	}
	for name, a := range map[string]*bytes.Buffer{
		"dots":           archive(t, entry{name: "../out", content: "x"}),
		"through a link": archive(t, entry{name: "l", kind: tar.TypeSymlink, link: "/etc"}, entry{name: "l/evil", content: "x"}),
		"device":         archive(t, entry{name: "null", kind: tar.TypeChar}),
		"pipe":           archive(t, entry{name: "p", kind: tar.TypeFifo}),
		"link out":       archive(t, entry{name: "h", kind: tar.TypeLink, link: "../etc/passwd"}),
		"empty":          archive(t),
		"no tar":         bytes.NewBufferString(strings.Repeat("x", 2000)),
	} {
		if err := b.Unpack(ctx, a, sandbox.Unpack{Dest: "/srv/evil"}); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: got %v, want %v", name, err, sandbox.ErrInvalid)
		}
	}
	if code, _, err := run(sandbox.Command{Args: []string{"tool", "remove", "/etc/doomed"}}); err != nil || code != 0 {
		t.Errorf("remove: %d, %v", code, err)
	}

	got := layerOf(t, b)
	for name, want := range map[string]struct {
		uid, gid int
		mode     int64
		kind     byte
	}{
		"srv":     {0, 0, 0o755, tar.TypeDir}, // made for the worker
		"srv/a/b": {1001, 1001, 0o755, tar.TypeDir}, "srv/app": {1001, 1001, 0o755, tar.TypeDir}, "srv/app/x": {1001, 1001, 0o755, 0},
		"srv/into/f": {0, 0, 0o644, tar.TypeReg}, "srv/named": {0, 0, 0, tar.TypeReg}, "srv/app/l": {1001, 1001, 0o777, tar.TypeSymlink},
		"home/worker": {1001, 1001, 0o755, tar.TypeDir}, "etc/sudoers.d/postern-worker": {0, 0, 0o440, tar.TypeReg}, "etc/doomed": {0, 0, 0, tar.TypeChar},
	} {
		h := got[name]
		if h == nil {
			t.Errorf("the layer lacks %s", name)
			continue
		}
		if name == "srv" {
			want.uid, want.gid = 1001, 1001
		}
		if h.Uid != want.uid || h.Gid != want.gid || h.Mode != want.mode && want.kind != tar.TypeChar || want.kind != 0 && h.Typeflag != want.kind {
			t.Errorf("%s: got %d:%d %o %c, want %+v", name, h.Uid, h.Gid, h.Mode, h.Typeflag, want)
		}
	}
	for name := range got {
		for _, no := range []string{"run/postern/", "run/e2b/", "etc/hosts", "etc/hostname", "srv/app/other", "etc/evil", "srv/out", "usr/local/sbin/postern-guest"} {
			if strings.HasPrefix(name, no) {
				t.Errorf("the layer has %s", name)
			}
		}
	}
	// A file of holes takes no disk, and would take all memory of the sandbox's kernel.
	if code, _, err := run(sandbox.Command{Args: []string{"tool", "truncate", "/srv/holes", "500000000000"}}); err != nil || code != 1 {
		t.Errorf("a file of 500 GB: %d, %v", code, err)
	}
	if code, out, err := run(sandbox.Command{Args: []string{"tool", "suicide"}}); err != nil || code != -1 || !slices.Contains(out, "stderr: the command was ended: signal: killed") {
		t.Errorf("a command that is killed: %d, %q, %v", code, out, err)
	}
	if code, _, err := run(sandbox.Command{Args: []string{"/bin/bash", "-c", "true"}}); !errors.Is(err, sandbox.ErrNoShell) {
		t.Errorf("a shell: %d, %v", code, err)
	}
	// A process that a step leaves must not live on, nor keep the step from ending.
	begin = time.Now()
	if code, _, err := run(sandbox.Command{Args: []string{"tool", "leave", "60s"}}); err != nil || code != 0 {
		t.Errorf("leave: %d, %v", code, err)
	}
	if took := time.Since(begin); took > 20*time.Second {
		t.Errorf("the step waited for what it left: %v", took)
	}
	if pids, err := r.cgroups.pids(b.ID); err != nil || len(pids) == 0 {
		t.Errorf("processes: %v, %v", pids, err)
	}

	// Nobody sees it, and nobody reaches it.
	if list, err := f.List(ctx, who, true); err != nil || len(list) > 0 {
		t.Errorf("list: %v, %v", list, err)
	}
	if _, err := f.Dial(ctx, b.ID, sandbox.GuestPort); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("dial: %v", err)
	}
	if err := errors.Join(b.Close(), b.Close()); err != nil {
		t.Errorf("close: %v", err)
	}
	if _, _, err := run(sandbox.Command{Args: []string{"tool", "euid"}}); err == nil {
		t.Error("a closed bench runs commands")
	}
}

func gzipped(t *testing.T, in io.Reader) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := io.Copy(w, in); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

// TestKilledServersBenchesAreRemoved: a bench has no row, so nobody takes it back.
func TestKilledServersBenchesAreRemoved(t *testing.T) {
	needRoot(t)
	state := t.TempDir()
	r := newRuntime(t, state)
	id := sandboxtest.NewID()
	killedServer(t, r.conf.StateDir, id, func(said *bufio.Reader) {
		for range 2 {
			if l, err := said.ReadString('\n'); err != nil {
				t.Fatalf("the server says %q, %v", l, err)
			}
		}
	})
	if left := footprintOf(t, r); left.none() {
		t.Fatal("nothing is left to be removed")
	}
	newFleet(t, nil, func(*sandbox.Config) {}, r)
	if left := footprintOf(t, r); !left.none() {
		t.Errorf("after the next start of a server: %v", left)
	}
}
