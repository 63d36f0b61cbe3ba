package statement_test

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"postern/internal/statement"
)

var update = flag.Bool("update", false, "write the test vectors anew")

// The vectors' key is that of RFC 8032 7.1, TEST 1: nobody uses it.
var private = ed25519.NewKeyFromSeed([]byte{
	0x9d, 0x61, 0xb1, 0x9d, 0xef, 0xfd, 0x5a, 0x60, 0xba, 0x84, 0x4a, 0xf4, 0x92, 0xec, 0x2c, 0xc4,
	0x44, 0x49, 0xc5, 0x69, 0x7b, 0x32, 0x69, 0x19, 0x70, 0x3b, 0xac, 0x03, 0x1c, 0xae, 0x7f, 0x60,
})

var made = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func keys() []statement.Key {
	return []statement.Key{
		{ID: "s20250101", Domain: "agents.example", Public: make([]byte, 32), From: made.AddDate(-2, 0, 0), Until: made.AddDate(0, -6, 0)},
		{ID: "s20260601", Domain: "agents.example", Public: private.Public().(ed25519.PublicKey), From: made.AddDate(0, -6, 0)},
	}
}

const plain = "Date: Sat, 21 Nov 2026 12:00:00 +0000\r\nFrom: \"An  Analyst\" <analyst@agents.example>\r\nTo: bob@example.com,\r\n Carol <carol@example.net>\r\n" +
	"Subject: Report \r\n of  November\r\nMessage-ID: <1@agents.example>\r\nAuto-Submitted: auto-generated\r\nMIME-Version: 1.0\r\n" +
	"Content-Type: text/plain; charset=utf-8\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\nHello  Bob,  \r\n\r\nit is 42.\r\n\r\n\r\n"

func about() statement.Statement {
	return statement.Statement{
		Domain: "agents.example", Key: "s20260601", Inbox: "analyst@agents.example", Project: "prj_ABCDEFGHIJKLMNOPQRSTUVWXYZ",
		Mode: "gated_send", Approved: statement.ByPerson, At: made,
	}
}

func sign(t *testing.T, raw string, s statement.Statement) string {
	t.Helper()
	field, err := statement.Sign([]byte(raw), s, private)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.SplitSeq(field, "\r\n") {
		if len(line) > 78 {
			t.Errorf("a line of %d octets: %s", len(line), line)
		}
	}
	return field + raw
}

// TestVectors compares what is signed with the vectors that docs/reference/statement.md
// names, so that the format does not change unseen.
func TestVectors(t *testing.T) {
	hiddenCopy := about()
	hiddenCopy.Hidden = "AAECAwQFBgcICQoLDA0ODw==.x9M7ybG7NBy1X8jur+vwvA=="
	policy := about()
	policy.Approved, policy.Mode = statement.ByPolicy, "autonomous"
	doc, err := statement.Document(keys())
	if err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string]string{
		"keys.json": string(doc), "person.eml": sign(t, plain, about()), "policy.eml": sign(t, plain, policy), "hidden.eml": sign(t, plain, hiddenCopy),
		"empty-body.eml": sign(t, plain[:strings.Index(plain, "\r\n\r\n")+4], about()),
	} {
		path := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil || string(want) != got {
			t.Errorf("%s: %v; got:\n%s", name, err, got)
		}
	}
}

