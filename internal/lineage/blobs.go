package lineage

import (
	"context"
	"errors"
	"fmt"

	"postern/internal/store"
)

// ErrOtherBlobs means that a directory of blobs is not the one that the database refers to.
var ErrOtherBlobs = errors.New("the database lists files that it does not have")

// Match checks that a directory of blobs belongs to the database, and makes it so for
// one that is new. The accident: two servers share a database and not the files. Each lists
// messages that it cannot read, and removes the other's files as garbage. With accept the
// directory becomes the database's, whatever was before.
func Match(ctx context.Context, db *store.DB, name string, blobs *store.Blobs, accept bool) error {
	id, err := blobs.ID()
	if err != nil {
		return fmt.Errorf("match directory %s with the database: %w", name, err)
	}
	err = db.Update(ctx, func(tx *store.Tx) error {
		var want string
		err := tx.One(ctx, `select id from blob_store where name = $1`, []any{name}, &want)
		switch {
		case err == nil && want != id && !accept:
			return ErrOtherBlobs
		case err == nil || errors.Is(err, store.ErrNotFound):
			_, err = tx.ExecContext(ctx, `insert into blob_store (name, id) values ($1, $2) on conflict (name) do update set id = excluded.id`, name, id)
		}
		return err
	})
	if err != nil && !errors.Is(err, ErrOtherBlobs) {
		return fmt.Errorf("match directory %s with the database: %w", name, err)
	}
	return err
}
