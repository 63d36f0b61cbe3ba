package delivery

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/scrub"
	"postern/internal/seal"
	"postern/internal/signing"
	"postern/internal/statement"
	"postern/internal/store"
)

// A Mailbox is the inbox's side of a delivery. Each method that is given tx works
// as part of it.
type Mailbox interface {
	// Announce records an event of b, about the messages and actions whose IDs
	// objects are, and wakes who waits for it once tx is committed.
	Announce(ctx context.Context, tx *store.Tx, b directory.Inbox, t event.Type, objects ...string) error
	// KeepSent puts a message that b sent into it, and returns its ID.
	KeepSent(ctx context.Context, tx *store.Tx, b directory.Inbox, raw []byte) (id string, err error)
	// KeepReceived puts a message for b, a bounce, into it, and returns its ID.
	KeepReceived(ctx context.Context, tx *store.Tx, b directory.Inbox, raw []byte) (id string, err error)
	// CountSent adds n, which is negative after a late bounce, to the messages
	// that the inbox has sent to an address.
	CountSent(ctx context.Context, tx *store.Tx, inbox, address string, n int64) error
	// EnsureCopy makes the copy for the overseers of b durable, if the action
	// must have one. Nothing of the action leaves after an error.
	EnsureCopy(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope) error
	// Judge is called when results of b were recorded. It puts b into a stricter
	// mode if too many of them are bad.
	Judge(ctx context.Context, tx *store.Tx, b directory.Inbox, now time.Time) error
}

// Parts are what a [Queue] works with. All are required but for the Signer.
type Parts struct {
	Directory   *directory.Directory // the inboxes that it sends for
	Mailbox     Mailbox
	Suppression *Suppressions
	Scrubber    *scrub.Scrubber // told when mail is open in this process
	Transport   Transport       // may be nil where nothing is ever approved
	Signer      *signing.Ring   // signs what leaves; nil means that nothing is signed
	Secret      []byte          // the server's; Message-IDs are kept as hashes under keys derived from it
}

// A Queue delivers approved mail to its recipients. It is safe for concurrent
// use, also by several programs on one database: each step is a conditional
// update.
type Queue struct {
	log   *slog.Logger
	db    *store.DB
	gate  *oversight.Gate
	parts Parts
	conf  Config
}

// NewQueue returns the queue of the mail that gate approves.
func NewQueue(log *slog.Logger, db *store.DB, gate *oversight.Gate, p Parts, c Config) *Queue {
	c.fill()
	return &Queue{log: log, db: db, gate: gate, parts: p, conf: c}
}

// Unroutable returns the domains of recipients to which this server has no route, and
// a note for the reviewer.
func (q *Queue) Unroutable(ctx context.Context, recipients []string) (domains []string, note string) {
	g, ok := q.parts.Transport.(Guide)
	if !ok {
		return nil, ""
	}
	domains, hint := g.Unroutable(ctx, recipients)
	if len(domains) == 0 {
		return nil, ""
	}
	return domains, fmt.Sprintf("this server has no route to %s: even if approved, delivery fails and nothing leaves; %s", mail.Printable(strings.Join(domains, ", "), 500), hint)
}

// recall makes deliveries of ds uncertain that this program has begun more often
// than their rows say: an old row was put back.
func (q *Queue) recall(action string, ds []Delivery) {
	for i := range ds {
		if d := &ds[i]; d.open() && q.gate.PartBegun(action, d.n) > d.Attempts {
			d.State, d.Detail = Uncertain, "an older version of its row in the database was put back behind the server's back: it may or may not have been sent"
		}
	}
}

// PartsOf implements [oversight.Parter].
func (q *Queue) PartsOf(ctx context.Context, tx *store.Tx, a oversight.Action) (out []oversight.Part, err error) {
	ds, err := deliveries(ctx, tx, a.ID, nil)
	q.recall(a.ID, ds)
	for _, d := range ds {
		out = append(out, d.part())
	}
	return out, err
}

// Deliveries returns what became of each recipient of an action that who may
// see in its inbox. There are none before it is first carried out.
func (q *Queue) Deliveries(ctx context.Context, who auth.Principal, action string) (out []Delivery, err error) {
	a, err := q.gate.Action(ctx, who, action)
	if err != nil {
		return nil, err
	}
	var env *mail.Envelope
	if e, err := mail.ParsePayload(a.Payload); err == nil {
		env = &e
	}
	err = q.db.View(ctx, func(tx *store.Tx) error {
		out, err = deliveries(ctx, tx, a.ID, env)
		return err
	})
	return out, err
}

// copyWait is how long mail waits whose copy for its overseers could not be made.
const copyWait = 2 * time.Minute

// A batch is recipients who get one copy in one conversation.
type batch struct {
	hop    Hop
	to     []Delivery
	hidden string // address of the one recipient whom the header does not name, or empty
}

