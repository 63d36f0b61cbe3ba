package guest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
)

func hashOf(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// ask is a request with a channel token of its own, on a new connection.
func (g *rig) ask(token, method, path, body string) (int, string) {
	g.t.Helper()
	r := must(http.NewRequestWithContext(g.t.Context(), method, g.url+path, strings.NewReader(body)))
	r.Header.Set(ChannelHeader, token)
	tr := &http.Transport{DisableKeepAlives: true}
	res, err := tr.RoundTrip(r)
	if err != nil {
		g.t.Fatal(err)
	}
	defer res.Body.Close()
	return res.StatusCode, string(must(io.ReadAll(res.Body)))
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestRestore: a guest restored from a snapshot takes the identity of a sandbox, keeps it
// over a pause, and takes another as a fork.
func TestRestore(t *testing.T) {
	g := newRig(t)
	host := must(os.Hostname()) // the machine's own: the test must not rename it
	say := func(token string, fields map[string]any) (int, string) {
		t.Helper()
		return g.ask(token, "POST", "/init", string(must(json.Marshal(fields))))
	}
	files := func() (machine, generation string) {
		return readFile(t, g.s.conf.MachineIDFile), readFile(t, g.s.conf.GenerationFile)
	}
	if code, body := say(testToken, map[string]any{"envVars": map[string]string{"E2B_OLD": "x", "A": "template"}, "timestamp": "2026-11-21T10:00:00Z"}); code != 204 {
		t.Fatalf("first init: got %d %s", code, body)
	}
	if got := readFile(t, g.s.conf.MachineIDFile); len(got) != 33 {
		t.Errorf("machine id: got %q, want 32 digits where it was empty", got)
	}

	// What the former host left open: a connection that says nothing, one with
	// requests, a stream and a tunnel.
	silent := must(net.Dial("tcp", g.url[len("http://"):]))
	defer silent.Close()
	g.do("GET", "/envs", nil)
	st, pid := g.begin(t.Context(), connect.NewRequest(shell("sleep 60")))
	defer st.Close()
	tunnel := g.tunnel(echo(t, "127.0.0.1:0"))
	defer tunnel.Close()

	first, second := strings.Repeat("1", 64), strings.Repeat("2", 64)
	// The host's clock was set back meanwhile: it is obeyed nevertheless.
	if code, body := say(testToken, map[string]any{
		"envVars": map[string]string{"A": "mine"}, "restored": true, "channelSHA256": hashOf(first), "hostname": host,
		"sandboxID": "ifirst", "templateID": "base", "timestamp": "2026-11-21T09:00:00Z",
	}); code != 204 {
		t.Fatalf("restore: got %d %s", code, body)
	}
	machine1, generation1 := files()
	for st.Receive() {
	}
	if st.Err() == nil {
		t.Error("the former host's stream goes on")
	}
	for name, c := range map[string]net.Conn{"silent connection": silent, "tunnel": tunnel} {
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		if _, err := c.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
			t.Errorf("the former host's %s is open: %v", name, err)
		}
	}
	if unix.Kill(int(pid), 0) != nil {
		t.Error("a running process was ended")
	}
	if got, _ := g.ask(testToken, "GET", "/envs", ""); got != 401 {
		t.Errorf("the snapshot's key: got %d, want 401", got)
	}
	if _, got := g.ask(first, "GET", "/envs", ""); got != `{"A":"mine","E2B_SANDBOX":"true","E2B_SANDBOX_ID":"ifirst","E2B_TEMPLATE_ID":"base"}` {
		t.Errorf("envs: got %s", got)
	}
	if got := readFile(t, g.s.conf.RunDir+"/.E2B_SANDBOX_ID"); got != "ifirst" {
		t.Errorf("fact: got %q", got)
	}
	if _, err := os.Stat(g.s.conf.RunDir + "/.E2B_OLD"); err == nil {
		t.Error("a fact of the former identity is left")
	}
	if got := readFile(t, g.s.conf.HostnameFile); got != host+"\n" {
		t.Errorf("host name: got %q, want %q", got, host)
	}

	// The same again, as after a lost answer, and paused and resumed.
	for range 2 {
		if code, body := say(first, map[string]any{"restored": true, "channelSHA256": hashOf(first), "sandboxID": "ifirst"}); code != 204 {
			t.Fatalf("resume: got %d %s", code, body)
		}
	}
	machine2, generation2 := files()
	if machine2 != machine1 {
		t.Error("a sandbox that goes on as itself has another machine id")
	}
	if generation2 == generation1 {
		t.Error("a resumed sandbox has the old generation, and so perhaps has a copy of it")
	}
	if _, got := g.ask(first, "GET", "/envs", ""); !strings.Contains(got, `"A":"mine"`) {
		t.Errorf("environment after a resume: got %s", got)
	}

	// Its copy.
	if code, body := say(first, map[string]any{"restored": true, "channelSHA256": hashOf(second), "sandboxID": "isecond"}); code != 204 {
		t.Fatalf("copy: got %d %s", code, body)
	}
	machine3, generation3 := files()
	if machine3 == machine2 || generation3 == generation2 {
		t.Errorf("copy: got machine id %q and generation %q, want others", machine3, generation3)
	}

	// Another server process, which only the environment of the boot describes.
	again := must(New(slog.New(slog.NewTextHandler(t.Output(), nil)), g.s.conf))
	if got := again.current(); hex.EncodeToString(got.Channel) != hashOf(second) || got.SandboxID != "isecond" || got.Envs["A"] != "mine" || got.DefaultWorkdir != g.home {
		t.Errorf("after a restart: got %+v", got)
	}
}

// TestSecondInitRewritesOnlyChanges: a pooled sandbox gets a second init request with its
// owner's environment. Only changed files are written.
func TestSecondInitRewritesOnlyChanges(t *testing.T) {
	g := newRig(t)
	key := strings.Repeat("1", 64)
	say := func(token string, envs map[string]string) {
		t.Helper()
		envs["E2B_SANDBOX_ID"] = "imine"
		body := must(json.Marshal(map[string]any{"envVars": envs, "restored": token == testToken, "channelSHA256": hashOf(key), "sandboxID": "imine", "templateID": "base"}))
		if code, text := g.ask(token, "POST", "/init", string(body)); code != 204 {
			t.Fatalf("init: got %d %s", code, text)
		}
	}
	say(testToken, map[string]string{})
	facts := must(filepath.Glob(filepath.Join(g.s.conf.RunDir, ".E2B_*")))
	if len(facts) == 0 {
		t.Fatal("there are no facts")
	}
	before := map[string]os.FileInfo{}
	for _, path := range append(facts, g.s.conf.HostnameFile, g.s.conf.HostsFile, g.s.conf.GenerationFile, g.s.conf.MachineIDFile) {
		before[path] = must(os.Stat(path))
	}
	say(key, map[string]string{"A": "owner"})
	for path, fi := range before {
		if !os.SameFile(fi, must(os.Stat(path))) {
			t.Errorf("%s was written again", path)
		}
	}
	if got := readFile(t, g.s.conf.EnvFile); !strings.Contains(got, `"A":"owner"`) {
		t.Errorf("the environment's file: got %s", got)
	}
}

// TestWarmUpShellIsInvisible: the shell that warms up a pooled guest leaves no trace.
func TestWarmUpShellIsInvisible(t *testing.T) {
	g := newRig(t)
	if code, body := g.ask(testToken, "POST", "/warm", ""); code != 204 {
		t.Errorf("got %d %s, want 204", code, body)
	}
	if code, _ := g.ask(strings.Repeat("0", 64), "POST", "/warm", ""); code != 401 {
		t.Errorf("without the channel's key: got %d, want 401", code)
	}
	if n := g.s.table.count(); n != 0 {
		t.Errorf("%d processes are listed", n)
	}
}

func TestInitRefuses(t *testing.T) {
	g := newRig(t)
	for _, tt := range []struct{ name, body, want string }{
		{"short channel", `{"channelSHA256":"aa"}`, "channelSHA256"},
		{"channel that is not hexadecimal", `{"channelSHA256":"` + strings.Repeat("x", 64) + `"}`, "channelSHA256"},
		{"long id", `{"sandboxID":"` + strings.Repeat("x", 300) + `"}`, "sandboxID"},
		{"host name with a line break", `{"hostname":"a\nb"}`, "hostname"},
		{"too large", `{"envVars":{"A":"` + strings.Repeat("x", maxInit) + `"}}`, "too large"},
	} {
		if code, body := g.ask(testToken, "POST", "/init", tt.body); code != 400 || !strings.Contains(body, tt.want) {
			t.Errorf("%s: got %d %.200s, want 400 with %q", tt.name, code, body, tt.want)
		}
	}
	if code, _ := g.ask(testToken, "GET", "/envs", ""); code != 200 {
		t.Errorf("the key after refused requests: got %d, want 200", code)
	}
}

func TestStateFile(t *testing.T) {
	f := must(newStateFile())
	defer f.Close()
	load := func() (v string, ok bool, err error) {
		s := stateFile{f: f}
		ok, err = s.load(&v)
		return v, ok, err
	}
	if _, ok, err := load(); ok || err != nil {
		t.Errorf("empty: got %v, %v", ok, err)
	}
	s := stateFile{f: f}
	for n := range 5 {
		want := fmt.Sprint("record ", n)
		if err := s.save(want); err != nil {
			t.Fatal(err)
		}
		if got, ok, err := load(); got != want || !ok || err != nil {
			t.Errorf("got %q, %v, %v, want %q", got, ok, err, want)
		}
	}
	// The last write was torn.
	if _, err := f.WriteAt([]byte("#"), int64(s.seq%2)*slotSize+slotHeader+3); err != nil {
		t.Fatal(err)
	}
	if got, ok, err := load(); got != "record 3" || !ok || err != nil {
		t.Errorf("torn: got %q, %v, %v, want the one before", got, ok, err)
	}
	// Root has destroyed it.
	if _, err := f.WriteAt(bytes.Repeat([]byte{0xff}, 2*slotSize), 0); err != nil {
		t.Fatal(err)
	}
	if got, ok, err := load(); ok || err == nil {
		t.Errorf("destroyed: got %q, %v, want an error", got, err)
	}
	if err := s.save(strings.Repeat("x", slotSize)); err == nil {
		t.Error("a record that is too large was written")
	}
}

func FuzzStateFile(f *testing.F) {
	m := must(newStateFile())
	s := stateFile{f: m}
	_ = s.save(settings{SandboxID: "i1"})
	whole := make([]byte, 256)
	_, _ = m.ReadAt(whole, slotSize)
	f.Add(whole)
	f.Add([]byte{})
	f.Add(bytes.Repeat([]byte{0xff}, 64))
	f.Fuzz(func(t *testing.T, b []byte) {
		_ = m.Truncate(0)
		_, _ = m.WriteAt(b, 0)
		var v settings
		got := stateFile{f: m}
		if ok, err := got.load(&v); ok && err != nil {
			t.Error("a record and an error")
		}
	})
}

// TestReplaceFileOnAFullDisk: a sandbox with a full disk can be resumed.
func TestReplaceFileOnAFullDisk(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }()
	path := dir + "/generation"
	if err := replaceFile(path, newGeneration(), 0o644); err != nil {
		t.Fatal(err)
	}
	_ = os.WriteFile(dir+"/fill", make([]byte, 1<<20), 0o644)
	want := newGeneration()
	if err := replaceFile(path, want, 0o644); err != nil {
		t.Fatal(err)
	}
	if got := readFile(t, path); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	left, _ := filepath.Glob(dir + "/*.new")
	if len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// echo listens on addr and sends back all it hears, then "bye" when the other
// side has closed its half. It returns its port.
func echo(t *testing.T, addr string) int {
	t.Helper()
	l := must(net.Listen("tcp", addr))
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(struct{ io.Writer }{c}, c)
				_, _ = c.Write([]byte("bye"))
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

// connect opens a tunnel by hand and returns its answer.
func (g *rig) connect(target, token, early string) (*net.TCPConn, *http.Response) {
	g.t.Helper()
	c := must(net.Dial("tcp", g.url[len("http://"):])).(*net.TCPConn)
	fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s: %s\r\n\r\n%s", target, target, ChannelHeader, token, early)
	// Byte by byte: nothing of the tunnel may be lost in a buffer.
	res, err := http.ReadResponse(bufio.NewReaderSize(&oneByte{c}, 16), &http.Request{Method: http.MethodConnect})
	if err != nil {
		g.t.Fatal(err)
	}
	return c, res
}

type oneByte struct{ io.Reader }

func (o *oneByte) Read(b []byte) (int, error) { return o.Reader.Read(b[:1]) }

func (g *rig) tunnel(port int) *net.TCPConn {
	g.t.Helper()
	c, res := g.connect(fmt.Sprintf("127.0.0.1:%d", port), testToken, "")
	if res.StatusCode != 200 {
		g.t.Fatalf("tunnel: got %s", res.Status)
	}
	return c
}

func TestTunnel(t *testing.T) {
	g := newRig(t)
	for name, addr := range map[string]string{"IPv4": "127.0.0.1:0", "IPv6 only": "[::1]:0"} {
		t.Run(name, func(t *testing.T) {
			c, res := g.connect(fmt.Sprintf("127.0.0.1:%d", echo(t, addr)), testToken, "early ")
			defer c.Close()
			if res.StatusCode != 200 {
				t.Fatalf("got %s", res.Status)
			}
			big := strings.Repeat("0123456789", 1<<20)
			go func() {
				_, _ = io.WriteString(c, big)
				_ = c.CloseWrite() // half: the answer still comes
			}()
			if got := string(must(io.ReadAll(c))); got != "early "+big+"bye" {
				t.Errorf("got %d bytes, want %d", len(got), len(big)+9)
			}
		})
	}
	t.Run("the port ends first", func(t *testing.T) {
		l := must(net.Listen("tcp", "127.0.0.1:0"))
		defer l.Close()
		heard := make(chan string, 1)
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			_, _ = c.Write([]byte("done"))
			_ = c.(*net.TCPConn).CloseWrite()
			b, _ := io.ReadAll(c)
			heard <- string(b)
		}()
		c := g.tunnel(l.Addr().(*net.TCPAddr).Port)
		defer c.Close()
		if got := string(must(io.ReadAll(c))); got != "done" {
			t.Errorf("got %q", got)
		}
		_, _ = c.Write([]byte("later"))
		_ = c.CloseWrite()
		if got := <-heard; got != "later" {
			t.Errorf("got %q, want what was sent after the port's end", got)
		}
	})
	// Keep a port bound without listening, so that no other process gets it.
	taken := must(unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))
	defer unix.Close(taken)
	if err := unix.Bind(taken, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	closed := fmt.Sprintf("127.0.0.1:%d", must(unix.Getsockname(taken)).(*unix.SockaddrInet4).Port)
	for _, tt := range []struct {
		name, target, token string
		want                int
		port                string
	}{
		{"closed port", closed, testToken, 502, "closed"},
		{"attacker: no key", closed, "", 401, ""},
		{"attacker: out of the sandbox", "192.0.2.1:80", testToken, 400, ""},
		{"attacker: a name", "example.com:80", testToken, 400, ""},
		{"port 0", "127.0.0.1:0", testToken, 400, ""},
		{"no port", "127.0.0.1", testToken, 400, ""},
		{"port too large", "127.0.0.1:70000", testToken, 400, ""},
	} {
		c, res := g.connect(tt.target, tt.token, "")
		if res.StatusCode != tt.want || res.Header.Get(PortHeader) != tt.port {
			t.Errorf("%s: got %d %q, want %d %q", tt.name, res.StatusCode, res.Header.Get(PortHeader), tt.want, tt.port)
		}
		c.Close()
	}
}

// TestReadAhead: bytes read ahead of a tunnel or of the next request are not lost.
func TestReadAhead(t *testing.T) {
	g := newRig(t)
	c := must(net.Dial("tcp", g.url[len("http://"):]))
	defer c.Close()
	content := strings.Repeat("0123456789abcdef", 64<<10) // 1 MiB
	var b strings.Builder
	for n := range 3 { // all at once, in chunks of odd sizes
		fmt.Fprintf(&b, "POST /files?path=f%d HTTP/1.1\r\nHost: x\r\n%s: %s\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n", n, ChannelHeader, testToken, octets)
		for rest, size := content, 1; len(rest) > 0; size = size*3%40961 + 1 {
			size = min(size, len(rest))
			fmt.Fprintf(&b, "%x\r\n%s\r\n", size, rest[:size])
			rest = rest[size:]
		}
		b.WriteString("0\r\n\r\n")
	}
	port := echo(t, "127.0.0.1:0")
	fmt.Fprintf(&b, "CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: x\r\n%s: %s\r\n\r\n%s", port, ChannelHeader, testToken, content)
	go func() {
		_, _ = io.WriteString(c, b.String())
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	r := bufio.NewReader(c)
	for n := range 3 {
		res, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, res.Body)
		if got := readFile(t, fmt.Sprintf("%s/f%d", g.home, n)); res.StatusCode != 200 || got != content {
			t.Errorf("upload %d: got %d and %d bytes, want %d", n, res.StatusCode, len(got), len(content))
		}
	}
	res, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil || res.StatusCode != 200 {
		t.Fatal(err, res)
	}
	if got := string(must(io.ReadAll(r))); got != content+"bye" {
		t.Errorf("tunnel: got %d bytes, want %d", len(got), len(content)+3)
	}
}

func TestTunnelsAreBounded(t *testing.T) {
	g := newRig(t)
	g.s.tunnels = make(chan struct{}, 2)
	port := echo(t, "127.0.0.1:0")
	a := g.tunnel(port)
	b := g.tunnel(port)
	defer b.Close()
	c, res := g.connect(fmt.Sprintf("127.0.0.1:%d", port), testToken, "")
	if got, want := res.StatusCode, 503; got != want {
		t.Errorf("one too many: got %d, want %d", got, want)
	}
	c.Close()
	a.Close()
	for end := time.Now().Add(time.Minute); len(g.s.tunnels) > 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a closed tunnel is still counted")
		}
	}
	g.tunnel(port).Close()
}

// TestTunnelOverHTTP2: HTTP/2 has another CONNECT, which is refused with an error text.
func TestTunnelOverHTTP2(t *testing.T) {
	g := newRig(t)
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: &p}
	defer tr.CloseIdleConnections()
	r := must(http.NewRequestWithContext(context.Background(), http.MethodConnect, g.url, nil))
	r.Host = "127.0.0.1:1"
	r.Header.Set(ChannelHeader, testToken)
	res, err := tr.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if got, want := res.StatusCode, http.StatusHTTPVersionNotSupported; got != want {
		t.Errorf("got %d, want %d", got, want)
	}
}

func FuzzTunnelPort(f *testing.F) {
	for _, s := range []string{"127.0.0.1:80", "[::1]:1", "localhost:65536", "10.0.0.1:80", ":", "127.0.0.1:+1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if port, err := tunnelPort(s); err == nil && port == 0 {
			t.Errorf("%q: port 0", s)
		}
	})
}
