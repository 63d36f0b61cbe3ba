package gvisor

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"postern/internal/erofs"
	"postern/internal/erofs/erofstest"
)

// TestSandboxesShareAJoinedImage: each start gets the same file, so that its pages are in
// memory once, and no file of a template that was deleted stays open.
func TestSandboxesShareAJoinedImage(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	flat := erofstest.Write(t, dir, &erofs.Node{Mode: unix.S_IFDIR | 0o755, Entries: map[string]*erofs.Node{
		"a": {Mode: unix.S_IFREG | 0o644, Text: strings.Repeat("a", 9000), Size: 9000},
	}}, nil)
	base, err := erofs.Open(flat)
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close()
	root, _, err := erofs.Read(base.File)
	if err != nil {
		t.Fatal(err)
	}
	path := erofstest.Write(t, dir, root, base)
	if i, err := erofs.Open(path); err != nil {
		t.Skipf("this kernel joins no images: %v", err)
	} else {
		i.Close()
	}
	var images joinedImages
	defer func() {
		if len(images.open) != 0 {
			t.Errorf("left open: %v", images.open)
		}
	}()
	if f, err := images.file(flat); f != nil || err != nil {
		t.Errorf("an image that is not joined: got %v, %v, want that the launcher opens it", f, err)
	}
	var got []os.FileInfo
	for range 2 {
		f, err := images.file(path)
		if err != nil {
			t.Fatal(err)
		}
		st, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, st)
		if _, err := f.WriteAt([]byte("x"), 0); err == nil {
			t.Error("a sandbox could write to the image")
		}
		f.Close()
	}
	if !os.SameFile(got[0], got[1]) {
		t.Error("two starts have different files")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	images.drop()
	if f, err := images.file(path); err == nil {
		t.Errorf("an image that was removed: got %v", f)
	}
}
