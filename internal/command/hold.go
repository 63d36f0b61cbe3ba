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
	a.mu.Lock()
	held := a.held[who.ID]
	if held < maxHeld {
		a.held[who.ID]++
	}
	a.mu.Unlock()
	if held >= maxHeld {
		// The attack: code starts programs until the kernel cannot hold any further
		// start.
		return refused(fmt.Sprintf("%d starts of this sandbox wait for a person already: try again once one is decided", maxHeld)), ""
	}
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.held[who.ID]--; a.held[who.ID] == 0 {
			delete(a.held, who.ID)
		}
	}()
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
			return denial(act), action
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
		if err := a.gate.Trusted(ctx, tx, &act); err != nil {
			return err
		}
		// The insert makes the approval usable only once, because the action is the key.
		// A start has no host.
		fresh, err := tx.Changed(ctx, `insert into request_use (action_id, project_id, host, used_at) values ($1, $2, '', $3) on conflict (action_id) do nothing`,
			act.ID, who.Project, store.Time(time.Now()))
		if err != nil {
			return fmt.Errorf("use approval: %w", err)
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

// denial returns the verdict for an action that ended without an approval.
func denial(act oversight.Action) policy.Verdict {
	_, byPerson := act.Person()
	switch {
	case act.State != oversight.Denied:
		return refused(act.ID + " is " + string(act.State))
	case byPerson:
		return refused("a person has rejected it (" + act.ID + "): " + act.Reason)
	case act.Reason != "":
		return refused(act.ID + ": " + act.Reason)
	}
	return refused(act.ID + ": " + act.Verdict)
}

// action returns the action that asks people about a start: one that waits or was
// decided recently, or else a new one.
func (a *Admission) action(ctx context.Context, who auth.Principal, s *Start, body []byte) (act oversight.Action, err error) {
	err = a.db.View(ctx, func(tx *store.Tx) error {
		act, err = a.last(ctx, tx, who, body)
		return err
	})
	if !errors.Is(err, store.ErrNotFound) {
		return act, err
	}
	err = a.db.Update(ctx, func(tx *store.Tx) error {
		// Another process may have asked since the View.
		if act, err = a.last(ctx, tx, who, body); !errors.Is(err, store.ErrNotFound) {
			return err
		}
		var n int
		err := tx.One(ctx, `select count(*) from action where project_id = $1 and kind = $2 and proposer = $3 and state = $4`,
			[]any{who.Project, policy.KindExec, who.String(), oversight.Pending}, &n)
		if err != nil {
			return err
		}
		if n >= maxPending {
			// The attack: a loop of programs, each of which asks a person.
			return fmt.Errorf("%d commands of this sandbox wait for a person: %w", n, oversight.ErrFull)
		}
		r := s.request(who)
		p := oversight.Proposal{Request: r, Via: r.Via, Payload: body, Ask: true}
		if !s.Fixed {
			p.Note = "the program's file was made or changed in the sandbox"
		}
		act, err = a.gate.Propose(ctx, tx, who, p)
		return err
	})
	return act, err
}

// last returns the newest action about a start that still applies, or
// [store.ErrNotFound]. An approval no longer applies once it was used, or once a kill
// switch has stopped it.
func (a *Admission) last(ctx context.Context, tx *store.Tx, who auth.Principal, body []byte) (oversight.Action, error) {
	digest := sha256.Sum256(body)
	var id string
	err := tx.One(ctx, `select id from action where project_id = $1 and kind = $2 and proposer = $3 and digest = $4 order by created_at desc, id limit 1`,
		[]any{who.Project, policy.KindExec, who.String(), digest[:]}, &id)
	if err != nil {
		return oversight.Action{}, err
	}
	act, err := a.gate.Find(ctx, tx, who, id)
	if err != nil {
		return oversight.Action{}, err
	}
	validity := retryTime
	if _, byPerson := act.Person(); act.State == oversight.Done || byPerson {
		validity = PassTime
	}
	if !act.Settled.IsZero() && time.Since(act.Settled) > validity {
		return oversight.Action{}, store.ErrNotFound
	}
	if act.State != oversight.Done {
		return act, nil
	}
	// Turning a switch off does not restore earlier approvals.
	stopped, err := a.gate.StoppedSince(ctx, tx, who.Project, act.Request, act.Settled)
	if err != nil {
		return oversight.Action{}, err
	}
	var used int
	if err := tx.One(ctx, `select count(*) from request_use where action_id = $1`, []any{act.ID}, &used); err != nil {
		return oversight.Action{}, err
	}
	if stopped || act.Stopped != "" || used > 0 {
		return oversight.Action{}, store.ErrNotFound
	}
	return act, nil
}
