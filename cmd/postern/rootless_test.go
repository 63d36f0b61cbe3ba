package main

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// asNobody returns a command of this program, run by a user without any rights, and a
// directory of that user's. Cancel ends it.
func asNobody(t *testing.T) (start func(args ...string) (cmd *exec.Cmd, cancel func()), home string) {
	t.Helper()
	// Not t.TempDir, whose parent only root may enter.
	dir, err := os.MkdirTemp("", "postern-nobody")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "postern")
	home = filepath.Join(dir, "home")
	if err := os.WriteFile(program, b, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(home, 0o700); err != nil {
		t.Fatal(err)
	}
	attr := &syscall.SysProcAttr{}
	if os.Geteuid() == 0 {
		const nobody = 65534
		attr.Credential = &syscall.Credential{Uid: nobody, Gid: nobody}
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(home, nobody, nobody); err != nil {
			t.Fatal(err)
		}
	}
	return func(args ...string) (*exec.Cmd, func()) {
		ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.SysProcAttr, cmd.Dir, cmd.Env = attr, home, []string{"HOME=" + home, "PATH=/usr/bin:/bin"}
		return cmd, cancel
	}, home
}

// TestUpNamesTheRootThatSandboxesNeed has a user without rights start the server: the
// refusal says why and what to do, before anything is made.
func TestUpNamesTheRootThatSandboxesNeed(t *testing.T) {
	start, home := asNobody(t)
	for _, args := range [][]string{{"up"}, {"up", "--data", filepath.Join(home, "data")}, {"gateway", "start"}} {
		cmd, cancel := start(args...)
		out, err := cmd.CombinedOutput()
		cancel()
		if err == nil || !strings.Contains(string(out), "sandboxes need root") || !strings.Contains(string(out), "--sandboxes=off") {
			t.Errorf("%v: %v, %s", args, err, out)
		}
	}
	if list, err := os.ReadDir(home); err != nil || len(list) > 0 {
		t.Errorf("it left %v, %v", list, err)
	}
}

// TestServerWithoutSandboxesNeedsNoRoot starts one as a user without rights, and with the
// default cache directory, which is root's.
func TestServerWithoutSandboxesNeedsNoRoot(t *testing.T) {
	if _, err := guest(); err != nil {
		t.Fatal(err)
	}
	start, home := asNobody(t)
	cmd, cancel := start("up", "--sandboxes=off", "--data", filepath.Join(home, "data"), "--listen", "127.0.0.1:0", "--smtp", "127.0.0.1:0")
	url := serve(t, cmd, cancel)
	resp, err := (&http.Client{Timeout: time.Minute}).Get(url + "/health")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode >= http.StatusBadRequest {
		t.Errorf("GET %s/health: %s", url, resp.Status)
	}
}
