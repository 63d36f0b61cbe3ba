package mail

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var now = time.Date(2026, 11, 21, 9, 30, 0, 0, time.UTC)

func wantField(t *testing.T, err error, field, reason string) {
	t.Helper()
	var fe *FieldError
	if !errors.As(err, &fe) {
		t.Fatalf("got error %v, want a FieldError for %s", err, field)
	}
	if fe.Field != field || !strings.Contains(fe.Reason, reason) {
		t.Errorf("got %q, want field %q and a reason with %q", fe, field, reason)
	}
	if controls(fe.Reason) != "" {
		t.Errorf("reason has control characters: %q", fe.Reason)
	}
}

func TestComposeRoundTrip(t *testing.T) {
	longWord := strings.Repeat("x", 990)
	for _, c := range []struct {
		name string
		d    Draft
	}{
		{"plain", Draft{Subject: "Report", Text: "Hello\nworld\n"}},
		{"empty", Draft{}},
		{"unicode", Draft{Subject: "Grüße 你好 🎉", Text: "Zeile mit Umlaut ä\nund 你好"}},
		{"long ascii subject", Draft{Subject: strings.TrimSpace(strings.Repeat("word ", 190)), Text: "x"}},
		{"one long word", Draft{Subject: longWord, Text: longWord + longWord}},
		{"long unicode subject", Draft{Subject: strings.Repeat("你", 998), Text: "x"}},
		{"subject that looks encoded", Draft{Subject: "=?utf-8?q?not_this?=", Text: "x"}},
		{"subject with odd spaces", Draft{Subject: "  a  b\tc ", Text: "x"}},
		{"dots and From lines", Draft{Subject: "s", Text: ".\n..\nFrom me\n. x\n=3D literal\ntrailing \t\n"}},
		{"attachments", Draft{Subject: "s", Text: "see files", Attachments: []Attachment{
			{Name: "a.csv", ContentType: "text/csv", Data: []byte("a,b\n1,2\n")},
			{Name: "Übersicht 你好.pdf", Data: bytes.Repeat([]byte{0, 1, 255, '\r', '\n'}, 1000)},
			{Name: "empty", Data: []byte{}},
		}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.d.From, c.d.To, c.d.Cc, c.d.Bcc = `"Agent, One" <one@agents.example>`, []string{"Ünal <u@b.example>", "c@D.example"}, []string{"d@e.example"}, []string{"secret@f.example"}
			c.d.InReplyTo, c.d.References = "<1@x>", []string{"<0@x>", "1@x"}
			e, err := Compose(c.d, now, "agents.example")
			if err != nil {
				t.Fatal(err)
			}
			if err := CheckRaw(e.Raw); err != nil {
				t.Fatal(err)
			}
			if bytes.Contains(e.Raw, []byte("secret@")) {
				t.Error("the Bcc recipient is in the message")
			}
			m, err := Parse(e.Raw)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := m.Subject, c.d.Subject; got != want {
				t.Errorf("subject: got %q, want %q", got, want)
			}
			if got, want := m.Text, strings.TrimSuffix(c.d.Text, "\n"); got != want {
				t.Errorf("text: got %q, want %q", got, want)
			}
			if diff := cmp.Diff([]Address{{"Ünal", "u@b.example"}, {"", "c@d.example"}}, m.To); diff != "" {
				t.Error(diff)
			}
			if got, want := m.From, []Address{{"Agent, One", "one@agents.example"}}; !slices.Equal(got, want) {
				t.Errorf("from: got %v, want %v", got, want)
			}
			if !m.Date.Equal(now) || m.AutoSubmitted != "auto-generated" || !slices.Equal(m.References, []string{"<0@x>", "<1@x>"}) || !slices.Equal(m.InReplyTo, []string{"<1@x>"}) {
				t.Errorf("got %v %q %v %v", m.Date, m.AutoSubmitted, m.References, m.InReplyTo)
			}
			if len(m.Attachments) != len(c.d.Attachments) {
				t.Fatalf("got %d attachments, want %d", len(m.Attachments), len(c.d.Attachments))
			}
			for i, a := range m.Attachments {
				if w := c.d.Attachments[i]; a.Name != w.Name || !bytes.Equal(a.Data, w.Data) {
					t.Errorf("attachment: got %q, %d octets; want %q, %d", a.Name, len(a.Data), w.Name, len(w.Data))
				}
			}
			if len(m.Warnings) > 0 {
				t.Errorf("warnings about our own message: %q", m.Warnings)
			}
			s, err := Describe(e)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{"secret@f.example"}, s.Bcc); diff != "" {
				t.Error(diff)
			}
			if len(s.To) != 2 || len(s.Cc) != 1 || len(s.Notes) != 0 {
				t.Errorf("got to %v, cc %v, notes %v", s.To, s.Cc, s.Notes)
			}
			p, err := e.Payload()
			if err != nil {
				t.Fatal(err)
			}
			back, err := ParsePayload(p)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(e, back); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestComposeHTML(t *testing.T) {
	e, err := Compose(Draft{
		From: "a@b.example", To: []string{"c@d.example"}, Subject: "s",
		HTML: `<p>Hello <b>you</b>, see <a href="https://evil.example/x">our site</a>.</p><img src="https://t.example/p.gif">`,
	}, now, "b.example")
	if err != nil {
		t.Fatal(err)
	}
	s, err := Describe(e)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := s.Text, "Hello you, see our site <https://evil.example/x> ."; !strings.HasPrefix(got, want) {
		t.Errorf("got %q, want it to begin with %q", got, want)
	}
	if len(s.Notes) != 1 || !strings.Contains(s.Notes[0], "t.example") {
		t.Errorf("got notes %q, want one about the picture", s.Notes)
	}
	e, err = Compose(Draft{From: "a@b.example", To: []string{"c@d.example"}, Text: "harmless", HTML: "<p style='display:none'>something else</p>"}, now, "b.example")
	if err != nil {
		t.Fatal(err)
	}
	if s, err = Describe(e); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(s.Text, "something else") || len(s.Notes) != 1 || !strings.Contains(s.Notes[0], "do not say the same") {
		t.Errorf("got %q, %q, want the hidden HTML shown and noted", s.Text, s.Notes)
	}
}

// The attacker writes a second header, or a second message, into every field.
func TestComposeRefusesInjection(t *testing.T) {
	base := func() Draft {
		return Draft{From: "a@b.example", To: []string{"c@d.example"}, Subject: "s", Text: "t"}
	}
	fields := map[string]func(d *Draft, s string){
		"from":                func(d *Draft, s string) { d.From = "x" + s + " <a@b.example>" },
		"to[0]":               func(d *Draft, s string) { d.To = []string{"x" + s + " <a@b.example>"} },
		"to[1]":               func(d *Draft, s string) { d.To = append(d.To, "a"+s+"@b.example") },
		"cc[0]":               func(d *Draft, s string) { d.Cc = []string{"a@b.example" + s} },
		"bcc[0]":              func(d *Draft, s string) { d.Bcc = []string{"a@b.example" + s + "Bcc: e@f"} },
		"subject":             func(d *Draft, s string) { d.Subject = "x" + s + "Bcc: e@f" },
		"reply_to":            func(d *Draft, s string) { d.ReplyTo = "a" + s + "@x" },
		"in_reply_to":         func(d *Draft, s string) { d.InReplyTo = "<1" + s + "@x>" },
		"references[0]":       func(d *Draft, s string) { d.References = []string{"<1@x>" + s} },
		"attachments[0].name": func(d *Draft, s string) { d.Attachments = []Attachment{{Name: "a" + s + "b"}} },
		"attachments[0].content_type": func(d *Draft, s string) {
			d.Attachments = []Attachment{{Name: "a", ContentType: "text/plain" + s + "X: y"}}
		},
	}
	for field, set := range fields {
		for what, s := range map[string]string{"a line break": "\r\n", "a line break ": "\n", " line break": "\r", "a NUL": "\x00", "control": "\x1b[2J", "U+202E": "\u202e", "UTF-8": "\xff"} {
			t.Run(fmt.Sprintf("%s/%q", field, s), func(t *testing.T) {
				d := base()
				set(&d, s)
				_, err := Compose(d, now, "b.example")
				wantField(t, err, field, strings.TrimSpace(what))
			})
		}
	}
	// The same by way of an encoded word, which decodes into line breaks.
	for _, from := range []string{"=?utf-8?q?x=0D=0ABcc:_e=40f?= <a@b.example>", "=?utf-8?b?DQpCY2M6IGVAZg==?= <a@b.example>"} {
		d := base()
		d.From = from
		_, err := Compose(d, now, "b.example")
		wantField(t, err, "from", "")
	}
}

func TestComposeRefuses(t *testing.T) {
	many := make([]string, 51)
	for i := range many {
		many[i] = fmt.Sprintf("r%d@x.example", i)
	}
	for _, c := range []struct {
		name, field, reason string
		change              func(d *Draft)
	}{
		{"no recipient", "to", "no recipient", func(d *Draft) { d.To = nil }},
		{"51 recipients", "to", "more than 50", func(d *Draft) { d.To = many }},
		{"51 in all", "to", "more than 50", func(d *Draft) { d.To, d.Bcc = many[:30], many[30:] }},
		{"not an address", "cc[1]", "not an address", func(d *Draft) { d.Cc = []string{"a@b.example", "nobody"} }},
		{"two in one", "to[0]", "not an address", func(d *Draft) { d.To = []string{"a@b.example, c@d.example"} }},
		{"group", "to[0]", "", func(d *Draft) { d.To = []string{"g: a@b.example;"} }},
		{"comment", "to[0]", "comment", func(d *Draft) { d.To = []string{"a@b.example (c@d.example)"} }},
		{"address literal", "to[0]", "", func(d *Draft) { d.To = []string{"root@[127.0.0.1]"} }},
		{"number", "to[0]", "number", func(d *Draft) { d.To = []string{"root@127.0.0.1"} }},
		{"quoted local part", "to[0]", "local part", func(d *Draft) { d.To = []string{`"a b"@x.example`} }},
		{"forged name", "from", "another address", func(d *Draft) { d.From = `"ceo@bank.example" <a@b.example>` }},
		{"subject too long", "subject", "998", func(d *Draft) { d.Subject = strings.Repeat("ä", 999) }},
		{"text too long", "text", "262144", func(d *Draft) { d.Text = strings.Repeat("a", 262145) }},
		{"html too long", "html", "262144", func(d *Draft) { d.HTML = strings.Repeat("a", 262145) }},
		{"text with NUL", "text", "NUL", func(d *Draft) { d.Text = "a\x00" }},
		{"path in name", "attachments[0].name", "separator", func(d *Draft) { d.Attachments = []Attachment{{Name: "../../etc/passwd"}} }},
		{"backslash in name", "attachments[0].name", "separator", func(d *Draft) { d.Attachments = []Attachment{{Name: `..\x`}} }},
		{"dots", "attachments[0].name", "file name", func(d *Draft) { d.Attachments = []Attachment{{Name: ".."}} }},
		{"multipart file", "attachments[0].content_type", "media type", func(d *Draft) { d.Attachments = []Attachment{{Name: "a", ContentType: "multipart/mixed; boundary=a"}} }},
		{"25 MB", "attachments", "26214400", func(d *Draft) {
			half := make([]byte, MaxAttachmentsBytes/2+1)
			d.Attachments = []Attachment{{Name: "a", Data: half}, {Name: "b", Data: half}}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := Draft{From: "a@b.example", To: []string{"c@d.example"}, Subject: "s", Text: "t"}
			c.change(&d)
			_, err := Compose(d, now, "b.example")
			wantField(t, err, c.field, c.reason)
		})
	}
	d := Draft{From: "a@b.example", To: []string{"c@d.example"}, Attachments: []Attachment{{Name: "a", Data: make([]byte, MaxAttachmentsBytes)}}}
	if _, err := Compose(d, now, "b.example"); err != nil {
		t.Errorf("25 MB exactly: got %v, want nil", err)
	}
}

func crlf(s string) []byte { return []byte(strings.ReplaceAll(s, "\n", "\r\n")) }

func TestFromCaptured(t *testing.T) {
	const inbox = "agent@postern.example"
	raw := crlf("From: The Agent <Agent@Postern.Example>\nTo: a@x.example\nBcc: hidden@x.example\nSubject: hi\n\nbody \xc3\xa4\n.\n")
	e, err := FromCaptured(raw, "agent@postern.example", []string{"a@x.example", "hidden@X.example", "other@x.example", "a@x.example"}, inbox, now)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"a@x.example", "hidden@x.example", "other@x.example"}, e.To); diff != "" {
		t.Error(diff)
	}
	hidden, err := e.Hidden()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"hidden@x.example", "other@x.example"}, hidden); diff != "" {
		t.Error(diff)
	}
	if s := string(e.Raw); strings.Contains(s, "\nBcc:") || !strings.HasPrefix(s, "Date: ") || !strings.Contains(s, "\r\nMessage-ID: <") || !strings.HasSuffix(s, "\r\n\r\nbody \xc3\xa4\r\n.\r\n") {
		t.Errorf("got %q", s)
	}

	head := "From: " + inbox + "\nTo: a@x.example\n"
	// A library signed the message for the server that it believes to talk to.
	signed := "DKIM-Signature: v=1; a=rsa-sha256; d=x.example; s=k;\n h=From:To;\n b=AAAA\nARC-Seal: i=1; cv=none\nARC-Message-Signature: i=1\nARC-Authentication-Results: i=1; x.example; dkim=pass\nX-Google-DKIM-Signature: v=1\ndomainkey-signature: a=rsa-sha1\n"
	if e, err := FromCaptured(crlf(signed+head+"Subject: s\n\nx\n"), inbox, []string{"a@x.example"}, inbox, now); err != nil || strings.Contains(strings.ToLower(string(e.Raw)), "signature") || strings.Contains(string(e.Raw), "ARC-") || strings.Contains(string(e.Raw), "AAAA") {
		t.Errorf("signed: %q, %v", e.Raw, err)
	}
	for _, c := range []struct{ name, from, raw, field, reason string }{
		{"forged envelope", "ceo@bank.example", head + "\nx\n", "MAIL FROM", inbox},
		{"null envelope", "", head + "\nx\n", "MAIL FROM", inbox},
		{"forged From", inbox, "From: ceo@bank.example\n\nx\n", "From header", inbox},
		{"no From", inbox, "To: a@x.example\n\nx\n", "From header", "missing"},
		{"two From", inbox, head + "From: ceo@bank.example\n\nx\n", "From header", "2 times"},
		{"two From, odd case", inbox, head + "fROM: ceo@bank.example\n\nx\n", "From header", "2 times"},
		{"From with space before colon", inbox, head + "From : ceo@bank.example\n\nx\n", "header", "colon"},
		{"two in one From", inbox, "From: " + inbox + ", ceo@bank.example\n\nx\n", "From header", "address"},
		{"group From", inbox, "From: ceo@bank.example: " + inbox + ";\n\nx\n", "From header", ""},
		{"comment From", inbox, "From: " + inbox + " (ceo@bank.example)\n\nx\n", "From header", "comment"},
		{"name as address", inbox, "From: \"ceo@bank.example\" <" + inbox + ">\n\nx\n", "From header", "another address"},
		{"encoded name as address", inbox, "From: =?utf-8?q?ceo=40bank.example?= <" + inbox + ">\n\nx\n", "From header", "another address"},
		{"encoded line break", inbox, "From: =?utf-8?q?x=0D=0AFrom:_ceo?= <" + inbox + ">\n\nx\n", "From header", "control"},
		{"address in encoded word", inbox, "From: =?utf-8?q?agent=40postern.example?=\n\nx\n", "From header", ""},
		{"Sender", inbox, head + "Sender: ceo@bank.example\n\nx\n", "Sender header", inbox},
		{"Resent-From", inbox, head + "Resent-From: ceo@bank.example\n\nx\n", "Resent-From header", "not allowed"},
		{"Resent-Bcc", inbox, head + "resent-bcc: ceo@bank.example\n\nx\n", "resent-bcc header", "not allowed"},
		{"a statement of its own", inbox, head + "Postern-Statement: v=1\n\nx\n", "Postern-Statement header", "not allowed"},
		{"two To", inbox, head + "To: b@x.example\n\nx\n", "To header", "2 times"},
		{"two Subject", inbox, head + "Subject: a\nSubject: b\n\nx\n", "Subject header", "2 times"},
		{"two Content-Type", inbox, head + "Content-Type: text/plain\nContent-Type: text/html\n\nx\n", "Content-Type header", "2 times"},
		{"broken To", inbox, "From: " + inbox + "\nTo: a@x.example <b@x.example\n\nx\n", "To header", "list"},
		{"blank continuation", inbox, head + "Subject: a\n \n\tb\n\nx\n", "header", "white space"},
		{"no empty line", inbox, head + "hello\n", "header", "empty line"},
		{"starts with continuation", inbox, " From: x\n" + head + "\nx\n", "header", "continuation"},
		{"NUL", inbox, head + "\nx\x00\n", "message", "NUL"},
		{"long line", inbox, head + "\n" + strings.Repeat("x", 999) + "\n", "message", "998"},
		{"bidi subject", inbox, head + "Subject: a\u202eb\n\nx\n", "Subject header", "U+202E"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := FromCaptured(crlf(c.raw), c.from, []string{"a@x.example"}, inbox, now)
			wantField(t, err, c.field, c.reason)
		})
	}
	for name, body := range map[string]string{
		"bare LF": "x\ny\r\n", "bare CR": "x\ry\r\n", "smuggled": "x\n.\nMAIL FROM:<a@b>\r\n", "dot CR": "x\r.\r\n", "LF dot": "x\n.\r\n", "last CR": "x\r\n\r",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := FromCaptured(append(crlf(head+"\n"), body...), inbox, []string{"a@x.example"}, inbox, now)
			wantField(t, err, "message", "without")
		})
	}
	for name, rcpts := range map[string][]string{"none": nil, "bad": {"a@b\r\nRCPT TO:<c@d>"}, "many": slices.Repeat([]string{"a"}, 2)} {
		t.Run("recipients "+name, func(t *testing.T) {
			_, err := FromCaptured(crlf(head+"\nx\n"), inbox, rcpts, inbox, now)
			wantField(t, err, "RCPT TO", "")
		})
	}
}

