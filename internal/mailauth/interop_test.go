package mailauth

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"maps"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/emersion/go-msgauth/dkim"

	"postern/internal/mailauth/dnstest"
)

// A keyPair is a private key as programs read it, with its DNS record.
type keyPair struct{ pem, record string }

func newKey(t testing.TB, bits int) keyPair {
	t.Helper()
	var private any
	var record string
	if bits == 0 {
		public, k, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		private, record = k, "v=DKIM1; k=ed25519; p="+base64.StdEncoding.EncodeToString(public)
	} else {
		k, err := rsa.GenerateKey(rand.Reader, bits)
		if err != nil {
			t.Fatal(err)
		}
		public, err := x509.MarshalPKIXPublicKey(&k.PublicKey)
		if err != nil {
			t.Fatal(err)
		}
		private, record = k, "v=DKIM1; k=rsa; p="+base64.StdEncoding.EncodeToString(public)
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return keyPair{string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})), record}
}

type theirs struct {
	SPF, ARC, DMARC string
	DKIM            []string
}

// A player is npm's mailauth, in a process that the test ends. To start it takes
// longer than to ask it.
type player struct {
	in  *json.Encoder
	out *json.Decoder
	end func() string // ends it and returns what it complained of
}

func newPlayer(t testing.TB) *player {
	t.Helper()
	if _, err := os.Stat("../../test/mail/node_modules/mailauth"); err != nil {
		t.Fatalf("%v: test/install-npm test/mail installs it", err)
	}
	cmd := exec.CommandContext(t.Context(), "node", "../../test/mail/auth.mjs")
	var errs bytes.Buffer
	cmd.Stderr = &errs
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &player{in: json.NewEncoder(in), out: json.NewDecoder(out)}
	p.end = sync.OnceValue(func() string {
		in.Close()
		_ = cmd.Wait()
		return errs.String()
	})
	t.Cleanup(func() { p.end() })
	return p
}

// play runs npm's mailauth over a message.
func (p *player) play(t testing.TB, message []byte, records map[string][][]string, steps []map[string]any, check map[string]any) ([]byte, *theirs) {
	t.Helper()
	var answer struct {
		Message []byte
		Results *theirs
	}
	err := p.in.Encode(map[string]any{"message": message, "records": records, "steps": steps, "check": check})
	if err == nil {
		err = p.out.Decode(&answer)
	}
	if err != nil {
		t.Fatalf("node: %v\n%s", err, p.end())
	}
	return answer.Message, answer.Results
}

const letter = "From: Ann <ann@good.example>\r\nTo: b@p.example\r\nSubject: Gr\xc3\xbc\xc3\x9fe  at \t once\r\nDate: Sat, 21 Nov 2026 10:00:00 +0000\r\n" +
	"Message-ID: <1@good.example>\r\nX-Long: a\r\n\tb\r\n   c\r\n\r\nhello  \r\n\tworld \t x\r\n.\r\n\r\nend\r\n\r\n\r\n"

