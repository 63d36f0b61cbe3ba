package oversight

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// A Decision is what a person says about the action that they were shown.
type Decision struct {
	ID      string
	Version int64  // that was shown
	Digest  string // that was shown, hexadecimal
	Approve bool
	Reason  string // needed to reject
}

// Decide records who's decision. Of an action that needs several approvals each
// person's counts once, and the action waits at the same version until there are
// enough; one rejection rejects it. It returns [auth.ErrForbidden] unless who is a
// person of the action's project who decides, [ErrNotAsked] and [ErrStepUp],
// [ErrStale] if the action is not, or no longer, what d says it was, [ErrStopped],
// [ErrReason] and [store.ErrNotFound].
func (g *Gate) Decide(ctx context.Context, who auth.Principal, d Decision) error {
	err := g.decideOne(ctx, who, d)
	if err == nil {
		g.poke()
	}
	return err
}

// DecideAll records who's decisions on actions that were each shown, each by
// itself as [Gate.Decide] does, and returns what that would have: one answer for
// each, nil for what was recorded.
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
	var late bool
	err := g.db.Update(ctx, func(tx *store.Tx) (err error) {
		late, err = g.decide(ctx, tx, who, d)
		return err
	})
	if err == nil && late {
		return fmt.Errorf("decide on %s: %w", d.ID, ErrLate)
	}
	return err
}

func (g *Gate) decide(ctx context.Context, tx *store.Tx, who auth.Principal, d Decision) (late bool, err error) {
	now := time.Now()
	a, err := g.read(ctx, tx, who, d.ID)
	if err != nil {
		return false, err
	}
	// What is decided on is what is stored now, and what was shown.
	if sum := sha256.Sum256(a.Payload); !bytes.Equal(sum[:], a.Digest) || a.Hex() != d.Digest {
		return false, fmt.Errorf("decide on %s: digest: %w", d.ID, ErrStale)
	}
	switch {
	case a.State != Pending || a.Version != d.Version:
		return false, fmt.Errorf("decide on %s: %w", d.ID, ErrStale)
	case !a.Expires.IsZero() && !a.Expires.After(now):
		return false, fmt.Errorf("decide on %s: the time to decide ended %s: %w", d.ID, a.Expires.Format(time.RFC1123), ErrStale)
	case !a.asks(who):
		return false, fmt.Errorf("decide on %s: it asks %s: %w", d.ID, strings.Join(a.Who, ", "), ErrNotAsked)
	}
	if !d.Approve {
		return false, g.decided(ctx, tx, who, a, d, Denied, now)
	}
	if a.StepUp && now.Sub(who.Strong) > StepUpTime {
		return false, fmt.Errorf("decide on %s: %w", d.ID, ErrStepUp)
	}
	if s, on, err := g.Stopped(ctx, tx, a.Project, a.Inbox, a.Request); err != nil || on {
		if err == nil {
			err = fmt.Errorf("decide on %s: %s: %w", d.ID, s, ErrStopped)
		}
		return false, err
	}
	// One that was asked about only at its time is late by the reviewer's own pace.
	if !a.SendAt.IsZero() && a.AskAt.IsZero() && now.Sub(a.SendAt) > MaxLate {
		return true, g.askAgain(ctx, tx, who, a, d)
	}
	fresh, err := tx.Changed(ctx, `insert into approval (action_id, version, person, at, reason) values ($1, $2, $3, $4, $5) on conflict do nothing`,
		a.ID, a.Version, who.String(), store.Time(now), d.Reason)
	if err != nil {
		return false, fmt.Errorf("record approval: %w", err)
	}
	if fresh {
		a.Approvals++
	}
	if a.Approvals < a.Approvers {
		if !fresh {
			return false, nil // said before: it counts once
		}
		return false, audit.Append(ctx, tx, who, "action.vote", a.ID, audit.Fields{
			"version": strconv.FormatInt(d.Version, 10), "digest": d.Digest, "reason": d.Reason, "approvals": fmt.Sprintf("%d of %d", a.Approvals, a.Approvers),
		})
	}
	return false, g.decided(ctx, tx, who, a, d, Approved, now)
}

// decided moves a to where a decision brought it.
func (g *Gate) decided(ctx context.Context, tx *store.Tx, who auth.Principal, a Action, d Decision, to State, now time.Time) error {
	if err := move(ctx, tx, a.ID, d.Version, Pending, to); err != nil {
		return err
	}
	verb := "action.reject"
	a.State, a.Version, a.Decider, a.Decided, a.Reason = to, d.Version+1, who.String(), stored(now), d.Reason
	if d.Approve {
		verb, a.Due = "action.approve", a.leaves(now)
	} else {
		a.Settled = stored(now)
	}
	_, err := tx.ExecContext(ctx, `update action set decider = $1, decided_at = $2, reason = $3, not_before = $4, settled_at = $5 where id = $6`,
		a.Decider, store.Time(a.Decided), a.Reason, store.Time(a.Due), store.Time(a.Settled), a.ID)
	if err != nil {
		return fmt.Errorf("record decision: %w", err)
	}
	f := audit.Fields{"version": strconv.FormatInt(d.Version, 10), "digest": d.Digest, "reason": d.Reason}
	if d.Approve && a.Approvers > 1 {
		f["approvals"] = fmt.Sprintf("%d of %d", a.Approvals, a.Approvers)
	}
	if err := audit.Append(ctx, tx, who, verb, a.ID, f); err != nil {
		return err
	}
	return g.moved(ctx, tx, a)
}

