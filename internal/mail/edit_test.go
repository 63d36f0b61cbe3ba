package mail_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/mail"
)

// TestEdit: what a reviewer changes is what differs, and nothing else.
func TestEdit(t *testing.T) {
	d := mail.Draft{
		From: `"Ana" <ana@example.com>`, To: []string{"Bob <bob@example.org>"}, Cc: []string{"carl@example.org"}, Bcc: []string{"dora@example.org"},
		ReplyTo: "desk@example.com", Subject: "Offer", Text: "one\ntwo\nthree", InReplyTo: "<q@example.org>", References: []string{"<p@example.org>", "<q@example.org>"}, Replied: true,
		Attachments: []mail.Attachment{{Name: "a.txt", ContentType: "text/plain", Data: []byte("a")}, {Name: "b.txt", ContentType: "text/plain", Data: []byte("b")}},
	}
	html := d
	html.Text, html.HTML = "one two", "<p>one <b>two</b></p>"
	marked := d
	marked.Text, marked.Markdown = "", "one **two**"
	tests := []struct {
		name  string
		draft mail.Draft
		edit  mail.Edit
		want  []string // changes, "Field: old → new"
	}{
		{"nothing", d, mail.Edit{}, nil},
		{"nothing of HTML", html, mail.Edit{}, nil},
		{"nothing of Markdown", marked, mail.Edit{}, nil},
		{"the subject", d, mail.Edit{Subject: new("Our offer")}, []string{"Subject: Offer → Our offer"}},
		{"a line", d, mail.Edit{Text: new("one\n2\nthree\nfour")}, []string{"text: two → ", "text:  → 2", "text:  → four"}},
		{
			"a recipient", d,
			mail.Edit{To: new([]string{"eve@example.org"}), Bcc: new([]string{})},
			[]string{"To: Bob <bob@example.org> → ", "To:  → eve@example.org", "Bcc: dora@example.org → "},
		},
		{
			"a file", d,
			mail.Edit{Drop: []int{0}},
			[]string{"file: a.txt (text/plain, 1 bytes, sha256 ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb) → "},
		},
		{"the text of HTML", html, mail.Edit{Text: new("three")}, []string{"forms: plain and HTML → plain", "text: one two → ", "text:  → three"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			before, err := mail.Compose(tt.draft, time.Now(), "example.com")
			if err != nil {
				t.Fatal(err)
			}
			after, err := tt.edit.Apply(before, time.Now(), "example.com")
			if err != nil {
				t.Fatal(err)
			}
			a, err := mail.Describe(before)
			if err != nil {
				t.Fatal(err)
			}
			b, err := mail.Describe(after)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, c := range mail.Diff(a, b) {
				got = append(got, c.Field+": "+c.Old+" → "+c.New)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("got  %q\nwant %q", got, tt.want)
			}
			if a.InReplyTo != b.InReplyTo {
				t.Errorf("it answers %q, want %q", b.InReplyTo, a.InReplyTo)
			}
			if a.SHA256 == b.SHA256 {
				t.Error("it has the digest of what it was")
			}
		})
	}
	before, err := mail.Compose(d, time.Now(), "example.com")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []mail.Edit{
		{Drop: []int{2}},
		{Drop: []int{-1}},
		{Subject: new("a\r\nBcc: eve@example.org")},
		{To: new([]string{"bob@example.org\r\nX: y"})},
		{To: new([]string{}), Cc: new([]string{}), Bcc: new([]string{})},
	} {
		if _, err := e.Apply(before, time.Now(), "example.com"); err == nil {
			t.Errorf("%+v was taken", e)
		}
	}
}

// TestDiffOfFields: a field that only one of two mails has.
func TestDiffOfFields(t *testing.T) {
	summary := func(field string) mail.Summary {
		t.Helper()
		raw := "From: ana@example.com\r\nTo: bob@example.org\r\nSubject: s\r\n" + field + "\r\nhello\r\n"
		env, err := mail.FromCaptured([]byte(raw), "ana@example.com", []string{"bob@example.org"}, "ana@example.com", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		s, err := mail.Describe(env)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	want := []mail.Change{{Field: "field", Old: "X-Data: a"}, {Field: "field", New: "X-Data: b"}}
	if got := mail.Diff(summary("X-Data: a\r\n"), summary("X-Data: b\r\n")); !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

// TestDiffIsBounded: a text of very many lines is not compared line by line.
func TestDiffIsBounded(t *testing.T) {
	a, b := strings.Repeat("a\n", 50_000), strings.Repeat("b\n", 50_000)
	if n := len(mail.Diff(mail.Summary{Text: a}, mail.Summary{Text: b})); n != 100_000 {
		t.Errorf("%d changes, want 100000", n)
	}
}

// TestDiffOfHTML: an agent revises a mail whose plain text stays what it was, and
// whose HTML does not.
func TestDiffOfHTML(t *testing.T) {
	summary := func(html string) mail.Summary {
		t.Helper()
		env, err := mail.Compose(mail.Draft{From: "ana@example.com", To: []string{"bob@example.org"}, Subject: "s", Text: "Pay here", HTML: html}, time.Now(), "example.com")
		if err != nil {
			t.Fatal(err)
		}
		s, err := mail.Describe(env)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	good := summary(`<p><a href="https://bank.example/">Pay here</a></p>`)
	if !strings.Contains(good.Text, "https://bank.example/") || !slices.ContainsFunc(good.Notes, func(n string) bool { return strings.Contains(n, "links that the plain text does not show") }) {
		t.Errorf("a link that only the HTML has is not shown as text: %q, %q", good.Text, good.Notes)
	}
	for name, tt := range map[string]struct{ html, want string }{
		"a link that leads elsewhere": {`<p><a href="https://evil.example/">Pay here</a></p>`, "https://evil.example/"},
		"what it looks like":          {`<p><a style="color:red" href="https://bank.example/">Pay here</a></p>`, "sha256 "},
	} {
		got := mail.Diff(good, summary(tt.html))
		if len(got) == 0 || !strings.Contains(got[len(got)-1].New, tt.want) {
			t.Errorf("%s: %+v", name, got)
		}
	}
	if got := mail.Diff(good, good); len(got) != 0 {
		t.Errorf("the same: %+v", got)
	}
}
