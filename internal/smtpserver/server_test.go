package smtpserver

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
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
)

// box takes what the server hands over.
type box struct {
	mu   sync.Mutex
	envs []mail.Envelope
	who  []auth.Principal
	dst  []netip.AddrPort
	err  error

	// If gate is not nil, deliver says in begun that it was called and waits for
	// gate.
	gate, begun chan struct{}
}

func (b *box) deliver(_ context.Context, env mail.Envelope, from Peer) error {
	if b.gate != nil {
		b.begun <- struct{}{}
		<-b.gate
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err != nil {
		return b.err
	}
	b.envs = append(b.envs, env)
	b.dst = append(b.dst, from.Remote)
	return nil
}

const inbox = "agent@p.example"

func (b *box) propose(_ context.Context, who auth.Principal, dst netip.AddrPort, env mail.Envelope) (string, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err != nil {
		return "", b.err
	}
	e, err := mail.FromCaptured(env.Raw, env.From, env.To, inbox, time.Now())
	if err != nil {
		return "", err
	}
	b.envs = append(b.envs, e)
	b.who = append(b.who, who)
	b.dst = append(b.dst, dst)
	return "held for approval as act_TEST", nil
}

func (b *box) all() []mail.Envelope {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.envs)
}

func accepts(_ context.Context, rcpt string) error {
	switch {
	case rcpt == "broken@p.example":
		return errors.New("the secret database is down")
	case !strings.HasSuffix(rcpt, "@p.example"):
		return fmt.Errorf("%s: %w", rcpt, ErrRelay)
	case strings.HasPrefix(rcpt, "nobody"), rcpt == "Postmaster@p.example":
		return ErrNoMailbox
	}
	return nil
}

