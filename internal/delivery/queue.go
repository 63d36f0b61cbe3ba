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

// A Mailbox is the inbox's side of a delivery. Methods that get a tx work as
// part of it.
type Mailbox interface {
	// Announce records an event of b about the messages and actions with the
	// given IDs, and wakes its subscribers once tx is committed.
	Announce(ctx context.Context, tx *store.Tx, b directory.Inbox, t event.Type, objects ...string) error
	// KeepSent stores a message that b sent, and returns its ID.
	KeepSent(ctx context.Context, tx *store.Tx, b directory.Inbox, raw []byte) (id string, err error)
	// KeepReceived stores a message for b, a bounce, and returns its ID.
	KeepReceived(ctx context.Context, tx *store.Tx, b directory.Inbox, raw []byte) (id string, err error)
	// CountSent adds n to the number of messages that the inbox has sent to an
	// address. It is negative after a late bounce.
	CountSent(ctx context.Context, tx *store.Tx, inbox, address string, n int64) error
	// EnsureCopy makes the overseers' copy durable, if the action requires one.
	// After an error nothing of the action may leave.
	EnsureCopy(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope) error
	// Judge is called after results of b were recorded. It puts b into a
	// stricter mode if too many of them are bad.
	Judge(ctx context.Context, tx *store.Tx, b directory.Inbox, now time.Time) error
}

// Parts are the dependencies of a [Queue]. All are required unless the field
// says otherwise.
type Parts struct {
	Directory   *directory.Directory // the sending inboxes
	Mailbox     Mailbox
	Suppression *Suppressions
	Scrubber    *scrub.Scrubber // touched whenever mail is open in this process
	Transport   Transport       // may be nil if nothing is ever approved
	Signer      *signing.Ring   // signs outgoing mail; nil means no signatures
	Secret      []byte          // the server's; Message-IDs are kept as hashes under keys derived from it
}

// A Queue delivers approved mail to its recipients. It is safe for concurrent
// use, also by several processes on one database: each step is a conditional
// update.
type Queue struct {
	log   *slog.Logger
	db    *store.DB
	gate  *oversight.Gate
	parts Parts
	conf  Config

	carrier Carrier // nil until [Queue.Use]
}

// Use sets what sends the mail of mailboxes at other providers. Call it before
// anything is delivered. Without one their mail waits.
func (q *Queue) Use(c Carrier) { q.carrier = c }

// Check returns why env can never leave from b, or nil.
func (q *Queue) Check(ctx context.Context, b directory.Inbox, env mail.Envelope) error {
	if !b.Connected || q.carrier == nil {
		return nil
	}
	return q.carrier.Check(ctx, b, env)
}

// NewQueue returns the delivery queue of the mail that gate approves.
func NewQueue(log *slog.Logger, db *store.DB, gate *oversight.Gate, p Parts, c Config) *Queue {
	c.fill()
	return &Queue{log: log, db: db, gate: gate, parts: p, conf: c}
}

// Unroutable returns the domains of recipients to which this server has no
// route for mail of an inbox, and a note for the reviewer. Both are empty if the
// transport is no [Guide], and for mailboxes at other providers.
func (q *Queue) Unroutable(ctx context.Context, inbox string, recipients []string) (domains []string, note string) {
	g, ok := q.parts.Transport.(Guide)
	if !ok {
		return nil, ""
	}
	var b directory.Inbox
	err := q.db.View(ctx, func(tx *store.Tx) (err error) {
		b, err = directory.LookupStored(ctx, tx, inbox)
		return err
	})
	if err == nil && b.Connected {
		return nil, ""
	}
	domains, hint := g.Unroutable(ctx, recipients)
	if len(domains) == 0 {
		return nil, ""
	}
	return domains, fmt.Sprintf("this server has no route to %s: even if approved, delivery fails and nothing leaves; %s", mail.Printable(strings.Join(domains, ", "), 500), hint)
}

// recall makes deliveries uncertain that this process has started more often
// than their rows say. The attack: somebody restores an older version of a row,
// so that the recipient gets the message twice.
func (q *Queue) recall(tx *store.Tx, action string, ds []Delivery) {
	for i := range ds {
		if d := &ds[i]; d.open() && q.gate.PartBegun(tx, action, d.n) > d.Attempts {
			d.State, d.Detail = Uncertain, "an older version of its row in the database was put back behind the server's back: it may or may not have been sent"
		}
	}
}

// PartsOf implements [oversight.Parter].
func (q *Queue) PartsOf(ctx context.Context, tx *store.Tx, a oversight.Action) (out []oversight.Part, err error) {
	ds, err := deliveries(ctx, tx, a.ID, nil)
	q.recall(tx, a.ID, ds)
	for _, d := range ds {
		out = append(out, d.part())
	}
	return out, err
}

