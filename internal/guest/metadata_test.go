package guest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"postern/internal/guest/filesystempb"
)

func (g *rig) stat(path string) *filesystempb.EntryInfo {
	g.t.Helper()
	res, err := g.file.Stat(g.t.Context(), connect.NewRequest(&filesystempb.StatRequest{Path: path}))
	if err != nil {
		g.t.Fatal(err)
	}
	return res.Msg.GetEntry()
}

func TestMetadata(t *testing.T) {
	g := newRig(t)
	code, body, _ := g.do("POST", "/files?path=a", strings.NewReader("x"), "Content-Type", octets, "X-Metadata-Author", "me", "X-Metadata-a.b_c~", "v")
	if code != 200 || !strings.Contains(string(body), `"metadata":{"a.b_c~":"v","author":"me"}`) {
		t.Fatalf("write: got %d %s", code, body)
	}
	want := "map[a.b_c~:v author:me]"
	if got := fmt.Sprint(g.stat("a").GetMetadata()); got != want {
		t.Errorf("stat: got %s, want %s", got, want)
	}
	moved, err := g.file.Move(t.Context(), connect.NewRequest(&filesystempb.MoveRequest{Source: "a", Destination: "d/b"}))
	if err != nil || fmt.Sprint(moved.Msg.GetEntry().GetMetadata()) != want {
		t.Errorf("move: got %v, %v, want %s", moved, err, want)
	}
	// Attributes that programs set are reported too, but only E2B's.
	for _, name := range []string{"user.e2b.inside", "user.other"} {
		if err := unix.Setxattr(g.home+"/d/b", name, []byte("\xff1"), 0); err != nil {
			t.Fatal(err)
		}
	}
	list, err := g.file.ListDir(t.Context(), connect.NewRequest(&filesystempb.ListDirRequest{Path: "d"}))
	if err != nil || fmt.Sprint(list.Msg.GetEntries()[0].GetMetadata()) != "map[a.b_c~:v author:me inside:\uFFFD1]" {
		t.Errorf("list: got %v, %v", list, err)
	}
	// Another write replaces all of it, and only that.
	g.do("POST", "/files?path=d/b", strings.NewReader("x"), "Content-Type", octets, "X-Metadata-Other", "o")
	if got := fmt.Sprint(g.stat("d/b").GetMetadata()); got != "map[other:o]" {
		t.Errorf("replaced: got %s", got)
	}
	g.do("POST", "/files?path=d/b", strings.NewReader("x"), "Content-Type", octets)
	if got := g.stat("d/b").GetMetadata(); len(got) > 0 {
		t.Errorf("removed: got %v", got)
	}
	if n, err := unix.Getxattr(g.home+"/d/b", "user.other", nil); n != 2 || err != nil {
		t.Errorf("an attribute of others: got %d, %v", n, err)
	}
	for name, header := range map[string][2]string{"long key": {"X-Metadata-" + strings.Repeat("k", 250), "v"}, "not ASCII": {"X-Metadata-K", "ü"}} {
		if code, body, _ := g.do("POST", "/files?path=bad", strings.NewReader("x"), "Content-Type", octets, header[0], header[1]); code != 400 {
			t.Errorf("%s: got %d %s, want 400", name, code, body)
		}
	}
}

