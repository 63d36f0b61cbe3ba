package e2e

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/smtp"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"postern/internal/imapmail/dovecottest"
	"postern/internal/smtpclient/postfixtest"
)

const connectedAddress = "b@" + postfixtest.Domain

// TestCrashMailbox connects a mailbox at Dovecot and Postfix by the command line, and
// kills the server while mail arrives, an archiving is applied and an approved mail
// leaves. Each message is in the inbox once, and no mail leaves twice.
func TestCrashMailbox(t *testing.T) {
	t.Parallel()
	const kills, old = 5, 12
	d := dovecottest.Start(t, dovecottest.Config{})
	submission := fmt.Sprintf("127.0.0.1:%d", 20_000+rand.IntN(12_000))
	mx, _ := postfixtest.Run(t, postfixtest.Config{LMTP: d.LMTP, Submission: submission, SASL: d.SASL, Cert: d.Cert, Key: d.Key})
	var want []string
	letter := func(subject string) string {
		want = append(want, subject)
		return "From: ann@victim.example\r\nTo: " + connectedAddress + "\r\nSubject: " + subject + "\r\nMessage-ID: <" + subject + "@victim.example>\r\nDate: Mon, 23 Nov 2026 10:00:00 +0000\r\n\r\nThis is " + subject + ".\r\n"
	}
	for i := range old {
		d.Save(t, connectedAddress, "INBOX", letter(fmt.Sprint("old-", i)))
	}
	data := t.TempDir()
	flags := []string{"--mailbox-private", "--mailbox-roots", d.Cert, "--log", "warn", "--inbox-limits", "none", "--project-limits", "none", "--cold", "--pool-max", "0"}
	s := start(t, data, flags...)
	cmd := exec.Command(s.bin, "mailbox", "connect", "imap", "--address", connectedAddress, "--imap", d.IMAPS, "--smtp", submission, "--data", data)
	cmd.Env = append(os.Environ(), "POSTERN_MAILBOX_CREDENTIAL="+dovecottest.Password)
	out, err := cmd.CombinedOutput()
	key := inboxKeyText.FindString(string(out))
	if err != nil || key == "" || !strings.Contains(string(out), connectedAddress) || strings.Contains(string(out), dovecottest.Password) {
		t.Fatalf("connect: %v\n%s", err, out)
	}
	if out := s.mustCLI("mailbox", "list"); !strings.Contains(out, connectedAddress) || !strings.Contains(out, "imap") {
		t.Errorf("list: %s", out)
	}

	box := &connectedInbox{t: t, s: s, key: key}
	sent := map[string]string{} // subject → action
	var archived []string
	for round := range kills {
		subject := fmt.Sprint("n-", round)
		sent[subject] = box.send(subject)
		if err := smtp.SendMail(mx, nil, "ann@victim.example", []string{connectedAddress}, []byte(letter(fmt.Sprint("new-", round)))); err != nil {
			t.Fatal(err)
		}
		var next *connectedMessage
		look := func() bool {
			list := box.messages()
			if i := slices.IndexFunc(list, func(m connectedMessage) bool {
				return strings.HasPrefix(m.Subject, "old-") && !slices.Contains(archived, m.Subject)
			}); i >= 0 {
				next = &list[i]
			}
			return next != nil
		}
		switch {
		case round == kills-1 && len(archived) == 0: // every kill came before the first import
			eventually(t, "a message of before is in the inbox", look)
		case round > 0:
			look()
		}
		if next != nil {
			agent := &gmailAgent{t: t, s: s, key: key}
			agent.action("email_archive", map[string]any{"id": next.ID})
			archived = append(archived, next.Subject)
		}
		box.approve(sent[subject])
		time.Sleep(rand.N(time.Duration(round+1) * 80 * time.Millisecond)) // from before it leaves to after
		_ = s.kill(syscall.SIGKILL)
		s = start(t, data, flags...)
		box.s = s
	}

	eventually(t, "each message is in the inbox", func() bool {
		list := box.messages()
		return !slices.ContainsFunc(want, func(subject string) bool {
			return !slices.ContainsFunc(list, func(m connectedMessage) bool { return m.Subject == subject })
		})
	})
	sent["last"] = box.send("last") // which no kill interrupts
	box.approve(sent["last"])
	states := map[string]int{}
	for subject, id := range sent {
		state := ""
		eventually(t, subject+" is decided about", func() bool {
			state = box.state(id)
			return state != "approved" && state != "executing"
		})
		states[state]++
		if subject == "last" && state != "done" {
			t.Errorf("the last mail is %s, want done", state)
		}
		if state == "done" {
			eventually(t, subject+" arrives", func() bool { return lies(t, d, "c", "INBOX", subject) > 0 })
		}
		if n := lies(t, d, "c", "INBOX", subject); n > 1 || state != "done" && state != "unknown" {
			t.Errorf("%s was approved, is %s, and arrived %d times", subject, state, n)
		}
	}
	for _, subject := range archived {
		eventually(t, subject+" is archived at Dovecot", func() bool {
			return lies(t, d, "b", "Archive", subject) == 1 && lies(t, d, "b", "INBOX", subject) == 0
		})
	}
	if len(archived) == 0 {
		t.Error("nothing was archived")
	}
	count := map[string]int{}
	for _, m := range box.messages() {
		if count[m.Subject]++; count[m.Subject] > 1 {
			t.Errorf("%s is in the inbox %d times", m.Subject, count[m.Subject])
		}
	}
	t.Logf("states of what was approved: %v; %d archived", states, len(archived))

	if out := s.mustCLI("mailbox", "show", connectedAddress); !strings.Contains(out, d.IMAPS) || strings.Contains(out, dovecottest.Password) {
		t.Errorf("show: %s", out)
	}
	if out := s.mustCLI("mailbox", "disconnect", connectedAddress); !strings.Contains(out, "revoked") {
		t.Errorf("disconnect: %s", out)
	}
	if n := len(box.messages()); n < len(want) {
		t.Errorf("after the end of the connection %d messages are left, want %d", n, len(want))
	}
	if text := s.mustCLI("audit", "verify"); !strings.Contains(text, "holds") {
		t.Error(text)
	}
}

