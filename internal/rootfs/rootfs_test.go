package rootfs_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	reader "gvisor.dev/gvisor/pkg/erofs"

	"postern/internal/rootfs"
)

// An entry is one of a test's archives.
type entry struct {
	h    tar.Header
	body string
}

func file(name, body string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, ModTime: time.Unix(7, 0)}, body}
}

func dir(name string) entry {
	return entry{h: tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755, ModTime: time.Unix(7, 0)}}
}

func link(name, to string) entry {
	return entry{h: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}}
}

func hard(name, to string) entry {
	return entry{h: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to}}
}

func whiteout(name string) entry { return entry{h: tar.Header{Typeflag: tar.TypeChar, Name: name}} }

func opaque(name string) entry {
	e := dir(name)
	e.h.PAXRecords = map[string]string{"SCHILY.xattr.trusted.overlay.opaque": "y"}
	return e
}

func (e entry) mode(m int64) entry       { e.h.Mode = m; return e }
func (e entry) owner(u, g int) entry     { e.h.Uid, e.h.Gid = u, g; return e }
func (e entry) at(t time.Time) entry     { e.h.ModTime = t; return e }
func (e entry) typed(b byte) entry       { e.h.Typeflag = b; return e }
func (e entry) device(a, b int64) entry  { e.h.Devmajor, e.h.Devminor = a, b; return e }
func (e entry) record(k, v string) entry { e.h.PAXRecords = map[string]string{k: v}; return e }

// archive returns the bytes of a tar archive.
func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		e.h.Size = int64(len(e.body))
		if err := w.WriteHeader(&e.h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// memory returns an empty file that is in no directory.
func memory(t testing.TB) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), fmt.Sprintf("/proc/self/fd/%d", fd))
	t.Cleanup(func() { f.Close() })
	return f
}

// stored returns a file of the host with that content.
func stored(t testing.TB, content []byte) *os.File {
	t.Helper()
	f := memory(t)
	if _, err := f.Write(content); err != nil {
		t.Fatal(err)
	}
	return f
}

func apply(t testing.TB, tree *rootfs.Tree, entries ...entry) error {
	t.Helper()
	return tree.Apply(stored(t, archive(t, entries...)), rootfs.Limits{})
}

// made returns a tree of layers.
func made(t testing.TB, layers ...[]entry) *rootfs.Tree {
	t.Helper()
	tree := rootfs.New()
	t.Cleanup(func() { tree.Close() })
	for _, l := range layers {
		if err := apply(t, tree, l...); err != nil {
			t.Fatal(err)
		}
	}
	return tree
}