// asks reports whether policy asks who to decide on a.
func (a *Action) asks(who auth.Principal) bool {
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
	Reason  string // may be empty
}

// Votes returns the approvals of an action, also those of versions that were
// revised since, oldest first. Who is a person: who said what is between the
// reviewers.
func (g *Gate) Votes(ctx context.Context, who auth.Principal, id string) (out []Vote, err error) {
	if who.Kind != auth.Person {
		return nil, fmt.Errorf("%s does not see who approved: %w", who, auth.ErrForbidden)
	}
	err = g.db.View(ctx, func(tx *store.Tx) error {
		if _, err := g.read(ctx, tx, who, id); err != nil {
			return err
		}
		out, err = store.List(ctx, tx, func(row func(...any) error) (v Vote, err error) {
			var at int64
			err = row(&v.Version, &v.Person, &at, &v.Reason)
			v.At = store.FromTime(at)
			return v, err
		}, `select version, person, at, reason from approval where action_id = $1 order by at, person`, id)
		return err
	})
	return out, err
}

// askAgain leaves a pending action that was approved too late pending, with a
// note and without its time, so that the next approval is of what it now is.
func (g *Gate) askAgain(ctx context.Context, tx *store.Tx, who auth.Principal, a Action, d Decision) error {
	if err := move(ctx, tx, a.ID, d.Version, Pending, Pending); err != nil {
		return err
	}
	a.State, a.Version = Pending, d.Version+1
	a.Note = strings.TrimSpace(a.Note + "\nit was to leave at " + a.SendAt.Format(time.RFC1123) + " and was approved too late for that: approved now, it leaves at once")
	a.SendAt = time.Time{}
	if _, err := tx.ExecContext(ctx, `update action set send_at = 0, note = $1 where id = $2`, a.Note, a.ID); err != nil {
		return fmt.Errorf("ask again: %w", err)
	}
	err := audit.Append(ctx, tx, who, "action.late", a.ID, audit.Fields{"version": strconv.FormatInt(d.Version, 10), "digest": d.Digest, "note": a.Note})
	if err != nil {
		return err
	}
	return g.moved(ctx, tx, a)
}

// Resolve records what a person found out about an action whose effect is
// unknown: that it happened (Done), that it did not and is given up (Failed),
// or that it did not and is to be tried again (Approved).
func (g *Gate) Resolve(ctx context.Context, who auth.Principal, id string, version int64, to State, reason string) error {
	if !who.Decides() {
		return fmt.Errorf("%s cannot resolve, only a person who reviews can: %w", who, auth.ErrForbidden)
	}
	if to != Done && to != Failed && to != Approved {
		return fmt.Errorf("resolve action as %q: want %s, %s or %s: %w", to, Done, Failed, Approved, auth.ErrInvalid)
	}
	reason = strings.TrimSpace(reason)
	if reason == "" || len(reason) > 1000 {
		return ErrReason
	}
	err := g.db.Update(ctx, func(tx *store.Tx) error {
		a, err := g.read(ctx, tx, who, id)
		if err != nil {
			return err
		}
		if to == Approved {
			if s, on, err := g.Stopped(ctx, tx, a.Project, a.Inbox, a.Request); err != nil || on {
				if err == nil {
					err = fmt.Errorf("resolve %s: %s: %w", id, s, ErrStopped)
				}
				return err
			}
		}
		if err := move(ctx, tx, a.ID, version, Unknown, to); err != nil {
			return err
		}
		a.State, a.Version, a.Result, a.Due = to, version+1, who.String()+" says: "+reason, time.Time{}
		if to.settled() {
			a.Settled = stored(time.Now())
		}
		if _, err := tx.ExecContext(ctx, `update action set result = $1, not_before = 0, settled_at = $2, stopped = '' where id = $3`, a.Result, store.Time(a.Settled), id); err != nil {
			return fmt.Errorf("record result: %w", err)
		}
		if err := audit.Append(ctx, tx, who, "action.resolve", id, audit.Fields{"state": string(to), "reason": reason}); err != nil {
			return err
		}
		return g.moved(ctx, tx, a)
	})
	if err == nil {
		g.poke()
	}
	return err
}
