package delivery

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"postern/internal/mail"
	"postern/internal/store"
)

const deliveryColumns = `n, state, asked, code, status, detail, remote, outside, attempts, first_at, last_at, next_at, settled_at, told_at, complained_at`

// deliveries returns the deliveries of an action in the order of its
// recipients. Without env their addresses are empty: the rows hold none.
func deliveries(ctx context.Context, tx *store.Tx, action string, env *mail.Envelope) (out []Delivery, err error) {
	rows, err := tx.QueryContext(ctx, `select `+deliveryColumns+` from delivery where action_id = $1 order by n`, action)
	if err != nil {
		return nil, fmt.Errorf("list deliveries: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var d Delivery
		var asked, outside, first, last, next, settled, told, complained int64
		err := rows.Scan(&d.n, &d.State, &asked, &d.Code, &d.Status, &d.Detail, &d.Remote, &outside, &d.Attempts, &first, &last, &next, &settled, &told, &complained)
		if err != nil {
			return nil, fmt.Errorf("list deliveries: %w", err)
		}
		d.asked, d.outside, d.told = asked == 1, outside == 1, store.FromTime(told)
		d.First, d.Last, d.Next, d.Settled, d.Complained = store.FromTime(first), store.FromTime(last), store.FromTime(next), store.FromTime(settled), store.FromTime(complained)
		if env != nil && d.n < len(env.To) {
			d.Recipient = env.To[d.n]
		}
		out = append(out, d)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, fmt.Errorf("list deliveries: %w", err)
	}
	return out, doubtful(ctx, tx, action, out)
}

// Sealed returns the rows of deliveries as they are authenticated in the
// database.
func Sealed() store.Sealed {
	return store.Sealed{Table: "delivery", Key: []string{"action_id", "n"}}
}

// sealDelivery authenticates the row of recipient n as tx has written it.
func sealDelivery(ctx context.Context, tx *store.Tx, action string, n int) error {
	return tx.Seal(ctx, Sealed(), `action_id = $1 and n = $2`, action, n)
}

// doubtful makes open deliveries uncertain whose rows this program did not
// write, so that a person decides. The attack: somebody who can write the
// database sets a finished delivery back to queued, so that the recipient gets
// the message twice.
func doubtful(ctx context.Context, tx *store.Tx, action string, ds []Delivery) error {
	if !slices.ContainsFunc(ds, func(d Delivery) bool { return d.open() }) {
		return nil
	}
	rows, err := tx.Rows(ctx, Sealed(), false, `action_id = $1`, action)
	if err != nil {
		return fmt.Errorf("check deliveries: %w", err)
	}
	for i := range ds {
		d := &ds[i]
		held := slices.ContainsFunc(rows, func(r store.SealedRow) bool { return r.Holds && r.Values["n"] == int64(d.n) })
		if d.open() && !held {
			d.State, d.Detail = Uncertain, "its row in the database was changed behind the server's back: it may or may not have been sent"
		}
	}
	return nil
}
