package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A verified is the output of postern verify --json, with the fields that the test uses.
type verified struct {
	ID      string
	Results []struct {
		ID, Seen, State string
		Settings        []string
		Passed          bool
	}
}

// verify runs postern verify and returns its output, and an error if a check failed.
func (s *server) verify(args ...string) (v verified, err error) {
	s.t.Helper()
	cmd := exec.Command(s.bin, append([]string{"verify", "--json", "--data", s.data}, args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err2 := json.Unmarshal(out, &v); err2 != nil {
		s.t.Fatalf("postern verify: %v, %v: %s\n%s", err, err2, out, &stderr)
	}
	return v, err
}

// TestVerify: all checks pass on a server with default settings.
func TestVerify(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--memory", "512", "--disk", "512")
	dir := t.TempDir()
	log, junit := filepath.Join(dir, "log"), filepath.Join(dir, "junit.xml")
	// The tests read the server's log through a pipe. Here it is copied to a file, which is
	// replaced as a whole: a check that reads it must not find it empty.
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for last := false; !last; {
			select {
			case <-done:
				last = true
			case <-time.After(20 * time.Millisecond):
			}
			if os.WriteFile(log+".new", []byte(s.log.String()), 0o600) == nil {
				_ = os.Rename(log+".new", log)
			}
		}
	}()
	v, err := s.verify("--log", log, "--junit", junit)
	close(done)
	<-stopped
	for _, r := range v.Results {
		if !r.Passed {
			t.Errorf("%s: %s", r.ID, r.Seen)
		}
	}
	if err != nil || len(v.Results) < 25 {
		t.Errorf("%d checks, %v", len(v.Results), err)
	}
	if b, err := os.ReadFile(junit); err != nil || !strings.Contains(string(b), `<testsuites name="postern verify"`) {
		t.Errorf("JUnit: %v: %.200s", err, b)
	}
	record := s.mustCLI("audit", "list", "--verb", "verification.")
	if !strings.Contains(record, "verification.begin") || !strings.Contains(record, "verification.end") || !strings.Contains(record, v.ID) {
		t.Errorf("the audit has %s", record)
	}
	for _, list := range [][]string{{"sandbox", "list"}, {"secret", "list"}, {"template", "list"}} {
		if out := s.mustCLI(list...); strings.Contains(out, "verify-") {
			t.Errorf("the verification left %s", out)
		}
	}
}

// TestVerifyTellsSettingsFromHoles: on servers whose operators opened something, a check that
// reaches only that is open, and names the setting. What is closed stays closed: the peers at
// the public addresses write down who reaches them. They are in a network namespace that no
// other has a route to.
func TestVerifyTellsSettingsFromHoles(t *testing.T) {
	t.Parallel()
	const name = "TestVerifyTellsSettingsFromHoles"
	again := func(inside string) *exec.Cmd {
		cmd := exec.Command(os.Args[0], "-test.run=^"+name+"$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE="+inside)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		return cmd
	}
	switch os.Getenv("POSTERN_TEST_INSIDE") {
	case "":
		out, err := again("servers").CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: "+name) {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	case "peers":
		servePeers(t)
		return
	}
	ip := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	reached := startPeers(t, again("peers"), ip)
	dns := nameServerOf(t, [4]byte{8, 8, 4, 4})

	t.Run("a list", func(t *testing.T) {
		s := start(t, t.TempDir(), "--dns", dns, "--egress-allow", "api.example.test", "--public-ports")
		v, err := s.verify("--only", "egress", "--only", "ports", "--log", os.DevNull)
		wantStates(t, v, err, map[string]string{"egress.opened": "--egress-allow api.example.test", "ports.traffic": "--public-ports"})
		if got := reached(); !slices.Equal(got, []string{"8.8.4.4:443"}) {
			t.Errorf("peers reached: %v, want the listed host alone", got)
		}
		if out := s.mustCLI("verify", "--only", "egress"); !strings.Contains(out, "open  egress.opened") || !strings.Contains(out, "1 open by configuration") {
			t.Errorf("the text has no third word:\n%s", out)
		}
		if record := s.mustCLI("audit", "list", "--verb", "verification.end", "--json"); !strings.Contains(strings.ReplaceAll(record, " ", ""), `"open":"2"`) {
			t.Errorf("the record has not how many are open: %s", record)
		}
		_ = reached()
	})
	t.Run("everything", func(t *testing.T) {
		s := start(t, t.TempDir(), "--dns", dns, "--egress", "allow")
		v, err := s.verify("--only", "egress")
		wantStates(t, v, err, map[string]string{"egress.tcp": "--egress=allow", "egress.dns": "--egress=allow"})
		got := reached()
		for _, want := range []string{"1.1.1.1:443", "9.9.9.9:80", "9.9.9.9:8443"} {
			if !slices.Contains(got, want) {
				t.Errorf("%s was not reached: %v", want, got)
			}
		}
		if slices.Contains(got, "9.9.9.9:25") {
			t.Error("mail left by TCP")
		}
	})
	t.Run("one address", func(t *testing.T) {
		s := start(t, t.TempDir(), "--dns", dns, "--egress-allow", "1.1.1.1")
		v, err := s.verify("--only", "egress")
		wantStates(t, v, err, map[string]string{"egress.tcp": "--egress-allow 1.1.1.1", "egress.dns": "--egress-allow 1.1.1.1", "egress.opened": "--egress-allow 1.1.1.1"})
		if got := reached(); slices.ContainsFunc(got, func(at string) bool { return !strings.HasPrefix(at, "1.1.1.1:") }) {
			t.Errorf("peers reached: %v", got)
		}
	})
}

// wantStates checks that the checks in open are open by the settings there, and that all
// others pass.
func wantStates(t *testing.T, v verified, err error, open map[string]string) {
	t.Helper()
	if err != nil {
		t.Errorf("the exit status: %v", err)
	}
	for _, r := range v.Results {
		want := "pass"
		if open[r.ID] != "" {
			want = "open"
		}
		if r.State != want || !r.Passed || strings.Join(r.Settings, ", ") != open[r.ID] {
			t.Errorf("%s is %s by %v, want %s by %q: %s", r.ID, r.State, r.Settings, want, open[r.ID], r.Seen)
		}
		delete(open, r.ID)
	}
	if len(open) > 0 {
		t.Errorf("not checked: %v", open)
	}
}

// publicPeers are the public addresses that verifications try, and that of a listed host.
var publicPeers = []string{"1.1.1.1", "9.9.9.9", "8.8.4.4"}

// startPeers starts the peers with cmd, and a link to their network namespace. The function
// that it returns returns who was reached since its last call.
func startPeers(t *testing.T, cmd *exec.Cmd, ip func(...string)) func() []string {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	t.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	ip("link", "set", "lo", "up")
	ip("link", "add", "here", "type", "veth", "peer", "name", "there")
	ip("link", "set", "there", "netns", strconv.Itoa(cmd.Process.Pid))
	ip("addr", "add", "192.0.2.1/24", "dev", "here")
	ip("link", "set", "here", "up")
	ip("route", "add", "default", "via", "192.0.2.2")
	if _, err := io.WriteString(in, "linked\n"); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() && lines.Text() != "ready" {
	}
	if lines.Text() != "ready" {
		t.Fatal("the peers are not ready")
	}
	return func() (got []string) {
		if _, err := io.WriteString(in, "who\n"); err != nil {
			t.Fatal(err)
		}
		for lines.Scan() && lines.Text() != "end" {
			if !slices.Contains(got, lines.Text()) {
				got = append(got, lines.Text())
			}
		}
		slices.Sort(got)
		return got
	}
}

// servePeers serves the public addresses in this process's network namespace: each answers
// with a byte, whatever it is asked.
func servePeers(t *testing.T) {
	in := bufio.NewScanner(os.Stdin)
	in.Scan() // there is a link
	for _, args := range []string{"link set lo up", "addr add 192.0.2.2/24 dev there", "link set there up", "addr add 1.1.1.1/32 dev lo", "addr add 9.9.9.9/32 dev lo", "addr add 8.8.4.4/32 dev lo"} {
		if out, err := exec.Command("ip", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", args, err, out)
		}
	}
	var mu sync.Mutex
	var reached []string
	for _, host := range publicPeers {
		for _, port := range []string{"25", "53", "80", "443", "853", "8443"} {
			l, err := net.Listen("tcp", net.JoinHostPort(host, port))
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					mu.Lock()
					reached = append(reached, l.Addr().String())
					mu.Unlock()
					go func() {
						_, _ = c.Read(make([]byte, 4096))
						_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
						c.Close()
					}()
				}
			}()
		}
	}
	fmt.Println("ready")
	for in.Scan() {
		mu.Lock()
		for _, r := range reached {
			fmt.Println(r)
		}
		reached = nil
		mu.Unlock()
		fmt.Println("end")
	}
}
