// Package directory knows which inboxes there are: whose they are, which address
// and mode each has, and which names and domains an address may have.
//
// It knows nothing of what is in an inbox, nor of the keys that open it; see
// packages mailbox and keyring. It makes rows of inboxes and reads them; what
// changes one later writes its own columns.
package directory

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/policy"
	"postern/internal/store"
)

// The errors of this package, one for each answer that a door can give.
var (
	// ErrNoInbox means that there is no such inbox in the caller's project.
	ErrNoInbox = errors.New("no such inbox")
	// ErrTaken means that the address is in use.
	ErrTaken = errors.New("the address is taken")
	// ErrInvalid means that a field of a request cannot be taken; the text
	// names the field and the limit. The packages above wrap it, too.
	ErrInvalid = errors.New("invalid request")
	// ErrReserved means that nobody, or only an owner, can have an address.
	ErrReserved = errors.New("reserved")
	// ErrDomain means that the project of an inbox has not, or no longer, proved
	// that it controls the inbox's domain.
	ErrDomain = errors.New("the domain is not verified for this project")
	// ErrReadOnly means that an inbox sends nothing, not even with an approval.
	ErrReadOnly = fmt.Errorf("the inbox is in mode read_only and sends nothing: a person can raise its mode, with a code or by approving the agent's request (%w)", auth.ErrForbidden)
)

// Config says what inboxes can be made.
type Config struct {
	Domain string // new inboxes get addresses in it; required

	// ProjectModes says that a project's key, too, makes inboxes in modes looser
	// than gated_send; otherwise only an owner does.
	ProjectModes bool
}

// A Directory makes and finds inboxes. It is safe for concurrent use.
type Directory struct {
	db   *store.DB
	conf Config
}

// New returns the directory of the inboxes in db.
func New(db *store.DB, c Config) *Directory {
	c.Domain = strings.ToLower(c.Domain)
	return &Directory{db: db, conf: c}
}

// Domain returns the domain of the server's own addresses.
func (d *Directory) Domain() string { return d.conf.Domain }

// AutoSubmitted says whether mail of an inbox has the field Auto-Submitted (RFC 3834).
type AutoSubmitted string

// The values of [AutoSubmitted].
const (
	SubmittedAlways     AutoSubmitted = "always"          // all mail has it; the default
	SubmittedUnapproved AutoSubmitted = "unless_approved" // mail that a person approved leaves without it
)

// An Inbox is an agent's address with its mail.
type Inbox struct {
	ID          string
	Project     string
	Address     string // lower case
	DisplayName string // what it calls itself beside its address, or empty
	Mode        policy.Mode
	ModeAt      time.Time // since when; zero means since it was made
	ModeBy      string    // a principal; empty where that was not written down
	ModeReason  string    // why it changed last, for a person; may be empty
	Created     time.Time
	Expires     time.Time // from when the server deletes it; zero means never
	Deleted     time.Time // since when it takes and shows no mail; zero means that it does
	Purge       time.Time // of a deleted one: when what is in it goes for good
	MaxBytes    int64     // what may arrive in it, in bytes of messages before sealing
	// Connected says that it is a mailbox at another provider: nothing arrives for it
	// over SMTP, and what it sends leaves through that provider.
	Connected bool
	// AutoSubmitted says when mail of the inbox names a program as its author.
	AutoSubmitted AutoSubmitted

	PublicKey []byte // of its newest epoch; mail is sealed to it
	Epoch     int64  // the number of the newest epoch, from 1

	// RowMode is the mode that the row has, even if it was changed behind the
	// server's back and is not trusted. Only a conditional update needs it.
	RowMode policy.Mode
}

// MayManage returns an error unless who manages inboxes: a project's key or a
// person of it.
func MayManage(who auth.Principal) error {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return fmt.Errorf("%s may not manage inboxes: %w", who, auth.ErrForbidden)
	}
	return nil
}

const inboxColumns = `id, project_id, address, display_name, mode, mode_at, mode_by, mode_reason, created_at, expires_at, deleted_at, purge_at, max_bytes, public_key, epoch, connected, auto_submitted`

func scanInbox(row func(...any) error) (Inbox, error) { return scanInboxAnd(row) }

// scanInboxAnd scans the columns of an inbox and further ones.
func scanInboxAnd(row func(...any) error, further ...any) (Inbox, error) {
	var b Inbox
	var created, modeAt, expires, deleted, purge, connected int64
	err := row(append([]any{
		&b.ID, &b.Project, &b.Address, &b.DisplayName, &b.Mode, &modeAt, &b.ModeBy, &b.ModeReason, &created, &expires, &deleted, &purge, &b.MaxBytes, &b.PublicKey, &b.Epoch, &connected, &b.AutoSubmitted,
	}, further...)...)
	b.Created, b.Expires, b.Deleted, b.Purge = store.FromTime(created), store.FromTime(expires), store.FromTime(deleted), store.FromTime(purge)
	b.ModeAt, b.RowMode, b.Connected = store.FromTime(modeAt), b.Mode, connected != 0
	if b.MaxBytes == 0 { // made before there was a setting
		b.MaxBytes = MaxBytes
	}
	return b, err
}

// live is the condition of inboxes that take and show mail, but for its last
// parameter, which is the time now. An expired one does not, even before
// anything has deleted it.
const live = `deleted_at = 0 and (expires_at = 0 or expires_at > `

