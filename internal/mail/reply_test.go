package mail

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func parsed(t testing.TB, header, body string) Message {
	t.Helper()
	m, err := Parse([]byte(strings.ReplaceAll(header+"\n\n"+body, "\n", "\r\n")))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestReplyTo(t *testing.T) {
	const own = "agent@agents.test"
	tests := []struct {
		name, header string
		all          bool
		to, cc       []string
		elsewhere    []string
		fails        bool
	}{
		{name: "its author", header: "From: Bob <bob@x.test>\nTo: agent@agents.test, c@x.test", to: []string{`"Bob" <bob@x.test>`}},
		{name: "Reply-To wins", header: "From: bob@x.test\nReply-To: list@x.test\nTo: agent@agents.test", to: []string{"list@x.test"}, elsewhere: []string{"list@x.test"}},
		{name: "an empty Reply-To does not", header: "From: bob@x.test\nReply-To:\nTo: agent@agents.test", to: []string{"bob@x.test"}},
		{
			name: "all, each once, and not ourselves", all: true,
			header: "From: bob@x.test\nTo: AGENT@agents.test, c@x.test, Bob@X.test\nCc: d@x.test, C@x.test, agent@agents.test",
			to:     []string{"bob@x.test"}, cc: []string{"c@x.test", "d@x.test"},
		},
		{
			name: "all with Reply-To", all: true, header: "From: bob@x.test\nReply-To: list@x.test\nTo: list@x.test\nCc: agent@agents.test",
			to: []string{"list@x.test"}, elsewhere: []string{"list@x.test"},
		},
		{name: "what we sent ourselves goes on where it went", header: "From: agent@agents.test\nTo: bob@x.test\nCc: c@x.test", to: []string{"bob@x.test"}},
		{name: "what we sent ourselves, all", all: true, header: "From: agent@agents.test\nTo: bob@x.test\nCc: c@x.test", to: []string{"bob@x.test"}, cc: []string{"c@x.test"}},
		{name: "only to ourselves", header: "From: agent@agents.test\nTo: agent@agents.test", fails: true},
		{name: "nobody", header: "Subject: x", fails: true},
		{name: "a name that reads like another address", header: "From: \"boss@x.test\" <eve@x.test>\nTo: agent@agents.test", to: []string{"eve@x.test"}},
		{name: "a name with a line break in disguise", header: "From: =?utf-8?q?Bob=0D=0ABcc:_eve?= <bob@x.test>\nTo: agent@agents.test", to: []string{`"Bob\\u{d}\\u{a}Bcc: eve" <bob@x.test>`}},
		{name: "a name with quotes", header: `From: "Bob \"the\" \\ builder" <bob@x.test>` + "\nTo: agent@agents.test", to: []string{`"Bob \"the\" \\ builder" <bob@x.test>`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, err := ReplyTo(parsed(t, tt.header, "x"), []string{own}, tt.all)
			if tt.fails {
				if _, ok := errors.AsType[*FieldError](err); !ok {
					t.Fatalf("ReplyTo = %+v, %v; want a FieldError", r, err)
				}
				return
			}
			if err != nil || !slices.Equal(r.To, tt.to) || !slices.Equal(r.Cc, tt.cc) || !slices.Equal(r.Elsewhere, tt.elsewhere) {
				t.Errorf("got to %q cc %q elsewhere %q, %v; want %q, %q, %q", r.To, r.Cc, r.Elsewhere, err, tt.to, tt.cc, tt.elsewhere)
			}
			d := Draft{From: own, To: r.To, Cc: r.Cc, Subject: r.Subject, Text: "x", InReplyTo: r.InReplyTo, References: r.References, Replied: true}
			env, err := Compose(d, time.Now(), "agents.test")
			if err != nil {
				t.Fatalf("the answer cannot be written: %v", err)
			}
			if !bytes.Contains(env.Raw, []byte("\r\nAuto-Submitted: auto-replied\r\n")) {
				t.Error("the answer does not say that it is one")
			}
		})
	}
}

func TestThread(t *testing.T) {
	tests := []struct{ name, header, inReplyTo, references string }{
		{"first of a thread", "Message-ID: <1@x>", "<1@x>", "<1@x>"},
		{"further down", "Message-ID: <3@x>\nReferences: <1@x> <2@x>\nIn-Reply-To: <2@x>", "<3@x>", "<1@x> <2@x> <3@x>"},
		{"without References", "Message-ID: <2@x>\nIn-Reply-To: <1@x>", "<2@x>", "<1@x> <2@x>"},
		{"two in In-Reply-To tell nothing", "Message-ID: <3@x>\nIn-Reply-To: <1@x> <2@x>", "<3@x>", "<3@x>"},
		{"without Message-ID", "References: <1@x>", "", "<1@x>"},
		{"twice the same", "Message-ID: <1@x>\nReferences: <1@x> <1@x>", "<1@x>", "<1@x>"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			in, refs := thread(parsed(t, "From: a@x.test\n"+tt.header, ""))
			if got := strings.Join(refs, " "); in != tt.inReplyTo || got != tt.references {
				t.Errorf("got %q, %q; want %q, %q", in, got, tt.inReplyTo, tt.references)
			}
		})
	}
}