func TestVerify(t *testing.T) {
	signed := sign(t, plain, about())
	secret := about()
	secret.Hidden = statement.HideRecipient("eve@example.org")
	hiddenCopy := sign(t, plain, secret)
	other := about()
	other.Inbox = "buyer@agents.example"
	foreign := about()
	foreign.Domain = "bank.example"
	old := about()
	old.At = made.AddDate(0, -7, 0)
	retired := about()
	retired.Key = "s20250101"
	header, body, _ := strings.Cut(signed, "\r\n\r\n")
	replace := func(from, to string) string {
		if !strings.Contains(signed, from) {
			t.Fatalf("%q is not in the message", from)
		}
		return strings.Replace(signed, from, to, 1)
	}
	forged, err := statement.Sign([]byte(plain), about(), ed25519.NewKeyFromSeed(make([]byte, 32)))
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, raw string
		recipient string
		want      error
	}{
		{"as it was sent", signed, "", nil},
		{"to one of its recipients", signed, "Carol@example.net", nil},
		{"after a relay", "Received: from a by b\r\nAuthentication-Results: b; dkim=pass\r\nReturn-Path: <x@y>\r\n" + signed, "bob@example.com", nil},
		{"white space that relays change", replace("Subject: Report \r\n of  November", "SUBJECT:   Report\t of November  ") + "\r\n\r\n", "", nil},
		{"white space in the body", header + "\r\n\r\n" + strings.ReplaceAll(body, "Hello  Bob,  ", "Hello \t Bob,"), "", nil},
		{"saved with LF", strings.ReplaceAll(signed, "\r\n", "\n"), "", nil},
		{"saved as an mbox", "From x@y Sat Nov 21 12:00:00 2026\n" + strings.ReplaceAll(signed, "\r\n", "\n"), "", nil},
		{"hidden copy at its recipient", hiddenCopy, "EVE@example.org", nil},
		{"without a recipient to check", hiddenCopy, "", nil},

		{"no statement", plain, "", statement.ErrNone},
		{"replayed to somebody else", signed, "mallory@example.com", statement.ErrRecipient},
		{"a hidden copy replayed to a visible recipient", hiddenCopy, "bob@example.com", statement.ErrRecipient},
		{"a hidden copy replayed to somebody else", hiddenCopy, "mallory@example.com", statement.ErrRecipient},
		{"recipient replaced", replace("To: bob@example.com", "To: mallory@example.com"), "mallory@example.com", statement.ErrAltered},
		{"second To", "To: mallory@example.com\r\n" + signed, "mallory@example.com", statement.ErrAltered},
		{"second From", "From: boss@agents.example\r\n" + signed, "", statement.ErrAltered},
		{"From replaced", replace("analyst@agents.example>", "boss@agents.example>"), "", statement.ErrAltered},
		{"Subject replaced", replace("November", "December"), "", statement.ErrAltered},
		{"Reply-To added", header + "\r\nReply-To: mallory@example.com\r\n\r\n" + body, "", statement.ErrAltered},
		{"Cc added", header + "\r\nCc: mallory@example.com\r\n\r\n" + body, "", statement.ErrAltered},
		{"Date removed", replace("Date: Sat, 21 Nov 2026 12:00:00 +0000\r\n", ""), "", statement.ErrAltered},
		{"body replaced", replace("it is 42", "it is 43"), "", statement.ErrAltered},
		{"text added at the end", signed + "PS: pay mallory\r\n", "", statement.ErrAltered},
		{"multipart by a new type", replace("text/plain", "text/html"), "", statement.ErrAltered},
		{"person claimed", strings.Replace(sign(t, plain, func() statement.Statement { s := about(); s.Approved = statement.ByPolicy; return s }()), "by=policy", "by=person", 1), "", statement.ErrAltered},
		{"time moved", replace("t=1795262400", "t=1795262401"), "", statement.ErrAltered},
		{"statement of another message", func() string {
			f, _, _ := strings.Cut(signed, "Date:")
			return f + strings.Replace(plain, "42", "43", 1)
		}(), "", statement.ErrAltered},
		{"signed with another key", forged + plain, "", statement.ErrAltered},
		{"another inbox's statement", sign(t, plain, other), "", statement.ErrSender},
		{"another domain's key", sign(t, plain, foreign), "", statement.ErrKey},
		{"before the key was in use", sign(t, plain, old), "", statement.ErrKey},
		{"after the key was in use", sign(t, plain, retired), "", statement.ErrKey},
		{"two statements", forged + signed, "", statement.ErrMalformed},
		{"two times one tag", replace("ai=yes;", "ai=yes; ai=no;"), "", statement.ErrMalformed},
		{"no AI", replace("ai=yes;", "ai=no;"), "", statement.ErrMalformed},
		{"a tag after the signature", strings.Replace(signed, "\r\nDate:", "; x=1\r\nDate:", 1), "", statement.ErrMalformed},
		{"a coverage that leaves out the subject", replace("subject:", ""), "", statement.ErrAltered},
		{"no message", "", "", statement.ErrNone},
		{"garbage", "\x00\xff", "", statement.ErrMalformed},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, err := statement.Verify([]byte(tt.raw), keys(), statement.Options{Recipient: tt.recipient})
			if !errors.Is(err, tt.want) || (err == nil) != (tt.want == nil) {
				t.Fatalf("Verify = %v, want %v", err, tt.want)
			}
			if err == nil && (r.Inbox != "analyst@agents.example" || r.Approved != statement.ByPerson || !r.At.Equal(made) || len(r.To) != 2) {
				t.Errorf("result = %+v", r)
			}
		})
	}
}

