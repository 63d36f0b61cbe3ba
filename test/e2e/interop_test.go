package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"postern/internal/mailauth/dnstest"
	"postern/internal/smtpclient/postfixtest"
)

// A dovecot is a real Dovecot. Postfix delivers a person's mail to it by LMTP, and
// the person's program reads it by IMAP.
type dovecot struct {
	lmtp, imap string // host:port
}

const dovecotPassword = "correct horse"

// startDovecot runs a private Dovecot on the loopback until the test ends.
func startDovecot(t testing.TB) dovecot {
	t.Helper()
	bin, err := exec.LookPath("/usr/sbin/dovecot")
	if err != nil {
		t.Fatal("dovecot is not installed: run make deps-test")
	}
	// Not t.TempDir, which is closed to other users: Dovecot's processes have users of
	// their own.
	dir, err := os.MkdirTemp("/tmp", "postern-dovecot-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	lmtp, imap := freePort(t), freePort(t)
	d := dovecot{lmtp: net.JoinHostPort("127.0.0.1", lmtp), imap: net.JoinHostPort("127.0.0.1", imap)}
	conf := fmt.Sprintf(`base_dir = %[1]s/run
state_dir = %[1]s/state
log_path = %[1]s/log
protocols = imap lmtp
listen = 127.0.0.1
ssl = no
disable_plaintext_auth = no
auth_mechanisms = plain
mail_location = maildir:%[1]s/mail/%%n
first_valid_uid = 1
mail_uid = dovecot
mail_gid = dovecot
passdb {
  driver = static
  args = password=%[2]s
}
userdb {
  driver = static
  args = uid=dovecot gid=dovecot home=%[1]s/mail/%%n allow_all_users=yes
}
service lmtp {
  inet_listener lmtp {
    address = 127.0.0.1
    port = %[3]s
  }
}
service imap-login {
  chroot =
  inet_listener imap {
    address = 127.0.0.1
    port = %[4]s
  }
  inet_listener imaps {
    port = 0
  }
}
`, dir, strings.ReplaceAll(dovecotPassword, " ", "_"), lmtp, imap)
	if err := os.WriteFile(dir+"/dovecot.conf", []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir+"/mail", 0o777); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("chown", "dovecot:dovecot", dir+"/mail").CombinedOutput(); err != nil {
		t.Fatalf("chown: %v: %s", err, out)
	}
	log := &lockedBuffer{}
	cmd := exec.Command(bin, "-F", "-c", dir+"/dovecot.conf")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if t.Failed() {
			b, _ := os.ReadFile(dir + "/log")
			t.Logf("the log of dovecot:\n%s%s", log, b)
		}
	})
	eventually(t, "dovecot listens", func() bool {
		for _, addr := range []string{d.lmtp, d.imap} {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				return false
			}
			c.Close()
		}
		return true
	})
	return d
}

// read returns the newest message of a user, once there are n.
func (d dovecot) read(t testing.TB, user string, n int) string {
	t.Helper()
	var raw string
	eventually(t, fmt.Sprintf("%s has %d messages", user, n), func() bool {
		out, err := exec.Command("curl", "-sS", "--max-time", "20", "-u", user+"@"+postfixtest.Domain+":"+strings.ReplaceAll(dovecotPassword, " ", "_"),
			fmt.Sprintf("imap://%s/INBOX;MAILINDEX=%d", d.imap, n)).Output()
		raw = string(out)
		return err == nil && raw != ""
	})
	return raw
}

// play runs one of the programs of test/mail, which are other people's, with
// in as JSON on its standard input, and decodes what it prints.
func playMail(t *testing.T, program string, in, out any) {
	t.Helper()
	b, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("node", filepath.Join("..", "mail", program))
	cmd.Stdin = strings.NewReader(string(b))
	var said strings.Builder
	cmd.Stderr = &said
	answer, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", program, err, said.String())
	}
	if err := json.Unmarshal(answer, out); err != nil {
		t.Fatalf("%s printed %q: %v", program, answer, err)
	}
}

