package oversight

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"postern/internal/auth"
	"postern/internal/store"
)

// maxOpened bounds the waiting actions that one person has opened. Older ones have to be
// opened again, which costs a look and never allows more.
const maxOpened = 5000

// openedPurpose is what the MACs of openings are for.
const openedPurpose = "opened"

// openedAs returns what the MAC of an opening covers.
func openedAs(who auth.Principal, a *Action) []byte {
	return fmt.Appendf(nil, "%s\x00%s\x00%d\x00%s", a.ID, who, a.Version, a.Hex())
}

// Opened records that who has opened a as it is, which a batch asks for. It writes only
// what is not recorded yet, and nothing unless who is a person who decides and a waits.
func (g *Gate) Opened(ctx context.Context, who auth.Principal, a *Action) error {
	if !who.Decides() || a.State != Pending {
		return nil
	}
	there, err := g.HasOpened(ctx, who, a) // a look first: an update takes the turn of all writers
	if err != nil || there {
		return err
	}
	err = g.db.Update(ctx, func(tx *store.Tx) error {
		mac, err := tx.MAC(openedPurpose, openedAs(who, a))
		if err != nil {
			return err
		}
		// Where the action was decided meanwhile, no row stays behind.
		_, err = tx.ExecContext(ctx, `insert into opened (action_id, person, version, digest, at, mac)
			select id, $2, $3, $4, $5, $6 from action where id = $1 and state = 'pending'
			on conflict (action_id, person) do update set version = excluded.version, digest = excluded.digest, at = excluded.at, mac = excluded.mac`,
			a.ID, who.String(), a.Version, a.Digest, store.Time(time.Now()), mac)
		if err != nil {
			return err
		}
		var n int
		if err := tx.One(ctx, `select count(*) from opened where person = $1`, []any{who.String()}, &n); err != nil || n <= maxOpened {
			return err
		}
		// The attack: a session that opens pages without end fills the database.
		_, err = tx.ExecContext(ctx, `delete from opened where person = $1 and action_id in (select action_id from opened where person = $1 order by at, action_id limit $2)`,
			who.String(), n-maxOpened+maxOpened/10)
		return err
	})
	if err != nil {
		return fmt.Errorf("record that action %s was opened: %w", a.ID, err)
	}
	return nil
}

// HasOpened reports whether who has opened exactly this version of a.
func (g *Gate) HasOpened(ctx context.Context, who auth.Principal, a *Action) (yes bool, err error) {
	err = g.db.View(ctx, func(tx *store.Tx) error {
		var version int64
		var digest, mac []byte
		err := tx.One(ctx, `select version, digest, mac from opened where action_id = $1 and person = $2`, []any{a.ID, who.String()}, &version, &digest, &mac)
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		// The attack: who writes the database says that a person looked.
		yes = err == nil && version == a.Version && bytes.Equal(digest, a.Digest) && tx.Sealed(openedPurpose, openedAs(who, a), mac)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("read whether action %s was opened: %w", a.ID, err)
	}
	return yes, nil
}
