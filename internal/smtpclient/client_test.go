package smtpclient

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/mail"
	"postern/internal/smtpserver"
)

// peer is a mail server that answers as a test says: by the first word of the
// command, "." for the final dot, "" for the connection. A missing word is
// answered with 250. An answer "drop" hangs up, "wait" never answers.
type peer struct {
	answers map[string]string
	tls     *tls.Config
	onDot   func()

	mu       sync.Mutex
	messages [][]byte // as they came between DATA and dot, with the stuffing undone
	commands []string
}

func (p *peer) start(t *testing.T) string {
	t.Helper()
	return p.startAt(t, "127.0.0.1:0")
}

func (p *peer) startAt(t *testing.T, addr string) string {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer context.AfterFunc(ctx, func() { c.Close() })()
				defer c.Close()
				p.converse(ctx, c)
			})
		}
	})
	t.Cleanup(func() { l.Close(); cancel(); wg.Wait() })
	return l.Addr().String()
}

func (p *peer) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.messages)
}

func (p *peer) converse(ctx context.Context, c net.Conn) {
	r := bufio.NewReader(c)
	answer := func(word, def string) bool {
		a, ok := p.answers[word]
		if !ok {
			a = def
		}
		switch a {
		case "drop":
			return false
		case "wait":
			<-ctx.Done()
			return false
		}
		_, err := io.WriteString(c, a+"\r\n")
		return err == nil
	}
	if !answer("", "220 peer.example") {
		return
	}
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		p.mu.Lock()
		p.commands = append(p.commands, strings.TrimSpace(line))
		p.mu.Unlock()
		word, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch word {
		case "EHLO":
			def := "250-peer.example\r\n250-8BITMIME\r\n250-SMTPUTF8\r\n250 SIZE 0"
			if _, isTLS := c.(*tls.Conn); p.tls != nil && !isTLS {
				def = "250-peer.example\r\n250 STARTTLS"
			}
			if !answer(word, def) {
				return
			}
		case "STARTTLS":
			if !answer(word, "220 go") {
				return
			}
			c = tls.Server(c, p.tls)
			r = bufio.NewReader(c)
		case "QUIT":
			answer(word, "221 bye")
			return
		case "DATA":
			a := p.answers["DATA"]
			if !answer(word, "354 go") {
				return
			}
			if a != "" && !strings.HasPrefix(a, "354") {
				continue
			}
			if p.answers["half"] != "" { // hangs up within the message
				io.CopyN(io.Discard, r, 1000)
				io.WriteString(c, p.answers["half"])
				return
			}
			var m []byte
			for {
				l, err := r.ReadBytes('\n')
				if err != nil {
					return
				}
				if string(l) == ".\r\n" {
					break
				}
				m = append(m, bytes.TrimPrefix(l, []byte("."))...)
			}
			p.mu.Lock()
			p.messages = append(p.messages, m)
			p.mu.Unlock()
			if p.onDot != nil {
				p.onDot()
			}
			if !answer(".", "250 2.0.0 taken as 1") {
				return
			}
		default:
			key := word
			if _, ok := p.answers[strings.TrimSpace(line)]; ok {
				key = strings.TrimSpace(line)
			}
			if !answer(key, "250 ok") {
				return
			}
		}
	}
}

