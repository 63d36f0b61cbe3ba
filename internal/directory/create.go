package directory

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/extract"
	"postern/internal/policy"
	"postern/internal/store"
)

// MaxBytes bounds what arrives in one inbox, in bytes of messages before sealing.
// The attack: whoever can reach the SMTP port fills the disk.
const MaxBytes = 1 << 30

// A NewInbox is a request for an inbox. The zero NewInbox asks for one whose
// address is drawn.
type NewInbox struct {
	// Address is a name, which gets the domain of this server, or a whole
	// address in it or in a domain that the project has verified. Empty asks for
	// one that is made of DisplayName, or drawn, and is free.
	Address     string
	Next        bool        // if Address is taken, take one like it
	DisplayName string      // at most 100 characters; empty means none
	Mode        policy.Mode // empty means gated_send
	Expires     time.Time   // zero means never
	MaxBytes    int64       // what may arrive in it, in bytes; 0 means [MaxBytes], which is the most
	Connected   bool        // Address is a mailbox at another provider
}

// Plan returns the inbox that n asks for, without keys, and the addresses to try
// one after the other if its own is taken. It writes nothing.
func (d *Directory) Plan(who auth.Principal, n NewInbox) (_ Inbox, more []string, err error) {
	if n.Mode == "" {
		n.Mode = policy.GatedSend
	}
	if !n.Mode.Known() {
		return Inbox{}, nil, fmt.Errorf("%w: mode: must be one of %v", ErrInvalid, policy.Modes())
	}
	// The attack: an agent that holds the project's key, and makes itself an inbox
	// that nobody watches.
	if n.Mode.Looser(policy.GatedSend) && !who.Manages() && (who.Kind != auth.Project || !d.conf.ProjectModes) {
		return Inbox{}, nil, fmt.Errorf("%s may not create an inbox in mode %s: an owner can create it, or raise its mode later: %w", who, n.Mode, auth.ErrForbidden)
	}
	b := Inbox{
		ID: "ibx_" + rand.Text(), Project: who.Project, DisplayName: n.DisplayName, Mode: n.Mode,
		Created: time.Now().UTC().Truncate(time.Microsecond), ModeBy: who.String(), Expires: n.Expires.UTC().Truncate(time.Microsecond), MaxBytes: n.MaxBytes, Epoch: 1, AutoSubmitted: SubmittedAlways,
	}
	if b.MaxBytes == 0 {
		b.MaxBytes = MaxBytes
	}
	if err := b.Check(); err != nil {
		return Inbox{}, nil, err
	}
	name, host, whole := strings.Cut(strings.ToLower(strings.TrimSpace(n.Address)), "@")
	if !whole {
		host = d.conf.Domain
	} else if ascii, err := domain.ASCII(host); err != nil || !strings.Contains(ascii, ".") && ascii != d.conf.Domain {
		return Inbox{}, nil, fmt.Errorf("%w: address: the part after the @ is not a domain", ErrInvalid)
	} else {
		host = ascii // Insert checks whose it is
	}
	if n.Connected {
		// Its provider made the name, so that our rules for new names do not apply.
		if !whole || !ValidName(n.Address) || name == "" || len(name) > 64 {
			return Inbox{}, nil, fmt.Errorf("%w: address: must be the whole address of the mailbox, of letters, digits and . _ + -", ErrInvalid)
		}
		b.Address, b.Connected = name+"@"+host, true
		return b, nil, nil
	}
	if n.Address == "" {
		if name = NameFor(n.DisplayName); name == "" {
			name = drawnName()
		}
		n.Next = true
	}
	if err := mayName(who, name, host == d.conf.Domain); err != nil {
		return Inbox{}, nil, err
	}
	b.Address = name + "@" + host
	if n.Next {
		for _, name := range append(like(name), drawnName(), drawnName()) {
			more = append(more, name+"@"+host)
		}
	}
	return b, more, nil
}

