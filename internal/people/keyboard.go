package people

import (
	"context"
	"fmt"

	"postern/internal/auth"
	"postern/internal/store"
)

// SetKeys turns the console's single-letter keys on or off for a person, who sets it for
// themselves. Someone who speaks to their computer, or whose hands tremble, presses keys
// that they did not mean (WCAG 2.1.4). It decides nothing, so it needs no second factor
// and no entry in the record.
func (p *People) SetKeys(ctx context.Context, who auth.Principal, on bool) error {
	return p.db.Update(ctx, func(tx *store.Tx) error {
		me, err := ownAccount(ctx, tx, who)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `update person set keys_off = $1 where id = $2`, !on, me.id); err != nil {
			return fmt.Errorf("set keys: %w", err)
		}
		return nil
	})
}

// KeysOff reports whether a person has turned the console's keys off. For who has no
// account, such as the operator at the machine, they are on.
func (p *People) KeysOff(ctx context.Context, who auth.Principal) (off bool, err error) {
	err = p.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) > 0 from person where name = $1 and project_id = $2 and keys_off`, []any{who.ID, who.Project}, &off)
	})
	return off, err
}
