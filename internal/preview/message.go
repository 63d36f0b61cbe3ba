package preview

import (
	"strings"
	"time"

	"postern/internal/mail"
)

// A Letter is an email that is a file, such as a forwarded one.
type Letter struct {
	From, To, Cc []string // addresses with names; hostile
	Subject      string
	Date         time.Time // zero if it has none
	Files        []string  // names of its files
}

// message shows an email. It does nothing if data is not an email.
func (f *File) message(data []byte) {
	m, err := mail.Parse(data)
	if err != nil || len(m.From) == 0 && m.Subject == "" {
		return
	}
	f.Form = Message
	f.Mail = Letter{From: addresses(m.From), To: addresses(m.To), Cc: addresses(m.Cc), Subject: m.Subject, Date: m.Date}
	// The attack: words in a header field that the page does not show, such as X-Note or Reply-To.
	f.missing("the other fields of its header are not shown")
	text := m.Text
	if strings.TrimSpace(text) == "" && m.HTML != "" {
		text = mail.HTMLText(m.HTML)
		f.note("its text is made from HTML")
	} else if m.HTML != "" {
		f.missing("it also has HTML, which is not shown")
	}
	if f.Text = text; len(text) > MaxText {
		f.Text = strings.ToValidUTF8(text[:MaxText], "")
		f.missing("only the beginning of its text is shown")
	}
	for _, a := range m.Attachments {
		if len(f.Mail.Files) < 50 {
			f.Mail.Files = append(f.Mail.Files, a.Name)
		}
	}
	if n := len(m.Attachments); n > 0 {
		f.missing("%s in it, not shown", plural(n, "file", "files"))
	}
	f.Facts = "an email"
	if max(len(m.From), len(m.To), len(m.Cc)) > maxAddresses {
		f.missing("only the first %d addresses of a field are shown", maxAddresses)
	}
	for _, w := range m.Warnings {
		f.note("%s", w)
	}
}

// maxAddresses is how many addresses of one field are shown.
const maxAddresses = 100

func addresses(list []mail.Address) (out []string) {
	for _, a := range list {
		if len(out) == maxAddresses {
			break
		}
		out = append(out, a.String())
	}
	return out
}
