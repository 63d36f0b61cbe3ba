package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"postern/internal/guest/processpb"
	"postern/internal/sandbox"
)

// withBusybox adds a shell to a root file system, as Alpine has it.
func withBusybox(t testing.TB, dir string) string {
	t.Helper()
	path, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("no busybox here: apt-get install busybox-static")
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "bin/busybox"), b, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"sh", "sleep", "cat", "echo", "touch", "test", "id", "pwd", "nc", "ls"} {
		if err := os.Symlink("busybox", filepath.Join(dir, "bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// runIn runs a command in a sandbox as the official SDKs do.
func runIn(t *testing.T, f *sandbox.Fleet, id, user string, args ...string) (out string, err error) {
	t.Helper()
	client := processpb.NewProcessClient(&http.Client{Transport: channel{f, id, user}}, fmt.Sprintf("http://%s:%d", id, sandbox.GuestPort))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stream, err := client.Start(ctx, connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: args[0], Args: args[1:]}}))
	if err != nil {
		return "", err
	}
	defer stream.Close()
	for stream.Receive() {
		ev := stream.Msg().GetEvent()
		out += string(ev.GetData().GetStdout()) + string(ev.GetData().GetStderr())
		if e := ev.GetEnd(); e != nil && e.GetExitCode() != 0 {
			return out, fmt.Errorf("%s", e.GetStatus())
		}
	}
	return strings.TrimSpace(out), stream.Err()
}

// channel sends requests to a guest as the host does.
type channel struct {
	f        *sandbox.Fleet
	id, user string
}

func (c channel) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set(sandbox.ChannelHeader, c.f.ChannelKey(c.id).Reveal())
	if c.user != "" {
		r.SetBasicAuth(c.user, "")
	}
	return c.f.Transport().RoundTrip(r)
}

