package mailbox

import (
	"context"
	"fmt"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/message"
	"postern/internal/seal"
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

// A Traffic is how many messages of one day an inbox holds.
type Traffic struct {
	Day       time.Time // its beginning, in UTC
	Direction message.Direction
	Messages  int64
}

// Traffic returns how much mail the inbox that k opens got and sent on each day
// from one moment to another. Mail that was removed for good is not counted.
func (m *PostOffice) Traffic(ctx context.Context, who auth.Principal, k *seal.Key, from, to time.Time) (out []Traffic, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return nil, err
	}
	const day = int64(24 * time.Hour / time.Microsecond)
	err = m.db.View(ctx, func(tx *store.Tx) error {
		out, err = store.List(ctx, tx, func(row func(...any) error) (t Traffic, err error) {
			var n int64
			err = row(&n, &t.Direction, &t.Messages)
			t.Day = store.FromTime(n * day)
			return t, err
		}, `select at / $1, direction, count(*) from message where inbox_id = $2 and at >= $3 and at < $4 group by 1, 2 order by 1, 2`,
			day, k.Inbox(), store.Time(from), store.Time(to))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("count mail of inbox %s: %w", k.Inbox(), err)
	}
	return out, nil
}
