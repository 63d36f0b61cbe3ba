package audit

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/mod/sumdb/tlog"

	"postern/internal/store"
)

// On PostgreSQL many transactions write at the same time, and one chain of all would
// make each wait for the commit of the one before it. So [Append] inserts the entry
// into audit_pending, in the transaction of the change, and a [Sequencer] moves it into
// the chain after the commit:
//
//	Append ── commit ──> pending ── sequence, one transaction for many ──> chain, tree
//
// A crash loses nothing: what is committed is pending or in the chain, never both and
// never neither, and the sequencer of any server goes on.
//
// Order: the entries of one transaction stay together, in their order. Transactions are
// in the order of the IDs of their first entries, among those that are committed by
// then. A transaction that writes about a thing has its turn, so its IDs are higher
// than those of the transactions about that thing before it, and those are visible
// wherever it is. So the entries about one thing are in the order of the commits.
//
// The attack: somebody who can write the database inserts a pending row which says that
// a person approved, and has the server seal it. So a pending row has a seal of its
// own, over all that becomes the entry and over its name (tx, n); and no name is in the
// chain twice, so that a row that was put back is not taken for news. What is left to
// that attacker for as long as a row is pending: to remove it, or to put it back late.

// A pending is an entry that is not in the chain yet.
type pending struct {
	Entry // Seq and Prev are zero

	pendingName

	id      int64
	seal    []byte
	known   bool // an entry of this name is in the chain
	refused bool // a sequencer has refused it before
}

// A pendingName names an entry until it has a number, see [store.Tx.Number].
type pendingName struct{ tx, n int64 }

// pendingSealed is the purpose of the MAC over a pending row.
const pendingSealed = "audit_pending"

// encode returns what the seal of p covers.
func (p *pending) encode() []byte {
	b := binary.BigEndian.AppendUint64(nil, uint64(p.tx))
	b = binary.BigEndian.AppendUint64(b, uint64(p.n))
	return p.Entry.encode(b)
}

// holds reports whether this server's key has sealed p.
func (p *pending) holds(tx *store.Tx) bool {
	return tx.Sealed(pendingSealed, p.encode(), p.seal)
}

// hold inserts e as a pending row.
func hold(ctx context.Context, tx *store.Tx, e Entry) (err error) {
	p := pending{Entry: e}
	p.tx, p.n = tx.Number()
	if p.seal, err = tx.MAC(pendingSealed, p.encode()); err != nil {
		return fmt.Errorf("seal audit entry: %w", err)
	}
	err = tx.Later(ctx, `insert into audit_pending (tx, n, at, project_id, actor, verb, object, detail, seal) values ($1, $2, $3, $4, $5, $6, $7, $8, $9)`,
		p.tx, p.n, store.Time(p.At), p.Project, p.Actor, p.Verb, p.Object, p.Detail, p.seal)
	if err != nil {
		return fmt.Errorf("append audit entry: %w", err)
	}
	return nil
}

// selectPending reads pending rows, each with whether its name is in the chain.
const selectPending = `select p.id, p.tx, p.n, p.at, p.project_id, p.actor, p.verb, p.object, p.detail, p.seal, p.refused_at,
	exists (select 1 from audit_entry e where e.tx = p.tx and e.n = p.n and e.tx <> 0) from audit_pending p `

func scanPending(row func(...any) error) (p pending, err error) {
	var at, refused int64
	err = row(&p.id, &p.tx, &p.n, &at, &p.Project, &p.Actor, &p.Verb, &p.Object, &p.Detail, &p.seal, &refused, &p.known)
	p.At, p.refused = time.UnixMicro(at).UTC(), refused != 0
	return p, err
}

// sequenceBatch is how many transactions are sequenced in one.
const sequenceBatch = 1000

// The errors about pending entries.
var (
	// ErrPending means that entries are committed and not in the chain yet, since no
	// server that has the key moves them there.
	ErrPending = errors.New("the newest entries are not in the chain yet")
	// errBusy means that another server is sequencing.
	errBusy = errors.New("another server is sequencing")
)

// A sequenced is what one transaction has moved into the chain.
type sequenced struct {
	moved   int
	refused []pending // this server's key has not sealed them, or they are in the chain already
	late    int       // of those that were moved: older than [Late]
	oldest  time.Time // of those that were moved; zero if there are none
}

// sequence moves pending rows into the chain as part of tx, which is one of
// [store.DB.Aside]. The lock makes it the only one; if that should fail, the primary key
// of the chain, the unique name and the number of removed rows do.
func sequence(ctx context.Context, tx *store.Tx) (sequenced, error) {
	return sequenceUnder(ctx, tx, "audit chain")
}

