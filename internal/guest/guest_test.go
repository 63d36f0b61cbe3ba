package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"

	"postern/internal/guest/filesystempb"
	"postern/internal/guest/processpb"
)

// testToken is the channel's token in tests.
const testToken = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

// testUser is an ordinary user that every Debian has.
const testUser = "nobody"

// A rig is a guest that serves on loopback, with clients.
type rig struct {
	t    testing.TB
	s    *Server
	url  string
	home string // a directory of testUser's, where relative paths start
	http *http.Client
	proc processpb.ProcessClient
	file filesystempb.FilesystemClient
}

// channelTransport adds the channel's token to requests, as the host's proxy does.
type channelTransport struct{ base http.RoundTripper }

func (c channelTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set(ChannelHeader, testToken)
	return c.base.RoundTrip(r)
}

func newRig(t testing.TB, change ...func(*Config)) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("the guest is root in its sandbox: run this test as root")
	}
	sum := sha256.Sum256([]byte(testToken))
	c := Config{ChannelSHA256: hex.EncodeToString(sum[:]), DefaultUser: testUser, RunDir: filepath.Join(t.TempDir(), "run")}
	c.EnvFile, c.HostsFile = filepath.Join(c.RunDir, "envs.json"), filepath.Join(t.TempDir(), "hosts")
	c.LauncherFile = filepath.Join(c.RunDir, "launcher")
	if err := os.WriteFile(c.HostsFile, []byte("127.0.0.1 localhost\n127.0.1.1 old\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	c.GenerationFile, c.MachineIDFile, c.HostnameFile = filepath.Join(c.RunDir, "generation"), filepath.Join(t.TempDir(), "machine-id"), filepath.Join(t.TempDir(), "hostname")
	if err := os.WriteFile(c.MachineIDFile, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	c.State = must(newStateFile())
	t.Cleanup(func() { c.State.Close() })
	for _, f := range change {
		f(&c)
	}
	s, err := New(slog.New(slog.NewTextHandler(t.Output(), nil)), c)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		for _, p := range s.table.list() {
			_ = p.signal(9)
		}
		stop()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	tr := &http.Transport{DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	g := &rig{t: t, s: s, url: "http://" + l.Addr().String(), http: &http.Client{Transport: channelTransport{tr}}}
	// The SDKs ask for no compression; and zeroes that are compressed test nothing.
	plain := connect.WithAcceptCompression("gzip", nil, nil)
	g.proc = processpb.NewProcessClient(g.http, g.url, plain)
	g.file = filesystempb.NewFilesystemClient(g.http, g.url, connect.WithProtoJSON(), plain)
	g.home = userDir(t)
	s.settings.DefaultWorkdir = g.home
	return g
}

// userDir is a directory that belongs to testUser, which t.TempDir's parents
// would not let through.
func userDir(t testing.TB) string {
	t.Helper()
	a, err := lookupAccount(testUser)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("/tmp", "guest-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chown(dir, int(a.uid), int(a.gid)); err != nil {
		t.Fatal(err)
	}
	return dir
}

func asUser[T any](req *connect.Request[T], name string) *connect.Request[T] {
	req.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(name+":")))
	return req
}

// A result is everything that a client receives from a process.
type result struct {
	pid                 uint32
	stdout, stderr, pty []byte
	end                 *processpb.ProcessEvent_EndEvent
	keepalives          int
}

func (r *result) take(ev *processpb.ProcessEvent) {
	switch e := ev.GetEvent().(type) {
	case *processpb.ProcessEvent_Start:
		r.pid = e.Start.GetPid()
	case *processpb.ProcessEvent_Data:
		r.stdout = append(r.stdout, e.Data.GetStdout()...)
		r.stderr = append(r.stderr, e.Data.GetStderr()...)
		r.pty = append(r.pty, e.Data.GetPty()...)
	case *processpb.ProcessEvent_End:
		r.end = e.End
	case *processpb.ProcessEvent_Keepalive:
		r.keepalives++
	}
}

func shell(script string) *processpb.StartRequest {
	no := false
	return &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}, Stdin: &no}
}

// run starts a process and reads its events until it ends.
func (g *rig) run(req *connect.Request[processpb.StartRequest]) (result, error) {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), 2*time.Minute)
	defer cancel()
	st, err := g.proc.Start(ctx, req)
	if err != nil {
		return result{}, err
	}
	defer st.Close()
	var r result
	for st.Receive() {
		r.take(st.Msg().GetEvent())
	}
	return r, st.Err()
}

func (g *rig) sh(script string) result {
	g.t.Helper()
	r, err := g.run(connect.NewRequest(shell(script)))
	if err != nil {
		g.t.Fatalf("run %q: %v", script, err)
	}
	return r
}

