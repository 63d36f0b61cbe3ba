package oversight_test

import (
	"testing"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestOpenedIsKept: what a person opened is known to every server on the database, of that
// person, action and version alone, until it is decided; nobody makes it up in the
// database, and looking again writes nothing.
func TestOpenedIsKept(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		h := newHouse(t, db)
		ann := h.joins("ann", auth.Owner, nil)
		bob := h.joins("bob", auth.Reviewer, &h.operator)
		vic := h.joins("vic", auth.Viewer, &h.operator)
		a, b := h.proposes(h.agent), h.proposes(h.agent)
		is := func(what string, g *oversight.Gate, who auth.Principal, a oversight.Action, want bool) {
			t.Helper()
			if got, err := g.HasOpened(t.Context(), who, &a); err != nil || got != want {
				t.Errorf("%s: opened is %t, %v, want %t", what, got, err, want)
			}
		}
		rows := func() (n, at int64) {
			t.Helper()
			h.must(db.View(t.Context(), func(tx *store.Tx) error {
				return tx.One(t.Context(), `select count(*), coalesce(max(at), 0) from opened`, nil, &n, &at)
			}))
			return n, at
		}
		is("before", h.gate, ann, a, false)
		h.must(h.gate.Opened(t.Context(), ann, &a))
		_, first := rows()
		h.must(h.gate.Opened(t.Context(), ann, &a))
		if n, at := rows(); n != 1 || at != first {
			t.Errorf("opening it again left %d rows, written at %d, want one of %d", n, at, first)
		}
		h.must(h.gate.Opened(t.Context(), vic, &a))
		h.must(h.gate.Opened(t.Context(), h.agent, &a))
		second := h.other().gate
		is("on a second server", second, ann, a, true)
		is("another action", second, ann, b, false)
		is("another person", second, bob, a, false)
		is("a viewer", second, vic, a, false)

		// The attack: who writes the database says that it was opened.
		h.update(func(tx *store.Tx) error {
			_, err := tx.ExecContext(t.Context(), `insert into opened (action_id, person, version, digest, at, mac) select action_id, 'person:bob', version, digest, at, mac from opened`)
			return err
		})
		is("a copied row", second, bob, a, false)

		a = h.revises(h.agent, a, "other words")
		is("a new version", second, ann, a, false)
		h.must(second.Opened(t.Context(), ann, &a))
		is("the new version, opened", h.gate, ann, a, true)
		h.must(h.approves(ann, a))
		if n, _ := rows(); n != 0 {
			t.Errorf("%d rows are left of a decided action", n)
		}
		now, err := h.gate.Action(t.Context(), ann, a.ID)
		h.must(err)
		h.must(h.gate.Opened(t.Context(), ann, &now))
		h.must(h.gate.Opened(t.Context(), ann, &a)) // as it was when the page was read
		if n, _ := rows(); n != 0 {
			t.Errorf("opening a decided action left %d rows", n)
		}
	})
}
