package guest

import (
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/textproto"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"postern/internal/guest/filesystempb"
)

func gz(b []byte) []byte {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, _ = w.Write(b)
	w.Close()
	return z.Bytes()
}

const octets = "application/octet-stream"

func TestWriteAndRead(t *testing.T) {
	g := newRig(t)
	path := g.home + "/new dir/sub/a.txt"
	q := "/files?path=" + url.QueryEscape(path)
	if code, body, _ := g.do("POST", q, strings.NewReader("hello world"), "Content-Type", octets); code != 200 ||
		string(body) != fmt.Sprintf(`[{"name":"a.txt","type":"file","path":%q}]`, path) {
		t.Fatalf("write: got %d %s", code, body)
	}
	fi, err := os.Stat(filepath.Dir(path))
	if err != nil || fi.Sys().(*syscall.Stat_t).Uid != 65534 || fi.Mode().Perm() != 0o755 {
		t.Errorf("parent: got %v, %v, want owner nobody and mode 755", fi, err)
	}
	for _, tt := range []struct {
		name   string
		header []string
		code   int
		body   string
	}{
		{"whole", nil, 200, "hello world"},
		{"range", []string{"Range", "bytes=6-8"}, 206, "wor"},
		{"range at the end", []string{"Range", "bytes=-3"}, 206, "rld"},
		{"range outside", []string{"Range", "bytes=50-"}, 416, ""},
		{"gzip alone", []string{"Accept-Encoding", "gzip"}, 200, "gzip:hello world"},
		{"a list", []string{"Accept-Encoding", "gzip, deflate, br"}, 200, "hello world"},
		{"nothing allowed", []string{"Accept-Encoding", "br, identity;q=0"}, 406, ""},
		{"gzip and range", []string{"Accept-Encoding", "gzip", "Range", "bytes=0-1"}, 206, "he"},
	} {
		code, body, h := g.do("GET", q, nil, tt.header...)
		if h.Get("Content-Encoding") == "gzip" {
			r, err := gzip.NewReader(bytes.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(r)
			body = append([]byte("gzip:"), b...)
		}
		if code != tt.code || (tt.body != "" && string(body) != tt.body) {
			t.Errorf("%s: got %d %q, want %d %q", tt.name, code, body, tt.code, tt.body)
		}
	}
	if _, _, h := g.do("GET", q, nil); h.Get("Content-Type") != "text/plain; charset=utf-8" || h.Get("Content-Disposition") != "inline; filename=a.txt" {
		t.Errorf("headers: got %v", h)
	}
	// Compressed, empty, and over an existing file that is longer.
	if code, body, _ := g.do("POST", q, bytes.NewReader(gz([]byte("short"))), "Content-Type", octets, "Content-Encoding", "gzip"); code != 200 {
		t.Fatalf("write gzip: got %d %s", code, body)
	}
	if _, body, _ := g.do("GET", q, nil); string(body) != "short" {
		t.Errorf("after gzip: got %q", body)
	}
	g.do("POST", q, strings.NewReader(""), "Content-Type", octets)
	if code, body, h := g.do("GET", q, nil); code != 200 || len(body) != 0 || h.Get("Content-Length") != "0" {
		t.Errorf("empty: got %d %q, Content-Length %q", code, body, h.Get("Content-Length"))
	}
	if _, body, _ := g.do("GET", "/files?path=/proc/self/status&username=root", nil); !strings.Contains(string(body), "Name:") {
		t.Errorf("a file of the kernel's: got %q", body)
	}
}

func TestMultipart(t *testing.T) {
	g := newRig(t)
	form := func(names ...string) (io.Reader, string) {
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		for _, n := range names {
			p, _ := w.CreatePart(textproto.MIMEHeader{"Content-Disposition": {fmt.Sprintf(`form-data; name="file"; filename=%q`, n)}})
			fmt.Fprint(p, "content of "+n)
		}
		w.Close()
		return &b, w.FormDataContentType()
	}
	body, kind := form("a/b.txt", g.home+"/c.txt")
	code, res, _ := g.do("POST", "/files", body, "Content-Type", kind)
	var got []written
	if err := json.Unmarshal(res, &got); code != 200 || err != nil || len(got) != 2 || got[0].Path != g.home+"/a/b.txt" || got[1].Path != g.home+"/c.txt" {
		t.Fatalf("got %d %s", code, res)
	}
	for p, want := range map[string]string{"/a/b.txt": "content of a/b.txt", "/c.txt": "content of " + g.home + "/c.txt"} {
		if b, err := os.ReadFile(g.home + p); err != nil || string(b) != want {
			t.Errorf("%s: got %q, %v, want %q", p, b, err, want)
		}
	}
	body, kind = form("ignored.txt")
	if code, res, _ := g.do("POST", "/files?path=named.txt", body, "Content-Type", kind); code != 200 || !strings.Contains(string(res), "named.txt") {
		t.Errorf("path given: got %d %s", code, res)
	}
	body, kind = form("twice", "./twice")
	if code, res, _ := g.do("POST", "/files", body, "Content-Type", kind); code != 400 || readFile(t, g.home+"/twice") != "content of twice" {
		t.Errorf("one file twice: got %d %s, want 400 and the first", code, res)
	}
	body, kind = form("a", "b")
	if code, res, _ := g.do("POST", "/files?path=named.txt", body, "Content-Type", kind); code != 400 {
		t.Errorf("one path and two files: got %d %s, want 400", code, res)
	}
}

func TestFileErrors(t *testing.T) {
	g := newRig(t)
	if err := errors.Join(unix.Mkfifo(g.home+"/fifo", 0o666), os.Chmod(g.home+"/fifo", 0o666)); err != nil {
		t.Fatal(err)
	}
	private := privateDir(t)
	link := func(to, name string) string {
		if err := os.Symlink(to, g.home+"/"+name); err != nil {
			t.Fatal(err)
		}
		return g.home + "/" + name
	}
	toSecret, toDir, toShadow := link(private+"/secret", "s"), link(private, "d"), link("/etc/shadow", "shadow")
	loop := link(g.home+"/loop", "loop")
	for _, tt := range []struct {
		name, method, path, more string
		want                     int
	}{
		{"missing", "GET", "/no/such", "", 404},
		{"no path", "GET", "", "", 400},
		{"directory", "GET", g.home, "", 400},
		{"file as directory", "GET", "/etc/passwd/x", "", 400},
		{"unknown user", "GET", "/etc/passwd", "&username=nobody-at-all", 401},
		{"another's home", "GET", "~root/x", "", 400},
		{"zero byte", "GET", "a\x00b", "", 400},
		{"long name", "GET", strings.Repeat("x", 300), "", 400},
		{"fifo, read", "GET", g.home + "/fifo", "", 400},
		{"device without end", "GET", "/dev/zero", "", 400},
		{"loop", "GET", loop, "", 400},
		{"attacker: root's file", "GET", private + "/secret", "", 403},
		{"attacker: shadow", "GET", "/etc/shadow", "", 403},
		{"attacker: link to root's file", "GET", toSecret, "", 403},
		{"attacker: link to root's directory", "GET", toDir + "/secret", "", 403},
		{"attacker: link to shadow", "GET", toShadow, "", 403},
		{"attacker: through the guest's /proc", "GET", "/proc/1/environ", "", 403},
		{"root may", "GET", toSecret, "&username=root", 200},
		{"write: no path", "POST", "", "", 400},
		{"write: directory", "POST", g.home, "", 400},
		{"write: fifo nobody reads", "POST", g.home + "/fifo", "", 400},
		{"write: through a file", "POST", "/etc/passwd/x", "", 400},
		{"attacker: write root's file", "POST", "/etc/passwd", "", 403},
		{"attacker: write over a link", "POST", toSecret, "", 403},
		{"attacker: create in root's directory", "POST", toDir + "/new", "", 403},
		{"attacker: make directories", "POST", "/etc/postern-test/x", "", 403},
		{"write: full device", "POST", "/dev/full", "", 400},
	} {
		t.Run(tt.name, func(t *testing.T) {
			done := make(chan struct{})
			go func() {
				defer close(done)
				var body io.Reader
				if tt.method == "POST" {
					body = strings.NewReader("x")
				}
				code, res, _ := g.do(tt.method, "/files?path="+url.QueryEscape(tt.path)+tt.more, body, "Content-Type", octets)
				if code != tt.want {
					t.Errorf("got %d %s, want %d", code, res, tt.want)
				}
				var e struct {
					Code    int
					Message string
				}
				if tt.want != 200 && (json.Unmarshal(res, &e) != nil || e.Code != tt.want || e.Message == "") {
					t.Errorf("body: got %s, want code and message", res)
				}
			}()
			select {
			case <-done:
			case <-time.After(time.Minute):
				t.Fatal("the guest hangs")
			}
		})
	}
	if b, _ := os.ReadFile(private + "/secret"); string(b) != "root's" {
		t.Errorf("root's file was changed: %q", b)
	}
	for _, tt := range []struct {
		name   string
		header []string
		body   string
	}{
		{"no type", nil, "x"},
		{"form without boundary", []string{"Content-Type", "multipart/form-data"}, "x"},
		{"form that is none", []string{"Content-Type", "multipart/form-data; boundary=b"}, "x"},
		{"unknown type", []string{"Content-Type", "text/plain"}, "x"},
		{"unknown encoding", []string{"Content-Type", octets, "Content-Encoding", "br"}, "x"},
		{"not gzip", []string{"Content-Type", octets, "Content-Encoding", "gzip"}, "x"},
		{"gzip cut short", []string{"Content-Type", octets, "Content-Encoding", "gzip"}, string(gz([]byte(strings.Repeat("abc", 1000)))[:20])},
	} {
		code, res, _ := g.do("POST", "/files?path=bad.txt", strings.NewReader(tt.body), tt.header...)
		if code != 400 {
			t.Errorf("%s: got %d %s, want 400", tt.name, code, res)
		}
		if _, err := os.Stat(g.home + "/bad.txt"); err == nil {
			t.Errorf("%s: half a file stays", tt.name)
		}
	}
}

func TestDiskFull(t *testing.T) {
	g := newRig(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m,mode=1777"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	big := make([]byte, 8<<20)
	for name, tt := range map[string]struct {
		body   []byte
		header []string
	}{
		"length known":   {big, nil},
		"length unknown": {gz(big), []string{"Content-Encoding", "gzip"}},
	} {
		code, res, _ := g.do("POST", "/files?username=root&path="+dir+"/x", bytes.NewReader(tt.body), append(tt.header, "Content-Type", octets)...)
		if code != 507 {
			t.Errorf("%s: got %d %s, want 507", name, code, res)
		}
		if _, err := os.Stat(dir + "/x"); err == nil {
			t.Errorf("%s: half a file stays", name)
		}
	}
}

// TestSwapRace has a user swap a directory for a link to a directory of root's while the
// guest works on it. The guest must not write as root there.
func TestSwapRace(t *testing.T) {
	g := newRig(t)
	private := privateDir(t)
	a, _ := lookupAccount(testUser)
	_ = as(a, func() error {
		_ = os.Mkdir(g.home+"/good", 0o755)
		return os.WriteFile(g.home+"/good/secret", []byte("mine"), 0o644)
	})
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			to := g.home + "/good"
			if i%2 == 0 {
				to = private
			}
			_ = os.Symlink(to, g.home+"/tmp")
			_ = os.Rename(g.home+"/tmp", g.home+"/swap")
		}
	}()
	for range 500 {
		if code, body, _ := g.do("GET", "/files?path=swap/secret", nil); code == 200 && string(body) != "mine" {
			t.Fatalf("read root's file: %q", body)
		}
		g.do("POST", "/files?path=swap/secret", strings.NewReader("mine"), "Content-Type", octets)
	}
	if b, _ := os.ReadFile(private + "/secret"); string(b) != "root's" {
		t.Errorf("root's file was changed: %q", b)
	}
}

