package template

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/internal/rootfs"
)

// smallRecipe returns a recipe that builds in seconds.
func smallRecipe() recipe {
	return recipe{
		name: "small", aliases: []string{"little"}, suite: "bookworm", variant: "essential", exclude: []string{"/usr/share/doc/*"},
		// Only the loopback: a package's script cannot reach the network.
		finish: "set -eu; echo made >/etc/made; test $(hostname) = sandbox; test $(grep -c : /proc/net/dev) = 1\n",
		files:  []file{{"/opt/a/b", "text"}},
	}
}

// TestMain makes this program the process that TestBuildKilled kills.
func TestMain(m *testing.M) {
	dir, ok := os.LookupEnv("POSTERN_TEST_BUILD_DIR")
	if !ok {
		os.Exit(m.Run())
	}
	c, err := New(slog.New(slog.DiscardHandler), Config{Dir: dir, Guest: []byte("guest"), Progress: os.Stdout})
	if err == nil {
		c.recipes = []recipe{smallRecipe()}
		_, err = c.Base(context.Background())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// TestBuildKilled: whenever a build is killed, no process and no mount stays, no
// incomplete template can be found, and the next build succeeds.
func TestBuildKilled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	before := temporary(t)
	for _, at := range []string{"installing", "writing the image"} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "POSTERN_TEST_BUILD_DIR="+dir)
		cmd.Stderr = t.Output()
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		reached := false
		for s := bufio.NewScanner(out); s.Scan(); {
			if strings.Contains(s.Text(), " s: "+at) {
				reached = true
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				break
			}
		}
		_ = cmd.Wait()
		if !reached {
			t.Fatalf("the build never said %q", at)
		}
		for wait := time.Now(); len(processesBelow(t, dir)) > 0; time.Sleep(20 * time.Millisecond) {
			if time.Since(wait) > time.Minute {
				t.Fatalf("killed at %q: still running: %v", at, processesBelow(t, dir))
			}
		}
		if left := temporary(t); len(left) > len(before) {
			t.Errorf("killed at %q: in the directory for temporary files are %v, before %v", at, left, before)
		}
		if m, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(m), dir) {
			t.Fatalf("killed at %q: got %v, or a mount below %s", at, err, dir)
		}
		if l, err := os.ReadDir(filepath.Join(dir, "templates")); err != nil || len(l) != 0 {
			t.Fatalf("killed at %q: got %v, %v, want no template", at, l, err)
		}
	}

	began := time.Now()
	c, out := newCache(t, dir, "guest")
	if left, err := filepath.Glob(filepath.Join(dir, "build-*")); err != nil || len(left) != 0 {
		t.Errorf("after the next start: got %v, %v, want nothing of the killed builds", left, err)
	}
	c.recipes = []recipe{smallRecipe()}
	tpl, err := c.Base(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "unpacking the packages") {
		t.Errorf("the second stage was killed: got %q, want it to go on from the first", out)
	}
	t.Logf("second stage: %v", time.Since(began))
	root := openImage(t, tpl.RootImage)
	for name, want := range map[string]uint64{"etc/made": 5, "opt/a/b": 4, GuestPath: 0} {
		if n, ok := lookup(t, root, name); !ok || !n.IsRegular() || n.Size() != want {
			t.Errorf("%s: got %v, %d bytes, want %d", name, ok, n.Size(), want)
		}
	}
	if _, ok := lookup(t, root, "opt/postern-finish.sh"); ok {
		t.Error("the finishing script is in the image")
	}
	if guest := openImage(t, tpl.GuestImage); guest.RootNid() == 0 {
		t.Error("the guest's image has no root")
	}
	if es, err := os.ReadDir(tpl.Rootfs); err != nil || len(es) != 0 {
		t.Errorf("rootfs: got %v, %v, want an empty directory", es, err)
	}
	if tpl.Packages < 50 || tpl.Bytes < 50e6 {
		t.Errorf("got %d packages and %d bytes, want the essential packages", tpl.Packages, tpl.Bytes)
	}
	rec, err := c.Record(tpl.ID)
	if err != nil || len(rec.Packages) != tpl.Packages || rec.Digest == "" || rec.Bytes != tpl.Bytes || strings.Join(rec.Names, " ") != "small little" {
		t.Errorf("record: got %+v, %v", rec, err)
	}
	if i := slices.IndexFunc(rec.Packages, func(p rootfs.Package) bool { return p.Name == "libc6" }); i < 0 || rec.Packages[i].Version == "" || rec.Packages[i].Kind != "deb" {
		t.Errorf("record: got %v, want libc6 with its version", rec.Packages)
	}
	var spdx bytes.Buffer
	if err := c.WriteSPDX(&spdx, tpl.ID); err != nil || !strings.Contains(spdx.String(), "pkg:deb") || !strings.Contains(spdx.String(), rec.Digest) {
		t.Errorf("SPDX: got %v, %.500s", err, spdx.String())
	}
	if debs, err := filepath.Glob(filepath.Join(dir, "apt", "*.deb")); err != nil || len(debs) != 0 {
		t.Errorf("downloads: got %d, %v, want none: they are kept installed", len(debs), err)
	}

	// The same packages and files give the same image, whenever it is built.
	if ok, err := c.retire(tpl.ID); ok || err != nil {
		t.Errorf("removing a template in use: got %v, %v", ok, err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if ok, err := c.retire(tpl.ID); !ok || err != nil {
		t.Fatalf("remove: got %v, %v", ok, err)
	}
	time.Sleep(1100 * time.Millisecond) // so that times of files differ
	c, _ = newCache(t, dir, "guest")
	c.recipes = []recipe{smallRecipe()}
	again, err := c.Base(t.Context())
	if err != nil || filepath.Base(again.RootImage) != filepath.Base(tpl.RootImage) {
		t.Errorf("built again: got %s, %v, want %s", again.RootImage, err, tpl.RootImage)
	}

	// Another script: the packages are not installed again, though their source is gone.
	other := smallRecipe()
	other.finish += "echo other >/etc/other\n"
	c.recipes = []recipe{other}
	c.cfg.Sources = "deb http://127.0.0.1:9/debian bookworm main\n"
	changed, err := c.Base(t.Context())
	if err != nil || changed.ID == tpl.ID || changed.RootImage == again.RootImage {
		t.Errorf("another script: got %+v, %v", changed, err)
	}
	began = time.Now()
	if _, err := c.Resolve(t.Context(), "little"); err != nil {
		t.Fatal(err)
	}
	t.Logf("found again in %v", time.Since(began))
}

// temporary returns what mmdebstrap and apt leave in the directory for temporary files.
func temporary(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, pattern := range []string{"mmdebstrap*", "apt-*", "apt.*"} {
		have, err := filepath.Glob(filepath.Join(os.TempDir(), pattern))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, have...)
	}
	return out
}

