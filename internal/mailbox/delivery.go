package mailbox

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/event"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/signing"
	"postern/internal/statement"
	"postern/internal/store"
)

// An action is one message to several recipients, and each of these is
// delivered, and recorded, by itself: it is an [oversight.Part], whose rules say
// how it moves.
//
// The intent (sending) is durable before the next server is spoken to, and each
// result before the next. The action goes back to the gate as approved for as
// long as some recipient is queued or deferred; what is settled is not touched
// again. A recipient whose outcome is uncertain waits for a person, who is
// asked when all others are settled.

// A DeliveryState is where one recipient of an action is.
type DeliveryState = oversight.PartState

// The states of a delivery.
const (
	DeliveryQueued     = oversight.PartQueued
	DeliverySending    = oversight.PartSending
	DeliveryDelivered  = oversight.PartDelivered
	DeliveryDeferred   = oversight.PartDeferred
	DeliveryBounced    = oversight.PartBounced
	DeliverySuppressed = oversight.PartSuppressed
	DeliveryUncertain  = oversight.PartUncertain
	DeliveryCancelled  = oversight.PartCancelled
)

// A Delivery is what became of one recipient of an action.
type Delivery struct {
	Recipient  string // its address; empty where the message is kept no longer
	State      DeliveryState
	Code       int    // SMTP code of the last reply; 0 where there was none
	Status     string // RFC 3463 code of it; may be empty
	Detail     string // for a person
	Remote     string // server that said so; may be empty
	Attempts   int64
	First      time.Time // when it was first tried; zero if it was not
	Last       time.Time // when it was last tried
	Next       time.Time // when it is tried next; zero once it is settled
	Settled    time.Time // zero while it is not
	Complained time.Time // when its reader complained; zero if he did not

	n       int
	outside bool
	asked   bool
	told    time.Time
}

// open says whether there is still something to do for d without a person.
func (d *Delivery) open() bool { return d.part().Open() }

// part returns what the rules of d look at.
func (d *Delivery) part() oversight.Part {
	return oversight.Part{State: d.State, Asked: d.asked, Attempts: d.Attempts}
}

// among returns the one of ds that has the place n.
func among(ds []Delivery, n int) (Delivery, error) {
	if i := slices.IndexFunc(ds, func(d Delivery) bool { return d.n == n }); i >= 0 {
		return ds[i], nil
	}
	return Delivery{}, fmt.Errorf("delivery %d: %w", n, oversight.ErrStale)
}

// A HopKind says whose server a message goes to next.
type HopKind string

// The kinds of hops.
const (
	HopLocal  HopKind = "local"  // this server
	HopRelay  HopKind = "relay"  // a server that the operator named
	HopDirect HopKind = "direct" // the recipient's, found by DNS
)

// A Hop is where a message for a recipient goes next.
type Hop struct {
	Kind HopKind
	Name string // of the destination that shares limits: a domain, or the host:port of a relay
}

// A Router is a [Transport] that tells where it takes a message. Without it
// all is taken to be local.
type Router interface {
	Hop(ctx context.Context, recipient string) Hop
}

// A Guide is a [Transport] that knows which recipients it cannot reach. Domains
// are the domains of those recipients, each once; hint tells the operator of the
// server what to do about it.
type Guide interface {
	Unroutable(ctx context.Context, recipients []string) (domains []string, hint string)
}

// noWay returns the domains of recipients that this server has no way out to, and
// a note for the reviewer.
func (m *PostOffice) noWay(ctx context.Context, recipients []string) (domains []string, note string) {
	g, ok := m.cfg.Transport.(Guide)
	if !ok {
		return nil, ""
	}
	domains, hint := g.Unroutable(ctx, recipients)
	if len(domains) == 0 {
		return nil, ""
	}
	return domains, fmt.Sprintf("this server has no way out to %s: even if approved, delivery fails and nothing leaves;  %s", mail.Printable(strings.Join(domains, ", "), 500), hint)
}

// A DeliveryConfig bounds how mail leaves.
type DeliveryConfig struct {
	// Instance is the name of this program's data directory among those that
	// share the database. What it held of destinations is free when it starts.
	Instance string

	Lifetime   time.Duration // after the first attempt, when a recipient is given up; 0 means 4 days
	FirstRetry time.Duration // before the second attempt, three times as long before each next, to 4 h; 0 means 5 s

	Connections int // conversations at the same time with one destination; 0 means 4
	PerMinute   int // messages a minute to one destination; 0 means 100
	RelayMax    int // conversations at the same time with one relay or route; 0 means 20

	WarmUp bool // a domain that begins to send directly may write to 50 recipients a day, then 500, then 5000

	// Reputation is what an inbox or a domain is suspended for.
	Reputation Reputation
}

