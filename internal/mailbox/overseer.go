package mailbox

import (
	"context"
	"fmt"

	"postern/internal/store"
)

// overseers returns who gets copies of what b sends while it is monitored: its
// own, or else its project's.
func overseers(ctx context.Context, tx *store.Tx, b Inbox) (out []string, err error) {
	for _, scope := range []string{b.ID, b.Project} {
		out, err = tx.Strings(ctx, `select address from overseer where scope = $1 order by address`, scope)
		if err != nil {
			return nil, fmt.Errorf("read overseers of %s: %w", scope, err)
		}
		if len(out) > 0 {
			break
		}
	}
	return out, nil
}