// Attacker: names and attributes that would break or swell the answer.
func TestHostileEntries(t *testing.T) {
	g := newRig(t)
	bad := g.home + "/\xff\xfe"
	if err := os.WriteFile(bad, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_ = os.Symlink("\xff", g.home+"/link")
	_ = unix.Setxattr(bad, "user.e2b.\xff", []byte("\xff"), 0)
	list, err := g.file.ListDir(t.Context(), connect.NewRequest(&filesystempb.ListDirRequest{Path: "."}))
	if err != nil || len(list.Msg.GetEntries()) != 2 {
		t.Errorf("got %v, %v, want 2 entries", list, err)
	}
	room := 10
	_ = unix.Setxattr(bad, "user.e2b.big", []byte("0123456789"), 0)
	if got := metadata(bad, &room); len(got) > 1 {
		t.Errorf("got %v, want no more than fits", got)
	}
}

func TestCompose(t *testing.T) {
	g := newRig(t)
	a, _ := lookupAccount(testUser)
	write := func(name, content string, mode os.FileMode) {
		t.Helper()
		path := g.home + "/" + name
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		_ = os.Chown(path, int(a.uid), int(a.gid))
	}
	compose := func(to string, from ...string) (int, string) {
		t.Helper()
		body := must(json.Marshal(map[string]any{"source_paths": from, "destination": to}))
		code, res, _ := g.do("POST", "/files/compose", strings.NewReader(string(body)))
		return code, string(res)
	}
	write("1", "one ", 0o644)
	write("2", "two ", 0o644)
	code, res := compose("new/whole", "1", "2", "1")
	if code != 200 || res != fmt.Sprintf(`{"name":"whole","type":"file","path":"%s/new/whole"}`, g.home) {
		t.Fatalf("got %d %s", code, res)
	}
	if got := readFile(t, g.home+"/new/whole"); got != "one two one " {
		t.Errorf("content: got %q", got)
	}
	for _, name := range []string{"1", "2"} {
		if _, err := os.Lstat(g.home + "/" + name); err == nil {
			t.Errorf("part %s is left", name)
		}
	}
	// What is there keeps its mode, also through a link.
	write("old", "old", 0o600)
	_ = os.Symlink("old", g.home+"/link")
	write("1", "fresh", 0o644)
	if code, res := compose("link", "1"); code != 200 {
		t.Fatalf("over a link: got %d %s", code, res)
	}
	if fi, err := os.Stat(g.home + "/old"); err != nil || fi.Mode() != 0o600 || readFile(t, g.home+"/old") != "fresh" {
		t.Errorf("over a link: got %v, %v", fi, err)
	}
	private := privateDir(t)
	write("keep", "keep", 0o644)
	_ = os.Symlink("keep", g.home+"/same")
	for _, tt := range []struct {
		name, to string
		from     []string
		want     int
	}{
		{"no sources", "x", nil, 400},
		{"no destination", "", []string{"keep"}, 400},
		{"missing source", "x", []string{"keep", "nope"}, 404},
		{"directory", "x", []string{"new"}, 400},
		{"onto itself", "keep", []string{"keep"}, 400},
		{"onto itself through a link", "same", []string{"keep"}, 400},
		{"onto a directory", "new", []string{"keep"}, 400},
		{"attacker: root's source", "x", []string{private + "/secret"}, 403},
		{"attacker: root's directory", private + "/x", []string{"keep"}, 403},
		{"attacker: over root's file", "/etc/passwd", []string{"keep"}, 403},
	} {
		if code, res := compose(tt.to, tt.from...); code != tt.want {
			t.Errorf("%s: got %d %s, want %d", tt.name, code, res, tt.want)
		}
	}
	if got := readFile(t, g.home+"/keep"); got != "keep" {
		t.Errorf("a source of a refused request: got %q", got)
	}
	if left, _ := filepath.Glob(g.home + "/.compose*"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestComposeOnAFullDisk(t *testing.T) {
	g := newRig(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m,mode=1777"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	_ = os.WriteFile(dir+"/part", make([]byte, 700<<10), 0o644)
	body := fmt.Sprintf(`{"source_paths":["%s/part"],"destination":"%s/whole","username":"root"}`, dir, dir)
	if code, res, _ := g.do("POST", "/files/compose", strings.NewReader(body)); code != 507 {
		t.Errorf("got %d %s, want 507", code, res)
	}
	left, _ := os.ReadDir(dir)
	if len(left) != 1 || left[0].Name() != "part" {
		t.Errorf("got %v, want the part alone", left)
	}
}

func FuzzHeaderMetadata(f *testing.F) {
	f.Add("X-Metadata-A", "b")
	f.Add("x-metadata-\xff", "\x00")
	f.Fuzz(func(t *testing.T, name, value string) {
		meta, err := headerMetadata(http.Header{name: {value}})
		if len(meta) > 0 && err != nil {
			t.Error("metadata and an error")
		}
		for k := range meta {
			if len(k) > unix.NAME_MAX {
				t.Errorf("key of %d bytes", len(k))
			}
		}
	})
}