// TestLargeFile: a transfer of any size, also beyond 2 GiB, takes bounded memory.
func TestLargeFile(t *testing.T) {
	g := newRig(t)
	const size = 2<<30 + 1
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	code, body, _ := g.do("POST", "/files?path=large", io.LimitReader(zeros{}, size), "Content-Type", octets)
	if code != 200 {
		t.Fatalf("got %d %s", code, body)
	}
	if fi, err := os.Stat(g.home + "/large"); err != nil || fi.Size() != size {
		t.Errorf("got %v, %v, want %d bytes", fi, err, size)
	}
	res := must(g.http.Get(g.url + "/files?path=large"))
	defer res.Body.Close()
	if n, err := io.Copy(io.Discard, res.Body); n != size || err != nil || res.ContentLength != size {
		t.Errorf("read %d bytes of %d, %v, want %d", n, res.ContentLength, err, size)
	}
	runtime.ReadMemStats(&after)
	if grown := int64(after.Sys) - int64(before.Sys); grown > 256<<20 { // the client is in here too
		t.Errorf("memory grew by %d MiB", grown>>20)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func FuzzAcceptEncoding(f *testing.F) {
	for _, s := range []string{"", "gzip", "gzip;q=0", "identity;q=0, *;q=0", "gzip;q=x", "br,,;"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if yes, err := wantsGzip(map[string][]string{"Accept-Encoding": {s}}); yes && err != nil {
			t.Error("yes and an error")
		}
	})
}

func FuzzStat(f *testing.F) {
	f.Add("12 (a) S 1 12 12 0 -1 0 0 0 0 0 5 6 7 8 20")
	f.Add("12 (evil) R 0 0) S 1 12 12 0 -1 0 0 0 0 0 5 6 7 8 20")
	f.Add(")(")
	f.Fuzz(func(t *testing.T, s string) {
		if p, ok := parseStat(s); ok && strings.HasPrefix(s, "12 (") && p.pid != 12 {
			t.Errorf("got pid %d of %q", p.pid, s)
		}
	})
}

// TestProcessWithoutItsFirstThreadIsAlive: a process whose first thread has ended is not
// dead while other threads run. Otherwise killAll would leave it out.
func TestProcessWithoutItsFirstThreadIsAlive(t *testing.T) {
	for line, dead := range map[string]bool{
		"12 (a) Z 1 12 12 0 -1 0 0 0 0 0 5 6 7 8 20 0 1 0":      true,
		"12 (a) Z 1 12 12 0 -1 0 0 0 0 0 5 6 7 8 20 0 2 0":      false,
		"12 (a) X 1 12 12 0 -1 0 0 0 0 0 5 6 7 8 20 0 0 0":      true,
		"12 (Z) 1 2) S 1 12 12 0 -1 0 0 0 0 0 5 6 7 8 20 0 1 0": false,
	} {
		if p, ok := parseStat(line); !ok || p.dead != dead {
			t.Errorf("%s: dead is %v, want %v", line, p.dead, dead)
		}
	}
}

func FuzzServices(f *testing.F) {
	f.Add("# none\n/bin/a b  c # d\n\n/bin/e")
	f.Add("relative")
	f.Fuzz(func(t *testing.T, s string) {
		lines, err := parseServices(strings.NewReader(s))
		for _, l := range lines {
			if err == nil && (len(l) == 0 || !filepath.IsAbs(l[0])) {
				t.Errorf("got %q of %q", l, s)
			}
		}
	})
}

func FuzzBasicUser(f *testing.F) {
	for _, s := range []string{"", "Basic dXNlcjo=", "basic !!!", "Bearer x", "Basic"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if name, err := basicUser(s); err != nil && name != "" {
			t.Error("a name and an error")
		}
	})
}

