// Package oversight holds every action that affects the outside world until
// policy or a person has approved it, then runs it once.
//
// An action moves through these states and no others:
//
//	            ┌─ denied
//	            ├─ scheduled ─┐ its time has come: a person is asked
//	(propose) ──┤      ┌──────┘
//	            ├─ pending ── denied
//	            │   │  ↑
//	            └─ approved ─── executing ─┬─ done
//	                   ↑            │      ├─ failed
//	                   └────────────┴──────┴─ unknown ─┬─ done
//	                     certainly no effect           ├─ failed
//	                                                   └─ approved
//
//	scheduled, pending, approved ── cancelled   until it has begun to leave
//	scheduled, pending, approved ── as if it were proposed now, by a revision
//	approved ── pending, denied     what a rule approved is judged again when it is due
//	approved, executing ── denied   by a kill switch; failed where some of it may have left
//
// life.go has all rules about these moves, part.go those of an effect that has
// several parts, and docs/background/oversight.md says what holds of them and how that is shown.
//
// An approved action that is not due waits: until the time at which it is to
// leave, for as long as it can be undone, or until it is tried again. One that
// is approved more than [MaxLate] after its time stays pending and is asked
// again, since what was right for that time may be wrong now.
//
// An action is marked executing before its effect is attempted. If the program
// stops between the two, the action becomes unknown and a person says what
// happened: a message must not be sent twice because we could not tell. It goes
// back from executing to approved only when its executor is certain that there
// was no effect, or that what there was is on its own durable record. While a
// program executes it renews a lease, so that another on the same database can
// tell an action that is being executed from one that was left.
//
// An action whose row this program did not write moves only to a person, or to
// the end that the audit names: see seal.go.
//
// Each move is one update that names the state and the version it moves from,
// and one audit entry, in one transaction. Only what waits, and is looked at in
// vain again and again for the same reason, has one entry for all of these.
package oversight

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"golang.org/x/sync/semaphore"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// State is where an action is in its life.
type State string

// The states; see the package comment for the moves between them.
const (
	Scheduled State = "scheduled" // a person is asked when its time comes
	Pending   State = "pending"   // a person is asked
	Denied    State = "denied"
	Approved  State = "approved" // it leaves when it is due
	Executing State = "executing"
	Done      State = "done"
	Failed    State = "failed"
	Unknown   State = "unknown"
	Cancelled State = "cancelled" // taken back before it began to leave
)

// States are all of them, in the order of an action's life.
var States = []State{Scheduled, Pending, Denied, Approved, Executing, Done, Failed, Unknown, Cancelled}

// settled reports whether nothing moves an action out of s.
func (s State) settled() bool {
	switch s {
	case Denied, Done, Failed, Cancelled:
		return true
	case Scheduled, Pending, Approved, Executing, Unknown:
	}
	return false
}

// The errors of this package, one for each answer that a door can give.
var (
	// ErrStale means that the action changed after the caller last read it,
	// or was decided already.
	ErrStale = errors.New("the action has changed since it was shown, or is decided already")
	// ErrReason means that a decision lacks its reason or has too long a one.
	ErrReason = errors.New("the reason is missing or longer than 1000 characters")
	// ErrLate means that the action was approved so long after the time at
	// which it was to leave that it is asked again. It is an [ErrStale].
	ErrLate = fmt.Errorf("its time to leave has passed by more than %v: look at it again, approved once more it leaves at once: %w", MaxLate, ErrStale)
	// ErrTooLate means that the action cannot be cancelled or revised any
	// more: it has begun to leave, or is settled.
	ErrTooLate = errors.New("it is too late to change or cancel it")
	// ErrNotAsked means that policy asks others than who decides.
	ErrNotAsked = fmt.Errorf("policy asks others to decide on this: %w", auth.ErrForbidden)
	// ErrNotCounted means that an approval would not count: the approver proposed or
	// edited the action, or may be the same human being as its proposer, an editor or
	// an earlier approver.
	ErrNotCounted = fmt.Errorf("this approval would not count: %w", auth.ErrForbidden)
	// ErrStepUp means that who decides must have proved a second factor a
	// moment ago.
	ErrStepUp = fmt.Errorf("policy asks for a second factor here: prove it, then decide within %v: %w", StepUpTime, auth.ErrStepUp)
	// ErrStopped means that a kill switch stops the action. It is an [ErrStale]
	// where somebody wants to let it go.
	ErrStopped = fmt.Errorf("a kill switch stops it: %w", ErrStale)
	// ErrFull means that so much of one inbox waits for a person that no more
	// is taken.
	ErrFull = errors.New("too much of this inbox waits for a person already; propose again when some of it has been decided")
)