// Deliveries returns the delivery state of each recipient of an action that who
// may see. There are none before the first attempt.
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

// copyWait is how long mail is delayed whose overseers' copy could not be made.
const copyWait = 2 * time.Minute

// A batch is the recipients who get the same bytes in one SMTP transaction.
type batch struct {
	hop    Hop
	to     []Delivery
	hidden string // address of the only recipient, if the header does not name it (Bcc)
}

// Execute implements [oversight.Executor]. It delivers to the recipients that
// are due: enqueue, then for each batch begin, send and record. If recipients
// remain, the outcome is approved with the time of the next attempt.
func (q *Queue) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	defer q.parts.Scrubber.Touch()
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was sent: " + err.Error()}
	}
	// The results are read even if ctx ends: some of the message may have been
	// sent.
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
	if b.Connected && a.Kind != policy.KindCopy { // the copy is this server's own mail
		due = q.together(b, ds)
	}
	if len(due) > 0 {
		// The overseers' copy is durable before anything leaves. Otherwise a
		// crash could let mail out unseen.
		if err := q.parts.Mailbox.EnsureCopy(ctx, a, b, env); err != nil {
			q.log.WarnContext(ctx, "make copy for overseers", "action", a.ID, "err", err)
			return oversight.Outcome{State: oversight.Approved, After: copyWait, Free: true, Detail: "waits: the overseers' copy could not be made or may not leave"}
		}
	}
	var g errgroup.Group
	// Batches of one action; the limits of destinations apply besides.
	g.SetLimit(4)
	for _, x := range due {
		g.Go(func() error {
			if err := q.deliver(ctx, a, b, env, x); err != nil && !errors.Is(err, oversight.ErrStopped) {
				q.log.ErrorContext(ctx, "deliver", "action", a.ID, "destination", x.hop.Name, "err", err)
			}
			return nil
		})
	}
	_ = g.Wait() // no function returns an error
	err = q.db.View(done, func(tx *store.Tx) error {
		ds, err = deliveries(done, tx, a.ID, &env)
		q.recall(tx, a.ID, ds)
		return err
	})
	if err != nil {
		return oversight.Outcome{State: oversight.Unknown, Detail: "some of it may have been sent: the server's records could not be read: " + err.Error()}
	}
	o := outcome(ds, time.Now())
	// An execution in which nobody was tried does not count as an attempt.
	o.Free = o.State == oversight.Approved && attempts(ds) == before
	return o
}

// attempts returns the sum of all attempts.
func attempts(ds []Delivery) (n int64) {
	for _, d := range ds {
		n += d.Attempts
	}
	return n
}