// TestTopDirectory: the default user may create directories in the root directory, where
// clients of E2B write. Other users may not, and existing directories stay closed.
func TestTopDirectory(t *testing.T) {
	g := newRig(t)
	top := "/postern-guest-" + rand.Text()
	t.Cleanup(func() { os.RemoveAll(top) })
	for _, tt := range []struct {
		name, path, user string
		want             int
	}{
		{"attacker: another user", top + "/a/b", "daemon", 403},
		{"attacker: a file", top, testUser, 403},
		{"attacker: a directory of root's", "/etc/postern-" + rand.Text(), testUser, 403},
		{"attacker: below a directory of root's", "/etc/postern-" + rand.Text() + "/x", testUser, 403},
		{"attacker: a directory of root's by another way", top + "/../etc/postern-" + rand.Text(), testUser, 403},
		{"the default user", top + "/a/b", testUser, 200},
		{"again", top + "/a/c", testUser, 200},
	} {
		code, res, _ := g.do("POST", "/files?username="+tt.user+"&path="+tt.path, strings.NewReader("x"), "Content-Type", octets)
		if code != tt.want {
			t.Errorf("%s: got %d %s, want %d", tt.name, code, res, tt.want)
		}
	}
	a, err := lookupAccount(testUser)
	if err != nil {
		t.Fatal(err)
	}
	made := top + "-made"
	t.Cleanup(func() { os.RemoveAll(made) })
	for _, tt := range []struct {
		name, path, user string
		want             connect.Code
	}{
		{"attacker: another user makes", made, "daemon", connect.CodePermissionDenied},
		{"attacker: makes in a directory of root's", "/etc/postern-" + rand.Text() + "/x", testUser, connect.CodePermissionDenied},
		{"the default user makes", made, testUser, 0},
		{"makes again", made, testUser, connect.CodeAlreadyExists},
		{"makes below", made + "/a/b", testUser, 0},
		{"attacker: another user makes below", made + "/c", "daemon", connect.CodePermissionDenied},
	} {
		req := asUser(connect.NewRequest(&filesystempb.MakeDirRequest{Path: tt.path}), tt.user)
		if _, err := g.file.MakeDir(t.Context(), req); (err == nil) != (tt.want == 0) || err != nil && connect.CodeOf(err) != tt.want {
			t.Errorf("%s: got %v, want %v", tt.name, err, tt.want)
		}
	}
	for _, dir := range []string{top, made, made + "/a/b"} {
		fi, err := os.Stat(dir)
		if err != nil || fi.Sys().(*syscall.Stat_t).Uid != a.uid {
			t.Errorf("owner of %s: got %v, %v, want %s", dir, fi, err, testUser)
		}
	}
}
