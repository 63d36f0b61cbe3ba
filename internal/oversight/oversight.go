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
// life.go has the rules for these moves, part.go those for an effect with several
// parts. docs/background/oversight.md states the invariants and how they are tested.
//
// An approved action waits until it is due: until its send time, the end of its
// undo window or its next attempt. If it is approved more than [MaxLate] after its
// send time it stays pending and people are asked again, since what was right for
// that time may be wrong now.
//
// An action is marked executing before its effect is attempted. If the program
// stops between the two, the action becomes unknown and a person says what
// happened: a message must not be sent twice because nobody knew. It goes back
// from executing to approved only if its executor is certain that there was no
// effect, or has a durable record of its own of what there was. A program renews a
// lease while it executes an action, so that another program on the same database
// can tell that action from one that was abandoned.
//
// An action whose row this program did not write is asked about again, or ends as
// the audit says that it ended: see seal.go.
//
// Each move is one update that names the state and the version it moves from,
// and one audit entry, in one transaction. The exception is an action whose
// executor keeps finding that it cannot begin yet, for the same reason: all of
// these attempts have one entry.
package oversight

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
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
	Scheduled State = "scheduled" // a person will be asked at a later time
	Pending   State = "pending"   // a person is asked
	Denied    State = "denied"
	Approved  State = "approved" // it leaves when it is due
	Executing State = "executing"
	Done      State = "done"
	Failed    State = "failed"
	Unknown   State = "unknown"
	Cancelled State = "cancelled" // withdrawn before it began to leave
)

// States lists every state, in the order of an action's life.
var States = []State{Scheduled, Pending, Denied, Approved, Executing, Done, Failed, Unknown, Cancelled}

// settled reports whether s is final.
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
	// ErrReason means that a decision has no reason although it needs one, or a reason that is too long.
	ErrReason = errors.New("the reason is missing or longer than 1000 characters")
	// ErrLate means that the action was approved more than [MaxLate] after its send
	// time, so that people are asked again. It is an [ErrStale].
	ErrLate = fmt.Errorf("its time to leave passed more than %v ago: review it again, it leaves at once if you approve it now: %w", MaxLate, ErrStale)
	// ErrTooLate means that the action can no longer be cancelled or revised: it has
	// begun to leave, or is settled.
	ErrTooLate = errors.New("it is too late to change or cancel it")
	// ErrNotAsked means that policy asks other people than the caller.
	ErrNotAsked = fmt.Errorf("policy asks others to decide on this: %w", auth.ErrForbidden)
	// ErrNotCounted means that an approval would not count: the approver proposed or
	// edited the action, or may be the same human being as its proposer, an editor or
	// an earlier approver.
	ErrNotCounted = fmt.Errorf("this approval would not count: %w", auth.ErrForbidden)
	// ErrStepUp means that the caller must prove a second factor first.
	ErrStepUp = fmt.Errorf("policy asks for a second factor here: prove it, then decide within %v: %w", StepUpTime, auth.ErrStepUp)
	// ErrStopped means that a kill switch stops the action. It is an [ErrStale] for a
	// caller who wants to approve it.
	ErrStopped = fmt.Errorf("a kill switch stops it: %w", ErrStale)
	// ErrFull means that too many actions of one inbox wait for a person.
	ErrFull = errors.New("too many actions of this inbox wait for a person already; propose again when some have been decided")
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
	Payload  []byte // for the [Executor] of Kind; nil in lists and once it is dropped
	Digest   []byte // SHA-256 of Payload: what the approver approves
	State    State
	Version  int64  // goes up by one at each change of state
	Rule     string // id of the policy rule that decided, or empty
	Verdict  string // what policy said, for a person
	Created  time.Time
	Written  time.Time // when Payload was last replaced, or Created
	Decider  string    // a principal; empty while pending
	Decided  time.Time // zero while pending
	Reason   string    // the decider's
	Attempts int64     // executions begun, without those that were free
	Result   string    // of the execution, for a person
	ResultBy string    // a principal, who says Result: a person who resolved it, or this program; empty if nobody does

	SendAt time.Time     // it leaves no sooner; zero means as soon as it may
	AskAt  time.Time     // a person is asked no sooner; zero means at once
	Undo   time.Duration // how long it can still be cancelled after it may leave
	Due    time.Time     // of an approved one: when it leaves, or is tried again
	Note   string        // warnings of the gate to the reviewer, one a line; may be empty

	Request   policy.Request // what policy was asked
	Context   string         // what the proposer chose to show beside it, such as the thread; may be empty
	Approvers int            // how many people must approve it
	Who       []string       // who is asked: names, or "role:owner"; empty means everybody who decides
	StepUp    bool           // deciders must prove a second factor
	Expires   time.Time      // when it is denied if nobody decided; zero means never
	Approvals int            // how many people have approved this version so far
	Stopped   string         // why no further part of it may begin, if it was being executed; else empty
	Assignee  string         // the person who was asked to look at it, a name; anybody who is asked may decide nevertheless

	Doubt string // why its row in the database is not trusted, where [Gate.Action] found that; else empty

	Settled time.Time // when it was denied, cancelled, done or failed; else zero
	Dropped time.Time // when its payload was dropped; zero while it is kept

	quorum *quorum // nil unless it waits for people and weigh was called

	lease time.Time // while executing: when its program counts as stopped unless it renews it
	waits bool      // its last execution began nothing, and no later one has begun

	parts  string // the states of its parts when it was put back for a retry, see [Parter]; or empty
	lapsed bool   // it was denied because nobody decided in time
	votes  int    // rows of approvals of this version
	broken bool   // its row has values that this program never writes
}

