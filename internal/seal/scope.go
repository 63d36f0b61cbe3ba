package seal

// A Scope is what a credential may do in an inbox. Each includes those before it.
// The zero Scope, and any that this version does not know, includes nothing.
type Scope string

// The scopes.
const (
	Read    Scope = "read"    // reads mail
	Propose Scope = "propose" // reads mail, and proposes to send
	Manage  Scope = "full"    // also manages the inbox, its keys and grants

	// Recover is the scope of a recovery key. It includes none of the others: such
	// a key makes a new key of its inbox, and reads nothing itself.
	Recover Scope = "recover"
)

// Scopes are those that a caller can ask for, from the narrowest.
var Scopes = []Scope{Read, Propose, Manage}

func (s Scope) rank() int {
	switch s {
	case Read:
		return 1
	case Propose:
		return 2
	case Manage:
		return 3
	case Recover:
	}
	return 0
}

// Valid reports whether s is one of [Scopes].
func (s Scope) Valid() bool { return s.rank() > 0 }

// Includes reports whether a key with scope s may do what want says. No scope
// includes an unknown one.
func (s Scope) Includes(want Scope) bool { return want.rank() > 0 && s.rank() >= want.rank() }

// Verb returns what s permits, as a verb for error texts.
func (s Scope) Verb() string {
	switch s {
	case Read:
		return "read"
	case Propose:
		return "propose"
	case Manage:
		return "manage"
	case Recover:
	}
	return "do nothing"
}
