// Package audit keeps the append-only, hash-chained record of what happened.
//
// An entry is appended in the transaction of the change that it records, so that
// neither can be committed without the other. On PostgreSQL it is pending until a
// [Sequencer] has moved it into the chain.
//
// The chain detects an entry that was changed, removed or inserted. A Merkle tree
// over the same entries (RFC 6962, section 2) gives short proofs that an entry is in
// the record, and that a later record extends an earlier one. A [Checkpoint] is the
// signed size and root of the tree. Somebody who keeps one elsewhere can prove that
// nothing before it was rewritten, even by an attacker who can write the whole
// database.
//
// Entries hold digests, sizes and names, never bodies, subjects or secrets, since
// entries cannot be removed. This package must not decide anything, nor send entries
// anywhere.
package audit

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/mod/sumdb/tlog"

	"postern/internal/auth"
	"postern/internal/store"
)

// Database is the object of entries about the database as a whole.
const Database = "database"

// Fields are the details of an entry. Empty values are left out.
type Fields map[string]string

// maxField bounds each value, in bytes: many come from sandboxes and mail.
const maxField = 2048

// An Entry is one link of the chain.
type Entry struct {
	Seq     int64 // 1 for the first
	At      time.Time
	Project string
	Actor   string // a principal, "person:…"
	Verb    Verb
	Object  string // id of what the entry is about; may be empty
	Detail  string // [Fields] as JSON
	Prev    Digest // hash of entry Seq-1, zero for the first
}

// A Digest is a SHA-256.
type Digest [sha256.Size]byte

// A Head is the last entry of a chain. The zero Head is that of the empty chain.
type Head struct {
	Seq  int64
	Hash Digest
}

// String returns h as "seq:hex", as [ParseHead] reads it.
func (h Head) String() string { return fmt.Sprintf("%d:%x", h.Seq, h.Hash) }

// ParseHead reads what [Head.String] wrote.
func ParseHead(s string) (Head, error) {
	var h Head
	var sum []byte
	if n, err := fmt.Sscanf(s, "%d:%x", &h.Seq, &sum); err != nil || n != 2 || len(sum) != len(h.Hash) || h.Seq < 0 {
		return Head{}, fmt.Errorf("audit head %q: want SEQ:HASH as audit verify prints it", s)
	}
	copy(h.Hash[:], sum)
	return h, nil
}

// Hash returns the hash of e over every field, each length-prefixed so that
// no two entries share an encoding.
func (e *Entry) Hash() Digest { return sha256.Sum256(e.encode(nil)) }

// hashes returns the hash of e in the chain and the one in the tree. They
// differ by RFC 6962's prefix of leaves: no leaf can be taken for a node.
func (e *Entry) hashes(buf []byte) (Digest, tlog.Hash, []byte) {
	buf = e.encode(append(buf[:0], 0))
	return sha256.Sum256(buf[1:]), sha256.Sum256(buf), buf
}

// encode appends to b what is hashed of e.
func (e *Entry) encode(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, uint64(e.Seq))
	b = binary.BigEndian.AppendUint64(b, uint64(e.At.UnixMicro()))
	for _, s := range []string{e.Project, e.Actor, string(e.Verb), e.Object, e.Detail} {
		b = binary.BigEndian.AppendUint32(b, uint32(len(s)))
		b = append(b, s...)
	}
	return append(b, e.Prev[:]...)
}

