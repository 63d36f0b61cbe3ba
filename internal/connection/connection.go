// Package connection decides which connections of sandboxes are made: those
// that the sandbox's own lists allow, unless a kill switch or the project's policy
// says otherwise. Where policy asks a person, the connection is held for a while
// and waits as an action of kind [policy.KindConnect].
//
// An allowed connection must not wait for the database: [Admission] keeps what is
// in force in memory and reads it anew in the background. Only a connection that a
// person is asked about reads and writes rows.
//
// What fails, fails closed: where rules or switches cannot be read, nothing
// connects. This package makes no connection itself; package egress does.
package connection

import (
	"context"
	"crypto/sha256"
	"log/slog"
	"slices"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/semaphore"
	"postern/internal/store"
)

const (
	// refreshInterval is how often what is in force is read anew: a rule or a
	// switch takes effect that much later, at most.
	refreshInterval = 500 * time.Millisecond
	// maxAge is how old what is in force may be. Beyond that nothing connects: the
	// database, which could say no, cannot be read.
	maxAge = 5 * time.Second
	// idleTime is how long a project is read after its last connection.
	idleTime = 10 * time.Minute
	// pollInterval is how often the action of a held connection is read.
	pollInterval = 250 * time.Millisecond

	maxHeld   = 16  // connections of one sandbox that are held at a time
	maxPasses = 512 // passes in memory, of all sandboxes
)

// unreadable is the reason of a refusal where the database cannot be read.
const unreadable = "the rules about connections cannot be read at the moment: nothing connects"

// Admission decides about each connection that the lists of a sandbox allow. A
// kill switch refuses it; a rule about [policy.KindConnect] allows or denies it, or
// has a person asked. Without such a rule the lists decide. It is safe for
// concurrent use.
type Admission struct {
	log  *slog.Logger
	db   *store.DB
	book *rulebook.Book
	gate *oversight.Gate
	hold time.Duration
	held *semaphore.PerKey // by sandbox: connections that are held

	attached func() []string                           // may be nil
	changed  func(ctx context.Context, project string) // may be nil

	permits *permit.Register // what people have allowed for a time; may be nil

	mu        sync.RWMutex
	projects  map[string]*inForce   // by project; an entry is replaced, never changed except for used
	passes    map[question]approval // what people approved, until it ends
	permitted map[question]made     // connections that were made under a permit
}

// A question identifies what a person is asked: one sandbox, one destination.
type question struct {
	project, sandbox string
	digest           [sha256.Size]byte // of the payload
}

// An approval is a person's yes to a question.
type approval struct {
	action string // its id
	until  time.Time
	// switchedOn is as in inForce, from before the action was looked for. A switch
	// that was turned on since ends the approval, even if it is off by now.
	switchedOn time.Time
}

// New returns an Admission by the policies in book and the switches of gate. A
// connection that a person is asked about is held for hold; 0 means a minute. Its
// caller registers it with gate for [policy.KindConnect], and runs [Admission.Run].
func New(log *slog.Logger, db *store.DB, book *rulebook.Book, gate *oversight.Gate, hold time.Duration) *Admission {
	if hold <= 0 {
		hold = time.Minute
	}
	return &Admission{
		log: log, db: db, book: book, gate: gate, hold: hold, held: semaphore.NewPerKey(maxHeld),
		projects: map[string]*inForce{}, passes: map[question]approval{}, permitted: map[question]made{},
	}
}

// Names reports whether a rule or a switch of who's project goes by host names.
// Then the name must be read from the connection itself, as an address is not enough.
func (c *Admission) Names(ctx context.Context, who auth.Principal) bool {
	s, err := c.inForce(ctx, who.Project)
	return err != nil || s.byName
}

// Lookup decides whether who may resolve name outside. The attack: a DNS query is
// itself a message. Rules are not evaluated, since the port is not known yet; kill
// switches are.
func (c *Admission) Lookup(ctx context.Context, who auth.Principal, name string) policy.Verdict {
	s, err := c.inForce(ctx, who.Project)
	if err != nil {
		return refused(unreadable)
	}
	return s.switches.verdict(request(who, Destination{Sandbox: who.ID, Template: who.Template, Hosts: []string{name}}))
}

// Permit decides whether who may make the connection to, which its lists allow.
// Where a person is asked it blocks until they decide, the time to hold is over or
// ctx is done. In the latter cases the connection is refused with the id of the
// action, and may be made once that is approved.
func (c *Admission) Permit(ctx context.Context, who auth.Principal, to policy.Connection) policy.Verdict {
	s, err := c.inForce(ctx, who.Project)
	if err != nil {
		return refused(unreadable)
	}
	d := destination(who, to)
	r := request(who, d)
	if v := s.switches.verdict(r); v.Effect != policy.Allow {
		return v
	}
	if s.doc == nil {
		return refused("the project's policy cannot be read: nothing connects until an owner has replaced it")
	}
	if !s.doc.Mentions(policy.KindConnect) {
		return policy.Verdict{Effect: policy.Allow}
	}
	v, matched := s.doc.Match(r)
	if !matched {
		return policy.Verdict{Effect: policy.Allow}
	}
	if v.Effect != policy.Ask {
		return v
	}
	if c.answered(ctx, who, d, v) {
		return policy.Verdict{Effect: policy.Allow, Rule: v.Rule, Reason: "an owner has allowed it for a time"}
	}
	return c.ask(ctx, who, r, d, s.switchedOn)
}

// MayContinue decides whether an open connection, which [Admission.Permit] allowed, may
// go on: a kill switch or a rule that denies ends it. A rule that asks does not,
// since a person would be asked about something that is going on already.
func (c *Admission) MayContinue(ctx context.Context, who auth.Principal, to policy.Connection) policy.Verdict {
	s, err := c.inForce(ctx, who.Project)
	if err != nil {
		return refused(unreadable)
	}
	r := request(who, destination(who, to))
	v := s.switches.verdict(r)
	if v.Effect == policy.Allow && s.doc != nil && s.doc.Mentions(policy.KindConnect) {
		said, ok := s.doc.Match(r)
		switch {
		case ok && said.Effect == policy.Deny:
			return said
		case ok && said.Effect == policy.Ask:
			return c.underPermit(ctx, who, destination(who, to), said)
		}
	}
	return v
}

func refused(reason string) policy.Verdict {
	return policy.Verdict{Effect: policy.Deny, Reason: reason}
}

// destination returns what a person would be asked about: the names that the
// connection may be meant for, or its address where it has none.
func destination(who auth.Principal, to policy.Connection) Destination {
	d := Destination{Sandbox: who.ID, Template: who.Template, Port: int(to.Addr.Port())}
	for _, n := range to.Names {
		if n, err := policy.Name(n); err == nil && !slices.Contains(d.Hosts, n) {
			d.Hosts = append(d.Hosts, n)
		}
	}
	if len(d.Hosts) == 0 {
		d.Hosts = []string{to.Addr.Addr().Unmap().String()}
	}
	slices.Sort(d.Hosts) // the same destination must be the same action
	return d
}
