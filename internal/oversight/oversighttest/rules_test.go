package oversighttest

import (
	"testing"

	"postern/internal/policy"
)

// TestStrictestRuleWins: tests can add a rule without loosening another.
func TestStrictestRuleWins(t *testing.T) {
	allowBob := Rule{ID: "bob", Kind: "email.send", To: "bob@example.com", Effect: policy.Allow}
	denyEvil := Rule{ID: "evil", Kind: "*", To: "*@evil.example", Effect: policy.Deny}
	askAll := Rule{ID: "ask", Kind: "*", Effect: policy.Ask}
	send := func(to ...string) policy.Request { return policy.Request{Kind: "email.send", To: to} }
	tests := []struct {
		name  string
		rules Rules
		req   policy.Request
		want  policy.Effect
		rule  string
	}{
		{"no rules", nil, send("bob@example.com"), policy.Ask, ""},
		{"allowed", Rules{allowBob}, send("bob@example.com"), policy.Allow, "bob"},
		{"case does not matter", Rules{allowBob}, send("Bob@Example.COM"), policy.Allow, "bob"},
		{"one of two matches", Rules{allowBob}, send("bob@example.com", "eve@evil.example"), policy.Ask, ""},
		{"no recipients match nothing", Rules{allowBob}, send(), policy.Ask, ""},
		{"stricter wins, first", Rules{askAll, allowBob}, send("bob@example.com"), policy.Ask, "ask"},
		{"stricter wins, last", Rules{allowBob, askAll}, send("bob@example.com"), policy.Ask, "ask"},
		{"deny wins", Rules{denyEvil, askAll}, send("x@evil.example"), policy.Deny, "evil"},
		{"another kind", Rules{allowBob}, policy.Request{Kind: "net.connect", To: []string{"bob@example.com"}}, policy.Ask, ""},
		{"a bad pattern matches nothing", Rules{{ID: "bad", Kind: "*", To: "[", Effect: policy.Allow}}, send("["), policy.Ask, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.rules.evaluate(tt.req)
			if got.Effect != tt.want || got.Rule != tt.rule || got.Reason == "" {
				t.Errorf("got %+v, want %s by %q", got, tt.want, tt.rule)
			}
		})
	}
}
