package notify

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/oversight"
	"postern/internal/store"
)

// escalations notifies others of actions that nobody has decided on within the time that the
// project sets. An escalation decides nothing: the action waits as before, until it expires.
func (n *Notifier) escalations(ctx context.Context) error {
	type due struct {
		id          string
		version, at int64
	}
	var dues []due
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		dues, err = store.List(ctx, tx, func(row func(...any) error) (d due, err error) {
			err = row(&d.id, &d.version, &d.at)
			return d, err
		}, `select action_id, version, escalate_at from notice_round where escalate_at > 0 and escalate_at <= $1 order by escalate_at limit 200`, store.Time(time.Now()))
		return err
	})
	if err != nil {
		return fmt.Errorf("find escalations: %w", err)
	}
	for _, d := range dues {
		err := n.db.Update(ctx, func(tx *store.Tx) error {
			ours, err := tx.Changed(ctx, `update notice_round set escalate_at = 0 where action_id = $1 and version = $2 and escalate_at = $3`, d.id, d.version, d.at)
			if err != nil || !ours {
				return err
			}
			a, err := oversight.ActionUnchecked(ctx, tx, d.id)
			if err != nil || a.State != oversight.Pending || a.Version != d.version {
				return err
			}
			return n.escalate(ctx, tx, a)
		})
		if err != nil {
			return fmt.Errorf("escalate action %s: %w", d.id, err)
		}
	}
	return nil
}

// escalate inserts the notices of one escalation.
func (n *Notifier) escalate(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	s, _, err := readSettings(ctx, tx, a.Project) // the current settings, not those of the round
	if err != nil || s.EscalateAfter == 0 {
		return err
	}
	all, err := store.List(ctx, tx, scanPerson, selectPeople+`and p.project_id = $1 order by p.name`, a.Project)
	if err != nil {
		return fmt.Errorf("list people: %w", err)
	}
	told := 0
	for _, to := range s.EscalateTo {
		kind, rest, _ := strings.Cut(to, ":")
		if kind == "room" {
			r, err := n.roomByID(ctx, tx, a.Project, rest)
			if err != nil { // it has been removed
				continue
			}
			told++
			if err := insertNotice(ctx, tx, a, r.ID, r.Kind, kindEscalated, time.Time{}); err != nil {
				return err
			}
			continue
		}
		for _, p := range all {
			if kind == "person" && p.ID != rest || kind == "role" && string(p.Role) != rest {
				continue
			}
			p, err := withoutForged(ctx, tx)(p, nil)
			if err != nil {
				return err
			}
			for _, c := range personal() {
				if !n.canReach(p, c) {
					continue
				}
				told++
				if err := insertNotice(ctx, tx, a, p.id, c, kindEscalated, time.Time{}); err != nil {
					return err
				}
			}
		}
	}
	if told == 0 {
		n.log.WarnContext(ctx, "nobody whom an escalation names can be notified", "action", a.ID)
	}
	return audit.Append(ctx, tx, system(a), audit.NotifyEscalate, a.ID, audit.Fields{"to": strings.Join(s.EscalateTo, ", "), "after_minutes": strconv.Itoa(s.EscalateAfter)})
}
