// Package mailbox is each agent's email: inboxes that only their own credential
// opens, what arrived in them, and what they propose to send.
//
// What arrives is sealed to the inbox's public key before it is stored; the
// private key is stored only wrapped for each of the inbox's credentials, which
// the server does not keep. So a project key, a person, or whoever copies the
// database can manage inboxes and open none. Losing every credential of an inbox
// loses its mail.
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
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/domain"
	"postern/internal/event"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/scrub"
	"postern/internal/seal"
	"postern/internal/semaphore"
	"postern/internal/signing"
	"postern/internal/store"
)

// How many large messages are in memory at a time, each of them several times:
// sealed, opened, decoded.
const (
	maxReading     = 6
	maxReadingEach = 2 // of one inbox
)

// SendKind is the kind of the actions that [PostOffice.Send] proposes.
const SendKind = policy.KindSend

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
	// Deliver hands e, its Prefix and then its Raw, to the next hop of each
	// recipient and tells what became of each, in the order of e.To. It fails as a whole only when certainly
	// nothing was sent to anybody.
	Deliver(ctx context.Context, e mail.Envelope) ([]mail.Delivery, error)
}

// Config says where a [PostOffice] keeps things and what it works with.
type Config struct {
	Blobs     *store.Blobs // where sealed messages are kept; required
	Transport Transport    // takes approved mail out; nil only where nothing is ever approved
	Domain    string       // new inboxes get addresses in it; required
	// QuarantineScore is the scan's score, 0 to 1, from which mail that arrives
	// waits for a person; 0 means that no score holds it, only the sender's
	// DMARC policy does.
	QuarantineScore float64
	Secret          []byte         // the server's own; Message-IDs are kept as hashes under keys derived from it. Empty, the database alone could be searched for one
	Signer          *signing.Ring  // signs what leaves; nil means that nothing is signed
	Delivery        DeliveryConfig // bounds how mail leaves
	Demotion        Demotion       // what puts an inbox that sends by itself back to gated_send

	// ProjectModes says that a project's key makes inboxes in modes looser than
	// gated_send, too; else only an owner does.
	ProjectModes bool

	// Scrub is told when mail is open in this process; nil means that nobody
	// overwrites the memory that it leaves.
	Scrub *scrub.Scrubber

	// PublicURL is where people reach this server, "https://mail.example.com": the
	// link in bulk mail leads there. Empty, bulk mail names its own inbox.
	PublicURL string

	InboxLimits   Limits // what an inbox sends at most, if nobody says otherwise
	ProjectLimits Limits // what all inboxes of a project send together
}

// PostOffice receives and sends for every inbox. It is safe for concurrent use.
type PostOffice struct {
	log  *slog.Logger
	db   *store.DB
	gate *oversight.Gate
	cfg  Config

	watch *event.Watch

	scrub   *scrub.Scrubber // told when mail is open in this process
	removed atomic.Bool     // wrapped keys were deleted since the database was last vacuumed of them

	found            *found // recent findings of the content checks
	searching        *semaphore.Keyed
	reading          *semaphore.Keyed
	foldMin, foldMax int // messages, see index.go; a test makes them small

	mu   sync.Mutex      // guards lent
	lent map[string]loan // by sandbox id; in memory only, gone with the process
}

var (
	_ oversight.Executor  = (*PostOffice)(nil)
	_ oversight.Finisher  = (*PostOffice)(nil)
	_ oversight.Recoverer = (*PostOffice)(nil)
)

// New returns the post office of the inboxes in db and makes it the executor of
// what concerns them: [SendKind], [CopyKind], [ReceiveKind], [ModeKind], [AllowKind].
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, cfg Config) *PostOffice {
	cfg.Domain = strings.ToLower(cfg.Domain)
	cfg.Delivery.fill()
	cfg.Demotion.fill()
	if cfg.Scrub == nil {
		cfg.Scrub = &scrub.Scrubber{}
	}
	m := &PostOffice{log: log, db: db, gate: gate, cfg: cfg, watch: event.NewWatch(log, db), scrub: cfg.Scrub, found: newFound(), searching: semaphore.New(maxSearching, maxSearchingEach), reading: semaphore.New(maxReading, maxReadingEach), foldMin: foldMin, foldMax: foldMax, lent: map[string]loan{}}
	gate.Handle(SendKind, m)
	gate.Handle(ModeKind, modeExecutor{m})
	gate.Handle(AllowKind, allowExecutor{m})
	gate.Handle(ReceiveKind, arrivalExecutor{m})
	gate.Handle(policy.KindArchive, arranger{m})
	gate.Handle(policy.KindTrash, arranger{m})
	gate.Handle(CopyKind, copyExecutor{m})
	return m
}

