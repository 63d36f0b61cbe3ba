// Package oversight holds every action that affects the outside world until
// policy or a person has approved it, then runs it once.
//
// An action moves through these states and no others:
//
//	           ┌─ denied
//	(propose) ─┼─ pending ── denied
//	           │     │
//	           └──── approved ── executing ─┬─ done
//	                    ↑            │      ├─ failed
//	                    └────────────┴──────┴─ unknown ─┬─ done
//	                      certainly no effect           ├─ failed
//	                                                    └─ approved
//
// An action is marked executing before its effect is attempted. If the program
// stops between the two, the action becomes unknown and a person says what
// happened: a message must not be sent twice because we could not tell. It goes
// back from executing to approved only when its executor is certain that there
// was no effect.
//
// Each move is one update that names the state and the version it moves from,
// and one audit entry, in one transaction.
package oversight

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// State is where an action is in its life.
type State string

// The states; see the package comment for the moves between them.
const (
	Pending   State = "pending"
	Denied    State = "denied"
	Approved  State = "approved"
	Executing State = "executing"
	Done      State = "done"
	Failed    State = "failed"
	Unknown   State = "unknown"
)

// The errors of this package, one for each answer that a door can give.
var (
	// ErrStale means that the action changed after the caller last read it,
	// or was decided already.
	ErrStale = errors.New("the action has changed since it was shown, or is decided already")
	// ErrReason means that a decision lacks its reason or has too long a one.
	ErrReason = errors.New("the reason is missing or longer than 1000 characters")
	// ErrFull means that so much of one inbox waits for a person that no more
	// is taken.
	ErrFull = errors.New("too much of this inbox waits for a person already; propose again when some of it has been decided")
)

// An Action is a proposed effect on the outside world.
type Action struct {
	ID       string
	Project  string
	Kind     string // "email.send"
	Proposer string // a principal, "sandbox:i3k…"
	Inbox    string // id of the inbox it is for, or empty
	Via      string // the door it came through: "mcp", "rest", "smtp"
	Payload  []byte // what an [Executor] of Kind understands; nil in lists
	Digest   []byte // SHA-256 of Payload: what the approver approves
	State    State
	Version  int64  // goes up by one at each change of state
	Rule     string // id of the policy rule that decided, or empty
	Verdict  string // what policy said, for a person
	Created  time.Time
	Decider  string    // a principal; empty while pending
	Decided  time.Time // zero while pending
	Reason   string    // the decider's
	Attempts int64     // executions begun
	Result   string    // what the execution brought, for a person
}

// Hex returns the action's digest as people and doors write it.
func (a *Action) Hex() string { return hex.EncodeToString(a.Digest) }

// A Proposal is what an agent wants to happen.
type Proposal struct {
	Request policy.Request
	Inbox   string
	Via     string
	Payload []byte
}

// A View is an action as a person reviews it. Everything in it may be hostile.
type View struct {
	Title  string
	Fields []Field
	Text   string
	Notes  []string // what the reviewer should be warned of
	Files  []File
}

// A Field is one line of a [View].
type Field struct{ Name, Value string }

// A File is an attachment of a [View].
type File struct {
	Name, Type string
	Size       int64  // bytes
	SHA256     string // hexadecimal
}