// Check returns an error that wraps [ErrInvalid] if a field that may be changed
// has a value that cannot be taken.
func (b *Inbox) Check() error {
	switch {
	case !utf8.ValidString(b.DisplayName) || utf8.RuneCountInString(b.DisplayName) > 100 || strings.ContainsFunc(b.DisplayName, func(r rune) bool { return !unicode.IsPrint(r) }):
		return fmt.Errorf("%w: display_name: must be at most 100 printable characters", ErrInvalid)
	case extract.CheckName(b.DisplayName) != nil:
		return fmt.Errorf("%w: display_name: %w", ErrInvalid, extract.CheckName(b.DisplayName))
	case strings.ContainsAny(b.DisplayName, "@<>\""):
		// The attack: a name that reads like the address of somebody else.
		return fmt.Errorf("%w: display_name: must not contain @ < > or quotation marks", ErrInvalid)
	case !b.Expires.IsZero() && !b.Expires.After(time.Now()):
		return fmt.Errorf("%w: expires_at: must be in the future", ErrInvalid)
	case b.AutoSubmitted != SubmittedAlways && b.AutoSubmitted != SubmittedUnapproved:
		return fmt.Errorf("%w: auto_submitted: must be %s or %s", ErrInvalid, SubmittedAlways, SubmittedUnapproved)
	case b.MaxBytes < 1 || b.MaxBytes > MaxBytes:
		return fmt.Errorf("%w: max_bytes: must be 1 to %d", ErrInvalid, MaxBytes)
	}
	return nil
}

// Insert stores b, which [Directory.Plan] returned, with its public key. Account
// says that an account makes it, for which a former address of the project is not
// free. That the address is taken is a [TakenError].
func (d *Directory) Insert(ctx context.Context, tx *store.Tx, b Inbox, account bool) error {
	use := d.useDomain
	if b.Connected {
		use = d.leaveDomain
	}
	if err := use(ctx, tx, b.Project, b.Address); err != nil {
		return err
	}
	former := b.Project
	if account {
		former = ""
	}
	used, err := taken(ctx, tx, former, b.Address)
	if err != nil {
		return err
	}
	if used {
		return &TakenError{Address: b.Address}
	}
	ok, err := tx.Changed(ctx, `insert into inbox (id, project_id, address, mode, public_key, created_at, display_name, expires_at, max_bytes, epoch, mode_by, connected)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) on conflict do nothing`,
		b.ID, b.Project, b.Address, b.Mode, b.PublicKey, store.Time(b.Created), b.DisplayName, store.Time(b.Expires), b.MaxBytes, b.Epoch, b.ModeBy, store.Flag(b.Connected))
	if err != nil {
		return fmt.Errorf("insert inbox: %w", err)
	}
	if !ok { // another request was faster
		return &TakenError{Address: b.Address}
	}
	if err := tx.Seal(ctx, Sealed(), `id = $1`, b.ID); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `insert into inbox_epoch (inbox_id, epoch, public_key, created_at) values ($1, $2, $3, $4)`,
		b.ID, b.Epoch, b.PublicKey, store.Time(b.Created)); err != nil {
		return fmt.Errorf("insert inbox: %w", err)
	}
	return nil
}

// SetApart marks an inbox, once, as one of an account that its user made by signing up,
// if the account was made so. Such inboxes share none of the project's limits. The mark
// stays when the account's own credential is gone.
func (d *Directory) SetApart(ctx context.Context, tx *store.Tx, inbox, account string) error {
	by := auth.Principal{Kind: auth.System, ID: auth.Signup}
	_, err := tx.ExecContext(ctx, `update inbox set signup = true where id = $1 and exists (select 1 from credential where id = $2 and account and created_by = $3)`, inbox, account, by.String())
	if err != nil {
		return fmt.Errorf("mark inbox of an account: %w", err)
	}
	return nil
}

// IsApart reports whether an inbox is one of an account that its user made by signing
// up.
func IsApart(ctx context.Context, tx *store.Tx, inbox string) (apart bool, err error) {
	if err = tx.One(ctx, `select signup from inbox where id = $1`, []any{inbox}, &apart); err != nil {
		err = fmt.Errorf("read inbox: %w", err)
	}
	return apart, err
}