// get makes a request over plain HTTP.
func (g *rig) do(method, path string, body io.Reader, header ...string) (int, []byte, http.Header) {
	g.t.Helper()
	r, err := http.NewRequestWithContext(g.t.Context(), method, g.url+path, body)
	if err != nil {
		g.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	res, err := g.http.Do(r)
	if err != nil {
		g.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	return res.StatusCode, b, res.Header
}

func TestChannel(t *testing.T) {
	g := newRig(t)
	paths := []struct{ method, path string }{
		{"GET", "/envs"},
		{"GET", "/metrics"},
		{"POST", "/init"},
		{"GET", "/files?path=/etc/passwd"},
		{"POST", "/files?path=/tmp/x"},
		{"POST", "/process.Process/List"},
		{"POST", "/process.Process/Start"},
		{"POST", "/filesystem.Filesystem/Stat"},
		{"POST", "/health"},
		{"GET", "/health/"},
		{"GET", "/nothing"},
		{"OPTIONS", "/files"},
	}
	sum := sha256.Sum256([]byte(testToken))
	for name, token := range map[string]string{
		"none": "", "wrong": "b" + testToken[1:], "prefix": testToken[:63], "the hash, which is in the guest's environment": hex.EncodeToString(sum[:]),
	} {
		for _, p := range paths {
			r, _ := http.NewRequest(p.method, g.url+p.path, bytes.NewReader([]byte("{}")))
			r.Header.Set("Content-Type", "application/json")
			if token != "" {
				r.Header.Set(ChannelHeader, token)
			}
			res, err := http.DefaultTransport.RoundTrip(r)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if got, want := res.StatusCode, http.StatusUnauthorized; got != want {
				t.Errorf("token %s: %s %s: got %d, want %d", name, p.method, p.path, got, want)
			}
		}
	}
	res, err := http.DefaultTransport.RoundTrip(must(http.NewRequest("GET", g.url+"/health", nil)))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if got, want := res.StatusCode, http.StatusNoContent; got != want {
		t.Errorf("health: got %d, want %d", got, want)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestSilentConnectionsAreBounded: a process in the sandbox that floods the port with
// silent connections must not lock out the host.
func TestSilentConnectionsAreBounded(t *testing.T) {
	g := newRig(t)
	var open []net.Conn
	defer func() {
		for _, c := range open {
			c.Close()
		}
	}()
	for range 2 * maxLocalConns {
		c, err := net.Dial("tcp", g.url[len("http://"):])
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	closed := 0
	for end := time.Now().Add(time.Minute); closed < maxLocalConns-1 && time.Now().Before(end); { // it may not have seen all yet
		closed = 0
		for _, c := range open {
			_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
			if _, err := c.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				closed++
			}
		}
	}
	if closed < maxLocalConns-1 {
		t.Errorf("got %d connections closed, want about %d", closed, maxLocalConns)
	}
}

func TestInit(t *testing.T) {
	g := newRig(t)
	for _, tt := range []struct {
		name, body string
		want       int
	}{
		{"applied", `{"envVars":{"A":"1","E2B_SANDBOX_ID":"i1"},"defaultUser":"nobody","defaultWorkdir":"` + g.home + `","timestamp":"2026-11-21T10:00:00Z"}`, 204},
		{"older changes nothing", `{"envVars":{"A":"old"},"timestamp":"2026-11-21T09:00:00Z"}`, 204},
		{"not JSON", `{`, 400},
		{"name with =", `{"envVars":{"A=":"x"}}`, 400},
		{"value with zero", `{"envVars":{"A":"\u0000"}}`, 400},
		{"unknown user", `{"defaultUser":"nobody-at-all"}`, 400},
		{"relative directory", `{"defaultWorkdir":"x"}`, 400},
	} {
		if got, body, _ := g.do("POST", "/init", bytes.NewReader([]byte(tt.body))); got != tt.want {
			t.Errorf("%s: got %d %s, want %d", tt.name, got, body, tt.want)
		}
	}
	if _, got, _ := g.do("GET", "/envs", nil); string(got) != `{"A":"1","E2B_SANDBOX_ID":"i1"}` {
		t.Errorf("envs: got %s", got)
	}
	if got := g.sh(`echo "$A $E2B_SANDBOX_ID $USER $LOGNAME $HOME"; pwd`).stdout; string(got) != "1 i1 nobody nobody /nonexistent\n"+g.home+"\n" {
		t.Errorf("environment: got %q", got)
	}
	if got, err := os.ReadFile(filepath.Join(g.s.conf.RunDir, ".E2B_SANDBOX_ID")); err != nil || string(got) != "i1" {
		t.Errorf("fact: got %q, %v", got, err)
	}
	if got, err := os.ReadFile(g.s.conf.EnvFile); err != nil || string(got) != `{"A":"1","E2B_SANDBOX_ID":"i1"}` {
		t.Errorf("environment for services: got %q, %v", got, err)
	}
	host, _ := os.Hostname()
	if got, err := os.ReadFile(g.s.conf.HostsFile); err != nil || string(got) != "127.0.0.1 localhost\n127.0.1.1 "+host+"\n" {
		t.Errorf("hosts: got %q, %v", got, err)
	}
}
