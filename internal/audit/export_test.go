package audit

import (
	"context"

	"postern/internal/store"
)

// Leaf returns what the tree's leaf of e is the hash of.
func Leaf(e Entry) []byte { return e.encode(nil) }

// Sequence is sequenceUnder.
func Sequence(ctx context.Context, tx *store.Tx, lock string) (moved int, err error) {
	s, err := sequenceUnder(ctx, tx, lock)
	return s.moved, err
}
