package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestSSH works in a sandbox with the OpenSSH client of this machine.
func TestSSH(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("ssh"); err != nil {
		t.Skip("no OpenSSH client: make deps-test installs it")
	}
	s := start(t, t.TempDir())
	b := s.sandbox(nil)
	other := s.sandbox(nil)
	dir := t.TempDir()
	mine := append(os.Environ(), "HOME="+dir, "TMPDIR="+dir)
	run := func(stdin io.Reader, name string, args ...string) (string, string, int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, name, args...)
		var out, errs bytes.Buffer
		cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errs
		cmd.Env = mine
		err := cmd.Run()
		if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
			t.Fatal(err)
		}
		return out.String(), errs.String(), cmd.ProcessState.ExitCode()
	}
	postern := func(stdin io.Reader, args ...string) (string, string, int) {
		return run(stdin, s.bin, append([]string{args[0], "--data", s.data}, args[1:]...)...)
	}

	blob := make([]byte, 3<<20)
	_, _ = rand.Read(blob)
	for _, tt := range []struct {
		name  string
		stdin string
		args  []string
		out   string
		errs  string
		exit  int
	}{
		{"output, error and status", "", []string{b.id, "--", "echo out; echo err >&2; exit 7"}, "out\n", "err\n", 7},
		{"binary input and its end", string(blob), []string{b.id, "cat"}, string(blob), "", 0},
		{"the template's account", "", []string{b.id, "--", "id", "-un"}, "user\n", "", 0},
		{"another account", "", []string{"--user", "root", b.id, "--", "id", "-un"}, "root\n", "", 0},
		{"a shell without a terminal", "echo $((6*7)); exit 3\n", []string{b.id}, "42\n", "", 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, errs, exit := postern(strings.NewReader(tt.stdin), append([]string{"ssh"}, tt.args...)...)
			if out != tt.out || errs != tt.errs || exit != tt.exit {
				t.Errorf("got %.200q, %q, %d, want %.200q, %q, %d", out, errs, exit, tt.out, tt.errs, tt.exit)
			}
		})
	}
	if _, errs, exit := postern(nil, "ssh", "inosuchsandbox", "true"); exit == 0 || !strings.Contains(errs, "no sandbox") {
		t.Errorf("no sandbox: %q, %d", errs, exit)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "postern-ssh-*")); err != nil || len(left) > 0 {
		t.Errorf("keys are left in %q, %v", left, err)
	}

	// The block for ~/.ssh/config, with OpenSSH's own programs.
	block, errs, exit := postern(nil, "ssh", "--print-config")
	if exit != 0 {
		t.Fatal(errs)
	}
	config := filepath.Join(dir, "config")
	if err := os.WriteFile(config, []byte(block), 0o600); err != nil {
		t.Fatal(err)
	}
	name := b.id + ".postern"
	// A terminal: a key interrupts, and the shell's status is the client's.
	keys, typed, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer keys.Close()
	defer typed.Close() // not before the shell has ended
	said := &lockedBuffer{}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	terminal := exec.CommandContext(ctx, "ssh", "-tt", "-F", config, name)
	terminal.Env, terminal.Stdin, terminal.Stdout, terminal.Stderr = mine, keys, said, said
	if err := terminal.Start(); err != nil {
		t.Fatal(err)
	}
	// The terminal echoes what is typed, so what a command says is written otherwise there.
	_, _ = io.WriteString(typed, `tty; sh -c 'trap "echo over''taken; exit" INT; echo trap''ped; while :; do sleep 1; done'`+"\n")
	eventually(t, "the shell says which terminal it has", func() bool {
		return strings.Contains(said.String(), "/dev/pts") && strings.Contains(said.String(), "trapped")
	})
	_, _ = io.WriteString(typed, "\x03")
	eventually(t, "the key interrupts the command", func() bool { return strings.Contains(said.String(), "overtaken") })
	_, _ = io.WriteString(typed, "exit 5\n")
	_ = terminal.Wait()
	if exit := terminal.ProcessState.ExitCode(); exit != 5 {
		t.Errorf("terminal: %q, %d", said, exit)
	}
	file := filepath.Join(dir, "blob")
	if err := os.WriteFile(file, blob, 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "tree", "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "tree", "sub", "ä b"), []byte("text"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"scp", "-F", config, "-p", file, name + ":there"},
		{"scp", "-F", config, "-r", filepath.Join(dir, "tree"), name + ":tree"},
		{"scp", "-F", config, name + ":there", file + ".back"},
		{"scp", "-F", config, "-r", name + ":tree", filepath.Join(dir, "tree.back")},
	} {
		if _, errs, exit := run(nil, args[0], args[1:]...); exit != 0 {
			t.Fatalf("%q: %s, %d", args, errs, exit)
		}
	}
	if back, err := os.ReadFile(file + ".back"); err != nil || !bytes.Equal(back, blob) {
		t.Errorf("copied back: %d bytes, %v", len(back), err)
	}
	if back, err := os.ReadFile(filepath.Join(dir, "tree.back", "sub", "ä b")); err != nil || string(back) != "text" {
		t.Errorf("copied back: %q, %v", back, err)
	}
	if r := b.run("stat -c '%a %U' ~/there"); r.stdout != "640 user\n" {
		t.Errorf("copied file: %+v", r)
	}
	if _, err := exec.LookPath("rsync"); err == nil && b.run("command -v rsync").exit == 0 {
		if _, errs, exit := run(nil, "rsync", "-a", "-e", "ssh -F "+config, filepath.Join(dir, "tree")+"/", name+":synced/"); exit != 0 {
			t.Errorf("rsync: %s, %d", errs, exit)
		}
	}

	// Ports: of the sandbox's loopback only.
	if r := b.run("cat > /tmp/s.py <<'END'" + services + "END\nsetsid python3 /tmp/s.py >/dev/null 2>&1 & for i in $(seq 600); do (echo > /dev/tcp/127.0.0.1/5001) 2>/dev/null && break; sleep 0.1; done"); r.exit != 0 {
		t.Fatalf("%+v", r)
	}
	const get = "GET / HTTP/1.0\r\nHost: x\r\n\r\n"
	for _, tt := range []struct {
		name, to string
		want     string
	}{{"loopback", "localhost:5000", "200 OK"}, {"the host's server", s.web, "localhost"}, {"elsewhere", "192.0.2.1:80", ""}} {
		out, errs, _ := run(strings.NewReader(get), "ssh", "-F", config, "-W", tt.to, name)
		if tt.name == "loopback" && !strings.Contains(out, tt.want) || tt.name != "loopback" && out != "" {
			t.Errorf("ssh -W %s: %q, %q", tt.to, out, errs)
		}
	}
	if out, errs, _ := postern(strings.NewReader(get), "forward", "--stdio", b.id, "5000"); !strings.Contains(out, "200 OK") {
		t.Errorf("forward --stdio: %q, %q", out, errs)
	}
	if _, errs, exit := postern(strings.NewReader(get), "forward", "--stdio", b.id, "5999"); exit == 0 || !strings.Contains(errs, "nothing listens") {
		t.Errorf("forward to a closed port: %q, %d", errs, exit)
	}
	testForward(t, s, b)

	// A client that goes takes its process with it.
	cmd := exec.CommandContext(t.Context(), "ssh", "-F", config, name, "exec -a gone-with-client sleep 1000")
	cmd.Env = mine
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	runs := func() bool { return b.run("pgrep -f '[g]one-with-client'").exit == 0 }
	eventually(t, "the client's process runs", runs)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	eventually(t, "the process of a client that has gone ends", func() bool { return !runs() })

	// A key of another project opens nothing.
	t.Run("another project's key", func(t *testing.T) {
		key, err := s.cli("project", "create", "other")
		if err != nil {
			t.Fatal(err)
		}
		if out, errs, exit := run(nil, "env", "POSTERN_URL=http://"+s.web, "POSTERN_PROJECT_KEY="+strings.TrimSpace(lastWord(key)), s.bin, "ssh", other.id, "true"); exit == 0 || !strings.Contains(errs, "no sandbox") {
			t.Errorf("got %q, %q, %d", out, errs, exit)
		}
	})
}

func lastWord(s string) string {
	words := strings.Fields(s)
	if len(words) == 0 {
		return ""
	}
	return words[len(words)-1]
}

// testForward uses postern forward as a browser would.
func testForward(t *testing.T, s *server, b *box) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := exec.CommandContext(ctx, s.bin, "forward", "--data", s.data, b.id, "0:5000")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cancel()
		_ = cmd.Wait()
	}()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	url := strings.Fields(line)[0]
	if host, _, err := net.SplitHostPort(strings.TrimPrefix(url, "http://")); err != nil || host != "127.0.0.1" {
		t.Errorf("it listens on %s, %v", url, err)
	}
	for range 3 {
		resp, err := client.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || !strings.HasPrefix(string(body), "127.0.0.1:") {
			t.Errorf("got %d %q, %v", resp.StatusCode, body, err)
		}
	}
}