// processesBelow returns the command lines that mention dir.
func processesBelow(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), dir) {
			out = append(out, strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return out
}

func TestBuildFails(t *testing.T) {
	t.Run("mmdebstrap missing", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		c, _ := newCache(t, t.TempDir(), "guest")
		_, err := c.Base(t.Context())
		if !errors.Is(err, exec.ErrNotFound) || !strings.Contains(err.Error(), "apt-get install") {
			t.Errorf("got %v, want it to say what to install", err)
		}
	})
	t.Run("no source for the release", func(t *testing.T) {
		c, _ := newCache(t, t.TempDir(), "guest")
		c.cfg.Sources = "deb https://d.example/debian trixie main\n"
		if _, err := c.Base(t.Context()); err == nil || !strings.Contains(err.Error(), "bookworm") {
			t.Errorf("got %v, want it to name the release", err)
		}
	})
	t.Run("another host without Debian's keys", func(t *testing.T) {
		c, _ := newCache(t, t.TempDir(), "guest")
		c.etcApt, c.keyring = t.TempDir(), filepath.Join(t.TempDir(), "no-keyring.*")
		_, err := c.Base(t.Context())
		if err == nil || !strings.Contains(err.Error(), "debian-archive-keyring") {
			t.Errorf("got %v, want it to say what to install", err)
		}
		if left, err := filepath.Glob(filepath.Join(c.cfg.Dir, "build-*")); err != nil || len(left) != 0 {
			t.Errorf("left: got %v, %v", left, err)
		}
	})
	t.Run("source unreachable", func(t *testing.T) {
		c, _ := newCache(t, t.TempDir(), "guest")
		c.recipes = []recipe{smallRecipe()}
		c.cfg.Sources = "deb http://127.0.0.1:9/debian bookworm main\n"
		_, err := c.Base(t.Context())
		if err == nil || !strings.Contains(err.Error(), "127.0.0.1:9") {
			t.Errorf("got %v, want it to quote apt", err)
		}
		if left, err := filepath.Glob(filepath.Join(c.cfg.Dir, "build-*")); err != nil || len(left) != 0 {
			t.Errorf("left: got %v, %v", left, err)
		}
	})
	t.Run("canceled", func(t *testing.T) {
		c, _ := newCache(t, t.TempDir(), "guest")
		c.recipes = []recipe{smallRecipe()}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		if _, err := c.Base(ctx); err == nil {
			t.Error("got no error")
		}
		if d := time.Since(began); d > time.Minute {
			t.Errorf("took %v", d)
		}
		if left, err := filepath.Glob(filepath.Join(c.cfg.Dir, "build-*")); err != nil || len(left) != 0 {
			t.Errorf("left: got %v, %v", left, err)
		}
	})
}

// TestRemoveTreeMounted: a mount below a directory to be removed may be the host's
// /dev.
func TestRemoveTreeMounted(t *testing.T) {
	dir := t.TempDir()
	inside := filepath.Join(dir, "rootfs/dev")
	write(t, filepath.Join(dir, "rootfs/file"), "x")
	if err := os.Mkdir(inside, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", inside, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(inside, "precious"), "x")
	err := removeTree(dir)
	if err == nil || !strings.Contains(err.Error(), inside) {
		t.Errorf("got %v, want it to name %s", err, inside)
	}
	if _, err := os.Stat(filepath.Join(inside, "precious")); err != nil {
		t.Errorf("got %v, want the file to be there", err)
	}
	if err := syscall.Unmount(inside, 0); err != nil {
		t.Fatal(err)
	}
	if err := removeTree(dir); err != nil {
		t.Errorf("after unmount: got %v", err)
	}
}
