package mail

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
)

// A File is an attachment as a reviewer sees it.
type File struct {
	Name        string
	ContentType string
	Size        int    // octets, decoded
	SHA256      string // hexadecimal
}

// A Summary is an envelope as it is shown to the person who decides about it,
// in the console and by the command line. Every string is printable: unseen
// characters are written as \u{202e}. Nothing in it is safe HTML.
type Summary struct {
	From    string   // the From header; for a forged one see Notes
	ReplyTo []string // where answers would go, if not to From
	To      []string // recipients that the To header shows
	Cc      []string // recipients that the Cc header shows
	Bcc     []string // recipients that no header shows
	Subject string
	Date    time.Time

	MessageID string
	InReplyTo string

	Text        string // what it says: plain text, or the HTML turned into text
	HTML        bool   // there is an HTML body too
	Rendered    string // what the HTML body says, with where its links lead; empty without one
	HTMLSHA256  string // digest of the HTML body; empty without one
	Markup      int    // octets of the HTML that only say how it looks, and are in no text here
	Attachments []File
	Size        int    // octets of the whole message
	SHA256      string // digest of the payload: what is approved

	// Fields are all fields of the header, and of the headers of parts, that say
	// something which is not above.
	Fields []HeaderField
	// Unshown is how many octets are neither shown nor syntax: at most [MaxUnshown].
	Unshown int
	// Unclear says why the message cannot be accounted for, so that a recipient may
	// see content that is not shown here: in mail that arrived, or that an earlier
	// release stored. It is empty if the message is accounted for.
	Unclear string

	// Notes are what a reviewer should know before deciding.
	Notes []string
}

// A HeaderField is a field of a header as a reviewer sees it.
type HeaderField struct {
	Field
	Usual bool // ordinary mail programs write it, and no longer than this
}

// Hidden returns the recipients that are in no To or Cc header, in order.
func (e Envelope) Hidden() ([]string, error) {
	m, err := Parse(e.Raw)
	if err != nil {
		return nil, err
	}
	return e.hidden(m), nil
}

func (e Envelope) hidden(m Message) []string {
	var list []string
	for _, to := range e.To {
		if !named(m.To, to) && !named(m.Cc, to) {
			list = append(list, shown(to))
		}
	}
	return list
}

// named compares exactly but for the case of the domain: an address that
// differs in anything may be another mailbox, and is then shown as hidden.
func named(list []Address, addr string) bool {
	at := strings.LastIndexByte(addr, '@') + 1
	addr = addr[:at] + strings.ToLower(addr[at:])
	return slices.ContainsFunc(list, func(a Address) bool { return a.Addr == addr })
}

// Describe returns what a reviewer is shown. Every recipient of the envelope
// is in exactly one of To, Cc and Bcc, whatever the message claims.
func Describe(e Envelope) (Summary, error) {
	m, err := Parse(e.Raw)
	if err != nil {
		return Summary{}, err
	}
	s := describe(e, m, false)
	s.SHA256, err = e.Digest()
	return s, err
}

// describe is [Describe] without the digest. The envelope of a stored message is gone,
// so nothing is said of it.
func describe(e Envelope, m Message, stored bool) Summary {
	s := Summary{
		Subject: m.Subject, Date: m.Date, MessageID: m.MessageID, InReplyTo: strings.Join(m.InReplyTo, " "),
		Bcc: e.hidden(m), HTML: m.HTML != "", Size: len(e.Raw), Notes: slices.Clone(m.Warnings),
	}
	note := func(n string) {
		if n = shown(n); !slices.Contains(s.Notes, n) {
			s.Notes = append(s.Notes, n)
		}
	}
	s.From = joinAddresses(m.From)
	if !stored && (len(m.From) != 1 || !sameAddr(m.From[0].Addr, e.From)) {
		note("the envelope says that it is from <" + e.From + ">")
	}
	for _, a := range m.ReplyTo {
		s.ReplyTo = append(s.ReplyTo, shown(a.String()))
		if !sameAddr(a.Addr, e.From) {
			note("answers would go to " + a.String())
		}
	}
	listed := map[string]bool{}
	for _, l := range []struct {
		name string
		from []Address
		to   *[]string
	}{{"To", m.To, &s.To}, {"Cc", m.Cc, &s.Cc}} {
		for _, a := range l.from {
			switch {
			case !stored && (a.Addr == "" || !slices.ContainsFunc(e.To, func(r string) bool { return named([]Address{a}, r) })):
				note("the " + l.name + " header names " + a.String() + ", who will not receive it")
			case !listed[a.Addr]:
				listed[a.Addr] = true
				*l.to = append(*l.to, shown(a.String()))
			default:
				// The attack: words in the name of an address that is listed already.
				note("the " + l.name + " header names once more " + a.String())
			}
		}
	}
	for _, list := range [][]Address{m.From, m.Sender, m.ReplyTo, m.To, m.Cc} {
		for _, a := range list {
			if n := foreign(a); n != "" {
				note(n)
			}
		}
	}
	for _, r := range e.To {
		if !isASCII(r) {
			note(foreignRecipient + r + spelled + wireForm(r))
		}
	}
	// Their text is shown below.
	s.Notes = slices.DeleteFunc(s.Notes, func(n string) bool { return strings.HasSuffix(n, likeText) })
	s.Fields = headerFields(e.Raw)
	if a, err := TakeAccount(e.Raw); err != nil {
		s.Unclear = shown(err.Error())
	} else {
		s.Unshown = a.Unshown
		// The fields of parts are shown.
		s.Notes = slices.DeleteFunc(s.Notes, func(n string) bool { return strings.HasPrefix(n, aboutPart) })
		for _, f := range a.Parts {
			_, name, _ := strings.Cut(f.Name, ": ")
			s.Fields = append(s.Fields, HeaderField{Field: f, Usual: len(f.Value) <= maxUsualPart && slices.ContainsFunc(usualParts, field{name: name}.is)})
		}
	}
	s.describeBody(m, note)
	s.describeFiles(m, note)
	for _, a := range m.Attachments {
		s.Attachments = append(s.Attachments, File{Name: shown(a.Name), ContentType: a.ContentType, Size: len(a.Data), SHA256: a.Digest()})
	}
	return s
}

