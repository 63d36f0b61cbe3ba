package policy_test

import (
	"testing"

	"postern/internal/policy"
)

// TestHost: one name, however it is written, is one name to rules and switches.
func TestHost(t *testing.T) {
	for in, want := range map[string]string{
		"Example.COM.": "example.com", "münchen.example": "xn--mnchen-3ya.example", "MÜNCHEN.example": "xn--mnchen-3ya.example",
		"mu\u0308nchen.example": "xn--mnchen-3ya.example", "ｅvil.com": "evil.com", "evil\u3002com": "evil.com", "evil.com..": "evil.com", "a_b.example": "a_b.example",
	} {
		if got, ok := policy.Host(in); got != want || !ok {
			t.Errorf("%q is %q, %v; want %q", in, got, ok, want)
		}
	}
	for _, in := range []string{"", ".", "ü_.com", "\xff.com"} {
		if got, ok := policy.Host(in); ok {
			t.Errorf("%q is the name %q", in, got)
		}
	}
	if got := policy.Address("\u212aIM@Ｅvil.com"); got != "\u212aim@evil.com" {
		t.Errorf("address %q", got)
	}
}

// TestRulesOnNames: a rule about a domain holds for each way to write it.
func TestRulesOnNames(t *testing.T) {
	d, err := policy.Parse([]byte("rules:\n  - id: a\n    when: to.exists(t, t.under('xn--mnchen-3ya.example'))\n    then: deny\n  - id: b\n    when: to.exists(t, t.under('Zürich.example'))\n    then: deny\n  - id: c\n    when: \"'evil.com' in domains\"\n    then: deny\n"))
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"x@münchen.example", "x@mail.MÜNCHEN.example.", "x@xn--zrich-kva.example", "x@ｅvil.com"} {
		if v := policy.Decide(d, policy.Request{Kind: policy.KindSend, Mode: policy.Autonomous, To: []string{to}}); v.Effect != policy.Deny {
			t.Errorf("%s: %s", to, v.Effect)
		}
	}
}
