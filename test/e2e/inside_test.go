package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	rest "postern/client"
)

// approveAll approves everything that waits, until the test ends. It returns what it has
// approved so far.
func (s *server) approveAll() (approved func() []rest.Action) {
	s.t.Helper()
	c, err := rest.Config{URL: "http://127.0.0.1", HTTP: s.local()}.New()
	if err != nil {
		s.t.Fatal(err)
	}
	var mu sync.Mutex
	var all []rest.Action
	var wg sync.WaitGroup
	stop := make(chan struct{})
	s.t.Cleanup(func() {
		close(stop)
		wg.Wait()
	})
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
			}
			list, err := c.Actions.List(s.t.Context(), 0, rest.StatePending)
			if err != nil {
				continue
			}
			for _, a := range list {
				if a, err = c.Actions.Get(s.t.Context(), a.ID); err != nil {
					continue
				}
				if _, err := c.Actions.Approve(s.t.Context(), a, ""); err == nil {
					mu.Lock()
					all = append(all, a)
					mu.Unlock()
				}
			}
		}
	})
	return func() []rest.Action {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
}

// tarOf returns an archive of paths, relative to dir, as they are.
func tarOf(t *testing.T, dir string, paths []string) []byte {
	t.Helper()
	cmd := exec.Command("tar", "--no-recursion", "-C", dir, "-cf", "-", "-T", "-")
	cmd.Stdin = strings.NewReader(strings.Join(paths, "\n"))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("tar: %v %s", err, stderr.Bytes())
	}
	return out
}

// install copies Debian packages of this machine, with those that they need and the
// sandbox lacks, into the sandbox. Both are the same release of Debian.
func (b *box) install(t *testing.T, packages ...string) {
	t.Helper()
	has := strings.Fields(b.run("dpkg-query -W -f '${Package}\n'").stdout)
	out, err := exec.Command("apt-cache", append([]string{"depends", "--recurse", "--installed", "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks", "--no-replaces", "--no-enhances"}, packages...)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	var missing []string
	for line := range strings.Lines(string(out)) {
		if name := strings.TrimSpace(line); !strings.HasPrefix(line, " ") && !strings.HasPrefix(line, "<") && !slices.Contains(has, strings.TrimSuffix(name, ":amd64")) {
			missing = append(missing, name)
		}
	}
	list, err := exec.Command("dpkg", append([]string{"-L"}, missing...)...).Output()
	if err != nil {
		t.Fatalf("dpkg -L %v: %v (make deps-test installs what is missing)", missing, err)
	}
	var files []string
	for name := range strings.Lines(string(list)) {
		name = strings.TrimSpace(name)
		if fi, err := os.Lstat(name); err != nil || fi.IsDir() || strings.HasPrefix(name, "/usr/share/doc/") || strings.HasPrefix(name, "/usr/share/man/") || strings.HasPrefix(name, "/usr/share/locale/") {
			continue
		}
		files = append(files, strings.TrimPrefix(name, "/"))
	}
	b.upload("/tmp/packages.tar", tarOf(t, "/", files))
	if r := b.run("sudo tar -xf /tmp/packages.tar -C / --keep-directory-symlink && rm /tmp/packages.tar && sudo ldconfig"); r.exit != 0 {
		t.Fatalf("install packages: %s %s", r.stdout, r.stderr)
	}
}

// TestInsideSandbox: a program that has nothing but HTTP proposes, waits, reads and
// answers; and programs that send over SMTP need no change. All run in a real sandbox,
// with clients that others have written.
func TestInsideSandbox(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir())
	robot, robotKey := s.inbox("robot")
	bobby, bobbyKey := s.inbox("bobby")
	approved := s.approveAll()
	status, b, err := s.createWith(map[string]any{"templateID": "base", "timeout": 1200, "metadata": map[string]string{"postern.inbox": robot}}, robotKey)
	if err != nil || status != http.StatusCreated {
		t.Fatalf("create: %d, %v", status, err)
	}
	t.Run("HTTP", func(t *testing.T) { insideHTTP(t, s, b, robot, bobbyKey, approved) })
	t.Run("SMTP", func(t *testing.T) { insideSMTP(t, s, b, robot, bobby, bobbyKey) })
	for _, a := range approved() {
		if a.Review == nil || a.Proposer != "sandbox:"+b.id {
			t.Errorf("proposed by another: %+v", a)
		}
	}
	if strings.Contains(s.log.String(), "pass-of-the-program") || strings.Contains(s.mustCLI("audit", "list", "--json"), "pass-of-the-program") {
		t.Error("a password is in the log or the record")
	}
}