// An Outcome is what an execution brought.
type Outcome struct {
	// State is Done, Failed (no effect, or a partial one that Detail tells),
	// Unknown (there may have been an effect), or Approved: there was
	// certainly no effect, and it is to be tried again after After.
	State  State
	Detail string // for a person
	After  time.Duration
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

// A Finisher is an [Executor] that keeps records of its own. Finish is called
// in the transaction that records the outcome of an action.
type Finisher interface {
	Finish(ctx context.Context, tx *store.Tx, a Action, o Outcome) error
}

// Gate is the one way out. It is safe for concurrent use.
type Gate struct {
	log   *slog.Logger
	db    *store.DB
	rules policy.Rules
	exec  map[string]Executor
	wake  chan struct{} // has room for one
}

// NewGate returns a gate that judges by rules. Every kind needs its executor,
// see [Gate.Handle].
func NewGate(log *slog.Logger, db *store.DB, rules policy.Rules) *Gate {
	return &Gate{log: log, db: db, rules: rules, exec: map[string]Executor{}, wake: make(chan struct{}, 1)}
}

// Handle sets the executor for a kind of action. It must not be called after
// [Gate.Run].
func (g *Gate) Handle(kind string, e Executor) { g.exec[kind] = e }

// Propose records an action as part of tx and returns it with the state that
// policy gave it. It has no outside effect.
func (g *Gate) Propose(ctx context.Context, tx *store.Tx, who auth.Principal, p Proposal) (Action, error) {
	digest := sha256.Sum256(p.Payload)
	v := g.rules.Evaluate(p.Request)
	a := Action{
		ID: "act_" + rand.Text(), Project: who.Project, Kind: p.Request.Kind, Proposer: who.String(), Inbox: p.Inbox, Via: p.Via,
		Payload: p.Payload, Digest: digest[:], Version: 1, Rule: v.Rule, Verdict: v.Reason, Created: time.Now().UTC(),
	}
	switch v.Effect {
	case policy.Allow:
		a.State = Approved
	case policy.Deny:
		a.State = Denied
	default:
		a.State = Pending
		if err := room(ctx, tx, a); err != nil {
			return Action{}, err
		}
	}
	_, err := tx.ExecContext(ctx, `insert into action
		(id, project_id, kind, proposer, inbox_id, via, payload, digest, state, version, rule, verdict, created_at, decider, decided_at, reason, attempts, not_before, result)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, '', 0, '', 0, 0, '')`,
		a.ID, a.Project, a.Kind, a.Proposer, a.Inbox, a.Via, a.Payload, a.Digest, a.State, a.Version, a.Rule, a.Verdict, store.Time(a.Created))
	if err != nil {
		return Action{}, fmt.Errorf("insert action: %w", err)
	}
	err = audit.Append(ctx, tx, who, "action.propose", a.ID, audit.Fields{
		"kind": a.Kind, "state": string(a.State), "rule": a.Rule, "verdict": a.Verdict, "digest": a.Hex(),
		"inbox": a.Inbox, "via": a.Via, "to": strings.Join(p.Request.To, ", "),
	})
	return a, err
}

// How much of one inbox may wait for a person. The attack: a sandbox that
// proposes in a loop, until the disk is full or the reviewer gives up.
const (
	maxPending      = 500
	maxPendingBytes = 512 << 20
)

// room returns [ErrFull] if a would be too much.
func room(ctx context.Context, tx *store.Tx, a Action) error {
	var n, size int64
	err := tx.QueryRowContext(ctx, `select count(*), coalesce(sum(length(payload)), 0) from action where state = $1 and project_id = $2 and inbox_id = $3`,
		Pending, a.Project, a.Inbox).Scan(&n, &size)
	if err != nil {
		return fmt.Errorf("count pending actions: %w", err)
	}
	if n >= maxPending || size+int64(len(a.Payload)) > maxPendingBytes {
		return ErrFull
	}
	return nil
}

// A Decision is what a person says about the action that they were shown.
type Decision struct {
	ID      string
	Version int64  // that was shown
	Digest  string // that was shown, hexadecimal
	Approve bool
	Reason  string // needed to reject
}

// Decide records who's decision. It returns [auth.ErrForbidden] unless who is a
// person of the action's project, [ErrStale] if the action is not, or no
// longer, what d says it was, and [store.ErrNotFound].
func (g *Gate) Decide(ctx context.Context, who auth.Principal, d Decision) error {
	if who.Kind != auth.Person {
		// The attack: an agent that approves itself, through any door.
		return fmt.Errorf("%s cannot decide, only a person can: %w", who, auth.ErrForbidden)
	}
	d.Reason = strings.TrimSpace(d.Reason)
	if len(d.Reason) > 1000 || d.Reason == "" && !d.Approve {
		return ErrReason
	}
	to, verb := Denied, "action.reject"
	if d.Approve {
		to, verb = Approved, "action.approve"
	}
	err := g.db.Update(ctx, func(tx *store.Tx) error {
		a, err := g.read(ctx, tx, who, d.ID)
		if err != nil {
			return err
		}
		// What is decided on is what is stored now, and what was shown.
		if sum := sha256.Sum256(a.Payload); !bytes.Equal(sum[:], a.Digest) || a.Hex() != d.Digest {
			return fmt.Errorf("decide on %s: digest: %w", d.ID, ErrStale)
		}
		if err := move(ctx, tx, a.ID, d.Version, Pending, to); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `update action set decider = $1, decided_at = $2, reason = $3 where id = $4`,
			who.String(), store.Time(time.Now()), d.Reason, a.ID)
		if err != nil {
			return fmt.Errorf("record decision: %w", err)
		}
		return audit.Append(ctx, tx, who, verb, a.ID, audit.Fields{"version": strconv.FormatInt(d.Version, 10), "digest": d.Digest, "reason": d.Reason})
	})
	if err == nil {
		g.poke()
	}
	return err
}

