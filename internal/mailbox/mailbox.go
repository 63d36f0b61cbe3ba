// Package mailbox is each agent's email: inboxes that only their own credential
// opens, what arrived in them, and what they propose to send.
//
// What arrives is sealed to the inbox's public key before it is stored; the
// private key is stored only wrapped under each of the inbox's credentials,
// which the server does not keep. So a project key, a person, or whoever copies
// the database can manage inboxes and open none. Losing every credential of an
// inbox loses its mail.
//
// What an agent proposes to send is not sealed before it is decided: reviewers
// read it, that is its purpose. Nothing here sends: [PostOffice.Send] proposes,
// and [PostOffice.Execute] is called by the gate after the decision.
package mailbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// SendKind is the kind of the actions that [PostOffice.Send] proposes.
const SendKind = "email.send"

// The errors of this package, one for each answer that a door can give.
var (
	// ErrNoInbox means that there is no such inbox in the caller's project.
	ErrNoInbox = errors.New("no such inbox")
	// ErrTaken means that the address is in use.
	ErrTaken = errors.New("the address is taken")
	// ErrInvalid means that a field of a request cannot be taken; the text
	// names the field and the limit.
	ErrInvalid = errors.New("invalid request")
)

// A Transport takes messages to where they are addressed. Implementations are
// safe for concurrent use.
type Transport interface {
	// Deliver hands e to the next hop of each recipient and tells what became
	// of each, in the order of e.To. It fails as a whole only when certainly
	// nothing was sent to anybody.
	Deliver(ctx context.Context, e mail.Envelope) ([]mail.Delivery, error)
}

// Config says where a [PostOffice] keeps things and what it works with.
type Config struct {
	Blobs     *store.Blobs // where sealed messages are kept; required
	Transport Transport    // takes approved mail out; nil only where nothing is ever approved
	Domain    string       // new inboxes get addresses in it; required
}

// PostOffice receives and sends for every inbox. It is safe for concurrent use.
type PostOffice struct {
	log  *slog.Logger
	db   *store.DB
	gate *oversight.Gate
	cfg  Config

	mu   sync.Mutex      // guards lent
	lent map[string]*Key // by sandbox id; in memory only, gone with the process
}

var (
	_ oversight.Executor = (*PostOffice)(nil)
	_ oversight.Finisher = (*PostOffice)(nil)
)

// New returns the post office of the inboxes in db and makes it the executor of
// [SendKind].
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, cfg Config) *PostOffice {
	cfg.Domain = strings.ToLower(cfg.Domain)
	m := &PostOffice{log: log, db: db, gate: gate, cfg: cfg, lent: map[string]*Key{}}
	gate.Handle(SendKind, m)
	return m
}

// Domain returns the domain of the inboxes.
func (m *PostOffice) Domain() string { return m.cfg.Domain }

// An Inbox is an agent's address with its mail.
type Inbox struct {
	ID      string
	Project string
	Address string // lower case
	Mode    policy.Mode
	Created time.Time

	publicKey []byte
}