// Append adds an entry to the chain as part of tx. It belongs to who.Project; for a
// principal of the system the caller sets that to the project of object. Verbs without
// a row in verb.go are refused, and projects that tx's turn does not cover. On SQLite no
// other transaction can append until tx ends; on PostgreSQL the entry is pending first,
// see [Settle].
func Append(ctx context.Context, tx *store.Tx, who auth.Principal, verb Verb, object string, f Fields) error {
	if !verb.Known() {
		return fmt.Errorf("append audit entry: verb %q has no row in the table of verbs", verb) // unreachable
	}
	if !tx.Turn().Covers(who.Project) {
		// What the transaction read of that project may have changed since.
		return fmt.Errorf("append audit entry: %s of project %q in the turn of %s", verb, who.Project, tx.Turn()) // unreachable
	}
	detail, err := json.Marshal(bounded(f)) // keys are sorted
	if err != nil {
		return fmt.Errorf("append audit entry: %w", err)
	}
	e := Entry{
		Project: who.Project, Actor: clean(who.String()), Verb: verb, Object: clean(object), Detail: string(detail),
	}
	if tx.Concurrent() {
		e.At = time.Now()
		return hold(ctx, tx, e)
	}
	c, err := lockChain(ctx, tx)
	if err != nil {
		return err
	}
	e.At = time.Now() // after the lock, so that times are in the order of the numbers
	l, err := c.add(tx, e, 0, 0)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx,
		`insert into audit_entry (seq, at, project_id, actor, verb, object, detail, prev, hash, seal) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`,
		l.Seq, store.Time(l.At), l.Project, l.Actor, l.Verb, l.Object, l.Detail, l.Prev[:], l.hash[:], l.seal)
	if err == nil {
		err = insertNodes(ctx, tx, l.first, l.nodes)
	}
	if err != nil {
		return fmt.Errorf("append audit entry %d: %w", l.Seq, err)
	}
	return c.save(ctx, tx)
}

// A chain is the end of the chain and of the tree, to which entries are added.
type chain struct {
	Head

	size  int64  // entries in the tree
	right []byte // the edge of the tree as it is stored
	edge  *edge  // nil if the tree lacks entries before the next one
}

// A link is an entry that was added to a chain: all that is stored of it.
type link struct {
	Entry

	hash  Digest
	seal  []byte
	nodes []tlog.Hash // the hashes of the tree that it completes, from the index first on
	first int64
}

// lockChain reads the end of the chain. It locks its row: a second transaction waits
// for the first one's commit and continues from there, so the chain cannot fork.
func lockChain(ctx context.Context, tx *store.Tx) (*chain, error) {
	var c chain
	var hash []byte
	query := `update audit_head set seq = seq where id = 1 returning seq, hash, tree_size, tree_edge`
	if tx.Concurrent() { // where an update that changes nothing leaves a dead row
		query = `select seq, hash, tree_size, tree_edge from audit_head where id = 1 for update`
	}
	err := tx.One(ctx, query, nil, &c.Seq, &hash, &c.size, &c.right)
	if err != nil {
		return nil, fmt.Errorf("read chain head: %w", err)
	}
	copy(c.Hash[:], hash)
	// If the tree lacks earlier entries, which a server of an old version may have
	// appended, [Fill] adds them and the next ones.
	if c.size == c.Seq {
		if c.edge, err = parseEdge(c.size, c.right); err != nil {
			return nil, fmt.Errorf("read chain head: %w", err)
		}
	}
	return &c, nil
}

// add makes e the next entry. (number, n) is its name while it was pending, or zero.
func (c *chain) add(tx *store.Tx, e Entry, number, n int64) (l link, err error) {
	e.Seq, e.Prev = c.Seq+1, c.Hash
	h, leaf, _ := e.hashes(nil)
	l = link{Entry: e, hash: h}
	// The attack: somebody who can write the database appends an entry which says
	// that a person approved, with correct hashes.
	if l.seal, err = tx.MAC(sealed, sealing(h, number, n)); err != nil {
		return l, fmt.Errorf("seal audit entry %d: %w", e.Seq, err)
	}
	if c.edge != nil {
		l.first, l.nodes = tlog.StoredHashIndex(0, c.edge.size), c.edge.add(leaf)
	}
	c.Head = Head{e.Seq, h}
	return l, nil
}

// end returns the size and the edge of the tree as they are stored.
func (c *chain) end() (size int64, right []byte) {
	if c.edge != nil {
		return c.edge.size, c.edge.bytes()
	}
	if c.right == nil {
		return c.size, []byte{} // SQLite returns empty bytes as nil, which would be stored as NULL
	}
	return c.size, c.right
}

