package template

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// smallRecipe returns a recipe that builds in seconds.
func smallRecipe() recipe {
	return recipe{
		name: "small", suite: "bookworm", variant: "essential", exclude: []string{"/usr/share/doc/*"},
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
		c.recipe = smallRecipe()
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
	dir := t.TempDir()
	for _, at := range []string{"installing", "writing to disk"} {
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
		if m, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(m), dir) {
			t.Fatalf("killed at %q: got %v, or a mount below %s", at, err, dir)
		}
		if l, err := os.ReadDir(filepath.Join(dir, "templates")); err != nil || len(l) != 0 {
			t.Fatalf("killed at %q: got %v, %v, want no template", at, l, err)
		}
	}

	c, out := newCache(t, dir, "guest")
	c.recipe = smallRecipe()
	tpl, err := c.Base(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "removing what an interrupted build left") {
		t.Errorf("progress: got %q, want it to mention the interrupted build", out)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "build-*")); err != nil || len(left) != 0 {
		t.Errorf("left of builds: got %v, %v", left, err)
	}
	for name, want := range map[string]string{"etc/made": "made\n", "opt/a/b": "text", GuestPath: "guest"} {
		if b, err := os.ReadFile(filepath.Join(tpl.Rootfs, name)); err != nil || string(b) != want {
			t.Errorf("%s: got %q, %v, want %q", name, b, err, want)
		}
	}
	if _, err := os.Stat(filepath.Join(tpl.Rootfs, "opt/postern-finish.sh")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("finishing script: got %v, want it gone", err)
	}
	if tpl.Packages < 50 || tpl.Bytes < 50e6 {
		t.Errorf("got %d packages and %d bytes, want the essential packages", tpl.Packages, tpl.Bytes)
	}
	if debs, err := filepath.Glob(filepath.Join(dir, "apt", "*.deb")); err != nil || len(debs) != tpl.Packages {
		t.Errorf("kept downloads: got %d, %v, want %d", len(debs), err, tpl.Packages)
	}
	began := time.Now()
	if _, err := c.Resolve(t.Context(), "base"); err != nil {
		t.Fatal(err)
	}
	t.Logf("found again in %v", time.Since(began))
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
		c.recipe = smallRecipe()
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
		c.recipe = smallRecipe()
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
