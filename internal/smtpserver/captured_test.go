package smtpserver

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net/smtp"
	"strings"
	"sync"
	"testing"
)

// A syncBuffer is a log that several goroutines write.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// TestCapturedBareLF: from inside, LF ends a line, as Python's sendmail(m.as_bytes()) and
// curl send it. Only CR LF dot CR LF ends the message.
func TestCapturedBareLF(t *testing.T) {
	head := "From: " + inbox + "\nTo: a@x.example\nSubject: s\nDate: d\nMessage-ID: <i@x>\n"
	wanted := strings.ReplaceAll(head, "\n", "\r\n") + "\r\n"
	for _, tt := range []struct{ name, body, want string }{
		{"lines", "one\ntwo\n", "one\r\ntwo\r\n"},
		{"mixed", "one\r\ntwo\nthree\r\n", "one\r\ntwo\r\nthree\r\n"},
		{"empty lines", "one\n\n\r\n\ntwo\n", "one\r\n\r\n\r\n\r\ntwo\r\n"},
		{"a dot that Python doubled", "one\n..two\n....\n..\n", "one\r\n.two\r\n...\r\n.\r\n"},
		{"a dot that curl did not", "one\n.two\n. \n", "one\r\n.two\r\n. \r\n"},
		{"a dot after CR LF", "one\r\n..two\r\n...\r\n", "one\r\n.two\r\n..\r\n"},
		{"dots within a line", "a..b\n x..\n", "a..b\r\n x..\r\n"},
		// The attack: a second message, in the eyes of a server that ends lines at LF.
		{"smuggled", "one\n.\nMAIL FROM:<" + inbox + ">\nRCPT TO:<eve@evil.example>\nDATA\n", "one\r\n.\r\nMAIL FROM:<" + inbox + ">\r\nRCPT TO:<eve@evil.example>\r\nDATA\r\n"},
		{"smuggled, CR LF after", "one\n.\r\nMAIL FROM:<" + inbox + ">\r\n", "one\r\n.\r\nMAIL FROM:<" + inbox + ">\r\n"},
		{"smuggled, CR LF before", "one\r\n.\nMAIL FROM:<" + inbox + ">\r\n", ""}, // go-smtp takes that dot off, and then refuses nothing
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := &box{}
			c := dial(t, capture(t, newServer(t, b, nil)))
			c.hello()
			c.want("MAIL FROM:<"+inbox+">\r\nRCPT TO:<a@x.example>\r\nDATA", "250")
			c.want("", "250")
			c.want("", "354")
			body, more := tt.body, ""
			if !strings.HasSuffix(body, "\r\n") { // as clients do, who end a message at CR LF alone
				body, more = body+"\r\n", "\r\n"
			}
			c.want(head+"\n"+body+".", "250")
			all := b.all()
			if len(all) != 1 {
				t.Fatalf("%d messages", len(all))
			}
			if len(all[0].To) != 1 || all[0].To[0] != "a@x.example" {
				t.Errorf("to %q", all[0].To)
			}
			if got := string(all[0].Raw); tt.want != "" && got != wanted+tt.want+more {
				t.Errorf("got %q, want %q", got, wanted+tt.want+more)
			}
		})
	}
	// A bare CR is refused from everybody, and so is a bare LF outside.
	for _, tt := range []struct {
		body     string
		captured bool
	}{{"one\rtwo\r\n", true}, {"one\r\n.\rtwo\r\n", true}, {"one\r\r\n", true}, {"one\ntwo\r\n", false}, {"one\n.\r\ntwo\r\n", false}} {
		b := &box{}
		s := newServer(t, b, nil)
		addr, to := capture(t, s), "a@x.example"
		if !tt.captured {
			addr, to = serve(t, s), "a@p.example"
		}
		c := dial(t, addr)
		c.hello()
		c.want("MAIL FROM:<"+inbox+">", "250")
		c.want("RCPT TO:<"+to+">", "250")
		c.want("DATA", "354")
		c.want(strings.ReplaceAll(head, "\n", "\r\n")+"\r\n"+tt.body+".", "550 5.6.0")
		if len(b.all()) != 0 {
			t.Errorf("%q was accepted", tt.body)
		}
	}
}

// hello reads the greeting and says EHLO.
func (c *client) hello() {
	c.t.Helper()
	c.want("", "220")
	c.want("EHLO program", "250")
}

