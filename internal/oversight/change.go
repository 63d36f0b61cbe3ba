package oversight

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// changeable reports whether a can still be cancelled or revised: nothing of it
// may have left.
func (a *Action) changeable() bool {
	switch a.State {
	case Scheduled, Pending:
		return true
	case Approved:
		return a.Attempts == 0
	case Denied, Executing, Done, Failed, Unknown, Cancelled:
	}
	return false
}

// mayChange returns an error unless who, who may see a, may also change it: a
// person, who proposed it, and the other holders of its inbox's keys. The
// attack: code in a sandbox that takes back or rewrites what was proposed for
// the inbox by somebody else.
func mayChange(who auth.Principal, a *Action) error {
	if who.Kind == auth.Sandbox && a.Proposer != who.String() {
		return fmt.Errorf("a sandbox changes what it proposed itself, and %s was proposed by another: %w", a.ID, auth.ErrForbidden)
	}
	return nil
}

// Cancel takes an action back that has not begun to leave, and returns it as it
// is then. A person may, who proposed it, and the other holders of its inbox's
// keys. To cancel it again changes nothing. It returns [ErrTooLate],
// [auth.ErrForbidden], or [store.ErrNotFound].
func (g *Gate) Cancel(ctx context.Context, who auth.Principal, id string) (a Action, err error) {
	// On PostgreSQL the action can move between our look at it and our update.
	for range 5 {
		err = g.db.Update(ctx, func(tx *store.Tx) error {
			a, err = g.cancel(ctx, tx, who, id)
			return err
		})
		if !errors.Is(err, ErrStale) {
			break
		}
	}
	return a, err
}

func (g *Gate) cancel(ctx context.Context, tx *store.Tx, who auth.Principal, id string) (Action, error) {
	a, err := g.read(ctx, tx, who, id)
	if err == nil {
		err = mayChange(who, &a)
	}
	if err != nil || a.State == Cancelled {
		return a, err
	}
	if !a.changeable() {
		return Action{}, fmt.Errorf("cancel action %s, which is %s: %w", id, a.State, ErrTooLate)
	}
	from := a.State
	if err := move(ctx, tx, a.ID, a.Version, from, Cancelled); err != nil {
		return Action{}, err
	}
	a.State, a.Version, a.Due, a.Settled, a.Result = Cancelled, a.Version+1, time.Time{}, stored(time.Now()), "cancelled by its inbox"
	switch {
	case who.String() == a.Proposer:
		a.Result = "cancelled by its proposer"
	case who.Kind == auth.Person:
		a.Result = "cancelled by a person"
	}
	if _, err := tx.ExecContext(ctx, `update action set result = $1, not_before = 0, settled_at = $2 where id = $3`, a.Result, store.Time(a.Settled), a.ID); err != nil {
		return Action{}, fmt.Errorf("record cancellation: %w", err)
	}
	if err := audit.Append(ctx, tx, who, "action.cancel", a.ID, audit.Fields{"from": string(from), "digest": a.Hex()}); err != nil {
		return Action{}, err
	}
	return a, g.moved(ctx, tx, a)
}