// createWith creates a sandbox to which the key of its inbox is lent.
func (s *server) createWith(body map[string]any, inboxKey string) (status int, b *box, err error) {
	in, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	req, err := http.NewRequest(http.MethodPost, "http://"+s.web+"/v2/sandboxes", bytes.NewReader(in))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("X-API-KEY", s.key)
	req.Header.Set("X-Postern-Inbox-Key", inboxKey)
	resp, err := client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	var out struct{ SandboxID, EnvdAccessToken, TrafficAccessToken string }
	err = json.NewDecoder(resp.Body).Decode(&out)
	return resp.StatusCode, &box{s, out.SandboxID, out.EnvdAccessToken, out.TrafficAccessToken}, err
}

// file copies a program of this test into the sandbox.
func (b *box) file(t *testing.T, name string) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("clients", name))
	if err != nil {
		t.Fatal(err)
	}
	b.upload("/tmp/"+name, content)
}

func insideHTTP(t *testing.T, s *server, b *box, robot, otherKey string, approved func() []rest.Action) {
	t.Helper()
	for _, name := range []string{"inside.py", "inside.mjs", "inside.sh"} {
		b.file(t, name)
	}
	for _, base := range []string{"http://postern.internal", "https://postern.internal"} {
		for client, command := range map[string]string{
			"requests": "python3 /tmp/inside.py BASE requests", "urllib": "python3 /tmp/inside.py BASE urllib", "fetch": "node /tmp/inside.mjs BASE", "curl": "bash /tmp/inside.sh BASE",
		} {
			subject := client + " at " + base
			done := make(chan string, 1)
			go func() {
				r, err := b.try(strings.Replace(command, "BASE", base, 1), time.Minute)
				done <- fmt.Sprint(r.stdout, r.stderr, err)
			}()
			eventually(t, "its email is approved", func() bool {
				return slices.ContainsFunc(approved(), func(a rest.Action) bool {
					return slices.Contains(a.View.Fields, rest.Field{Name: "Subject", Value: subject})
				})
			})
			answer := "From: bob@example.com\r\nTo: " + robot + "\r\nSubject: Re: " + subject + "\r\nMessage-ID: <" + rand.Text() + "@example.com>\r\n\r\nHello robot\r\n"
			if err := s.bring("bob@example.com", robot, answer); err != nil {
				t.Fatal(err)
			}
			if got := <-done; got != "answered pending_send_approval\n<nil>" {
				t.Errorf("%s: %s", subject, got)
			}
		}
	}
	for _, tt := range []struct{ name, command, want string }{
		{"MCP over TLS", `curl -sS -H 'Content-Type: application/json' -d '{"jsonrpc":"2.0","id":1,"method":"tools/list"}' https://postern.internal/mcp | grep -o '"email_send"'`, `"email_send"`},
		// The attacks.
		{"a stolen key of another inbox", `curl -sS -o /dev/null -w '%{http_code}' -H 'Authorization: Bearer ` + otherKey + `' https://postern.internal/v1/inboxes/bobby@agents.internal/messages`, "403"},
		{"and it changes nothing of who calls", `curl -sS -H 'Authorization: Bearer ` + otherKey + `' http://postern.internal/v1/me | grep -o '"kind":"sandbox"'`, `"kind":"sandbox"`},
		{"a decision", `curl -sS -o /dev/null -w '%{http_code}' -H 'Content-Type: application/json' -d '{}' http://postern.internal/v1/actions/act_AAAAAAAAAAAAAAAA/decision`, "403"},
		{"a new inbox", `curl -sS -o /dev/null -w '%{http_code}' -H 'Content-Type: application/json' -d '{"address":"more"}' http://postern.internal/v1/inboxes`, "403"},
		{"a sign-up", `curl -sS -o /dev/null -w '%{http_code}' -X POST http://postern.internal/v1/signup`, "403"},
		{"DNS rebinding", `curl -sS -o /dev/null -w '%{http_code}' -H 'Host: evil.example' http://postern.internal/v1/me`, "421"},
		{"DNS rebinding in TLS", `curl -sS -k -o /dev/null -w '%{http_code}' --connect-to evil.example:443:postern.internal:443 https://evil.example/v1/me || echo refused`, "000refused"},
		{"a web page inside", `curl -sS -o /dev/null -w '%{http_code}' -H 'Origin: https://evil.example' -H 'Content-Type: application/json' -d '{"to":["a@b.example"],"subject":"s","text":"t"}' http://postern.internal/v1/inboxes/me/messages`, "403"},
		{"a form of a web page", `curl -sS -o /dev/null -w '%{http_code}' -d 'to=a@b.example' http://postern.internal/v1/inboxes/me/messages`, "415"},
		{"a redirect to elsewhere", `curl -sS -o /dev/null -w '%{http_code} %{redirect_url}' --path-as-is http://postern.internal//evil.example/..//v1/me | grep -c evil.example/v1 || true`, "0"},
	} {
		if r := b.run(tt.command); strings.TrimSpace(r.stdout) != tt.want {
			t.Errorf("%s: got %q %q, want %q", tt.name, r.stdout, r.stderr, tt.want)
		}
	}
}

