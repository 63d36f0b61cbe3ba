package oversight

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// A Scope is the range of what a [Switch] stops.
type Scope string

// The scopes.
const (
	ScopeInbox      Scope = "inbox"      // actions of one inbox; the target is its id
	ScopeCapability Scope = "capability" // one kind of action; the target is the kind, "email.send"
	ScopeDomain     Scope = "domain"     // actions to a domain or its subdomains; the target is the domain
	ScopeProject    Scope = "project"    // all actions of one project
	ScopeEverything Scope = "everything" // all actions of all projects; only the operator may use it
)

// Scopes lists the scopes, the narrowest first.
var Scopes = []Scope{ScopeInbox, ScopeCapability, ScopeDomain, ScopeProject, ScopeEverything}

// A Switch stops actions at once. Approved actions are denied when it is turned on.
// While it is on, new proposals are denied, pending actions cannot be approved, and
// no further part of an action in execution begins. Turning it off restores nothing
// that it denied.
type Switch struct {
	ID      string
	Project string // empty for everything
	Scope   Scope
	Target  string // see the scopes; empty for project and everything
	Reason  string
	By      string // a principal
	At      time.Time
	Until   time.Time // when it ends; zero means when it is turned off
	Stopped int64     // approved actions that were denied when it was turned on
}

// String returns what s stops and why, for people and for proposers.
func (s Switch) String() string {
	what := string(s.Scope)
	if s.Target != "" {
		what += " " + s.Target
	}
	return "stopped by the kill switch for " + what + ": " + s.Reason
}

// Stops reports whether s stops an action with request r, of the inbox with this id
// or of none.
func (s Switch) Stops(inbox string, r policy.Request) bool {
	switch s.Scope {
	case ScopeInbox:
		return s.Target == inbox
	case ScopeCapability:
		return s.Target == string(r.Kind)
	case ScopeDomain:
		for _, to := range r.To {
			host, ok := policy.Host(to[strings.LastIndexByte(to, '@')+1:])
			// What is not a valid name cannot be compared with the target: fail closed.
			if !ok || host == s.Target || strings.HasSuffix(host, "."+s.Target) {
				return true
			}
		}
		return false
	case ScopeProject, ScopeEverything:
		return true
	}
	return true // unreachable, as SwitchOn refuses other scopes; fail closed
}

// A Stopper is an [Executor] with more to do when a switch is turned on, for example
// to lower modes or to cut connections. Stopped is called once for each executor in
// the transaction that turns s on; its error undoes that.
type Stopper interface {
	Stopped(ctx context.Context, tx *store.Tx, who auth.Principal, s Switch) error
}

