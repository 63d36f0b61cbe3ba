package secret

import (
	"context"
	"fmt"
	"strings"

	"postern/internal/store"
)

// Review calls say for each secret of a database that was written before secrets had
// places, once: after say has returned nil for all of them, no later call says it
// again. Fields are the header fields that its value enters from now on.
func (s *Store) Review(ctx context.Context, say func(c Secret, fields string) error) error {
	var due int
	var all []Secret
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		if err := tx.One(ctx, `select count(*) from secret_review`, nil, &due); err != nil || due == 0 {
			return err
		}
		all, err = s.rows(ctx, tx, `kind = $1 order by project_id, name`, Plain)
		return err
	})
	if err != nil || due == 0 {
		return err
	}
	for _, c := range all {
		if err := say(c, strings.Join(c.Fields(), ", ")); err != nil {
			return fmt.Errorf("review secrets: %w", err)
		}
	}
	return s.db.Update(ctx, func(tx *store.Tx) error {
		_, err := tx.ExecContext(ctx, `delete from secret_review`)
		return err
	})
}