// An Action is a proposed effect on the outside world.
type Action struct {
	ID       string
	Project  string
	Kind     policy.Kind
	Proposer string // a principal, "sandbox:i3k…"
	Author   string // a principal, the person who edited it last; empty where its proposer wrote it
	Inbox    string // id of the inbox it is for, or empty
	Via      string // the door it came through: "mcp", "rest", "smtp"
	Payload  []byte // what an [Executor] of Kind understands; nil in lists and once it is dropped
	Digest   []byte // SHA-256 of Payload: what the approver approves
	State    State
	Version  int64  // goes up by one at each change of state
	Rule     string // id of the policy rule that decided, or empty
	Verdict  string // what policy said, for a person
	Created  time.Time
	Written  time.Time // when Payload took the place of an earlier one, or Created
	Decider  string    // a principal; empty while pending
	Decided  time.Time // zero while pending
	Reason   string    // the decider's
	Attempts int64     // executions begun, without those that were free
	Result   string    // what the execution brought, for a person
	ResultBy string    // a principal, who says Result: a person who resolved it, or this program; empty if nobody does

	SendAt time.Time     // it leaves no sooner; zero means as soon as it may
	AskAt  time.Time     // a person is asked no sooner; zero means at once
	Undo   time.Duration // for so long after it may leave it can be cancelled
	Due    time.Time     // of an approved one: when it leaves, or is tried again
	Note   string        // what the gate warns the reviewer of; may be empty

	Request   policy.Request // what policy was asked
	Context   string         // what the proposer chose to show beside it, such as the thread; may be empty
	Approvers int            // how many people must approve it
	Who       []string       // who is asked: names, or "role:owner"; empty means whoever decides
	StepUp    bool           // who decides proves a second factor
	Expires   time.Time      // when it is denied if nobody decided; zero means never
	Approvals int            // how many people have approved this version so far
	Stopped   string         // why nothing more of it may begin, of one that was being executed; else empty

	Doubt string // why its row in the database is not trusted, where [Gate.Action] found that; else empty

	Settled time.Time // when it was denied, cancelled, done or failed; else zero
	Dropped time.Time // when its payload was dropped; zero while it is kept

	quorum *quorum // of one that waits for people, where it was asked for; else nil

	lease time.Time // of one that is being executed: until when its program need say nothing
	waits bool      // its last execution began nothing, and no later one has yet

	parts  string // how its parts stood when it was put back to be tried again, see [Parter]; or empty
	lapsed bool   // it was denied because nobody decided in time
	broken bool   // its row holds what this program never writes
}

// Hex returns the action's digest as people and doors write it.
func (a *Action) Hex() string { return hex.EncodeToString(a.Digest) }

// A Proposal is what an agent wants to happen.
type Proposal struct {
	Request policy.Request
	Inbox   string
	Via     string
	Payload []byte

	NotBefore time.Time     // it leaves no sooner; zero means as soon as it may
	AskAt     time.Time     // a person is asked no sooner; zero means at once
	Undo      time.Duration // for so long after it may leave it can be cancelled
	Ask       bool          // a person is asked, also where policy would allow it
	Note      string        // what the reviewer is to be warned of; may be empty
	Context   string        // what the reviewer is shown beside it, such as the thread; may be empty
}

// A Judge says what policy makes of a request of a project.
type Judge interface {
	Judge(ctx context.Context, tx *store.Tx, project string, r policy.Request) (policy.Verdict, error)
}

// A Refresher is an [Executor] that knows what has changed of a request since
// it was made: the mode of the inbox, its allow list, the history. The gate
// judges again what a rule, and no person, had approved, before it executes it.
type Refresher interface {
	Refresh(ctx context.Context, tx *store.Tx, a Action) (policy.Request, error)
}

// StepUpTime is how long after a person proved a second factor it counts.
const StepUpTime = auth.StepUpTime

// DefaultWithin is how long an action waits for a person where policy says
// nothing else.
const DefaultWithin = 7 * 24 * time.Hour

// MaxLate is how long after its time an action still leaves as it was approved.
const MaxLate = time.Hour

