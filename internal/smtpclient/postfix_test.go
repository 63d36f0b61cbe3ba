package smtpclient

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/mail"
)

// postfix starts a private Postfix that delivers y.example to a maildir, and
// returns its address and the maildir.
func postfix(t *testing.T) (addr, maildir string) {
	t.Helper()
	bin, err := exec.LookPath("/usr/sbin/postfix")
	if err != nil {
		t.Fatal("postfix is not installed: DEBIAN_FRONTEND=noninteractive apt-get install --no-install-recommends postfix")
	}
	if os.Getuid() != 0 {
		t.Fatal("postfix needs root to start; run the tests as root")
	}
	// Not t.TempDir: Postfix runs as its own user and must be able to enter.
	dir, err := os.MkdirTemp("/tmp", "postern-postfix-")
	if err != nil {
		t.Fatal(err)
	}
	conf, queue, data, mailDir := dir+"/conf", dir+"/queue", dir+"/data", dir+"/mail"
	for _, d := range []string{dir, conf, queue, data, mailDir} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{data, mailDir} {
		if out, err := exec.CommandContext(t.Context(), "chown", "postfix", d).CombinedOutput(); err != nil {
			t.Fatalf("chown: %v: %s", err, out)
		}
	}
	uid, err := exec.CommandContext(t.Context(), "id", "-u", "postfix").Output()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr = l.Addr().String()
	l.Close()
	main := fmt.Sprintf(`compatibility_level = 3.6
queue_directory = %s
data_directory = %s
maillog_file = %s/log
maillog_file_prefixes = /tmp
myhostname = mx.y.example
mydestination =
local_recipient_maps =
inet_interfaces = 127.0.0.1
inet_protocols = ipv4
mynetworks = 127.0.0.0/8
alias_maps =
virtual_mailbox_domains = y.example
virtual_mailbox_base = %s
virtual_mailbox_maps = inline:{ b@y.example=b/ c@y.example=c/ }
virtual_uid_maps = static:%s
virtual_gid_maps = static:%[5]s
virtual_minimum_uid = 1
smtputf8_enable = yes
message_size_limit = 40000000
virtual_mailbox_limit = 0
mailbox_size_limit = 0
default_transport = error
`, queue, data, dir, mailDir, strings.TrimSpace(string(uid)))
	master := fmt.Sprintf(`%s inet n - n - - smtpd
pickup unix n - n 60 1 pickup
cleanup unix n - n - 0 cleanup
qmgr unix n - n 300 1 qmgr
tlsmgr unix - - n 1000? 1 tlsmgr
rewrite unix - - n - - trivial-rewrite
bounce unix - - n - 0 bounce
defer unix - - n - 0 bounce
error unix - - n - - error
retry unix - - n - - error
virtual unix - n n - - virtual
anvil unix - - n - 1 anvil
proxymap unix - - n - - proxymap
postlog unix-dgram n - n - 1 postlogd
`, addr)
	for name, text := range map[string]string{"main.cf": main, "master.cf": master} {
		if err := os.WriteFile(filepath.Join(conf, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// Its output goes to a file: a pipe would be held open by its daemon.
	run := func(args ...string) error {
		f, err := os.Create(dir + "/out")
		if err != nil {
			return err
		}
		defer f.Close()
		cmd := exec.Command(bin, append([]string{"-c", conf}, args...)...)
		cmd.Stdout, cmd.Stderr = f, f
		return cmd.Run()
	}
	logs := func() string {
		out, _ := os.ReadFile(dir + "/out")
		log, _ := os.ReadFile(dir + "/log")
		return string(out) + string(log)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log of postfix:\n%s", logs())
		}
		if err := run("stop"); err != nil {
			t.Errorf("stop postfix: %v\n%s", err, logs())
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := run("start"); err != nil {
		t.Fatalf("start postfix: %v\n%s", err, logs())
	}
	for range 100 {
		if c, err := net.Dial("tcp", addr); err == nil {
			c.Close()
			return addr, mailDir
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("postfix does not listen\n%s", logs())
	return "", ""
}

// stored returns the one message in a user's maildir, without the fields that
// Postfix puts before it, lines ending in CR LF again.
func stored(t *testing.T, maildir, user string, n int) [][]byte {
	t.Helper()
	var names []string
	for range 200 {
		names, _ = filepath.Glob(filepath.Join(maildir, user, "new", "*"))
		if len(names) >= n {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if len(names) != n {
		t.Fatalf("got %d messages for %s, want %d", len(names), user, n)
	}
	var all [][]byte
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, bytes.ReplaceAll(b, []byte("\n"), []byte("\r\n")))
	}
	return all
}

// Postfix stores exactly the bytes that were approved.
func TestPostfix(t *testing.T) {
	addr, maildir := postfix(t)
	c := newClient(t, Config{Routes: map[string]string{"y.example": addr, "x.example": addr}, CommandTimeout: 20 * time.Second, FinalTimeout: 20 * time.Second})
	file := make([]byte, 8<<20)
	if _, err := rand.Read(file); err != nil {
		t.Fatal(err)
	}
	composed, err := mail.Compose(mail.Draft{
		From: "Ägent <a@x.example>", To: []string{"b@y.example"}, Bcc: []string{"c@y.example"}, Subject: strings.Repeat("Grüße 你好 ", 30),
		Text: ".\n..\n.\n\nFrom here\n" + strings.Repeat("ä", 2000), HTML: "<p>.</p>", Attachments: []mail.Attachment{{Name: "Übersicht.bin", Data: file}},
	}, time.Now(), "x.example")
	if err != nil {
		t.Fatal(err)
	}
	captured, err := mail.FromCaptured([]byte("From: a@x.example\r\nTo: b@y.example\r\nSubject: eight \xc3\xa4\r\n\r\n.\r\n..\r\n.\xc3\xa4\r\n"+strings.Repeat("y", 998)+"\r\n\r\n.\r\n"), "a@x.example", []string{"b@y.example"}, "a@x.example", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	var want [][]byte
	for _, env := range []mail.Envelope{composed, captured} {
		ds, err := c.Deliver(t.Context(), env)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range ds {
			if d.Outcome != mail.Accepted || !strings.Contains(d.Detail, "queued as") {
				t.Errorf("got %+v, want accepted", d)
			}
		}
		want = append(want, env.Raw)
	}
	for user, n := range map[string]int{"b": 2, "c": 1} {
		for _, got := range stored(t, maildir, user, n) {
			found := false
			for _, w := range want {
				if bytes.HasSuffix(got, append([]byte("\r\n"), w...)) && len(got)-len(w) < 1000 {
					found = true
				}
			}
			if !found {
				t.Errorf("%s: a message of %d octets is none of those that were sent: %.600q", user, len(got), got)
			}
		}
	}
	for rcpt, outcome := range map[string]mail.Outcome{"nobody@y.example": mail.Refused, "b@elsewhere.example": mail.Refused} {
		env := captured
		env.To = []string{rcpt}
		ds, err := c.Deliver(t.Context(), env)
		if err != nil || ds[0].Outcome != outcome {
			t.Errorf("%s: got %+v, %v, want %s", rcpt, ds, err, outcome)
		}
	}
}
