package audit

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"postern/internal/store"
)

// A BrokenError says where verification of a record failed.
type BrokenError struct {
	Seq    int64 // the first bad entry; 0 if that has no number yet
	To     int64 // if only a range is known to contain the bad entry: its last entry; otherwise zero
	Reason string
}

func (e *BrokenError) Error() string {
	if e.Seq == 0 {
		return "audit broken: " + e.Reason // the same text each time, however long the chain is by then
	}
	if e.To > e.Seq {
		return fmt.Sprintf("audit chain broken at one of the entries %d to %d: %s", e.Seq, e.To, e.Reason)
	}
	return fmt.Sprintf("audit chain broken at entry %d: %s", e.Seq, e.Reason)
}

// A Kept is a checkpoint that was kept outside the record. Its signature has been
// verified by [Keep].
type Kept struct {
	TreeHead
	Source string   // where it was found, for error texts
	Signed []string // the keys that signed it, as NAME+HASH
}

// Keep verifies a signed checkpoint with keys. source says where it was found.
func Keep(source string, signed []byte, keys note.Verifiers) (Kept, error) {
	h, sigs, err := OpenCheckpoint(signed, keys)
	if err != nil {
		return Kept{}, fmt.Errorf("%s: %w", source, err)
	}
	k := Kept{TreeHead: h, Source: source}
	for _, s := range sigs {
		k.Signed = append(k.Signed, fmt.Sprintf("%s+%08x", s.Name, s.Hash))
	}
	return k, nil
}

// Options say what a record is verified against.
type Options struct {
	Known Head   // the record must contain this entry; zero means any
	Kept  []Kept // the record must extend each of these
	// Keys verify the checkpoints inside an export; nil means that these are only
	// counted.
	Keys note.Verifiers
	// Partial accepts an export that begins later or omits entries. Missing entries
	// are then not detected.
	Partial bool
	// Each is called with each valid entry, in order; nil means that it is not called.
	// An error ends the verification and is returned.
	Each func(Entry) error
	// Progress is called with the number of entries read so far, every 10,000; nil
	// means never.
	Progress func(done int64)
}

// A Report says what was verified.
type Report struct {
	Head    Head
	Root    tlog.Hash // of the tree over all entries; zero of a part
	Entries int64     // read
	Gaps    int64     // in a partial export: places where entries are missing

	Tree   int64    // entries whose stored tree hashes are correct
	Stored []Signed // checkpoints in the database whose sizes and roots match; the caller verifies their signatures
	Kept   []Kept   // the given checkpoints, and the verified ones of an export; by size
	Unread int      // checkpoints of an export that were not verified

	Sealed int64 // first entry from which all entries are sealed; 0 if none is, or without the server's key

	// Backlog are the entries that are committed and not in the chain yet. They are
	// given to Each after the others; with the server's key, their seals hold.
	Backlog Backlog
}

// ErrTwoRecords means that two signed checkpoints of the same size differ: somebody
// with the key has shown two different records (a split view).
var ErrTwoRecords = errors.New("two records were signed")

// An examiner verifies the entries of a record one by one.
type examiner struct {
	o    Options
	r    Report
	last Head
	tree *edge  // nil after a gap: the tree needs every entry
	kept []Kept // not yet reached, by size
	good int64  // size of the largest kept checkpoint that matched
	buf  []byte // reused for the encoding of each entry

	names bool // the database has names of entries that were pending
}

func newExaminer(o Options) (*examiner, error) {
	x := &examiner{o: o, tree: &edge{}}
	for _, k := range o.Kept {
		if err := x.keep(k); err != nil {
			return nil, err
		}
	}
	return x, nil
}

