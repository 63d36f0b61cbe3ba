package audit_test

import (
	"testing"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestQueryByParties: entries are found by who did them, by what they are about, and by the
// inbox that their detail names; and never those of another project.
func TestQueryByParties(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		add := func(project, actor string, verb audit.Verb, object string, f audit.Fields) {
			t.Helper()
			who := auth.Principal{Kind: auth.Sandbox, ID: actor, Project: project}
			if err := db.Update(t.Context(), func(tx *store.Tx) error { return audit.Append(t.Context(), tx, who, verb, object, f) }); err != nil {
				t.Fatal(err)
			}
		}
		add("one", "a", audit.EgressDenied, "a", nil)
		add("one", "b", audit.EgressConnected, "b", nil)
		add("one", "b", audit.MessageReceive, "msg_1", audit.Fields{"inbox": "inb_1"})
		add("one", "b", audit.MessageReceive, "msg_2", audit.Fields{"inbox": "inb_2"})
		add("one", "b", audit.ActionApprove, "act_1", nil)
		add("two", "a", audit.EgressDenied, "act_1", audit.Fields{"inbox": "inb_1"})
		if err := audit.Settle(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			name string
			q    audit.Query
			want int
		}{
			{"by", audit.Query{By: []string{"sandbox:a"}}, 1},
			{"about", audit.Query{About: []string{"act_1", "b"}}, 2},
			{"inbox", audit.Query{Inboxes: []string{"inb_1"}}, 1},
			{"any of them", audit.Query{By: []string{"sandbox:a"}, About: []string{"act_1"}, Inboxes: []string{"inb_1"}}, 3},
			{"and a verb", audit.Query{By: []string{"sandbox:b"}, Verbs: []audit.Verb{audit.EgressConnected, audit.ActionApprove}}, 2},
			{"hostile", audit.Query{By: []string{"' or 1=1 --"}, Inboxes: []string{`"%`}}, 0},
		} {
			tt.q.Project = "one"
			err := db.View(t.Context(), func(tx *store.Tx) error {
				got, err := audit.List(t.Context(), tx, tt.q)
				if len(got) != tt.want {
					t.Errorf("%s: %d entries, want %d", tt.name, len(got), tt.want)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestPosition: the place of a time in the record excludes no entry of that time, even if
// an entry was removed from the database.
func TestPosition(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		appendN(t, db, 100)
		if err := audit.Settle(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		begun := time.Now().Add(-1000 * time.Hour)
		at := func(seq int64) time.Time { return begun.Add(time.Duration(seq) * time.Hour) }
		err := db.Update(t.Context(), func(tx *store.Tx) error {
			for seq := range int64(100) {
				if _, err := tx.ExecContext(t.Context(), `update audit_entry set at = $1 where seq = $2`, store.Time(at(seq+1)), seq+1); err != nil {
					return err
				}
			}
			_, err := tx.ExecContext(t.Context(), `delete from audit_entry where seq in (50, 51)`)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		err = db.View(t.Context(), func(tx *store.Tx) error {
			for when, want := range map[time.Time]int64{at(0): 0, at(20): 19, at(51): 51, at(100): 99, at(500): 100, begun.AddDate(-9, 0, 0): 0} {
				got, err := audit.Position(t.Context(), tx, when)
				if err != nil {
					return err
				}
				if got != want {
					t.Errorf("the position of hour %v is %d, want %d", when.Sub(begun).Hours(), got, want)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}
