package audit

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/tlog"

	"postern/internal/store"
)

// An edge is the right edge of a tree: the roots of its complete subtrees, the
// largest first. Their sizes are the powers of two that add up to the tree's size.
// It is all that is needed to append a leaf, so [Append] reads one row.
type edge struct {
	size  int64
	roots []tlog.Hash
}

// parseEdge reads what [edge.bytes] wrote.
func parseEdge(size int64, b []byte) (*edge, error) {
	t := &edge{size: size}
	for ; len(b) >= tlog.HashSize; b = b[tlog.HashSize:] {
		t.roots = append(t.roots, tlog.Hash(b[:tlog.HashSize]))
	}
	n := 0
	for s := size; s > 0; s &= s - 1 {
		n++
	}
	if len(b) != 0 || size < 0 || len(t.roots) != n {
		return nil, fmt.Errorf("read edge of tree: %d hashes for a size of %d", len(t.roots), size)
	}
	return t, nil
}

// bytes returns the roots, one after the other.
func (t *edge) bytes() []byte {
	b := make([]byte, 0, len(t.roots)*tlog.HashSize)
	for _, h := range t.roots {
		b = append(b, h[:]...)
	}
	return b
}

// add appends a leaf and returns the hashes that it completes: its own, and those of
// the subtrees that it is the last leaf of. They are stored one after the other, from
// the leaf's [tlog.StoredHashIndex] on.
func (t *edge) add(leaf tlog.Hash) []tlog.Hash {
	done := []tlog.Hash{leaf}
	for n := t.size; n&1 == 1; n >>= 1 {
		left := t.roots[len(t.roots)-1]
		t.roots = t.roots[:len(t.roots)-1]
		done = append(done, tlog.NodeHash(left, done[len(done)-1]))
	}
	t.roots = append(t.roots, done[len(done)-1])
	t.size++
	return done
}

// root returns the root of the whole tree.
func (t *edge) root() tlog.Hash {
	if len(t.roots) == 0 {
		h, err := tlog.TreeHash(0, nil)
		if err != nil {
			panic(err) // unreachable: the empty tree reads nothing
		}
		return h
	}
	h := t.roots[len(t.roots)-1]
	for i := len(t.roots) - 2; i >= 0; i-- {
		h = tlog.NodeHash(t.roots[i], h)
	}
	return h
}

// perInsert is how many hashes one statement stores: databases bound the number of
// its arguments.
const perInsert = 250

// insertNodes stores hashes at the indexes from first on, as part of tx.
func insertNodes(ctx context.Context, tx *store.Tx, first int64, hashes []tlog.Hash) error {
	for len(hashes) > 0 {
		n := min(len(hashes), perInsert)
		q := append(make([]byte, 0, 64+16*n), "insert into audit_node (idx, hash) values "...)
		args := make([]any, 0, 2*n)
		for i, h := range hashes[:n] {
			if i > 0 {
				q = append(q, ", "...)
			}
			q = append(q, "($"...)
			q = strconv.AppendInt(q, int64(2*i+1), 10)
			q = append(q, ", $"...)
			q = strconv.AppendInt(q, int64(2*i+2), 10)
			q = append(q, ')')
			args = append(args, first+int64(i), h[:])
		}
		if _, err := tx.ExecContext(ctx, string(q), args...); err != nil {
			return err
		}
		first, hashes = first+int64(n), hashes[n:]
	}
	return nil
}

// nodes reads the stored hashes of the tree as part of tx.
func nodes(ctx context.Context, tx *store.Tx) tlog.HashReader {
	return tlog.HashReaderFunc(func(indexes []int64) ([]tlog.Hash, error) {
		if len(indexes) == 0 {
			return nil, nil
		}
		at := map[int64][]int{}
		var q strings.Builder
		q.WriteString(`select idx, hash from audit_node where idx in (`)
		args := make([]any, 0, len(indexes))
		for i, idx := range indexes {
			if i > 0 {
				q.WriteString(", ")
			}
			fmt.Fprintf(&q, "$%d", i+1)
			args = append(args, idx)
			at[idx] = append(at[idx], i)
		}
		q.WriteString(`)`)
		rows, err := tx.QueryContext(ctx, q.String(), args...)
		if err != nil {
			return nil, err
		}
		defer rows.Close()
		out, found := make([]tlog.Hash, len(indexes)), 0
		for rows.Next() {
			var idx int64
			var sum []byte
			if err := rows.Scan(&idx, &sum); err != nil {
				return nil, err
			}
			for _, i := range at[idx] {
				copy(out[i][:], sum)
				found++
			}
		}
		if err := rows.Err(); err != nil {
			return nil, err
		}
		if found != len(indexes) {
			return nil, fmt.Errorf("read tree: %d of %d hashes are there", found, len(indexes))
		}
		return out, nil
	})
}

// ErrSize means that the tree is smaller than what is asked about.
var ErrSize = errors.New("the record's tree does not have that size")

