package template

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func newCache(t *testing.T, dir, guest string) (*Cache, *output) {
	t.Helper()
	out := &output{}
	c, err := New(slog.New(slog.NewTextHandler(t.Output(), nil)), Config{Dir: dir, Guest: []byte(guest), Progress: out})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, out
}

// output collects what is written to it.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// pretend puts an empty template where a build would put it.
func pretend(t *testing.T, c *Cache, id string) string {
	t.Helper()
	dir := filepath.Join(c.cfg.Dir, "templates", id)
	write(t, filepath.Join(dir, "template.json"), `{"id":"`+id+`","name":"base","packages":1}`)
	write(t, filepath.Join(dir, "in-use"), "")
	if err := os.MkdirAll(filepath.Join(dir, "rootfs"), 0o755); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "rootfs")
}

func TestNew(t *testing.T) {
	for _, tt := range []struct {
		name string
		cfg  Config
	}{
		{"no directory", Config{Guest: []byte("x")}},
		{"relative directory", Config{Dir: "cache", Guest: []byte("x")}},
		{"no guest", Config{Dir: t.TempDir()}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := New(slog.New(slog.DiscardHandler), tt.cfg); err == nil {
				t.Error("got no error")
			}
		})
	}
	t.Run("closes the directory", func(t *testing.T) {
		// A root file system holds a setuid sudo.
		dir := t.TempDir()
		if err := os.Chmod(dir, 0o777); err != nil {
			t.Fatal(err)
		}
		newCache(t, dir, "x")
		if i, err := os.Stat(dir); err != nil || i.Mode().Perm() != 0o700 {
			t.Errorf("got %v, %v, want mode 0700", i.Mode(), err)
		}
	})
}

func TestResolve(t *testing.T) {
	c, _ := newCache(t, t.TempDir(), "guest")
	want := pretend(t, c, c.recipe.id())
	for name, found := range map[string]bool{
		"base": true, "code-interpreter-v1": true, "code-interpreter": true, "base:default": true,
		"": false, "desktop": false, "BASE": false, "../base": false, c.recipe.id(): false, "base:other": false,
		strings.Repeat("x", 1<<16): false,
	} {
		tpl, err := c.Resolve(t.Context(), name)
		if found && (err != nil || tpl.Rootfs != want) {
			t.Errorf("%q: got %q, %v, want %q", name, tpl.Rootfs, err, want)
		}
		if !found && (!errors.Is(err, ErrNotFound) || len(err.Error()) > 300) {
			t.Errorf("%.20q: got %v, want a short ErrNotFound", name, err)
		}
	}
}

func TestGuestRefresh(t *testing.T) {
	dir := t.TempDir()
	c, _ := newCache(t, dir, "guest one")
	rootfs := pretend(t, c, c.recipe.id())
	guest := filepath.Join(rootfs, GuestPath)
	check := func(want string) os.FileInfo {
		t.Helper()
		b, err := os.ReadFile(guest)
		if err != nil || string(b) != want {
			t.Fatalf("guest: got %q, %v, want %q", b, err, want)
		}
		i, err := os.Stat(guest)
		if err != nil || i.Mode().Perm() != 0o755 {
			t.Fatalf("guest: got %v, %v, want mode 0755", i.Mode(), err)
		}
		return i
	}
	if _, err := c.Base(t.Context()); err != nil {
		t.Fatal(err)
	}
	one := check("guest one")
	if _, err := c.Base(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(one, check("guest one")) {
		t.Error("the same guest was installed again")
	}

	// A sandbox that runs keeps the file it has open, and one that was saved
	// finds it again.
	version, err := filepath.EvalSymlinks(guest)
	if err != nil {
		t.Fatal(err)
	}
	open, err := os.Open(guest)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	left := filepath.Join(filepath.Dir(guest), ".postern-guest.KILLED")
	write(t, left, "half a gue")
	c2, _ := newCache(t, dir, "guest two")
	if _, err := c2.Base(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("guest two")
	b := make([]byte, 9)
	if _, err := open.Read(b); err != nil || string(b) != "guest one" {
		t.Errorf("open guest: got %q, %v, want the old one", b, err)
	}
	if b, err := os.ReadFile(version); err != nil || string(b) != "guest one" {
		t.Errorf("file of the old guest: got %q, %v", b, err)
	}
	if _, err := c.Base(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("guest one")
	if now, err := filepath.EvalSymlinks(guest); err != nil || now != version {
		t.Errorf("the old guest again: got %s, %v, want %s", now, err, version)
	}
	if _, err := os.Stat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a killed installation left: got %v, want it gone", err)
	}
	link, err := filepath.EvalSymlinks(filepath.Join(dir, "base-current"))
	if err != nil || link != rootfs {
		t.Errorf("base-current: got %q, %v, want %q", link, err, rootfs)
	}
}

// TestGuestEscape: a link in a root file system must not lead the host's root out
// of it.
func TestGuestEscape(t *testing.T) {
	c, _ := newCache(t, t.TempDir(), "guest")
	rootfs, outside := pretend(t, c, c.recipe.id()), t.TempDir()
	if err := os.MkdirAll(filepath.Join(rootfs, "usr/local"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(rootfs, "usr/local/sbin")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Base(t.Context()); err == nil {
		t.Error("got no error")
	}
	if e, err := os.ReadDir(outside); err != nil || len(e) != 0 {
		t.Errorf("outside: got %v, %v, want nothing", e, err)
	}
}

func TestLockExcludesOtherProcesses(t *testing.T) {
	dir := t.TempDir()
	c1, _ := newCache(t, dir, "guest")
	c2, out := newCache(t, dir, "guest")
	unlock, err := c1.lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := c2.Base(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while another builds: got %v, want the deadline", err)
	}
	if !strings.Contains(out.String(), "waiting for another process") {
		t.Errorf("progress: got %q, want it to say why it waits", out)
	}
	done := make(chan error, 1)
	go func() {
		_, err := c2.Base(t.Context())
		done <- err
	}()
	time.Sleep(200 * time.Millisecond)
	// What the other builder would have made.
	pretend(t, c1, c1.recipe.id())
	unlock()
	if err := <-done; err != nil {
		t.Errorf("after the other has built: got %v", err)
	}
}

func TestPruneKeepsTemplatesInUse(t *testing.T) {
	dir := t.TempDir()
	c, _ := newCache(t, dir, "guest")
	pretend(t, c, c.recipe.id())
	pretend(t, c, "base-unused")
	pretend(t, c, "base-used")
	other, _ := newCache(t, dir, "guest")
	if _, err := other.open("base-used"); err != nil {
		t.Fatal(err)
	}
	got, err := c.Prune(t.Context())
	if err != nil || strings.Join(got, " ") != "base-unused" {
		t.Errorf("first: got %v, %v, want base-unused", got, err)
	}
	if err := other.Close(); err != nil {
		t.Fatal(err)
	}
	got, err = c.Prune(t.Context())
	if err != nil || strings.Join(got, " ") != "base-used" {
		t.Errorf("after close: got %v, %v, want base-used", got, err)
	}
	left, err := os.ReadDir(filepath.Join(dir, "templates"))
	if err != nil || len(left) != 1 || left[0].Name() != c.recipe.id() {
		t.Errorf("left: got %v, %v, want only %s", left, err, c.recipe.id())
	}
}