// enqueue creates the missing delivery records and settles the recipients that
// must not get mail: suppressed addresses, and all of them if the inbox's
// domain was lost.
func (q *Queue) enqueue(ctx context.Context, a oversight.Action, env mail.Envelope) (b directory.Inbox, ds []Delivery, err error) {
	err = q.db.Update(ctx, func(tx *store.Tx) error {
		if a.Kind == policy.KindCopy {
			// The attack: an agent sends and then deletes its inbox, before the
			// overseers have the copy. So copies are sent for deleted inboxes
			// too.
			b, err = directory.LookupStored(ctx, tx, a.Inbox)
		} else {
			b, err = directory.Lookup(ctx, tx, a.Inbox)
		}
		if err != nil {
			return err
		}
		if b.Mode == policy.ReadOnly && a.Kind == policy.KindSend {
			// A message that a person approved is not judged by policy again.
			// The attack on relying on that: a message that was approved for a
			// later time leaves an inbox that has been silenced meanwhile.
			return directory.ErrReadOnly
		}
		owner, domain := b.ID, mail.Domain(b.Address)
		if a.Kind == policy.KindCopy { // an unreachable overseer must not hurt the reputation of the inbox
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
		q.recall(tx, a.ID, ds)
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

// batches groups the recipients that are due by destination and by the bytes
// that they get.
func (q *Queue) batches(ctx context.Context, env mail.Envelope, ds []Delivery) (out []batch) {
	hidden := map[string]bool{}
	if q.parts.Signer != nil {
		// Each hidden recipient (Bcc) gets a copy of its own. The signed
		// statement in it names only that recipient, so that nobody learns of
		// the others, and a forwarded copy does not verify for its new reader.
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

// together returns one batch for all recipients of mailbox b that are due.
func (q *Queue) together(b directory.Inbox, ds []Delivery) []batch {
	x := batch{hop: Hop{Kind: HopProvider, Name: "provider of " + b.ID}}
	now := time.Now()
	for _, d := range ds {
		if d.open() && !d.Next.After(now) {
			x.to = append(x.to, d)
		}
	}
	if len(x.to) == 0 {
		return nil
	}
	return []batch{x}
}

// carry sends the batch through the provider of b.
func (q *Queue) carry(ctx context.Context, b directory.Inbox, e mail.Envelope) []mail.Delivery {
	if q.carrier == nil {
		return all(e.To, mail.NotSent, "this server connects to no mailboxes at other providers")
	}
	out, err := q.carrier.Carry(ctx, b, e)
	if err == nil && len(out) != len(e.To) {
		return all(e.To, mail.Uncertain, "the provider returned results for other recipients") // unreachable: its contract
	}
	if err != nil {
		return all(e.To, mail.NotSent, err.Error())
	}
	return out
}

// deliver sends one batch and records the results.
func (q *Queue) deliver(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope, x batch) error {
	holder, ok, err := q.begin(ctx, a, b, env, x)
	if err != nil || !ok {
		return err
	}
	results := q.send(ctx, a, b, env, x)
	// The results are recorded even if ctx has ended: without a record, the
	// deliveries would become uncertain.
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

// begin records the intent to send x before the conversation starts. If x must
// wait, it records until when instead, and ok is false. Holder identifies the
// connection slot at the destination.
func (q *Queue) begin(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope, x batch) (holder string, ok bool, err error) {
	sent := q.sentHash(b.ID, messageIDOf(env.Raw)) // outside of the transaction: the message may be large
	err = q.db.Update(ctx, func(tx *store.Tx) error {
		now := time.Now()
		ds, err := deliveries(ctx, tx, a.ID, nil)
		if err != nil {
			return err
		}
		q.recall(tx, a.ID, ds)
		var wait time.Time
		var why string
		if a.Kind != policy.KindCopy { // overseers of a suspended inbox still get their copies
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
				// Sealing a row makes it trusted. The attack: a forged row
				// becomes genuine by being deferred. So its state is checked
				// first.
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
			// Conditional on the state and the attempts that were read: of two
			// processes that start the same delivery, one succeeds.
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
		if a.Kind == policy.KindCopy { // no reports come back for it: its reverse path is empty
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

// send hands the batch to the transport and returns one result for each of
// x.to.
func (q *Queue) send(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope, x batch) []mail.Delivery {
	e := mail.Envelope{From: env.From, Raw: env.Raw}
	for _, d := range x.to {
		e.To = append(e.To, d.Recipient)
	}
	if x.hop.Kind == HopProvider {
		return q.carry(ctx, b, e)
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
		// The transport fails as a whole only for a message that it can never
		// send, so a retry is pointless.
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

// sign returns the header fields to put before the approved bytes: the signed
// statement and DKIM signatures. Without a signer it returns nothing.
func (q *Queue) sign(ctx context.Context, a oversight.Action, b directory.Inbox, raw []byte, hidden string) ([]byte, error) {
	if q.parts.Signer == nil {
		return nil, nil
	}
	domain := mail.Domain(b.Address)
	if b.Connected { // a copy for overseers, which is this server's own mail
		domain = q.parts.Directory.Domain()
	}
	s := statement.Statement{
		Domain: domain, Inbox: b.Address, Project: b.Project, Mode: string(b.Mode), Approved: statement.ByPolicy, At: time.Now(),
	}
	if _, ok := a.Person(); ok {
		s.Approved = statement.ByPerson
	}
	if hidden != "" {
		s.Hidden = statement.HideRecipient(hidden)
	}
	prefix, err := q.parts.Signer.Sign(ctx, raw, s)
	if errors.Is(err, signing.ErrNotFound) { // first message of the domain: create its keys
		if err := q.parts.Signer.Prepare(ctx, s.Domain); err != nil {
			return nil, err
		}
		prefix, err = q.parts.Signer.Sign(ctx, raw, s)
	}
	return prefix, err
}

// messageIDOf returns the Message-ID of a message, or its SHA-256 in
// hexadecimal if it has none.
func messageIDOf(raw []byte) string {
	header, _, _ := strings.Cut(string(raw[:min(len(raw), 256<<10)]), "\r\n\r\n")
	if id := mail.Read([]byte(header + "\r\n\r\n")).MessageID; id != "" {
		return id
	}
	return fmt.Sprintf("%x", sha256.Sum256(raw))
}

// sentHash returns the keyed hash under which a Message-ID is stored. A copy of
// the database cannot be searched for a known Message-ID.
func (q *Queue) sentHash(inbox, messageID string) []byte {
	return seal.Hash(q.parts.Secret, inbox, "postern sent v1", messageID)
}

// Unqueue deletes the deliveries of an action that was deferred before anything
// was sent and is now about another message. They are identified by their index
// among the recipients, which the new message changes.
func (q *Queue) Unqueue(ctx context.Context, tx *store.Tx, action string) error {
	if _, err := tx.ExecContext(ctx, `delete from delivery where action_id = $1`, action); err != nil {
		return fmt.Errorf("forget deliveries of %s: %w", action, err)
	}
	return nil
}
