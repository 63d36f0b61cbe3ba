package seal

import "strings"

// A Scope is what a credential may do in an inbox: one scope, or several that are
// separated by spaces, as OAuth writes them (RFC 6749, section 3.3). The zero Scope
// permits nothing, and neither does one with a word that this version does not know.
type Scope string

// The scopes. Only a key with Read, Manage, Recover or Context is given the private keys of an
// inbox: any other one cannot open mail, whatever the program checks.
const (
	Read   Scope = "read"  // opens mail and drafts
	Draft  Scope = "draft" // writes, replaces and deletes drafts; proposes nothing
	Send   Scope = "send"  // proposes what is sent or changed; opens nothing
	Manage Scope = "full"  // all of these, and manages the inbox, its keys and grants

	// Propose is the former name of Read, Draft and Send together. It remains their
	// name in the database and in answers.
	Propose Scope = "propose"

	// Recover is the scope of a recovery key. It includes none of the others: such
	// a key makes a new key of its inbox, and reads nothing itself.
	Recover Scope = "recover"

	// Context is the scope of a reviewer's grant. It includes none of the others either:
	// with such a key the console shows one person what a waiting action is about.
	Context Scope = "context"
)

// Scopes are those that a caller can ask for, alone or together.
var Scopes = []Scope{Read, Draft, Send, Propose, Manage}

type bits uint8

const (
	readBit bits = 1 << iota
	draftBit
	sendBit
	manageBit
)

const (
	proposeBits = readBit | draftBit | sendBit
	allBits     = proposeBits | manageBit
)

// bits returns what s permits, or 0 if any word of it is unknown.
func (s Scope) bits() (b bits) {
	for word := range strings.FieldsSeq(string(s)) {
		switch Scope(word) {
		case Read:
			b |= readBit
		case Draft:
			b |= draftBit
		case Send:
			b |= sendBit
		case Propose:
			b |= proposeBits
		case Manage:
			b |= allBits
		default:
			return 0
		}
	}
	return b
}

// Join returns the scope that permits what any of list does, in its one spelling: the
// words in the order of [Scopes], [Propose] for three of them, and [Manage] alone. It
// is empty if a word of list is unknown.
func Join(list ...Scope) Scope {
	var all bits
	for _, s := range list {
		b := s.bits()
		if b == 0 {
			return ""
		}
		all |= b
	}
	switch {
	case all&manageBit != 0:
		return Manage
	case all == proposeBits:
		return Propose
	}
	return Scope(strings.Join(all.words(), " "))
}

func (b bits) words() (out []string) {
	for i, s := range []Scope{Read, Draft, Send} {
		if b&(1<<i) != 0 {
			out = append(out, string(s))
		}
	}
	return out
}

// List returns the scopes that s consists of: [Manage] alone, or some of [Read],
// [Draft] and [Send].
func (s Scope) List() []string {
	if s == Recover || s == Context || s.Includes(Manage) {
		return []string{string(s)}
	}
	return append([]string{}, s.bits().words()...)
}

// Valid reports whether s permits something and is spelled as [Join] spells it.
func (s Scope) Valid() bool { return s != "" && Join(s) == s }

// Opens reports whether a key with scope s is given the private keys of its inbox.
func (s Scope) Opens() bool { return s == Recover || s == Context || s.Includes(Read) }

// Includes reports whether a key with scope s may do all that want says. No scope
// includes an unknown one.
func (s Scope) Includes(want Scope) bool {
	w := want.bits()
	return w != 0 && s.bits()&w == w
}

// Verb returns what s permits, as a verb for error texts.
func (s Scope) Verb() string {
	b := s.bits()
	switch {
	case b&manageBit != 0:
		return "manage"
	case b == 0:
		return "do nothing"
	}
	return strings.Join(b.words(), " and ")
}
