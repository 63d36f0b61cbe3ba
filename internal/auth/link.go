package auth

import (
	"strings"
	"time"
)

// Unknown is the principal that stands for somebody who was removed from the database.
// It may be anybody, and no [Link] says who it is.
const Unknown = string(Person) + ":local-unknown"

// A Link says that the operator at the machine is one person: what comes over the local
// socket counts as that person's. The zero Link says nothing: the operator may be
// anybody with an account.
//
// A link takes effect at once if the person made or confirmed it in their own session.
// Otherwise it takes effect after [SettleTime]. It counts for actions that were proposed
// after that, and for none of them once it has ended. The attacks: somebody at the
// machine links the operator to a colleague, and approves as the colleague and with
// their own account; somebody approves, unlinks or links anew, and approves again.
type Link struct {
	Person string    // principal of the account; empty if the operator is not linked to one
	By     string    // principal who made or confirmed it last
	At     time.Time // when By did
	From   time.Time // since when it is in force; may lie in the future
}

// after returns the link after a change of the account of a person. Changes may come in
// any order of accounts: the newest decides.
func (l Link) after(person string, c Change) Link {
	switch {
	case c.What != Linked && c.What != Unlinked || c.At.Before(l.At):
		return l
	case c.What == Unlinked:
		return Link{By: c.By, At: c.At}
	}
	from := c.At
	if c.By != person {
		from = from.Add(SettleTime)
	}
	if l.Person == person && l.From.Before(from) { // confirmed
		from = l.From
	}
	return Link{Person: person, By: c.By, At: c.At, From: from}
}

// Link returns the link of the operator, which may not be in force yet. The zero Link
// means that there is none.
func (r Roll) Link() Link {
	if r.link.Person == "" {
		return Link{}
	}
	return r.link
}

// For returns the roll for counting who approved an action that was proposed at the
// given time: without the operator's link unless it was in force then.
func (r Roll) For(proposed time.Time) Roll {
	if r.link.From.After(proposed) {
		r.link = Link{}
	}
	return r
}

// links reports whether a principal is the operator and a link says who that is.
func (r Roll) links(principal string) bool {
	return r.link.Person != "" && !r.link.From.After(r.now) && Nameless(principal) && principal != Unknown
}

// As returns the account that a principal counts as: the linked one of the operator,
// with that account's role, and otherwise who.
func (r Roll) As(who Principal) Principal {
	if !r.links(who.String()) {
		return who
	}
	who.ID, who.Role = strings.TrimPrefix(r.link.Person, string(Person)+":"), r.accounts[r.link.Person].role
	return who
}
