package rulebook

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

const (
	// refreshed is how often what [Connections] knows is read anew. A rule or a
	// switch is heeded that much later, at the most.
	refreshed = 500 * time.Millisecond
	// fresh is how old it may be. Beyond that nothing connects: the database
	// that could say no cannot be read.
	fresh = 5 * time.Second
	// unused is for how long the project of a sandbox that connects to nothing
	// is read.
	unused = 10 * time.Minute
	// PassTime is for how long a sandbox may connect where a person let it, and
	// may not ask again where a person did not.
	PassTime = time.Hour
	// again is for how long it may not ask again where nobody said no.
	again = time.Minute
	// waited is how often what is held is looked at.
	waited = 250 * time.Millisecond

	maxWaiting = 16  // connections of one sandbox that are held at a time
	maxAsked   = 20  // actions of one sandbox that wait
	maxPasses  = 512 // that are remembered
)

// Connections has the last word on what the lists of a sandbox allow: a switch
// refuses it, a rule of the policy about [policy.KindConnect] allows, denies or
// has a person asked, for whom the connection is held for a while. Where no rule
// speaks of connections the lists have it. It is safe for concurrent use, and
// asks the database only where a person is asked.
type Connections struct {
	log  *slog.Logger
	db   *store.DB
	book *Book
	gate *oversight.Gate
	hold time.Duration

	attached func() []string                           // may be nil
	changed  func(ctx context.Context, project string) // may be nil

	mu       sync.RWMutex
	projects map[string]*standing // by project; each is replaced, never changed but for used
	waiting  map[string]int       // by sandbox: connections that are held
	passes   map[pass]permission  // what people let through
}

// A standing is what holds in a project, as it was read.
type standing struct {
	version  string           // changes with what follows
	doc      *policy.Document // nil where it cannot be read
	named    bool             // something in it goes by names
	switches []oversight.Switch
	thrown   time.Time // when a switch was last turned on, on still or not
	read     time.Time
	used     time.Time // guarded by Connections.mu
}

// A permission is a person's yes.
type permission struct {
	action string // its id
	until  time.Time
	thrown time.Time // as in standing, before it was looked for: a later switch ends it
}

type pass struct {
	project, sandbox string
	digest           [sha256.Size]byte
}

// A Destination is what a person lets a sandbox connect to: the payload of the
// action.
type Destination struct {
	Sandbox  string   `json:"sandbox"`
	Template string   `json:"template"`
	Hosts    []string `json:"hosts"` // names that it is meant for, or else its address
	Port     int      `json:"port"`
}

// NewConnections returns the last word by book and by gate's switches. A
// connection that a person is asked about is held for hold; 0 means a minute.
// [Connections.Run] keeps what it knows fresh.
func NewConnections(log *slog.Logger, db *store.DB, book *Book, gate *oversight.Gate, hold time.Duration) *Connections {
	if hold <= 0 {
		hold = time.Minute
	}
	return &Connections{
		log: log, db: db, book: book, gate: gate, hold: hold,
		projects: map[string]*standing{}, waiting: map[string]int{}, passes: map[pass]permission{},
	}
}

// Watch has [Connections.Run] read what holds in the projects that attached
// returns, too, and call changed where that has changed, so that connections
// which may not go on can be cut. It must be called before Run.
func (c *Connections) Watch(attached func() []string, changed func(ctx context.Context, project string)) {
	c.attached, c.changed = attached, changed
}

// Run reads what holds in the projects whose sandboxes connect, until ctx is
// done.
func (c *Connections) Run(ctx context.Context) error {
	t := time.NewTicker(refreshed)
	defer t.Stop()
	told := map[string]string{} // by project: the version of its standing that was heeded last
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		used := c.inUse()
		maps.DeleteFunc(told, func(project, _ string) bool { return !slices.Contains(used, project) })
		for _, project := range used {
			s, err := c.read(ctx, project)
			if err != nil {
				if ctx.Err() == nil {
					c.log.ErrorContext(ctx, "read what holds of connections", "project", project, "err", err)
				}
				continue
			}
			if was, ok := told[project]; (!ok || was != s.version) && c.changed != nil {
				c.changed(ctx, project)
			}
			told[project] = s.version
		}
	}
}

