package e2e

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// mailProgram is what an agent writes: it sends by SendGrid's API with the standard
// library alone.
const mailProgram = `
import json, ssl, sys, urllib.request, urllib.error
body = {"from": {"email": sys.argv[1]}, "personalizations": [{"to": [{"email": "ada@example.net"}], "bcc": [{"email": "hidden@example.net"}]}],
        "subject": "Hello by request", "content": [{"type": "text/plain", "value": "Plain words"}]}
if len(sys.argv) > 2:
    body["mail_settings"] = {"bcc": {"enable": True, "email": "thief@example.org"}}
r = urllib.request.Request("https://api.sendgrid.com/v3/mail/send", json.dumps(body).encode(), {"Content-Type": "application/json", "Authorization": "Bearer SG.key-of-the-test"})
try:
    a = urllib.request.urlopen(r, timeout=120)
    print(a.status, a.headers.get("X-Message-Id"), a.read().decode())
except urllib.error.HTTPError as e:
    print(e.code, e.headers.get("Content-Type"), e.headers.get("Postern-Denial"), e.read().decode())
`

// TestMailByRequest: a program in a sandbox sends by SendGrid's API, to a server of the
// test in a network namespace. People see an email, and what they approve is made once.
func TestMailByRequest(t *testing.T) {
	t.Parallel()
	if os.Getenv("POSTERN_TEST_INSIDE") == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestMailByRequest$", "-test.v=true")
		cmd.Env = append(os.Environ(), "POSTERN_TEST_INSIDE=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil || !strings.Contains(string(out), "--- PASS: TestMailByRequest") {
			t.Errorf("in its own network namespace: %v", err)
		}
		return
	}
	for _, args := range [][]string{{"link", "set", "lo", "up"}, {"addr", "add", outside + "/32", "dev", "lo"}} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	var mu sync.Mutex
	var got []string
	seen := func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append([]string{}, got...)
	}
	w := &rulesWorld{}
	cert := w.authority(t, "api.sendgrid.com")
	l, err := net.Listen("tcp", outside+":443")
	if err != nil {
		t.Fatal(err)
	}
	service := &http.Server{TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}}, Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		got = append(got, fmt.Sprintf("%s %s %s %s %s", r.Method, r.Host, r.URL.Path, r.Header.Get("Authorization"), body))
		rw.Header().Set("X-Message-Id", "answer-of-the-service")
		rw.WriteHeader(http.StatusAccepted)
	})}
	t.Cleanup(func() { service.Close() })
	go func() { _ = service.ServeTLS(l, "", "") }()

	s := start(t, t.TempDir(), "--dns", nameServer(t), "--egress", "allow", "--egress-allow", outside, "--egress-ca", w.ca)
	address, _ := s.inbox("robot")
	b := s.sandbox(map[string]any{"metadata": map[string]string{"postern.inbox": address}})
	b.run("cat > /tmp/send.py <<'END'\n" + mailProgram + "\nEND")

	waiting := func(kind string) (id string) {
		within(t, 30*time.Second, kind+" waits", func() bool {
			id = ""
			if out := s.mustCLI("pending"); strings.Contains(out, kind) {
				id = actionID.FindString(out)
			}
			return id != ""
		})
		return id
	}
	answers := make(chan string, 1)
	send := func(args string) {
		go func() {
			r, err := b.try("python3 /tmp/send.py "+args, 2*time.Minute)
			answers <- fmt.Sprint(r.stdout, r.stderr, err)
		}()
	}

	send(address)
	id := waiting("email.send")
	if n := len(seen()); n != 0 {
		t.Fatalf("%d requests left before the approval", n)
	}
	shown := s.mustCLI("show", id)
	for _, want := range []string{"Hello by request", "ada@example.net", "hidden@example.net", "Plain words", "HTTPS request to api.sendgrid.com (SendGrid), exactly as below"} {
		if !strings.Contains(shown, want) {
			t.Errorf("the action does not show %q:\n%s", want, shown)
		}
	}
	s.mustCLI("approve", id, "--seen", "hidden_recipient:hidden@example.net")
	if a := <-answers; !strings.HasPrefix(a, "202 answer-of-the-service") {
		t.Errorf("the program got %s", a)
	}
	if g := seen(); len(g) != 1 || !strings.HasPrefix(g[0], "POST api.sendgrid.com /v3/mail/send Bearer SG.key-of-the-test {") || !strings.Contains(g[0], "hidden@example.net") {
		t.Errorf("the service got %q", g)
	}

	// The same once more is another send; a person rejects it.
	send(address)
	again := waiting("email.send")
	s.mustCLI("reject", again, "--reason", "once is enough")
	if a := <-answers; !strings.HasPrefix(a, "403 application/problem+json 1") || !strings.Contains(a, "once is enough") || !strings.Contains(a, again) {
		t.Errorf("after the rejection the program got %s", a)
	}

	// What cannot be shown is no email, and nobody lets it through unasked.
	send(address + " more")
	hidden := waiting("net.request")
	if shown := s.mustCLI("show", hidden); !strings.Contains(shown, "mail_settings.bcc") {
		t.Errorf("the request does not show why it is asked about:\n%s", shown)
	}
	s.mustCLI("reject", hidden, "--reason", "no")
	if a := <-answers; !strings.HasPrefix(a, "403") {
		t.Errorf("a hidden recipient: %s", a)
	}

	none := s.sandbox(map[string]any{})
	none.run("cat > /tmp/send.py <<'END'\n" + mailProgram + "\nEND")
	if r := none.run("python3 /tmp/send.py " + address); !strings.HasPrefix(r.stdout, "403") || !strings.Contains(r.stdout, "no inbox") {
		t.Errorf("without an inbox: %s %s", r.stdout, r.stderr)
	}
	if g := seen(); len(g) != 1 {
		t.Errorf("the service got %d requests, want one: %q", len(g), g)
	}
	if record := s.mustCLI("audit", "list", "--json"); !strings.Contains(record, "message.request") {
		t.Error("the record does not say that the request was let through")
	}
}
