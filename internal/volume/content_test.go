package volume

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"postern/internal/storetest"
)

func newContent(t *testing.T) *Content {
	t.Helper()
	s, who := newStore(t, storetest.SQLite(t), Config{})
	return content(t, s, create(t, s, who, "a").ID)
}

func TestContentIsStoredAndListed(t *testing.T) {
	c := newContent(t)
	ctx := t.Context()
	before := time.Now().Add(-time.Minute)

	e, err := c.Write("/a.txt", strings.NewReader("hello"), Attributes{}, false)
	if err != nil || e.Name != "a.txt" || e.Path != "/a.txt" || e.Kind != File || e.Size != 5 || e.Mode != 0o666 || e.UID != 1000 || e.GID != 1000 || e.Modify.Before(before) {
		t.Errorf("write: %+v, %v", e, err)
	}
	if got := read(t, c, "a.txt"); got != "hello" { // relative is the same
		t.Errorf("read: %q", got)
	}
	if _, err := c.Write("/a.txt", strings.NewReader("x"), Attributes{}, false); !errors.Is(err, ErrExists) {
		t.Errorf("write again without force: %v", err)
	}
	write(t, c, "/a.txt", "longer than before")
	write(t, c, "/a.txt", "")
	if got := read(t, c, "/a.txt"); got != "" {
		t.Errorf("read what was replaced: %q", got)
	}
	uid, gid, mode := uint32(0), uint32(7), uint32(0o640)
	if e, err := c.SetAttributes("/a.txt", Attributes{UID: &uid, GID: &gid, Mode: &mode}); err != nil || e.UID != 0 || e.GID != 7 || e.Mode != 0o640 {
		t.Errorf("set attributes: %+v, %v", e, err)
	}
	if e, err := c.SetAttributes("/a.txt", Attributes{Mode: new(uint32)}); err != nil || e.GID != 7 || e.Mode != 0 {
		t.Errorf("set the mode alone: %+v, %v", e, err)
	}

	if e, err := c.MakeDir("/d", Attributes{Mode: &mode}, false); err != nil || e.Kind != Directory || e.Mode != 0o640 || e.Name != "d" {
		t.Errorf("make directory: %+v, %v", e, err)
	}
	if _, err := c.MakeDir("/d", Attributes{}, false); !errors.Is(err, ErrExists) {
		t.Errorf("make it again: %v", err)
	}
	if e, err := c.MakeDir("/d", Attributes{}, true); err != nil || e.Mode != 0o640 {
		t.Errorf("make it again with force: %+v, %v", e, err)
	}
	if _, err := c.MakeDir("/a.txt", Attributes{}, true); !errors.Is(err, ErrExists) {
		t.Errorf("make a directory of a file: %v", err)
	}
	for name, err := range map[string]error{
		"make a directory": func() error { _, err := c.MakeDir("/x/y", Attributes{}, false); return err }(),
		"write":            func() error { _, err := c.Write("/x/y", strings.NewReader(""), Attributes{}, false); return err }(),
		"read":             func() error { _, _, err := c.Open("/x"); return err }(),
		"list":             func() error { _, err := c.List(ctx, "/x", 0); return err }(),
		"look at":          func() error { _, err := c.Stat("/x/y"); return err }(),
		"remove":           c.Remove(ctx, "/x"),
		"change":           func() error { _, err := c.SetAttributes("/x", Attributes{}); return err }(),
	} {
		if !errors.Is(err, ErrNoPath) {
			t.Errorf("%s where nothing is: %v", name, err)
		}
	}
	if e, err := c.MakeDir("/x/y/z", Attributes{Mode: &mode}, true); err != nil || e.Path != "/x/y/z" {
		t.Errorf("with parents: %+v, %v", e, err)
	}
	if e, err := c.Stat("/x/y"); err != nil || e.Mode != 0o777 || e.UID != 1000 {
		t.Errorf("a parent: %+v, %v", e, err)
	}
	write(t, c, "/x/new/f", "1")
	write(t, c, "/x/y/z/f", "2")

	list := func(p string, depth int) string {
		t.Helper()
		es, err := c.List(ctx, p, depth)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range es {
			names = append(names, e.Path)
		}
		return strings.Join(names, " ")
	}
	for _, tt := range []struct {
		path  string
		depth int
		want  string
	}{
		{"/", 0, "/a.txt /d /x"},
		{"/x", 1, "/x/new /x/y"},
		{"/x", 2, "/x/new /x/new/f /x/y /x/y/z"},
		{"/", 10, "/a.txt /d /x /x/new /x/new/f /x/y /x/y/z /x/y/z/f"},
		{"/d", 3, ""},
	} {
		if got := list(tt.path, tt.depth); got != tt.want {
			t.Errorf("list %s, %d: %s, want %s", tt.path, tt.depth, got, tt.want)
		}
	}
	if e, err := c.Stat("/"); err != nil || e.Path != "/" || e.Kind != Directory {
		t.Errorf("the root: %+v, %v", e, err)
	}
	if err := c.Remove(ctx, "/x"); err != nil {
		t.Error(err)
	}
	if err := c.Remove(ctx, "/a.txt"); err != nil {
		t.Error(err)
	}
	if got := list("/", 10); got != "/d" {
		t.Errorf("after it: %s", got)
	}
}

