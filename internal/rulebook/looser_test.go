package rulebook_test

import (
	"strings"
	"testing"

	"postern/internal/rulebook"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestLooserPolicyIsNoticed: the reviewer of a change sees each way in which the new version
// asks less. The attack: a change that looks like a tidy-up takes the second factor,
// the tick of a finding or the second person away.
func TestLooserPolicyIsNoticed(t *testing.T) {
	const before = "version: 1\ngrave: [lookalike, secret]\nrules:\n  - id: money\n    then: ask\n    step_up: true\n    approvers: 2\n    who: ['role:owner']\n    within: 1h\n"
	changed := "rule money, which said ask, was removed or changed"
	for _, tt := range []struct{ name, from, to, want string }{
		{"no second factor", "    step_up: true\n", "", changed},
		{"a second factor that is false", "step_up: true", "step_up: false", changed},
		{"one person", "    approvers: 2\n", "", changed},
		{"fewer people to ask", "who: ['role:owner']", "who: ['role:reviewer']", changed},
		{"more time", "within: 1h", "within: 2h", changed},
		{"it allows", "then: ask\n    step_up: true\n    approvers: 2\n    who: ['role:owner']\n    within: 1h\n", "then: allow\n", "is new or changed, and allows"},
		{"a kind that is no longer grave", "grave: [lookalike, secret]", "grave: [secret]", "the finding lookalike is no longer grave"},
		{"nothing is grave", "grave: [lookalike, secret]", "grave: []", "the finding secret is no longer grave"},
		{"more is grave", "grave: [lookalike, secret]", "grave: [lookalike, secret, iban]", ""},
		{"another name of the file's zone", "version: 1\n", "version: 1\nzone: Europe/Berlin\n", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := setup(t, storetest.SQLite(t))
			f.run(f.approved(rulebook.Change{Text: before}))
			v, err := f.gate.Show(f.propose(rulebook.Change{Text: strings.Replace(before, tt.from, tt.to, 1)}))
			if err != nil {
				t.Fatal(err)
			}
			notes := strings.Join(v.Notes, "\n")
			if tt.want == "" && notes != "" || !strings.Contains(notes, tt.want) {
				t.Errorf("got the notes %q, want %q", notes, tt.want)
			}
		})
	}
	// The way back is stricter: a second factor that is added is no loss.
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		f.run(f.approved(rulebook.Change{Text: strings.Replace(before, "    step_up: true\n", "", 1)}))
		v, err := f.gate.Show(f.propose(rulebook.Change{Text: before}))
		if err != nil || len(v.Notes) != 0 {
			t.Errorf("got the notes %q, %v, want none for a second factor that is added", v.Notes, err)
		}
	})
	// What no document says is grave by default: a first document may take that away.
	f := setup(t, storetest.SQLite(t))
	v, err := f.gate.Show(f.propose(rulebook.Change{Text: "version: 1\ngrave: []\nrules: []\n"}))
	if err != nil || !strings.Contains(strings.Join(v.Notes, "\n"), "the finding lookalike is no longer grave") {
		t.Errorf("got the notes %q, %v", v.Notes, err)
	}
}