func TestPrefixed(t *testing.T) {
	for _, tt := range []struct{ subject, want string }{
		{"Hello", "Re: Hello"},
		{"Re: Hello", "Re: Hello"},
		{"RE: Hello", "RE: Hello"},
		{"re:Hello", "re:Hello"},
		{"", "Re: "},
		{"Regarding", "Re: Regarding"},
	} {
		if got := prefixed("Re: ", tt.subject); got != tt.want {
			t.Errorf("prefixed(%q) = %q, want %q", tt.subject, got, tt.want)
		}
	}
	if got := prefixed("Re: ", strings.Repeat("ü", MaxSubject)); len([]rune(got)) != MaxSubject {
		t.Errorf("a long subject has %d characters", len([]rune(got)))
	}
}

// TestForward takes every file along, also those whose names no header holds.
func TestForward(t *testing.T) {
	env, err := Compose(Draft{From: "a@x.test", To: []string{"b@x.test"}, Subject: "Report", Text: "see\n> file", Attachments: []Attachment{
		{Name: "a.csv", ContentType: "text/csv", Data: []byte("1,2")}, {Name: "ü.bin", Data: []byte{0, 1, 2}},
	}}, time.Now(), "x.test")
	if err != nil {
		t.Fatal(err)
	}
	m, err := Parse(env.Raw)
	if err != nil {
		t.Fatal(err)
	}
	m.Attachments = append(m.Attachments, Attachment{Name: "../../etc/passwd", ContentType: "nonsense", Data: []byte("x")}, Attachment{Name: "", ContentType: "multipart/mixed", Data: []byte("y")})
	subject, text, files := Forward(m)
	if subject != "Fwd: Report" || !strings.Contains(text, "\n> see\n> > file\n") || !strings.Contains(text, "> From: a@x.test\n") {
		t.Errorf("subject %q, text:\n%s", subject, text)
	}
	out, err := Compose(Draft{From: "b@x.test", To: []string{"c@x.test"}, Subject: subject, Text: text, Attachments: files}, time.Now(), "x.test")
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(out.Raw)
	if err != nil || len(got.Attachments) != 4 {
		t.Fatalf("%d files arrived, %v", len(got.Attachments), err)
	}
	for i, a := range got.Attachments {
		if a.Digest() != m.Attachments[i].Digest() {
			t.Errorf("file %d is %q, want %q", i, a.Data, m.Attachments[i].Data)
		}
	}
	if got.Attachments[2].Name != "attachment-3" || got.Attachments[0].Name != "a.csv" || got.Attachments[0].ContentType != "text/csv" {
		t.Errorf("names %q, %q", got.Attachments[0].Name, got.Attachments[2].Name)
	}
}

func TestMarkdown(t *testing.T) {
	tests := []struct{ name, markdown, want string }{
		{"emphasis", "a **b** c", "<p>a <strong>b</strong> c</p>"},
		{"lines are lines", "a\nb", "<p>a<br>\nb</p>"},
		{"a link", "[x](https://x.test)", `<p><a href="https://x.test">x</a></p>`},
		{"a table", "|a|\n|-|\n|b|", "<table>"},
		{"HTML is text", "a <b>c</b> <script>alert(1)</script>", "<p>a &lt;b&gt;c&lt;/b&gt; &lt;script&gt;alert(1)&lt;/script&gt;</p>"},
		{"a block of HTML is text", "<div onclick=x>\nb\n</div>", "&lt;div onclick=x&gt;"},
		{"a link that runs", "[x](javascript:alert(1))", `<a href="">x</a>`},
		{"a quotation is no Markdown", "yes\n\n> ![x](https://track.test/p)\n> <b>", "<blockquote>\n![x](https://track.test/p)<br>\n&lt;b&gt;\n</blockquote>"},
		{"dashes", strings.Repeat("-", 70) + " Forwarded", "Forwarded"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := markdownHTML(tt.markdown)
			if err != nil || !strings.Contains(got, tt.want) {
				t.Fatalf("got %q, %v; want %q", got, err, tt.want)
			}
			env, err := Compose(Draft{From: "a@x.test", To: []string{"b@x.test"}, Markdown: tt.markdown}, time.Now(), "x.test")
			if err != nil {
				t.Fatal(err)
			}
			s, err := Describe(env)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range s.Notes {
				if strings.Contains(n, "do not say the same") {
					t.Errorf("the reviewer is warned: %s", n)
				}
			}
			if strings.TrimSpace(s.Text) != strings.TrimSpace(tt.markdown) {
				t.Errorf("the reviewer reads %q", s.Text)
			}
		})
	}
	if _, err := markdownHTML(strings.Repeat(">", 10000) + "x\n\ny"); err == nil {
		t.Error("10000 quotes in one another were rendered")
	}
	if _, err := Compose(Draft{From: "a@x.test", To: []string{"b@x.test"}, Markdown: "a", Text: "b"}, time.Now(), "x.test"); err == nil {
		t.Error("markdown together with text was taken")
	}
}

