package mail

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// A Reply is how a message is answered or passed on: what of a [Draft] follows
// from the message. All of it comes from whoever wrote the message.
type Reply struct {
	To         []string // as [ParseAddress] reads them
	Cc         []string
	Subject    string
	InReplyTo  string
	References []string
	// Elsewhere names the addresses of To that are not those of From: where a
	// Reply-To field sends the answer.
	Elsewhere []string
}

// ReplyTo returns how m is answered: its author alone, or all who got it. Own
// are the addresses of who answers, which are left out; an answer to what they
// sent goes to whom they sent it.
func ReplyTo(m Message, own []string, all bool) (Reply, error) {
	r := Reply{Subject: prefixed("Re: ", m.Subject)}
	isOwn := func(a Address) bool {
		return slices.ContainsFunc(own, func(o string) bool { return sameAddr(o, a.Addr) })
	}
	seen := map[string]bool{}
	add := func(list *[]string, from []Address) {
		for _, a := range from {
			key := strings.ToLower(a.Addr)
			// What is no address is not answered; it was shown as it came.
			if _, err := CheckAddr("", a.Addr); err != nil || isOwn(a) || seen[key] {
				continue
			}
			seen[key] = true
			*list = append(*list, writable(a))
		}
	}
	to := m.ReplyTo
	if len(to) == 0 || !slices.ContainsFunc(to, func(a Address) bool { return a.Addr != "" }) {
		to = m.From
	}
	if len(m.From) > 0 && isOwn(m.From[0]) {
		to = m.To // goes on where the own message went
	}
	add(&r.To, to)
	if all {
		add(&r.Cc, m.To)
		add(&r.Cc, m.Cc)
	}
	if len(r.To) == 0 && len(r.Cc) > 0 {
		r.To, r.Cc = r.Cc, nil
	}
	if len(r.To) == 0 {
		return Reply{}, fieldErr("reply_to", "the message names nobody else whom an answer could go to")
	}
	if len(m.ReplyTo) > 0 && len(m.From) > 0 && !isOwn(m.From[0]) {
		for _, a := range to {
			if a.Addr != "" && !slices.ContainsFunc(m.From, func(f Address) bool { return sameAddr(f.Addr, a.Addr) }) {
				r.Elsewhere = append(r.Elsewhere, a.Addr)
			}
		}
	}
	r.InReplyTo, r.References = thread(m)
	return r, nil
}

// thread returns the In-Reply-To and References of an answer to m (RFC 5322,
// 3.6.4).
func thread(m Message) (inReplyTo string, references []string) {
	refs := m.References
	if len(refs) == 0 && len(m.InReplyTo) == 1 {
		refs = m.InReplyTo
	}
	for _, id := range append(slices.Clone(refs), m.MessageID) {
		if id, err := checkID("", id); err == nil && !slices.Contains(references, id) {
			references = append(references, id)
		}
	}
	if id, err := checkID("", m.MessageID); err == nil {
		inReplyTo = id
	}
	return inReplyTo, references
}

// prefixed returns a subject with its prefix, once.
func prefixed(prefix, subject string) string {
	subject = strings.TrimSpace(subject)
	if len(subject) >= len(prefix)-1 && strings.EqualFold(subject[:len(prefix)-1], prefix[:len(prefix)-1]) {
		prefix = ""
	}
	if s := []rune(prefix + subject); len(s) > MaxSubject {
		return string(s[:MaxSubject])
	}
	return prefix + subject
}

// writable returns a as [ParseAddress] reads it back. The name is the
// stranger's choice: one that would not be taken is left out.
func writable(a Address) string {
	if a.Name == "" {
		return a.Addr
	}
	s := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(a.Name) + `" <` + a.Addr + ">"
	if got, err := ParseAddress("", s); err != nil || got != a || strings.ContainsRune(a.Name, '@') {
		return a.Addr
	}
	return s
}

// said returns the text of m as one quotes it.
func said(m Message) string {
	text := m.Text
	if strings.TrimSpace(text) == "" && m.HTML != "" {
		text = m.htmlText(true).text
	}
	text = visible(strings.NewReplacer("\r\n", "\n", "\r", "\n", "\x00", "").Replace(text), true)
	return strings.TrimRight(text, "\n ")
}

// Quote returns what m says, with > before each line and a line that says whose
// words they are.
func Quote(m Message) string {
	var b strings.Builder
	when := ""
	if !m.Date.IsZero() {
		when = "On " + m.Date.Format("Mon, 2 Jan 2006 at 15:04 -0700") + ", "
	}
	b.WriteString(when + oneLine(joinAddresses(m.From)) + " wrote:\n")
	for line := range strings.SplitSeq(said(m), "\n") {
		if strings.HasPrefix(line, ">") || line == "" {
			b.WriteString(">" + line + "\n")
		} else {
			b.WriteString("> " + line + "\n")
		}
	}
	return b.String()
}

// Forward returns the subject, the text and the attachments with which m is
// passed on. The attachments are all of them, with names that can be written.
func Forward(m Message) (subject, text string, files []Attachment) {
	var b strings.Builder
	b.WriteString("---------- Forwarded message ----------\n")
	line := func(name, value string) {
		if value != "" {
			b.WriteString("> " + name + ": " + oneLine(value) + "\n")
		}
	}
	line("From", joinAddresses(m.From))
	if !m.Date.IsZero() {
		line("Date", m.Date.Format(time.RFC1123Z))
	}
	line("Subject", m.Subject)
	line("To", joinAddresses(m.To))
	line("Cc", joinAddresses(m.Cc))
	b.WriteString(">\n")
	for l := range strings.SplitSeq(said(m), "\n") {
		b.WriteString(strings.TrimRight("> "+l, " ") + "\n")
	}
	for i, a := range m.Attachments {
		if _, err := attachmentEntity("", Attachment{Name: a.Name}); err != nil {
			a.Name = fmt.Sprintf("attachment-%d", i+1)
		}
		if _, err := attachmentEntity("", Attachment{Name: a.Name, ContentType: a.ContentType}); err != nil {
			a.ContentType = ""
		}
		files = append(files, a)
	}
	return prefixed("Fwd: ", m.Subject), b.String(), files
}

// oneLine keeps a line of a quotation a line of bounded length.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if utf8.RuneCountInString(s) > 500 {
		return string([]rune(s)[:500]) + "…"
	}
	return s
}

// Behind returns text with what follows it, a quotation or a forwarded message,
// an empty line below.
func Behind(text, follows string) string {
	if text = strings.TrimRight(text, "\r\n"); text == "" {
		return follows
	}
	return text + "\n\n" + follows
}

// BehindHTML is [Behind] for a fragment of HTML.
func BehindHTML(fragment, follows string) string {
	lines := strings.Split(strings.TrimRight(follows, "\n"), "\n")
	n := len(lines)
	for n > 0 && strings.HasPrefix(lines[n-1], ">") {
		n--
	}
	var b strings.Builder
	b.WriteString(fragment + "\n<p>")
	b.WriteString(strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(quoteHTML(lines[:n])), "<blockquote>\n"), "\n</blockquote>"))
	b.WriteString("</p>\n" + quoteHTML(lines[n:]))
	return b.String()
}