// TestSignRefuses is what would make two readings of one statement.
func TestSignRefuses(t *testing.T) {
	for name, change := range map[string]func(raw *string, s *statement.Statement){
		"two From":             func(raw *string, _ *statement.Statement) { *raw = "From: x@y\r\n" + *raw },
		"a statement already":  func(raw *string, _ *statement.Statement) { *raw = "Postern-Statement: v=1\r\n" + *raw },
		"a tag in a value":     func(_ *string, s *statement.Statement) { s.Mode = "x; by=person" },
		"a line in a value":    func(_ *string, s *statement.Statement) { s.Project = "x\r\nBcc: y" },
		"an empty value":       func(_ *string, s *statement.Statement) { s.Key = "" },
		"letters beyond ASCII": func(_ *string, s *statement.Statement) { s.Inbox = "ä@agents.example" },
	} {
		raw, s := plain, about()
		change(&raw, &s)
		if f, err := statement.Sign([]byte(raw), s, private); err == nil {
			t.Errorf("%s: signed as %s", name, f)
		}
	}
}

func TestParseKeys(t *testing.T) {
	doc, err := statement.Document(keys())
	if err != nil {
		t.Fatal(err)
	}
	got, err := statement.ParseKeys(doc)
	if err != nil || len(got) != 2 || !bytes.Equal(got[1].Public, keys()[1].Public) || !got[0].Until.Equal(keys()[0].Until) || !got[1].Until.IsZero() {
		t.Errorf("read %+v, %v", got, err)
	}
	for name, data := range map[string]string{
		"not JSON": "x", "another version": `{"version":2,"keys":[]}`, "too long": strings.Repeat(" ", statement.MaxKeys) + "{}",
		"a short key":   `{"version":1,"keys":[{"id":"a","domain":"b","algorithm":"ed25519","public_key":"AAAA","not_before":"2026-01-01T00:00:00Z"}]}`,
		"without times": `{"version":1,"keys":[{"id":"a","domain":"b","algorithm":"ed25519","public_key":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}]}`,
	} {
		if ks, err := statement.ParseKeys([]byte(data)); err == nil {
			t.Errorf("%s: %+v", name, ks)
		}
	}
	if ks, err := statement.ParseKeys([]byte(`{"version":1,"keys":[{"id":"a","algorithm":"ml-dsa-65"}]}`)); err != nil || len(ks) != 0 {
		t.Errorf("an algorithm of tomorrow: %v, %v", ks, err)
	}
}

