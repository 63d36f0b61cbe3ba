package oversight

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// changeable reports whether a can still be cancelled or revised: nothing of it
// may have left.
func (a *Action) changeable() bool {
	switch a.State {
	case Scheduled, Pending, Approved:
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
	if who.Kind == auth.Person && !who.Decides() {
		return fmt.Errorf("%s looks and changes nothing: %w", who, auth.ErrForbidden)
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
// decision that was made, or is being made, was on other bytes. Its proposer is
// who wrote these; of what a person edited, who decides, the proposer stays and
// the person is its author, and it leaves only with an approval of its new digest,
// whatever policy allows. A version other than 0 must be the one that is there. Who
// needs what [Gate.Cancel] needs. It returns [ErrTooLate], [ErrStale], [auth.ErrForbidden] or
// [store.ErrNotFound].
func (g *Gate) Revise(ctx context.Context, tx *store.Tx, who auth.Principal, id string, version int64, p Proposal) (Action, error) {
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
	if err := keep(ctx, tx, a); err != nil {
		return Action{}, err
	}
	author, proposer := "", who.String()
	if who.Kind == auth.Person {
		// Who edits has said what is to leave, and not that it may.
		p.Ask = true
		author, proposer = who.String(), a.Proposer
	}
	if err := g.weigh(ctx, tx, &a, p); err != nil {
		return Action{}, err
	}
	a.Author, a.Written, a.Approvals = author, stored(time.Now()), 0
	a.Version, a.Proposer, a.Via, a.Decider, a.Decided, a.Reason, a.Result = old+1, proposer, p.Via, "", time.Time{}, "", ""
	request, err := a.request()
	if err != nil {
		return Action{}, err
	}
	ok, err := tx.Changed(ctx, `update action set version = version + 1, payload = $1, digest = $2, state = $3, rule = $4, verdict = $5,
			decider = '', decided_at = 0, reason = '', result = '', not_before = $6, send_at = $7, ask_at = $8, undo = $9, note = $10, settled_at = $11,
			proposer = $12, via = $13, author = $14, written_at = $15, request = $16, context = $17, approvers = $18, who = $19, step_up = $20, expires_at = $21
		where id = $22 and version = $23 and state = $24`,
		a.Payload, a.Digest, a.State, a.Rule, a.Verdict, store.Time(a.Due), store.Time(a.SendAt), store.Time(a.AskAt), a.Undo.Microseconds(), a.Note,
		store.Time(a.Settled), a.Proposer, a.Via, a.Author, store.Time(a.Written),
		request, a.Context, a.Approvers, strings.Join(a.Who, ","), flag(a.StepUp), store.Time(a.Expires), a.ID, old, from)
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
			ids, err := tx.Strings(ctx, `select id from action where settled_at > 0 and settled_at < $1 and dropped_at = 0 order by settled_at limit 100`,
				store.Time(now.Add(-keep)))
			if err != nil {
				return err
			}
			for _, id := range ids {
				// Who it was to, and what it was about, goes with it.
				_, err := tx.ExecContext(ctx, `update action set payload = $1, dropped_at = $2, request = '{}', context = '' where id = $3`, []byte{}, store.Time(now), id)
				if err != nil {
					return err
				}
				if _, err := tx.ExecContext(ctx, `update revision set payload = $1 where action_id = $2`, []byte{}, id); err != nil {
					return err
				}
			}
			some = int64(len(ids))
			return nil
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