// Reading waits until a message of an inbox may be read as a whole; call done
// when its bytes are not needed any more. It is for all doors together.
func (m *PostOffice) Reading(ctx context.Context, inbox string) (done func(), err error) {
	return m.reading.Acquire(ctx, inbox)
}

// Domain returns the domain of the inboxes.
func (m *PostOffice) Domain() string { return m.cfg.Domain }

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
	Expires     time.Time // from when it is deleted by itself; zero means never
	Deleted     time.Time // since when it takes and shows no mail; zero means that it does
	Purge       time.Time // of a deleted one: when what is in it goes for good
	MaxBytes    int64     // what may arrive in it, in bytes of messages before sealing

	publicKey []byte // of its newest epoch
	epoch     int64

	rowMode policy.Mode // the row's mode, even if it is not trusted
}

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
	MaxBytes    int64       // what may arrive in it, in bytes; 0 means MaxInboxBytes, which is the most
}

// CreateInbox makes an inbox and its first credential, which is shown this
// once. Who must be a project key, a person, or an account: a grant that gets a
// part in each inbox that it makes, for which it shows its credential. That the
// address is taken is a [TakenError].
func (m *PostOffice) CreateInbox(ctx context.Context, who auth.Principal, n NewInbox, credential auth.Secret) (Inbox, auth.Secret, error) {
	if err := auth.Need(who, auth.Owner); err != nil {
		return Inbox{}, "", err
	}
	account, err := m.account(ctx, who, credential)
	if err != nil {
		return Inbox{}, "", err
	}
	b, more, err := m.plan(who, n)
	if err != nil {
		return Inbox{}, "", err
	}
	pair, err := seal.NewPair(b.ID, b.epoch)
	if err != nil {
		return Inbox{}, "", err
	}
	b.publicKey = pair.Public
	var key auth.Secret
	for {
		err = m.db.Update(ctx, func(tx *store.Tx) error {
			key, err = m.insert(ctx, tx, who, b, pair, account)
			return err
		})
		if !errors.Is(err, ErrTaken) || len(more) == 0 {
			return b, key, m.suggest(ctx, who.Project, err)
		}
		b.Address, more = more[0], more[1:]
	}
}

// account returns the public key of the account that who is, or nil for a
// manager, who gets no part in what it makes.
func (m *PostOffice) account(ctx context.Context, who auth.Principal, credential auth.Secret) ([]byte, error) {
	if who.Kind != auth.Grant {
		return nil, mayManage(who)
	}
	var account bool
	err := m.db.View(ctx, func(tx *store.Tx) error {
		return tx.One(ctx, `select account from credential where id = $1`, []any{who.ID}, &account)
	})
	if err != nil {
		return nil, fmt.Errorf("find grant %s: %w", who.ID, err)
	}
	if !account {
		return nil, mayManage(who)
	}
	k, err := seal.CredentialKey(credential.Reveal(), who.ID)
	if err != nil {
		return nil, err
	}
	return k.PublicKey(), nil
}