func newServer(t testing.TB, b *box, change func(*Config)) *Server {
	t.Helper()
	cfg := Config{Hostname: "mx.p.example", Accepts: accepts, Deliver: b.deliver, Propose: b.propose}
	if change != nil {
		change(&cfg)
	}
	s, err := New(slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// serve starts an inbound server and returns its address.
func serve(t testing.TB, s *Server) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
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

// capture starts a listener whose connections are captured conversations, as
// the wall hands them over.
func capture(t testing.TB, s *Server) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	secure := testTLS(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { s.ServeConn(context.Background(), someone, target, c, nil, secure) })
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().String()
}

var (
	someone = auth.Principal{Kind: auth.Sandbox, ID: "i0123456789abcdefghij", Project: "prj", Inbox: "inb"}
	target  = netip.MustParseAddrPort("203.0.113.9:587")
)

// client speaks SMTP line by line.
type client struct {
	t testing.TB
	net.Conn
	r *bufio.Reader
}

func dial(t testing.TB, addr string) *client {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	return &client{t, c, bufio.NewReader(c)}
}

// reply reads one reply, all its lines; "" if the connection is closed.
func (c *client) reply() string {
	var all string
	for {
		line, err := c.r.ReadString('\n')
		if err != nil {
			return all
		}
		all += line
		if len(line) > 3 && line[3] == ' ' {
			return all
		}
	}
}

func (c *client) send(s string) {
	c.t.Helper()
	if _, err := c.Write([]byte(s)); err != nil {
		c.t.Logf("write: %v", err)
	}
}

func (c *client) want(send, prefix string) string {
	c.t.Helper()
	if send != "" {
		c.send(send + "\r\n")
	}
	got := c.reply()
	if !strings.HasPrefix(got, prefix) {
		c.t.Fatalf("%.60q: got reply %q, want %q", send, got, prefix)
	}
	return got
}

func (c *client) begin(from, to string) {
	c.t.Helper()
	c.want("", "220 mx.p.example ESMTP")
	c.want("EHLO client.example", "250-")
	c.want("MAIL FROM:<"+from+">", "250 2.")
	c.want("RCPT TO:<"+to+">", "250 2.")
	c.want("DATA", "354 ")
}

func TestInboundMessageIsDelivered(t *testing.T) {
	b := &box{}
	c := dial(t, serve(t, newServer(t, b, nil)))
	c.begin("", "a@P.example")
	c.want("From: x@y.example\r\nSubject: s\r\n\r\n..dot\r\n\xe4\r\n.", "250 2.0.0")
	c.want("QUIT", "221 ")
	envs := b.all()
	if len(envs) != 1 {
		t.Fatalf("got %d messages, want 1", len(envs))
	}
	e := envs[0]
	if e.From != "" || !slices.Equal(e.To, []string{"a@p.example"}) {
		t.Errorf("got envelope %q %q", e.From, e.To)
	}
	if want := "Return-Path: <>\r\nReceived: from client.example ([127.0.0.1])\r\n\tby mx.p.example with ESMTP id "; !bytes.HasPrefix(e.Raw, []byte(want)) {
		t.Errorf("got %q, want prefix %q", e.Raw, want)
	}
	if want := "\r\nFrom: x@y.example\r\nSubject: s\r\n\r\n.dot\r\n\xe4\r\n"; !bytes.HasSuffix(e.Raw, []byte(want)) {
		t.Errorf("got %q, want suffix %q", e.Raw, want)
	}
	m, err := mail.Parse(e.Raw)
	if err != nil || m.Subject != "s" || len(m.Header) != 4 {
		t.Errorf("got %+v, %v", m, err)
	}
}

func TestInboundRefuses(t *testing.T) {
	b := &box{}
	addr := serve(t, newServer(t, b, func(c *Config) { c.MaxMessageBytes = 10_000; c.MaxRecipients = 2 }))
	c := dial(t, addr)
	c.want("", "220 ")
	c.want("MAIL FROM:<a@x.example>", "502 ") // no EHLO
	c.want("EHLO x", "250-")
	c.want("AUTH PLAIN AGEAYg==", "523 ") // not without TLS
	c.want("STARTTLS", "502 ")
	c.want("MAIL FROM:<a@x.example> SIZE=10001", "552 5.3.4")
	c.want("MAIL FROM:<a\x00@x.example>", "553 5.1.7")
	c.want("MAIL FROM:<\"a b\"@x.example>", "553 5.1.7")
	c.want("MAIL FROM:<a@x.example\r>", "553 5.1.7")
	c.want("MAIL FROM:<a@x.example>", "250 ")
	c.want("MAIL FROM:<b@x.example>", "503 5.5.1")
	c.want("DATA", "502 ")
	c.want("RCPT TO:<nobody@p.example>", "550 5.1.1")
	c.want("RCPT TO:<Postmaster@p.example>", "550 5.1.1 nobody reads postmaster@p.example")
	if got := c.want("RCPT TO:<a@elsewhere.example>", "550 5.7.1"); strings.Contains(got, "elsewhere") {
		t.Errorf("the text of the error is in the reply: %q", got)
	}
	if got := c.want("RCPT TO:<broken@p.example>", "451 4.3.0"); strings.Contains(got, "database") {
		t.Errorf("the inside shows in %q", got)
	}
	c.want("RCPT TO:<@relay.example:nobody@p.example>", "550 ")
	c.want("RCPT TO:<a@p.example@x.example>", "553 ")
	c.want("RCPT TO:<a%x.example@p.example>", "250 ") // a local part, not a route
	c.want("RCPT TO:<b@p.example>", "250 ")
	c.want("RCPT TO:<c@p.example>", "452 4.5.3")
	c.want("DATA", "354 ")
	c.want(strings.Repeat("x\r\n", 5000)+".", "552 5.3.4")
	c.want("MAIL FROM:<a@x.example>", "250 ")
	c.want("RCPT TO:<a@p.example>", "250 ")
	b.err = errors.New("disk /var/secret is full")
	c.want("DATA", "354 ")
	if got := c.want("Subject: s\r\n\r\nx\r\n.", "451 4.3.0"); strings.Contains(got, "disk") {
		t.Errorf("the inside shows in %q", got)
	}
	b.err = &mail.FieldError{Field: "header", Reason: "is\r\nodd"}
	c.want("MAIL FROM:<a@x.example>", "250 ")
	c.want("RCPT TO:<a@p.example>", "250 ")
	c.want("DATA", "354 ")
	c.want("Subject: s\r\n\r\nx\r\n.", "554 5.6.0 header: is??odd\r\n")
	b.err = nil
	c.want("MAIL FROM:<a@x.example>", "250 ")
	c.want("RCPT TO:<a@p.example>", "250 ")
	c.want("DATA", "354 ")
	c.want(strings.Repeat("Received: x\r\n", 51)+"\r\nx\r\n.", "554 5.4.6")
	if n := len(b.all()); n != 0 {
		t.Errorf("got %d messages, want 0", n)
	}
}

// The attacker ends a message in a way that some servers see and some do not,
// and appends the commands for a second one.
func TestSmuggling(t *testing.T) {
	const second = "MAIL FROM:<admin@p.example>\r\nRCPT TO:<a@p.example>\r\nDATA\r\nSubject: smuggled\r\n\r\nx\r\n.\r\n"
	for _, end := range []string{"\n.\n", "\r.\r", "\r.\r\n", "\n.\r\n", "\r\n.\n", "\r\n\n.\r\n", "\r\r\n.\r\n", "\r\n.\r\r\n", "\r\n.\r.\r\n", "\n.\r", "\r\n.\x00\r\n"} {
		for _, mode := range []string{"DATA", "BDAT"} {
			t.Run(fmt.Sprintf("%s/%q", mode, end), func(t *testing.T) {
				b := &box{}
				c := dial(t, serve(t, newServer(t, b, nil)))
				text := "Subject: first\r\n\r\nx" + end + second
				if mode == "DATA" {
					c.begin("e@x.example", "a@p.example")
					c.send(text + "\r\n.\r\n")
				} else {
					c.want("", "220 ")
					c.send("EHLO x\r\nMAIL FROM:<e@x.example>\r\nRCPT TO:<a@p.example>\r\n")
					c.send(fmt.Sprintf("BDAT %d LAST\r\n%s", len(text), text))
					c.want("", "250-")
					c.want("", "250 ")
					c.want("", "250 ")
				}
				c.reply()
				c.send("QUIT\r\n")
				for c.reply() != "" {
				}
				for _, e := range b.all() {
					// One message may come through if all of it is the text of
					// that one: the smuggled commands must be inside.
					if e.From != "e@x.example" || bytes.Contains(e.Raw, []byte("\r\r")) {
						t.Errorf("smuggled: %q", e.Raw)
					}
					if err := mail.CheckRaw(bytes.ReplaceAll(e.Raw, []byte{0}, nil)); err != nil {
						t.Errorf("accepted %q: %v", e.Raw, err)
					}
				}
			})
		}
	}
}

// TestDotWithBareCR: go-smtp drops a dot and a CR at the beginning of a line if no LF
// follows. Such a message is refused, and one whose lines only begin with dots
// comes as it was written.
func TestDotWithBareCR(t *testing.T) {
	for _, text := range []string{"\r\n.\rx\r\n", ".\rx\r\n", "x\r\n.\r\r\n", "x\r\n.\r.\r\n", "x\r\n.\r.\r\r\n", "x\r\n..\r.\r\n", "x\r\n.\r\x00\n"} {
		t.Run(fmt.Sprintf("%q", text), func(t *testing.T) {
			b := &box{}
			c := dial(t, serve(t, newServer(t, b, nil)))
			c.begin("e@x.example", "a@p.example")
			c.send(text + ".\r\n")
			if got := c.reply(); !strings.HasPrefix(got, "550 5.6.0") {
				t.Errorf("got %q, want a refusal", got)
			}
			if n := len(b.all()); n != 0 {
				t.Errorf("got %d messages, want 0", n)
			}
		})
	}
	for _, text := range []string{".\r\n", "..\r\n", ".x\r\n...\r\n", "x\r\n\r\n.\r\n"} {
		t.Run(fmt.Sprintf("whole/%q", text), func(t *testing.T) {
			b := &box{}
			c := dial(t, serve(t, newServer(t, b, nil)))
			c.begin("e@x.example", "a@p.example")
			var stuffed strings.Builder
			for line := range strings.SplitAfterSeq("Subject: s\r\n\r\n"+text, "\r\n") {
				if strings.HasPrefix(line, ".") {
					line = "." + line
				}
				stuffed.WriteString(line)
			}
			c.send(stuffed.String() + ".\r\n")
			c.want("", "250 ")
			if all := b.all(); len(all) != 1 || !bytes.HasSuffix(all[0].Raw, []byte("\r\n\r\n"+text)) {
				t.Errorf("got %q, want it to end in %q", all, text)
			}
		})
	}
}

// A sender that waits after CR CR LF dot CR LF, which go-smtp does not take
// for the end, is answered soon and not after the timeout.
func TestRefusedMessageIsAnsweredSoon(t *testing.T) {
	b := &box{}
	c := dial(t, serve(t, newServer(t, b, nil)))
	c.begin("e@x.example", "a@p.example")
	c.want("x\r\r\n.", "550 5.6.0") // for which a client waits less than the timeout
	// What comes late may be text or commands; nothing of it is obeyed.
	c.send("MAIL FROM:<e@x.example>\r\n")
	if got := c.reply(); !strings.HasPrefix(got, "421 ") && got != "" {
		t.Errorf("got %q, want 421 or the end", got)
	}
}

func TestTenThousandRecipients(t *testing.T) {
	for _, kind := range []string{"good", "nobody"} {
		t.Run(kind, func(t *testing.T) {
			b := &box{}
			c := dial(t, serve(t, newServer(t, b, nil)))
			c.want("", "220 ")
			c.want("EHLO x", "250-")
			c.want("MAIL FROM:<a@x.example>", "250 ")
			go func() {
				for i := range 10_000 {
					if _, err := fmt.Fprintf(c.Conn, "RCPT TO:<%s%d@p.example>\r\n", kind, i); err != nil {
						return
					}
				}
			}()
			n := map[string]int{}
			for {
				got := c.reply()
				if got == "" {
					break
				}
				n[got[:3]]++
			}
			good := 0
			if kind == "good" {
				good = mail.MaxRecipients
			}
			if n["250"] != good || n["421"] == 0 || n["452"]+n["550"] > maxRefused {
				t.Errorf("got replies %v, want %d accepted and then 421", n, good)
			}
		})
	}
}

func TestHundredMegabyteLine(t *testing.T) {
	var before, after runtime.MemStats
	for _, where := range []string{"command", "data"} {
		t.Run(where, func(t *testing.T) {
			b := &box{}
			c := dial(t, serve(t, newServer(t, b, nil)))
			if where == "data" {
				c.begin("a@x.example", "a@p.example")
			} else {
				c.want("", "220 ")
			}
			runtime.ReadMemStats(&before)
			piece := bytes.Repeat([]byte("x"), 1<<20)
			sent := 0
			for range 100 {
				n, err := c.Write(piece)
				sent += n
				if err != nil {
					break
				}
			}
			runtime.ReadMemStats(&after)
			if sent == 100<<20 {
				t.Error("100 MB of one line were taken")
			}
			if d := after.TotalAlloc - before.TotalAlloc; d > 20<<20 {
				t.Errorf("allocated %d octets, want less than 20 MiB", d)
			}
			if n := len(b.all()); n != 0 {
				t.Errorf("got %d messages, want 0", n)
			}
		})
	}
}

// TestOneHostCannotUseAllConnections opens connections from one address until they
// are refused, and then one from another.
func TestOneHostCannotUseAllConnections(t *testing.T) {
	addr := serve(t, newServer(t, &box{}, func(c *Config) { c.MaxConnections, c.MaxPerHost = 4, 2 }))
	from := func(ip string) *client {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
		c, err := d.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return &client{t, c, bufio.NewReader(c)}
	}
	first := from("127.0.0.1")
	first.want("", "220 ")
	from("127.0.0.1").want("", "220 ")
	from("127.0.0.1").want("", "421 ")
	from("127.0.0.2").want("", "220 ")
	first.want("QUIT", "221 ")
	first.reply() // until it is closed
	eventually(t, "the place of a connection that has ended is free", func() bool {
		return strings.HasPrefix(from("127.0.0.1").reply(), "220 ")
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

func TestSlowClients(t *testing.T) {
	b := &box{}
	t.Run("silent", func(t *testing.T) {
		c := dial(t, serve(t, newServer(t, b, func(c *Config) { c.IdleTimeout = 300 * time.Millisecond })))
		c.want("", "220 ")
		c.want("", "421 4.4.2")
	})
	t.Run("drips a message", func(t *testing.T) {
		c := dial(t, serve(t, newServer(t, b, func(c *Config) { c.DataTimeout = time.Second })))
		c.begin("a@x.example", "a@p.example")
		go func() { // for longer than the reply is waited for
			for {
				if _, err := c.Write([]byte("x\r\n")); err != nil {
					return
				}
				time.Sleep(100 * time.Millisecond)
			}
		}()
		c.want("", "451 4.4.2")
	})
	t.Run("too many", func(t *testing.T) {
		addr := serve(t, newServer(t, b, func(c *Config) { c.MaxConnections = 2 }))
		c1, c2, c3 := dial(t, addr), dial(t, addr), dial(t, addr)
		c1.want("", "220 ")
		c2.want("", "220 ")
		c3.want("", "421 4.7.0")
		c1.want("QUIT", "221 ")
		eventually(t, "there is room again", func() bool { return strings.HasPrefix(dial(t, addr).reply(), "220 ") })
	})
	if n := len(b.all()); n != 0 {
		t.Errorf("got %d messages, want 0", n)
	}
}

func TestEndlessCommands(t *testing.T) {
	c := dial(t, serve(t, newServer(t, &box{}, nil)))
	c.want("", "220 ")
	go func() {
		for {
			if _, err := c.Write([]byte(strings.Repeat("NOOP\r\n", 1000))); err != nil {
				return
			}
		}
	}()
	n := 0
	for c.reply() != "" {
		n++
	}
	if n > maxReplies+1000 { // what was read at once is answered
		t.Errorf("got %d replies, want at most about %d", n, maxReplies)
	}
}

// untilReading waits until the text of n messages is being read: a client may
// have its 354 a moment before that.
func untilReading(t *testing.T, s *Server, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d messages are being read", n), func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		reading := 0
		for k := range s.links {
			k.mu.Lock()
			if k.phase == data {
				reading++
			}
			k.mu.Unlock()
		}
		return reading == n
	})
}

func TestShutdownFinishesMessage(t *testing.T) {
	b := &box{gate: make(chan struct{}), begun: make(chan struct{}, 2)}
	s := newServer(t, b, nil)
	addr := serve(t, s)
	idle, busy, sending := dial(t, addr), dial(t, addr), dial(t, addr)
	idle.want("", "220 ")
	busy.begin("a@x.example", "a@p.example")
	busy.send("Subject: one\r\n\r\nx\r\n.\r\n")
	sending.begin("a@x.example", "a@p.example")
	sending.send("Subject: two\r\n")
	<-b.begun
	untilReading(t, s, 1)
	done := make(chan error, 1)
	go func() { done <- s.Shutdown(context.Background()) }()
	idle.want("", "421 ")
	sending.send("\r\nx\r\n.\r\n")
	<-b.begun
	close(b.gate)
	busy.want("", "250 2.0.0")
	sending.want("", "250 2.0.0")
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := len(b.all()); n != 2 {
		t.Errorf("got %d messages, want 2", n)
	}
	if c, err := net.Dial("tcp", addr); err == nil {
		c.Close()
		t.Error("still listens")
	}
}

func TestShutdownCutsOff(t *testing.T) {
	b := &box{}
	s := newServer(t, b, nil)
	addr := serve(t, s)
	c := dial(t, addr)
	c.begin("a@x.example", "a@p.example")
	untilReading(t, s, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := s.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want DeadlineExceeded", err)
	}
	c.reply() // returns: the connection is closed
}

func testTLS(t testing.TB) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"mx.p.example"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12}
}