// save stores the end of the chain.
func (c *chain) save(ctx context.Context, tx *store.Tx) error {
	size, right := c.end()
	_, err := tx.ExecContext(ctx, `update audit_head set seq = $1, hash = $2, tree_size = $3, tree_edge = $4 where id = 1`, c.Seq, c.Hash[:], size, right)
	if err != nil {
		return fmt.Errorf("append audit entry %d: %w", c.Seq, err)
	}
	return nil
}

// sealed is the purpose of the MAC over an entry's hash. The hash covers the
// previous hash, so the seal covers every entry up to this one.
const sealed = "audit_entry"

// sealing returns what the seal of an entry covers: its hash, and its name if it was
// pending.
func sealing(hash Digest, number, n int64) []byte {
	if number == 0 {
		return hash[:]
	}
	return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(hash[:], uint64(number)), uint64(n))
}

// ErrUnsealed means that this server did not write an entry.
var ErrUnsealed = errors.New("the entry was not written by this server")

// Last returns the newest entry about object with one of these verbs, as part
// of tx. It returns [store.ErrNotFound] if there is none, and [ErrUnsealed] if
// this server did not write it.
func Last(ctx context.Context, tx *store.Tx, object string, verbs []Verb) (Entry, error) {
	args := []any{object}
	for _, v := range verbs {
		args = append(args, v)
	}
	// The index on object serves this query; without it the whole record is read.
	in := `where object = $1 and verb in (` + store.Places(2, len(verbs)) + `)`
	query := `select 0, seq, at, project_id, actor, verb, object, detail, prev, hash, seal, tx, n from audit_entry ` + in + ` order by seq desc limit 1`
	if tx.Concurrent() {
		// What is pending is newer than what is in the chain. One statement reads both:
		// between two, an entry could move. The attack: an entry that is in the chain is
		// made pending again, with its seal, and so the newest.
		query = `select * from (
				(` + query + `) union all
				(select 1, id, at, project_id, actor, verb, object, detail, seal, seal, seal, tx, n from audit_pending p ` + in + `
					and refused_at = 0 and not exists (select 1 from audit_entry e where e.tx = p.tx and e.n = p.n and e.tx <> 0) order by id desc limit 1)
			) as newest (fresh, seq, at, project_id, actor, verb, object, detail, prev, hash, seal, tx, n) order by fresh desc limit 1`
	}
	row := tx.QueryRowContext(ctx, query, args...)
	var fresh, number, n int64
	var seal []byte
	e, hash, err := scan(func(dest ...any) error {
		return row.Scan(append(append([]any{&fresh}, dest...), &seal, &number, &n)...)
	})
	if err != nil {
		return Entry{}, fmt.Errorf("last entry about %s: %w", object, store.NotFound(err))
	}
	if fresh == 1 {
		p := pending{Entry: e, pendingName: pendingName{number, n}, seal: seal}
		p.Seq, p.Prev = 0, Digest{}
		if !p.holds(tx) {
			return Entry{}, fmt.Errorf("pending entry about %s: %w", object, ErrUnsealed)
		}
		return p.Entry, nil
	}
	if e.Hash() != hash || !tx.Sealed(sealed, sealing(hash, number, n), seal) {
		return Entry{}, fmt.Errorf("entry %d about %s: %w", e.Seq, object, ErrUnsealed)
	}
	return e, nil
}

// Count returns how many entries about object have a verb, as part of tx, with those
// that are pending.
func Count(ctx context.Context, tx *store.Tx, object string, verb Verb) (n int, err error) {
	err = tx.One(ctx, `select (select count(*) from audit_entry where object = $1 and verb = $2) + (select count(*) from audit_pending where object = $1 and verb = $2)`,
		[]any{object, verb}, &n)
	if err != nil {
		return 0, fmt.Errorf("count entries about %s: %w", object, err)
	}
	return n, nil
}

// Details returns the detail of e as fields.
func (e *Entry) Details() Fields { return e.details() }

// ErrOtherKey means that the record was sealed with another server's key.
var ErrOtherKey = errors.New("the record was sealed with another server's key")