// validName is what the id or address of an inbox may look like. It is compiled
// when it is first needed: each part of a sandbox is this program, and would
// otherwise compile it as it starts.
var validName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9._+@-]{3,320}$`) })

// ValidName reports whether name may be the id or the address of an inbox. Other
// names need no query.
func ValidName(name string) bool { return validName().MatchString(name) }

// Inboxes returns the inboxes that who manages, or those that its credential
// has a part in.
func (d *Directory) Inboxes(ctx context.Context, who auth.Principal) (out []Inbox, err error) {
	where, args := `project_id = $1 and `+live+`$2)`, []any{who.Project, store.Time(time.Now())}
	switch {
	case who.Kind == auth.Grant:
		where += ` and id in (select k.inbox_id from inbox_key k where k.credential_id = $3 and (k.expires_at = 0 or k.expires_at > $2))`
		args = append(args, who.ID)
	case MayManage(who) != nil:
		where += ` and id = $3`
		args = append(args, who.Inbox)
	}
	err = d.db.View(ctx, func(tx *store.Tx) error {
		out, err = List(ctx, tx, where, args...)
		return err
	})
	return out, err
}

// List returns the inboxes that match a condition in SQL, ordered by address. It
// checks neither that they are live nor that their modes are genuine: use
// [Lookup] before anything depends on a mode.
func List(ctx context.Context, tx *store.Tx, where string, args ...any) (out []Inbox, err error) {
	out, err = store.List(ctx, tx, scanInbox, `select `+inboxColumns+` from inbox where `+where+` order by address`, args...)
	if err != nil {
		return nil, fmt.Errorf("list inboxes: %w", err)
	}
	// Databases order text by rules of their own; a page begins where the one
	// before it ended by ours.
	slices.SortStableFunc(out, func(a, b Inbox) int { return strings.Compare(a.Address, b.Address) })
	return out, nil
}

// Find returns an inbox of who's project by its id or its address.
func (d *Directory) Find(ctx context.Context, who auth.Principal, name string) (b Inbox, err error) {
	err = d.db.View(ctx, func(tx *store.Tx) error {
		b, err = LookupFor(ctx, tx, who, name)
		return err
	})
	return b, err
}

// LookupFor is [Lookup] within who's project.
func LookupFor(ctx context.Context, tx *store.Tx, who auth.Principal, name string) (Inbox, error) {
	b, err := Inbox{}, ErrNoInbox
	if ValidName(name) {
		b, err = Lookup(ctx, tx, name)
	}
	if err == nil && b.Project != who.Project {
		err = ErrNoInbox
	}
	if err != nil {
		return Inbox{}, fmt.Errorf("inbox %q: %w", name, err)
	}
	return b, nil
}

// Lookup returns an inbox by its id or address, or [ErrNoInbox] unless it takes
// and shows mail now.
func Lookup(ctx context.Context, tx *store.Tx, name string) (Inbox, error) {
	return verified(ctx, tx, `(id = $1 or address = $2) and `+live+`$3)`, name, strings.ToLower(name), store.Time(time.Now()))
}

// Sealed are the rows of inboxes, in the columns that say whose they are and in
// which mode. The attack: somebody who can write the database loosens a mode.
func Sealed() store.Sealed {
	return store.Sealed{Table: "inbox", Key: []string{"id"}, Only: []string{"id", "project_id", "mode"}}
}

// verified returns the first inbox that matches a condition in SQL, by address, or
// [ErrNoInbox]. If its mode was changed in the database behind the server's back, it
// returns the inbox in gated_all: a person decides on everything until the mode is
// changed in the usual way.
func verified(ctx context.Context, tx *store.Tx, where string, args ...any) (Inbox, error) {
	if !tx.Keyed() {
		return Inbox{}, fmt.Errorf("read inbox: %w", store.ErrNoKey)
	}
	list, err := store.List(ctx, tx, func(row func(...any) error) (Inbox, error) {
		var id, project, mode, seal any
		b, err := scanInboxAnd(row, &id, &project, &mode, &seal)
		if err == nil && !tx.SealHolds(Sealed(), map[string]any{"id": id, "project_id": project, "mode": mode}, seal) {
			b.Mode, b.ModeReason = policy.GatedAll, "its mode was changed in the database behind the server's back"
		}
		return b, err
	}, `select `+inboxColumns+`, id, project_id, mode, seal from inbox where `+where+` order by address limit 1`, args...)
	if err != nil {
		return Inbox{}, fmt.Errorf("read inbox: %w", err)
	}
	if len(list) == 0 {
		return Inbox{}, ErrNoInbox
	}
	return list[0], nil
}

// LookupStored returns an inbox by its id, also one that is deleted or expired.
func LookupStored(ctx context.Context, tx *store.Tx, id string) (Inbox, error) {
	return verified(ctx, tx, `id = $1`, id)
}

// AddressAndMode returns the address and the mode of an inbox.
func AddressAndMode(ctx context.Context, tx *store.Tx, id string) (address string, mode policy.Mode, err error) {
	err = tx.One(ctx, `select address, mode from inbox where id = $1 and deleted_at = 0`, []any{id}, &address, &mode)
	return address, mode, err
}