// goProgram returns the program that sends by Go's net/smtp.
func goProgram(t *testing.T) []byte {
	t.Helper()
	dir := t.TempDir()
	source, err := os.ReadFile("clients/mail.go.txt")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "main.go"), source, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-o", filepath.Join(dir, "mail"), filepath.Join(dir, "main.go"))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=mod", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v %s", err, out)
	}
	b, err := os.ReadFile(filepath.Join(dir, "mail"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// insideSMTP sends with programs that believe to talk to a mail server on the Internet.
// What they send waits, is approved, and arrives as it was shown.
func insideSMTP(t *testing.T, s *server, b *box, robot, bobby, bobbyKey string) {
	t.Helper()
	b.install(t, "python3-django", "ruby-actionmailer", "libphp-phpmailer", "php-cli", "swaks", "libnet-ssleay-perl")
	for _, name := range []string{"smtp.py", "smtp.rb", "smtp.php", "smtp.cjs"} {
		b.file(t, name)
	}
	b.upload("/tmp/mail", goProgram(t))
	nodemailer, err := exec.Command("tar", "-C", "../mail/node_modules/nodemailer", "-cf", "-", ".").Output()
	if err != nil {
		t.Fatalf("nodemailer: %v (test/install-npm test/mail installs it)", err)
	}
	b.upload("/tmp/nodemailer.tar", nodemailer)
	b.upload("/tmp/curl.eml", []byte("From: "+robot+"\nTo: "+bobby+"\nSubject: curl-PORT\n\nsent by curl-PORT\n.a line with a dot\n"))
	if r := b.run("chmod +x /tmp/mail && sudo mkdir /opt/nodemailer && sudo tar -xf /tmp/nodemailer.tar -C /opt/nodemailer"); r.exit != 0 {
		t.Fatalf("install: %s", r.stderr)
	}
	curl := func(port, url string) string {
		return `sed s/PORT/` + port + `/ /tmp/curl.eml > /tmp/` + port + `.eml && curl -sS --ssl-reqd --url ` + url + ` -u user:pass-of-the-program --mail-from FROM --mail-rcpt TO -T /tmp/` + port + `.eml`
	}
	commands := map[string]string{ // by subject
		"starttls":         "python3 /tmp/smtp.py starttls FROM TO",
		"bytes":            "python3 /tmp/smtp.py bytes FROM TO",
		"ssl":              "python3 /tmp/smtp.py ssl FROM TO",
		"django":           "/usr/bin/python3 /tmp/smtp.py django FROM TO",
		"django-ssl":       "/usr/bin/python3 /tmp/smtp.py django-ssl FROM TO",
		"rails":            "ruby /tmp/smtp.rb FROM TO",
		"phpmailer-tls":    "php8.2 /tmp/smtp.php tls FROM TO",
		"phpmailer-ssl":    "php8.2 /tmp/smtp.php ssl FROM TO",
		"nodemailer-gmail": "node /tmp/smtp.cjs gmail FROM TO",
		"nodemailer-dkim":  "node /tmp/smtp.cjs dkim FROM TO",
		"go":               "/tmp/mail FROM TO",
		"curl-smtp":        curl("smtp", "smtp://smtp.example.com:587"),
		"curl-smtps":       curl("smtps", "smtps://smtp.example.com"),
		"swaks":            `swaks --silent 2 --server smtp.example.com --port 587 --tls --auth CRAM-MD5 --auth-user user --auth-password pass-of-the-program --from FROM --to TO --header 'Subject: swaks' --body 'sent by swaks\n.a line with a dot\n'`,
	}
	for subject, command := range commands {
		if r := b.run(strings.NewReplacer("FROM", robot, "TO", bobby).Replace(command)); r.exit != 0 {
			t.Errorf("%s: exit %d %s %s", subject, r.exit, r.stdout, r.stderr)
		}
	}
	var list struct {
		Messages []struct{ ID, Subject string }
	}
	eventually(t, "all have arrived", func() bool {
		_, err := call(client, "GET", "http://"+s.web+"/v1/inboxes/"+bobby+"/messages?limit=100", bobbyKey, nil, &list)
		return err == nil && len(list.Messages) >= len(commands)
	})
	for _, m := range list.Messages {
		raw := s.raw(bobby, bobbyKey, m.ID)
		head, body, _ := strings.Cut(raw, "\r\n\r\n")
		if commands[m.Subject] == "" {
			t.Errorf("a message that nobody sent: %s", m.Subject)
		}
		body = strings.ReplaceAll(strings.TrimRight(body, "\r\n"), "=2E", ".")
		if body != "sent by "+m.Subject+"\r\n.a line with a dot" {
			t.Errorf("%s: body %q", m.Subject, body)
		}
		// Ours alone, which holds: the program's was taken off.
		if strings.Contains(head, "s=mine") || !strings.Contains(head, "dkim=pass") || strings.Contains(head, "dkim=fail") {
			t.Errorf("%s: header %s", m.Subject, head)
		}
	}
}
