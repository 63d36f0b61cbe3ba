package mail

import (
	"fmt"
	"strings"
	"testing"
)

// TestRead is mail that Parse refuses, or reads in part: each is listed and
// opened, and says what is wrong.
func TestRead(t *testing.T) {
	const head = "From: Bob <bob@example.com>\r\nSubject: hello\r\n"
	tests := []struct {
		name, raw                    string
		from, subject, text, warning string
	}{
		{"nothing", "", "", "", "", "it has no header"},
		{"no header", "just words", "", "", "just words", "it has no header"},
		{"bytes", "\xff\xfea\x00b", "", "", "\ufffda\ufffdb", "it has no header"},
		{"a giant header", head + strings.Repeat("X-Long: "+strings.Repeat("a", 900)+"\r\n", 400) + "\r\nbody\r\n", "bob@example.com", "hello", "", "only the beginning of its header was read"},
		{"ten thousand fields", head + strings.Repeat("A: b\r\n", 10000) + "\r\nbody\r\n", "bob@example.com", "hello", "", "only the beginning of its header was read"},
		{"one endless line", "Subject: " + strings.Repeat("a", 300<<10), "", "aaaa", "", "there is no From address"},
		{"ten thousand parts", head + "Content-Type: multipart/mixed; boundary=b\r\n\r\n" + strings.Repeat("--b\r\n\r\npart\r\n", 10000) + "--b--\r\n", "bob@example.com", "hello", "part", "more than 500 parts"},
		{"levels without end", head + nested(2000), "bob@example.com", "hello", "", "levels of parts"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := Read([]byte(tt.raw))
			from := ""
			if len(m.From) > 0 {
				from = m.From[0].Addr
			}
			if from != tt.from || !strings.HasPrefix(m.Subject, tt.subject) || !strings.HasPrefix(m.Text, tt.text) {
				t.Errorf("from %q, subject %.40q, text %.40q", from, m.Subject, m.Text)
			}
			if got := strings.Join(m.Warnings, "\n"); !strings.Contains(got, tt.warning) {
				t.Errorf("warnings %.300q lack %q", got, tt.warning)
			}
		})
	}
}

func nested(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "Content-Type: multipart/mixed; boundary=b%d\r\n\r\n--b%d\r\n", i, i)
	}
	return b.String()
}

func FuzzRead(f *testing.F) {
	f.Add([]byte("From: a@b.example\r\n\r\nx"))
	f.Add([]byte("x"))
	f.Add([]byte(strings.Repeat("A: b\n", 2000)))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m := Read(raw)
		if _, err := Parse(raw); err != nil && len(m.Warnings) == 0 {
			t.Error("unreadable, and no warning")
		}
	})
}
