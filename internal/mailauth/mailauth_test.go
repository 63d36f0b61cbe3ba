package mailauth

import (
	"bytes"
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"postern/internal/mail"
	"postern/internal/mailauth/dnstest"
)

const hostname = "mx.p.example"

var (
	goodHost  = netip.MustParseAddr("192.0.2.1")
	otherHost = netip.MustParseAddr("192.0.2.99")
)

func newVerifier(t testing.TB, dns *dnstest.Server) *Verifier {
	t.Helper()
	v, err := New(Config{Resolver: dns.Resolver(), Hostname: hostname})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func crlfs(s string) []byte { return []byte(strings.ReplaceAll(s, "\n", "\r\n")) }

// The message that RFC 6376, appendix A.3, and RFC 8463, appendix A, sign.
const dinner = `From: Joe SixPack <joe@football.example.com>
To: Suzie Q <suzie@shopping.example.net>
Subject: Is dinner ready?
Date: Fri, 11 Jul 2003 21:00:37 -0700 (PDT)
Message-ID: <20030712040037.46341.5F8J@football.example.com>

Hi.

We lost the game. Are you hungry yet?

Joe.
`

const rfc6376 = `DKIM-Signature: v=1; a=rsa-sha256; s=brisbane; d=example.com;
      c=simple/simple; q=dns/txt; i=joe@football.example.com;
      h=Received : From : To : Subject : Date : Message-ID;
      bh=2jUSOH9NhtVGCQWNr9BrIAPreKQjO6Sn7XIkfJVOzv8=;
      b=AuUoFEfDxTDkHlLXSZEpZj79LICEps6eda7W3deTVFOk4yAUoqOB
      4nujc7YopdG5dWLSdNg6xNAZpOPr+kHxt1IrE+NahM6L/LbvaHut
      KVdkLLkpVaVVQPzeRDI009SO2Il5Lu7rDNH6mZckBdrIx0orEtZV
      4bmp/YzhwvcubU4=;
Received: from client1.football.example.com  [192.0.2.1]
      by submitserver.example.com with SUBMISSION;
      Fri, 11 Jul 2003 21:01:54 -0700 (PDT)
` + dinner

const rfc8463 = `DKIM-Signature: v=1; a=ed25519-sha256; c=relaxed/relaxed;
 d=football.example.com; i=@football.example.com;
 q=dns/txt; s=brisbane; t=1528637909; h=from : to :
 subject : date : message-id : from : subject : date;
 bh=2jUSOH9NhtVGCQWNr9BrIAPreKQjO6Sn7XIkfJVOzv8=;
 b=/gCrinpcQOoIfuHNQIbq4pgh9kyIK3AQUdt9OdqQehSwhEIug4D11Bus
 Fa3bT3FY5OsU7ZbnKELq+eXdp1Q1Dw==
DKIM-Signature: v=1; a=rsa-sha256; c=relaxed/relaxed;
 d=football.example.com; i=@football.example.com;
 q=dns/txt; s=test; t=1528637909; h=from : to : subject :
 date : message-id : from : subject : date;
 bh=2jUSOH9NhtVGCQWNr9BrIAPreKQjO6Sn7XIkfJVOzv8=;
 b=F45dVWDfMbQDGHJFlXUNB2HKfbCeLRyhDXgFpEL8GwpsRe0IeIixNTe3
 DhCVlUrSjV4BwcVcOF6+FF3Zo9Rpo1tFOeS9mPYQTnGdaSGsgeefOsk2Jz
 dA+L10TeYt9BgDfQNZtKdN1WO//KgIqXP7OdEFE4LjFYNcUxZQ4FADY+8=
` + dinner

// rfcKeys are the records of RFC 6376 appendix C and RFC 8463 appendix A.2.
func rfcKeys(s *dnstest.Server) {
	rsa := "v=DKIM1; p=MIGfMA0GCSqGSIb3DQEBAQUAA4GNADCBiQKBgQDwIRP/UC3SBsEmGqZ9ZJW3/DkMoGeLnQg1fWn7/zYtIxN2SnFCjxOCKG9v3b4jYfcTNh5ijSsq631uBItLa7od+v/RtdC2UzJ1lWT947qR+Rcac2gbto/NMqJ0fzfVjH4OuKhitdY9tf6mcwGjaNBcWToIMmPSPDdQPNUYckcQ2QIDAQAB"
	s.TXT("brisbane._domainkey.example.com", rsa)
	s.TXT("test._domainkey.football.example.com", "v=DKIM1; k=rsa; p=MIGfMA0GCSqGSIb3DQEBAQUAA4GNADCBiQKBgQDkHlOQoBTzWRiGs5V6NpP3idY6Wk08a5qhdR6wy5bdOKb2jLQiY/J16JYi0Qvx/byYzCNb3W91y3FutACDfzwQ/BC/e/8uBsCR+yz1Lxj+PL6lHvqMKrM3rG4hstT5QjvHO9PzoxZyVYLzBfO2EeC3Ip3G+2kryOTIKT+l/K4w3QIDAQAB")
	s.TXT("brisbane._domainkey.football.example.com", "v=DKIM1; k=ed25519; p=11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=")
}

// results verifies every DKIM signature of a message and returns "result domain".
func results(t testing.TB, v *Verifier, raw []byte) (out []string) {
	t.Helper()
	h := splitMessage(raw)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, s := range v.verifyDKIM(ctx, newAsker(v.cfg), h, &bodyHashes{body: h.body}) {
		out = append(out, s.result+" "+s.domain)
	}
	return out
}

func TestVectorsOfTheRFCs(t *testing.T) {
	dns := dnstest.Start(t)
	rfcKeys(dns)
	v := newVerifier(t, dns)
	for _, tt := range []struct {
		name, message string
		want          []string
	}{
		{"RFC 6376 A.3", rfc6376, []string{"pass example.com"}},
		{"RFC 8463 A.3", rfc8463, []string{"pass football.example.com", "pass football.example.com"}},
		{"a changed header", strings.Replace(rfc6376, "dinner", "lunch", 1), []string{"fail example.com"}},
		{"a changed body", strings.Replace(rfc8463, "lost", "won", 1), []string{"fail football.example.com", "fail football.example.com"}},
		{"an added field that was signed as absent", strings.Replace(rfc8463, "To: ", "Subject: another\nTo: ", 1), []string{"fail football.example.com", "fail football.example.com"}},
		{"white space that relaxed ignores", strings.NewReplacer("Subject: Is", "SUBJECT  :\n\tIs", "hungry yet", "hungry \t yet").Replace(rfc8463), []string{"pass football.example.com", "pass football.example.com"}},
		{"white space that simple does not", strings.Replace(rfc6376, "Subject: ", "Subject:  ", 1), []string{"fail example.com"}},
		{"empty lines at the end", rfc6376 + "\n\n\n", []string{"pass example.com"}},
		{"no line end", strings.TrimSuffix(rfc6376, "\n"), []string{"pass example.com"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := results(t, v, crlfs(tt.message)); !slices.Equal(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// records are the DNS of the messages below.
var records = []string{
	`good.example. TXT "v=spf1 ip4:192.0.2.1 -all"`, `_dmarc.good.example. TXT "v=DMARC1; p=reject; np=reject; sp=quarantine"`,
	`mail.good.example. TXT "v=spf1 ip4:192.0.2.1 -all"`, `www.good.example. A 192.0.2.7`,
	`strict.example. TXT "v=spf1 ip4:192.0.2.1 -all"`, `_dmarc.strict.example. TXT "v=DMARC1;p=quarantine;aspf=s;adkim=s"`,
	`mail.strict.example. TXT "v=spf1 ip4:192.0.2.1 -all"`,
	`_dmarc.testing.example. TXT "v=DMARC1; p=reject; t=y"`, `_dmarc.pct.example. TXT "v=DMARC1; p=reject; pct=0"`,
	`_dmarc.two.example. TXT "v=DMARC1; p=reject"`, `_dmarc.two.example. TXT "v=DMARC1; p=none"`,
	`_dmarc.odd.example. TXT "V=dmarc1; p=reject"`, `_dmarc.nop.example. TXT "v=DMARC1; rua=mailto:a@nop.example; p=maybe"`,
	// A public suffix with a policy, and a company below it with none.
	`_dmarc.bank.example. TXT "v=DMARC1; p=none; psd=y; np=reject; sp=quarantine"`, `one.bank.example. A 192.0.2.7`, `one.bank.example. TXT "v=spf1 ip4:192.0.2.1 -all"`,
	`two.bank.example. TXT "v=spf1 ip4:192.0.2.1 -all"`, `mail.one.bank.example. TXT "v=spf1 ip4:192.0.2.1 -all"`,
	// A department that is an organization of its own.
	`_dmarc.big.example. TXT "v=DMARC1; p=none"`, `_dmarc.own.big.example. TXT "v=DMARC1; p=reject; psd=n"`, `big.example. TXT "v=spf1 ip4:192.0.2.1 -all"`,
	`many.example. TXT "v=spf1 include:a.many.example include:b.many.example include:c.many.example -all"`,
	`loop.example. TXT "v=spf1 include:loop.example -all"`, `_dmarc.loop.example. TXT "v=DMARC1; p=reject"`,
	`xn--mnchen-3ya.example. TXT "v=spf1 ip4:192.0.2.1 -all"`, `_dmarc.xn--mnchen-3ya.example. TXT "v=DMARC1; p=reject"`,
}

func TestDMARC(t *testing.T) {
	dns := dnstest.Start(t, records...)
	dns.Fail("broken.example", true)
	dns.Fail("_dmarc.half.example", true)
	dns.Add(t, `half.example. TXT "v=spf1 ip4:192.0.2.1 -all"`, `_dmarc.flaky.example. TXT "v=DMARC1; p=reject"`)
	dns.Fail("flaky.example", true) // its policy too
	dns.Add(t, `_dmarc.spfless.example. TXT "v=DMARC1; p=reject"`)
	dns.Fail("mail.spfless.example", true)
	dns.Add(t, `evil.example. TXT "v=spf1 ip4:192.0.2.1 -all"`)
	dns.Fail("_dmarc.evil.example", true)
	dns.Add(t, `silent.evil.example. TXT "v=spf1 ip4:192.0.2.1 -all"`)
	v := newVerifier(t, dns)
	deep := "a.b.c.d.e.f.g.h.i.j.good.example"
	for _, tt := range []struct {
		name, from, mailFrom string
		remote               netip.Addr
		want                 string // dmarc result, policy
	}{
		{"spf of the same domain", "a@good.example", "a@good.example", goodHost, "pass "},
		{"in capitals", "a@GOOD.example", "a@Good.Example", goodHost, "pass "},
		{"spf of the organization", "a@good.example", "b@mail.good.example", goodHost, "pass "},
		{"another host", "a@good.example", "a@good.example", otherHost, "fail reject"},
		{"a subdomain that is there", "a@www.good.example", "a@x.example", goodHost, "fail quarantine"},
		{"a subdomain that is not", "a@gone.good.example", "a@x.example", goodHost, "fail reject"},
		{"a deep subdomain", "a@" + deep, "a@x.example", goodHost, "fail reject"},
		{"the name of another", "a@good.example", "a@strict.example", goodHost, "fail reject"},
		{"a name that only ends alike", "a@notgood.example", "a@good.example", goodHost, "none "},
		{"strict, the same", "a@strict.example", "a@strict.example", goodHost, "pass "},
		{"strict, a subdomain", "a@strict.example", "a@mail.strict.example", goodHost, "fail quarantine"},
		{"testing asks for less", "a@testing.example", "a@x.example", goodHost, "fail quarantine"},
		{"pct means nothing any more", "a@pct.example", "a@x.example", goodHost, "fail reject"},
		{"two records are none", "a@two.example", "a@x.example", goodHost, "none "},
		{"another version is none", "a@odd.example", "a@x.example", goodHost, "none "},
		{"a policy that is not known is none", "a@nop.example", "a@x.example", goodHost, "fail none"},
		{"below a public suffix, itself", "a@one.bank.example", "a@one.bank.example", goodHost, "pass "},
		{"below a public suffix, its host", "a@one.bank.example", "a@mail.one.bank.example", goodHost, "pass "},
		{"below a public suffix, a neighbour", "a@one.bank.example", "a@two.bank.example", goodHost, "fail quarantine"},
		{"below a public suffix, one that is not there", "a@three.bank.example", "a@two.bank.example", goodHost, "fail reject"},
		{"an organization of its own", "a@own.big.example", "a@big.example", goodHost, "fail reject"},
		{"no policy at all", "a@nothing.example", "a@x.example", goodHost, "none "},
		{"policy cannot be asked for", "a@broken.example", "a@x.example", goodHost, "temperror "},
		{"policy cannot be asked for, though it would pass", "a@half.example", "a@half.example", goodHost, "temperror "},
		{"the proof cannot be asked for", "a@spfless.example", "a@mail.spfless.example", goodHost, "temperror "},
		{"a forger whose own policy cannot be asked for", "a@good.example", "a@evil.example", goodHost, "fail reject"},
		{"a forger below such a name", "a@good.example", "a@silent.evil.example", goodHost, "fail reject"},
		{"a record that includes itself", "a@loop.example", "a@loop.example", goodHost, "fail reject"},
		{"a name in letters of its own", "a@münchen.example", "a@xn--mnchen-3ya.example", goodHost, "pass "},
		{"from this machine", "a@good.example", "a@x.example", netip.MustParseAddr("127.0.0.1"), "none "},
		{"no From", "", "a@good.example", goodHost, "permerror quarantine"},
		{"two authors of two domains", "a@good.example, b@strict.example", "a@good.example", goodHost, "permerror reject"},
		{"two authors of one domain", "a@good.example, b@good.example", "a@good.example", goodHost, "pass "},
		{"two fields", "a@good.example\r\nFrom: b@bank.example", "a@good.example", goodHost, "permerror reject"},
		{"no address", "The Bank", "a@good.example", goodHost, "permerror quarantine"},
		{"an invalid address", "a@good.example <>", "a@good.example", goodHost, "permerror quarantine"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			raw := "Subject: s\r\n\r\nb\r\n"
			if tt.from != "" {
				raw = "From: " + tt.from + "\r\n" + raw
			}
			dns.Forget()
			r, field := v.Verify(context.Background(), Message{Remote: tt.remote, Helo: "client.example", From: tt.mailFrom, Raw: []byte(raw)})
			if got := r.DMARC.Result + " " + r.Policy; got != tt.want {
				t.Errorf("got %q, want %q: %+v\n%s", got, tt.want, r, field)
			}
			n := 0
			for _, q := range dns.Asked() {
				if strings.HasPrefix(q, "TXT _dmarc.") && strings.HasSuffix(q, "good.example") {
					n++
				}
			}
			if n > 8 {
				t.Errorf("a walk of %d questions", n)
			}
		})
	}
}

func TestTreeNames(t *testing.T) {
	for domain, want := range map[string][]string{
		"com":                   {"com"},
		"example.com":           {"example.com", "com"},
		"a.b.c.d.e.f.g.h":       {"a.b.c.d.e.f.g.h", "b.c.d.e.f.g.h", "c.d.e.f.g.h", "d.e.f.g.h", "e.f.g.h", "f.g.h", "g.h", "h"},
		"1.2.3.a.b.c.d.e.f.g.h": {"1.2.3.a.b.c.d.e.f.g.h", "b.c.d.e.f.g.h", "c.d.e.f.g.h", "d.e.f.g.h", "e.f.g.h", "f.g.h", "g.h", "h"},
	} {
		if d := cmp.Diff(want, treeNames(domain)); d != "" {
			t.Errorf("%s: %s", domain, d)
		}
	}
}

func TestSPF(t *testing.T) {
	dns := dnstest.Start(t, records...)
	dns.Fail("broken.example", true)
	dns.Add(t, `hosts.example. TXT "v=spf1 a mx -all"`, `hosts.example. MX 10 mx.hosts.example.`, `mx.hosts.example. A 192.0.2.1`,
		`macro.example. TXT "v=spf1 exists:%{l}.x.macro.example -all"`, `joe.x.macro.example. A 127.0.0.2`,
		`six.example. TXT "v=spf1 ip6:2001:db8::/32 -all"`, `dup.example. TXT "v=spf1 -all"`, `dup.example. TXT "v=spf1 +all"`)
	v := newVerifier(t, dns)
	for _, tt := range []struct {
		from, helo string
		remote     string
		want       string
	}{
		{"a@good.example", "x.example", "192.0.2.1", "pass good.example"},
		{"a@good.example", "x.example", "::ffff:192.0.2.1", "pass good.example"},
		{"a@good.example", "x.example", "192.0.2.2", "fail good.example"},
		{"a@hosts.example", "x.example", "192.0.2.1", "pass hosts.example"},
		{"joe@macro.example", "x.example", "192.0.2.1", "pass macro.example"},
		{"jim@macro.example", "x.example", "192.0.2.1", "fail macro.example"},
		{"a@six.example", "x.example", "2001:db8::1", "pass six.example"},
		{"a@none.example", "x.example", "192.0.2.1", "none none.example"},
		{"a@dup.example", "x.example", "192.0.2.1", "permerror dup.example"},
		{"a@loop.example", "x.example", "192.0.2.1", "permerror loop.example"},
		{"a@many.example", "x.example", "192.0.2.1", "permerror many.example"},
		{"a@broken.example", "x.example", "192.0.2.1", "temperror broken.example"},
		{"a@good.example", "x.example", "127.0.0.1", "none good.example"},
		{"", "mail.good.example", "192.0.2.1", "pass mail.good.example"},
		{"", "[192.0.2.1]", "192.0.2.1", "none "},
		{"", "localhost", "192.0.2.1", "none "},
		{"", "192.0.2.1", "192.0.2.1", "none "},
	} {
		t.Run(tt.from+" "+tt.helo+" "+tt.remote, func(t *testing.T) {
			r, field := v.Verify(context.Background(), Message{Remote: netip.MustParseAddr(tt.remote), Helo: tt.helo, From: tt.from, Raw: []byte("From: a@b.example\r\n\r\n")})
			if got := r.SPF.Result + " " + r.SPF.Domain; got != tt.want {
				t.Errorf("got %q, want %q\n%s", got, tt.want, field)
			}
		})
	}
}

// TestOwnAddressFromThisMachine: a peer on this machine is believed about
// strangers, whom a server in front has checked, and not about our own inboxes.
func TestOwnAddressFromThisMachine(t *testing.T) {
	dns := dnstest.Start(t, records...)
	rfcKeys(dns)
	signed := crlfs(rfc8463) // from joe@football.example.com
	for _, tt := range []struct {
		name, from, ours, remote string
		raw                      []byte
		want                     string
	}{
		{"a stranger", "a@good.example", "b@good.example", "127.0.0.1", nil, "none "},
		{"an inbox", "b@good.example", "b@good.example", "127.0.0.1", nil, "fail quarantine"},
		{"an inbox, over IPv6", "b@good.example", "b@good.example", "::1", nil, "fail quarantine"},
		{"an inbox of two authors", "a@good.example, b@good.example", "b@good.example", "127.0.0.1", nil, "fail quarantine"},
		{"an inbox whose server signed it", "", "joe@football.example.com", "127.0.0.1", signed, "pass "},
		{"an inbox, signed and changed", "", "joe@football.example.com", "127.0.0.1", bytes.Replace(signed, []byte("lost"), []byte("won"), 1), "fail quarantine"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v, err := New(Config{Resolver: dns.Resolver(), Hostname: hostname, Ours: func(_ context.Context, a string) bool { return a == tt.ours }})
			if err != nil {
				t.Fatal(err)
			}
			if tt.raw == nil {
				tt.raw = []byte("From: " + tt.from + "\r\nSubject: s\r\n\r\nb\r\n")
			}
			r, field := v.Verify(t.Context(), Message{Remote: netip.MustParseAddr(tt.remote), Helo: "client.example", From: "a@x.example", Raw: tt.raw})
			if got := r.DMARC.Result + " " + r.Policy; got != tt.want {
				t.Errorf("got %q, want %q\n%s", got, tt.want, field)
			}
		})
	}
}

// TestSlowDNS: servers that never answer cost the time of one message, and the
// message is marked, not refused.
func TestSlowDNS(t *testing.T) {
	dns := dnstest.Start(t)
	dns.Drop("silent.example", true)
	v, err := New(Config{Resolver: dns.Resolver(), Hostname: hostname, Timeout: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	raw := strings.Replace(rfc8463, "d=football.example.com; i=@football.example.com", "d=silent.example", 1)
	raw = strings.Replace(raw, "joe@football.example.com>", "joe@silent.example>", 1)
	r, _ := v.Verify(context.Background(), Message{Remote: goodHost, Helo: "mx.silent.example", From: "a@silent.example", Raw: crlfs(raw)})
	want := mail.Results{
		SPF:   mail.Check{Result: "temperror", Domain: "silent.example"},
		DKIM:  mail.Check{Result: "temperror", Domain: "silent.example"},
		DMARC: mail.Check{Result: "temperror", Domain: "silent.example"},
		ARC:   mail.Check{Result: "none"},
	}
	for _, c := range []*mail.Check{&r.SPF, &r.DKIM, &r.DMARC} {
		c.Detail = ""
	}
	if d := cmp.Diff(want, r); d != "" {
		t.Error(d)
	}
}

// TestPanicStaysInItsConversation: a bug that a message can reach ends the
// conversation that brought it, and not the server.
func TestPanicStaysInItsConversation(t *testing.T) {
	v, err := New(Config{Resolver: dnstest.Start(t).Resolver(), Hostname: hostname, Own: func(context.Context, string) ([]string, bool) { panic("a bug") }})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if p := recover(); p == nil || !strings.Contains(p.(string), "a bug") {
			t.Errorf("recovered %v", p)
		}
	}()
	v.Verify(context.Background(), Message{Remote: goodHost, Raw: crlfs(rfc8463)})
	t.Error("it did not panic")
}

func TestForgedResultsAreStripped(t *testing.T) {
	v := newVerifier(t, dnstest.Start(t))
	const rest = "From: a@b.example\r\nSubject: Authentication-Results: mx.p.example; dkim=pass\r\n\r\nAuthentication-Results: mx.p.example; dkim=pass\r\n"
	for name, tt := range map[string]struct {
		field   string
		removed bool
	}{
		"ours":                      {"Authentication-Results: mx.p.example; dkim=pass\r\n", true},
		"in capitals":               {"AUTHENTICATION-RESULTS: MX.P.Example; dkim=pass\r\n", true},
		"no space":                  {"Authentication-Results:mx.p.example;dkim=pass\r\n", true},
		"space before the colon":    {"Authentication-Results \t: mx.p.example; dkim=pass\r\n", true},
		"folded":                    {"Authentication-Results:\r\n\tmx.p.example\r\n ; dkim=pass\r\n", true},
		"after a comment":           {"Authentication-Results: (a (nested) ; one) mx.p.example; dkim=pass\r\n", true},
		"a comment that ends oddly": {"Authentication-Results: (\\)) mx.p.example; dkim=pass\r\n", true},
		"in quotes":                 {"Authentication-Results: \"mx.p.example\"; dkim=pass\r\n", true},
		"escaped in quotes":         {"Authentication-Results: \"mx\\.p.example\"; dkim=pass\r\n", true},
		"with a version":            {"Authentication-Results: mx.p.example 1; dkim=pass\r\n", true},
		"without results":           {"Authentication-Results: mx.p.example\r\n", true},
		"a name with a last dot":    {"Authentication-Results: mx.p.example.; dkim=pass\r\n", true},
		"another's":                 {"Authentication-Results: mx.q.example; dkim=pass header.d=mx.p.example\r\n", false},
		"another's, with a comment": {"Authentication-Results: mx.q.example (not mx.p.example); dkim=pass\r\n", false},
		"another field":             {"X-Authentication-Results: mx.p.example; dkim=pass\r\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			want := tt.field + rest
			if tt.removed {
				want = rest
			}
			if got := string(v.Strip([]byte(tt.field + rest))); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
			if got := string(v.Strip([]byte("X: y\r\n" + tt.field + tt.field + rest))); tt.removed && got != "X: y\r\n"+rest {
				t.Errorf("in the middle: got %q", got)
			}
		})
	}
}
