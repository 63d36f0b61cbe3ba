package imapserver

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"postern/internal/storetest"
)

// BenchmarkLargeFolder measures what a program asks first of a folder with 10,000
// messages.
func BenchmarkLargeFolder(b *testing.B) {
	f := setup(b, storetest.SQLite(b), nil)
	const n = 10_000
	for i := range n {
		f.receive(b, f.a, plain(fmt.Sprintf("Message %d", i), strings.Repeat("some words of a message\n", 50)))
	}
	c := f.login(b, f.a.Address, f.keyA)
	_ = c.SetDeadline(time.Now().Add(10 * time.Minute))
	c.ok("SELECT INBOX") // numbers them
	for name, command := range map[string]string{
		"select": "SELECT INBOX", "status": "STATUS INBOX (MESSAGES UNSEEN SIZE)", "flags": "FETCH 1:* (UID FLAGS INTERNALDATE RFC822.SIZE)", "envelopes": "FETCH 1:* (UID ENVELOPE)",
		"unseen": "SEARCH UNSEEN", "from": "SEARCH FROM nobody", "text": "SEARCH TEXT nothing", "poll": "NOOP",
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if got := c.do("%s", command); !strings.Contains(got, "OK ") {
					b.Fatal(got)
				}
			}
		})
	}
}
