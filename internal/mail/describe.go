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
	Attachments []File
	Size        int    // octets of the whole message
	SHA256      string // digest of the payload: what is approved

	// Notes are what a reviewer should know before deciding.
	Notes []string
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
	s := Summary{
		Subject: m.Subject, Date: m.Date, MessageID: m.MessageID, InReplyTo: strings.Join(m.InReplyTo, " "),
		Bcc: e.hidden(m), HTML: m.HTML != "", Size: len(e.Raw), Notes: slices.Clone(m.Warnings),
	}
	if s.SHA256, err = e.Digest(); err != nil {
		return Summary{}, err
	}
	note := func(n string) {
		if n = shown(n); !slices.Contains(s.Notes, n) {
			s.Notes = append(s.Notes, n)
		}
	}
	s.From = joinAddresses(m.From)
	if len(m.From) != 1 || !sameAddr(m.From[0].Addr, e.From) {
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
			case a.Addr == "" || !slices.ContainsFunc(e.To, func(r string) bool { return named([]Address{a}, r) }):
				note("the " + l.name + " header names " + a.String() + ", who will not receive it")
			case !listed[a.Addr]:
				listed[a.Addr] = true
				*l.to = append(*l.to, shown(a.String()))
			}
		}
	}
	for _, r := range e.To {
		if !isASCII(r) {
			note("a recipient has letters outside ASCII: " + r)
		}
	}
	for _, n := range unshownFields(e.Raw) {
		note(n)
	}
	s.describeBody(m, note)
	for _, a := range m.Attachments {
		s.Attachments = append(s.Attachments, File{Name: shown(a.Name), ContentType: a.ContentType, Size: len(a.Data), SHA256: a.Digest()})
	}
	return s, nil
}

// quiet are the fields that are not shown and that most mail has; up to so many
// octets each there is nothing to say about them.
var quiet = []string{
	"Date", "Message-ID", "In-Reply-To", "References", "Sender", "MIME-Version", "Content-Type", "Content-Transfer-Encoding", "Content-Language",
	"User-Agent", "X-Mailer", "Auto-Submitted", "Importance", "Priority", "X-Priority", "List-Unsubscribe", "List-Unsubscribe-Post",
}

const maxQuiet = 1000 // octets

// unshownFields names the fields of the header that a reviewer is not shown.
// The attack: a harmless mail with a file in its X-Data header, or with one
// that sends a receipt to somebody else.
func unshownFields(raw []byte) (notes []string) {
	fields, _, _, err := splitHeader(raw)
	if err != nil {
		return nil // unreachable: Parse has read it
	}
	for _, f := range fields {
		switch {
		case slices.ContainsFunc([]string{"From", "To", "Cc", "Bcc", "Reply-To", "Subject"}, f.is):
		case slices.ContainsFunc(quiet, f.is) && len(f.raw) <= maxQuiet:
		case len(notes) == maxWarnings:
			return append(notes, "the header has more fields that are not shown")
		default:
			value := string(f.raw[len(f.name):])
			notes = append(notes, fmt.Sprintf("the header has a field that is not shown, of %d octets: %s %s", len(f.raw), f.name, quote(strings.TrimSpace(strings.TrimPrefix(value, ":")))))
		}
	}
	return notes
}

func (s *Summary) describeBody(m Message, note func(string)) {
	s.Text = m.Text
	if m.HTML != "" {
		r := htmlText(m.HTML, true)
		sum := sha256.Sum256([]byte(m.HTML))
		s.Rendered, s.HTMLSHA256 = visible(r.text, true), hex.EncodeToString(sum[:])
		for _, n := range r.notes {
			note(n)
		}
		switch {
		case strings.TrimSpace(m.Text) == "":
			s.Text = r.text
			note("there is only HTML; the text was made from it")
		case rendered(m.Text, m.HTML):
		case slices.Equal(words(m.Text), words(r.text)):
		case slices.Equal(words(m.Text), words(htmlText(m.HTML, false).text)):
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
	if v := visible(s.Text, true); v != s.Text {
		s.Text = v
		note("the text has unseen characters; they are shown as \\u{…}")
	}
}

func words(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool {
		return !unicode.IsLetter(r) && !unicode.IsDigit(r) && !unicode.IsMark(r) && !unicode.IsSymbol(r)
	})
}

func joinAddresses(list []Address) string {
	var all []string
	for _, a := range list {
		all = append(all, shown(a.String()))
	}
	return strings.Join(all, ", ")
}
