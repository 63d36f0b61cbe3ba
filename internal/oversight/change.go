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
	err = g.db.Update(ctx, func(tx *store.Tx) error {
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

// Revise puts p in the place of what an action that has not begun to leave
// would do, as part of tx. It is then judged as if it were proposed now: a
// decision that was made, or is being made, was on other bytes. Its proposer is
// who wrote these; of what a person edited, who decides, the proposer stays and
// the person is its author, and it leaves only with an approval of its new digest,
// whatever policy allows. A version other than 0 must be the one that is there. Who
// needs what [Gate.Cancel] needs. It returns [ErrTooLate], [ErrStale], [auth.ErrForbidden] or
// [store.ErrNotFound].
func (g *Gate) Revise(ctx context.Context, tx *store.Tx, who auth.Principal, id string, version int64, p Proposal) (Action, error) {
	before, err := g.read(ctx, tx, who, id)
	if err != nil {
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
	if err := g.trust(ctx, tx, &before); err != nil {
		return Action{}, fmt.Errorf("revise action %s: %w", id, err)
	}
	if err := room(ctx, tx, a); err != nil {
		return Action{}, err
	}
	if err := keep(ctx, tx, before); err != nil {
		return Action{}, err
	}
	if err := save(ctx, tx, before, a); err != nil {
		return Action{}, err
	}
	if _, err := tx.ExecContext(ctx, `update action set payload = $1, digest = $2 where id = $3`, a.Payload, a.Digest, a.ID); err != nil {
		return Action{}, fmt.Errorf("revise action %s: %w", id, err)
	}
	if err := g.seal(ctx, tx, &a); err != nil {
		return Action{}, err
	}
	f := proposal(&a)
	f["from"], f["was"], f["version"] = string(before.State), before.Hex(), strconv.FormatInt(a.Version, 10)
	if err := enter(ctx, tx, who, audit.ActionRevise, a, f); err != nil {
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
				rows, err := tx.Rows(ctx, sealedActions(), true, `id = $1`, id)
				if err != nil {
					return err
				}
				// Who it was to, and what it was about, goes with it.
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
