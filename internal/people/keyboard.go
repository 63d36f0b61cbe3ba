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
// and no entry in the record. Sessions say how it is set: [auth.Principal].KeysOff.
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
