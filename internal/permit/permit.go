// Package permit keeps what people have allowed sandboxes for a time: permits.
//
// A program in a sandbox that was refused proposes what it needs (hosts, methods,
// paths, for how long, why), as an action of kind [policy.KindPermit]. An owner
// decides, after narrowing it where it asks for too much. The permit then opens
// public addresses by name, beyond the sandbox's lists and the project's ceiling,
// until its time ends or a person ends it:
//
//	Propose ── waits ──┬─ rejected
//	   ▲     Narrow    └─ approved ── permit ──┬─ its time ends
//	   └───────┘                               └─ End
//
// The grants that allow a sandbox the use of a secret for a time are permits as
// well, see [Grant]. So is what an owner allows together with the approval of a request
// or a connection, see [Register.Like].
//
// The package must not open a private address, whatever a person approves. It must
// not decide: a permit without a person's decision is refused. Switches and rules
// about connections (package connection) still apply to what a permit opens. So does the
// contract that binds a sandbox: the wall asks it beside the permits.
package permit

import (
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"postern/internal/contract"
	"postern/internal/outgoing"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// Kind says what a permit allows.
type Kind string

// The kinds of permit.
const (
	Network Kind = "network" // connections and requests to hosts
	Secret  Kind = "secret"  // the use of a secret
	// The next two are made together with an approval, see [Register.Like]. They open
	// nothing: they answer a rule that asks.
	Connection Kind = "connection" // connections to a host and port
	Request    Kind = "request"    // requests with a method to a host and path
)

// Kinds returns the kinds of permits.
func Kinds() []Kind { return []Kind{Network, Secret, Connection, Request} }

var (
	// ErrInvalid means that a proposal cannot be taken. The text names the field and
	// the limit.
	ErrInvalid = errors.New("invalid proposal")
	// ErrWider means that a narrowed proposal allows something that the proposal does
	// not.
	ErrWider = errors.New("a proposal can only be narrowed")
	// ErrNotFound means that there is no such permit, or no such proposal.
	ErrNotFound = store.ErrNotFound
)

// A Permit is what a sandbox, or every sandbox of a project, may do until a time.
type Permit struct {
	ID      string
	Project string
	Sandbox string // empty: every sandbox of the project
	Kind    Kind
	Hosts   []string // "host" or "*.host", lower case
	Methods []string // upper case; empty: every method
	Paths   []string // patterns, see [Proposal]; empty: every path
	Port    uint16   // 0: 443 and 80
	Secret  string   // ID of the secret, for kind [Secret]
	Why     string   // what the proposer said; for kinds [Connection] and [Request] the rule that it answers, see [ByRule]
	Created time.Time
	Until   time.Time
	Action  string // ID of the action by which it was asked for
	Decider string // principal of the person who allowed it
	Ended   time.Time
	EndedBy string // a principal
}

// Holds reports whether p is in force at a time.
func (p *Permit) Holds(now time.Time) bool { return p.Ended.IsZero() && now.Before(p.Until) }

// Plain reports whether p says nothing about requests. Then connections need not be
// inspected.
func (p *Permit) Plain() bool { return len(p.Methods) == 0 && len(p.Paths) == 0 }

// names reports whether p is about host and port. Port 0 means any port.
func (p *Permit) names(host string, port uint16) bool {
	if p.Kind != Network || !slices.ContainsFunc(p.Hosts, func(pattern string) bool { return covers(pattern, host) }) {
		return false
	}
	return p.opens(port)
}

// opens reports whether p is about a port. Port 0 means any port.
func (p *Permit) opens(port uint16) bool {
	return policy.HostPattern{Port: p.Port}.Opens(port)
}

// allows reports whether p allows a request, whichever of its methods a server reads.
// The attack: a permit for POST, and a POST that says in a field that it is a DELETE.
func (p *Permit) allows(r *outgoing.Request) bool {
	if len(p.Methods) > 0 {
		methods, unknown := r.Methods()
		if unknown != "" || slices.ContainsFunc(methods, func(m string) bool { return !slices.Contains(p.Methods, m) }) {
			return false
		}
	}
	return len(p.Paths) == 0 || slices.ContainsFunc(p.Paths, func(pattern string) bool { return matches(pattern, r.Path) })
}

// A Register holds the permits of all projects. It is safe for concurrent use.
type Register struct {
	log  *slog.Logger
	db   *store.DB
	gate *oversight.Gate
	off  bool // no permit opens a connection, and none is proposed

	bounds *contract.Bounds

	mu        sync.RWMutex
	projects  map[string]*inForce
	forgotten int64 // how often forget was called
}

// Config holds the settings of a [Register].
type Config struct {
	// Off turns network permits off: agents cannot propose any, and those that exist
	// open nothing. Permits of kind [Secret] are not affected.
	Off bool
	// Bounds has the contracts that bind sandboxes. Nil: a sandbox that one binds proposes
	// nothing.
	Bounds *contract.Bounds
}

// New returns the Register of db. The gate needs it as the executor of
// [policy.KindPermit].
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, conf Config) *Register {
	return &Register{log: log, db: db, gate: gate, off: conf.Off, bounds: conf.Bounds, projects: map[string]*inForce{}}
}
