package gvisor

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/erofs"
	trees "postern/internal/rootfs"
	"postern/internal/sandbox"
)

// TestTheSameStepsInTwoSandboxesGiveTheSameLayers: gVisor writes what a sandbox changed
// in a random order, and each sandbox has its own names, certificates and times.
func TestTheSameStepsInTwoSandboxesGiveTheSameLayers(t *testing.T) {
	needRoot(t)
	f, who, _ := newFleet(t, nil, nil)
	ctx, dir := t.Context(), t.TempDir()
	base := provisioned(t, dir)
	below, err := trees.Open(base.Root)
	if err != nil {
		t.Fatal(err)
	}
	defer below.Close()
	layers := func() (list [][]byte) {
		b, err := f.OpenBench(ctx, who, sandbox.BenchRequest{Base: sandbox.Base{Rootfs: t.TempDir(), Image: base, Key: "k"}, Timeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		tool := func(args ...string) error {
			var said strings.Builder
			code, err := b.Run(ctx, sandbox.Command{Args: append([]string{"/bin/tool"}, args...)}, func(_, text string) { said.WriteString(text) })
			if err == nil && code != 0 {
				err = fmt.Errorf("tool %q: exit status %d: %s", args, code, &said)
			}
			return err
		}
		var before *os.File
		for _, step := range []func() error{
			func() error {
				files := archive(t, entry{name: "app", kind: tar.TypeDir, mode: 0o755}, entry{name: "app/b", content: "B"}, entry{name: "app/a", kind: tar.TypeLink, link: "app/b"},
					entry{name: "app/c", content: strings.Repeat("c", 100_000), mode: 0o4755}, entry{name: "app/l", kind: tar.TypeSymlink, link: "../etc"})
				return errors.Join(b.AddUser(ctx, "worker", true), b.Unpack(ctx, files, sandbox.Unpack{Source: "app", Dest: "/srv/app", User: "worker"}))
			},
			func() error { return errors.Join(tool("remove", "/etc/doomed"), tool("write", "/srv/app/c", "new")) },
			// A temporary file of another name each time: an overlay remembers it.
			func() error {
				name := "/tmp/" + rand.Text()
				return errors.Join(tool("write", name, "x"), tool("remove", name), tool("remove", "/srv/app/b"), tool("mkdir", "/etc/doomed"))
			},
			func() error { return tool("cat", "/etc/passwd") },
		} {
			if err := step(); err != nil {
				t.Fatal(err)
			}
			after, err := os.CreateTemp(dir, "")
			if err != nil {
				t.Fatal(err)
			}
			defer after.Close()
			if err := b.WriteLayer(ctx, after); err != nil {
				t.Fatal(err)
			}
			var l bytes.Buffer
			if _, err := trees.Delta(&l, below, before, after, time.Unix(0, 0)); err != nil {
				t.Fatal(err)
			}
			list, before = append(list, l.Bytes()), after
		}
		return list
	}
	one, two := layers(), layers()
	want := [][]string{
		{"etc/group", "etc/passwd", "etc/sudoers.d/postern-worker", "home/worker/", "srv/", "srv/app/", "srv/app/a", "srv/app/b", "srv/app/c", "srv/app/l"},
		{"etc/.wh.doomed", "srv/app/c"},
		{"etc/doomed/", "srv/app/.wh.b"},
		nil,
	}
	for i := range one {
		if !bytes.Equal(one[i], two[i]) {
			t.Errorf("step %d: got %q in one sandbox and %q in the other, or other contents", i, namesOf(t, one[i]), namesOf(t, two[i]))
		}
		got := namesOf(t, one[i])
		got = slices.DeleteFunc(got, func(n string) bool { return n == "etc/shadow" })
		if !slices.Equal(got, want[i]) {
			t.Errorf("step %d: got %q, want %q", i, got, want[i])
		}
	}
}

func namesOf(t *testing.T, layer []byte) (names []string) {
	t.Helper()
	for r := tar.NewReader(bytes.NewReader(layer)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names
		} else if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
}

// provisioned returns the images of a root file system with nothing inside, as a build
// makes them.
func provisioned(t *testing.T, dir string) sandbox.Image {
	t.Helper()
	i := sandbox.Image{Root: filepath.Join(dir, "root-1.erofs"), Guest: filepath.Join(dir, "guest-1.erofs")}
	plain := write(t, filepath.Join(dir, "plain"), func(f *os.File) error {
		_, err := erofs.Write(t.Context(), f, distroless(t), nil)
		return err
	})
	tree, err := trees.Open(plain)
	if err != nil {
		t.Fatal(err)
	}
	defer tree.Close()
	if err := tree.Provision(); err != nil {
		t.Fatal(err)
	}
	write(t, i.Root, func(f *os.File) error {
		_, err := tree.WriteImage(t.Context(), f)
		return err
	})
	write(t, i.Guest, func(f *os.File) error {
		g, err := realGuest()
		if err != nil {
			return err
		}
		b, err := os.ReadFile(g)
		if err != nil {
			return err
		}
		_, err = erofs.WriteFile(f, b, 0o755)
		return err
	})
	return i
}

// write makes a file and returns its path.
func write(t *testing.T, path string, content func(*os.File) error) string {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(content(f), f.Close()); err != nil {
		t.Fatal(err)
	}
	return path
}
