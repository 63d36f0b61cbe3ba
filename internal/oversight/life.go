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

// This file has every rule about how an action moves, and nothing else does: the
// Gate reads an action, asks an event what becomes of it, and writes that down if
// the action is still where it was read. The events read no clock and no
// database, so that the search in model_test.go goes through all that can happen
// with these very rules.

// An event is something that happens to an action.
type event interface {
	// next returns the action as it is afterwards, or why it refuses: [ErrStale]
	// where it is not what the event was about any more.
	next(a Action) (Action, error)
}

// errStays means that an event is about an action and changes nothing of it.
var errStays = errors.New("nothing changes")

// An answer is what policy and the switches say of an action at some moment.
type answer struct {
	now     time.Time
	verdict policy.Verdict
	stop    string // why a switch stops it; empty where none does
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

// refuse ends an action that must not go on: as denied, or as failed where some
// of it may have left.
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

// ask takes over whom v asks, how many of them, and until when.
func (a *Action) ask(v policy.Verdict, from time.Time) {
	within := v.Within
	if within <= 0 {
		within = DefaultWithin
	}
	a.Approvers, a.Who, a.StepUp, a.Approvals = max(v.Approvers, 1), v.Who, v.StepUp, 0
	a.Expires = stored(from.Add(within))
}

// judged puts a where an answer brings what p proposes.
func (a *Action) judged(an answer, p Proposal) {
	v := an.verdict
	if an.stop != "" {
		v = policy.Verdict{Effect: policy.Deny, Rule: v.Rule, Reason: an.stop}
	}
	digest := sha256.Sum256(p.Payload)
	a.Payload, a.Digest, a.Rule, a.Verdict = p.Payload, digest[:], v.Rule, v.Reason
	a.Request, a.Context, a.Via = p.Request, p.Context, p.Via
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

// A proposed is an action that comes into being.
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

// A revised has other bytes in the place of what an action would do.
type revised struct {
	answer
	p       Proposal
	who     auth.Principal
	version int64 // that was shown; 0 means whichever it has
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
		// Who edits has said what is to leave, and not that it may.
		p.Ask = true
		a.Author = e.who.String()
	} else {
		a.Author, a.Proposer = "", e.who.String()
	}
	a.judged(e.answer, p)
	return a, nil
}

// A timeCame is the time at which a scheduled action is asked about.
type timeCame struct{ now time.Time }

func (e timeCame) next(a Action) (Action, error) {
	if a.State != Scheduled || a.AskAt.After(e.now) {
		return a, ErrStale
	}
	a.to(Pending, e.now)
	return a, nil
}

// A timeEnded is the time until which somebody should have decided.
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

// A decided is what a person says about an action.
type decided struct {
	Decision
	who     auth.Principal
	votes   []string // the persons who have approved the action at its version
	authors []string // the persons whose content it has; see [authors]
	roll    auth.Roll
	now     time.Time
	stop    string // why a switch stops it; empty where none does
}

// next leaves an action that lacks approvals at its version, with one more of
// them. One that is approved too late for its time goes to another version.
func (e decided) next(a Action) (Action, error) {
	sum := sha256.Sum256(a.Payload)
	switch {
	case !e.who.Decides():
		// The attack: an agent that approves itself, through any door.
		return a, fmt.Errorf("%s cannot decide, only a person who reviews can: %w", e.who, auth.ErrForbidden)
	case !bytes.Equal(sum[:], a.Digest) || a.Hex() != e.Digest:
		// What is decided on is what is stored now, and what was shown.
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
		// One that was asked about only at its time is late by the reviewer's own pace.
		a.Note = strings.TrimSpace(a.Note + "\nit was to leave at " + a.SendAt.Format(time.RFC1123) + " and was approved too late for that: approved now, it leaves at once")
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

// A cancelled is an action that is taken back.
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

// A claimed is a program's taking an action to execute it. What a rule approved,
// and no person, is judged again; with judge false it has nobody who could.
type claimed struct {
	answer
	judge   bool
	request policy.Request // that was judged
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
		a.Request, a.Rule, a.Verdict = e.request, e.verdict.Rule, e.verdict.Reason
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

// A held is a program's word that it still executes an action.
type held struct {
	version int64 // that it claimed
	now     time.Time
}

func (e held) next(a Action) (Action, error) {
	if a.State != Executing || a.Version != e.version {
		return a, ErrStale
	}
	a.lease = stored(e.now.Add(leaseTime))
	return a, nil
}

// A begun is a program's intent to begin a part of an action's effect.
type begun struct {
	version int64  // that it claimed
	stop    string // why a switch stops it; empty where none does
}

func (e begun) next(a Action) (Action, error) {
	switch {
	case a.State != Executing || a.Version != e.version:
		// The attack on going on: this program stood still and was taken for dead,
		// and the action has been stopped, or tried again, since.
		return a, fmt.Errorf("it is %s: %w", a.State, ErrStale)
	case a.Stopped != "":
		return a, fmt.Errorf("%s: %w", a.Stopped, ErrStopped)
	case e.stop != "":
		return a, fmt.Errorf("%s: %w", e.stop, ErrStopped)
	}
	a.waits = false
	return a, nil
}

// An ended is the outcome of an execution, told by its program, or by another one
// that found it left in its middle.
type ended struct {
	Outcome
	version int64 // that was claimed
	now     time.Time
	stop    string // why a switch stops it; empty where none does
	left    bool   // another tells, for a program whose lease has run out
	alone   bool   // with left: no other program executes for this database
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
			// Turning the switch off again releases nothing: it ends here.
			a.refuse(system(a).String(), a.Stopped, e.now)
			return a, nil
		}
		a.to(Approved, e.now)
		a.Due = stored(e.now.Add(e.After))
	case Done, Failed:
		a.to(e.State, e.now)
	case Unknown, Scheduled, Pending, Denied, Executing, Cancelled: // an executor's mistake is no knowledge
		a.to(Unknown, e.now)
	}
	return a, nil
}

// A switched is a kill switch that stops an action.
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
		// What has begun is not to be called back; nothing more of it begins.
		if a.Stopped == "" {
			a.Stopped = e.why
			return a, nil
		}
	case Scheduled, Pending, Denied, Done, Failed, Cancelled:
	}
	return a, errStays
}

