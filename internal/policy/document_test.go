package policy_test

import (
	"errors"
	"strings"
	"testing"

	"postern/internal/policy"
)

func parse(t testing.TB, text string) *policy.Document {
	t.Helper()
	d, err := policy.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestParseRefuses(t *testing.T) {
	rule := func(lines string) string { return "version: 1\nrules:\n  - id: a\n" + lines }
	tests := []struct {
		name, text string
		want       []string // in the error
	}{
		{"nothing", "", []string{"line 1", "empty"}},
		{"only a comment", "# x\n", []string{"empty"}},
		{"no rules", "version: 1\n", []string{"rules", "missing"}},
		{"another version", "version: 2\nrules: []\n", []string{"line 1", "version", "must be 1"}},
		{"unknown field", "version: 1\nrulez: []\n", []string{"line 2", "rulez", "no such field", "rules"}},
		{"unknown field of a rule", rule("    then: deny\n    unless: x\n"), []string{"line 5", "rules[0].unless", "no such field"}},
		{"a field twice", rule("    then: deny\n    then: allow\n"), []string{"line 5", "rules[0].then", "twice"}},
		{"two rules of a name", rule("    then: deny\n  - id: a\n    then: allow\n"), []string{"line 5", "rules[1].id", "line 3"}},
		{"no id", "rules:\n  - then: deny\n", []string{"line 2", "rules[0].id", "missing"}},
		{"a mode's name", "rules:\n  - id: gated_send\n    then: deny\n", []string{"rules[0].id", "mode"}},
		{"no verdict", rule("    kind: email.send\n"), []string{"line 3", "rules[0].then", "missing"}},
		{"another verdict", rule("    then: perhaps\n"), []string{"line 4", "perhaps", "allow, ask or deny"}},
		{"a bad kind", rule("    then: deny\n    kind: [email]\n"), []string{"line 5", "rules[0].kind[0]"}},
		{"approvers of a denial", rule("    then: deny\n    approvers: 2\n"), []string{"rules[0].approvers", "only a rule that asks"}},
		{"no approvers", rule("    then: ask\n    approvers: 0\n"), []string{"line 5", "1 to 10"}},
		{"too many approvers", rule("    then: ask\n    approvers: 11\n"), []string{"line 5", "1 to 10"}},
		{"approvers in words", rule("    then: ask\n    approvers: two\n"), []string{"line 5", "whole number"}},
		{"nobody", rule("    then: ask\n    who: []\n"), []string{"line 5", "nobody"}},
		{"a viewer", rule("    then: ask\n    who: ['role:viewer']\n"), []string{"line 5", "rules[0].who[0]"}},
		{"a bad time", rule("    then: ask\n    within: soon\n"), []string{"line 5", "within"}},
		{"no time", rule("    then: ask\n    within: 0s\n"), []string{"line 5", "1m to 90d"}},
		{"step_up in words", rule("    then: ask\n    step_up: please\n"), []string{"line 5", "true or false"}},
		{"a list where a text is wanted", rule("    then: [deny]\n"), []string{"line 4", "must be a text"}},
		{"an alias", "rules: &x\n  - id: a\n    then: deny\n    who: *x\n", []string{"anchors and aliases"}},
		{"a tag", "rules: !!seq []\n", []string{"line 1", "tags"}},
		{"two documents", "rules: []\n---\nrules: []\n", []string{"something follows"}},
		{"not YAML", "rules: [\n", []string{"line"}},
		{"a NUL", "rules: []\x00", []string{"UTF-8"}},
		{"too long", "rules: [] #" + strings.Repeat("x", policy.MaxText), []string{"bytes"}},
		{"brackets without end", "rules: " + strings.Repeat("[", 10000), []string{"nested"}},
		{"too many rules", "rules:\n" + strings.Repeat("  - {}\n", policy.MaxClauses+1), []string{"201", "at most 200"}},
		{"a zone that is none", "zone: Mars/Olympus\nrules: []\n", []string{"line 1", "zone", "Europe/Berlin"}},
		{"an unknown kind of finding in grave", "grave: [lookalike, lookalikes]\nrules: []\n", []string{"line 1", "grave[1]", "lookalikes", "must be a kind of finding: lookalike, hidden_recipient"}},
		{"a grave kind twice", "grave:\n  - secret\n  - secret\nrules: []\n", []string{"line 3", "grave[1]", "in the list already"}},
		{"grave in one word", "grave: lookalike\nrules: []\n", []string{"line 1", "grave", "list"}},
		{"grave as a map", "grave: {lookalike: true}\nrules: []\n", []string{"line 1", "grave", "list"}},
		{"grave of a number", "grave: [1]\nrules: []\n", []string{"line 1", "grave[0]"}},
		{"grave of nothing", "grave: ['']\nrules: []\n", []string{"line 1", "grave[0]"}},
		{"grave of null", "grave: [~]\nrules: []\n", []string{"line 1", "grave[0]"}},
		{"grave null", "grave:\nrules: []\n", []string{"line 1", "grave", "list"}},
		{"grave twice", "grave: []\ngrave: [secret]\nrules: []\n", []string{"line 2", "grave", "twice"}},
		{"grave in capitals", "grave: [Lookalike]\nrules: []\n", []string{"grave[0]", "Lookalike"}},
		{"a long grave kind", "grave: [" + strings.Repeat("x", 5000) + "]\nrules: []\n", []string{"grave[0]"}},
		{"grave of a rule", rule("    then: ask\n    grave: [secret]\n"), []string{"line 5", "rules[0].grave", "no such field"}},
		{"a record of what there is none", "record: [keys]\nrules: []\n", []string{"line 1", "record", "input"}},
		{"a record of one twice", "record: [input, input]\nrules: []\n", []string{"record"}},
		{"the machine's zone", "zone: Local\nrules: []\n", []string{"zone"}},
		{"a zone from a file", "zone: ../../etc/passwd\nrules: []\n", []string{"zone"}},

		{"denies what there is not", rule("    then: deny\n    kind: net.conect\n"), []string{"net.conect", "net.connect"}},
		{"allows its own change", rule("    then: allow\n    kind: policy.change\n"), []string{"line 3", "always decided by a person"}},
		{"allows a mode", rule("    then: allow\n    kind: [email.send, inbox.mode]\n"), []string{"inbox.mode"}},
		{"locks itself", rule("    then: deny\n    kind: policy.change\n"), []string{"never be changed"}},

		{"an unknown variable", rule("    then: deny\n    when: subject == 'x'\n"), []string{"line 5, column 11", "rule a", "subject"}},
		{"in quotes", rule("    then: deny\n    when: \"true || x\"\n"), []string{"line 5, column 20", "rule a"}},
		{"in a block", rule("    then: deny\n    when: |\n      size > 1 &&\n      too == []\n"), []string{"line 7, column 7", "rule a", "too"}},
		{"folded", rule("    then: deny\n    when: >\n      size > 1 &&\n      too == []\n"), []string{"line 5", "character 13", "rule a"}},
		{"a wrong type", rule("    then: deny\n    when: size > 'x'\n"), []string{"line 5, column 16", "rule a"}},
		{"a field that files have not", rule("    then: deny\n    when: files.exists(f, f.path == 'x')\n"), []string{"line 5", "path"}},
		{"no condition", rule("    then: deny\n    when: size + 1\n"), []string{"line 5", "int", "true or false"}},
		{"no expression", rule("    then: deny\n    when: 'size >'\n"), []string{"line 5", "rule a"}},
		{"a bad pattern", rule("    then: deny\n    when: inbox.matches('(')\n"), []string{"line 5", "rule a"}},
		{"a pattern that is huge", rule("    then: deny\n    when: inbox.matches('(((a{30}){30}){30})')\n"), []string{"line 5", "rule a"}},
		{"too long a condition", rule("    then: deny\n    when: '" + strings.Repeat(" ", 2001) + "true'\n"), []string{"line 5", "2005 bytes"}},
		{"three loops", rule("    then: deny\n    when: to.all(a, to.all(b, to.all(c, a == b && b == c)))\n"), []string{"line 5", "rule a"}},
		{"brackets in a condition", rule("    then: deny\n    when: '" + strings.Repeat("(", 500) + "true" + strings.Repeat(")", 500) + "'\n"), []string{"line 5", "rule a"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := policy.Parse([]byte(tt.text))
			if !errors.Is(err, policy.ErrDocument) {
				t.Fatalf("got error %v, want ErrDocument", err)
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("got error %q, want %q in it", err, w)
				}
			}
			if len(err.Error()) > 450 {
				t.Errorf("the error has %d bytes: it repeats what was sent", len(err.Error()))
			}
		})
	}
}

