package e2e

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/pem"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	rest "postern/client"
)

// learntJob starts children in several ways, writes files, and tries to reach a host.
const learntJob = `
import os, subprocess, sys, tempfile, urllib.request
print(subprocess.check_output(["uname", "-p"], text=True))
subprocess.run(["sh", "-c", "echo 'it works' | tr a-z A-Z > shell.txt"], check=True)
subprocess.run([sys.executable, "-c", "print(6 * 7)"], check=True)
os.system("ls /work > /dev/null")
with tempfile.TemporaryDirectory() as d:
    open(d + "/x.py", "w").write("print('from a temporary file')")
    subprocess.run([sys.executable, d + "/x.py"], check=True)
try:
    urllib.request.urlopen("http://outside.example/", timeout=5)
except OSError as e:
    print("no network", e)
try:
    open("/usr/share/x", "w")
except OSError as e:
    print("no file", e)
os.mkdir("made")
open("made/total.csv", "w").write(sys.argv[1] + "\n")
`

// approveAll approves what waits until the test ends.
func approveAll(t *testing.T, person *rest.Client) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	decided := make(chan struct{})
	go func() {
		defer close(decided)
		for ctx.Err() == nil {
			list, err := person.Actions.List(ctx, 50, rest.StatePending)
			for _, a := range list {
				if err == nil {
					_ = approveRun(ctx, person, a.ID) // the next round tries again
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(200 * time.Millisecond):
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-decided
	})
}

// learn learns a contract from a command, checks it, performs the command under it, and
// returns the contract's text. Every clause must be kept.
func (s *server) learn(t *testing.T, key *rest.Client, file string, args, command []string) string {
	t.Helper()
	all := slices.Concat([]string{"contract", "learn", "--data", s.data, "--out", file}, args, []string{"--"}, command)
	out, err := exec.CommandContext(t.Context(), s.bin, all...).CombinedOutput()
	if err != nil {
		t.Fatalf("learn: %v\n%s", err, out)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", text)
	if out, err := exec.CommandContext(t.Context(), s.bin, "contract", "check", file).CombinedOutput(); err != nil || !strings.Contains(string(out), "is in order") {
		t.Errorf("check: %v\n%s", err, out)
	}
	if code, out := s.runStatus(t, nil, slices.Concat([]string{file}, args, []string{"--"}, command)...); code != 0 {
		t.Fatalf("run under the learnt contract: exit %d\n%s", code, out)
	}
	list, err := key.Runs.List(t.Context(), rest.RunQuery{Limit: 1})
	if err != nil || len(list) != 1 || list[0].Outcome != rest.RunSucceeded {
		t.Fatalf("%+v, %v", list, err)
	}
	for _, c := range s.reportOf(t.Context(), key, list[0].ID).Clauses {
		if c.Verdict != "kept" {
			t.Errorf("clause %s is %s: %s", c.ID, c.Verdict, c.Because)
		}
	}
	return string(text)
}

// TestLearntContractIsKept: a contract that was learnt from one run passes check, and the
// same command runs under it with every clause kept. Another command does not.
func TestLearntContractIsKept(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--pool-max", "0")
	key, person := s.api()
	approveAll(t, person)
	dir := t.TempDir()
	script, learnt := filepath.Join(dir, "job.py"), filepath.Join(dir, "learnt.yaml")
	if err := os.WriteFile(script, []byte(learntJob), 0o600); err != nil {
		t.Fatal(err)
	}
	text := s.learn(t, key, learnt, []string{"--input", script}, []string{"python3", "job.py", "June 2026"})
	for _, want := range []string{"uname -p", "outside.example", "# Refused to write: /usr/share/x", "made/total.csv", "job.py 'June 2026'"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in the contract", want)
		}
	}
	// npm starts node and a shell, and writes a log whose name differs from run to run.
	manifest := filepath.Join(dir, "package.json")
	if err := os.WriteFile(manifest, []byte(`{"name":"x","version":"1.0.0","scripts":{"report":"node -e 'require(\"fs\").writeFileSync(\"made.txt\", \"x\")'"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if text := s.learn(t, key, filepath.Join(dir, "npm.yaml"), []string{"--input", manifest}, []string{"npm", "run", "report"}); !strings.Contains(text, "node -e") {
		t.Errorf("npm's children are not in the contract")
	}
	if code, out := s.runStatus(t, nil, learnt, "--input", script, "--", "python3", "job.py", "July 2026"); code != 121 {
		t.Errorf("another command: exit %d, want 121\n%s", code, out)
	}
}

// tinyWheel returns a Python package.
func tinyWheel(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, f := range [][2]string{
		{"tiny.py", "print('tiny')\n"},
		{"tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"},
		{"tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"tiny-1.0.dist-info/RECORD", "tiny.py,,\ntiny-1.0.dist-info/METADATA,,\ntiny-1.0.dist-info/WHEEL,,\ntiny-1.0.dist-info/RECORD,,\n"},
	} {
		w, err := z.Create(f[0])
		if err == nil {
			_, err = io.WriteString(w, f[1])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestLearntContractOfPackages: pip installs from the operator's mirror, which is at a
// private address. The contract that is learnt pins the package and names pip's children.
func TestLearntContractOfPackages(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestLearntContractOfPackages$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestLearntContractOfPackages") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"route", "add", "local", "10.9.8.7/32", "dev", "lo"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	wheel := tinyWheel(t)
	l, err := net.Listen("tcp", "10.9.8.7:8443")
	if err != nil {
		t.Fatal(err)
	}
	mirror := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/simple/tiny/":
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, `<a href="/simple/files/tiny-1.0-py3-none-any.whl">tiny-1.0-py3-none-any.whl</a>`)
		case "/simple/files/tiny-1.0-py3-none-any.whl":
			_, _ = w.Write(wheel)
		default:
			http.NotFound(w, r)
		}
	}))
	mirror.Listener.Close()
	mirror.Listener = l
	mirror.StartTLS()
	t.Cleanup(mirror.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: mirror.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(t, t.TempDir(), "--pool-max", "0", "--dns", permitNames(t), "--egress-ca", ca, "--package-mirror", "pypi=https://mirror.example.com:8443/simple")
	key, person := s.api()
	approveAll(t, person)
	text := s.learn(t, key, filepath.Join(t.TempDir(), "learnt.yaml"), nil, []string{"pip", "install", "--target", "/work/lib", "--no-cache-dir", "tiny==1.0"})
	if !strings.Contains(text, "{manager: pypi, pinned: true}") || !strings.Contains(text, "pip install --target /work/lib --no-cache-dir 'tiny==1.0'") && !strings.Contains(text, "pip install --target /work/lib --no-cache-dir tiny==1.0") {
		t.Errorf("the contract does not pin the package:\n%s", text)
	}
}
