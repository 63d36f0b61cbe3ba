package guest

import (
	"bytes"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"

	"postern/internal/guest/filesystempb"
	"postern/internal/guest/processpb"
)

// TestBoundGuestWithoutViewStartsNothing: a restarted guest is still bound, and starts nothing
// without its view. The attack: kill the guest, so that its successor knows no contract.
func TestBoundGuestWithoutViewStartsNothing(t *testing.T) {
	g := newRig(t)
	if err := g.s.bind("job@sha256:1"); err != nil {
		t.Fatal(err)
	}
	again := newRig(t, func(c *Config) { c.State = g.s.conf.State })
	for name, g := range map[string]*rig{"before": g, "after a restart": again} {
		t.Run(name, func(t *testing.T) {
			stream, err := g.proc.Start(t.Context(), connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/bin/true"}}))
			if err == nil {
				stream.Receive()
				err = stream.Err()
			}
			if connect.CodeOf(err) != connect.CodeFailedPrecondition {
				t.Errorf("start: %v", err)
			}
			_, err = g.file.Stat(t.Context(), connect.NewRequest(&filesystempb.StatRequest{Path: "/etc/passwd"}))
			if connect.CodeOf(err) != connect.CodeFailedPrecondition { // the attack: it shows the files outside of the view
				t.Errorf("stat: %v", err)
			}
			watch, err := g.file.WatchDir(t.Context(), connect.NewRequest(&filesystempb.WatchDirRequest{Path: "/"}))
			if err == nil {
				watch.Receive()
				err = watch.Err()
			}
			if connect.CodeOf(err) != connect.CodePermissionDenied {
				t.Errorf("watch: %v", err)
			}
			for path, want := range map[string]int{"/run/command": http.StatusConflict, "/run/confine": http.StatusBadRequest, "/run/kill?pid=0": http.StatusConflict, "/warm": http.StatusForbidden, "/files?path=" + filepath.Join(t.TempDir(), "x"): http.StatusConflict, "/files/compose": http.StatusForbidden} {
				kind := "application/json"
				if strings.HasPrefix(path, "/files?") {
					kind = "application/octet-stream"
				}
				resp, err := g.http.Post(g.url+path, kind, strings.NewReader("{}"))
				if err != nil {
					t.Fatal(err)
				}
				resp.Body.Close()
				if resp.StatusCode != want {
					t.Errorf("%s: %d, want %d", path, resp.StatusCode, want)
				}
			}
			if g.s.current().Contract != "job@sha256:1" {
				t.Errorf("settings: %+v", g.s.current())
			}
		})
	}
	if err := again.s.bind("other@sha256:2"); err == nil {
		t.Error("a bound guest was bound a second time")
	}
}

// TestViewChecksPaths: a view refuses paths that it cannot show or make writable.
func TestViewChecksPaths(t *testing.T) {
	for name, tt := range map[string]struct {
		r    viewRequest
		want string
	}{
		"no contract":       {viewRequest{}, "contract"},
		"relative":          {viewRequest{Read: []string{"data"}}, "read"},
		"unclean":           {viewRequest{Write: []string{"/work/../etc"}}, "write"},
		"zero byte":         {viewRequest{Deny: []string{"/a\x00b"}}, "deny"},
		"everything":        {viewRequest{Read: []string{"/"}}, "root directory"},
		"writable system":   {viewRequest{Write: []string{"/usr"}}, "system directory"},
		"kernel":            {viewRequest{Read: []string{"/proc/1"}}, "sandbox's own"},
		"the guest's":       {viewRequest{Read: []string{"/run/postern/view"}}, "guest's own"},
		"the starter":       {viewRequest{Read: []string{"/.postern-start"}}, "guest's own"},
		"below the starter": {viewRequest{Write: []string{"/.postern-start/x"}}, "guest's own"},
		"above the guest's": {viewRequest{Read: []string{"/run"}}, "guest's own"},
		"memory":            {viewRequest{MemoryMB: -1}, "memoryMB"},
		"too many":          {viewRequest{Read: make([]string, 1000)}, "1000 paths"},
	} {
		t.Run(name, func(t *testing.T) {
			if name != "no contract" {
				tt.r.Contract, tt.r.Dir = "x", "/"
			}
			if err := tt.r.check(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q in it", err, tt.want)
			}
		})
	}
}

// TestViewShowsOnlyItsPaths: the processes of a view have no capabilities and see only the
// paths of the request. gvisor.TestConfinedProcessesCannotLeaveTheirView tests the rest.
func TestViewShowsOnlyItsPaths(t *testing.T) {
	work := t.TempDir()
	data := t.TempDir()
	if err := os.WriteFile(filepath.Join(data, "f"), []byte("data\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	v, err := newView(viewRequest{Contract: "x", Read: []string{data}, Write: []string{"/work"}, Deny: []string{"/usr/bin/env"}, Dir: "/work"}, work)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(v.inputsFrom(), "0"), []byte("in\n"), 0o555); err != nil {
		t.Fatal(err)
	}
	if err := v.put("/work/in/a", "0"); err != nil {
		t.Fatal(err)
	}
	if err := v.put("/work/in/a", "0"); err == nil {
		t.Error("two inputs have the same path")
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	script := `ls /; cat ` + data + `/f /work/in/a; id -un; env; mkdir /work/x && echo y > /work/x/y; touch /data; unshare -U true; grep -E "CapEff|CapBnd|NoNew" /proc/self/status`
	p, err := v.start("/bin/sh", []string{"sh", "-c", script}, &os.ProcAttr{
		Dir: "/work", Env: []string{"PATH=/usr/bin:/bin"}, Files: []*os.File{nil, w, w},
		Sys: &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: v.account.uid, Gid: v.account.gid}},
	})
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	_, _ = b.ReadFrom(r)
	_, _ = p.Wait()
	for _, want := range []string{"data\nin\nrun\n", "env: Permission denied", "touch: cannot touch '/data': Permission denied", "unshare: unshare failed: Operation not permitted", "CapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is not in %s", want, b.String())
		}
	}
	for _, not := range []string{"home", "root", "run\nsbin", ".inputs", ".old"} {
		if strings.HasPrefix(b.String(), not+"\n") || strings.Contains(strings.SplitN(b.String(), "data\n", 2)[0], "\n"+not+"\n") {
			t.Errorf("%q is in the root: %s", not, b.String())
		}
	}
	if got, err := os.ReadFile(filepath.Join(work, "write/0/x/y")); err != nil || string(got) != "y\n" {
		t.Errorf("what was written: %q, %v", got, err)
	}
	if err := v.put("/work/late", "0"); err == nil {
		t.Error("an input was accepted after the first process")
	}
	found, err := v.list([]string{"/work/**"}, 10)
	if err != nil || len(found) != 1 || string(found[0].Path) != "/work/x/y" {
		t.Errorf("listed: %+v, %v", found, err)
	}
}