// headerFields returns the header fields that have content and no place of their
// own in a [Summary]. The attack: a harmless mail with a file in its X-Mailer
// field, or with a field that sends a receipt to another address.
func headerFields(raw []byte) (list []HeaderField) {
	fields, _, _, err := splitHeader(raw)
	if err != nil {
		return nil // unreachable: Parse has read it
	}
	unfold(fields)
	seen, named := map[string]bool{}, isFile(fields)
	for _, f := range fields {
		name := strings.ToLower(f.name)
		again := seen[name]
		seen[name] = true
		shownName, normal := shown(f.name), slices.ContainsFunc(usual, f.is) && len(f.raw) <= maxUsual
		switch {
		case again:
			normal = false
		case f.is("Subject"), slices.ContainsFunc(told, f.is) && saysAll(f.value):
			continue
		case slices.ContainsFunc(told, f.is):
			shownName, normal = shownName+" (as written)", true
		case silent(f, named):
			continue
		}
		list = append(list, HeaderField{Field: Field{Name: shownName, Value: shown(decodeWords(f.value))}, Usual: normal})
	}
	return list
}

// maxSaid is how many octets of an address a list shows, or a note, which pages cut.
// The attack: words behind the first thousands of a name of who does not receive it.
const maxSaid = 1000

// saysAll reports whether the list of addresses that is read from v says all
// that v does. The attack: words in a comment, or in the name of a group.
func saysAll(v string) bool {
	name, rest, group := strings.Cut(v, ":")
	if group && strings.TrimSpace(rest) == ";" {
		n := strings.ToLower(strings.Trim(strings.TrimSpace(name), `"`))
		return n == "undisclosed-recipients" || n == "undisclosed recipients"
	}
	bare := func(s string) string {
		return strings.ToLower(strings.Map(func(r rune) rune {
			if strings.ContainsRune(" \t\"\\<>,", r) {
				return -1
			}
			return r
		}, s))
	}
	list, ok := parseList(v)
	var all strings.Builder
	for _, a := range list {
		if len(a.String()) > maxSaid {
			return false
		}
		all.WriteString(bare(a.Name) + bare(a.Addr))
	}
	return v == "" || ok && all.String() == bare(decodeWords(v))
}

func (s *Summary) describeBody(m Message, note func(string)) {
	s.Text = m.Text
	if m.HTML != "" {
		r := m.htmlText(true)
		if len(m.HTMLParts) > 1 {
			note(fmt.Sprintf("it has %d HTML parts; mail programs show all of them or only one", len(m.HTMLParts)))
		}
		sum := sha256.Sum256([]byte(m.HTML))
		s.Rendered, s.HTMLSHA256, s.Markup = visible(r.text, true), hex.EncodeToString(sum[:]), r.markup
		for _, n := range r.notes {
			note(n)
		}
		switch {
		case strings.TrimSpace(m.Text) == "":
			s.Text = r.text
			note("there is only HTML; the text was made from it")
		case rendered(m.Text, m.HTML):
		case visible(r.text, true) == r.text && slices.Equal(words(m.Text), words(r.text)):
		case slices.Equal(words(m.Text), words(m.htmlText(false).text)):
			// The attack: words that are the same in both, and a link behind them that
			// only the HTML has. Who decides where the text alone is shown, in a list, in
			// a terminal, approves where it leads, too.
			note("the HTML has links that the plain text does not show; the HTML is shown below the text")
			s.Text = m.Text + "\n\n--- HTML ---\n" + r.text
		default:
			note("the plain text and the HTML do not say the same; the HTML is shown below the text")
			s.Text = m.Text + "\n\n--- HTML ---\n" + r.text
		}
	}
	for _, name := range encodedFiles(m.Text) {
		note("the text has the file " + name + " in it, in an old encoding that some mail programs decode and show as a file")
	}
	if n := trailing(m.Text); n > maxTrailing {
		note(fmt.Sprintf("the text has %d spaces and tabs at the ends of its lines, where nobody sees them", n))
	}
	s.clean(note)
}

// clean makes invisible characters in the text visible.
func (s *Summary) clean(note func(string)) {
	if v := visible(s.Text, true); v != s.Text {
		s.Text = v
		note("the text has unseen characters; they are shown as \\u{…}")
	}
}

// maxTrailing is how many spaces may stand at the ends of lines without a note:
// a table that a program prints.
const maxTrailing = 1000

func trailing(text string) (n int) {
	for line := range strings.SplitSeq(text, "\n") {
		n += len(line) - len(strings.TrimRight(line, " \t"))
	}
	return n
}

func words(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool {
		// The attack: words in letters that nobody has agreed upon.
		return unicode.IsPunct(r) || unicode.IsSpace(r) || unicode.IsControl(r) || unicode.Is(unicode.Cf, r)
	})
}

func joinAddresses(list []Address) string {
	var all []string
	for _, a := range list {
		all = append(all, shown(a.String()))
	}
	return strings.Join(all, ", ")
}