var localPart = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$`)

// reserved names belong to whoever runs the domain (RFC 2142 and habit).
var reserved = []string{
	"abuse", "admin", "administrator", "hostmaster", "info", "mailer-daemon", "noc", "no-reply", "noreply", "postmaster",
	"root", "security", "support", "webmaster",
}

// CreateInbox makes an inbox and its first credential, which is shown this
// once. The address is a name, which gets the domain of this server, or a whole
// address in it. Who must be a project key or a person.
func (m *PostOffice) CreateInbox(ctx context.Context, who auth.Principal, address string, mode policy.Mode) (Inbox, auth.Secret, error) {
	if err := mayManage(who); err != nil {
		return Inbox{}, "", err
	}
	address, err := m.checkAddress(address)
	if err != nil {
		return Inbox{}, "", err
	}
	if mode == "" {
		mode = policy.GatedSend
	}
	if mode != policy.GatedSend {
		if slices.Contains(policy.Modes, mode) {
			return Inbox{}, "", fmt.Errorf("%w: mode %s is not supported yet: only %s is", ErrInvalid, mode, policy.GatedSend)
		}
		return Inbox{}, "", fmt.Errorf("%w: mode %q is not a mode: want one of %v", ErrInvalid, mode, policy.Modes)
	}
	public, private, err := newKeys()
	if err != nil {
		return Inbox{}, "", err
	}
	b := Inbox{ID: "ibx_" + rand.Text(), Project: who.Project, Address: address, Mode: mode, Created: time.Now().UTC(), publicKey: public}
	var key auth.Secret
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `insert into inbox (id, project_id, address, mode, public_key, created_at)
			values ($1, $2, $3, $4, $5, $6) on conflict do nothing`, b.ID, b.Project, b.Address, b.Mode, public, store.Time(b.Created))
		if err != nil {
			return fmt.Errorf("insert inbox: %w", err)
		}
		if !ok {
			return fmt.Errorf("%s: %w", address, ErrTaken)
		}
		var credential string
		if credential, key, err = auth.NewInboxKey(ctx, tx, b.Project, b.ID); err != nil {
			return err
		}
		wrapped, err := wrap(private, key, b.ID, credential)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `insert into inbox_key (inbox_id, credential_id, wrapped) values ($1, $2, $3)`, b.ID, credential, wrapped); err != nil {
			return fmt.Errorf("insert inbox key: %w", err)
		}
		return audit.Append(ctx, tx, who, "inbox.create", b.ID, audit.Fields{"address": address, "mode": string(mode), "credential": credential})
	})
	return b, key, err
}

func mayManage(who auth.Principal) error {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return fmt.Errorf("%s may not manage inboxes: %w", who, auth.ErrForbidden)
	}
	return nil
}

func (m *PostOffice) checkAddress(address string) (string, error) {
	name, domain, ok := strings.Cut(strings.ToLower(strings.TrimSpace(address)), "@")
	if ok && domain != m.cfg.Domain {
		return "", fmt.Errorf("%w: address: its domain must be %s", ErrInvalid, m.cfg.Domain)
	}
	if len(name) < 3 || len(name) > 64 || !localPart.MatchString(name) || strings.Contains(name, "..") {
		return "", fmt.Errorf("%w: address: the name must be 3 to 64 of a-z 0-9 . _ -, begin and end with a letter or digit", ErrInvalid)
	}
	if slices.Contains(reserved, name) {
		return "", fmt.Errorf("%w: address: %s is reserved", ErrInvalid, name)
	}
	return name + "@" + m.cfg.Domain, nil
}

const inboxColumns = `id, project_id, address, mode, public_key, created_at`

func scanInbox(row func(...any) error) (Inbox, error) {
	var b Inbox
	var created int64
	err := row(&b.ID, &b.Project, &b.Address, &b.Mode, &b.publicKey, &created)
	b.Created = store.FromTime(created)
	return b, err
}

// Inboxes returns the inboxes that who manages, or the one that it acts for.
func (m *PostOffice) Inboxes(ctx context.Context, who auth.Principal) (out []Inbox, err error) {
	where, args := `project_id = $1`, []any{who.Project}
	if mayManage(who) != nil {
		where, args = `project_id = $1 and id = $2`, append(args, who.Inbox)
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		rows, err := tx.QueryContext(ctx, `select `+inboxColumns+` from inbox where `+where+` order by address`, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			b, err := scanInbox(rows.Scan)
			if err != nil {
				return err
			}
			out = append(out, b)
		}
		return rows.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("list inboxes: %w", err)
	}
	return out, nil
}

// Find returns an inbox of who's project by its id or its address.
func (m *PostOffice) Find(ctx context.Context, who auth.Principal, name string) (b Inbox, err error) {
	err = m.db.View(ctx, func(tx *store.Tx) error {
		b, err = m.find(ctx, tx, name)
		return err
	})
	if err == nil && b.Project != who.Project {
		err = ErrNoInbox
	}
	if err != nil {
		return Inbox{}, fmt.Errorf("inbox %q: %w", name, err)
	}
	return b, nil
}

func (m *PostOffice) find(ctx context.Context, tx *store.Tx, name string) (Inbox, error) {
	var b Inbox
	var created int64
	err := tx.One(ctx, `select `+inboxColumns+` from inbox where id = $1 or address = $2`, []any{name, strings.ToLower(name)},
		&b.ID, &b.Project, &b.Address, &b.Mode, &b.publicKey, &created)
	b.Created = store.FromTime(created)
	if errors.Is(err, store.ErrNotFound) {
		return Inbox{}, ErrNoInbox
	}
	return b, err
}

// Accepts returns [ErrNoInbox] unless mail for the address is received here.
func (m *PostOffice) Accepts(ctx context.Context, address string) error {
	return m.db.View(ctx, func(tx *store.Tx) error {
		_, err := m.find(ctx, tx, address)
		return err
	})
}

// mayOpen returns the error of who may not read the inbox, in words that say
// what would.
func mayOpen(who auth.Principal, inbox string) error {
	switch who.Kind {
	case auth.Agent, auth.Sandbox:
		if who.Inbox != "" && who.Inbox == inbox {
			return nil
		}
		return fmt.Errorf("%s has no key of inbox %s: %w", who, inbox, auth.ErrForbidden)
	case auth.Project, auth.Person, auth.System:
	}
	return fmt.Errorf("a %s manages inboxes and opens none, only the inbox's own key does: %w", who.Kind, auth.ErrForbidden)
}

// Open returns the key of an inbox that credential opens; an empty inbox means
// the one that who acts for. Who is the credential's principal, as
// [auth.CheckKey] told.
func (m *PostOffice) Open(ctx context.Context, who auth.Principal, credential auth.Secret, inbox string) (*Key, error) {
	if who.Kind != auth.Agent {
		return nil, fmt.Errorf("a %s shows no key of an inbox: %w", who.Kind, auth.ErrForbidden)
	}
	if inbox != "" && inbox != who.Inbox {
		return nil, fmt.Errorf("%s has no key of inbox %s: %w", who, inbox, auth.ErrForbidden)
	}
	var wrapped []byte
	err := m.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select wrapped from inbox_key where inbox_id = $1 and credential_id = $2`, []any{who.Inbox, who.ID}, &wrapped)
	})
	if err != nil {
		return nil, fmt.Errorf("read key of inbox %s: %w", who.Inbox, err)
	}
	return unwrap(wrapped, credential, who.Inbox, who.ID)
}

