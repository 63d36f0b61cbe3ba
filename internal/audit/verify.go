package audit

import (
	"context"
	"fmt"

	"golang.org/x/mod/sumdb/tlog"

	"postern/internal/store"
)

// A BrokenError says where a record does not hold.
type BrokenError struct {
	Seq    int64 // the first bad entry
	Reason string
}

func (e *BrokenError) Error() string {
	return fmt.Sprintf("audit chain broken at entry %d: %s", e.Seq, e.Reason)
}

// A verifier follows the chain, entry by entry.
type verifier struct {
	last Head
	buf  []byte
}

// next checks that e, recorded with hash, follows, and returns its leaf.
func (v *verifier) next(e Entry, hash Digest) (leaf tlog.Hash, err error) {
	h, leaf, buf := e.hashes(v.buf)
	v.buf = buf
	switch {
	case e.Seq != v.last.Seq+1:
		return leaf, &BrokenError{v.last.Seq + 1, fmt.Sprintf("the next entry is %d", e.Seq)}
	case e.Prev != v.last.Hash:
		return leaf, &BrokenError{e.Seq, "it does not continue the entry before it"}
	case h != hash:
		return leaf, &BrokenError{e.Seq, "its content is not what was recorded"}
	}
	v.last = Head{e.Seq, hash}
	return leaf, nil
}

// page calls f with up to limit entries after seq, in order, each with the hash
// that was recorded with it.
func page(ctx context.Context, tx *store.Tx, seq int64, limit int, f func(Entry, Digest) error) (n int, err error) {
	rows, err := tx.QueryContext(ctx, `select seq, at, project_id, actor, verb, object, detail, prev, hash from audit_entry
		where seq > $1 order by seq limit $2`, seq, limit)
	if err != nil {
		return 0, fmt.Errorf("read audit: %w", err)
	}
	defer rows.Close()
	for last := seq; rows.Next(); n++ {
		e, hash, err := scan(rows.Scan)
		if err != nil {
			return n, &BrokenError{last + 1, "it cannot be read: " + err.Error()}
		}
		if err := f(e, hash); err != nil {
			return n, err
		}
		last = e.Seq
	}
	return n, rows.Err()
}

// verifyPage is how many entries are read at a time. A new query for each page
// lets the stored hashes of the tree be read in between.
const verifyPage = 2000

// Verify reads the whole chain and returns its head, or a [BrokenError] naming
// the first entry that does not fit. If known is not zero the chain must also
// contain it, which shows that nothing up to there was written anew.
func Verify(ctx context.Context, tx *store.Tx, known Head) (Head, error) {
	v := verifier{}
	for {
		n, err := page(ctx, tx, v.last.Seq, verifyPage, func(e Entry, hash Digest) error {
			before := v.last
			if _, err := v.next(e, hash); err != nil {
				return err
			}
			if e.Seq == known.Seq && hash != known.Hash {
				v.last = before
				return &BrokenError{e.Seq, "it is not the entry that was noted as head " + known.String()}
			}
			return nil
		})
		if err != nil {
			return v.last, err
		}
		if n < verifyPage {
			break
		}
	}
	if v.last.Seq < known.Seq {
		return v.last, &BrokenError{v.last.Seq + 1, "missing, though head " + known.String() + " was noted"}
	}
	var head Head
	var sum []byte
	if err := tx.One(ctx, `select seq, hash from audit_head where id = 1`, nil, &head.Seq, &sum); err != nil {
		return v.last, fmt.Errorf("read chain head: %w", err)
	}
	copy(head.Hash[:], sum)
	if head != v.last {
		return v.last, &BrokenError{min(head.Seq, v.last.Seq) + 1, fmt.Sprintf("the chain ends at %d and its head says %d", v.last.Seq, head.Seq)}
	}
	return v.last, nil
}
