package mailbox

import (
	"context"
	"fmt"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

// An Account is a grant that gets a part in each inbox that it makes. It may
// have none yet.
type Account struct {
	auth.Credential
	Inboxes int // that it has a part in
}

// Accounts returns the accounts of who's project, oldest first.
func (m *PostOffice) Accounts(ctx context.Context, who auth.Principal) (out []Account, err error) {
	if err := mayManage(who); err != nil {
		return nil, err
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select c.id, c.name, c.created_at, c.created_by, c.used_at, (select count(*) from inbox_key k where k.credential_id = c.id)
			from credential c where c.project_id = $1 and c.account = $2 and c.revoked_at = 0 order by c.created_at, c.id`, who.Project, true)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			a := Account{Credential: auth.Credential{Project: who.Project, Kind: auth.Grant, Account: true}}
			var created, used int64
			if err := rows.Scan(&a.ID, &a.Name, &created, &a.CreatedBy, &used, &a.Inboxes); err != nil {
				return err
			}
			a.Created, a.Used = store.FromTime(created), store.FromTime(used)
			out = append(out, a)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("list accounts: %w", err)
	}
	return out, nil
}

// Made returns when a credential was made.
func (m *PostOffice) Made(ctx context.Context, credential string) (t time.Time, err error) {
	err = m.db.View(ctx, func(tx *store.Tx) error {
		var at int64
		err := tx.One(ctx, `select created_at from credential where id = $1`, []any{credential}, &at)
		t = store.FromTime(at)
		return err
	})
	return t, err
}

// Opens returns of how many inboxes a credential has a part, with those that are
// deleted and not gone yet.
func (m *PostOffice) Opens(ctx context.Context, credential string) (n int, err error) {
	err = m.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from inbox_key where credential_id = $1`, []any{credential}, &n)
	})
	if err != nil {
		return 0, fmt.Errorf("count inboxes of %s: %w", credential, err)
	}
	return n, nil
}