// sequenceUnder is sequence with the name of its lock.
func sequenceUnder(ctx context.Context, tx *store.Tx, lock string) (s sequenced, err error) {
	if !tx.Keyed() {
		return s, store.ErrNoKey
	}
	if ok, err := tx.TryLock(ctx, lock); err != nil {
		return s, err
	} else if !ok {
		return s, errBusy
	}
	rows, err := store.List(ctx, tx, scanPending, selectPending+`join (
			select tx, min(id) as first from audit_pending where refused_at = 0 group by tx order by first limit $1
		) as t on t.tx = p.tx
		where p.refused_at = 0 order by t.first, p.id`, sequenceBatch)
	if err != nil {
		return s, fmt.Errorf("read pending entries: %w", err)
	}
	if len(rows) == 0 {
		return s, nil
	}
	c, err := lockChain(ctx, tx)
	if err != nil {
		return s, err
	}
	seen := map[pendingName]bool{}
	var b batch
	var bad []int64
	for _, p := range rows {
		if p.known || seen[p.pendingName] || !p.holds(tx) {
			s.refused, bad = append(s.refused, p), append(bad, p.id)
			continue
		}
		seen[p.pendingName] = true
		l, err := c.add(tx, p.Entry, p.tx, p.n)
		if err != nil {
			return s, err
		}
		b.put(p, l)
		if time.Since(p.At) > Late {
			s.late++
		}
		if s.oldest.IsZero() || p.At.Before(s.oldest) {
			s.oldest = p.At
		}
	}
	if len(bad) > 0 {
		if _, err := tx.ExecContext(ctx, `update audit_pending set refused_at = $1 where id = any($2::bigint[])`, store.Time(time.Now()), bad); err != nil {
			return s, fmt.Errorf("refuse pending entries: %w", err)
		}
	}
	s.moved = len(b.ids)
	if s.moved == 0 {
		return s, nil
	}
	if err := b.store(ctx, tx, c); err != nil {
		return s, fmt.Errorf("sequence %d entries from %d on: %w", s.moved, b.seqs[0], err)
	}
	return s, nil
}

// A batch is what one transaction adds to the chain and the tree, by column: PostgreSQL
// takes each as an array, so that the statement is the same for any number.
type batch struct {
	ids, txs, ns, seqs, ats                 []int64
	projects, actors, verbs, objects, texts []string
	prevs, hashes, seals                    [][]byte
	nodes                                   []tlog.Hash
	first                                   int64 // index of nodes[0]
}

func (b *batch) put(p pending, l link) {
	e := l.Entry
	b.ids, b.txs, b.ns = append(b.ids, p.id), append(b.txs, p.tx), append(b.ns, p.n)
	b.seqs, b.ats = append(b.seqs, e.Seq), append(b.ats, store.Time(e.At))
	b.projects, b.actors, b.verbs = append(b.projects, e.Project), append(b.actors, e.Actor), append(b.verbs, string(e.Verb))
	b.objects, b.texts = append(b.objects, e.Object), append(b.texts, e.Detail)
	b.prevs, b.hashes, b.seals = append(b.prevs, e.Prev[:]), append(b.hashes, l.hash[:]), append(b.seals, l.seal)
	if len(b.nodes) == 0 {
		b.first = l.first
	}
	b.nodes = append(b.nodes, l.nodes...)
}

// store writes b, whose last entry is the end of c, in one statement: the chain's row is
// locked meanwhile, and each round trip would be time for all that is pending.
func (b *batch) store(ctx context.Context, tx *store.Tx, c *chain) error {
	hashes := make([][]byte, len(b.nodes))
	for i := range b.nodes {
		hashes[i] = b.nodes[i][:]
	}
	size, right := c.end()
	n := 0
	err := tx.One(ctx, `with entries as (
			insert into audit_entry (seq, at, project_id, actor, verb, object, detail, prev, hash, seal, tx, n)
			select * from unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bytea[], $9::bytea[], $10::bytea[], $11::bigint[], $12::bigint[])
		), nodes as (
			insert into audit_node (idx, hash) select $13::bigint + i - 1, hash from unnest($14::bytea[]) with ordinality as h (hash, i)
		), head as (
			update audit_head set seq = $15, hash = $16, tree_size = $17, tree_edge = $18 where id = 1
		), gone as (
			delete from audit_pending where id = any($19::bigint[]) returning 1
		) select count(*) from gone`, []any{
		b.seqs, b.ats, b.projects, b.actors, b.verbs, b.objects, b.texts, b.prevs, b.hashes, b.seals, b.txs, b.ns,
		b.first, hashes, c.Seq, c.Hash[:], size, right, b.ids,
	}, &n)
	if err == nil && n != len(b.ids) {
		err = fmt.Errorf("%d of %d pending rows were there to remove", n, len(b.ids))
	}
	return err
}

// settleWait is how long [Settle] waits for another server that is sequencing.
const settleWait = 2 * time.Second

