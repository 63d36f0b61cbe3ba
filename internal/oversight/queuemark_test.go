package oversight_test

import (
	"errors"
	"testing"

	"postern/internal/auth"
	"postern/internal/oversight"
	"postern/internal/oversight/oversighttest"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestMarksChangeWithTheQueue: the mark of the queue, and of one action, is another after each
// thing that a page would show otherwise, and the same in between.
func TestMarksChangeWithTheQueue(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, oversighttest.Rules{})
		seen := map[string]string{}
		queue := func(after string, waiting int) {
			t.Helper()
			for range 2 {
				p, err := f.gate.QueueMark(t.Context(), f.person)
				if err != nil || p.Waiting != waiting {
					t.Fatalf("after %s: %+v, %v, want %d waiting", after, p, err, waiting)
				}
				if first, ok := seen[p.Mark]; ok && first != after {
					t.Errorf("after %s the mark is what it was after %s", after, first)
				}
				seen[p.Mark] = after
			}
		}
		queue("nothing", 0)
		a := f.propose("one")
		queue("one proposal", 1)
		before, err := f.gate.Mark(t.Context(), f.person, a.ID)
		if err != nil {
			t.Fatal(err)
		}
		b := f.propose("two")
		queue("two proposals", 2)
		if again, err := f.gate.Mark(t.Context(), f.person, a.ID); err != nil || again != before {
			t.Errorf("the mark of what did not change is %q, %v, and was %q", again, err, before)
		}
		if _, err := f.gate.Comment(t.Context(), f.person, a.ID, "hm", false); err != nil {
			t.Fatal(err)
		}
		commented, err := f.gate.Mark(t.Context(), f.person, a.ID)
		if err != nil || commented == before {
			t.Errorf("after a comment the mark is %q, %v", commented, err)
		}
		if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: b.ID, Version: b.Version, Digest: b.Hex(), Reason: "no"}); err != nil {
			t.Fatal(err)
		}
		// What a rejected one leaves behind is what was there before it came.
		if p, err := f.gate.QueueMark(t.Context(), f.person); err != nil || p.Waiting != 1 || seen[p.Mark] != "one proposal" {
			t.Errorf("after a rejection: %+v, %v", p, err)
		}
		for name, who := range map[string]auth.Principal{"an agent": f.agent, "a stranger": f.stranger} {
			if _, err := f.gate.Mark(t.Context(), who, a.ID); !errors.Is(err, auth.ErrForbidden) && !errors.Is(err, store.ErrNotFound) {
				t.Errorf("%s watches: %v", name, err)
			}
		}
		if _, err := f.gate.QueueMark(t.Context(), f.agent); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("an agent watches the queue: %v", err)
		}
	})
}
