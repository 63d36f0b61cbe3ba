package e2e

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/smtp"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/internal/smtpclient/postfixtest"
)

// roundTheWall is the attacker's program, which runs in the sandbox.
//
//go:embed wall_attack.py
var roundTheWall string

// TestRoundTheWall attacks Debian's Postfix and nginx on an allowed host from a
// sandbox, in a network namespace. It hides SMTP behind bytes that servers ignore, and
// sends requests for a second host at the same address. Postfix must get no message and
// nginx no request for that host, which both would accept. Ordinary web clients must
// go on working.
func TestRoundTheWall(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestRoundTheWall$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestRoundTheWall") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"addr", "add", outside + "/32", "dev", "lo"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	web := startNginx(t)
	postfix, maildir := postfixtest.Start(t)
	for _, port := range []string{"2526", "443"} {
		forward(t, outside+":"+port, postfix)
	}
	s := start(t, t.TempDir(), "--dns", nameServer(t), "--egress", "allow", "--egress-allow", outside)
	b := s.sandbox(map[string]any{"network": map[string]any{"allowOut": []string{"good.test", "good.test:2526"}, "denyOut": []string{"0.0.0.0/0"}}})

	if r := b.run("cat > /tmp/attack.py <<'END'\n" + roundTheWall + "\nEND\npython3 /tmp/attack.py " + postfixtest.Domain); r.exit != 0 || !strings.Contains(r.stdout, "attacked") {
		t.Fatalf("attack: exit %d: %s %s", r.exit, r.stdout, r.stderr)
	} else {
		t.Log(strings.TrimSpace(r.stdout))
	}

	// Without the wall one of the attacker's conversations delivers mail, and one of
	// the requests is served: the servers are as lenient as the attack assumes.
	c, err := smtp.Dial(postfix)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Noop(); err != nil {
		t.Error(err)
	}
	if id, err := c.Text.Cmd("XYZZY"); err != nil {
		t.Error(err)
	} else {
		c.Text.StartResponse(id)
		_, _, _ = c.Text.ReadResponse(0)
		c.Text.EndResponse(id)
	}
	if err := c.Mail("a@x.example"); err != nil {
		t.Error(err)
	}
	if err := c.Rcpt("b@" + postfixtest.Domain); err != nil {
		t.Error(err)
	}
	if w, err := c.Data(); err != nil {
		t.Error(err)
	} else {
		fmt.Fprint(w, "Subject: direct\r\n\r\nx\r\n")
		w.Close()
	}
	c.Close()
	messages := func() []string {
		m, _ := filepath.Glob(maildir + "/*/new/*")
		return m
	}
	for end := time.Now().Add(time.Minute); len(messages()) == 0 && time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond)
	}
	if m := messages(); len(m) != 1 {
		t.Errorf("Postfix has %d messages, want the one that was sent without the wall", len(m))
	} else if text, err := os.ReadFile(m[0]); err != nil || !strings.Contains(string(text), "Subject: direct") {
		t.Errorf("Postfix has %s, %v", text, err)
	}
	conn, err := net.Dial("tcp", outside+":80")
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "GET /kept HTTP/1.1\r\nHost: good.test\r\n\r\n\r\nGET /direct HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n")
	_, _ = io.ReadAll(conn)
	conn.Close()
	// nginx writes its log line after the response.
	var direct, good int
	for end := time.Now().Add(time.Minute); direct == 0 && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		direct, good = 0, 0
		for _, l := range web.served(t) {
			switch {
			case l.Server == "evil.test" && l.URI == "/direct":
				direct++
			case l.Server == "good.test":
				good++
			case l.Server == "evil.test":
				t.Fatalf("nginx served %+v", l)
			}
		}
	}
	if direct != 1 || good < 20 {
		t.Errorf("nginx served %d requests without the wall, and %d for the host that is allowed", direct, good)
	}
	record := s.mustCLI("audit", "list", "--object", b.id, "--verb", "egress.")
	for _, want := range []string{"evil.test", outside + ":2526"} {
		if !strings.Contains(record, want) {
			t.Errorf("%s is not on the record:\n%s", want, tail(record, 40))
		}
	}

	t.Run("ordinary programs", func(t *testing.T) {
		for _, tc := range []struct{ name, run, want string }{
			{"curl keeps its connection", `curl -sS -w '%{num_connects} ' http://good.test/a http://good.test/b`, "good /a\n1 good /b\n0 "},
			{"curl uploads in chunks, and waits for 100", `head -c 3000000 /dev/zero | curl -sS -o /dev/null -w '%{http_code}' -T - -H 'Expect: 100-continue' http://good.test/up/f`, "204"},
			{"curl offers HTTP/2", `curl -sS --http2 http://good.test/a`, "good /a\n"},
			{"Python", `python3 -c '
import http.client
c = http.client.HTTPConnection("good.test")
for p in ("/a", "/b"):
    c.request("GET", p)
    print(c.getresponse().read().decode(), end="")
c.request("PUT", "/up/g", body=(b"x" * 1000 for _ in range(20)), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
print(c.getresponse().status)'`, "good /a\ngood /b\n204\n"},
			{"ten requests at once, as apt", `python3 -c '
import socket
s = socket.create_connection(("good.test", 80))
s.sendall(b"GET /a HTTP/1.1\r\nHost: good.test\r\n\r\n" * 9 + b"GET /a HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n")
b = b""
while d := s.recv(65536): b += d
print(b.count(b"good /a"))'`, "10\n"},
			{"git", `git clone -q http://good.test/repo.git /tmp/clone && cat /tmp/clone/README`, "hello\n"},
		} {
			if r := b.run(tc.run); r.stdout != tc.want {
				t.Errorf("%s: got %q, %q (exit %d), want %q", tc.name, r.stdout, r.stderr, r.exit, tc.want)
			}
		}
	})
}

