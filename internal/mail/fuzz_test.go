package mail

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

var seeds = []string{
	"From: a@b.example\r\nTo: c@d.example\r\nSubject: =?utf-8?b?w6Q=?=\r\n\r\nhello\r\n",
	"From: a@b.example\r\nContent-Type: multipart/alternative; boundary=\"x\"\r\n\r\n--x\r\n\r\nplain\r\n--x\r\nContent-Type: text/html\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n<p>=C3=A4 <a href=3D\"http://x\">y</a>\r\n--x--\r\n",
	"From: \"x\" <a@b.example>\nBcc : q\n\tr\nContent-Type: application/pdf; name*=utf-8''%2e%2e%2fx\nContent-Transfer-Encoding: base64\n\nAAAA=\nBB",
	"From a\r\nFrom: g: a@b, c@d;\r\nResent-To: <>\r\nReferences: <a@b> <c\r\n d>\r\n \r\n\r\n\x00\r\r\n",
	"Content-Type: multipart/digest; boundary=\r\n\r\n----\r\n",
}

func FuzzParse(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	f.Add([]byte("Authentication-Results: x;\r\nReturn-Path: <>\r\nReceived: by x;\r\nReceived: from y by x\r\nReturn-Path: <\x01>\r\n\r\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := Parse(raw)
		if err != nil {
			return
		}
		all := append([]string{m.Subject, m.AutoSubmitted, m.MessageID}, m.Warnings...)
		all = append(append(all, m.Brought()...), DescribeStored(raw).Notes...)
		for _, l := range [][]Address{m.From, m.Sender, m.ReplyTo, m.To, m.Cc, m.Bcc} {
			for _, a := range l {
				all = append(all, a.Name, a.Addr)
			}
		}
		for _, a := range m.Attachments {
			if a.Name == "" || strings.ContainsAny(a.Name, `/\`) || strings.Trim(a.Name, ".") == "" {
				t.Errorf("unsafe name %q", a.Name)
			}
			all = append(all, a.Name, a.ContentType)
		}
		for _, s := range append(append(all, m.InReplyTo...), m.References...) {
			if controls(s) != "" || !utf8.ValidString(s) {
				t.Errorf("unprintable %q", s)
			}
		}
		if !utf8.ValidString(m.Text) || !utf8.ValidString(m.HTML) {
			t.Error("invalid text")
		}
		e := Envelope{From: "a@b.example", To: []string{"c@d.example", "e@f.example"}, Raw: raw}
		s, err := Describe(e)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(s.To) + len(s.Cc) + len(s.Bcc); n != 2 {
			t.Errorf("%d of 2 recipients are shown", n)
		}
		if v := visible(s.Text, true); v != s.Text {
			t.Errorf("unprintable text %q", s.Text)
		}
	})
}

func FuzzAddress(f *testing.F) {
	for _, s := range []string{"a@b.example", `"x, y" <a@b.example>`, "=?utf-8?q?=41?= <a@b>", "g: a@b;", "a@b (c)", `"a b"@c`, "a@[1.2.3.4]", "a@b\r\nBcc: c@d", "ä@ü.example", "<a@b>,<c@d", "a@b>x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		parseList(s)
		a, err := ParseAddress("x", s)
		if err != nil {
			return
		}
		if again, err := CheckAddr("x", a.Addr); err != nil || again != a.Addr {
			t.Errorf("%q: %q does not check again: %v", s, a.Addr, err)
		}
		if strings.ContainsAny(a.Addr+a.Name, "\r\n\x00") {
			t.Errorf("%q: got %+v", s, a)
		}
		e, err := Compose(Draft{From: "a@b.example", To: []string{s}, Text: "x"}, now, "b.example")
		if err != nil {
			t.Fatal(err)
		}
		m, err := Parse(e.Raw)
		if err != nil || len(m.To) != 1 || m.To[0].Addr != a.Addr || !slices.Equal(e.To, []string{a.Addr}) {
			t.Errorf("%q: sent to %v, shown %v: %v", s, e.To, m.To, err)
		}
	})
}

func FuzzCompose(f *testing.F) {
	f.Add("subject", "text\n.\n", "name.txt", "<b>x</b>")
	f.Add("=?utf-8?q?x?=", "\r", "ä", "")
	f.Fuzz(func(t *testing.T, subject, text, name, html string) {
		e, err := Compose(Draft{
			From: "a@b.example", To: []string{"c@d.example"}, Subject: subject, Text: text, HTML: html,
			Attachments: []Attachment{{Name: name, Data: []byte(text)}},
		}, now, "b.example")
		if err != nil {
			return
		}
		if _, err := TakeAccount(e.Raw); err != nil && !strings.Contains(subject, "=?") {
			t.Errorf("what we compose cannot be accounted for: %v\n%s", err, e.Raw)
		}
		m, err := Parse(e.Raw)
		if err != nil {
			t.Fatal(err)
		}
		if m.Subject != subject || len(m.To) != 1 || len(m.Bcc) != 0 || len(m.Attachments) != 1 || !bytes.Equal(m.Attachments[0].Data, []byte(text)) {
			t.Errorf("got %+v", m)
		}
	})
}

func FuzzPayload(f *testing.F) {
	f.Add([]byte("MAIL FROM:<a@b>\r\nRCPT TO:<c@d>\r\nRCPT TO:<e@f>\r\n\r\nFrom: a@b\r\n\r\nx\r\n"))
	f.Add([]byte("MAIL FROM:<>\r\nRCPT TO:<c@d>\r\n\r\n"))
	f.Fuzz(func(t *testing.T, p []byte) {
		e, err := ParsePayload(p)
		if err != nil {
			return
		}
		again, err := e.Payload()
		if err != nil || !bytes.Equal(again, p) {
			t.Errorf("got %q, %v, want %q", again, err, p)
		}
	})
}

func FuzzCaptured(f *testing.F) {
	const inbox = "agent@p.example"
	for _, s := range seeds {
		f.Add([]byte(strings.ReplaceAll(s, "a@b.example", inbox)), "c@d.example", "h@i.example")
	}
	f.Fuzz(func(t *testing.T, raw []byte, r1, r2 string) {
		e, err := FromCaptured(raw, inbox, []string{r1, r2}, inbox, now)
		if err != nil {
			return
		}
		if err := CheckRaw(e.Raw); err != nil {
			t.Fatal(err)
		}
		s, err := Describe(e)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(s.To) + len(s.Cc) + len(s.Bcc); n != len(e.To) {
			t.Errorf("%d of %d recipients are shown", n, len(e.To))
		}
		m, err := Parse(e.Raw)
		if err != nil || len(m.From) != 1 || m.From[0].Addr != inbox || len(m.Bcc) != 0 || bytes.Contains(bytes.ToLower(e.Raw[:bytes.Index(e.Raw, []byte("\r\n\r\n"))]), []byte("\r\nbcc:")) {
			t.Errorf("got from %v, bcc %v: %v", m.From, m.Bcc, err)
		}
	})
}

// FuzzAccount: what is accounted for is so to its last octet, and is shown by the
// same reading.
func FuzzAccount(f *testing.F) {
	for _, s := range seeds {
		f.Add(crlf(strings.ReplaceAll(s, "\r\n", "\n")))
	}
	g := newGenerator(3)
	for range 40 {
		f.Add(g.message())
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if _, err := TakeAccount(raw); err != nil {
			if controls(err.Error()) != "" || !utf8.ValidString(err.Error()) {
				t.Errorf("unprintable error %q", err)
			}
			return
		}
		checkAccount(t, raw)
		s, err := Describe(Envelope{From: "a@b.example", To: []string{"c@d.example"}, Raw: raw})
		if err != nil || s.Unclear != "" {
			t.Errorf("accounted for, and %q, %v", s.Unclear, err)
		}
	})
}

// FuzzStructured: a parameter that is read has one value, and is read the same
// again as a program would write it.
func FuzzStructured(f *testing.F) {
	for _, s := range []string{
		"text/plain; charset=utf-8", `attachment; filename="a\"b"`, "attachment; filename*=utf-8'en'%e2%82%ac; filename=a", "attachment; filename*0*=iso-8859-1''%E4; filename*1=b",
		"multipart/mixed; boundary=a; boundary*=b", "a/b;;", "a/b; c", "a/b (c)", `a/b; c="d`, "a; b=c; B=d",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, v string) {
		s, err := parseStructured(v)
		if err != nil {
			return
		}
		if s.value != strings.ToLower(s.value) || strings.ContainsAny(s.value, " ;\"()") {
			t.Errorf("%q: value %q", v, s.value)
		}
		for name, value := range s.params {
			if name != strings.ToLower(name) || strings.ContainsAny(name, "* ;=") {
				t.Errorf("%q: parameter %q", v, name)
			}
			again, err := parseStructured(s.value + "; " + name + `="` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(value) + `"`)
			if err != nil || again.params[name] != value {
				t.Errorf("%q: %s is %q, and again %q, %v", v, name, value, again.params[name], err)
			}
		}
	})
}

// FuzzWords: encoded words that are let in decode to text in which none is left.
func FuzzWords(f *testing.F) {
	for _, s := range []string{"=?utf-8?q?=C3=A4?= =?utf-8?b?w6Q=?=", "=?utf-7?q?x?=", "=?utf-8?q?=3D=3F?=", `"=?utf-8?q?x?=" <a@b>`, "a=?utf-8?q?x?=", "=?iso-2022-jp?B?GyRCRnxLXBsoQg==?=", "=?"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, v string) {
		if checkWords(v) != nil {
			return
		}
		if d := decodeWords(v); strings.Contains(d, "=?") || strings.Contains(v, "=?") && strings.ContainsRune(d, utf8.RuneError) {
			t.Errorf("%q decodes to %q", v, d)
		}
	})
}
