package policy_test

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"postern/internal/policy"
)

func TestTemplatesOfHeaders(t *testing.T) {
	for _, tc := range []struct {
		value string
		want  []policy.Part
		bad   bool
	}{
		{"", nil, false},
		{"plain", []policy.Part{{Text: "plain"}}, false},
		{"Bearer ${e2b.secrets.github}", []policy.Part{{Text: "Bearer "}, {Secret: "github"}}, false},
		{"${e2b.secrets.GitHub-Key}", []policy.Part{{Secret: "github-key"}}, false},
		{"${e2b.secrets.a}:${e2b.identity.tokens.AWS}!", []policy.Part{{Secret: "a"}, {Text: ":"}, {Token: "AWS"}, {Text: "!"}}, false},
		{"${HOME} $ { }", []policy.Part{{Text: "${HOME} $ { }"}}, false},
		{"${e2b.secrets.a.b}", []policy.Part{{Secret: "a.b"}}, false},
		{"${e2b.secrets.}", nil, true},
		{"${e2b.secrets}", nil, true},
		{"${e2b}", nil, true},
		{"${e2b.", nil, true},
		{"x ${e2b.secrets.a", nil, true},
		{"${e2b.secrets.${e2b.secrets.a}}", nil, true},
		{"${e2b.secrets.a{b}", nil, true},
		{"${e2b.secret.a}", nil, true},
		{"${e2b.identity.tokens.}", nil, true},
		{"${e2b.identity.a}", nil, true},
		{"${e2b.secrets.a\x00}", nil, true},
		{"${e2b.secrets." + strings.Repeat("a", 129) + "}", nil, true},
	} {
		got, err := policy.ParseTemplate(tc.value)
		if errors.Is(err, policy.ErrPlaceholder) != tc.bad || (err != nil) != tc.bad || !reflect.DeepEqual(got, tc.want) {
			t.Errorf("ParseTemplate(%q) = %+v, %v, want %+v, error %v", tc.value, got, err, tc.want, tc.bad)
		}
	}
}

func TestExactRulesWinOverLongestPatternsAndNeverMerge(t *testing.T) {
	rule := func(name string) []policy.Rule { return []policy.Rule{{Headers: map[string]string{"X-" + name: name}}} }
	e := policy.Egress{Rules: map[string][]policy.Rule{
		"api.example.com": rule("Exact"), "*.example.com": rule("Short"), "*.eu.example.com": rule("Long"), "*.com": rule("Tld"), "off.example.com": {},
	}}
	for host, want := range map[string]string{
		"api.example.com": "Exact", "API.example.com.": "Exact", "x.example.com": "Short", "a.b.example.com": "Short", "x.eu.example.com": "Long", "eu.example.com": "Short",
		"example.com": "Tld", "other.com": "Tld", "com": "-", "example.org": "-", "badexample.org": "-", "10.0.0.1": "-", "": "-", "off.example.com": "",
	} {
		r, ok := e.RuleFor(host)
		got := "-"
		if ok {
			got = ""
		}
		for _, v := range r.Headers {
			got += v
		}
		if got != want {
			t.Errorf("RuleFor(%q) = %q, want %q", host, got, want)
		}
	}
}

