package oversight

import (
	"context"
	"errors"
	"fmt"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
)

// ErrSnooze means that a snooze is longer than 30 days or than the action waits, or that
// the person has snoozed 500 actions.
var ErrSnooze = errors.New("choose a time within 30 days and before the action expires; a person can snooze at most 500 actions")

// ErrAssign means that a person may not decide on the action.
var ErrAssign = errors.New("choose a person of the project who may decide on the action")

const (
	maxSnooze  = 30 * 24 * time.Hour
	maxSnoozed = 500 // actions that one person snoozes at the same time
)

// A Snooze is an action that one person does not want to see now.
type Snooze struct {
	Action   string // id
	Until    time.Time
	OnAnswer bool // it comes back earlier when its agent revises it
	At       time.Time
}

// Snooze hides a pending action from who's queue until a time, at most 30 days ahead and
// not after it expires. Everybody else still sees it, and its expiry does not change. With
// onAnswer it also comes back when its agent revises it; until may then be zero. The error
// wraps [ErrSnooze], [ErrStale] if the action is not pending, [auth.ErrForbidden] or
// [store.ErrNotFound].
func (g *Gate) Snooze(ctx context.Context, who auth.Principal, id string, until time.Time, onAnswer bool) (z Snooze, err error) {
	if !who.Decides() {
		return z, fmt.Errorf("%s has no list of actions: only a person who reviews has: %w", who, auth.ErrForbidden)
	}
	err = g.UpdateAction(ctx, who, id, func(tx *store.Tx) error {
		a, err := g.waiting(ctx, tx, who, id)
		if err != nil {
			return err
		}
		now := time.Now()
		end := until
		if end.IsZero() && onAnswer {
			end = a.Expires
		}
		// When the action expires it is denied, and nothing would come back.
		if !end.After(now) || end.Sub(now) > maxSnooze || !a.Expires.IsZero() && end.After(a.Expires) {
			return fmt.Errorf("snooze %s: %w", id, ErrSnooze)
		}
		fresh, err := tx.Changed(ctx, `insert into snooze (action_id, person, until, on_answer, at) select $1, $2, $3, $4, $5
			where (select count(*) from snooze where person = $2 and until > $5 and action_id <> $1) < $6
			on conflict (action_id, person) do update set until = excluded.until, on_answer = excluded.on_answer, at = excluded.at`,
			id, who.String(), store.Time(end), store.Flag(onAnswer), store.Time(now), maxSnoozed)
		if err != nil {
			return fmt.Errorf("snooze %s: %w", id, err)
		}
		if !fresh {
			return fmt.Errorf("snooze %s: %w", id, ErrSnooze)
		}
		z = Snooze{Action: id, Until: stored(end), OnAnswer: onAnswer, At: stored(now)}
		f := audit.Fields{"until": z.Until.Format(time.RFC3339)}
		if onAnswer {
			f["on_answer"] = "true"
		}
		return audit.Append(ctx, tx, who, audit.ActionSnooze, id, f)
	})
	return z, err
}

// Unsnooze ends who's snooze of an action, if there is one.
func (g *Gate) Unsnooze(ctx context.Context, who auth.Principal, id string) error {
	if !who.Decides() {
		return fmt.Errorf("%s has no list of actions: only a person who reviews has: %w", who, auth.ErrForbidden)
	}
	return g.UpdateAction(ctx, who, id, func(tx *store.Tx) error {
		if _, err := g.read(ctx, tx, who, id); err != nil {
			return err
		}
		was, err := tx.Changed(ctx, `delete from snooze where action_id = $1 and person = $2`, id, who.String())
		if err != nil || !was {
			return err
		}
		return audit.Append(ctx, tx, who, audit.ActionSnooze, id, audit.Fields{"until": "now"})
	})
}

