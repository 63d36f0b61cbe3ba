package rootfs_test

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"

	"postern/internal/rootfs"
)

// seeds returns archives that try something.
func seeds(t testing.TB) [][]byte {
	base := []entry{dir("etc"), file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"), link("lib", "usr/lib"), file("usr/lib/a", "A"), hard("b", "usr/lib/a")}
	list := [][]byte{archive(t, base...), {}, bytes.Repeat([]byte{0}, 1024)}
	for _, l := range [][]entry{
		{file("../a", "x")},
		{file("etc/.wh.passwd", ""), file("etc/.wh..wh..opq", "")},
		{whiteout("etc"), opaque("usr"), file("usr/x", "X")},
		{link("a", "a"), file("a/b", "x")},
		{link("etc", "/run/postern"), link("run", "/etc")},
		{hard("etc/self", "etc/passwd"), hard("etc/passwd", "etc/self")},
		{file("lib/evil", "x"), dir("lib"), file("lib/evil", "y")},
		{file(strings.Repeat("n", 300)+"/x", "long")},
		{file("a", "").record("GNU.sparse.realsize", "99999999999")},
		{file("a", "x").owner(1<<31-1, 1<<31-1)},
		{link("proc", "/etc"), file("etc/group", "user:x:1:\n"), dir("etc/hosts")},
	} {
		list = append(list, archive(t, append(slices.Clip(base), l...)...))
	}
	return list
}

// FuzzApply: whatever is in a layer, an error is that of the layer, and what was
// applied can be prepared and written as an image, twice the same.
func FuzzApply(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		if len(a)+len(b) > 1<<20 {
			return
		}
		tree := rootfs.New()
		defer tree.Close()
		for _, layer := range [][]byte{a, b} {
			if err := tree.Apply(stored(t, layer), rootfs.Limits{Bytes: 1 << 20, Entries: 1000}); err != nil {
				if !errors.Is(err, rootfs.ErrInvalid) {
					t.Errorf("got %v", err)
				}
				return
			}
		}
		if err := tree.Provision(); err != nil {
			if !errors.Is(err, rootfs.ErrInvalid) {
				t.Errorf("got %v", err)
			}
			return
		}
		if err := tree.Provision(); err != nil {
			t.Errorf("once more: %v", err)
		}
		path := written(t, tree)
		again, err := rootfs.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		if other := written(t, again); !bytes.Equal(content(t, path), content(t, other)) {
			t.Error("the image of the image differs")
		}
	})
}

// FuzzDelta: a layer that is made of two states of a sandbox can be applied, and gives
// the later one.
func FuzzDelta(f *testing.F) {
	for _, s := range seeds(f) {
		f.Add(s, s)
		f.Add([]byte{}, s)
	}
	one := archive(f, dir("."), opaque("./etc"), file("./etc/passwd", "Q"), whiteout("./lib"), dir("./usr"), file("./usr/b", "B"), dir("./home"), file("./home/x.py", "X"))
	f.Add([]byte{}, one)
	f.Add(one, archive(f, dir("."), whiteout("./etc"), dir("./usr"), file("./usr/b", "C"), hard("./usr/c", "./usr/b"), dir("./home"), whiteout("./home/x"), link("./home/l", "../etc"),
		dir("./home/__pycache__"), file("./home/__pycache__/x.pyc", "\xa7\r\r\n\x00\x00\x00\x00\x07\x00\x00\x00sizecode")))
	f.Fuzz(func(t *testing.T, before, after []byte) {
		if len(before)+len(after) > 1<<20 {
			return
		}
		below := made(t, base())
		var layer bytes.Buffer
		if _, err := rootfs.Delta(&layer, below, stored(t, before), stored(t, after), clamp()); err != nil {
			if !errors.Is(err, rootfs.ErrInvalid) {
				t.Errorf("got %v", err)
			}
			return
		}
		tree := made(t, base())
		for _, l := range [][]byte{before, layer.Bytes()} {
			if err := tree.Apply(stored(t, l), rootfs.Limits{}); err != nil {
				t.Fatalf("apply: %v", err)
			}
		}
		// Nothing is left to be done.
		var none bytes.Buffer
		if _, err := rootfs.Delta(&none, tree, nil, stored(t, after), clamp()); err != nil {
			t.Fatal(err)
		}
		if left := lines(t, none.Bytes()); len(left) > 0 {
			t.Errorf("left: %q\nlayer: %q", left, lines(t, layer.Bytes()))
		}
	})
}

// base returns what is below the states of FuzzDelta.
func base() []entry {
	return []entry{dir("etc"), file("etc/passwd", "P"), dir("usr"), file("usr/a", "A"), hard("usr/b", "usr/a"), link("lib", "usr")}
}
