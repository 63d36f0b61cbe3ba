package erofs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
)

// text returns a regular file.
func text(s string) *erofs.Node {
	return &erofs.Node{Mode: unix.S_IFREG | 0o644, Text: s, Size: int64(len(s))}
}

// folder returns a directory.
func folder(entries map[string]*erofs.Node) *erofs.Node {
	return &erofs.Node{Mode: unix.S_IFDIR | 0o755, Entries: entries}
}

// tree returns a tree with something of everything.
func tree() *erofs.Node {
	shared := text("shared")
	many := map[string]*erofs.Node{}
	for i := range 500 {
		many[fmt.Sprintf("file-%05d", i)] = text(strings.Repeat("x", i*37))
	}
	return folder(map[string]*erofs.Node{
		"a": shared, "b": {Mode: unix.S_IFREG | 0o4755, UID: 1000, GID: 70000, Sec: 5, Nsec: 7},
		"l":   {Mode: unix.S_IFLNK | 0o777, Text: "../x"},
		"!":   folder(map[string]*erofs.Node{"again": shared, strings.Repeat("n", 255): text("")}),
		"dev": {Mode: unix.S_IFCHR | 0o666, Rdev: unix.Mkdev(300, 70000)}, "p": {Mode: unix.S_IFIFO | 0o600},
		"many": folder(many), "long": {Mode: unix.S_IFLNK | 0o777, Text: strings.Repeat("t", 4000)},
	})
}

// writeTree writes the image of a tree to a new file in dir and returns it.
func writeTree(t testing.TB, dir string, root *erofs.Node) (*os.File, erofs.Digest) {
	t.Helper()
	f, err := os.CreateTemp(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	d, err := erofs.WriteTree(t.Context(), f, root)
	if err != nil {
		t.Fatal(err)
	}
	return f, d
}

// show returns a line for each file of a tree.
func show(t testing.TB, n *erofs.Node) string {
	t.Helper()
	var out strings.Builder
	seen := map[*erofs.Node]string{}
	var visit func(path string, n *erofs.Node)
	visit = func(path string, n *erofs.Node) {
		fmt.Fprintf(&out, "%q %o %d:%d %d.%d %d", path, n.Mode, n.UID, n.GID, n.Sec, n.Nsec, n.Rdev)
		switch n.Kind() {
		case unix.S_IFREG:
			b := []byte(n.Text)
			if n.From != nil {
				b = make([]byte, n.Size)
				if _, err := n.From.ReadAt(b, n.At); err != nil && !errors.Is(err, io.EOF) {
					t.Fatal(err)
				}
			}
			fmt.Fprintf(&out, " %q %s\n", b, seen[n])
			seen[n] = path
		case unix.S_IFDIR:
			out.WriteString("\n")
			for _, e := range slices.Sorted(maps.Keys(n.Entries)) {
				visit(path+"/"+e, n.Entries[e])
			}
		default:
			fmt.Fprintf(&out, " %q\n", n.Text)
		}
	}
	visit("", n)
	return out.String()
}

func TestTreeIsWrittenAndReadAgain(t *testing.T) {
	root := tree()
	f, d := writeTree(t, t.TempDir(), root)
	got, gotDigest, err := erofs.Read(f)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := show(t, root), show(t, got); a != b {
		t.Errorf("got %s\nwant %s", b, a)
	}
	if gotDigest != d {
		t.Errorf("digest: got %v, want %v", gotDigest, d)
	}
	// gVisor's kernel reads it, and so the same image comes from what was read.
	again, other := writeTree(t, t.TempDir(), got)
	if other != d || !bytes.Equal(bytesOf(t, f), bytesOf(t, again)) {
		t.Error("the image of the tree that was read differs")
	}
	i := open(t, again)
	n, err := i.Inode(i.RootNid())
	if err != nil {
		t.Fatal(err)
	}
	nid, err := n.Lookup("a")
	if err != nil {
		t.Fatal(err)
	}
	a, err := i.Inode(nid)
	if err != nil || a.Nlink() != 2 || string(content(t, &a)) != "shared" {
		t.Errorf("a: %v, %d names, %q", err, a.Nlink(), content(t, &a))
	}
}

func bytesOf(t testing.TB, f *os.File) []byte {
	t.Helper()
	b, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestTreeAndDirectoryGiveTheSameImage(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, "d/e"), 0o755), os.WriteFile(filepath.Join(dir, "d/f"), []byte("F"), 0o644),
		os.Symlink("f", filepath.Join(dir, "d/l")), os.Link(filepath.Join(dir, "d/f"), filepath.Join(dir, "d/e/g"))); err != nil {
		t.Fatal(err)
	}
	i, d := image(t, dir, nil)
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", i.FD()))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	root, _, err := erofs.Read(f)
	if err != nil {
		t.Fatal(err)
	}
	if _, got := writeTree(t, t.TempDir(), root); got != d {
		t.Errorf("got %v, want %v", got, d)
	}
}

