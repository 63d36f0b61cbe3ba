package audit_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"postern/internal/audit"
	"postern/internal/store"
	"postern/internal/storetest"
)

// signer makes a key for checkpoints.
func signer(t testing.TB, name string) (note.Signer, note.Verifier) {
	t.Helper()
	skey, vkey, err := note.GenerateKey(rand.Reader, name)
	if err != nil {
		t.Fatal(err)
	}
	s, err := note.NewSigner(skey)
	if err != nil {
		t.Fatal(err)
	}
	v, err := note.NewVerifier(vkey)
	if err != nil {
		t.Fatal(err)
	}
	return s, v
}

func view(t testing.TB, db *store.DB, f func(ctx context.Context, tx *store.Tx) error) {
	t.Helper()
	if err := audit.View(t.Context(), db, func(tx *store.Tx) error { return f(t.Context(), tx) }); err != nil {
		t.Fatal(err)
	}
}

func update(t testing.TB, db *store.DB, f func(ctx context.Context, tx *store.Tx) error) {
	t.Helper()
	if err := db.Update(t.Context(), func(tx *store.Tx) error { return f(t.Context(), tx) }); err != nil {
		t.Fatal(err)
	}
}

// leaves returns what the tree must have, by way of the library alone.
func leaves(t testing.TB, db *store.DB) (stored []tlog.Hash) {
	t.Helper()
	read := tlog.HashReaderFunc(func(idx []int64) (out []tlog.Hash, err error) {
		for _, i := range idx {
			out = append(out, stored[i])
		}
		return out, nil
	})
	view(t, db, func(ctx context.Context, tx *store.Tx) error {
		list, err := audit.List(ctx, tx, audit.Query{Limit: 1 << 20})
		for i := range list {
			e := list[len(list)-1-i]
			hs, err := tlog.StoredHashes(int64(i), audit.Leaf(e), read)
			if err != nil {
				t.Fatal(err)
			}
			stored = append(stored, hs...)
		}
		return err
	})
	return stored
}

// TestTree compares what is stored, the root at each size and each proof with
// what the library makes of the same entries.
func TestTree(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		const n = 21
		appendN(t, db, n)
		want := leaves(t, db)
		read := tlog.HashReaderFunc(func(idx []int64) (out []tlog.Hash, err error) {
			for _, i := range idx {
				out = append(out, want[i])
			}
			return out, nil
		})
		view(t, db, func(ctx context.Context, tx *store.Tx) error {
			var count int
			if err := tx.One(ctx, `select count(*) from audit_node`, nil, &count); err != nil || count != len(want) {
				t.Errorf("%d hashes are stored (%v), want %d", count, err, len(want))
			}
			for size := int64(0); size <= n; size++ {
				root, err := audit.Root(ctx, tx, size)
				if err != nil {
					return err
				}
				lib, err := tlog.TreeHash(size, read)
				if err != nil || root != lib {
					t.Fatalf("root at %d = %v, want %v (%v)", size, root, lib, err)
				}
				for seq := int64(1); seq <= size; seq++ {
					p, err := audit.Prove(ctx, tx, seq, size)
					if err != nil {
						return err
					}
					if err := tlog.CheckRecord(p, size, root, seq-1, want[tlog.StoredHashIndex(0, seq-1)]); err != nil {
						t.Errorf("proof of %d in %d: %v", seq, size, err)
					}
					c, err := audit.ProveConsistency(ctx, tx, seq, size)
					if err != nil {
						return err
					}
					old, err := audit.Root(ctx, tx, seq)
					if err != nil {
						return err
					}
					if err := tlog.CheckTree(c, size, root, seq, old); err != nil {
						t.Errorf("proof of %d after %d: %v", size, seq, err)
					}
				}
			}
			for _, bad := range [][2]int64{{0, n}, {-1, n}, {n + 1, n}, {1, n + 1}, {2, 1}, {1, -1}} {
				if _, err := audit.Prove(ctx, tx, bad[0], bad[1]); !errors.Is(err, audit.ErrSize) {
					t.Errorf("Prove(%d, %d) = %v, want ErrSize", bad[0], bad[1], err)
				}
				if _, err := audit.ProveConsistency(ctx, tx, bad[0], bad[1]); !errors.Is(err, audit.ErrSize) {
					t.Errorf("ProveConsistency(%d, %d) = %v, want ErrSize", bad[0], bad[1], err)
				}
			}
			return nil
		})
	})
}