// TestTheirSignatures: what npm's mailauth signs and seals is judged alike by
// it and by us, whole and changed on the way.
func TestTheirSignatures(t *testing.T) {
	one, two, list := newKey(t, 2048), newKey(t, 0), newKey(t, 2048)
	records := map[string][][]string{
		"TXT s1._domainkey.good.example": {{one.record}}, "TXT s2._domainkey.good.example": {{two.record}}, "TXT s1._domainkey.list.example": {{list.record}}, "TXT s1._domainkey.late.example": {{two.record}},
		"TXT good.example": {{"v=spf1 ip4:192.0.2.1 -all"}}, "TXT list.example": {{"v=spf1 ip4:192.0.2.2 -all"}}, "TXT _dmarc.good.example": {{"v=DMARC1; p=reject"}},
	}
	dns, p := dnstest.Start(t), newPlayer(t)
	for name, texts := range records {
		dns.TXT(strings.TrimPrefix(name, "TXT "), strings.Join(texts[0], ""))
	}
	v := newVerifier(t, dns)
	signer := func(selector string, k keyPair, canonical string) map[string]any {
		return map[string]any{"sign": map[string]any{"signingDomain": "good.example", "selector": selector, "privateKey": k.pem, "canonicalization": canonical}}
	}
	check := func(ip, helo, sender string) map[string]any {
		return map[string]any{"ip": ip, "helo": helo, "sender": sender, "mta": "mx.list.example"}
	}
	seal := func(domain string, k keyPair, c map[string]any) map[string]any {
		return map[string]any{"seal": map[string]any{"signingDomain": domain, "selector": "s1", "privateKey": k.pem}, "check": c}
	}
	direct, relayed := check("192.0.2.1", "mail.good.example", "ann@good.example"), check("192.0.2.2", "list.example", "bounce@list.example")
	footer := func(m []byte) []byte { return append(slices.Clone(m), "-- \r\nthe list\r\n"...) }
	for _, tt := range []struct {
		name   string
		steps  []map[string]any
		change func([]byte) []byte
		check  map[string]any
		arc    string
		dmarc  string
	}{
		{"rsa, relaxed", []map[string]any{signer("s1", one, "relaxed/relaxed")}, nil, direct, "none", "pass"},
		{"rsa, simple", []map[string]any{signer("s1", one, "simple/simple")}, nil, direct, "none", "pass"},
		{"rsa, mixed", []map[string]any{signer("s1", one, "relaxed/simple")}, nil, relayed, "none", "pass"},
		{"ed25519", []map[string]any{signer("s2", two, "relaxed/relaxed")}, nil, relayed, "none", "pass"},
		{"both", []map[string]any{signer("s1", one, "relaxed/relaxed"), signer("s2", two, "simple/relaxed")}, nil, relayed, "none", "pass"},
		{"with a footer", []map[string]any{signer("s1", one, "relaxed/relaxed")}, footer, relayed, "none", "fail"},
		{"with white space", []map[string]any{signer("s1", one, "relaxed/relaxed"), signer("s1", one, "simple/simple")}, func(m []byte) []byte {
			return bytes.Replace(m, []byte("Subject: "), []byte("subject:   "), 1)
		}, relayed, "none", "pass"},
		{"with another subject", []map[string]any{signer("s2", two, "relaxed/relaxed")}, func(m []byte) []byte {
			return bytes.Replace(m, []byte("once"), []byte("twice"), 1)
		}, relayed, "none", "fail"},
		{"sealed", []map[string]any{signer("s1", one, "relaxed/relaxed"), seal("list.example", list, direct)}, nil, relayed, "pass", "pass"},
		{"sealed by Ed25519", []map[string]any{signer("s1", one, "relaxed/relaxed"), seal("late.example", two, direct)}, nil, relayed, "pass", "pass"},
		{"sealed twice", []map[string]any{signer("s1", one, "relaxed/relaxed"), seal("list.example", list, direct), seal("good.example", one, relayed)}, nil, relayed, "pass", "pass"},
		{"sealed, changed, sealed", []map[string]any{
			signer("s1", one, "relaxed/relaxed"), seal("list.example", list, direct), {"append": "-- \r\nthe list\r\n"}, seal("good.example", one, relayed),
		}, nil, relayed, "fail", "fail"},
		{"sealed, then changed", []map[string]any{seal("list.example", list, direct)}, footer, direct, "fail", "pass"},
		{"sealed, results changed", []map[string]any{signer("s1", one, "relaxed/relaxed"), seal("list.example", list, relayed)}, func(m []byte) []byte {
			return bytes.Replace(m, []byte("ARC-Authentication-Results: i=1;"), []byte("ARC-Authentication-Results: i=1; x=y;"), 1)
		}, relayed, "fail", "pass"},
		{"a seal taken away", []map[string]any{seal("list.example", list, direct), seal("good.example", one, relayed)}, func(m []byte) []byte {
			return bytes.Replace(m, []byte("ARC-Seal: i=1;"), []byte("X-Seal: i=1;"), 1)
		}, direct, "fail", "pass"},
		{"two seals of one set", []map[string]any{seal("list.example", list, direct)}, func(m []byte) []byte {
			return append([]byte("ARC-Seal: i=1; a=rsa-sha256; cv=none; d=list.example; s=s1; b=AAAA\r\n"), m...)
		}, direct, "fail", "pass"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m, they := p.play(t, []byte(letter), records, tt.steps, tt.check)
			if tt.change != nil {
				changed := tt.change(m)
				if bytes.Equal(changed, m) {
					t.Fatal("nothing was changed")
				}
				m, they = p.play(t, changed, records, nil, tt.check)
			}
			ip := net.ParseIP(tt.check["ip"].(string))
			remote := goodHost
			if ip.String() != remote.String() {
				remote = remote.Next()
			}
			r, field := v.Verify(context.Background(), Message{Remote: remote, Helo: tt.check["helo"].(string), From: tt.check["sender"].(string), Raw: m})
			var signed []string
			for _, s := range results(t, v, m) {
				signed = append(signed, strings.Fields(s)[0])
			}
			if r.SPF.Result != they.SPF || r.DMARC.Result != they.DMARC || r.ARC.Result != they.ARC {
				t.Errorf("we say %+v, they say %+v\n%s", r, they, field)
			}
			if len(signed) > 0 && !slices.Equal(signed, they.DKIM) {
				t.Errorf("of the signatures we say %q, they say %q", signed, they.DKIM)
			}
			if r.ARC.Result != tt.arc || r.DMARC.Result != tt.dmarc {
				t.Errorf("got arc=%s dmarc=%s, want %s and %s\n%s", r.ARC.Result, r.DMARC.Result, tt.arc, tt.dmarc, field)
			}
		})
	}
}

