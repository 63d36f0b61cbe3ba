package leak

import (
	"iter"
	"strings"

	"postern/internal/extract"
)

const (
	windowSize    = 1 << 20  // bytes of text that are searched at a time
	windowOverlap = 64 << 10 // bytes that two windows share; no secret that is looked for is longer

	maxReported = 1000   // findings that are kept until the report is made
	maxKnown    = 10_000 // secrets and numbers that are remembered
)

// A match is a span of a text that should not leave unnoticed.
type match struct {
	from, to int // in bytes
	flag     Flag
	rule     string
	detail   string // may be empty
}

// A search calls found with each match of one kind in text.
type search func(text string, found func(match))

// finder visits all texts of one message.
type finder struct {
	walker *extract.Walker

	findings []Finding
	flags    map[Flag]bool
	reported map[string]bool // by flag, rule and place
	known    map[string]bool // secrets and numbers, by rule
	people   people
	accounts []Account

	variables map[string]*variables // by place
}

var _ extract.Visitor = (*finder)(nil)

// add sets the flag of a finding, and keeps the finding if it is the first of
// its rule at its place.
func (f *finder) add(n Finding) {
	f.flags[n.Flag] = true
	if n.Flag == FlagPrivateKey {
		f.flags[FlagSecret] = true
	}
	key := string(n.Flag) + "\x00" + n.Rule + "\x00" + n.Where
	if f.reported[key] || len(f.reported) > maxReported {
		return
	}
	f.reported[key] = true
	n.Where, n.Detail, n.Excerpt = extract.Excerpt(n.Where), extract.Excerpt(n.Detail), extract.Excerpt(n.Excerpt)
	f.findings = append(f.findings, n)
}

// search reports the matches of searches in a text.
func (f *finder) search(p extract.Place, text string, searches ...search) {
	found := func(m match) {
		key := m.rule + "\x00" + text[m.from:m.to]
		if m.flag == FlagIBAN && (!p.Source || !f.known[key]) {
			f.account(text[m.from:m.to], p.Where)
		}
		if p.Source && f.known[key] { // reported in the part that it stands in
			return
		}
		if len(f.known) < maxKnown {
			f.known[key] = true
		}
		f.add(Finding{Flag: m.flag, Rule: m.rule, Where: p.Where, Detail: written(m.detail, p), Excerpt: mask(text[m.from:m.to], m.flag)})
	}
	for _, s := range searches {
		s(text, found)
	}
}

// maxAccounts bounds the accounts of one report. The attack: a list of a million.
const maxAccounts = 100

// account counts a bank account.
func (f *finder) account(number, where string) {
	number = strings.NewReplacer(" ", "", "-", "").Replace(number)
	for i := range f.accounts {
		if f.accounts[i].Number == number {
			f.accounts[i].Count++
			return
		}
	}
	if len(f.accounts) < maxAccounts {
		f.accounts = append(f.accounts, Account{Number: number, Count: 1, Where: extract.Excerpt(where)})
	}
}

// written returns a detail with the encodings of a place.
func written(detail string, p extract.Place) string {
	if p.How == "" {
		return detail
	}
	return strings.TrimPrefix(detail+", written in "+p.How, ", ")
}

// windows returns a text piece by piece. Each piece begins with the end of the
// one before, so that a secret across the border is whole in one of them.
func windows(text string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for len(text) > windowSize {
			if !yield(text[:windowSize]) {
				return
			}
			text = text[windowSize-windowOverlap:]
		}
		yield(text)
	}
}

// Characters reports characters that a person does not see.
func (f *finder) Characters(p extract.Place, text string) { f.unseen(p.Where, text) }

// Text reports private keys, and returns text without them.
func (f *finder) Text(p extract.Place, text string) string {
	for w := range windows(text) {
		f.search(p, w, keyBlocks)
	}
	return withoutKeys(text)
}

// Words reports the other secrets, and numbers.
func (f *finder) Words(p extract.Place, text string) {
	for w := range windows(text) {
		f.search(p, w, secretSearches...)
		f.environment(p, w)
		if p.IDs {
			continue
		}
		f.search(p, w, numbers)
		if !p.Binary { // chance makes too many addresses
			f.people.count(w)
		}
	}
}

// FileName reports files that hold secrets by convention.
func (f *finder) FileName(p extract.Place, name string) {
	f.unseen("the name of "+p.Where, name)
	if secretFile(name) {
		f.add(Finding{Flag: FlagSecret, Rule: "file_of_secrets", Where: p.Where, Detail: "by its name"})
	}
}

// Unread reports what could not be read.
func (f *finder) Unread(p extract.Place, reason extract.Reason, why string) {
	f.add(Finding{Flag: FlagUnread, Rule: string(reason), Where: p.Where, Detail: written(why, p)})
}

// Media reports pictures, sound and films.
func (f *finder) Media(p extract.Place, what string) {
	f.add(Finding{Flag: FlagMedia, Rule: "media", Where: p.Where, Detail: what + ", whose content is not read"})
}

// PrivateKey reports a private key in a binary format.
func (f *finder) PrivateKey(p extract.Place, form string) {
	f.add(Finding{Flag: FlagPrivateKey, Rule: "private_key", Where: p.Where, Detail: written(form, p)})
}

// withoutKeys returns text without the private keys that were found in it, which
// need not be found once more as what is nothing known.
func withoutKeys(text string) string {
	if !strings.Contains(text, "PRIVATE KEY") {
		return text
	}
	b := []byte(text)
	keyBlocks(text, func(t match) {
		for i := t.from; i < t.to; i++ {
			b[i] = '\n'
		}
	})
	return string(b)
}
