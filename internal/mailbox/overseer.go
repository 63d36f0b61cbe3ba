package mailbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/mail"
	"postern/internal/store"
)

// maxOverseers is how many addresses get the copies of one inbox.
const maxOverseers = 10

// Overseers are the addresses that get copies of what monitored inboxes send.
type Overseers struct{ db *store.DB }

// overseers returns who gets copies of what b sends while it is monitored: its
// own, or else its project's.
func overseers(ctx context.Context, tx *store.Tx, b directory.Inbox) (out []string, err error) {
	for _, scope := range []string{b.ID, b.Project} {
		out, err = tx.Strings(ctx, `select address from overseer where scope = $1`, scope)
		if err != nil {
			return nil, fmt.Errorf("read overseers of %s: %w", scope, err)
		}
		// The attack: an inbox that oversees itself.
		out = slices.DeleteFunc(out, func(a string) bool { return strings.EqualFold(a, b.Address) })
		if len(out) > 0 {
			break
		}
	}
	slices.Sort(out)
	return out, nil
}

// overseen returns the scope whose overseers who asks about: an inbox of who's
// project, or for an empty name the project.
func overseen(ctx context.Context, tx *store.Tx, who auth.Principal, inbox string) (string, error) {
	if inbox == "" {
		return who.Project, nil
	}
	b, err := directory.LookupFor(ctx, tx, who, inbox)
	return b.ID, err
}

// List returns who gets copies of what an inbox sends while it is
// monitored, or for an empty name who does for inboxes that have none of their
// own. Who manages inboxes, or looks.
func (o *Overseers) List(ctx context.Context, who auth.Principal, inbox string) (out []string, err error) {
	if who.Kind != auth.Person && who.Kind != auth.Project {
		return nil, fmt.Errorf("%s may not see its overseers: %w", who, auth.ErrForbidden)
	}
	err = o.db.View(ctx, func(tx *store.Tx) error {
		scope, err := overseen(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		out, err = tx.Strings(ctx, `select address from overseer where scope = $1`, scope)
		return err
	})
	slices.Sort(out)
	return out, err
}

// Set says who gets copies of what an inbox sends while it is
// monitored, or for an empty name who does for inboxes that have none of their
// own. Who is an owner. Without any, a monitored inbox waits for people like one
// in gated_send.
func (o *Overseers) Set(ctx context.Context, who auth.Principal, inbox string, addresses []string) (out []string, err error) {
	if !who.Manages() {
		return nil, fmt.Errorf("%s may not set overseers: only an owner may: %w", who, auth.ErrForbidden)
	}
	if len(addresses) > maxOverseers {
		return nil, fmt.Errorf("%w: addresses: must be at most %d", directory.ErrInvalid, maxOverseers)
	}
	for i, a := range addresses {
		a, err := mail.CheckAddr(fmt.Sprintf("addresses[%d]", i), strings.TrimSpace(a))
		if err != nil {
			return nil, err
		}
		out = append(out, a)
	}
	slices.Sort(out)
	out = slices.Compact(out)
	err = o.db.Update(ctx, func(tx *store.Tx) error {
		scope, err := overseen(ctx, tx, who, inbox)
		if err != nil {
			return err
		}
		if b, err := directory.LookupStored(ctx, tx, scope); err == nil && slices.ContainsFunc(out, func(a string) bool { return strings.EqualFold(a, b.Address) }) {
			return fmt.Errorf("%w: addresses: an inbox cannot oversee itself", directory.ErrInvalid)
		}
		if _, err := tx.ExecContext(ctx, `delete from overseer where scope = $1`, scope); err != nil {
			return fmt.Errorf("set overseers of %s: %w", scope, err)
		}
		for _, a := range out {
			if _, err := tx.ExecContext(ctx, `insert into overseer (scope, address, created_at, created_by) values ($1, $2, $3, $4)`, scope, a, store.Time(time.Now()), who.String()); err != nil {
				return fmt.Errorf("set overseers of %s: %w", scope, err)
			}
		}
		return audit.Append(ctx, tx, who, audit.InboxOverseers, scope, audit.Fields{"addresses": strings.Join(out, ", ")})
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}
