package e2e

import (
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// TestBrowserSandbox works in a real sandbox with headless Chromium: its page, a file that is
// downloaded, a terminal whose programs try to make it type, a flood, and a command without
// JavaScript.
func TestBrowserSandbox(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--domain", "boxes.test", "--public-ports")
	b := s.sandbox(map[string]any{"metadata": map[string]string{"name": "reconcile november", "team": "finance"}})
	if r := b.run("printf 'one\\033[2Jtwo\\n' > note.txt; mkdir -p work/ledger; mkfifo pipe; ln -s /proc/1/environ env; truncate -s 1T sparse; touch $'a\\nb'; setsid python3 -m http.server 8000 >/dev/null 2>&1 & sleep 1; curl -sm 3 https://refused.example/ || true"); r.exit != 0 {
		t.Fatalf("%+v", r)
	}
	shots := os.Getenv("POSTERN_TEST_SCREENSHOTS")
	if shots == "" {
		shots = t.TempDir()
	}
	if os.Getenv("POSTERN_TEST_DOCS") != "" {
		b.run("(for i in $(seq 12); do python3 -c 'x = list(range(4 * 10**6)); sum(x)'; sleep $((i % 4 + 2)); done) >/dev/null 2>&1 &")
	}
	out, err := exec.Command("node", "../browser/sandbox.mjs", "http://"+s.web, s.link, b.id, shots).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
}

// TestSandboxPage: the console's forms pause, resume, extend and fork a real sandbox, and
// its file view is bounded, or refuses with a clear text, for what is not a plain file.
func TestSandboxPage(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--pool-min", "0", "--pool-max", "0")
	b := s.sandbox(map[string]any{"metadata": map[string]string{"name": "odd files"}})
	if r := b.run("echo hello > note.txt; mkfifo pipe; ln -s /proc/1/environ env; ln -s /etc/shadow shadow; ln -s /dev/zero zero; ln -s loop loop; truncate -s 1T sparse; mkdir dir; " +
		"python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'"); r.exit != 0 {
		t.Fatalf("%+v", r)
	}
	ann := s.person("ann")
	base := "/console/sandboxes/" + b.id
	get := func(path string) (int, string) {
		t.Helper()
		resp, err := ann.Get("http://" + s.web + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	const home = "/home/user/"
	for _, tt := range []struct {
		path   string
		status int
		want   string
	}{
		{home + "note.txt", http.StatusOK, "hello"},
		{home + "sparse", http.StatusOK, "This is only the beginning"},
		{home + "pipe", http.StatusConflict, "is not a regular file"},
		{home + "sock", http.StatusConflict, "The sandbox refuses"},
		{home + "zero", http.StatusConflict, "is not a regular file"},
		{"/dev/zero", http.StatusConflict, "is not a regular file"},
		{home + "dir", http.StatusConflict, "is a directory"},
		{home + "loop", http.StatusConflict, "The sandbox refuses"},
		{home + "env", http.StatusConflict, "The sandbox refuses"},    // another user's
		{home + "shadow", http.StatusConflict, "The sandbox refuses"}, // a link leads no farther than the user may
		{"/proc/cpuinfo", http.StatusOK, "processor"},                 // the sandbox's own, whose size the kernel does not tell
		{"/proc/kcore", http.StatusConflict, "The sandbox"},
		{home + "none", http.StatusConflict, "does not exist"},
	} {
		begun := time.Now()
		status, page := get(base + "/file?path=" + url.QueryEscape(tt.path))
		if status != tt.status || !strings.Contains(page, tt.want) || time.Since(begun) > 30*time.Second || len(page) > 4<<20 {
			t.Errorf("%s: status %d after %s, %d bytes, want %d with %q\n%s", tt.path, status, time.Since(begun), len(page), tt.status, tt.want, alert(page))
		}
		if strings.Contains(page, "root:") {
			t.Errorf("%s shows a file that the user cannot read", tt.path)
		}
		if status, page := s.form(ann, base+"/download", url.Values{"path": {tt.path}}); tt.status != http.StatusOK && status == http.StatusOK || strings.Contains(page, "root:") {
			t.Errorf("%s is downloaded", tt.path)
		}
	}
	do := func(form string, v url.Values, done string) string {
		t.Helper()
		status, page := s.form(ann, base+form, v)
		if status != http.StatusSeeOther {
			t.Fatalf("%s: %d\n%s", form, status, alert(page))
		}
		if _, page := get(base); !strings.Contains(page, done) {
			t.Errorf("after %s the page does not say %q", form, done)
		}
		return page
	}
	do("/extend", url.Values{"for": {"1h"}}, "running")
	do("/fork", nil, "running")
	if n := len(sandboxIDs(t, func() []byte { _, _, b := s.project("GET", "/v2/sandboxes", ""); return b }())); n != 2 {
		t.Errorf("%d sandboxes after a fork, want 2", n)
	}
	do("/pause", nil, "paused")
	if status, page := s.form(ann, base+"/terminal", url.Values{}); status != http.StatusConflict || !strings.Contains(page, "A terminal needs a sandbox that runs") {
		t.Errorf("a terminal of a paused sandbox: %d", status)
	}
	do("/resume", nil, "running")
	if r := b.run("cat note.txt"); r.exit != 0 || !strings.Contains(r.stdout, "hello") {
		t.Errorf("after resuming: %+v", r)
	}
}

// alert returns what a page says about an error, as far as it can be found.
func alert(page string) string {
	if i := strings.Index(page, "<main"); i >= 0 {
		page = page[i:]
	}
	return page[:min(len(page), 1500)]
}
