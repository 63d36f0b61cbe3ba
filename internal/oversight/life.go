package oversight

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// This file has every rule about how an action moves. The Gate reads an action,
// applies an event to it, and stores the result if the row is still at the version
// that was read. Events read no clock and no database, so that the exhaustive search
// in model_test.go runs these very rules.

// An event is something that happens to an action.
type event interface {
	// next returns the action after the event, or why the event is refused:
	// [ErrStale] if the action is not in a state or version that the event is about.
	next(a Action) (Action, error)
}

// errStays means that an event applies to an action and changes nothing.
var errStays = errors.New("nothing changes")

// An answer is what policy and the kill switches say about an action at one moment.
type answer struct {
	now     time.Time
	verdict policy.Verdict
	stop    string // why a kill switch stops it; empty if none does
}

// to moves a to another state.
func (a *Action) to(s State, now time.Time) {
	a.State, a.Version, a.Due, a.lease, a.lapsed = s, a.Version+1, time.Time{}, time.Time{}, false
	if s.settled() {
		a.Settled = stored(now)
	}
}

// report sets the result of a and who says it: a principal.
func (a *Action) report(by, result string) { a.ResultBy, a.Result = by, result }

// refuse ends an action that must not go on: denied, or failed if some of it may have
// left. Decider is a principal.
func (a *Action) refuse(decider, why string, now time.Time) {
	to := Denied
	if a.Attempts > 0 {
		to = Failed
		by := a.resolver() // what a person said stays theirs: the reason is only added to it
		if by == "" {
			by = system(*a).String()
		}
		a.report(by, strings.TrimSpace(a.Result+"\n"+why))
	}
	a.to(to, now)
	a.Decider, a.Decided, a.Reason = decider, stored(now), why
}

// ask sets whom v asks, how many of them, and until when, counted from a time.
func (a *Action) ask(v policy.Verdict, from time.Time) {
	within := v.Within
	if within <= 0 {
		within = DefaultWithin
	}
	a.Approvers, a.Who, a.StepUp, a.Approvals = max(v.Approvers, 1), v.Who, v.StepUp, 0
	a.Expires = stored(from.Add(within))
}

// judged gives a the content of p and the state that an answer about p leads to.
// Nothing of earlier contents stays: no decision, no result, no approval.
func (a *Action) judged(an answer, p Proposal) {
	v := an.verdict
	if an.stop != "" {
		v = policy.Verdict{Effect: policy.Deny, Rule: v.Rule, Reason: an.stop, Grave: v.Grave}
	}
	digest := sha256.Sum256(p.Payload)
	a.Payload, a.Digest, a.Rule, a.Verdict = p.Payload, digest[:], v.Rule, v.Reason
	a.Request, a.Context, a.Via = grave(p.Request, v.Grave), p.Context, p.Via
	a.SendAt, a.AskAt, a.Undo, a.Note = stored(p.NotBefore), stored(p.AskAt), p.Undo, p.Note
	a.Settled, a.Expires, a.Written = time.Time{}, time.Time{}, stored(an.now)
	a.Decider, a.Decided, a.Reason, a.parts = "", time.Time{}, "", ""
	a.report("", "")
	a.ask(v, an.now)
	switch {
	case v.Effect == policy.Deny:
		a.to(Denied, an.now)
	case v.Effect == policy.Allow && !p.Ask:
		a.to(Approved, an.now)
		a.Due = a.leaves(an.now)
	case a.AskAt.After(an.now):
		a.to(Scheduled, an.now)
		a.ask(v, a.AskAt)
		return
	default:
		a.to(Pending, an.now)
		return
	}
	a.Expires = time.Time{} // nobody is asked
}

// A proposed is the event that creates an action.
type proposed struct {
	answer
	p Proposal
}

func (e proposed) next(a Action) (Action, error) {
	if a.Version != 0 {
		return a, ErrStale
	}
	a.judged(e.answer, e.p)
	return a, nil
}

// A revised replaces the content of an action.
type revised struct {
	answer
	p       Proposal
	who     auth.Principal
	version int64 // the one that was shown; 0 means any
}

func (e revised) next(a Action) (Action, error) {
	switch err := mayChange(e.who, &a); {
	case err != nil:
		return a, err
	case e.version != 0 && e.version != a.Version:
		return a, ErrStale
	case !a.changeable():
		return a, ErrTooLate
	case e.p.Request.Kind != a.Kind || e.p.Inbox != a.Inbox:
		return a, fmt.Errorf("it is of another kind or inbox: %w", ErrStale)
	}
	p := e.p
	if e.who.Kind == auth.Person {
		// An edit says what should leave, and is not an approval of it.
		p.Ask = true
		a.Author = e.who.String()
	} else {
		a.Author, a.Proposer = "", e.who.String()
	}
	a.judged(e.answer, p)
	return a, nil
}