// Resolve records what a person found out about an action whose effect is
// unknown: that it happened (Done), that it did not and is given up (Failed),
// or that it did not and is to be tried again (Approved).
func (g *Gate) Resolve(ctx context.Context, who auth.Principal, id string, version int64, to State, reason string) error {
	if who.Kind != auth.Person {
		return fmt.Errorf("%s cannot resolve, only a person can: %w", who, auth.ErrForbidden)
	}
	if to != Done && to != Failed && to != Approved {
		return fmt.Errorf("resolve action as %q: want %s, %s or %s: %w", to, Done, Failed, Approved, auth.ErrInvalid)
	}
	reason = strings.TrimSpace(reason)
	if reason == "" || len(reason) > 1000 {
		return ErrReason
	}
	err := g.db.Update(ctx, func(tx *store.Tx) error {
		a, err := g.read(ctx, tx, who, id)
		if err != nil {
			return err
		}
		if err := move(ctx, tx, a.ID, version, Unknown, to); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `update action set result = $1, not_before = 0 where id = $2`, who.String()+" says: "+reason, id); err != nil {
			return fmt.Errorf("record result: %w", err)
		}
		return audit.Append(ctx, tx, who, "action.resolve", id, audit.Fields{"state": string(to), "reason": reason})
	})
	if err == nil {
		g.poke()
	}
	return err
}

// Recover moves the actions that were executing when the program stopped to
// [Unknown]. It is called once, before [Gate.Run] and while no other program
// executes for the same database.
func (g *Gate) Recover(ctx context.Context) error {
	return g.db.Update(ctx, func(tx *store.Tx) error {
		as, err := list(ctx, tx, `where state = $1 order by created_at, id`, Executing)
		if err != nil {
			return err
		}
		for _, a := range as {
			const why = "the program stopped while this was being executed: it may or may not have happened"
			if err := settle(ctx, tx, a, Outcome{State: Unknown, Detail: why}); err != nil {
				return err
			}
		}
		return nil
	})
}

// Run executes approved actions, oldest first, until ctx is done. What is
// being executed then is finished first. Several Runs may work side by side.
func (g *Gate) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		ran, err := g.RunOne(ctx)
		if err != nil {
			if ctx.Err() != nil {
				break
			}
			g.log.ErrorContext(ctx, "run action", "err", err)
		} else if ran {
			g.poke() // there may be more than one; another Run may be idle
			continue
		}
		select {
		case <-ctx.Done():
		case <-g.wake:
		case <-time.After(time.Second): // those to be tried again, and those that another process approved
		}
	}
	return ctx.Err()
}

// executionTime bounds one execution.
const executionTime = 15 * time.Minute