// A View is an action as a person reviews it. Everything in it may be hostile.
type View struct {
	Title  string
	Fields []Field
	Text   string
	Notes  []string // what the reviewer should be warned of
	Files  []File

	HTML    []byte   // the HTML part as it would leave, hostile: for a frame that runs and loads nothing; may be nil
	Raw     []byte   // what would leave, byte by byte; may be nil
	Context string   // what the proposer chose to show beside it
	Flags   []string // what content checks found
	// Partial says, for a person, why Fields, Text and Files are not everything that
	// leaves; it is empty if they are. Unless it is empty, an interface that shows a
	// View without its source offers no approval.
	Partial string
	NoWay   []string // domains of recipients to which this server has no way: approved, nothing leaves for them
}

// A Field is one line of a [View].
type Field struct{ Name, Value string }

// A File is an attachment of a [View].
type File struct {
	Name, Type string
	Size       int64  // bytes
	SHA256     string // hexadecimal
	Open       bool   // [Gate.File] has its content
}

// An Outcome is what an execution brought.
type Outcome struct {
	// State is Done, Failed (no effect, or a partial one that Detail tells),
	// Unknown (there may have been an effect), or Approved: there was
	// certainly no effect that the executor has not on its own durable record,
	// and it is to be tried again after After.
	State  State
	Detail string // for a person
	After  time.Duration
	// Free says, with Approved, that nothing was attempted at all: it does not
	// count as an attempt, and the action can still be cancelled. While Detail
	// stays the same the audit says once that it waits: put no counts in it.
	Free bool
}

// An Executor carries out approved actions of one kind. Implementations are
// safe for concurrent use.
type Executor interface {
	// Execute performs a, whose payload is the approved one. It is not called
	// again for an action unless it returned Approved. A cancelled ctx should
	// end it soon, with an outcome that is still true.
	Execute(ctx context.Context, a Action) Outcome
	// Show returns what a person needs to see to decide. It has no effects.
	Show(a Action) (View, error)
}

// An Opener is an [Executor] that gives out the files of its views.
type Opener interface {
	// OpenFile returns the file of Show(a).Files with this index and its content. It
	// returns [store.ErrNotFound] if there is none.
	OpenFile(a Action, index int) (File, []byte, error)
}

// A Finisher is an [Executor] that keeps records of its own. Finish is called
// in the transaction that records the outcome of an action.
type Finisher interface {
	Finish(ctx context.Context, tx *store.Tx, a Action, o Outcome) error
}

// A Recoverer is an [Executor] whose own durable record tells more of an
// execution that a program left in the middle than that it may have happened.
// Interrupted is called in the transaction that records its answer, with the
// action without its payload.
type Recoverer interface {
	Interrupted(ctx context.Context, tx *store.Tx, a Action) (Outcome, error)
}

// A Watcher is an [Executor] that wants to know of each move of its actions,
// but for looks at one that waits and still does.
// Moved is called in the transaction of the move, with the action as it is then
// and without its payload. Its error undoes the move, but for the outcome of an
// execution, which is recorded in any case.
type Watcher interface {
	Moved(ctx context.Context, tx *store.Tx, a Action) error
}

// maxPage is how many actions are read at a time where all of them are looked
// at: with its request and what is shown beside it each may be of some 100 KB.
const maxPage = 100

// Gate is the one way out. It is safe for concurrent use.
type Gate struct {
	log   *slog.Logger
	db    *store.DB
	judge Judge
	exec  map[policy.Kind]Executor
	wake  chan struct{}       // has room for one
	room  int64               // maxHeld; a test makes it small
	page  int                 // maxPage; a test makes it small
	held  *semaphore.Weighted // of room, bytes of large payloads that are being executed

	memory memory // of the versions that actions were moved to
}

// NewGate returns a gate that asks judge. Every kind needs its executor, see
// [Gate.Handle].
func NewGate(log *slog.Logger, db *store.DB, judge Judge) *Gate {
	return &Gate{log: log, db: db, judge: judge, exec: map[policy.Kind]Executor{}, wake: make(chan struct{}, 1), room: maxHeld, page: maxPage, held: semaphore.NewWeighted(maxHeld), memory: memory{new: map[string]int64{}}}
}

// Handle sets the executor for a kind of action. It must not be called after
// [Gate.Run].
func (g *Gate) Handle(kind policy.Kind, e Executor) { g.exec[kind] = e }

