package oversight

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// changeable reports whether a can still be cancelled or revised, because nothing of
// it can have left.
func (a *Action) changeable() bool {
	switch a.State {
	case Scheduled, Pending, Approved:
		return a.Attempts == 0
	case Denied, Executing, Done, Failed, Unknown, Cancelled:
	}
	return false
}

// mayChange returns an error unless who, who may see a, may also change it: people
// who decide, its proposer and the other keys of its inbox. The attack: code in a
// sandbox that cancels or rewrites what another principal proposed for the inbox.
func mayChange(who auth.Principal, a *Action) error {
	if who.Kind == auth.Sandbox && a.Proposer != who.String() {
		return fmt.Errorf("a sandbox may change only its own proposals, and %s is not one of them: %w", a.ID, auth.ErrForbidden)
	}
	if who.Kind == auth.Person && !who.Decides() {
		return fmt.Errorf("%s may view actions but not change them: %w", who, auth.ErrForbidden)
	}
	return nil
}

// Cancel withdraws an action that has not begun to leave, and returns it as it is
// then. People who decide may cancel it, its proposer and the other keys of its inbox.
// Cancelling it again changes nothing. It returns [ErrTooLate], [auth.ErrForbidden],
// or [store.ErrNotFound].
func (g *Gate) Cancel(ctx context.Context, who auth.Principal, id string) (a Action, err error) {
	err = g.UpdateAction(ctx, who, id, func(tx *store.Tx) error {
		a, err = g.cancel(ctx, tx, who, id)
		return err
	})
	return a, err
}

func (g *Gate) cancel(ctx context.Context, tx *store.Tx, who auth.Principal, id string) (Action, error) {
	a, err := g.read(ctx, tx, who, id)
	if err != nil {
		return a, err
	}
	from := a.State
	a, err = g.advance(ctx, tx, a, cancelled{who: who, now: time.Now()})
	if errors.Is(err, errStays) {
		return a, nil
	}
	if err != nil {
		return Action{}, fmt.Errorf("cancel action %s: %w", id, err)
	}
	if err := enter(ctx, tx, who, audit.ActionCancel, a, audit.Fields{"from": string(from), "digest": a.Hex()}); err != nil {
		return Action{}, err
	}
	return a, g.moved(ctx, tx, a)
}

// Revise replaces what an action would do by p, as part of tx, whose turn includes
// [Turn], if it has not begun to leave. It is then judged as if it were proposed now, since earlier decisions
// were on other bytes.
//
// An agent that revises becomes the proposer. A person who revises becomes the
// author beside the proposer, and the action then needs an approval of its new
// digest, even if policy would allow it. If version is not 0 it must be the current
// one. Who needs the rights of [Gate.Cancel]. It returns [ErrTooLate], [ErrStale],
// [auth.ErrForbidden] or [store.ErrNotFound].
func (g *Gate) Revise(ctx context.Context, tx *store.Tx, who auth.Principal, id string, version int64, p Proposal) (Action, error) {
	before, err := g.read(ctx, tx, who, id)
	if err != nil {
		return Action{}, err
	}
	if err := inTurn(tx, &before); err != nil {
		return Action{}, err
	}
	an, err := g.ask(ctx, tx, before, &p)
	if err != nil {
		return Action{}, err
	}
	a, err := (revised{answer: an, p: p, who: who, version: version}).next(before)
	if err != nil {
		return Action{}, fmt.Errorf("revise action %s: %w", id, err)
	}
	row, err := g.trust(ctx, tx, &before)
	if err != nil {
		return Action{}, fmt.Errorf("revise action %s: %w", id, err)
	}
	if err := room(ctx, tx, a); err != nil {
		return Action{}, err
	}
	if err := keep(ctx, tx, before); err != nil {
		return Action{}, err
	}
	if err := save(ctx, tx, before, a, row); err != nil {
		return Action{}, err
	}
	if _, err := tx.ExecContext(ctx, `update action set payload = $1, digest = $2 where id = $3`, a.Payload, a.Digest, a.ID); err != nil {
		return Action{}, fmt.Errorf("revise action %s: %w", id, err)
	}
	if err := g.seal(ctx, tx, &a); err != nil {
		return Action{}, err
	}
	if err := answered(ctx, tx, id); err != nil {
		return Action{}, err
	}
	f := proposal(&a)
	f["from"], f["was"], f["version"] = string(before.State), before.Hex(), strconv.FormatInt(a.Version, 10)
	if err := enter(ctx, tx, who, audit.ActionRevise, a, f); err != nil {
		return Action{}, err
	}
	return a, g.moved(ctx, tx, a)
}

// KeepPayloads is how long the payload of a settled action is kept by default.
const KeepPayloads = 30 * 24 * time.Hour

// DropPayloads removes the payloads of actions that were settled longer than keep
// ago, and returns how many. Their digests stay, so that whoever has the bytes can
// still prove that these were approved. It moves no action.
func (g *Gate) DropPayloads(ctx context.Context, keep time.Duration) (n int64, err error) {
	now := time.Now()
	for {
		var some int64
		err = g.db.Update(ctx, func(tx *store.Tx) error {
			// A few at a time: a payload may have 35 MB, and other writers wait.
			ids, err := tx.Strings(ctx, `select id from action where settled_at > 0 and settled_at < $1 and dropped_at = 0 order by settled_at limit 100`,
				store.Time(now.Add(-keep)))
			if err != nil {
				return err
			}
			for _, id := range ids {
				rows, err := tx.Rows(ctx, sealedActions(), true, `id = $1`, id)
				if err != nil {
					return err
				}
				// Recipients and context are as private as the payload.
				_, err = tx.ExecContext(ctx, `update action set payload = $1, dropped_at = $2, request = '{}', context = '' where id = $3`, []byte{}, store.Time(now), id)
				if err != nil {
					return err
				}
				if _, err := tx.ExecContext(ctx, `update revision set payload = $1 where action_id = $2`, []byte{}, id); err != nil {
					return err
				}
				if !slices.ContainsFunc(rows, func(r store.SealedRow) bool { return r.Holds }) {
					continue // removing the payload must not seal a row that was changed
				}
				if err := tx.Seal(ctx, sealedActions(), `id = $1`, id); err != nil {
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