func TestContentRefuses(t *testing.T) {
	c := newContent(t)
	write(t, c, "/f", "x")
	if _, err := c.MakeDir("/d/e", Attributes{}, true); err != nil {
		t.Fatal(err)
	}
	suid, nobody := uint32(0o4755), uint32(1<<32-1)
	put := func(p string, a Attributes, force bool) error {
		_, err := c.Write(p, strings.NewReader(""), a, force)
		return err
	}
	for name, err := range map[string]error{
		"no path":                      put("", Attributes{}, true),
		"NUL":                          put("/a\x00b", Attributes{}, true),
		"a path without end":           put(strings.Repeat("/a", 3000), Attributes{}, true),
		"a name that is too long":      put("/"+strings.Repeat("a", 256), Attributes{}, true),
		"write over the root":          put("/", Attributes{}, true),
		"write over a directory":       put("/d", Attributes{}, true),
		"write below a file":           put("/f/g", Attributes{}, false),
		"write below a file, by force": put("/f/g", Attributes{}, true),
		"set-user-ID":                  put("/s", Attributes{Mode: &suid}, true),
		"no user":                      put("/s", Attributes{UID: &nobody}, true),
		"remove the root":              c.Remove(t.Context(), "/x/../.."),
		"read a directory":             func() error { _, _, err := c.Open("/d"); return err }(),
		"list a file":                  func() error { _, err := c.List(t.Context(), "/f", 1); return err }(),
		"too deep":                     func() error { _, err := c.List(t.Context(), "/", 11); return err }(),
		"less than nothing deep":       func() error { _, err := c.List(t.Context(), "/", -1); return err }(),
	} {
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.Stat("/s"); !errors.Is(err, ErrNoPath) {
		t.Errorf("something stays of what was refused: %v", err)
	}
}

// TestHostileFiles: files that a sandbox leaves must not harm the host's access to
// the volume.
func TestHostileFiles(t *testing.T) {
	c := newContent(t)
	dir := c.disk.files()
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	links := map[string]string{
		"absolute": secret, "shadow": "/etc/shadow", "up": "../../../../../../../../etc/shadow", "incoming": "../incoming", "dir": filepath.Dir(secret),
		"self": "self", "proc": "/proc/self/environ", "dots": "..", "slash": "/",
	}
	for name, target := range links {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for name, make := range map[string]func(string) error{
		"fifo": func(p string) error { return unix.Mkfifo(p, 0o666) },
		"disk": func(p string) error { return unix.Mknod(p, unix.S_IFBLK|0o666, 7<<8) },
		"zero": func(p string) error { return unix.Mknod(p, unix.S_IFCHR|0o666, 1<<8|5) },
		"sock": func(p string) error { return unix.Mknod(p, unix.S_IFSOCK|0o666, 0) },
	} {
		if err := make(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan struct{})
	go func() {
		select {
		case <-done:
		case <-time.After(5 * time.Minute):
			panic("something that a sandbox left holds the caller")
		}
	}()
	defer close(done)
	for _, name := range []string{"absolute", "shadow", "up", "incoming", "dir", "self", "proc", "dots", "slash", "fifo", "disk", "zero", "sock"} {
		t.Run(name, func(t *testing.T) {
			e, err := c.Stat(name)
			want := Unknown
			if links[name] != "" {
				want = Symlink
			}
			if err != nil || e.Kind != want || e.Target != links[name] {
				t.Errorf("stat: %+v, %v", e, err)
			}
			if f, _, err := c.Open(name); !errors.Is(err, ErrInvalid) {
				t.Errorf("read: %v, %v", f, err)
			}
			if _, err := c.List(t.Context(), name, 2); !errors.Is(err, ErrInvalid) {
				t.Errorf("list: %v", err)
			}
			if _, err := c.SetAttributes(name, Attributes{}.or(0o777)); !errors.Is(err, ErrInvalid) {
				t.Errorf("change: %v", err)
			}
			for _, force := range []bool{false, true} {
				if _, err := c.Write(name+"/new", strings.NewReader("x"), Attributes{}, force); !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrExists) {
					t.Errorf("write below, force %v: %v", force, err)
				}
				if _, err := c.MakeDir(name+"/new", Attributes{}, force); !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrExists) {
					t.Errorf("make a directory below, force %v: %v", force, err)
				}
			}
			if err := c.Remove(t.Context(), name+"/secret"); !errors.Is(err, ErrInvalid) {
				t.Errorf("remove below: %v", err)
			}
			// Replaced, not followed.
			write(t, c, name, "mine")
			if e, err := c.Stat(name); err != nil || e.Kind != File || e.Size != 4 {
				t.Errorf("replace: %+v, %v", e, err)
			}
			if err := c.Remove(t.Context(), name); err != nil {
				t.Errorf("remove: %v", err)
			}
		})
	}
	if b, err := os.ReadFile(secret); string(b) != "secret" || err != nil {
		t.Errorf("the host's file: %q, %v", b, err)
	}
	// Links that stay inside are followed.
	write(t, c, "/real/f", "inside")
	for name, target := range map[string]string{"in": "real/f", "real/back": "../real/f", "indir": "real"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{"/in", "/real/back", "/indir/f", "/indir/../in"} {
		if got := read(t, c, p); got != "inside" {
			t.Errorf("%s: %q", p, got)
		}
	}
}

// TestSwappedPathsDoNotEscape: a sandbox replaces a path between two system calls.
func TestSwappedPathsDoNotEscape(t *testing.T) {
	c := newContent(t)
	dir := c.disk.files()
	outside := t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "f"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "real"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "real", "f"), []byte("inside"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, filepath.Join(dir, "real"), unix.AT_FDCWD, filepath.Join(dir, "link"), unix.RENAME_EXCHANGE)
				runtime.Gosched()
			}
		}
	})
	var seen int
	for range 2000 {
		if f, _, err := c.Open("/real/f"); err == nil {
			b, _ := io.ReadAll(f)
			f.Close()
			if string(b) != "inside" {
				t.Fatalf("read %q", b)
			}
			seen++
		}
		_, _ = c.Write("/real/new", strings.NewReader("x"), Attributes{}, true)
		_, _ = c.MakeDir("/real/newdir", Attributes{}, true)
		if es, err := c.List(t.Context(), "/real", 1); err == nil {
			for _, e := range es {
				if e.Name == "outside" {
					t.Fatal("listed the host's directory")
				}
			}
		}
		_ = c.Remove(t.Context(), "/real/new")
	}
	close(stop)
	wg.Wait()
	if seen == 0 {
		t.Error("never read it at all: this test shows nothing")
	}
	if es, err := os.ReadDir(outside); err != nil || len(es) != 1 {
		t.Errorf("outside: %v, %v", es, err)
	}
}

