// Package command decides which programs may start in sandboxes, and records them.
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
// Each answer is recorded before the kernel gets it, so that a server that is killed
// loses no start. Every sandbox has a record, with or without a contract.
//
// Everything fails closed: nothing starts if the rules cannot be read, if a sandbox
// with a contract is not bound, or if the record of a bound sandbox cannot be written.
// This package itself neither starts nor ends processes.
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
	"postern/internal/semaphore"
	"postern/internal/store"
)

const (
	// HoldTime is how long a start is held by default while a person is asked. By
	// default its action waits as long.
	HoldTime = time.Hour
	// pollInterval is how often the action of a held start is read.
	pollInterval = 250 * time.Millisecond
	maxHeld      = 16 // starts of one sandbox that are held at a time
)

// unreadable is the reason for a refusal if the database cannot be read.
const unreadable = "the rules about commands cannot be read at the moment: nothing is started"

// Config is the configuration of an [Admission].
type Config struct {
	// Dir is the directory of the records. No other Admission may use it. New creates
	// it if it does not exist.
	Dir string
	// Hold is how long a start is held while a person is asked; 0 means [HoldTime].
	Hold time.Duration
	// Contract returns the contract of a sandbox, "name@sha256:…", or "" if it has none.
	// It is called once for each sandbox that is not bound. If it returns an error,
	// nothing starts. Nil means to read the sandbox's row.
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
	// Violated is called for each violation of the contract. Calls are concurrent and
	// must not block for long. Nil means that nobody is told.
	Violated func(Violation)
}

// A Violation is a violation of the commands clause of a contract.
type Violation struct {
	Time time.Time
	PID  int32
	What ViolationKind
	Text string // for a person; contains hostile text, with control characters escaped
}

// A ViolationKind says how a commands clause was violated.
type ViolationKind string

// The kinds of violations.
const (
	// Refused is a start that the clause does not allow. The program did not start.
	Refused ViolationKind = "refused"
	// Overtime is a process that exceeded the time of its command. It is being killed.
	// Descendants that have another parent by now may survive, so the receiver must end
	// all processes of the run.
	Overtime ViolationKind = "overtime"
	// Unrecorded means that events of the sandbox were lost, or could not be written.
	Unrecorded ViolationKind = "unrecorded"
)

// Admission decides on the starts of programs in sandboxes and records them. It
// implements [sandbox.Commands], and [oversight.Executor] for
// [postern/internal/policy.KindExec]. It is safe for concurrent use.
type Admission struct {
	log   *slog.Logger
	db    *store.DB
	gate  *oversight.Gate
	rules *connection.Admission // has the rules and switches in force
	conf  Config
	held  *semaphore.PerKey // by sandbox: starts that are held
	// killTime is how long a killed process may take to end. After that the sandbox is
	// stopped.
	killTime time.Duration

	mu       sync.Mutex
	ledgers  map[string]*ledger  // by sandbox
	bindings map[string]*binding // by sandbox
}

var _ sandbox.Commands = (*Admission)(nil)

// A binding is a [Binding] in force.
type binding struct {
	Binding
	name string // of the contract, with its digest
}

// New returns an Admission that applies rules. The caller registers it with gate for
// [postern/internal/policy.KindExec], gives it to the fleet, and runs [Admission.Run].
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
		log: log, db: db, gate: gate, rules: rules, conf: c, held: semaphore.NewPerKey(maxHeld), killTime: 5 * time.Second,
		ledgers: map[string]*ledger{}, bindings: map[string]*binding{},
	}, nil
}

// Bind binds a sandbox to b.Contract until Unbind. Call it before anything that the
// contract restricts can start. If the sandbox is already bound, Bind returns an error
// and changes nothing.
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

// Unbind ends the binding of a sandbox. From then on nothing starts in it.
func (a *Admission) Unbind(sandboxID string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.bindings, sandboxID)
	if l := a.ledgers[sandboxID]; l != nil {
		l.stopTimers()
	}
}

// Record returns the record of the commands of a sandbox, including one that ended some
// days ago. Its error wraps [sandbox.ErrNotFound] if there is none.
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
	if l != nil { // wait until no line is being written
		l.mu.Lock()
		defer l.mu.Unlock()
	}
	r, err := readRecord(a.conf.Dir, sandboxID)
	if l != nil && l.lost > 0 {
		r.Complete = false
	}
	return r, err
}

// Read is [Admission.Record] with a check of permissions: who must be a person or the
// key of the project that the sandbox belongs to.
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