func TestStartTLS(t *testing.T) {
	b := &box{}
	c := dial(t, serve(t, newServer(t, b, func(cfg *Config) { cfg.TLS = testTLS(t) })))
	c.want("", "220 ")
	if got := c.want("EHLO x", "250-"); !strings.Contains(got, "STARTTLS") || strings.Contains(got, "AUTH") {
		t.Errorf("got %q, want STARTTLS and no AUTH", got)
	}
	// A command injected behind STARTTLS must not be obeyed inside TLS.
	c.send("STARTTLS\r\nMAIL FROM:<evil@x.example>\r\n")
	c.want("", "220 ")
	tc := tls.Client(c.Conn, &tls.Config{InsecureSkipVerify: true})
	c2 := &client{t, tc, bufio.NewReader(tc)}
	c2.want("EHLO x", "250-")
	c2.want("MAIL FROM:<a@x.example>", "250 ")
	c2.want("RCPT TO:<a@p.example>", "250 ")
	c2.want("DATA", "354 ")
	c2.want("Subject: s\r\n\r\nx\r\n.", "250 ")
	if e := b.all(); len(e) != 1 || !bytes.Contains(e[0].Raw, []byte("with ESMTPS id")) {
		t.Errorf("got %+v", e)
	}
}

func TestCapturedMessageIsProposed(t *testing.T) {
	b := &box{}
	addr := capture(t, newServer(t, b, nil))
	c := dial(t, addr)
	c.want("", "220 ")
	if got := c.want("EHLO x", "250-"); !strings.Contains(got, "PLAIN LOGIN") {
		t.Errorf("got %q, want AUTH", got)
	}
	c.want("AUTH LOGIN", "334 VXNlcm5hbWU6")
	c.want("dXNlcg==", "334 UGFzc3dvcmQ6")
	c.want("cGFzcw==", "235 ")
	c.want("MAIL FROM:<"+inbox+">", "250 ")
	c.want("RCPT TO:<anyone@anywhere.example>", "250 ")
	c.want("RCPT TO:<hidden@elsewhere.example>", "250 ")
	c.want("DATA", "354 ")
	c.want("From: "+inbox+"\r\nTo: anyone@anywhere.example\r\n\r\nx\r\n.", "250 2.0.0 held for approval as act_TEST\r\n")
	c.want("MAIL FROM:<ceo@bank.example>", "250 ")
	c.want("RCPT TO:<anyone@anywhere.example>", "250 ")
	c.want("DATA", "354 ")
	c.want("From: ceo@bank.example\r\n\r\nx\r\n.", "550 5.7.1 MAIL FROM: is <ceo@bank.example>; only <"+inbox+"> may be sent as here")
	envs := b.all()
	if len(envs) != 1 {
		t.Fatalf("got %d messages, want 1", len(envs))
	}
	if h, err := envs[0].Hidden(); err != nil || !slices.Equal(h, []string{"hidden@elsewhere.example"}) {
		t.Errorf("got hidden %v, %v", h, err)
	}
	if b.who[0] != someone || b.dst[0] != target {
		t.Errorf("got %v %v", b.who[0], b.dst[0])
	}

	c.want("MAIL FROM:<"+inbox+">", "250 ")
	for i := range mail.MaxRecipients {
		c.want(fmt.Sprintf("RCPT TO:<r%d@x.example>", i), "250 ")
	}
	c.want("RCPT TO:<one-more@x.example>", "550 5.5.3")
	c.want("DATA", "354 ")
	c.want("From: "+inbox+"\r\n\r\nx\r\n.", "550 5.5.3")
	b.err = errors.New("secret trouble")
	c.want("MAIL FROM:<"+inbox+">", "250 ")
	c.want("RCPT TO:<r@x.example>", "250 ")
	c.want("DATA", "354 ")
	if got := c.want("From: "+inbox+"\r\n\r\nx\r\n.", "451 4.3.0"); strings.Contains(got, "secret") {
		t.Errorf("the inside shows in %q", got)
	}
}

