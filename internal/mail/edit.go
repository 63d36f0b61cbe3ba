package mail

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// An Edit is what a reviewer changes of an email that waits. What is nil stays
// as it is.
type Edit struct {
	To, Cc, Bcc *[]string
	Subject     *string
	Text        *string // takes the place of all forms of the text; Markdown where that is what it was
	Drop        []int   // files that are taken out, by their place in [Summary.Attachments]
}

// Empty reports whether e changes nothing.
func (e Edit) Empty() bool {
	return e.To == nil && e.Cc == nil && e.Bcc == nil && e.Subject == nil && e.Text == nil && len(e.Drop) == 0
}

// Apply returns env as e changes it, composed anew: with a new Message-ID and
// date, and without fields of the header that [Compose] does not write, which no
// reviewer was shown. What cannot be written is refused with a [FieldError].
func (e Edit) Apply(env Envelope, now time.Time, messageIDDomain string) (Envelope, error) {
	d, err := e.Draft(env)
	if err != nil {
		return Envelope{}, err
	}
	return Compose(d, now, messageIDDomain)
}

// Draft returns the draft that [Edit.Apply] composes.
func (e Edit) Draft(env Envelope) (Draft, error) {
	m, err := Parse(env.Raw)
	if err != nil {
		return Draft{}, err
	}
	d := Draft{From: env.From, Bcc: env.hidden(m), Subject: m.Subject, Replied: m.Replied(), References: m.References}
	if len(m.From) == 1 && sameAddr(m.From[0].Addr, env.From) && !strings.ContainsRune(m.From[0].Name, '@') {
		d.From = writable(m.From[0])
	}
	if len(m.InReplyTo) == 1 {
		d.InReplyTo = m.InReplyTo[0]
	} else {
		d.References = nil
	}
	if len(m.ReplyTo) == 1 {
		d.ReplyTo = writable(m.ReplyTo[0])
	}
	received := func(list []Address) (out []string) {
		for _, a := range list {
			if slices.ContainsFunc(env.To, func(r string) bool { return named([]Address{a}, r) }) {
				out = append(out, writable(a))
			}
		}
		return out
	}
	d.To, d.Cc = received(m.To), received(m.Cc)
	if e.To == nil && e.Cc == nil && e.Bcc == nil {
		// A link to get no more of it is of one address; it stays with that.
		d.Unsubscribe, d.OneClick = unsubscribeOf(m)
	}
	for _, l := range []struct{ from, to *[]string }{{e.To, &d.To}, {e.Cc, &d.Cc}, {e.Bcc, &d.Bcc}} {
		if l.from != nil {
			*l.to = *l.from
		}
	}
	if e.Subject != nil {
		d.Subject = *e.Subject
	}
	switch {
	case e.Text != nil && m.HTML != "" && rendered(m.Text, m.HTML):
		d.Markdown = *e.Text
	case e.Text != nil:
		d.Text = *e.Text
	default:
		d.Text, d.HTML = strings.TrimSuffix(m.Text, "\n"), fragment(m.HTML)
	}
	for i, a := range m.Attachments {
		if !slices.Contains(e.Drop, i) {
			d.Attachments = append(d.Attachments, a)
		}
	}
	for _, i := range e.Drop {
		if i < 0 || i >= len(m.Attachments) {
			return Draft{}, fieldErr("drop", "names file %d, and there are %d", i, len(m.Attachments))
		}
	}
	return d, nil
}

// fragment returns what [document] was made from, or what it is given.
func fragment(doc string) string {
	doc = strings.ReplaceAll(doc, "\r\n", "\n")
	before, after, _ := strings.Cut(document("\x00"), "\x00")
	if inner, ok := strings.CutPrefix(doc, before); ok {
		return strings.TrimSuffix(strings.TrimRight(inner, "\n")+"\n", after)
	}
	return doc
}

// unsubscribeOf returns the way out of bulk mail that m names.
func unsubscribeOf(m Message) (u string, oneClick bool) {
	for _, f := range m.Header {
		switch {
		case strings.EqualFold(f.Name, "List-Unsubscribe"):
			u = strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(f.Value), "<"), ">")
		case strings.EqualFold(f.Name, "List-Unsubscribe-Post"):
			oneClick = true
		}
	}
	return u, oneClick
}