// lies returns how many messages with a subject a folder has.
func lies(t *testing.T, d dovecottest.Server, user, folder, subject string) (n int) {
	t.Helper()
	for _, m := range d.Messages(t, user, folder) {
		if bytes.Contains(m, []byte("Subject: "+subject+"\r\n")) {
			n++
		}
	}
	return n
}

// A connectedInbox is what an agent and a reviewer do with a connected mailbox.
type connectedInbox struct {
	t   *testing.T
	s   *server
	key string
}

type connectedMessage struct {
	ID, Subject string
}

func (c *connectedInbox) messages() []connectedMessage {
	c.t.Helper()
	var list struct{ Messages []connectedMessage }
	if status, err := call(http.DefaultClient, "GET", "http://"+c.s.web+"/v1/inboxes/"+connectedAddress+"/messages?limit=100", c.key, nil, &list); err != nil || status != http.StatusOK {
		c.t.Fatalf("list messages: status %d, %v", status, err)
	}
	return list.Messages
}

// send proposes a mail and returns its action.
func (c *connectedInbox) send(subject string) string {
	c.t.Helper()
	var a struct{ ID string }
	status, err := call(http.DefaultClient, "POST", "http://"+c.s.web+"/v1/inboxes/"+connectedAddress+"/messages", c.key,
		map[string]any{"to": []string{"c@" + postfixtest.Domain}, "subject": subject, "text": "x"}, &a)
	if err != nil || status != http.StatusAccepted {
		c.t.Fatalf("propose %s: status %d, %v", subject, status, err)
	}
	return a.ID
}

func (c *connectedInbox) approve(id string) {
	c.t.Helper()
	var full struct {
		Version int64
		Digest  string
	}
	if _, err := call(c.s.local(), "GET", "http://x/v1/actions/"+id, "", nil, &full); err != nil {
		c.t.Fatal(err)
	}
	status, err := call(c.s.local(), "POST", "http://x/v1/actions/"+id+"/decision", "", map[string]any{"version": full.Version, "digest": full.Digest, "approve": true}, nil)
	if err != nil || status != http.StatusOK {
		c.t.Fatalf("approve %s: status %d, %v", id, status, err)
	}
}

func (c *connectedInbox) state(id string) string {
	c.t.Helper()
	var a struct{ State string }
	if status, err := call(c.s.local(), "GET", "http://x/v1/actions/"+id, "", nil, &a); err != nil || status != http.StatusOK {
		c.t.Fatalf("%s: status %d, %v", id, status, err)
	}
	return a.State
}
