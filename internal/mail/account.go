package mail

import (
	"bytes"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"
)

// Outgoing mail is accounted for octet by octet. Each octet is
//
//   - syntax without content of its own, or
//   - shown to the reviewer, as text, as a field or as rendered HTML, or
//   - content of a file, which the reviewer has with its digest, or
//   - counted against one small budget, [MaxUnshown].
//
// Anything unknown is refused. A list of hiding places would always miss one: a
// field that nobody reads, words after the last part, a second part after the end
// of the first, a charset that only the recipient knows.

// MaxUnshown is how many octets of a message may be neither shown nor syntax:
// the boundaries of its parts, and spaces and spellings that leave a choice.
const MaxUnshown = 512

const (
	maxOutHeader  = 64 << 10  // octets of the header of a message that leaves
	maxOutHeaders = 256 << 10 // octets of all headers in it
	maxOutName    = 60        // octets of the name of a field
)

// A Use classifies octets of an outgoing message.
type Use string

// The uses.
const (
	Syntax  Use = "syntax"  // no content of its own
	Shown   Use = "shown"   // a reviewer reads it
	Listed  Use = "listed"  // content of a file that a reviewer has with its digest
	Counted Use = "counted" // part of the budget
)

// A Span is a run of octets of one use.
type Span struct {
	Start, End int // octets Start to End-1 of the message
	Use        Use
}

// An Account classifies each octet of an outgoing message.
type Account struct {
	Spans   []Span  // all of the message, in order
	Unshown int     // octets of the budget that it takes, at most [MaxUnshown]
	Parts   []Field // fields of the headers of parts that say something: a reviewer is shown them
}

// TakeAccount parses raw strictly and classifies each of its octets. It returns a
// [FieldError] that names the field or the part if mail programs read raw
// differently, or if too many of its octets are not shown. It must be called
// before a message leaves or is proposed.
func TakeAccount(raw []byte) (Account, error) {
	if err := CheckRaw(raw); err != nil {
		return Account{}, err
	}
	c := newAccountant(raw)
	if err := c.run(); err != nil {
		return Account{}, err
	}
	if c.Unshown > MaxUnshown {
		var most string
		for _, what := range slices.Sorted(maps.Keys(c.counts)) {
			if most == "" || c.counts[what] > c.counts[most] {
				most = what
			}
		}
		return Account{}, fieldErr("message", "has %d octets that no reviewer would be shown, more than %d; most are %s (%d): leave those out", c.Unshown, MaxUnshown, most, c.counts[most])
	}
	return c.Account, nil
}

// checkInner accounts for a message that is a file of an outgoing message. It
// returns an error if mail programs read it differently. Such a message has fields
// of each server on its way, so there is no budget, and those may appear twice.
func checkInner(raw []byte) (Account, error) {
	c := newAccountant(raw)
	c.inner = true
	err := c.run()
	return c.Account, err
}

func newAccountant(raw []byte) *accountant {
	return &accountant{raw: raw, p: parser{m: &Message{}}, counts: map[string]int{}, delimiters: map[int]bool{}}
}

// run accounts for all of the message.
func (c *accountant) run() error {
	if err := c.entity(0, len(c.raw), 0, ""); err != nil {
		return err
	}
	if err := c.checkDelimiters(); err != nil {
		return err
	}
	return c.checkReading()
}

type accountant struct {
	Account
	inner      bool // it is a message within the message that leaves
	raw        []byte
	at         int // all before it is accounted for
	counts     map[string]int
	boundaries []string
	delimiters map[int]bool // offsets of the lines that are delimiters
	p          parser       // reads the parts just as [Parse] does
	headers    int          // octets of all headers
}

// use accounts for the octets up to end.
func (c *accountant) use(end int, u Use) {
	if end <= c.at {
		return
	}
	if n := len(c.Spans); n > 0 && c.Spans[n-1].Use == u {
		c.Spans[n-1].End = end
	} else {
		c.Spans = append(c.Spans, Span{c.at, end, u})
	}
	c.at = end
}

// count takes n octets from the budget.
func (c *accountant) count(n int, what string) {
	if n > 0 {
		c.Unshown += n
		c.counts[what] += n
	}
}

// in names a field or a thing of a part for an error.
func in(part, what string) string {
	if part == "" {
		return what
	}
	return "part " + part + ": " + what
}

// checkReading compares this reading with that of [Parse], which is used to show
// messages: what is shown and what is checked cannot differ.
func (c *accountant) checkReading() error {
	m, err := Parse(c.raw)
	if err != nil {
		return fieldErr("message", "%v", err)
	}
	same := m.Text == strings.TrimSuffix(c.p.m.Text, "\n") && m.HTML == strings.TrimSuffix(c.p.m.HTML, "\n") &&
		slices.EqualFunc(m.Attachments, c.p.m.Attachments, func(a, b Attachment) bool {
			return a.Name == b.Name && a.ContentType == b.ContentType && bytes.Equal(a.Data, b.Data)
		})
	if !same {
		return fieldErr("message", "can be read in two ways; give each part a Content-Type")
	}
	return nil
}

