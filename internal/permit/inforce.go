package permit

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/outgoing"
	"postern/internal/policy"
	"postern/internal/store"
)

const (
	// refreshInterval is how often the permits that hold are read anew: an end takes
	// effect that much later, at most.
	refreshInterval = 500 * time.Millisecond
	// maxAge is how old what was read may be. Beyond that no permit holds: the
	// database, which could say that it was ended, cannot be read.
	maxAge = 5 * time.Second
	// idleTime is how long a project is read after its last connection.
	idleTime = 10 * time.Minute
	// maxHolding bounds the permits of one project that are in force at a time.
	maxHolding = 1000
)

// An inForce is what holds in a project, as it was read. It is never changed except
// for used.
type inForce struct {
	permits []Permit
	read    time.Time
	used    time.Time // guarded by Register.mu
}

// version is another text whenever other permits hold.
func (s *inForce) version(now time.Time) string {
	var b strings.Builder
	for i := range s.permits {
		if s.permits[i].Holds(now) {
			b.WriteString(s.permits[i].ID)
		}
	}
	return b.String()
}

// Allows decides on a connection of the sandbox who to a public address that host
// resolved to. Port 0 means any port: then it is about looking the name up. An empty
// host asks whether there is a permit for any host. Inspect means that every request on
// the connection must be asked about with [Register.Find]; a caller that cannot do that
// must refuse the connection.
func (r *Register) Allows(ctx context.Context, who auth.Principal, host string, port uint16) (v policy.Verdict, inspect bool) {
	var best *Permit
	for p := range r.holding(ctx, who) {
		if p.names(host, port) || host == "" && p.opens(port) {
			best = p
			if p.Plain() {
				break
			}
		}
	}
	if best == nil {
		return policy.Verdict{Effect: policy.Deny, Reason: "no permit names " + host}, false
	}
	return best.verdict(), !best.Plain()
}

// Find decides on a request of the sandbox who, to a host that only permits open. One
// permit must allow it, with each method that a server could read from it.
func (r *Register) Find(ctx context.Context, who auth.Principal, q *outgoing.Request) policy.Verdict {
	for p := range r.holding(ctx, who) {
		if p.names(q.Host, q.Port) && p.allows(q) {
			return p.verdict()
		}
	}
	methods, unknown := q.Methods()
	reason := "no permit allows " + strings.Join(methods, " and ") + " of this path at " + q.Host
	switch {
	case unknown != "":
		reason += ": a server could read another method from the request, since " + unknown
	case len(methods) > 1:
		reason += ": servers may read each of these methods from the request"
	}
	return policy.Verdict{Effect: policy.Deny, Reason: reason}
}

// Holding returns the permit by which the sandbox who may use a secret, if one is in
// force.
func (r *Register) Holding(ctx context.Context, who auth.Principal, secret string) (Permit, bool) {
	if secret == "" {
		return Permit{}, false
	}
	for p := range r.all(ctx, who) {
		if p.Kind == Secret && p.Secret == secret {
			return *p, true
		}
	}
	return Permit{}, false
}

func (p *Permit) verdict() policy.Verdict {
	who, _ := strings.CutPrefix(p.Decider, string(auth.Person)+":")
	return policy.Verdict{Effect: policy.Allow, Rule: p.ID, Reason: who + " has allowed it until " + p.Until.Format(time.RFC3339) + " (" + p.ID + ")"}
}

// holding returns the network permits that hold for the sandbox who.
func (r *Register) holding(ctx context.Context, who auth.Principal) func(func(*Permit) bool) {
	if r.off {
		return func(func(*Permit) bool) {}
	}
	return func(yield func(*Permit) bool) {
		for p := range r.all(ctx, who) {
			if p.Kind == Network && !yield(p) {
				return
			}
		}
	}
}

// all returns the permits that hold for the sandbox who.
func (r *Register) all(ctx context.Context, who auth.Principal) func(func(*Permit) bool) {
	return func(yield func(*Permit) bool) {
		if who.Kind != auth.Sandbox || who.ID == "" || who.Project == "" {
			return
		}
		s, err := r.inForce(ctx, who.Project)
		if err != nil {
			return // fail closed
		}
		now := time.Now()
		for i := range s.permits {
			p := &s.permits[i]
			if p.Holds(now) && (p.Sandbox == "" || p.Sandbox == who.ID) && !yield(p) {
				return
			}
		}
	}
}