// Settle returns when the chain has all entries that were committed when it was called.
// If another server that sequences is stuck, it waits 2 seconds at most and then returns
// [ErrPending]. On SQLite it does nothing.
func Settle(ctx context.Context, db *store.DB) error { return settle(ctx, db, sequence) }

// Await is [Settle] for who may not write: it waits for a server.
func Await(ctx context.Context, db *store.DB) error {
	return settle(ctx, db, func(context.Context, *store.Tx) (s sequenced, err error) { return s, errBusy })
}

func settle(ctx context.Context, db *store.DB, sequence func(context.Context, *store.Tx) (sequenced, error)) error {
	if !db.Concurrent() {
		return nil
	}
	var last, n int64
	// Of committed rows alone: the one with the highest ID may be of a transaction
	// that began after others that are not committed, and those are not waited for.
	waiting := func() error {
		return db.Aside(ctx, func(tx *store.Tx) error {
			return tx.One(ctx, `select coalesce(max(id), 0), count(*) from audit_pending where refused_at = 0 and ($1::bigint = 0 or id <= $1)`, []any{last}, &last, &n)
		})
	}
	err := waiting()
	for begun, pause := time.Now(), time.Millisecond; err == nil && n > 0; err = waiting() {
		var s sequenced
		err := db.Aside(ctx, func(tx *store.Tx) (err error) {
			s, err = sequence(ctx, tx)
			return err
		})
		switch {
		case err == nil && s.moved > 0:
			continue
		case err != nil && !errors.Is(err, errBusy):
			return fmt.Errorf("sequence audit: %w", err)
		case time.Since(begun) >= settleWait:
			return fmt.Errorf("%d wait: %w", n, ErrPending)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		pause = min(2*pause, 50*time.Millisecond)
	}
	if err != nil {
		return fmt.Errorf("read pending entries: %w", err)
	}
	return nil
}

// View runs fn in a read-only transaction in which the chain has all entries that were
// committed before, so that who has the answer to a request sees its entries. After
// [ErrPending] it runs fn all the same: what there is in the chain is true.
func View(ctx context.Context, db *store.DB, fn func(tx *store.Tx) error) error {
	if err := Settle(ctx, db); err != nil && !errors.Is(err, ErrPending) {
		return err
	}
	return db.View(ctx, fn)
}

// A Backlog says what is not in the chain yet. The zero Backlog is that of SQLite.
type Backlog struct {
	Pending int64     // committed entries that are not in the chain
	Oldest  time.Time // when the oldest of them was made; zero if there is none
	Refused int64     // pending rows that the server did not write, or that are in the chain already
}

// Late is the age from which a pending entry is a reason to look: the sequencer needs
// about a tenth of a second.
const Late = 10 * time.Second

// Late reports whether an entry has been pending for too long.
func (b Backlog) Late() bool { return b.Pending > 0 && time.Since(b.Oldest) > Late }

// Waiting returns the backlog, as part of tx.
func Waiting(ctx context.Context, tx *store.Tx) (b Backlog, err error) {
	var at int64
	err = tx.One(ctx, `select coalesce(sum(case when refused_at = 0 then 1 else 0 end), 0), coalesce(min(case when refused_at = 0 then at end), 0),
		coalesce(sum(case when refused_at = 0 then 0 else 1 end), 0) from audit_pending`, nil, &b.Pending, &at, &b.Refused)
	if err != nil {
		return b, fmt.Errorf("count pending entries: %w", err)
	}
	b.Oldest = store.FromTime(at)
	return b, nil
}

// A Sequencer moves pending entries into the chain. Every server runs one; the database
// lets one at a time work. It is safe for concurrent use.
type Sequencer struct {
	log *slog.Logger
	db  *store.DB

	mu   sync.Mutex // guards said
	said time.Time  // when an alarm was logged last
}

// NewSequencer returns a sequencer of the record in db.
func NewSequencer(log *slog.Logger, db *store.DB) *Sequencer { return &Sequencer{log: log, db: db} }

// How often a sequencer looks for pending entries while some come, and else; how often
// it looks whether the server that sequences is still there; how often it says that
// something is wrong; and after how many entries it has the table cleaned.
const (
	sequenceBusy  = 100 * time.Millisecond
	sequenceIdle  = 300 * time.Millisecond
	sequenceStand = time.Second
	sequenceSay   = time.Minute
	sequenceClean = 10_000
)

// Recover sequences what a former process has left. Among that may be rows which this
// server wrote, and which a command with another server's key has refused.
func (s *Sequencer) Recover(ctx context.Context) error {
	if !s.db.Concurrent() {
		return nil
	}
	err := s.db.Aside(ctx, func(tx *store.Tx) error {
		rows, err := store.List(ctx, tx, scanPending, selectPending+`where refused_at <> 0`)
		if err != nil {
			return err
		}
		for _, p := range rows {
			if p.known || !p.holds(tx) {
				s.refused(ctx, p)
				continue
			}
			if _, err := tx.ExecContext(ctx, `update audit_pending set refused_at = 0 where id = $1`, p.id); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read refused entries: %w", err)
	}
	_, err = s.step(ctx)
	return err
}

// refused raises the alarm about a row. The attack: see the comment on pending rows.
func (s *Sequencer) refused(ctx context.Context, p pending) {
	s.log.ErrorContext(ctx, "a pending entry of the audit was not written by this server, or is in the chain already: it is refused", "row", p.id, "verb", p.Verb, "object", p.Object, "project", p.Project, "in_chain", p.known)
}

// Run sequences until ctx is done, and once more at the end. It logs failures and goes
// on. Of several servers one does the work, as long as it lives: two that look in turns
// would halve each other's batches. On SQLite it only waits.
func (s *Sequencer) Run(ctx context.Context) error {
	if !s.db.Concurrent() {
		<-ctx.Done()
		return ctx.Err()
	}
	for ctx.Err() == nil {
		pause := sequenceStand
		h, err := s.db.Hold(ctx, "audit sequencer", 0)
		switch {
		case err == nil:
			err = s.lead(ctx)
			if cerr := h.Close(context.WithoutCancel(ctx)); err == nil {
				err = cerr
			}
			pause = 0
		case errors.Is(err, store.ErrHeld):
			// The attack on the other server, or its bug, must be seen here as well.
			var b Backlog
			if b, err = s.backlog(ctx); err == nil {
				err = b.alarm()
			}
		}
		if err != nil && ctx.Err() == nil {
			s.say(ctx, err)
			pause = sequenceStand
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if _, err := s.step(last); err != nil {
		s.log.WarnContext(last, "sequence the audit's last entries; the next server does", "err", err)
	}
	return ctx.Err()
}

// leadFor is how long a server sequences before it takes the hold again: a hold that
// was lost with its connection is not noticed before. Until then two may sequence, in
// turns.
const leadFor = time.Minute

// lead sequences until ctx is done, for [leadFor] at most, or until something fails.
func (s *Sequencer) lead(ctx context.Context) error {
	b, err := s.backlog(ctx)
	if err != nil {
		return err
	}
	if b.Refused > 0 {
		s.log.ErrorContext(ctx, "refused entries of the audit are in the table audit_pending; see docs/reference/audit.md", "count", b.Refused)
	}
	moved := 0
	for begun := time.Now(); time.Since(begun) < leadFor; {
		n, err := s.step(ctx)
		if err != nil {
			return err
		}
		if moved += n; moved >= sequenceClean {
			moved = 0
			if err := s.db.Vacuum(ctx, "audit_pending"); err != nil {
				return err
			}
		}
		pause := sequenceIdle
		if n > 0 {
			pause = sequenceBusy
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
	return nil
}

// say logs an error, once a minute at most.
func (s *Sequencer) say(ctx context.Context, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.said) >= sequenceSay {
		s.said = time.Now()
		s.log.ErrorContext(ctx, "committed entries do not get into the audit's chain", "err", err)
	}
}

// step sequences what is pending, and returns the number of entries.
func (s *Sequencer) step(ctx context.Context) (moved int, err error) {
	for {
		var q sequenced
		err := s.db.Aside(ctx, func(tx *store.Tx) (err error) {
			some := false
			if err := tx.One(ctx, `select exists (select 1 from audit_pending where refused_at = 0)`, nil, &some); err != nil || !some {
				return err
			}
			q, err = sequence(ctx, tx)
			return err
		})
		if errors.Is(err, errBusy) { // a reader of the record is sequencing
			b, err := s.backlog(ctx)
			return moved, errors.Join(err, b.alarm())
		}
		if err != nil {
			return moved, err
		}
		for _, p := range q.refused {
			s.refused(ctx, p)
		}
		if q.late > 0 {
			// No server has run, or was stuck. The attack: an entry was taken away while it
			// was pending, and put back when it was of use.
			s.log.WarnContext(ctx, "entries got into the audit's chain late", "count", q.late, "oldest", q.oldest.Format(time.RFC3339))
		}
		if moved += q.moved; q.moved < sequenceBatch {
			return moved, nil
		}
	}
}

func (s *Sequencer) backlog(ctx context.Context) (b Backlog, err error) {
	err = s.db.View(ctx, func(tx *store.Tx) error {
		b, err = Waiting(ctx, tx)
		return err
	})
	return b, err
}

// alarm returns what is wrong with b, or nil.
func (b Backlog) alarm() error {
	if !b.Late() {
		return nil
	}
	return fmt.Errorf("%d wait, the oldest since %s", b.Pending, b.Oldest.Format(time.RFC3339))
}