func TestParseHostile(t *testing.T) {
	deep := "Content-Type: multipart/mixed; boundary=b\n\n"
	for i := range 40 {
		deep += "--b" + strings.Repeat("b", i) + "\nContent-Type: multipart/mixed; boundary=b" + strings.Repeat("b", i+1) + "\n\n"
	}
	for _, c := range []struct {
		name, raw string
		warning   string
		check     func(m Message) bool
	}{
		{"two From", "From: a@x.example\nFrom: b@x.example\n\n", "2 From", func(m Message) bool { return len(m.From) == 2 }},
		{"two Subject", "From: a@x.example\nSubject: a\nSubject: b\n\n", "Subject stands 2", nil},
		{"Bcc", "From: a@x.example\nBcc: b@x.example\n\n", "Bcc", func(m Message) bool { return len(m.Bcc) == 1 }},
		{"obsolete syntax", "From : a@x.example\n\n", "colon", func(m Message) bool { return len(m.From) == 1 }},
		{"mbox", "From me now\nFrom: a@x.example\n\n", "mbox", func(m Message) bool { return len(m.From) == 1 }},
		{"body without empty line", "From: a@x.example\nhello\n", "empty line", func(m Message) bool { return m.Text == "hello" }},
		{"list is broken", "From: a@x.example\nTo: b@x.example; c@x.example\n\n", "To is not", nil},
		{"encoded line break", "From: a@x.example\nSubject: =?utf-8?q?a=0D=0ABcc:_x?=\n\n", "hides", func(m Message) bool { return m.Subject == `a\u{d}\u{a}Bcc: x` }},
		{"terminal escape", "From: a@x.example\nSubject: a\x1b[2Jb\n\n", "hides", func(m Message) bool { return m.Subject == `a\u{1b}[2Jb` }},
		{"path in name", "From: a@x.example\nContent-Type: application/x; name=\"../../etc/cron.d/x\"\n\nx", "unsafe name", func(m Message) bool { return m.Attachments[0].Name == "x" }},
		{"name of dots", "From: a@x.example\nContent-Disposition: attachment; filename=\"..\"\n\nx", "", func(m Message) bool { return m.Attachments[0].Name == "attachment-1" }},
		{"deep", deep, "levels", nil},
		{"no end", "From: a@x.example\nContent-Type: multipart/mixed; boundary=b\n\n--b\n\nhello\n", "does not end", func(m Message) bool { return m.Text == "hello" }},
		{"no boundary", "From: a@x.example\nContent-Type: multipart/mixed\n\nhello", "boundary", func(m Message) bool { return len(m.Attachments) == 1 }},
		{"base64 after its end", "From: a@x.example\nContent-Transfer-Encoding: base64\n\naGk=\naGlkZGVu\n", "after its end", func(m Message) bool { return m.Text == "hi" }},
		{"malformed type", "From: a@x.example\nContent-Type: text/html; charset=utf-8; charset=x; y\n\n<b>x</b>", "malformed", func(m Message) bool { return m.HTML == "<b>x</b>" }},
		{"latin-1", "From: a@x.example\nSubject: =?iso-8859-1?q?=E4?=\nContent-Type: text/plain; charset=windows-1252\n\n\x80 \xe4", "", func(m Message) bool { return m.Text == "€ ä" && m.Subject == "ä" }},
		{"name like an address", "From: \"ceo@bank.example\" <evil@x.example>\n\n", "looks like another", nil},
		{"homoglyph", "From: a@bаnk.example\n\n", "outside ASCII", nil},
		{"qp", "From: a@x.example\nContent-Transfer-Encoding: quoted-printable\n\na=ZZb=41=\nc\n", "", func(m Message) bool { return strings.Contains(m.Text, "Ac") }},
		{"undisclosed", "From: a@x.example\nTo: undisclosed-recipients:;\n\n", "", func(m Message) bool { return len(m.To) == 0 && !strings.Contains(strings.Join(m.Warnings, ""), "To") }},
		{"forwarded", "From: a@x.example\nContent-Type: multipart/mixed; boundary=b\n\n--b\n\nfyi\n--b\nContent-Type: message/rfc822\n\nFrom: c@x.example\n\ninner\n--b--\n", "", func(m Message) bool {
			return m.Text == "fyi" && len(m.Attachments) == 1 && m.Attachments[0].Name == "attachment-1.eml"
		}},
		{"text after file", "From: a@x.example\nContent-Type: multipart/mixed; boundary=b\n\n--b\n\none\n--b\nContent-Type: application/pdf; name=a.pdf\n\n%PDF\n--b\n\ntwo\n--b--\n", "", func(m Message) bool { return m.Text == "one\ntwo" && len(m.Attachments) == 1 }},
	} {
		for _, end := range []string{"\n", "\r\n"} {
			t.Run(fmt.Sprintf("%s/%q", c.name, end), func(t *testing.T) {
				m, err := Parse([]byte(strings.ReplaceAll(c.raw, "\n", end)))
				if err != nil {
					t.Fatal(err)
				}
				if c.warning != "" && !strings.Contains(strings.Join(m.Warnings, "\n"), c.warning) {
					t.Errorf("got warnings %q, want one with %q", m.Warnings, c.warning)
				}
				if c.check != nil && !c.check(m) {
					t.Errorf("got %+v", m)
				}
			})
		}
	}
	for name, raw := range map[string]string{"empty": "", "body only": "\r\nhello", "no header": "hello", "endless header": "A: b\r\n" + strings.Repeat(" x\r\n", 100_000), "many fields": strings.Repeat("A:\r\n", 2000)} {
		if _, err := Parse([]byte(raw)); !errors.Is(err, ErrNotMessage) {
			t.Errorf("%s: got %v, want ErrNotMessage", name, err)
		}
	}
}

