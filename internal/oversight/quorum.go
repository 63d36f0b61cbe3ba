package oversight

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// A quorum counts the people who have approved an action. Two accounts of one human
// being count once. Where it is not known who is behind an account, the quorum assumes
// the fewest human beings that are possible (see [auth.Roll]). Like the events of
// life.go it reads no clock and no database.
type quorum struct {
	need    int      // people who must approve
	authors []string // principals of those who proposed or edited it, who do not count
	roll    auth.Roll
	alone   bool // nobody but an author may decide, and one approval is asked

	votes []string // principals of those who approved the waiting version
}

// newQuorum returns the quorum of a, whose content is by authors. Roll has the
// project's accounts.
func newQuorum(a *Action, authors []string, roll auth.Roll) quorum {
	q := quorum{need: max(a.Approvers, 1), authors: authors, roll: roll}
	switch {
	case q.need > 1 || len(authors) == 0:
	case !person(a.Proposer):
		// A program's proposal needs one person, and that may be an editor.
		q.authors = nil
	default:
		// A person who is alone is not locked out of their own installation. An
		// operator without a name is taken for one of those who may decide. The attack:
		// one human being writes it under two names, so that no colleague seems left.
		named, _ := q.writers()
		q.alone = len(named)+len(roll.Others(a.Asks, named)) <= 1
	}
	return q
}

// writers returns the human beings who are authors, and how many further authors
// could be anybody.
func (q *quorum) writers() (named []string, unknown int) {
	for _, p := range q.authors {
		switch h := q.roll.Human(p); {
		case h == "":
			unknown++
		case !slices.Contains(named, h):
			named = append(named, h)
		}
	}
	return named, unknown
}

// humans returns the human beings who cast votes, each once, and whether another vote
// could be anybody's.
func (q *quorum) humans(votes []string) (named []string, anybody bool) {
	for _, v := range votes {
		switch h := q.roll.Human(v); {
		case q.roll.Gone(v):
			// The attack: an approval that was removed with its account is put back into the
			// database, with its seal.
		case h == "":
			anybody = true
		case !slices.Contains(named, h):
			named = append(named, h)
		}
	}
	return named, anybody
}

// count returns the smallest number of people, without authors, who can have cast
// votes.
func (q *quorum) count(votes []string) int {
	named, anybody := q.humans(votes)
	if len(q.authors) == 0 || q.alone {
		if len(named) == 0 && anybody || q.alone && len(named) > 0 {
			return 1
		}
		return len(named)
	}
	writers, unknown := q.writers()
	named = slices.DeleteFunc(named, func(h string) bool { return slices.Contains(writers, h) })
	// Each author without a name may be one of those who approved.
	return max(0, len(named)-unknown)
}

// admits returns [ErrNotCounted], with what to do instead, if who's approval would
// add nothing to votes.
func (q *quorum) admits(who auth.Principal, votes []string) error {
	if q.alone {
		return nil
	}
	me := who.String()
	h := q.roll.Human(me)
	// The attack: one human being uses another name to approve their own proposal,
	// or to approve twice.
	for _, p := range q.authors {
		switch w := q.roll.Human(p); {
		case p == me:
			return fmt.Errorf("%s proposed or edited it, so another person must approve it: %w", me, ErrNotCounted)
		case h == "" || h == w:
			return fmt.Errorf("%s may be the same person as %s, who proposed or edited it: %s: %w", me, p, q.instead(me, p), ErrNotCounted)
		}
	}
	if h == "" && q.need > 1 {
		return fmt.Errorf("policy asks %d people, and %s may be one of the others: %s: %w", q.need, me, q.instead(me, ""), ErrNotCounted)
	}
	for _, v := range votes {
		if v != me && h != "" && h == q.roll.Human(v) {
			return fmt.Errorf("%s may be the same person as %s, who has approved it: %s: %w", me, v, q.instead(me, v), ErrNotCounted)
		}
	}
	return nil
}

// instead returns what a person whose approval does not count can do.
func (q *quorum) instead(me, other string) string {
	if auth.Nameless(me) {
		if h := q.roll.Human(me); h != "" {
			return fmt.Sprintf("the operator at the machine is linked to %s; ask another person", h)
		}
		return "the operator at the machine has no name; sign in to an account (export POSTERN_SESSION=$(postern login NAME)), or ask another person. " +
			"Who the operator is, postern person link-operator says, for actions that are proposed from then on"
	}
	if auth.Nameless(other) && q.roll.Human(other) != "" {
		return fmt.Sprintf("the operator at the machine is linked to %s; ask another person", q.roll.Human(other))
	}
	for _, p := range []string{me, other} {
		if q.roll.Doubtful(p) {
			return fmt.Sprintf("what the database says of the account of %s was changed behind the server's back; see postern audit verify, and ask another person", p)
		}
		if at, by, how := q.roll.Settles(p); !at.IsZero() {
			if by == "" || auth.Nameless(by) {
				by = "the operator"
			}
			return fmt.Sprintf("the account of %s was opened by %s (%s), and counts as a person of its own from %s on; ask another person",
				p, by, how, at.UTC().Format(time.RFC1123))
		}
	}
	return "ask another person"
}