func TestRulesThatCannotBeTaken(t *testing.T) {
	one := func(name, value string) map[string][]policy.Rule {
		return map[string][]policy.Rule{"a.test": {{Headers: map[string]string{name: value}}}}
	}
	at := func(domain string) map[string][]policy.Rule { return map[string][]policy.Rule{domain: {{}}} }
	many := func(n int, f func(int) string) map[string]string {
		m := map[string]string{}
		for i := range n {
			m[f(i)] = "v"
		}
		return m
	}
	domains := func(n int) map[string][]policy.Rule {
		m := map[string][]policy.Rule{}
		for i := range n {
			m[fmt.Sprintf("d%d.test", i)] = nil
		}
		return m
	}
	var secrets []string
	for i := range 33 {
		secrets = append(secrets, fmt.Sprintf("${e2b.secrets.s%d}", i))
	}
	header := func(i int) string { return fmt.Sprintf("X-H%d", i) }
	long := strings.Repeat("a", 62) + "." + strings.Repeat("b", 60) + ".test" // 128 characters
	for _, tc := range []struct {
		name  string
		rules map[string][]policy.Rule
		want  string // part of the error, or empty
	}{
		{"nothing", nil, ""},
		{"ten domains", domains(10), ""},
		{"eleven domains", domains(11), "has 11 domains; at most 10"},
		{"a domain of 128", at(long), ""},
		{"a domain of 129", at("a" + long), "has 129 characters; at most 128"},
		{"a bare star", at("*"), "want a host name"},
		{"two stars", at("*.*.test"), "want a host name"},
		{"a star inside", at("a.*.test"), "want a host name"},
		{"a pattern of a top-level domain", at("*.com"), ""},
		{"a leading dot", at(".a.test"), "want a host name"},
		{"an address", at("192.0.2.1"), "want a host name"},
		{"a prefix", at("192.0.2.0/24"), "want a host name"},
		{"a port", at("a.test:443"), "want a host name"},
		{"a URL", at("https://a.test"), "want a host name"},
		{"no name", at(""), "want a host name"},
		{"the same name twice", map[string][]policy.Rule{"a.test": {}, "A.test": {}}, "another key"},
		{"two rules", map[string][]policy.Rule{"a.test": {{}, {}}}, "has 2 rules"},
		{"20 headers", map[string][]policy.Rule{"a.test": {{Headers: many(20, header)}}}, ""},
		{"21 headers", map[string][]policy.Rule{"a.test": {{Headers: many(21, header)}}}, "has 21 headers"},
		{"a name of 64", one(strings.Repeat("x", 64), "v"), ""},
		{"a name of 65", one(strings.Repeat("x", 65), "v"), "65 bytes; at most 64"},
		{"a value of 2048", one("X-A", strings.Repeat("x", 2048)), ""},
		{"a value of 2049", one("X-A", strings.Repeat("x", 2049)), "2049 bytes; at most 2048"},
		{"32 secrets", one("X-A", strings.Join(secrets[:32], "")), ""},
		{"33 secrets", one("X-A", strings.Join(secrets, "")), "names 33 secrets; at most 32"},
		{"the same header twice", map[string][]policy.Rule{"a.test": {{Headers: map[string]string{"x-a": "1", "X-A": "2"}}}}, "another header"},
		{"a malformed placeholder", one("X-A", "${e2b.secrets}"), "malformed placeholder"},
		{"a known token", one("X-A", "${e2b.identity.tokens.aws}"), ""},
		{"an unknown token", one("X-A", "${e2b.identity.tokens.gcp}"), `there is no token "gcp"`},
		{"a line break", one("X-A", "a\r\nX-B: b"), "not printable"},
		{"a line break in the name", one("X-A: b\r\nX", "a"), "not a token"},
		{"no header name", one("", "a"), "is empty"},
		{"a pseudo-header", one(":authority", "a"), "not a token"},
		{"a space at the end", one("X-A", "a "), "a space"},
		{"an underscore", one("X_A", "a"), ""},
	} {
		_, err := policy.NewRules(tc.rules, map[string]policy.Token{"aws": {}})
		switch {
		case tc.want == "" && err != nil:
			t.Errorf("%s: %v", tc.name, err)
		case tc.want != "" && (!errors.Is(err, policy.ErrInvalid) || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%s: got error %v, want %q", tc.name, err, tc.want)
		}
	}
	for _, name := range []string{"Host", "Content-Length", "transfer-encoding", "Connection", "Upgrade", "TE", "Trailer", "Proxy-Authorization", "Proxy-Connection", "Expect", "Keep-Alive", "Sec-WebSocket-Key"} {
		if _, err := policy.NewRules(one(name, "x"), nil); !errors.Is(err, policy.ErrInvalid) {
			t.Errorf("a rule that sets %s: got error %v, want ErrInvalid", name, err)
		}
	}
}

func TestRulesHaveOneForm(t *testing.T) {
	got, err := policy.NewRules(map[string][]policy.Rule{"API.Example.COM.": {{Headers: map[string]string{"x-api-key": "${e2b.secrets.K}"}}}, "*.B.test": {}}, nil)
	want := map[string][]policy.Rule{"api.example.com": {{Headers: map[string]string{"X-Api-Key": "${e2b.secrets.K}"}}}, "*.b.test": {}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
	if got, want := (&policy.Egress{Rules: got}).RuleSecrets(), map[string][]string{"k": {"api.example.com"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("got secrets %v, want %v", got, want)
	}
}

func TestProxiesAndTokensThatCannotBeTaken(t *testing.T) {
	for _, tc := range []struct {
		name string
		e    policy.Egress
		want string
	}{
		{"a proxy by name", policy.Egress{Proxy: &policy.Proxy{Address: "proxy.example.com:1080"}}, ""},
		{"a proxy by address", policy.Egress{Proxy: &policy.Proxy{Address: "[2001:db8::1]:1080", Username: "u", Sealed: []byte{1}}}, ""},
		{"a proxy without a port", policy.Egress{Proxy: &policy.Proxy{Address: "proxy.example.com"}}, "egressProxy.address"},
		{"port 0", policy.Egress{Proxy: &policy.Proxy{Address: "proxy.example.com:0"}}, "egressProxy.address"},
		{"port 65536", policy.Egress{Proxy: &policy.Proxy{Address: "proxy.example.com:65536"}}, "egressProxy.address"},
		{"a URL", policy.Egress{Proxy: &policy.Proxy{Address: "socks5://proxy.example.com:1080"}}, "egressProxy.address"},
		{"an odd address", policy.Egress{Proxy: &policy.Proxy{Address: "0x7f.1:1080"}}, "egressProxy.address"},
		{"a long user name", policy.Egress{Proxy: &policy.Proxy{Address: "p.test:1", Username: strings.Repeat("u", 256)}}, "egressProxy.username"},
		{"a password alone", policy.Egress{Proxy: &policy.Proxy{Address: "p.test:1", Sealed: []byte{1}}}, "egressProxy.password"},
		{"a token", policy.Egress{Tokens: map[string]policy.Token{"aws": {Audience: "sts.amazonaws.com", Type: policy.TokenType}}}, ""},
		{"a token of another type", policy.Egress{Tokens: map[string]policy.Token{"aws": {Audience: "a", Type: "X509-SVID"}}}, "tokenType"},
		{"a token without audience", policy.Egress{Tokens: map[string]policy.Token{"aws": {Type: policy.TokenType}}}, "audience"},
		{"a token with a brace", policy.Egress{Tokens: map[string]policy.Token{"a}": {Audience: "a", Type: policy.TokenType}}}, "brace"},
	} {
		err := tc.e.Validate()
		if tc.want == "" && err != nil || tc.want != "" && (!errors.Is(err, policy.ErrInvalid) || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: got error %v, want %q", tc.name, err, tc.want)
		}
	}
}

// TestListsMatchAsE2Bs is E2B's order: a domain or an address in allowOut, then
// denyOut, then the default, which is to allow.
func TestListsMatchAsE2Bs(t *testing.T) {
	const all = "0.0.0.0/0"
	for _, tc := range []struct {
		name        string
		off         bool // allow_internet_access is false
		allow, deny []string
		addr, host  string
		want        bool
	}{
		{"nothing", false, nil, nil, "1.1.1.1", "", true},
		{"no Internet", true, nil, nil, "1.1.1.1", "", false},
		{"no Internet but an address", true, []string{"1.1.1.1"}, nil, "1.1.1.1", "", true},
		{"no Internet but a range", true, []string{"1.1.1.0/24"}, nil, "1.1.1.9", "", true},
		{"no Internet but everything", true, []string{all}, nil, "1.1.1.1", "", true},
		{"allowOut alone narrows nothing", false, []string{"8.8.8.8"}, nil, "1.1.1.1", "", true},
		{"a denied address", false, nil, []string{"1.1.1.1"}, "1.1.1.1", "", false},
		{"beside a denied address", false, nil, []string{"1.1.1.1"}, "1.1.1.2", "", true},
		{"a denied range with host bits", false, nil, []string{"1.1.1.77/24"}, "1.1.1.1", "", false},
		{"allow wins", false, []string{"1.1.1.1"}, []string{"1.1.1.0/24"}, "1.1.1.1", "", true},
		{"allow wins, also the wider one", false, []string{"1.1.1.0/24"}, []string{"1.1.1.1"}, "1.1.1.1", "", true},
		{"allow wins over all", false, []string{"1.1.1.0/24"}, []string{all}, "1.1.1.1", "", true},
		{"all denied", false, []string{"1.1.1.0/24"}, []string{all}, "1.1.2.1", "", false},
		{"a domain", false, []string{"example.com"}, []string{all}, "1.1.1.1", "example.com", true},
		{"a domain in capitals", false, []string{"Example.COM"}, []string{all}, "1.1.1.1", "eXample.com", true},
		{"another domain at its address", false, []string{"example.com"}, []string{all}, "1.1.1.1", "example.org", false},
		{"no domain at its address", false, []string{"example.com"}, []string{all}, "1.1.1.1", "", false},
		{"below a domain", false, []string{"example.com"}, []string{all}, "1.1.1.1", "a.example.com", false},
		{"a wildcard", false, []string{"*.example.com"}, []string{all}, "1.1.1.1", "a.b.example.com", true},
		{"a wildcard and its apex", false, []string{"*.example.com"}, []string{all}, "1.1.1.1", "example.com", false},
		{"a wildcard and a longer name", false, []string{"*.example.com"}, []string{all}, "1.1.1.1", "badexample.com", false},
		{"domains and addresses", false, []string{"example.com", "9.9.9.9"}, []string{all}, "9.9.9.9", "other.test", true},
		{"a domain without Internet", true, []string{"example.com"}, nil, "1.1.1.1", "example.com", true},
		{"a domain at a private address", false, []string{"example.com"}, []string{all}, "10.1.2.3", "example.com", false},
		{"a private address", false, []string{"10.1.2.3"}, nil, "10.1.2.3", "", false},
		{"everything but a denied range", false, []string{all}, []string{"1.1.1.0/24"}, "1.1.1.1", "", true},
	} {
		o, err := policy.NewOutbound(policy.Egress{Internet: !tc.off, AllowOut: tc.allow, DenyOut: tc.deny}, policy.Ceiling{Internet: true})
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		c := policy.Connection{Addr: netip.AddrPortFrom(netip.MustParseAddr(tc.addr), 443)}
		if tc.host != "" {
			c.Names = []string{tc.host}
		}
		if v := o.Connect(c); (v.Effect == policy.Allow) != tc.want {
			t.Errorf("%s: got %s (%s), want allowed %v", tc.name, v.Effect, v.Reason, tc.want)
		}
	}
	for name, e := range map[string]policy.Egress{
		"a domain with everything open":   {Internet: true, AllowOut: []string{"example.com"}},
		"a domain with a range denied":    {Internet: true, AllowOut: []string{"example.com"}, DenyOut: []string{"10.0.0.0/8"}},
		"a domain in denyOut":             {Internet: true, DenyOut: []string{"example.com"}},
		"a bare star":                     {AllowOut: []string{"*"}},
		"a star inside":                   {AllowOut: []string{"a.*.test"}},
		"a URL":                           {AllowOut: []string{"https://example.com"}},
		"a prefix that is longer than 32": {DenyOut: []string{"1.1.1.1/33"}},
		"an address with a leading zero":  {DenyOut: []string{"1.1.1.01"}},
		"an empty entry":                  {AllowOut: []string{""}},
	} {
		if err := e.Validate(); !errors.Is(err, policy.ErrInvalid) {
			t.Errorf("%s: got error %v, want ErrInvalid", name, err)
		}
	}
}

// FuzzParseTemplate: parts say what the value says, and no text part begins a
// placeholder.
func FuzzParseTemplate(f *testing.F) {
	for _, s := range []string{"", "Bearer ${e2b.secrets.a}", "${e2b.identity.tokens.a}${e2b.secrets.b}x", "${e2b", "${e2b.secrets.a{b}", "$${e2b.secrets.a}}"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, value string) {
		parts, err := policy.ParseTemplate(value)
		if err != nil {
			return
		}
		var again strings.Builder
		for _, p := range parts {
			switch {
			case p.Secret != "":
				again.WriteString("${e2b.secrets." + p.Secret + "}")
			case p.Token != "":
				again.WriteString("${e2b.identity.tokens." + p.Token + "}")
			default:
				if p.Text == "" || strings.Contains(p.Text, "${e2b") {
					t.Errorf("%q has the text part %q", value, p.Text)
				}
				again.WriteString(p.Text)
			}
		}
		if strings.ToLower(again.String()) != strings.ToLower(value) { //nolint:staticcheck // names were put in lower case, which EqualFold undoes for fewer letters
			t.Errorf("%q became %q", value, again.String())
		}
	})
}

// FuzzRules: whatever is given as a rule, what is taken has one form, and its domain
// is found again.
func FuzzRules(f *testing.F) {
	f.Add("api.example.com", "Authorization", "Bearer ${e2b.secrets.a}")
	f.Add("*.example.com", "x-a", "v")
	f.Add("*", "Host", "a\nb")
	f.Fuzz(func(t *testing.T, domain, name, value string) {
		one, err := policy.NewRules(map[string][]policy.Rule{domain: {{Headers: map[string]string{name: value}}}}, nil)
		if err != nil {
			if !errors.Is(err, policy.ErrInvalid) {
				t.Errorf("got error %v", err)
			}
			return
		}
		two, err := policy.NewRules(one, nil)
		if err != nil || !reflect.DeepEqual(one, two) {
			t.Errorf("%v became %v (%v)", one, two, err)
		}
		e := policy.Egress{Rules: one}
		for key := range one {
			host := strings.Replace(key, "*", "a", 1)
			if _, err := policy.Name(host); err != nil { // too long below the pattern
				continue
			}
			if _, ok := e.RuleFor(host); !ok {
				t.Errorf("no rule for %q of %q", host, key)
			}
			if _, err := netip.ParseAddr(host); err == nil {
				t.Errorf("took the address %q", key)
			}
		}
	})
}
