package oversight

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestProofFinds puts a wrong rule in the place of a right one, by turns. Each must
// change the rules that the proof is about. With POSTERN_TEST_PROOF=1, as make proof
// has it, the proof is also checked about the wrong rule, and must fail: a rule that
// the proof does not need would not be proved.
func TestProofFinds(t *testing.T) {
	decide := func(wrong func(a *Action, d *decided)) rules {
		return func(a Action, e event) (Action, error) {
			d, ok := e.(decided)
			if !ok {
				return e.next(a)
			}
			was := a
			wrong(&a, &d)
			b, err := d.next(a)
			b.Digest, b.Who, b.Request, b.Expires = was.Digest, was.Who, was.Request, was.Expires
			return b, err
		}
	}
	tests := []struct {
		name, rule string
		wrong      rules
	}{
		{"an approval of other bytes counts", "decided", decide(func(a *Action, d *decided) { d.Digest = a.Hex() })},
		{"an approval of another version counts", "decided", decide(func(a *Action, d *decided) { d.Version = a.Version })},
		{"bytes that were changed in the database are approved", "decided", decide(func(a *Action, d *decided) {
			if d.Digest == a.Hex() {
				a.Digest = digested(string(a.Payload))
				d.Digest = a.Hex()
			}
		})},
		{"no second factor is needed", "decided", decide(func(_ *Action, d *decided) { d.who.Strong = d.now })},
		{"one approval is enough", "decided", func(a Action, e event) (Action, error) {
			b, err := e.next(a)
			if d, ok := e.(decided); ok && err == nil && d.Approve && b.Version == a.Version {
				b.to(Approved, d.now)
				b.Decider, b.Reason = d.who.String(), d.Reason
			}
			return b, err
		}},
		{"who is not asked decides", "decided", decide(func(a *Action, _ *decided) { a.Who = nil })},
		{"a finding needs no tick", "decided", decide(func(a *Action, _ *decided) { a.Request.Findings = nil })},
		{"the time to decide has no end", "decided", decide(func(a *Action, _ *decided) { a.Expires = clocks[3] })},
		{"an approval keeps the version", "decided", func(a Action, e event) (Action, error) {
			b, err := e.next(a)
			if _, ok := e.(decided); ok && err == nil {
				b.Version = a.Version
			}
			return b, err
		}},
		{"what a person edited leaves by a rule", "revised", func(a Action, e event) (Action, error) {
			if r, ok := e.(revised); ok && r.who.Decides() {
				r.who = agentOne
				e = r
			}
			return e.next(a)
		}},
		{"what a rule approved is not judged again", "claimed", func(a Action, e event) (Action, error) {
			if c, ok := e.(claimed); ok {
				c.judge = false
				e = c
			}
			return e.next(a)
		}},
		{"a switch is not looked at when it begins", "begun", func(a Action, e event) (Action, error) {
			if b, ok := e.(begun); ok {
				b.stop = ""
				e = b
			}
			return e.next(a)
		}},
		{"a program that lost the action goes on", "begun", func(a Action, e event) (Action, error) {
			if b, ok := e.(begun); ok {
				b.version = a.Version
				e = b
			}
			return e.next(a)
		}},
		{"a switch leaves what was approved", "switched", func(a Action, e event) (Action, error) {
			if _, ok := e.(switched); ok && a.State == Approved {
				return a, errStays
			}
			return e.next(a)
		}},
		{"what is unknown is tried again although its row was changed", "resolved", func(a Action, e event) (Action, error) {
			if r, ok := e.(resolved); ok {
				r.changed = false
				e = r
			}
			return e.next(a)
		}},
		{"an execution that may have sent something is tried again", "ended", func(a Action, e event) (Action, error) {
			if d, ok := e.(ended); ok && d.State == Unknown {
				d.State = Approved
				e = d
			}
			return e.next(a)
		}},
		{"a changed payload is executed", "intact", func(a Action, e event) (Action, error) {
			if _, ok := e.(checked); ok {
				return a, nil
			}
			return e.next(a)
		}},
	}
	right, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	proving := os.Getenv("POSTERN_TEST_PROOF") != ""
	before := map[string]string{}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			i := slices.IndexFunc(proofRules(), func(r proofRule) bool { return r.name == tt.rule })
			r := proofRules()[i]
			if !proving {
				r = pendingOnly(r)
			}
			text := func(rules rules) string {
				return definition(r.name, r.about, r.asks, "answer", r.grow(t, rules, nil))
			}
			if before[r.name] == "" {
				before[r.name] = text(actual)
			}
			wrong := text(tt.wrong)
			if wrong == before[r.name] {
				t.Fatal("the rules that the proof is about are the same")
			}
			if !proving {
				return
			}
			checkFault(t, string(right), r.name, wrong)
		})
	}
	for name, parts := range map[string]partRules{
		"what may have been sent is sent again": {end: Part.End, left: func(p Part) Part {
			if p.State == PartSending {
				p.State = PartQueued
			}
			return p
		}},
		"a late word is written over a newer one": {left: Part.Interrupted, end: func(p Part, _ int64, to PartState) (Part, bool) {
			p.State, p.Asked = to, false
			return p, true
		}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, r := range proofPartRules(parts) {
				wrong := definition(r.name, r.about, r.asks, r.result, r.grow())
				if strings.Contains(string(right), wrong) {
					continue
				}
				if proving {
					checkFault(t, string(right), r.name, wrong)
				}
				return
			}
			t.Fatal("the rules that the proof is about are the same")
		})
	}
}

// pendingOnly leaves the states out that say nothing about a decision: going through
// all of them takes seconds. In every other state a decision is refused.
func pendingOnly(r proofRule) proofRule {
	if r.name == "decided" {
		r.asks = slices.Clone(r.asks)
		for i := range r.asks {
			if r.asks[i].name == "st" {
				r.asks[i].answers = []string{"Pending"}
			}
		}
	}
	return r
}

// checkFault checks that the proof fails with a wrong definition of a rule.
func checkFault(t *testing.T, rules, name, wrong string) {
	t.Helper()
	dir := t.TempDir()
	files, err := filepath.Glob("proof/*.v")
	if err != nil || len(files) < 4 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if f == rulesFile {
			i := strings.Index(rules, "\nDefinition "+name+" ")
			i = strings.LastIndex(rules[:i], "\n\n") + 1
			j := i + strings.Index(rules[i:], ".\n") + 2
			b = []byte(rules[:i] + wrong + rules[j:])
		}
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(f)), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.CommandContext(t.Context(), "../../test/proof", dir).CombinedOutput()
	if err == nil {
		t.Fatalf("the proof holds all the same:\n%s", wrong)
	}
	if !strings.Contains(string(out), `"./safe.v", line`) {
		t.Fatalf("the proof fails, but not in a proof:\n%s", out)
	}
	t.Logf("%s", strings.SplitN(string(out), "\nIn environment", 2)[0])
}
