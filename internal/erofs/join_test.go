package erofs_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	reader "gvisor.dev/gvisor/pkg/erofs"

	"postern/internal/erofs"
	"postern/internal/erofs/erofstest"
)

// needJoin skips a test where the kernel cannot join images: there WriteJoined is not used.
func needJoin(t *testing.T) {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor); err != nil || major < 6 || major == 6 && minor < 12 || os.Geteuid() != 0 {
		t.Skip("it needs root and Linux 6.12")
	}
}

// get opens an image and reads its tree.
func get(t testing.TB, path string) (*erofs.Image, *erofs.Node) {
	t.Helper()
	i, err := erofs.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { i.Close() })
	root, d, err := erofs.Read(i.File)
	if err != nil {
		t.Fatal(err)
	}
	if d != i.Digest || erofs.PartName(d) != filepath.Base(path) {
		t.Errorf("digest: got %v and %v of %s", d, i.Digest, path)
	}
	return i, root
}

// TestJoinedImage: images that take their content from others read as if they had it,
// over several generations, by us and by gVisor's kernel.
func TestJoinedImage(t *testing.T) {
	needJoin(t)
	dir := t.TempDir()
	first := tree()
	// Over one extent of the head, and not a multiple of it.
	first.Entries["big"] = text(strings.Repeat("0123456789abcdef", 3<<16+300))
	path := erofstest.Write(t, dir, first, nil)
	for generation := range 4 {
		base, root := get(t, path)
		root.Entries[fmt.Sprintf("new%d", generation)] = text(strings.Repeat("n", 5000+generation))
		root.Entries[fmt.Sprintf("again%d", generation)] = root.Entries["big"] // a further name
		delete(root.Entries["many"].Entries, fmt.Sprintf("file-%05d", generation))
		if generation == 2 {
			root.Entries["big"] = text(strings.Repeat("B", 2<<20))
		}
		want := show(t, root)
		path = erofstest.Write(t, dir, root, base)
		if again := erofstest.Write(t, dir, root, base); again != path {
			t.Errorf("the same tree gives %s, then %s", path, again)
		}
		i, got := get(t, path)
		if show(t, got) != want {
			t.Fatalf("generation %d is not what was written", generation)
		}
		if parts, err := erofs.Parts(path); err != nil || len(parts) != generation+1 || !slices.Equal(parts, i.Parts) {
			t.Errorf("generation %d: %d parts, %v", generation, len(parts), err)
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil || st.Blocks*512 > 3<<20 {
			t.Errorf("generation %d takes %d bytes, %v", generation, st.Blocks*512, err)
		}
		// gVisor's kernel maps it. It closes the file.
		mapped, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", i.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		image := open(t, mapped)
		for name, n := range root.Entries {
			if n.Kind() == unix.S_IFREG {
				if got := string(fileOf(t, image, name)); got != string(nodeBytes(t, n)) {
					t.Errorf("generation %d: %s has %d bytes in gVisor's kernel, not %d, or others", generation, name, len(got), n.Size)
				}
			}
		}
		// It can be written as an image of its own.
		flat, _ := get(t, erofstest.Write(t, t.TempDir(), got, nil))
		if flat.Parts != nil {
			t.Error("an image of its own has parts")
		}
	}
}

func fileOf(t *testing.T, i *reader.Image, name string) []byte {
	t.Helper()
	root, err := i.Inode(i.RootNid())
	if err != nil {
		t.Fatal(err)
	}
	nid, err := root.Lookup(name)
	if err != nil {
		t.Fatal(err)
	}
	n, err := i.Inode(nid)
	if err != nil {
		t.Fatal(err)
	}
	return content(t, &n)
}

func nodeBytes(t *testing.T, n *erofs.Node) []byte {
	t.Helper()
	if n.From == nil {
		return []byte(n.Text)
	}
	b, err := io.ReadAll(io.NewSectionReader(n.From, n.At, n.Size))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestJoinedImageNeedsItsParts: an image whose part is missing or is another file cannot
// be opened, and says which.
func TestJoinedImageNeedsItsParts(t *testing.T) {
	needJoin(t)
	dir := t.TempDir()
	first := erofstest.Write(t, dir, folder(map[string]*erofs.Node{"a": text("one")}), nil)
	other := erofstest.Write(t, dir, folder(map[string]*erofs.Node{"a": text("two")}), nil)
	base, root := get(t, first)
	root.Entries["b"] = text("more")
	path := erofstest.Write(t, dir, root, base)
	if err := os.Rename(other, first); err != nil {
		t.Fatal(err)
	}
	if i, err := erofs.Open(path); !errors.Is(err, erofs.ErrFormat) || !strings.Contains(err.Error(), first) {
		t.Errorf("a part is another file: got %v, %v", i, err)
	}
	if err := os.Remove(first); err != nil {
		t.Fatal(err)
	}
	if i, err := erofs.Open(path); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), first) {
		t.Errorf("a part is missing: got %v, %v", i, err)
	}
	if parts, err := erofs.Parts(path); err != nil || len(parts) != 1 || erofs.PartName(parts[0]) != filepath.Base(first) {
		t.Errorf("parts: got %v, %v", parts, err)
	}
}

// TestJoinedImageHasFewParts: no chain of images grows without end.
func TestJoinedImageHasFewParts(t *testing.T) {
	needJoin(t)
	dir := t.TempDir()
	path := erofstest.Write(t, dir, folder(map[string]*erofs.Node{"0": text("x")}), nil)
	for n := 1; ; n++ {
		base, root := get(t, path)
		root.Entries[fmt.Sprint(n)] = text("x")
		f, err := os.CreateTemp(dir, "")
		if err != nil {
			t.Fatal(err)
		}
		_, err = erofs.WriteJoined(t.Context(), f, root, base)
		f.Close()
		if errors.Is(err, errors.ErrUnsupported) && n > 2 {
			return
		}
		if err != nil || n > 100 {
			t.Fatalf("after %d: %v", n, err)
		}
		path = erofstest.Write(t, dir, root, base)
	}
}

// FuzzParts: the head of an image must never make the server crash or take all memory.
func FuzzParts(f *testing.F) {
	dir := f.TempDir()
	flat := erofstest.Write(f, dir, folder(map[string]*erofs.Node{"a": text("A")}), nil)
	base, root := get(f, flat)
	root.Entries["b"] = text("B")
	for _, path := range []string{flat, erofstest.Write(f, dir, root, base)} {
		b, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[:min(len(b), 8192)])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<16 {
			return
		}
		head := memory(t)
		if _, err := head.Write(b); err != nil {
			t.Fatal(err)
		}
		parts, err := erofs.ReadHead(head)
		if err == nil && len(parts) > 16 {
			t.Errorf("%d parts", len(parts))
		}
	})
}