func TestUnsubscribe(t *testing.T) {
	for _, tt := range []struct {
		name, url string
		one, ok   bool
		want      string
	}{
		{"one click", "https://p.test/v1/unsubscribe/T", true, true, "List-Unsubscribe: <https://p.test/v1/unsubscribe/T>\r\nList-Unsubscribe-Post: List-Unsubscribe=One-Click\r\n"},
		{"a page", "https://p.test/v1/unsubscribe/T", false, true, "List-Unsubscribe: <https://p.test/v1/unsubscribe/T>\r\nAuto"},
		{"mail has no clicks", "mailto:a@x.test?subject=unsubscribe", true, true, "List-Unsubscribe: <mailto:a@x.test?subject=unsubscribe>\r\nAuto"},
		{"a second field", "https://p.test/\r\nBcc: eve@x.test", true, false, ""},
		{"a second address", "https://p.test/>,<https://eve.test/", true, false, ""},
		{"no address", "javascript:x", true, false, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			env, err := Compose(Draft{From: "a@x.test", To: []string{"b@x.test"}, Text: "t", Unsubscribe: tt.url, OneClick: tt.one}, time.Now(), "x.test")
			if (err == nil) != tt.ok || !bytes.Contains(env.Raw, []byte(tt.want)) {
				t.Errorf("%v\n%s", err, env.Raw)
			}
		})
	}
}

func TestFingerprint(t *testing.T) {
	base := Draft{From: "a@x.test", To: []string{"b@x.test", "c@x.test"}, Subject: "s", Text: "t", Attachments: []Attachment{{Name: "f", Data: []byte("1")}}}
	of := func(change func(*Draft)) string {
		d := base
		d.To = slices.Clone(base.To)
		d.Attachments = slices.Clone(base.Attachments)
		change(&d)
		env, err := Compose(d, time.Now(), "x.test")
		if err != nil {
			t.Fatal(err)
		}
		f, err := Fingerprint(env)
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprintf("%x", f)
	}
	want := of(func(*Draft) {})
	for _, tt := range []struct {
		name   string
		change func(*Draft)
		same   bool
	}{
		{"composed once more", func(*Draft) {}, true},
		{"recipients in another order", func(d *Draft) { slices.Reverse(d.To) }, true},
		{"another recipient", func(d *Draft) { d.To[0] = "d@x.test" }, false},
		{"one more, hidden", func(d *Draft) { d.Bcc = []string{"d@x.test"} }, false},
		{"another subject", func(d *Draft) { d.Subject = "S" }, false},
		{"another text", func(d *Draft) { d.Text = "T" }, false},
		{"another file", func(d *Draft) { d.Attachments[0].Data = []byte("2") }, false},
		{"another name of a file", func(d *Draft) { d.Attachments[0].Name = "g" }, false},
		{"no file", func(d *Draft) { d.Attachments = nil }, false},
		{"in answer to something", func(d *Draft) { d.InReplyTo = "<1@x>" }, false},
		{"as HTML", func(d *Draft) { d.HTML = "t" }, false},
	} {
		if got := of(tt.change); (got == want) != tt.same {
			t.Errorf("%s: the same is %v, want %v", tt.name, got == want, tt.same)
		}
	}
}

// FuzzReply answers and passes on what anybody may have sent: what comes out can
// be composed, or is refused in words.
func FuzzReply(f *testing.F) {
	f.Add([]byte("From: Bob <bob@x.test>\r\nTo: a@x.test, \"b\\\"\" <c@x.test>\r\nReply-To: =?utf-8?q?=0A?= <d@x.test>\r\nMessage-ID: <1@x>\r\nSubject: Re: x\r\n\r\n> hi\r\n"))
	f.Add([]byte("From: <>\r\nReferences: <a> <b\r\n\r\n"))
	f.Add([]byte("From: a@x.test\r\nContent-Type: text/html\r\n\r\n<b>x</b><img src=https://t.test/>"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := Parse(raw)
		if err != nil || len(m.Text) > 10000 || len(m.HTML) > 10000 {
			return
		}
		compose := func(d Draft) {
			if _, err := Compose(d, time.Unix(0, 0), "x.test"); err != nil {
				if _, ok := errors.AsType[*FieldError](err); !ok {
					t.Errorf("%T: %v", err, err)
				}
			}
		}
		if r, err := ReplyTo(m, []string{"a@x.test"}, true); err == nil {
			if len(r.To) == 0 {
				t.Error("an answer to nobody")
			}
			for _, to := range append(r.To, r.Cc...) {
				if a, err := ParseAddress("", to); err != nil || strings.EqualFold(a.Addr, "a@x.test") {
					t.Errorf("answers to %q: %v", to, err)
				}
			}
			compose(Draft{From: "a@x.test", To: r.To[:1], Subject: r.Subject, Markdown: Behind("x", Quote(m)), InReplyTo: r.InReplyTo, References: r.References})
		}
		subject, text, files := Forward(m)
		if len(files) != len(m.Attachments) {
			t.Error("a file is lost")
		}
		compose(Draft{From: "a@x.test", To: []string{"b@x.test"}, Subject: subject, HTML: BehindHTML("<p>x</p>", text), Attachments: files})
	})
}