// inUse returns the projects whose standing is to be read, and forgets others.
func (c *Connections) inUse() (out []string) {
	if c.attached != nil {
		out = c.attached()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	for project, s := range c.projects {
		switch {
		case slices.Contains(out, project):
		case now.Sub(s.used) > unused:
			delete(c.projects, project)
		default:
			out = append(out, project)
		}
	}
	for p, yes := range c.passes {
		if now.After(yes.until) {
			delete(c.passes, p)
		}
	}
	return out
}

// standing returns what holds in a project.
func (c *Connections) standing(ctx context.Context, project string) (*standing, error) {
	now := time.Now()
	c.mu.RLock()
	s := c.projects[project]
	stale := s == nil || now.Sub(s.read) > fresh
	touch := s != nil && now.Sub(s.used) > unused/10
	c.mu.RUnlock()
	if touch {
		c.mu.Lock()
		s.used = now
		c.mu.Unlock()
	}
	if !stale {
		return s, nil
	}
	return c.read(ctx, project)
}

func (c *Connections) read(ctx context.Context, project string) (*standing, error) {
	now := time.Now()
	s := &standing{read: now, used: now}
	var v Version
	err := c.db.View(ctx, func(tx *store.Tx) (err error) {
		if v, err = active(ctx, tx, project); err != nil {
			return err
		}
		if s.switches, err = c.gate.SwitchesOf(ctx, tx, project); err != nil {
			return err
		}
		s.thrown, err = c.gate.SwitchedOn(ctx, tx, project)
		return err
	})
	if err != nil {
		return nil, err
	}
	if s.doc, err = c.book.document(v); err != nil {
		c.log.ErrorContext(ctx, "read policy", "project", project, "version", v.Number, "err", err)
	}
	s.version = v.Hex()
	for _, w := range s.switches {
		s.version += " " + w.ID
	}
	s.named = s.doc != nil && s.doc.Mentions(policy.KindConnect) || slices.ContainsFunc(s.switches, func(w oversight.Switch) bool { return w.Scope == oversight.ScopeDomain })
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.projects[project]; old != nil {
		if old.read.After(s.read) { // another read was faster, and later
			return old, nil
		}
		s.used = old.used
		if now.Sub(s.used) > unused {
			s.used = now
		}
	}
	c.projects[project] = s
	return s, nil
}

func refused(reason string) policy.Verdict {
	return policy.Verdict{Effect: policy.Deny, Reason: reason}
}

const unknown = "what holds of connections cannot be read at the moment: nothing connects"

// Names reports whether something holds in who's project that goes by names, so
// that the name is to be looked for on the connection itself.
func (c *Connections) Names(ctx context.Context, who auth.Principal) bool {
	s, err := c.standing(ctx, who.Project)
	return err != nil || s.named
}

// Look says whether who may look a name up outside: a question is a message,
// too. Rules are not asked, since no port is known yet; switches are.
func (c *Connections) Look(ctx context.Context, who auth.Principal, name string) policy.Verdict {
	s, err := c.standing(ctx, who.Project)
	if err != nil {
		return refused(unknown)
	}
	return s.stopped(request(who, Destination{Sandbox: who.ID, Template: who.Template, Hosts: []string{name}}))
}

// stopped is the verdict of the switches: deny, or allow.
func (s *standing) stopped(r policy.Request) policy.Verdict {
	for _, w := range s.switches {
		if w.Stops("", r) {
			return refused(w.String())
		}
	}
	return policy.Verdict{Effect: policy.Allow}
}

// Permit says whether who may make connection to, which its lists allow. Where a
// person is asked it waits, as long as ctx and the time to hold last; the
// connection is then refused, with the action that waits, and may be made once
// that is approved.
func (c *Connections) Permit(ctx context.Context, who auth.Principal, to policy.Connection) policy.Verdict {
	s, err := c.standing(ctx, who.Project)
	if err != nil {
		return refused(unknown)
	}
	d := destination(who, to)
	r := request(who, d)
	if v := s.stopped(r); v.Effect != policy.Allow {
		return v
	}
	if s.doc == nil {
		return refused("the project's policy cannot be read: nothing connects until an owner has put that right")
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
	return c.ask(ctx, who, r, d, s.thrown)
}

// Still says whether a connection that Permit allowed may go on: not if a
// switch or a rule stops it by now. Who would be asked by now is not cut off.
func (c *Connections) Still(ctx context.Context, who auth.Principal, to policy.Connection) policy.Verdict {
	s, err := c.standing(ctx, who.Project)
	if err != nil {
		return refused(unknown)
	}
	r := request(who, destination(who, to))
	v := s.stopped(r)
	if v.Effect == policy.Allow && s.doc != nil && s.doc.Mentions(policy.KindConnect) {
		if said, ok := s.doc.Match(r); ok && said.Effect == policy.Deny {
			return said
		}
	}
	return v
}

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
	slices.Sort(d.Hosts) // the same destination is the same action
	return d
}

// request is what rules are asked about a connection: to has its hosts, of
// which several may share the address.
func request(who auth.Principal, d Destination) policy.Request {
	return policy.Request{
		Kind: policy.KindConnect, Via: "link", To: d.Hosts, Sandbox: who.ID, Template: who.Template, Time: time.Now(),
		Detail: map[string]string{"host": d.Hosts[0], "port": strconv.Itoa(d.Port)},
	}
}

// ask asks a person, and waits.
func (c *Connections) ask(ctx context.Context, who auth.Principal, r policy.Request, d Destination, thrown time.Time) policy.Verdict {
	body, err := json.Marshal(d)
	if err != nil { // unreachable: our own type
		return refused(unknown)
	}
	p := pass{who.Project, who.ID, sha256.Sum256(body)}
	c.mu.Lock()
	yes := c.passes[p]
	through := time.Now().Before(yes.until) && yes.thrown.Equal(thrown)
	waiting := c.waiting[who.ID]
	if !through && waiting < maxWaiting {
		c.waiting[who.ID]++
	}
	c.mu.Unlock()
	if through {
		return yes.verdict()
	}
	if waiting >= maxWaiting {
		// The attack: code that opens connections until all that a sandbox may
		// have open are held.
		return refused(fmt.Sprintf("%d connections of this sandbox wait for a person already", maxWaiting))
	}
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.waiting[who.ID]--; c.waiting[who.ID] == 0 {
			delete(c.waiting, who.ID)
		}
	}()
	over := time.NewTimer(c.hold)
	defer over.Stop()
	t := time.NewTicker(waited)
	defer t.Stop()
	for {
		a, err := c.asked(ctx, who, r, p, body)
		switch {
		case ctx.Err() != nil:
			return refused("the sandbox was detached while a person was asked")
		case errors.Is(err, oversight.ErrFull):
			return refused(err.Error())
		case err != nil:
			c.log.ErrorContext(ctx, "ask about connection", "sandbox", who.ID, "err", err)
			return refused("a person decides on it, and cannot be asked at the moment")
		}
		if v, known := c.verdict(a, p, thrown); known {
			return v
		}
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-over.C:
			return refused("a person decides on it (" + a.ID + "): try again once it is approved")
		}
	}
}

