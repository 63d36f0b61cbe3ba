package policy_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"postern/internal/leak"
	"postern/internal/policy"
)

// TestDocumentation runs the tests in docs/reference/policy.md on the policy above each.
func TestDocumentation(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	var doc *policy.Document
	policies, tests := 0, 0
	for _, m := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		if !strings.HasPrefix(m[1], "tests:") {
			doc = parse(t, m[1])
			policies++
			continue
		}
		trials, err := policy.ParseTrials([]byte(m[1]))
		if err != nil {
			t.Fatalf("%v:\n%s", err, m[1])
		}
		for _, trial := range trials {
			if _, err := trial.Check(doc); err != nil {
				t.Error(err)
			}
			tests++
		}
	}
	t.Logf("%d policies, %d tests", policies, tests)
	for _, v := range policy.Variables { // of all that there is to ask there is an example
		if !regexp.MustCompile(`(?s)when:[^\n]*\b`+v.Name+`\b`).Match(page) && v.Name != "kind" {
			t.Errorf("docs/reference/policy.md has no condition with %s", v.Name)
		}
	}
}

// TestFlags: rules and the page ask about flags that the content checks set.
func TestFlags(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, f := range leak.Flags() {
		known[string(f)] = true
		if !strings.Contains(string(page), "`"+string(f)+"`") {
			t.Errorf("docs/reference/policy.md does not tell of the flag %s", f)
		}
	}
	for _, text := range []string{policy.Default().Text(), string(page)} {
		for _, list := range regexp.MustCompile(`f in \[([^]]*)\]|'([a-z_]+)' in flags`).FindAllStringSubmatch(text, -1) {
			for name := range strings.SplitSeq(list[1]+list[2], ",") {
				if name = strings.Trim(name, " '"); !known[name] && !strings.HasPrefix(name, ".") {
					t.Errorf("a rule asks about the flag %q, which no check sets", name)
				}
			}
		}
	}
}