// TestMatchName: "*" matches any text within one name, and nothing else is special.
func TestMatchName(t *testing.T) {
	for _, tt := range []struct {
		pattern, name string
		want          bool
	}{
		{"a.csv", "a.csv", true},
		{"a.csv", "b.csv", false},
		{"*", "", true},
		{"*.csv", ".csv", true},
		{"*.csv", "x.csv.gz", false},
		{"a*b*c", "abc", true},
		{"a*b*c", "a-b-c", true},
		{"a*b*c", "acb", false},
		{"a*a", "a", false},
		{"[a]?", "[a]?", true},
		{"[a]", "a", false},
	} {
		if got := matchName(tt.pattern, tt.name); got != tt.want {
			t.Errorf("matchName(%q, %q) = %v", tt.pattern, tt.name, got)
		}
	}
}

// TestViewRefusesSymbolicLinks: a contract cannot name a path that a symbolic link leads
// elsewhere.
func TestViewRefusesSymbolicLinks(t *testing.T) {
	data := t.TempDir()
	if err := os.Symlink(data, filepath.Join(data, "harmless")); err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]viewRequest{
		"to read":  {Read: []string{filepath.Join(data, "harmless")}},
		"to write": {Read: []string{data}, Write: []string{filepath.Join(data, "harmless", "out")}},
	} {
		r.Contract, r.Dir = "x", "/"
		if _, err := newView(r, t.TempDir()); err == nil || !strings.Contains(err.Error(), "symbolic link") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
