package smtpserver

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
)

const inboxKey = "pib_key"

func authenticate(_ context.Context, user, password string, _ Peer) (Account, error) {
	switch {
	case user == "broken":
		return Account{}, errors.New("the secret database is down")
	case user != inbox && user != "ibx_1" || password != inboxKey:
		return Account{}, fmt.Errorf("%s: %w", user, ErrCredentials)
	}
	return Account{Who: auth.Principal{Kind: auth.Agent, ID: "key_1", Project: "prj", Inbox: "ibx_1"}, Address: inbox}, nil
}

func (b *box) submit(ctx context.Context, a Account, env mail.Envelope, _ Peer) (string, error) {
	if strings.Contains(string(env.Raw), "Subject: denied") {
		return "", &RefusalError{Code: 550, Enhanced: [3]int{5, 7, 1}, Reason: "denied by policy: not to there"}
	}
	return b.propose(ctx, a.Who, target, env)
}

func submission(t testing.TB, b *box, change func(*Config)) *Server {
	return newServer(t, b, func(c *Config) {
		c.Authenticate, c.Submit, c.TLS = authenticate, b.submit, testTLS(t)
		if change != nil {
			change(c)
		}
	})
}

// serveOn starts a door and returns its address.
func serveOn(t testing.TB, s *Server, run func(net.Listener) error) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- run(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return l.Addr().String()
}

func starttls(s *Server) func(net.Listener) error {
	return func(l net.Listener) error { return s.ServeSubmission(l, false) }
}

func implicit(s *Server) func(net.Listener) error {
	return func(l net.Listener) error { return s.ServeSubmission(l, true) }
}

func plainly(user, password string) string {
	return "AUTH PLAIN " + base64.StdEncoding.EncodeToString([]byte("\x00"+user+"\x00"+password))
}

// encrypt continues a conversation over TLS.
func (c *client) encrypt() {
	c.Conn = tls.Client(c.Conn, &tls.Config{InsecureSkipVerify: true})
	c.r = bufio.NewReader(c.Conn)
}

const submitted = "From: Agent <" + inbox + ">\r\nTo: b@x.example\r\nSubject: s\r\n\r\nhello\r\n."

func TestSubmission(t *testing.T) {
	b := &box{}
	s := submission(t, b, nil)
	for name, begin := range map[string]func() *client{
		"STARTTLS": func() *client {
			c := dial(t, serveOn(t, s, starttls(s)))
			c.want("", "220 ")
			c.want("EHLO me.example", "250-")
			c.want("STARTTLS", "220 ")
			c.encrypt()
			return c
		},
		"implicit TLS": func() *client {
			s := submission(t, b, nil)
			c := dial(t, serveOn(t, s, implicit(s)))
			c.encrypt()
			c.want("", "220 ")
			return c
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := len(b.all())
			c := begin()
			if got := c.want("EHLO me.example", "250-"); !strings.Contains(got, "AUTH PLAIN LOGIN\r\n") || strings.Contains(got, "STARTTLS") {
				t.Errorf("it offers %q", got)
			}
			c.want("MAIL FROM:<"+inbox+">", "530 5.7.0 ")
			c.want(plainly(inbox, inboxKey), "235 ")
			c.want(plainly(inbox, inboxKey), "503 ")
			c.want("MAIL FROM:<ceo@bank.example>", "553 5.7.1 this key may only send as <"+inbox+">")
			c.want("MAIL FROM:<>", "553 5.7.1 ")
			c.want("MAIL FROM:<AGENT@p.example>", "250 ")
			c.want("RCPT TO:<b@x.example>", "250 ")
			c.want("DATA", "354 ")
			c.want(submitted, "250 2.0.0 held for approval as act_TEST\r\n")
			c.want("MAIL FROM:<"+inbox+">", "250 ")
			c.want("RCPT TO:<b@x.example>", "250 ")
			c.want("DATA", "354 ")
			c.want(strings.Replace(submitted, "Subject: s", "Subject: denied", 1), "550 5.7.1 denied by policy: not to there\r\n")
			c.want("MAIL FROM:<"+inbox+">", "250 ")
			c.want("RCPT TO:<b@x.example>", "250 ")
			c.want("DATA", "354 ")
			c.want(strings.Replace(submitted, "Agent <"+inbox, "Boss <ceo@bank.example", 1), "550 5.6.0 ")
			c.want("QUIT", "221 ")
			if got := b.all(); len(got) != before+1 || strings.Contains(string(got[before].Raw), "Received:") {
				t.Errorf("got %d messages, the last %q", len(got)-before, got[len(got)-1].Raw)
			}
		})
	}
}

