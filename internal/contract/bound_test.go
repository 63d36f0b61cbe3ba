package contract_test

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"postern/internal/contract"
	"postern/internal/policy"
)

// bounds returns Bounds that know one contract, and its name with the digest.
func bounds(t *testing.T, text string) (*contract.Bounds, string) {
	t.Helper()
	c, err := contract.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return contract.NewBounds(slog.New(slog.NewTextHandler(t.Output(), nil)), func(_ context.Context, project, digest string) (*contract.Contract, error) {
		if project != "prj" || digest != c.Digest() {
			return nil, errors.New("no such contract")
		}
		return c, nil
	}), c.Name + "@" + c.Digest()
}

const (
	closedContract = "version: 1\nname: closed\ncommands:\n  allow:\n    - run: ls\n"
	openContract   = `
version: 1
name: open
commands:
  allow:
    - run: ls
network:
  allow: [api.example.com, "*.cdn.example.net", "db.example.com:5432", 93.184.216.0/24]
packages:
  - manager: pypi
credentials:
  - secret: tok
    hosts: [api.example.com]
    approval: first
mail:
  inbox: ibx_1
artifacts:
  - path: /work/out.csv
    type: csv
files:
  write: [/work]
`
	wideContract = `
version: 1
name: wide
commands:
  allow:
    - run: ls
network:
  allow: [0.0.0.0/0]
  deny: [93.184.216.0/24]
`
)