// forgetTree makes a database what it was before there was a tree in it.
func forgetTree(t testing.TB, db *store.DB) {
	update(t, db, func(ctx context.Context, tx *store.Tx) error {
		_, err1 := tx.ExecContext(ctx, `delete from audit_node`)
		_, err2 := tx.ExecContext(ctx, `update audit_head set tree_size = 0, tree_edge = $1`, []byte{})
		return errors.Join(err1, err2)
	})
}

// TestFill is a database from before the tree: it is filled by several servers
// at once while one that knows of no tree, and one that does, go on appending.
func TestFill(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		update(t, db, func(ctx context.Context, tx *store.Tx) error {
			for i := range 2500 {
				if err := audit.Append(ctx, tx, ann, audit.SetupCreate, fmt.Sprint("obj_", i), nil); err != nil {
					return err
				}
			}
			return nil
		})
		var want tlog.Hash
		view(t, db, func(ctx context.Context, tx *store.Tx) (err error) {
			want, err = audit.Root(ctx, tx, 2500)
			return err
		})
		forgetTree(t, db)
		appendN(t, db, 3) // behind the gap: they wait for it
		view(t, db, func(ctx context.Context, tx *store.Tx) error {
			if n, err := audit.Size(ctx, tx); err != nil || n != 0 {
				t.Errorf("size = %d, %v, want 0 before it is filled", n, err)
			}
			return nil
		})
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				var last int64
				err := audit.Fill(t.Context(), db, func(done, all int64) {
					if done < last || done > all {
						t.Errorf("progress went from %d to %d of %d", last, done, all)
					}
					last = done
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		wg.Go(func() { appendN(t, db, 10) })
		wg.Wait()
		if err := audit.Fill(t.Context(), db, nil); err != nil {
			t.Fatal(err)
		}
		view(t, db, func(ctx context.Context, tx *store.Tx) error {
			if n, err := audit.Size(ctx, tx); err != nil || n != 2513 {
				t.Errorf("size = %d, %v, want 2513", n, err)
			}
			if got, err := audit.Root(ctx, tx, 2500); err != nil || got != want {
				t.Errorf("root of the first 2500 = %v, %v, want %v", got, err, want)
			}
			return nil
		})
	})
}

// TestFillBroken: no tree is built over a chain that does not hold.
func TestFillBroken(t *testing.T) {
	for _, tt := range []struct {
		name, attack string
		want         int64
	}{
		{"changed", `update audit_entry set actor = 'person:eve' where seq = 3`, 3},
		{"removed", `delete from audit_entry where seq = 3`, 3},
		{"all removed", `delete from audit_entry`, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			db := storetest.SQLite(t)
			appendN(t, db, 5)
			forgetTree(t, db)
			update(t, db, func(ctx context.Context, tx *store.Tx) error { _, err := tx.ExecContext(ctx, tt.attack); return err })
			err := audit.Fill(t.Context(), db, nil)
			var broken *audit.BrokenError
			if !errors.As(err, &broken) || broken.Seq != tt.want {
				t.Errorf("Fill = %v, want broken at %d", err, tt.want)
			}
		})
	}
}

// TestTwoProcessesAppend is two servers on one database: one chain, one tree.
func TestTwoProcessesAppend(t *testing.T) {
	source := storetest.PostgresURL(t)
	if source == "" {
		source = filepath.Join(t.TempDir(), "postern.db")
	}
	var wg sync.WaitGroup
	for range 2 {
		db := storetest.Open(t, source)
		for range 4 {
			wg.Go(func() { appendN(t, db, 25) })
		}
	}
	wg.Wait()
	db := storetest.Open(t, source)
	if h, err := verify(t, db, audit.Head{}); err != nil || h.Seq != 200 {
		t.Fatalf("Verify = %v, %v; want 200 entries", h, err)
	}
	want := leaves(t, db)
	view(t, db, func(ctx context.Context, tx *store.Tx) error {
		root, err := audit.Root(ctx, tx, 200)
		if err != nil {
			return err
		}
		p, err := audit.Prove(ctx, tx, 77, 200)
		if err != nil {
			return err
		}
		return tlog.CheckRecord(p, 200, root, 76, want[tlog.StoredHashIndex(0, 76)])
	})
}
