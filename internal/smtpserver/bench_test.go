package smtpserver

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"postern/internal/mail"
)

// BenchmarkInbound receives messages of 4 kB and of 4 MB over one connection.
func BenchmarkInbound(b *testing.B) {
	for _, size := range []int{4 << 10, 4 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			s := newServer(b, &box{}, func(c *Config) {
				c.Deliver = func(context.Context, mail.Envelope, Peer) error { return nil }
			})
			addr := serve(b, s)
			text := "Subject: s\r\n\r\n" + strings.Repeat(strings.Repeat("x", 76)+"\r\n", size/78) + "."
			b.SetBytes(int64(len(text)))
			var c *client
			for i := 0; b.Loop(); i++ {
				if i%1000 == 0 { // maxReplies
					c = dial(b, addr)
					c.want("", "220 ")
					c.want("EHLO x", "250-")
				}
				c.want("MAIL FROM:<a@x.example>", "250 ")
				c.want("RCPT TO:<a@p.example>", "250 ")
				c.want("DATA", "354 ")
				c.want(text, "250 ")
			}
		})
	}
}