func TestDefault(t *testing.T) {
	d := policy.Default()
	if len(d.Clauses()) == 0 {
		t.Fatal("the default document has no rules")
	}
	v := policy.Decide(d, policy.Request{Kind: policy.KindSend, Mode: policy.Autonomous, To: []string{"bob@example.com"}, Flags: []string{"secret"}})
	if v.Effect != policy.Ask || v.Rule != "secret" {
		t.Errorf("got %+v, want that a secret is asked about", v)
	}
}

// TestUnseen: what a person who approves a document does not see is in none.
func TestUnseen(t *testing.T) {
	for _, hidden := range []string{"\u2028", "\u2029", "\u0085", "\r", "\u202e", "\u200b", "\x1b", "\ufeff"} {
		text := "rules: # none" + hidden + "\n  - id: all\n    then: deny\n"
		if _, err := policy.Parse([]byte(text)); hidden != "\r" && !errors.Is(err, policy.ErrDocument) {
			t.Errorf("%q in a comment: %v", hidden, err)
		}
		text = "rules: # none" + hidden + "  - {id: all, then: allow}\n  - {id: rest, then: deny}\n"
		if _, err := policy.Parse([]byte(text)); !errors.Is(err, policy.ErrDocument) {
			t.Errorf("%q before a rule: %v", hidden, err)
		}
		if _, err := policy.ParseTrials([]byte("tests: [] # " + hidden + "x\n")); !errors.Is(err, policy.ErrDocument) {
			t.Errorf("%q in tests: %v", hidden, err)
		}
	}
	if _, err := policy.Parse([]byte("rules:\r\n\t# ü – ok\r\n  - {id: rest, then: deny}\r\n")); err != nil && strings.Contains(err.Error(), "U+") {
		t.Errorf("lines that end as Windows' do: %v", err)
	}
}