// Sealed reports, as part of tx, whether the record is sealed: from its first
// entry on, or from the entry with verb on. It returns [ErrOtherKey] if another
// key has sealed entries and this one has sealed none.
func Sealed(ctx context.Context, tx *store.Tx, verb Verb) (bool, error) {
	type found struct{ ours, other bool }
	other := false
	for _, q := range []struct {
		where string
		arg   any
	}{{`seq = $1`, 1}, {`verb = $1`, verb}} {
		rows, err := store.List(ctx, tx, func(row func(...any) error) (f found, err error) {
			var seal []byte
			var number, n int64
			e, hash, err := scan(func(dest ...any) error { return row(append(dest, &seal, &number, &n)...) })
			whole := e.Hash() == hash
			f.ours = whole && tx.Sealed(sealed, sealing(hash, number, n), seal)
			f.other = whole && !f.ours && len(seal) > 0
			return f, err
		}, `select seq, at, project_id, actor, verb, object, detail, prev, hash, seal, tx, n from audit_entry where `+q.where, q.arg)
		if err != nil {
			return false, fmt.Errorf("look for sealed entries: %w", err)
		}
		if slices.ContainsFunc(rows, func(f found) bool { return f.ours }) {
			return true, nil
		}
		other = other || slices.ContainsFunc(rows, func(f found) bool { return f.other })
	}
	// Before the first start, a command may have left entries that are still pending.
	waiting, err := store.List(ctx, tx, scanPending, selectPending+`where refused_at = 0 order by p.id limit 100`)
	if err != nil {
		return false, fmt.Errorf("look for sealed entries: %w", err)
	}
	for _, p := range waiting {
		if p.holds(tx) {
			return true, nil
		}
		other = true
	}
	if other {
		return false, ErrOtherKey
	}
	return false, nil
}

// bounded makes hostile values safe to store: valid UTF-8 of bounded length, without
// NUL, which PostgreSQL refuses.
func bounded(f Fields) Fields {
	out := make(Fields, len(f))
	for k, v := range f {
		if v != "" {
			out[k] = clean(v)
		}
	}
	return out
}

// clean is bounded for one value. It cuts between characters.
func clean(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= maxField {
		return s
	}
	cut := maxField
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}

// scan reads an entry, and the hash that was stored with it.
func scan(row func(...any) error) (e Entry, hash Digest, err error) {
	var at int64
	var prev, sum []byte
	err = row(&e.Seq, &at, &e.Project, &e.Actor, &e.Verb, &e.Object, &e.Detail, &prev, &sum)
	e.At = time.UnixMicro(at).UTC()
	copy(e.Prev[:], prev)
	copy(hash[:], sum)
	return e, hash, err
}

// A Query selects entries. The zero Query selects the newest 100 of all.
type Query struct {
	Project string    // only this project's; empty means all
	Object  string    // only about the thing with this id; empty means all
	Actor   string    // only by this principal, "person:ann", or by all of a kind, "person:"; empty means all
	Verb    string    // only verbs with this prefix, "egress."; empty means all
	Since   time.Time // only from then on; zero means no bound
	Until   time.Time // only before then; zero means no bound
	Before  int64     // only entries with a lower Seq; 0 means no bound
	After   int64     // only entries with a higher Seq; 0 means no bound
	Limit   int       // at most so many; 0 means 100

	Verbs []Verb // only these; empty means all
	// Only entries by one of the principals By, about one of the IDs About, or whose detail
	// names one of the inboxes Inboxes. All empty means all.
	By, About, Inboxes []string
}

