package erofs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	reader "gvisor.dev/gvisor/pkg/erofs"

	"postern/internal/erofs"
)

// image writes an image of source and opens it as gVisor's kernel does.
func image(t *testing.T, source string, pick func(string) erofs.Pick) (*reader.Image, erofs.Digest) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := erofs.Write(t.Context(), f, source, pick)
	if err != nil {
		t.Fatal(err)
	}
	return open(t, f), d
}

func open(t *testing.T, f *os.File) *reader.Image {
	t.Helper()
	i, err := reader.OpenImage(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(i.Close)
	return i
}

// content returns the content of a regular file in an image.
func content(t *testing.T, n *reader.Inode) []byte {
	t.Helper()
	ranges, err := n.DataRanges()
	if err != nil {
		t.Fatal(err)
	}
	if n.Size() > 0 {
		at, err := n.DataOffset() // what gVisor needs to map it
		if err != nil || at%4096 != 0 {
			t.Errorf("content is at %d, %v, not at the start of a block", at, err)
		}
	}
	return append(bytes.Clone(ranges[0].Bytes), ranges[1].Bytes...)
}

// compare compares the directory of an image with one of the host, with everything
// below them, and returns the numbers of the image's inodes by name.
func compare(t *testing.T, i *reader.Image, nid, parent uint64, path string, numbers map[string]uint64) {
	t.Helper()
	n, err := i.Inode(nid)
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	numbers[path] = nid
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprintf("%o %d:%d %d.%d", n.Mode(), n.UID(), n.GID(), n.Mtime(), n.MtimeNsec())
	if want := fmt.Sprintf("%o %d:%d %d.%d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec); got != want {
		t.Errorf("%s: got %s, want %s", path, got, want)
	}
	switch {
	case n.IsRegular():
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(content(t, &n), want) || n.Size() != uint64(len(want)) {
			t.Errorf("%s: other content", path)
		}
		if n.Nlink() != uint32(st.Nlink) {
			t.Errorf("%s: got %d names, want %d", path, n.Nlink(), st.Nlink)
		}
	case n.IsSymlink():
		got, err := n.Readlink()
		if want, _ := os.Readlink(path); err != nil || got != want {
			t.Errorf("%s: got %q, %v, want %q", path, got, err, want)
		}
	case n.IsDir():
		if n.Nlink() != uint32(st.Nlink) {
			t.Errorf("%s: got %d links, want %d", path, n.Nlink(), st.Nlink)
		}
		es, err := os.ReadDir(path)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{".": true, "..": true}
		if err := n.IterDirents(func(name string, _ uint8, at uint64) error {
			switch name {
			case ".":
				if at != nid {
					t.Errorf("%s/.: got %d, want %d", path, at, nid)
				}
			case "..":
				if at != parent {
					t.Errorf("%s/..: got %d, want %d", path, at, parent)
				}
			default:
				seen[name] = true
				compare(t, i, at, nid, filepath.Join(path, name), numbers)
			}
			return nil
		}); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		for _, e := range es {
			at, err := n.Lookup(e.Name())
			if err != nil || at != numbers[filepath.Join(path, e.Name())] {
				t.Errorf("%s: lookup: got %d, %v", filepath.Join(path, e.Name()), at, err)
			}
		}
		if len(seen) != len(es)+2 {
			t.Errorf("%s: got %d entries, want %d", path, len(seen), len(es)+2)
		}
		if _, err := n.Lookup("missing"); err == nil {
			t.Errorf("%s: it has a missing file", path)
		}
	}
}

func TestImageHoldsWhatTheDirectoryHolds(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, b []byte, mode fs.FileMode) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, b, mode), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	write("empty", nil, 0o600)
	write("a", []byte("a"), 0o644)
	write("block", bytes.Repeat([]byte("b"), 4096), 0o644)
	write("more", bytes.Repeat([]byte("m"), 4097), 0o755)
	write("large", bytes.Repeat([]byte("0123456789"), 300_000), 0o400)
	write("su", []byte("#!"), fs.ModeSetuid|0o755)
	write(strings.Repeat("n", 255), []byte("long"), 0o644)
	write("\x01 \xff\n", []byte("odd"), 0o644)
	// Directories whose entries need about one block, and many.
	for _, n := range []int{0, 1, 2, 145, 146, 147, 148, 149, 150, 151, 152, 1000} {
		sub := filepath.Join("dirs", fmt.Sprint(n))
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o750); err != nil {
			t.Fatal(err)
		}
		for i := range n {
			write(filepath.Join(sub, fmt.Sprintf("file-%010d", i)), nil, 0o644)
		}
	}
	for i, target := range []string{"a", "/", "missing/..", strings.Repeat("x", 4000)} {
		if err := os.Symlink(target, filepath.Join(dir, fmt.Sprint("link", i))); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(
		os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "dirs/a")),
		os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "dirs/1/a")),
		os.Chtimes(filepath.Join(dir, "a"), time.Unix(5, 7), time.Unix(1e9, 123456789)),
		// Opening it would wait for a writer forever.
		unix.Mkfifo(filepath.Join(dir, "pipe"), 0o622),
	); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		if err := errors.Join(os.Lchown(filepath.Join(dir, "block"), 1000, 70000), os.Lchown(filepath.Join(dir, "link1"), 1, 2)); err != nil {
			t.Fatal(err)
		}
	}
	i, d := image(t, dir, nil)
	numbers := map[string]uint64{}
	compare(t, i, i.RootNid(), i.RootNid(), dir, numbers)
	if a, b, c := numbers[filepath.Join(dir, "a")], numbers[filepath.Join(dir, "dirs/a")], numbers[filepath.Join(dir, "dirs/1/a")]; a != b || a != c {
		t.Errorf("hard links: got inodes %d, %d, %d, want one", a, b, c)
	}
	if i.SuperBlock().UUID != d {
		t.Errorf("UUID: got %x, want %v", i.SuperBlock().UUID, d)
	}
	_, again := image(t, dir, nil)
	if again != d {
		t.Errorf("the same directory again: got %v, want %v", again, d)
	}
	write("a", []byte("b"), 0o644)
	if _, other := image(t, dir, nil); other == d {
		t.Error("other content has the same digest")
	}
}