func FuzzVerify(f *testing.F) {
	field, err := statement.Sign([]byte(plain), about(), private)
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(field+plain), "bob@example.com")
	f.Add([]byte(plain), "")
	f.Add([]byte("Postern-Statement: v=1; a=ed25519-sha256; d=; b=\r\n\r\n"), "x")
	f.Fuzz(func(t *testing.T, raw []byte, rcpt string) {
		r, err := statement.Verify(raw, keys(), statement.Options{Recipient: rcpt})
		if err == nil && (r.Domain != "agents.example" || !bytes.Contains(raw, []byte("42"))) {
			t.Errorf("true: %+v", r)
		}
	})
}

func FuzzParseKeys(f *testing.F) {
	doc, err := statement.Document(keys())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(doc)
	f.Fuzz(func(t *testing.T, data []byte) {
		ks, err := statement.ParseKeys(data)
		if err != nil {
			return
		}
		for _, k := range ks {
			if len(k.Public) != ed25519.PublicKeySize {
				t.Errorf("a key of %d bytes", len(k.Public))
			}
		}
	})
}

// TestEveryChangedByteIsNoticed changes each byte of a signed message. What
// still verifies says the same as before.
func TestEveryChangedByteIsNoticed(t *testing.T) {
	signed := sign(t, plain, about())
	want, err := statement.Verify([]byte(signed), keys(), statement.Options{})
	if err != nil {
		t.Fatal(err)
	}
	squeezed := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	verified := 0
	for i := range signed {
		for _, c := range []byte{' ', '\n', 'x', signed[i] ^ 0x20, signed[i] ^ 0x80} {
			if c == signed[i] {
				continue
			}
			raw := []byte(signed)
			raw[i] = c
			got, err := statement.Verify(raw, keys(), statement.Options{})
			if err != nil {
				continue
			}
			verified++
			if got.Statement != want.Statement || squeezed(got.From) != squeezed(want.From) || squeezed(got.Subject) != squeezed(want.Subject) || strings.Join(got.To, ",") != strings.Join(want.To, ",") || got.ID != want.ID {
				t.Errorf("byte %d, %q for %q: %+v", i, c, signed[i], got)
			}
			if from, to := squeezed(strings.ToLower(signed)), squeezed(strings.ToLower(string(raw))); from != to && !strings.EqualFold(strings.Join(strings.Fields(signed), ""), strings.Join(strings.Fields(string(raw)), "")) {
				t.Errorf("byte %d, %q for %q verifies, and is more than white space or case of a field's name", i, c, signed[i])
			}
		}
	}
	t.Logf("%d bytes, %d changes still verify", len(signed), verified)
}

// TestVerifyHeaderNeedsNoBody: a bounce returns the header alone.
func TestVerifyHeaderNeedsNoBody(t *testing.T) {
	header, _, _ := strings.Cut(sign(t, plain, about()), "\r\n\r\n")
	r, err := statement.VerifyHeader([]byte(header+"\r\n\r\n"), keys())
	if err != nil || r.Inbox != "analyst@agents.example" {
		t.Errorf("verified %+v, %v", r, err)
	}
	if _, err := statement.Verify([]byte(header+"\r\n\r\n"), keys(), statement.Options{}); !errors.Is(err, statement.ErrAltered) {
		t.Errorf("the same with its body missing: %v", err)
	}
	if _, err := statement.VerifyHeader([]byte(strings.Replace(header, "November", "December", 1)), keys()); !errors.Is(err, statement.ErrAltered) {
		t.Errorf("another subject: %v", err)
	}
}

// TestHiddenRecipientsCannotBeCompared: the same address is hidden differently
// each time, so two copies do not show that they went to one person.
func TestHiddenRecipientsCannotBeCompared(t *testing.T) {
	a, b := statement.HideRecipient("evelyn@example.org"), statement.HideRecipient("evelyn@example.org")
	if a == b {
		t.Errorf("both are %s", a)
	}
	for _, v := range []string{a, b} {
		if strings.Contains(v, "evelyn") || strings.Contains(v, "example") {
			t.Errorf("%s names the address", v)
		}
	}
}