func newClient(t *testing.T, cfg Config) *Client {
	t.Helper()
	cfg.Hostname = "postern.example"
	if cfg.CommandTimeout == 0 {
		cfg.CommandTimeout = 2 * time.Minute
	}
	if cfg.FinalTimeout == 0 {
		cfg.FinalTimeout = 2 * time.Minute
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func message(to ...string) mail.Envelope {
	if len(to) == 0 {
		to = []string{"b@y.example"}
	}
	return mail.Envelope{From: "a@x.example", To: to, Raw: []byte("From: a@x.example\r\nSubject: s\r\n\r\n.\r\n..\r\n.x\r\n\r\n.\r\n")}
}

func TestOutcomes(t *testing.T) {
	t.Parallel()
	eight := message()
	eight.Raw = []byte("From: a@x.example\r\n\r\n\xc3\xa4\r\n")
	utf8 := message("ä@y.example")
	big := message()
	big.Raw = append(big.Raw, bytes.Repeat([]byte("0123456789\r\n"), 500_000)...)
	for _, c := range []struct {
		name    string
		answers map[string]string
		env     mail.Envelope
		want    mail.Outcome
		detail  string
	}{
		{"accepted", nil, message(), mail.Accepted, "250 2.0.0 taken as 1"},
		{"accepted, long reply", map[string]string{".": "250-one\r\n250 two"}, message(), mail.Accepted, "250 one two"},
		{"only HELO", map[string]string{"EHLO": "502 what?"}, message(), mail.Accepted, "250"},
		{"greeting 5xx", map[string]string{"": "554 go away"}, message(), mail.Refused, "554 go away"},
		{"greeting 4xx", map[string]string{"": "421 busy"}, message(), mail.NotSent, "421 busy"},
		{"greeting drop", map[string]string{"": "drop"}, message(), mail.NotSent, "closed"},
		{"greeting silence", map[string]string{"": "wait"}, message(), mail.NotSent, "timeout"},
		{"greeting of HTTP", map[string]string{"": "HTTP/1.1 400 Bad Request"}, message(), mail.NotSent, "malformed"},
		{"EHLO refused", map[string]string{"EHLO": "550 not you"}, message(), mail.Refused, "550 not you"},
		{"MAIL 5xx", map[string]string{"MAIL": "550 5.7.1 no"}, message(), mail.Refused, "550 5.7.1 no"},
		{"MAIL 4xx", map[string]string{"MAIL": "451 4.7.1 greylisted"}, message(), mail.NotSent, "greylisted"},
		{"RCPT 5xx", map[string]string{"RCPT": "550 5.1.1 unknown"}, message(), mail.Refused, "5.1.1 unknown"},
		{"RCPT 4xx", map[string]string{"RCPT": "450 later"}, message(), mail.NotSent, "later"},
		{"RCPT drop", map[string]string{"RCPT": "drop"}, message(), mail.NotSent, "closed"},
		{"DATA 5xx", map[string]string{"DATA": "554 no valid recipients"}, message(), mail.Refused, "no valid"},
		{"DATA 4xx", map[string]string{"DATA": "451 not now"}, message(), mail.NotSent, "not now"},
		{"DATA drop", map[string]string{"DATA": "drop"}, message(), mail.NotSent, "closed"},
		{"DATA 250", map[string]string{"DATA": "250 what"}, message(), mail.NotSent, "250 what"},
		{"drop within the message", map[string]string{"half": "\r\n"}, big, mail.NotSent, ""},
		{"refused within the message", map[string]string{"half": "552 5.3.4 too big\r\n"}, big, mail.Refused, "too big"},
		{"dot 5xx", map[string]string{".": "554 5.7.1 spam"}, message(), mail.Refused, "spam"},
		{"dot 4xx", map[string]string{".": "451 4.3.0 disk"}, message(), mail.NotSent, "disk"},
		{"dot drop", map[string]string{".": "drop"}, message(), mail.Uncertain, "closed"},
		{"dot silence", map[string]string{".": "wait"}, message(), mail.Uncertain, "timeout"},
		{"dot garbage", map[string]string{".": "OK!"}, message(), mail.Uncertain, "malformed"},
		{"dot 354", map[string]string{".": "354 go on"}, message(), mail.Uncertain, "354"},
		{"dot two codes", map[string]string{".": "250-ok\r\n554 no"}, message(), mail.Uncertain, "malformed"},
		{"no 8BITMIME", map[string]string{"EHLO": "250 peer.example"}, eight, mail.Refused, "8BITMIME"},
		{"8BITMIME", nil, eight, mail.Accepted, ""},
		{"a prefix, and a dot behind it", nil, prefixed("X-Before: 1\r\n", ".X: 2\r\n\r\n.\r\n"), mail.Accepted, ""},
		{"8BITMIME of the prefix", map[string]string{"EHLO": "250 peer.example"}, prefixed("X-Before: \xc3\xa4\r\n", "X: 2\r\n\r\n"), mail.Refused, "SMTPUTF8"},
		{"too big with its prefix", map[string]string{"EHLO": "250-peer.example\r\n250 SIZE 20"}, prefixed("X-Before: 1\r\n", "X: 2\r\n\r\n"), mail.Refused, "at most 20"},
		{"no SMTPUTF8", map[string]string{"EHLO": "250-peer.example\r\n250 8BITMIME"}, utf8, mail.Refused, "SMTPUTF8"},
		{"SMTPUTF8", nil, utf8, mail.Accepted, ""},
		{"too big for SIZE", map[string]string{"EHLO": "250-peer.example\r\n250 SIZE 10"}, message(), mail.Refused, "at most 10"},
		{"hostile text", map[string]string{"RCPT": "550 \x1b[2J\u202e" + strings.Repeat("x", 2000)}, message(), mail.Refused, `\u{1b}[2J\u{202e}xxx`},
		{"endless reply", map[string]string{"": strings.Repeat("220-x\r\n", 10_000)}, message(), mail.NotSent, "too many lines"},
		{"endless line", map[string]string{"": "220 " + strings.Repeat("x", 100_000)}, message(), mail.NotSent, "too long"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := &peer{answers: c.answers}
			cfg := Config{Relay: p.start(t)}
			switch "wait" {
			case c.answers[""]:
				cfg.CommandTimeout = time.Second
			case c.answers["."]:
				cfg.FinalTimeout = time.Second
			}
			ds, err := newClient(t, cfg).Deliver(t.Context(), c.env)
			if err != nil {
				t.Fatal(err)
			}
			if len(ds) != 1 || ds[0].Recipient != c.env.To[0] || ds[0].Outcome != c.want || !strings.Contains(ds[0].Detail, c.detail) {
				t.Errorf("got %+v, want %s with %q", ds, c.want, c.detail)
			}
			if d := ds[0].Detail; len(d) > maxDetail+10 || strings.ContainsAny(d, "\r\n\x1b") {
				t.Errorf("detail is %d octets: %q", len(d), d)
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			if c.want == mail.Accepted && (len(p.messages) != 1 || !bytes.Equal(p.messages[0], slices.Concat(c.env.Prefix, c.env.Raw))) {
				t.Errorf("got %q, want %q", p.messages, c.env.Raw)
			}
		})
	}
}

func TestRecipientsAndRoutes(t *testing.T) {
	one := &peer{answers: map[string]string{"RCPT TO:<no@one.example>": "550 no", "RCPT TO:<later@one.example>": "450 later"}}
	two := &peer{answers: map[string]string{".": "drop"}}
	const closed = "127.0.0.1:1" // never assigned as an ephemeral port
	c := newClient(t, Config{Routes: map[string]string{"One.example": one.start(t), "two.example": two.start(t), "gone.example": closed}, NoRoute: "set --relay"})
	env := message("a@one.example", "no@one.example", "b@TWO.example", "later@one.example", "c@else.example", "d@gone.example", "e@one.example")
	ds, err := c.Deliver(t.Context(), env)
	if err != nil {
		t.Fatal(err)
	}
	want := []mail.Outcome{mail.Accepted, mail.Refused, mail.Uncertain, mail.NotSent, mail.Refused, mail.NotSent, mail.Accepted}
	for i, d := range ds {
		if d.Recipient != env.To[i] || d.Outcome != want[i] {
			t.Errorf("got %+v, want %s", d, want[i])
		}
	}
	if !strings.Contains(ds[4].Detail, "no route to else.example: set --relay") {
		t.Errorf("got %q, want the setting", ds[4].Detail)
	}
	if n, m := one.count(), two.count(); n != 1 || m != 1 {
		t.Errorf("got %d and %d messages, want one each", n, m)
	}
}

func TestDeliverRefusesEnvelope(t *testing.T) {
	p := &peer{}
	c := newClient(t, Config{Relay: p.start(t)})
	for name, env := range map[string]mail.Envelope{
		"bare LF":       {From: "a@x.example", To: []string{"b@y.example"}, Raw: []byte("Subject: x\r\n\r\na\n.\nMAIL FROM:<c@d>\r\n")},
		"bare CR":       {From: "a@x.example", To: []string{"b@y.example"}, Raw: []byte("a\rb\r\n")},
		"no last CR LF": {From: "a@x.example", To: []string{"b@y.example"}, Raw: []byte("a")},
		"command in To": {From: "a@x.example", To: []string{"b@y.example>\r\nRCPT TO:<c@d"}, Raw: []byte("a\r\n")},
		"in From":       {From: "a@x.example> SIZE=1", To: []string{"b@y.example"}, Raw: []byte("a\r\n")},
		"nobody":        {From: "a@x.example", Raw: []byte("a\r\n")},
	} {
		var fe *mail.FieldError
		if ds, err := c.Deliver(t.Context(), env); !errors.As(err, &fe) {
			t.Errorf("%s: got %v, %v, want a FieldError", name, ds, err)
		}
	}
	if len(p.commands) != 0 {
		t.Errorf("the server was told %q", p.commands)
	}
}

func prefixed(prefix, raw string) mail.Envelope {
	e := message()
	e.Prefix, e.Raw = []byte(prefix), []byte(raw)
	return e
}

// TestPrefix: what would end in the middle of a line is not sent.
func TestPrefix(t *testing.T) {
	p := &peer{}
	if ds, err := newClient(t, Config{Relay: p.start(t)}).Deliver(t.Context(), prefixed("X-Before: 1", "X: 2\r\n\r\n")); err == nil || len(p.messages) > 0 {
		t.Errorf("got %+v, %q; want an error", ds, p.messages)
	}
}

// TestContextIsIgnoredAfterTheFinalDot: a context that ends before the final dot
// certainly stops the delivery; one that ends after it must not turn a certain
// outcome into an uncertain one.
func TestContextIsIgnoredAfterTheFinalDot(t *testing.T) {
	t.Run("before", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		p := &peer{answers: map[string]string{"RCPT": "wait"}}
		c := newClient(t, Config{Relay: p.start(t), CommandTimeout: time.Minute})
		time.AfterFunc(100*time.Millisecond, cancel)
		ds, err := c.Deliver(ctx, message())
		if err != nil || ds[0].Outcome != mail.NotSent || !strings.Contains(ds[0].Detail, "canceled") {
			t.Errorf("got %+v, %v, want not_sent", ds, err)
		}
	})
	t.Run("already", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		ds, err := newClient(t, Config{Relay: (&peer{}).start(t)}).Deliver(ctx, message())
		if err != nil || ds[0].Outcome != mail.NotSent {
			t.Errorf("got %+v, %v, want not_sent", ds, err)
		}
	})
	t.Run("after", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		p := &peer{onDot: func() { cancel(); time.Sleep(200 * time.Millisecond) }}
		ds, err := newClient(t, Config{Relay: p.start(t)}).Deliver(ctx, message())
		if err != nil || ds[0].Outcome != mail.Accepted {
			t.Errorf("got %+v, %v, want accepted", ds, err)
		}
	})
}

