package mail

import (
	"bytes"
	"cmp"
	"fmt"
	"path"
	"strings"
	"unicode"

	"golang.org/x/net/idna"
)

const (
	maxFileText = 64 << 10 // octets of a file that are shown as text
	maxNested   = 3        // messages within messages
)

// describeFiles adds what mail programs show of files as if it were the text: a
// page, an invitation, a forwarded message. It names content that they show but
// this program cannot read.
func (s *Summary) describeFiles(m Message, note func(string)) {
	var b strings.Builder
	fileTexts(&b, m, teller{note, note}, 0)
	if b.Len() > 0 {
		s.Text = strings.TrimRight(s.Text, "\n") + b.String()
		s.clean(note)
	}
}

// Doubts names content that a recipient may see but no reviewer can: in packages
// that only some programs open, and in inner messages that programs read
// differently. Modes that send without a person ask one for these.
func Doubts(raw []byte) (list []string, err error) {
	m, err := Parse(raw)
	if err != nil {
		return nil, err
	}
	fileTexts(&strings.Builder{}, m, teller{note: func(string) {}, doubt: func(n string) { list = append(list, shown(n)) }}, 0)
	return list, nil
}

// A teller collects notes about files for the reviewer.
type teller struct {
	note  func(string) // what is shown as text, and what to look at in it
	doubt func(string) // content that a recipient may see but a reviewer cannot
}

func fileTexts(b *strings.Builder, m Message, say teller, depth int) {
	for _, a := range m.Attachments {
		text, what := fileText(a, say, depth)
		switch {
		case what == "":
			continue
		case text == "":
			say.doubt("the file " + quote(a.Name) + " is " + what + ", of which mail programs may show what is not shown here")
			continue
		}
		say.note("mail programs show the file " + quote(a.Name) + ", which is " + what + ", like the text itself: its text is shown below")
		if len(text) > maxFileText {
			text = strings.ToValidUTF8(text[:maxFileText], "") + "\n…"
			say.note(fmt.Sprintf("of the file %s only the first %d octets are shown as text; open it to read the rest", quote(a.Name), maxFileText))
		}
		fmt.Fprintf(b, "\n\n--- file %s, as mail programs show it ---\n%s", quote(a.Name), text)
	}
}

// fileText returns the text that a mail program shows of a file, and the kind of
// file if programs show it at all. They go by the type, or by the extension if the
// type is generic.
func fileText(a Attachment, say teller, depth int) (text, what string) {
	ext := strings.ToLower(path.Ext(a.Name))
	main, sub, _ := strings.Cut(a.ContentType, "/")
	switch {
	case a.ContentType == "text/html", a.ContentType == "application/xhtml+xml", ext == ".html", ext == ".htm", ext == ".xhtml":
		r := htmlText(plainText(a, say), true)
		for _, n := range r.notes {
			say.note("in the file " + quote(a.Name) + ": " + n)
		}
		return r.text + " ", "an HTML page"
	case a.ContentType == "text/calendar", a.ContentType == "application/ics", ext == ".ics", ext == ".vcs":
		return unfoldCalendar(plainText(a, say)) + " ", "an invitation or a calendar"
	case a.ContentType == "message/rfc822", a.ContentType == "message/global", ext == ".eml":
		if text := innerMessage(a, say, depth); text != "" || main != "text" {
			return text, "a message"
		}
		return plainText(a, say) + " ", "text declared as a message"
	case a.ContentType == "application/ms-tnef", a.ContentType == "application/vnd.ms-tnef", strings.EqualFold(a.Name, "winmail.dat"):
		return "", "an Outlook package (TNEF) with text and files of its own"
	case sub == "pkcs7-mime", sub == "x-pkcs7-mime", ext == ".p7m":
		return "", "a message in an S/MIME envelope"
	case main == "message", main == "text" && a.Inline:
		return plainText(a, say) + " ", "text of the type " + a.ContentType
	}
	return "", ""
}

// plainText returns a file's text. If its charset is not one that all mail
// programs know, each octet is read as a letter, and a doubt is noted.
func plainText(a Attachment, say teller) string {
	data := a.Data[:min(len(a.Data), maxBody)]
	s, err := decodeCharset(cmp.Or(a.Charset, "utf-8"), data)
	if err != nil {
		tell := say.note
		if a.Inline {
			tell = say.doubt
		}
		tell("the file " + quote(a.Name) + " may show what is not shown here: " + err.Error())
		var b strings.Builder
		for _, c := range data {
			b.WriteRune(rune(c))
		}
		s = b.String()
	}
	return plainLines(s)
}

// plainLines returns a text with lines that end in LF, and without NULs.
func plainLines(s string) string {
	return strings.NewReplacer("\r\n", "\n", "\r", "\n", "\x00", "\ufffd").Replace(s)
}

// unfoldCalendar joins the lines that RFC 5545 3.1 has folded: a word cut in two
// is not read.
func unfoldCalendar(s string) string {
	return strings.NewReplacer("\n ", "", "\n\t", "").Replace(s)
}

