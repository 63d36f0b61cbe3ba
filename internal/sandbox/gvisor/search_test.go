package gvisor

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/internal/sandbox"
)

// traces returns what Gone found of a sandbox: the details by the trace's name.
func traces(t *testing.T, f *sandbox.Fleet, s sandbox.Info) map[string]string {
	t.Helper()
	there := map[string]string{}
	for _, tr := range f.Gone(t.Context(), s) {
		if tr.Detail == "" {
			t.Errorf("%s: the detail is empty", tr.What)
		}
		if !tr.Gone {
			there[tr.What] = tr.Detail
		}
	}
	return there
}

// TestGoneFindsWhatIsLeft: Gone finds every trace of a running sandbox, none of a removed
// one, and each trace that a faulty removal would leave behind.
func TestGoneFindsWhatIsLeft(t *testing.T) {
	needRoot(t)
	f, who, r := newFleet(t, map[string]sandbox.Base{"t": {Rootfs: withBusybox(t, distroless(t)), Key: "gone", User: "user"}}, nil)
	s, err := f.Create(t.Context(), who, sandbox.Request{Template: "t", Options: sandbox.Options{Timeout: time.Minute}})
	if err != nil {
		t.Fatal(err)
	}
	alive := traces(t, f, s)
	for _, what := range []string{"processes", "cgroup", "user ID", "files", "runtime", "list of the runtime", "link", "guest", "ports and tokens", "row"} {
		if alive[what] == "" {
			t.Errorf("%s of a running sandbox: not found", what)
		}
	}
	name := r.name(s.ID)
	uid, ok := r.ids.has(name)
	if !ok {
		t.Fatal("the sandbox has no user ID")
	}
	// A paused sandbox has a snapshot and a row.
	if err := f.Pause(t.Context(), who, s.ID, false); err != nil {
		t.Fatal(err)
	}
	if there := traces(t, f, s); there["snapshots"] == "" || there["row"] == "" {
		t.Errorf("found of a paused sandbox: %q", there)
	}
	if err := f.Kill(t.Context(), who, s.ID); err != nil {
		t.Fatal(err)
	}
	if there := traces(t, f, s); len(there) > 0 {
		t.Fatalf("found of a removed sandbox: %q", there)
	}
	if there := traces(t, f, sandbox.Info{ID: "i" + strings.Repeat("x", 20)}); there["processes"] == "" {
		t.Error("an unknown sandbox is reported as gone")
	}

	faults := map[string]func(t *testing.T) (undo func() error){
		"cgroup": func(t *testing.T) func() error {
			dir := filepath.Join(r.cgroups.trees()[0], name)
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			return func() error { return os.Remove(dir) }
		},
		"files": func(t *testing.T) func() error {
			if err := os.Mkdir(r.dir(name), 0o700); err != nil {
				t.Fatal(err)
			}
			return func() error { return os.Remove(r.dir(name)) }
		},
		"user ID": func(t *testing.T) func() error {
			if err := os.Symlink(r.dir(name), r.ids.link(uid)); err != nil {
				t.Fatal(err)
			}
			return func() error { return os.Remove(r.ids.link(uid)) }
		},
	}
	process := func(change func(c *exec.Cmd)) func(t *testing.T) func() error {
		return func(t *testing.T) func() error {
			c := exec.Command("/bin/sleep", "60")
			change(c)
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			return func() error { _ = c.Process.Kill(); _ = c.Wait(); return nil }
		}
	}
	for how, change := range map[string]func(c *exec.Cmd){
		"by its user": func(c *exec.Cmd) {
			c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		},
		"by its arguments": func(c *exec.Cmd) { c.Args[0] = "sleep-" + s.ID },
	} {
		faults["processes "+how] = process(change)
	}
	for fault, plant := range faults {
		t.Run(fault, func(t *testing.T) {
			undo := plant(t)
			what, _, _ := strings.Cut(fault, " by ")
			there := traces(t, f, s)
			if there[what] == "" {
				t.Errorf("not found; found %q", there)
			}
			if err := undo(); err != nil {
				t.Error(err)
			}
			if there := traces(t, f, s); len(there) > 0 {
				t.Errorf("after it was removed: %q", there)
			}
		})
	}
	if got := searchMounts("22 1 0:21 / /state/"+name+" rw - tmpfs none rw\n23 1 0:22 / /other rw - tmpfs none rw\n", []string{s.ID, name}); len(got) != 1 || got[0] != "/state/"+name {
		t.Errorf("mounts: %q", got)
	}
}