// Execute implements [oversight.Executor]. It delivers to those who are due.
func (q *Queue) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	defer q.parts.Scrubber.Touch()
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was sent: " + err.Error()}
	}
	done := context.WithoutCancel(ctx)
	b, ds, err := q.enqueue(ctx, a, env)
	if errors.Is(err, directory.ErrNoInbox) {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was sent: the inbox has been deleted"}
	}
	if errors.Is(err, directory.ErrReadOnly) {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing more was sent: the inbox is in mode read_only"}
	}
	if err != nil {
		q.log.ErrorContext(ctx, "queue deliveries", "action", a.ID, "err", err)
		return oversight.Outcome{State: oversight.Approved, After: 10 * time.Second, Free: true, Detail: "nothing was sent: the server's records could not be written"}
	}
	before := attempts(ds)
	due := q.batches(ctx, env, ds)
	if len(due) > 0 {
		// Its overseers' copy is durable before anything leaves.
		if err := q.parts.Mailbox.EnsureCopy(ctx, a, b, env); err != nil {
			q.log.WarnContext(ctx, "make copy for overseers", "action", a.ID, "err", err)
			return oversight.Outcome{State: oversight.Approved, After: copyWait, Free: true, Detail: "waits: the overseers' copy could not be made or may not leave"}
		}
	}
	var g errgroup.Group
	g.SetLimit(4)
	for _, x := range due {
		g.Go(func() error {
			if err := q.deliver(ctx, a, b, env, x); err != nil && !errors.Is(err, oversight.ErrStopped) {
				q.log.ErrorContext(ctx, "deliver", "action", a.ID, "destination", x.hop.Name, "err", err)
			}
			return nil
		})
	}
	_ = g.Wait() // nothing returns an error
	err = q.db.View(done, func(tx *store.Tx) error {
		ds, err = deliveries(done, tx, a.ID, &env)
		q.recall(a.ID, ds)
		return err
	})
	if err != nil {
		return oversight.Outcome{State: oversight.Unknown, Detail: "some of it may have been sent: the server's records could not be read: " + err.Error()}
	}
	o := outcome(ds, time.Now())
	o.Free = o.State == oversight.Approved && attempts(ds) == before
	return o
}

func attempts(ds []Delivery) (n int64) {
	for _, d := range ds {
		n += d.Attempts
	}
	return n
}

// enqueue makes the record of each recipient, unless it is there, and settles
// those who must not be written to.
func (q *Queue) enqueue(ctx context.Context, a oversight.Action, env mail.Envelope) (b directory.Inbox, ds []Delivery, err error) {
	err = q.db.Update(ctx, func(tx *store.Tx) error {
		if a.Kind == policy.KindCopy {
			// The attack: an agent that sends and deletes its inbox at once, before
			// its overseers have the copy.
			b, err = directory.LookupStored(ctx, tx, a.Inbox)
		} else {
			b, err = directory.Lookup(ctx, tx, a.Inbox)
		}
		if err != nil {
			return err
		}
		if b.Mode == policy.ReadOnly && a.Kind == policy.KindSend {
			// Policy judges no more what a person has approved. The attack on leaving
			// it at that: what was approved for later leaves an inbox that somebody has
			// silenced meanwhile.
			return directory.ErrReadOnly
		}
		owner, domain := b.ID, mail.Domain(b.Address)
		if a.Kind == policy.KindCopy { // whether an overseer can be reached says nothing of the inbox
			owner, domain = "", ""
		}
		for n := range env.To {
			fresh, err := tx.Changed(ctx, `insert into delivery (action_id, n, inbox_id, domain, state, asked, code, status, detail, remote, outside,
				attempts, first_at, last_at, next_at, settled_at, told_at, complained_at)
				values ($1, $2, $3, $4, $5, 0, 0, '', '', '', 0, 0, 0, 0, $6, 0, 0, 0) on conflict do nothing`,
				a.ID, n, owner, domain, Queued, store.Time(time.Now()))
			if err != nil {
				return fmt.Errorf("queue delivery: %w", err)
			}
			if !fresh {
				continue
			}
			if err := sealDelivery(ctx, tx, a.ID, n); err != nil {
				return err
			}
		}
		if ds, err = deliveries(ctx, tx, a.ID, &env); err != nil {
			return err
		}
		q.recall(a.ID, ds)
		lost := q.parts.Directory.MaySend(ctx, tx, b)
		if lost != nil && !errors.Is(lost, directory.ErrDomain) {
			return lost
		}
		var barred []Delivery
		for i := range ds {
			d := &ds[i]
			if !d.open() {
				continue
			}
			reason, err := q.parts.Suppression.reason(ctx, tx, b.Project, d.Recipient)
			switch {
			case err != nil:
				return err
			case lost != nil:
				d.State, d.Detail = Bounced, "not sent: "+lost.Error()
			case reason != "" && a.Kind != policy.KindCopy:
				d.State = Suppressed
				d.Detail = "not sent: the address is on this project's suppression list (" + string(reason) + "); a person or the project's key can remove it"
			default:
				continue
			}
			if err := q.note(ctx, tx, a, *d); err != nil {
				return err
			}
			barred = append(barred, *d)
		}
		for _, d := range barred {
			if err := q.announceDelivery(ctx, tx, a, b, d); err != nil {
				return err
			}
		}
		return nil
	})
	return b, ds, err
}

