package oversight

import (
	"testing"

	"postern/internal/policy"
)

// TestWhoResolvedIsKeptFromTheProposer, also in rows from before the column, and
// no result of the program's own is taken for a person's.
func TestWhoResolvedIsKeptFromTheProposer(t *testing.T) {
	for _, tt := range []struct{ name, by, result, want string }{
		{"resolved", "person:ann", "person:ann says: it arrived", "a person says: it arrived"},
		{"stopped afterwards", "person:ann", "person:ann says: try it\nswitched off", "a person says: try it\nswitched off"},
		{"from before the column", "", "person:ann says: it arrived", "a person says: it arrived"},
		{"of the program", "system:gate", "person:ann says: what a server answered", "person:ann says: what a server answered"},
		{"of the program, from before", "", "sent to 2 recipients", "sent to 2 recipients"},
		{"none", "", "", ""},
	} {
		a := Action{Result: tt.result, ResultBy: tt.by}
		if got := a.ResultForProposer(); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
	// A refusal adds its reason to what a person said, in rows of both kinds.
	for _, by := range []string{"person:ann", ""} {
		a := Action{State: Approved, Attempts: 1, ResultBy: by, Result: "person:ann says: try it again"}
		a.refuse("system:gate", "a switch stops it", a.Created)
		if got, want := a.ResultForProposer(), "a person says: try it again\na switch stops it"; got != want {
			t.Errorf("by %q: got %q, want %q", by, got, want)
		}
	}
}

func TestLapsedIsAColumn(t *testing.T) {
	gate := system(Action{}).String()
	for _, tt := range []struct {
		name string
		a    Action
		want bool
	}{
		{"lapsed", Action{State: Denied, lapsed: true}, true},
		{"from before the column", Action{State: Denied, Decider: gate, Reason: nobodyDecided + "yesterday"}, true},
		{"a person who writes so", Action{State: Denied, Decider: "person:ann", Reason: nobodyDecided + "yesterday"}, false},
		{"by a rule", Action{State: Denied, Rule: "no"}, false},
		{"asked again since", Action{State: Pending, lapsed: true}, false},
	} {
		if got := tt.a.Lapsed(); got != tt.want {
			t.Errorf("%s: got %v", tt.name, got)
		}
	}
	// What is asked again has not lapsed, whatever became of it before.
	a := Action{State: Denied, lapsed: true, Request: policy.Request{Kind: policy.KindSend}}
	if a.to(Pending, a.Created); a.lapsed {
		t.Error("a move keeps the mark")
	}
}
