package smtpclient

import (
	"bytes"
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/mail"
	"postern/internal/smtpclient/postfixtest"
)

// stored returns the one message in a user's maildir, without the fields that
// Postfix puts before it, lines ending in CR LF again.
func stored(t *testing.T, maildir, user string, n int) [][]byte {
	t.Helper()
	var names []string
	for range 1200 { // a minute
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
	addr, maildir := postfixtest.Start(t)
	c := newClient(t, Config{Routes: map[string]string{"y.example": addr, "x.example": addr}, CommandTimeout: time.Minute, FinalTimeout: time.Minute})
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