func testTLS(t *testing.T) (*tls.Config, *x509.CertPool) {
	t.Helper()
	return testTLSFor(t)
}

// testTLSFor returns a server's certificate for 127.0.0.1 and names, and who
// vouches for it.
func testTLSFor(t *testing.T, names ...string) (*tls.Config, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: names, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12}, pool
}

func TestStartTLS(t *testing.T) {
	server, pool := testTLS(t)
	ehlo := "250-peer.example\r\n250 STARTTLS"
	for _, c := range []struct {
		name    string
		peer    *peer
		cfg     Config
		want    mail.Outcome
		secured bool
	}{
		{"opportunistic", &peer{tls: server}, Config{}, mail.Accepted, true},
		{"verified", &peer{tls: server}, Config{TLS: &tls.Config{RootCAs: pool}, RequireTLS: true}, mail.Accepted, true},
		{"unknown certificate", &peer{tls: server}, Config{TLS: &tls.Config{RootCAs: x509.NewCertPool()}, RequireTLS: true}, mail.NotSent, false},
		{"unknown certificate, not required", &peer{tls: server}, Config{TLS: &tls.Config{RootCAs: x509.NewCertPool()}}, mail.Accepted, false},
		{"not offered", &peer{}, Config{TLS: &tls.Config{}, RequireTLS: true}, mail.NotSent, false},
		{"offered and refused", &peer{answers: map[string]string{"EHLO": ehlo, "STARTTLS": "454 no"}}, Config{}, mail.Accepted, false},
		{"injected reply", &peer{answers: map[string]string{"STARTTLS": "220 go\r\n250 injected"}, tls: server}, Config{TLS: &tls.Config{RootCAs: pool}, RequireTLS: true}, mail.NotSent, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.cfg.Relay = c.peer.start(t)
			ds, err := newClient(t, c.cfg).Deliver(t.Context(), message())
			if err != nil || ds[0].Outcome != c.want {
				t.Fatalf("got %+v, %v, want %s", ds, err, c.want)
			}
			c.peer.mu.Lock()
			defer c.peer.mu.Unlock()
			all := strings.Join(c.peer.commands, "\n")
			if c.want == mail.NotSent && strings.Contains(all, "MAIL") {
				t.Errorf("MAIL was sent: %q", all)
			}
			if i := strings.Index(all, "EHLO"); c.secured && strings.Count(all[i:], "EHLO") != 2 {
				t.Errorf("got %q, want EHLO again inside TLS", all)
			}
		})
	}
}

