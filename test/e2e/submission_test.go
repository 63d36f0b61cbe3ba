package e2e

import (
	"bufio"
	"crypto/tls"
	"encoding/base64"
	"io"
	"net/http"
	"net/textproto"
	"regexp"
	"strings"
	"testing"
)

var (
	submissionLine  = regexp.MustCompile(`submission +(\S+) `)
	submissionsLine = regexp.MustCompile(`the same, in TLS (\S+)`)
	heldLine        = regexp.MustCompile(`held for approval as (act_\w+)`)
)

// submitTo opens a conversation over TLS and authenticates.
func submitTo(t *testing.T, addr, address, key string, code int) *mailer {
	t.Helper()
	conn, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	m := &mailer{Conn: conn, replies: textproto.Reader{R: bufio.NewReader(conn)}}
	for _, step := range []struct {
		line string
		code int
	}{{"", 220}, {"EHLO program.example", 250}, {"AUTH PLAIN " + base64.StdEncoding.EncodeToString([]byte("\x00"+address+"\x00"+key)), code}} {
		if err := m.say(step.line, step.code); err != nil {
			t.Fatalf("%.10s: %v", step.line, err)
		}
	}
	return m
}

// TestSubmission: mail that a program submits over SMTP with an inbox's key is held
// like mail from every other API. Once approved it arrives, and the verified sender
// that its reader is shown is the right one.
func TestSubmission(t *testing.T) {
	t.Parallel()
	s := start(t, t.TempDir(), "--submission", "127.0.0.1:0", "--submissions", "127.0.0.1:0", "--cold", "--pool-max", "0")
	alice, aliceKey := s.inbox("alice")
	bob, bobKey := s.inbox("bobby")
	addr := submissionsLine.FindStringSubmatch(s.log.String())[1]
	if submissionLine.FindString(s.log.String()) == "" {
		t.Error("the server does not say where mail is submitted")
	}

	submitTo(t, addr, alice, bobKey, 535)
	submitTo(t, addr, alice, s.key, 535)
	m := submitTo(t, addr, alice, aliceKey, 235)
	if err := m.say("MAIL FROM:<"+bob+">", 553); err != nil {
		t.Error(err)
	}
	message := "From: Alice <" + alice + ">\r\nTo: " + bob + "\r\nSubject: hello\r\nMessage-ID: <one@agents.internal>\r\nDate: Sat, 21 Nov 2026 10:00:00 +0000\r\n\r\nhello\r\n."
	var ids []string
	for range 2 { // the second time as a client does that never heard the answer
		for _, line := range []string{"MAIL FROM:<" + alice + ">", "RCPT TO:<" + bob + ">"} {
			if err := m.say(line, 250); err != nil {
				t.Fatal(err)
			}
		}
		if err := m.say("DATA", 354); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Write([]byte(message + "\r\n")); err != nil {
			t.Fatal(err)
		}
		_, said, err := m.replies.ReadResponse(250)
		if err != nil || !heldLine.MatchString(said) {
			t.Fatalf("got %q, %v", said, err)
		}
		ids = append(ids, heldLine.FindStringSubmatch(said)[1])
	}
	if ids[0] != ids[1] {
		t.Errorf("sent once, held twice: %q", ids)
	}
	s.mustCLI("approve", ids[0])

	var list struct{ Messages []struct{ ID string } }
	eventually(t, "it has arrived", func() bool {
		_, err := call(client, "GET", "http://"+s.web+"/v1/inboxes/"+bob+"/messages", bobKey, nil, &list)
		return err == nil && len(list.Messages) == 1
	})
	raw := s.raw(bob, bobKey, list.Messages[0].ID)
	if !strings.HasPrefix(raw, "Authentication-Results: agents.internal;\r\n") || !strings.Contains(raw, "dkim=pass") || !strings.Contains(raw, "dmarc=pass") {
		t.Errorf("its reader is told:\n%.2000s", raw)
	}

	// An outsider forges our own Authentication-Results (RFC 8601, section 5).
	in, err := dialMail(s.smtp)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	for _, step := range []struct {
		line string
		code int
	}{{"MAIL FROM:<eve@example.com>", 250}, {"RCPT TO:<" + bob + ">", 250}, {"DATA", 354}, {
		"Authentication-Results: (me)\r\n \"agents.internal\"; dkim=pass header.d=bank.example; dmarc=pass\r\nAuthentication-Results: mx.other.example; dkim=pass\r\nFrom: eve@example.com\r\nSubject: trust me\r\n\r\nx\r\n.", 250,
	}} {
		if err := in.say(step.line, step.code); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "it has arrived", func() bool {
		_, err := call(client, "GET", "http://"+s.web+"/v1/inboxes/"+bob+"/messages", bobKey, nil, &list)
		return err == nil && len(list.Messages) == 2
	})
	for _, msg := range list.Messages {
		if raw := s.raw(bob, bobKey, msg.ID); strings.Contains(raw, "bank.example") || strings.Contains(raw, "trust me") && !strings.Contains(raw, "mx.other.example") {
			t.Errorf("its reader is told:\n%.2000s", raw)
		}
	}
}

// raw returns a message's bytes.
func (s *server) raw(inbox, key, id string) string {
	s.t.Helper()
	req, err := http.NewRequest(http.MethodGet, "http://"+s.web+"/v1/inboxes/"+inbox+"/messages/"+id+"/raw", http.NoBody)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+key)
	resp, err := client.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		s.t.Fatalf("raw: %d, %v", resp.StatusCode, err)
	}
	return string(b)
}