func TestSubmissionLogin(t *testing.T) {
	b := &box{}
	s := submission(t, b, nil)
	addr := serveOn(t, s, starttls(s))
	b64 := func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }
	begin := func() *client { // from this machine even in the clear
		c := dial(t, addr)
		c.want("", "220 ")
		c.want("EHLO me.example", "250-")
		return c
	}
	c := begin()
	c.want("AUTH LOGIN", "334 "+b64("Username:"))
	c.want(b64("ibx_1"), "334 "+b64("Password:"))
	c.want(b64(inboxKey), "235 ")
	c.want("MAIL FROM:<"+inbox+">", "250 ")

	c = begin()
	c.want("AUTH LOGIN "+b64(inbox), "334 "+b64("Password:"))
	c.want(b64(inboxKey), "235 ")

	c = begin()
	c.want("AUTH PLAIN", "334")
	c.want(b64("\x00"+inbox+"\x00"+inboxKey), "235 ")

	c = begin()
	c.want("AUTH PLAIN "+b64("boss@p.example\x00"+inbox+"\x00"+inboxKey), "535 5.7.8 ")
	c.want("AUTH PLAIN "+b64("nonsense"), "501 ")
	c.want("AUTH XOAUTH2 "+b64("x"), "504 ")
	c.want("AUTH LOGIN", "334 ")
	c.want("*", "501 ")
	c.want(plainly("broken", inboxKey), "454 4.7.0 temporary failure")
	c.want(plainly(inbox, "wrong"), "535 5.7.8 ")
	c.want(plainly("nobody", inboxKey), "535 5.7.8 ")
	c.want(plainly(inbox, inboxKey[:4]), "535 5.7.8 ")
	c.want("NOOP", "421 ") // three wrong ones are enough
}

// TestClearPassword: an address that is not this machine gets no AUTH in the clear.
func TestClearPassword(t *testing.T) {
	b := &box{}
	s := submission(t, b, nil)
	k := s.newLink(&memConn{addr: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 1}})
	k.door = &door{submission: true}
	ses := submitSession{&session{s: s, link: k}}
	if got := ses.AuthMechanisms(); len(got) != 0 {
		t.Errorf("in the clear it offers %q", got)
	}
	if _, err := ses.Auth("PLAIN"); err == nil || !strings.Contains(err.Error(), "encryption is required") {
		t.Errorf("in the clear: %v", err)
	}
	if err := ses.Mail(inbox, nil); err == nil || !strings.Contains(err.Error(), "begin with STARTTLS") {
		t.Errorf("in the clear: %v", err)
	}
	ses.isTLS = true
	if got := ses.AuthMechanisms(); len(got) != 2 {
		t.Errorf("over TLS it offers %q", got)
	}
}

// TestPlaintextBeforeTLS: commands that somebody on the way puts behind
// STARTTLS are not carried out once it is encrypted (CVE-2011-0411).
func TestPlaintextBeforeTLS(t *testing.T) {
	b := &box{}
	s := submission(t, b, nil)
	c := dial(t, serveOn(t, s, starttls(s)))
	c.want("", "220 ")
	c.want("EHLO me.example", "250-")
	c.want("STARTTLS\r\n"+plainly(inbox, inboxKey)+"\r\nMAIL FROM:<"+inbox+">", "220 ")
	c.encrypt()
	c.want("EHLO me.example", "250-")
	c.want("MAIL FROM:<"+inbox+">", "530 5.7.0 ")
}

// TestGuesserBlocksNobody: while guessers are being slowed down others send.
func TestGuesserBlocksNobody(t *testing.T) {
	b := &box{}
	s := submission(t, b, nil)
	s.tarLocal = true
	in := serve(t, s)
	for range 30 {
		s.names.NameGuess("127.0.0.1")
	}
	for range 5 { // once, unless the machine stands still for ten seconds
		guesser := dial(t, in)
		guesser.want("", "220 ")
		guesser.want("EHLO x", "250-")
		guesser.want("MAIL FROM:<a@x.example>", "250 ")
		guesser.send("RCPT TO:<nobody1@p.example>\r\n") // is answered after ten seconds
		eventually(t, "the guesser is slowed down", func() bool { return s.pausing.Load() > 0 })
		c := dial(t, in)
		c.begin("b@x.example", inbox)
		c.want("Subject: s\r\n\r\nx\r\n.", "250 ")
		if s.pausing.Load() > 0 {
			return
		}
	}
	t.Error("the guesser has been answered already")
}