// keep adds a checkpoint that the record must extend.
func (x *examiner) keep(k Kept) error {
	at, _ := slices.BinarySearchFunc(x.kept, k, func(a, b Kept) int { return cmp.Compare(a.Size, b.Size) })
	if at < len(x.kept) && x.kept[at].Size == k.Size && x.kept[at].Root != k.Root {
		return fmt.Errorf("%s and %s are both signed, and their first %d entries differ: %w", x.kept[at].Source, k.Source, k.Size, ErrTwoRecords)
	}
	x.kept = slices.Insert(x.kept, at, k)
	return nil
}

// entry verifies the next entry, which was recorded with hash. It returns the tree
// hashes that the entry completes.
func (x *examiner) entry(e Entry, hash Digest) (done []tlog.Hash, err error) {
	h, leaf, buf := e.hashes(x.buf)
	x.buf = buf
	gap := e.Seq != x.last.Seq+1
	switch {
	case gap && !x.o.Partial:
		return nil, &BrokenError{Seq: x.last.Seq + 1, Reason: fmt.Sprintf("the next entry is %d", e.Seq)}
	case gap && e.Seq <= x.last.Seq:
		return nil, &BrokenError{Seq: e.Seq, Reason: fmt.Sprintf("it comes after entry %d", x.last.Seq)}
	case !gap && e.Prev != x.last.Hash:
		return nil, &BrokenError{Seq: e.Seq, Reason: "it does not continue the entry before it"}
	case h != hash:
		return nil, &BrokenError{Seq: e.Seq, Reason: "its content is not what was recorded"}
	case e.Seq == x.o.Known.Seq && h != x.o.Known.Hash:
		return nil, &BrokenError{Seq: e.Seq, Reason: "it is not the entry that was noted as head " + x.o.Known.String()}
	}
	if gap {
		x.tree = nil
		x.r.Gaps++
	}
	if x.tree != nil {
		done = x.tree.add(leaf)
		if err := x.compare(); err != nil {
			return nil, err
		}
	}
	x.last = Head{e.Seq, hash}
	x.r.Entries++
	if x.o.Each != nil {
		if err := x.o.Each(e); err != nil {
			return nil, err
		}
	}
	if x.o.Progress != nil && x.r.Entries%10_000 == 0 {
		x.o.Progress(x.r.Entries)
	}
	return done, nil
}

// compare compares the tree with the kept checkpoints of its current size.
func (x *examiner) compare() error {
	for len(x.kept) > 0 && x.kept[0].Size == x.tree.size {
		k := x.kept[0]
		if k.Root != x.tree.root() {
			return &BrokenError{Seq: x.good + 1, To: k.Size, Reason: fmt.Sprintf("the first %d entries are not those that the checkpoint %s was signed for", k.Size, k.Source)}
		}
		x.good = k.Size
		x.kept, x.r.Kept = x.kept[1:], append(x.r.Kept, k)
	}
	return nil
}

// end completes the report after the last entry. It detects a truncated record.
func (x *examiner) end() error {
	x.r.Head = x.last
	if x.tree != nil {
		x.r.Root = x.tree.root()
	}
	if x.o.Partial {
		return nil
	}
	if len(x.kept) > 0 {
		k := x.kept[len(x.kept)-1]
		return &BrokenError{Seq: x.last.Seq + 1, Reason: fmt.Sprintf("missing, though the checkpoint %s was signed for %d entries", k.Source, k.Size)}
	}
	if x.last.Seq < x.o.Known.Seq {
		return &BrokenError{Seq: x.last.Seq + 1, Reason: "missing, though head " + x.o.Known.String() + " was noted"}
	}
	return nil
}

// page calls f with up to limit entries after seq, in order, each with the hash
// that was recorded with it.
func page(ctx context.Context, tx *store.Tx, seq int64, limit int, f func(Entry, Digest) error) (n int, err error) {
	last := seq
	if seq == 0 {
		seq = math.MinInt64 // the attack: an entry is inserted before the first
	}
	rows, err := tx.QueryContext(ctx, `select seq, at, project_id, actor, verb, object, detail, prev, hash from audit_entry
		where seq > $1 order by seq limit $2`, seq, limit)
	if err != nil {
		return 0, fmt.Errorf("read audit: %w", err)
	}
	defer rows.Close()
	for ; rows.Next(); n++ {
		e, hash, err := scan(rows.Scan)
		if err != nil {
			return n, &BrokenError{Seq: last + 1, Reason: "it cannot be read: " + err.Error()}
		}
		if err := f(e, hash); err != nil {
			return n, err
		}
		last = e.Seq
	}
	return n, rows.Err()
}