// SwitchOn turns on a switch with s's Scope, Target, Reason and Until, and returns it
// as it is stored. Who must decide; for [ScopeEverything] who must be the operator.
func (g *Gate) SwitchOn(ctx context.Context, who auth.Principal, s Switch) (Switch, error) {
	if !who.Decides() {
		return Switch{}, fmt.Errorf("%s cannot stop anything, only a person who reviews can: %w", who, auth.ErrForbidden)
	}
	s.Target, s.Reason = strings.TrimSpace(s.Target), strings.TrimSpace(s.Reason)
	now := time.Now()
	switch s.Scope {
	case ScopeInbox:
		if s.Target == "" || len(s.Target) > 200 {
			return Switch{}, fmt.Errorf("turn switch on: target: name the %s: %w", s.Scope, auth.ErrInvalid)
		}
	case ScopeCapability:
		// A switch for an unknown kind would stop nothing, although the person who
		// turned it on believes that it does.
		s.Target = strings.ToLower(s.Target)
		if kind := policy.Kind(s.Target); g.exec[kind] == nil && !kind.Known() {
			return Switch{}, fmt.Errorf("turn switch on: target: want a kind of action, one of %s: %w", policy.JoinKinds(policy.Kinds()), auth.ErrInvalid)
		}
	case ScopeDomain:
		name, ok := policy.Host(strings.Trim(s.Target, ". "))
		s.Target = name
		if !ok || len(s.Target) > 253 || strings.ContainsAny(s.Target, "@*/: ") {
			return Switch{}, fmt.Errorf("turn switch on: target: name a domain, such as example.com: %w", auth.ErrInvalid)
		}
	case ScopeProject, ScopeEverything:
		// A target means that the caller wants a narrower scope.
		if s.Target != "" {
			return Switch{}, fmt.Errorf("turn switch on: target: a switch of the %s has none: %w", s.Scope, auth.ErrInvalid)
		}
	default:
		return Switch{}, fmt.Errorf("turn switch on: scope: want one of %v: %w", Scopes, auth.ErrInvalid)
	}
	switch {
	case s.Scope == ScopeEverything && !who.Operator:
		return Switch{}, fmt.Errorf("%s cannot stop other projects, only the operator at the machine can: %w", who, auth.ErrForbidden)
	case s.Reason == "" || len(s.Reason) > 1000:
		return Switch{}, ErrReason
	case !s.Until.IsZero() && !s.Until.After(now):
		return Switch{}, fmt.Errorf("turn switch on: until: has passed: %w", auth.ErrInvalid)
	}
	s.Reason, s.Target = cut(s.Reason, 1000), cut(s.Target, 253)
	s.ID, s.Project, s.By, s.At, s.Until = "swi_"+rand.Text(), who.Project, who.String(), stored(now), stored(s.Until)
	if s.Scope == ScopeEverything {
		s.Project = ""
	}
	err := g.db.UpdateIn(ctx, store.Project(s.Project), func(tx *store.Tx) (err error) { // of everything: all
		if s.Stopped, err = g.stopAll(ctx, tx, s); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `insert into kill_switch (id, project_id, scope, target, reason, person, at, until_at, off_at, off_by, stopped)
			values ($1, $2, $3, $4, $5, $6, $7, $8, 0, '', $9)`, s.ID, s.Project, s.Scope, s.Target, s.Reason, s.By, store.Time(s.At), store.Time(s.Until), s.Stopped)
		if err != nil {
			return fmt.Errorf("turn switch on: %w", err)
		}
		if err := tx.Seal(ctx, SealedSwitches(), `id = $1`, s.ID); err != nil {
			return err
		}
		f := audit.Fields{"scope": string(s.Scope), "target": s.Target, "reason": s.Reason, "stopped": strconv.FormatInt(s.Stopped, 10)}
		if !s.Until.IsZero() {
			f["until"] = s.Until.Format(time.RFC3339)
		}
		if err := audit.Append(ctx, tx, who, audit.SwitchOn, s.ID, f); err != nil {
			return err
		}
		done := map[Stopper]bool{} // one executor may serve several kinds
		for _, kind := range slices.Sorted(maps.Keys(g.exec)) {
			e := g.exec[kind]
			if st, ok := e.(Stopper); ok && !done[st] {
				done[st] = true
				if err := st.Stopped(ctx, tx, who, s); err != nil {
					return fmt.Errorf("turn switch on: %w", err)
				}
			}
		}
		return g.switched(ctx, tx, s, true)
	})
	if err != nil {
		return Switch{}, err
	}
	return s, nil
}

// stopAll denies the approved actions that s stops, and marks those in execution, so
// that no further part of them begins. It returns how many it denied.
func (g *Gate) stopAll(ctx context.Context, tx *store.Tx, s Switch) (n int64, err error) {
	// A page at a time: any number of actions may wait for their time, each with up
	// to maxContext.
	var at int64
	for id := ""; ; {
		as, err := list(ctx, tx, `where state in ($1, $2, $3) and (project_id = $4 or $4 = '') and (created_at > $5 or created_at = $5 and id > $6)
			order by created_at, id limit $7`, Approved, Executing, Unknown, s.Project, at, id, g.page)
		if err != nil {
			return 0, err
		}
		for _, a := range as {
			denied, err := g.stopOne(ctx, tx, s, a)
			if err != nil {
				return 0, err
			}
			if denied {
				n++
			}
		}
		if len(as) < g.page {
			return n, nil
		}
		at, id = store.Time(as[len(as)-1].Created), as[len(as)-1].ID
	}
}

