package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// webSocketBridge does for TestSSHDInATemplate what websocat does in E2B's recipe: it passes
// the binary messages of WebSockets at port 8081 on to port 22, and back.
const webSocketBridge = `
import base64, hashlib, socket, struct, threading
def serve(c):
    head = b''
    while b'\r\n\r\n' not in head: head += c.recv(1)
    key = [l.split(b':', 1)[1].strip() for l in head.split(b'\r\n') if l.lower().startswith(b'sec-websocket-key:')][0]
    accept = base64.b64encode(hashlib.sha1(key + b'258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest())
    c.sendall(b'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ' + accept + b'\r\n\r\n')
    s = socket.create_connection(('127.0.0.1', 22))
    def back():
        while data := s.recv(65536):
            n = len(data)
            c.sendall((struct.pack('!BB', 130, n) if n < 126 else struct.pack('!BBH', 130, 126, n) if n < 65536 else struct.pack('!BBQ', 130, 127, n)) + data)
        c.sendall(b'\x88\x02\x03\xe8')
        c.shutdown(socket.SHUT_RDWR)
    threading.Thread(target=back).start()
    r = c.makefile('rb')
    while len(h := r.read(2)) == 2 and h[0] & 15 != 8:
        n = h[1] & 127
        if n > 125: n = int.from_bytes(r.read(2 if n == 126 else 8), 'big')
        mask = r.read(4)
        data = bytearray(r.read(n))
        for i in range(n): data[i] ^= mask[i & 3]
        if h[0] & 15 < 8: s.sendall(data)
    s.shutdown(socket.SHUT_WR)
l = socket.create_server(('0.0.0.0', 8081))
while True: threading.Thread(target=serve, args=(l.accept()[0],)).start()
`

// TestSSHDInATemplate is E2B's recipe for SSH: Debian's sshd in a template behind a program
// that turns WebSockets into TCP. docs/tasks/ssh.md has its one difference: a sandbox has no
// systemd, so the start command starts sshd. A small bridge stands in for websocat.
func TestSSHDInATemplate(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("ssh"); err != nil {
		t.Skip("no OpenSSH client: make deps-test installs it")
	}
	// The packages come from this machine's sources, because in the test nothing is open to
	// sandboxes. They must fit the template.
	if release, err := os.ReadFile("/etc/os-release"); err != nil || !bytes.Contains(release, []byte("VERSION_CODENAME=bookworm\n")) {
		t.Skip("needs packages of Debian 12, and this is another system")
	}
	debs := t.TempDir()
	apt := func(args ...string) error {
		cmd := exec.CommandContext(t.Context(), "apt-get", append([]string{"-o", "APT::Sandbox::User=root"}, args...)...)
		cmd.Dir = debs
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, out)
		}
		return err
	}
	packages := []string{"download", "openssh-server", "openssh-sftp-server", "openssh-client", "libwrap0", "ucf", "runit-helper", "adduser", "sysvinit-utils", "lsb-base"}
	if apt(packages...) != nil { // no list of packages yet, or an old one
		if err := apt("update"); err != nil {
			t.Fatal(err)
		}
		if err := apt(packages...); err != nil {
			t.Fatal(err)
		}
	}
	files := map[string]string{"bridge.py": webSocketBridge}
	found, err := filepath.Glob(filepath.Join(debs, "*.deb"))
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range found {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		files[fmt.Sprintf("debs/%d.deb", i)] = string(b)
	}

	s := start(t, t.TempDir(), "--domain", "boxes.test", "--public-ports", "--pool-max", "0")
	template, build := s.template("sshd")
	hash := strings.Repeat("0b", 32)
	s.upload(template, hash, files)
	b := s.startBuild(template, build, `{"fromTemplate":"base","startCmd":"sudo sh -c 'mkdir -p /run/sshd && /usr/sbin/sshd && exec python3 /opt/bridge/bridge.py'","readyCmd":"ss -tuln | grep :8081","steps":[
		{"type":"COPY","args":[".","/opt/bridge","root",""],"filesHash":"`+hash+`"},
		{"type":"RUN","args":["DEBIAN_FRONTEND=noninteractive dpkg -i /opt/bridge/debs/*.deb && chroot / /bin/true","root"]},
		{"type":"RUN","args":["passwd -d user; printf 'PermitRootLogin yes\\nPermitEmptyPasswords yes\\nPasswordAuthentication yes\\n' > /etc/ssh/sshd_config.d/e2b.conf","root"]}]}`)
	if b.Status != "ready" {
		t.Fatalf("build = %+v\n%s", b.Reason, b.log())
	}
	status, box, err := s.create(map[string]any{"templateID": "sshd", "timeout": 600})
	if err != nil || status != http.StatusCreated {
		t.Fatalf("create = %d, %v", status, err)
	}

	// Each connection to the listener becomes a WebSocket through the proxy, as "websocat
	// --binary - wss://8081-ID.DOMAIN" makes one of the ProxyCommand's pipe.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				ws, resp, err := websocket.Dial(ctx, "ws://"+s.web+"/", &websocket.DialOptions{Host: "8081-" + box.id + ".boxes.test"})
				if err != nil {
					t.Errorf("connect to the bridge: %v, %+v", err, resp)
					return
				}
				n := websocket.NetConn(ctx, ws, websocket.MessageBinary)
				go func() { _, _ = io.Copy(n, c) }()
				_, _ = io.Copy(c, n)
			}()
		}
	}()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	options := []string{"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-F", "none"}
	run := func(stdin, name string, args ...string) (string, int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, name, append(options, args...)...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	if out, exit := run("from here\n", "ssh", "-p", port, "user@127.0.0.1", "id -un; cat; test -n \"$SSH_CONNECTION\" && echo by sshd; exit 7"); out != "user\nfrom here\nby sshd\n" || exit != 7 {
		t.Errorf("command: got %q, %d", out, exit)
	}
	file := filepath.Join(t.TempDir(), "blob")
	if err := os.WriteFile(file, bytes.Repeat([]byte("0123456789abcdef"), 1<<16), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, exit := run("", "scp", "-P", port, file, "user@127.0.0.1:there"); exit != 0 {
		t.Errorf("scp: %q, %d", out, exit)
	}
	if r := box.run("wc -c < ~/there"); r.stdout != "1048576\n" {
		t.Errorf("copied file: %+v", r)
	}
}