// batches groups those who are due by destination and copy.
func (q *Queue) batches(ctx context.Context, env mail.Envelope, ds []Delivery) (out []batch) {
	hidden := map[string]bool{}
	if q.parts.Signer != nil {
		// Each recipient whom the header does not name gets a copy of its own:
		// the statement in it names that one alone, so that a copy which is
		// passed on proves nothing, and none learns of another.
		list, err := env.Hidden()
		if err == nil {
			for _, h := range list {
				hidden[h] = true
			}
		}
	}
	router, _ := q.parts.Transport.(Router)
	now := time.Now()
next:
	for _, d := range ds {
		if !d.open() || d.Next.After(now) {
			continue
		}
		x := batch{hop: Hop{Kind: HopLocal, Name: "local"}, to: []Delivery{d}}
		if router != nil {
			x.hop = router.Hop(ctx, d.Recipient)
		}
		if hidden[d.Recipient] {
			x.hidden = d.Recipient
			out = append(out, x)
			continue
		}
		for i := range out {
			if out[i].hop == x.hop && out[i].hidden == "" {
				out[i].to = append(out[i].to, d)
				continue next
			}
		}
		out = append(out, x)
	}
	return out
}

// deliver takes one copy to one destination and records what became of it.
func (q *Queue) deliver(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope, x batch) error {
	holder, ok, err := q.begin(ctx, a, b, env, x)
	if err != nil || !ok {
		return err
	}
	results := q.send(ctx, a, b, env, x)
	// What happened is recorded whatever else ends now; without a record it
	// would be uncertain.
	done, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	for try := range 5 {
		err = q.db.Update(done, func(tx *store.Tx) error { return q.record(done, tx, a, b, x, holder, results) })
		if err == nil {
			return nil
		}
		select {
		case <-done.Done():
		case <-time.After(time.Duration(try+1) * time.Second):
		}
	}
	return fmt.Errorf("record deliveries: %w", err)
}

// begin records the intent to send x, unless it must wait; then it records for
// how long. Holder is who uses the destination.
func (q *Queue) begin(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope, x batch) (holder string, ok bool, err error) {
	sent := q.sentHash(b.ID, messageIDOf(env.Raw)) // read from a large message, while others can write
	err = q.db.Update(ctx, func(tx *store.Tx) error {
		now := time.Now()
		ds, err := deliveries(ctx, tx, a.ID, nil)
		if err != nil {
			return err
		}
		q.recall(a.ID, ds)
		var wait time.Time
		var why string
		if a.Kind != policy.KindCopy { // an inbox that is suspended does not keep its overseers from knowing why
			if wait, why, err = q.mayLeave(ctx, tx, b, x, now); err != nil {
				return err
			}
		}
		if wait.IsZero() {
			if holder, wait, why, err = q.acquire(ctx, tx, x.hop, len(x.to), now); err != nil {
				return err
			}
		}
		if wait.IsZero() {
			if wait, why, err = q.warm(ctx, tx, b, x, now); err != nil {
				return err
			}
			if !wait.IsZero() {
				if err := q.giveBack(ctx, tx, x.hop, holder, len(x.to)); err != nil {
					return err
				}
			}
		}
		for _, d := range x.to {
			if !wait.IsZero() {
				// Deferring a delivery must not seal a row that cannot be trusted.
				if is, err := among(ds, d.n); err != nil || !is.open() {
					return fmt.Errorf("put delivery %d of %s off: %w", d.n, a.ID, errors.Join(err, oversight.ErrStale))
				}
				_, err := tx.ExecContext(ctx, `update delivery set next_at = $1, detail = $2 where action_id = $3 and n = $4 and settled_at = 0`,
					store.Time(wait), why, a.ID, d.n)
				if err != nil {
					return fmt.Errorf("put delivery off: %w", err)
				}
				if err := sealDelivery(ctx, tx, a.ID, d.n); err != nil {
					return err
				}
				continue
			}
			first := d.First
			if first.IsZero() {
				first = now
			}
			is, err := among(ds, d.n)
			if err != nil {
				return err
			}
			p, err := is.part().Begin()
			if err != nil {
				return fmt.Errorf("begin delivery %d of %s: %w", d.n, a.ID, err)
			}
			taken, err := tx.Changed(ctx, `update delivery set state = $1, attempts = $2, first_at = $3, last_at = $4, outside = $5
				where action_id = $6 and n = $7 and state = $8 and attempts = $9`,
				p.State, p.Attempts, store.Time(first), store.Time(now), store.Flag(x.hop.Kind != HopLocal), a.ID, d.n, is.State, is.Attempts)
			if err != nil {
				return fmt.Errorf("begin delivery: %w", err)
			}
			if !taken {
				return fmt.Errorf("begin delivery %d of %s: %w", d.n, a.ID, oversight.ErrStale)
			}
			if err := sealDelivery(ctx, tx, a.ID, d.n); err != nil {
				return err
			}
			q.gate.BeginPart(tx, a.ID, d.n, p.Attempts)
		}
		if ok = wait.IsZero(); !ok {
			return nil
		}
		if a.Kind == policy.KindCopy { // nobody reports of it: it has no reverse path
			return q.gate.Begin(ctx, tx, a)
		}
		_, err = tx.ExecContext(ctx, `insert into sent_message (inbox_id, hash, action_id, sent_at, copied) values ($1, $2, $3, $4, 0) on conflict do nothing`,
			b.ID, sent, a.ID, store.Time(now))
		if err != nil {
			return fmt.Errorf("note sent message: %w", err)
		}
		return q.gate.Begin(ctx, tx, a)
	})
	return holder, ok, err
}

