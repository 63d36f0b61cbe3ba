package oversight

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// A Decision is a person's decision on the action that they were shown.
type Decision struct {
	ID      string
	Version int64  // the one that was shown
	Digest  string // the one that was shown, hexadecimal
	Approve bool   // false rejects
	Reason  string // required to reject; at most 1000 bytes

	// Seen are the IDs of the findings that the person ticked. An approval must have
	// those of all grave findings.
	Seen []string

	// Allow is what the person allows together with the approval; nil means nothing more
	// than this action. Where it cannot be allowed, nothing is approved.
	Allow *Allowance
}

// Decide records who's decision. If an action needs several approvals, each human
// being counts once, and the action waits at the same version until there are enough;
// one rejection is enough to reject it. It returns [auth.ErrForbidden] unless who is a
// person of the action's project who decides, [ErrNotAsked], [ErrNotCounted] and [ErrStepUp],
// [ErrStale] if the action is not, or no longer, what d says it was, [ErrStopped],
// [ErrReason], [ErrAllowance], [ErrUnseen] if an approval lacks the tick of a grave finding, and
// [store.ErrNotFound].
func (g *Gate) Decide(ctx context.Context, who auth.Principal, d Decision) error {
	err := g.decideOne(ctx, who, d)
	if err == nil {
		g.poke()
	}
	return err
}

// DecideAll calls [Gate.Decide] for several decisions, each in a transaction of its
// own, and returns one error for each: nil for those that were recorded.
func (g *Gate) DecideAll(ctx context.Context, who auth.Principal, ds []Decision) []error {
	errs := make([]error, len(ds))
	for i, d := range ds {
		if errs[i] = ctx.Err(); errs[i] == nil {
			errs[i] = g.decideOne(ctx, who, d)
		}
	}
	g.poke()
	return errs
}

func (g *Gate) decideOne(ctx context.Context, who auth.Principal, d Decision) error {
	if !who.Decides() {
		// The attack: an agent that approves itself, through any door.
		return fmt.Errorf("%s cannot decide, only a person who reviews can: %w", who, auth.ErrForbidden)
	}
	d.Reason = strings.TrimSpace(d.Reason)
	if len(d.Reason) > 1000 || d.Reason == "" && !d.Approve {
		return ErrReason
	}
	var late, doubted bool
	err := g.UpdateAction(ctx, who, d.ID, func(tx *store.Tx) (err error) {
		late, err = g.decide(ctx, tx, who, d)
		if doubted = errors.Is(err, errCommitted); doubted {
			return nil
		}
		return err
	})
	if err == nil && doubted {
		return fmt.Errorf("decide on %s: %w", d.ID, ErrTampered)
	}
	if err == nil && late {
		return fmt.Errorf("decide on %s: %w", d.ID, ErrLate)
	}
	return err
}

// decide records a decision as part of tx. Late means that it was an approval that
// came too late, see [MaxLate]; errCommitted that the action was in doubt.
func (g *Gate) decide(ctx context.Context, tx *store.Tx, who auth.Principal, d Decision) (late bool, err error) {
	before, err := g.read(ctx, tx, who, d.ID)
	if err != nil {
		return false, err
	}
	e := decided{Decision: d, who: who, now: time.Now()}
	if e.votes, err = voters(ctx, tx, &before); err != nil {
		return false, err
	}
	if q := before.quorum; q != nil {
		e.authors, e.roll = q.authors, q.roll
	}
	if e.stop, err = g.stop(ctx, tx, before.Project, before.Inbox, before.Request); err != nil {
		return false, err
	}
	a, err := g.claimParts(ctx, tx, before, e) // it may have been tried before
	if doubted, derr := g.unlessTrusted(ctx, tx, d.ID, err); doubted {
		return false, errCommitted
	} else if err = derr; err != nil {
		return false, fmt.Errorf("decide on %s: %w", d.ID, err)
	}
	f := audit.Fields{"version": strconv.FormatInt(d.Version, 10), "digest": d.Digest, "reason": d.Reason}
	seen := strings.Join(before.seenOf(d.Seen), "\n")
	if f["seen"] = seen; seen == "" {
		delete(f, "seen")
	}
	verb, voted := audit.ActionReject, false
	switch {
	case !d.Approve:
	case a.State == Pending && a.Version != before.Version:
		verb, late, f["note"] = audit.ActionLate, true, a.Note
	case a.State == Pending && slices.Contains(e.votes, who.String()):
		return false, nil // a repeated approval counts once
	case a.State == Pending:
		verb, voted = audit.ActionVote, true
	default:
		// An earlier approver may complete it: the account may count as a person of
		// its own by now.
		verb, voted = audit.ActionApprove, !slices.Contains(e.votes, who.String())
		if before.Sole() {
			f["alone"] = "nobody else may decide: " + before.Proposer + ", who proposed it, and " + who.String() + " may be one person"
		}
		if a.Author != "" {
			f["edited_by"] = a.Author
		}
	}
	if d.Allow != nil && d.Approve {
		more, err := g.allow(ctx, tx, who, &a, *d.Allow)
		if err != nil {
			return false, fmt.Errorf("decide on %s: %w", d.ID, err)
		}
		maps.Copy(f, more)
	}
	if voted {
		_, err := tx.ExecContext(ctx, `insert into approval (action_id, version, person, at, reason, seen) values ($1, $2, $3, $4, $5, $6)`,
			a.ID, before.Version, who.String(), store.Time(e.now), d.Reason, seen)
		if err != nil {
			return false, fmt.Errorf("record approval: %w", err)
		}
		if err := tx.Seal(ctx, sealedApprovals(), `action_id = $1 and version = $2 and person = $3`, a.ID, before.Version, who.String()); err != nil {
			return false, err
		}
		if a.Approvers > 1 {
			f["approvals"] = fmt.Sprintf("%d of %d", a.Approvals, a.Approvers)
		}
	}
	if err := enter(ctx, tx, who, verb, a, f); err != nil {
		return false, err
	}
	if verb == audit.ActionVote {
		return false, nil // the action has not moved
	}
	if err := g.moved(ctx, tx, a); err != nil || a.State != Approved || a.Attempts == 0 {
		return late, err
	}
	return late, g.noteParts(ctx, tx, &a) // a retry, as after Resolve
}

