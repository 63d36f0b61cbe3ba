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
	c.mu.Lock()
	yes := c.passes[q]
	approved := time.Now().Before(yes.until) && yes.switchedOn.Equal(switchedOn)
	held := c.held[who.ID]
	if !approved && held < maxHeld {
		c.held[who.ID]++
	}
	c.mu.Unlock()
	if approved {
		return yes.verdict()
	}
	if held >= maxHeld {
		// The attack: code that opens connections until all that a sandbox may
		// have open are held.
		return refused(fmt.Sprintf("%d connections of this sandbox wait for a person already: try again once one is decided", maxHeld))
	}
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.held[who.ID]--; c.held[who.ID] == 0 {
			delete(c.held, who.ID)
		}
	}()
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

func byPerson(a oversight.Action) bool {
	_, ok := a.Person()
	return ok
}

func (y approval) verdict() policy.Verdict {
	return policy.Verdict{Effect: policy.Allow, Reason: "a person has approved it until " + y.until.UTC().Format(time.TimeOnly) + " UTC (" + y.action + ")"}
}

// verdict returns what has become of an action; known is false while it is open.
func (c *Admission) verdict(a oversight.Action, q question, switchedOn time.Time) (v policy.Verdict, known bool) {
	switch a.State {
	case oversight.Done:
		yes := approval{a.ID, a.Settled.Add(PassTime), switchedOn}
		c.mu.Lock()
		if _, ok := c.passes[q]; ok || len(c.passes) < maxPasses { // beyond that, each connection reads its action
			c.passes[q] = yes
		}
		c.mu.Unlock()
		return yes.verdict(), true
	case oversight.Denied:
		switch {
		case byPerson(a):
			return refused("a person has rejected it (" + a.ID + "): " + a.Reason), true
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

// action returns the action by which people are asked about a destination: one
// that waits or was decided a short while ago, or else a new one.
func (c *Admission) action(ctx context.Context, who auth.Principal, r policy.Request, q question, body []byte) (a oversight.Action, err error) {
	err = c.db.View(ctx, func(tx *store.Tx) error {
		a, err = c.last(ctx, tx, who, q)
		return err
	})
	if !errors.Is(err, store.ErrNotFound) {
		return a, err
	}
	err = c.db.Update(ctx, func(tx *store.Tx) error {
		// Another connection may have asked since the View.
		if a, err = c.last(ctx, tx, who, q); !errors.Is(err, store.ErrNotFound) {
			return err
		}
		var n int
		err := tx.One(ctx, `select count(*) from action where project_id = $1 and kind = $2 and proposer = $3 and state = $4`,
			[]any{who.Project, policy.KindConnect, who.String(), oversight.Pending}, &n)
		if err != nil {
			return err
		}
		if n >= maxPending {
			// The attack: a scan of all ports, each of which asks a person.
			return fmt.Errorf("%d destinations of this sandbox wait for a person: %w", n, oversight.ErrFull)
		}
		a, err = c.gate.Propose(ctx, tx, who, oversight.Proposal{Request: r, Via: r.Via, Payload: body})
		return err
	})
	return a, err
}

// last returns the newest action about a destination that still counts, or
// [store.ErrNotFound]. One that was approved before a kill switch stopped it does
// not count any more.
func (c *Admission) last(ctx context.Context, tx *store.Tx, who auth.Principal, q question) (oversight.Action, error) {
	var id string
	err := tx.One(ctx, `select id from action where project_id = $1 and kind = $2 and proposer = $3 and digest = $4 order by created_at desc, id limit 1`,
		[]any{who.Project, policy.KindConnect, who.String(), q.digest[:]}, &id)
	if err != nil {
		return oversight.Action{}, err
	}
	a, err := c.gate.Find(ctx, tx, who, id)
	if err != nil {
		return oversight.Action{}, err
	}
	counts := retryTime
	if a.State == oversight.Done || byPerson(a) {
		counts = PassTime
	}
	if !a.Settled.IsZero() && time.Since(a.Settled) > counts {
		return oversight.Action{}, store.ErrNotFound
	}
	if a.State == oversight.Done {
		// Turning a switch off restores nothing, also not what was approved before.
		stopped, err := c.gate.StoppedSince(ctx, tx, who.Project, a.Request, a.Settled)
		if err != nil {
			return oversight.Action{}, err
		}
		if stopped || a.Stopped != "" { // since it was done, or since it was claimed
			return oversight.Action{}, store.ErrNotFound
		}
	}
	return a, nil
}
