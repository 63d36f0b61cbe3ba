package keyring

import (
	"context"
	"errors"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/store"
)

// Expire removes what is wrapped for credentials whose time is over, and
// re-keys their inboxes: what comes after is not sealed to a key that they, with
// a copy of the database, could open.
func (r *Ring) Expire(ctx context.Context) error {
	var list []Part
	err := r.db.View(ctx, func(tx *store.Tx) (err error) {
		list, err = parts(ctx, tx, `(k.expires_at > 0 and k.expires_at <= $1 or c.expires_at > 0 and c.expires_at <= $1)`, store.Time(time.Now()))
		return err
	})
	if err != nil {
		return err
	}
	for _, p := range list {
		err := r.db.Update(ctx, func(tx *store.Tx) error {
			if err := lockInbox(ctx, tx, p.Inbox); err != nil {
				return err
			}
			if _, err := onePart(ctx, tx, p.Inbox, p.Credential); err != nil {
				return err
			}
			b, err := directory.LookupStored(ctx, tx, p.Inbox)
			if err != nil {
				return err
			}
			return r.dropAndRekey(ctx, tx, auth.Principal{Kind: auth.System, ID: "expiry", Project: b.Project}, p, "its time is over")
		})
		if err != nil && !errors.Is(err, ErrNoKey) && !errors.Is(err, directory.ErrNoInbox) { // another process was faster
			return err
		}
	}
	return nil
}

// DropAll removes all keys of an inbox that goes for good: after tx nobody can
// open what is in it.
func (r *Ring) DropAll(ctx context.Context, tx *store.Tx, who auth.Principal, inbox, why string) error {
	list, err := parts(ctx, tx, `k.inbox_id = $1`, inbox)
	if err != nil {
		return err
	}
	for _, p := range list {
		if err := r.drop(ctx, tx, who, p, why); err != nil {
			return err
		}
	}
	for _, table := range []string{"inbox_wrap", "inbox_key"} { // of credentials that had ended
		if _, err := tx.ExecContext(ctx, `delete from `+table+` where inbox_id = $1`, inbox); err != nil {
			return err
		}
	}
	return nil
}

// Forget makes the database overwrite the wrapped keys that were removed since
// the last time. The attack: what was wrapped for a revoked credential, found in
// the database's files by somebody who has both.
func (r *Ring) Forget(ctx context.Context) error {
	if !r.removed.Swap(false) {
		return nil
	}
	if err := r.db.Forget(ctx); err != nil {
		r.removed.Store(true)
		return err
	}
	return nil
}
