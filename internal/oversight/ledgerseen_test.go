package oversight_test

import (
	"encoding/json"
	"slices"
	"testing"

	"postern/internal/audit"
	"postern/internal/oversight"
)

// TestLedgerComparesTicks: postern audit verify reports each approval on the record that
// lacks the tick of a finding that was grave when it was asked about.
func TestLedgerComparesTicks(t *testing.T) {
	const ticked = "fnd_a\nfnd_b"
	propose := func(grave string) audit.Entry { return entry("action.propose", "agent:crd_1", "grave", grave) }
	vote := func(who, seen string) audit.Entry { return entry("action.vote", who, "seen", seen) }
	for _, tt := range []struct {
		name    string
		entries []audit.Entry
		want    []string
	}{
		{"all are ticked", []audit.Entry{propose(ticked), vote("person:ann", ticked), entry("action.approve", "person:bob", "seen", ticked)}, nil},
		{"none is grave", []audit.Entry{propose(""), entry("action.approve", "person:ann")}, nil},
		{"one tick is missing", []audit.Entry{propose(ticked), entry("action.approve", "person:ann", "seen", "fnd_b")}, []string{"approved by person:ann, who did not tick the grave finding fnd_a"}},
		{"another finding is ticked", []audit.Entry{propose("fnd_a"), entry("action.approve", "person:ann", "seen", "fnd_aa\nfnd_b")}, []string{"approved by person:ann, who did not tick the grave finding fnd_a"}},
		{"the first of two did not tick", []audit.Entry{propose("fnd_a"), vote("person:ann", ""), entry("action.approve", "person:bob", "seen", "fnd_a")}, []string{"approved by person:ann, who did not tick the grave finding fnd_a"}},
		{"it was grave before the edit", []audit.Entry{propose("fnd_a"), entry("action.revise", "agent:crd_1"), entry("action.approve", "person:ann")}, nil},
		{"it is grave since the edit", []audit.Entry{propose(""), entry("action.revise", "agent:crd_1", "grave", "fnd_c"), entry("action.approve", "person:ann")}, []string{"approved by person:ann, who did not tick the grave finding fnd_c"}},
		{"it is grave since it was asked about", []audit.Entry{propose(""), entry("action.ask", "system:gate", "grave", "fnd_c"), entry("action.approve", "person:ann")}, []string{"approved by person:ann, who did not tick the grave finding fnd_c"}},
		{"a rejection needs none", []audit.Entry{propose(ticked), entry("action.reject", "person:ann")}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := oversight.NewLedger()
			for i, e := range tt.entries {
				if e.Seq = int64(i + 1); l.Entry(e) != nil {
					t.Fatal("an entry is refused")
				}
			}
			var got []string
			list, _ := l.Found()
			for _, m := range list {
				got = append(got, m.What)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("found %q, want %q", got, tt.want)
			}
		})
	}
}

// entry returns an entry about one action, with pairs of fields.
func entry(verb audit.Verb, actor string, fields ...string) audit.Entry {
	f := audit.Fields{"digest": "00"}
	for i := 0; i+1 < len(fields); i += 2 {
		if fields[i+1] != "" {
			f[fields[i]] = fields[i+1]
		}
	}
	detail, err := json.Marshal(f)
	if err != nil {
		panic(err) // unreachable: texts
	}
	return audit.Entry{Actor: actor, Verb: verb, Object: "act_1", Detail: string(detail)}
}