// Asks reports whether policy asks who to decide on a.
func (a *Action) Asks(who auth.Principal) bool {
	return len(a.Who) == 0 || slices.ContainsFunc(a.Who, func(name string) bool {
		switch role, ok := strings.CutPrefix(name, "role:"); {
		case !ok:
			return name == who.ID
		case role == string(auth.Reviewer):
			return who.Decides()
		default:
			return role == string(who.Role)
		}
	})
}

// A Vote is one person's approval of one version of an action.
type Vote struct {
	Version int64
	Person  string // a principal
	At      time.Time
	Reason  string   // may be empty
	Seen    []string // IDs of the findings that the person ticked
}

// Votes returns the approvals of an action, including those of versions that were
// revised since, oldest first. Who must be a person: only reviewers may see who
// approved.
func (g *Gate) Votes(ctx context.Context, who auth.Principal, id string) (out []Vote, err error) {
	if who.Kind != auth.Person {
		return nil, fmt.Errorf("%s may not see who approved, only a person may: %w", who, auth.ErrForbidden)
	}
	err = g.db.View(ctx, func(tx *store.Tx) error {
		if _, err := g.read(ctx, tx, who, id); err != nil {
			return err
		}
		out, err = store.List(ctx, tx, func(row func(...any) error) (v Vote, err error) {
			var at int64
			var seen string
			err = row(&v.Version, &v.Person, &at, &v.Reason, &seen)
			v.At, v.Seen = store.FromTime(at), recorded(seen)
			return v, err
		}, `select version, person, at, reason, seen from approval where action_id = $1 order by at, person`, id)
		return err
	})
	return out, err
}

// Resolve records what a person found out about an action whose effect is unknown:
// it happened (Done), it did not and is given up (Failed), or it did not and is tried
// again (Approved). If its row was changed in the database it needs new approvals
// before it is tried again.
func (g *Gate) Resolve(ctx context.Context, who auth.Principal, id string, version int64, to State, reason string) error {
	if !who.Decides() {
		return fmt.Errorf("%s cannot resolve, only a person who reviews can: %w", who, auth.ErrForbidden)
	}
	reason = strings.TrimSpace(reason)
	if reason == "" || len(reason) > 1000 {
		return ErrReason
	}
	doubted := false
	err := g.UpdateAction(ctx, who, id, func(tx *store.Tx) error {
		doubted = false
		a, err := g.read(ctx, tx, who, id)
		if err != nil {
			return err
		}
		e := resolved{who: who, version: version, to: to, reason: reason, now: time.Now()}
		if e.stop, err = g.stop(ctx, tx, a.Project, a.Inbox, a.Request); err != nil {
			return err
		}
		if e.changed, err = foundChanged(ctx, tx, id); err != nil {
			return err
		}
		a, err = g.advance(ctx, tx, a, e)
		if doubted, err = g.unlessTrusted(ctx, tx, id, err); doubted || err != nil {
			return wrap("resolve action "+id, err)
		}
		if err := enter(ctx, tx, who, audit.ActionResolve, a, audit.Fields{"state": string(a.State), "reason": reason}); err != nil {
			return err
		}
		if err := g.moved(ctx, tx, a); err != nil || a.State != Approved {
			return err
		}
		return g.noteParts(ctx, tx, &a) // parts that did not happen, as the person says, are open again
	})
	if err == nil && doubted {
		return fmt.Errorf("resolve action %s: %w", id, ErrTampered)
	}
	if err == nil {
		g.poke()
	}
	return err
}
