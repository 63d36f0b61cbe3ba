// Package e2e tests the real binary from outside: the story that the demo plays,
// crashes, attackers, browsers. The tests need root, a built bin/postern and the
// packages of "make deps-test". Without them they fail: a skipped test shows nothing.
//
// Each test starts a server of its own on free ports of the loopback interface, with
// its own data directory, so tests may run in parallel. The longer ones do, except
// those that measure or exhaust the machine, compare times, choose ports before they
// use them, or change this process. These run first, one after the other. "make e2e
// RUN=TestName" runs one.
package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/smtp"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// postern returns the path of the program under test.
func postern(t testing.TB) string {
	t.Helper()
	path := os.Getenv("POSTERN_TEST_BINARY")
	if path == "" {
		path = "../../bin/postern"
	}
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: build it with make build", err)
	}
	if os.Geteuid() != 0 {
		t.Fatal("gVisor needs root")
	}
	return path
}

// A server is a running "postern up".
type server struct {
	t    testing.TB
	bin  string
	data string
	cmd  *exec.Cmd
	done chan error

	web, smtp string   // addresses
	key, link string   // shown at the first start
	env       []string // that runStatus adds to the environment
	log       *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

var (
	webLine  = regexp.MustCompile(`API, proxy, MCP +http://(\S+)`)
	smtpLine = regexp.MustCompile(`SMTP +(\S+),`)
	keyForm  = regexp.MustCompile(`^e2b_[0-9a-f]{40}\n$`)
	linkForm = regexp.MustCompile(`^https?://\S+/console/setup\?token=\S+\n$`)
)

// start runs postern up on the data directory and returns when it serves. It is
// stopped when the test ends. The ports are free ones of the loopback interface; flags
// come after them on the command line, and may override them.
func start(t testing.TB, data string, flags ...string) *server {
	t.Helper()
	return startBy(t, nil, data, flags...)
}

// startBy is start with the words of a command that executes the program, before it.
func startBy(t testing.TB, by []string, data string, flags ...string) *server {
	t.Helper()
	s := &server{t: t, bin: postern(t), data: data, log: &lockedBuffer{}, done: make(chan error, 1)}
	last := "  data  " // the last line that every start prints
	if _, err := os.Stat(filepath.Join(data, "postern.db")); errors.Is(err, fs.ErrNotExist) {
		last = "/" + linkFile // and the last of a first one
	}
	args := append(slices.Clip(by), s.bin, "up", "--data", data, "--listen", "127.0.0.1:0", "--smtp", "127.0.0.1:0")
	args = append(args, flags...)
	s.cmd = exec.Command(args[0], args[1:]...)
	s.cmd.Stderr = s.log
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Not SIGKILL: a killed server leaves its sandboxes to the next start on its
		// data directory, and here there is none.
		_ = s.kill(syscall.SIGTERM)
		if t.Failed() {
			t.Logf("server's log:\n%s", tail(s.log.String(), 60))
		}
	})
	isReady := make(chan struct{})
	go func() {
		ready := isReady
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			_, _ = fmt.Fprintln(s.log, lines.Text())
			if ready != nil && strings.Contains(lines.Text(), last) {
				close(ready)
				ready = nil
			}
		}
		_, _ = io.Copy(io.Discard, out)
		s.done <- s.cmd.Wait()
	}()
	select {
	case <-isReady:
	case err := <-s.done:
		s.done <- err
		t.Fatalf("postern up ended: %v\n%s", err, s.log)
	case <-time.After(3 * time.Minute):
		t.Fatalf("postern up was not ready within three minutes\n%s", s.log)
	}
	text := s.log.String()
	s.web, s.smtp = webLine.FindStringSubmatch(text)[1], smtpLine.FindStringSubmatch(text)[1]
	s.key, s.link = s.secret(keyFile, keyForm), s.secret(linkFile, linkForm)
	return s
}

// The files that a first start writes if its output is not a terminal.
const (
	keyFile  = "project.key"
	linkFile = "setup.link"
)

// secret returns the secret that a first start has written to a file of mode 0600,
// and not to its output, or "" if there is no such file.
func (s *server) secret(name string, form *regexp.Regexp) string {
	s.t.Helper()
	path := filepath.Join(s.data, name)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	if err != nil {
		s.t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 || !form.Match(b) {
		s.t.Errorf("%s: %v, %v, %d bytes; want mode 0600 and one secret", path, fi, err, len(b))
	}
	text := strings.TrimSpace(string(b))
	if strings.Contains(s.log.String(), text) {
		s.t.Errorf("the content of %s is in the output too", path)
	}
	return text
}

// bring delivers a message as another mail server does: without TLS and without
// authentication.
func (s *server) bring(from, to, raw string) error {
	c, err := smtp.Dial(s.smtp)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := errors.Join(c.Mail(from), c.Rcpt(to)); err != nil {
		return err
	}
	w, err := c.Data()
	if err != nil {
		return err
	}
	if _, err := io.WriteString(w, raw); err != nil {
		return err
	}
	return errors.Join(w.Close(), c.Quit())
}

func tail(s string, n int) string {
	lines := strings.Split(s, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// kill sends sig, waits for the end of the server and returns its exit error. A server
// that does not end within three minutes is killed with SIGKILL.
func (s *server) kill(sig syscall.Signal) error {
	_ = s.cmd.Process.Signal(sig)
	select {
	case err := <-s.done:
		s.done <- err
		return err
	case <-time.After(3 * time.Minute):
		_ = s.cmd.Process.Kill()
		return fmt.Errorf("%v did not end it within three minutes", sig)
	}
}

// cli runs a subcommand against the server and returns what it printed.
func (s *server) cli(args ...string) (string, error) {
	out, err := exec.Command(s.bin, append(args, "--data", s.data)...).CombinedOutput()
	return string(out), err
}

func (s *server) mustCLI(args ...string) string {
	s.t.Helper()
	out, err := s.cli(args...)
	if err != nil {
		s.t.Fatalf("postern %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

var inboxKeyText = regexp.MustCompile(`pib_[A-Z2-7]{26}`)

// inbox creates an inbox and returns its address and key.
func (s *server) inbox(name string) (address, key string) {
	s.t.Helper()
	out := s.mustCLI("inbox", "create", name)
	return name + "@agents.internal", inboxKeyText.FindString(out)
}

// local returns a client on the server's local socket.
func (s *server) local() *http.Client {
	return &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", filepath.Join(s.data, "postern.sock"))
		},
	}}
}

// call makes one request with a key, which may be empty, and decodes the response into
// out if the status is below 300. out may be nil.
func call(c *http.Client, method, url, key string, in, out any) (status int, err error) {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return 0, err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequest(method, url, body)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := c.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || out == nil || resp.StatusCode >= 300 {
		return resp.StatusCode, err
	}
	return resp.StatusCode, json.Unmarshal(b, out)
}

// await waits, for two minutes at most, until the server's log contains text.
func (s *server) await(text string) {
	s.t.Helper()
	for end := time.Now().Add(2 * time.Minute); !strings.Contains(s.log.String(), text); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("the server's log does not contain %q after two minutes", text)
		}
	}
}