// forward relays connections from one address to another.
func forward(t *testing.T, from, to string) {
	t.Helper()
	l, err := net.Listen("tcp", from)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
				go func() {
					_, _ = io.Copy(way[0], way[1])
					_ = way[0].(*net.TCPConn).CloseWrite()
				}()
			}
		}
	}()
}

// An nginx is Debian's nginx with good.test and evil.test at [outside], configured as
// leniently as possible.
type nginx struct{ log string }

type nginxLine struct{ Server, Host, URI string }

func startNginx(t *testing.T) nginx {
	t.Helper()
	bin, err := exec.LookPath("/usr/sbin/nginx")
	if err != nil {
		t.Fatal("nginx is not installed: run make deps-test")
	}
	// Not t.TempDir, which is closed to other users: its workers have their own.
	dir, err := os.MkdirTemp("/tmp", "postern-nginx-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	repo := `set -e; cd "$1"; git init -q -b main work; cd work; echo hello >README; git add README; git -c user.name=a -c user.email=a@b commit -qm x; cd ..; git clone -q --bare work repo.git; git -C repo.git update-server-info; mkdir www tmp; mv repo.git www; chmod -R a+rX www; chmod a+rwx www tmp`
	if out, err := exec.Command("bash", "-c", repo, "bash", dir).CombinedOutput(); err != nil {
		t.Fatalf("make a repository: %v: %s", err, out)
	}
	conf := fmt.Sprintf(`daemon off;
worker_processes 1;
pid %[1]s/pid;
error_log %[1]s/error.log;
events { worker_connections 4000; }
http {
	log_format json escape=json '{"Server":"$server_name","Host":"$host","URI":"$request_uri"}';
	access_log %[1]s/access.log json;
	client_body_temp_path %[1]s/tmp/body;
	proxy_temp_path %[1]s/tmp/proxy;
	fastcgi_temp_path %[1]s/tmp/fastcgi;
	uwsgi_temp_path %[1]s/tmp/uwsgi;
	scgi_temp_path %[1]s/tmp/scgi;
	ignore_invalid_headers off;
	underscores_in_headers on;
	client_max_body_size 0;
	server {
		listen %[2]s:80 default_server;
		server_name none;
		return 404;
	}
	server {
		listen %[2]s:80;
		server_name good.test;
		location / { return 200 "good $request_uri\n"; }
		location /repo.git { root %[1]s/www; }
		location /up { proxy_pass http://%[2]s:8080; }
	}
	server {
		listen %[2]s:80;
		server_name evil.test;
		location / { return 200 "evil $request_uri\n"; }
	}
}
`, dir, outside)
	if err := os.WriteFile(dir+"/nginx.conf", []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	// The upstream reads uploads.
	l, err := net.Listen("tcp", outside+":8080")
	if err != nil {
		t.Fatal(err)
	}
	behind := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.WriteHeader(http.StatusNoContent)
	})}
	go func() { _ = behind.Serve(l) }()
	t.Cleanup(func() { behind.Close() })
	cmd := exec.Command(bin, "-p", dir, "-c", dir+"/nginx.conf", "-e", dir+"/error.log")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if t.Failed() {
			out, _ := os.ReadFile(dir + "/error.log")
			t.Logf("the log of nginx:\n%s", tail(string(out), 20))
		}
	})
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if c, err := net.Dial("tcp", outside+":80"); err == nil {
			c.Close()
			break
		} else if time.Now().After(end) {
			t.Fatalf("nginx does not listen: %v", err)
		}
	}
	return nginx{dir + "/access.log"}
}

// served returns nginx's log lines, one for each request.
func (n nginx) served(t *testing.T) (lines []nginxLine) {
	t.Helper()
	b, err := os.ReadFile(n.log)
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(b)) {
		var line nginxLine
		if !strings.HasSuffix(l, "\n") {
			break // it is being written
		}
		if err := json.Unmarshal([]byte(l), &line); err != nil {
			t.Fatalf("%q: %v", l, err)
		}
		lines = append(lines, line)
	}
	return lines
}