func TestImageLeavesOutWhatIsNotKept(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, "secret/below"), 0o755), os.WriteFile(filepath.Join(dir, "kept"), nil, 0o644),
		os.Symlink("/etc/shadow", filepath.Join(dir, "blank"))); err != nil {
		t.Fatal(err)
	}
	i, _ := image(t, dir, func(name string) erofs.Pick {
		switch name {
		case "secret":
			return erofs.Omit
		case "blank":
			return erofs.Blank
		}
		return erofs.Keep
	})
	root, err := i.Inode(i.RootNid())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := root.Lookup("kept"); err != nil {
		t.Error(err)
	}
	if root.Mtime() != 0 || root.MtimeNsec() != 0 {
		t.Errorf("the directory's time says when what is omitted changed: %d", root.Mtime())
	}
	if _, err := root.Lookup("secret"); err == nil {
		t.Error("what is omitted is there")
	}
	nid, err := root.Lookup("blank")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := i.Inode(nid); err != nil || !n.IsRegular() || n.Size() != 0 {
		t.Errorf("blank: got mode %o, size %d, %v", n.Mode(), n.Size(), err)
	}
}

func TestImageOfAFile(t *testing.T) {
	for _, size := range []int{0, 1, 4096, 100_000} {
		want := bytes.Repeat([]byte("x"), size)
		f, err := os.Create(filepath.Join(t.TempDir(), "image"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := erofs.WriteFile(f, want, 0o755); err != nil {
			t.Fatal(err)
		}
		i := open(t, f)
		root, err := i.Inode(i.RootNid())
		if err != nil {
			t.Fatal(err)
		}
		if !root.IsRegular() || root.Mode()&0o7777 != 0o755 || !bytes.Equal(content(t, &root), want) {
			t.Errorf("%d bytes: got mode %o, size %d", size, root.Mode(), root.Size())
		}
	}
}

// TestImageDoesNotFollowLinks: a package could hold a link to a
// directory of the host.
func TestImageDoesNotFollowLinks(t *testing.T) {
	secret := t.TempDir()
	if err := os.WriteFile(filepath.Join(secret, "key"), []byte("secret key"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := errors.Join(os.Symlink(secret, filepath.Join(dir, "d")), os.Symlink(filepath.Join(secret, "key"), filepath.Join(dir, "f"))); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := erofs.Write(t.Context(), f, dir, nil); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(b, []byte("secret key")) {
		t.Error("the image holds a file from outside the directory")
	}
}

func TestImageStopsWithItsContext(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a"), []byte("a"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := erofs.Write(ctx, f, dir, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	// What was written has no superblock, so nothing takes it for an image.
	if i, err := reader.OpenImage(f); err == nil {
		i.Close()
		t.Error("it opens")
	}
}
