package policy_test

import (
	"fmt"
	"strings"
	"testing"

	"postern/internal/policy"
)

var usual = policy.Request{
	Kind: policy.KindSend, Mode: policy.GatedSend, Inbox: "analyst@agents.test", Via: "mcp", To: []string{"bob@example.com", "eve@example.org"}, Size: 20_000,
	Files: []policy.Attachment{{Name: "report.pdf", Type: "application/pdf", Size: 10_000}},
}

func BenchmarkDecide(b *testing.B) {
	rules := func(n int) *policy.Document {
		var s strings.Builder
		s.WriteString("rules:\n")
		for i := range n {
			fmt.Fprintf(&s, "  - id: r%d\n    kind: email.send\n    when: to.exists(a, a.under('no%d.example')) && size < 1000000\n    then: deny\n", i, i)
		}
		return parse(b, s.String())
	}
	run := func(name string, d *policy.Document, r policy.Request) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				policy.Decide(d, r)
			}
		})
	}
	run("default", policy.Default(), usual)
	run("rules=20", rules(20), usual)
	run("rules=200", rules(200), usual)
	run("no-rule-of-the-kind", rules(20), policy.Request{Kind: policy.KindConnect})
	huge := usual
	huge.To = nil
	for i := range 1000 {
		huge.To = append(huge.To, fmt.Sprintf("%s%d@example.com", strings.Repeat("a", 200), i))
	}
	var s strings.Builder
	s.WriteString("rules:\n")
	for i := range policy.MaxClauses {
		fmt.Fprintf(&s, "  - id: r%d\n    then: allow\n    when: to.exists(a, to.exists(b, a == b + 'x'))\n", i)
	}
	run("worst", parse(b, s.String()), huge)
}

func BenchmarkParse(b *testing.B) {
	var s strings.Builder
	s.WriteString("rules:\n")
	for i := range policy.MaxClauses {
		fmt.Fprintf(&s, "  - id: r%d\n    kind: email.send\n    when: to.exists(a, a.under('no%d.example')) && size < 1000000\n    then: deny\n", i, i)
	}
	for b.Loop() {
		parse(b, s.String())
	}
}
