package mail

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// shownToReviewer is all that a reviewer reads, in small letters.
func shownToReviewer(s Summary) string {
	var b strings.Builder
	all := []string{s.From, s.Subject, s.Text, s.Rendered}
	for _, l := range [][]string{s.To, s.Cc, s.Bcc, s.ReplyTo, s.Notes} {
		all = append(all, l...)
	}
	for _, f := range s.Fields {
		all = append(all, f.Name, f.Value)
	}
	for _, f := range s.Attachments {
		all = append(all, f.Name, f.ContentType)
	}
	for _, a := range all {
		b.WriteString(a + "\n")
	}
	return strings.ToLower(b.String())
}

// eachGenerated calls check with each message that is let in, and how many octets
// of the words hidden in it may be seen by nobody.
//
// It makes n messages, and as many again that are those with something changed.
// POSTERN_TEST_CYCLES multiplies n, for "make soak-tests".
func eachGenerated(t *testing.T, n int, seed uint64, check func(g *generator, e Envelope, s Summary)) {
	t.Helper()
	if v := os.Getenv("POSTERN_TEST_CYCLES"); v != "" {
		cycles, err := strconv.Atoi(v)
		if err != nil {
			t.Fatalf("POSTERN_TEST_CYCLES: %v", err)
		}
		n *= cycles
	}
	g := newGenerator(seed)
	taken := 0
	one := func(raw []byte) {
		e, err := FromCaptured(raw, genInbox, []string{"b@x.example"}, genInbox, now)
		if err != nil {
			return
		}
		s, err := Describe(e)
		if err != nil {
			t.Fatalf("%v: %q", err, raw)
		}
		taken++
		check(g, e, s)
	}
	for range n {
		raw := g.message()
		one(raw)
		one(g.mutated(raw))
	}
	t.Logf("%d of %d messages were let in", taken, 2*n)
	if taken < n/10 {
		t.Errorf("only %d of %d messages were let in: the generator tests little", taken, 2*n)
	}
}

// TestEveryOctetIsAccounted: of what is let in each octet is syntax, shown, of a
// listed file or counted; and of the words that the generator hides in it, each
// is really shown or in a file, or the budget has room for it.
func TestEveryOctetIsAccounted(t *testing.T) {
	eachGenerated(t, 3000, 1, func(g *generator, e Envelope, s Summary) {
		if s.Unclear != "" {
			t.Fatalf("let in without an account: %s\n%s", s.Unclear, e.Raw)
		}
		checkAccount(t, e.Raw)
		checkWordsShown(t, g.secrets, e, s)
	})
}

func checkAccount(t *testing.T, raw []byte) {
	t.Helper()
	a, err := TakeAccount(raw)
	if err != nil {
		t.Fatalf("%v\n%s", err, raw)
	}
	at, counted := 0, 0
	for _, sp := range a.Spans {
		if sp.Start != at || sp.End <= sp.Start {
			t.Fatalf("octets %d to %d are accounted for after %d\n%s", sp.Start, sp.End, at, raw)
		}
		if sp.Use == Counted {
			counted += sp.End - sp.Start
		}
		at = sp.End
	}
	if at != len(raw) {
		t.Fatalf("%d of %d octets are accounted for\n%s", at, len(raw), raw)
	}
	if counted > a.Unshown || a.Unshown > MaxUnshown {
		t.Fatalf("%d octets are counted, %d are said to be, %d may be", counted, a.Unshown, MaxUnshown)
	}
}

// checkWordsShown looks for the words that were hidden in a message. It knows
// nothing of how the account was taken.
func checkWordsShown(t *testing.T, secrets []string, e Envelope, s Summary) {
	t.Helper()
	seen, raw := shownToReviewer(s), bytes.ToLower(e.Raw)
	m, err := Parse(e.Raw)
	if err != nil {
		t.Fatal(err)
	}
	unseen := 0
	for _, w := range secrets {
		if !bytes.Contains(raw, []byte(w)) || strings.Contains(seen, w) || slices.ContainsFunc(m.Attachments, func(a Attachment) bool {
			// Letters can be part of base64, too.
			return bytes.Contains(bytes.ToLower(a.Data), []byte(w)) || strings.Contains(base64.StdEncoding.EncodeToString(a.Data), w)
		}) {
			continue
		}
		if strings.Contains(strings.ToLower(m.HTML), w) && s.HTMLSHA256 != "" && s.Markup >= len(w) {
			continue // in a style or a script: counted beside the digest
		}
		if unseen += len(w); unseen > s.Unshown {
			t.Fatalf("%q leaves and nobody is shown it; %d octets are counted\n%s\n--- shown:\n%s", w, s.Unshown, e.Raw, seen)
		}
	}
}

// What the generator hides it says in words of these letters alone.
var hiddenWord = regexp.MustCompile(`q[bcdfghjklmnpqrstvwxz]{11}`)

// TestOldMessagesAreDescribed: what an earlier release took, and what arrives, is
// shown as well as it can be, with what is wrong with it.
func TestOldMessagesAreDescribed(t *testing.T) {
	raw := crlf("From: a@p.example\nTo: b@x.example\nX-Mailer: a\nX-Mailer: PAY EVE\nContent-Type: multipart/mixed; boundary=x\n\n--x\n\nhello\n--x--\n--x\n\nPAY EVE\n--x--\n")
	s, err := Describe(Envelope{From: "a@p.example", To: []string{"b@x.example"}, Raw: raw})
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(s.Unclear, "X-Mailer header: appears twice") || s.Text != "hello" || len(s.Fields) != 2 || s.Fields[1].Value != "PAY EVE" || s.Fields[1].Usual {
		t.Errorf("got %+v", s)
	}
}