// examinePage is how many entries are read at a time. A new query for each page
// lets the stored hashes of the tree be read in between.
const examinePage = 2000

// Examine verifies the whole record in a database against o: the chain, the tree, the
// seals and the stored checkpoints. If it fails, the error is a [BrokenError] that
// names the first bad entry, or [ErrTwoRecords], and the report covers the entries
// before it.
func Examine(ctx context.Context, tx *store.Tx, o Options) (Report, error) {
	o.Partial = false
	x, err := newExaminer(o)
	if err != nil {
		return Report{}, err
	}
	fail := func(err error) (Report, error) {
		x.r.Head = x.last
		return x.r, err
	}
	var head Head
	var sum, right []byte
	var size int64
	tree, err := hasTree(ctx, tx)
	if err != nil {
		return fail(err)
	}
	if tree {
		err = tx.One(ctx, `select seq, hash, tree_size, tree_edge from audit_head where id = 1`, nil, &head.Seq, &sum, &size, &right)
	} else {
		err = tx.One(ctx, `select seq, hash from audit_head where id = 1`, nil, &head.Seq, &sum)
	}
	if err != nil {
		return fail(fmt.Errorf("read chain head: %w", err))
	}
	copy(head.Hash[:], sum)
	seals, err := hasMigration(ctx, tx, "0013_seal")
	if err != nil {
		return fail(err)
	}
	if x.names, err = hasMigration(ctx, tx, "0041_audit_pending"); err != nil {
		return fail(err)
	}
	var at []byte // the edge of the tree at its stored size
	for more := true; more; {
		from := x.last.Seq
		var want []tlog.Hash
		n, err := page(ctx, tx, from, examinePage, func(e Entry, hash Digest) error {
			done, err := x.entry(e, hash)
			if err == nil && e.Seq <= size {
				want = append(want, done...)
			}
			if err == nil && e.Seq == size {
				at = x.tree.bytes()
			}
			return err
		})
		// Compare the stored hashes even if an entry of this page is broken: a wrong
		// hash before it would be the first fault.
		if size > from {
			if err := compareNodes(ctx, tx, from, want); err != nil {
				return fail(err)
			}
			x.r.Tree = min(x.last.Seq, size)
		}
		if err != nil {
			return fail(err)
		}
		if seals && tx.Keyed() {
			if err := x.seals(ctx, tx, from); err != nil {
				return fail(err)
			}
		}
		more = n == examinePage
	}
	if err := x.end(); err != nil {
		return x.r, err
	}
	if head != x.last {
		return x.r, &BrokenError{Seq: min(head.Seq, x.last.Seq) + 1, Reason: fmt.Sprintf("the chain ends at %d and its head says %d", x.last.Seq, head.Seq)}
	}
	if err := x.pending(ctx, tx); err != nil || !tree {
		return x.r, err
	}
	if size > x.last.Seq || !bytes.Equal(at, right) {
		return x.r, &BrokenError{Seq: min(size, x.last.Seq) + 1, Reason: fmt.Sprintf("the chain ends at %d and its tree at %d, or elsewhere", x.last.Seq, size)}
	}
	return x.r, x.stored(ctx, tx, size)
}

