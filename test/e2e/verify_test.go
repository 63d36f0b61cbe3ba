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
		ID, Seen, State, Contract string
		Settings                  []string
		Passed                    bool
		Attempts                  []struct{ What, Outcome, Detail string }
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

// TestVerifyTriesAContract: each clause of a contract of examples/contracts is tried from
// inside and kept, a person reviews the trial first, and nothing is left behind.
func TestVerifyTriesAContract(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--egress", "allow")
	done, stopped := make(chan struct{}), make(chan struct{})
	defer func() { close(done); <-stopped }()
	go func() {
		defer close(stopped)
		for {
			select {
			case <-done:
				return
			case <-time.After(200 * time.Millisecond):
			}
			for _, id := range s.pendingIDs() {
				s.approve(id)
			}
		}
	}()
	short := filepath.Join(t.TempDir(), "short.yaml")
	const text = "version: 1\nname: short\ncommands: {allow: [{run: cat *}], deny: [python3]}\nfiles: {read: [/srv], write: [/work], deny: [/etc/shadow, /usr/share/doc]}\nlimits: {time: 20s, memory: 128MiB, disk: 16MiB, output: 1KiB, processes: 16}\n"
	if err := os.WriteFile(short, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"../../examples/contracts/web-scrape.yaml", "../../examples/contracts/backup-verify.yaml", short} {
		v, err := s.verify("--contract", file)
		if err != nil {
			t.Errorf("%s: %v", file, err)
		}
		tried := map[string]string{}
		for _, r := range v.Results {
			tried[r.ID] = r.State
			t.Logf("%s %s %s %s: %s", filepath.Base(file), r.State, r.ID, r.Contract, r.Seen)
			if !r.Passed {
				t.Errorf("%s: %s: %s", file, r.ID, r.Seen)
			}
		}
		want := []string{"commands", "children", "write", "read", "network", "packages", "credentials", "mail", "memory", "processes", "disk", "output"}
		if file == short {
			want = append(want, "deny", "time")
		}
		for _, id := range want {
			if tried["contract."+id] != "pass" {
				t.Errorf("%s: contract.%s is %q, want pass", file, id, tried["contract."+id])
			}
		}
	}
	for _, list := range [][]string{{"sandbox", "list"}, {"secret", "list"}, {"contract", "list"}} {
		if out := s.mustCLI(list...); strings.Contains(out, "verify-") {
			t.Errorf("the verification left %s", out)
		}
	}
}

// TestVerifyFindsAWiderContract: what the server enforces is wider than the contract that was
// to be tried. Each clause that is wider fails.
func TestVerifyFindsAWiderContract(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir())
	key, _ := s.api()
	const wide = "version: 1\nname: %s\ncommands: {allow: [{run: '**'}]}\nfiles: {read: [/home], write: [/work, /srv]}\nlimits: {time: 10m, memory: 1GiB, disk: 1GiB, output: 16MiB, processes: 512}\n"
	done, stopped := make(chan struct{}), make(chan struct{})
	defer func() { close(done); <-stopped }()
	go func() {
		defer close(stopped)
		replaced := map[string]bool{}
		for {
			select {
			case <-done:
				return
			case <-time.After(200 * time.Millisecond):
			}
			list, err := key.Contracts.List(t.Context())
			if err != nil {
				t.Errorf("list contracts: %v", err)
				return
			}
			for _, c := range list {
				if strings.HasPrefix(c.Name, "verify-") && !replaced[c.Name] {
					replaced[c.Name] = true
					if _, err := key.Contracts.Put(t.Context(), c.Name, fmt.Sprintf(wide, c.Name)); err != nil {
						t.Errorf("replace %s: %v", c.Name, err)
					}
				}
			}
			if len(replaced) < 2 {
				continue // nobody has approved what was stored first
			}
			for _, id := range s.pendingIDs() {
				s.approve(id)
			}
		}
	}()
	file := filepath.Join(t.TempDir(), "narrow.yaml")
	const narrow = "version: 1\nname: narrow\ncommands: {allow: [{run: cat *}]}\nfiles: {write: [/work]}\nlimits: {time: 5m, memory: 128MiB, disk: 16MiB, processes: 16}\n"
	if err := os.WriteFile(file, []byte(narrow), 0o600); err != nil {
		t.Fatal(err)
	}
	v, err := s.verify("--contract", file)
	if err == nil {
		t.Error("the exit status is 0")
	}
	state := map[string]string{}
	for _, r := range v.Results {
		state[r.ID] = r.State
		t.Logf("%s %s: %s: %v", r.State, r.ID, r.Seen, r.Attempts)
	}
	for _, id := range []string{"commands", "children", "write", "read", "memory", "processes", "disk"} {
		if state["contract."+id] != "fail" {
			t.Errorf("contract.%s is %q, want fail", id, state["contract."+id])
		}
	}
	for _, id := range []string{"network", "packages", "credentials", "mail"} { // not wider
		if state["contract."+id] != "pass" {
			t.Errorf("contract.%s is %q, want pass", id, state["contract."+id])
		}
	}
}
