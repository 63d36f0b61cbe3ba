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
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := Parse(raw)
		if err != nil {
			return
		}
		all := append([]string{m.Subject, m.AutoSubmitted, m.MessageID}, m.Warnings...)
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
