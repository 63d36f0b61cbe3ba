package keyring

import (
	"context"
	"fmt"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/seal"
	"postern/internal/store"
)

// An Account is a grant that may create inboxes and becomes a member of each
// inbox that it creates. A new account has no inboxes.
type Account struct {
	auth.Credential
	Inboxes int // number of inboxes that it can open
}

// Accounts returns the accounts of who's project, oldest first.
func (r *Ring) Accounts(ctx context.Context, who auth.Principal) (out []Account, err error) {
	if err := directory.MayManage(who); err != nil {
		return nil, err
	}
	err = r.db.View(ctx, func(tx *store.Tx) error {
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

// Made returns when a credential was created, or an error that wraps
// [store.ErrNotFound].
func (r *Ring) Made(ctx context.Context, credential string) (t time.Time, err error) {
	err = r.db.View(ctx, func(tx *store.Tx) error {
		var at int64
		err := tx.One(ctx, `select created_at from credential where id = $1`, []any{credential}, &at)
		t = store.FromTime(at)
		return err
	})
	return t, err
}

// Opens returns how many inboxes a credential can open. Deleted inboxes count
// until they are purged.
func (r *Ring) Opens(ctx context.Context, credential string) (n int, err error) {
	err = r.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select count(*) from inbox_key where credential_id = $1`, []any{credential}, &n)
	})
	if err != nil {
		return 0, fmt.Errorf("count inboxes of %s: %w", credential, err)
	}
	return n, nil
}

// AccountKey returns the public key of the account that who is. It returns nil
// for a manager, who cannot open the inboxes that it creates, and an error for
// anybody else.
func (r *Ring) AccountKey(ctx context.Context, who auth.Principal, credential auth.Secret) ([]byte, error) {
	if who.Kind != auth.Grant {
		return nil, directory.MayManage(who)
	}
	var account bool
	err := r.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select account from credential where id = $1`, []any{who.ID}, &account)
	})
	if err != nil {
		return nil, fmt.Errorf("find grant %s: %w", who.ID, err)
	}
	if !account {
		return nil, directory.MayManage(who)
	}
	k, err := seal.CredentialKey(credential.Reveal(), who.ID)
	if err != nil {
		return nil, err
	}
	return k.PublicKey(), nil
}