// usual are the fields that ordinary mail programs write. Others are shown too,
// with a note to the reviewer.
var usual = []string{
	"Date", "Message-ID", "In-Reply-To", "References", "Sender", "MIME-Version", "Content-Type", "Content-Transfer-Encoding", "Content-Language", "Content-Disposition",
	"Organization", "User-Agent", "X-Mailer", "Auto-Submitted", "Importance", "Priority", "X-Priority", "X-MSMail-Priority", "Thread-Topic", "Thread-Index",
	"List-Unsubscribe", "List-Unsubscribe-Post", "List-ID", "Precedence",
}

// usualParts are fields of parts that ordinary mail programs write, where they have
// at most maxUsualPart octets: the id of a picture, the method of an invitation.
var usualParts = []string{"Content-ID", "X-Attachment-Id", "Content-Type", "Content-Disposition", "Content-Description", "Content-Language", "MIME-Version"}

const maxUsualPart = 200

// maxUsual is how many octets of a usual field are usual: a list of the ids of a
// long thread.
const maxUsual = 4000

// told are the fields with a place of their own in a [Summary].
var told = []string{"From", "To", "Cc", "Reply-To", "Subject"}

// header accounts for a header section at c.at, up to and with its empty line.
func (c *accountant) header(fields []field, part string) error {
	seen, named := map[string]bool{}, isFile(fields)
	again := 0
	for _, f := range fields {
		name := strings.ToLower(f.name)
		label := in(part, quoteName(f.name)+" header")
		switch {
		case len(f.name) > maxOutName:
			return fieldErr(label, "has a name of more than %d octets", maxOutName)
		case seen[name] && slices.ContainsFunc(once, f.is), seen[name] && !c.inner && !repeats(f):
			return fieldErr(label, "appears twice; only one is allowed")
		case seen[name] && !c.inner:
			if again++; again > maxAgain {
				return fieldErr(label, "is one of more than %d repeated fields", maxAgain)
			}
		case part == "" && name == "bcc" && !c.inner:
			return fieldErr(label, "would reveal hidden recipients to everybody; leave it out, the envelope has them")
		}
		seen[name] = true
		if !utf8.ValidString(f.value) {
			return fieldErr(label, "is not valid UTF-8; encode it as RFC 2047 says")
		}
		if ch := controls(decodeWords(f.value)); ch != "" {
			return fieldErr(label, "contains the control character %s", ch)
		}
		if !slices.Contains([]string{"content-type", "content-disposition"}, name) {
			if err := checkWords(f.value); err != nil {
				return fieldErr(label, "%v", err)
			}
		}
		use, err := c.field(f, named, part, label)
		if err != nil {
			return err
		}
		c.count(looseSpace(f), "spaces in header fields")
		c.use(c.at+len(f.name)+1, Syntax)
		c.use(c.at-len(f.name)-1+len(f.raw), use)
	}
	return nil
}

// maxAgain is how many fields of a header may have the name of another.
const maxAgain = 30

// repeats reports whether a field may stand there more than once: those of RFC 5322
// 3.6.5, and what no mail program knows, such as X-Cron-Env. All of them are shown.
func repeats(f field) bool {
	return f.is("Comments") || f.is("Keywords") || len(f.name) > 2 && strings.EqualFold(f.name[:2], "X-") && !slices.ContainsFunc(usual, f.is)
}

// quoteName returns a field's name for an error: printable and bounded.
func quoteName(name string) string { return Printable(name, maxOutName) }

// field returns the use of a field's value. Named says that the name of a file in it
// is in the list of files.
func (c *accountant) field(f field, named bool, part, label string) (Use, error) {
	switch {
	case part == "" && slices.ContainsFunc(told, f.is):
		c.count(oddCase(f.name), "letters of field names")
		if f.is("Subject") {
			if n := utf8.RuneCountInString(decodeWords(f.value)); n > MaxSubject {
				return "", fieldErr(label, "has %d characters, more than %d", n, MaxSubject)
			}
			return Shown, nil
		}
		if _, ok := parseList(f.value); !ok && f.value != "" && !emptyGroup(f.value) {
			return "", fieldErr(label, "is not a list of addresses")
		}
		return Shown, nil // as it is written, too, where the list does not say all of it
	case f.is("Content-Transfer-Encoding") && !slices.Contains(encodings, strings.ToLower(f.value)):
		return "", fieldErr(label, "is %s; use 7bit, 8bit, quoted-printable or base64", quote(f.value))
	case f.is("Content-Type") || f.is("Content-Disposition"):
		if err := c.structured(f, label); err != nil {
			return "", err
		}
	}
	if silent(f, named) {
		c.count(oddCase(f.name), "letters of field names")
		if f.is("Content-Transfer-Encoding") {
			c.count(oddCase(f.value), "letters of field names")
		}
		return Syntax, nil
	}
	c.show(f.name, f.value, part)
	return Shown, nil
}

