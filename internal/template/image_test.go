package template

import (
	"errors"
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

// TestGuestIsAnImageOfItsOwn: each version of the program adds its own, and takes no
// other's away.
func TestGuestIsAnImageOfItsOwn(t *testing.T) {
	dir := t.TempDir()
	c, out := newCache(t, dir, "guest one")
	tplDir := pretend(t, c, c.recipes[0].id())
	left := filepath.Join(tplDir, imagesDir, ".making-1")
	write(t, left, "half an image")
	one, err := c.Base(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !os.IsNotExist(err) {
		t.Errorf("what a killed process left: got %v", err)
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
	link, err := filepath.EvalSymlinks(filepath.Join(dir, "base-current"))
	if err != nil || link != one.RootImage {
		t.Errorf("base-current: got %q, %v, want %q", link, err, one.RootImage)
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

	if err := os.Remove(one.RootImage); err != nil {
		t.Fatal(err)
	}
	c3, _ := newCache(t, dir, "guest three")
	if _, err := c3.Base(t.Context()); err == nil || !strings.Contains(err.Error(), "lost its image") {
		t.Errorf("without its image: got %v, want it to say what to do", err)
	}
}

// TestTemplatesOfOlderPrograms: a sandbox that was saved on a directory finds it again.
func TestTemplatesOfOlderPrograms(t *testing.T) {
	c, _ := newCache(t, t.TempDir(), "guest")
	dir := filepath.Join(c.cfg.Dir, "templates", "base-0123456789abcdef")
	write(t, filepath.Join(dir, "template.json"), `{"id":"base-0123456789abcdef","name":"base","packages":1}`)
	write(t, filepath.Join(dir, "in-use"), "")
	write(t, filepath.Join(dir, "rootfs/etc/hostname"), "sandbox")
	tpl, err := c.ByID(t.Context(), "base-0123456789abcdef")
	if err != nil || tpl.RootImage != "" || tpl.GuestImage != "" || tpl.Rootfs != filepath.Join(dir, "rootfs") || tpl.Ready == nil {
		t.Errorf("got %+v, %v, want the directory alone", tpl, err)
	}
	rec, err := c.Record(tpl.ID)
	if err != nil || rec.Path != tpl.Rootfs || len(rec.Names) != 0 {
		t.Errorf("record: got %+v, %v", rec, err)
	}
	for _, id := range []string{"base-ffffffffffffffff", "../base", "..", ""} {
		if _, err := c.ByID(t.Context(), id); !errors.Is(err, ErrNotFound) {
			t.Errorf("by ID %q: got %v", id, err)
		}
		if err := c.WriteSPDX(t.Output(), id); !errors.Is(err, ErrNotFound) {
			t.Errorf("record of %q: got %v", id, err)
		}
	}
}
