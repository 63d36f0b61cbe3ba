package audit_test

import (
	"strings"
	"testing"
	"time"
	"unicode"

	"postern/internal/audit"
)

// TestLinesAreCalm: what a hostile name or reason holds ends no line of a log,
// and a terminal that shows the log obeys none of it.
func TestLinesAreCalm(t *testing.T) {
	evil := "x\x1b]0;y\x07\u0085\u2028\u202e\x00\r\nCEF:0|z\xff"
	e := audit.Entry{Seq: 1, At: time.Unix(1, 0), Project: evil, Actor: evil, Verb: "action.reject", Object: evil, Detail: `{"reason":"a\u001b[2Jb\u2028c"}`}
	line, err := audit.Syslog(e, audit.Digest{}, "host", 8192)
	if err != nil {
		t.Fatal(err)
	}
	head, _, _ := strings.Cut(string(line), "] {")
	for name, s := range map[string]string{"CEF": audit.CEF(e, audit.Digest{}, "1"), "syslog": head} {
		if i := strings.IndexFunc(s, func(r rune) bool { return unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) }); i >= 0 {
			t.Errorf("%s: %q", name, s)
		}
	}
}
