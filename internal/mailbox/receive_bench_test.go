package mailbox

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"postern/internal/mail"
)

// BenchmarkReceive stores messages of 4 kB of one sender, over one and over eight
// sessions at once: what the server does behind SMTP.
func BenchmarkReceive(b *testing.B) {
	for _, sessions := range []int{1, 8} {
		b.Run(fmt.Sprintf("sessions=%d", sessions), func(b *testing.B) {
			s := seed(b, 0, 0, false)
			text := strings.Repeat(strings.Repeat("x", 76)+"\r\n", 52)
			var n atomic.Int64
			var left atomic.Int64
			left.Store(int64(b.N))
			b.ResetTimer()
			done := make(chan error, sessions)
			for range sessions {
				go func() {
					for left.Add(-1) >= 0 {
						raw := fmt.Sprintf("From: buyer@example.com\r\nTo: analyst@agents.test\r\nSubject: figures\r\nMessage-ID: <%d@example.com>\r\n\r\n%s", n.Add(1), text)
						if err := s.m.Receive(b.Context(), Arrival{Envelope: mail.Envelope{From: "buyer@example.com", To: []string{"analyst@agents.test"}, Raw: []byte(raw)}, Remote: "192.0.2.1:4711"}); err != nil {
							done <- err
							return
						}
					}
					done <- nil
				}()
			}
			for range sessions {
				if err := <-done; err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
		})
	}
}
