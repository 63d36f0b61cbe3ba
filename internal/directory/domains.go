package directory

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/store"
)

// useDomain returns an error unless inboxes of project may have addresses in
// the domain of address. The domain stays the project's until tx is over.
func (d *Directory) useDomain(ctx context.Context, tx *store.Tx, project, address string) error {
	_, name, _ := strings.Cut(address, "@")
	if name == d.conf.Domain {
		return nil
	}
	ok, err := domain.Use(ctx, tx, project, name)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("%w: address: its domain must be %s or one that this project has verified (POST /v1/domains)", ErrInvalid, d.conf.Domain)
	}
	return nil
}

// leaveDomain returns an error if this server receives mail for the domain of an
// address at another provider. The attack: a project connects a mailbox under the
// address of somebody's inbox here.
func (d *Directory) leaveDomain(ctx context.Context, tx *store.Tx, _, address string) error {
	_, name, _ := strings.Cut(address, "@")
	held := name == d.conf.Domain
	if !held {
		var err error
		if _, held, err = domain.Owner(ctx, tx, name); err != nil {
			return err
		}
	}
	if held {
		return fmt.Errorf("%w: address: this server receives the mail for %s itself; create an inbox instead", ErrInvalid, name)
	}
	return nil
}

// released is the domain of addresses that were taken from their inboxes.
const released = "released.invalid"

// MaySend returns [ErrDomain] unless mail may leave from b's address. A
// domain that is lost, or another project's by now, lends its name to nobody.
func (d *Directory) MaySend(ctx context.Context, tx *store.Tx, b Inbox) error {
	_, name, _ := strings.Cut(b.Address, "@")
	if name == d.conf.Domain || b.Connected && name != released {
		return nil // its provider decides which names it lends
	}
	ok, err := domain.Verified(ctx, tx, b.Project, name)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("%s may not send: %w (%w); its DNS records show what is missing", b.Address, ErrDomain, auth.ErrForbidden)
	}
	return nil
}

// Serves reports whether this server receives mail for the domain called name:
// its own, or one that a project holds.
func (d *Directory) Serves(ctx context.Context, name string) (held bool, err error) {
	name, err = domain.ASCII(name)
	if err != nil {
		return false, nil // what is no name is nobody's domain
	}
	if name == d.conf.Domain {
		return true, nil
	}
	err = d.db.View(ctx, func(tx *store.Tx) error {
		_, held, err = domain.Owner(ctx, tx, name)
		return err
	})
	return held, err
}

// Addressee returns the inbox that receives mail for address.
func (d *Directory) Addressee(ctx context.Context, tx *store.Tx, address string) (Inbox, error) {
	if local, name, ok := strings.Cut(address, "@"); ok { // RFC 6531 lets the domain come in either form
		if ascii, err := domain.ASCII(name); err == nil {
			address = local + "@" + ascii
		}
	}
	b, err := Lookup(ctx, tx, address)
	if err != nil {
		return Inbox{}, err
	}
	if b.Connected {
		// The attack: a project connects a server of its own as ceo@victim.example, and
		// gets the mail that other inboxes of this server write to that address.
		return Inbox{}, ErrNoInbox
	}
	if _, name, _ := strings.Cut(b.Address, "@"); name != d.conf.Domain {
		ok, err := domain.Receives(ctx, tx, b.Project, name)
		if err != nil {
			return Inbox{}, err
		}
		if !ok { // somebody else's now, or given up
			return Inbox{}, ErrNoInbox
		}
	}
	return b, nil
}

// InboxesIn returns how many inboxes of project have addresses in the domain
// called name. It is for [domain.Config].
func InboxesIn(ctx context.Context, tx *store.Tx, project, name string) (n int, err error) {
	err = tx.One(ctx, `select count(*) from inbox where project_id = $1 and deleted_at = 0 and address like $2`, []any{project, "%@" + name}, &n)
	if err != nil {
		return 0, fmt.Errorf("count inboxes in %s: %w", name, err)
	}
	return n, nil
}

// FreeAddresses takes the addresses in the domain called name from inboxes of
// projects that held it before: it is project's now. Their mail stays theirs.
// It is for [domain.Config].
func FreeAddresses(ctx context.Context, tx *store.Tx, project, name string) error {
	rows, err := tx.QueryContext(ctx, `update inbox set address = lower(id) || '@`+released+`' where project_id <> $1 and address like $2 returning id, project_id`, project, "%@"+name)
	if err != nil {
		return fmt.Errorf("free addresses in %s: %w", name, err)
	}
	defer rows.Close()
	var freed [][2]string
	for rows.Next() {
		var f [2]string
		if err := rows.Scan(&f[0], &f[1]); err != nil {
			return fmt.Errorf("free addresses in %s: %w", name, err)
		}
		freed = append(freed, f)
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return fmt.Errorf("free addresses in %s: %w", name, err)
	}
	if _, err := tx.ExecContext(ctx, `delete from former_address where project_id <> $1 and address like $2`, project, "%@"+name); err != nil {
		return fmt.Errorf("free addresses in %s: %w", name, err)
	}
	for i, f := range freed {
		who := auth.Principal{Kind: auth.System, ID: "domain", Project: f[1]}
		if err := audit.Append(ctx, tx, who, audit.InboxUnaddress, f[0], audit.Fields{"domain": name, "of": strconv.Itoa(i+1) + "/" + strconv.Itoa(len(freed))}); err != nil {
			return err
		}
	}
	return nil
}
