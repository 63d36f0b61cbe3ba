package oversight

import (
	"strings"

	"postern/internal/auth"
)

// Person returns the name of the person who decided on a, and whether a person
// did: not a rule, the gate or a switch.
func (a *Action) Person() (name string, ok bool) { return personName(a.Decider) }

// personName returns the name of a principal who is a person.
func personName(principal string) (name string, ok bool) {
	name, ok = strings.CutPrefix(principal, string(auth.Person)+":")
	return name, ok && name != ""
}

// says stands in a result between a person and what they found out.
const says = " says: "

// resolver returns the person who resolved a, as a principal, if its result is
// what they said.
func (a *Action) resolver() string {
	if _, ok := personName(a.ResultBy); ok {
		return a.ResultBy
	}
	if a.ResultBy == "" { // rows from before the column have it in the result alone
		who, _, said := strings.Cut(a.Result, says)
		if _, ok := personName(who); ok && said {
			return who
		}
	}
	return ""
}

// ResultForProposer returns a's result with the reviewer's identity removed: which
// person resolved an action is known to reviewers only.
func (a *Action) ResultForProposer() string {
	if who := a.resolver(); who != "" {
		return "a person" + strings.TrimPrefix(a.Result, who)
	}
	return a.Result
}

// nobodyDecided begins the reason of an action that lapsed.
const nobodyDecided = "nobody decided until "

// Lapsed reports whether a was denied because nobody decided in time.
func (a *Action) Lapsed() bool {
	return a.State == Denied && (a.lapsed ||
		a.Decider == system(*a).String() && strings.HasPrefix(a.Reason, nobodyDecided)) // rows from before the column
}