// Hex returns the action's digest in hexadecimal, as the API and pages show it.
func (a *Action) Hex() string { return hex.EncodeToString(a.Digest) }

// A Proposal is what an agent wants to happen.
type Proposal struct {
	Request policy.Request
	Inbox   string
	Via     string
	Payload []byte

	NotBefore time.Time     // it leaves no sooner; zero means as soon as it may
	AskAt     time.Time     // a person is asked no sooner; zero means at once
	Undo      time.Duration // how long it can still be cancelled after it may leave
	Ask       bool          // a person is asked even if policy would allow it
	Note      string        // a warning to the reviewer; may be empty
	Context   string        // what the reviewer is shown beside it, such as the thread; may be empty
}

// A Judge applies a project's policy to a request. Implementations are safe for
// concurrent use.
type Judge interface {
	// Judge reads in tx which policy is in force. An error means that there is no
	// verdict: the action is then neither proposed nor claimed.
	Judge(ctx context.Context, tx *store.Tx, project string, r policy.Request) (policy.Verdict, error)
}

// A Refresher is an [Executor] that knows what has changed about a request since
// it was made: the inbox's mode, its allow list, the history. The gate has an action
// judged again before it executes it, if a rule approved it and not a person.
type Refresher interface {
	Refresh(ctx context.Context, tx *store.Tx, a Action) (policy.Request, error)
}

// StepUpTime is how long after a person proved a second factor it counts.
const StepUpTime = auth.StepUpTime

// DefaultWithin is how long an action waits for a person if policy sets no time.
const DefaultWithin = 7 * 24 * time.Hour

// MaxLate is how long after its send time an action can still be approved for it.
const MaxLate = time.Hour

// A View is an action as a person reviews it. Everything in it may be hostile.
type View struct {
	Title  string
	Fields []Field
	Text   string
	Notes  []string // warnings to the reviewer
	Files  []File

	HTML    []byte   // the HTML part as it would leave, hostile: only for a frame without scripts and network; may be nil
	Raw     []byte   // what would leave, byte by byte; may be nil
	Context string   // what the proposer chose to show beside it
	Flags   []string // what content checks found
	// Findings are what the reviewer should look at closely; grave ones have a Tick.
	Findings []Finding
	// Partial says, for a person, why Fields, Text and Files are not everything that
	// leaves; it is empty if they are. Unless it is empty, an interface that shows a
	// View without its source offers no approval.
	Partial    string
	Unroutable []string // domains of recipients that this server cannot deliver to, even if it is approved

	Request *RequestView // the HTTP request that would be made; nil for other actions
	Panels  []Panel      // Fields and Text once more, for pages; nil for mail and requests
	InPanel bool         // Panels have all of Text
}

// A RequestView is an HTTP request as a person reviews it. Fields and Text of its
// [View] have the same, for interfaces without a page for it.
type RequestView struct {
	Method  string
	Scheme  string
	Host    string // without port
	Port    string // ":8443", or empty for the scheme's own
	Path    []Span // with the query
	Headers []Header
	Type    string // of the body, as the request says; may be empty
	Size    int64  // bytes of the body
	Shown   string // how Text shows the body: "JSON", "form", "text", "hex"; empty without a body
	Body    []Span // the body as Text shows it
	Secrets []string
	// Grant is how long the proposer may use GrantOf, a secret, if this is approved. It
	// is zero if the approval is for this one request.
	Grant   time.Duration
	GrantOf string
}

// A Header is a field of a [RequestView].
type Header struct {
	Name  string
	Value []Span
}

// A Span is a piece of a text: either Text as it is, or the place where the value of
// a secret is put in.
type Span struct{ Text, Secret string }