// stopOne is [Gate.stopAll] for one action, and reports whether it was denied.
func (g *Gate) stopOne(ctx context.Context, tx *store.Tx, s Switch, a Action) (denied bool, err error) {
	if !s.Stops(a.Inbox, a.Request) {
		return false, nil
	}
	from := a.State
	a, err = g.advance(ctx, tx, a, switched{why: s.String(), now: time.Now()})
	switch {
	case errors.Is(err, errStays):
		return false, nil
	case errors.Is(err, ErrTampered):
		_, err = g.unlessTrusted(ctx, tx, a.ID, err)
		return false, err
	case err != nil:
		return false, fmt.Errorf("stop action %s: %w", a.ID, err)
	case from != Approved:
		return false, nil // its execution ends it
	}
	return true, g.refused(ctx, tx, a, audit.ActionStop)
}

// refused records that the gate ended an action, and why.
func (g *Gate) refused(ctx context.Context, tx *store.Tx, a Action, verb audit.Verb) error {
	if err := enter(ctx, tx, system(a), verb, a, audit.Fields{"state": string(a.State), "reason": a.Reason, "digest": a.Hex()}); err != nil {
		return err
	}
	return g.moved(ctx, tx, a)
}

// SwitchOff turns a switch off. What it denied stays denied. Who must manage the
// project; for [ScopeEverything] who must be the operator.
func (g *Gate) SwitchOff(ctx context.Context, who auth.Principal, id string) error {
	if !who.Manages() {
		return fmt.Errorf("%s cannot turn a switch off, only an owner can: %w", who, auth.ErrForbidden)
	}
	turn := store.Project(who.Project)
	if who.Operator { // it may be of everything
		turn = store.All()
	}
	return g.db.UpdateIn(ctx, turn, func(tx *store.Tx) error {
		s := Switch{ID: id}
		err := tx.One(ctx, `select project_id, scope, target, reason from kill_switch where id = $1 and (project_id = $2 or project_id = '')`,
			[]any{id, who.Project}, &s.Project, &s.Scope, &s.Target, &s.Reason)
		if err != nil {
			return fmt.Errorf("switch %s: %w", id, err)
		}
		if s.Project == "" && !who.Operator {
			return fmt.Errorf("%s cannot turn off a switch of other projects, only the operator at the machine can: %w", who, auth.ErrForbidden)
		}
		changed, err := tx.Changed(ctx, `update kill_switch set off_at = $1, off_by = $2 where id = $3 and off_at = 0`, store.Time(time.Now()), who.String(), id)
		if err != nil {
			return err
		}
		// A switch that was turned off in the database stays on until it is turned off here.
		genuine, err := tx.Holding(ctx, SealedSwitches(), `id = $1`, id)
		if err != nil || !changed && genuine { // it is off already
			return err
		}
		if err := tx.Seal(ctx, SealedSwitches(), `id = $1`, id); err != nil {
			return err
		}
		if err := audit.Append(ctx, tx, who, audit.SwitchOff, id, nil); err != nil {
			return err
		}
		return g.switched(ctx, tx, s, false)
	})
}

// Switches returns the switches that are on for who's project, newest first. Who must
// be a person.
func (g *Gate) Switches(ctx context.Context, who auth.Principal) (out []Switch, err error) {
	if who.Kind != auth.Person {
		return nil, fmt.Errorf("%s may not see switches, only a person may: %w", who, auth.ErrForbidden)
	}
	err = g.db.View(ctx, func(tx *store.Tx) error {
		out, err = switches(ctx, tx, who.Project)
		return err
	})
	return out, err
}

// SwitchesOf returns the switches that are on for a project, newest first, as part of
// tx. It checks no principal: it is for the parts of this program that enforce them.
func (g *Gate) SwitchesOf(ctx context.Context, tx *store.Tx, project string) ([]Switch, error) {
	return switches(ctx, tx, project)
}