func TestCapturedAfterTheGreeting(t *testing.T) {
	b := &box{}
	s := newServer(t, b, nil)
	ours, theirs := net.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.ServeConn(ctx, someone, target, ours, []byte("EHLO x\r\nNO"), nil)
	}()
	c := &client{t, theirs, bufio.NewReader(theirs)}
	c.want("", "250-Hello x")
	c.want("OP", "250 ")
	cancel()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Error("ServeConn did not end with its context")
	}
}

// Programs as agents write them: python's smtplib, and swaks.
func TestCapturedPython(t *testing.T) {
	b := &box{}
	_, port, _ := net.SplitHostPort(capture(t, newServer(t, b, nil)))
	const program = `
import smtplib, sys
from email.message import EmailMessage
m = EmailMessage()
m["From"] = "agent@p.example"; m["To"] = "Zoë <z@x.example>"; m["Bcc"] = "boss@x.example"; m["Subject"] = "Grüße"
m.set_content("Hallo Welt ä\n.\n..\n" + "long " * 400)
m.add_attachment(b"a,b\n1,2\n", maintype="text", subtype="csv", filename="data.csv")
s = smtplib.SMTP("127.0.0.1", int(sys.argv[1]), timeout=60)
s.ehlo(); s.login("user@gmail.com", "hunter2")
print("sent", s.send_message(m))
try:
    s.sendmail("ceo@bank.example", ["a@x.example"], "From: ceo@bank.example\r\n\r\nx")
except smtplib.SMTPDataError as e:
    print("refused", e.smtp_code, e.smtp_error)
s.quit()
`
	out, err := exec.CommandContext(t.Context(), "python3", "-c", program, port).CombinedOutput()
	if err != nil {
		t.Fatalf("python3: %v\n%s(apt-get install python3)", err, out)
	}
	if got := string(out); !strings.Contains(got, "sent {}") || !strings.Contains(got, "refused 550") {
		t.Errorf("got %s", got)
	}
	envs := b.all()
	if len(envs) != 1 {
		t.Fatalf("got %d messages, want 1", len(envs))
	}
	sum, err := mail.Describe(envs[0])
	if err != nil {
		t.Fatal(err)
	}
	if sum.Subject != "Grüße" || !slices.Equal(sum.Bcc, []string{"boss@x.example"}) || len(sum.Attachments) != 1 || sum.Attachments[0].Size != 8 || !strings.HasPrefix(sum.Text, "Hallo Welt ä\n.\n..\nlong ") {
		t.Errorf("got %+v", sum)
	}
}

