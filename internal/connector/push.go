package connector

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mailbox"
	"postern/internal/store"
)

// pushStep bounds the messages whose changes are applied in one step.
const pushStep = 100

// push applies at the provider what has changed here. A change is marked as done after
// the provider has it: after a crash in between it is applied once more, which changes
// nothing.
func (w *worker) push(ctx context.Context) error {
	passed := ""
	for {
		c, b, err := w.current(ctx)
		if err != nil {
			return err
		}
		w.c = c
		var rows []remote
		labels := map[string][]string{}
		err = w.s.db.View(ctx, func(tx *store.Tx) error {
			// What left and was not seen at the provider yet has no id there.
			rows, err = remotes(ctx, tx, `inbox_id = $1 and dirty > 0 and gone = 0 and message_id <> '' and remote_id not like 'sent:%' and remote_id > $2`, b.ID, passed)
			rows = rows[:min(len(rows), pushStep)]
			if err != nil || len(rows) == 0 {
				return err
			}
			var ids []string
			for _, r := range rows {
				ids = append(ids, r.message)
			}
			labels, err = w.s.post.LabelsOf(ctx, tx, b.ID, ids)
			return err
		})
		if err != nil || len(rows) == 0 {
			return err
		}
		for _, r := range rows {
			passed = r.id
			if err := w.apply(ctx, b, r, labels[r.message]); err != nil {
				return err
			}
		}
	}
}

// apply makes one copy of a message at the provider what the message is here.
func (w *worker) apply(ctx context.Context, b directory.Inbox, r remote, here []string) error {
	if here == nil { // it is gone here, or held
		return w.applied(ctx, b, r, r.id, r.seen, false)
	}
	var others []remote
	err := w.s.db.View(ctx, func(tx *store.Tx) (err error) {
		others, err = remotes(ctx, tx, `inbox_id = $1 and message_id = $2 and gone = 0`, b.ID, r.message)
		return err
	})
	if err != nil {
		return err
	}
	// A copy at another place has that place's labels; only what none of them has is
	// added, and to each.
	m, ok := wants(here, scoped(r, others, here))
	if !ok {
		return w.applied(ctx, b, r, r.id, r.seen, false)
	}
	now, err := w.p.Apply(ctx, r.id, m)
	if errors.Is(err, ErrGone) {
		// Where it went, the next pull says.
		return w.applied(ctx, b, r, r.id, r.seen, false)
	}
	if err != nil {
		return fmt.Errorf("apply change at the provider: %w", err)
	}
	if now == "" {
		now = r.id
	}
	return w.applied(ctx, b, r, now, r.seen.after(m), true)
}

// scoped returns the view with which a copy is compared. Of several copies at different
// places only those move that keep the message at its place: archiving takes it out of
// the inbox, and leaves a copy in a folder alone.
func scoped(r remote, others []remote, here []string) view {
	v := r.seen
	if slices.Contains(here, mailbox.LabelTrash) || len(others) < 2 {
		return v
	}
	if archived := slices.Contains(here, mailbox.LabelArchived); archived && v.place != Inbox {
		v.place = Archive
	} else if !archived && v.place != Inbox && slices.ContainsFunc(others, func(o remote) bool { return o.seen.place == Inbox }) {
		v.place = Inbox
	}
	return v
}

// applied notes what the provider has now. Changes that were made meanwhile stay to be
// applied.
func (w *worker) applied(ctx context.Context, b directory.Inbox, r remote, now string, seen view, changed bool) error {
	if now != r.id {
		if err := checkChange(Change{ID: now}); err != nil {
			return err
		}
	}
	return w.s.db.UpdateIn(ctx, store.Thing(b.Project, b.ID), func(tx *store.Tx) error {
		if now != r.id {
			// The pull may have seen it at its new place already.
			if _, err := tx.ExecContext(ctx, `delete from connected_message where inbox_id = $1 and remote_id = $2`, b.ID, now); err != nil {
				return err
			}
		}
		_, err := tx.ExecContext(ctx, `update connected_message set remote_id = $1, seen = $2, dirty = dirty - $3 where inbox_id = $4 and remote_id = $5 and dirty >= $3`, now, seen.String(), r.dirty, b.ID, r.id)
		if err != nil {
			return fmt.Errorf("note applied change: %w", err)
		}
		if !changed {
			return nil
		}
		who := auth.Principal{Kind: auth.System, ID: "connector", Project: b.Project}
		return audit.Append(ctx, tx, who, audit.MailboxApply, r.message, audit.Fields{"inbox": b.ID, "from": r.seen.String(), "to": seen.String()})
	})
}
