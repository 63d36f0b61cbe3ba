// Package mailquery reads searches of mail in the language of Gmail's search
// box, and says whether a message is one that a search looks for.
//
// It is pure: words in, a tree out, no I/O and no imports of ours. What it does
// not understand it refuses, and names the term: who searches for from:bob in
// a program that takes it for a word believes that there is no mail of Bob's.
//
// A message may be known in part: its words without its text, or without its
// labels. [Query.Match] then says "maybe", so that a search reads what is costly
// only of messages that may be found by it.
package mailquery

import (
	"bytes"
	"fmt"
	"slices"
	"time"
)

// The bounds of a query.
const (
	MaxQuery = 2000 // bytes
	maxTerms = 100
	maxDepth = 20 // parentheses within parentheses
)

// An Error says which term of a query is wrong, and why.
type Error struct {
	Term   string // as it was written, shortened; empty for the query as a whole
	Reason string
}

// Error returns `term "foo:bar": reason`.
func (e *Error) Error() string {
	if e.Term == "" {
		return e.Reason
	}
	return fmt.Sprintf("term %q: %s", e.Term, e.Reason)
}

// Truth is whether a message is found.
type Truth int8

// The answers, in an order in which a conjunction is the least and a
// disjunction the greatest.
const (
	No    Truth = -1
	Maybe Truth = 0 // it depends on what is not known of the message
	Yes   Truth = 1
)

// A Doc is a message as a query sees it. Words are as [Words] made them.
type Doc struct {
	From, To, Cc, Subject, Files []byte // words; Files of the attachments' names
	MessageID                    []byte // with its angle brackets
	Attachments                  int
	At                           time.Time
	Size                         int64 // bytes
	Sent                         bool  // by the inbox, and not to it

	Text   []byte // words; only if HasText
	Labels []string

	HasText   bool
	HasLabels bool
}

// A Query is a search that was read. It is not changed by its use.
type Query struct {
	root     node
	text     bool
	anywhere bool
}

// Options say what some terms mean.
type Options struct {
	Now time.Time // older_than and newer_than count from it
	Me  string    // the address that from:me and to:me mean; empty refuses them
}

// Match says whether d is found. It says [Maybe] only if d has no text or no
// labels.
func (q *Query) Match(d *Doc) Truth { return q.root.match(d) }

// NeedsText says whether some messages can be told only by their text.
func (q *Query) NeedsText() bool { return q.text }

// Anywhere says whether the query names the trash or every place. Otherwise
// who searches leaves the trash out.
func (q *Query) Anywhere() bool { return q.anywhere }

// A node is a part of a query.
type node interface{ match(d *Doc) Truth }

type all []node

func (ns all) match(d *Doc) Truth {
	t := Yes
	for _, n := range ns {
		if t = min(t, n.match(d)); t == No {
			break
		}
	}
	return t
}

type some []node

func (ns some) match(d *Doc) Truth {
	t := No
	for _, n := range ns {
		if t = max(t, n.match(d)); t == Yes {
			break
		}
	}
	return t
}

type not struct{ node }

func (n not) match(d *Doc) Truth { return -n.node.match(d) }

func truth(b bool) Truth {
	if b {
		return Yes
	}
	return No
}

// field says where a word is looked for.
type field int

const (
	anyField field = iota
	fromField
	toField // To and Cc, as Gmail has it
	ccField
	subjectField
	filesField
	listField  // these stand in the text, each word behind a mark
	boxField   // as before
	bccField   // as before
	importance // as before
)

// words is found where its words stand one after the other.
type words struct {
	field  field
	needle []byte // " foo" for the beginning of a word, " foo " for a whole one
}

func (w words) match(d *Doc) Truth {
	in := func(fields ...[]byte) Truth {
		return truth(slices.ContainsFunc(fields, func(f []byte) bool { return bytes.Contains(f, w.needle) }))
	}
	switch w.field {
	case fromField:
		return in(d.From)
	case toField:
		return in(d.To, d.Cc)
	case ccField:
		return in(d.Cc)
	case subjectField:
		return in(d.Subject)
	case filesField:
		return in(d.Files)
	case listField, boxField, bccField, importance:
		if d.HasText {
			return in(d.Text)
		}
		return Maybe
	default:
		if t := in(d.Subject, d.From, d.To, d.Cc, d.Files); t == Yes || d.HasText {
			return max(t, in(d.Text))
		}
		return Maybe
	}
}

// fact is what can be told from what is always known.
type fact func(d *Doc) bool

func (f fact) match(d *Doc) Truth { return truth(f(d)) }

// labels is what can be told from the labels.
type labels func(d *Doc) bool

func (f labels) match(d *Doc) Truth {
	if !d.HasLabels {
		return Maybe
	}
	return truth(f(d))
}

// labelled is found with one label.
type labelled string

func (l labelled) match(d *Doc) Truth {
	if !d.HasLabels {
		return Maybe
	}
	return truth(slices.Contains(d.Labels, string(l)))
}

// Required returns a label that every message that is found has, or for unread
// that none of them is read; or neither if there is no such label. By it the few
// messages that may be found are known without looking at all of them.
func (q *Query) Required() (label string, unread bool) { return required(q.root) }

func required(n node) (label string, unread bool) {
	switch n := n.(type) {
	case labelled:
		return string(n), false
	case not:
		return "", n.node == labelled("read")
	case all:
		for _, n := range n {
			if l, u := required(n); l != "" {
				return l, false
			} else if u {
				unread = true
			}
		}
	}
	return "", unread
}