func TestSwaks(t *testing.T) {
	path, err := exec.LookPath("swaks")
	if err != nil {
		t.Fatal("swaks is not installed: apt-get install --no-install-recommends swaks")
	}
	b := &box{}
	s := newServer(t, b, nil)
	in, held := serve(t, s), capture(t, s)
	for _, c := range []struct {
		name, server string
		args         []string
		fails        bool
		want         string
	}{
		{"inbound", in, []string{"--from", "a@x.example", "--to", "b@p.example"}, false, "250 2.0.0"},
		{"pipelined", in, []string{"--from", "<>", "--to", "b@p.example", "--pipeline"}, false, "250 2.0.0"},
		{"unknown", in, []string{"--from", "a@x.example", "--to", "nobody@p.example"}, true, "550 5.1.1"},
		{"relay", in, []string{"--from", "a@x.example", "--to", "b@x.example"}, true, "550 5.7.1"},
		{"captured", held, []string{"--from", inbox, "--to", "b@x.example", "--auth", "PLAIN", "--auth-user", "u", "--auth-password", "p", "--attach", "@/etc/hostname"}, false, "held for approval as act_TEST"},
		{"captured forged", held, []string{"--from", "ceo@bank.example", "--to", "b@x.example"}, true, "550 5.7.1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			host, port, _ := net.SplitHostPort(c.server)
			out, err := exec.CommandContext(t.Context(), path, append([]string{"--server", host, "--port", port, "--timeout", "60"}, c.args...)...).CombinedOutput()
			if (err != nil) != c.fails || !strings.Contains(string(out), c.want) {
				t.Errorf("got %v\n%s\nwant %q", err, out, c.want)
			}
		})
	}
	if n := len(b.all()); n != 3 {
		t.Errorf("got %d messages, want 3", n)
	}
}

