package e2e

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/cgi"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestClientsTrustTheWall uses the clients that agents use in a sandbox, against a
// real HTTPS server in a network namespace. For each one the wall puts a secret on a
// GET, and holds a POST until a person approves it. No client is
// configured: each finds the sandbox's authority where it looks by default.
//
// The package requests is the copy that pip brings along. Its own release and httpx
// need an index of packages; httpx reads SSL_CERT_FILE as Python's ssl does.
func TestClientsTrustTheWall(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestClientsTrustTheWall$", "-test.v=true", "-test.timeout=8m")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestClientsTrustTheWall") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"addr", "add", outside + "/32", "dev", "lo"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	const value = "tok_0123456789abcdefghijABCDEFGHIJ"
	servers := newClientServers(t)
	w := newRulesWorld(t)
	w.extra = servers
	s := start(t, t.TempDir(), "--dns", nameServer(t), "--egress", "allow", "--egress-allow", outside, "--egress-ca", w.ca)
	changePolicy(t, shell{s: s}, shell{s: s}, `version: 1
rules:
  - id: writes
    kind: net.request
    when: host.under('rules.test') && method == 'POST'
    then: ask
`)
	if status, _, answer := s.project("POST", "/secrets", `{"name": "token", "value": "`+value+`"}`); status != http.StatusCreated {
		t.Fatalf("secret: %d %s", status, answer)
	}
	b := s.sandbox(map[string]any{"network": map[string]any{
		"allowOut": []string{"*.rules.test"}, "denyOut": []string{"0.0.0.0/0"},
		"rules": map[string]any{"*.rules.test": []any{map[string]any{"transform": map[string]any{"headers": map[string]string{"Authorization": "Bearer ${e2b.secrets.token}"}}}}},
	}})
	goClient, java := buildClients(t)
	b.upload("/tmp/goclient", goClient)
	b.upload("/tmp/jre.tar", java)
	// A runtime that came later trusts the wall from the next start on.
	if r := b.run("chmod +x /tmp/goclient && sudo mkdir -p /opt/java/openjdk && sudo tar -xf /tmp/jre.tar -C /opt/java/openjdk && rm /tmp/jre.tar && /opt/java/openjdk/bin/java -version"); r.exit != 0 {
		t.Fatalf("install clients: %s %s", r.stdout, r.stderr)
	}
	if status, _, answer := s.project("POST", "/sandboxes/"+b.id+"/pause", ""); status != http.StatusNoContent {
		t.Fatalf("pause: %d %s", status, answer)
	}
	if status, _, answer := s.project("POST", "/sandboxes/"+b.id+"/resume", `{"timeout": 1200}`); status != http.StatusCreated {
		t.Fatalf("resume: %d %s", status, answer)
	}
	approving := make(chan struct{})
	var approver sync.WaitGroup
	approved := map[string]bool{}
	approver.Go(func() {
		for {
			select {
			case <-approving:
				return
			case <-time.After(200 * time.Millisecond):
			}
			out, err := s.cli("pending", "--json")
			if err != nil {
				continue
			}
			for _, id := range actionID.FindAllString(out, -1) {
				if !approved[id] {
					if _, err := s.cli("approve", id); err == nil {
						approved[id] = true
					}
				}
			}
		}
	})
	defer func() {
		close(approving)
		approver.Wait()
		if len(approved) < 8 {
			t.Errorf("a person approved %d requests", len(approved))
		}
	}()

	const url = `U=https://app.rules.test/$NAME; `
	for _, tt := range []struct {
		name, command string
		posts         bool
	}{
		{"curl", url + `curl -sS -o /dev/null -w 'GET %{http_code}\n' $U && curl -sS -o /dev/null -w 'POST %{http_code}\n' -d "$BODY" $U`, true},
		{"curl as root without any variable", url + `sudo env -i curl -sS -o /dev/null -w 'GET %{http_code}\n' $U && sudo env -i curl -sS -o /dev/null -w 'POST %{http_code}\n' -d "$BODY" $U`, true},
		{"curl by HTTP 1.1", url + `curl --http1.1 -sS -o /dev/null -w 'GET %{http_code}\n' $U && curl --http1.1 -sS -o /dev/null -w 'POST %{http_code}\n' -d "$BODY" $U`, true},
		{"git", `git clone -q https://git.rules.test/repo.git /tmp/clone && cat /tmp/clone/file && echo GET 200`, false}, // by a POST of Git's own
		{"pip", `pip download -q --no-deps --no-cache-dir -d /tmp/pip --index-url https://pypi.rules.test/simple hello && ls /tmp/pip | grep hello && echo GET 200`, false},
		{"requests, of pip", url + `python3 -c 'import sys; from pip._vendor import requests as r; print("GET", r.get(sys.argv[1]).status_code); print("POST", r.post(sys.argv[1], data=sys.argv[2]).status_code)' $U "$BODY"`, true},
		{"Python's urllib", url + `python3 -c 'import sys; from urllib.request import urlopen as o; print("GET", o(sys.argv[1]).status); print("POST", o(sys.argv[1], sys.argv[2].encode()).status)' $U "$BODY"`, true},
		{"Python's urllib without any variable", url + `env -i /usr/bin/python3 -c 'import sys; from urllib.request import urlopen as o; print("GET", o(sys.argv[1]).status); print("POST", o(sys.argv[1], sys.argv[2].encode()).status)' $U "$BODY"`, true},
		{"Node's fetch", url + `node -e 'const [u, body] = process.argv.slice(1); (async () => { console.log("GET", (await fetch(u)).status); console.log("POST", (await fetch(u, { method: "POST", body })).status) })()' $U "$BODY"`, true},
		{"Node's https", url + `node -e 'const [u, body] = process.argv.slice(1); const go = (method, next) => require("https").request(u, { method }, (r) => { r.resume(); console.log(method, r.statusCode); next?.() }).end(next ? undefined : body); go("GET", () => go("POST"))' $U "$BODY"`, true},
		{"Go's net/http", url + `/tmp/goclient $U "$BODY"`, true},
		{"Java's HttpClient", url + `/opt/java/openjdk/bin/java -cp /opt/java/openjdk Client $U "$BODY"`, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := strings.ReplaceAll(strings.ToLower(tt.name), " ", "-")
			body := "held: " + tt.name
			servers.reset()
			r, err := b.try("export NAME='"+strings.ReplaceAll(path, "'", "")+`' BODY="`+body+`"; `+tt.command, time.Minute)
			if err != nil {
				t.Error(err)
			}
			want := "GET 200\n"
			if tt.posts {
				want += "POST 200\n"
			}
			if !strings.HasSuffix(r.stdout, want) || strings.Contains(r.stderr, "JAVA_TOOL_OPTIONS") {
				t.Errorf("got %q, %q", r.stdout, r.stderr)
			}
			gets, posts := 0, 0
			for _, q := range servers.reset() {
				if q.auth != "Bearer "+value {
					t.Errorf("%s %s has Authorization %q", q.method, q.path, q.auth)
				}
				switch {
				case q.method == "POST" && tt.posts && q.body == body, q.method == "POST" && tt.name == "git":
					posts++
				case q.method == "GET":
					gets++
				}
			}
			if gets == 0 || posts == 0 && tt.name != "pip" {
				t.Errorf("%d GETs and %d POSTs arrived", gets, posts)
			}
		})
	}

	t.Run("a client that pins another authority is refused and recorded", func(t *testing.T) {
		if r := b.run("sudo openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout /dev/null -out /tmp/pinned.pem -subj /CN=pinned -days 9 2>/dev/null; sudo chmod a+r /tmp/pinned.pem; curl -sS --cacert /tmp/pinned.pem --capath /dev/null https://app.rules.test/pinned"); r.exit != 60 {
			t.Errorf("curl: exit %d %s %s", r.exit, r.stdout, r.stderr)
		}
		eventually(t, "the refusal is on the record", func() bool { // after the client has ended
			return strings.Contains(s.mustCLI("audit", "list", "--object", b.id, "--json"), "the client refused the sandbox's certificate: ")
		})
	})
}