// Run keeps what holds up to date in the projects whose sandboxes connect, and calls
// changed where other permits hold than before, until ctx is done. Attached returns
// the projects that have sandboxes.
func (r *Register) Run(ctx context.Context, attached func() []string, changed func(ctx context.Context, project string)) error {
	t := time.NewTicker(refreshInterval)
	defer t.Stop()
	reported := map[string]string{} // by project: the version that changed was called with last
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		used := r.inUse(attached())
		maps.DeleteFunc(reported, func(project, _ string) bool { return !slices.Contains(used, project) })
		for _, project := range used {
			now := time.Now()
			s, err := r.read(ctx, project)
			if err != nil {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				r.log.ErrorContext(ctx, "read permits", "project", project, "err", err)
				if s = r.kept(project); s == nil || now.Sub(s.read) > maxAge {
					s = &inForce{} // none holds any more
				}
			}
			version := s.version(now)
			if was, ok := reported[project]; !ok || was != version {
				changed(ctx, project)
			}
			reported[project] = version
		}
	}
}

func (r *Register) kept(project string) *inForce {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.projects[project]
}

// forget has a project read anew when it is needed next.
func (r *Register) forget(project string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.projects, project)
	r.forgotten++
}

// inUse returns the projects to read, and forgets idle ones.
func (r *Register) inUse(attached []string) []string {
	out := slices.Clone(attached)
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for project, s := range r.projects {
		switch {
		case slices.Contains(out, project):
		case now.Sub(s.used) > idleTime:
			delete(r.projects, project)
		default:
			out = append(out, project)
		}
	}
	return out
}

// inForce returns what holds in a project, from memory if it is not older than
// maxAge.
func (r *Register) inForce(ctx context.Context, project string) (*inForce, error) {
	now := time.Now()
	r.mu.RLock()
	s := r.projects[project]
	stale := s == nil || now.Sub(s.read) > maxAge
	touch := s != nil && now.Sub(s.used) > idleTime/10 // seldom, since it takes the lock for writing
	r.mu.RUnlock()
	if touch {
		r.mu.Lock()
		s.used = now
		r.mu.Unlock()
	}
	if !stale {
		return s, nil
	}
	return r.read(ctx, project)
}

// read reads what holds in a project, and keeps it.
func (r *Register) read(ctx context.Context, project string) (*inForce, error) {
	r.mu.RLock()
	forgotten := r.forgotten
	r.mu.RUnlock()
	s, err := r.look(ctx, project)
	if err != nil {
		return nil, err
	}
	return r.keep(project, s, forgotten), nil
}

// look reads what holds in a project. Rows without a valid seal are left out.
func (r *Register) look(ctx context.Context, project string) (*inForce, error) {
	now := time.Now()
	s := &inForce{read: now, used: now}
	err := r.db.View(ctx, func(tx *store.Tx) error {
		const where = `project_id = $1 and ended_at = 0 and until_at > $2`
		permits, err := store.List(ctx, tx, scan, `select `+columns+` from permit where `+where+` order by created_at desc, id limit $3`, project, store.Time(now), maxHolding)
		if err != nil || len(permits) == 0 {
			return err
		}
		rows, err := tx.Rows(ctx, Sealed(), false, where, project, store.Time(now))
		if err != nil {
			return err
		}
		genuine := map[string]bool{}
		for _, row := range rows {
			if id, ok := row.Values["id"].(string); ok && row.Holds {
				genuine[id] = true
			}
		}
		s.permits = slices.DeleteFunc(permits, func(p Permit) bool { return !genuine[p.ID] })
		return nil
	})
	return s, err
}

// keep keeps what [Register.look] has read, after r.forgotten was as given, and returns
// the newest that is known.
func (r *Register) keep(project string, s *inForce, forgotten int64) *inForce {
	r.mu.Lock()
	defer r.mu.Unlock()
	// A permit may have ended since the snapshot. Whoever asks next must learn of that.
	if r.forgotten != forgotten {
		return s
	}
	if old := r.projects[project]; old != nil {
		if old.read.After(s.read) { // another read began later and was faster
			return old
		}
		s.used = old.used
		if s.read.Sub(s.used) > idleTime {
			s.used = s.read
		}
	}
	r.projects[project] = s
	return s
}
