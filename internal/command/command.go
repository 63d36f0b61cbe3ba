// Package command decides which programs are started in sandboxes, and keeps the record
// of them.
//
// The kernel of each sandbox asks before it starts a program:
//
//	Exec ── the guest itself? ──────────────────────────────────────┐
//	  │                                                             │
//	  ├─ bound by a contract: its commands clause ── no ── refused   │
//	  ├─ kill switches, rules about process.exec ── deny ─ refused   │
//	  ├─ contract or rule asks ── held ─┬─ rejected, expired ─ refused
//	  │                                 └─ approved ─ used ─ allowed │
//	  └─ else ─────────────────────────────────────────── allowed ──┘
//
// The answer is in the sandbox's record before the kernel has it, so that a server that
// is killed loses no start. The record is kept for every sandbox, contract or not.
//
// What fails, fails closed: where rules cannot be read, where a sandbox that has a
// contract is not bound, and where the record of a bound sandbox cannot be written,
// nothing starts. This package starts and ends nothing itself.
package command

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/connection"
	"postern/internal/contract"
	"postern/internal/oversight"
	"postern/internal/sandbox"
	"postern/internal/store"
)

const (
	// HoldTime is how long a start is held by default while a person is asked: as long
	// as its action waits, if no rule says otherwise.
	HoldTime = time.Hour
	// PassTime is how long an approved start may be made, and how long a rejected one is
	// refused without a new question.
	PassTime = time.Hour
	// retryTime is how long a start may not ask again where nobody decided.
	retryTime = time.Minute
	// pollInterval is how often the action of a held start is read.
	pollInterval = 250 * time.Millisecond
	maxHeld      = 16 // starts of one sandbox that are held at a time
	maxPending   = 20 // actions of one sandbox that wait for a person
)

// unreadable is the reason of a refusal where the database cannot be read.
const unreadable = "the rules about commands cannot be read at the moment: nothing is started"

// Config is what an [Admission] needs beside its parts.
type Config struct {
	// Dir is the directory of the records. No other Admission may use it. New creates
	// it if it does not exist.
	Dir string
	// Hold is how long a start is held while a person is asked; 0 means [HoldTime].
	Hold time.Duration
	// Contract returns the contract of a sandbox, "name@sha256:…", or an empty text if
	// it has none. It is asked once for each sandbox that is not bound. An error means
	// that it is not known: nothing is started. Nil means what the sandbox's row says.
	Contract func(ctx context.Context, sandboxID string) (string, error)
}

// A Binding binds a sandbox to a contract.
type Binding struct {
	Contract *contract.Contract
	// Kill ends a process of the sandbox and its descendants. It is called when a
	// command's time is over.
	Kill func(ctx context.Context, pid int32) error
	// Stop ends the sandbox. It is called when a process could not be ended. It must
	// not block for long.
	Stop func(reason string)
	// Violated is told what the sandbox tried against its contract. It is called
	// concurrently, must not block for long, and may be nil.
	Violated func(Violation)
}

// A Violation is what a sandbox tried against the commands clause of its contract.
type Violation struct {
	Time time.Time
	PID  int32
	What Trespass
	Text string // for a person; has hostile text, with control characters visible
}

// Trespass says how a commands clause was violated.
type Trespass string

// The trespasses.
const (
	// Refused is a start that the clause does not allow. The program did not start.
	Refused Trespass = "refused"
	// Overtime is a process that ran until the time of its command was over. Its end is
	// under way. What it has left behind under another parent may run on: whoever is
	// told ends all processes of the run.
	Overtime Trespass = "overtime"
	// Unrecorded means that events of the sandbox were lost, or could not be written.
	Unrecorded Trespass = "unrecorded"
)

// Admission decides on the starts of programs in sandboxes and records them. It
// implements [sandbox.Commands], and [oversight.Executor] for
// [postern/internal/policy.KindExec]. It is safe for concurrent use.
type Admission struct {
	log   *slog.Logger
	db    *store.DB
	gate  *oversight.Gate
	rules *connection.Admission // has what is in force in memory
	conf  Config
	// killTime is how long a process may take to end once it was killed. After it the
	// sandbox is stopped.
	killTime time.Duration

	mu       sync.Mutex
	ledgers  map[string]*ledger  // by sandbox
	bindings map[string]*binding // by sandbox
	held     map[string]int      // by sandbox: starts that are held
}

