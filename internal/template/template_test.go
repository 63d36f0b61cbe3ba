package template

import (
	"bytes"
	"context"
	"errors"
	"io"
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

// pretend puts a template without files where a build would put it, and returns its
// directory.
func pretend(t *testing.T, c *Cache, id string) string {
	t.Helper()
	dir := filepath.Join(c.cfg.Dir, "templates", id)
	write(t, filepath.Join(dir, imagesDir, rootPrefix+"00"+imageSuffix), "image")
	write(t, filepath.Join(dir, "template.json"), `{"id":"`+id+`","name":"base","packages":1}`)
	write(t, filepath.Join(dir, "in-use"), "")
	if err := os.MkdirAll(filepath.Join(dir, "rootfs"), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
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
	want := filepath.Join(pretend(t, c, c.recipes[0].id()), "rootfs")
	for name, found := range map[string]bool{
		"base": true, "code-interpreter-v1": true, "code-interpreter": true, "mcp-gateway": true, "base:default": true,
		"": false, "desktop": false, "BASE": false, "../base": false, c.recipes[0].id(): false, "base:other": false,
		strings.Repeat("x", 1<<16): false,
	} {
		tpl, err := c.Resolve(t.Context(), name)
		if found && (err != nil || tpl.Rootfs != want) {
			t.Errorf("%q: got %q, %v, want %q", name, tpl.Rootfs, err, want)
		}
		if !found && (!errors.Is(err, ErrNotFound) || len(err.Error()) > 300) {
			t.Errorf("%.20q: got %v, want a short ErrNotFound", name, err)
		}
		if id, err := c.Lookup(name); found != (err == nil) || found && id != c.recipes[0].id() {
			t.Errorf("look up %.20q: got %s, %v", name, id, err)
		}
	}
}

// TestOtherTemplatesAreBuiltAtTheirFirstUse: until then the error says that a build runs,
// or why it failed.
func TestOtherTemplatesAreBuiltAtTheirFirstUse(t *testing.T) {
	c, _ := newCache(t, t.TempDir(), "guest")
	pretend(t, c, c.recipes[0].id())
	c.cfg.Sources = "deb http://127.0.0.1:9/debian bookworm main\n"
	_, err := c.Resolve(t.Context(), "slim")
	if !errors.Is(err, ErrNotBuilt) || !strings.Contains(err.Error(), "postern template build slim") {
		t.Errorf("first use: got %v, want what goes on and what to do", err)
	}
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		_, err := c.Resolve(t.Context(), "slim:default")
		if !errors.Is(err, ErrNotBuilt) {
			t.Fatalf("got %v, want that it is not built", err)
		}
		if strings.Contains(err.Error(), "127.0.0.1:9") {
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatalf("got %v, want why the build failed", err)
		}
	}
	if id, err := c.Lookup("slim"); err != nil || id != c.recipes[1].id() {
		t.Errorf("look up: got %s, %v", id, err)
	}
	if got := strings.Join(c.Names(), " "); got != "base code-interpreter-v1 code-interpreter mcp-gateway slim" {
		t.Errorf("names: got %s", got)
	}
}

func TestLockExcludesOtherProcesses(t *testing.T) {
	dir := t.TempDir()
	c1, _ := newCache(t, dir, "guest")
	c2, out := newCache(t, dir, "guest")
	unlock, err := c1.lock(t.Context(), "base", io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	gaveUp := make(chan error, 1)
	go func() {
		_, err := c2.Base(ctx)
		gaveUp <- err
	}()
	for end := time.Now().Add(time.Minute); !strings.Contains(out.String(), "waiting for another process"); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("progress: got %q, want it to say why it waits", out)
		}
	}
	cancel()
	if err := <-gaveUp; !errors.Is(err, context.Canceled) {
		t.Errorf("while another builds: got %v, want that it was canceled", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := c2.Base(t.Context())
		done <- err
	}()
	time.Sleep(200 * time.Millisecond)
	// What the other builder would have made.
	pretend(t, c1, c1.recipes[0].id())
	unlock()
	if err := <-done; err != nil {
		t.Errorf("after the other has built: got %v", err)
	}
}

func TestPruneKeepsTemplatesInUse(t *testing.T) {
	dir := t.TempDir()
	c, _ := newCache(t, dir, "guest")
	pretend(t, c, c.recipes[0].id())
	pretend(t, c, c.recipes[1].id())
	pretend(t, c, "base-unused")
	write(t, c.packed(c.recipes[0]), "packages")
	write(t, filepath.Join(dir, "packages", "old.tar.zst"), "packages of an old program")
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
	if err != nil || len(left) != 2 || left[0].Name() != c.recipes[0].id() || left[1].Name() != c.recipes[1].id() {
		t.Errorf("left: got %v, %v, want those of this program", left, err)
	}
	packed, err := filepath.Glob(filepath.Join(dir, "packages", "*"))
	if err != nil || len(packed) != 1 || packed[0] != c.packed(c.recipes[0]) {
		t.Errorf("installed packages left: got %v, %v", packed, err)
	}
}
