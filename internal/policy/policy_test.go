package policy_test

import (
	"testing"

	"postern/internal/policy"
)

func TestEvaluate(t *testing.T) {
	allowBob := policy.Rule{ID: "bob", Kind: "email.send", To: "bob@example.com", Effect: policy.Allow}
	denyEvil := policy.Rule{ID: "evil", Kind: "*", To: "*@evil.example", Effect: policy.Deny}
	askAll := policy.Rule{ID: "ask", Kind: "*", Effect: policy.Ask}
	send := func(to ...string) policy.Request { return policy.Request{Kind: "email.send", To: to} }
	tests := []struct {
		name  string
		rules policy.Rules
		req   policy.Request
		want  policy.Effect
		rule  string
	}{
		{"no rules", nil, send("bob@example.com"), policy.Ask, ""},
		{"allowed", policy.Rules{allowBob}, send("bob@example.com"), policy.Allow, "bob"},
		{"case does not matter", policy.Rules{allowBob}, send("Bob@Example.COM"), policy.Allow, "bob"},
		{"one of two matches", policy.Rules{allowBob}, send("bob@example.com", "eve@evil.example"), policy.Ask, ""},
		{"no recipients match nothing", policy.Rules{allowBob}, send(), policy.Ask, ""},
		{"stricter wins, first", policy.Rules{askAll, allowBob}, send("bob@example.com"), policy.Ask, "ask"},
		{"stricter wins, last", policy.Rules{allowBob, askAll}, send("bob@example.com"), policy.Ask, "ask"},
		{"deny wins", policy.Rules{denyEvil, askAll}, send("x@evil.example"), policy.Deny, "evil"},
		{"another kind", policy.Rules{allowBob}, policy.Request{Kind: "net.connect", To: []string{"bob@example.com"}}, policy.Ask, ""},
		{"a bad pattern matches nothing", policy.Rules{{ID: "bad", Kind: "*", To: "[", Effect: policy.Allow}}, send("["), policy.Ask, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.rules.Evaluate(tt.req)
			if got.Effect != tt.want || got.Rule != tt.rule || got.Reason == "" {
				t.Errorf("got %+v, want %s by %q", got, tt.want, tt.rule)
			}
		})
	}
}
