// Package leak finds what should not leave unnoticed: secrets, payment cards,
// account numbers, identity numbers and lists of people, content that a reviewer
// or the reader does not see, and content that cannot be read at all. It reads
// every byte of a message or a file, in each format and encoding that package
// extract knows.
//
// It finds accidents, and leaks by an agent that was talked into one and did not
// hide it well. Whoever wants to hide something can. So a clean [Report] must
// allow nothing.
//
// It is pure: no I/O, no state. Time and memory are linear in the input. It does
// not decide: policy does, by the flags.
package leak

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"postern/internal/extract"
)

// A Flag names one kind of finding; the rules of a policy use it.
type Flag string

// The flags.
const (
	FlagSecret     Flag = "secret"            // a token, a password, or a file that holds some
	FlagPrivateKey Flag = "private_key"       // a private key; secret is set, too
	FlagCard       Flag = "payment_card"      // the number of a payment card, with a valid check digit
	FlagIBAN       Flag = "iban"              // a bank account number, with valid check digits
	FlagNationalID Flag = "national_id"       // a number by which a state identifies a person
	FlagBulk       Flag = "personal_data"     // addresses or telephone numbers of many people
	FlagEnv        Flag = "environment"       // a dump of a process's environment variables
	FlagHidden     Flag = "hidden_text"       // text that a person does not see
	FlagUnseen     Flag = "unseen_characters" // characters that have no width or reverse the text
	FlagTracking   Flag = "tracking"          // remote pictures that report who opens the mail, and when
	FlagRemote     Flag = "remote_content"    // other remote pictures and styles
	FlagLink       Flag = "link_mismatch"     // a link that shows one host and leads to another
	FlagUnread     Flag = "unread"            // content that cannot be read: encrypted, too large, or in an unknown format
	FlagMedia      Flag = "media"             // pictures, sound and films: known formats whose content is not read
)

// Flags returns all flags, the gravest first.
func Flags() []Flag {
	return []Flag{FlagSecret, FlagPrivateKey, FlagCard, FlagIBAN, FlagNationalID, FlagBulk, FlagEnv, FlagHidden, FlagUnseen, FlagTracking, FlagRemote, FlagLink, FlagUnread, FlagMedia}
}

const (
	maxFindings = 40 // findings of one report
	manyPeople  = 25 // different addresses, or telephone numbers, from which personal_data is set
)

// A Message is what is proposed to leave. Each field may be empty: files that
// leave a sandbox are a Message with Files alone.
type Message struct {
	Subject string
	Text    string
	HTML    string
	Files   []File
	Raw     []byte // the message as sent; all of it is read, including what no mail program shows
}

// A File is an attachment of a [Message].
type File struct {
	Name string
	Data []byte
}

// A Finding is one reason for a flag.
type Finding struct {
	Flag    Flag   `json:"flag"`
	Rule    string `json:"rule"`    // the rule's name, for programs: "github_token"
	Where   string `json:"where"`   // subject, text, html, a header field or a file, with the path into archives
	Detail  string `json:"detail"`  // for people: encodings, checksums; may be empty
	Excerpt string `json:"excerpt"` // the beginning and the length, never the whole secret; may be empty
}

// String returns f as a reviewer reads it.
func (f Finding) String() string {
	s := strings.ReplaceAll(f.Rule, "_", " ") + " in " + f.Where
	if f.Detail != "" {
		s += " (" + f.Detail + ")"
	}
	if f.Excerpt != "" {
		s += ": " + f.Excerpt
	}
	return s
}

// A Report is what [Find] found.
type Report struct {
	Flags    []Flag    // each once, in the order of [Flags]
	Findings []Finding // at most 40, in the order of their flags

	Accounts []Account // bank accounts that it names, in the order in which they were found; at most 100
}

// An Account is a bank account that a message names, by a valid IBAN.
type Account struct {
	Number string // without spaces, as ISO 13616 writes it for machines
	Count  int    // how many times it is named
	Where  string // the first place; see [Finding]
}

// Find reads a message. It never fails and never panics: what cannot be read
// sets [FlagUnread].
func Find(m Message) Report {
	size := len(m.Subject) + len(m.Text) + len(m.HTML) + len(m.Raw)
	for _, f := range m.Files {
		size += len(f.Data)
	}
	f := &finder{
		flags: map[Flag]bool{}, reported: map[string]bool{}, known: map[string]bool{},
		people: people{map[string]bool{}, map[string]bool{}}, variables: map[string]*variables{},
	}
	f.walker = extract.NewWalker(size, f)
	f.walker.Text(extract.Place{Where: "subject"}, m.Subject)
	f.walker.Text(extract.Place{Where: "text"}, m.Text)
	if m.HTML != "" {
		f.html(m.HTML)
	}
	var parts [][]byte
	for _, file := range m.Files {
		f.walker.File(file.Name, file.Data)
		parts = append(parts, file.Data)
	}
	f.walker.Source(m.Raw, parts)
	for _, n := range []struct {
		what string
		n    int
	}{{"addresses", len(f.people.addresses)}, {"telephone numbers", len(f.people.phones)}} {
		if n.n >= manyPeople {
			f.add(Finding{Flag: FlagBulk, Rule: "many_people", Where: "the message", Detail: fmt.Sprintf("%d different %s", n.n, n.what)})
		}
	}
	return f.report()
}

func (f *finder) report() Report {
	var out Report
	order := map[Flag]int{}
	for i, flag := range Flags() {
		order[flag] = i
		if f.flags[flag] {
			out.Flags = append(out.Flags, flag)
		}
	}
	slices.SortStableFunc(f.findings, func(a, b Finding) int { return cmp.Compare(order[a.Flag], order[b.Flag]) })
	out.Findings = f.findings[:min(len(f.findings), maxFindings)]
	out.Accounts = f.accounts
	return out
}