func (c *DeliveryConfig) fill() {
	def := func(d *time.Duration, to time.Duration) {
		if *d <= 0 {
			*d = to
		}
	}
	number := func(n *int, to int) {
		if *n <= 0 {
			*n = to
		}
	}
	def(&c.Lifetime, 4*24*time.Hour)
	def(&c.FirstRetry, 5*time.Second)
	number(&c.Connections, 4)
	number(&c.PerMinute, 100)
	number(&c.RelayMax, 20)
	c.Reputation.fill()
}

const maxRetryAfter = 4 * time.Hour

// retryAfter returns how long to wait after so many attempts.
func (c *DeliveryConfig) retryAfter(attempts int64) time.Duration {
	d := c.FirstRetry
	for range min(attempts-1, 20) {
		if d *= 3; d > maxRetryAfter {
			return maxRetryAfter
		}
	}
	return d
}

const deliveryColumns = `n, state, asked, code, status, detail, remote, outside, attempts, first_at, last_at, next_at, settled_at, told_at, complained_at`

// deliveries returns the recipients of an action. Env may be nil.
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

// SealedDeliveries are the recipients of actions.
func SealedDeliveries() store.Sealed {
	return store.Sealed{Table: "delivery", Key: []string{"action_id", "n"}}
}

// sealDelivery seals the row of the recipient n of an action as tx has written it.
func sealDelivery(ctx context.Context, tx *store.Tx, action string, n int) error {
	return tx.Seal(ctx, SealedDeliveries(), `action_id = $1 and n = $2`, action, n)
}

// doubtful makes pending deliveries of ds uncertain if this program did not write
// their rows: a person says what became of them. The attack: a finished delivery
// is set back to waiting, so that the recipient gets the message twice.
func doubtful(ctx context.Context, tx *store.Tx, action string, ds []Delivery) error {
	if !slices.ContainsFunc(ds, func(d Delivery) bool { return d.open() }) {
		return nil
	}
	rows, err := tx.Rows(ctx, SealedDeliveries(), false, `action_id = $1`, action)
	if err != nil {
		return fmt.Errorf("check deliveries: %w", err)
	}
	for i := range ds {
		d := &ds[i]
		held := slices.ContainsFunc(rows, func(r store.SealedRow) bool { return r.Holds && r.Values["n"] == int64(d.n) })
		if d.open() && !held {
			d.State, d.Detail = DeliveryUncertain, "its row in the database was changed behind the server's back: it may or may not have been sent"
		}
	}
	return nil
}

// recall makes deliveries of ds uncertain that this program has begun more often
// than their rows say: an old row was put back.
func (m *PostOffice) recall(action string, ds []Delivery) {
	for i := range ds {
		if d := &ds[i]; d.open() && m.gate.PartBegun(action, d.n) > d.Attempts {
			d.State, d.Detail = DeliveryUncertain, "its row in the database is an old one, put back behind the server's back: it may or may not have been sent"
		}
	}
}

// PartsOf implements [oversight.Parter].
func (m *PostOffice) PartsOf(ctx context.Context, tx *store.Tx, a oversight.Action) (out []oversight.Part, err error) {
	ds, err := deliveries(ctx, tx, a.ID, nil)
	m.recall(a.ID, ds)
	for _, d := range ds {
		out = append(out, d.part())
	}
	return out, err
}

// Deliveries returns what became of each recipient of an action that who may
// see. There are none before it is first carried out.
func (m *PostOffice) Deliveries(ctx context.Context, who auth.Principal, action string) (out []Delivery, err error) {
	as, err := m.As(ctx, who, action)
	if err != nil {
		return nil, err
	}
	a, err := m.gate.Action(ctx, as, action)
	if err != nil {
		return nil, err
	}
	var env *mail.Envelope
	if e, err := mail.ParsePayload(a.Payload); err == nil {
		env = &e
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		out, err = deliveries(ctx, tx, a.ID, env)
		return err
	})
	return out, err
}