// TestFullVolumeRefusesWrites: a volume holds its size and no more. The caller gets
// an error, and nothing of a failed write stays.
func TestFullVolumeRefusesWrites(t *testing.T) {
	c := newContent(t)
	write(t, c, "/kept", "kept")
	_, err := c.Write("/big", io.LimitReader(ones{}, 1<<30), Attributes{}, false)
	if !errors.Is(err, ErrFull) {
		t.Fatalf("write a GiB into 32 MiB: %v", err)
	}
	if _, err := c.Stat("/big"); !errors.Is(err, ErrNoPath) {
		t.Errorf("a part of it stays: %v", err)
	}
	write(t, c, "/fits", strings.Repeat("x", 1<<20)) // there is room again
	// As a sandbox fills it: through the mount.
	f, err := os.Create(filepath.Join(c.disk.files(), "filler"))
	if err != nil {
		t.Fatal(err)
	}
	n, err := io.Copy(f, io.LimitReader(ones{}, 1<<30))
	f.Close()
	if !errors.Is(err, unix.ENOSPC) || n > 32<<20 {
		t.Errorf("filled by %d bytes: %v", n, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(c.disk.image(), &st); err != nil || st.Blocks*512 > 33<<20 {
		t.Errorf("the host's disk has given %d bytes, %v", st.Blocks*512, err)
	}
	if _, err := c.Write("/more", bytes.NewReader(make([]byte, 1<<20)), Attributes{}, true); !errors.Is(err, ErrFull) {
		t.Errorf("write into a full volume: %v", err)
	}
	if got := read(t, c, "/kept"); got != "kept" {
		t.Errorf("what was there: %q", got)
	}
	if err := c.Remove(t.Context(), "/filler"); err != nil {
		t.Errorf("remove from a full volume: %v", err)
	}
	write(t, c, "/more", "fits")
	unix.Sync()
	if err := unix.Stat(c.disk.image(), &st); err != nil || st.Blocks*512 > 16<<20 {
		t.Logf("not given back to the disk yet: %d bytes, %v", st.Blocks*512, err)
	}
}

// ones is an endless reader.
type ones struct{}

func (ones) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 1
	}
	return len(p), nil
}