func TestNewRefuses(t *testing.T) {
	b := &box{}
	for name, cfg := range map[string]Config{
		"no name":    {Propose: b.propose},
		"bad name":   {Hostname: "a\r\nb", Propose: b.propose},
		"nothing":    {Hostname: "a"},
		"no Accepts": {Hostname: "a", Deliver: b.deliver},
	} {
		if _, err := New(slog.New(slog.DiscardHandler), cfg); err == nil {
			t.Errorf("%s: got nil, want an error", name)
		}
	}
}

// TestHandedOver: large messages that are handed over wait for each other, those
// that wait too long stay with their sender, and small ones wait for nobody.
func TestHandedOver(t *testing.T) {
	b := &box{}
	s := newServer(t, b, nil)
	ctx := t.Context()
	first, err := s.acquireRoom(ctx, s.brought, maxHandled-smallMessage)
	if err != nil {
		t.Fatal(err)
	}
	long := s.cfg.HandTimeout
	s.cfg.HandTimeout = 100 * time.Millisecond // of the one that waits for nothing; the others have their time
	if _, err := s.acquireRoom(ctx, s.brought, 2*smallMessage); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no room: %v, want %v", err, context.DeadlineExceeded)
	}
	s.cfg.HandTimeout = long
	leave, err := s.acquireRoom(ctx, s.brought, smallMessage)
	if err != nil {
		t.Errorf("a small one: %v", err)
	} else {
		leave()
	}
	if leave, err = s.acquireRoom(ctx, s.proposed, 2*smallMessage); err != nil { // an agent's own
		t.Fatal(err)
	}
	leave()
	first()
	if leave, err = s.acquireRoom(ctx, s.brought, 2*maxHandled); err != nil { // larger than all of it: alone
		t.Fatal(err)
	}
	leave()
}