// SwitchedOn returns when a switch of a project, or of everything, was last turned on,
// whether it is still on or not; zero if none ever was.
func (g *Gate) SwitchedOn(ctx context.Context, tx *store.Tx, project string) (time.Time, error) {
	var at int64
	if err := tx.One(ctx, `select coalesce(max(at), 0) from kill_switch where project_id in ($1, '')`, []any{project}, &at); err != nil {
		return time.Time{}, fmt.Errorf("read switches: %w", err)
	}
	return store.FromTime(at), nil
}

// StoppedSince reports whether a switch that stops an action with request r, of no
// inbox, was turned on in a project since a time, whether it is still on or not.
func (g *Gate) StoppedSince(ctx context.Context, tx *store.Tx, project string, r policy.Request, since time.Time) (bool, error) {
	return g.InboxStoppedSince(ctx, tx, project, "", r, since)
}

// InboxStoppedSince is [Gate.StoppedSince] for an action of an inbox.
func (g *Gate) InboxStoppedSince(ctx context.Context, tx *store.Tx, project, inbox string, r policy.Request, since time.Time) (bool, error) {
	out, err := store.List(ctx, tx, scanSwitch, `select `+switchColumns+` from kill_switch where project_id in ($1, '') and at >= $2`, project, store.Time(since))
	if err != nil {
		return false, fmt.Errorf("read switches: %w", err)
	}
	return slices.ContainsFunc(out, func(s Switch) bool { return s.Stops(inbox, r) }), nil
}

const switchColumns = `id, project_id, scope, target, reason, person, at, until_at, stopped`

func scanSwitch(row func(...any) error) (s Switch, err error) {
	var at, until int64
	err = row(&s.ID, &s.Project, &s.Scope, &s.Target, &s.Reason, &s.By, &at, &until, &s.Stopped)
	s.At, s.Until = store.FromTime(at), store.FromTime(until)
	return s, err
}

func switches(ctx context.Context, tx *store.Tx, project string) (out []Switch, err error) {
	rows, err := tx.Rows(ctx, SealedSwitches(), false, `project_id in ($1, '') order by at desc, id`, project)
	if err != nil {
		return nil, fmt.Errorf("list switches: %w", err)
	}
	now := store.Time(time.Now())
	for _, r := range rows {
		text := func(column string) string { s, _ := r.Values[column].(string); return s }
		number := func(column string) int64 { n, _ := r.Values[column].(int64); return n }
		switch until := number("until_at"); {
		case !r.Holds:
			// The attack: somebody who can write the database turns a switch off there, ends
			// it, or changes what it stops. A changed switch stops its whole project.
			out = append(out, Switch{ID: text("id"), Project: project, Scope: ScopeProject, Reason: "its row was changed in the database behind the server's back"})
		case number("off_at") == 0 && (until == 0 || until > now):
			out = append(out, Switch{
				ID: text("id"), Project: text("project_id"), Scope: Scope(text("scope")), Target: text("target"), Reason: text("reason"),
				By: text("person"), At: store.FromTime(number("at")), Until: store.FromTime(until), Stopped: number("stopped"),
			})
		}
	}
	return out, nil
}

// SealedSwitches is the table of kill switches, see [store.Sealed].
func SealedSwitches() store.Sealed {
	return store.Sealed{Table: "kill_switch", Key: []string{"id"}}
}

// Stopped returns a switch that is on and stops an action with request r, of the inbox
// with this id or of none, and whether there is one.
func (g *Gate) Stopped(ctx context.Context, tx *store.Tx, project, inbox string, r policy.Request) (Switch, bool, error) {
	list, err := switches(ctx, tx, project)
	if err != nil {
		return Switch{}, false, err
	}
	for _, s := range list {
		if s.Stops(inbox, r) {
			return s, true, nil
		}
	}
	return Switch{}, false, nil
}

// stop returns why a switch stops an action with request r, or "".
func (g *Gate) stop(ctx context.Context, tx *store.Tx, project, inbox string, r policy.Request) (string, error) {
	s, on, err := g.Stopped(ctx, tx, project, inbox, r)
	if err != nil || !on {
		return "", err
	}
	return s.String(), nil
}
