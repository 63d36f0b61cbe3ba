package connection

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
	"postern/internal/store"
)

// maxPermitted bounds the destinations that are remembered as made under a permit. Beyond
// it a person is asked: what is not remembered could not be cut when the permit ends.
const maxPermitted = 4096

// Honour has permits of kind [permit.Connection] answer rules that ask. It must be called
// before the first connection.
func (c *Admission) Honour(r *permit.Register) { c.permits = r }

func (d Destination) question(who auth.Principal) (question, error) {
	body, err := json.Marshal(d)
	return question{who.Project, who.ID, sha256.Sum256(body)}, err
}

// answered reports whether a permit answers the rule that asks about d with v.
func (c *Admission) answered(ctx context.Context, who auth.Principal, d Destination, v policy.Verdict) bool {
	if c.permits == nil || !permit.Answers(v) {
		return false
	}
	id, ok := c.permits.Connect(ctx, who, d.Hosts, uint16(d.Port), v.Rule)
	q, err := d.question(who)
	if !ok || err != nil {
		return false
	}
	if c.remember(q, id) {
		return true
	}
	c.prune(ctx)
	return c.remember(q, id)
}

// A made is the permit under which connections to a destination were made.
type made struct {
	id    string
	ended time.Time // when prune found that it had ended; else zero
}

// remember notes that a connection is made under a permit. It returns false if there is no
// room.
func (c *Admission) remember(q question, id string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.permitted[q]; !known && len(c.permitted) >= maxPermitted {
		return false
	}
	c.permitted[q] = made{id: id}
	return true
}

// prune forgets permits that ended a while ago: the connections under them were cut.
func (c *Admission) prune(ctx context.Context) {
	const cut = time.Minute // far longer than a connection goes on after its permit
	c.mu.RLock()
	all := maps.Clone(c.permitted)
	c.mu.RUnlock()
	for q, m := range all {
		if c.permits.InForce(ctx, q.project, m.id) {
			continue
		}
		c.mu.Lock()
		switch now := c.permitted[q]; {
		case now.id != m.id:
		case now.ended.IsZero():
			c.permitted[q] = made{m.id, time.Now()}
		case time.Since(now.ended) > cut:
			delete(c.permitted, q)
		}
		c.mu.Unlock()
	}
}

// underPermit decides whether a connection that a rule asks about with v may go on: not if
// it was made under a permit that has ended. Others may, see [Admission.MayContinue].
func (c *Admission) underPermit(ctx context.Context, who auth.Principal, d Destination, v policy.Verdict) policy.Verdict {
	q, err := d.question(who)
	if err != nil {
		return refused(unreadable) // unreachable: our own type
	}
	c.mu.RLock()
	m, known := c.permitted[q]
	yes := c.passes[q]
	c.mu.RUnlock()
	if !known || time.Now().Before(yes.until) || c.answered(ctx, who, d, v) {
		return policy.Verdict{Effect: policy.Allow}
	}
	return refused("the permit under which it was made has ended (" + m.id + ")")
}

var _ oversight.Allower = (*Admission)(nil)

// Allow implements [oversight.Allower]: together with the approval of a connection, an owner
// allows the sandbox connections to the same host and port until a time. Only the rule that
// asked is answered.
func (c *Admission) Allow(ctx context.Context, tx *store.Tx, who auth.Principal, a oversight.Action, w oversight.Allowance) (audit.Fields, error) {
	var d Destination
	if err := json.Unmarshal(a.Payload, &d); err != nil || d.Port <= 0 || d.Port > 65535 {
		return nil, fmt.Errorf("the payload cannot be read: %w", oversight.ErrAllowance)
	}
	if len(d.Hosts) != 1 {
		return nil, fmt.Errorf("several names share its address, and which of them is meant is not known: %w", oversight.ErrAllowance)
	}
	return c.permits.Like(ctx, tx, who, a, permit.Permit{Kind: permit.Connection, Hosts: d.Hosts, Port: uint16(d.Port)}, w)
}