// TestBufferIsShared: who sends large messages slowly keeps nobody else's out.
func TestBufferIsShared(t *testing.T) {
	b := &box{}
	s := newServer(t, b, func(c *Config) { c.MaxBufferBytes = 4 << 20 })
	s.tarLocal = true // this machine is a stranger
	addr := serve(t, s)
	begin := func() *client {
		c := dial(t, addr)
		c.reply()
		for _, line := range []string{"EHLO x.example", "MAIL FROM:<a@x.example>", "RCPT TO:<" + inbox + ">", "DATA"} {
			fmt.Fprintf(c, "%s\r\n", line)
			c.reply()
		}
		return c
	}
	line := strings.Repeat("x", 98) + "\r\n"
	slow := begin()
	fmt.Fprintf(slow, "Subject: slow\r\n\r\n%s", strings.Repeat(line, 3000))
	for end := time.Now().Add(2 * time.Minute); s.buffered.Load() < 300_000; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d octets are held", s.buffered.Load())
		}
	}
	more := begin()
	fmt.Fprintf(more, "Subject: more\r\n\r\n%s.\r\n", strings.Repeat(line, 9000))
	if r := more.reply(); !strings.HasPrefix(r, "452 4.3.1") {
		t.Errorf("one sender's second message: %q, want 452 4.3.1", r)
	}
	// A sandbox is another sender.
	ours, theirs := net.Pipe()
	go s.ServeConn(t.Context(), auth.Principal{Kind: auth.Sandbox, ID: "sbx"}, netip.AddrPort{}, ours, nil, nil)
	c := &client{t, theirs, bufio.NewReader(theirs)}
	if err := theirs.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	c.reply()
	for _, l := range []string{"EHLO x", "MAIL FROM:<" + inbox + ">", "RCPT TO:<bob@b.example>", "DATA"} {
		fmt.Fprintf(c, "%s\r\n", l)
		c.reply()
	}
	fmt.Fprintf(c, "From: %s\r\nTo: bob@b.example\r\nSubject: s\r\n\r\n%s.\r\n", inbox, strings.Repeat(line, 1000))
	if r := c.reply(); !strings.HasPrefix(r, "250") {
		t.Errorf("another sender's: %q", r)
	}
	theirs.Close()
	fmt.Fprintf(slow, ".\r\n")
	if r := slow.reply(); !strings.HasPrefix(r, "250") {
		t.Errorf("the slow one: %q", r)
	}
	for end := time.Now().Add(2 * time.Minute); s.buffered.Load() != 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d octets are still counted", s.buffered.Load())
		}
	}
	s.shares.mu.Lock()
	defer s.shares.mu.Unlock()
	if len(s.shares.by) != 0 {
		t.Errorf("left are %v", s.shares.by)
	}
}