// RunOne executes the oldest approved action that is due and reports whether
// there was one.
func (g *Gate) RunOne(ctx context.Context) (bool, error) {
	a, err := g.claim(ctx)
	if errors.Is(err, store.ErrNotFound) || errors.Is(err, ErrStale) {
		return false, nil // nothing to do, or another Run was faster
	}
	if err != nil {
		return false, err
	}
	// From here on a shutdown waits: an effect that has begun is recorded.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), executionTime)
	defer cancel()
	o := g.execute(ctx, a)
	ctx = context.WithoutCancel(ctx)
	if f, ok := g.exec[a.Kind].(Finisher); ok {
		err := g.db.Update(ctx, func(tx *store.Tx) error {
			if err := f.Finish(ctx, tx, a, o); err != nil {
				return err
			}
			return settle(ctx, tx, a, o)
		})
		if err == nil {
			return true, nil
		}
		// What happened outside is recorded even where the executor's own
		// records cannot be kept.
		g.log.ErrorContext(ctx, "finish action", "action", a.ID, "err", err)
	}
	err = g.db.Update(ctx, func(tx *store.Tx) error { return settle(ctx, tx, a, o) })
	return true, err
}

func (g *Gate) execute(ctx context.Context, a Action) Outcome {
	e, ok := g.exec[a.Kind]
	if !ok {
		return Outcome{State: Failed, Detail: fmt.Sprintf("there is no executor for kind %q", a.Kind)}
	}
	// The attack: a payload changed in the database after it was approved.
	if sum := sha256.Sum256(a.Payload); !bytes.Equal(sum[:], a.Digest) {
		return Outcome{State: Failed, Detail: "the stored payload is not what was approved; nothing was executed"}
	}
	return e.Execute(ctx, a)
}

// claim marks the next due action as executing, before any effect.
func (g *Gate) claim(ctx context.Context) (a Action, err error) {
	err = g.db.Update(ctx, func(tx *store.Tx) error {
		a, err = scanOne(tx.QueryRowContext(ctx, `select `+columns+`, payload from action
			where state = $1 and not_before <= $2 order by created_at, id limit 1`, Approved, store.Time(time.Now())).Scan)
		if err != nil {
			return err
		}
		if err := move(ctx, tx, a.ID, a.Version, Approved, Executing); err != nil {
			return err
		}
		a.State, a.Version, a.Attempts = Executing, a.Version+1, a.Attempts+1
		if _, err := tx.ExecContext(ctx, `update action set attempts = $1 where id = $2`, a.Attempts, a.ID); err != nil {
			return err
		}
		return audit.Append(ctx, tx, system(a), "action.execute", a.ID, audit.Fields{"attempt": strconv.FormatInt(a.Attempts, 10), "digest": a.Hex()})
	})
	return a, err
}

// settle moves an executing action to what its execution brought.
func settle(ctx context.Context, tx *store.Tx, a Action, o Outcome) error {
	verb := "action." + string(o.State)
	if o.State == Approved {
		verb = "action.retry"
	}
	if err := move(ctx, tx, a.ID, a.Version, Executing, o.State); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `update action set result = $1, not_before = $2 where id = $3`,
		o.Detail, store.Time(time.Now().Add(o.After)), a.ID)
	if err != nil {
		return fmt.Errorf("record result: %w", err)
	}
	return audit.Append(ctx, tx, system(a), verb, a.ID, audit.Fields{"result": o.Detail})
}

func system(a Action) auth.Principal {
	return auth.Principal{Kind: auth.System, ID: "gate", Project: a.Project}
}

// move changes the state of one action, failing with ErrStale unless it is
// still at version and in state from.
func move(ctx context.Context, tx *store.Tx, id string, version int64, from, to State) error {
	ok, err := tx.Changed(ctx,
		`update action set state = $1, version = version + 1 where id = $2 and version = $3 and state = $4`, to, id, version, from)
	if err != nil {
		return fmt.Errorf("move action %s to %s: %w", id, to, err)
	}
	if !ok {
		return fmt.Errorf("move action %s to %s: %w", id, to, ErrStale)
	}
	return nil
}

func (g *Gate) poke() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}