// upload writes a file in the sandbox.
func (b *box) upload(path string, content []byte) {
	b.s.t.Helper()
	req := b.request("POST", "/files?path="+path, bytes.NewReader(content))
	req.Header.Set("Content-Type", "application/octet-stream")
	resp, err := (&http.Client{Timeout: 2 * time.Minute}).Do(req)
	if err != nil {
		b.s.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		answer, _ := io.ReadAll(io.LimitReader(resp.Body, 1000))
		b.s.t.Fatalf("upload %s: %s %s", path, resp.Status, answer)
	}
}

// buildClients returns a program in Go, and a tar archive of a Java runtime with a
// program.
func buildClients(t *testing.T) (goClient, java []byte) {
	t.Helper()
	dir := t.TempDir()
	source, err := os.ReadFile("clients/client.go.txt")
	if err != nil {
		t.Fatal(err)
	}
	main := filepath.Join(dir, "main.go")
	if err := os.WriteFile(main, source, 0o600); err != nil {
		t.Fatal(err)
	}
	jre := filepath.Join(dir, "jre")
	for _, args := range [][]string{
		{"go", "build", "-o", filepath.Join(dir, "client"), main},
		{"jlink", "--add-modules", "java.base,java.net.http,jdk.crypto.ec", "--strip-java-debug-attributes", "--no-header-files", "--no-man-pages", "--output", jre},
		{"javac", "-d", jre, "clients/Client.java"},
		{"tar", "-chf", filepath.Join(dir, "jre.tar"), "-C", jre, "."},
	} {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=mod", "GOWORK=off")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v (openjdk-17-jdk-headless has jlink and javac)\n%s", args, err, out)
		}
	}
	if goClient, err = os.ReadFile(filepath.Join(dir, "client")); err != nil {
		t.Fatal(err)
	}
	if java, err = os.ReadFile(filepath.Join(dir, "jre.tar")); err != nil {
		t.Fatal(err)
	}
	return goClient, java
}

