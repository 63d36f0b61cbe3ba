package policy_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"postern/internal/policy"
)

// TestDocumentation runs the tests in docs/policy.md on the policy above each.
func TestDocumentation(t *testing.T) {
	page, err := os.ReadFile("../../docs/policy.md")
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
			t.Errorf("docs/policy.md has no condition with %s", v.Name)
		}
	}
}