// cpuTime returns for how long this process has computed: a machine that is busy
// with other things does not count.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// manyAttributes returns size octets of attributes, all of other names.
func manyAttributes(size int) string {
	var b strings.Builder
	for i := 0; b.Len() < size; i++ {
		fmt.Fprintf(&b, " a%d=b", i)
	}
	return b.String()
}

// Hostile messages of the largest size are read in bounded time.
func TestParseIsBounded(t *testing.T) {
	const size = 20 << 20
	fill := func(s string) string { return strings.Repeat(s, size/len(s)) }
	for name, raw := range map[string]string{
		"parts":      "From: a@x.example\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n" + fill("--b\r\n\r\n"),
		"base64":     "From: a@x.example\r\nContent-Transfer-Encoding: base64\r\n\r\n" + fill("===="),
		"qp":         "From: a@x.example\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n" + fill("="),
		"qp spaces":  "From: a@x.example\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n" + fill("=                                                 "),
		"html":       "From: a@x.example\r\nContent-Type: text/html\r\n\r\n" + fill("<a href=x>"),
		"attributes": "From: a@x.example\r\nContent-Type: text/html\r\n\r\n<p" + manyAttributes(size) + ">",
		"dashes":     "From: a@x.example\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\n\r\n" + fill("--\r\n") + "--b--\r\n",
		"html open":  "From: a@x.example\r\nContent-Type: text/html\r\n\r\n" + fill("<"),
		"comments":   "From: " + strings.Repeat("(", 250_000) + "\r\n\r\n",
		"addresses":  "From: a@x.example\r\nTo: " + strings.Repeat("a@b,", 60_000) + "\r\n\r\n",
		"words":      "Subject: " + strings.Repeat("=?utf-8?q?a?= ", 18_000) + "\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			start := cpuTime(t)
			if _, err := Describe(Envelope{From: "a@x.example", To: []string{"b@x.example"}, Raw: []byte(raw)}); err != nil {
				t.Fatal(err)
			}
			if d := cpuTime(t) - start; d > 10*time.Second {
				t.Errorf("took %v of computing, want less than 10s", d)
			}
		})
	}
}