// Propose records an action as part of tx and returns it with the state that
// policy gave it. It has no outside effect.
func (g *Gate) Propose(ctx context.Context, tx *store.Tx, who auth.Principal, p Proposal) (Action, error) {
	a := Action{
		ID: "act_" + rand.Text(), Project: who.Project, Kind: p.Request.Kind, Proposer: who.String(), Inbox: p.Inbox, Via: p.Via,
		Created: stored(time.Now()),
	}
	an, err := g.ask(ctx, tx, a, &p)
	if err != nil {
		return Action{}, err
	}
	if a, err = (proposed{an, p}).next(a); err != nil {
		return Action{}, fmt.Errorf("propose action: %w", err)
	}
	if err := room(ctx, tx, a); err != nil {
		return Action{}, err
	}
	if err := insert(ctx, tx, a); err != nil {
		return Action{}, err
	}
	if err := g.seal(ctx, tx, &a); err != nil {
		return Action{}, err
	}
	if err := enter(ctx, tx, who, audit.ActionPropose, a, proposal(&a)); err != nil {
		return Action{}, err
	}
	return a, g.moved(ctx, tx, a)
}

// ask asks policy and the switches about what p proposes for a.
func (g *Gate) ask(ctx context.Context, tx *store.Tx, a Action, p *Proposal) (answer, error) {
	an := answer{now: time.Now()}
	p.Request.Time, p.Context = stored(an.now), cut(p.Context, maxContext)
	var err error
	if an.verdict, err = g.judge.Judge(ctx, tx, a.Project, p.Request); err != nil {
		return answer{}, fmt.Errorf("judge action: %w", err)
	}
	an.stop, err = g.stop(ctx, tx, a.Project, a.Inbox, p.Request)
	return an, err
}

// maxContext bounds what a proposer shows beside an action, in bytes.
const maxContext = 64 << 10

// cut returns at most so many bytes of s, which is text.
func cut(s string, most int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// leaves returns when an action that may leave from now on does so.
func (a *Action) leaves(now time.Time) time.Time {
	due := stored(now.Add(a.Undo))
	if a.SendAt.After(due) {
		return a.SendAt
	}
	return due
}

// stored returns t as the database gives it back.
func stored(t time.Time) time.Time { return store.FromTime(store.Time(t)) }

// proposal is what the audit says of what a would do.
func proposal(a *Action) audit.Fields {
	f := audit.Fields{
		"kind": string(a.Kind), "state": string(a.State), "rule": a.Rule, "verdict": a.Verdict, "digest": a.Hex(),
		"inbox": a.Inbox, "via": a.Via, "to": strings.Join(a.Request.To, ", "), "note": a.Note,
	}
	a.asking(f)
	if !a.SendAt.IsZero() {
		f["send_at"] = a.SendAt.Format(time.RFC3339)
	}
	if !a.AskAt.IsZero() {
		f["ask_at"] = a.AskAt.Format(time.RFC3339)
	}
	return f
}

// moved tells the executor of a that it moved.
func (g *Gate) moved(ctx context.Context, tx *store.Tx, a Action) error {
	w, ok := g.exec[a.Kind].(Watcher)
	if !ok {
		return nil
	}
	a.Payload = nil
	if err := w.Moved(ctx, tx, a); err != nil {
		return fmt.Errorf("tell of action %s: %w", a.ID, err)
	}
	return nil
}

// How much of one inbox may wait, for a person or for its time. The attack: a sandbox that
// proposes in a loop, until the disk is full or the reviewer gives up.
const (
	maxPending      = 500
	maxPendingBytes = 512 << 20
)

// room returns [ErrFull] if a waits and would be too much.
func room(ctx context.Context, tx *store.Tx, a Action) error {
	if a.State != Scheduled && a.State != Pending && (a.State != Approved || !a.SendAt.After(time.Now())) {
		return nil
	}
	var n, size int64
	err := tx.QueryRowContext(ctx, `select count(*), coalesce(sum(length(payload)), 0) from action
		where project_id = $1 and inbox_id = $2 and id <> $3 and (state in ($4, $5) or state = $6 and send_at > $7) and kind = $8`,
		a.Project, a.Inbox, a.ID, Pending, Scheduled, Approved, store.Time(time.Now()), a.Kind).Scan(&n, &size)
	if err != nil {
		return fmt.Errorf("count waiting actions: %w", err)
	}
	if n >= maxPending || size+int64(len(a.Payload)) > maxPendingBytes {
		return ErrFull
	}
	return nil
}