// stored verifies the number of tree hashes, and the stored checkpoints against the
// tree.
func (x *examiner) stored(ctx context.Context, tx *store.Tx, size int64) error {
	var count int64
	if err := tx.One(ctx, `select count(*) from audit_node`, nil, &count); err != nil {
		return fmt.Errorf("count hashes of tree: %w", err)
	}
	if want := tlog.StoredHashCount(size); count != want {
		return &BrokenError{Seq: size + 1, Reason: fmt.Sprintf("the tree has %d hashes, and %d entries make %d", count, size, want)}
	}
	list, err := Checkpoints(ctx, tx)
	if err != nil {
		return &BrokenError{Seq: 1, To: x.last.Seq, Reason: err.Error()}
	}
	for _, s := range list {
		if s.Size > size {
			return &BrokenError{Seq: size + 1, Reason: fmt.Sprintf("missing, though the database has a checkpoint of %d entries", s.Size)}
		}
		root, err := tlog.TreeHash(s.Size, nodes(ctx, tx))
		if err != nil {
			return fmt.Errorf("hash tree of %d entries: %w", s.Size, err)
		}
		if root != s.Root {
			return &BrokenError{Seq: 1, To: s.Size, Reason: fmt.Sprintf("the first %d entries are not those that a checkpoint in the database was signed for", s.Size)}
		}
	}
	x.r.Stored = list
	return nil
}

