package request_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"postern/internal/contract"
	"postern/internal/outgoing"
	"postern/internal/policy"
	"postern/internal/request"
	"postern/internal/storetest"
)

// TestRulesDoNotLoosenAContractsApproval: in a bound sandbox neither a rule that allows the
// use of a secret nor the secret's own setting spares the question that the contract
// promises. A secret that the contract does not have is refused.
func TestRulesDoNotLoosenAContractsApproval(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	f.holds("rules:\n  - {id: secrets, kind: secret.use, then: allow}\n")
	c, err := contract.Parse([]byte(`
version: 1
name: report
commands: {allow: [{run: ls}]}
network: {allow: [api.example.com, b.example.com]}
credentials:
  - {secret: tok, hosts: [api.example.com]}
  - {secret: once, hosts: [api.example.com], header: X-Once, approval: first}
  - {secret: quiet, hosts: [api.example.com], header: X-Quiet, approval: never}
  - {secret: far, hosts: [b.example.com], approval: never}
`))
	if err != nil {
		t.Fatal(err)
	}
	bounds := contract.NewBounds(f.log, func(_ context.Context, _, digest string) (*contract.Contract, error) {
		if digest != c.Digest() {
			return nil, errors.New("no such contract")
		}
		return c, nil
	})
	s := f.start(time.Millisecond)
	s.Admission = request.New(f.log, f.db, s.gate, s.rules, request.Permits{Register: s.permits, Bounds: bounds}, time.Millisecond)
	unread := request.New(f.log, f.db, s.gate, s.rules, request.Permits{Register: s.permits}, time.Millisecond)
	without := request.New(f.log, f.db, s.gate, s.rules, nil, time.Millisecond)
	free, bound, unknown := f.box(), f.box(), f.box()
	bound.Contract, unknown.Contract = "report@"+c.Digest(), "report@sha256:00"
	use := func(name string) *outgoing.Request { return get("GET", "/1", "", secret(name, "never")) }
	for _, tc := range []struct {
		name string
		got  policy.Verdict
		want policy.Effect
	}{
		{"not bound", s.Judge(t.Context(), free, use("tok")), policy.Allow},
		{"always", s.Judge(t.Context(), bound, use("tok")), policy.Ask},
		{"first", s.Judge(t.Context(), bound, use("once")), policy.Ask},
		{"never", s.Judge(t.Context(), bound, use("quiet")), policy.Allow},
		{"of another host", s.Judge(t.Context(), bound, use("far")), policy.Deny},
		{"not of the contract", s.Judge(t.Context(), bound, use("other")), policy.Deny},
		{"an unknown contract", s.Judge(t.Context(), unknown, use("quiet")), policy.Deny},
		{"no Bounds", unread.Judge(t.Context(), bound, use("quiet")), policy.Deny},
		{"no grants", without.Judge(t.Context(), bound, use("quiet")), policy.Deny},
		{"no secret", s.Judge(t.Context(), bound, get("GET", "/1", "")), policy.Allow},
	} {
		if tc.got.Effect != tc.want {
			t.Errorf("%s: got %+v, want %s", tc.name, tc.got, tc.want)
		}
	}
	// Each use with "always" is a question of its own, and "first" is a grant.
	s.ask(t.Context(), bound, use("tok"))
	f.decide(true)
	if v := s.ask(t.Context(), bound, use("tok")); v.Effect != policy.Allow {
		t.Errorf("always, approved: got %+v", v)
	}
	if v := s.Judge(t.Context(), bound, use("tok")); v.Effect != policy.Ask {
		t.Errorf("always, the next one: got %+v", v)
	}
	s.ask(t.Context(), bound, use("once"))
	f.decide(true)
	r := use("once")
	if v := s.Judge(t.Context(), bound, r); v.Effect != policy.Allow || len(r.Permits) != 1 {
		t.Errorf("first, approved: got %+v under %v", v, r.Permits)
	}
}
