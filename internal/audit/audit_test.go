package audit_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

var ann = auth.Principal{Kind: auth.Person, Role: auth.Owner, ID: "ann", Project: "prj_1"}

func appendN(t *testing.T, db *store.DB, n int) {
	t.Helper()
	for range n {
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			return audit.Append(t.Context(), tx, ann, audit.SetupCreate, "obj_1", audit.Fields{"k": "v", "empty": ""})
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	settle(t, db)
}

func verify(t *testing.T, db *store.DB, known audit.Head) (h audit.Head, err error) {
	t.Helper()
	verr := audit.View(t.Context(), db, func(tx *store.Tx) error {
		var r audit.Report
		r, err = audit.Examine(t.Context(), tx, audit.Options{Known: known})
		h = r.Head
		return nil
	})
	if verr != nil {
		t.Fatal(verr)
	}
	return h, err
}

func TestVerifyFindsTheFirstBadEntry(t *testing.T) {
	tests := []struct {
		name, attack string
		want         int64
	}{
		{"actor changed", `update audit_entry set actor = 'person:eve' where seq = 3`, 3},
		{"detail changed by one byte", `update audit_entry set detail = '{"k":"w"}' where seq = 2`, 2},
		{"time moved", `update audit_entry set at = at + 1 where seq = 5`, 5},
		{"entry removed", `delete from audit_entry where seq = 3`, 3},
		{"last entry removed", `delete from audit_entry where seq = 5`, 5},
		{"hash replaced", `update audit_entry set hash = prev where seq = 4`, 4},
		{"entry renumbered", `update audit_entry set seq = 9 where seq = 5`, 5},
		{"head set back", `update audit_head set seq = 4`, 5},
	}
	storetest.Each(t, func(t *testing.T, _ *store.DB) {
		for _, tt := range tests {
			t.Run(tt.name, func(t *testing.T) {
				db := storetest.SQLite(t)
				appendN(t, db, 5)
				if h, err := verify(t, db, audit.Head{}); err != nil || h.Seq != 5 {
					t.Fatalf("before the attack: %v, %v", h, err)
				}
				if err := db.Update(t.Context(), func(tx *store.Tx) error { _, err := tx.ExecContext(t.Context(), tt.attack); return err }); err != nil {
					t.Fatal(err)
				}
				_, err := verify(t, db, audit.Head{})
				var broken *audit.BrokenError
				if !errors.As(err, &broken) || broken.Seq != tt.want {
					t.Errorf("Verify = %v, want broken at %d", err, tt.want)
				}
			})
		}
	})
}

// TestVerifyKnownHead is the attacker who can write everything: cuts the chain
// and sets the head to match. Only a head noted elsewhere shows it.
func TestVerifyKnownHead(t *testing.T) {
	db := storetest.SQLite(t)
	appendN(t, db, 3)
	known, err := verify(t, db, audit.Head{})
	if err != nil {
		t.Fatal(err)
	}
	if again, err := audit.ParseHead(known.String()); err != nil || again != known {
		t.Fatalf("ParseHead(%q) = %v, %v", known, again, err)
	}
	appendN(t, db, 1)
	if _, err := verify(t, db, known); err != nil {
		t.Fatalf("a longer chain: %v", err)
	}
	err = db.Update(t.Context(), func(tx *store.Tx) error {
		_, err1 := tx.ExecContext(t.Context(), `delete from audit_entry where seq > 2`)
		_, err2 := tx.ExecContext(t.Context(), `update audit_head set seq = 2, hash = (select hash from audit_entry where seq = 2)`)
		return errors.Join(err1, err2)
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := verify(t, db, audit.Head{}); err == nil {
		t.Fatal("the tree that is longer than the chain was not seen")
	}
	forgetTree(t, db)
	if err := audit.Fill(t.Context(), db, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := verify(t, db, audit.Head{}); err != nil {
		t.Fatalf("the cut chain should look whole without a known head: %v", err)
	}
	if _, err := verify(t, db, known); err == nil {
		t.Error("Verify with the known head did not see the cut")
	}
}

// TestAppendConcurrent shows that writers at the same time make one chain.
func TestAppendConcurrent(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() { appendN(t, db, 10) })
		}
		wg.Wait()
		if h, err := verify(t, db, audit.Head{}); err != nil || h.Seq != 80 {
			t.Errorf("Verify = %v, %v; want 80 entries", h, err)
		}
	})
}

func TestAppendHostileValues(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := context.Background()
		err := db.Update(ctx, func(tx *store.Tx) error {
			return audit.Append(ctx, tx, ann, audit.EgressDenied, "a\x00b", audit.Fields{"name": "\xff\x00" + strings.Repeat("ü", 10_000)})
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := verify(t, db, audit.Head{}); err != nil {
			t.Fatal(err)
		}
		err = audit.View(ctx, db, func(tx *store.Tx) error {
			es, err := audit.List(ctx, tx, audit.Query{Project: "prj_1", Verb: "egress."})
			if len(es) != 1 || len(es[0].Detail) > 2200 {
				t.Errorf("List = %d entries", len(es))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}