// CheckLoan returns an error unless credential opens the inbox of sandbox.
func (m *PostOffice) CheckLoan(ctx context.Context, sandbox auth.Principal, credential auth.Secret) error {
	_, err := m.loan(ctx, sandbox, credential)
	return err
}

func (m *PostOffice) loan(ctx context.Context, sandbox auth.Principal, credential auth.Secret) (*Key, error) {
	owner, err := auth.CheckKey(ctx, m.db, credential)
	if errors.Is(err, auth.ErrUnauthenticated) {
		return nil, fmt.Errorf("%w: it is not a key of an inbox", ErrInvalid)
	}
	if err != nil {
		return nil, err
	}
	if owner.Kind != auth.Agent || owner.Project != sandbox.Project || owner.Inbox != sandbox.Inbox {
		return nil, fmt.Errorf("%w: it is not a key of the inbox that the sandbox is attached to", ErrInvalid)
	}
	return m.Open(ctx, owner, credential, sandbox.Inbox)
}

// Lend lets sandbox read the inbox that it is attached to, until [PostOffice.Return].
// The key stays in this process; the sandbox never holds it. Who hands it over.
func (m *PostOffice) Lend(ctx context.Context, who, sandbox auth.Principal, credential auth.Secret) error {
	k, err := m.loan(ctx, sandbox, credential)
	if err != nil {
		return err
	}
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		return audit.Append(ctx, tx, who, "inbox.lend", sandbox.Inbox, audit.Fields{"to": sandbox.String()})
	})
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lent[sandbox.ID] = k
	return nil
}

// Return ends what [PostOffice.Lend] began. It does nothing for a sandbox that
// was lent nothing.
func (m *PostOffice) Return(sandboxID string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.lent, sandboxID)
}

// Lent returns the key that was lent to a sandbox, or an error that says how
// its creator lends one.
func (m *PostOffice) Lent(sandbox auth.Principal) (*Key, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.lent[sandbox.ID]
	if k == nil || sandbox.Kind != auth.Sandbox || k.inbox != sandbox.Inbox {
		return nil, fmt.Errorf("this sandbox may not read mail: its creator lends the inbox's key with the header X-Postern-Inbox-Key: %w", auth.ErrForbidden)
	}
	return k, nil
}
