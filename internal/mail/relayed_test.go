package mail

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

// TestRelayedMailIsLetIn: what Postfix hands on for cron, with where it was and with
// fields that stand there again. Where it was does not leave; the rest is shown.
func TestRelayedMailIsLetIn(t *testing.T) {
	raw := "Return-Path: <" + genInbox + ">\nX-Original-To: root\nDelivered-To: root@host\nReceived: by host (Postfix, from userid 0)\n\tid 0A1; Sun, 22 Nov 2026 12:00:00 +0000 (UTC)\nReceived: from a by b\n" +
		"From: " + genInbox + "\nTo: b@x.example\nSubject: Cron <root@host> run\nMIME-Version: 1.0\nContent-Type: text/plain; charset=ANSI_X3.4-1968\nContent-Transfer-Encoding: 8bit\n" +
		"X-Cron-Env: <SHELL=/bin/sh>\nX-Cron-Env: <HOME=/root>\nX-Cron-Env: <LOGNAME=root>\n\nhello\n"
	e, err := FromCaptured(crlf(raw), genInbox, []string{"b@x.example"}, genInbox, now)
	if err != nil {
		t.Fatal(err)
	}
	for _, gone := range []string{"Received", "Return-Path", "Delivered-To", "X-Original-To", "userid"} {
		if bytes.Contains(e.Raw, []byte(gone)) {
			t.Errorf("%s leaves", gone)
		}
	}
	s, err := Describe(e)
	if err != nil || s.Unclear != "" {
		t.Fatal(s.Unclear, err)
	}
	for _, want := range []string{"SHELL=/bin/sh", "HOME=/root", "LOGNAME=root"} {
		if !strings.Contains(fmt.Sprint(s.Fields), want) {
			t.Errorf("%s leaves and is not shown", want)
		}
	}
	for name, fields := range map[string]string{
		"a usual field":      "X-Mailer: a\nX-Mailer: b\n",
		"too many of a name": strings.Repeat("X-A: b\n", maxAgain+2),
		"a list's way out":   "List-Unsubscribe: <mailto:a@b.example>\nList-Unsubscribe: <mailto:c@d.example>\n",
	} {
		if _, err := FromCaptured(crlf("From: "+genInbox+"\n"+fields+"\nhello\n"), genInbox, []string{"b@x.example"}, genInbox, now); err == nil {
			t.Errorf("%s more than once is let in", name)
		}
	}
	if _, err := FromCaptured(crlf("From: "+genInbox+"\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=x\n\n"+strings.Repeat("--x\nContent-Description:"+strings.Repeat(" words\n", 4000)+"\nhello\n", 12)+"--x--\n"), genInbox, []string{"b@x.example"}, genInbox, now); err == nil || !strings.Contains(err.Error(), "with those of the other parts") {
		t.Errorf("headers without end are let in: %v", err)
	}
}

// TestPicturesAreUsual: the id of a picture in the text is shown and is nothing to
// look at; a long one is.
func TestPicturesAreUsual(t *testing.T) {
	for id, usual := range map[string]bool{"<a@b>": true, "<" + strings.Repeat("secret", 50) + "@b>": false} {
		s, err := Describe(Envelope{From: genInbox, To: []string{"b@x.example"}, Raw: crlf("From: " + genInbox + "\nTo: b@x.example\nMIME-Version: 1.0\nContent-Type: multipart/related; boundary=x\n\n--x\nContent-Type: text/html\n\n<img src=cid:a@b>\n--x\nContent-Type: image/png; name=a.png\nContent-ID: " + id + "\n\nx\n--x--\n")})
		if err != nil || len(s.Fields) != 1 || s.Fields[0].Usual != usual {
			t.Errorf("%.20q: %+v, %q, %v", id, s.Fields, s.Unclear, err)
		}
	}
}