// A batch is recipients who get one copy in one conversation.
type batch struct {
	hop    Hop
	to     []Delivery
	hidden string // address of the one recipient whom the header does not name, or empty
}

// Execute implements [oversight.Executor]. It delivers to those who are due.
func (m *PostOffice) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	defer m.scrub.Touch()
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was sent: " + err.Error()}
	}
	done := context.WithoutCancel(ctx)
	b, ds, err := m.enqueue(ctx, a, env)
	if errors.Is(err, directory.ErrNoInbox) {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was sent: the inbox has been deleted"}
	}
	if errors.Is(err, ErrReadOnly) {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing more was sent: the inbox is in mode read_only"}
	}
	if err != nil {
		m.log.ErrorContext(ctx, "queue deliveries", "action", a.ID, "err", err)
		return oversight.Outcome{State: oversight.Approved, After: 10 * time.Second, Free: true, Detail: "nothing was sent: the server's records could not be written"}
	}
	before := attempts(ds)
	due := m.batches(ctx, env, ds)
	if len(due) > 0 {
		// Its overseers' copy is durable before anything leaves.
		if err := m.ensureCopy(ctx, a, b, env); err != nil {
			m.log.WarnContext(ctx, "make copy for overseers", "action", a.ID, "err", err)
			return oversight.Outcome{State: oversight.Approved, After: copyWait, Free: true, Detail: "waits: the copy for its overseers cannot be made or may not leave"}
		}
	}
	var g errgroup.Group
	g.SetLimit(4)
	for _, x := range due {
		g.Go(func() error {
			if err := m.deliver(ctx, a, b, env, x); err != nil && !errors.Is(err, oversight.ErrStopped) {
				m.log.ErrorContext(ctx, "deliver", "action", a.ID, "destination", x.hop.Name, "err", err)
			}
			return nil
		})
	}
	_ = g.Wait() // nothing returns an error
	err = m.db.View(done, func(tx *store.Tx) error {
		ds, err = deliveries(done, tx, a.ID, &env)
		m.recall(a.ID, ds)
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
func (m *PostOffice) enqueue(ctx context.Context, a oversight.Action, env mail.Envelope) (b directory.Inbox, ds []Delivery, err error) {
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		if a.Kind == CopyKind {
			// The attack: an agent that sends and deletes its inbox at once, before
			// its overseers have the copy.
			b, err = directory.LookupStored(ctx, tx, a.Inbox)
		} else {
			b, err = directory.Lookup(ctx, tx, a.Inbox)
		}
		if err != nil {
			return err
		}
		if b.Mode == policy.ReadOnly && a.Kind == SendKind {
			// Policy judges no more what a person has approved. The attack on leaving
			// it at that: what was approved for later leaves an inbox that somebody has
			// silenced meanwhile.
			return ErrReadOnly
		}
		owner, domain := b.ID, mail.Domain(b.Address)
		if a.Kind == CopyKind { // whether an overseer can be reached says nothing of the inbox
			owner, domain = "", ""
		}
		for n := range env.To {
			fresh, err := tx.Changed(ctx, `insert into delivery (action_id, n, inbox_id, domain, state, asked, code, status, detail, remote, outside,
				attempts, first_at, last_at, next_at, settled_at, told_at, complained_at)
				values ($1, $2, $3, $4, $5, 0, 0, '', '', '', 0, 0, 0, 0, $6, 0, 0, 0) on conflict do nothing`,
				a.ID, n, owner, domain, DeliveryQueued, store.Time(time.Now()))
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
		m.recall(a.ID, ds)
		lost := m.Directory.MaySend(ctx, tx, b)
		if lost != nil && !errors.Is(lost, directory.ErrDomain) {
			return lost
		}
		var barred []Delivery
		for i := range ds {
			d := &ds[i]
			if !d.open() {
				continue
			}
			reason, err := m.suppressed(ctx, tx, b.Project, d.Recipient)
			switch {
			case err != nil:
				return err
			case lost != nil:
				d.State, d.Detail = DeliveryBounced, "not sent: "+lost.Error()
			case reason != "" && a.Kind != CopyKind:
				d.State = DeliverySuppressed
				d.Detail = "not sent: this project writes to this address no more (" + string(reason) + "); a person or the project's key can take it off the suppression list"
			default:
				continue
			}
			if err := m.note(ctx, tx, a, *d); err != nil {
				return err
			}
			barred = append(barred, *d)
		}
		for _, d := range barred {
			if err := m.announceDelivery(ctx, tx, a, b, d); err != nil {
				return err
			}
		}
		return nil
	})
	return b, ds, err
}

// unqueue forgets the recipients of an action that was put off before anything
// was sent, and is now about another message: each is known by its place among
// those of the message that there was. Its overseers' copy is made anew, too.
func (m *PostOffice) unqueue(ctx context.Context, tx *store.Tx, action string) error {
	if err := recopy(ctx, tx, action); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `delete from delivery where action_id = $1`, action); err != nil {
		return fmt.Errorf("forget deliveries of %s: %w", action, err)
	}
	return nil
}

