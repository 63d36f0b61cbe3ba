package mailauth

import (
	"strings"
	"testing"

	"postern/internal/mail"
)

const fromVictim = "From: Ann <ann@victim.example>\r\n\r\nhello\r\n"

func TestGivenResults(t *testing.T) {
	t.Parallel()
	pass := mail.Results{DMARC: mail.Check{Result: "pass", Domain: "victim.example"}}
	for _, tt := range []struct {
		name, header string
		want         mail.Results
	}{
		{
			"all methods",
			"Authentication-Results: mx.provider.example;\r\n\tdkim=fail header.d=other.example;\r\n\tdkim=pass header.i=@victim.example header.s=x;\r\n\tspf=pass (it is; so) smtp.mailfrom=\"bounce\"@victim.example;\r\n\tdmarc=pass (p=REJECT sp=NONE) header.from=victim.example; arc=none\r\n",
			mail.Results{
				SPF: mail.Check{Result: "pass", Domain: "victim.example"}, DKIM: mail.Check{Result: "pass", Domain: "victim.example"}, ARC: mail.Check{Result: "none"},
				DMARC: mail.Check{Result: "pass", Domain: "victim.example"}, Policy: "reject",
			},
		},
		{"a property for the policy", "Authentication-Results: mx.provider.example 1; dmarc=fail policy.dmarc=quarantine header.from=victim.example\r\n", mail.Results{DMARC: mail.Check{Result: "fail", Domain: "victim.example"}, Policy: "quarantine"}},
		{"in another case, folded", "authentication-RESULTS :\r\n MX.provider.example;\r\n dmarc=pass header.from=victim.example\r\n", pass},
		{"no field", "Subject: x\r\n", mail.Results{}},
		// Attacks.
		{"the sender's own server", "Authentication-Results: evil.example; dmarc=pass header.from=victim.example\r\n", mail.Results{}},
		{"a name that contains the name", "Authentication-Results: mx.provider.example.evil.example; dmarc=pass header.from=victim.example\r\n", mail.Results{}},
		{"a name in a comment", "Authentication-Results: (mx.provider.example) evil.example; dmarc=pass header.from=victim.example\r\n", mail.Results{}},
		{
			"a second field below the provider's",
			"Authentication-Results: mx.provider.example; dmarc=fail header.from=victim.example\r\nAuthentication-Results: mx.provider.example; dmarc=pass header.from=victim.example\r\n",
			mail.Results{DMARC: mail.Check{Result: "fail", Domain: "victim.example"}},
		},
		{"results within a comment", "Authentication-Results: mx.provider.example; spf=fail (x; dmarc=pass header.from=victim.example) smtp.mailfrom=a@b.example\r\n", mail.Results{SPF: mail.Check{Result: "fail", Domain: "b.example"}}},
		{"results within quotes", "Authentication-Results: mx.provider.example; spf=fail smtp.mailfrom=\"x; dmarc=pass header.from=victim.example\"@b.example\r\n", mail.Results{SPF: mail.Check{Result: "fail", Domain: "b.example"}}},
		{"an unknown word", "Authentication-Results: mx.provider.example; dmarc=passed header.from=victim.example\r\n", mail.Results{}},
		{"in the body", "\r\nAuthentication-Results: mx.provider.example; dmarc=pass header.from=victim.example\r\n", mail.Results{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := Given([]byte(tt.header+fromVictim), "mx.provider.example"); got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
	field := "Authentication-Results: mx.provider.example; dmarc=pass header.from=%\r\n"
	for name, raw := range map[string]string{
		"another author": strings.Replace(field, "%", "evil.example", 1) + fromVictim,
		"two authors":    strings.Replace(field, "%", "victim.example", 1) + "From: x@evil.example\r\n" + fromVictim,
		"no author":      strings.Replace(field, "%", "victim.example", 1) + "Subject: x\r\n\r\n",
	} {
		if got := Given([]byte(raw), "mx.provider.example"); got.DMARC.Result != "permerror" {
			t.Errorf("%s: got %+v, want permerror", name, got.DMARC)
		}
	}
	if got := Given([]byte(strings.Replace(field, "%", "victim.example", 1)+fromVictim), ""); got != (mail.Results{}) {
		t.Errorf("without a trusted name: got %+v, want nothing", got)
	}
}

func FuzzGiven(f *testing.F) {
	f.Add([]byte("Authentication-Results: a; dmarc=pass (p=none) header.from=victim.example\r\n" + fromVictim))
	f.Add([]byte("Authentication-Results: a 1; spf=pass smtp.mailfrom=\"a\\\"b\"@c; dkim=pass header.d=d (\\) ((x)\r\n\r\n"))
	f.Add([]byte("authentication-results:(a;\r\n \";=(\r\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := Given(raw, "a")
		for _, c := range []mail.Check{r.SPF, r.DKIM, r.DMARC, r.ARC} {
			if len(c.Domain) > 300 || strings.ContainsAny(c.Domain, "\r\n\x00") {
				t.Errorf("the domain %q is not printable or too long", c.Domain)
			}
		}
		if r.DMARC.Result == "pass" {
			if list, n, _ := mail.Authors(raw); n != 1 || len(list) != 1 {
				t.Errorf("proved %d authors in %d fields", len(list), n)
			}
		}
	})
}
