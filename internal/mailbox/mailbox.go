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
// and [delivery.Queue.Execute] is called by the gate after the decision.
package mailbox

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"postern/internal/delivery"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/keyring"
	"postern/internal/lookalike"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/quota"
	"postern/internal/scrub"
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

// Config says where a [PostOffice] keeps things and what it works with.
type Config struct {
	Blobs     *store.Blobs       // where sealed messages are kept; required
	Transport delivery.Transport // takes approved mail out; nil only where nothing is ever approved
	Domain    string             // new inboxes get addresses in it; required
	// QuarantineScore is the scan's score, 0 to 1, from which mail that arrives
	// waits for a person; 0 means that no score holds it, only the sender's
	// DMARC policy does.
	QuarantineScore float64
	Secret          []byte          // the server's own; Message-IDs are kept as hashes under keys derived from it. Empty, the database alone could be searched for one
	Signer          *signing.Ring   // signs what leaves; nil means that nothing is signed
	Delivery        delivery.Config // bounds how mail leaves
	Demotion        Demotion        // what puts an inbox that sends by itself back to gated_send

	// ProjectModes says that a project's key makes inboxes in modes looser than
	// gated_send, too; else only an owner does.
	ProjectModes bool

	// Scrub is told when mail is open in this process; nil means that nobody
	// overwrites the memory that it leaves.
	Scrub *scrub.Scrubber

	// Known has the domains that projects know; nil means a register of its own.
	Known *lookalike.Register

	// PublicURL is where people reach this server, "https://mail.example.com": the
	// link in bulk mail leads there. Empty, bulk mail names its own inbox.
	PublicURL string

	InboxLimits   quota.Limits // what an inbox sends at most, if nobody says otherwise
	ProjectLimits quota.Limits // what all inboxes of a project send together
}

// PostOffice receives and sends for every inbox. It is safe for concurrent use.
type PostOffice struct {
	Directory *directory.Directory // which inboxes there are
	Keys      *keyring.Ring        // which credentials open them

	Quotas *quota.Quotas // what inboxes and projects may send

	Index     *Index      // searches
	Drafts    *Drafts     // messages that are being written
	AllowList *AllowLists // to whom inboxes write without an approval
	Overseers *Overseers  // who gets copies of what monitored inboxes send
	Contexts  *Contexts   // what waiting actions are about, for reviewers

	Delivery    *delivery.Queue        // delivers what the gate has approved
	Suppression *delivery.Suppressions // addresses that projects write to no more
	Signing     *delivery.SigningKeys  // DKIM keys of domains

	log  *slog.Logger
	db   *store.DB
	gate *oversight.Gate
	cfg  Config

	watch *event.Watch

	scrub *scrub.Scrubber // told when mail is open in this process

	changed func(inbox string) // called after labels of a connected mailbox have changed; may be nil
	shown   ShownFunc          // may be nil

	found   *found // recent findings of the content checks
	known   *lookalike.Register
	reading *semaphore.Keyed

	maxApart int // a test makes it small
}

// New returns the post office of the inboxes in db and makes it the executor of
// what concerns them: [SendKind], [CopyKind], [ReceiveKind], [ModeKind], [AllowKind].
func New(log *slog.Logger, db *store.DB, gate *oversight.Gate, cfg Config) *PostOffice {
	cfg.Domain = strings.ToLower(cfg.Domain)
	cfg.Demotion.fill()
	if cfg.Scrub == nil {
		cfg.Scrub = &scrub.Scrubber{}
	}
	if cfg.Known == nil {
		cfg.Known = lookalike.New(cfg.Domain)
	}
	m := &PostOffice{
		Directory: directory.New(db, directory.Config{Domain: cfg.Domain, ProjectModes: cfg.ProjectModes}),
		Keys:      keyring.New(db, cfg.Scrub),
		log:       log, db: db, gate: gate, cfg: cfg, watch: event.NewWatch(log, db), scrub: cfg.Scrub, found: newFound(), known: cfg.Known, reading: semaphore.New(maxReading, maxReadingEach),
		maxApart: maxApart,
	}
	m.Quotas = quota.New(db, m.Directory, m.Keys, cfg.InboxLimits, cfg.ProjectLimits)
	m.Index = newIndex(log, db, cfg.Blobs, cfg.Scrub)
	m.Drafts = &Drafts{log: log, db: db, blobs: cfg.Blobs, scrub: cfg.Scrub, post: m}
	m.AllowList = &AllowLists{db: db, gate: gate, post: m}
	m.Overseers = &Overseers{db: db}
	m.Contexts = &Contexts{db: db, post: m, told: map[string]time.Time{}}
	m.Suppression = delivery.NewSuppressions(db, cfg.Secret)
	m.Signing = delivery.NewSigningKeys(db, cfg.Signer, cfg.Domain)
	m.Delivery = delivery.NewQueue(log, db, gate, delivery.Parts{
		Directory: m.Directory, Mailbox: sentBox{m}, Suppression: m.Suppression, Scrubber: cfg.Scrub,
		Transport: cfg.Transport, Signer: cfg.Signer, Secret: cfg.Secret,
	}, cfg.Delivery)
	gate.Handle(SendKind, sendExecutor{m})
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

// Accepts returns [directory.ErrNoInbox] unless mail for the address is received here.
func (m *PostOffice) Accepts(ctx context.Context, address string) error {
	m.scrub.Touch() // the mail itself comes next, whatever becomes of it
	return m.db.Look(ctx, func(tx *store.Tx) error {
		_, err := m.Directory.Addressee(ctx, tx, address)
		return err
	})
}
