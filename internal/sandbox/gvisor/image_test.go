package gvisor

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"postern/internal/sandbox"
	"postern/internal/sandbox/launch"
)

// digest returns the SHA-256 of a file.
func digest(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// names returns the names of a sandbox's processes.
func names(t *testing.T, r *Runtime, id string) (out []string) {
	t.Helper()
	pids, err := r.cgroups.pids(id)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pids {
		cmd, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p))
		if err != nil {
			continue // it has ended
		}
		name, _, _ := strings.Cut(string(cmd), "\x00")
		out = append(out, name)
	}
	return out
}

// TestImagesAreOnlyRead: the sentry reads the images itself, so its files must not be
// writable by one that a program inside has taken over, and root inside must not
// replace the guest that the host trusts to speak for the sandbox.
func TestImagesAreOnlyRead(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	s, h := start(t, r, nil)
	root, guest := digest(t, s.Image.Root), digest(t, s.Image.Guest)
	if got := names(t, r, s.ID); slices.Contains(got, launch.Gofer) || !slices.Contains(got, launch.Sentry) {
		t.Errorf("processes: got %q, want no %s", got, launch.Gofer)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.all[s.ID].sentry))
	if err != nil {
		t.Fatal(err)
	}
	images, stores := 0, 0
	for _, fd := range fds {
		file, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", r.all[s.ID].sentry, fd.Name()))
		if err != nil {
			continue
		}
		if strings.Contains(file, launch.Filestore) {
			stores++
		}
		if file != s.Image.Root && file != s.Image.Guest {
			continue
		}
		images++
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", r.all[s.ID].sentry, fd.Name()))
		if err != nil {
			t.Fatal(err)
		}
		var pos, flags uint64
		if _, err := fmt.Sscanf(string(info), "pos: %d\nflags: %o", &pos, &flags); err != nil || flags&unix.O_ACCMODE != unix.O_RDONLY {
			t.Errorf("%s is open with flags %o, %v, want for reading only", file, flags, err)
		}
	}
	if images < 2 || stores != 1 {
		t.Errorf("the sentry has %d images and %d files for writes open, want 2 and 1", images, stores)
	}
	for _, c := range [][]string{
		{"write", guestArgs[0], "mine"}, {"remove", guestArgs[0]}, {"fill", guestArgs[0], "1"},
	} {
		if got := h.do(t, 0, c...); !strings.Contains(got, "error:") {
			t.Errorf("%q: got %q, want an error", c, got)
		}
	}
	h.do(t, 0, "write", "/etc/new", "mine")
	if got := h.do(t, 0, "cat", "/etc/new"); got != "mine" {
		t.Errorf("a new file: got %q", got)
	}
	if digest(t, s.Image.Root) != root || digest(t, s.Image.Guest) != guest {
		t.Error("an image has changed")
	}
}

// TestSnapshotsKeepTheirRoot: what was saved on a directory continues on it, also
// when the template has got an image meanwhile, and the other way round the error
// says what is missing. A snapshot of files boots on either.
func TestSnapshotsKeepTheirRoot(t *testing.T) {
	needRoot(t)
	r := newRuntime(t, t.TempDir())
	image, err := rootImage()
	if err != nil {
		t.Fatal(err)
	}
	// Newer images in the directory of the old ones, and where those are missing.
	images := func(dir string) sandbox.Image {
		return sandbox.Image{Root: filepath.Join(dir, "root-2.erofs"), Guest: filepath.Join(dir, "guest-2.erofs")}
	}
	beside, elsewhere, none := images(t.TempDir()), images(t.TempDir()), sandbox.Image{}
	for from, to := range map[string]string{
		image.Root:  filepath.Join(filepath.Dir(beside.Root), filepath.Base(image.Root)),
		image.Guest: filepath.Join(filepath.Dir(beside.Root), filepath.Base(image.Guest)),
	} {
		if err := errors.Join(os.Symlink(from, to), os.Symlink(from, strings.Replace(to, "-1", "-2", 1))); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name        string
		saved       sandbox.Image
		files       bool
		restored    sandbox.Image
		gofer       bool
		want        string // in the error; empty if it starts
		alsoMounted bool
	}{
		{name: "an image", saved: image, restored: image},
		{name: "an image, with a mount", saved: image, restored: image, gofer: true, alsoMounted: true},
		{name: "an image with newer ones beside it", saved: image, restored: beside},
		{name: "an image that was removed", saved: image, restored: elsewhere, want: "root-1.erofs, which does not exist any more"},
		{name: "an image where there is only a directory", saved: image, restored: none, want: "template build"},
		{name: "a directory where there is an image", saved: none, restored: image, gofer: true},
		{name: "a directory, with a mount", saved: none, restored: image, gofer: true, alsoMounted: true},
		{name: "files of an image on a directory", saved: image, files: true, restored: none, gofer: true},
		{name: "files of a directory on an image", saved: none, files: true, restored: image},
	} {
		t.Run(c.name, func(t *testing.T) {
			var mounts []sandbox.Mount
			if c.alsoMounted {
				mounts = []sandbox.Mount{{Source: t.TempDir(), Destination: "/mnt/deep/volume"}}
			}
			old, h := start(t, r, func(s *sandbox.Spec) { s.Image, s.Mounts = c.saved, mounts })
			h.do(t, 0, "write", "/etc/kept", "value")
			h.do(t, 0, "remove", "/var")
			dir := filepath.Join(t.TempDir(), "snapshot")
			if err := r.Save(t.Context(), old.ID, dir, sandbox.SaveOptions{FilesOnly: c.files}); err != nil {
				t.Fatal(err)
			}
			if c.want != "" {
				_, link := newLink(t)
				s := specWith(t, link)
				s.From, s.Image = dir, c.restored
				if err := r.Start(t.Context(), s); err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("got %v, want %q in it", err, c.want)
				}
				return
			}
			s, h := start(t, r, func(s *sandbox.Spec) { s.From, s.Image, s.Mounts = dir, c.restored, mounts })
			if got := slices.Contains(names(t, r, s.ID), launch.Gofer); got != c.gofer {
				t.Errorf("a gofer: got %v, want %v", got, c.gofer)
			}
			if got := h.do(t, 0, "cat", "/etc/kept"); got != "value" {
				t.Errorf("a file: got %q", got)
			}
			if got := h.do(t, 0, "ls", "/var"); !strings.Contains(got, "no such file") {
				t.Errorf("a removed directory: got %q", got)
			}
			if got := h.do(t, 0, "exec", guestArgs[0], "euid"); got != "0" {
				t.Errorf("the guest as a program: got %q", got)
			}
			if c.alsoMounted {
				h.do(t, 0, "write", "/mnt/deep/volume/f", "on the host")
				if b, err := os.ReadFile(filepath.Join(mounts[0].Source, "f")); err != nil || string(b) != "on the host" {
					t.Errorf("the volume: got %q, %v", b, err)
				}
			}
			// The limit on disk holds after all of that.
			if got := h.do(t, 0, "fill", "/etc/x", "1000"); !strings.Contains(got, "no space left on device") {
				t.Errorf("fill the disk: got %q", got)
			}
			// On a disk whose free space is fragmented, the file system's own blocks are added.
			most := s.DiskMB<<20 + s.DiskMB<<20/100
			if u, err := r.Usage(t.Context(), s.ID); err != nil || u.Disk < 32<<20 || u.Disk > most {
				t.Errorf("usage of disk: got %d bytes, %v, want up to %d", u.Disk, err, most)
			}
		})
	}
}