// A timeCame moves a scheduled action to pending.
type timeCame struct{ now time.Time }

func (e timeCame) next(a Action) (Action, error) {
	if a.State != Scheduled || a.AskAt.After(e.now) {
		return a, ErrStale
	}
	a.to(Pending, e.now)
	return a, nil
}

// A timeEnded denies an action that nobody decided on in time.
type timeEnded struct{ now time.Time }

func (e timeEnded) next(a Action) (Action, error) {
	if a.State != Pending || !a.expired(e.now) {
		return a, ErrStale
	}
	a.refuse(system(a).String(), nobodyDecided+a.Expires.Format(time.RFC1123), e.now)
	a.lapsed = a.State == Denied
	return a, nil
}

// expired reports whether the time to decide on a has ended.
func (a *Action) expired(now time.Time) bool { return !a.Expires.IsZero() && !a.Expires.After(now) }

// A decided is a person's decision.
type decided struct {
	Decision
	who     auth.Principal
	votes   []string // principals of those who have approved this version
	authors []string // principals of those who wrote the content; see [authors]
	roll    auth.Roll
	now     time.Time
	stop    string // why a kill switch stops it; empty if none does
}

// next counts an approval. As long as more are needed the action stays pending at
// its version. An approval after its send time moves it to a new version instead.
func (e decided) next(a Action) (Action, error) {
	sum := sha256.Sum256(a.Payload)
	switch {
	case !e.who.Decides():
		// The attack: an agent that approves itself, through any door.
		return a, fmt.Errorf("%s cannot decide, only a person who reviews can: %w", e.who, auth.ErrForbidden)
	case !bytes.Equal(sum[:], a.Digest) || a.Hex() != e.Digest:
		// The decision must be on the bytes that are stored now and that were shown.
		return a, fmt.Errorf("digest: %w", ErrStale)
	case a.State != Pending || a.Version != e.Version:
		return a, ErrStale
	case a.expired(e.now):
		return a, fmt.Errorf("the time to decide ended %s: %w", a.Expires.Format(time.RFC1123), ErrStale)
	case !a.Asks(e.who):
		return a, fmt.Errorf("it asks %s: %w", strings.Join(a.Who, ", "), ErrNotAsked)
	case !e.Approve:
		a.refuse(e.who.String(), e.Reason, e.now)
		return a, nil
	}
	if f, missing := a.unseen(e.Seen); missing {
		// The attack: a page, a chat or a script that approves what nobody looked at.
		return a, unseenError(f)
	}
	if as := e.roll.As(e.who); a.Approvers > 1 && !a.Asks(as) {
		// The attack: the operator has an owner's rights, is linked to a reviewer, and
		// counts as one of the two owners who are asked.
		return a, fmt.Errorf("it asks %s, and the operator at the machine is linked to %s: %w", strings.Join(a.Who, ", "), as, ErrNotAsked)
	}
	q := newQuorum(&a, e.authors, e.roll)
	switch err := q.admits(e.who, e.votes); {
	case err != nil:
		return a, err
	case a.StepUp && (e.now.Sub(e.who.Strong) > StepUpTime || e.who.Strong.IsZero()):
		return a, ErrStepUp
	case e.stop != "":
		return a, fmt.Errorf("%s: %w", e.stop, ErrStopped)
	}
	if !a.SendAt.IsZero() && a.AskAt.IsZero() && e.now.Sub(a.SendAt) > MaxLate {
		// An action that people were asked about only at its time (AskAt) is never late.
		a.Note = strings.TrimSpace(a.Note + "\nit was to leave at " + a.SendAt.Format(time.RFC1123) + " and was approved too late for that: if you approve it now, it leaves at once")
		a.SendAt, a.Approvals = time.Time{}, 0
		a.to(Pending, e.now)
		return a, nil
	}
	votes := slices.Clone(e.votes)
	if !slices.Contains(votes, e.who.String()) {
		votes = append(votes, e.who.String())
	}
	if a.Approvals = q.count(votes); a.Approvals < q.need {
		return a, nil
	}
	a.to(Approved, e.now)
	a.Decider, a.Decided, a.Reason, a.Due = e.who.String(), stored(e.now), e.Reason, a.leaves(e.now)
	return a, nil
}

// A cancelled withdraws an action.
type cancelled struct {
	who auth.Principal
	now time.Time
}

