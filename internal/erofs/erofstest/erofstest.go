// Package erofstest writes images for tests.
package erofstest

import (
	"os"
	"path/filepath"
	"testing"

	"postern/internal/erofs"
)

// Write writes an image of the tree below root to the name in dir that it has as a part of
// others, and returns its path. If base is set, the image is joined with it.
func Write(t testing.TB, dir string, root *erofs.Node, base *erofs.Image) string {
	t.Helper()
	f, err := os.CreateTemp(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var d erofs.Digest
	if base == nil {
		d, err = erofs.WriteTree(t.Context(), f, root)
	} else {
		d, err = erofs.WriteJoined(t.Context(), f, root, base)
	}
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, erofs.PartName(d))
	if err := os.Rename(f.Name(), path); err != nil {
		t.Fatal(err)
	}
	return path
}