// A Change is one difference between two emails, for a person. A line of text
// that is there in one of them alone is in Old or in New; of all else both say
// what it was and what it is.
type Change struct {
	Field    string // "To", "Subject", "text", "HTML", "file"
	Old, New string // printable; empty where there was, or is, none
}

// Diff returns what a reviewer sees differ between two emails: each recipient,
// field and file that was added, taken away or changed, and the lines of the text.
func Diff(before, after Summary) (out []Change) {
	one := func(name, a, b string) {
		if a != b {
			out = append(out, Change{name, a, b})
		}
	}
	list := func(name string, a, b []string) {
		for _, v := range a {
			if !slices.Contains(b, v) {
				out = append(out, Change{name, v, ""})
			}
		}
		for _, v := range b {
			if !slices.Contains(a, v) {
				out = append(out, Change{name, "", v})
			}
		}
	}
	one("From", before.From, after.From)
	list("To", before.To, after.To)
	list("Cc", before.Cc, after.Cc)
	list("Bcc", before.Bcc, after.Bcc)
	list("Reply-To", before.ReplyTo, after.ReplyTo)
	one("Subject", before.Subject, after.Subject)
	if before.HTML != after.HTML {
		forms := map[bool]string{true: "plain and HTML", false: "plain"}
		out = append(out, Change{"forms", forms[before.HTML], forms[after.HTML]})
	}
	fields := func(s Summary) (all []string) {
		for _, f := range s.Fields {
			// Every version has its own.
			if !strings.EqualFold(f.Name, "Date") && !strings.EqualFold(f.Name, "Message-ID") {
				all = append(all, f.Name+": "+f.Value)
			}
		}
		return all
	}
	list("field", fields(before), fields(after))
	files := func(s Summary) (names []string) {
		for _, f := range s.Attachments {
			names = append(names, fmt.Sprintf("%s (%s, %d bytes, sha256 %s)", f.Name, f.ContentType, f.Size, f.SHA256))
		}
		return names
	}
	list("file", files(before), files(after))
	text := lines("text", before.Text, after.Text)
	out = append(out, text...)
	if !before.HTML || !after.HTML || before.HTMLSHA256 == after.HTMLSHA256 {
		return out
	}
	// The attack: a plain text that stays what it was, beside HTML whose links lead
	// elsewhere now, or that shows something else.
	html := lines("HTML", before.Rendered, after.Rendered)
	if len(html) == 0 {
		html = []Change{{"HTML", "sha256 " + before.HTMLSHA256, "sha256 " + after.HTMLSHA256}}
	}
	if slices.EqualFunc(text, html, func(a, b Change) bool { return a.Old == b.Old && a.New == b.New }) {
		return out // the text was made from it
	}
	return append(out, html...)
}

// maxCompared is how many lines of a text are compared with so many others: the
// comparison takes the product of both. The attack: a text of a million lines.
const maxCompared = 2000

// lines returns the lines that were taken away or added, in order.
func lines(field, before, after string) (out []Change) {
	a, b := strings.Split(strings.TrimRight(before, "\n"), "\n"), strings.Split(strings.TrimRight(after, "\n"), "\n")
	for len(a) > 0 && len(b) > 0 && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	gone := func(s string) { out = append(out, Change{field, s, ""}) }
	come := func(s string) { out = append(out, Change{field, "", s}) }
	if len(a) > maxCompared || len(b) > maxCompared {
		for _, s := range a {
			gone(s)
		}
		for _, s := range b {
			come(s)
		}
		return out
	}
	// common[i][j] is the length of the longest common subsequence of a[i:] and b[j:].
	common := make([][]int16, len(a)+1)
	for i := range common {
		common[i] = make([]int16, len(b)+1)
	}
	for i, x := range slices.Backward(a) {
		for j, y := range slices.Backward(b) {
			if x == y {
				common[i][j] = common[i+1][j+1] + 1
			} else {
				common[i][j] = max(common[i+1][j], common[i][j+1])
			}
		}
	}
	i, j := 0, 0
	for i < len(a) && j < len(b) {
		switch {
		case a[i] == b[j]:
			i, j = i+1, j+1
		case common[i+1][j] >= common[i][j+1]:
			gone(a[i])
			i++
		default:
			come(b[j])
			j++
		}
	}
	for ; i < len(a); i++ {
		gone(a[i])
	}
	for ; j < len(b); j++ {
		come(b[j])
	}
	return out
}