func byPerson(a oversight.Action) bool {
	_, ok := a.Person()
	return ok
}

func (y permission) verdict() policy.Verdict {
	return policy.Verdict{Effect: policy.Allow, Reason: "a person has let it connect there until " + y.until.UTC().Format(time.TimeOnly) + " UTC (" + y.action + ")"}
}

// verdict is what an action says by now; known is false while it is open.
func (c *Connections) verdict(a oversight.Action, p pass, thrown time.Time) (v policy.Verdict, known bool) {
	switch a.State {
	case oversight.Done:
		yes := permission{a.ID, a.Settled.Add(PassTime), thrown}
		c.mu.Lock()
		if _, there := c.passes[p]; there || len(c.passes) < maxPasses {
			c.passes[p] = yes
		}
		c.mu.Unlock()
		return yes.verdict(), true
	case oversight.Denied:
		switch {
		case byPerson(a):
			return refused("a person has refused it (" + a.ID + "): " + a.Reason), true
		case a.Reason != "":
			return refused(a.ID + ": " + a.Reason), true
		}
		return refused(a.ID + ": " + a.Verdict), true
	case oversight.Failed, oversight.Cancelled, oversight.Unknown:
		return refused(a.ID + " is " + string(a.State)), true
	case oversight.Scheduled, oversight.Pending, oversight.Approved, oversight.Executing:
	}
	return policy.Verdict{}, false
}