// TestContractIsTheCeilingOfGrants: a grant counts in a bound sandbox only as far as the
// contract has it. What is not known is refused.
func TestContractIsTheCeilingOfGrants(t *testing.T) {
	const in, out = "93.184.216.34:443", "1.1.1.1:443"
	at := func(kind policy.Kind, addr string, hosts ...string) contract.Grant {
		g := contract.Grant{Kind: kind, Hosts: hosts}
		if addr != "" {
			g.Addr = netip.MustParseAddrPort(addr)
		}
		return g
	}
	connect := func(addr string, hosts ...string) contract.Grant { return at(policy.KindConnect, addr, hosts...) }
	request := func(hosts ...string) contract.Grant { return at(policy.KindRequest, "", hosts...) }
	permit := func(hosts ...string) contract.Grant { return at(policy.KindPermit, "", hosts...) }
	secret := func(name string, hosts ...string) contract.Grant {
		return contract.Grant{Kind: policy.KindSecret, Secret: name, Hosts: hosts}
	}
	portOf := func(host string, ports ...uint16) contract.Grant {
		g := permit(host)
		g.Ports = ports
		return g
	}
	everyone := permit("api.example.com")
	everyone.Everyone = true
	for _, tc := range []struct {
		name, text string
		g          contract.Grant
		want       string // part of the reason; empty: allowed
	}{
		{"no network", closedContract, connect(out, "reg.example.org"), "the contract closed, which binds this sandbox, does not have reg.example.org; nothing that is granted later adds to it: propose a new contract"},
		{"no network, by address", closedContract, connect(out), "does not have 1.1.1.1"},
		{"no network, any name", closedContract, connect(""), "does not have any host"},
		{"no network, lookup", closedContract, connect("", "reg.example.org"), "does not have reg.example.org"},
		{"no network, request", closedContract, request("reg.example.org"), "does not have reg.example.org"},
		{"no network, proposal", closedContract, permit("reg.example.org"), "does not have reg.example.org"},
		{"no secret", closedContract, secret("tok", "api.example.com"), "does not have the secret tok"},
		{"no inbox", closedContract, at(policy.KindSend, ""), "does not have an inbox"},
		{"no artifact", closedContract, at(policy.KindExport, ""), "does not have any artifact"},
		{"a program", closedContract, at(policy.KindExec, ""), ""},

		{"a host", openContract, connect(out, "api.example.com"), ""},
		{"another host at the address of an allowed one", openContract, connect(out, "evil.example.org"), "does not have evil.example.org"},
		{"an allowed address", openContract, connect(in, "evil.example.org"), ""},
		{"a pattern", openContract, connect(out, "a.cdn.example.net"), ""},
		{"a pattern is not its own name", openContract, connect(out, "cdn.example.net"), "does not have cdn.example.net"},
		{"a pattern needs a dot", openContract, connect(out, "xcdn.example.net"), "does not have xcdn.example.net"},
		{"one of two hosts", openContract, request("api.example.com", "evil.example.org"), "does not have evil.example.org"},
		{"any name", openContract, connect(""), ""},
		{"a registry by its address", openContract, connect(out, "pypi.org"), "lets it read packages at pypi.org and nothing else"},
		{"a request to a registry", openContract, request("pypi.org"), "lets it read packages"},
		{"proposal of a registry", openContract, permit("pypi.org"), "lets it read packages"},
		{"proposal of a host", openContract, permit("api.example.com"), ""},
		{"proposal of a pattern", openContract, permit("*.cdn.example.net"), ""},
		{"proposal of a narrower pattern", openContract, permit("*.a.cdn.example.net"), ""},
		{"proposal of a wider pattern", openContract, permit("*.example.net"), "does not have *.example.net"},
		{"proposal of a pattern below a host", openContract, permit("*.api.example.com"), "does not have *.api.example.com"},
		{"proposal of the web's ports", openContract, portOf("api.example.com", 443, 80), ""},
		{"proposal of another port", openContract, portOf("api.example.com", 8443), "does not have api.example.com at port 8443"},
		{"proposal of the contract's own port", openContract, portOf("db.example.com", 5432), ""},
		{"proposal of the web's ports where the contract has another", openContract, portOf("db.example.com", 443, 80), "does not have db.example.com at port 443"},
		{"proposal for every sandbox", openContract, everyone, "anything for other sandboxes"},
		{"proposal of nothing", openContract, permit(), "does not have any host"},
		{"a secret", openContract, secret("tok", "api.example.com"), ""},
		{"a secret for another host", openContract, secret("tok", "a.cdn.example.net"), "does not have the secret tok for a.cdn.example.net"},
		{"a secret for a wider pattern", openContract, secret("tok", "*.example.com"), "does not have the secret tok for *.example.com"},
		{"a secret for no host", openContract, secret("tok"), "for every host"},
		{"another secret", openContract, secret("other", "api.example.com"), "does not have the secret other"},
		{"mail", openContract, at(policy.KindSend, ""), ""},
		{"artifacts", openContract, at(policy.KindExport, ""), ""},
		{"a tool elsewhere", openContract, at(policy.KindTool, "", "evil.example.org"), "does not have evil.example.org"},

		{"the Internet", wideContract, connect(out, "any.example.org"), ""},
		{"a denied address by name", wideContract, connect(in, "any.example.org"), "does not have any.example.org"},
		{"a denied address", wideContract, connect(in), "does not have 93.184.216.34"},

		{"a looser mode", wideContract, at(policy.KindMode, ""), "anything of the kind inbox.mode"},
		{"an allow list", wideContract, at(policy.KindAllow, ""), "anything of the kind inbox.allow"},
		{"a policy", wideContract, at(policy.KindChange, ""), "anything of the kind policy.change"},
		{"a webhook", wideContract, at(policy.KindWebhook, ""), "anything of the kind webhook.create"},
		{"a run", wideContract, at(policy.KindRun, ""), "anything of the kind run.start"},
		{"an unknown kind", wideContract, at("volume.mount", ""), "anything of the kind volume.mount"},
		{"no kind", wideContract, contract.Grant{}, "anything of the kind"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b, name := bounds(t, tc.text)
			v := b.Allows(t.Context(), "prj", name, tc.g)
			if (v.Effect == policy.Allow) != (tc.want == "") || !strings.Contains(v.Reason, tc.want) {
				t.Errorf("got %+v, want %q", v, tc.want)
			}
			if v := b.Allows(t.Context(), "prj", "", tc.g); v.Effect != policy.Allow {
				t.Errorf("not bound: got %+v", v)
			}
			for other, v := range map[string]policy.Verdict{
				"another project": b.Allows(t.Context(), "other", name, tc.g),
				"another digest":  b.Allows(t.Context(), "prj", "open@sha256:abc", tc.g),
				"no digest":       b.Allows(t.Context(), "prj", "open", tc.g),
				"no Bounds":       (*contract.Bounds)(nil).Allows(t.Context(), "prj", name, tc.g),
			} {
				if v.Effect != policy.Deny || !strings.Contains(v.Reason, "cannot be read") {
					t.Errorf("%s: got %+v", other, v)
				}
			}
		})
	}
}

