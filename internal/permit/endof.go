package permit

import (
	"context"
	"fmt"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

// EndOf ends all permits in force of one sandbox in who's project. It checks no rights: the
// caller is the part of the server that removes the sandbox.
func (r *Register) EndOf(ctx context.Context, who auth.Principal, sandbox string) error {
	if sandbox == "" { // permits for all sandboxes have an empty sandbox ID
		return nil
	}
	now := time.Now()
	err := r.db.UpdateIn(ctx, store.Project(who.Project), func(tx *store.Tx) error {
		held, err := store.List(ctx, tx, scan, `select `+columns+` from permit where project_id = $1 and sandbox_id = $2 and ended_at = 0 and until_at > $3`, who.Project, sandbox, store.Time(now))
		if err != nil {
			return err
		}
		for i := range held {
			if err := end(ctx, tx, who, &held[i], now); err != nil {
				return err
			}
		}
		tx.AfterCommit(func() { r.forget(who.Project) })
		return nil
	})
	if err != nil {
		return fmt.Errorf("end permits of sandbox %s: %w", sandbox, err)
	}
	return nil
}

// EndAll ends every permit of every project, and returns how many. It is for a database
// that turns out to be a copy: a person may have ended them since.
func (r *Register) EndAll(ctx context.Context, who auth.Principal) (n int, err error) {
	now := time.Now()
	var held []Permit
	err = r.db.Update(ctx, func(tx *store.Tx) error {
		if held, err = store.List(ctx, tx, scan, `select `+columns+` from permit where ended_at = 0 and until_at > $1`, store.Time(now)); err != nil {
			return err
		}
		for i := range held {
			if err := end(ctx, tx, who, &held[i], now); err != nil {
				return err
			}
		}
		tx.AfterCommit(func() {
			for i := range held {
				r.forget(held[i].Project)
			}
		})
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("end all permits: %w", err)
	}
	return len(held), nil
}
