package template

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	reader "gvisor.dev/gvisor/pkg/erofs"
)

// openImage opens an image as gVisor's kernel does.
func openImage(t *testing.T, path string) *reader.Image {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	i, err := reader.OpenImage(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(i.Close)
	return i
}

// lookup returns a file of an image; ok is false if it does not exist.
func lookup(t *testing.T, i *reader.Image, path string) (n reader.Inode, ok bool) {
	t.Helper()
	n, err := i.Inode(i.RootNid())
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		nid, err := n.Lookup(name)
		if err != nil {
			return n, false
		}
		if n, err = i.Inode(nid); err != nil {
			t.Fatal(err)
		}
	}
	return n, true
}

// TestTemplateGetsImages: also one that an older program has built, and again when it
// was killed meanwhile.
func TestTemplateGetsImages(t *testing.T) {
	dir := t.TempDir()
	c, out := newCache(t, dir, "guest one")
	rootfs := pretend(t, c, c.recipe.id())
	write(t, filepath.Join(rootfs, "etc/passwd"), "root:x:0:0:")
	write(t, filepath.Join(rootfs, GuestPath+"-older"), "older guest")
	left := filepath.Join(filepath.Dir(rootfs), imagesDir, ".making-1")
	write(t, left, "half an image")
	one, err := c.Base(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("what a killed process left: got %v", err)
	}
	root := openImage(t, one.RootImage)
	if n, ok := lookup(t, root, "etc/passwd"); !ok || n.Size() != 11 {
		t.Errorf("etc/passwd: got %v, %d bytes", ok, n.Size())
	}
	if n, ok := lookup(t, root, GuestPath); !ok || !n.IsRegular() || n.Size() != 0 {
		t.Errorf("the guest's place: got %v, mode %o, %d bytes, want an empty file", ok, n.Mode(), n.Size())
	}
	for _, name := range []string{"-older", "-" + c.digest[:16]} {
		if _, ok := lookup(t, root, GuestPath+name); ok {
			t.Errorf("the image has %s", GuestPath+name)
		}
	}
	guest := openImage(t, one.GuestImage)
	n, err := guest.Inode(guest.RootNid())
	if err != nil || n.Size() != 9 || n.Mode()&0o7777 != 0o755 {
		t.Errorf("guest: got mode %o, %d bytes, %v", n.Mode(), n.Size(), err)
	}
	before := out.String()
	again, err := c.Base(t.Context())
	if err != nil || again.RootImage != one.RootImage || again.GuestImage != one.GuestImage || out.String() != before {
		t.Errorf("again: got %+v, %v", again, err)
	}

	// The next version of the program has another guest, and uses the same image of
	// the rest, even if that was lost meanwhile.
	if err := os.Remove(one.RootImage); err != nil {
		t.Fatal(err)
	}
	c2, _ := newCache(t, dir, "guest two")
	two, err := c2.Base(t.Context())
	if err != nil || two.RootImage != one.RootImage || two.GuestImage == one.GuestImage {
		t.Errorf("another guest: got %s and %s, %v, want %s and another", two.RootImage, two.GuestImage, err, one.RootImage)
	}
	if _, err := os.Stat(one.GuestImage); err != nil {
		t.Errorf("a snapshot needs the old guest: %v", err)
	}
	if tpl, err := c.Base(t.Context()); err != nil || tpl.GuestImage != one.GuestImage {
		t.Errorf("the old program: got %s, %v, want %s", tpl.GuestImage, err, one.GuestImage)
	}
}

// TestTemplateWithoutImage: where no image can be made, the directory still serves.
func TestTemplateWithoutImage(t *testing.T) {
	c, out := newCache(t, t.TempDir(), "guest")
	rootfs := pretend(t, c, c.recipe.id())
	write(t, filepath.Join(filepath.Dir(rootfs), imagesDir), "a file is in the way")
	for range 2 {
		tpl, err := c.Base(t.Context())
		if err != nil || tpl.RootImage != "" || tpl.GuestImage != "" || tpl.Rootfs != rootfs {
			t.Errorf("got %+v, %v, want the directory alone", tpl, err)
		}
	}
	if n := strings.Count(out.String(), "no image"); n != 1 {
		t.Errorf("said %d times that there is no image, want once:\n%s", n, out)
	}
}
