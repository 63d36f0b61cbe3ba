package command

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// hold asks a person about a start, and waits until they decide, the time to hold is
// over or ctx is done. The verdict allow is for this one start. It also returns the ID
// of the action. If clause is set, the contract requires the question, whatever the
// rules say.
func (a *Admission) hold(ctx context.Context, who auth.Principal, e *sandbox.Exec, s *Start, l *ledger, clause bool) (v policy.Verdict, action string) {
	if e.Cut {
		// A person must see everything that they approve, and cannot see all of this.
		return refused("a person decides on it, and its command line or its environment is too long to be shown"), ""
	}
	body, err := json.Marshal(s)
	if err != nil { // unreachable: our own type
		return refused(unreadable), ""
	}
	release, ok := a.held.TryAcquire(who.ID)
	if !ok {
		// The attack: code starts programs until the kernel cannot hold any further
		// start.
		return refused(fmt.Sprintf("%d starts of this sandbox wait for a person already: try again once one is decided", maxHeld)), ""
	}
	defer release()
	holdTime := a.conf.Hold
	if e.Guest {
		// The guest starts it and would be held with it: nobody could reach the sandbox
		// any more while one command is held.
		holdTime = 0
	}
	over := time.NewTimer(holdTime)
	defer over.Stop()
	t := time.NewTicker(pollInterval)
	defer t.Stop()
	for {
		// Ask the rules each time: a rule or a switch may have changed.
		if w := a.byRules(ctx, who, s); w.Effect == policy.Deny || w.Effect == policy.Allow && !clause {
			return w, action
		}
		act, err := a.action(ctx, who, s, body)
		switch {
		case ctx.Err() != nil:
			return refused("the process gave up while a person was asked"), action
		case errors.Is(err, oversight.ErrFull):
			return refused(err.Error()), action
		case err != nil:
			a.log.ErrorContext(ctx, "ask about command", "sandbox", who.ID, "err", err)
			return refused("a person decides on it, and cannot be asked at the moment"), action
		}
		if act.ID != action {
			action = act.ID
			line := startLine(e)
			line.What, line.Action = lineHeld, action
			if err := l.append(&line); err != nil {
				a.log.ErrorContext(ctx, "record held command", "sandbox", who.ID, "err", err)
			}
		}
		switch act.State {
		case oversight.Done:
			used, v := a.use(ctx, who, body)
			if v.Effect != "" {
				return v, used
			}
			continue // another start has used it: ask again
		case oversight.Scheduled, oversight.Pending, oversight.Approved, oversight.Executing:
		case oversight.Denied, oversight.Failed, oversight.Cancelled, oversight.Unknown:
			return refused(act.Refusal()), action
		}
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-over.C:
			return refused("a person decides on it (" + action + "): try again once it is approved"), action
		}
	}
}

// errUsed means that an approval was used for another start in the meantime.
var errUsed = errors.New("the approval was used already")

// use uses up the approval of a start. A verdict without effect means that another
// start has used it.
func (a *Admission) use(ctx context.Context, who auth.Principal, body []byte) (id string, v policy.Verdict) {
	err := a.db.Update(ctx, func(tx *store.Tx) error {
		act, err := a.last(ctx, tx, who, body)
		switch {
		case errors.Is(err, store.ErrNotFound), err == nil && act.State != oversight.Done:
			return errUsed
		case err != nil:
			return err
		}
		// The attack: somebody who can write the database approves the action there.
		if err := a.gate.InForce(ctx, tx, &act); err != nil {
			return err
		}
		fresh, err := oversight.Use(ctx, tx, &act, "")
		if err != nil {
			return err
		}
		if !fresh {
			return errUsed
		}
		id = act.ID
		return audit.Append(ctx, tx, who, audit.CommandUse, act.ID, audit.Fields{"digest": act.Hex()})
	})
	switch {
	case errors.Is(err, errUsed):
		return "", v
	case errors.Is(err, oversight.ErrTampered):
		return "", refused("the approval was changed in the server's database: nothing is started")
	case err != nil:
		if ctx.Err() == nil {
			a.log.ErrorContext(ctx, "use approval", "sandbox", who.ID, "err", err)
		}
		return "", refused(unreadable)
	}
	return id, policy.Verdict{Effect: policy.Allow, Reason: "a person has approved it (" + id + ")"}
}

// action returns the action by which people are asked about a start: one that waits or
// was decided a short while ago, or else a new one.
func (a *Admission) action(ctx context.Context, who auth.Principal, s *Start, body []byte) (oversight.Action, error) {
	r := s.request(who)
	p := oversight.Proposal{Request: r, Via: r.Via, Payload: body, Ask: true}
	if !s.Fixed {
		p.Note = "the program's file was made or changed in the sandbox"
	}
	return a.gate.ProposeOnce(ctx, who, p, "commands", func(tx *store.Tx) (oversight.Action, error) { return a.last(ctx, tx, who, body) })
}

// last returns the newest action about a start that still counts, or
// [store.ErrNotFound]. An approval that was used does not count any more.
func (a *Admission) last(ctx context.Context, tx *store.Tx, who auth.Principal, body []byte) (oversight.Action, error) {
	act, err := a.gate.Asked(ctx, tx, who, policy.KindExec, sha256.Sum256(body))
	if err != nil || act.State != oversight.Done {
		return act, err
	}
	return act, oversight.Unused(ctx, tx, &act)
}