// send hands the copy to the transport and returns what became of each of x.to.
func (q *Queue) send(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope, x batch) []mail.Delivery {
	e := mail.Envelope{From: env.From, Raw: env.Raw}
	for _, d := range x.to {
		e.To = append(e.To, d.Recipient)
	}
	prefix, err := q.sign(ctx, a, b, env.Raw, x.hidden)
	if err == nil {
		e.Prefix = prefix
		var out []mail.Delivery
		if out, err = q.parts.Transport.Deliver(ctx, e); err == nil && len(out) == len(e.To) {
			return out
		}
		if err == nil {
			err = errors.New("the transport returned results for other recipients") // unreachable: its contract
		}
		// It fails as a whole only when it cannot be sent as it is.
		return all(e.To, mail.Refused, err.Error())
	}
	q.log.ErrorContext(ctx, "sign message", "action", a.ID, "err", err)
	return all(e.To, mail.NotSent, "the message could not be signed")
}

func all(to []string, o mail.Outcome, detail string) (out []mail.Delivery) {
	for _, r := range to {
		out = append(out, mail.Delivery{Recipient: r, Outcome: o, Detail: mail.Printable(detail, 500)})
	}
	return out
}

// sign returns what goes before the approved bytes.
func (q *Queue) sign(ctx context.Context, a oversight.Action, b directory.Inbox, raw []byte, hidden string) ([]byte, error) {
	if q.parts.Signer == nil {
		return nil, nil
	}
	s := statement.Statement{
		Domain: mail.Domain(b.Address), Inbox: b.Address, Project: b.Project, Mode: string(b.Mode), Approved: statement.ByPolicy, At: time.Now(),
	}
	if _, ok := a.Person(); ok {
		s.Approved = statement.ByPerson
	}
	if hidden != "" {
		s.Hidden = statement.HideRecipient(hidden)
	}
	prefix, err := q.parts.Signer.Sign(ctx, raw, s)
	if errors.Is(err, signing.ErrNotFound) { // the first message of a domain
		if err := q.parts.Signer.Prepare(ctx, s.Domain); err != nil {
			return nil, err
		}
		prefix, err = q.parts.Signer.Sign(ctx, raw, s)
	}
	return prefix, err
}

// messageIDOf returns the Message-ID of a message, or its digest.
func messageIDOf(raw []byte) string {
	header, _, _ := strings.Cut(string(raw[:min(len(raw), 256<<10)]), "\r\n\r\n")
	if id := mail.Read([]byte(header + "\r\n\r\n")).MessageID; id != "" {
		return id
	}
	return fmt.Sprintf("%x", sha256.Sum256(raw))
}

// sentHash is what a Message-ID is kept as: who copies the database cannot look
// for one that he knows.
func (q *Queue) sentHash(inbox, messageID string) []byte {
	return seal.Hash(q.parts.Secret, inbox, "postern sent v1", messageID)
}

// Unqueue forgets the recipients of an action that was put off before anything
// was sent, and is now about another message: each is known by its place among
// those of the former message.
func (q *Queue) Unqueue(ctx context.Context, tx *store.Tx, action string) error {
	if _, err := tx.ExecContext(ctx, `delete from delivery where action_id = $1`, action); err != nil {
		return fmt.Errorf("forget deliveries of %s: %w", action, err)
	}
	return nil
}