// TestInterop: a person with a mail program, whose provider is Postfix with
// Dovecot, and an agent write to each other: both ways, with a thread, an
// attachment, names and text beyond ASCII. Other people's libraries read what
// we emit.
func TestInterop(t *testing.T) {
	t.Parallel()
	d := startDovecot(t)
	ours := net.JoinHostPort("127.0.0.1", freePort(t))
	addr, _ := postfixtest.Run(t, postfixtest.Config{LMTP: d.lmtp, Routes: map[string]string{"agents.internal": ours}})
	s := start(t, t.TempDir(), "--smtp", ours, "--route", postfixtest.Domain+"="+addr, "--submissions", "127.0.0.1:0", "--cold", "--pool-max", "0")
	agent, key := s.inbox("analyst")

	// The person writes first.
	var sent struct{ MessageID string }
	playMail(t, "send.mjs", map[string]any{
		"server": addr,
		"mail": map[string]any{
			"from": "Bärbel <b@" + postfixtest.Domain + ">", "to": agent, "subject": "Übersicht 你好", "text": "Grüße\n.\n..dots\nFrom here\n", "html": "<p>Grüße</p>",
			"attachments": []map[string]any{{"filename": "Zahlen für 2026.csv", "content": "a;b\r\n1;2\r\n"}},
		},
	}, &sent)
	type message struct {
		ID, From, Subject string
		MessageID         string `json:"message_id"`
		Text              string
		Attachments       []struct{ Name string }
	}
	var list struct{ Messages []message }
	eventually(t, "the agent has the mail", func() bool {
		_, err := call(client, "GET", "http://"+s.web+"/v1/inboxes/"+agent+"/messages", key, nil, &list)
		return err == nil && len(list.Messages) == 1
	})
	var got message
	if status, err := call(client, "GET", "http://"+s.web+"/v1/inboxes/"+agent+"/messages/"+list.Messages[0].ID, key, nil, &got); err != nil || status != http.StatusOK {
		t.Fatalf("read: %d, %v", status, err)
	}
	if got.Subject != "Übersicht 你好" || !strings.Contains(got.From, "Bärbel") || strings.TrimSpace(strings.ReplaceAll(got.Text, "\r\n", "\n")) != "Grüße\n.\n..dots\nFrom here" ||
		len(got.Attachments) != 1 || got.Attachments[0].Name != "Zahlen für 2026.csv" || "<"+strings.Trim(got.MessageID, "<>")+">" != sent.MessageID {
		t.Errorf("the agent reads %+v; the person sent %s", got, sent.MessageID)
	}

	// The agent answers, and a person approves.
	var a struct{ ID string }
	if status, err := call(client, "POST", "http://"+s.web+"/v1/inboxes/"+agent+"/messages", key, map[string]any{
		"to": []string{"b@" + postfixtest.Domain}, "bcc": []string{"c@" + postfixtest.Domain}, "subject": "Re: Übersicht 你好", "text": "Natürlich.\n.\n", "html": "<p>Natürlich.</p>",
		"in_reply_to": sent.MessageID, "attachments": []map[string]any{{"name": "Antwort.txt", "content_base64": "w6Q=", "content_type": "text/plain"}},
	}, &a); err != nil || status != http.StatusAccepted {
		t.Fatalf("propose: %d, %v", status, err)
	}
	s.mustCLI("approve", a.ID, "--seen", "hidden_recipient:c@"+postfixtest.Domain)
	for _, user := range []string{"b", "c"} {
		var p struct {
			From, To, Subject, Text, HTML, InReplyTo string
			Attachments                              []struct{ Name, Text string }
			Headers                                  []string
		}
		playMail(t, "parse.mjs", map[string]any{"raw": d.read(t, user, 1)}, &p)
		if p.From != agent || p.To != "b@"+postfixtest.Domain || p.Subject != "Re: Übersicht 你好" || p.Text != "Natürlich.\n.\n" || !strings.Contains(p.HTML, "<p>Natürlich.</p>") ||
			p.InReplyTo != sent.MessageID || len(p.Attachments) != 1 || p.Attachments[0].Name != "Antwort.txt" || p.Attachments[0].Text != "ä" {
			t.Errorf("mailparser reads for %s: %+v", user, p)
		}
		for _, h := range p.Headers {
			if strings.EqualFold(h, "bcc") {
				t.Errorf("%s sees the field Bcc", user)
			}
		}
	}

	// The reply passed two servers of other vendors. Its DKIM signatures hold, and
	// its recipient can verify offline who approved it.
	var signing struct {
		Keys []struct{ Name, Record string }
	}
	if _, err := call(s.local(), "GET", "http://x/v1/signing/agents.internal", "", nil, &signing); err != nil {
		t.Fatal(err)
	}
	names := dnstest.Start(t)
	for _, k := range signing.Keys {
		if k.Record != "" {
			names.Add(t, k.Name+". TXT "+quoteTXT(k.Record))
		}
	}
	raw := d.read(t, "b", 1)
	var signatures []string
	playMail(t, "authenticate.mjs", map[string]any{"raw": raw, "dns": names.Addr}, &signatures)
	if want := []string{"pass ed25519-sha256 agents.internal", "pass rsa-sha256 agents.internal"}; !slices.Equal(signatures, want) {
		t.Errorf("mailauth says %q of the signatures, want %q", signatures, want)
	}
	dir := t.TempDir()
	keys, message1 := filepath.Join(dir, "keys.json"), filepath.Join(dir, "message.eml")
	resp, err := client.Get("http://" + s.web + "/.well-known/postern-keys.json")
	if err != nil {
		t.Fatal(err)
	}
	published, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string]string{keys: string(published), message1: raw} {
		if err := os.WriteFile(name, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command(s.bin, "verify-message", message1, "--keys", keys).CombinedOutput(); err != nil || !strings.Contains(string(out), agent) {
		t.Errorf("verify-message: %v\n%s", err, out)
	}
	if err := os.WriteFile(message1, []byte(strings.Replace(raw, "Subject: ", "Subject: not ", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(s.bin, "verify-message", message1, "--keys", keys).CombinedOutput(); err == nil {
		t.Errorf("verify-message takes a message with another subject:\n%s", out)
	}

	// The agent's program sends as any program does, with a library that knows
	// nothing of Postern. What it sends waits like everything else.
	var held struct{ Response string }
	playMail(t, "send.mjs", map[string]any{
		"server": submissionsLine.FindStringSubmatch(s.log.String())[1], "secure": true, "auth": map[string]string{"user": agent, "pass": key},
		"mail": map[string]any{"from": "Agent <" + agent + ">", "to": "b@" + postfixtest.Domain, "subject": "from a program", "text": "Zahlen: ä\n"},
	}, &held)
	m := heldLine.FindStringSubmatch(held.Response)
	if m == nil {
		t.Fatalf("nodemailer was told %q", held.Response)
	}
	s.mustCLI("approve", m[1])
	if raw := d.read(t, "b", 2); !strings.Contains(raw, "Subject: from a program") {
		t.Errorf("b got %s", raw)
	}

	// Who is not there is not taken: Postfix itself tells the person.
	playMail(t, "send.mjs", map[string]any{"server": addr, "mail": map[string]any{"from": "b@" + postfixtest.Domain, "to": "nobody@agents.internal", "subject": "x", "text": "y"}}, &sent)
	if bounce := d.read(t, "b", 3); !strings.Contains(bounce, "5.1.1") || !strings.Contains(bounce, "nobody@agents.internal") {
		t.Errorf("the bounce for nobody: %s", bounce)
	}
}

// quoteTXT writes text as the strings of a TXT record, of which each holds 255 bytes.
func quoteTXT(text string) string {
	var parts []string
	for len(text) > 250 {
		parts, text = append(parts, `"`+text[:250]+`"`), text[250:]
	}
	return strings.Join(append(parts, `"`+text+`"`), " ")
}