// TestCapturedAuth: any credential is accepted with each mechanism, and is not kept.
func TestCapturedAuth(t *testing.T) {
	var log syncBuffer
	b := &box{}
	s, err := New(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})), Config{Hostname: "mx.p.example", Propose: b.propose})
	if err != nil {
		t.Fatal(err)
	}
	addr := capture(t, s)
	const secret = "hunter2-hunter2"
	enc := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	for _, tt := range []struct {
		name  string
		lines []string // each but the last is answered with 334
	}{
		{"PLAIN", []string{"AUTH PLAIN " + enc("\x00me\x00"+secret)}},
		{"PLAIN in two steps", []string{"AUTH PLAIN", enc("\x00me\x00" + secret)}},
		{"LOGIN", []string{"AUTH LOGIN", enc("me"), enc(secret)}},
		{"LOGIN with the name", []string{"AUTH LOGIN " + enc("me"), enc(secret)}},
		{"CRAM-MD5", []string{"AUTH CRAM-MD5", enc("me " + strings.Repeat("0", 32))}},
		{"XOAUTH2", []string{"AUTH XOAUTH2 " + enc("user=me\x01auth=Bearer "+secret+"\x01\x01")}},
		{"OAUTHBEARER", []string{"AUTH OAUTHBEARER " + enc("n,a=me,\x01auth=Bearer "+secret+"\x01\x01")}},
		{"garbage", []string{"AUTH PLAIN " + enc(secret)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := dial(t, addr)
			c.hello()
			for i, l := range tt.lines {
				if i < len(tt.lines)-1 {
					c.want(l, "334")
					continue
				}
				c.want(l, "235")
			}
			c.want("AUTH PLAIN "+enc("\x00me\x00"+secret), "503") // RFC 4954: once
			c.want("MAIL FROM:<"+inbox+">", "250")
		})
	}
	c := dial(t, addr)
	c.want("", "220")
	said := c.want("EHLO program", "250")
	for _, want := range []string{"STARTTLS", "AUTH CRAM-MD5 PLAIN LOGIN XOAUTH2 OAUTHBEARER"} {
		if !strings.Contains(said, want) {
			t.Errorf("not offered: %s: %q", want, said)
		}
	}
	c.want("AUTH GSSAPI", "504")
	// The attack: a flood of attempts. It ends with the conversation's other commands.
	for n := 0; ; n++ {
		if n > maxReplies {
			t.Fatal("it has no end")
		}
		c.send("AUTH PLAIN !\r\n")
		if c.reply() == "" {
			break
		}
		if n%1000 == 0 {
			c.send(strings.Repeat("AUTH PLAIN !\r\n", 1000))
			for range 1000 {
				c.reply()
			}
		}
	}
	for _, s := range []string{secret, enc("\x00me\x00" + secret)} {
		if strings.Contains(log.String(), s) {
			t.Error("a password is in the log")
		}
	}
}

// TestCapturedSTARTTLS: Go's net/smtp sends in TLS, as it does to every server that
// offers it; and what was pipelined in plain text after STARTTLS does not count.
func TestCapturedSTARTTLS(t *testing.T) {
	b := &box{}
	addr := capture(t, newServer(t, b, nil))
	c, err := smtp.Dial(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.StartTLS(&tls.Config{InsecureSkipVerify: true}); err != nil {
		t.Fatal(err)
	}
	if ok, _ := c.Extension("STARTTLS"); ok {
		t.Error("STARTTLS is offered in TLS")
	}
	if err := c.Auth(smtp.PlainAuth("", "me", "secret", "127.0.0.1")); err != nil {
		t.Error(err)
	}
	if err := c.Mail(inbox); err != nil {
		t.Error(err)
	}

	// The attack (CVE-2011-0411): somebody between a program and its server puts
	// commands before the handshake, which the server takes for encrypted ones.
	in := dial(t, addr)
	in.hello()
	in.send("STARTTLS\r\nMAIL FROM:<" + inbox + ">\r\nRCPT TO:<eve@evil.example>\r\nDATA\r\n")
	if r := in.reply(); !strings.HasPrefix(r, "220") {
		t.Fatal(r)
	}
	secure := tls.Client(in.Conn, &tls.Config{InsecureSkipVerify: true})
	if err := secure.HandshakeContext(t.Context()); err == nil { // the commands were read ahead, and dropped
		in.Conn, in.r = secure, bufio.NewReader(secure)
		in.want("DATA", "502")
		in.want("EHLO program", "250")
		in.want("RCPT TO:<a@x.example>", "502") // there was no MAIL
	}
	if n := len(b.all()); n != 0 {
		t.Errorf("%d messages", n)
	}

	// A program that begins with TLS where nobody expects it gets an answer that no TLS
	// client takes for one.
	plain := dial(t, addr)
	if err := tls.Client(plain.Conn, &tls.Config{InsecureSkipVerify: true}).HandshakeContext(t.Context()); err == nil || !strings.Contains(err.Error(), "first record does not look like a TLS handshake") {
		t.Errorf("TLS on a port without: %v", err)
	}
}

// TestCapturedInTLS: a conversation that is in TLS already is offered no STARTTLS.
func TestCapturedInTLS(t *testing.T) {
	b := &box{}
	c := dial(t, capture(t, newServer(t, b, nil)))
	c.hello()
	c.want("STARTTLS", "220")
	secure := tls.Client(c.Conn, &tls.Config{InsecureSkipVerify: true})
	c.Conn, c.r = secure, bufio.NewReader(secure)
	c.want("EHLO program", "250")
	c.want("STARTTLS", "502")
	c.want(fmt.Sprintf("MAIL FROM:<%s>", inbox), "250")
}

// FuzzLineEnds compares what is gathered from a message with the lines that it has.
func FuzzLineEnds(f *testing.F) {
	for _, s := range []string{"a\nb\r\n", "\n..\n.\r\n", "a\r\n.\nb", "a\rb", "\n\n\n", "...\n...\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		for _, lenient := range []bool{true, false} {
			var buf bytes.Buffer
			ends, ok := lineEnds{lenient: lenient}, true
			for _, c := range in {
				if ok = ok && ends.add(&buf, c); !ok {
					break
				}
			}
			fixed := bytes.ReplaceAll(bytes.ReplaceAll(in, []byte("\r\n"), []byte("\n")), []byte("\n"), []byte("\r\n"))
			bareLF, bareCR := !bytes.Equal(fixed, in), bytes.Contains(bytes.ReplaceAll(bytes.TrimSuffix(in, []byte("\r")), []byte("\r\n"), nil), []byte("\r"))
			if want := !bareCR && (lenient || !bareLF); ok != want {
				t.Fatalf("%q, lenient %v: accepted %v, want %v", in, lenient, ok, want)
			}
			if ok && !bytes.Equal(buf.Bytes(), fixed) {
				t.Fatalf("%q: got %q, want %q", in, buf.Bytes(), fixed)
			}
		}
	})
}