// where returns the condition of q and its arguments. It has only the columns that q
// restricts, so that both databases choose the right index.
func (q Query) where() (string, []any) {
	cond, args := "seq > $1", []any{int64(math.MinInt64)}
	if q.After > 0 {
		args[0] = q.After
	}
	add := func(c string, v any) {
		args = append(args, v)
		cond += " and " + strings.ReplaceAll(c, "?", "$"+strconv.Itoa(len(args)))
	}
	prefix := func(column, p string) {
		add(fmt.Sprintf("substr(%s, 1, %d) = ?", column, utf8.RuneCountInString(p)), p)
	}
	if q.Before > 0 {
		add("seq < ?", q.Before)
	}
	if q.Project != "" {
		add("project_id = ?", q.Project)
	}
	if q.Object != "" {
		add("object = ?", q.Object)
	}
	if strings.HasSuffix(q.Actor, ":") {
		prefix("actor", q.Actor)
	} else if q.Actor != "" {
		add("actor = ?", q.Actor)
	}
	if q.Verb != "" {
		prefix("verb", q.Verb)
	}
	list := func(column string, values []string) string {
		first := len(args) + 1
		for _, v := range values {
			args = append(args, v)
		}
		return column + " in (" + store.Places(first, len(values)) + ")"
	}
	if len(q.Verbs) > 0 {
		verbs := make([]string, len(q.Verbs))
		for i, v := range q.Verbs {
			verbs[i] = string(v)
		}
		cond += " and " + list("verb", verbs)
	}
	var any []string
	if len(q.By) > 0 {
		any = append(any, list("actor", q.By))
	}
	if len(q.About) > 0 {
		any = append(any, list("object", q.About))
	}
	for _, id := range q.Inboxes {
		args = append(args, `%"inbox":"`+id+`"%`)
		any = append(any, "detail like $"+strconv.Itoa(len(args)))
	}
	if len(any) > 0 {
		cond += " and (" + strings.Join(any, " or ") + ")"
	}
	if !q.Since.IsZero() {
		add("at >= ?", store.Time(q.Since))
	}
	if !q.Until.IsZero() {
		add("at < ?", store.Time(q.Until))
	}
	return cond, args
}

// clockSlack is by how much the times of entries may be out of the order of their numbers:
// on PostgreSQL an entry gets its number some time after its time, and a clock may be set.
const clockSlack = 15 * time.Minute

// Position returns the highest number such that the entries up to it are all older than t.
// The record has no index by time, and needs none: numbers and times grow together, so few
// reads find the place. A query with that number as [Query.After] does not read what is
// older.
func Position(ctx context.Context, tx *store.Tx, t time.Time) (int64, error) {
	t = t.Add(-clockSlack)
	size, err := Size(ctx, tx)
	if err != nil {
		return 0, err
	}
	low, high := int64(0), size // entries up to low are older, those after high are not
	for low < high {
		mid := low + (high-low+1)/2
		var at int64
		// An entry may be missing: somebody removed it from the database.
		err := tx.One(ctx, `select at from audit_entry where seq <= $1 order by seq desc limit 1`, []any{mid}, &at)
		if err != nil && !errors.Is(err, store.ErrNotFound) {
			return 0, fmt.Errorf("find the record's place of %s: %w", t.Format(time.RFC3339), err)
		}
		if at < store.Time(t) {
			low = mid
		} else {
			high = mid - 1
		}
	}
	return low, nil
}

// List returns the entries that q selects, newest first.
func List(ctx context.Context, tx *store.Tx, q Query) (out []Entry, err error) {
	err = q.each(ctx, tx, "desc", func(e Entry, _ Digest) error {
		out = append(out, e)
		return nil
	})
	return out, err
}

// each calls f with the entries that q selects, in an order.
func (q Query) each(ctx context.Context, tx *store.Tx, order string, f func(Entry, Digest) error) error {
	if q.Limit <= 0 {
		q.Limit = 100
	}
	cond, args := q.where()
	rows, err := tx.QueryContext(ctx, `select seq, at, project_id, actor, verb, object, detail, prev, hash from audit_entry
		where `+cond+` order by seq `+order+` limit `+strconv.Itoa(q.Limit), args...)
	if err != nil {
		return fmt.Errorf("list audit: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		e, hash, err := scan(rows.Scan)
		if err != nil {
			return fmt.Errorf("list audit: %w", err)
		}
		if err := f(e, hash); err != nil {
			return err
		}
	}
	return rows.Err()
}