// A resolved is what a person found out about an action whose effect is unknown.
type resolved struct {
	who     auth.Principal
	version int64 // that was shown
	to      State
	reason  string
	now     time.Time
	stop    string // why a switch stops it; empty where none does
	changed bool   // it is unknown since its row was found changed, see distrusted
}

// next lets an action be tried again that had its approvals. The attack: what was
// approved by two, with a second factor, is changed in the database while it is
// being executed, and one person who says "try again" lets go what nobody
// approved. It is asked about as anything new.
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

// A distrusted is the event for an action whose row this program did not write.
type distrusted struct {
	answer
	why    string
	detail string         // what an execution that has just ended brought, or empty
	on     standing       // by the audit
	asked  policy.Verdict // whom it asks, by the audit
}

// settle puts a where nothing of it leaves before a person has looked at it. It
// believes nothing that the row says of decisions and executions: what the audit
// says has ended stays so, of what may have begun a person says what became of
// it, and all else is asked again of as many as it ever asked.
func (e distrusted) settle(a Action) Action {
	note := "the server's database was changed behind its back: " + e.why + ". Review all of this as if it were new"
	if a.broken {
		a.State = Pending
		a.broken = false
	}
	was := a.State
	a.Version = max(min(a.Version, maxVersion), e.on.version, 0)
	a.Note = strings.TrimSpace(cut(a.Note, maxNote) + "\n" + note)
	a.Decider, a.Decided, a.Reason, a.waits = "", time.Time{}, "", false
	v := e.verdict
	v.Approvers, v.StepUp = max(v.Approvers, e.asked.Approvers), v.StepUp || e.asked.StepUp
	if len(e.asked.Who) > 0 {
		v.Who = e.asked.Who
	}
	a.Approvers, a.Who, a.StepUp, a.Approvals = max(v.Approvers, 1), v.Who, v.StepUp, 0
	began := e.on.began || e.detail != ""
	if e.on.state == "" && (was == Executing || was == Unknown || a.Attempts > 0) {
		began = true // without a record the row is believed in what holds it back
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