// Revise puts p in the place of what an action that has not begun to leave
// would do, as part of tx. It is then judged as if it were proposed now: a
// decision that was made, or is being made, was on other bytes; its proposer is
// who wrote these. A version other than 0 must be the one that is there. Who
// needs what [Gate.Cancel] needs, and is no person: reviewers decide on what
// others wrote. It returns [ErrTooLate], [ErrStale], [auth.ErrForbidden] or
// [store.ErrNotFound].
func (g *Gate) Revise(ctx context.Context, tx *store.Tx, who auth.Principal, id string, version int64, p Proposal) (Action, error) {
	if who.Kind == auth.Person {
		return Action{}, fmt.Errorf("%s cannot revise what an agent proposed: %w", who, auth.ErrForbidden)
	}
	a, err := g.read(ctx, tx, who, id)
	if err == nil {
		err = mayChange(who, &a)
	}
	switch {
	case err != nil:
		return Action{}, err
	case version != 0 && version != a.Version:
		return Action{}, fmt.Errorf("revise action %s at version %d: %w", id, version, ErrStale)
	case !a.changeable():
		return Action{}, fmt.Errorf("revise action %s, which is %s: %w", id, a.State, ErrTooLate)
	case p.Request.Kind != a.Kind || p.Inbox != a.Inbox:
		return Action{}, fmt.Errorf("revise action %s of kind %s: as %s of another kind or inbox: %w", id, a.Kind, p.Request.Kind, ErrStale)
	}
	from, was, old := a.State, a.Hex(), a.Version
	if err := g.weigh(ctx, tx, &a, p); err != nil {
		return Action{}, err
	}
	a.Version, a.Proposer, a.Via, a.Decider, a.Decided, a.Reason, a.Result = old+1, who.String(), p.Via, "", time.Time{}, "", ""
	ok, err := tx.Changed(ctx, `update action set version = version + 1, payload = $1, digest = $2, state = $3, rule = $4, verdict = $5,
			decider = '', decided_at = 0, reason = '', result = '', not_before = $6, send_at = $7, ask_at = $8, undo = $9, note = $10, settled_at = $11,
			proposer = $12, via = $13
		where id = $14 and version = $15 and state = $16`,
		a.Payload, a.Digest, a.State, a.Rule, a.Verdict, store.Time(a.Due), store.Time(a.SendAt), store.Time(a.AskAt), a.Undo.Microseconds(), a.Note,
		store.Time(a.Settled), a.Proposer, a.Via, a.ID, old, from)
	if err != nil {
		return Action{}, fmt.Errorf("revise action: %w", err)
	}
	if !ok {
		return Action{}, fmt.Errorf("revise action %s: %w", id, ErrStale)
	}
	f := proposed(&a, p)
	f["from"], f["was"], f["version"] = string(from), was, strconv.FormatInt(a.Version, 10)
	if err := audit.Append(ctx, tx, who, "action.revise", a.ID, f); err != nil {
		return Action{}, err
	}
	return a, g.moved(ctx, tx, a)
}

// KeepPayloads is how long the payload of a settled action is kept if nobody
// says otherwise.
const KeepPayloads = 30 * 24 * time.Hour

// DropPayloads removes the payloads of actions that were settled longer than
// keep ago, and reports how many those were. Their digests stay: whoever has
// the bytes can still show that these were the ones. It moves no action.
func (g *Gate) DropPayloads(ctx context.Context, keep time.Duration) (n int64, err error) {
	now := time.Now()
	for {
		var some int64
		err = g.db.Update(ctx, func(tx *store.Tx) error {
			// A few at a time: a payload may be of 35 MB, and others want to write.
			res, err := tx.ExecContext(ctx, `update action set payload = $1, dropped_at = $2 where id in
				(select id from action where settled_at > 0 and settled_at < $3 and dropped_at = 0 order by settled_at limit 100)`,
				[]byte{}, store.Time(now), store.Time(now.Add(-keep)))
			if err != nil {
				return err
			}
			some, err = res.RowsAffected()
			return err
		})
		if err != nil {
			return n, fmt.Errorf("drop payloads: %w", err)
		}
		if n += some; some == 0 {
			return n, nil
		}
	}
}

// RunRetention calls [Gate.DropPayloads] each hour until ctx is done.
func (g *Gate) RunRetention(ctx context.Context, keep time.Duration) error {
	t := time.NewTicker(time.Hour)
	defer t.Stop()
	for {
		if n, err := g.DropPayloads(ctx, keep); err != nil && ctx.Err() == nil {
			g.log.ErrorContext(ctx, "drop payloads", "err", err)
		} else if n > 0 {
			g.log.InfoContext(ctx, "dropped payloads of settled actions", "count", n)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}
