package policy_test

import (
	"strconv"
	"testing"

	"postern/internal/policy"
)

// TestConcernsFindsRulesThatCouldMatch: a rule about requests concerns a host
// unless its condition is false whatever else the request is.
func TestConcernsFindsRulesThatCouldMatch(t *testing.T) {
	for _, tt := range []struct {
		name, rule string
		want       bool
	}{
		{"no condition", "kind: net.request", true},
		{"this host", "kind: net.request, when: \"host == 'api.example.com'\"", true},
		{"another host", "kind: net.request, when: \"host == 'www.example.com'\"", false},
		{"another host and a method", "kind: net.request, when: \"method != 'GET' && host == 'www.example.com'\"", false},
		{"another host or a method", "kind: net.request, when: \"method != 'GET' || host == 'www.example.com'\"", true},
		{"below a domain", "kind: net.request, when: \"host.under('example.com') && size > 10\"", true},
		{"below another domain", "kind: net.request, when: \"host.under('example.org') && size > 10\"", false},
		{"to", "kind: net.request, when: \"to.all(h, h.under('example.com'))\"", true},
		{"another to", "kind: net.request, when: \"to.exists(h, h.under('example.org'))\"", false},
		{"another domain", "kind: net.request, when: \"'example.org' in domains\"", false},
		{"a method alone", "kind: net.request, when: \"method in ['POST', 'PUT']\"", true},
		{"the kind", "kind: [net.request, email.send], when: \"kind == 'email.send'\"", false},
		{"a secret", "kind: net.request, when: \"'github' in secrets\"", true},
		{"a header", "kind: net.request, when: \"headers['x'] == 'y' && host == 'x'\"", false},
		{"never", "kind: net.request, when: \"1 == 2\"", false},
		{"an error", "kind: net.request, when: \"1 / 0 == 2\"", true},
		{"an error for this host", "kind: net.request, when: \"host.under('example.com') && size / (size(host) - 15) > 1\"", true},
		{"a query", "kind: net.request, when: \"query.exists(k, k == host)\"", true},
		{"another kind", "kind: net.connect", false},
		{"no kind", "when: \"true\"", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := parse(t, "rules:\n  - {id: a, then: ask, "+tt.rule+"}\n")
			if got := d.Concerns(policy.KindRequest, "api.example.com"); got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// BenchmarkConcerns is what a connection costs where twenty rules are about other hosts.
func BenchmarkConcerns(b *testing.B) {
	text := "rules:\n"
	for i := range 20 {
		text += "  - {id: r" + strconv.Itoa(i) + ", kind: net.request, when: \"method == 'POST' && host.under('h" + strconv.Itoa(i) + ".example.com')\", then: ask}\n"
	}
	d := parse(b, text)
	for b.Loop() {
		if d.Concerns(policy.KindRequest, "api.example.com") {
			b.Fatal("a rule about another host concerns it")
		}
	}
}

// TestByMethodFindsRulesThatLookAtIt: so that bodies are read for the method only where it
// decides.
func TestByMethodFindsRulesThatLookAtIt(t *testing.T) {
	for _, tt := range []struct {
		name, rule     string
		method, asking bool
	}{
		{"no condition", "then: deny, kind: net.request", false, false},
		{"a method", "then: deny, kind: net.request, when: \"method == 'DELETE'\"", true, false},
		{"a method, of another host", "then: deny, kind: net.request, when: \"host == 'www.example.com' && method == 'DELETE'\"", false, false},
		{"a method in a list of all", "then: ask, kind: net.request, when: \"['GET', 'HEAD'].all(m, m != method)\"", true, true},
		{"a method in a choice", "then: ask, kind: net.request, when: \"(host == 'x' ? path : method).startsWith('P')\"", true, true},
		{"a method of any kind", "then: deny, when: \"method == 'DELETE'\"", true, false},
		{"a method of another kind", "then: deny, kind: secret.use, when: \"method == 'DELETE'\"", false, false},
		{"a path", "then: ask, kind: net.request, when: \"path == '/method'\"", false, true},
		{"another rule that asks", "then: ask, kind: net.request, when: \"host == 'www.example.com'\"", false, false},
		{"mail that is asked about", "then: ask, when: \"to.all(a, true)\"", false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := parse(t, "rules:\n  - {id: a, "+tt.rule+"}\n")
			if got := d.ByMethod(policy.KindRequest, "api.example.com"); got != tt.method {
				t.Errorf("by method: got %v", got)
			}
			if got := d.Asks(policy.KindRequest, "api.example.com"); got != tt.asking {
				t.Errorf("asks: got %v", got)
			}
		})
	}
}