// asked returns the action by which people are asked about a destination: the
// one that waits, or was decided on a while ago, or else a new one.
func (c *Connections) asked(ctx context.Context, who auth.Principal, r policy.Request, p pass, body []byte) (a oversight.Action, err error) {
	err = c.db.View(ctx, func(tx *store.Tx) error {
		a, err = c.last(ctx, tx, who, p)
		return err
	})
	if !errors.Is(err, store.ErrNotFound) {
		return a, err
	}
	err = c.db.Update(ctx, func(tx *store.Tx) error {
		// Another connection may have asked meanwhile.
		if a, err = c.last(ctx, tx, who, p); !errors.Is(err, store.ErrNotFound) {
			return err
		}
		var n int
		err := tx.One(ctx, `select count(*) from action where project_id = $1 and kind = $2 and proposer = $3 and state = $4`,
			[]any{who.Project, policy.KindConnect, who.String(), oversight.Pending}, &n)
		if err != nil {
			return err
		}
		if n >= maxAsked {
			// The attack: a scan of all ports, of which each asks a person.
			return fmt.Errorf("%d destinations of this sandbox wait for a person: %w", n, oversight.ErrFull)
		}
		a, err = c.gate.Propose(ctx, tx, who, oversight.Proposal{Request: r, Via: r.Via, Payload: body})
		return err
	})
	return a, err
}

// last returns the newest action about a destination that still counts, or
// [store.ErrNotFound]: what was let through before a switch stopped it does not.
func (c *Connections) last(ctx context.Context, tx *store.Tx, who auth.Principal, p pass) (oversight.Action, error) {
	var id string
	err := tx.One(ctx, `select id from action where project_id = $1 and kind = $2 and proposer = $3 and digest = $4 order by created_at desc, id limit 1`,
		[]any{who.Project, policy.KindConnect, who.String(), p.digest[:]}, &id)
	if err != nil {
		return oversight.Action{}, err
	}
	a, err := c.gate.Find(ctx, tx, who, id)
	if err != nil {
		return oversight.Action{}, err
	}
	counts := again
	if a.State == oversight.Done || byPerson(a) {
		counts = PassTime
	}
	if !a.Settled.IsZero() && time.Since(a.Settled) > counts {
		return oversight.Action{}, store.ErrNotFound
	}
	if a.State == oversight.Done {
		// A switch that is turned off releases nothing, also not what was let through before.
		over, err := c.gate.StoppedSince(ctx, tx, who.Project, a.Request, a.Settled)
		if err != nil {
			return oversight.Action{}, err
		}
		if over || a.Stopped != "" { // since it was done, or since it was claimed
			return oversight.Action{}, store.ErrNotFound
		}
	}
	return a, nil
}

var (
	_ oversight.Executor  = (*Connections)(nil)
	_ oversight.Recoverer = (*Connections)(nil)
)

// Execute implements [oversight.Executor]. The connection is made by whoever
// waits for it, or tries again; that it may be made is in the action's state.
func (c *Connections) Execute(_ context.Context, a oversight.Action) oversight.Outcome {
	var d Destination
	if err := json.Unmarshal(a.Payload, &d); err != nil || len(d.Hosts) == 0 {
		return oversight.Outcome{State: oversight.Failed, Detail: "the payload cannot be read"}
	}
	return oversight.Outcome{State: oversight.Done, Detail: fmt.Sprintf("sandbox %s may connect to %s for %v", d.Sandbox, d, PassTime)}
}

// Interrupted implements [oversight.Recoverer]: an execution has no effect but
// its outcome.
func (c *Connections) Interrupted(context.Context, *store.Tx, oversight.Action) (oversight.Outcome, error) {
	return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before it was let through; it is tried again"}, nil
}

// String returns d as "name:443", for a person.
func (d Destination) String() string {
	var b bytes.Buffer
	for i, h := range d.Hosts {
		if i > 0 {
			b.WriteString(" or ")
		}
		b.WriteString(net.JoinHostPort(h, strconv.Itoa(d.Port)))
	}
	return b.String()
}

// Show implements [oversight.Executor].
func (c *Connections) Show(a oversight.Action) (oversight.View, error) {
	var d Destination
	if err := json.Unmarshal(a.Payload, &d); err != nil {
		return oversight.View{}, fmt.Errorf("read connection: %w", err)
	}
	v := oversight.View{
		Title:  "Connection to " + d.String(),
		Fields: []oversight.Field{{Name: "To", Value: d.String()}, {Name: "Sandbox", Value: d.Sandbox}, {Name: "Template", Value: d.Template}},
		Text:   fmt.Sprintf("Approved, code in this sandbox may connect there for %v, as often as it likes, and send and read what it likes.", PassTime),
	}
	if len(d.Hosts) > 1 {
		v.Notes = append(v.Notes, "these names share the address, and which of them is meant is not known")
	}
	return v, nil
}
