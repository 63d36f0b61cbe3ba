package run

import (
	"context"

	"postern/internal/store"
)

// BoundaryIn is boundaryIn, for tests.
func (s *Service) BoundaryIn(ctx context.Context, tx *store.Tx, project string) (Stored, error) {
	return s.boundaryIn(ctx, tx, project)
}