func (e cancelled) next(a Action) (Action, error) {
	switch err := mayChange(e.who, &a); {
	case err != nil:
		return a, err
	case a.State == Cancelled:
		return a, errStays
	case !a.changeable():
		return a, fmt.Errorf("it is %s: %w", a.State, ErrTooLate)
	}
	a.to(Cancelled, e.now)
	by := "its inbox"
	switch {
	case e.who.String() == a.Proposer:
		by = "its proposer"
	case e.who.Kind == auth.Person:
		by = "a person"
	}
	a.report(system(a).String(), "cancelled by "+by)
	return a, nil
}

// A claimed makes this program the one that executes an action. If a rule approved
// the action and not a person, a new verdict applies, where there is one.
type claimed struct {
	answer
	judge   bool           // there is a new verdict, of request
	request policy.Request // as it is now
}

func (e claimed) next(a Action) (Action, error) {
	if a.State != Approved || a.Due.After(e.now) {
		return a, ErrStale
	}
	if e.stop != "" {
		a.refuse(system(a).String(), e.stop, e.now)
		return a, nil
	}
	if e.judge && a.Decider == "" {
		a.Request, a.Rule, a.Verdict = grave(e.request, e.verdict.Grave), e.verdict.Rule, e.verdict.Reason
		switch e.verdict.Effect {
		case policy.Allow:
		case policy.Deny:
			a.refuse(system(a).String(), e.verdict.Reason, e.now)
			return a, nil
		case policy.Ask:
			a.ask(e.verdict, e.now)
			a.to(Pending, e.now)
			return a, nil
		}
	}
	a.to(Executing, e.now)
	a.Attempts++
	a.lease = stored(e.now.Add(leaseTime))
	return a, nil
}

// A held renews the lease of an action that is being executed.
type held struct {
	version int64 // the one that was claimed
	now     time.Time
}

func (e held) next(a Action) (Action, error) {
	if a.State != Executing || a.Version != e.version {
		return a, ErrStale
	}
	a.lease = stored(e.now.Add(leaseTime))
	return a, nil
}

// A begun is the intent to begin a part of an action's effect.
type begun struct {
	version int64  // the one that was claimed
	stop    string // why a kill switch stops it; empty if none does
}

func (e begun) next(a Action) (Action, error) {
	switch {
	case a.State != Executing || a.Version != e.version:
		// This program was suspended and lost its lease. Another one may have executed
		// the action since, so beginning now could send it twice.
		return a, fmt.Errorf("it is %s: %w", a.State, ErrStale)
	case a.Stopped != "":
		return a, fmt.Errorf("%s: %w", a.Stopped, ErrStopped)
	case e.stop != "":
		return a, fmt.Errorf("%s: %w", e.stop, ErrStopped)
	}
	a.waits = false
	return a, nil
}

// An ended is the outcome of an execution: from the program that executed it, or
// from another one that recovered it.
type ended struct {
	Outcome
	version int64 // the one that was claimed
	now     time.Time
	stop    string // why a kill switch stops it; empty if none does
	left    bool   // it was recovered after the lease ran out
	alone   bool   // with left: no other program executes, so the lease is ignored
}

func (e ended) next(a Action) (Action, error) {
	if a.State != Executing || a.Version != e.version || e.left && !e.alone && !a.lease.Before(e.now) {
		return a, ErrStale
	}
	free := e.State == Approved && e.Free
	if free {
		a.Attempts--
	}
	a.waits = free
	a.report(system(a).String(), e.Detail)
	switch e.State {
	case Approved:
		if a.Stopped == "" {
			a.Stopped = e.stop
		}
		if a.Stopped != "" {
			// A switch ends what it stops: turning it off again releases nothing.
			a.refuse(system(a).String(), a.Stopped, e.now)
			return a, nil
		}
		a.to(Approved, e.now)
		a.Due = stored(e.now.Add(e.After))
	case Done, Failed:
		a.to(e.State, e.now)
	case Unknown, Scheduled, Pending, Denied, Executing, Cancelled: // the last five are an executor's mistake, and say nothing about the effect
		a.to(Unknown, e.now)
	}
	return a, nil
}

// A switched is a kill switch that is turned on and stops the action.
type switched struct {
	why string
	now time.Time
}

func (e switched) next(a Action) (Action, error) {
	switch a.State {
	case Approved:
		a.refuse(system(a).String(), e.why, e.now)
		return a, nil
	case Executing, Unknown:
		// Parts that have begun cannot be called back, but no further one begins.
		if a.Stopped == "" {
			a.Stopped = e.why
			return a, nil
		}
	case Scheduled, Pending, Denied, Done, Failed, Cancelled:
	}
	return a, errStays
}