func TestMalformedTreesAreRefused(t *testing.T) {
	loop := folder(map[string]*erofs.Node{})
	loop.Entries["loop"] = loop
	for name, root := range map[string]*erofs.Node{
		"a directory in itself":      loop,
		"a name with a slash":        folder(map[string]*erofs.Node{"a/b": text("")}),
		"a name that leads up":       folder(map[string]*erofs.Node{"..": text("")}),
		"a long name":                folder(map[string]*erofs.Node{strings.Repeat("n", 256): text("")}),
		"a link without a target":    folder(map[string]*erofs.Node{"l": {Mode: unix.S_IFLNK}}),
		"a link with a large target": folder(map[string]*erofs.Node{"l": {Mode: unix.S_IFLNK, Text: strings.Repeat("t", 4096)}}),
		"a negative size":            folder(map[string]*erofs.Node{"f": {Mode: unix.S_IFREG, Size: -1}}),
	} {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := erofs.WriteTree(t.Context(), f, root); err == nil {
			t.Errorf("%s: no error", name)
		}
		if _, _, err := erofs.Read(f); !errors.Is(err, erofs.ErrFormat) {
			t.Errorf("%s: it can be read: %v", name, err)
		}
		f.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f, _ := os.CreateTemp(t.TempDir(), "")
	defer f.Close()
	if _, err := erofs.WriteTree(ctx, f, tree()); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// TestImageFromAnImageIsTheSameWhereverItIs: on a file system that shares blocks, and
// on others.
func TestImageFromAnImageIsTheSameWhereverItIs(t *testing.T) {
	check := func(t *testing.T, dir string) {
		t.Helper()
		base, _ := writeTree(t, dir, tree())
		root, _, err := erofs.Read(base)
		if err != nil {
			t.Fatal(err)
		}
		big, err := os.CreateTemp(dir, "")
		if err != nil {
			t.Fatal(err)
		}
		defer big.Close()
		// A source that is no image: aligned, but with other bytes after the content.
		if _, err := big.Write(bytes.Repeat([]byte("0123456789abcdef"), 1<<16)); err != nil {
			t.Fatal(err)
		}
		root.Entries["whole"] = &erofs.Node{Mode: unix.S_IFREG, From: big, Size: 1 << 20}
		root.Entries["part"] = &erofs.Node{Mode: unix.S_IFREG, From: big, At: 4096, Size: 5000}
		root.Entries["odd"] = &erofs.Node{Mode: unix.S_IFREG, From: big, At: 512, Size: 1 << 16}
		delete(root.Entries["many"].Entries, "file-00100")
		got, d := writeTree(t, dir, root)
		plain, want := writeTree(t, "/dev/shm", root)
		defer os.Remove(plain.Name())
		if d != want || !bytes.Equal(bytesOf(t, got), bytesOf(t, plain)) {
			t.Errorf("got %v, want %v", d, want)
		}
		open(t, got)
	}
	t.Run("copied", func(t *testing.T) { check(t, t.TempDir()) })
	t.Run("shared", func(t *testing.T) {
		dir := xfs(t)
		var before, after unix.Statfs_t
		base, _ := writeTree(t, dir, folder(map[string]*erofs.Node{"big": text(strings.Repeat("0123456789abcdef", 1<<20))}))
		root, _, err := erofs.Read(base)
		if err != nil {
			t.Fatal(err)
		}
		root.Entries["a"] = text("before it")
		if err := errors.Join(base.Sync(), unix.Statfs(dir, &before)); err != nil {
			t.Fatal(err)
		}
		f, _ := writeTree(t, dir, root)
		if err := errors.Join(f.Sync(), unix.Statfs(dir, &after)); err != nil {
			t.Fatal(err)
		}
		if took := int64(before.Bfree-after.Bfree) * before.Bsize; took > 1<<20 {
			t.Errorf("the second image of 16 MB takes %d bytes on the disk", took)
		}
		check(t, dir)
	})
}

// xfs returns a directory on a file system that shares blocks.
func xfs(t *testing.T) string {
	t.Helper()
	mkfs, err := exec.LookPath("mkfs.xfs")
	if err != nil || os.Geteuid() != 0 {
		t.Skip("it needs root and mkfs.xfs")
	}
	disk, dir := filepath.Join(t.TempDir(), "disk"), t.TempDir()
	if err := errors.Join(os.WriteFile(disk, nil, 0o600), os.Truncate(disk, 320<<20)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(mkfs, "-q", disk).CombinedOutput(); err != nil {
		t.Skipf("mkfs.xfs: %v: %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", disk, dir).CombinedOutput(); err != nil {
		t.Skipf("mount: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", "--lazy", dir).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	return dir
}

// FuzzRead: an image must never make the server crash or take all memory. What can be
// read can be written, and is the same then.
func FuzzRead(f *testing.F) {
	img, _ := writeTree(f, f.TempDir(), folder(map[string]*erofs.Node{"a": text("A"), "d": folder(map[string]*erofs.Node{"l": {Mode: unix.S_IFLNK, Text: "x"}})}))
	f.Add(bytesOf(f, img))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<20 {
			return
		}
		b = bytes.Clone(b)
		if len(b) >= 4096 {
			erofs.Checksum(b)
		}
		img := memory(t)
		if _, err := img.Write(b); err != nil {
			t.Fatal(err)
		}
		root, _, err := erofs.Read(img)
		if err != nil {
			return
		}
		_, _ = erofs.WriteTree(t.Context(), memory(t), root)
	})
}

// memory returns an empty file that is in no directory.
func memory(t testing.TB) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "memory")
	t.Cleanup(func() { f.Close() })
	return f
}