// TestBrokenUpload: an incomplete upload changes nothing.
func TestBrokenUpload(t *testing.T) {
	c := newContent(t)
	write(t, c, "/f", "old")
	broken := io.MultiReader(strings.NewReader("new"), errReader{})
	if _, err := c.Write("/f", broken, Attributes{}, true); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", err)
	}
	if got := read(t, c, "/f"); got != "old" {
		t.Errorf("the file is %q", got)
	}
	left, err := os.ReadDir(filepath.Join(c.disk.mnt(), "incoming"))
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// TestRemoveHostileTrees: deep and wide trees cost the host neither descriptors nor
// memory, and a sandbox that keeps writing does not block the caller.
func TestRemoveHostileTrees(t *testing.T) {
	c := newContent(t)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	const depth = 5000
	fd, err := unix.Open(c.disk.files(), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range depth { // no path is long enough for it
		name := "d"
		if i == 0 {
			name = "deep"
		}
		if err := unix.Mkdirat(fd, name, 0o777); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		fd = next
	}
	unix.Close(fd)
	open := func() int {
		es, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(es)
	}
	before, most := open(), 0
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				if es, err := os.ReadDir("/proc/self/fd"); err == nil {
					most = max(most, len(es))
				}
			}
		}
	})
	if err := c.Remove(t.Context(), "/deep"); err != nil {
		t.Error(err)
	}
	close(stop)
	wg.Wait()
	if most > before+200 { // others of this process may open some; it is 5000 deep
		t.Errorf("up to %d files were open, %d before", most, before)
	}
	for i := range 200 {
		write(t, c, fmt.Sprintf("/wide/%d/f", i), "x")
	}
	if err := c.Remove(t.Context(), "/wide"); err != nil {
		t.Error(err)
	}
	left, err := os.ReadDir(filepath.Join(c.disk.mnt(), "incoming"))
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}

	// One that writes on while it is removed, through a directory it holds.
	write(t, c, "/busy/f", "x")
	held, err := unix.Open(filepath.Join(c.disk.files(), "busy"), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(held)
	stop = make(chan struct{})
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				if fd, err := unix.Openat(held, fmt.Sprint(i), unix.O_CREAT|unix.O_WRONLY, 0o666); err == nil {
					unix.Close(fd)
				}
			}
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	begin := time.Now()
	err = c.Remove(ctx, "/busy")
	if took := time.Since(begin); took > time.Minute {
		t.Errorf("kept for %v: %v", took, err)
	}
	close(stop)
	wg.Wait()
	if _, err := c.Stat("/busy"); !errors.Is(err, ErrNoPath) {
		t.Errorf("it is still seen: %v", err)
	}
}

