package permit_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/storetest"
)

// TestBoundSandboxesProposeWithinTheirContract: a sandbox that a contract binds proposes for
// itself, and hosts that its contract has. The question names the contract.
func TestBoundSandboxesProposeWithinTheirContract(t *testing.T) {
	c, err := contract.Parse([]byte("version: 1\nname: report\ncommands: {allow: [{run: ls}]}\nnetwork: {allow: [api.example.com, '*.cdn.example.net']}\npackages: [{manager: pypi}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	bounds := contract.NewBounds(slog.New(slog.NewTextHandler(t.Output(), nil)), func(_ context.Context, _, digest string) (*contract.Contract, error) {
		if digest != c.Digest() {
			return nil, errors.New("no such contract")
		}
		return c, nil
	})
	f := setup(t, storetest.SQLite(t), permit.Config{Bounds: bounds})
	bound, unknown := f.box, f.box
	bound.ID, bound.Contract = "i2", "report@"+c.Digest()
	unknown.ID, unknown.Contract = "i3", "report@sha256:00"
	for _, tc := range []struct {
		name string
		who  auth.Principal
		p    permit.Proposal
		want string
	}{
		{"another host", bound, permit.Proposal{Hosts: []string{"evil.example.org"}}, "the contract report, which binds this sandbox, does not have evil.example.org"},
		{"one of two", bound, permit.Proposal{Hosts: []string{"api.example.com", "evil.example.org"}}, "does not have evil.example.org"},
		{"a wider pattern", bound, permit.Proposal{Hosts: []string{"*.example.net"}}, "does not have *.example.net"},
		{"certain requests", bound, permit.Proposal{Hosts: []string{"evil.example.org"}, Methods: []string{"GET"}, Paths: []string{"/v1/*"}}, "does not have evil.example.org"},
		{"a registry", bound, permit.Proposal{Hosts: []string{"pypi.org"}}, "lets it read packages at pypi.org and nothing else"},
		{"for everyone", bound, permit.Proposal{Hosts: []string{"api.example.com"}, Scope: permit.ForProject}, "does not have anything for other sandboxes"},
		{"an unknown contract", unknown, permit.Proposal{Hosts: []string{"api.example.com"}}, "cannot be read"},
	} {
		if _, err := f.reg.Propose(t.Context(), tc.who, "proposal", tc.p); !errors.Is(err, auth.ErrForbidden) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want %q", tc.name, err, tc.want)
		}
	}
	if list, err := f.gate.Actions(t.Context(), f.owner, oversight.Query{}); err != nil || len(list) != 0 {
		t.Errorf("a person is asked about %d of them, %v", len(list), err)
	}
	a := f.propose(bound, permit.Proposal{Hosts: []string{"api.example.com", "*.a.cdn.example.net"}})
	a, err = f.reg.Narrow(t.Context(), f.owner, a.ID, a.Version, permit.Proposal{Hosts: []string{"api.example.com"}})
	if err != nil {
		t.Fatal(err)
	}
	v, err := f.reg.Show(a)
	if err != nil || !slices.ContainsFunc(v.Fields, func(d oversight.Field) bool { return d.Name == "Contract" && d.Value == bound.Contract }) ||
		!slices.ContainsFunc(v.Notes, func(n string) bool {
			return strings.Contains(n, "the contract report binds this sandbox and has these hosts")
		}) {
		t.Errorf("the question shows %+v, %v", v, err)
	}
	f.approved(a)
	if !f.allows(bound, "api.example.com", 443) {
		t.Error("the approved host is closed")
	}

	// What holds for it is what its contract has of the permits.
	everyone := f.propose(f.box, permit.Proposal{Hosts: []string{"*.example.net", "evil.example.org"}, Scope: permit.ForProject})
	if v, err := f.reg.Show(everyone); err != nil || !slices.ContainsFunc(v.Notes, func(n string) bool {
		return strings.Contains(n, "it opens nothing that the contract does not have")
	}) {
		t.Errorf("the question shows %+v, %v", v.Notes, err)
	}
	f.approved(everyone)
	f.approved(f.propose(f.box, permit.Proposal{Hosts: []string{"evil.example.org"}, Scope: permit.ForProject}))
	for who, want := range map[*auth.Principal]string{
		&bound:   "*.cdn.example.net; api.example.com",
		&unknown: "",
		&f.box:   "*.example.net evil.example.org; evil.example.org",
	} {
		list, err := f.reg.List(t.Context(), *who, permit.Query{})
		var got []string
		for _, p := range list {
			got = append(got, strings.Join(p.Hosts, " "))
		}
		slices.Sort(got)
		if strings.Join(got, "; ") != want || err != nil {
			t.Errorf("%s: got %q, %v; want %q", who, got, err, want)
		}
	}
}