var _ sandbox.Commands = (*Admission)(nil)

// A binding is a [Binding] in force.
type binding struct {
	Binding
	name string // of the contract, with its digest
}

// New returns an Admission by what rules has in memory. Its caller registers it with
// gate for [postern/internal/policy.KindExec], gives it to the fleet, and runs
// [Admission.Run].
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, rules *connection.Admission, c Config) (*Admission, error) {
	if c.Hold <= 0 {
		c.Hold = HoldTime
	}
	if c.Contract == nil {
		c.Contract = func(ctx context.Context, id string) (name string, err error) {
			err = db.View(ctx, func(tx *store.Tx) error {
				return tx.One(ctx, `select contract from sandbox where id = $1`, []any{id}, &name)
			})
			return name, err
		}
	}
	if err := os.MkdirAll(c.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of records of commands: %w", err)
	}
	return &Admission{
		log: log, db: db, gate: gate, rules: rules, conf: c, killTime: 5 * time.Second,
		ledgers: map[string]*ledger{}, bindings: map[string]*binding{}, held: map[string]int{},
	}, nil
}

// Bind binds a sandbox to b.Contract, until Unbind. It must be called before anything
// that the contract is about can start. A sandbox that is bound already stays bound to
// what it was, and Bind returns an error.
func (a *Admission) Bind(sandboxID string, b Binding) error {
	if b.Contract == nil || b.Kill == nil || b.Stop == nil {
		return fmt.Errorf("bind sandbox %s: a contract, Kill and Stop are needed", sandboxID)
	}
	name := b.Contract.Name + "@" + b.Contract.Digest()
	l, err := a.ledger(sandboxID)
	if err != nil {
		return fmt.Errorf("bind sandbox %s: %w", sandboxID, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.bindings[sandboxID] != nil {
		return fmt.Errorf("bind sandbox %s: it is bound already", sandboxID)
	}
	if err := l.bind(name, time.Now()); err != nil {
		return fmt.Errorf("bind sandbox %s: %w", sandboxID, err)
	}
	a.bindings[sandboxID] = &binding{b, name}
	return nil
}

// Unbind ends the binding of a sandbox. While the sandbox lives, nothing more starts
// in it.
func (a *Admission) Unbind(sandboxID string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.bindings, sandboxID)
	if l := a.ledgers[sandboxID]; l != nil {
		l.stopTimers()
	}
}

// Record returns the record of the commands of a sandbox, also of one that has ended
// some days ago. Its error wraps [sandbox.ErrNotFound] if there is none.
func (a *Admission) Record(ctx context.Context, sandboxID string) (Record, error) {
	if err := ctx.Err(); err != nil {
		return Record{}, err
	}
	if !idPattern().MatchString(sandboxID) {
		return Record{}, fmt.Errorf("sandbox %q: %w", sandboxID, sandbox.ErrNotFound)
	}
	a.mu.Lock()
	l := a.ledgers[sandboxID]
	a.mu.Unlock()
	if l != nil { // not while a line is written
		l.mu.Lock()
		defer l.mu.Unlock()
	}
	r, err := readRecord(a.conf.Dir, sandboxID)
	if l != nil && l.failed {
		r.Complete = false
	}
	return r, err
}

// Read is [Admission.Record] for a caller: who must be a person or the key of the
// project that the sandbox belongs to.
func (a *Admission) Read(ctx context.Context, who auth.Principal, sandboxID string) (Record, error) {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return Record{}, fmt.Errorf("%s may not read records of commands: %w", who, auth.ErrForbidden)
	}
	var n int
	err := a.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from sandbox where id = $1 and project_id = $2`, []any{sandboxID, who.Project}, &n)
	})
	if err != nil {
		return Record{}, fmt.Errorf("find sandbox: %w", err)
	}
	if n == 0 {
		return Record{}, fmt.Errorf("sandbox %q: %w", sandboxID, sandbox.ErrNotFound)
	}
	return a.Record(ctx, sandboxID)
}
