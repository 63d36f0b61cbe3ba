package secret

import (
	"context"

	"postern/internal/store"
)

// Find is find, as part of tx.
func (s *Store) Find(ctx context.Context, tx *store.Tx, project, name string) (Secret, error) {
	return s.find(ctx, tx, project, name)
}