// clientServers are the servers outside: an API, a Git repository and an index of
// Python packages.
type clientServers struct {
	git   http.Handler
	wheel []byte

	mu   sync.Mutex
	seen []clientRequest
}

type clientRequest struct{ method, path, auth, body string }

func newClientServers(t *testing.T) *clientServers {
	t.Helper()
	root := t.TempDir()
	for _, args := range [][]string{
		{"init", "-q", root + "/work"}, {"-C", root + "/work", "commit", "-q", "--allow-empty", "-m", "first"},
	} {
		runGit(t, args...)
	}
	if err := os.WriteFile(root+"/work/file", []byte("from git\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	runGit(t, "-C", root+"/work", "add", "file")
	runGit(t, "-C", root+"/work", "commit", "-q", "-m", "second")
	runGit(t, "clone", "-q", "--bare", root+"/work", root+"/repo.git")
	path, err := exec.Command("git", "--exec-path").Output()
	if err != nil {
		t.Fatal(err)
	}
	var wheel bytes.Buffer
	z := zip.NewWriter(&wheel)
	for name, text := range map[string]string{
		"hello/__init__.py":            "",
		"hello-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n",
		"hello-1.0.dist-info/WHEEL":    "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
		"hello-1.0.dist-info/RECORD":   "",
	} {
		f, err := z.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(f, text)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return &clientServers{wheel: wheel.Bytes(), git: &cgi.Handler{
		Path: filepath.Join(strings.TrimSpace(string(path)), "git-http-backend"),
		Env:  []string{"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1", "HOME=" + root, "GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*"},
	}}
}

func runGit(t *testing.T, args ...string) {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-c", "user.name=t", "-c", "user.email=t@test"}, args...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
}

// reset returns the requests since the last call.
func (c *clientServers) reset() []clientRequest {
	c.mu.Lock()
	defer c.mu.Unlock()
	seen := c.seen
	c.seen = nil
	return seen
}

// ServeHTTP implements http.Handler.
func (c *clientServers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	c.seen = append(c.seen, clientRequest{r.Method, r.URL.Path, r.Header.Get("Authorization"), string(body)})
	c.mu.Unlock()
	r.Body = io.NopCloser(bytes.NewReader(body))
	r.ContentLength = int64(len(body))
	r.TransferEncoding = nil
	const wheel = "hello-1.0-py3-none-any.whl"
	switch {
	case r.Host == "git.rules.test":
		c.git.ServeHTTP(w, r)
	case r.Host == "pypi.rules.test" && r.URL.Path == "/simple/hello/":
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<!DOCTYPE html><html><body><a href="/files/%s">%s</a></body></html>`, wheel, wheel)
	case r.Host == "pypi.rules.test" && r.URL.Path == "/files/"+wheel:
		_, _ = w.Write(c.wheel)
	case r.Host == "app.rules.test":
		_ = json.NewEncoder(w).Encode(map[string]any{"bytes": len(body)})
	default:
		http.NotFound(w, r)
	}
}
