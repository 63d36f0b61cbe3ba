package secret_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"postern/internal/contract"
	"postern/internal/policy"
	"postern/internal/secret"
	"postern/internal/storetest"
)

// TestContractBoundsSecrets: in a bound sandbox a secret has the hosts of the contract and
// no others, and people are asked as often as the contract says, whatever the secret's own
// settings became after the approval.
func TestContractBoundsSecrets(t *testing.T) {
	f, ctx := setup(t, storetest.SQLite(t)), t.Context()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	c, err := contract.Parse([]byte(`
version: 1
name: report
commands: {allow: [{run: ls}]}
network: {allow: [a.example.com, b.example.com]}
credentials:
  - {secret: tok, hosts: [a.example.com]}
  - {secret: free, hosts: [a.example.com], header: X-Free, approval: first}
`))
	if err != nil {
		t.Fatal(err)
	}
	find := func(_ context.Context, project, digest string) (*contract.Contract, error) {
		if project != f.key.Project || digest != c.Digest() {
			return nil, errors.New("no such contract")
		}
		return c, nil
	}
	f.s, err = secret.New(ctx, log, f.db, secret.Config{Server: serverKey, Bounds: contract.NewBounds(log, find)})
	if err != nil {
		t.Fatal(err)
	}
	tok := f.create("tok", canary, "a.example.com")
	f.create("free", canary+"2")
	f.create("other", canary+"3", "a.example.com")
	bound := f.sandbox
	bound.Contract = "report@" + c.Digest()
	list := func(e policy.Egress) string {
		t.Helper()
		got, err := f.s.Bound(ctx, bound, &e)
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, b := range got {
			out = append(out, b.Name+" "+strings.Join(b.Hosts, ",")+" "+b.Approval)
		}
		return strings.Join(out, "; ")
	}
	e := c.Egress()
	change := func(ch secret.Change) {
		t.Helper()
		if _, err := f.s.Update(ctx, f.owner, tok.ID, ch); err != nil {
			t.Fatal(err)
		}
	}
	first, never := secret.First, secret.Never
	for _, tc := range []struct {
		name   string
		change secret.Change
		want   string
	}{
		{"as approved", secret.Change{}, "free a.example.com first; tok a.example.com always"},
		{"more hosts", secret.Change{Hosts: &[]string{"a.example.com", "b.example.com", "evil.example.org"}}, "free a.example.com first; tok a.example.com always"},
		{"a pattern", secret.Change{Hosts: &[]string{"*.example.com"}}, "free a.example.com first; tok a.example.com always"},
		{"asks less often", secret.Change{Approval: &first}, "free a.example.com first; tok a.example.com always"},
		{"asks never", secret.Change{Approval: &never}, "free a.example.com first; tok a.example.com always"},
		{"rotated, for other hosts", secret.Change{Value: &secret.Value{Text: canary + "new"}, Hosts: &[]string{"b.example.com"}}, "free a.example.com first"},
	} {
		change(tc.change)
		if got := list(e); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
	// Attached later, by name or by a rule: the contract does not name it.
	later := policy.Egress{Secrets: []string{"other", "free"}, Rules: map[string][]policy.Rule{"b.example.com": {{Headers: map[string]string{"X": "${e2b.secrets.other}"}}}}}
	if got := list(later); got != "free a.example.com first" {
		t.Errorf("attached later: got %q", got)
	}
	if err := f.s.Delete(ctx, f.key, "tok"); err != nil {
		t.Fatal(err)
	}
	f.create("tok", canary+"4", "*.example.com", "evil.example.org")
	if got := list(e); got != "free a.example.com first; tok a.example.com always" {
		t.Errorf("created again: got %q", got)
	}
	bound.Contract = "report@sha256:00"
	if got, err := f.s.Bound(ctx, bound, &e); err == nil {
		t.Errorf("an unknown contract has %+v", got)
	}
	if got, err := open(t, f.db, nil).Bound(ctx, bound, &e); err == nil {
		t.Errorf("without Bounds it has %+v", got)
	}
}