// TestTemplatesStartTheirCommand: it runs as the template's user with its environment and
// directory, it is ready in every sandbox from the snapshot, it survives the server, and
// a failure says what it printed.
func TestTemplatesStartTheirCommand(t *testing.T) {
	needRoot(t)
	root := withBusybox(t, distroless(t))
	image := sandbox.Base{Rootfs: root, Env: map[string]string{"COLOUR": "green", "E2B_SANDBOX_ID": "forged"}, User: "user", Dir: "/home"}
	with := func(key, startCmd, readyCmd string) sandbox.Base {
		b := image
		b.Key, b.StartCmd, b.ReadyCmd = key, startCmd, readyCmd
		return b
	}
	counts := "cd /tmp; n=0; while :; do n=$((n+1)); echo $n $COLOUR $(id -u) $PWD > count.new; /bin/busybox mv count.new count; sleep 0.2; done"
	bases := map[string]sandbox.Base{
		"good":  with("good", "echo starting; "+counts, "test -e /tmp/count"),
		"fails": with("fails", "echo the last words; exit 3", ""),
		"never": with("never", "sleep 100", "false"),
		"done":  with("done", "touch /tmp/done", "false"),
	}
	small := bases["good"]
	small.Key, small.MemoryMB, small.DiskMB = "small", 128, 16
	bases["small"] = small
	f, who, _ := newFleet(t, bases, func(c *sandbox.Config) {
		c.Cold, c.ReadyTimeout, c.StartWait, c.Pool = false, 9*time.Second, time.Minute, sandbox.PoolConfig{Max: 2, MemoryMB: 1024}
	})
	ctx := t.Context()
	var said []string
	if err := f.MakeTemplateSnapshot(ctx, "good", func(l string) { said = append(said, l) }); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(said, "starting") {
		t.Errorf("output: %q", said)
	}
	for name, want := range map[string]string{"fails": "the last words", "never": "not ready within 9s"} {
		if err := f.MakeTemplateSnapshot(ctx, name, func(string) {}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q in it", name, err, want)
		} else if _, ok := errors.AsType[*sandbox.StartError](err); !ok {
			t.Errorf("%s: got %T", name, err)
		}
	}
	if err := f.MakeTemplateSnapshot(ctx, "done", func(string) {}); err != nil {
		t.Errorf("a start command that has ended well: %v", err)
	}
	create := func(template string, env map[string]string) sandbox.Info {
		t.Helper()
		begin := time.Now()
		s, err := f.Create(ctx, who, sandbox.Request{Template: template, EnvVars: env, Options: sandbox.Options{Timeout: time.Minute}})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("create %s: %v", template, time.Since(begin))
		return s
	}
	for range 3 { // the later ones may come from the pool
		s := create("good", map[string]string{"MORE": "x"})
		got, err := runIn(t, f, s.ID, "", "/bin/bash", "-l", "-c", "cat /tmp/count; echo $COLOUR $MORE $(id -u) $PWD $E2B_SANDBOX_ID")
		count, rest, _ := strings.Cut(got, "\n")
		if err != nil || !strings.HasSuffix(count, " green 1000 /tmp") || strings.HasPrefix(count, "1 ") || rest != "green x 1000 /home "+s.ID {
			t.Errorf("got %q, %v", got, err)
		}
		if _, err := runIn(t, f, s.ID, "root123", "/bin/bash", "-l", "-c", "true"); connect.CodeOf(err) != connect.CodeUnauthenticated || !strings.HasSuffix(err.Error(), "invalid username: 'root123'") {
			t.Errorf("unknown user: %v", err)
		}
		if err := f.Kill(ctx, who, s.ID); err != nil {
			t.Error(err)
		}
		time.Sleep(300 * time.Millisecond)
	}
	s := create("good", nil)
	if err := f.Pause(ctx, who, s.ID, true); err != nil { // without its memory
		t.Fatal(err)
	}
	if _, _, err := f.Connect(ctx, who, s.ID, sandbox.ConnectRequest{Timeout: time.Minute}); err != nil {
		t.Fatal(err)
	}
	if got, err := runIn(t, f, s.ID, "", "/bin/bash", "-l", "-c", "cat /tmp/count"); err != nil || !strings.HasSuffix(got, " green 1000 /tmp") {
		t.Errorf("after a boot from files: %q, %v", got, err)
	}
	if s := create("small", nil); s.MemoryMB != 128 || s.DiskMB != 16 || s.CPUs != 1 {
		t.Errorf("limits of the template: got %+v", s)
	} else if _, err := runIn(t, f, s.ID, "", "/bin/sh", "-c", "/bin/busybox dd if=/dev/zero of=/home/user/big bs=1M count=20"); err == nil {
		t.Error("a sandbox of 16 MiB took 20")
	}
	if err := f.ForgetTemplate(ctx, "good"); err != nil {
		t.Error(err)
	}
}

// TestImagesWithoutAShell: a program runs by its path, and what needs a shell says so.
func TestImagesWithoutAShell(t *testing.T) {
	needRoot(t)
	f, who, _ := newFleet(t, map[string]sandbox.Base{"bare": {Rootfs: distroless(t), Key: "bare"}}, nil)
	s, err := f.Create(t.Context(), who, sandbox.Request{Template: "bare", Options: sandbox.Options{Timeout: time.Minute}})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if got, err := runIn(t, f, s.ID, "", "/bin/tool", "euid"); err != nil || got != "1000" {
			t.Errorf("a program: %q, %v", got, err)
		}
		if _, err := runIn(t, f, s.ID, "", "/bin/bash", "-l", "-c", "true"); err == nil || !strings.Contains(err.Error(), "the template has no shell; run a program by its path") {
			t.Errorf("a shell: %v", err)
		}
	}
	client := &http.Client{Transport: channel{f, s.ID, ""}}
	resp, err := client.Post(fmt.Sprintf("http://%s:%d/bench/run", s.ID, sandbox.GuestPort), "application/json", strings.NewReader(`{"args":["/bin/tool","euid"]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusNotFound {
		t.Errorf("the routes of builds in a user's sandbox: %d %s", resp.StatusCode, b)
	}
}