// Snoozed returns who's snoozes, the first to end first.
func (g *Gate) Snoozed(ctx context.Context, who auth.Principal) (out []Snooze, err error) {
	if who.Kind != auth.Person {
		return nil, fmt.Errorf("%s has no list of actions, only a person has: %w", who, auth.ErrForbidden)
	}
	err = g.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, func(row func(...any) error) (s Snooze, err error) {
			var until, answer, at int64
			err = row(&s.Action, &until, &answer, &at)
			s.Until, s.OnAnswer, s.At = store.FromTime(until), answer == 1, store.FromTime(at)
			return s, err
		}, `select s.action_id, s.until, s.on_answer, s.at from snooze s join waiting w on w.action_id = s.action_id
			where s.person = $1 and s.until > $2 and w.project_id = $3 order by s.until, s.action_id`, who.String(), store.Time(time.Now()), who.Project)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read snoozed actions: %w", err)
	}
	return out, nil
}

// answered ends the snoozes of an action that end when its agent revises it.
func answered(ctx context.Context, tx *store.Tx, id string) error {
	if err := tx.Later(ctx, `delete from snooze where action_id = $1 and on_answer = 1`, id); err != nil {
		return fmt.Errorf("wake action %s: %w", id, err)
	}
	return nil
}

// waiting returns a pending action, or [ErrStale] if it is not pending.
func (g *Gate) waiting(ctx context.Context, tx *store.Tx, who auth.Principal, id string) (Action, error) {
	a, err := g.read(ctx, tx, who, id)
	if err == nil && a.State != Pending {
		err = fmt.Errorf("action %s is %s: %w", id, a.State, ErrStale)
	}
	return a, err
}

// Assign asks a person, by name, to look at a pending action. An empty name removes the
// assignment. Everybody sees it; it limits nobody's decision and gives nobody a right. It
// returns [ErrAssign] unless the person may decide on the action, [ErrStale] if the action
// is not pending, [auth.ErrForbidden] or [store.ErrNotFound].
func (g *Gate) Assign(ctx context.Context, who auth.Principal, id, person string) error {
	if !who.Decides() {
		return fmt.Errorf("%s cannot assign, only a person who reviews can: %w", who, auth.ErrForbidden)
	}
	return g.UpdateAction(ctx, who, id, func(tx *store.Tx) error {
		a, err := g.waiting(ctx, tx, who, id)
		if err != nil || a.Assignee == person {
			return err
		}
		if person == "" {
			_, err = tx.ExecContext(ctx, `delete from assignment where action_id = $1`, id)
		} else {
			if err := assignable(ctx, tx, &a, person); err != nil {
				return err
			}
			_, err = tx.ExecContext(ctx, `insert into assignment (action_id, person, by_whom, at) values ($1, $2, $3, $4)
				on conflict (action_id) do update set person = excluded.person, by_whom = excluded.by_whom, at = excluded.at`,
				id, person, who.String(), store.Time(time.Now()))
		}
		if err != nil {
			return fmt.Errorf("assign %s: %w", id, err)
		}
		return audit.Append(ctx, tx, who, audit.ActionAssign, id, audit.Fields{"person": person, "was": a.Assignee})
	})
}

// assignable returns [ErrAssign] unless the person with this name may decide on a.
func assignable(ctx context.Context, tx *store.Tx, a *Action, name string) error {
	var role string
	err := tx.One(ctx, `select role from person where name = $1 and project_id = $2 and disabled_at = 0`, []any{name, a.Project}, &role)
	if errors.Is(err, store.ErrNotFound) {
		return fmt.Errorf("%q has no account in this project: %w", name, ErrAssign)
	}
	if err != nil {
		return fmt.Errorf("read account: %w", err)
	}
	p := auth.Principal{Kind: auth.Person, ID: name, Role: auth.Role(role), Project: a.Project}
	switch {
	case !p.Decides():
		return fmt.Errorf("%s may view actions but not decide: %w", name, ErrAssign)
	case !a.Asks(p):
		return fmt.Errorf("policy does not ask %s about this: %w", name, ErrAssign)
	}
	return nil
}
