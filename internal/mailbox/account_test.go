package mailbox_test

import (
	"errors"
	"strings"
	"testing"

	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/storetest"
)

// TestNothingLeavesUnseen: an agent hides words where a reviewer would not look.
// They are refused, also where no person is asked, or shown.
func TestNothingLeavesUnseen(t *testing.T) {
	const part = "MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary=AA\n\n"
	for name, tt := range map[string]struct{ raw, field string }{
		"fields without end":      {strings.Repeat("X-Mailer: SECRET\n", 181) + "\nhello\n", "X-Mailer header"},
		"a part behind the end":   {part + "--AA\n\nhello\n--AA--\n--AA\nContent-Type: text/html\n\nSECRET\n--AA--\n", "multipart"},
		"words before the parts":  {part + strings.Repeat("SECRET\n", 100) + "--AA\n\nhello\n--AA--\n", "message"},
		"a charset that we lack":  {"Subject: =?utf-7?q?SECRET?=\n\nhello\n", "Subject header"},
		"octets behind base64":    {"Content-Transfer-Encoding: base64\n\naGVsbG8=\nU0VDUkVU\n", "body"},
		"a boundary of no parts":  {"Content-Type: text/plain; boundary=AA\n\n--AA\n\nSECRET\n--AA--\n", "Content-Type header"},
		"a file's name in pieces": {"Content-Type: text/plain; name*0=SEC; name*2=RET\n\nhello\n", "Content-Type header"},
	} {
		t.Run(name, func(t *testing.T) {
			f := setup(t, storetest.SQLite(t))
			f.judgedBy(t, &asked{}) // it lets everything leave, as in mode autonomous
			b, who, _ := f.inbox(t, "alice")
			raw := strings.ReplaceAll("From: "+b.Address+"\nTo: bob@example.com\n"+tt.raw, "\n", "\r\n")
			_, err := f.post.SendRaw(t.Context(), who, "smtp", b.Address, []string{"bob@example.com"}, []byte(raw))
			var fe *mail.FieldError
			if !errors.As(err, &fe) || fe.Field != tt.field {
				t.Errorf("got %v, want %s refused", err, tt.field)
			}
			if _, err := f.gate.RunOne(t.Context()); err != nil || len(f.hop.got) != 0 {
				t.Errorf("%d left, %v", len(f.hop.got), err)
			}
		})
	}
	t.Run("held", func(t *testing.T) {
		f := setup(t, storetest.SQLite(t))
		f.judgedBy(t, &asked{}) // as above
		b, who, _ := f.inbox(t, "alice")
		raw := strings.ReplaceAll("From: "+b.Address+"\nTo: bob@example.com\n"+part+"--AA\nContent-Type: message/rfc822\n\nContent-Type: multipart/mixed; boundary=q\n\n--q\n\nhello\n--q--\n--q\n\nSECRET\n--q--\n--AA--\n", "\n", "\r\n")
		p, err := f.post.SendRaw(t.Context(), who, "smtp", b.Address, []string{"bob@example.com"}, []byte(raw))
		if err != nil || p.State != oversight.Pending || !strings.Contains(p.Note, "must approve in every mode") {
			t.Errorf("a message that hides a part: %s, %q, %v", p.State, p.Note, err)
		}
	})
	t.Run("shown", func(t *testing.T) {
		f := setup(t, storetest.SQLite(t))
		b, who, _ := f.inbox(t, "alice")
		raw := strings.ReplaceAll("From: "+b.Address+"\nTo: bob@example.com\nX-Data: SECRET\nReferences: <WORDS@x>\nList-Unsubscribe: <https://evil.example/>\n"+part+"--AA\nContent-Description: HIDDEN\n\nhello\n--AA--\n", "\n", "\r\n")
		p, err := f.post.SendRaw(t.Context(), who, "smtp", b.Address, []string{"bob@example.com"}, []byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		v, err := f.post.Show(p.Action)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []oversight.Field{{Name: "X-Data", Value: "SECRET"}, {Name: "References", Value: "<WORDS@x>"}, {Name: "List-Unsubscribe", Value: "<https://evil.example/>"}, {Name: "part 1: Content-Description", Value: "HIDDEN"}} {
			found := false
			for _, got := range v.Fields {
				found = found || got == want
			}
			if !found {
				t.Errorf("%v is not among the fields %v", want, v.Fields)
			}
		}
		if !strings.Contains(strings.Join(v.Notes, "\n"), "X-Data (6 bytes)") || strings.Contains(strings.Join(v.Notes, "\n"), "References") {
			t.Errorf("notes %q", v.Notes)
		}
		if !strings.Contains(v.Partial, "2 bytes of it are not shown") {
			t.Errorf("it is said to be whole, or not why: %q", v.Partial)
		}
	})
	t.Run("whole", func(t *testing.T) {
		f := setup(t, storetest.SQLite(t))
		_, who, _ := f.inbox(t, "alice")
		p, err := f.post.Send(t.Context(), who, "rest", letter("hello", "bob@example.com"))
		if err != nil {
			t.Fatal(err)
		}
		if v, err := f.post.Show(p.Action); err != nil || v.Partial != "" || len(v.Notes) > 0 {
			t.Errorf("a plain letter is %q with notes %q, %v", v.Partial, v.Notes, err)
		}
	})
}
