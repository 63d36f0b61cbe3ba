package connection

import (
	"context"
	"maps"
	"slices"
	"time"

	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/rulebook"
	"postern/internal/store"
)

// An inForce is what is in force in a project, as it was read.
type inForce struct {
	version  string           // another text whenever doc or switches change
	doc      *policy.Document // nil where it cannot be read
	byName   bool             // a rule or a switch goes by host names
	switches switches
	// switchedOn is when a switch was last turned on, whether it is still on or not.
	switchedOn time.Time
	read       time.Time
	used       time.Time // guarded by Admission.mu
}

// InForce is what is in force in a project, for other parts that decide on what its
// sandboxes do.
type InForce struct {
	Policy     *policy.Document   // nil where it cannot be read
	Switches   []oversight.Switch // those that are on; the caller must not change them
	SwitchedOn time.Time          // when a switch was last turned on, whether it is still on or not
}

// Stopped returns deny if one of the switches stops r, else allow.
func (f InForce) Stopped(r policy.Request) policy.Verdict { return switches(f.Switches).verdict(r) }

// InForce returns what is in force in a project, from memory. An error means that it
// cannot be read: then nothing must be allowed.
func (c *Admission) InForce(ctx context.Context, project string) (InForce, error) {
	s, err := c.inForce(ctx, project)
	if err != nil {
		return InForce{}, err
	}
	return InForce{s.doc, s.switches, s.switchedOn}, nil
}

// switches are the kill switches of a project that are on.
type switches []oversight.Switch

// verdict returns deny if one of the switches stops r, else allow.
func (on switches) verdict(r policy.Request) policy.Verdict {
	for _, s := range on {
		if s.Stops("", r) {
			return refused(s.String())
		}
	}
	return policy.Verdict{Effect: policy.Allow}
}

// Watch has [Admission.Run] also read the projects that attached returns, and call
// changed where what is in force has changed, so that open connections can be cut.
// It must be called before Run.
func (c *Admission) Watch(attached func() []string, changed func(ctx context.Context, project string)) {
	c.attached, c.changed = attached, changed
}

// Run keeps what is in force up to date, in the projects whose sandboxes connect,
// until ctx is done.
func (c *Admission) Run(ctx context.Context) error {
	t := time.NewTicker(refreshInterval)
	defer t.Stop()
	reported := map[string]string{} // by project: the version that changed was called with last
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
		used := c.inUse()
		maps.DeleteFunc(reported, func(project, _ string) bool { return !slices.Contains(used, project) })
		for _, project := range used {
			s, err := c.read(ctx, project)
			if err != nil {
				if ctx.Err() == nil {
					c.log.ErrorContext(ctx, "read rules about connections", "project", project, "err", err)
				}
				continue
			}
			if was, ok := reported[project]; (!ok || was != s.version) && c.changed != nil {
				c.changed(ctx, project)
			}
			reported[project] = s.version
		}
	}
}

// inUse returns the projects to read, and forgets idle ones and ended approvals.
func (c *Admission) inUse() (out []string) {
	if c.attached != nil {
		out = c.attached()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	for project, s := range c.projects {
		switch {
		case slices.Contains(out, project):
		case now.Sub(s.used) > idleTime:
			delete(c.projects, project)
		default:
			out = append(out, project)
		}
	}
	for q, yes := range c.passes {
		if now.After(yes.until) {
			delete(c.passes, q)
		}
	}
	return out
}

// inForce returns what is in force in a project, from memory if it is not older
// than maxAge.
func (c *Admission) inForce(ctx context.Context, project string) (*inForce, error) {
	now := time.Now()
	c.mu.RLock()
	s := c.projects[project]
	stale := s == nil || now.Sub(s.read) > maxAge
	touch := s != nil && now.Sub(s.used) > idleTime/10 // seldom, since it takes the lock for writing
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

// read reads what is in force in a project, and keeps it.
func (c *Admission) read(ctx context.Context, project string) (*inForce, error) {
	now := time.Now()
	s := &inForce{read: now, used: now}
	var v rulebook.Version
	err := c.db.View(ctx, func(tx *store.Tx) (err error) {
		if v, err = c.book.InForce(ctx, tx, project); err != nil {
			return err
		}
		if s.switches, err = c.gate.SwitchesOf(ctx, tx, project); err != nil {
			return err
		}
		s.switchedOn, err = c.gate.SwitchedOn(ctx, tx, project)
		return err
	})
	if err != nil {
		return nil, err
	}
	if s.doc, err = c.book.Document(v); err != nil {
		c.log.ErrorContext(ctx, "read policy", "project", project, "version", v.Number, "err", err)
	}
	s.version = v.Hex()
	for _, w := range s.switches {
		s.version += " " + w.ID
	}
	s.byName = s.doc != nil && s.doc.Mentions(policy.KindConnect) || slices.ContainsFunc(s.switches, func(w oversight.Switch) bool { return w.Scope == oversight.ScopeDomain })
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.projects[project]; old != nil {
		if old.read.After(s.read) { // another read began later and was faster
			return old, nil
		}
		s.used = old.used
		if now.Sub(s.used) > idleTime {
			s.used = now
		}
	}
	c.projects[project] = s
	return s, nil
}
