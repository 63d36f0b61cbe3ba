package smtpserver

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/mail"
)

// memConn is a connection whose other end has said everything already.
type memConn struct {
	in   *bytes.Reader
	out  bytes.Buffer
	addr net.Addr // of the other end; nil for one that is none
}

type memAddr struct{}

func (memAddr) Network() string { return "mem" }
func (memAddr) String() string  { return "mem" }

func (c *memConn) Read(p []byte) (int, error)  { return c.in.Read(p) }
func (c *memConn) Write(p []byte) (int, error) { return c.out.Write(p) }
func (c *memConn) Close() error                { c.in.Reset(nil); return nil }
func (c *memConn) LocalAddr() net.Addr         { return memAddr{} }
func (c *memConn) RemoteAddr() net.Addr {
	if c.addr != nil {
		return c.addr
	}
	return memAddr{}
}
func (c *memConn) SetDeadline(time.Time) error        { return nil }
func (c *memConn) SetReadDeadline(t time.Time) error  { return nil }
func (c *memConn) SetWriteDeadline(t time.Time) error { return nil }

type memListener struct {
	k    net.Conn
	wait chan struct{}
}

func (l *memListener) Accept() (net.Conn, error) {
	if k := l.k; k != nil {
		l.k = nil
		return k, nil
	}
	<-l.wait
	return nil, io.EOF
}
func (l *memListener) Close() error   { return nil }
func (l *memListener) Addr() net.Addr { return memAddr{} }

// panics keeps what go-smtp says about panics that it has recovered from. It
// must not touch the test: a message cut off within BDAT ends in a goroutine
// that may outlive it.
type panics struct {
	slog.Handler
	mu  *sync.Mutex
	all *[]string
}

func (p panics) Enabled(context.Context, slog.Level) bool { return true }
func (p panics) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, "panic") {
		r.Attrs(func(a slog.Attr) bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			*p.all = append(*p.all, a.String())
			return true
		})
	}
	return nil
}

func FuzzConversation(f *testing.F) {
	for _, s := range []string{
		"EHLO x\r\nMAIL FROM:<agent@p.example>\r\nRCPT TO:<a@p.example>\r\nDATA\r\nFrom: agent@p.example\r\n\r\n..x\r\n.\r\nQUIT\r\n",
		"HELO x\r\nMAIL FROM:<> BODY=8BITMIME SIZE=10\r\nRCPT TO:<a@p.example>\r\nRSET\r\nNOOP\r\nVRFY x\r\n",
		"EHLO x\r\nMAIL FROM:<agent@p.example>\r\nRCPT TO:<a@p.example>\r\nBDAT 3\r\na\r\nBDAT 2 LAST\r\n\r\nQUIT\r\n",
		"EHLO x\r\nMAIL FROM:<agent@p.example>\r\nRCPT TO:<a@p.example>\r\nBDAT 3\r\na\r\nRSET\r\nMAIL FROM:<b@x>\r\nBDAT 0 LAST\r\n",
		"EHLO x\r\nAUTH PLAIN AGFnZW50QHAuZXhhbXBsZQBwaWJfa2V5\r\nMAIL FROM:<agent@p.example>\r\nRCPT TO:<a@b.example>\r\nDATA\r\nFrom: agent@p.example\r\n\r\n.\r\n",
		"EHLO x\r\nAUTH LOGIN\r\nYWdlbnRAcC5leGFtcGxl\r\ncGliX2tleQ==\r\nMAIL FROM:<agent@p.example>\r\nRCPT TO:<a@b.example>\r\nBDAT 3 LAST\r\na\r\n",
		"EHLO x\r\nMAIL FROM:<agent@p.example>\r\nRCPT TO:<a@p.example>\r\nDATA\r\nFrom: agent@p.example\r\n\r\n.\r.\r\r\n.\r\nQUIT\r\n",
		"EHLO x\r\nAUTH PLAIN\r\nAGEAYg==\r\nAUTH LOGIN =\r\n*\r\nSTARTTLS\r\n",
		"EHLO \r\x00x\nMAIL FROM:<\"a\\\"b\"@p.example>\nRCPT TO:<@a,@b:c@d>\nDATA\n\n.\n\r.\r\r\n.\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		b := &box{}
		log := panics{slog.DiscardHandler, &sync.Mutex{}, &[]string{}}
		s, err := New(slog.New(log), Config{Hostname: "mx.p.example", Accepts: accepts, Deliver: b.deliver, Propose: b.propose, Authenticate: authenticate, Submit: b.submit, MaxMessageBytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		captured := &memConn{in: bytes.NewReader(in)}
		s.ServeConn(context.Background(), someone, target, captured, nil, nil)

		inbound, submitted := &memConn{in: bytes.NewReader(in)}, &memConn{in: bytes.NewReader(in), addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}}
		for _, c := range []*memConn{inbound, submitted} {
			k := s.newLink(c)
			k.door = &door{submission: c == submitted, byHost: map[string]int{}}
			s.track(k)
			srv := s.engine(nil, c == submitted)
			_ = srv.Serve(&memListener{k: k, wait: k.closed})
			_ = srv.Shutdown(context.Background())
		}

		for _, c := range []*memConn{captured, inbound, submitted} {
			for line := range strings.SplitAfterSeq(c.out.String(), "\r\n") {
				if line != "" && (len(line) < 6 || strings.Trim(line[:3], "0123456789") != "" || !strings.HasSuffix(line, "\r\n")) {
					t.Errorf("reply line %q", line)
				}
			}
		}
		for _, e := range b.all() {
			if err := mail.CheckRaw(append(bytes.ReplaceAll(e.Raw, []byte{0}, nil), "\r\n"...)); err != nil && !strings.Contains(err.Error(), "longer") {
				t.Errorf("accepted %q: %v", e.Raw, err)
			}
			if _, err := e.Payload(); err != nil {
				t.Errorf("accepted envelope %q %q: %v", e.From, e.To, err)
			}
		}
		for range 30_000 { // a message cut off within BDAT ends in a goroutine of go-smtp
			if s.buffered.Load() == 0 {
				break
			}
			time.Sleep(time.Millisecond)
		}
		log.mu.Lock()
		defer log.mu.Unlock()
		for _, p := range *log.all {
			t.Errorf("recovered: %s", p)
		}
		if n := s.buffered.Load(); n != 0 {
			t.Errorf("%d octets are still counted", n)
		}
	})
}