// show adds a field of a part to what a reviewer is shown. Those of the message
// itself are shown by [Describe], whatever the account says.
func (c *accountant) show(name, value, part string) {
	if part != "" {
		c.Parts = append(c.Parts, Field{Name: in(part, shown(name)), Value: shown(decodeWords(value))})
	}
}

// structured checks a Content-Type or a Content-Disposition.
func (c *accountant) structured(f field, label string) error {
	s, err := parseStructured(f.value)
	if err != nil {
		return fieldErr(label, "is malformed: %v", err)
	}
	if f.is("Content-Disposition") && s.value != "inline" && s.value != "attachment" {
		// Text to some programs, and a file to others.
		return fieldErr(label, "is %s; use inline or attachment", quote(s.value))
	}
	for _, name := range []string{"name", "filename"} {
		for _, v := range []string{s.params[name], s.other[name]} {
			if err := checkWords(v); err != nil {
				return fieldErr(label, "has a file name that %v", err)
			}
			if ch := controls(decodeWords(v)); ch != "" {
				return fieldErr(label, "has a file name with the control character %s", ch)
			}
		}
	}
	c.count(len(s.params["boundary"]), "boundaries")
	c.count(oddCase(s.params["charset"])+s.loose, "letters and semicolons of parameters")
	return nil
}

var encodings = []string{"7bit", "8bit", "binary", "quoted-printable", "base64"}

// isFile reports whether a file name in these fields of a header is in the list of
// files. The attack: text in the name of a multipart, which is not a file.
func isFile(fields []field) bool {
	s, err := contentType(fields)
	return err == nil && !strings.HasPrefix(s.value, "multipart/")
}

// silent reports whether a field says nothing of its own: it tells programs how
// to read the message or part in one of the ways that all have, and names the
// file as the reviewer is shown it, if named says that it is. All other fields are
// shown.
func silent(f field, named bool) bool {
	switch {
	case f.is("MIME-Version"):
		return f.value == "1.0"
	case f.is("Auto-Submitted"):
		return f.value == "no" || f.value == "auto-generated" || f.value == "auto-replied"
	case f.is("Content-Transfer-Encoding"):
		return slices.Contains(encodings, strings.ToLower(f.value))
	case !f.is("Content-Type") && !f.is("Content-Disposition"):
		return false
	}
	s, err := parseStructured(f.value)
	if err != nil || len(s.other) > 0 || s.language || f.is("Content-Disposition") && s.value != "inline" && s.value != "attachment" {
		return false
	}
	for name, v := range s.params {
		switch name {
		case "charset":
			if !slices.Contains(sameEverywhere, strings.ToLower(v)) {
				return false
			}
		case "format", "delsp":
			if !slices.Contains([]string{"flowed", "fixed", "yes", "no"}, v) {
				return false
			}
		case "boundary": // counted
		case "name", "filename":
			// The attack: each is read in one of the two fields, and hides words in the other.
			if !named || f.is("Content-Type") != (name == "name") || fileTitle(decodeWords(v)) != decodeWords(v) {
				return false
			}
		default:
			return false
		}
	}
	return true
}

// looseSpace counts a field's white space beyond one character before each word:
// data could be encoded in spaces and tabs.
func looseSpace(f field) (n int) {
	v := f.raw[len(f.name)+1:]
	v = bytes.ReplaceAll(bytes.TrimSuffix(v, []byte("\r\n")), []byte("\r\n"), nil)
	space := false
	for _, b := range v {
		if b == ' ' || b == '\t' {
			if space {
				n++
			}
			space = true
			continue
		}
		space = false
	}
	if space && len(v) > 1 {
		n++ // at the end
	}
	return n
}

// oddCase counts the letters of a word that is written neither in small
// letters, nor in capitals, nor with capitals at the beginning of its words, as
// programs do it.
func oddCase(s string) int {
	small := strings.ToLower(s)
	start := true
	title := strings.Map(func(r rune) rune {
		defer func() { start = r == '-' || r == '/' || r == '_' }()
		if start && r >= 'a' && r <= 'z' {
			return r - 'a' + 'A'
		}
		return r
	}, small)
	switch s {
	case small, strings.ToUpper(s), title, strings.ToUpper(s[:min(1, len(s))]) + small[min(1, len(s)):], "MIME-Version", "Message-ID", "Content-ID":
		return 0
	}
	return len(s)
}
