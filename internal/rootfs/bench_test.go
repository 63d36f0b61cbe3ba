package rootfs_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"postern/internal/rootfs"
)

// BenchmarkWriteImage measures the image of a template: that of a base image, from the
// file that POSTERN_BENCH_IMAGE names, and a small layer.
func BenchmarkWriteImage(b *testing.B) {
	base := os.Getenv("POSTERN_BENCH_IMAGE")
	if base == "" {
		b.Skip("set POSTERN_BENCH_IMAGE to an EROFS image, such as that of the base template")
	}
	layer := stored(b, archive(b, dir("app"), file("app/main.py", "print('hello')\n")))
	for b.Loop() {
		tree, err := rootfs.Open(base)
		if err != nil {
			b.Fatal(err)
		}
		if err := tree.Apply(layer, rootfs.Limits{}); err != nil {
			b.Fatal(err)
		}
		f, err := os.Create(filepath.Join(b.TempDir(), "image"))
		if err != nil {
			b.Fatal(err)
		}
		if _, err := tree.WriteImage(b.Context(), f); err != nil {
			b.Fatal(err)
		}
		if st, err := f.Stat(); err == nil {
			b.SetBytes(st.Size())
		}
		f.Close()
		os.Remove(f.Name())
		tree.Close()
	}
}

// BenchmarkApply measures a layer of many small files.
func BenchmarkApply(b *testing.B) {
	var list []entry
	for i := range 20_000 {
		list = append(list, file(fmt.Sprintf("usr/lib/python3/dist-packages/package-%d/module-%d.py", i/100, i), strings.Repeat("x", 2000)))
	}
	layer := stored(b, archive(b, list...))
	for b.Loop() {
		tree := rootfs.New()
		if err := tree.Apply(layer, rootfs.Limits{}); err != nil {
			b.Fatal(err)
		}
		tree.Close()
	}
}