// seals verifies the seals of the entries after from, up to the last one read. Entries
// written by versions without seals have none. The first sealed entry covers them,
// since its hash covers the chain before it. Every later entry must be sealed.
func (x *examiner) seals(ctx context.Context, tx *store.Tx, from int64) error {
	names := "0, 0"
	if x.names {
		names = "tx, n"
	}
	rows, err := tx.QueryContext(ctx, `select seq, hash, seal, `+names+` from audit_entry where seq > $1 and seq <= $2 order by seq`, from, x.last.Seq)
	if err != nil {
		return fmt.Errorf("read seals: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var seq, number, n int64
		var sum, seal []byte
		if err := rows.Scan(&seq, &sum, &seal, &number, &n); err != nil {
			return fmt.Errorf("read seals: %w", err)
		}
		switch {
		case len(seal) == 0 && x.r.Sealed == 0:
		case len(sum) != len(Digest{}) || !tx.Sealed(sealed, sealing(Digest(sum), number, n), seal):
			// The attack: somebody who can write the database rewrites the entries after
			// the last checkpoint, with correct hashes.
			return &BrokenError{Seq: seq, Reason: "it is not sealed with this server's key: the server did not write it"}
		case x.r.Sealed == 0:
			x.r.Sealed = seq
		}
	}
	return rows.Err()
}

// pending verifies that no entry was put into the chain twice, and the entries that are
// not in it yet.
func (x *examiner) pending(ctx context.Context, tx *store.Tx) (err error) {
	if !x.names {
		return nil
	}
	// The attack: an entry is made pending again, after the index that forbids it was
	// dropped, and the server puts it into the chain as news.
	var twice int64
	err = tx.One(ctx, `select coalesce(max(seq), 0) from (select max(seq) as seq from audit_entry where tx <> 0 group by tx, n having count(*) > 1) as e`, nil, &twice)
	if err != nil {
		return fmt.Errorf("look for entries that are there twice: %w", err)
	}
	if twice > 0 {
		return &BrokenError{Seq: twice, Reason: "it is there twice: it was made pending again"}
	}
	if x.r.Backlog, err = Waiting(ctx, tx); err != nil {
		return err
	}
	if x.r.Backlog == (Backlog{}) {
		return nil
	}
	seq := x.last.Seq
	rows, err := store.List(ctx, tx, scanPending, selectPending+`join (select tx, min(id) as first from audit_pending group by tx) as t on t.tx = p.tx order by t.first, p.id`)
	if err != nil {
		return fmt.Errorf("read pending entries: %w", err)
	}
	seen := map[pendingName]bool{}
	for _, p := range rows {
		seq++
		if p.refused || p.known || seen[p.pendingName] || tx.Keyed() && !p.holds(tx) {
			return &BrokenError{Reason: fmt.Sprintf("the server did not write row %d of the pending entries, or it did before and the entry is in the chain already", p.id)}
		}
		seen[p.pendingName] = true
		p.Seq = seq // if no other is committed before it is sequenced
		if x.o.Each != nil {
			if err := x.o.Each(p.Entry); err != nil {
				return err
			}
		}
	}
	return nil
}

// hasTree reports whether the database has a tree. A backup of an old version has none.
func hasTree(ctx context.Context, tx *store.Tx) (bool, error) {
	return hasMigration(ctx, tx, "0011_audit")
}

// hasMigration reports whether a migration was applied to the database, which may be a
// backup of an old version.
func hasMigration(ctx context.Context, tx *store.Tx, name string) (bool, error) {
	n := 0
	if err := tx.One(ctx, `select count(*) from migration where name = $1`, []any{"migrations/" + name + ".sql"}, &n); err != nil {
		return false, fmt.Errorf("read version of database: %w", err)
	}
	return n > 0, nil
}

// compareNodes compares the stored tree hashes of the entries after from with want.
func compareNodes(ctx context.Context, tx *store.Tx, from int64, want []tlog.Hash) error {
	if len(want) == 0 {
		return nil
	}
	first := tlog.StoredHashIndex(0, from)
	// entry returns the entry that completes hash i: the first one that a wrong hash
	// can concern.
	entry := func(i int) int64 {
		level, n := tlog.SplitStoredHashIndex(first + int64(i))
		return (n + 1) << level
	}
	rows, err := tx.QueryContext(ctx, `select idx, hash from audit_node where idx >= $1 and idx < $2 order by idx`, first, first+int64(len(want)))
	if err != nil {
		return fmt.Errorf("read tree: %w", err)
	}
	defer rows.Close()
	i := 0
	for ; rows.Next(); i++ {
		var idx int64
		var sum []byte
		if err := rows.Scan(&idx, &sum); err != nil {
			return fmt.Errorf("read tree: %w", err)
		}
		if idx != first+int64(i) {
			return &BrokenError{Seq: entry(i), Reason: "it is not in the tree"}
		}
		if !bytes.Equal(sum, want[i][:]) {
			return &BrokenError{Seq: entry(i), Reason: "it is not the one that was put into the tree"}
		}
	}
	if err := rows.Err(); err != nil {
		return fmt.Errorf("read tree: %w", err)
	}
	if i < len(want) {
		return &BrokenError{Seq: entry(i), Reason: "it is not in the tree"}
	}
	return nil
}

// ExamineExport verifies an export in JSON Lines against o, like [Examine].
func ExamineExport(r io.Reader, o Options) (Report, error) {
	x, err := newExaminer(o)
	if err != nil {
		return Report{}, err
	}
	number := 0
	err = ReadExport(r, func(l Line) error {
		number++
		if l.Checkpoint == nil {
			if x.r.Entries == 0 && o.Partial && l.Entry.Seq > 1 {
				// A partial export may begin anywhere: trust the first entry's prev.
				x.last = Head{l.Entry.Seq - 1, l.Entry.Prev}
				x.tree = nil
				x.r.Gaps++
			}
			_, err := x.entry(l.Entry, l.Hash)
			return err
		}
		if o.Keys == nil {
			x.r.Unread++
			return nil
		}
		k, err := Keep(fmt.Sprintf("in line %d of the export", l.Number), l.Checkpoint, o.Keys)
		if err != nil {
			return err
		}
		if x.tree == nil {
			return nil
		}
		// A checkpoint in an export follows the entries that it covers.
		if k.Size > x.tree.size {
			return &BrokenError{Seq: x.tree.size + 1, Reason: fmt.Sprintf("missing, though the checkpoint %s was signed for %d entries", k.Source, k.Size)}
		}
		if k.Size < x.tree.size {
			x.r.Unread++
			return nil
		}
		if err := x.keep(k); err != nil {
			return err
		}
		return x.compare()
	})
	if err != nil {
		x.r.Head = x.last
		return x.r, err
	}
	return x.r, x.end()
}