// A resolved is a person's answer about an action whose effect is unknown.
type resolved struct {
	who     auth.Principal
	version int64 // the one that was shown
	to      State
	reason  string
	now     time.Time
	stop    string // why a kill switch stops it; empty if none does
	changed bool   // it is unknown because its row was found changed, see distrusted
}

// next lets an action that was approved be tried again, except one whose row was
// changed: that needs new approvals. The attack: an action that two people approved is
// changed in the database while it is being executed, and then one person who answers
// "try again" releases what nobody approved.
func (e resolved) next(a Action) (Action, error) {
	switch {
	case !e.who.Decides():
		return a, fmt.Errorf("%s cannot resolve, only a person who reviews can: %w", e.who, auth.ErrForbidden)
	case e.to != Done && e.to != Failed && e.to != Approved:
		return a, fmt.Errorf("as %q: want %s, %s or %s: %w", e.to, Done, Failed, Approved, auth.ErrInvalid)
	case a.State != Unknown || a.Version != e.version:
		return a, ErrStale
	case e.to == Approved && a.Stopped != "":
		return a, fmt.Errorf("%s: %w", a.Stopped, ErrStopped)
	case e.to == Approved && e.stop != "":
		return a, fmt.Errorf("%s: %w", e.stop, ErrStopped)
	}
	if e.to == Approved && e.changed {
		a.to(Pending, e.now)
		a.Expires = stored(e.now.Add(DefaultWithin))
	} else {
		a.to(e.to, e.now)
	}
	a.report(e.who.String(), e.who.String()+says+e.reason)
	return a, nil
}

// A distrusted is about an action whose row this program did not write.
type distrusted struct {
	answer
	why    string
	detail string         // the outcome of an execution that has just ended, or empty
	on     standing       // where the action is according to the audit
	asked  policy.Verdict // whom it asks according to the audit

	findings []policy.Finding // of the content as it is now, and what was grave according to the audit
}

// settle moves a to a state from which nothing leaves before a person has reviewed it.
// It ignores what the row says about decisions and executions. An action that has
// ended according to the audit stays ended; one that may have begun becomes unknown;
// every other is asked about again, with at least as many approvers as before.
func (e distrusted) settle(a Action) Action {
	note := "the server's database was changed behind its back: " + e.why + ". Review all of this as if it were new"
	if a.broken {
		a.State = Pending
		a.broken = false
	}
	was := a.State
	a.Version = max(min(a.Version, maxVersion), e.on.version, 0)
	a.Note = strings.TrimSpace(cut(a.Note, maxNote) + "\n" + note)
	a.Request.Findings = e.findings
	a.Decider, a.Decided, a.Reason, a.waits = "", time.Time{}, "", false
	v := e.verdict
	v.Approvers, v.StepUp = max(v.Approvers, e.asked.Approvers), v.StepUp || e.asked.StepUp
	if len(e.asked.Who) > 0 {
		v.Who = e.asked.Who
	}
	a.Approvers, a.Who, a.StepUp, a.Approvals = max(v.Approvers, 1), v.Who, v.StepUp, 0
	began := e.on.began || e.detail != ""
	if e.on.state == "" && (was == Executing || was == Unknown || a.Attempts > 0) {
		began = true // the audit says nothing: believe the row where that is stricter
	}
	a.Attempts = max(a.Attempts, int64(store.Flag(began)))
	switch {
	case !e.on.entries:
		a.refuse(system(a).String(), "nothing on the record says that it was proposed", e.now)
	case e.on.state.settled():
		a.to(e.on.state, e.now)
		a.Decider, a.Reason = system(a).String(), note
	case began:
		a.to(Unknown, e.now)
		a.report(system(a).String(), strings.TrimSpace(e.detail+"\n"+note))
	case e.stop != "" || e.verdict.Effect == policy.Deny:
		why := e.stop
		if why == "" {
			why = e.verdict.Reason
		}
		a.refuse(system(a).String(), why, e.now)
	default:
		a.Rule, a.Verdict = e.verdict.Rule, e.verdict.Reason
		a.ask(v, e.now)
		a.to(Pending, e.now)
	}
	return a
}

const (
	// maxVersion is more than any action has. A greater version in the database is
	// not used to count on.
	maxVersion = 1 << 40
	// maxNote bounds what stays of the notes on an action that is distrusted, in bytes.
	maxNote = 4 << 10
)

// intact refuses to execute a payload that is not the one that was approved. The
// attack: it was changed in the database since.
func (a *Action) intact() error {
	if sum := sha256.Sum256(a.Payload); !bytes.Equal(sum[:], a.Digest) {
		return errors.New("the stored payload is not what was approved; nothing was executed")
	}
	return nil
}