// Size returns how many entries the tree has, as part of tx.
func Size(ctx context.Context, tx *store.Tx) (n int64, err error) {
	if err := tx.One(ctx, `select tree_size from audit_head where id = 1`, nil, &n); err != nil {
		return 0, fmt.Errorf("read size of tree: %w", err)
	}
	return n, nil
}

// Root returns the root of the tree as it was at a size, as part of tx.
func Root(ctx context.Context, tx *store.Tx, size int64) (tlog.Hash, error) {
	if err := within(ctx, tx, size); err != nil {
		return tlog.Hash{}, err
	}
	h, err := tlog.TreeHash(size, nodes(ctx, tx))
	if err != nil {
		return tlog.Hash{}, fmt.Errorf("hash tree of %d entries: %w", size, err)
	}
	return h, nil
}

// Prove returns the hashes that prove, with [tlog.CheckRecord], that entry seq is in
// the tree of the first size entries, as part of tx.
func Prove(ctx context.Context, tx *store.Tx, seq, size int64) (tlog.RecordProof, error) {
	if err := within(ctx, tx, size); err != nil {
		return nil, err
	}
	if seq < 1 || seq > size {
		return nil, fmt.Errorf("prove entry %d in a tree of %d: %w", seq, size, ErrSize)
	}
	p, err := tlog.ProveRecord(size, seq-1, nodes(ctx, tx))
	if err != nil {
		return nil, fmt.Errorf("prove entry %d: %w", seq, err)
	}
	return p, nil
}

// ProveConsistency returns the hashes that prove, with [tlog.CheckTree], that the tree
// of to entries extends the one of from entries, as part of tx.
func ProveConsistency(ctx context.Context, tx *store.Tx, from, to int64) (tlog.TreeProof, error) {
	if err := within(ctx, tx, to); err != nil {
		return nil, err
	}
	if from < 1 || from > to {
		return nil, fmt.Errorf("prove that a tree of %d extends one of %d: %w", to, from, ErrSize)
	}
	p, err := tlog.ProveTree(to, from, nodes(ctx, tx))
	if err != nil {
		return nil, fmt.Errorf("prove that a tree of %d extends one of %d: %w", to, from, err)
	}
	return p, nil
}

// within returns [ErrSize] unless the tree has at least size entries.
func within(ctx context.Context, tx *store.Tx, size int64) error {
	have, err := Size(ctx, tx)
	if err != nil {
		return err
	}
	if size < 0 || size > have {
		return fmt.Errorf("tree of %d entries, there are %d: %w", size, have, ErrSize)
	}
	return nil
}

// fillBatch is how many entries [Fill] adds in one transaction.
const fillBatch = 1000

// Fill adds the entries to the tree that are not in it yet, which a version without
// the tree appended. It calls progress, if that is not nil, with the number of entries
// in the tree and in the record. It returns a [BrokenError] if the chain is broken
// there: no tree is built over entries that are known to be false. It can be
// interrupted and repeated, also by several servers at a time.
func Fill(ctx context.Context, db *store.DB, progress func(done, all int64)) error {
	for {
		more, err := fill(ctx, db, progress)
		if err != nil || !more {
			return err
		}
	}
}

func fill(ctx context.Context, db *store.DB, progress func(done, all int64)) (more bool, err error) {
	var size, all int64
	var right []byte
	var t *edge
	var done []tlog.Hash
	// Entries do not change, so they are read and hashed before the transaction that
	// writes. If another server adds the same ones first, this one starts again.
	err = db.View(ctx, func(tx *store.Tx) error {
		err := tx.One(ctx, `select seq, tree_size, tree_edge from audit_head where id = 1`, nil, &all, &size, &right)
		if err != nil || size >= all {
			return err
		}
		if t, err = parseEdge(size, right); err != nil {
			return err
		}
		x := examiner{tree: t, last: Head{Seq: size}}
		if size > 0 {
			var sum []byte
			if err := tx.One(ctx, `select hash from audit_entry where seq = $1`, []any{size}, &sum); err != nil {
				return &BrokenError{Seq: size, Reason: "it is in the tree and not in the record"}
			}
			copy(x.last.Hash[:], sum)
		}
		n, err := page(ctx, tx, size, fillBatch, func(e Entry, hash Digest) error {
			nodes, err := x.entry(e, hash)
			done = append(done, nodes...)
			return err
		})
		if err == nil && n == 0 {
			return &BrokenError{Seq: size + 1, Reason: "it is missing"}
		}
		return err
	})
	if err != nil || t == nil {
		return false, err
	}
	if progress != nil && size == 0 {
		progress(0, all)
	}
	err = db.Update(ctx, func(tx *store.Tx) error {
		ok, err := tx.Changed(ctx, `update audit_head set tree_size = $1, tree_edge = $2 where id = 1 and tree_size = $3`, t.size, t.bytes(), size)
		if err != nil || !ok {
			return err // another server was faster
		}
		return insertNodes(ctx, tx, tlog.StoredHashIndex(0, size), done)
	})
	if err != nil {
		return false, fmt.Errorf("fill tree from entry %d: %w", size+1, err)
	}
	if progress != nil {
		progress(t.size, all)
	}
	return true, nil
}