// innerMessage returns a forwarded message as programs show it within the outer
// one.
func innerMessage(a Attachment, say teller, depth int) string {
	if depth >= maxNested {
		return ""
	}
	raw := bytes.ReplaceAll(bytes.ReplaceAll(a.Data, []byte("\r\n"), []byte("\n")), []byte("\n"), []byte("\r\n"))
	if !bytes.HasSuffix(raw, []byte("\r\n")) {
		raw = append(raw, "\r\n"...)
	}
	account, err := checkInner(raw)
	if err != nil {
		if _, err := Parse(raw); err != nil {
			return "" // not a message, whatever its type
		}
		// The attack: a message within the message that is written so that only the
		// recipient's program finds the text in it.
		say.doubt("mail programs may not read the message in the file " + quote(a.Name) + " alike, so that some may show what is not shown here: " + shown(err.Error()))
	}
	m := Read(raw)
	var b strings.Builder
	for _, f := range m.Header {
		fmt.Fprintf(&b, "%s: %s\n", f.Name, f.Value)
	}
	for _, f := range account.Parts {
		fmt.Fprintf(&b, "%s: %s\n", f.Name, f.Value)
	}
	b.WriteString("\n" + m.Text)
	if m.HTML != "" {
		r := m.htmlText(true)
		for _, n := range r.notes {
			say.note("in the file " + quote(a.Name) + ": " + n)
		}
		b.WriteString("\n--- HTML ---\n" + r.text)
	}
	for _, f := range m.Attachments {
		fmt.Fprintf(&b, "\n[file %s, %s, %d octets, sha256 %s]", quote(f.Name), f.ContentType, len(f.Data), f.Digest())
	}
	fileTexts(&b, m, say, depth+1)
	return b.String()
}

// encodedFiles returns the names of files that stand in a text as uuencode or
// yEnc, quoted.
func encodedFiles(text string) (names []string) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if rest, ok := strings.CutPrefix(line, "begin "); ok {
			mode, name, _ := strings.Cut(rest, " ")
			if len(mode) >= 3 && len(mode) <= 4 && strings.Trim(mode, "01234567") == "" && name != "" {
				names = append(names, quote(name))
			}
		} else if strings.HasPrefix(line, "begin-base64 ") || strings.HasPrefix(line, "=ybegin ") {
			names = append(names, quote(line))
		}
		if len(names) == maxWarnings {
			return names
		}
	}
	return names
}

// alike are letters of other scripts that look like Latin ones.
const alike = "аеорсухіјѕԁһӏԛԝкмтвнгАВЕКМНОРСТУХІЈЅԌԜһΑΒΕΖΗΙΚΜΝΟΡΤΥΧονικυωρταγӀ"

// Parts of the notes that say that an address has letters outside of ASCII.
const (
	foreignRecipient = "a recipient has letters outside ASCII: "
	spelled          = ", which is "
	foreignAddress   = "the address "
	foreignSays      = " has letters outside ASCII; programs also write it as "
	foreignIn        = " an address has letters outside ASCII: "
)

// NotesForeign reports whether a note says no more than that this address has letters
// outside of ASCII. It compares the whole form of the note. The attack: the name beside
// another address reads like such a note, so that a warning about it is dropped.
func NotesForeign(note, address string) bool {
	note, address = strings.ToLower(note), strings.ToLower(address)
	in := strings.ToLower(foreignIn)
	return strings.HasPrefix(note, strings.ToLower(foreignRecipient)+address+spelled) ||
		strings.HasPrefix(note, foreignAddress+address+strings.ToLower(foreignSays)) ||
		strings.HasPrefix(note, "in ") && (strings.HasSuffix(note, in+address) || strings.Contains(note, in) && strings.HasSuffix(note, " <"+address+">"))
}

// foreign describes the spelling of an address that may look like another one:
// its domain has non-ASCII letters, or a word of its name mixes scripts or consists
// of letters that look like Latin ones. For other addresses it returns nothing.
func foreign(a Address) string {
	if !isASCII(a.Addr) {
		return foreignAddress + a.Addr + foreignSays + wireForm(a.Addr)
	}
	for _, w := range strings.FieldsFunc(a.Name, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsMark(r) }) {
		latin, like, other := 0, 0, 0
		for _, r := range w {
			switch {
			case unicode.Is(unicode.Latin, r):
				latin++
			case strings.ContainsRune(alike, r):
				like++
			case unicode.IsLetter(r):
				other++
			}
		}
		if latin > 0 && like > 0 || like > 2 && other == 0 {
			form, err := idna.Punycode.ToASCII(strings.ToLower(w))
			if err != nil {
				continue
			}
			return "the name " + quote(a.Name) + " has letters that look like others: " + quote(w) + " is " + form
		}
	}
	return ""
}

// wireForm returns an address with its domain and its local part in ASCII form, so
// that letters which look like others are visible.
func wireForm(addr string) string {
	at := strings.LastIndexByte(addr, '@') + 1
	domain, err := idna.Punycode.ToASCII(addr[at:])
	if err != nil {
		domain = addr[at:]
	}
	local := addr[:at]
	if !isASCII(local) {
		if form, err := idna.Punycode.ToASCII(strings.TrimSuffix(local, "@")); err == nil {
			local = form + "@"
		}
	}
	return local + domain
}