// TestReplacedContractGrantsNothing: a contract in the database that is not the one that
// binds the sandbox counts as unreadable.
func TestReplacedContractGrantsNothing(t *testing.T) {
	wide, err := contract.Parse([]byte(wideContract))
	if err != nil {
		t.Fatal(err)
	}
	_, name := bounds(t, closedContract)
	b := contract.NewBounds(slog.New(slog.NewTextHandler(t.Output(), nil)), func(context.Context, string, string) (*contract.Contract, error) { return wide, nil })
	if v := b.Allows(t.Context(), "prj", name, contract.Grant{Kind: policy.KindConnect, Hosts: []string{"reg.example.org"}}); v.Effect != policy.Deny {
		t.Errorf("got %+v", v)
	}
	if _, err := b.Credential(t.Context(), "prj", name, "tok"); err == nil {
		t.Error("its credentials were read")
	}
}

func TestBoundsNameCredentials(t *testing.T) {
	b, name := bounds(t, `
version: 1
name: creds
commands: {allow: [{run: ls}]}
network: {allow: [a.example.com, b.example.com]}
credentials:
  - {secret: tok, hosts: [a.example.com], approval: never}
  - {secret: tok, hosts: [b.example.com], header: X-Key, approval: first}
  - {secret: other, hosts: [b.example.com]}
`)
	for secret, want := range map[string]contract.Credential{
		"tok":   {Secret: "tok", Hosts: []string{"a.example.com", "b.example.com"}, Approval: "first"},
		"other": {Secret: "other", Hosts: []string{"b.example.com"}, Approval: "always"},
		"none":  {Approval: "always"},
	} {
		got, err := b.Credential(t.Context(), "prj", name, secret)
		if err != nil || got.Secret != want.Secret || got.Approval != want.Approval || !slices.Equal(got.Hosts, want.Hosts) {
			t.Errorf("%s: got %+v, %v; want %+v", secret, got, err, want)
		}
	}
}

// TestBoundsNameHosts: a host whose contract opens another port is one that it has.
func TestBoundsNameHosts(t *testing.T) {
	b, name := bounds(t, openContract)
	got := b.Hosts(t.Context(), "prj", name, []string{"db.example.com", "*.example.net", "evil.example.org"})
	if want := []string{"db.example.com", "*.cdn.example.net"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := b.Hosts(t.Context(), "prj", "open@00", []string{"db.example.com"}); got != nil {
		t.Errorf("of a contract that cannot be read: %q", got)
	}
}

func TestNarrow(t *testing.T) {
	for _, tc := range []struct{ a, b, want string }{
		{"a.test", "a.test", "a.test"},
		{"a.test b.test", "b.test", "b.test"},
		{"*.test.org", "a.test.org test.org", "a.test.org"},
		{"a.test.org", "*.test.org", "a.test.org"},
		{"*.a.test.org *.b.test.org", "*.test.org", "*.a.test.org *.b.test.org"},
		{"*.test.org", "*.a.test.org", "*.a.test.org"},
		{"a.test", "b.test", ""},
		{"", "b.test", ""},
		{"a.test", "", ""},
	} {
		if got := strings.Join(contract.Narrow(strings.Fields(tc.a), strings.Fields(tc.b)), " "); got != tc.want {
			t.Errorf("Narrow(%q, %q): got %q, want %q", tc.a, tc.b, got, tc.want)
		}
	}
}
