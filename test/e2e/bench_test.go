package e2e

import (
	"bufio"
	"fmt"
	"net"
	"net/textproto"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"postern/internal/smtpclient/postfixtest"
)

// BenchmarkInbound gives messages of 4 kB to Postern, which seals them and
// keeps them in its database, and to a Postfix beside it, which queues them:
// both answer 250 only for what is durable. The figure to compare is msg/s.
func BenchmarkInbound(b *testing.B) {
	s := start(b, b.TempDir(), "--cold")
	to, _ := s.inbox("analyst")
	postfix, _ := postfixtest.Start(b)
	for _, links := range []int{1, 8} {
		for _, server := range []struct{ name, addr, to string }{{"postfix", postfix, "b@" + postfixtest.Domain}, {"postern", s.smtp, to}} {
			b.Run(fmt.Sprintf("%s/links=%d", server.name, links), func(b *testing.B) {
				var left atomic.Int64
				left.Store(int64(b.N))
				var all sync.WaitGroup
				for range links {
					all.Go(func() {
						for left.Load() > 0 {
							if err := deliverSome(server.addr, server.to, &left); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				all.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
			})
		}
	}
}

// deliverSome gives up to 50 messages over one connection.
func deliverSome(addr, to string, left *atomic.Int64) error {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	c := textproto.Reader{R: bufio.NewReader(conn)}
	say := func(line string, code int) error {
		if line != "" {
			if _, err := conn.Write([]byte(line + "\r\n")); err != nil {
				return err
			}
		}
		_, _, err := c.ReadResponse(code)
		return err
	}
	text := "From: bob@example.com\r\nTo: " + to + "\r\nSubject: figures\r\nMessage-ID: <%d@example.com>\r\n\r\n" + strings.Repeat(strings.Repeat("x", 76)+"\r\n", 52) + "."
	if err := say("", 220); err != nil {
		return err
	}
	if err := say("EHLO example.com", 250); err != nil {
		return err
	}
	for range 50 {
		n := left.Add(-1)
		if n < 0 {
			break
		}
		for _, step := range []struct {
			line string
			code int
		}{{"MAIL FROM:<bob@example.com>", 250}, {"RCPT TO:<" + to + ">", 250}, {"DATA", 354}, {fmt.Sprintf(text, n), 250}} {
			if err := say(step.line, step.code); err != nil {
				return fmt.Errorf("%.20s: %w", step.line, err)
			}
		}
	}
	return say("QUIT", 221)
}
