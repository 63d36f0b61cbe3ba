package oversight

import (
	"context"
	"fmt"

	"postern/internal/store"
)

// Waiting returns an action without its payload, whoever's it is, as part of
// tx. It is for the parts of this program that tell people what waits; no door
// calls it, since it asks nobody who they are.
func Waiting(ctx context.Context, tx *store.Tx, id string) (Action, error) {
	as, err := list(ctx, tx, `where id = $1`, id)
	if err == nil && len(as) == 0 {
		err = store.ErrNotFound
	}
	if err == nil {
		err = weigh(ctx, tx, as)
	}
	if err != nil {
		return Action{}, fmt.Errorf("action %s: %w", id, err)
	}
	return as[0], nil
}
