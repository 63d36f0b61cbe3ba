package keyring

import (
	"context"
	"errors"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/store"
)

// Expire removes the wrapped keys of expired credentials and re-keys their
// inboxes. Without the re-keying, the holder of an expired credential and of a
// copy of the database could open mail that arrives later.
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
			// The part is read again behind the lock: it may have been revoked,
			// or removed by another process, since the list was read.
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
			return r.dropAndRekey(ctx, tx, auth.Principal{Kind: auth.System, ID: "expiry", Project: b.Project}, p, "expired")
		})
		if err != nil && !errors.Is(err, ErrNoKey) && !errors.Is(err, directory.ErrNoInbox) { // another process was faster
			return err
		}
	}
	return nil
}

// DropAll removes all keys of an inbox that is being purged. Once tx is
// committed, nobody can open the mail in it.
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
	for _, table := range []string{"inbox_wrap", "inbox_key"} { // rows of revoked credentials, which parts leaves out
		if _, err := tx.ExecContext(ctx, `delete from `+table+` where inbox_id = $1`, inbox); err != nil {
			return err
		}
	}
	return nil
}

// Forget makes the database overwrite the wrapped keys that were removed since
// its last call. The attack: somebody who has a revoked credential finds its
// wrapped keys in free pages of the database file.
func (r *Ring) Forget(ctx context.Context) error {
	// The flag is cleared first: a key that is removed meanwhile sets it again
	// for the next call.
	if !r.removed.Swap(false) {
		return nil
	}
	if err := r.db.Forget(ctx); err != nil {
		r.removed.Store(true)
		return err
	}
	return nil
}
