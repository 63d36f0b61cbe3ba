package console

import (
	"context"
	"fmt"
	"time"

	"postern/internal/oversight"
	"postern/internal/store"
)

// latelyTime is how far back the page of an action looks at its agent.
const latelyTime = 30 * 24 * time.Hour

// A lately has the outcomes of an agent's proposals in the last 30 days.
type lately struct {
	Done, Rejected, Edited int64
	Reason                 string // of the last rejection by a person; empty if there is none
	By                     string // the principal who rejected it
	At                     time.Time
}

// lately reads the outcomes of the proposals for a's inbox. The caller must have checked
// that the viewer may see a, and with it its project.
func (s reviews) lately(ctx context.Context, a *oversight.Action) (l lately, err error) {
	if a.Inbox == "" {
		return l, nil
	}
	since := store.Time(time.Now().Add(-latelyTime))
	err = s.db.View(ctx, func(tx *store.Tx) error {
		err := tx.One(ctx, `select coalesce(sum(case when state = 'done' then 1 else 0 end), 0), coalesce(sum(case when state = 'denied' and decider like 'person:%' then 1 else 0 end), 0),
			coalesce(sum(case when author <> '' then 1 else 0 end), 0) from action where inbox_id = $1 and project_id = $2 and created_at > $3`, []any{a.Inbox, a.Project, since}, &l.Done, &l.Rejected, &l.Edited)
		if err != nil || l.Rejected == 0 {
			return err
		}
		var at int64
		err = tx.One(ctx, `select reason, decider, decided_at from action where inbox_id = $1 and project_id = $2 and state = 'denied' and decider like 'person:%' and created_at > $3
			order by decided_at desc limit 1`, []any{a.Inbox, a.Project, since}, &l.Reason, &l.By, &at)
		l.At = store.FromTime(at)
		return err
	})
	if err != nil {
		return lately{}, fmt.Errorf("read what came of an agent's proposals: %w", err)
	}
	return l, nil
}