// TestHostileNames: any name that the file system accepts can be listed and
// removed.
func TestHostileNames(t *testing.T) {
	c := newContent(t)
	names := []string{"a\nb", "\xff\xfe", "-rf", "..a", "\x1b[2J", strings.Repeat("n", 255), "a b"}
	for _, n := range names {
		if err := os.WriteFile(filepath.Join(c.disk.files(), n), nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	es, err := c.List(t.Context(), "/", 1)
	if err != nil || len(es) != len(names) {
		t.Fatalf("list: %v, %v", es, err)
	}
	for _, e := range es {
		if err := c.Remove(t.Context(), e.Path); err != nil {
			t.Errorf("remove %q: %v", e.Path, err)
		}
	}
	if es, err := c.List(t.Context(), "/", 1); err != nil || len(es) > 0 {
		t.Errorf("left: %v, %v", es, err)
	}
}

func TestHugeDirectory(t *testing.T) {
	s, who := newStore(t, storetest.SQLite(t), Config{SizeMB: 1200}) // has more files than a listing
	c := content(t, s, create(t, s, who, "a").ID)
	fd, err := unix.Open(c.disk.files(), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for i := range maxEntries + 1 {
		if err := unix.Mknodat(fd, fmt.Sprintf("f%d", i), unix.S_IFREG|0o666, 0); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.List(t.Context(), "/", 1); !errors.Is(err, ErrInvalid) {
		t.Errorf("got %v", err)
	}
	if err := c.Remove(t.Context(), "/f0"); err != nil {
		t.Fatal(err)
	}
	if es, err := c.List(t.Context(), "/", 1); err != nil || len(es) != maxEntries {
		t.Errorf("%d entries, %v", len(es), err)
	}
}

func FuzzClean(f *testing.F) {
	for _, s := range []string{"/a", "..", "a/../../b", "//", "a\x00", "", "/.", "./..//x/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := clean(s)
		if err == nil && !filepath.IsLocal(p) {
			t.Errorf("clean(%q) = %q", s, p)
		}
	})
}

func BenchmarkMount(b *testing.B) {
	s, who := newStore(b, storetest.SQLite(b), Config{})
	v, err := s.Create(b.Context(), who, "a")
	if err != nil {
		b.Fatal(err)
	}
	b.Run("first", func(b *testing.B) {
		for b.Loop() {
			if err := s.unmount(v.ID); err != nil {
				b.Fatal(err)
			}
			d, err := s.open(b.Context(), v.ID)
			if err != nil {
				b.Fatal(err)
			}
			d.release()
		}
	})
	b.Run("mounted", func(b *testing.B) {
		for b.Loop() {
			if _, err := s.Mount(b.Context(), who.Project, "i1", "a"); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// TestHostFull: other files fill the host's disk despite the reserve. Writers get
// an error, existing files stay, and the volume works again when there is space.
func TestHostFull(t *testing.T) {
	image, host := filepath.Join(t.TempDir(), "host"), t.TempDir()
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 96<<20); err != nil {
		t.Fatal(err)
	}
	if err := format(t.Context(), image); err != nil {
		t.Fatal(err)
	}
	dev, err := attach(image)
	if err != nil {
		t.Fatal(err)
	}
	err = unix.Mount(dev.Name(), host, "ext4", 0, "")
	dev.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(host, unix.MNT_DETACH) })
	s, who := newStore(t, storetest.SQLite(t), Config{Dir: filepath.Join(host, "volumes"), ReserveMB: 1})
	v := create(t, s, who, "a")
	c, err := s.Content(t.Context(), v.ID)
	if err != nil {
		t.Fatal(err)
	}
	write(t, c, "/kept", "kept")
	filler, err := os.Create(filepath.Join(host, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(filler, ones{}); !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	filler.Close()
	if _, err := c.Write("/big", io.LimitReader(ones{}, 8<<20), Attributes{}, true); err == nil {
		t.Error("8 MiB were taken on a disk without room")
	} else {
		t.Log("the writer is told:", err)
	}
	if got := read(t, c, "/kept"); got != "kept" {
		t.Errorf("what was there: %q", got)
	}
	c.Close()
	if err := os.Remove(filepath.Join(host, "filler")); err != nil {
		t.Fatal(err)
	}
	s.sweep(t.Context(), 0) // a minute without use
	c, err = s.Content(t.Context(), v.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if got := read(t, c, "/kept"); got != "kept" {
		t.Errorf("what was there, afterwards: %q", got)
	}
	if _, err := c.Stat("/big"); !errors.Is(err, ErrNoPath) {
		t.Errorf("what failed: %v", err)
	}
	if _, err := c.Write("/big", io.LimitReader(ones{}, 8<<20), Attributes{}, true); err != nil {
		t.Errorf("with room again: %v", err)
	}
}

// TestPowerLoss: what Write has returned for survives a stop of the machine at any
// moment, and the file system is intact.
func TestPowerLoss(t *testing.T) {
	s, who := newStore(t, storetest.SQLite(t), Config{})
	v, after := create(t, s, who, "before"), create(t, s, who, "after")
	c := content(t, s, v.ID)
	write(t, c, "/dir/f", strings.Repeat("durable ", 100_000))
	write(t, c, "/replaced", "old")
	write(t, c, "/replaced", "new")
	// On its way when the power goes.
	fd, err := unix.Openat(int(c.incoming.Fd()), "newHALF", unix.O_CREAT|unix.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	// What is on the disk now, without anybody having been told to finish.
	// The same twice: the kernel may write while it is read, and no machine stops
	// at several moments.
	var image []byte
	for last := image; len(image) == 0 || !bytes.Equal(image, last); {
		last = image
		if image, err = os.ReadFile(c.disk.image()); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.unmount(after.ID); err != nil {
		t.Fatal(err)
	}
	// In another file: a process that has just copied this one's mounts, such as a
	// sandbox that another test starts, keeps the former file system alive.
	other := filepath.Join(s.conf.Dir, after.ID, "image")
	if err := errors.Join(os.Remove(other), os.WriteFile(other, image, 0o600)); err != nil {
		t.Fatal(err)
	}
	found := content(t, s, after.ID)
	if got := read(t, found, "/dir/f"); got != strings.Repeat("durable ", 100_000) {
		t.Errorf("%d bytes of the file", len(got))
	}
	if got := read(t, found, "/replaced"); got != "new" {
		t.Errorf("the file that was replaced: %q", got)
	}
	if es, err := found.List(t.Context(), "/", 10); err != nil || len(es) != 3 {
		t.Errorf("listed: %v, %v", es, err)
	}
}
