package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// services is the program that TestPorts runs inside: it serves a page on the loopback
// interface, and upgrades one connection and echoes it.
const services = `
import socket, threading, http.server
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = (self.headers['Host'] + ' ' + str(self.headers.get('e2b-traffic-access-token'))).encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
threading.Thread(target=http.server.ThreadingHTTPServer(('127.0.0.1', 5000), Page).serve_forever).start()
l = socket.create_server(('0.0.0.0', 5001))
while True:
    c, _ = l.accept()
    def echo(c):
        c.recv(65536)
        c.sendall(b'HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n')
        while data := c.recv(65536): c.sendall(data)
    threading.Thread(target=echo, args=(c,)).start()
`

// TestPorts reaches services in a real sandbox through the proxy, until the sandbox
// ends.
func TestPorts(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--domain", "boxes.test", "--public-ports")
	b := s.sandbox(map[string]any{"network": map[string]any{"allowPublicTraffic": false, "maskRequestHost": "localhost:${PORT}"}})
	open := s.sandbox(nil)
	for _, b := range []*box{b, open} {
		if r := b.run("cat > /tmp/s.py <<'END'" + services + "END\nsetsid python3 /tmp/s.py >/dev/null 2>&1 & for i in $(seq 600); do (echo > /dev/tcp/127.0.0.1/5001) 2>/dev/null && break; sleep 0.1; done"); r.exit != 0 {
			t.Fatalf("%+v", r)
		}
	}
	get := func(b *box, port int, token string) (int, string) {
		t.Helper()
		req, err := http.NewRequest("GET", "http://"+s.web+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = fmt.Sprintf("%d-%s.boxes.test", port, b.id)
		if token != "" {
			req.Header.Set("e2b-traffic-access-token", token)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		var refused struct{ Message string }
		if json.Unmarshal(text, &refused) == nil {
			return resp.StatusCode, refused.Message
		}
		return resp.StatusCode, string(text)
	}
	const missing = "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
	const invalid = "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is invalid"
	for _, tt := range []struct {
		name  string
		b     *box
		port  int
		token string
		want  int
		text  string
	}{
		{"on the loopback, with another Host", b, 5000, b.traffic, 200, "localhost:5000 None"},
		{"without a token", b, 5000, "", 403, missing},
		{"with another sandbox's", b, 5000, open.traffic, 403, invalid},
		{"with the access token", b, 5000, b.access, 403, invalid},
		{"closed", b, 5999, b.traffic, 502, "The sandbox is running but port is not open"},
		{"open to all", open, 5000, "", 200, "5000-" + open.id + ".boxes.test None"},
		{"open to all, but not the interpreter", open, 49999, "", 403, missing},
		{"open to all, but not the guest", open, 49983, "", 401, "missing or wrong X-Access-Token"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, text := get(tt.b, tt.port, tt.token); got != tt.want || text != tt.text {
				t.Errorf("got %d %q, want %d %q", got, text, tt.want, tt.text)
			}
		})
	}

	c, err := net.Dial("tcp", s.web)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(2 * time.Minute))
	fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: 5001-%s.boxes.test\r\nE2b-Traffic-Access-Token: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", b.id, b.traffic)
	in := bufio.NewReader(c)
	resp, err := http.ReadResponse(in, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("got %v, %v, want 101", resp, err)
	}
	message := strings.Repeat("x", 300<<10)
	go func() { _, _ = io.WriteString(c, message) }()
	if got := make([]byte, len(message)); true {
		if _, err := io.ReadFull(in, got); err != nil || string(got) != message {
			t.Fatalf("echo: %v", err)
		}
	}
	req, err := http.NewRequest("DELETE", "http://"+s.web+"/sandboxes/"+b.id, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-API-KEY", s.key)
	killed, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	killed.Body.Close()
	// It must neither stay open nor end as if it were complete.
	if n, err := in.Read(make([]byte, 1)); n != 0 || err == nil || isTimeout(err) {
		t.Errorf("after the sandbox has ended: %d bytes, %v", n, err)
	}
	if got, text := get(b, 5000, b.traffic); got != 502 || text != "The sandbox was not found" {
		t.Errorf("got %d %q", got, text)
	}
}

func isTimeout(err error) bool {
	n, ok := errors.AsType[net.Error](err)
	return ok && n.Timeout()
}

// TestTrafficWakes: an authorized request resumes a paused sandbox that was created
// with auto-resume. An unauthorized request does not.
func TestTrafficWakes(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--domain", "boxes.test")
	wakes := s.sandbox(map[string]any{"autoPause": true, "autoResume": map[string]any{"enabled": true}})
	sleeps := s.sandbox(map[string]any{"autoPause": true})
	state := func(b *box) string {
		t.Helper()
		var out struct{ State string }
		req, err := http.NewRequest("GET", "http://"+s.web+"/sandboxes/"+b.id, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-KEY", s.key)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
			t.Fatal(err)
		}
		return out.State
	}
	for _, b := range []*box{wakes, sleeps} {
		if r := b.run("echo kept >/tmp/kept; (python3 -m http.server 5002 --bind 127.0.0.1 --directory /tmp >/dev/null 2>&1 &) ; for i in $(seq 600); do (echo > /dev/tcp/127.0.0.1/5002) 2>/dev/null && break; sleep 0.1; done"); r.exit != 0 {
			t.Fatalf("%+v", r)
		}
		req, err := http.NewRequest("POST", "http://"+s.web+"/sandboxes/"+b.id+"/pause", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-KEY", s.key)
		resp, err := client.Do(req)
		if err != nil || resp.StatusCode != http.StatusNoContent {
			t.Fatalf("pause: %v, %v", resp, err)
		}
		resp.Body.Close()
	}
	for _, tt := range []struct {
		name   string
		b      *box
		port   int
		path   string
		header string
		value  string
		want   int
		text   string
		state  string
	}{
		{"a stranger asks for health", wakes, 49983, "/health", "", "", 502, "The sandbox was not found", "paused"},
		{"a stranger asks for a port", wakes, 5002, "/kept", "", "", 403, "This sandbox can't be resumed with the credentials provided", "paused"},
		{"somebody with another's token", wakes, 5002, "/kept", "e2b-traffic-access-token", sleeps.traffic, 403, "This sandbox can't be resumed with the credentials provided", "paused"},
		{"somebody who may", wakes, 5002, "/kept", "e2b-traffic-access-token", wakes.traffic, 200, "kept", "running"},
		{"somebody who may, but it must not wake", sleeps, 5002, "/kept", "e2b-traffic-access-token", sleeps.traffic, 502, "The sandbox is paused and does not resume on traffic", "paused"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req, err := http.NewRequest("GET", "http://"+s.web+tt.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Host = fmt.Sprintf("%d-%s.boxes.test", tt.port, tt.b.id)
			if tt.header != "" {
				req.Header.Set(tt.header, tt.value)
			}
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != tt.want || !strings.Contains(string(text), tt.text) {
				t.Errorf("got %d %q, %v, want %d %q", resp.StatusCode, text, err, tt.want, tt.text)
			}
			if got := state(tt.b); got != tt.state {
				t.Errorf("got state %s, want %s", got, tt.state)
			}
		})
	}
}