// lacks returns what the action waits for, for a reviewer.
func (q *quorum) lacks(a *Action) string {
	have := q.count(q.votes)
	text := "an approval"
	if q.need > 1 {
		text = fmt.Sprintf("%d of %d approvals, by different people", q.need-have, q.need)
	}
	if q.alone {
		return text + "; nobody else may decide, so the proposer may approve it, and the record says so"
	}
	named, unknown := q.writers()
	if len(q.authors) > 0 {
		text += ", by somebody other than " + strings.Join(q.authors, " and ") + ", who proposed or edited it"
	}
	if unknown > 0 {
		text += fmt.Sprintf(" and may be anybody with an account, so it takes %d more", unknown)
	}
	people := len(q.roll.Others(a.Asks, named)) - unknown
	if q.roll.Known() && people < q.need {
		text += fmt.Sprintf("; the project has %d such people: invite another (postern person invite), who counts %d hours after joining", max(0, people), int(auth.SettleTime.Hours()))
	}
	return text
}

// Lacks is [Action.Missing] for people who decide: it says whose approval is needed
// and whose does not count. It names reviewers, so agents must not see it.
func (a *Action) Lacks() string {
	if a.State == Pending && a.quorum != nil {
		return a.quorum.lacks(a)
	}
	return a.Missing()
}

// Bars returns why who's approval of a would not count, or "".
func (a *Action) Bars(who auth.Principal) string {
	if a.quorum == nil {
		return ""
	}
	if err := a.quorum.admits(who, a.quorum.votes); err != nil {
		return strings.TrimSuffix(err.Error(), ": "+ErrNotCounted.Error())
	}
	return ""
}

// Uncounted returns why a person's approval of a does not count, or counts only
// together with another one, or "".
func (a *Action) Uncounted(person string) string {
	q := a.quorum
	if q == nil || q.alone {
		return ""
	}
	h := q.roll.Human(person)
	switch writers, _ := q.writers(); {
	case slices.Contains(writers, h) || slices.Contains(q.authors, person):
		return "does not count: proposed or edited it"
	case h == "" && (q.need > 1 || len(q.authors) > 0):
		return "does not count: may be anybody with an account"
	}
	for _, v := range q.votes {
		if v == person {
			break
		}
		if h != "" && q.roll.Human(v) == h {
			return "counts as one with " + v
		}
	}
	return ""
}

// Sole reports whether only one person can decide on a, who may be its proposer.
func (a *Action) Sole() bool { return a.quorum != nil && a.quorum.alone }

// weigh sets the quorum of the pending actions of as where people are counted: where
// several must approve, or a person proposed it.
func weigh(ctx context.Context, tx *store.Tx, as []Action) error {
	rolls := map[string]auth.Roll{}
	for i := range as {
		a := &as[i]
		if a.State != Pending || a.Approvers < 2 && !person(a.Proposer) {
			continue
		}
		roll, ok := rolls[a.Project]
		if !ok {
			var err error
			if roll, err = auth.ReadRoll(ctx, tx, a.Project, time.Now()); err != nil {
				return err
			}
			rolls[a.Project] = roll
		}
		authors, err := authors(ctx, tx, a)
		if err != nil {
			return err
		}
		q := newQuorum(a, authors, roll.For(a.Created))
		if q.votes, err = voters(ctx, tx, a); err != nil {
			return err
		}
		a.quorum, a.Approvals = &q, q.count(q.votes)
	}
	return nil
}

// voters returns the principals who have approved a at its version.
func voters(ctx context.Context, tx *store.Tx, a *Action) ([]string, error) {
	if a.votes == 0 {
		return nil, nil
	}
	out, err := tx.Strings(ctx, `select person from approval where action_id = $1 and version = $2 order by at, person`, a.ID, a.Version)
	if err != nil {
		return nil, fmt.Errorf("read approvals: %w", err)
	}
	return out, nil
}

// authors returns the people who wrote a's content: its proposer, and those who have
// edited it since a program last wrote all of it.
func authors(ctx context.Context, tx *store.Tx, a *Action) (out []string, err error) {
	if person(a.Proposer) {
		out = append(out, a.Proposer)
	}
	if a.Author == "" {
		return out, nil
	}
	before, err := tx.Rows(ctx, sealedRevisions(), false, `action_id = $1 order by version desc`, a.ID)
	if err != nil {
		return nil, fmt.Errorf("read authors: %w", err)
	}
	revised, err := audit.Count(ctx, tx, a.ID, audit.ActionRevise)
	if err != nil {
		return nil, fmt.Errorf("read authors: %w", err)
	}
	// The attack: an editor removes their revision from the database, and approves.
	if revised > len(before) || slices.ContainsFunc(before, func(r store.SealedRow) bool { return !r.Holds }) {
		out = append(out, unknownAuthor)
	}
	names := []string{a.Author}
	for _, r := range before {
		name, _ := r.Values["author"].(string)
		names = append(names, name)
	}
	for _, author := range names {
		if !person(author) {
			break
		}
		if !slices.Contains(out, author) {
			out = append(out, author)
		}
	}
	return out, nil
}

// unknownAuthor stands for an editor who was removed from the database: it could be
// anybody.
const unknownAuthor = auth.Unknown

// person reports whether a principal is a person.
func person(principal string) bool { return strings.HasPrefix(principal, string(auth.Person)+":") }
