package audit_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"postern/internal/audit"
	"postern/internal/store"
	"postern/internal/storetest"
)

// benchEntries is how many entries the record of a benchmark has. It is enough
// for its cost by entry to be that of millions: the tree alone grows, by a hash
// in a proof for each doubling.
const benchEntries = 50_000

func bigRecord(b *testing.B) *store.DB {
	b.Helper()
	db := storetest.SQLite(b)
	for range benchEntries / 1000 {
		update(b, db, func(ctx context.Context, tx *store.Tx) error {
			for i := range 1000 {
				err := audit.Append(ctx, tx, ann, "action.propose", fmt.Sprint("act_", i), audit.Fields{
					"digest": "4b94c15ad0d2f5e9b3c8a7f6e1d4c2b0a9f8e7d6c5b4a3f2e1d0c9b8a7f6e5d4", "kind": "email.send", "state": "pending", "to": "bob@example.com", "via": "rest",
				})
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	return db
}

// BenchmarkVerify reads and checks a whole record, chain, tree and checkpoint,
// and compares with the time to hash the same bytes once.
func BenchmarkVerify(b *testing.B) {
	db := bigRecord(b)
	s, v := signer(b, "example.com/audit")
	var kept audit.Kept
	update(b, db, func(ctx context.Context, tx *store.Tx) error {
		signed, err := audit.Checkpoint(ctx, tx, s)
		if err == nil {
			kept, err = audit.Keep("bench", signed, note.VerifierList(v))
		}
		return err
	})
	var bytes [][]byte
	view(b, db, func(ctx context.Context, tx *store.Tx) error {
		list, err := audit.List(ctx, tx, audit.Query{Limit: benchEntries})
		for _, e := range list {
			bytes = append(bytes, audit.Leaf(e))
		}
		return err
	})
	start := time.Now()
	for _, e := range bytes {
		sha256.Sum256(e)
	}
	hashing := time.Since(start)
	b.ResetTimer()
	for b.Loop() {
		view(b, db, func(ctx context.Context, tx *store.Tx) error {
			_, err := audit.Examine(ctx, tx, audit.Options{Kept: []audit.Kept{kept}})
			return err
		})
	}
	each := b.Elapsed() / time.Duration(b.N)
	b.ReportMetric(each.Seconds()*1e6/benchEntries, "s/million")
	b.ReportMetric(float64(each)/float64(hashing), "x-sha256")
}

// BenchmarkProve makes a proof of an entry, and checks it.
func BenchmarkProve(b *testing.B) {
	db := bigRecord(b)
	s, v := signer(b, "example.com/audit")
	update(b, db, func(ctx context.Context, tx *store.Tx) error {
		_, err := audit.Checkpoint(ctx, tx, s)
		return err
	})
	keys := note.VerifierList(v)
	seq := int64(1)
	for b.Loop() {
		view(b, db, func(ctx context.Context, tx *store.Tx) error {
			p, err := audit.ProveEntry(ctx, tx, "", seq)
			if err != nil {
				return err
			}
			_, err = p.Check(keys)
			return err
		})
		seq = seq*7919%benchEntries + 1
	}
}

// BenchmarkAppend appends entries in transactions of one, each durable, and of
// many, and compares the latter with the same without the tree.
func BenchmarkAppend(b *testing.B) {
	add := func(ctx context.Context, tx *store.Tx) error {
		return audit.Append(ctx, tx, ann, "action.propose", "act_1", audit.Fields{"kind": "email.send", "to": "bob@example.com"})
	}
	b.Run("durable", func(b *testing.B) {
		db := storetest.SQLite(b)
		for b.Loop() {
			update(b, db, add)
		}
	})
	many := func(b *testing.B, db *store.DB) {
		b.Helper()
		for b.Loop() {
			update(b, db, func(ctx context.Context, tx *store.Tx) error {
				for range 100 {
					if err := add(ctx, tx); err != nil {
						return err
					}
				}
				return nil
			})
		}
		b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/100, "us/entry")
	}
	b.Run("hundred", func(b *testing.B) { many(b, storetest.SQLite(b)) })
	b.Run("hundred-no-tree", func(b *testing.B) {
		db := storetest.SQLite(b)
		update(b, db, add)
		forgetTree(b, db) // behind a gap the tree is left to Fill
		many(b, db)
	})
}