// TestExtensions looks at what is offered, and that each does what it says.
func TestExtensions(t *testing.T) {
	b := &box{}
	s := submission(t, b, nil)
	c := dial(t, serve(t, s))
	c.want("", "220 mx.p.example ESMTP")
	ehlo := c.want("EHLO client.example", "250-")
	for _, word := range []string{"PIPELINING", "8BITMIME", "ENHANCEDSTATUSCODES", "CHUNKING", "STARTTLS", "SMTPUTF8", fmt.Sprintf("SIZE %d", mail.MaxMessageBytes)} {
		if !strings.Contains(ehlo, "-"+word+"\r\n") && !strings.Contains(ehlo, " "+word+"\r\n") {
			t.Errorf("%s is not offered:\n%s", word, ehlo)
		}
	}
	if strings.Contains(ehlo, "AUTH") {
		t.Errorf("AUTH is offered to other servers:\n%s", ehlo)
	}
	// SIZE refuses before the message is sent.
	c.want(fmt.Sprintf("MAIL FROM:<a@x.example> SIZE=%d", mail.MaxMessageBytes+1), "552 5.3.4 ")
	// A whole transaction ahead, in one piece, with BDAT in two chunks and letters of any kind.
	first, last := "Subject: Grüße\r\n\r\nhel", "lo ÿ\xff\r\n"
	c.send("MAIL FROM:<jürgen@x.example> BODY=8BITMIME SMTPUTF8 SIZE=100\r\nRCPT TO:<" + inbox + ">\r\n" +
		fmt.Sprintf("BDAT %d\r\n%sBDAT %d LAST\r\n%s", len(first), first, len(last), last) + "NOOP\r\n")
	for _, want := range []string{"250 2.0.0 ", "250 2.0.0 ", "250 2.0.0 ", "250 2.0.0 OK", "250 2.0.0 "} {
		if got := c.reply(); !strings.HasPrefix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if got := b.all(); len(got) != 1 || got[0].From != "jürgen@x.example" || !strings.HasSuffix(string(got[0].Raw), first+last) {
		t.Errorf("got %q", got)
	}
	// No relay, in no spelling.
	c.want("MAIL FROM:<a@x.example>", "250 ")
	for _, to := range []string{"b@x.example", "b%x.example@y.example", "@p.example:b@x.example", "\"b@x.example\"@y.example", "b@p.example.x.example", "b@[127.0.0.1]"} {
		if got := c.want("RCPT TO:<"+to+">", "5"); strings.HasPrefix(got, "250") {
			t.Errorf("it relays to %s", to)
		}
	}
}

// TestSwaksSubmission: a program that others wrote speaks TLS to it both ways.
func TestSwaksSubmission(t *testing.T) {
	path, err := exec.LookPath("swaks")
	if err != nil {
		t.Fatal("swaks is not installed: apt-get install --no-install-recommends swaks")
	}
	b := &box{}
	s, s2 := submission(t, b, nil), submission(t, b, nil)
	with, without := serveOn(t, s, starttls(s)), serveOn(t, s2, implicit(s2))
	for _, c := range []struct {
		name, server string
		args         []string
		fails        bool
		want         string
	}{
		{"STARTTLS, PLAIN", with, []string{"--tls", "--auth", "PLAIN", "--auth-user", inbox, "--auth-password", inboxKey}, false, "250 2.0.0 held for approval as act_TEST"},
		{"STARTTLS, LOGIN", with, []string{"--tls", "--auth", "LOGIN", "--auth-user", inbox, "--auth-password", inboxKey}, false, "250 2.0.0 held for approval as act_TEST"},
		{"TLS", without, []string{"--tlsc", "--auth", "PLAIN", "--auth-user", inbox, "--auth-password", inboxKey}, false, "250 2.0.0 held for approval as act_TEST"},
		{"a wrong key", without, []string{"--tlsc", "--auth", "PLAIN", "--auth-user", inbox, "--auth-password", "x"}, true, "535 5.7.8"},
		{"none", with, []string{"--tls"}, true, "530 5.7.0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			host, port, _ := net.SplitHostPort(c.server)
			args := append([]string{"--server", host, "--port", port, "--timeout", "60", "--from", inbox, "--to", "b@x.example"}, c.args...)
			out, err := exec.CommandContext(t.Context(), path, args...).CombinedOutput()
			if (err != nil) != c.fails || !strings.Contains(string(out), c.want) {
				t.Errorf("got %v\n%s\nwant %q", err, out, c.want)
			}
		})
	}
}