// A Field is one line of a [View].
type Field struct{ Name, Value string }

// A File is an attachment of a [View].
type File struct {
	Name, Type string
	Size       int64  // bytes
	SHA256     string // hexadecimal
	Open       bool   // [Gate.File] has its content
}

// An Outcome is the result of an execution.
type Outcome struct {
	// State is Done; Failed (no effect, or a partial one that Detail describes);
	// Unknown (there may have been an effect); or Approved: it is tried again after
	// After, and every effect so far is on the executor's own durable record.
	State  State
	Detail string // for a person
	After  time.Duration
	// Free means, with Approved, that nothing was attempted: it does not count as an
	// attempt, and the action can still be cancelled. The audit gets one entry for all
	// such outcomes in a row with the same Detail, so put no counts in it.
	Free bool
}

// An Executor carries out approved actions of one kind. Implementations are
// safe for concurrent use.
type Executor interface {
	// Execute performs a, whose payload is the approved one. It is called again for
	// the same action only if it returned Approved. When ctx is cancelled it should
	// return soon, with an outcome that is still true.
	Execute(ctx context.Context, a Action) Outcome
	// Show returns what a person needs to see to decide. It has no effects.
	Show(a Action) (View, error)
}

// An Opener is an [Executor] that can return the files of its views.
type Opener interface {
	// OpenFile returns the file of Show(a).Files with this index and its content. It
	// returns [store.ErrNotFound] if there is none.
	OpenFile(a Action, index int) (File, []byte, error)
}

// A Finisher is an [Executor] with records of its own. Finish is called in the
// transaction that records the outcome of an action; its error undoes both, and the
// outcome is then recorded without it.
type Finisher interface {
	Finish(ctx context.Context, tx *store.Tx, a Action, o Outcome) error
}

// A Recoverer is an [Executor] whose own durable record shows what became of an
// execution that was interrupted when a program stopped. Without one such an action
// becomes [Unknown]. Interrupted is called in the transaction that records its
// answer, with the action without its payload.
type Recoverer interface {
	Interrupted(ctx context.Context, tx *store.Tx, a Action) (Outcome, error)
}

// A Watcher is an [Executor] that is called for each move of its actions, except
// rechecks that change nothing. Moved is called in the transaction of the move, with
// the action after it and without its payload. Its error undoes the move; only the
// outcome of an execution is recorded in any case.
type Watcher interface {
	Moved(ctx context.Context, tx *store.Tx, a Action) error
}

// maxPage is how many actions are read at a time by what goes through all of them:
// each may have some 100 KB, with its request and context.
const maxPage = 100

// maxRemembered is of how many actions and parts a gate remembers the versions, at least:
// of the most recent ones, since an attacker gains most from their old rows.
const maxRemembered = 50_000

// Gate is the one way out. It is safe for concurrent use.
type Gate struct {
	log   *slog.Logger
	db    *store.DB
	judge Judge
	exec  map[policy.Kind]Executor
	wake  chan struct{}       // of capacity one; see poke
	room  int64               // maxHeld; a test makes it small
	page  int                 // maxPage; a test makes it small
	held  *semaphore.Weighted // of size room: bytes of large payloads in execution

	// examine and learn are about the names in requests, see Names; both may be nil
	examine func(ctx context.Context, tx *store.Tx, project string, r *policy.Request) error
	learn   func(ctx context.Context, tx *store.Tx, a Action) error
	// bound checks proposals of sandboxes, see Bound; may be nil
	bound func(ctx context.Context, tx *store.Tx, who auth.Principal, r policy.Request) error

	void atomic.Int64 // approvals from before this time are void, see Void

	memory *store.Memory // the latest versions that this program moved actions to, and attempts of their parts
}

// NewGate returns a gate that applies the policies of judge. Every kind needs an
// executor, see [Gate.Handle].
func NewGate(log *slog.Logger, db *store.DB, judge Judge) *Gate {
	return &Gate{log: log, db: db, judge: judge, exec: map[policy.Kind]Executor{}, wake: make(chan struct{}, 1), room: maxHeld, page: maxPage, held: semaphore.NewWeighted(maxHeld), memory: db.NewMemory(maxRemembered)}
}

// Handle sets the executor for a kind of action. It must not be called after
// [Gate.Run].
func (g *Gate) Handle(kind policy.Kind, e Executor) { g.exec[kind] = e }

// Bound makes [Gate.Propose] call check, in its transaction, before code in a sandbox
// proposes an action. An error of check refuses the proposal. Bound must not be called after
// [Gate.Run].
func (g *Gate) Bound(check func(ctx context.Context, tx *store.Tx, who auth.Principal, r policy.Request) error) {
	g.bound = check
}