// batches groups those who are due by destination and copy.
func (m *PostOffice) batches(ctx context.Context, env mail.Envelope, ds []Delivery) (out []batch) {
	hidden := map[string]bool{}
	if m.cfg.Signer != nil {
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
	router, _ := m.cfg.Transport.(Router)
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
func (m *PostOffice) deliver(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope, x batch) error {
	holder, ok, err := m.begin(ctx, a, b, env, x)
	if err != nil || !ok {
		return err
	}
	results := m.send(ctx, a, b, env, x)
	// What happened is recorded whatever else ends now; without a record it
	// would be uncertain.
	done, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	for try := range 5 {
		err = m.db.Update(done, func(tx *store.Tx) error { return m.record(done, tx, a, b, x, holder, results) })
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
func (m *PostOffice) begin(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope, x batch) (holder string, ok bool, err error) {
	sent := m.sentHash(b.ID, messageIDOf(env.Raw)) // read from a large message, while others can write
	err = m.db.Update(ctx, func(tx *store.Tx) error {
		now := time.Now()
		ds, err := deliveries(ctx, tx, a.ID, nil)
		if err != nil {
			return err
		}
		m.recall(a.ID, ds)
		var wait time.Time
		var why string
		if a.Kind != CopyKind { // an inbox that is suspended does not keep its overseers from knowing why
			if wait, why, err = m.mayLeave(ctx, tx, b, x, now); err != nil {
				return err
			}
		}
		if wait.IsZero() {
			if holder, wait, why, err = m.acquire(ctx, tx, x.hop, len(x.to), now); err != nil {
				return err
			}
		}
		if wait.IsZero() {
			if wait, why, err = m.warm(ctx, tx, b, x, now); err != nil {
				return err
			}
			if !wait.IsZero() {
				if err := m.giveBack(ctx, tx, x.hop, holder, len(x.to)); err != nil {
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
			m.gate.BeginPart(tx, a.ID, d.n, p.Attempts)
		}
		if ok = wait.IsZero(); !ok {
			return nil
		}
		if a.Kind == CopyKind { // nobody reports of it: it has no reverse path
			return m.gate.Begin(ctx, tx, a)
		}
		_, err = tx.ExecContext(ctx, `insert into sent_message (inbox_id, hash, action_id, sent_at, copied) values ($1, $2, $3, $4, 0) on conflict do nothing`,
			b.ID, sent, a.ID, store.Time(now))
		if err != nil {
			return fmt.Errorf("note sent message: %w", err)
		}
		return m.gate.Begin(ctx, tx, a)
	})
	return holder, ok, err
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
func (m *PostOffice) sentHash(inbox, messageID string) []byte {
	return m.keyed(inbox, "postern sent v1", messageID)
}

func (m *PostOffice) keyed(salt, purpose, value string) []byte {
	key, err := hkdf.Key(sha256.New, m.cfg.Secret, []byte(salt), purpose, 32)
	if err != nil { // unreachable: the length is one that HKDF yields
		panic(err)
	}
	h := hmac.New(sha256.New, key)
	h.Write([]byte(value))
	return h.Sum(nil)
}

// send hands the copy to the transport and returns what became of each of x.to.
func (m *PostOffice) send(ctx context.Context, a oversight.Action, b directory.Inbox, env mail.Envelope, x batch) []mail.Delivery {
	e := mail.Envelope{From: env.From, Raw: env.Raw}
	for _, d := range x.to {
		e.To = append(e.To, d.Recipient)
	}
	prefix, err := m.sign(ctx, a, b, env.Raw, x.hidden)
	if err == nil {
		e.Prefix = prefix
		var out []mail.Delivery
		if out, err = m.cfg.Transport.Deliver(ctx, e); err == nil && len(out) == len(e.To) {
			return out
		}
		if err == nil {
			err = errors.New("the transport told of other recipients") // unreachable: its contract
		}
		// It fails as a whole only when it cannot be sent as it is.
		return all(e.To, mail.Refused, err.Error())
	}
	m.log.ErrorContext(ctx, "sign message", "action", a.ID, "err", err)
	return all(e.To, mail.NotSent, "the message could not be signed")
}

func all(to []string, o mail.Outcome, detail string) (out []mail.Delivery) {
	for _, r := range to {
		out = append(out, mail.Delivery{Recipient: r, Outcome: o, Detail: mail.Printable(detail, 500)})
	}
	return out
}

// sign returns what goes before the approved bytes.
func (m *PostOffice) sign(ctx context.Context, a oversight.Action, b directory.Inbox, raw []byte, hidden string) ([]byte, error) {
	if m.cfg.Signer == nil {
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
	prefix, err := m.cfg.Signer.Sign(ctx, raw, s)
	if errors.Is(err, signing.ErrNotFound) { // the first message of a domain
		if err := m.cfg.Signer.Prepare(ctx, s.Domain); err != nil {
			return nil, err
		}
		prefix, err = m.cfg.Signer.Sign(ctx, raw, s)
	}
	return prefix, err
}

// record writes down what became of a batch, and lets its destination go.
func (m *PostOffice) record(ctx context.Context, tx *store.Tx, a oversight.Action, b directory.Inbox, x batch, holder string, results []mail.Delivery) error {
	now := time.Now()
	answered := false
	ds, err := deliveries(ctx, tx, a.ID, nil)
	if err != nil {
		return err
	}
	x.to = slices.Clone(x.to) // it may be tried again
	for i, r := range results {
		d := x.to[i]
		d.Attempts++
		if d.First.IsZero() {
			d.First = now
		}
		d.outside = x.hop.Kind != HopLocal
		d.Last, d.Code, d.Status, d.Detail, d.Remote = now, r.Code, r.Status, mail.Printable(r.Detail, 1000), mail.Printable(r.Remote, 200)
		answered = answered || r.Code != 0 || r.Outcome == mail.Accepted
		switch r.Outcome {
		case mail.Accepted:
			d.State = DeliveryDelivered
		case mail.Refused:
			d.State = DeliveryBounced
		case mail.Uncertain:
			d.State = DeliveryUncertain
		case mail.NotSent:
			d.State, d.Next = DeliveryDeferred, now.Add(m.cfg.Delivery.retryAfter(d.Attempts))
			if d.Next.Sub(d.First) > m.cfg.Delivery.Lifetime {
				d.State, d.Next = DeliveryBounced, time.Time{}
				d.Detail = fmt.Sprintf("given up after %d attempts; the last one: %s", d.Attempts, d.Detail)
				if d.Status == "" || strings.HasPrefix(d.Status, "4") {
					d.Status = "4.4.7" // RFC 3463: delivery time expired
				}
			}
		}
		is, err := among(ds, d.n)
		if err != nil {
			return err
		}
		if _, ours := is.part().End(d.Attempts, d.State); !ours {
			continue // this program stood still, and another has sent it since
		}
		x.to[i] = d
		if err := m.note(ctx, tx, a, d); err != nil {
			return err
		}
		if d.State == DeliveryDelivered && a.Kind != CopyKind {
			if err := m.exchanged(ctx, tx, b.ID, d.Recipient, 1, 0); err != nil {
				return err
			}
		}
		if d.State == DeliveryBounced && r.Gone && a.Kind != CopyKind {
			if err := m.suppress(ctx, tx, b.Project, b.ID, d.Recipient, SuppressedBounce); err != nil {
				return err
			}
		}
	}
	if err := m.release(ctx, tx, x.hop, holder, answered, now); err != nil {
		return err
	}
	if err := m.judge(ctx, tx, b, now); err != nil {
		return err
	}
	// Last, since it takes the lock that all of them need.
	for _, d := range x.to {
		if err := m.announceDelivery(ctx, tx, a, b, d); err != nil {
			return err
		}
	}
	return nil
}

// note writes d down as it is now.
func (m *PostOffice) note(ctx context.Context, tx *store.Tx, a oversight.Action, d Delivery) error {
	if d.open() {
		d.Settled = time.Time{}
	} else if d.Settled.IsZero() && d.State != DeliveryUncertain {
		d.Settled, d.Next = time.Now(), time.Time{}
	}
	if d.State == DeliveryUncertain {
		d.Next = time.Time{}
	}
	_, err := tx.ExecContext(ctx, `update delivery set state = $1, asked = 0, code = $2, status = $3, detail = $4, remote = $5, next_at = $6, settled_at = $7
		where action_id = $8 and n = $9`,
		d.State, d.Code, d.Status, d.Detail, d.Remote, store.Time(d.Next), store.Time(d.Settled), a.ID, d.n)
	if err != nil {
		return fmt.Errorf("record delivery: %w", err)
	}
	return sealDelivery(ctx, tx, a.ID, d.n)
}

// outcome says what the deliveries of an action amount to.
func outcome(ds []Delivery, now time.Time) oversight.Outcome {
	var lines []string
	var parts []oversight.Part
	var next time.Time
	for _, d := range ds {
		parts = append(parts, d.part())
		if d.open() && (next.IsZero() || d.Next.Before(next)) {
			next = d.Next
		}
		word := string(d.State)
		if d.State == DeliveryDelivered {
			word = string(mail.Accepted)
		}
		lines = append(lines, strings.TrimSpace(fmt.Sprintf("%s: %s %s", d.Recipient, word, d.Detail)))
	}
	o := oversight.Outcome{State: oversight.Sum(parts), Detail: strings.Join(lines, "\n")}
	if o.State == oversight.Approved {
		o.After = max(next.Sub(now), 0)
	}
	return o
}

// Interrupted implements [oversight.Recoverer]: those whom nobody had begun to
// send to when the program stopped get the message all the same; the others
// are uncertain.
func (m *PostOffice) Interrupted(ctx context.Context, tx *store.Tx, a oversight.Action) (oversight.Outcome, error) {
	var env *mail.Envelope
	var payload []byte
	if err := tx.One(ctx, `select payload from action where id = $1`, []any{a.ID}, &payload); err != nil {
		return oversight.Outcome{}, fmt.Errorf("recover deliveries: %w", err)
	}
	if e, err := mail.ParsePayload(payload); err == nil {
		env = &e
	}
	ds, err := deliveries(ctx, tx, a.ID, env)
	if err != nil {
		return oversight.Outcome{}, err
	}
	for i := range ds {
		d := &ds[i]
		left := d.part().Interrupted().State
		if left == d.State {
			continue
		}
		d.State, d.Detail = left, "the program stopped while this was being sent: it may or may not have arrived"
		_, err := tx.ExecContext(ctx, `update delivery set state = $1, detail = $2 where action_id = $3 and n = $4`, d.State, d.Detail, a.ID, d.n)
		if err != nil {
			return oversight.Outcome{}, fmt.Errorf("recover deliveries: %w", err)
		}
		if err := sealDelivery(ctx, tx, a.ID, d.n); err != nil {
			return oversight.Outcome{}, err
		}
	}
	m.recall(a.ID, ds)
	if len(ds) == 0 {
		return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before anything was sent"}, nil
	}
	return outcome(ds, time.Now()), nil
}

// deliveryMoved follows an action that a person or the gate has moved.
func (m *PostOffice) deliveryMoved(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	ds, err := deliveries(ctx, tx, a.ID, nil)
	if err != nil {
		return err
	}
	arrived := false
	now := time.Now()
	for _, d := range ds {
		p := d.part().Follow(a.State)
		if p == d.part() {
			continue
		}
		d.State, d.asked = p.State, p.Asked
		switch d.State {
		case DeliveryQueued:
			d.Next = now
		case DeliveryDelivered:
			d.Detail, d.Settled, arrived = "a person says that it arrived", now, true
		case DeliveryBounced:
			d.Detail, d.Settled, d.told = "a person gave it up", now, now
		case DeliveryCancelled:
			d.Next, d.Settled = time.Time{}, now
		case DeliverySending, DeliveryDeferred, DeliverySuppressed, DeliveryUncertain:
		}
		_, err := tx.ExecContext(ctx, `update delivery set state = $1, asked = $2, detail = $3, next_at = $4, settled_at = $5, told_at = $6 where action_id = $7 and n = $8`,
			d.State, store.Flag(d.asked), d.Detail, store.Time(d.Next), store.Time(d.Settled), store.Time(d.told), a.ID, d.n)
		if err != nil {
			return fmt.Errorf("follow action %s: %w", a.ID, err)
		}
		if err := sealDelivery(ctx, tx, a.ID, d.n); err != nil {
			return err
		}
	}
	if a.State == oversight.Done && arrived {
		return m.copyOf(ctx, tx, a)
	}
	return nil
}

// copyOf keeps a copy of an action's message, of which a person said that it
// arrived.
func (m *PostOffice) copyOf(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	var payload []byte
	if err := tx.One(ctx, `select payload from action where id = $1`, []any{a.ID}, &payload); err != nil {
		return fmt.Errorf("copy message: %w", err)
	}
	env, err := mail.ParsePayload(payload)
	if err != nil {
		return nil //nolint:nilerr // it is kept no longer
	}
	b, err := directory.Lookup(ctx, tx, a.Inbox)
	if errors.Is(err, directory.ErrNoInbox) {
		return nil
	}
	if err != nil {
		return err
	}
	return m.keepCopy(ctx, tx, a, b, env.Raw)
}

// Finish implements [oversight.Finisher]: the inbox keeps a sealed copy of what
// it sent, and is told of those who were given up.
func (m *PostOffice) Finish(ctx context.Context, tx *store.Tx, a oversight.Action, o oversight.Outcome) error {
	env, err := mail.ParsePayload(a.Payload)
	if err != nil {
		return err
	}
	b, err := directory.Lookup(ctx, tx, a.Inbox)
	if errors.Is(err, directory.ErrNoInbox) {
		return nil // it was deleted meanwhile, and there is nobody to keep a copy for
	}
	if err != nil {
		return fmt.Errorf("inbox %q: %w", a.Inbox, err)
	}
	ds, err := deliveries(ctx, tx, a.ID, &env)
	if err != nil {
		return err
	}
	if o.State != oversight.Approved {
		some := false
		for _, d := range ds {
			some = some || d.State == DeliveryDelivered
		}
		if some {
			if err := m.keepCopy(ctx, tx, a, b, env.Raw); err != nil {
				return err
			}
		}
	}
	return m.tell(ctx, tx, a, b, env, ds)
}

// keepCopy puts what was sent into the inbox that sent it, once.
func (m *PostOffice) keepCopy(ctx context.Context, tx *store.Tx, a oversight.Action, b directory.Inbox, raw []byte) error {
	fresh, err := tx.Changed(ctx, `update sent_message set copied = 1 where action_id = $1 and copied = 0`, a.ID)
	if err != nil || !fresh {
		return err
	}
	id, err := m.put(ctx, tx, b, Out, raw)
	if err != nil {
		return err
	}
	return m.announce(ctx, tx, b, event.MessageSent, id, a.ID)
}

// tell puts a bounce (RFC 3464) into the inbox for those who were given up and
// of whom it was not told yet.
func (m *PostOffice) tell(ctx context.Context, tx *store.Tx, a oversight.Action, b directory.Inbox, env mail.Envelope, ds []Delivery) error {
	var failed []mail.BouncedRecipient
	for _, d := range ds {
		if d.State != DeliveryBounced && d.State != DeliverySuppressed || !d.told.IsZero() {
			continue
		}
		failed = append(failed, mail.BouncedRecipient{Address: d.Recipient, Status: d.Status, Code: d.Code, Detail: d.Detail, Remote: d.Remote, Last: d.Last})
		if _, err := tx.ExecContext(ctx, `update delivery set told_at = $1 where action_id = $2 and n = $3`, store.Time(time.Now()), a.ID, d.n); err != nil {
			return fmt.Errorf("note bounce: %w", err)
		}
		if err := sealDelivery(ctx, tx, a.ID, d.n); err != nil {
			return err
		}
	}
	if len(failed) == 0 {
		return nil
	}
	raw, err := mail.ComposeBounce(mail.Bounce{
		Domain: mail.Domain(b.Address), To: b.Address, Original: env.Raw, Arrived: a.Created, Recipients: failed,
	}, time.Now())
	if err != nil {
		return fmt.Errorf("compose bounce: %w", err)
	}
	id, err := m.put(ctx, tx, b, In, raw)
	if err != nil {
		return err
	}
	return m.announce(ctx, tx, b, event.MessageReceived, id)
}