func TestDescribe(t *testing.T) {
	e := Envelope{From: "agent@p.example", To: []string{"a@x.example", "Hidden@x.example"}, Raw: crlf("From: agent@p.example\nTo: a@x.example, hidden@x.example\nCc: nobody@x.example\nReply-To: evil@y.example\nSubject: s\n\nleft\u202eright\n")}
	s, err := Describe(e)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"Hidden@x.example"}, s.Bcc); diff != "" {
		t.Error(diff)
	}
	if s.Text != `left\u{202e}right` {
		t.Errorf("got text %q", s.Text)
	}
	notes := strings.Join(s.Notes, "\n")
	for _, want := range []string{"nobody@x.example, who will not receive it", "hidden@x.example, who will not", "answers would go to evil@y.example", "unseen"} {
		if !strings.Contains(notes, want) {
			t.Errorf("got notes %q, want %q in them", notes, want)
		}
	}
}

func TestPayloadRefuses(t *testing.T) {
	for _, e := range []Envelope{
		{From: "a@b>\r\nRCPT TO:<x@y", To: []string{"c@d"}},
		{From: "a@b", To: []string{"c@d>\r\nRCPT TO:<x@y"}},
		{From: "a@b", To: []string{""}},
		{From: "a@b"},
	} {
		if p, err := e.Payload(); err == nil {
			t.Errorf("%+v: got %q, want an error", e, p)
		}
	}
	for _, p := range []string{"", "\r\n", "MAIL FROM:<a>\r\n\r\n", "MAIL FROM:<a>\r\nRCPT TO:<>\r\n\r\n", "mail from:<a>\r\nRCPT TO:<b>\r\n\r\n", "MAIL FROM:<a>\r\nRCPT TO:<b>\r\nX\r\n\r\n", "MAIL FROM:<a>\nRCPT TO:<b>\r\n\r\n"} {
		if e, err := ParsePayload([]byte(p)); !errors.Is(err, ErrBadPayload) {
			t.Errorf("%q: got %+v, %v, want ErrBadPayload", p, e, err)
		}
	}
}

// TestWideTables: a table whose rows are filled up to very many cells is not
// rendered, and an ordinary one is.
func TestWideTables(t *testing.T) {
	if _, err := markdownHTML(strings.Repeat("|a", 450) + "\n" + strings.Repeat("|-", 450) + "\n" + strings.Repeat("|\n", 30_000)); err == nil || !strings.Contains(err.Error(), "cells") {
		t.Errorf("a table of millions of cells is rendered: %v", err)
	}
	doc, err := markdownHTML("|a|b|\n|-|-|\n" + strings.Repeat("|1|2|\n", 1000))
	if err != nil || strings.Count(doc, "<tr>") != 1001 {
		t.Errorf("an ordinary table has %d rows, %v", strings.Count(doc, "<tr>"), err)
	}
}