// Names makes the gate call examine, in the transaction of a proposal or a revision and
// before policy is asked, to add findings about the names in a request; and learn for each
// move of an action, as part of its transaction. It must not be called after [Gate.Run].
func (g *Gate) Names(examine func(ctx context.Context, tx *store.Tx, project string, r *policy.Request) error, learn func(ctx context.Context, tx *store.Tx, a Action) error) {
	g.examine, g.learn = examine, learn
}

// Propose records an action as part of tx, whose turn includes [Turn], and returns it with the state that
// policy gave it. It has no outside effect.
func (g *Gate) Propose(ctx context.Context, tx *store.Tx, who auth.Principal, p Proposal) (Action, error) {
	a := Action{
		ID: "act_" + rand.Text(), Project: who.Project, Kind: p.Request.Kind, Proposer: who.String(), Inbox: p.Inbox, Via: p.Via,
		Created: stored(time.Now()),
	}
	if err := inTurn(tx, &a); err != nil {
		return Action{}, err
	}
	if g.bound != nil && who.Kind == auth.Sandbox {
		if err := g.bound(ctx, tx, who, p.Request); err != nil {
			return Action{}, err
		}
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
	g.remember(tx, &a)
	if err := enter(ctx, tx, who, audit.ActionPropose, a, proposal(&a)); err != nil {
		return Action{}, err
	}
	if a.State == Approved { // a rule allows it: execute it at once
		tx.AfterCommit(g.poke)
	}
	return a, g.moved(ctx, tx, a)
}

// Asks reports whether a person would decide on p, if who proposed it now. It is for a
// proposer whose content depends on that; tx is the transaction of the proposal.
func (g *Gate) Asks(ctx context.Context, tx *store.Tx, who auth.Principal, p Proposal) (bool, error) {
	if p.Ask {
		return true, nil
	}
	an, err := g.ask(ctx, tx, Action{Project: who.Project, Inbox: p.Inbox}, &p)
	return an.verdict.Effect == policy.Ask, err
}

// ask returns what policy and the kill switches say about p, as part of tx.
func (g *Gate) ask(ctx context.Context, tx *store.Tx, a Action, p *Proposal) (answer, error) {
	an := answer{now: time.Now()}
	p.Request.Time, p.Context = stored(an.now), cut(p.Context, maxContext)
	var err error
	if g.examine != nil {
		if err = g.examine(ctx, tx, a.Project, &p.Request); err != nil {
			return answer{}, fmt.Errorf("look for findings: %w", err)
		}
	}
	flagged(&p.Request)
	if an.verdict, err = g.judge.Judge(ctx, tx, a.Project, p.Request); err != nil {
		return answer{}, fmt.Errorf("judge action: %w", err)
	}
	an.stop, err = g.stop(ctx, tx, a.Project, a.Inbox, p.Request)
	return an, err
}

// maxContext bounds the context of an action, in bytes.
const maxContext = 64 << 10

// cut returns at most most bytes of s, as text that both databases can store.
func cut(s string, most int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// leaves returns when an action leaves that is approved now.
func (a *Action) leaves(now time.Time) time.Time {
	due := stored(now.Add(a.Undo))
	if a.SendAt.After(due) {
		return a.SendAt
	}
	return due
}

// stored returns t with the precision of the database: microseconds, in UTC.
func stored(t time.Time) time.Time { return store.FromTime(store.Time(t)) }

// proposal returns the audit fields that describe what a would do.
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

// moved notifies the executor of a, if it is a [Watcher], that a moved.
func (g *Gate) moved(ctx context.Context, tx *store.Tx, a Action) error {
	if g.learn != nil {
		if err := g.learn(ctx, tx, a); err != nil {
			return fmt.Errorf("learn from action %s: %w", a.ID, err)
		}
	}
	w, ok := g.exec[a.Kind].(Watcher)
	if !ok {
		return nil
	}
	a.Payload = nil
	if err := w.Moved(ctx, tx, a); err != nil {
		return fmt.Errorf("report move of action %s: %w", a.ID, err)
	}
	return nil
}

// Limits on what of one inbox may wait, for a person or for its time. The attack: a
// sandbox that proposes in a loop, until the disk is full or the reviewer gives up.
const (
	MaxPending      = 500       // actions of one kind
	maxPendingBytes = 512 << 20 // of their payloads
)

// room returns [ErrFull] if a has to wait and its inbox is at a limit.
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
	if n >= MaxPending || size+int64(len(a.Payload)) > maxPendingBytes {
		return ErrFull
	}
	return nil
}
