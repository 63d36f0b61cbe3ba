package mailbox

import (
	"context"
	"fmt"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/store"
)

// A Usage is how much is in an inbox.
type Usage struct {
	Messages int64
	Bytes    int64 // of what arrived, before sealing; to compare with Inbox.MaxBytes
}

// Usage returns how much is in each inbox of who's project, by its id. What is
// in it is sealed; how much is not.
func (m *PostOffice) Usage(ctx context.Context, who auth.Principal) (out map[string]Usage, err error) {
	if err := directory.MayManage(who); err != nil {
		return nil, err
	}
	out = map[string]Usage{}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select i.id, (select count(*) from message m where m.inbox_id = i.id), coalesce((select u.bytes from inbox_use u where u.inbox_id = i.id), 0)
			from inbox i where i.project_id = $1`, who.Project)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var id string
			var u Usage
			if err := rows.Scan(&id, &u.Messages, &u.Bytes); err != nil {
				return err
			}
			out[id] = u
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("measure inboxes: %w", err)
	}
	return out, nil
}