// TestOrdinaryMailIsAccepted: what mail programs write, as they write it.
func TestOrdinaryMailIsAccepted(t *testing.T) {
	alternative := "Content-Type: multipart/alternative;\n boundary=\"%[1]s\"\n\n%[2]s--%[1]s\nContent-Type: text/plain; charset=UTF-8; format=flowed\nContent-Transfer-Encoding: 8bit\n\nGr\u00fc\u00dfe\n\n--%[1]s\nContent-Type: text/html; charset=UTF-8\nContent-Transfer-Encoding: quoted-printable\n\n<p style=3D\"margin:0\">Gr=C3=BC=C3=9Fe</p>\n--%[1]s--\n"
	for name, raw := range map[string]string{
		"mutt":          "Date: Sun, 22 Nov 2026 12:00:00 +0100\nSubject: Re: hello\nMessage-ID: <20261122110000.GA1234@host>\nReferences: <a@b> <c@d>\nMIME-Version: 1.0\nContent-Type: text/plain; charset=us-ascii\nContent-Disposition: inline\nIn-Reply-To: <c@d>\nUser-Agent: Mutt/2.2.9 (2022-11-12)\n\nHello\n\n-- \nAnn\n",
		"Thunderbird":   "Message-ID: <8c5ab1b1-0000-4000-8000-4f8f3e1b2a1c@p.example>\nDate: Sun, 22 Nov 2026 12:00:00 +0100\nMIME-Version: 1.0\nUser-Agent: Mozilla Thunderbird\nContent-Language: en-US\nSubject: hello\n" + fmt.Sprintf(alternative, "------------0a1b2c3d4e5f6a7b8c9d0e1f", "This is a multi-part message in MIME format.\n"),
		"Outlook":       "Subject: hello\nThread-Topic: hello\nThread-Index: AdlKQ0p1c2VjcmV0\nX-MSMail-Priority: Normal\nMIME-Version: 1.0\n" + fmt.Sprintf(alternative, "----=_NextPart_000_0012_01DA1B2C.3D4E5F60", "This is a multipart message in MIME format.\n\n"),
		"Apple Mail":    "Subject: hello\nMime-Version: 1.0 (Mac OS X Mail 16.0 \\(3774.600.62\\))\nX-Mailer: Apple Mail (2.3774.600.62)\n" + fmt.Sprintf(alternative, "Apple-Mail=_D2A2F3B0-0000-4000-8000-000000000000", "\n"),
		"swaks":         "Date: Sun, 22 Nov 2026 12:00:00 +0000\nSubject: test\nMessage-Id: <20261122120000.000123@host>\nX-Mailer: swaks v20201014.0 jetmore.org/john/code/swaks/\n\nThis is a test mailing\n\n",
		"signed":        "Subject: hello\nMIME-Version: 1.0\nContent-Type: multipart/signed; protocol=\"application/pkcs7-signature\"; micalg=sha-256; boundary=\"----ABC\"\n\nThis is an S/MIME signed message\n\n------ABC\nContent-Type: text/plain\n\nhello\n\n------ABC\nContent-Type: application/pkcs7-signature; name=\"smime.p7s\"\nContent-Transfer-Encoding: base64\nContent-Disposition: attachment; filename=\"smime.p7s\"\n\nMIIB\n\n------ABC--\n\n",
		"a long thread": "Subject: hello\nReferences: " + strings.TrimSpace(strings.Repeat("<20261122110000.GA1234@a-host.of.a-company.example>\n ", 60)) + "\n\nhello\n",
		"Japanese":      "Subject: =?iso-2022-jp?B?GyRCRnxLXBsoQg==?=\nContent-Type: text/plain; charset=iso-2022-jp\nContent-Transfer-Encoding: 7bit\n\n\x1b$BF|K\\\x1b(B\n",
		"a file":        "Subject: hello\nMIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=\"===============123==\"\n\n--===============123==\nContent-Type: text/plain; charset=\"utf-8\"\nContent-Transfer-Encoding: 7bit\n\nhello\n\n--===============123==\nContent-Type: application/pdf\nContent-Transfer-Encoding: base64\nContent-Disposition: attachment; filename*=utf-8''%C3%9Cbersicht.pdf\nMIME-Version: 1.0\n\nJVBERi0=\n\n--===============123==--\n",
		"cron":          "Subject: Cron <root@host> run\nMIME-Version: 1.0\nContent-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: 8bit\nX-Cron-Env: <SHELL=/bin/sh>\nX-Cron-Shell: /bin/sh\nAuto-Submitted: auto-generated\nPrecedence: bulk\n\na   b   \n",
	} {
		e, err := FromCaptured(crlf("From: Agent <"+genInbox+">\nTo: Bob <b@x.example>\n"+raw), genInbox, []string{"b@x.example"}, genInbox, now)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		s, err := Describe(e)
		if err != nil || len(s.Notes) > 0 || s.Unclear != "" {
			t.Errorf("%s: notes %q, %q, %v", name, s.Notes, s.Unclear, err)
		}
	}
}
