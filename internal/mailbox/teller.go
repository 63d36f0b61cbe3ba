package mailbox

import (
	"context"

	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/oversight"
	"postern/internal/store"
)

// Switched implements [oversight.Teller]: each inbox that a switch may touch has
// an event of it, and of its end.
func (x sendExecutor) Switched(ctx context.Context, tx *store.Tx, s oversight.Switch, on bool) error {
	where, args := `project_id = $1`, []any{s.Project}
	switch s.Scope {
	case oversight.ScopeInbox:
		where, args = where+` and id = $2`, append(args, s.Target)
	case oversight.ScopeEverything:
		where, args = `project_id <> $1`, []any{""}
	case oversight.ScopeProject, oversight.ScopeCapability, oversight.ScopeDomain:
	}
	list, err := directory.List(ctx, tx, where+` and deleted_at = 0`, args...)
	if err != nil {
		return err
	}
	of := map[string][]string{}
	for _, b := range list {
		of[b.Project] = append(of[b.Project], b.ID)
	}
	t := event.SwitchOff
	if on {
		t = event.SwitchOn
	}
	for project, ids := range of {
		e := event.Event{Project: project, Type: t, Object: s.ID, Data: map[string]any{"switch": s.ID, "scope": string(s.Scope), "reason": s.Reason}}
		if err := event.AppendEach(ctx, tx, e, ids); err != nil {
			return err
		}
	}
	tx.AfterCommit(func() {
		for _, b := range list {
			x.m.watch.Wake(b.ID)
		}
	})
	return nil
}

// Commented implements [oversight.Teller]. The event does not hold the comment:
// it may quote what the mail says, and the project's key may read events.
func (x sendExecutor) Commented(ctx context.Context, tx *store.Tx, a oversight.Action, _ oversight.Remark) error {
	if a.Inbox == "" {
		return nil
	}
	return x.m.announceWith(ctx, tx, directory.Inbox{ID: a.Inbox, Project: a.Project}, event.OversightCommented, map[string]any{"state": string(a.State)}, a.ID)
}