// TestSignatureAttacks: what must not count as proved. Each is signed by
// go-msgauth with the domain's true key.
func TestSignatureAttacks(t *testing.T) {
	good, short := newKey(t, 2048), newKey(t, 2048)
	dns := dnstest.Start(t)
	dns.TXT("s1._domainkey.good.example", good.record)
	for name, record := range map[string]string{
		"revoked": "v=DKIM1; k=rsa; p=", "kind": strings.Replace(good.record, "k=rsa", "k=ed25519", 1), "version": strings.Replace(good.record, "DKIM1", "DKIM2", 1),
		"hash": strings.Replace(good.record, "k=rsa;", "k=rsa; h=sha1;", 1), "service": strings.Replace(good.record, "k=rsa;", "k=rsa; s=tlsrpt;", 1), "own": strings.Replace(good.record, "k=rsa;", "k=rsa; t=s;", 1),
		"noise": "hello", "other": short.record,
		// 512 bits: RFC 8301 wants 1024.
		"weak": "v=DKIM1; k=rsa; p=MFwwDQYJKoZIhvcNAQEBBQADSwAwSAJBAKfTThNtGmtRp8ESLSVyXiMIUInFgOcXQ9mXVZwBoVQ7LBPmSMIg0aDGIRLEBhSwqHMTVb8TQEvZzCOLyLOTVScCAwEAAQ==",
	} {
		dns.TXT(name+"._domainkey.good.example", record)
	}
	dns.TXT("twice._domainkey.good.example", good.record, good.record)
	dns.TXT("wild._domainkey.good.example", "v=spf1 -all", good.record)
	dns.Fail("broken._domainkey.good.example", true)
	v := newVerifier(t, dns)
	block, _ := pem.Decode([]byte(good.pem))
	private, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	sign := func(selector string, keys ...string) string {
		var b bytes.Buffer
		o := &dkim.SignOptions{Domain: "good.example", Selector: selector, Signer: private.(*rsa.PrivateKey), HeaderCanonicalization: dkim.CanonicalizationRelaxed, BodyCanonicalization: dkim.CanonicalizationRelaxed, HeaderKeys: keys}
		if err := dkim.Sign(&b, strings.NewReader(letter), o); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	tag := func(selector, old, text string) string {
		s := sign(selector)
		changed := strings.Replace(s, old, text, 1)
		if s == changed {
			t.Fatalf("%q is not in %s", old, s)
		}
		return changed
	}
	for name, tt := range map[string]struct{ message, want string }{
		"whole":               {sign("s1"), "pass"},
		"with other records":  {sign("wild"), "pass"},
		"revoked":             {sign("revoked"), "permerror"},
		"another kind":        {sign("kind"), "permerror"},
		"another version":     {sign("version"), "permerror"},
		"not for SHA-256":     {sign("hash"), "permerror"},
		"not for mail":        {sign("service"), "permerror"},
		"no key":              {sign("noise"), "permerror"},
		"another's key":       {sign("other"), "fail"},
		"a weak key":          {sign("weak"), "policy"},
		"two keys":            {sign("twice"), "permerror"},
		"no record":           {sign("gone"), "permerror"},
		"DNS is broken":       {sign("broken"), "temperror"},
		"SHA-1":               {tag("s1", "a=rsa-sha256", "a=rsa-sha1"), "permerror"},
		"two domains":         {tag("s1", "d=good.example", "d=evil.example; d=good.example"), "permerror"},
		"another domain":      {tag("s1", "d=good.example", "d=evil.example"), "permerror"},
		"i= outside d=":       {tag("s1", "d=good.example", "d=good.example; i=@notgood.example"), "permerror"},
		"i= below, forbidden": {tag("own", "d=good.example", "d=good.example; i=@x.good.example"), "permerror"},
		"expired":             {tag("s1", "d=good.example", "d=good.example; x=1000"), "permerror"},
		"l= of less":          {tag("s1", "d=good.example", "d=good.example; l=0"), "fail"},
		"l= of more":          {tag("s1", "d=good.example", "d=good.example; l=99999999"), "fail"},
		"l= of nonsense":      {tag("s1", "d=good.example", "d=good.example; l=-1"), "permerror"},
		"From not signed":     {tag("s1", " h=", " h=x-"), "permerror"},
		"a path in s=":        {tag("s1", "s=s1", "s=../s1"), "permerror"},
		"many names":          {tag("s1", " h=", " h="+strings.Repeat("a:", 1000)), "permerror"},
		"a field too long":    {tag("s1", "d=good.example", "d=good.example; z="+strings.Repeat("a", 40<<10)), "permerror"},
	} {
		t.Run(name, func(t *testing.T) {
			got := results(t, v, []byte(tt.message))
			if len(got) != 1 || strings.Fields(got[0])[0] != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}

	// l= is signed over the beginning of a body that then grows.
	head, _, _ := strings.Cut(letter, "\r\n\r\n")
	short1, long := head+"\r\n\r\npay ann\r\n", head+"\r\n\r\npay ann\r\nno, pay eve\r\n"
	p := newPlayer(t)
	withLength := func(body string) string {
		k := map[string]any{"signingDomain": "good.example", "selector": "s1", "privateKey": good.pem, "canonicalization": "simple/simple", "maxBodyLength": 9}
		m, _ := p.play(t, []byte(body), nil, []map[string]any{{"sign": k}}, nil)
		return string(m)
	}
	signed := withLength(short1)
	if !strings.Contains(signed, "l=9") {
		t.Fatalf("no l= in %s", signed)
	}
	if got := results(t, v, []byte(signed)); got[0] != "pass good.example" {
		t.Errorf("l= of the whole body: %q", got)
	}
	if got := results(t, v, []byte(strings.TrimSuffix(signed, short1)+long)); got[0] != "policy good.example" {
		t.Errorf("a body that has grown: %q, want policy", got)
	}
	// Twenty signatures cost no more than eight.
	many := strings.Repeat(strings.TrimSuffix(sign("s1"), letter), 20) + letter
	dns.Forget()
	if got := results(t, v, []byte(many)); len(got) != maxSignatures {
		t.Errorf("%d signatures are verified, want %d", len(got), maxSignatures)
	}
}

// FuzzVerify: no message and no record makes the verifier fail, take long, or
// write a field that is more than one. What it passes, go-msgauth passes too.
func FuzzVerify(f *testing.F) {
	for _, m := range []string{rfc6376, rfc8463, letter, "From: a@b.example\n\nx", "ARC-Seal: i=1; cv=none; a=rsa-sha256; b=AA; d=a.example; s=b\nARC-Message-Signature: i=1; a=rsa-sha256; d=a.example; s=b; h=from; bh=AA; b=AA\nARC-Authentication-Results: i=1; x\nFrom: a@b.example\n\n"} {
		f.Add(crlfs(m), "v=DMARC1; p=reject; sp=none; psd=n", "a@good.example", "mx.good.example")
	}
	f.Add(crlfs(rfc8463), "v=DKIM1; k=ed25519; p=11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=", "", "[1.2.3.4]")
	f.Add(crlfs(rfc8463), "v=spf1 include:%{d} a:%{l} exists:%{ir} mx ptr redirect=%{h} -all", "ä\"@b", "x\r\ny")
	f.Fuzz(func(t *testing.T, raw []byte, record, from, helo string) {
		if len(raw) > 64<<10 || len(record) > 4096 {
			return
		}
		v, err := New(Config{Resolver: &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
			return nil, os.ErrPermission
		}}, Hostname: hostname, Own: func(context.Context, string) ([]string, bool) { return []string{record}, true }})
		if err != nil {
			t.Fatal(err)
		}
		_, field := v.Verify(context.Background(), Message{Remote: goodHost, Helo: helo, From: from, Raw: raw})
		h := splitMessage(append(slices.Clone(field), "\r\n"...))
		if len(h.fields) != 1 || h.fields[0].name != "authentication-results" || len(h.body) != 0 || strings.ContainsRune(string(field), 0) {
			t.Errorf("the field is %q", field)
		}
		if !bytes.Contains(field, []byte("; dmarc=")) && !bytes.Contains(field, []byte(";\r\n\tdmarc=")) {
			t.Errorf("the field is %q", field)
		}
		stripped := v.Strip(append(slices.Clone(field), raw...))
		for _, f := range splitMessage(stripped).fields {
			if f.name == "authentication-results" && v.claims(f.raw) {
				t.Errorf("a false field is left: %q", f.raw)
			}
		}
		if bytes.Contains(raw, []byte("l=")) || !bytes.Contains(raw, []byte("\r\n\r\n")) {
			return // where we differ on purpose
		}
		ours := results(t, v, raw)
		theirs, err := dkim.VerifyWithOptions(bytes.NewReader(raw), &dkim.VerifyOptions{LookupTXT: func(string) ([]string, error) { return []string{record}, nil }, MaxVerifications: maxSignatures})
		if err != nil || len(theirs) != len(ours) {
			return
		}
		for i, s := range ours {
			if strings.HasPrefix(s, "pass ") && theirs[i].Err != nil {
				t.Errorf("we pass what they do not: %v", theirs[i].Err)
			}
		}
	})
}

// FuzzRecord: no policy record is read as more than it says.
func FuzzRecord(f *testing.F) {
	for _, r := range records {
		f.Add(r)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, ok := parseRecord("a.example", text)
		if !ok {
			return
		}
		if !strings.HasPrefix(strings.TrimLeft(text, " \t"), "v") {
			t.Errorf("%q is read as a record", text)
		}
		known := maps.Keys(map[string]bool{"": true, policyNone: true, policyQuarantine: true, policyReject: true})
		for _, p := range []string{r.p, r.sp, r.np, r.asks(author{domain: "b.a.example", absent: true})} {
			if !slices.Contains(slices.Collect(known), p) {
				t.Errorf("policy %q", p)
			}
		}
	})
}