// plan returns the inbox that n asks for, without keys, and which addresses it
// may get instead of its own if that is taken.
func (m *PostOffice) plan(who auth.Principal, n NewInbox) (_ Inbox, more []string, err error) {
	if n.Mode == "" {
		n.Mode = policy.GatedSend
	}
	if !n.Mode.Known() {
		return Inbox{}, nil, fmt.Errorf("%w: mode: must be one of %v", ErrInvalid, policy.Modes())
	}
	// The attack: an agent that holds the project's key, and makes itself an inbox
	// that nobody watches.
	if looser(n.Mode, policy.GatedSend) && !who.Manages() && (who.Kind != auth.Project || !m.cfg.ProjectModes) {
		return Inbox{}, nil, fmt.Errorf("%s may not make an inbox in mode %s: an owner may, or raise the mode later: %w", who, n.Mode, auth.ErrForbidden)
	}
	b := Inbox{
		ID: "ibx_" + rand.Text(), Project: who.Project, DisplayName: n.DisplayName, Mode: n.Mode,
		Created: time.Now().UTC().Truncate(time.Microsecond), ModeBy: who.String(), Expires: n.Expires.UTC().Truncate(time.Microsecond), MaxBytes: n.MaxBytes, epoch: 1,
	}
	if b.MaxBytes == 0 {
		b.MaxBytes = MaxInboxBytes
	}
	if err := b.check(); err != nil {
		return Inbox{}, nil, err
	}
	name, host, whole := strings.Cut(strings.ToLower(strings.TrimSpace(n.Address)), "@")
	if !whole {
		host = m.cfg.Domain
	} else if ascii, err := domain.ASCII(host); err != nil || !strings.Contains(ascii, ".") && ascii != m.cfg.Domain {
		return Inbox{}, nil, fmt.Errorf("%w: address: what follows the @ is not a domain", ErrInvalid)
	} else {
		host = ascii // whose it is, insert finds out
	}
	if n.Address == "" {
		if name = nameFor(n.DisplayName); name == "" {
			name = drawnName()
		}
		n.Next = true
	}
	if err := mayName(who, name, host == m.cfg.Domain); err != nil {
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

// check returns an error that wraps [ErrInvalid] if a field that may be changed
// has a value that cannot be taken.
func (b *Inbox) check() error {
	switch {
	case !utf8.ValidString(b.DisplayName) || utf8.RuneCountInString(b.DisplayName) > 100 || strings.ContainsFunc(b.DisplayName, func(r rune) bool { return !unicode.IsPrint(r) }):
		return fmt.Errorf("%w: display_name: must be at most 100 characters that can be seen", ErrInvalid)
	case strings.ContainsAny(b.DisplayName, "@<>\""):
		// The attack: a name that reads like the address of somebody else.
		return fmt.Errorf("%w: display_name: must be without @ < > and quotation marks", ErrInvalid)
	case !b.Expires.IsZero() && !b.Expires.After(time.Now()):
		return fmt.Errorf("%w: expires_at: must be in the future", ErrInvalid)
	case b.MaxBytes < 1 || b.MaxBytes > MaxInboxBytes:
		return fmt.Errorf("%w: max_bytes: must be 1 to %d", ErrInvalid, MaxInboxBytes)
	}
	return nil
}

// insert stores an inbox with its first key and the part of account in it,
// which may be nil.
func (m *PostOffice) insert(ctx context.Context, tx *store.Tx, who auth.Principal, b Inbox, pair seal.Pair, account []byte) (auth.Secret, error) {
	if err := m.useDomain(ctx, tx, b.Project, b.Address); err != nil {
		return "", err
	}
	// The attack: an owner creates an inbox in a mode to which policy lets nobody
	// raise one alone. The operator decides whether a project's key may.
	if looser(b.Mode, policy.GatedSend) && who.Kind == auth.Person {
		from := b
		from.Mode = policy.GatedSend
		if err := m.gate.ByHand(ctx, tx, who, raising(from, b.Mode)); err != nil {
			return "", err
		}
	}
	former := b.Project // may have its own former addresses again; no account of it may
	if account != nil {
		former = ""
	}
	used, err := taken(ctx, tx, former, b.Address)
	if err != nil {
		return "", err
	}
	if used {
		return "", &TakenError{Address: b.Address}
	}
	ok, err := tx.Changed(ctx, `insert into inbox (id, project_id, address, mode, public_key, created_at, display_name, expires_at, max_bytes, epoch, mode_by)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) on conflict do nothing`,
		b.ID, b.Project, b.Address, b.Mode, b.publicKey, store.Time(b.Created), b.DisplayName, store.Time(b.Expires), b.MaxBytes, b.epoch, b.ModeBy)
	if err != nil {
		return "", fmt.Errorf("insert inbox: %w", err)
	}
	if !ok {
		return "", &TakenError{Address: b.Address}
	}
	if err := tx.Seal(ctx, SealedInboxes(), `id = $1`, b.ID); err != nil {
		return "", err
	}
	if _, err := tx.ExecContext(ctx, `insert into inbox_epoch (inbox_id, epoch, public_key, created_at) values ($1, $2, $3, $4)`,
		b.ID, b.epoch, b.publicKey, store.Time(b.Created)); err != nil {
		return "", fmt.Errorf("insert inbox: %w", err)
	}
	id, key, err := auth.NewCredential(ctx, tx, auth.Credential{Project: b.Project, Kind: auth.Agent, Inbox: b.ID, CreatedBy: who.String()})
	if err != nil {
		return "", err
	}
	cred, err := seal.CredentialKey(key.Reveal(), id)
	if err != nil {
		return "", err
	}
	if err := enrol(ctx, tx, who, b.ID, id, cred.PublicKey(), seal.Manage, time.Time{}, pair); err != nil {
		return "", err
	}
	detail := audit.Fields{"address": b.Address, "mode": string(b.Mode), "credential": id}
	if account != nil {
		if err := enrol(ctx, tx, who, b.ID, who.ID, account, seal.Manage, time.Time{}, pair); err != nil {
			return "", err
		}
		detail["grant"] = who.ID
	}
	if err := audit.Append(ctx, tx, who, audit.InboxCreate, b.ID, detail); err != nil {
		return "", err
	}
	return key, m.announce(ctx, tx, b, event.InboxCreated)
}

func mayManage(who auth.Principal) error {
	if who.Kind != auth.Project && who.Kind != auth.Person {
		return fmt.Errorf("%s may not manage inboxes: %w", who, auth.ErrForbidden)
	}
	return nil
}

const inboxColumns = `id, project_id, address, display_name, mode, mode_at, mode_by, mode_reason, created_at, expires_at, deleted_at, purge_at, max_bytes, public_key, epoch`

func scanInbox(row func(...any) error) (Inbox, error) {
	var b Inbox
	var created, modeAt, expires, deleted, purge int64
	err := row(&b.ID, &b.Project, &b.Address, &b.DisplayName, &b.Mode, &modeAt, &b.ModeBy, &b.ModeReason, &created, &expires, &deleted, &purge, &b.MaxBytes, &b.publicKey, &b.epoch)
	b.Created, b.Expires, b.Deleted, b.Purge = store.FromTime(created), store.FromTime(expires), store.FromTime(deleted), store.FromTime(purge)
	b.ModeAt, b.rowMode = store.FromTime(modeAt), b.Mode
	if b.MaxBytes == 0 { // from before it could be said
		b.MaxBytes = MaxInboxBytes
	}
	return b, err
}

// live is the condition of inboxes that are there for mail. One that has
// expired is not, whether it has been noticed or not.
const live = `deleted_at = 0 and (expires_at = 0 or expires_at > `

// Inboxes returns the inboxes that who manages, or those that its credential
// has a part in.
func (m *PostOffice) Inboxes(ctx context.Context, who auth.Principal) (out []Inbox, err error) {
	where, args := `project_id = $1 and `+live+`$2)`, []any{who.Project, store.Time(time.Now())}
	switch {
	case who.Kind == auth.Grant:
		where += ` and id in (select k.inbox_id from inbox_key k where k.credential_id = $3 and (k.expires_at = 0 or k.expires_at > $2))`
		args = append(args, who.ID)
	case mayManage(who) != nil:
		where += ` and id = $3`
		args = append(args, who.Inbox)
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		out, err = inboxes(ctx, tx, where, args...)
		return err
	})
	return out, err
}

func inboxes(ctx context.Context, tx *store.Tx, where string, args ...any) (out []Inbox, err error) {
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
func (m *PostOffice) Find(ctx context.Context, who auth.Principal, name string) (b Inbox, err error) {
	err = m.db.View(ctx, func(tx *store.Tx) error {
		b, err = m.findFor(ctx, tx, who, name)
		return err
	})
	return b, err
}

func (m *PostOffice) findFor(ctx context.Context, tx *store.Tx, who auth.Principal, name string) (Inbox, error) {
	b, err := Inbox{}, ErrNoInbox
	if nameForm().MatchString(name) {
		b, err = m.find(ctx, tx, name)
	}
	if err == nil && b.Project != who.Project {
		err = ErrNoInbox
	}
	if err != nil {
		return Inbox{}, fmt.Errorf("inbox %q: %w", name, err)
	}
	return b, nil
}

// find returns an inbox that is there for mail.
func (m *PostOffice) find(ctx context.Context, tx *store.Tx, name string) (Inbox, error) {
	return watched(ctx, tx)(first(inboxes(ctx, tx, `(id = $1 or address = $2) and `+live+`$3)`, name, strings.ToLower(name), store.Time(time.Now()))))
}

// SealedInboxes are the inboxes, in the columns of their mode.
func SealedInboxes() store.Sealed {
	return store.Sealed{Table: "inbox", Key: []string{"id"}, Only: []string{"id", "project_id", "mode"}}
}

// watched returns an inbox as it was read. If its mode was changed in the database
// it returns the inbox in gated_all: a person decides on everything, until the
// mode is changed in the usual way.
func watched(ctx context.Context, tx *store.Tx) func(Inbox, error) (Inbox, error) {
	return func(b Inbox, err error) (Inbox, error) {
		if err != nil {
			return b, err
		}
		genuine, err := tx.Holding(ctx, SealedInboxes(), `id = $1`, b.ID)
		if err != nil {
			return Inbox{}, err
		}
		if !genuine {
			b.Mode, b.ModeReason = policy.GatedAll, "its mode was changed in the database behind the server's back"
		}
		return b, nil
	}
}

// stored returns an inbox by its id, also one that is deleted.
func (m *PostOffice) stored(ctx context.Context, tx *store.Tx, id string) (Inbox, error) {
	return watched(ctx, tx)(first(inboxes(ctx, tx, `id = $1`, id)))
}

func first(list []Inbox, err error) (Inbox, error) {
	if err == nil && len(list) == 0 {
		err = ErrNoInbox
	}
	if err != nil {
		return Inbox{}, err
	}
	return list[0], nil
}

// Accepts returns [ErrNoInbox] unless mail for the address is received here.
func (m *PostOffice) Accepts(ctx context.Context, address string) error {
	m.scrub.Touch() // the mail itself comes next, whatever becomes of it
	return m.db.View(ctx, func(tx *store.Tx) error {
		_, err := m.addressee(ctx, tx, address)
		return err
	})
}
