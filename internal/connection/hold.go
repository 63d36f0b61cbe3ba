package connection

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// ask asks a person about a connection and holds it meanwhile.
func (c *Admission) ask(ctx context.Context, who auth.Principal, r policy.Request, d Destination, switchedOn time.Time) policy.Verdict {
	body, err := json.Marshal(d)
	if err != nil { // unreachable: our own type
		return refused(unreadable)
	}
	q := question{who.Project, who.ID, sha256.Sum256(body)}
	c.mu.RLock()
	yes := c.passes[q]
	c.mu.RUnlock()
	if time.Now().Before(yes.until) && yes.switchedOn.Equal(switchedOn) {
		return yes.verdict()
	}
	release, ok := c.held.TryAcquire(who.ID)
	if !ok {
		// The attack: code that opens connections until all that a sandbox may
		// have open are held.
		return refused(fmt.Sprintf("%d connections of this sandbox wait for a person already: try again once one is decided", maxHeld))
	}
	defer release()
	over := time.NewTimer(c.hold)
	defer over.Stop()
	t := time.NewTicker(pollInterval)
	defer t.Stop()
	for {
		a, err := c.action(ctx, who, r, q, body)
		switch {
		case ctx.Err() != nil:
			return refused("the sandbox was detached while a person was asked")
		case errors.Is(err, oversight.ErrFull):
			return refused(err.Error())
		case err != nil:
			c.log.ErrorContext(ctx, "ask about connection", "sandbox", who.ID, "err", err)
			return refused("a person decides on it, and cannot be asked at the moment")
		}
		if v, known := c.verdict(a, q, switchedOn); known {
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

func (y approval) verdict() policy.Verdict {
	return policy.Verdict{Effect: policy.Allow, Reason: "a person has approved it until " + y.until.UTC().Format(time.TimeOnly) + " UTC (" + y.action + ")"}
}

// verdict returns what has become of an action; known is false while it is open.
func (c *Admission) verdict(a oversight.Action, q question, switchedOn time.Time) (v policy.Verdict, known bool) {
	switch a.State {
	case oversight.Done:
		yes := approval{a.ID, a.Settled.Add(oversight.PassTime), switchedOn}
		c.mu.Lock()
		if _, ok := c.passes[q]; ok || len(c.passes) < maxPasses { // beyond that, each connection reads its action
			c.passes[q] = yes
		}
		c.mu.Unlock()
		return yes.verdict(), true
	case oversight.Denied, oversight.Failed, oversight.Cancelled, oversight.Unknown:
		return refused(a.Refusal()), true
	case oversight.Scheduled, oversight.Pending, oversight.Approved, oversight.Executing:
	}
	return policy.Verdict{}, false
}

// action returns the action by which people are asked about a destination: one
// that waits or was decided a short while ago, or else a new one.
func (c *Admission) action(ctx context.Context, who auth.Principal, r policy.Request, q question, body []byte) (oversight.Action, error) {
	p := oversight.Proposal{Request: r, Via: r.Via, Payload: body}
	return c.gate.ProposeOnce(ctx, who, p, "destinations", func(tx *store.Tx) (oversight.Action, error) {
		return c.gate.Asked(ctx, tx, who, policy.KindConnect, q.digest)
	})
}