// written writes the image of a tree and returns its path.
func written(t testing.TB, tree *rootfs.Tree) string {
	t.Helper()
	f := memory(t)
	if _, err := tree.WriteImage(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	return f.Name()
}

// listed returns what gVisor's kernel would see in the image of a tree: a line for
// each file, by its path. The guest's place is left out, with its directories unless
// something else is in them.
func listed(t testing.TB, tree *rootfs.Tree) map[string]string {
	t.Helper()
	f, err := os.Open(written(t, tree))
	if err != nil {
		t.Fatal(err)
	}
	i, err := reader.OpenImage(f)
	if err != nil {
		t.Fatal(err)
	}
	defer i.Close()
	got, numbers := map[string]string{}, map[uint64]string{}
	var visit func(path string, nid uint64)
	visit = func(path string, nid uint64) {
		n, err := i.Inode(nid)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		line := fmt.Sprintf("%o %d:%d %d", n.Mode(), n.UID(), n.GID(), n.Mtime())
		switch {
		case n.IsRegular():
			ranges, err := n.DataRanges()
			if err != nil {
				t.Fatal(err)
			}
			line += " " + string(ranges[0].Bytes) + string(ranges[1].Bytes)
			if first := numbers[nid]; first != "" {
				line += " = " + first
			} else {
				numbers[nid] = path
			}
		case n.IsSymlink():
			to, err := n.Readlink()
			if err != nil {
				t.Fatal(err)
			}
			line += " -> " + to
		}
		got[path] = line
		if !n.IsDir() {
			return
		}
		if err := n.IterDirents(func(name string, _ uint8, nid uint64) error {
			if name != "." && name != ".." {
				visit(path+"/"+name, nid)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	visit("", i.RootNid())
	for p := rootfs.GuestPath; p != ""; p = p[:strings.LastIndexByte(p, '/')] {
		if got[p] == "100644 0:0 0 " || got[p] == "40755 0:0 0" {
			delete(got, p)
		}
	}
	return got
}

func check(t *testing.T, tree *rootfs.Tree, want map[string]string) {
	t.Helper()
	got := listed(t, tree)
	delete(got, "")
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

func TestLayersMakeOneTree(t *testing.T) {
	type layer = []entry
	base := layer{
		dir("etc"), file("etc/a", "A").mode(0o600).owner(1000, 70000), file("etc/b", "B"), dir("usr"), dir("usr/lib"),
		file("usr/lib/x", "X"), link("lib", "usr/lib"), link("abs", "/usr"),
	}
	for _, tt := range []struct {
		name   string
		layers []layer
		want   map[string]string
	}{
		{
			"what a file has",
			[]layer{{
				dir("d").mode(0o1777), file("d/su", "#!").mode(0o4755), file("d/empty", ""), link("d/l", "../etc/shadow"),
				file("d/"+strings.Repeat("n", 200)+"/"+strings.Repeat("m", 200), "long"),
				file("d/\xff\n", "odd"), file("later", "L").at(time.Unix(1<<31, 5)), file("never", "N").at(time.Unix(-5, 0)),
			}},
			map[string]string{
				"/d": "41777 0:0 7", "/d/su": "104755 0:0 7 #!", "/d/empty": "100644 0:0 7 ", "/d/l": "120777 0:0 0 -> ../etc/shadow",
				"/d/" + strings.Repeat("n", 200):                                  "40755 0:0 0",
				"/d/" + strings.Repeat("n", 200) + "/" + strings.Repeat("m", 200): "100644 0:0 7 long",
				"/d/\xff\n": "100644 0:0 7 odd", "/later": "100644 0:0 2147483648 L", "/never": "100644 0:0 0 N",
			},
		},
		{
			"whiteouts of OCI",
			[]layer{base, {file("etc/.wh.a", ""), file(".wh.lib", ""), file(".wh.missing", ""), file("no/.wh.x", "")}},
			map[string]string{
				"/etc": "40755 0:0 7", "/etc/b": "100644 0:0 7 B", "/usr": "40755 0:0 7", "/usr/lib": "40755 0:0 7",
				"/usr/lib/x": "100644 0:0 7 X", "/abs": "120777 0:0 0 -> /usr",
			},
		},
		{
			"opaque directories hide what is below, not what is beside",
			[]layer{base, {file("etc/new", "N"), file("etc/.wh..wh..opq", ""), opaque("usr"), dir("usr/bin")}},
			map[string]string{
				"/etc": "40755 0:0 7", "/etc/new": "100644 0:0 7 N", "/usr": "40755 0:0 7", "/usr/bin": "40755 0:0 7",
				"/abs": "120777 0:0 0 -> /usr", "/lib": "120777 0:0 0 -> usr/lib",
			},
		},
		{
			"whiteouts of an overlay",
			[]layer{base, {dir("."), whiteout("./etc"), whiteout("./usr"), whiteout("./lib"), whiteout("./never")}},
			map[string]string{"/abs": "120777 0:0 0 -> /usr"},
		},
		{
			"a whiteout does not hide its own layer",
			[]layer{{file("a", "old")}, {file("a", "new"), file(".wh.a", "")}},
			map[string]string{"/a": "100644 0:0 7 new"},
		},
		{
			"files replace directories and directories files",
			[]layer{base, {file("etc", "E"), dir("usr/lib/x"), file("usr/lib/x/y", "Y"), file("lib", "L"), dir("abs"), file("abs/z", "Z")}},
			map[string]string{
				"/etc": "100644 0:0 7 E", "/usr": "40755 0:0 7", "/usr/lib": "40755 0:0 7", "/usr/lib/x": "40755 0:0 7",
				"/usr/lib/x/y": "100644 0:0 7 Y", "/lib": "100644 0:0 7 L", "/abs": "40755 0:0 7", "/abs/z": "100644 0:0 7 Z",
			},
		},
		{
			"the last of two entries counts",
			[]layer{{file("a", "1"), file("a", "2"), dir("b"), file("b", "3"), dir("c"), dir("c").mode(0o700)}},
			map[string]string{"/a": "100644 0:0 7 2", "/b": "100644 0:0 7 3", "/c": "40700 0:0 7"},
		},
		{
			"links lead within the root",
			[]layer{
				{dir("usr"), dir("usr/lib"), link("lib", "usr/lib"), link("abs", "/usr/lib"), link("up", "../../../usr/lib"), link("new", "made/here")},
				{file("lib/a", "1"), file("abs/b", "2"), file("up/c", "3"), file("new/d", "4")},
			},
			map[string]string{
				"/usr": "40755 0:0 7", "/usr/lib": "40755 0:0 7", "/lib": "120777 0:0 0 -> usr/lib", "/abs": "120777 0:0 0 -> /usr/lib",
				"/up": "120777 0:0 0 -> ../../../usr/lib", "/new": "120777 0:0 0 -> made/here",
				"/usr/lib/a": "100644 0:0 7 1", "/usr/lib/b": "100644 0:0 7 2", "/usr/lib/c": "100644 0:0 7 3",
				"/made": "40755 0:0 0", "/made/here": "40755 0:0 0", "/made/here/d": "100644 0:0 7 4",
			},
		},
		{
			"hard links",
			[]layer{{file("a", "A"), hard("b", "a"), dir("d"), hard("d/c", "./b")}, {hard("e", "/d/c"), file("a", "new")}, {hard("e", "e")}},
			map[string]string{
				"/a": "100644 0:0 7 new", "/b": "100644 0:0 7 A", "/d": "40755 0:0 7", "/d/c": "100644 0:0 7 A = /b", "/e": "100644 0:0 7 A = /b",
			},
		},
		{
			"devices and pipes are left out", []layer{{file("old", "O")}, {
				entry{}.typed(tar.TypeChar).device(1, 3).named("null"), entry{}.typed(tar.TypeBlock).device(8, 0).named("old"),
				entry{}.typed(tar.TypeFifo).named("pipe"),
			}}, map[string]string{},
		},
		{
			"names",
			[]layer{{file("/abs", "1"), file("./dot", "2"), file("a//b/./c", "3"), file("...", "4"), file("..a", "5"), file(".whx", "6")}},
			map[string]string{
				"/abs": "100644 0:0 7 1", "/dot": "100644 0:0 7 2", "/a": "40755 0:0 0", "/a/b": "40755 0:0 0", "/a/b/c": "100644 0:0 7 3",
				"/...": "100644 0:0 7 4", "/..a": "100644 0:0 7 5", "/.whx": "100644 0:0 7 6",
			},
		},
		{
			"attributes are dropped",
			[]layer{{file("ping", "P").record("SCHILY.xattr.security.capability", "x")}},
			map[string]string{"/ping": "100644 0:0 7 P"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			check(t, made(t, tt.layers...), tt.want)
		})
	}
}

func (e entry) named(name string) entry { e.h.Name = name; return e }

func TestHostileLayersAreRefused(t *testing.T) {
	deep := strings.TrimSuffix(strings.Repeat("d/", 257), "/")
	down := func() (list []entry) { // deeper by a link with each entry
		list = append(list, file(strings.Repeat("d/", 200)+"x", ""), link("l", strings.Repeat("d/", 200)))
		return append(list, file("l/"+strings.Repeat("e/", 100)+"x", ""))
	}()
	for _, tt := range []struct {
		name    string
		entries []entry
		want    string
	}{
		{"a name that leads up", []entry{file("../etc/passwd", "x")}, `the name ".." is not allowed`},
		{"a name that leads up later", []entry{file("a/../../b", "x")}, `the name ".." is not allowed`},
		{"a long part", []entry{file(strings.Repeat("n", 256), "x")}, "is not allowed"},
		{"a long name", []entry{file(strings.Repeat("n/", 2100)+"x", "x")}, "more than 4095 bytes"},
		{"deep directories", []entry{file(deep+"/x", "")}, "more than 256 nested directories"},
		{"deep directories by a link", down, "more than 256 nested directories"},
		{"a hard link that leads up", []entry{hard("a", "../../etc/shadow")}, `the name ".." is not allowed`},
		{"a hard link to a missing file", []entry{hard("a", "/etc/shadow")}, "does not exist"},
		{"a hard link to a directory", []entry{dir("d"), hard("d/self", "d")}, "to the directory"},
		{"a link to itself", []entry{link("a", "a"), file("a/b", "")}, "symbolic links"},
		{"two links to each other", []entry{link("a", "b/x"), link("b", "a/y"), file("a/b", "")}, ""},
		{"a file as a directory", []entry{file("a", ""), file("a/b", "")}, "is not a directory"},
		{"a link to a file as a directory", []entry{file("f", ""), link("a", "f"), file("a/b", "")}, "is not a directory"},
		{"a link without a target", []entry{link("a", "")}, "target of a symbolic link"},
		{"a link with a long target", []entry{link("a", strings.Repeat("x", 4001))}, "target of a symbolic link"},
		{"a file below a whiteout", []entry{file(".wh.a/b", "")}, "below a whiteout"},
		{"a whiteout of the parent", []entry{file("d/.wh...", "")}, "is not allowed"},
		{"a whiteout of nothing", []entry{file("d/.wh.", "")}, "is not allowed"},
		{"the root as a file", []entry{file(".", "x")}, "the root"},
		{"the root as a link", []entry{link("/", "/etc")}, "the root"},
		{"a negative owner", []entry{file("a", "").owner(-1, 0)}, "owner"},
		{"an owner of 64 bits", []entry{file("a", "").owner(1<<33, 0)}, "owner"},
		{"an unknown type", []entry{file("a", "").typed('7')}, "type"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tree := rootfs.New()
			defer tree.Close()
			err := apply(t, tree, tt.entries...)
			if !errors.Is(err, rootfs.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func content(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestLayersCannotTakeTheProcessorForLong: each entry is below links that lead to each
// other in long ways.
func TestLayersCannotTakeTheProcessorForLong(t *testing.T) {
	list := []entry{file(strings.Repeat("d/", 250)+"x", "")}
	for i := range 35 {
		list = append(list, link(fmt.Sprint("l", i), fmt.Sprint(strings.Repeat("d/", 250), strings.Repeat("../", 250), strings.Repeat("./", 1000), "l", i+1)))
	}
	list = append(list, link("l35", "."))
	for i := range 20_000 {
		list = append(list, file(fmt.Sprint("l0/f", i), ""))
	}
	tree := rootfs.New()
	defer tree.Close()
	if err := apply(t, tree, list...); !errors.Is(err, rootfs.ErrInvalid) || !strings.Contains(err.Error(), "lookups") {
		t.Errorf("got %v", err)
	}
}