// One of ours talks to the other of ours.
func TestToSMTPServer(t *testing.T) {
	serverTLS, _ := testTLS(t)
	var mu sync.Mutex
	var got []mail.Envelope
	s, err := smtpserver.New(slog.New(slog.NewTextHandler(t.Output(), nil)), smtpserver.Config{
		Hostname: "mx.y.example", TLS: serverTLS,
		Accepts: func(_ context.Context, rcpt string) error {
			if strings.HasPrefix(rcpt, "nobody") {
				return smtpserver.ErrNoMailbox
			}
			return nil
		},
		Deliver: func(_ context.Context, env mail.Envelope, _ smtpserver.Peer) error {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, env)
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	c := newClient(t, Config{Relay: l.Addr().String()})

	file := make([]byte, 5<<20)
	if _, err := rand.Read(file); err != nil {
		t.Fatal(err)
	}
	env, err := mail.Compose(mail.Draft{
		From: "a@x.example", To: []string{"b@y.example", "nobody@y.example"}, Bcc: []string{"ä@y.example"}, Subject: "Grüße",
		Text: ".\n..\nFrom here\n" + strings.Repeat(".", 70), Attachments: []mail.Attachment{{Name: "x.bin", Data: file}},
	}, time.Now(), "x.example")
	if err != nil {
		t.Fatal(err)
	}
	ds, err := c.Deliver(t.Context(), env)
	if err != nil {
		t.Fatal(err)
	}
	if ds[0].Outcome != mail.Accepted || ds[1].Outcome != mail.Refused || !strings.Contains(ds[1].Detail, "5.1.1") || ds[2].Outcome != mail.Accepted {
		t.Errorf("got %+v", ds)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := errors.Join(s.Shutdown(ctx), <-done); err != nil {
		t.Error(err)
	}
	if len(got) != 1 {
		t.Fatalf("got %d messages, want 1", len(got))
	}
	if !bytes.HasSuffix(got[0].Raw, append([]byte("\r\n"), env.Raw...)) {
		t.Error("the message was changed on the way")
	}
	if !bytes.Contains(got[0].Raw[:400], []byte("with ESMTPS")) {
		t.Errorf("got %q, want TLS", got[0].Raw[:400])
	}
	m, err := mail.Parse(got[0].Raw)
	if err != nil || len(m.Attachments) != 1 || !bytes.Equal(m.Attachments[0].Data, file) {
		t.Errorf("the attachment was changed: %v", err)
	}
}

func TestNewRefuses(t *testing.T) {
	for name, cfg := range map[string]Config{
		"no name":   {},
		"bad route": {Hostname: "a", Routes: map[string]string{"x": "no-port"}},
		"bad relay": {Hostname: "a", Relay: "no-port"},
		"no TLS":    {Hostname: "a", RequireTLS: true},
	} {
		if _, err := New(cfg); err == nil {
			t.Errorf("%s: got nil, want an error", name)
		}
	}
}

// A reply may be anything.
func FuzzReply(f *testing.F) {
	for _, s := range []string{"250 ok\r\n", "250-a\r\n250 b\r\n", "250\n", "999 x\r\n", "2\xff0 x\r\n", "250-x\r\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		v := &conversation{r: bufio.NewReaderSize(bytes.NewReader(in), maxReplyLine)}
		code, lines, err := v.reply()
		if err == nil && (code < 200 || code > 599 || len(lines) == 0) {
			t.Errorf("got %d %q", code, lines)
		}
		_ = fmt.Sprint(lines)
	})
}
